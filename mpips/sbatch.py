"""Write a job script: ``python -m mpips.sbatch JOB.toml [options] --nodes 4 > my.sbatch``.

What it does not know, every option of mpips.train, goes into the job. Memory and time are filled
in from the job (see `mpips.needs`), unless they are given. Starts no MPI.
"""

import argparse
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from mpips.command_line import parse_command_line
from mpips.errors import UserError
from mpips.jobfile import read_toml, resolve
from mpips.launch import TREE
from mpips.needs import Needs, measure, needs

MEMORY_SLACK, MEMORY_STEP_MB = 1.25, 50
SHORTEST_S, TIME_STEP_S = 600, 300
NOTICE_S = 120  # SLURM may be a minute early, and as much is left to spare


@dataclass(frozen=True)
class Request:
    """What is asked of SLURM.

    Attributes:
        nodes: Number of nodes.
        ntasks_per_node: Ranks of each.
        cpus_per_task: Cores of each rank.
        mem_per_cpu: Such as ``2G``; empty for what the job needs.
        time: Such as ``1-12:00:00``; empty for what the job needs.
        max_time_s: The longest time limit of the cluster, in seconds.
        name: Of the job.
        directives: More options of sbatch, as they stand.
    """

    nodes: int
    ntasks_per_node: int
    cpus_per_task: int = 1
    mem_per_cpu: str = ""
    time: str = ""
    max_time_s: int = 86400
    name: str = "mpips"
    directives: tuple[str, ...] = ()


def script(request: Request, need: Needs, words: Sequence[str], scripts: Path) -> str:
    """Return the text of the job script.

    Args:
        request: What is asked of SLURM.
        need: What the job takes there.
        words: The job's command line.
        scripts: The folder of common.sh.
    """
    limit_s, notice_s = _limit_s(request, need), NOTICE_S + math.ceil(2 * need.save_s)
    lines = [
        f"--job-name={request.name}",
        f"--nodes={request.nodes}",
        f"--ntasks-per-node={request.ntasks_per_node}",
        f"--cpus-per-task={request.cpus_per_task}",
        f"--mem-per-cpu={request.mem_per_cpu or _memory(request, need)}",
        f"--time={request.time or clock(limit_s)}",
        f"--signal=B:USR1@{notice_s}",
        "--requeue",
        "--open-mode=append",
        "--output=%x-%j.out",
        *request.directives,
    ]
    job = shlex.join(words)
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {line}" for line in lines),
            "#",
            *(f"# {line}" for line in _told(request, need)),
            "set -euo pipefail",
            "# shellcheck source=/dev/null",
            f". {shlex.quote(str(scripts / 'common.sh'))}",
            "",
            "prepare",
            f'find_out "runs/$SLURM_JOB_NAME-$SLURM_JOB_ID" {job}',
            f"train_once {job}",
            "requeue",
            "",
        ]
    )


def _told(request: Request, need: Needs) -> list[str]:
    """Return what stands behind the numbers."""
    owners = f"{_counted(need.servers, 'server')} and " if need.servers else ""
    one = f"about {need.worker_bytes / 1e6:.0f} MB a worker"
    if need.servers:
        one += f", {need.server_bytes / 1e6:.0f} MB a server"
    workers = _counted(need.workers, "worker")
    told = [f"{owners}{workers}: {one}, and {clock(need.seconds)} to the end."]
    if not request.time and need.seconds > request.max_time_s:
        told.append("That is more than the time limit: it is requeued, and goes on, until it ends.")
    return told


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _memory(request: Request, need: Needs) -> str:
    each = MEMORY_SLACK * need.rank_bytes / request.cpus_per_task / 2**20
    return f"{math.ceil(each / MEMORY_STEP_MB) * MEMORY_STEP_MB}M"


def _limit_s(request: Request, need: Needs) -> int:
    steps = math.ceil(need.seconds / TIME_STEP_S) * TIME_STEP_S
    return min(request.max_time_s, max(SHORTEST_S, steps))


def clock(seconds: float) -> str:
    """Return a time as SLURM writes it: ``[days-]HH:MM:SS``."""
    minutes, second = divmod(math.ceil(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{f'{days}-' if days else ''}{hour:02d}:{minute:02d}:{second:02d}"


class Parser(argparse.ArgumentParser):
    """A parser whose errors are UserErrors."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage."""
        raise UserError(f"command line: {message}", "what --help lists")


def make_parser() -> Parser:
    """Build the parser of this command."""
    parser = Parser(
        prog="python -m mpips.sbatch",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--nodes", type=_count, default=1, metavar="N", help="nodes [default: 1]")
    add("--ntasks-per-node", type=_count, default=4, metavar="N", help="ranks a node [default: 4]")
    add("--cpus-per-task", type=_count, default=1, metavar="N", help="cores a rank [default: 1]")
    add("--mem-per-cpu", default="", metavar="SIZE", help="memory [default: what the job needs]")
    add("--time", default="", metavar="TIME", help="time limit [default: what the job needs]")
    add("--max-time", type=_count, default=24, metavar="HOURS", help="its maximum [default: 24]")
    add("--job-name", default="", metavar="NAME", help="[default: that of the job file]")
    add("--partition", metavar="NAME", help="partition of the cluster")
    add("--account", metavar="NAME", help="account to be charged")
    add("--constraint", metavar="FEATURE", help="feature that the nodes must have")
    return parser


def _count(text: str) -> int:
    """Return a positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}, expected an integer >= 1")
    return int(text)


def write(argv: Sequence[str]) -> str:
    """Return the script for a command line.

    Raises:
        UserError: If the command line, the job or its data is wrong, or the world too small.
    """
    args, words = make_parser().parse_known_args(argv)
    scripts = TREE / "slurm"
    if not (scripts / "common.sh").is_file():
        remedy = "install mpips from a clone by pip install -e"
        raise UserError(f"no slurm/common.sh in {TREE}", "a clone of the repository", remedy)
    line = parse_command_line(words)
    config = resolve(line.options, read_toml(line.job) if line.job else None)
    need = needs(config, measure(config), args.nodes, args.ntasks_per_node)
    extra = [f"--{k}={getattr(args, k)}" for k in ("partition", "account", "constraint")]
    request = Request(
        args.nodes, args.ntasks_per_node, args.cpus_per_task, args.mem_per_cpu, args.time,
        3600 * args.max_time, args.job_name or (line.job.stem if line.job else "mpips"),
        tuple(word for word in extra if not word.endswith("=None")),
    )  # fmt: skip
    return script(request, need, words, scripts)


def main(argv: Sequence[str]) -> int:
    """Print the script; returns the exit code."""
    try:
        print(write(argv), end="")
    except UserError as error:
        print(f"mpips: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
