"""``python -m mpips report``: runs as pictures and tables in one page."""
