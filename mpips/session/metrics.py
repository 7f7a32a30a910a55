"""Log of a run: progress on a terminal, ``metrics.jsonl`` and JSON files.

Only one rank, the coordinator, writes a `Log`. Every line of ``metrics.jsonl`` is an object with
``kind``, ``time_s`` since the start, ``step`` (updates applied), and the fields of its kind.

Lines of metrics.jsonl:
    start: ``mode``, ``world``, ``epochs`` (null with --steps), ``resumed``, ``inject_delay`` (by
        worker), ``data`` (notes)
    train: ``epoch``, ``loss`` (mean since the last line), ``samples``, ``samples_per_s``,
        ``staleness`` (mean since the last line, at server 0)
    eval: ``epoch``, and the problem's metrics: ``loss``, ``accuracy``. The last line is of the
        final parameters
    log: ``worker`` (its number), and the values that a program gave to ``worker.log``
    checkpoint: No more. The checkpoint is on the disk
    warning: ``text``, such as of a damaged checkpoint
    lost: the ``rank`` that died: a ``worker``, whose open ``batches`` were assigned again; a
        ``server``, whose shard was taken over in ``seconds`` (``continued``: an interrupted update
        was completed); or an ``evaluator``
    stop: ``reason``: a signal's name, ``target``, ``patience``, ``diverged``, ``stopped``
    end: ``reason``, ``eval_loss``
"""

import json
import math
import os
import resource
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np

from mpips.checkpoint.run_folder import write_whole
from mpips.errors import complain, human_bytes, write_line
from mpips.launch import heartbeat
from mpips.launch.terminal import Terminal, find_terminal

# Seconds between two lines on a terminal: at least the first, then a share of the elapsed time, at
# most the last.
LINE_S, LINE_SHARE, LINE_MAX_S = 2.0, 0.1, 60.0
BAR = "{l_bar}{bar}| {elapsed}<{remaining}{postfix}"  # for 80 columns


class Progress:
    """Progress as a bar, as lines, or both.

    The first line determines whether there is a terminal.

    Args:
        total_steps: Updates of the whole run, for the bar; None if unknown.
        hushed: Returns whether to show nothing any more, as the job ends.
        sparse: Whether to print fewer lines, at growing intervals; a bar shows all.
    """

    def __init__(
        self, total_steps: int | None, hushed: Callable[[], bool], sparse: bool = False
    ) -> None:
        self._total, self._hushed, self._sparse = total_steps, hushed, sparse
        self._next_s = 0.0  # earliest time of the next line, after the start
        self._bar: Any = None
        self._found: tuple[Terminal | None, bool] | None = None

    def show(self, gone_s: float, step: int, words: Sequence[str], last: bool = False) -> bool:
        """Show words about update `step`.

        Args:
            gone_s: Seconds since the start.
            step: Number of the update.
            words: Parts of the text.
            last: Whether to print a line in any case.

        Returns:
            Whether the words are shown; a line is only printed if it is due.
        """
        if self._hushed():
            return False
        if self._found is None:
            self._found = find_terminal()
        terminal, lines = self._found
        if terminal is not None:
            self._show_bar(terminal, step, ", ".join(words).replace(" samples/s", "/s"))
        lines = lines and (last or not self._sparse or gone_s >= self._next_s)
        if lines:
            self._next_s = gone_s + max(LINE_S, min(LINE_MAX_S, LINE_SHARE * gone_s))
            write_line(f"[{gone_s:7.1f} s] step {step:>8d}  {'  '.join(words)}")
        return lines or terminal is not None

    def _show_bar(self, terminal: Terminal, step: int, text: str) -> None:
        if self._bar is None:
            from tqdm import tqdm

            tqdm.monitor_interval = 0  # no thread of tqdm: every line redraws the bar
            self._bar = tqdm(
                total=self._total, initial=step, file=terminal, dynamic_ncols=True, bar_format=BAR
            )
        self._bar.n = step
        self._bar.set_postfix_str(text)

    def end_bar(self) -> None:
        """End the bar as it is; the next line begins another."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def close(self) -> None:
        """Close the bar and the terminal; a second call does nothing."""
        self.end_bar()
        if self._found is not None and self._found[0] is not None:
            self._found[0].close()
        self._found = None


LONG_LOSS = 1e5
# Seconds between two lines of kind train: at least a share of the elapsed time, up to a limit.
TRAIN_SHARE, TRAIN_MAX_S = 0.02, 30.0
Listener: TypeAlias = Callable[[str, int | None, Mapping[str, Any]], object]
WARNINGS = 100  # largest number of warnings in a summary; the last ones are kept


def peak_memory_mb() -> float:
    """Return this process's largest resident size so far in MB, shared memory included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class MetricsFile:
    """Appends rows to a file. Rows that cannot be written are written with a later row.

    Args:
        path: Path of the file.
    """

    def __init__(self, path: Path) -> None:
        self._file, self._unwritten = _appending(path)
        self._failed = False

    def append(self, row: Mapping[str, Any]) -> str | None:
        """Append a row, and return the result of `flush`."""
        self._unwritten += f"{json.dumps(finite(row))}\n".encode()
        return self.flush()

    def flush(self) -> str | None:
        """Write all pending rows. Return the reason of a first failure, else None."""
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) or 0 :]
        except OSError as problem:
            already, self._failed = self._failed, True
            return None if already else f"{self._file.name} cannot be written: {problem.strerror}"
        self._failed = False
        return None

    def reopen(self, path: Path) -> None:
        """Continue in another file: the old one is gone."""
        file, end = _appending(path)
        self._file.close()
        self._file, self._unwritten = file, end + self._unwritten

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _appending(path: Path) -> tuple[IO[bytes], bytes]:
    """Open a file to append rows; return it, and the end of a row that was cut off in it."""
    file = open(path, "ab+", buffering=0)  # noqa: SIM115  (closed by close)
    size = file.seek(0, os.SEEK_END)
    return file, b"\n" * (size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n")


def finite(value: Any) -> Any:
    """Return `value` with NaN and infinities as text, as JSON cannot represent them."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    if isinstance(value, np.generic):
        return finite(value.item())
    return value


class Log:
    """Progress lines and ``metrics.jsonl``; only the coordinator writes.

    Args:
        path: The file to append to; None on other ranks.
        start: `time.perf_counter` at the start of the process.
        total_steps: Updates of the whole run, for the bar; None if unknown.
        interval_s: Least seconds between lines of kind ``train``; in a long run, intervals grow.
        quiet: Whether to print nothing.
        listener: Called with the kind, step and fields of each line, or None.
        hushed: Returns whether to show nothing any more, as the job ends.
        sparse: Whether to show fewer lines than the file has; see `Progress`.

    Attributes:
        warnings: Texts of the last warnings.
        last_loss: Mean loss of the last line of kind ``train``.
        last_eval: Metrics of the last evaluation.

    Lines that cannot be written are written with a later line.
    """

    def __init__(
        self,
        path: Path | None,
        start: float,
        total_steps: int | None = None,
        interval_s: float = 1.0,
        quiet: bool = False,
        listener: Listener | None = None,
        hushed: Callable[[], bool] = lambda: False,
        sparse: bool = False,
    ) -> None:
        self._file = MetricsFile(path) if path else None
        self._step, self._listener = 0, listener
        self.warnings: deque[str] = deque(maxlen=WARNINGS)
        self._start, self._interval_s, self._quiet = start, interval_s, quiet
        self._progress = Progress(total_steps, hushed, sparse)
        self._shown: tuple[float | None] | None = None
        self._last = self._begin = (time.perf_counter(), 0)
        self._losses = 0.0, 0  # sum of losses, and number of samples
        self.last_loss = math.nan
        self.last_eval: dict[str, float] = {}

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file and the bar; a second call does nothing."""
        if self._file is not None:
            if problem := self._file.flush():
                self.warn(problem)
            self._file.close()
            self._file = None
        self._progress.close()

    def reopen(self, path: Path) -> None:
        """Continue in another file: the old one is gone, or belonged to another rank."""
        if self._file is not None:
            self._file.reopen(path)
        else:
            self._file = MetricsFile(path)

    def start_at(self, samples: int) -> None:
        """Start to measure speed, after `samples` done before."""
        self._last = self._begin = (time.perf_counter(), samples)

    def count(self, *batches: tuple[float, int]) -> None:
        """Add mean losses of batches, each with its samples, to the next progress line."""
        total, counted = self._losses
        for loss, samples in batches:
            total, counted = total + loss * samples, counted + samples
        self._losses = total, counted

    def event(self, kind: str, step: int | None, /, **fields: Any) -> None:
        """Write a line to ``metrics.jsonl``."""
        if self._file is not None:
            time_s = round(time.perf_counter() - self._start, 3)
            self._step = self._step if step is None else step
            heartbeat.beat()
            if problem := self._file.append(
                {"kind": kind, "time_s": time_s, "step": step, **fields}
            ):
                self.warn(problem)
            if self._listener is not None:
                self._listener(kind, step, fields)

    def warn(self, text: str) -> None:
        """Print and record a warning, even if `quiet`."""
        if self._file is not None:
            self.note(text)
            self._progress.end_bar()
            complain(f"warning: {text}")

    def note(self, text: str) -> None:
        """Record a warning in ``metrics.jsonl`` and the summary without printing it."""
        self.warnings.append(text)
        self.event("warning", self._step, text=text)

    def heard(self, kind: str, payload: Any) -> None:
        """Record a message of a worker.

        Args:
            kind: ``eval`` or ``log``.
            payload: For ``eval``, ``step``, ``epoch``, ``loss`` and, if defined, ``accuracy``. For
                ``log``, lines of its program, each with ``step`` and ``worker``.
        """
        for line in [payload] if kind == "eval" else payload:
            values = dict(line)
            if kind == "eval":
                self.last_eval = {k: v for k, v in line.items() if k != "epoch"}
            step = values.pop("step")
            self.event(kind, None if step is None else int(step), **values)

    def due(self) -> bool:
        """Return whether this rank has to write a progress line now."""
        if self._file is None:
            return False
        now = time.perf_counter()
        gap = max(self._interval_s, min(TRAIN_MAX_S, TRAIN_SHARE * (now - self._start)))
        return bool(self._losses[1]) and now - self._last[0] >= gap

    def progress(
        self,
        step: int,
        epoch: float,
        samples: int,
        force: bool = False,
        staleness: float | None = None,
    ) -> None:
        """Write and show a progress line, if it is due.

        Args:
            step: Number of updates.
            epoch: Number of epochs.
            samples: Number of samples.
            force: Whether it is the last line: written if anything is new, with the whole run's
                speed.
            staleness: Mean staleness since the last line, for the file; None if unknown.
        """
        outdated = self._shown is not None and self._shown != (self.last_eval.get("accuracy"),)
        new = bool(self._losses[1]) or outdated
        if self._file is None or not ((force and new) or self.due()):
            return
        then, before = self._begin if force else self._last
        now = time.perf_counter()
        rate = (samples - before) / max(now - then, 1e-9)
        if self._losses[1]:
            self._last = (now, samples)
            self.last_loss = self._losses[0] / self._losses[1]
            self._losses = 0.0, 0
            stale = {} if staleness is None else {"staleness": round(staleness, 3)}
            self.event(
                "train", step, epoch=round(epoch, 4), loss=self.last_loss, samples=samples,
                samples_per_s=round(rate, 1), **stale,
            )  # fmt: skip
        if not self._quiet:
            self._show(step, epoch, rate, force)
        if force:
            self._progress.end_bar()

    def _show(self, step: int, epoch: float, rate: float, last: bool) -> None:
        accuracy = self.last_eval.get("accuracy")
        held_out = [] if accuracy is None else [f"accuracy {accuracy:.4f}"]
        loss = f"{self.last_loss:.4f}" if self.last_loss < LONG_LOSS else f"{self.last_loss:.3g}"
        words = [f"epoch {epoch:6.2f}", f"loss {loss}", *held_out, f"{rate:,.0f} samples/s"]
        shown = self._progress.show(time.perf_counter() - self._start, step, words, last)
        self._shown = (accuracy if shown else math.nan,)  # NaN differs from every accuracy

    def say(self, text: str | None) -> None:
        """Print `text`, if there is one, unless quiet or not the coordinator."""
        if text is not None and self._file is not None and not self._quiet:
            self._progress.end_bar()
            write_line(text)


def staleness_summary(histogram: Sequence[int], total: int, largest: int) -> dict[str, Any]:
    """Return a summary of staleness counts.

    Args:
        histogram: Updates with staleness 0, 1, ...; the last bin counts everything above.
        total: Sum of the staleness of all updates.
        largest: Largest staleness.

    Returns:
        ``mean``, ``p50``, ``p99``, ``max`` and ``histogram`` (without trailing zeroes).
    """
    counts = np.asarray(histogram, np.int64)
    n = int(counts.sum())
    cumulative = np.cumsum(counts)
    used = int(np.max(np.nonzero(counts)[0], initial=-1)) + 1
    return {
        "mean": total / n if n else 0.0,
        "p50": int(np.searchsorted(cumulative, 0.50 * n)) if n else 0,
        "p99": int(np.searchsorted(cumulative, 0.99 * n)) if n else 0,
        "max": largest,
        "histogram": counts[:used].tolist(),
    }


def write_json(path: Path, value: Any) -> None:
    """Write `value` to `path` atomically."""
    write_whole(path, json.dumps(finite(value), indent=2) + "\n")


def role_table(
    hosts: Sequence[str], node_of: Sequence[int], names: Sequence[str], owned: Sequence[int]
) -> str:
    """Return the table of rank, node, host, role and bytes owned, one line a rank."""
    lines = ["rank  node  host              role        owned"]
    for rank, (host, node, name, size) in enumerate(zip(hosts, node_of, names, owned, strict=True)):
        shown = human_bytes(size) if size else "-"
        lines.append(f"{rank:4d}  {node:4d}  {host[:16]:16s}  {name:10s}  {shown}")
    return "\n".join(lines)
