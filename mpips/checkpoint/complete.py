"""Completeness of a run: its marker, its checkpoints, its data and its pushes add up."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpips.checkpoint.files import INDEX, folder_step, list_checkpoints
from mpips.checkpoint.place import DONE, SUMMARY
from mpips.checkpoint.reader import Checkpoint, newest_whole, verify
from mpips.config.jobfile import from_toml
from mpips.config.modes import SERVED


def check_run(out: Path) -> list[str]:
    """Return what is wrong with a run that should be complete, a line each.

    A complete run has its marker and its summary. Each of its checkpoints is whole, and the last
    one is its end. All of its data was assigned to workers, and all pushes were applied.
    """
    if not (out / DONE).is_file():
        return ["no DONE"]
    wrong = [text for path in committed(out) for text in verify(path)]
    found, _ = newest_whole(out)
    if found is None:
        return [*wrong, "no whole checkpoint"]
    try:
        summary = json.loads((out / SUMMARY).read_text())
    except (OSError, ValueError) as problem:
        return [*wrong, f"{SUMMARY}: {problem}"]
    return [*wrong, *_wrong_ledger(summary, found), *_wrong_pushes(summary, found)]


def committed(out: Path) -> list[Path]:
    """Return the folders of a run's checkpoints whose index is written, oldest first."""
    return [path for path in list_checkpoints(out) if (path / INDEX).exists()]


def _differing(expected: dict[str, tuple[Any, Any]]) -> Iterator[str]:
    """Yield a line for each pair of a found and an expected value that differ, by name."""
    for name, (got, wanted) in expected.items():
        if got != wanted:
            yield f"{name} {got}, expected {wanted}"


def _wrong_ledger(summary: dict[str, Any], found: Checkpoint) -> Iterator[str]:
    state, config = found.state, from_toml(found.config)
    handout, n = state["handout"], state["n_train"]
    expected = {
        "global_step": (summary["global_step"], found.step),
        "samples": (summary["samples"], state["samples"]),
    }
    if config.mode in SERVED:
        expected["sum of the clocks"] = sum(handout["clocks"]), found.step
    if summary["stop_reason"] == "epochs":
        expected["batches that were not applied"] = handout["pending"], []
        expected["epoch and position"] = handout["cursor"], [config.epochs, 0]
        expected["samples of all epochs"] = state["samples"], config.epochs * n
    if summary["stop_reason"] == "steps":
        expected["steps of the workers"] = set(handout["clocks"]), {config.steps}
    yield from _differing(expected)


def _wrong_pushes(summary: dict[str, Any], found: Checkpoint) -> Iterator[str]:
    """Yield what is wrong with the pushes of the last start, which a summary counts."""
    config, before = from_toml(found.config), 0
    if summary["resumed_from"]:
        before = folder_step(Path(summary["resumed_from"])) or 0
    sent, applied = summary["pushes_sent"], summary["pushes_applied"]
    expected = {"pushes sent": (sent, applied)}
    if config.mode in SERVED:
        expected["pushes applied"] = applied, summary["global_step"] - before
    yield from _differing(expected)
