"""Compatibility of a checkpoint with the run that reads it.

Messages:
    epochs 3 on resume: ``--epochs`` is a total. Leave it out, or give more.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from mpips.checkpoint.reader import Checkpoint
from mpips.config import Config
from mpips.errors import UserError
from mpips.layout import Layout

Tables: TypeAlias = Mapping[str, Mapping[str, Any]]  # what is told of each


def check_samples(checkpoint: Checkpoint, n_train: int) -> None:
    """Check that a run that is resumed finds as many samples as it had.

    Raises:
        UserError: If not: positions in the order of the samples would name others.
    """
    saved = checkpoint.state["n_train"]
    if saved != n_train:
        remedy = "give the data of that run, or begin a new run with --init-from"
        got = f"{n_train} training samples on resume"
        raise UserError(got, f"{saved} as in the saved run", remedy)


def check_length(done: float, config: Config) -> None:
    """Check that a run that is resumed is not asked to be shorter than it is.

    Args:
        done: Epochs that are over.
        config: The job.

    Raises:
        UserError: If it is: what was assigned would be trained on, and the run called done.
    """
    if not (config.steps or config.eval_only) and done > config.epochs:
        expected = f"at least {math.ceil(done)}: {done:.2f} are over"
        remedy = "leave out --epochs to go on as the run was begun"
        raise UserError(f"epochs {config.epochs} on resume", expected, remedy)


def check_checkpoint(checkpoint: Checkpoint, layout: Layout, dtype: str) -> None:
    """Check that a checkpoint's arrays are those of the model.

    Raises:
        UserError: If a name, a shape or the dtype differs.
    """
    saved = dict(zip(checkpoint.layout.names, checkpoint.layout.shapes, strict=True))
    wanted = dict(zip(layout.names, layout.shapes, strict=True))
    for name in [*wanted, *saved]:
        if saved.get(name) != wanted.get(name):
            got = f"checkpoint {checkpoint.path}: params/{name} of shape {saved.get(name)}"
            remedy = "give the options of the run that saved it"
            raise UserError(got, f"{wanted.get(name)}, as in the model", remedy)
    if checkpoint.dtype != np.dtype(dtype):
        got = f"checkpoint {checkpoint.path} of dtype {checkpoint.dtype}"
        raise UserError(got, f"dtype {dtype}", f"use --dtype {checkpoint.dtype}")


def check_tables(path: Path, saved: Tables, wanted: Tables) -> None:
    """Check that a checkpoint's tables are those of a run that goes on from it.

    Args:
        path: Of the checkpoint.
        saved: What it says of each table: ``rows``, and more.
        wanted: What the run says.

    Raises:
        UserError: If one is missing on either side, has fewer rows than it had, or differs in
            anything else; more rows are no difference, but where ids are hashed.
    """
    remedy = "give the tables of the run that saved it"
    for name in [*saved, *wanted]:
        if name not in wanted or name not in saved:
            sides = [f"the checkpoint {path}", "the run"]
            has, lacks = sides if name in saved else reversed(sides)
            got = f"table {name!r} of {has}, and not of {lacks}"
            raise UserError(got, "the same tables", remedy)
    for name, now in wanted.items():
        for key, value in now.items():
            before, grows = saved[name].get(key), key == "rows" and not now["hashed"]
            if before != value and not (grows and isinstance(before, int) and before <= value):
                shown = "{:,}".format if key == "rows" else str
                expected = "at least " * grows + shown(before)
                got = f"table {name!r} of {key} {shown(value)} on resume"
                why = ", as its ids are hashed" * (key == "rows" and now["hashed"])
                raise UserError(got, f"{expected}, as in {path}{why}", remedy)
