"""The rows of a push as a message: whole, and without the list of the push before."""

import itertools
from typing import Any, cast

import numpy as np
import pytest

from mpips.codecs import Codec, make_codec
from mpips.layout.tables import Table
from mpips.mpi.window import Window
from mpips.optim.row_rules import Sgd
from mpips.planning.tables import JobTable
from mpips.transport import rows as packed_rows
from mpips.transport.rows import RowsPacker, RowsUnpacker, SumsPacker, rows_fields
from mpips.transport.wire import Packing

SERVERS, SERVER, MOST = 3, 1, 6000
TABLES = [
    JobTable("wide", Table(rows=9000, dim=16), Sgd(1.0), 0, MOST, lambda version: 1.0),
    JobTable("thin", Table(rows=40, dim=1), Sgd(1.0), 0, 40, lambda version: 1.0),
]


class Memory:
    """A worker's segment, with the packer of its pushes."""

    def __init__(self, codec: Codec | None = None) -> None:
        fields, own = rows_fields(TABLES, SERVERS, "float32"), cast(Window, self)
        self._fields = {field.name: np.zeros(field.shape, field.dtype) for field in fields}
        self.packer = RowsPacker(own, 0, TABLES, SERVERS, SERVER, Packing(codec), 0)

    def view(self, rank: int, name: str) -> np.ndarray:
        return self._fields[name]

    def put(self, seq: int, table: str, places: np.ndarray, sums: np.ndarray) -> None:
        """Write what a push has for the server; server 0 has 3 rows before, 2 has 2 behind."""
        starts, all_places, all_sums = (
            self._fields[f"tables/{table}/{name}"][seq % 2] for name in ("starts", "places", "sums")
        )
        n = len(places)
        starts[:] = 0, 3, 3 + n, 5 + n
        all_places[3 : 3 + n], all_sums[3 : 3 + n] = places, sums


def unpacker_of(codec: Codec | None = None) -> RowsUnpacker:
    return RowsUnpacker(TABLES, SERVERS, SERVER, "float32", codec)


def arrived(message: np.ndarray, unpacker: RowsUnpacker, worker: int = 0) -> tuple[Any, int]:
    """Return what arrives of a push, and the bytes that it took."""
    place = unpacker.place()
    place[: len(message)] = message
    place[len(message) :] = 255
    return unpacker.unpack(worker, place), len(message)


@pytest.mark.parametrize("codec", ["none", "fp16", "bf16", "int8", "int4", "onebit"])
def test_rows_arrive(codec: str) -> None:
    """Of two workers, each with lists of its own, also behind a push without rows of a table."""
    made, rng, took = make_codec(codec), np.random.default_rng(1), list[int]()
    memories, unpacker = [Memory(made), Memory(made)], unpacker_of(made)
    wide, thin = np.sort(rng.choice(2999, 1500, replace=False)), np.array([0, 7, 11])
    pushes = [(wide, thin), (wide, thin), (wide[:40], thin[:0]), (wide[:40], thin)]
    for seq, worker in itertools.product(range(1, 5), range(2)):
        lists = [places + worker for places in pushes[seq - 1]]
        # Numbers that all formats write as they are: of a row, all are as large.
        signs = [rng.choice([-1, 1], (len(p), d)) for p, d in zip(lists, (16, 1), strict=True)]
        sums = [each * rng.integers(1, 64, (len(each), 1)) for each in signs]
        for table, places, values in zip(TABLES, lists, sums, strict=True):
            memories[worker].put(seq, table.name, places, values)
        found, nbytes = arrived(memories[worker].packer.pack(seq), unpacker, worker)
        took += [nbytes] * (worker == 0)
        for section, places, values in zip(found, lists, sums, strict=True):
            np.testing.assert_array_equal(section.places, places)
            np.testing.assert_array_equal(section.sums, values)
            assert section.sums.dtype == np.float32
            assert section.sums.shape == values.shape
    each = {"fp16": 32, "bf16": 32, "int8": 4 + 16, "int4": 4 + 8}.get(codec, 64)
    numbers = 1500 * each
    assert took[1] == 32 + numbers + 16, "no list, and 3 numbers of 4 bytes to the next word"
    assert took[1] + 1500 <= took[0] <= took[1] + 2 * 1500 + 16
    assert took[2] <= 32 + 2 * 40 + 8 + 40 * 16 * 4, "a small message is not packed"


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("dim", [1, 17, 32])
def test_rows_are_rounded_each_by_its_own_size(name: str, dim: int) -> None:
    """Without a bias, as others in each push; again the same ones in a replay of that push."""
    levels, rng = {"int8": 127, "int4": 7}[name], np.random.default_rng(dim)
    size = 10.0 ** rng.integers(-6, 6, (1 << 15, 1))
    rows = (rng.standard_normal((1 << 15, dim)) * size).astype("f4")
    packing = Packing(make_codec(name), seed=3, before=10)
    packer, total, pushes = SumsPacker(packing, dim, 2, 1, 0), np.zeros(rows.shape), 40
    together = 16 if dim == 1 else 1  # rows that have a size in common
    if dim == 17 and name == "int4":
        together = 2  # two levels are a byte
    first = np.arange(0, len(rows), together)
    largest = np.repeat(np.maximum.reduceat(np.abs(rows).max(1), first), together)
    step = largest[: len(rows), None] / levels
    for seq in range(1, pushes + 1):
        came = packer.arrived(rows, seq)
        assert (np.abs(came - rows) <= step * (1 + 1e-5)).all()
        total += came
    np.testing.assert_array_equal(SumsPacker(packing, dim, 2, 1, 0).arrived(rows, pushes), came)
    error = ((total / pushes - rows) / step).mean(1)
    assert abs(error.mean()) < 5 * 0.5 / np.sqrt(pushes * rows.size)
    for others in ((3, 1, 0), (2, 0, 0), (2, 1, 1)):
        assert (SumsPacker(packing, dim, *others).arrived(rows, pushes) != came).any()


def test_the_largest_push_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows of the server in one push, which takes several transfers."""
    monkeypatch.setattr(packed_rows, "TRANSFER_MAX_BYTES", 100_000)
    monkeypatch.setattr(packed_rows, "PIECE_BYTES", 5_000)
    monkeypatch.setattr(packed_rows, "MOST_PIECES", 20)
    memory, unpacker = Memory(), unpacker_of()
    packer = memory.packer
    memory.put(1, "wide", np.arange(3000), np.ones((3000, 16)))
    memory.put(1, "thin", np.arange(13), np.ones((13, 1)))
    message = packer.pack(1)
    pieces = packed_rows.pieces_of(message, packer.most)
    transfers = -(-unpacker.place().size // 100_000)
    assert len(pieces) == transfers > 1
    (wide, thin), _ = arrived(message, unpacker)
    for found in (pieces, packed_rows.pieces_in_turn(message)):
        np.testing.assert_array_equal(np.concatenate(found), message)
    assert len(found) == 20
    assert wide.sums.sum() == 3000 * 16
    np.testing.assert_array_equal(thin.places, np.arange(13))
    memory.put(2, "wide", np.zeros(0, "i8"), np.ones((0, 16)))
    memory.put(2, "thin", np.zeros(0, "i8"), np.ones((0, 1)))
    pieces = packed_rows.pieces_of(packer.pack(2), packer.most)
    assert [len(piece) for piece in pieces] == [32] + [0] * (transfers - 1)
    nbytes, (piece,) = packer.pack_in_turn(2)
    assert nbytes == len(piece) == 32
