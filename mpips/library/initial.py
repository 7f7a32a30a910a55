"""Initial parameters of a run: given values, and changes by the program."""

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
    """Description of an array that a worker's program has changed before the loop.

    Attributes:
        shape: Shape of the array.
        dtype: Its NumPy dtype, as a string.
        mark: Its checksum; None if each worker keeps its own values.
    """

    shape: tuple[int, ...]
    dtype: str
    mark: int | None


def check_sum(array: np.ndarray) -> int:
    """Return a checksum of an array, which shows whether its values have changed."""
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view("u1").data)


def taken(
    given: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], needed: Collection[str]
) -> dict[str, str]:
    """Return the key of each array of a model among given arrays.

    Args:
        given: Arrays or tensors by key, such as a state dict: ``w`` or ``params/w``.
        shapes: Shapes of the model's arrays, by name.
        needed: Names of the arrays that must be given.

    Returns:
        Keys by name; without the arrays that are neither given nor needed.

    Raises:
        UserError: If a needed array is missing, or an array has another shape.
    """
    keys = {}
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
        keys[name] = key
    return keys


def share_changes(start: "Start") -> list[str]:
    """Give every rank the initial parameters as the workers' programs have changed them.

    Args:
        start: The run, before its loop.

    Returns:
        Names of the changed parameters.

    Raises:
        CollectiveError: If workers have made different changes, on every rank.

    Collective: yes. Blocks: until the values have arrived.
    """
    program = start.program

    def changes() -> dict[str, Change] | None:
        return program.changes() if start.works else None

    changes_by_rank = gather_all(start.comm, raise_on_all(start.comm, changes))
    of_workers = {rank: mine for rank, mine in enumerate(changes_by_rank) if mine is not None}
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
    """Return the notes of a run about its initial parameters.

    Args:
        program: The program, with the notes of a new run.
        changed: Names of the parameters that the program has changed before its loop.
        resumed: Whether the run is resumed, so that its own parameters replace the program's.
    """
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
