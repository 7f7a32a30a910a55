"""Asynchronous and hybrid runs are made again from their records, to the same bits."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from launch import python, run, train
from runs import ENDLESS, HERE, MODELS, SAVED, Plan, newest, summary, thinned
from supervised import Supervised, counting_words
from test_record import HEAD, line_dtype_of, pieces_of

from mpips.checkpoint import list_checkpoints
from mpips.checkpoint.files import INDEX, folder_step
from mpips.errors import UserError
from mpips.launch import mpirun
from mpips.ps import replay_log
from mpips.tools import plan
from mpips.tools.replay.record import read_parts
from mpips.tools.replay.run import replay
from mpips.tools.replay.server_file import read

PROGRAMS = Path(__file__).parent / "programs"
RECORDED = ["--record", "--read", "consistent", "--checkpoint-every", "40steps", "--keep", "100"]
SEED, EPOCHS = 21, 6
MANY = int(os.environ.get("MPIPS_REPLAY_RUNS", "4"))


def file_of(part: int, server: int) -> str:
    return f"record/part-{part:04d}/{replay_log.FILE.format(server)}"


def replayed(out: Path, *options: str, codes: tuple[int, ...] = (0,)) -> str:
    """Replay a run by the command."""
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # models of tests send it themselves
    try:
        done = python("-m", "mpips", "replay", str(out), *options, cwd=out.parent, code=None)
    finally:
        signal.signal(signal.SIGUSR1, before)
    text = done.stdout + done.stderr
    assert done.returncode in codes, text
    return text


def assert_replayed(out: Path, jobs: int, *program: str) -> str:
    """Replay a run; each of its jobs has to be made again, up to the last checkpoint."""
    text = replayed(out, *program)
    steps = re.findall(r"^job (\d+): .* equal bits in .*?([\d,]+)(?:;.*)?$", text, re.MULTILINE)
    assert [int(number) for number, _ in steps] == list(range(1, jobs + 1)), text
    assert int(steps[-1][1].replace(",", "")) == newest(out).step, text
    return text


@contextlib.contextmanager
def changed(out: Path, files: Mapping[str, bytes | None]) -> Iterator[None]:
    """Within the block files of a run are other ones; those that are None are away, or folders."""
    away = Path(tempfile.mkdtemp(dir=out.parent))
    for k, (name, content) in enumerate(files.items()):
        (out / name).rename(away / str(k))
        if content is not None:
            (out / name).write_bytes(content)
    yield
    for k, name in enumerate(files):
        (out / name).unlink(missing_ok=True)
        (away / str(k)).rename(out / name)


def resealed(data: bytes, column: str = "", about: Any = None) -> bytes:
    """Return a file with other values, under right sums: of its 30th push, or its first line."""
    first = json.dumps(about).encode() if about else data.partition(b"\n")[0]
    found, total = first + b"\n", crc32(first)
    for number, (at, end) in enumerate(pairwise([*pieces_of(data), len(data)])):
        count, reads, _ = replay_log.HEAD.unpack_from(data, at)
        body = bytearray(data[at + HEAD : end])
        if number == 1 and column:  # the one before seals the first line
            change(body, column, np.frombuffer(body, line_dtype_of(data), count))
        piece, total = replay_log.piece(count, reads, bytes(body), total)
        found += piece
    return found


def change(body: bytearray, column: str, lines: np.ndarray) -> None:
    """Change a column of a piece, or have rows read an update earlier."""
    if column == "reads":
        reads = range(lines.nbytes + 20, len(body))
        body[next(k for k in reads if body[k] % replay_log.MORE < 9)] += 1
    else:
        view = lines[column][29:30].view(f"u{lines.dtype[column].itemsize}")
        view ^= 16 if column == "samples" else 1


def assert_named(out: Path, cases: Mapping[str, str]) -> None:
    """Replays of the first job with other values tell of the first difference."""
    whole = (out / file_of(1, 0)).read_bytes()
    for column, named in cases.items():
        with changed(out, {file_of(1, 0): resealed(whole, column)}):
            # A worker that cannot have read what it pushed (2) depends on where the two are.
            assert re.search(named, replayed(out, codes=(1, 2))), column


LOSS = r"first difference: the loss of push \d+ of worker \d+ \(samples \d+ to"
ANY = r"first difference: |no recorded push can be applied next"
ROWS = rf"{ANY}|reads rows of server 0"


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
@pytest.mark.parametrize("seeds", thinned(["first", "even", "odd"], ["first"], ()))
def test_random_runs_are_replayed(seeds: str, tmp_path: Path) -> None:
    """They end, or are stopped and go on with other ranks and options; seeds say which."""
    plan, cases = (
        Plan(tmp_path),
        {"first": [0], "even": range(2, MANY, 2), "odd": range(1, MANY, 2)},
    )
    runs = {f"run {SEED + k}": drawn_run(random.Random(SEED + k)) for k in cases[seeds]}
    for name, jobs in runs.items():
        for k, (ranks, options) in enumerate(jobs):
            print(name, ranks, *options)
            plan.add(name, ranks, options, 0 if k + 1 == len(jobs) else SAVED)
    plan.run(400)
    for name, jobs in runs.items():
        assert_replayed(plan.out(name), len(jobs))


@pytest.mark.launch
@pytest.mark.one_mpi
def test_records_and_what_is_left_of_them(tmp_path: Path) -> None:
    """Of a full disk, a record that was removed, a kill, and damage; none is called equal."""
    plan = Plan(tmp_path)
    words = ["--servers", "2", "--hidden", "24", *RECORDED]
    again = [*words, "--problem", f"{MODELS}:RecordedAnewMLP"]
    plan.add("kept", 4, [*words, "--epochs", "1"])
    plan.add("kept", 4, [*words, "--epochs", "2", "--resume"])
    plan.add("full", 4, [*words, "--epochs", "3", "--problem", f"{MODELS}:UnrecordedMLP"])
    plan.add("removed", 4, [*again, "--epochs", "1"])
    plan.add("removed", 4, [*again, "--epochs", "2", "--resume"])
    plan.run(200)
    out, full = plan.out("kept"), plan.out("full")
    assert newest(full).state["recorded"] == 0
    end, base, step = newest(out).step, read_parts(out)[1].base, newest(full).step
    whole = [(out / file_of(2, server)).read_bytes() for server in range(2)]
    assert_whole_runs_are_replayed(out, base)
    assert_parts_that_are_not_there_are_missed(out, whole)
    assert_a_server_may_stop(out, whole[1], end)
    assert_ends_are_known(out, whole[1], base)
    assert_the_last_job_is_meant(out, whole, base)
    assert_kills_leave_what_is_replayed(out, whole)
    shutil.copytree(newest(full).path, out / "checkpoints" / newest(full).path.name)
    with changed(out, {"summary.json": json.dumps({"global_step": step}).encode()}):
        told = told_before(out, f"the record of job 2 ends at update {end}, .* recording stopped")
    assert len(told) == 2
    assert told[1].startswith(f"job 2: {end - base} updates")
    (anew,) = replay(plan.out("removed"))
    assert re.search(f"^job 1: {end - base} updates .* equal bits in .* {end}$", anew)


def assert_whole_runs_are_replayed(out: Path, base: int) -> None:
    """To the end, and up to an update, whose parameters a job begins with; or a value differs."""
    text = assert_replayed(out, 2)
    assert f"job 2: {newest(out).step - base:,} updates from step {base:,} on, 2 workers" in text
    told = replayed(out, "--until", f"{base + 7}", "-o", "state.npz")
    assert f"update {base + 7} of server 0: push " in told
    with np.load(out.parent / "state.npz") as state:
        assert {"params/w1", "slots/m/w1"} <= set(state)
    again = ["--init-from", "state.npz", "--eval-only", "--hidden", "24"]
    train(2, *again, cwd=out.parent).check()
    assert "expected an update that is recorded: 1 to " in replayed(out, "--until", "0", codes=(2,))
    by = r"first difference: update \d+ of server 0, by push \d+ of worker \d+"
    assert_named(out, {"loss": LOSS, "line": by, "stale": ANY})


def told_before(out: Path, error: str, until: int | None = None) -> list[str]:
    """Return what a replay tells before it ends with an error, with exit code 1."""
    told: list[str] = []
    with pytest.raises(UserError, match=error) as caught:
        told.extend(replay(out, until))
    assert caught.value.code == 1
    return told


def assert_parts_that_are_not_there_are_missed(out: Path, whole: Sequence[bytes]) -> None:
    flipped = whole[1][:-9] + bytes([whole[1][-9] ^ 1]) + whole[1][-8:]
    for files, error in (
        ({file_of(2, 1): None}, "no record .*server-00001, expected one of each server"),
        ({file_of(1, 0): None, file_of(1, 1): None}, "without the record of job 1"),
        ({"record/part-0001": None}, "with the records of jobs 2, expected those of jobs 1 to 2"),
        ({"record/part-0002": None}, "without the record of job 2, expected it: a checkpoint"),
        ({file_of(2, 1): whole[0]}, "of another server or job"),
        ({file_of(2, 1): flipped}, "begins a piece whose sum is wrong"),
    ):
        with changed(out, files):
            assert not told_before(out, error)


def assert_a_server_may_stop(out: Path, whole: bytes, end: int) -> None:
    """What is there of a record that has stopped is replayed; one that was cut is refused."""
    at = pieces_of(whole)[2]
    (before,) = replay_log.SUM.unpack_from(whole, pieces_of(whole)[1] + replay_log.HEAD.size)
    with changed(out, {file_of(2, 1): whole[:at] + replay_log.piece(0, 0, b"", before)[0]}):
        last = read_parts(out)[1].last
        told = told_before(out, f"ends at update {last}, .* recording stopped.* --until {last}")
        assert "equal bits" in told[1]
        assert "recording stopped before the pushes they depend on" in told[1]
        assert f"update {last} of server 1" in "".join(replay(out, last))
    early = f"ends at update {last}, expected {end}, .* bring the rest back .* --until {last}"
    with changed(out, {file_of(2, 1): whole[:at]}):
        assert not told_before(out, early)
    with changed(out, {file_of(2, 1): whole[: at + 17], "checkpoints": None}):  # a head and a byte
        assert not told_before(out, f"ends at update {last}, expected {end}, at which the run was")


def assert_ends_are_known(out: Path, whole: bytes, base: int) -> None:
    """Neither a damaged summary nor damaged checkpoints let a cut record pass."""
    for text in (b"", b"{", b"[]", b'{"global_step": []}', b'{"global_step": "9"}', b"{}", None):
        with changed(out, {"summary.json": text}):
            assert not told_before(out, "summary.json without the end of the run")
    later = [folder for folder in list_checkpoints(out) if folder_step(folder) > base]
    cut = {"DONE": None, file_of(2, 1): whole[: pieces_of(whole)[1]]}
    with changed(out, cut | {str(f.relative_to(out) / INDEX): b"" for f in later}):
        told = told_before(out, "expected .*, of which there is a checkpoint")
        assert all(line.startswith("not compared: ") for line in told)


def assert_the_last_job_is_meant(out: Path, whole: Sequence[bytes], base: int) -> None:
    """An update that a damaged job has made again is not answered for by the job before."""
    files = {}
    for server, data in enumerate(whole):
        about = json.loads(data.partition(b"\n")[0]) | {"step": base - 5}
        sealed = bytearray(resealed(data, about=about))
        sealed[pieces_of(bytes(sealed))[1] + 20] ^= 1
        files[file_of(2, server)] = bytes(sealed)
    with changed(out, files):
        found = told_before(out, f"--until {base - 2}: the record of job 2 ends", base - 2)
        assert found[0].startswith("warning: ")
        assert "whose sum is wrong" in found[0]
        warned, *told = replay(out, base - 7)
        assert "whose sum is wrong" in warned
        assert f"update {base - 7} of server 0: push" in "".join(told)


def assert_kills_leave_what_is_replayed(out: Path, whole: Sequence[bytes]) -> None:
    """Files of as many pieces have not the same pushes, where one server was ahead."""
    files: dict[str, bytes | None] = {"checkpoints": None, "DONE": None}
    for server, data in enumerate(whole):
        begins = pieces_of(data)
        line = np.frombuffer(data, line_dtype_of(data), 1, begins[1] + HEAD).copy()
        line["worker"] = server
        (before,) = replay_log.SUM.unpack_from(data, begins[0] + replay_log.HEAD.size)
        piece, _ = replay_log.piece(1, 0, line.tobytes(), before)
        files[file_of(2, server)] = data[: begins[1]] + piece
    with changed(out, files):
        told = list(replay(out))
        assert "the job was killed before the pushes they depend on were written" in told[1]


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


def sparse_samples(folder: Path) -> list[str]:
    """Write samples of few features; returns the options that name them."""
    samples, chance = folder / "sparse.svm", np.random.default_rng(5)
    lines = ([*np.sort(chance.choice(500, 12, replace=False) + 1)] for _ in range(400))
    samples.write_text("".join(f"{ids[0] % 2} {':1 '.join(map(str, ids))}:1\n" for ids in lines))
    return ["--dataset", str(samples), "--batch-size", "16", *RECORDED]


@pytest.mark.launch
def test_hybrid_runs_are_replayed(tmp_path: Path) -> None:
    """On one node and several, with rows of some rounds before; resumed on other ranks."""
    pytest.importorskip("torch")  # of which the model is
    plan = Plan(tmp_path)
    words = ["--mode", "hybrid", "--problem", "wide_deep", *sparse_samples(tmp_path)]
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
    sums = r"update 30 of server 0, by push \d+ of .* gradients of rows"
    assert_named(out, {"loss": LOSS, "line": sums, "samples": ANY, "worker": ANY, "reads": ROWS})
    out = plan.out("bound")
    whole = (out / file_of(1, 1)).read_bytes()
    cut = {file_of(1, 1): whole[: pieces_of(whole)[1]]}
    with changed(out, cut):
        assert not told_before(out, "the record of job 1 ends at update 0, expected ")
    with changed(out, cut | {"checkpoints": None, "DONE": None}):
        told = replayed(out)
    assert re.search(r"^job 1: 0 updates .*; the last \d+ pushes are left out: the job was", told)


@pytest.mark.launch
@pytest.mark.long
@pytest.mark.other_mpi
def test_runs_with_tables_are_replayed(tmp_path: Path) -> None:
    """Of long rows, on other ranks and nodes each; a read of rows at another time is named."""
    plan, sparse = Plan(tmp_path), sparse_samples(tmp_path)
    words = "--problem factorization_machine --factors 1200 --node-size 2 --clip 0.5 --accumulate 2"
    for ranks, more in (
        (3, "--mode ssp --epochs 1 --servers 1"),
        (4, "--codec int8 --epochs 2 --servers 2 --resume"),
    ):
        plan.add("run", ranks, [*words.split(), *sparse, *more.split()])
    plan.run(200)
    out = plan.out("run")
    assert "2 servers: equal bits" in assert_replayed(out, 2)
    assert summary(out)["bytes_sent"] < summary(out)["bytes_received"] / 2
    assert_named(out, {"reads": ROWS})


def record_programs(folder: Path, *lines: str) -> None:
    """Record runs of programs in one world, each in a folder that is named as its line."""
    run(4, [str(HERE / "jobs" / "programs.py"), str(PROGRAMS), str(folder), *lines], folder).check()


def program_of(folder: Path, line: str) -> list[str]:
    """Return the file and the words of a program."""
    name, *words = line.split(",")
    return [str(PROGRAMS / f"{name}.py"), str(folder / line), *words]


@pytest.mark.launch
@pytest.mark.one_mpi
def test_a_program_is_replayed(tmp_path: Path) -> None:
    """With tables, stopped and gone on with; what differs is named. A plan takes its times."""
    line = "loop,float32,int8"
    record_programs(tmp_path, line, line)
    out, words = tmp_path / line, program_of(tmp_path, line)
    text = assert_replayed(out, 2, *words)
    assert text.count("2 workers, 2 servers: equal bits") == 2
    for server in range(2):
        evicted = list(read(out / file_of(2, server)).evicted.values())
        assert evicted == sorted({*evicted})  # a snapshot may put one off to the next
        assert evicted[-1] == 4, "old rows went"
    named = r"first difference: the loss of push 1 of worker \d \(samples \d+ to \d+ of epoch 0\)"
    assert re.search(named, replayed(out, *words, "0.5", codes=(1,)))
    with pytest.raises(UserError, match="expected the program as well"):
        list(replay(out))
    own = json.loads(plan.write(["--from", str(out), "--json"]))
    assert (own["servers"], own["workers"], own["nodes"]) == (2, 2, 2)
    assert own["run"]["parameters"] == 3001
    assert min(own["run"]["step_s"], own["step_s"], own["run"]["samples"]) > 0
    larger = json.loads(plan.write(["--from", str(out), "--workers", "6", "--json"]))
    assert (larger["workers"], larger["parameter_bytes"]) == (6, 4 * 3001)
    (tmp_path / "none.py").write_text("")
    assert "came to no mpips.run" in replayed(out, "none.py", codes=(2,))


@pytest.mark.launch
@pytest.mark.long
@pytest.mark.one_mpi
def test_programs_are_replayed(tmp_path: Path) -> None:
    """Of PyTorch, also in mode hybrid."""
    pytest.importorskip("torch")
    lines = ("net,ssp", "net,hybrid")
    record_programs(tmp_path, *lines)
    for line in lines:
        text = assert_replayed(tmp_path / line, 1, *program_of(tmp_path, line))
        assert "2 workers, 2 servers: equal bits" in text
    other = replayed(tmp_path / line, *program_of(tmp_path, "loop,float32,int8"), codes=(2,))
    assert "a run of loop.py:train, expected that of net.py:train" in other


def test_a_run_without_a_record(tmp_path: Path) -> None:
    missing, empty = tmp_path / "missing", tmp_path / "empty"
    (empty / file_of(1, 0)).parent.mkdir(parents=True)
    (empty / file_of(1, 0)).write_bytes(b"")
    for out, error in (
        (missing, f"no folder {missing}, expected the folder of a run"),
        (empty, "empty record, expected one of a job that has begun"),
    ):
        with pytest.raises(UserError, match=error):
            list(replay(out))
    with pytest.raises(UserError, match=r"state\.h5, expected a name that ends in \.npz"):
        list(replay(empty, out=Path("state.h5")))
    with pytest.raises(UserError, match="none is no folder, expected one for the file"):
        list(replay(empty, out=Path("none/state.npz")))
    assert "expected a run made with --record" in replayed(tmp_path, codes=(2,))
