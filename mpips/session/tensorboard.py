"""TensorBoard event files with the figures of ``metrics.jsonl``.

Each job of a run adds a file to ``<out>/tensorboard``. Its first event lets TensorBoard drop later
steps of an earlier job: steps that were not saved are computed again.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mpips import extras
from mpips.checkpoint.run_folder import TENSORBOARD
from mpips.errors import complain
from mpips.session.metrics import Listener

PACKAGE = ("tensorboardX", "tensorboard", "writes event files")
BESIDE = ("step", "worker", "epoch")  # fields of a line that position its figures


def check() -> None:
    """Check that event files can be written, without importing large packages.

    Raises:
        UserError: If there is no package that writes them.
    """
    extras.find("tensorboardX", *PACKAGE)


class EventFiles:
    """Writes each line of ``metrics.jsonl`` as scalars. Blocks: for the file.

    Args:
        out: Folder of the run.
        step: Update at which this job begins.
        then: Another listener, called with each line, or None.

    If the file cannot be written, a warning is printed once, and the run continues.
    """

    def __init__(self, out: Path, step: int, then: Listener | None = None) -> None:
        self._then, self._step = then, step
        self._proto = extras.load("tensorboardX.proto.event_pb2", *PACKAGE)
        self._summary = extras.load("tensorboardX.proto.summary_pb2", *PACKAGE).Summary
        self._file: Any = None
        self._try(lambda: self._open(out / TENSORBOARD))

    def _open(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        module = extras.load("tensorboardX.event_file_writer", *PACKAGE)
        self._file = module.EventsWriter(str(folder / "events"))
        log = self._proto.SessionLog
        self._write(self._step, session_log=log(status=log.START))

    def __call__(self, kind: str, step: int | None, fields: Mapping[str, Any]) -> None:
        """Write the figures of a line; see `mpips.session.metrics.Log`."""
        self._step = self._step if step is None else step
        worker = f"/worker {fields['worker']}" if "worker" in fields else ""
        values = [
            self._summary.Value(tag=f"{kind}/{name}{worker}", simple_value=float(value))
            for name, value in fields.items()
            if name not in BESIDE and isinstance(value, int | float)
        ]
        if kind in ("train", "eval", "log") and values and self._file is not None:
            self._try(lambda: self._write(self._step, summary=self._summary(value=values)))
        if self._then is not None:
            self._then(kind, step, fields)

    def _write(self, step: int, **fields: Any) -> None:
        self._file.write_event(self._proto.Event(wall_time=time.time(), step=step, **fields))
        self._file.flush()

    def _try(self, write: Callable[[], object]) -> None:
        try:
            write()
        except OSError as problem:
            self._file = None
            complain(f"warning: no more event files for TensorBoard: {problem.strerror}")

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._file is not None:
            self._try(self._file.close)
            self._file = None
