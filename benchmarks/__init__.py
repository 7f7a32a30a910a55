"""Benchmarks: mpips beside its peers, and what guards its speed against regressions.

``python -m benchmarks [MEASURE ...]`` runs them from a clone. Each measure is a module with a
``run``, as in `mpips bench`, whose machinery they share.
"""
