"""What the ranks of a job did when: merged into one timeline, and its critical path.

The timeline is in the Trace Event Format, which https://ui.perfetto.dev and Chrome read: a host is
a process, a rank a thread, a phase a slice; an arrow goes from a push to where it is applied.
"""

import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np

from mpips.cluster import words
from mpips.cluster.trace import Traced, folder_of, jobs_of, read
from mpips.errors import UserError

PATH_STEPS = 1_000_000
CLOCK, SAVED, WRITING = (words.WORDS + word for word in (words.CLOCK, words.SAVED, words.WRITING))
# Who ends a wait, or a server's rest: a rank that has just left this phase.
ENDED_BY = {
    words.SERVING: words.PUSHING, words.CLOCKS: words.PUSHING,
    words.BUFFER: words.APPLYING, words.SHARD: words.APPLYING,
    words.ROUND: words.COMPUTING, words.OTHERS: words.COMPUTING,
}  # fmt: skip


Span = tuple[float, float]  # seconds


class Slices(NamedTuple):
    """The phases of a rank, one behind the other.

    Attributes:
        begins: When each begins, shape (n,), seconds.
        ends: When it ends.
        whats: Which of `words.PHASES` it is, shape (n,), int64.
        values: Of an applied push: its worker, above its number's 32 bits.
    """

    begins: np.ndarray
    ends: np.ndarray
    whats: np.ndarray
    values: np.ndarray

    def at(self, time: float) -> int:
        """Return the slice that ends at `time` or has it inside; -1 before the first."""
        return bisect_left(self.begins, time) - 1


def read_run(run: Path, job: int | None = None) -> list[Traced]:
    """Read the traces of a run's job, by default of its last one, by rank.

    Raises:
        UserError: If there are none, or one is something else.
    """
    jobs = jobs_of(run)
    if not jobs:
        raise UserError(f"{run} without traces", "a run made with --trace", "run it so")
    if job is not None and job not in jobs:
        raise UserError(f"--job {job}", f"one of which there are traces: {numbers(jobs)}")
    found = []
    for path in sorted(folder_of(run, job or jobs[-1]).glob("rank-*")):
        try:
            found.append(read(path))
        except (ValueError, KeyError, OSError) as problem:
            raise UserError(f"{path} cannot be read ({problem})", "a trace of mpips") from None
    return found


def numbers(jobs: Sequence[int]) -> str:
    """Return the numbers of jobs as text."""
    return ", ".join(map(str, jobs))


def slices(traced: Traced) -> Slices:
    """Return the phases of a rank; the last one goes on as long as the rank is known to live."""
    is_phase = traced.whats < words.WORDS
    begins, whats = traced.times[is_phase], traced.whats[is_phase]
    end = traced.times.max(keepdims=True) if len(begins) else begins
    return Slices(begins, np.append(begins[1:], end), whats, traced.values[is_phase])


def reach(ranks: Sequence[Traced]) -> Span:
    """Return when the first rank begins and when the last one ends, by the ranks' clock."""
    times = [each.times for each in ranks if len(each.times)]
    return min((t[0] for t in times), default=0.0), max((t.max() for t in times), default=0.0)


# Events ----------------------------------------------------------------------------------------


def write(ranks: Sequence[Traced], out: TextIO) -> int:
    """Write the timeline of ranks as JSON, an event a line; returns how many events it has."""
    start, _ = reach(ranks)
    count = 0
    out.write('{"displayTimeUnit": "ms", "traceEvents": [')
    for event in _events(ranks, start):
        out.write(("," if count else "") + "\n" + json.dumps(event, separators=(",", ":")))
        count += 1
    out.write("\n]}\n")
    return count


def _events(ranks: Sequence[Traced], start: float) -> Iterator[dict[str, Any]]:
    arrows = _Arrows(ranks)
    for each in ranks:
        about = each.about
        where = {"pid": about["node"], "tid": about["rank"]}
        names = {
            "process_name": f"node {about['node']}, {about['host']}",
            "thread_name": f"rank {about['rank']}: {about['name']}",
        }
        for kind, name in names.items():
            yield {"ph": "M", "name": kind, **where, "args": {"name": name}}
        order = {"sort_index": about["rank"]}
        yield {"ph": "M", "name": "thread_sort_index", **where, "args": order}
        yield from _phases(each, where, start, arrows)
        yield from _marks(each, where, start, arrows)


class _Arrows:
    """The arrows from each push to the servers.

    Args:
        ranks: All ranks.

    Attributes:
        servers: The ranks that applied pushes.
    """

    def __init__(self, ranks: Sequence[Traced]) -> None:
        self.servers = [r.about["rank"] for r in ranks if (r.whats == words.APPLYING).any()]
        self._workers = max((len(r.about["workers"]) for r in ranks), default=0)

    def end(self, worker: int, push: int, server: int) -> dict[str, Any]:
        """Return what both ends of an arrow have: a number of its own; Perfetto takes no text."""
        number = (push * self._workers + worker) * len(self.servers) + self.servers.index(server)
        return {"name": "push", "cat": "push", "id": number}


def _us(times: np.ndarray, start: float) -> list[float]:
    return np.round(1e6 * (times - start), 3).tolist()


def _phases(
    each: Traced, where: dict[str, int], start: float, arrows: _Arrows
) -> Iterator[dict[str, Any]]:
    found = slices(each)
    rows = zip(
        _us(found.begins, start), _us(found.ends, start), found.whats.tolist(),
        found.values.tolist(), strict=True,
    )  # fmt: skip
    for begin, end, what, value in rows:
        event: dict[str, Any] = {
            "ph": "X",
            "name": words.PHASES.get(what, f"phase {what}"),
            **where,
            "ts": begin,
        }
        event["dur"] = round(end - begin, 3)
        event["cat"] = "wait" if what >= words.WAITING else "work"
        worker, seq = value >> 32, value & 0xFFFFFFFF
        if what == words.APPLYING:
            event["args"] = {"worker": worker, "push": seq}
        yield event
        if what == words.APPLYING:
            arrow = arrows.end(worker, seq, each.about["rank"])
            yield {"ph": "f", "bp": "e", **arrow, **where, "ts": begin}


def _marks(
    each: Traced, where: dict[str, int], start: float, arrows: _Arrows
) -> Iterator[dict[str, Any]]:
    """Yield the beginnings of arrows, from each push to the servers, and checkpoints."""
    times = _us(each.times, start)
    workers: list[int] = each.about["workers"]
    rank = each.about["rank"]
    saving, pushing = 0, 0.0
    for time, what, value in zip(times, each.whats.tolist(), each.values.tolist(), strict=True):
        if what == WRITING:
            saving += value
            kind = {"ph": "b" if value else "e", "cat": "checkpoint", "id": f"{rank}.{saving}"}
            yield {"name": "writing a checkpoint", **kind, **where, "ts": time}
        elif what == SAVED and value >= 0:
            name = f"checkpoint of step {value}"
            yield {"ph": "i", "s": "g", "name": name, **where, "ts": time}
        elif what == words.PUSHING:
            pushing = time
        elif what == CLOCK and rank in workers:
            for server in arrows.servers:
                arrow = arrows.end(workers.index(rank), value, server)
                yield {"ph": "s", **arrow, **where, "ts": pushing}


# The critical path -----------------------------------------------------------------------------


def shares(ranks: Sequence[Traced]) -> list[dict[int, float]]:
    """Return the seconds of each rank in each phase that it was in."""
    found = []
    for each in map(slices, ranks):
        seconds = np.bincount(each.whats, each.ends - each.begins, words.WORDS)
        found.append({what: float(seconds[what]) for what in np.flatnonzero(seconds).tolist()})
    return found


def critical_path(ranks: Sequence[Traced]) -> dict[tuple[int, int], float]:
    """Return the seconds of each (rank, phase) on the path that the job's time went.

    It is followed from the end: through what a rank did, and where it waited, through what the rank
    did that had just ended the wait: a server that applied, a worker that computed. So the seconds
    add up to the job's. A wait that nobody is seen to end stays a wait. Ranks that evaluate, which
    know of no workers, are not on it: nobody's step waits for them.
    """
    ranks = [each for each in ranks if each.about["workers"]] or ranks
    found = [slices(each) for each in ranks]
    lasts = [each.ends[-1] if len(each.ends) else -np.inf for each in found]
    rank, total = int(np.argmax(lasts)), defaultdict[tuple[int, int], float](float)
    time, left = float(lasts[rank]), PATH_STEPS
    ends = {
        phase: [each.ends[each.whats == phase] for each in found] for phase in ENDED_BY.values()
    }
    while left and (k := found[rank].at(time)) >= 0:
        left -= 1
        begin, what = float(found[rank].begins[k]), int(found[rank].whats[k])
        phase = words.COMPUTING if what == words.SUMMING else ENDED_BY.get(what)
        other, ended = _who_ended(ends[phase], begin, time) if phase is not None else (rank, begin)
        if other == rank or ended <= begin:
            total[ranks[rank].about["rank"], what] += time - begin
            time = begin
        else:
            total[ranks[rank].about["rank"], what] += time - ended
            rank, time = other, ended
    return {key: seconds for key, seconds in total.items() if seconds > 0}


def _who_ended(ends: Sequence[np.ndarray], begin: float, time: float) -> tuple[int, float]:
    """Return the rank that ended something last within ``(begin, time]``, and when."""
    lasts = [float(each[k - 1]) if (k := np.searchsorted(each, time, "right")) else -np.inf
             for each in ends]  # fmt: skip
    rank = int(np.argmax(lasts))
    return rank, max(lasts[rank], begin)
