"""Bench: mpips beside the machine's limit and plain MPI.

Each measure is a module with a function ``run(cluster, options)``, which returns or yields rows.
All ranks of its world call it. A measure that starts jobs has a function ``run(options)``, which
the driver calls. The two sides of a comparison take turns in one run, so other load of the machine
affects both.
"""
