"""``python -m mpips report``: one page with figures and tables of runs."""
