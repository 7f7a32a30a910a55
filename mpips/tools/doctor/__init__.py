"""``python -m mpips doctor``: examination of a cluster, with remedies.

Facts are gathered on every rank, and judged on one by functions without side effects; what has to
be tried out (windows, links, files) is tried in short, each under a limit.
"""
