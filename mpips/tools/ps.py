"""Table of a running job's ranks: ``python -m mpips ps RUN``.

It starts no MPI, and only reads.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from mpips.errors import Exit, answer
from mpips.launch.ranks import ranks_table

USAGE = """usage: python -m mpips ps RUN

Shows a line for each rank of the job in the folder RUN that is on this host: what it does, in
which call and since when; its clock, which is the pushes that a worker has made, the updates that a
server has applied, the rounds, or the evaluations that an evaluator has made; how many pushes wait
for a server; and when it was last seen to live. Behind a wait are the ranks that it waits for, as
far as they are on this host. The exit code is 0 if the job runs here, 1 if it does not, 2 if RUN is
no run.
"""


def main(argv: Sequence[str]) -> int:
    """Print the table; returns the exit code."""
    if len(argv) != 1 or argv[0].startswith("-"):
        print(USAGE, end="", file=sys.stdout if "--help" in argv else sys.stderr)
        return Exit.DONE if "--help" in argv else Exit.REFUSED
    return answer(lambda words: ranks_table(Path(words[0])), argv)
