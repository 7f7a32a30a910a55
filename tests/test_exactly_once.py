"""Every batch is applied exactly once, whatever happens: proved by counting."""

import json
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from launch import Running, train
from runs import (
    SAVED,
    assert_counts,
    counting,
    final,
    newest,
    samples_file,
    several,
    summary,
    wait_until_started,
)

N = 230  # not divisible by any batch size below


def assert_accounts(out: Path, pushes: int) -> None:
    """Check the summary of an uninterrupted run of `pushes` pushes."""
    s, staleness = summary(out), summary(out)["staleness"]
    assert s["pushes_sent"] == s["pushes_applied"] == s["global_step"] == pushes
    applied = [server["applied"] for server in s["per_server"] if server["bytes"]]
    assert set(applied) == {pushes}
    assert sum(staleness["histogram"]) == sum(applied)
    assert staleness["mean"] <= 2 * s["workers"] - 1
    assert sum(s["steps"]) == sum(w["steps"] for w in s["per_worker"]) == pushes


PLAIN = {
    "smallest world": (2, "--servers 1 --batch-size 32"),
    "several servers": (5, "--servers 3 --batch-size 7"),
    "a single worker": (4, "--servers 3 --batch-size 100"),
    "default servers": (8, "--batch-size 16"),
    "nodes of one": (5, "--servers 2 --batch-size 16 --node-size 1"),
    "nodes of two": (6, "--servers 3 --batch-size 16 --node-size 2"),
    "unequal nodes": (5, "--servers 2 --batch-size 9 --node-size 2"),
    "nodes of servers only": (6, "--server-ranks 0,1 --batch-size 16 --node-size 2"),
    "private windows": (4, "--servers 2 --batch-size 16 --window private"),
    "consistent reads": (6, "--servers 2 --batch-size 8 --read consistent"),
    "consistent reads from afar": (5, "--servers 2 --batch-size 16 --read consistent --node-size 2"),
    "one batch": (8, "--servers 2 --batch-size 230"),
    "batches of one": (4, "--servers 1 --batch-size 1"),
    "more servers than cache lines": (6, "--servers 3 --batch-size 2"),
    "far servers without a line": (6, "--servers 3 --batch-size 2 --node-size 1"),
    "no shuffling": (4, "--servers 2 --batch-size 50 --no-shuffle"),
    "stalling checkpoints": (5, "--servers 2 --batch-size 8 --snapshot stall"),
}  # fmt: skip
TINY = ("more servers than cache lines", "far servers without a line")
EPOCHS = 3


def test_plain_runs(tmp_path: Path) -> None:
    """Counts are exact on many worlds, with checkpoints coming thick and fast."""
    many, few = samples_file(tmp_path, N), samples_file(tmp_path, 6)
    jobs = []
    for k, (name, (ranks, options)) in enumerate(PLAIN.items()):
        data = [*counting(few), "--hidden", "1"] if name in TINY else counting(many)
        every = ["--checkpoint-every", "4steps", "--keep", "100"]
        out = ["--out", str(tmp_path / f"run{k}"), "--quiet", "--epochs", str(EPOCHS)]
        jobs.append((ranks, [*data, *options.split(), *every, *out]))
    assert several(jobs, tmp_path, 240) == [0] * len(jobs)
    for k, (name, (_, options)) in enumerate(PLAIN.items()):
        n, out = 6 if name in TINY else N, tmp_path / f"run{k}"
        batch_size = int(options.split("--batch-size ")[1].split()[0]) if "batch" in options else 32
        assert_counts(final(out), n, EPOCHS)
        assert_accounts(out, EPOCHS * -(-n // batch_size))
