"""Asynchronous runs are made again from their records, to the same bits."""

import contextlib
import json
import os
import random
import re
import resource
import shutil
import signal
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch import python, run, train
from runs import ENDLESS, MODELS, SAVED, Plan, kill_once, newest, shared_out, summary
from supervised import Supervised, counting_words

from mpips.checkpoint import list_checkpoints
from mpips.checkpoint.files import INDEX, folder_step
from mpips.errors import UserError
from mpips.launch import mpirun
from mpips.layout import Layout
from mpips.ps import replay_log
from mpips.ps.replay_log import line_start, line_sum
from mpips.tools import plan
from mpips.tools.replay.compare import element
from mpips.tools.replay.record import checkpoints_of, damages_of, read_parts
from mpips.tools.replay.run import replay
from mpips.tools.replay.server_file import read
from mpips.transport.push import Push

PROGRAMS = Path(__file__).parent / "programs"
RECORDED = ["--record", "--read", "consistent", "--checkpoint-every", "40steps", "--keep", "100"]
SEED, EPOCHS = 21, 6
FEW, MANY = 1, int(os.environ.get("MPIPS_REPLAY_RUNS", "4"))
SOME = (FEW + MANY) // 2  # those before it are MPICH's
DAMAGES = 40  # of each run's record


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """Ignore the SIGUSR1 that models of tests send themselves."""
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def replayed(out: Path, *options: str, code: int | tuple[int, ...] = 0) -> str:
    """Replay a run."""
    with unheard():
        done = python("-m", "mpips", "replay", str(out), *options, cwd=out.parent, code=None)
    text = done.stdout + done.stderr
    assert done.returncode in (code if isinstance(code, tuple) else (code,)), text
    return text


def drawn_run(chance: random.Random) -> list[tuple[int, list[str]]]:
    """Draw the ranks and options of the jobs of a run; all but the last are stopped."""
    large = chance.random() < 0.5  # enough for codecs
    name = chance.choice(("StoppingMLP", "NoisyMLP"))
    model = ["--problem", f"{MODELS}:{name}", "--hidden", "200,150" if large else "24"]
    model += ["--dtype", chance.choice(("float32", "float64")), *RECORDED]
    model += ["--optimizer", chance.choice(("sgd", "momentum", "adam", "adamw", "rmsprop"))]
    model += ["--accumulate", chance.choice("112"), "--seed", str(chance.randrange(100))]
    found, count = [], chance.choice((1, 2, 3))
    for part in range(count):
        ranks = chance.randint(2, 6)
        words = ["--servers", str(chance.randint(1, min(3, ranks - 1)))]
        words += ["--node-size", chance.choice("0012")]
        words += ["--mode", chance.choice(("async", "async", "ssp"))]
        words += ["--codec", chance.choice(("none", "none", "topk", "int8", "onebit"))]
        words += chance.choice(([], [], ["--clip", "1"], ["--staleness-lr"]))
        words += chance.choice(([], [], ["--max-staleness", "3"], ["--snapshot", "stall"]))
        words += chance.choice(([], [], ["--delay-compensation", "0.1"]))
        last = part + 1 == count
        words += ["--epochs", str(EPOCHS if last else ENDLESS), *["--resume"] * (part > 0)]
        found.append((ranks, [*model, *words]))
    return found


@pytest.mark.launch
@pytest.mark.parametrize(
    "cases",
    shared_out([range(FEW), range(FEW, SOME), range(SOME, MANY)], [range(FEW)], ()),
    ids=str,
)
def test_random_runs_are_replayed(cases: range, tmp_path: Path) -> None:
    """They end, or are stopped and go on with other ranks and options; seeds say which."""
    plan, seeds = Plan(tmp_path), [SEED + k for k in cases]
    runs = {f"run {seed}": drawn_run(random.Random(seed)) for seed in seeds}
    for name, jobs in runs.items():
        for k, (ranks, options) in enumerate(jobs):
            print(name, ranks, *options)
            plan.add(name, ranks, options, 0 if k + 1 == len(jobs) else SAVED)
    plan.run(400)
    found = Counter[str]()
    for seed, (name, jobs) in zip(seeds, runs.items(), strict=True):
        assert_replayed(plan.out(name), len(jobs))
        found += damaged_in_turn(plan.out(name), DAMAGES, random.Random(seed))
        assert_cut_tails_are_sound(plan.out(name), random.Random(seed))
    print("damaged records, all of them refused:", found.total(), dict(found))


def damaged_in_turn(out: Path, count: int, chance: random.Random) -> Counter[str]:
    """Damage a run's record, once at a time, and have it refused; returns how many of each kind."""
    paths, found = sorted(out.glob("record/part-*/server-*")), Counter[str]()
    for _ in range(count):
        path, kind = chance.choice(paths), chance.choice(DAMAGED)
        whole, moved = path.read_bytes(), path.parent.with_name("moved")
        if kind == "removed":
            path.unlink()
        elif kind == "folder removed":
            path.parent.rename(moved)
        else:
            path.write_bytes(damaged(whole, kind, chance))
        with unheard(), pytest.raises(UserError) as caught:
            print(kind, path, *replay(out))
        refused = caught.value.code == 1 or re.search(
            ": format | without a record", str(caught.value)
        )
        assert refused, (kind, caught.value)
        if moved.exists():
            moved.rename(path.parent)
        path.write_bytes(whole)
        found[kind] += 1
    return found


DAMAGED = (
    *("removed", "folder removed", "cut", "cut behind a piece", "end of zeros", "piece left out"),
    *("piece twice", "bit", "bit", "bit of the first line", "bit of a head"),
)


def damaged(data: bytes, kind: str, chance: random.Random) -> bytes:
    """Return a file of a record with damage of a kind."""
    begins, end = pieces_of(data), len(data)
    head = replay_log.HEAD.size + replay_log.SUM.size
    at, next_ = chance.choice([*zip(begins, [*begins[1:], end], strict=True)])
    cut = chance.randrange(end)
    if kind in ("cut", "cut behind a piece"):
        return data[: cut if kind == "cut" else at]
    if kind == "end of zeros":
        return data[:cut] + bytes(end - cut - 1) + bytes([data[-1] ^ 1])
    if kind == "piece left out":
        return data[:at] + data[next_:]
    if kind == "piece twice":
        return data[:next_] + data[at:]
    ranges = {
        "bit": (0, end),
        "bit of the first line": (0, begins[0]),
        "bit of a head": (at, at + head),
    }
    flipped = bytearray(data)
    flipped[chance.randrange(*ranges[kind])] ^= 1 << chance.randrange(8)
    return bytes(flipped)


def pieces_of(data: bytes) -> list[int]:
    """Return where the pieces of a file of a record begin; the first seals the first line."""
    found, at = [], data.index(b"\n") + 1
    width = line_dtype_of(data).itemsize
    while at < len(data):
        found.append(at)
        count, reads, _ = replay_log.HEAD.unpack_from(data, at)
        at += replay_log.HEAD.size + replay_log.SUM.size + count * width + reads
    return found


def assert_cut_tails_are_sound(out: Path, chance: random.Random) -> None:
    """What a kill leaves of the last job's record is no damage, but of a run that is done."""
    done, last = out / "DONE", max(out.glob("record/part-*"))
    for path in sorted(last.glob("server-*")):
        whole, begins = path.read_bytes(), pieces_of(path.read_bytes())
        for cut in (begins[1], *(chance.randrange(begins[1], len(whole)) for _ in range(4))):
            path.write_bytes(whole[:cut])
            parts = read_parts(out)
            saved = replace(checkpoints_of(out, ()), by_job={})
            (error,) = damages_of(out, parts, saved).values()
            assert re.search(r"ends at update .*, at which the run was done", str(error))
            done.rename(out / "undone")
            assert not damages_of(out, parts, saved)
            (out / "undone").rename(done)
        path.write_bytes(whole)


def assert_replayed(out: Path, jobs: int, *program: str) -> str:
    """Replay a run; each of its jobs has to be made again, up to the last checkpoint."""
    text = replayed(out, *program)
    steps = re.findall(r"^job (\d+): .* equal bits in .*?([\d,]+)(?:;.*)?$", text, re.MULTILINE)
    assert [int(number) for number, _ in steps] == list(range(1, jobs + 1)), text
    assert int(steps[-1][1].replace(",", "")) == newest(out).step, text
    return text


@pytest.mark.launch
@pytest.mark.long
@pytest.mark.one_mpi
def test_what_is_left_of_a_killed_job_is_replayed(tmp_path: Path) -> None:
    """Up to its last whole piece; then what went on. What differs is named, and what is lost."""
    out = tmp_path / "out"
    common = ["--problem", f"{MODELS}:SlowMLP", *RECORDED, "--out", str(out), "--hidden", "24"]
    kill_once(out, 5, [*common, "--servers", "2", "--epochs", str(ENDLESS)], when="write")
    step = newest(out).step
    words = [*common, "--resume", "--epochs", str(step // 45 + 2), "--servers", "1"]
    train(3, *words, cwd=tmp_path).check()
    text = assert_replayed(out, 2)
    assert f"job 2: {newest(out).step - step:,} updates from step {step:,} on, 2 workers" in text
    until = step + 7
    told = replayed(out, "--until", str(until), "-o", "state.npz")
    assert f"update {until} of server 0: push " in told
    with np.load(tmp_path / "state.npz") as state:
        assert {"params/w1", "slots/m/w1"} <= set(state)
    again = ["--init-from", "state.npz", "--eval-only", "--problem", f"{MODELS}:SlowMLP"]
    train(2, *again, "--hidden", "24", cwd=tmp_path).check()
    assert f"{until} of server 0" in replayed(out, "--until", str(until))
    assert "expected an update that is recorded: 1 to " in replayed(out, "--until", "0", code=2)
    assert_differences_are_named(out, step)


def assert_differences_are_named(out: Path, step: int) -> None:
    """A loss, a line of a shard and an order that are not what they were; the last bytes."""
    path = replay_log.part_folder(out, 1) / "server-00000"
    whole = path.read_bytes()
    for column, bits, named in (
        ("loss", 1, r"first difference: the loss of push \d+ of worker \d+ \(samples \d+ to"),
        ("line", 1, r"first difference: update \d+ of server 0, by push \d+ of worker \d+"),
        ("stale", 1, r"first difference: |no recorded push can be applied next"),
    ):
        path.write_bytes(changed(whole, column, bits))
        assert re.search(named, replayed(out, code=1)), column
    path.write_bytes(whole[:-9])
    kept = read(path)
    if kept is None or len(kept.records) < step:  # no piece behind the checkpoint was written
        assert f", expected {step}, of which there is a checkpoint" in replayed(out, code=1)
    else:
        assert "are left out" in replayed(out)
    more = resealed(whole + whole[pieces_of(whole)[-1] :])
    path.write_bytes(more[:-9] + bytes(9))
    assert "begins a piece whose sum is wrong" in replayed(out, code=1)
    assert "update 1 of server 0" in replayed(out, "--until", "1")
    path.write_bytes(whole.replace(b'"format": 6', b'"format": 5', 1))
    assert "format 5, expected 6" in replayed(out, code=2)
    path.write_bytes(b"none\n" + whole)
    assert "expected the record of a server" in replayed(out, code=1)
    path.write_bytes(whole)


def changed(data: bytes, column: str, bits: int) -> bytes:
    """Return a record of server 0 with one value of its 30th push changed, and the right sums."""
    dtype = line_dtype_of(data)

    def change(lines: bytearray, reads: bytearray) -> None:
        view = np.frombuffer(lines, dtype)[column][29:30].view(f"u{dtype[column].itemsize}")
        view ^= bits

    return resealed(data, change)


def line_dtype_of(data: bytes) -> np.dtype:
    about = json.loads(data.partition(b"\n")[0])
    return replay_log.line_dtype(about["server"] == 0, len(about["workers"]))


def unchanged(lines: bytearray, reads: bytearray) -> None:
    pass


def read_earlier(lines: bytearray, reads: bytearray) -> None:
    """Have rows read an update earlier."""
    reads[next(k for k in range(20, len(reads)) if reads[k] % replay_log.MORE < 9)] += 1


def resealed(
    data: bytes, change: Callable[[bytearray, bytearray], None] = unchanged, about: Any = None
) -> bytes:
    """Return a record whose first lines and reads of rows are changed, with the right sums."""
    first, _, rest = data.partition(b"\n")
    dtype, first = line_dtype_of(data), json.dumps(about).encode() if about else first
    found, total, at, number = first + b"\n", zlib.crc32(first), 0, 0
    while at < len(rest):
        count, length, _ = replay_log.HEAD.unpack_from(rest, at)
        begin = at + replay_log.HEAD.size + replay_log.SUM.size
        middle = begin + count * dtype.itemsize
        at, lines = middle + length, bytearray(rest[begin:middle])
        reads = bytearray(rest[middle:at])
        if number == 1:  # the one before seals the first line
            change(lines, reads)
        piece, total = replay_log.piece(count, length, bytes(lines + reads), total)
        found, number = found + piece, number + 1
    return found


def test_a_record_is_read_as_far_as_it_is_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    params, count = np.arange(100, dtype="f4"), 2 * replay_log.PIECE + 5
    for server in (0, 1):
        path = tmp_path / f"server-{server}"
        about = about_server(server, workers=3)
        kept = replay_log.Recorder(path, about, params, whole=server == 0)
        for k in range(count):
            kept.note(Push(k % 3, k, (1, 32 * k, 32 * k + 7), 7, k / 3, 0, params), k - 1, k)
        kept.close()
        found = read(path)
        assert found.damage is None
        assert found.records["worker"].tolist() == [k % 3 for k in range(count)]
        assert found.records["stale"].tolist() == list(range(count))
        words = params.view("u4")
        assert found.records["line"].tolist() == [line_sum(words, k) for k in range(count)]
        if server == 0:
            assert found.records["loss"].tolist() == [k / 3 for k in range(count)]
            assert set(found.records["epoch"]) == {1}
            assert found.records["begin"].tolist() == [32 * k for k in range(count)]
            assert set(found.records["samples"]) == {7}
        whole = path.read_bytes()
        for tail, sound in ((whole[:-1], True), (whole[:-3] + b"abc", False)):
            path.write_bytes(tail)
            found = read(path)
            assert len(found.records) == 2 * replay_log.PIECE
            assert (found.damage is None) == sound
        for cut in range(whole.index(b"\n") + 17):  # the first piece is not there yet
            path.write_bytes(whole[:cut])
            assert read(path) is None
        path.write_bytes(whole.replace(b"\n", b"\v", 1))
        with pytest.raises(UserError, match="without a sound first line") as caught:
            read(path)
        assert caught.value.code == 1
    full = tmp_path / "full"
    full.symlink_to("/dev/full")
    replay_log.Recorder(full, about, params, whole=True).close()
    assert "no record" in capsys.readouterr().err


def test_a_full_disk_ends_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The end of the file says so, if there is room; each of its bits is in a sum."""
    params, path, before = np.zeros(100, "f4"), tmp_path / "file", resource.RLIMIT_FSIZE
    limits = resource.getrlimit(before)
    kept = replay_log.Recorder(path, about_server(0, workers=3), params, whole=True)
    assert kept.part == 3
    try:
        resource.setrlimit(before, (path.stat().st_size + 5 * replay_log.PIECE * 24, limits[1]))
        for k in range(9 * replay_log.PIECE):
            kept.note(Push(k % 3, k, (1, 0, 7), 7, k / 3, 0, params), k - 1, 0)
    finally:
        resource.setrlimit(before, limits)
    kept.close()
    assert kept.part == 0
    assert "ends here: No space left on device" in capsys.readouterr().err
    found, whole = read(path), path.read_bytes()
    assert (len(found.records), found.damage, found.stopped) == (4 * replay_log.PIECE, None, True)
    end = replay_log.HEAD.size + replay_log.SUM.size
    for bit in range(8 * end):
        flipped = bytearray(whole)
        flipped[len(whole) - end + bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        found = read(path)
        assert found.damage is not None
        assert not found.stopped
    for cut in range(1, end + 1):
        path.write_bytes(whole[:-cut])
        assert not read(path).stopped


@pytest.mark.launch
@pytest.mark.one_mpi
def test_records_that_end_before_their_jobs(tmp_path: Path) -> None:
    """Of a full disk, a record that was removed, and damage; no such run is called equal."""
    plan = Plan(tmp_path)
    words = ["--servers", "2", "--hidden", "24", *RECORDED]
    again = [*words, "--problem", f"{MODELS}:RecordedAnewMLP"]
    plan.add("kept", 4, [*words, "--epochs", "1"])
    plan.add("kept", 4, [*words, "--epochs", "2", "--resume"])
    plan.add("full", 4, [*words, "--epochs", "3", "--problem", f"{MODELS}:UnrecordedMLP"])
    plan.add("removed", 4, [*again, "--epochs", "1"])
    plan.add("removed", 4, [*again, "--epochs", "2", "--resume"])
    plan.run(200)
    kept, full = plan.out("kept"), plan.out("full")
    assert newest(full).state["recorded"] == 0
    end, base = newest(kept).step, read_parts(kept)[1].base
    assert_a_server_may_stop(kept, end)
    assert_ends_are_known(kept, base)
    assert_the_last_job_is_meant(kept, base)
    assert_kills_leave_equal_lengths(kept)
    step = newest(full).step
    shutil.copytree(newest(full).path, kept / "checkpoints" / newest(full).path.name)
    summarize(kept, step)
    told = list_until_error(kept, f"the record of job 2 ends at update {end}, .* recording stopped")
    assert len(told) == 2
    assert told[1].startswith(f"job 2: {end - base} updates")
    (anew,) = replay(plan.out("removed"))
    assert re.search(f"^job 1: {end - base} updates .* equal bits in .* {end}$", anew)


def assert_a_server_may_stop(out: Path, end: int) -> None:
    """What is there of a record that has stopped is replayed; one that was cut is refused."""
    path = replay_log.part_folder(out, 2) / replay_log.FILE.format(1)
    whole = path.read_bytes()
    at = pieces_of(whole)[2]
    (before,) = replay_log.SUM.unpack_from(whole, pieces_of(whole)[1] + replay_log.HEAD.size)
    path.write_bytes(whole[:at] + replay_log.piece(0, 0, b"", before)[0])
    last = read_parts(out)[1].last
    told = list_until_error(out, f"ends at update {last}, .* recording stopped.* --until {last}")
    assert "equal bits" in told[1]
    assert "recording stopped before the pushes they depend on" in told[1]
    assert f"update {last} of server 1" in "".join(replay(out, last))
    path.write_bytes(whole[:at])
    early = f"ends at update {last}, expected {end}, .* bring the rest back .* --until {last}"
    assert not list_until_error(out, early)
    path.write_bytes(whole)


def assert_ends_are_known(out: Path, base: int) -> None:
    """Neither a damaged summary nor damaged checkpoints let a cut record pass."""
    summary, path = out / "summary.json", replay_log.part_folder(out, 2) / replay_log.FILE.format(1)
    whole, text = path.read_bytes(), summary.read_text()
    for other in ("", "{", "[]", '{"global_step": []}', '{"global_step": "9"}', "{}"):
        summary.write_text(other)
        assert not list_until_error(out, "summary.json without the end of the run")
    summary.unlink()
    assert not list_until_error(out, "summary.json without the end of the run")
    summary.write_text(text)
    (out / "DONE").rename(out / "undone")
    path.write_bytes(whole[: pieces_of(whole)[1]])
    later = [folder for folder in list_checkpoints(out) if folder_step(folder) > base]
    for folder in later:
        (folder / INDEX).rename(folder / "kept")
        (folder / INDEX).write_bytes(b"")
    told = list_until_error(out, "expected .*, of which there is a checkpoint")
    assert all(line.startswith("not compared: ") for line in told)
    for folder in later:
        (folder / "kept").rename(folder / INDEX)
    path.write_bytes(whole)
    (out / "undone").rename(out / "DONE")


def assert_the_last_job_is_meant(out: Path, base: int) -> None:
    """An update that a damaged job has made again is not answered for by the job before."""
    paths = [replay_log.part_folder(out, 2) / replay_log.FILE.format(k) for k in range(2)]
    wholes = [path.read_bytes() for path in paths]
    for path, whole in zip(paths, wholes, strict=True):
        about = json.loads(whole.partition(b"\n")[0]) | {"step": base - 5}
        sealed = bytearray(resealed(whole, about=about))
        sealed[pieces_of(bytes(sealed))[1] + 20] ^= 1
        path.write_bytes(sealed)
    found = list_until_error(out, f"--until {base - 2}: the record of job 2 ends", base - 2)
    assert found[0].startswith("warning: ")
    assert "whose sum is wrong" in found[0]
    warned, *told = replay(out, base - 7)
    assert "whose sum is wrong" in warned
    assert f"update {base - 7} of server 0: push" in "".join(told)
    for path, whole in zip(paths, wholes, strict=True):
        path.write_bytes(whole)


def assert_kills_leave_equal_lengths(out: Path) -> None:
    """Files of as many pieces have not the same pushes, where one server was ahead."""
    paths = [replay_log.part_folder(out, 2) / replay_log.FILE.format(k) for k in range(2)]
    wholes, moved = [path.read_bytes() for path in paths], out.with_name("moved")
    (out / "checkpoints").rename(moved)
    (out / "DONE").rename(out / "undone")
    for path, whole in zip(paths, wholes, strict=True):
        about, begins = json.loads(whole.partition(b"\n")[0]), pieces_of(whole)
        head = replay_log.HEAD.size + replay_log.SUM.size
        line = np.frombuffer(whole, line_dtype_of(whole), 1, begins[1] + head).copy()
        line["worker"] = about["server"]
        (before,) = replay_log.SUM.unpack_from(whole, begins[0] + replay_log.HEAD.size)
        path.write_bytes(whole[: begins[1]] + replay_log.piece(1, 0, line.tobytes(), before)[0])
    told = list(replay(out))
    assert "the job was killed before the pushes they depend on were written" in told[1]
    for path, whole in zip(paths, wholes, strict=True):
        path.write_bytes(whole)
    moved.rename(out / "checkpoints")
    (out / "undone").rename(out / "DONE")


def list_until_error(out: Path, error: str, until: int | None = None) -> list[str]:
    """Return what a replay tells before it ends with an error, with exit code 1."""
    told: list[str] = []
    with pytest.raises(UserError, match=error) as caught:
        told.extend(replay(out, until))
    assert caught.value.code == 1
    return told


def summarize(out: Path, step: int) -> None:
    summary = out / "summary.json"
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"global_step": step}))


def about_server(server: int, workers: int, *tables: str) -> dict[str, Any]:
    about = {"format": replay_log.FORMAT, "part": 3, "server": server, "tables": tables}
    return about | {"workers": list(range(workers)), "samples": [6000, 0]}


@pytest.mark.parametrize(("servers", "workers", "tables"), [(8, 300, ()), (8, 200, ("t",))])
def test_a_push_takes_64_bytes(
    servers: int, workers: int, tables: tuple[str, ...], tmp_path: Path
) -> None:
    """Of all servers together, with heads of pieces; those of great staleness take a line more."""
    params, count = np.zeros(100, "f4"), 10 * replay_log.PIECE
    whose = [k % workers for k in range(count)]
    stale = [1 << 16, (1 << 16) - 1, (1 << 32) - 1, *range(3, count)]
    total = 0
    for server in range(servers):
        path = tmp_path / f"server-{server}"
        about = about_server(server, workers, *tables)
        kept = replay_log.Recorder(path, about, params, whole=server == 0)
        begun = path.stat().st_size
        for k, (worker, old) in enumerate(zip(whose, stale, strict=True)):
            kept.note_read(worker)
            kept.note(Push(worker, k, (2, 32 * k, 32 * k + 32), 32, -0.5, 0, params), k - 1, old)
        kept.close()
        total += path.stat().st_size - begun
        found = read(path)
        assert found.records["worker"].tolist() == whose
        assert found.records["stale"].tolist() == stale
        if tables:
            assert found.reads["worker"].tolist() == whose
            assert found.reads["at"].tolist() == list(range(count))
    assert total / count <= 64


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


@pytest.mark.launch
@pytest.mark.long
@pytest.mark.skipif(not mpirun.survivors_launcher(), reason="this MPI ends jobs whose ranks die")
def test_a_job_whose_worker_has_died_is_replayed(tmp_path: Path) -> None:
    """What it has pushed counts, and the others go on."""
    out = tmp_path / "out"
    words = counting_words(tmp_path, 20, "--servers", "2", *RECORDED, "--mode", "ssp")
    with Supervised(tmp_path, 5, words) as job:
        os.kill(job.wait_for_training(out, 1)[-1], signal.SIGKILL)
        told = job.wait(0)
    assert "starting again" not in told
    assert summary(out)["lost"] == [4]
    assert f"{newest(out).step:,} updates from step 0 on, 3 workers" in assert_replayed(out, 1)


@pytest.mark.launch
def test_hybrid_runs_are_replayed(tmp_path: Path) -> None:
    """On one node and several, with rows of some rounds before; resumed on other ranks."""
    pytest.importorskip("torch")  # of which the model is
    plan, chance = Plan(tmp_path), np.random.default_rng(5)
    words = ["--mode", "hybrid", "--problem", "wide_deep", "--batch-size", "16", *RECORDED]
    words += ["--dataset", str(sparse_samples(tmp_path, chance))]
    plan.add("one server", 3, [*words, "--servers", "1", "--epochs", "2"])
    plan.add("no bound", 4, [*words, "--servers", "2", "--epochs", "4"])
    plan.add("no bound", 5, [*words, "--servers", "1", "--epochs", "6", "--resume"])
    more = ["--staleness-bound", "0", "--evict-after", "1", "--accumulate", "2"]
    plan.add("bound", 4, [*words, *more, "--servers", "2", "--epochs", "4", "--node-size", "3"])
    plan.run(200)
    for name, jobs in (("one server", 1), ("no bound", 2), ("bound", 1)):
        assert_replayed(plan.out(name), jobs)
    out = plan.out("no bound")
    assert "update 30: a round of 2 workers, samples " in replayed(out, "--until", "30")
    assert_hybrid_differences_are_named(out)
    assert damaged_in_turn(out, DAMAGES // 4, random.Random(SEED)).total() == DAMAGES // 4
    assert_killed_rounds_are_left_out(plan.out("bound"))


def assert_hybrid_differences_are_named(out: Path) -> None:
    """A loss, a sum of gradients, a read of rows at another time, and another worker's push."""
    path = replay_log.part_folder(out, 1) / "server-00000"
    whole = path.read_bytes()
    later = "reads rows of server 0, which|no recorded push can be applied next"
    for data, named in (
        (changed(whole, "loss", 1), r"the loss of push \d+ of worker \d+ \(samples \d+ to"),
        (changed(whole, "line", 1), r"update 30 of server 0, by push \d+ of .* gradients of rows"),
        (changed(whole, "samples", 16), r"first difference: |no recorded push can be applied next"),
        (changed(whole, "worker", 1), r"first difference: |no recorded push can be applied next"),
        (resealed(whole, read_earlier), rf"first difference: |{later}"),
    ):
        path.write_bytes(data)
        assert re.search(named, replayed(out, code=(1, 2)))
    path.write_bytes(whole)


def assert_killed_rounds_are_left_out(out: Path) -> None:
    """What one server has recorded beyond the other is no damage where the job was killed."""
    path, moved = replay_log.part_folder(out, 1) / "server-00001", out.with_name("moved")
    whole = path.read_bytes()
    (out / "checkpoints").rename(moved)
    (out / "DONE").rename(out / "undone")
    path.write_bytes(whole[: pieces_of(whole)[1]])
    told = replayed(out)
    assert re.search(r"^job 1: 0 updates .*; the last \d+ pushes are left out: the job was", told)
    path.write_bytes(whole)
    moved.rename(out / "checkpoints")
    (out / "undone").rename(out / "DONE")


def sparse_samples(folder: Path, chance: np.random.Generator) -> Path:
    """Write samples of few features; returns the file."""
    samples = folder / "sparse.svm"
    lines = ([*np.sort(chance.choice(500, 12, replace=False) + 1)] for _ in range(400))
    samples.write_text("".join(f"{ids[0] % 2} {':1 '.join(map(str, ids))}:1\n" for ids in lines))
    return samples


@pytest.mark.launch
@pytest.mark.long
@pytest.mark.other_mpi
def test_runs_with_tables_are_replayed(tmp_path: Path) -> None:
    """Two jobs each, on other ranks and nodes; a read of rows at another time is named."""
    plan, chance = Plan(tmp_path), np.random.default_rng(5)
    sparse = ["--dataset", str(sparse_samples(tmp_path, chance))]
    common = ["--batch-size", "16", *RECORDED]
    long_rows = ["--problem", "factorization_machine", *sparse, "--factors", "1200"]
    runs = {
        "wide deep": [["--problem", "wide_deep", *sparse, "--clip", "0.5", "--accumulate", "2"]]
        * 2,
        "long rows": [
            [*long_rows, "--node-size", "2", *more]
            for more in (["--mode", "ssp"], ["--codec", "int8"])
        ],
    }
    for name, jobs in runs.items():
        for k, options in enumerate(jobs):
            more = ["--epochs", str(1 + k), "--servers", str(1 + k), *["--resume"] * k]
            plan.add(name, 3 + k, [*options, *common, *more])
    plan.run(200)
    for name in runs:
        assert "2 servers: equal bits" in assert_replayed(plan.out(name), 2)
    packed = summary(plan.out("long rows"))
    assert packed["bytes_sent"] < packed["bytes_received"] / 2
    path = replay_log.part_folder(plan.out("wide deep"), 1) / "server-00000"
    path.write_bytes(resealed(path.read_bytes(), read_earlier))
    named = r"first difference: |reads rows of server 0|no recorded push can be applied next"
    # A worker that cannot have read what it pushed (2) depends on where the two are.
    assert re.search(named, replayed(plan.out("wide deep"), code=(1, 2)))


@pytest.mark.launch
@pytest.mark.one_mpi
def test_a_program_is_replayed(tmp_path: Path) -> None:
    """It was stopped and gone on with; what differs is named. A plan takes its times as well."""
    out, words = tmp_path / "linear", record_programs(tmp_path, "linear")["linear"]
    text = assert_replayed(out, 2, *words)
    assert text.count("2 workers, 2 servers: equal bits") == 2
    named = r"first difference: the loss of push 1 of worker \d \(samples \d+ to \d+ of epoch 0\)"
    assert re.search(named, replayed(out, *words, "0.5", code=1))
    with pytest.raises(UserError, match="expected the program as well"):
        list(replay(out))
    own = json.loads(plan.write(["--from", str(out), "--json"]))
    assert (own["servers"], own["workers"], own["nodes"]) == (2, 2, 2)
    assert own["run"]["parameters"] == 3001
    assert min(own["run"]["step_s"], own["step_s"], own["run"]["samples"]) > 0
    larger = json.loads(plan.write(["--from", str(out), "--workers", "6", "--json"]))
    assert (larger["workers"], larger["parameter_bytes"]) == (6, 4 * 3001)
    (tmp_path / "none.py").write_text("")
    assert "came to no mpips.run" in replayed(out, "none.py", code=2)


@pytest.mark.launch
@pytest.mark.long
@pytest.mark.one_mpi
def test_programs_are_replayed(tmp_path: Path) -> None:
    """With tables, of PyTorch, and in mode hybrid."""
    pytest.importorskip("torch")
    words = record_programs(tmp_path, "rows", "net", "hybrid")
    for name in ("rows", "net", "hybrid"):
        text = assert_replayed(tmp_path / name, 1, *words[name])
        assert "2 workers, 2 servers: equal bits" in text
    for server in range(2):
        path = replay_log.part_folder(tmp_path / "rows", 1) / f"server-{server:05d}"
        evicted = list(read(path).evicted.values())  # a snapshot may put one off to the next
        assert evicted == sorted({*evicted})
        assert evicted[-1] == 4, "old rows went"
    other = replayed(tmp_path / "net", *words["rows"], code=2)
    assert "a run of rows.py:train, expected that of net.py:train" in other


def record_programs(folder: Path, *names: str) -> dict[str, list[str]]:
    """Record runs of programs, of `linear` two jobs; returns the file and words of each."""
    known = {
        "linear": ("linear", ["float32", "int8"]), "rows": ("rows", []),
        "net": ("net", ["ssp"]), "hybrid": ("net", ["hybrid"]),
    }  # fmt: skip
    chosen = {name: known[name] for name in names}
    runs = [(program, str(folder / name), words) for name, (program, words) in chosen.items()]
    runs *= 2 if names == ("linear",) else 1
    run(4, [str(PROGRAMS / "all.py"), json.dumps(runs)], folder).check()
    return {
        name: [str(PROGRAMS / f"{program}.py"), str(folder / name), "2", *words]
        for name, (program, words) in chosen.items()
    }


def test_a_run_without_a_record(tmp_path: Path) -> None:
    missing, empty = tmp_path / "missing", tmp_path / "empty"
    path = replay_log.part_folder(empty, 1) / replay_log.FILE.format(0)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"")
    for out, error in (
        (missing, f"no folder {missing}, expected the folder of a run"),
        (empty, "empty record, expected one of a job that has begun"),
    ):
        with pytest.raises(UserError, match=error):
            list(replay(out))
    with pytest.raises(UserError, match=r"state\.h5, expected a name that ends in \.npz"):
        list(replay(empty, out=Path("state.h5")))
    assert "expected a run made with --record" in replayed(tmp_path, code=2)
