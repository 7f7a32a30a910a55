"""One job with several seeds, one after the other in one world, which saves their starts.

``python -m benchmarks.seeds N JOB.toml [--option value ...]``, under mpirun, does what so many
runs of ``mpips.train`` do, with ``--seed`` 0 to N - 1 and ``--out run-0`` and on.
"""

import sys
from collections.abc import Sequence

from mpips.train import main


def run(number: int, argv: Sequence[str]) -> int:
    """Train with each seed; returns the exit code of the first that fails. Collective: yes."""
    for seed in range(number):
        code = main([*argv, "--seed", str(seed), "--out", f"run-{seed}"])
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1]), sys.argv[2:]))
