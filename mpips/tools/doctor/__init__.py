"""``python -m mpips doctor``: examination of a cluster, with remedies.

Every rank gathers facts, and rank 0 judges them by functions without side effects. Windows, links
and files are tried out by short trials, each with a time limit.
"""
