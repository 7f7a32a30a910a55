"""Benchmarks: comparisons of mpips with its peers, and guards against regressions of speed.

``python -m benchmarks [MEASURE ...]`` runs them from a clone. Each measure is a module with a
function ``run``, as in `mpips bench`, whose code they share.
"""
