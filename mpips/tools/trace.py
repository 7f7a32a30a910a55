"""Timeline of a job's ranks, from a run with --trace: ``python -m mpips trace RUN``.

Writes a timeline that https://ui.perfetto.dev and chrome://tracing open, and prints where the time
of each rank went, and that of the critical path: the chain of work and waits that the job's time
consists of. Of a run of several jobs it is the last one, or that of --job. Starts no MPI.
"""

import argparse
import gzip
import itertools
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, cast

import numpy as np

from mpips.checkpoint import run_folder
from mpips.config.jobfile import verbatim
from mpips.errors import UserError, answer, human_bytes
from mpips.health import status_board
from mpips.health.trace_file import Traced, folder_of, jobs_of, read
from mpips.tools.report.phases import CLOCK, slices, waits, waits_in

PATH_STEPS = 1_000_000
JUST_US = 0.01  # before the end of a slice: an arrow from there begins in it
SAVED, WRITING = status_board.WORDS + status_board.SAVED, status_board.WORDS + status_board.WRITING
NUMBER = 0xFFFFFFFF  # of a push, below its worker
Event = dict[str, Any]
LINES = 10  # of the critical path


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


class Timeline:
    """What the ranks of a job did when. In its methods `k` is a rank's place among their traces.

    It is in the Trace Event Format, which https://ui.perfetto.dev and Chrome read: a host is a
    process, a rank a thread, a phase a slice. An arrow goes from a push to where it is applied,
    from a read of another node's shard to where its owner takes it up, unless that is read by Get,
    and from the rank that enters a round last to those that waited for it.

    Args:
        ranks: The traces of all ranks.
    """

    def __init__(self, ranks: Sequence[Traced]) -> None:
        self._ranks, self._slices = ranks, list(map(slices, ranks))
        self._waits = waits(ranks, self._slices)
        self._start = min((each.times[0] for each in ranks if len(each.times)), default=0.0)
        self._lanes = [{"pid": each.about["node"], "tid": each.about["rank"]} for each in ranks]
        self._titles = [f"rank {each.about['rank']}: {each.about['name']}" for each in ranks]
        self._numbers = defaultdict[str, Iterator[int]](itertools.count)  # of arrows, by category

    def write(self, out: TextIO) -> int:
        """Write the timeline as JSON, an event a line; returns how many events it has."""
        count = 0
        out.write('{"displayTimeUnit": "ms", "traceEvents": [')
        for event in self._events():
            out.write(("," if count else "") + "\n" + json.dumps(event, separators=(",", ":")))
            count += 1
        out.write("\n]}\n")
        return count

    def _events(self) -> Iterator[Event]:
        pushes = [self._pushed(each) for each in self._ranks]
        for k in range(len(self._ranks)):
            yield from self._names(k)
            yield from self._phases(k)
            yield from self._marks(k)
            yield from self._push_arrows(k, pushes)
            yield from self._round_arrows(k)
            yield from self._read_arrows(k)

    def _us(self, times: np.ndarray) -> list[float]:
        return np.round(1e6 * (times - self._start), 3).tolist()

    def _arrow(self, name: str, k: int, begin: float, other: int, end: float) -> Iterator[Event]:
        """Yield both ends of an arrow; their number is an integer, as Perfetto takes no text."""
        arrow = {"name": name, "cat": name, "id": next(self._numbers[name])}
        yield {"ph": "s", **arrow, **self._lanes[k], "ts": begin}
        yield {"ph": "f", "bp": "e", **arrow, **self._lanes[other], "ts": end}

    def _names(self, k: int) -> Iterator[Event]:
        about, lane = self._ranks[k].about, {"ph": "M", **self._lanes[k]}
        node = f"node {about['node']}, {about['host']}"
        yield {**lane, "name": "process_name", "args": {"name": node}}
        yield {**lane, "name": "thread_name", "args": {"name": self._titles[k]}}
        yield {**lane, "name": "thread_sort_index", "args": {"sort_index": about["rank"]}}

    def _phases(self, k: int) -> Iterator[Event]:
        """Yield the slices of a rank, which say for whom it waits."""
        found, whos = self._slices[k], self._waits[k].whos.tolist()
        times = zip(self._us(found.begins), self._us(found.ends), strict=True)
        whats, values = found.whats.tolist(), found.values.tolist()
        for (begin, end), what, value, who in zip(times, whats, values, whos, strict=True):
            event: Event = {"ph": "X", "name": status_board.PHASES.get(what, f"phase {what}")}
            event |= {**self._lanes[k], "ts": begin, "dur": round(end - begin, 3)}
            event["cat"] = "wait" if what >= status_board.WAITING else "work"
            if what == status_board.APPLYING:
                event["args"] = {"worker": value >> 32, "push": value & NUMBER}
            elif who >= 0 and waits_in(what):
                event["args"] = {"for": self._titles[who]}
            yield event

    def _marks(self, k: int) -> Iterator[Event]:
        """Yield checkpoints, and their writing."""
        each, saving = self._ranks[k], 0
        rows = zip(self._us(each.times), each.whats.tolist(), each.values.tolist(), strict=True)
        for time, what, value in rows:
            where = {**self._lanes[k], "ts": time}
            if what == WRITING:
                saving += value
                number = f"{each.about['rank']}.{saving}"
                kind = {"ph": "b" if value else "e", "cat": "checkpoint", "id": number}
                yield {"name": "writing a checkpoint", **kind, **where}
            elif what == SAVED and value >= 0:
                yield {"ph": "i", "s": "g", "name": f"checkpoint of step {value}", **where}

    def _pushed(self, each: Traced) -> dict[int, float]:
        """Return when a worker began each of its pushes, by number."""
        order = np.flatnonzero((each.whats == status_board.PUSHING) | (each.whats == CLOCK))
        pushing, found = 0.0, dict[int, float]()
        rows = each.whats[order].tolist(), each.values[order].tolist()
        for time, what, value in zip(self._us(each.times[order]), *rows, strict=True):
            if what == status_board.PUSHING:
                pushing = time
            else:
                found[value] = pushing
        return found

    def _push_arrows(self, k: int, pushes: Sequence[Mapping[int, float]]) -> Iterator[Event]:
        """Yield an arrow to each push that a server applied, from where it was made."""
        found, workers = self._slices[k], self._ranks[k].about["workers"]
        places = {each.about["rank"]: place for place, each in enumerate(self._ranks)}
        applied = found.whats == status_board.APPLYING
        values = found.values[applied].tolist()
        for value, end in zip(values, self._us(found.begins[applied]), strict=True):
            worker = value >> 32
            place = places.get(workers[worker]) if 0 <= worker < len(workers) else None
            if place is not None and (begin := pushes[place].get(value & NUMBER)) is not None:
                yield from self._arrow("push", place, begin, k, end)

    def _round_arrows(self, k: int) -> Iterator[Event]:
        """Yield an arrow to where a rank goes on with a round, from the rank that came last."""
        ended = self._waits[k]
        for i in np.flatnonzero(ended.rounds).tolist():
            who, when = int(ended.whos[i]), ended.whens[i]
            before = self._slices[who].begins[max(0, self._slices[who].at(when))]
            begin, entry, end = self._us(np.array([before, when, self._slices[k].ends[i]]))
            yield from self._arrow("round", who, max(begin, round(entry - JUST_US, 3)), k, end)

    def _read_arrows(self, k: int) -> Iterator[Event]:
        """Yield an arrow from each read of a server's shard to where it is taken up.

        The server takes up those of a worker in their order.
        """
        found = self._slices[k]
        answers = found.whats == status_board.ANSWERING
        begins, readers = found.begins[answers], found.values[answers] >> 32
        for place, each in enumerate(self._ranks if len(begins) else ()):
            asked = self._us(each.times[each.whats == status_board.FETCH])
            taken = self._us(begins[readers == each.about["rank"]])
            for at, begin in zip(asked, taken, strict=False):
                if at <= begin:  # else one has asked anew, of a server that took over
                    yield from self._arrow("read", place, at, k, begin)

    def shares(self) -> list[dict[int, float]]:
        """Return the seconds of each rank in each phase that it was in."""
        found = []
        for each in self._slices:
            seconds = np.bincount(each.whats, each.ends - each.begins, status_board.WORDS)
            found.append({what: float(seconds[what]) for what in np.flatnonzero(seconds).tolist()})
        return found

    def awaited(self) -> list[dict[int, tuple[int, float]]]:
        """Return for each rank, by wait, the rank that it waited for longest, and for how long."""
        longest = list[dict[int, tuple[int, float]]]()
        for each, ended in zip(self._slices, self._waits, strict=True):
            longest.append({})
            seen = (ended.whos >= 0) & waits_in(each.whats)
            for what in np.unique(each.whats[seen]).tolist():
                which = seen & (each.whats == what)
                seconds = np.bincount(ended.whos[which], (ended.whens - each.begins)[which])
                who = int(np.argmax(seconds))
                longest[-1][what] = self._lanes[who]["tid"], float(seconds[who])
        return longest

    def critical_path(self) -> dict[tuple[int, int, int | None], float]:
        """Return the seconds of each (rank, phase, awaited rank) on the path of the job's time.

        It is followed from the end: through what a rank did, and where it waited, through what the
        rank did that had just ended the wait: a server that applied, a worker that computed. So the
        seconds add up to the job's. A wait that nobody is seen to end stays a wait. Evaluators,
        which know of no workers, are not on it: nobody's step waits for them.
        """
        trains = [bool(each.about["workers"]) for each in self._ranks]
        lasts = [
            each.ends[-1] if len(each.ends) and (on or not any(trains)) else -np.inf
            for each, on in zip(self._slices, trains, strict=True)
        ]
        rank, total = int(np.argmax(lasts)), defaultdict[tuple[int, int, int | None], float](float)
        time, left, ended = float(lasts[rank]), PATH_STEPS, self._waits
        numbers = [lane["tid"] for lane in self._lanes]
        while left and (k := self._slices[rank].at(time)) >= 0:
            left -= 1
            found = self._slices[rank]
            begin, what = float(found.begins[k]), int(found.whats[k])
            who, when = int(ended[rank].whos[k]), float(ended[rank].whens[k])
            if who >= 0 and begin < when <= time:
                other = numbers[who] if waits_in(what) else None
                total[numbers[rank], what, other] += time - when
                rank, time = who, when
            else:
                total[numbers[rank], what, None] += time - begin
                time = begin
        return {key: seconds for key, seconds in total.items() if seconds > 0}


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
