"""One job with several seeds, one after another in one world, to save the time of starts.

``python -m benchmarks.seeds N JOB.toml [--option value ...]``, under mpirun, is the same as N runs
of ``mpips.train`` with ``--seed`` 0 to N - 1 and ``--out run-0`` to ``run-(N - 1)``.
"""

import sys
from collections.abc import Sequence

from mpips.train import main


def run(number: int, argv: Sequence[str]) -> int:
    """Train with each seed; returns the exit code of the first failed run. Collective: yes."""
    for seed in range(number):
        code = main([*argv, "--seed", str(seed), "--out", f"run-{seed}"])
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1]), sys.argv[2:]))
