"""The guide: a Markdown page for each topic."""
