"""Bad input ends a job on all ranks: one message, an exit code, and nothing saved is lost."""

import contextlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import h5py
import numpy as np
import pytest
from launch import Finished, ends_soon, file_in_shared_memory, python, run, shown, train
from runs import Plan, newest, summary, thinned

from mpips import train as program
from mpips.checkpoint import list_checkpoints

pytestmark = pytest.mark.launch

HERE = Path(__file__).parent.parent
FAULTY = str(HERE / "problems" / "faulty.py")
FORM = re.compile(r"mpips: \S.*, expected \S.*")
ONE_MPI = [pytest.mark.long, pytest.mark.one_mpi]
LONG_RAISES = (("Raises", "async"), ("RaisesInEvaluate", "sync"), ("Leaves", "async"))
LIMIT_S = 60.0  # it takes about a second; the machine may be busy
QUICK = "--problem softmax --epochs 2"
MODES = ("async", "sync", "local_sgd", "easgd")
OTHER_DATA = "--dataset good.npz --mode sync --batch-size 8"  # by a name in the current folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of files with something wrong, and some that are right."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 3)).astype("f4"), rng.integers(0, 3, 60)
    with_nan = x.copy()
    with_nan[17, 1] = np.nan
    np.savez(folder / "good.npz", x=x, y=y)
    np.savez(folder / "nan.npz", x=with_nan, y=y)
    np.savez(folder / "nan-bias.npz", w=np.zeros((64, 10)), b=np.full(10, np.nan))
    for number in range(12):
        path = folder / f"part-{number:02d}.h5"
        with h5py.File(path, "w") as file:
            file["x"], file["y"] = x[:, : 2 if number == 9 else 3], y
    (folder / "used").mkdir()
    (folder / "used" / "thesis.txt").write_text("precious\n")
    return folder


def message_of(done: Finished, code: int) -> str:
    """Return the one message of a job that failed; its launcher's noise may stand around it."""
    done.check(code)
    found = [line for line in done.output.splitlines() if line.startswith("mpips: ")]
    assert len(found) == 1, done.output
    assert FORM.fullmatch(found[0]), found[0]
    return found[0]


def wide() -> str:
    """Return layers of which three ranks need too much shared memory, but not too much memory."""
    stat = os.statvfs("/dev/shm")
    free = stat.f_bavail * stat.f_frsize
    # They need at least six such vectors in shared memory; four are within the memory.
    return ",".join(2 * [str(int(math.sqrt(0.18 * free / 4)))])


@contextlib.contextmanager
def unchanged(folder: Path) -> Iterator[None]:
    """Check that nothing in `folder` is changed, added or removed."""
    before = {p: p.read_bytes() if p.is_file() else b"" for p in folder.rglob("*")}
    yield
    assert before == {p: p.read_bytes() if p.is_file() else b"" for p in folder.rglob("*")}


def test_a_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is refused without MPI, and without another process."""
    for name in program.LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    assert program.main(["--epoch", "1"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert FORM.fullmatch(err.rstrip("\n")), err
    assert "unknown option --epoch, " in err


# What takes a world: every rank refuses with the same words, and no folder of a run is left.

REFUSALS = {
    "--servers 3": "servers=3 leaves no worker in a world of 3, .* servers <= 2; .*mpirun -n 4",
    "--inject-delay 3:5 --mode sync": "inject_delay names worker 3, expected workers 0 to 2",
    "--mode sync --servers 1 --backup-workers 2": "backup_workers 2 of 2 workers, expected .* <= 1",
    "--server-ranks 0,3": "server_ranks has rank 3, expected ranks 0 to 2",
    "--dataset {data}/part-*.h5": r"part-09.h5: array 'x' has samples of shape \(2,\), f",
    "--dataset {data}/nan.npz": r"'x', sample 17, element \(1,\) is nan in float32, expected fin",
    "--problem {faulty}:RaisesWhenMade": "raised KeyError.*, expected a class .*; see line",
    "--problem {faulty}:LeavesWhenMade": "raised SystemExit: 3, expected a class",
    "--out /proc/run": "--out /proc/run: .*, expected a folder that can be written",
    "--out {data}/{long}": "File name too long, expected a folder that can be written",
    "--out {data}/new --resume": "--resume finds no run in .*/new, .*; use --resume auto",
    "--resume": "--resume finds no run in runs/mlp-async-",
    "--eval-only --init-from {data}/used": "no whole checkpoint in --init-from .*none was saved, ",
    "--servers 2 --evaluators 1": "servers=2 leaves no worker in a world of 2 beside evaluators=1",
    "--init-from {data}/nan-bias.npz {quick}": "nan-bias.npz: NaN or infinity in 'b', expected",
    "--eval-only --resume auto --out {data}/new": "--eval-only finds no run in .*/new, expected",
    "--hidden {wide}": "/dev/shm on .* has .*B free, expected at least .*B for the windows",
    "--hidden 9999999999,9999999999": "2 workers .* take [0-9.]+ EB, expected at most .*B",
    "--resume --out {finished} --dtype float64": "dtype 'float64' on resume, expected 'float32'",
    "--init-from {finished}": r"params/w1 of shape None, expected \(64, 128\), as in the model",
    "--out {finished}": "--out .* holds a run, expected a new or empty folder; .*--resume",
    "--resume --out {damaged}": "no whole checkpoint in .*damaged: .*sha256.*, expected",
    "--resume auto --out {damaged}": "no whole checkpoint in .*damaged: .*sha256.*, expected",
    "{other} --out {saved} --resume": "32 training samples on resume, expected 48 as in the saved",
}


def damage(run: Path, copy: Path, count: int) -> Path:
    """Copy a run, with a flipped bit in its last checkpoints; returns the copy."""
    shutil.copytree(run, copy)
    for folder in list_checkpoints(copy)[-count:]:
        shard = min(folder.glob("shard-*.h5"))
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 4
        shard.write_bytes(content)
    return copy


def test_refusals(data: Path, runs: Plan, tmp_path: Path) -> None:
    """One world refuses all of them, and still works then; it uses an older, whole checkpoint."""
    finished = runs.out("finished")
    places = {"data": data, "faulty": FAULTY, "wide": wide(), "long": 300 * "n", "quick": QUICK}
    places |= {"finished": finished, "damaged": damage(finished, data / "damaged", 2)}
    places |= {"other": OTHER_DATA, "saved": runs.out("data")}
    np.savez(tmp_path / "good.npz", x=np.zeros((40, 3), "f4"), y=np.arange(40) % 3)
    older = damage(finished, tmp_path / "older", 1)
    begun, last = list_checkpoints(older)
    lines = [line.format(**places).split() for line in REFUSALS]
    resumed = f"--resume --epochs 2 --out {older}".split()
    jobs = [*lines, resumed, f"{QUICK} --quiet --out ok".split()]
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    with unchanged(data), unchanged(finished):
        job = [str(HERE / "jobs" / "refusals.py"), "jobs.json"]
        output = run(3, job, tmp_path, 2 * LIMIT_S).check().output
    *found, went_on, new = json.loads((tmp_path / "refusals.json").read_text())
    assert went_on == new == 3 * ["exit code 0"]
    assert re.search(f"not used: .*{last.name}.*sha256", output)
    assert f"resumed at step 0 from {begun}" in output
    assert summary(older)["epochs"] == 2
    wrong = []
    for (line, pattern), told in zip(REFUSALS.items(), found, strict=True):
        first, *rest = told[0].splitlines()
        if len(set(told)) > 1 or not FORM.fullmatch(f"mpips: {first}"):
            wrong.append((line, told))
        elif not re.search(pattern, first):
            wrong.append((line, first))
        elif "RaisesWhenMade" in line and rest[0] != "rank 2: Traceback (most recent call last):":
            wrong.append((line, rest))  # it raises there alone
    assert not wrong
    assert not list((tmp_path / "runs").glob("*"))


@pytest.mark.one_mpi
def test_worlds_of_one_refuse_once(tmp_path: Path) -> None:
    """In a mode in which each of them could train."""
    for rank, told in ((0, 1), (1, 0)):
        words, env = ("-m", "mpips.train", "--mode", "sync"), {"SLURM_PROCID": str(rank)}
        done = python(*words, cwd=tmp_path, code=2, SLURM_STEP_NUM_TASKS="2", **env)
        assert done.stderr.count("use srun --mpi=") == told, done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.one_mpi
def test_a_sample_that_is_nan_amid_training(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "nan.h5", "w") as file:
        x = np.ones((2600, 1024), "f4")  # blocks of 1024 samples
        x[1500, 7] = np.nan
        file["x"], file["y"] = x, np.arange(2600) % 3
    words = ("--dataset", "nan.h5", "--no-shuffle", "--mode", "sync", "--problem", "softmax")
    done = train(1, *words, cwd=tmp_path, timeout_s=LIMIT_S)
    assert "'x', sample 1500, element (7,) is nan in float32" in message_of(done, 1)
    assert "Traceback" not in done.output


# The user's own problem.


@pytest.mark.parametrize(
    ("problem", "mode"),
    [
        *(("Raises", "sync"), ("RaisesEverywhere", "async")),
        *(pytest.param(*of_one, marks=ONE_MPI) for of_one in LONG_RAISES),
    ],
)
def test_an_exception_ends_all_ranks(problem: str, mode: str, tmp_path: Path) -> None:
    """In 5 seconds, with its traceback last on the screen."""
    words = ["-m", "mpips.train", "--problem", f"{FAULTY}:{problem}", "--mode", mode, "--out"]
    words += ["run", "--checkpoint-every", "1steps", "--log-every", "0.05"]

    def job(env: Mapping[str, str]) -> Finished:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        return run(3, words, tmp_path, LIMIT_S, env)

    done = ends_soon(job, tmp_path)
    message = message_of(done, 1)
    raised = "SystemExit: 0" if problem == "Leaves" else "KeyError: 'a mistake of mine'"
    ranks = "[0-2]" if problem == "RaisesEverywhere" else "2"
    assert re.search(f"rank {ranks} raised {raised}, expected no exception", message), message
    assert done.output.count("Traceback (most recent call last)") == 1
    assert re.search(r'faulty.py", line \d+, in (fail|evaluate)', done.output)
    assert not re.search("MPI_Abort", done.output, re.IGNORECASE)
    assert shown(done.output)[-1] == raised, done.output
    assert not (tmp_path / "run" / "DONE").exists()
    if problem == "RaisesInEvaluate":  # found before the first step
        assert not list((tmp_path / "run" / "checkpoints").glob("step-*[1-9]*"))


def test_a_failed_job_removes_its_own_segments_alone(tmp_path: Path) -> None:
    """The user's file lies in shared memory too, even by the name of a segment."""
    with file_in_shared_memory() as mine:
        words = ("-m", "mpips.train", "--problem", f"{FAULTY}:RaisesWithAFileOfMine")
        env = {"FILE_OF_MINE": str(mine)}
        done = run(3, [*words, "--out", "run"], tmp_path, LIMIT_S, env)
        assert "a mistake of mine" in message_of(done, 1)
        assert np.load(mine).tolist() == [1.0, 2.0]
    made = (tmp_path / "segments.txt").read_text().split()
    assert made
    assert [path for path in made if Path(path).exists()] == []


@pytest.mark.parametrize("name", thinned(MODES, ["async"], ()))
def test_parameters_cannot_be_written(name: str, tmp_path: Path) -> None:
    """It would train another model than the one that is saved."""
    words = ("--problem", f"{FAULTY}:WritesParameters", "--mode", name, "--out", "run")
    message = message_of(train(3, *words, cwd=tmp_path, timeout_s=LIMIT_S), 1)
    assert re.search("raised ValueError: .* is read-only, expected no exception", message), message


# Runs that end by an error, or go on after one, in one world.


DIVERGED = {
    **{
        f"{problem} {mode}": f"--problem {FAULTY}:{problem} --mode {mode}"
        " --checkpoint-every 1steps --keep 1000"
        for problem, modes in (("NanLoss", ("async", "sync")), ("NanGradient", MODES))
        for mode in modes
    },
    # No loss shows the last update, but the last checkpoint is refused.
    "last async": f"--problem {FAULTY}:NanGradient --mode async --servers 2 --steps 5",
    "last sync": f"--problem {FAULTY}:NanGradient --mode sync --steps 5",
    # Two layers are needed: the loss of a softmax regression grows without ever overflowing.
    **{f"rate {mode}": f"--mode {mode} --optimizer sgd --lr 1e30" for mode in MODES[:2]},
}


@pytest.fixture(scope="module")
def runs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Runs that end as the command says, and leave a world in which others run."""
    plan = Plan(tmp_path_factory.mktemp("runs"))
    for name, line in DIVERGED.items():
        plan.add(name, 3, line.split(), code=1, quiet=False)
    shutil.copy(data / "good.npz", plan.folder)
    plan.add("data", 1, OTHER_DATA.split())
    plan.add("finished", 2, f"{QUICK} --mode sync --checkpoint-every 0".split())
    plan.run(300)
    return plan


@pytest.mark.parametrize("name", DIVERGED)
def test_a_loss_that_is_nan(name: str, runs: Plan) -> None:
    out = runs.out(name)
    lines = [line for line in runs.errors() if f"{out}{os.sep}" in line]
    message = message_of(Finished(1, "\n".join(lines)), 1)
    assert re.search(r"(loss|parameters) .*(nan|inf|not finite) at step \d+", message), message
    assert not (out / "DONE").exists()
    assert summary(out)["stop_reason"] == "diverged"
    (told,) = runs.outputs(name)
    assert told.count("saved in ") + 1 == told.count("not saved: it diverged") == 1
    assert np.isfinite(newest(out).read_params()).all()
