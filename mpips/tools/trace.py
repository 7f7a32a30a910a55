"""Timeline of a job's ranks: ``python -m mpips trace RUN``.

Reads what a run with --trace has left. Writes a timeline for https://ui.perfetto.dev and
chrome://tracing. Prints the share of each phase in the time of each rank and in the critical path,
the chain of work and waits that determines the job's time. For a run of several jobs, this is the
last job, or the one of --job. The command does not start MPI.
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
from mpips.errors import UserError, answer, complain, human_bytes, listed
from mpips.health import status_board
from mpips.health.trace_file import Traced, folder_of, jobs_of, read
from mpips.tools.report.phases import CLOCK, slices, waits, waits_in

PATH_STEPS = 1_000_000  # most slices of the critical path
JUST_US = 0.01  # an arrow starts so long before the end of its slice, to start within it
SAVED, WRITING = status_board.WORDS + status_board.SAVED, status_board.WORDS + status_board.WRITING
NUMBER = 0xFFFFFFFF  # mask of a push's number; the bits above are its worker
Event = dict[str, Any]
LINES = 10  # most lines about the critical path


def read_run(run: Path, job: int | None = None) -> list[Traced]:
    """Read the traces of all ranks of a run's job, by default of its last one.

    A warning names the file of a rank that was killed before it wrote the first line.

    Raises:
        UserError: If there are none, or a file is damaged.
    """
    jobs = jobs_of(run)
    if not jobs:
        raise UserError(f"{run} without traces", "a run made with --trace", "run it so")
    if job is not None and job not in jobs:
        raise UserError(f"--job {job}", f"one of which there are traces: {listed(jobs, len(jobs))}")
    traces = []
    for path in sorted(folder_of(run, job or jobs[-1]).glob("rank-*")):
        with path.open("rb") as file:
            if not file.readline().endswith(b"\n"):
                complain(f"warning: {path} is empty, as of a rank that was killed at its start")
                continue
        try:
            traces.append(read(path))
        except (ValueError, KeyError, TypeError) as problem:
            raise UserError(f"{path} cannot be read ({problem})", "a trace of mpips") from None
    if not traces:
        raise UserError(f"{run} with empty traces", "those of ranks that have begun")
    return traces


class Timeline:
    """Timeline of a job's ranks.

    Its file has the Trace Event Format, which https://ui.perfetto.dev and Chrome read: a node is a
    process, a rank is a thread, and a phase is a slice. There are three kinds of arrows: from a
    push to the slice that applies it, from a read of another node's shard to the slice in which the
    owner answers (not for reads by Get), and from the last rank to enter a round to the ranks that
    waited for it. In the methods, `k` is the index of a rank in `ranks`.

    Args:
        ranks: Traces of all ranks.
    """

    def __init__(self, ranks: Sequence[Traced]) -> None:
        self._ranks, self._slices = ranks, list(map(slices, ranks))
        self._waits = waits(ranks, self._slices)
        self._start = min((traced.times[0] for traced in ranks if len(traced.times)), default=0.0)
        abouts = [traced.about for traced in ranks]
        self._lanes = [{"pid": about["node"], "tid": about["rank"]} for about in abouts]
        self._titles = [f"rank {about['rank']}: {about['name']}" for about in abouts]
        self._numbers = defaultdict[str, Iterator[int]](itertools.count)  # ids of arrows, by name

    def write(self, out: TextIO) -> int:
        """Write the timeline as JSON, with one event per line; returns the number of events."""
        count = 0
        out.write('{"displayTimeUnit": "ms", "traceEvents": [')
        for event in self._events():
            out.write(("," if count else "") + "\n" + json.dumps(event, separators=(",", ":")))
            count += 1
        out.write("\n]}\n")
        return count

    def _events(self) -> Iterator[Event]:
        pushes = [self._pushed(traced) for traced in self._ranks]
        reads = [self._us(each.times[each.whats == status_board.FETCH]) for each in self._ranks]
        for k in range(len(self._ranks)):
            yield from self._names(k)
            yield from self._phases(k)
            yield from self._marks(k)
            yield from self._push_arrows(k, pushes)
            yield from self._round_arrows(k)
            yield from self._read_arrows(k, reads)

    def _us(self, times: np.ndarray) -> list[float]:
        return np.round(1e6 * (times - self._start), 3).tolist()

    def _arrow(self, name: str, k: int, begin: float, other: int, end: float) -> Iterator[Event]:
        """Yield both ends of an arrow; its id is an integer, as Perfetto accepts no text."""
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
        """Yield the slices of a rank; the slice of a wait names the awaited rank."""
        own, whos = self._slices[k], self._waits[k].whos.tolist()
        times = zip(self._us(own.begins), self._us(own.ends), strict=True)
        phases, values = own.whats.tolist(), own.values.tolist()
        for (begin, end), phase, value, who in zip(times, phases, values, whos, strict=True):
            event: Event = {"ph": "X", "name": status_board.PHASES.get(phase, f"phase {phase}")}
            event |= {**self._lanes[k], "ts": begin, "dur": round(end - begin, 3)}
            event["cat"] = "wait" if phase >= status_board.WAITING else "work"
            if phase == status_board.APPLYING:
                event["args"] = {"worker": value >> 32, "push": value & NUMBER}
            elif who >= 0 and waits_in(phase):
                event["args"] = {"for": self._titles[who]}
            yield event

    def _marks(self, k: int) -> Iterator[Event]:
        """Yield the commits of checkpoints, and the times at which they were written."""
        traced, writes = self._ranks[k], 0
        order = np.flatnonzero(np.isin(traced.whats, (SAVED, WRITING)))
        rows = traced.whats[order].tolist(), traced.values[order].tolist()
        for time, what, value in zip(self._us(traced.times[order]), *rows, strict=True):
            lane = {**self._lanes[k], "ts": time}
            if what == WRITING:
                writes += value
                number = f"{traced.about['rank']}.{writes}"
                kind = {"ph": "b" if value else "e", "cat": "checkpoint", "id": number}
                yield {"name": "writing a checkpoint", **kind, **lane}
            elif what == SAVED and value >= 0:
                yield {"ph": "i", "s": "g", "name": f"checkpoint of step {value}", **lane}

    def _pushed(self, traced: Traced) -> dict[int, float]:
        """Return the time at which a worker began each of its pushes, in us, by number."""
        order = np.flatnonzero((traced.whats == status_board.PUSHING) | (traced.whats == CLOCK))
        begin, begins = 0.0, dict[int, float]()
        rows = traced.whats[order].tolist(), traced.values[order].tolist()
        for time, what, value in zip(self._us(traced.times[order]), *rows, strict=True):
            if what == status_board.PUSHING:
                begin = time
            else:
                begins[value] = begin
        return begins

    def _push_arrows(self, k: int, pushes: Sequence[Mapping[int, float]]) -> Iterator[Event]:
        """Yield an arrow to each slice in which a server applied a push, from the worker's push."""
        own, workers = self._slices[k], self._ranks[k].about["workers"]
        indices = {lane["tid"]: index for index, lane in enumerate(self._lanes)}
        applied = own.whats == status_board.APPLYING
        values = own.values[applied].tolist()
        for value, end in zip(values, self._us(own.begins[applied]), strict=True):
            worker = value >> 32
            index = indices.get(workers[worker]) if 0 <= worker < len(workers) else None
            if index is not None and (begin := pushes[index].get(value & NUMBER)) is not None:
                yield from self._arrow("push", index, begin, k, end)

    def _round_arrows(self, k: int) -> Iterator[Event]:
        """Yield an arrow to each end of a wait in a round, from the rank that entered it last."""
        ended = self._waits[k]
        for i in np.flatnonzero(ended.rounds).tolist():
            who, when = int(ended.whos[i]), ended.whens[i]
            previous = self._slices[who].begins[max(0, self._slices[who].at(when))]
            begin, entry, end = self._us(np.array([previous, when, self._slices[k].ends[i]]))
            yield from self._arrow("round", who, max(begin, round(entry - JUST_US, 3)), k, end)

    def _read_arrows(self, k: int, reads: Sequence[Sequence[float]]) -> Iterator[Event]:
        """Yield an arrow from each read of a server's shard to the slice that answers it.

        A server answers the reads of a worker in their order.
        """
        own = self._slices[k]
        answers = own.whats == status_board.ANSWERING
        begins, readers = own.begins[answers], own.values[answers] >> 32
        for reader, traced in enumerate(self._ranks if len(begins) else ()):
            answered = self._us(begins[readers == traced.about["rank"]])
            for read_at, begin in zip(reads[reader], answered, strict=False):
                if read_at <= begin:  # false after a shard takeover, when workers read again
                    yield from self._arrow("read", reader, read_at, k, begin)

    def shares(self) -> list[dict[int, float]]:
        """Return the seconds of each rank in each of its phases."""
        shares = []
        for own in self._slices:
            seconds = np.bincount(own.whats, own.ends - own.begins, status_board.WORDS)
            shares.append({k: float(seconds[k]) for k in np.flatnonzero(seconds).tolist()})
        return shares

    def awaited(self) -> list[dict[int, tuple[int, float]]]:
        """Return for each rank, by wait, the rank that it waited for longest, and the seconds."""
        longest = list[dict[int, tuple[int, float]]]()
        for own, ended in zip(self._slices, self._waits, strict=True):
            longest.append({})
            seen = (ended.whos >= 0) & waits_in(own.whats)
            for phase in np.unique(own.whats[seen]).tolist():
                which = seen & (own.whats == phase)
                seconds = np.bincount(ended.whos[which], (ended.whens - own.begins)[which])
                who = int(np.argmax(seconds))
                longest[-1][phase] = self._lanes[who]["tid"], float(seconds[who])
        return longest

    def critical_path(self) -> dict[tuple[int, int, int | None], float]:
        """Return the seconds of each (rank, phase, awaited rank) on the critical path.

        The path is followed backwards from the last slice of the job. At a wait, it continues with
        the rank that ended the wait, such as a server that applied a push. So the seconds add up to
        the time of the job, or to the time of its last `PATH_STEPS` slices. If the traces do not
        show the rank that ended a wait, the wait itself is on the path. Evaluators are never on it,
        since no step waits for them; their traces name no workers.
        """
        trains = [bool(traced.about["workers"]) for traced in self._ranks]
        lasts = [
            own.ends[-1] if len(own.ends) and (on or not any(trains)) else -np.inf
            for own, on in zip(self._slices, trains, strict=True)
        ]
        rank, total = int(np.argmax(lasts)), defaultdict[tuple[int, int, int | None], float](float)
        time, steps, ended = float(lasts[rank]), 0, self._waits
        numbers = [lane["tid"] for lane in self._lanes]
        while steps < PATH_STEPS and (k := self._slices[rank].at(time)) >= 0:
            steps += 1
            own = self._slices[rank]
            begin, phase = float(own.begins[k]), int(own.whats[k])
            who, when = int(ended[rank].whos[k]), float(ended[rank].whens[k])
            if who >= 0 and begin < when <= time:
                other = numbers[who] if waits_in(phase) else None
                total[numbers[rank], phase, other] += time - when
                rank, time = who, when
            else:
                total[numbers[rank], phase, None] += time - begin
                time = begin
        return {key: seconds for key, seconds in total.items() if seconds > 0}


def table(ranks: Sequence[Traced], timeline: Timeline) -> str:
    """Return the shares of phases in the time of each rank, and in the critical path, as text."""
    shares, path, longest = timeline.shares(), timeline.critical_path(), timeline.awaited()
    phases = sorted(set[int]().union(*shares), key=lambda k: (k >= status_board.WAITING, k))
    lines = []
    for traced, seconds, awaited in zip(ranks, shares, longest, strict=True):
        total, about = sum(seconds.values()), traced.about
        spent = [f"{status_board.PHASES[k]} {seconds[k] / total:.0%}" + _whom(awaited.get(k), total)
                 for k in phases if k in seconds]  # fmt: skip
        lines.append(f"rank {about['rank']:3d}  {about['name']:10s}  {', '.join(spent)}")
    path_s = sum(path.values())
    lines.append(f"critical path, {path_s:.3f} s:")
    for (rank, phase, who), spent_s in sorted(path.items(), key=lambda item: -item[1])[:LINES]:
        whom = "" if who is None else f" (rank {who})"
        lines.append(f"  {spent_s / path_s:4.0%}  rank {rank} {status_board.PHASES[phase]}{whom}")
    return "\n".join(lines)


def _whom(longest: tuple[int, float] | None, total: float) -> str:
    """Return the rank that was awaited longest, and its share of the time, as text."""
    return "" if longest is None else f" (rank {longest[0]}: {longest[1] / total:.0%})"


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = verbatim("python -m mpips trace", __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="the timeline, compressed "
        "where its name ends in .gz [default: RUN/trace.json]")  # fmt: skip
    parser.add_argument("--job", type=int, metavar="N", help="which job of the run "
        "[default: the last one]")  # fmt: skip
    return parser


def make(argv: Sequence[str]) -> str:
    """Write a timeline; returns the table and a message about the file.

    Raises:
        UserError: If there are no traces, or the file cannot be written.
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
    text = f"{count:,} events in {out} ({size}): open it in https://ui.perfetto.dev"
    jobs = jobs_of(args.run)
    if len(jobs) > 1:
        of = f"job {args.job or jobs[-1]} of this run's jobs {listed(jobs, len(jobs))}"
        text = f"{of}: see --job\n{text}"
    return f"{table(ranks, timeline)}\n{text}\n"


def main(argv: Sequence[str]) -> int:
    """Write the timeline, print the table, and return the exit code."""
    return answer(make, argv)
