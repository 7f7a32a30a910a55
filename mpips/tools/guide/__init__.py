"""Guide: a Markdown page for each topic."""
