"""The guide, a Markdown page a topic, and completion by the shell."""
