"""A replay beside the run: what differs first, by name."""

import struct

import numpy as np

from mpips.checkpoint import Checkpoint
from mpips.errors import UserError
from mpips.kernels.record_lines import WORDS, line_sum, place_of
from mpips.layout import Layout
from mpips.planning.job import Job
from mpips.ps.shard import Server
from mpips.ps.table_server import TableServer
from mpips.transport.wire import Packer

REMEDY = "is it the machine, are they the files, libraries and threads, of the run?"


def differing(what: str, replay: object, run: object) -> UserError:
    """Return the error for something that differs, with exit code 1."""
    error = UserError(f"{what} is {replay} in the replay", f"{run} as in the run", REMEDY)
    error.code = 1
    return error


def compare_loss(push: str, replay: float, run: float) -> None:
    """Compare the loss of a push, bit by bit.

    Raises:
        UserError: If it differs.
    """
    if struct.pack("d", replay) != struct.pack("d", run):
        raise differing(f"first difference: the loss of {push}", repr(replay), repr(run))


def compare_line(layout: Layout, k: int, store: Server, run: int, push: str) -> None:
    """Compare the line of a shard that was summed after its last update.

    Raises:
        UserError: If it differs.
    """
    words, version = store.params.view(np.uint32), store.version
    found = line_sum(words, version)
    if found == run:
        return
    at, size = place_of(words.size, version), store.params.itemsize // words.itemsize
    begin = store.shard.begin + at // size
    end = store.shard.begin + min(at + WORDS, words.size) // size
    where = f"{element(layout, begin)} to {element(layout, end - 1)}"
    what = f"first difference: update {version} of server {k}, by {push}: the sum of {where}"
    raise differing(what, f"{found:02x}", f"{run:02x}")


def compare_shard(job: Job, k: int, store: Server, saved: Checkpoint) -> None:
    """Compare a shard and its slots with a checkpoint, bit by bit.

    Raises:
        UserError: If an element differs; it says which is the first.
    """
    begin, end = store.shard.begin, store.shard.end
    whose = f"{saved.path}: of server {k}'s parameters"
    _compare(job.layout, begin, whose, store.params, saved.read_params(begin, end))
    for name, slot in zip(job.slots, store.slots, strict=True):
        whose = f"{saved.path}: of server {k}'s slot {name}"
        _compare(job.layout, begin, whose, slot, saved.read_slot(name, begin, end))


def compare_rows(k: int, store: TableServer, saved: Checkpoint) -> None:
    """Compare a server's rows of tables, and their slots, with a checkpoint, bit by bit.

    Raises:
        UserError: If some were changed that are not there, or an element differs.
    """
    for served in store.tables:
        name, found = served.table.name, served.changed_rows()
        order = np.argsort(found.rows)
        mine, whose = found.rows[order], f"{saved.path}: of table {name!r}, server {k}'s rows"
        seen = owned = 0
        for piece in saved.read_table(name):
            at = np.minimum(np.searchsorted(mine, piece.rows), max(0, mine.size - 1))
            here = np.flatnonzero(mine[at] == piece.rows) if mine.size else at[:0]
            owned += served.owned(piece.rows)
            if not here.size:
                continue
            seen += here.size
            places = order[at[here]]
            pairs = {"values": (found.params, piece.params)}
            pairs |= {f"slot {s}": (found.slots[s], piece.slots[s]) for s in found.slots}
            for what, (ours, theirs) in pairs.items():
                _compare_rows(f"{whose}, {what},", piece.rows[here], ours[places], theirs[here])
        if seen != mine.size or owned != mine.size:
            raise differing(f"{whose}: the number that was changed", mine.size, owned)


def _compare_rows(whose: str, ids: np.ndarray, replay: np.ndarray, run: np.ndarray) -> None:
    replay, run = np.ascontiguousarray(replay), np.ascontiguousarray(run)
    bits = f"u{replay.itemsize}"
    differ = replay.view(bits).reshape(len(ids), -1) != run.view(bits).reshape(len(ids), -1)
    if differ.any():
        row, column = np.argwhere(differ)[0].tolist()
        what = f"{whose} {int(differ.any(axis=1).sum()):,} of {len(ids):,} differ; the first, "
        first = f"{what}row {ids[row]} at {column},"
        values = (float(array.reshape(len(ids), -1)[row, column]) for array in (replay, run))
        raise differing(first, *map(repr, values))


def compare_own(job: Job, worker: int, packer: Packer, saved: Checkpoint) -> None:
    """Compare what a worker's codec keeps for a shard with a checkpoint, bit by bit.

    Raises:
        UserError: If an element differs; it says which is the first.
    """
    for name in set(packer.state) & set(saved.worker_names):
        kept, begin = packer.state[name], packer.shard.begin
        run = np.empty_like(kept)
        saved.read_worker(name, worker, run, begin)
        _compare(job.layout, begin, f"{saved.path}: of worker {worker}'s {name}", kept, run)


def _compare(layout: Layout, begin: int, whose: str, replay: np.ndarray, run: np.ndarray) -> None:
    bits = f"u{replay.itemsize}"
    places = np.flatnonzero(replay.view(bits) != run.view(bits))
    if places.size:
        first, count = int(places[0]), f"{places.size:,} of {replay.size:,} elements"
        what = f"{whose} {count} differ; the first, {element(layout, begin + first)},"
        raise differing(what, repr(float(replay[first])), repr(float(run[first])))


def element(layout: Layout, at: int) -> str:
    """Return the name and indices of an element of the flat vector, such as ``w1[3, 4]``."""
    shapes = dict(zip(layout.names, layout.shapes, strict=True))
    name, begin = next((n, b) for n, (b, e) in layout.slices().items() if b <= at < e)
    indices = np.unravel_index(at - begin, shapes[name]) if shapes[name] else ()
    return f"{name}[{', '.join(str(int(i)) for i in indices)}]"
