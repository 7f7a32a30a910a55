"""Initial parameters of a run: given, or changed in place."""

import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpips.checkpoint.exchange import PARAMS
from mpips.errors import UserError, nearest
from mpips.mpi.collective_errors import raise_on_all
from mpips.mpi.collectives import broadcast_polled, gather_all

if TYPE_CHECKING:
    from mpips.library.program import Program
    from mpips.library.start import Start


class Change(NamedTuple):
    """An array that a program has changed on a worker.

    Attributes:
        shape: Its shape.
        dtype: Its NumPy dtype.
        mark: Its check sum; None for what each worker has of its own.
    """

    shape: tuple[int, ...]
    dtype: str
    mark: int | None


def check_sum(array: np.ndarray) -> int:
    """Return a number that shows a change of an array."""
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view("u1").data)


def taken(
    given: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], needed: Collection[str]
) -> dict[str, str]:
    """Return under which name each array of a model stands among given ones.

    Args:
        given: Arrays or tensors by name, such as a state dict: ``w`` or ``params/w``.
        shapes: Of the model's arrays, by name.
        needed: Names of those that have to be there.

    Raises:
        UserError: If one is missing or of another shape.
    """
    found = {}
    for name, shape in shapes.items():
        key = next((key for key in (name, f"{PARAMS}{name}") if key in given), None)
        if key is None and name in needed:
            expected = "an array for each parameter of the model"
            raise UserError(f"init_from without {name!r}", expected, nearest(name, map(str, given)))
        if key is None:
            continue
        if tuple(np.shape(given[key])) != tuple(shape):
            got = f"init_from with {key!r} of shape {tuple(np.shape(given[key]))}"
            raise UserError(got, f"{tuple(shape)}, as in the model")
        found[name] = key
    return found


def share_changes(start: "Start") -> list[str]:
    """Have every rank begin with what the workers' programs have made of the parameters.

    Args:
        start: The run, before its loop.

    Returns:
        Names of the parameters that were changed.

    Raises:
        CollectiveError: If the workers have not all made the same of them, on every rank.

    Collective: yes. Blocks: until they are here.
    """
    program = start.program

    def changes() -> dict[str, Change] | None:
        return program.changes() if start.works else None

    found = gather_all(start.comm, raise_on_all(start.comm, changes))
    of_workers = {rank: mine for rank, mine in enumerate(found) if mine is not None}
    raise_on_all(start.comm, lambda: _check_alike(of_workers))
    root, changed = next(iter(of_workers.items()))
    for name, (shape, dtype, mark) in changed.items():
        array = np.empty(shape, dtype)
        if start.comm.rank == root:
            array[...] = program.array(name)
        flat = array.reshape(-1).view("u1")
        broadcast_polled(start.comm, flat, root, start.ranks.wait_request)
        if mark is not None or not start.works:
            program.take(name, array)
    return [name for name in changed if name in program.layout.names]


def notes_of(program: "Program", changed: Sequence[str], resumed: bool) -> list[str]:
    """Return what a run tells of initial parameters, some of which its program has changed."""
    if not resumed:
        return program.notes
    if not changed:
        return []
    what = repr(changed[0]) + (f" and {len(changed) - 1} more" if changed[1:] else "")
    return [f"the run goes on with its own parameters, not with the program's {what}"]


def _check_alike(of_workers: Mapping[int, Mapping[str, Change]]) -> None:
    (first, expected), *others = of_workers.items()
    for rank, mine in others:
        for name in sorted({*mine, *expected}):
            here, there = mine.get(name), expected.get(name)
            if here == there or None in {change.mark for change in (here, there) if change}:
                continue
            got = f"{name!r} that rank {rank} has changed before the loop"
            if here is None:
                got = f"{name!r} that rank {rank} has not changed before the loop"
            remedy = "load the same weights on every worker, or in model= or params="
            raise UserError(got, f"the same on every worker, as rank {first} has it", remedy)
