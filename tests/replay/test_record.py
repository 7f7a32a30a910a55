"""A server's file of a record is read as it was written, and any damage to it is found."""

import json
import resource
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from mpips.errors import UserError
from mpips.layout import Layout
from mpips.ps import replay_log
from mpips.ps.replay_log import PIECE, Recorder, line_start, line_sum
from mpips.tools.replay.compare import element
from mpips.tools.replay.server_file import read
from mpips.transport.push import Push

PARAMS = np.arange(100, dtype="f4")
HEAD = replay_log.HEAD.size + replay_log.SUM.size


def recorder(path: Path, server: int = 0, workers: int = 3, tables: Sequence[str] = ()) -> Recorder:
    about = {"format": replay_log.FORMAT, "part": 3, "server": server, "tables": tables}
    about |= {"workers": list(range(workers)), "samples": [6000, 0]}
    return Recorder(path, about, PARAMS, whole=server == 0)


def note(kept: Recorder, k: int, workers: int = 3, stale: int = 0) -> None:
    push = Push(k % workers, k, (1, 7 * k, 7 * k + 7), 7, k / 3, 0, PARAMS)
    kept.note(push, k - 1, stale)


def line_dtype_of(data: bytes) -> np.dtype:
    about = json.loads(data.partition(b"\n")[0])
    return replay_log.line_dtype(about["server"] == 0, len(about["workers"]))


def pieces_of(data: bytes) -> list[int]:
    """Return where the pieces of a file of a record begin; the first seals the first line."""
    found, at, width = list[int](), data.index(b"\n") + 1, line_dtype_of(data).itemsize
    while at < len(data):
        found.append(at)
        count, reads, _ = replay_log.HEAD.unpack_from(data, at)
        at += HEAD + count * width + reads
    return found


@pytest.mark.parametrize(
    ("servers", "workers", "tables"), [(2, 3, ()), (8, 300, ()), (8, 200, ("t",))]
)
def test_a_record_is_read_as_it_was_written(
    servers: int, workers: int, tables: tuple[str, ...], tmp_path: Path
) -> None:
    """Of 8 servers together a push takes 64 bytes; one of great staleness takes a line more."""
    count, size = 10 * PIECE + 5, 0
    stale = [1 << 16, (1 << 16) - 1, (1 << 32) - 1, *range(3, count)]
    whose, words = [k % workers for k in range(count)], PARAMS.view("u4")
    expected = {"worker": whose, "stale": stale, "line": [line_sum(words, k) for k in range(count)]}
    batches = {"epoch": [1] * count, "begin": [7 * k for k in range(count)], "samples": [7] * count}
    batches |= {"loss": [k / 3 for k in range(count)]}
    for server in range(servers):
        path = tmp_path / f"server-{server}"
        kept = recorder(path, server, workers, tables)
        begun = path.stat().st_size
        for k, old in enumerate(stale):
            kept.note_read(whose[k])
            note(kept, k, workers, old)
        kept.close()
        size += path.stat().st_size - begun
        found = read(path)
        assert found is not None
        assert found.damage is None
        for name, values in (expected if server else expected | batches).items():
            assert found.records[name].tolist() == values, name
        assert found.reads.tolist() == [*zip(whose, range(count), strict=True)] * bool(tables)
    assert size / count <= 64


def test_any_damage_to_a_file_is_found(tmp_path: Path) -> None:
    """Bits, and pieces that are left out, there twice or zero; a file that was cut is sound."""
    path = tmp_path / "file"
    kept = recorder(path)
    for k in range(2 * PIECE + 5):
        note(kept, k)
    kept.close()
    whole, records = path.read_bytes(), read(path).records
    begins = [*pieces_of(whole), len(whole)]

    def damage(data: bytes) -> UserError:
        path.write_bytes(data)
        try:
            found = read(path).damage
        except UserError as error:
            found = error
        assert found is not None
        return found

    for bit in range(0, 8 * len(whole), 5):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        damage(flipped)
    for at, end in pairwise(begins):
        assert "begins a piece whose sum is wrong" in str(damage(whole[:end] + whole[at:]))
        damage(whole[:at] + bytes(end - at) + whole[end:])
        damage(whole[: at + HEAD + 1] + bytes(len(whole) - at - HEAD - 1))
        if end < len(whole):
            damage(whole[:at] + whole[end:])
    for data in (b"none\n" + whole, whole.replace(b"\n", b"\v", 1)):
        error = damage(data)
        assert "without a sound first line, expected the record of a server" in str(error)
        assert error.code == 1
    error = damage(whole.replace(b'"format": 6', b'"format": 5', 1))
    assert "format 5, expected 6" in str(error)
    assert error.code == 2
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        found = read(path)
        if cut < begins[1]:
            assert found is None
            continue
        assert (found.damage, found.stopped) == (None, False)
        ends = [end for end in begins[1:-1] if end <= cut]
        assert found.records.tolist() == records[: PIECE * (len(ends) - 1)].tolist()


def test_a_full_disk_ends_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The end of the file says so, if there is room; each of its bits is in a sum."""
    path, limit = tmp_path / "file", resource.RLIMIT_FSIZE
    limits, kept = resource.getrlimit(limit), recorder(path)
    assert kept.part == 3
    try:
        resource.setrlimit(limit, (path.stat().st_size + 5 * PIECE * 24, limits[1]))
        for k in range(9 * PIECE):
            note(kept, k)
    finally:
        resource.setrlimit(limit, limits)
    kept.close()
    assert kept.part == 0
    assert "ends here: No space left on device" in capsys.readouterr().err
    found, whole = read(path), path.read_bytes()
    assert (len(found.records), found.damage, found.stopped) == (4 * PIECE, None, True)
    for bit in range(8 * HEAD):
        flipped = bytearray(whole)
        flipped[len(whole) - HEAD + bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        found = read(path)
        assert found.damage is not None
        assert not found.stopped
    for cut in range(1, HEAD + 1):
        path.write_bytes(whole[:-cut])
        assert not read(path).stopped
    (tmp_path / "full").symlink_to("/dev/full")
    recorder(tmp_path / "full").close()
    assert "no record" in capsys.readouterr().err


def test_reads_of_rows_are_kept() -> None:
    ages, over = [[], [0], [1, 0], [125, 126, 127, 128, 70_000, 0], [126], []], {0: 1, 3: 2, 5: 300}
    codes = b"".join(replay_log.encoded(each, over.get(k)) for k, each in enumerate(ages))
    found, evicted = replay_log.decoded(codes, np.arange(len(ages)))
    assert found.tolist() == [(k, k - age) for k, each in enumerate(ages) for age in each]
    assert evicted == over
    assert replay_log.encoded([3]) == b"\3"


def test_every_line_of_a_shard_is_summed_and_every_element_has_a_name() -> None:
    for size in (1, 16, 25, 16 * 57):
        begins = {line_start(size, version) for version in range(1000)}
        assert begins == set(range(0, size, 16))
    words = np.arange(25, dtype="u4")
    before = line_sum(words, 1)
    for at in range(line_start(25, 1), 25):
        words[at] ^= 1 << at
        assert line_sum(words, 1) != before
        words[at] ^= 1 << at
    layout = Layout.of({"w": (3, 4), "b": (4,), "c": ()})
    assert [element(layout, at) for at in (0, 7, 12, 16)] == ["w[0, 0]", "w[1, 3]", "b[0]", "c[]"]
