"""What the ranks of a job did when: merged into one timeline, and its critical path.

The timeline is in the Trace Event Format, which https://ui.perfetto.dev and Chrome read: a host is
a process, a rank a thread, a phase a slice. An arrow goes from a push to where it is applied, from
a read of another node's shard to where its owner takes it up, unless that is read by Get, and from
the rank that enters a round last to those that waited for it.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from mpips.cluster import words
from mpips.cluster.trace import Traced, folder_of, jobs_of, read
from mpips.errors import UserError
from mpips.report.phases import CLOCK, Slices, Waits, slices, waits, waits_in

PATH_STEPS = 1_000_000
JUST_US = 0.01  # before the end of a slice: an arrow from there begins in it
SAVED, WRITING = words.WORDS + words.SAVED, words.WORDS + words.WRITING
Span = tuple[float, float]  # seconds


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
    arrows, found = _Arrows(ranks), list(map(slices, ranks))
    lanes = [{"pid": each.about["node"], "tid": each.about["rank"]} for each in ranks]
    titles = [f"rank {each.about['rank']}: {each.about['name']}" for each in ranks]
    for k, (each, ended) in enumerate(zip(ranks, waits(ranks, found), strict=True)):
        about, where = each.about, lanes[k]
        names = {
            "process_name": f"node {about['node']}, {about['host']}",
            "thread_name": titles[k],
        }
        for kind, name in names.items():
            yield {"ph": "M", "name": kind, **where, "args": {"name": name}}
        order = {"sort_index": about["rank"]}
        yield {"ph": "M", "name": "thread_sort_index", **where, "args": order}
        awaited = [titles[who] if who >= 0 else "" for who in ended.whos.tolist()]
        yield from _phases(found[k], awaited, where, start, arrows)
        yield from _marks(each, where, start, arrows)
        yield from _round_arrows(k, lanes, start, found, ended)
        yield from _read_arrows(k, lanes, start, ranks, found)


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
    found: Slices, awaited: Sequence[str], where: dict[str, int], start: float, arrows: _Arrows
) -> Iterator[dict[str, Any]]:
    """Yield the slices of a rank, which say for whom it waits, and the ends of pushes' arrows."""
    rows = zip(
        _us(found.begins, start), _us(found.ends, start), found.whats.tolist(),
        found.values.tolist(), awaited, strict=True,
    )  # fmt: skip
    for begin, end, what, value, who in rows:
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
        elif who and waits_in(what):
            event["args"] = {"for": who}
        yield event
        if what == words.APPLYING:
            arrow = arrows.end(worker, seq, where["tid"])
            yield {"ph": "f", "bp": "e", **arrow, **where, "ts": begin}


def _round_arrows(
    rank: int,
    lanes: Sequence[dict[str, int]],
    start: float,
    found: Sequence[Slices],
    ended: Waits,
) -> Iterator[dict[str, Any]]:
    """Yield an arrow to where a rank goes on with a round, from the rank that entered it last."""
    for k in np.flatnonzero(ended.rounds).tolist():
        who, number = int(ended.whos[k]), int(ended.rounds[k])
        arrow = {"name": "round", "cat": "round", "id": number * len(lanes) + rank}
        before = found[who].begins[max(0, found[who].at(ended.whens[k]))]
        begin, entry, end = _us(np.array([before, ended.whens[k], found[rank].ends[k]]), start)
        yield {"ph": "s", **arrow, **lanes[who], "ts": max(begin, round(entry - JUST_US, 3))}
        yield {"ph": "f", "bp": "e", **arrow, **lanes[rank], "ts": end}


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


def _read_arrows(
    rank: int,
    lanes: Sequence[dict[str, int]],
    start: float,
    ranks: Sequence[Traced],
    found: Sequence[Slices],
) -> Iterator[dict[str, Any]]:
    """Yield an arrow from each read of a server's shard to where it is taken up.

    The server takes up those of a worker in their order.
    """
    is_answer = found[rank].whats == words.ANSWERING
    begins, readers = found[rank].begins[is_answer], found[rank].values[is_answer] >> 32
    for k in range(len(lanes) if len(begins) else 0):
        asked = _us(ranks[k].times[ranks[k].whats == words.FETCH], start)
        taken = _us(begins[readers == lanes[k]["tid"]], start)
        for number, (at, begin) in enumerate(zip(asked, taken, strict=False)):
            if at <= begin:  # else one has asked anew, of a server that took over
                key = (number * len(lanes) + k) * len(lanes) + rank
                arrow = {"name": "read", "cat": "read", "id": key}
                yield {"ph": "s", **arrow, **lanes[k], "ts": at}
                yield {"ph": "f", "bp": "e", **arrow, **lanes[rank], "ts": begin}


# The critical path -----------------------------------------------------------------------------


def shares(ranks: Sequence[Traced]) -> list[dict[int, float]]:
    """Return the seconds of each rank in each phase that it was in."""
    found = []
    for each in map(slices, ranks):
        seconds = np.bincount(each.whats, each.ends - each.begins, words.WORDS)
        found.append({what: float(seconds[what]) for what in np.flatnonzero(seconds).tolist()})
    return found


def awaited(ranks: Sequence[Traced]) -> list[dict[int, tuple[int, float]]]:
    """Return for each rank, by wait, the rank that it waited for longest, and for how long."""
    found, longest = list(map(slices, ranks)), list[dict[int, tuple[int, float]]]()
    for each, ended in zip(found, waits(ranks, found), strict=True):
        longest.append({})
        seen = (ended.whos >= 0) & waits_in(each.whats)
        for what in np.unique(each.whats[seen]).tolist():
            which = seen & (each.whats == what)
            seconds = np.bincount(ended.whos[which], (ended.whens - each.begins)[which])
            who = int(np.argmax(seconds))
            longest[-1][what] = int(ranks[who].about["rank"]), float(seconds[who])
    return longest


def critical_path(ranks: Sequence[Traced]) -> dict[tuple[int, int, int | None], float]:
    """Return the seconds of each (rank, phase, awaited rank) on the path that the job's time went.

    It is followed from the end: through what a rank did, and where it waited, through what the rank
    did that had just ended the wait: a server that applied, a worker that computed. So the seconds
    add up to the job's. A wait that nobody is seen to end stays a wait. Ranks that evaluate, which
    know of no workers, are not on it: nobody's step waits for them.
    """
    ranks = [each for each in ranks if each.about["workers"]] or ranks
    found = [slices(each) for each in ranks]
    lasts = [each.ends[-1] if len(each.ends) else -np.inf for each in found]
    rank, total = int(np.argmax(lasts)), defaultdict[tuple[int, int, int | None], float](float)
    time, left = float(lasts[rank]), PATH_STEPS
    ended = waits(ranks, found)
    numbers = [int(each.about["rank"]) for each in ranks]
    while left and (k := found[rank].at(time)) >= 0:
        left -= 1
        begin, what = float(found[rank].begins[k]), int(found[rank].whats[k])
        who, when = int(ended[rank].whos[k]), float(ended[rank].whens[k])
        if who >= 0 and begin < when <= time:
            other = numbers[who] if waits_in(what) else None
            total[numbers[rank], what, other] += time - when
            rank, time = who, when
        else:
            total[numbers[rank], what, None] += time - begin
            time = begin
    return {key: seconds for key, seconds in total.items() if seconds > 0}
