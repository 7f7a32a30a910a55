"""``python -m mpips.report``: what runs have left, as pictures and tables in one file."""
