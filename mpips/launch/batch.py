"""The text of a job script for SLURM: what is asked for, and what is run."""

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpips.errors import UserError, counted
from mpips.planning.needs import Needs

MEMORY_SLACK, MEMORY_STEP_MB = 1.25, 50
SHORTEST_S, TIME_STEP_S = 600, 300
NOTICE_S = 120  # SLURM may be a minute early, and as much is left to spare
EARLY_S = 60
# Of sbatch: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]].
TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<rest>\d+(?::\d+){0,2})")


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
        scratch: Folder on a node's own disk, and what is copied there; empty for none.
        table: Of a sweep; empty for one run.
        array: Rows of it.
    """

    nodes: int
    ntasks_per_node: int
    cpus_per_task: int = 1
    mem_per_cpu: str = ""
    time: str = ""
    max_time_s: int = 86400
    name: str = "mpips"
    directives: tuple[str, ...] = ()
    scratch: tuple[str, ...] = ()
    table: str = ""
    array: str = ""

    @property
    def each(self) -> str:
        """What SLURM calls a log: by the job, or by the array and its task."""
        return "%A_%a" if self.table else "%j"


def script(request: Request, need: Needs, words: Sequence[str], scripts: Path) -> str:
    """Return the text of the job script.

    Args:
        request: What is asked of SLURM.
        need: What the job takes there.
        words: The job's command line.
        scripts: The folder of common.sh.

    Raises:
        UserError: If the time limit is over as soon as the ranks would be asked to save.
    """
    notice_s = NOTICE_S + math.ceil(2 * need.save_s)
    limit_s = _limit_s(request, need, notice_s + EARLY_S)
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
        f"--output=%x-{request.each}.out",
        *([f"--array={request.array}"] if request.table else []),
        *request.directives,
    ]
    job = shlex.join(["sweep", request.table, *words] if request.table else ["train", *words])
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {line}" for line in lines),
            "#",
            *(f"# {line}" for line in _comments(request, need)),
            "set -euo pipefail",
            "# shellcheck source=/dev/null",
            f". {shlex.quote(str(scripts / 'common.sh'))}",
            "",
            "prepare",
            *([shlex.join(["scratch", *request.scratch])] if request.scratch else []),
            job,
            "",
        ]
    )


def _comments(request: Request, need: Needs) -> list[str]:
    """Return what stands behind the numbers."""
    owners = f"{counted(need.servers, 'server')} and " if need.servers else ""
    one = f"about {need.worker_bytes / 1e6:.0f} MB a worker"
    if need.servers:
        one += f", {need.server_bytes / 1e6:.0f} MB a server"
    workers = counted(need.workers, "worker")
    if need.evaluators:
        workers += f", beside them {counted(need.evaluators, 'evaluator')}"
    lines = [f"{owners}{workers}: {one}, and {clock(need.seconds)} to the end."]
    if not request.time and need.seconds > request.max_time_s:
        more = "That is more than the time limit: it is requeued, and goes on, until it ends."
        lines.append(more)
    return lines


def _memory(request: Request, need: Needs) -> str:
    each = MEMORY_SLACK * need.rank_bytes / request.cpus_per_task / 2**20
    return f"{math.ceil(each / MEMORY_STEP_MB) * MEMORY_STEP_MB}M"


def _limit_s(request: Request, need: Needs, least_s: int) -> int:
    """Return the time limit, of which more must be left than the notice takes."""
    steps = math.ceil(need.seconds / TIME_STEP_S) * TIME_STEP_S
    limit_s = min(request.max_time_s, max(SHORTEST_S, 2 * least_s, steps))
    got = f"--max-time {request.max_time_s / 3600:g}"
    if request.time:
        limit_s, got = seconds(request.time), f"--time {request.time}"
    if limit_s <= least_s:
        expected = f"more than {clock(least_s)}"
        raise UserError(got, expected, "the ranks are asked to save that much before the end")
    return limit_s


def seconds(text: str) -> int:
    """Return a time limit, as sbatch reads it, in seconds.

    Raises:
        UserError: If it is none.
    """
    match = TIME.fullmatch(text)
    if match is None:
        form = "minutes, hours:minutes:seconds or days-hours:minutes:seconds"
        raise UserError(f"--time {text!r}", form, "such as 90, 12:00:00 or 1-12:00:00")
    parts = [int(part) for part in match["rest"].split(":")]
    if match["days"] is None and len(parts) < 3:
        parts.insert(0, 0)
    hours, minutes, rest = (*parts, 0, 0)[:3]
    return ((24 * int(match["days"] or 0) + hours) * 60 + minutes) * 60 + rest


def clock(seconds: float) -> str:
    """Return a time as SLURM writes it: ``[days-]HH:MM:SS``."""
    minutes, second = divmod(math.ceil(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{f'{days}-' if days else ''}{hour:02d}:{minute:02d}:{second:02d}"
