"""What each rank of a job did when: ``python -m mpips trace RUN``, of a run made with --trace.

Writes a timeline that https://ui.perfetto.dev and chrome://tracing open, and prints where the time
of each rank went, and that of the critical path: the chain of work and waits that the job's time
consists of. Of a run of several jobs it is the last one, or that of --job. Starts no MPI.
"""

import argparse
import gzip
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO, cast

from mpips.checkpoint import run_folder
from mpips.config.arguments import verbatim
from mpips.errors import UserError, answer, human_bytes
from mpips.health import status_board
from mpips.health.trace_file import Traced, jobs_of
from mpips.tools.report.timeline import Timeline, numbers, read_run

LINES = 10  # of the critical path


def table(ranks: Sequence[Traced], timeline: Timeline) -> str:
    """Return where the time of each rank, and of the critical path, went."""
    every, path, longest = timeline.shares(), timeline.critical_path(), timeline.awaited()
    whats = sorted(
        {what for each in every for what in each}, key=lambda w: (w >= status_board.WAITING, w)
    )
    lines = []
    for each, seconds, most in zip(ranks, every, longest, strict=True):
        total = sum(seconds.values())
        spent = [f"{status_board.PHASES[w]} {seconds[w] / total:.0%}" + _whom(most.get(w), total)
                 for w in whats if w in seconds]  # fmt: skip
        lines.append(f"rank {each.about['rank']:3d}  {each.about['name']:10s}  {', '.join(spent)}")
    whole = sum(path.values())
    lines.append(f"critical path, {whole:.3f} s:")
    for (rank, what, who), spent_s in sorted(path.items(), key=lambda item: -item[1])[:LINES]:
        whom = "" if who is None else f" (rank {who})"
        lines.append(f"  {spent_s / whole:4.0%}  rank {rank} {status_board.PHASES[what]}{whom}")
    return "\n".join(lines)


def _whom(most: tuple[int, float] | None, total: float) -> str:
    """Say which rank was waited for longest, and for which share of the time."""
    return "" if most is None else f" (rank {most[0]}: {most[1] / total:.0%})"


def make_parser() -> argparse.ArgumentParser:
    """Build the parser of this command."""
    parser = verbatim("python -m mpips trace", __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="the timeline, compressed "
        "where its name ends in .gz [default: RUN/trace.json]")  # fmt: skip
    parser.add_argument("--job", type=int, metavar="N", help="which job of the run "
        "[default: the last one]")  # fmt: skip
    return parser


def make(argv: Sequence[str]) -> str:
    """Write a timeline; returns what to tell of it.

    Raises:
        UserError: If there are no traces, or a file cannot be written.
    """
    args = make_parser().parse_args(argv)
    ranks = read_run(args.run, args.job)
    timeline = Timeline(ranks)
    out = args.out or args.run / f"{run_folder.TRACE}.json"
    try:
        open_text = gzip.open if out.suffix == ".gz" else open
        with open_text(out, "wt") as file:
            count = timeline.write(cast(TextIO, file))
    except OSError as problem:
        got = f"{problem.filename or out}: {problem.strerror}"
        raise UserError(got, "a file that can be written") from None
    size = human_bytes(out.stat().st_size)
    told = f"{count:,} events in {out} ({size}): open it in https://ui.perfetto.dev"
    jobs = jobs_of(args.run)
    if len(jobs) > 1:
        told = f"job {args.job or jobs[-1]} of this run's jobs {numbers(jobs)}: see --job\n{told}"
    return f"{table(ranks, timeline)}\n{told}\n"


def main(argv: Sequence[str]) -> int:
    """Write the timeline, and print where the time went; returns the exit code."""
    return answer(make, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
