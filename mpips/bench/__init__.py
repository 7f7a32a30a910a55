"""``python -m mpips.bench``: mpips beside the machine's limit and beside plain MPI.

Each measure is a file with a ``run(cluster, options) -> list[Row]`` that all ranks of its world
call, or, where whole jobs are compared, a function of the driver. Every comparison is made in one
run, the two sides in turn, so that what else the machine does hits both.
"""
