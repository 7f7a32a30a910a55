"""Bitwise comparison of a replay with its run.

Errors name the first element that differs.
"""

import struct
from collections.abc import Callable
from functools import partial

import numpy as np

from mpips.checkpoint import Checkpoint
from mpips.errors import Failure, UserError
from mpips.layout import Layout
from mpips.planning.job import Job
from mpips.ps.replay_log import WORDS, line_start, line_sum, words_of
from mpips.ps.shard import Server
from mpips.tables.server import OwnedRows
from mpips.transport.push import Push
from mpips.transport.wire import Packer

REMEDY = "is it the machine, are they the files, libraries and threads, of the run?"


def differing(what: str, replay: object, run: object) -> UserError:
    """Return the error for a value that differs, with exit code 1."""
    return Failure(f"{what} is {replay} in the replay", f"{run} as in the run", REMEDY)


def loss(push: str, replay: float, run: float) -> None:
    """Compare the loss of a push, bit by bit.

    Raises:
        UserError: If the loss differs.
    """
    if struct.pack("d", replay) != struct.pack("d", run):
        raise differing(f"first difference: the loss of {push}", repr(replay), repr(run))


def line(job: Job, k: int, store: Server, push: Push, version: int, run: int, whose: str) -> None:
    """Compare the checksum of a push's cache line with the record; see `mpips.ps.replay_log`.

    Args:
        job: The job.
        k: Number of the server.
        store: The server, after it has applied the push.
        push: The push.
        version: Number of updates, this one included.
        run: The checksum in the record.
        whose: Text that names the push.

    Raises:
        UserError: If the checksum differs.
    """
    params = store.params[:0] if job.config.in_rounds else store.params  # pushes have only rows
    words = words_of(params, push, version)
    replay = line_sum(words, version)
    if replay == run:
        return
    update = f"first difference: update {version} of server {k}, by {whose}: the sum of"
    if not params.size:
        raise differing(f"{update} its gradients of rows", f"{replay:02x}", f"{run:02x}")
    at, size = line_start(words.size, version), store.params.itemsize // words.itemsize
    begin = store.shard.begin + at // size
    end = store.shard.begin + min(at + WORDS, words.size) // size
    where = f"{element(job.layout, begin)} to {element(job.layout, end - 1)}"
    raise differing(f"{update} {where}", f"{replay:02x}", f"{run:02x}")


def shard(job: Job, k: int, store: Server, saved: Checkpoint) -> None:
    """Compare a shard and its slots with a checkpoint, bit by bit.

    Raises:
        UserError: If an element differs; the error names the first one.
    """
    begin, end = store.shard.begin, store.shard.end
    pairs = {"parameters": (store.params, saved.read_params(begin, end))}
    for name, slot in zip(job.slots, store.slots, strict=True):
        pairs[f"slot {name}"] = slot, saved.read_slot(name, begin, end)
    for what, (replay, run) in pairs.items():
        whose = f"{saved.path}: of server {k}'s {what}"
        _compare(whose, replay, run, partial(element, job.layout), begin)


def rows(k: int, owned_rows: OwnedRows, saved: Checkpoint) -> None:
    """Compare a server's rows of tables, and their slots, with a checkpoint, bit by bit.

    Raises:
        UserError: If the checkpoint has other rows, or an element differs.
    """
    for served in owned_rows.tables:
        name, changed = served.table.name, served.changed_rows()
        order = np.argsort(changed.rows)
        numbers, whose = changed.rows[order], f"{saved.path}: of table {name!r}, server {k}'s rows"
        seen = owned = 0
        for piece in saved.read_table(name, served.owned):
            at = np.minimum(np.searchsorted(numbers, piece.rows), max(0, numbers.size - 1))
            common = np.flatnonzero(numbers[at] == piece.rows) if numbers.size else at[:0]
            owned += piece.rows.size
            if not common.size:
                continue
            seen += common.size
            indices = order[at[common]]
            pairs = {"values": (changed.params, piece.params)}
            pairs |= {f"slot {s}": (changed.slots[s], piece.slots[s]) for s in changed.slots}
            for what, (replay, run) in pairs.items():
                named = partial(_row_element, piece.rows[common], replay[0].size)
                _compare(f"{whose}, {what},", replay[indices], run[common], named)
        if seen != numbers.size or owned != numbers.size:
            raise differing(f"{whose}: the number that was changed", numbers.size, owned)


def own(job: Job, worker: int, packer: Packer, saved: Checkpoint) -> None:
    """Compare the state of a worker's codec for a shard with a checkpoint, bit by bit.

    Raises:
        UserError: If an element differs; the error names the first one.
    """
    for name in set(packer.state) & set(saved.worker_names):
        replay, begin = packer.state[name], packer.shard.begin
        run = np.empty_like(replay)
        saved.read_worker(name, worker, run, begin)
        whose = f"{saved.path}: of worker {worker}'s {name}"
        _compare(whose, replay, run, partial(element, job.layout), begin)


def _compare(
    whose: str, replay: np.ndarray, run: np.ndarray, name: Callable[[int], str], begin: int = 0
) -> None:
    """Compare arrays bit by bit; ``name(begin + k)`` is the name of element k."""
    replay, run = np.ascontiguousarray(replay).ravel(), np.ascontiguousarray(run).ravel()
    bits = f"u{replay.itemsize}"
    indices = np.flatnonzero(replay.view(bits) != run.view(bits))
    if indices.size:
        first, count = int(indices[0]), f"{indices.size:,} of {replay.size:,} elements"
        what = f"{whose} {count} differ; the first, {name(begin + first)},"
        raise differing(what, repr(float(replay[first])), repr(float(run[first])))


def _row_element(ids: np.ndarray, width: int, at: int) -> str:
    return f"row {ids[at // width]} at {at % width}"


def element(layout: Layout, at: int) -> str:
    """Return the name and indices of an element of the flat vector, such as ``w1[3, 4]``."""
    shapes = dict(zip(layout.names, layout.shapes, strict=True))
    name, begin = next((n, b) for n, (b, e) in layout.slices().items() if b <= at < e)
    indices = np.unravel_index(at - begin, shapes[name]) if shapes[name] else ()
    return f"{name}[{', '.join(str(int(i)) for i in indices)}]"
