"""``python -m mpips.doctor``: will this cluster run mpips well, and what is to be changed?

Facts are gathered on every rank, and judged on one by functions without side effects; what has to
be tried out (windows, links, files) is tried in short, each under a limit.
"""
