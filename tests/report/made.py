"""Runs that no job has made: what a folder holds, written by hand."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mpips.config import Config
from mpips.session.folder import save_config

SUMMARY = {
    "mode": "async", "world": 4, "servers": 1, "workers": 3, "global_step": 40, "epochs": 4.0,
    "samples": 400, "wall_s": 12.0, "train_s": 8.0, "samples_per_s": 50.0, "loss": 0.25,
    "eval_loss": 0.5, "accuracy": 0.75, "stop_reason": "epochs", "command": "python -m mpips.train",
    "staleness": {"mean": 1.5, "p50": 1, "p99": 4, "max": 4, "histogram": [10, 20, 5, 3, 2]},
    "bytes_pulled": 4000, "bytes_pushed": 3000, "bytes_sent": 0, "bytes_received": 0,
    "nodes": [{"host": "vm", "ranks": [0, 1, 2, 3]}],
    "per_worker": [
        {"rank": k, "steps": 13, "samples": 130, "compute_s": 2.0 + k, "pull_s": 0.5,
         "push_s": 0.25, "wait_s": 1.0, "bytes_sent": 0, "bytes_received": 0}
        for k in (1, 2, 3)
    ],
    "per_server": [
        {"rank": 0, "bytes": 800, "applied": 40, "busy_s": 2.0, "pushes_dropped": 0,
         "staleness_mean": 1.5}
    ],
}  # fmt: skip


def row(kind: str, time_s: float, step: int | None, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "time_s": time_s, "step": step, **fields}


def job(
    begin: int = 0, end: int = 4, scale: float = 1.0, resumed: bool = False
) -> list[dict[str, Any]]:
    """Return the lines of a job of 10 updates, 100 samples and 2 seconds an epoch."""
    found = [row("start", 5.0, 10 * begin, mode="async", world=4, resumed=resumed, data=[])]
    for k in range(begin + 1, end + 1):
        at, loss = 5.0 + 2 * (k - begin), scale / k
        train = {"epoch": float(k), "loss": loss, "samples": 100 * k, "samples_per_s": 50.0}
        found.append(row("train", at, 10 * k, **train, staleness=k / 2))
        held_out = {"epoch": float(k), "loss": 2 * loss, "accuracy": 1 - loss / 8}
        found.append(row("eval", at + 0.5, 10 * k, **held_out))
    return found


def end(time_s: float, step: int, reason: str = "epochs") -> list[dict[str, Any]]:
    """Return the lines of the end of a job that saved."""
    return [row("checkpoint", time_s, step), row("end", time_s, step, reason=reason, eval_loss=0.5)]


def make(
    out: Path,
    lines: Iterable[Mapping[str, Any]] = (),
    summary: Mapping[str, Any] | None = SUMMARY,
    done: bool = True,
    **options: Any,
) -> Path:
    out.mkdir(parents=True)
    save_config(out, Config(**options))
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (out / "metrics.jsonl").write_text(text)
    if summary is not None:
        (out / "summary.json").write_text(json.dumps(summary))
    if done:
        (out / "DONE").write_text("epochs\n")
    return out


def whole(out: Path, scale: float = 1.0, **options: Any) -> Path:
    """Make a run that has ended, whose losses are so many times those of others."""
    came = {**SUMMARY, "loss": scale / 4, "eval_loss": scale / 2, "accuracy": 1 - scale / 32}
    return make(out, [*job(scale=scale), *end(14.0, 40)], came, **options)
