"""Completeness of a run: marker, checkpoints, data and pushes."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

from mpips.checkpoint.files import committed, folder_step
from mpips.checkpoint.reader import Checkpoint, open_checkpoint
from mpips.checkpoint.run_folder import CONFIG, DONE, SUMMARY
from mpips.config import Config
from mpips.config.jobfile import from_toml, read_toml, resolve
from mpips.config.names import SERVED
from mpips.errors import UserError

NEEDED: dict[str, Any] = {  # required fields of a summary, with their types
    **dict.fromkeys(("global_step", "samples", "pushes_sent", "pushes_applied"), int),
    "stop_reason": str,
    "resumed_from": str | None,
}


def check_ledger(out: Path) -> list[str]:
    """Check that a run is complete, without reading any array.

    A complete run has the file ``DONE``, a summary, and a last checkpoint of the same moment. All
    of its data was assigned to workers, and all pushes were applied.

    Returns:
        One line for each problem; empty for a complete run.
    """
    if not (out / DONE).is_file():
        return [f"no {DONE}: the run has not finished, or this is not the folder of a run"]
    newest = _newest(out)
    if newest is None:
        return ["no checkpoint whose index can be read"]
    try:
        summary = json.loads((out / SUMMARY).read_text())
    except (OSError, ValueError) as problem:
        return [f"{SUMMARY}: {problem}"]
    if not isinstance(summary, dict):
        return [f"{SUMMARY}: {type(summary).__name__}, expected an object"]
    bad = [name for name, kind in NEEDED.items() if not isinstance(summary.get(name, ...), kind)]
    if bad:
        return [f"{SUMMARY}: no sound {', '.join(bad)}: it was edited, or is of another version"]
    return [
        f"{name} {got}, expected {wanted}: {meaning}"
        for name, got, wanted, meaning in _claims(summary, newest, _asked(out, newest))
        if got != wanted
    ]


def _newest(out: Path) -> Checkpoint | None:
    for path in reversed(committed(out)):
        with contextlib.suppress(UserError):  # `verify` reports this problem
            return open_checkpoint(path)
    return None


def _asked(out: Path, newest: Checkpoint) -> Config:
    """Return the last job's options; the checkpoint has others if the job had nothing to save."""
    with contextlib.suppress(UserError):
        return resolve({}, saved=read_toml(out / CONFIG))
    return from_toml(newest.config)


Claim: TypeAlias = tuple[str, Any, Any, str]
"""Name of a value, its actual and its expected value, and the meaning of a difference."""


def _claims(summary: dict[str, Any], newest: Checkpoint, asked: Config) -> Iterator[Claim]:
    """Yield the conditions on a run's summary, its last checkpoint and its configurations."""
    state, config, step = newest.state, from_toml(newest.config), summary["global_step"]
    allocator = state["allocator"]
    other = f"{SUMMARY} and the last checkpoint are of different moments of the run"
    yield "global_step", step, newest.step, other
    yield "samples", summary["samples"], state["samples"], other
    if config.mode in SERVED:
        merged = state.get("merged", 0)  # by rounds, of earlier jobs in other modes
        meaning = "the workers' steps do not add up to the updates of the servers"
        yield "sum of the clocks", sum(allocator["clocks"]), newest.step + merged, meaning
    if summary["stop_reason"] == "epochs":
        end = [asked.epochs, 0]  # the job before may have assigned batches of later epochs
        pending = [batch for batch in allocator["pending"] if batch[:2] < end]
        missing = "the parameters lack the gradients of these batches"
        yield "batches that were not applied", pending, [], missing
        early = "the last checkpoint is from before the end of the last epoch"
        yield "epoch and position", min(allocator["cursor"], end), end, early
        counted = "samples were left out, or counted twice"
        epoch, position = max(allocator["cursor"], end)
        left = sum(last - first for e, first, last in allocator["pending"] if e >= asked.epochs)
        n = epoch * state["n_train"] + position - left
        yield "samples of all epochs", state["samples"], n, counted
    if summary["stop_reason"] == "steps":
        meaning = "not every worker has done all of its steps, and no more"
        yield "steps of the workers", sorted(set(allocator["clocks"])), [asked.steps], meaning
    # A summary counts only the pushes since the last start.
    sent, applied = summary["pushes_sent"], summary["pushes_applied"]
    yield "pushes sent", sent, applied, "gradients that workers sent were lost, or applied twice"
    if config.mode in SERVED:
        before = folder_step(Path(summary["resumed_from"])) if summary["resumed_from"] else 0
        meaning = "the last start made another number of updates than gradients were applied"
        yield "pushes applied", applied, step - (before or 0), meaning
