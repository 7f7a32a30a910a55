"""Measure: ``mpirun -n RANKS python -m mpips.bench [MEASURE ...]``."""

import argparse
import sys
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    from mpips.bench import pushpull, rounds, rules
    from mpips.bench.measure import Options, table
    from mpips.cluster import Cluster, whole_world
    p = argparse.ArgumentParser()
    p.add_argument("measures", nargs="*")
    p.add_argument("--repeats", type=int, default=5)
    p.add_argument("--quick", action="store_true")
    a = p.parse_args(argv)
    cluster = Cluster(whole_world())
    cluster.limit_threads()
    o = Options(a.repeats, a.quick)
    rows = []
    for name in a.measures:
        rows += {"pushpull": pushpull, "rounds": rounds, "rules": rules}[name].run(cluster, o)
    if cluster.rank == 0:
        print(table(rows), flush=True)
    cluster.barrier()
    cluster.free()
    return 0


sys.exit(main(sys.argv[1:]))
