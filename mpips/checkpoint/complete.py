"""Completeness of a run: marker, checkpoints, data and pushes."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpips.checkpoint.files import INDEX, folder_step, list_checkpoints
from mpips.checkpoint.place import DONE, SUMMARY
from mpips.checkpoint.reader import Checkpoint, open_checkpoint, verify
from mpips.config.jobfile import from_toml
from mpips.config.modes import SERVED
from mpips.errors import UserError

NEEDED: dict[str, Any] = {  # of a summary
    **dict.fromkeys(("global_step", "samples", "pushes_sent", "pushes_applied"), int),
    "stop_reason": str,
    "resumed_from": str | None,
}


def check_run(out: Path) -> list[str]:
    """Return what is wrong with a run that should be complete, a line each.

    Each of its checkpoints is whole, and it passes `check_ledger`.
    """
    if not (out / DONE).is_file():
        return check_ledger(out)
    return [*(text for path in committed(out) for text in verify(path)), *check_ledger(out)]


def check_ledger(out: Path) -> list[str]:
    """Return what is wrong with the end of a run, a line each; reads no array.

    A complete run has its marker and its summary, and its last checkpoint is its end. All of its
    data was assigned to workers, and all pushes were applied.
    """
    if not (out / DONE).is_file():
        return [f"no {DONE}: the run has not finished, or this is not the folder of a run"]
    found = _newest(out)
    if found is None:
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
    return [*_wrong_ledger(summary, found), *_wrong_pushes(summary, found)]


def _newest(out: Path) -> Checkpoint | None:
    for path in reversed(committed(out)):
        with contextlib.suppress(UserError):  # `verify` tells of it
            return open_checkpoint(path)
    return None


def committed(out: Path) -> list[Path]:
    """Return the folders of a run's checkpoints whose index is written, oldest first."""
    return [path for path in list_checkpoints(out) if (path / INDEX).exists()]


def _differing(expected: dict[str, tuple[Any, Any, str]]) -> Iterator[str]:
    """Yield a line for each found value that is not the expected one, with what that means."""
    for name, (got, wanted, meaning) in expected.items():
        if got != wanted:
            yield f"{name} {got}, expected {wanted}: {meaning}"


def _wrong_ledger(summary: dict[str, Any], found: Checkpoint) -> Iterator[str]:
    state, config = found.state, from_toml(found.config)
    handout, n = state["handout"], state["n_train"]
    other = f"{SUMMARY} and the last checkpoint are of different moments of the run"
    expected = {
        "global_step": (summary["global_step"], found.step, other),
        "samples": (summary["samples"], state["samples"], other),
    }
    if config.mode in SERVED:
        meaning = "the workers' steps do not add up to the updates of the servers"
        expected["sum of the clocks"] = sum(handout["clocks"]), found.step, meaning
    if summary["stop_reason"] == "epochs":
        missing = "the parameters lack the gradients of these batches"
        expected["batches that were not applied"] = handout["pending"], [], missing
        early = "the last checkpoint is from before the end of the last epoch"
        expected["epoch and position"] = handout["cursor"], [config.epochs, 0], early
        counted = "samples were left out, or counted twice"
        expected["samples of all epochs"] = state["samples"], config.epochs * n, counted
    if summary["stop_reason"] == "steps":
        steps = sorted(set(handout["clocks"]))
        meaning = "not every worker has done all of its steps, and no more"
        expected["steps of the workers"] = steps, [config.steps], meaning
    yield from _differing(expected)


def _wrong_pushes(summary: dict[str, Any], found: Checkpoint) -> Iterator[str]:
    """Yield what is wrong with the pushes of the last start, which a summary counts."""
    config, before = from_toml(found.config), 0
    if summary["resumed_from"]:
        before = folder_step(Path(summary["resumed_from"])) or 0
    sent, applied = summary["pushes_sent"], summary["pushes_applied"]
    lost = "gradients that the workers sent were lost, or applied twice"
    expected = {"pushes sent": (sent, applied, lost)}
    if config.mode in SERVED:
        meaning = "the last start made another number of updates than gradients were applied"
        expected["pushes applied"] = applied, summary["global_step"] - before, meaning
    yield from _differing(expected)
