"""`mpips.run`: programs with a training function of their own, on real ranks."""

import dataclasses
import os
import re
import signal
import textwrap
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import pytest
from launch import ROOT, Running, python, run
from runs import thinned, wait_for

import mpips
from mpips.config import OPTIONS, Config
from mpips.config.names import LEARNING_RATES
from mpips.config.validation import validate
from mpips.errors import Exit
from mpips.launch import mpirun
from mpips.library import optimizers
from mpips.library.data import Samples
from mpips.library.loop import TEXT_MAX, note
from mpips.library.start import checked
from mpips.mpi.process import MEETS

PROGRAMS = ROOT / "tests" / "library" / "programs"
LOOP = Template("""
import os, signal, sys, numpy as np, mpips, mpips.library.collectives, mpips.session.setup

mpips.library.collectives.PATIENCE_S = 1
means = lambda params, batch: {"loss": 0.0}

def train(worker):
    for batch in worker.batches(50, batch_size=5, epochs=2):
        worker.grads["w"][:] = 0
        $line
        worker.push($loss)
    $after

$before
result = mpips.run(train, {"w": np.zeros(3)}, out="out", quiet=True, mode="$mode")
$end
""")
STOP = "os.kill(os.getpid(), signal.SIGUSR1)"
AT_THE_START = f"""
def at_the_start(*args, load=mpips.session.setup._load):
    {STOP}
    return load(*args)

mpips.session.setup._load = at_the_start
"""
WARNED = r"^mpips: warning: the run in out {}: end with sys.exit\(result.code\)$"
PLAIN = {"line": "", "loss": "1.0", "after": "", "before": "", "mode": "sync", "end": ""}
# What the program has, its exit code (1 where a gradient was computed), and what is said.
ENDS = {
    "raises": (
        {"line": 'raise ValueError("so it is")', "mode": "async"}, 1, "ValueError: so it is"
    ),
    "early": (
        {"after": "if worker.id == 0: worker.barrier()", "mode": "async"}, 1,
        r"own.py:12: barrier\(\) after the loop, and on worker 1 the end of its function, exp",
    ),
    "unequal": (
        {"after": "worker.evaluate(means, 8 + worker.id)", "mode": "async"}, 1,
        r"own.py:12: evaluate\(\) of . samples after the loop, and on worker . "
        r"evaluate\(\) of . samples after the loop",
    ),
    "missing": (
        {"line": "if worker.id == 1: worker.evaluate(means, 9)"}, 2,
        r"own.py:10: evaluate\(\) of 9 samples in the loop, to which not all have come for 1 s",
    ),
    "diverged": ({"loss": "np.nan"}, 0, WARNED.format(r"failed \(diverged\)")),
    "saved": ({"loss": f"{STOP} or 1.0"}, 0, WARNED.format(r"was saved, .* \(SIGUSR1\)")),
    "heeded": ({"loss": "np.nan", "end": "sys.exit(result.code)"}, 1, ""),
    "at the start": ({"before": AT_THE_START}, 85, r"^mpips: own.py:\d+: SIGUSR1 before training"),
}  # fmt: skip
FAILS = """
import os, numpy as np, mpips

with mpips.Store(None, {{"w": np.zeros(3)}}) as store:
    {}
"""
IN_A_STORE = {
    "raises": ('if store.worker == 1: raise ValueError("so it is")', "ValueError: so it is"),
    "pulls": ("store.pull()", r"^mpips: own.py:5: pull on a server, expected a worker; look"),
}
BEFORE_A_RUN = """
import os, numpy as np, mpips

rank = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))
{}
mpips.run(lambda worker: None, {{"w": np.zeros(2)}}, mpips.SGD(0.1), out="out")
"""
RAISES = 'if rank == 1: raise FileNotFoundError("data.npy")'
OF_A_MODEL = """
import torch, mpips.torch

def net():
    if rank == 1: raise FileNotFoundError("weights.pt")
    return torch.nn.Linear(2, 1)

mpips.torch.run(lambda worker: None, model=net, optimizer=mpips.SGD(0.1), out="out")
"""
IN_A_PART = """
from mpi4py import MPI

comm = MPI.COMM_WORLD.Split(rank // 2)
if rank < 2: mpips.run(lambda worker: None, {"w": np.zeros(2)}, comm=comm, mode="asink")
MPI.COMM_WORLD.Barrier()
"""
EARLY = {  # what some ranks do, and what is said once
    "started": (f"import mpi4py.MPI\n{RAISES}", "FileNotFoundError: data.npy"),
    "none": (RAISES, "FileNotFoundError: data.npy"),
    "model": (
        OF_A_MODEL, r"own.py:\d+: model=net raised FileNotFoundError: weights.pt, expected a module"
    ),
    "part": (IN_A_PART, r"own.py:\d+: unknown mode 'asink'"),
    "alike": (
        'raise mpips.UserError("a file that is on no rank", "one on each")',
        r"own.py:\d+: a file that is on no rank, expected one on each",
    ),
}  # fmt: skip
ABSENT = """
import os, sys, time, mpips
names = ("PMI_RANK", "OMPI_COMM_WORLD_RANK")
is_absent = next(os.environ[name] for name in names if name in os.environ) == "1"
if sys.argv[1] == "leaves early" and is_absent:
    sys.exit(3)
from mpi4py import MPI
if sys.argv[1] == "leaves" and is_absent:
    sys.exit()
if sys.argv[1] == "is asked":
    import mpips.mpi.collective_errors
    mpips.mpi.collective_errors.SAVING_S = 0.1
while is_absent and not os.path.exists("told"):
    time.sleep(0.01)
def train(worker):
    for batch in worker.batches(3, batch_size=1, epochs=1):
        worker.grads["w"][:] = 0
        worker.push(0.0)
mpips.run(train, {"w": [0.0]}, mode="sync", timeout=4, out="out", quiet=True)
"""
NEVER_SERVES = """
import time, numpy as np, mpips

def busy():
    time.sleep(600)

with mpips.Store(None, {"w": np.zeros(3)}, timeout=2) as store:
    while store.worker is not None:
        store.grads["w"][:] = 0
        store.push()
    busy()
"""


ONCE = {r"^backup is printed\nonce$": 1}


@pytest.mark.launch
@pytest.mark.parametrize(
    ("ranks", "program", "told"),
    [
        pytest.param(3, "together.py", {"is done: together": 3, **ONCE}, marks=pytest.mark.one_mpi),
        # What goes in rounds has the other MPI: tests/matrix/test_serial.py.
        pytest.param(5, "tables.py served", {" is done": 5}, marks=pytest.mark.one_mpi),
        (4, "stores.py", {"is done": 4}),
    ],
)
def test_a_program_comes_to_its_end(
    ranks: int, program: str, told: dict[str, int], tmp_path: Path
) -> None:
    found = run(ranks, f"{PROGRAMS}/{program} {tmp_path}".split(), tmp_path, 240).check()
    for text, count in told.items():
        assert len(re.findall(text, found.output, re.M)) == count, found.output


@pytest.mark.launch
@pytest.mark.parametrize("absent", thinned(["leaves early", "leaves"], ["leaves early"]))
def test_a_rank_that_leaves_before_the_run(absent: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(ABSENT)
    done = run(3, ["own.py", absent], tmp_path)
    expected = "rank 1 ended before the run began, and rank [02] waits for it, expected every"
    assert len(re.findall(expected, done.output)) == 1, done.output
    assert done.code == 2, done.output


@pytest.mark.launch
def test_a_rank_that_comes_late_to_the_run(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(ABSENT)
    with Running(2, ["own.py", "is late"], tmp_path) as job:
        wait_for(job, lambda: "has not come to the run" in job.output())
        (tmp_path / "told").touch()
        done = job.wait(60)
    assert done.code == 0, done.output
    assert re.search(r"warning: rank 1 \(process \d+\) has not come to the run", done.output)


@pytest.mark.launch
def test_a_rank_that_waits_for_the_run_is_asked_to_stop(tmp_path: Path) -> None:
    def waiting() -> list[int]:
        return [k for k in job.ranks() if Path(f"/proc/{k}/comm").read_text() == f"{MEETS}\n"]

    (tmp_path / "own.py").write_text(ABSENT)
    with Running(2, ["own.py", "is asked"], tmp_path) as job:
        wait_for(job, lambda: bool(waiting()))
        os.kill(waiting()[0], signal.SIGTERM)
        done = job.wait(20)
    assert done.code == 85, done.output
    assert done.output.count("mpips: SIGTERM before the run began") == 1, done.output


@pytest.mark.launch
def test_a_store_whose_server_does_not_serve_ends_the_job(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(NEVER_SERVES)
    found = run(2, ["own.py"], tmp_path).check(1)
    assert re.search(r"no progress for \d+ s, and ranks wait", found.output), found.output
    assert re.search(r"0 +server 0 .* between steps +busy ", found.output), found.output
    assert re.search(r"1 +worker 0 .* waits for a buffer \(rank 0\) +Store.grads", found.output)


@pytest.mark.launch
@pytest.mark.parametrize("name", thinned(IN_A_STORE, ["pulls"]))
def test_an_exception_in_the_block_of_a_store_ends_the_job(name: str, tmp_path: Path) -> None:
    line, told = IN_A_STORE[name]
    (tmp_path / "own.py").write_text(FAILS.format(line))
    found = run(3, ["own.py"], tmp_path).check(1)
    assert re.search(told, found.output, re.M), found.output
    assert found.output.count("mpips: ") == 1, "told once"


@pytest.mark.launch
@pytest.mark.skipif(not mpirun.survivors_launcher(), reason="this MPI ends jobs whose ranks die")
def test_a_death_in_a_store_is_told_from_an_exception(tmp_path: Path) -> None:
    """It is found by the server, as it serves to the end, and by the worker, in its block."""
    dies = "while store.worker == 0: store.push()\n    if store.worker: os.kill(os.getpid(), 9)"
    (tmp_path / "own.py").write_text(FAILS.format(dies))
    with Running(3, ["own.py"], tmp_path, launcher=mpirun.survivors_launcher()) as job:
        done = job.wait(60).check(Exit.KILLED)
    assert done.output.count("rank 2 has died, expected all that this job needs") == 1, done.output


@pytest.mark.launch
@pytest.mark.parametrize("how", thinned(EARLY, ["model", "none"]))
def test_what_one_rank_raises_before_a_run_ends_the_job(how: str, tmp_path: Path) -> None:
    """Whether MPI has been started or not; the others would wait in the collectives of a run."""
    if how == "model":
        pytest.importorskip("torch")
    line, told = EARLY[how]
    (tmp_path / "own.py").write_text(BEFORE_A_RUN.format(line))
    found = run(3, ["own.py"], tmp_path)
    assert found.code not in (0, 124), found.output
    assert len(re.findall(told, found.output)) == 1, found.output
    if "own.py" in told:  # a mistake
        assert found.code == 2
        assert found.output.count("mpips: ") == 1, found.output
    assert not (tmp_path / "out").exists()


@pytest.mark.launch
def test_what_cannot_be_is_refused_alike_on_every_rank(tmp_path: Path) -> None:
    found = run(3, [str(PROGRAMS / "refused.py"), str(tmp_path / "run")], tmp_path).check(2)
    assert found.output.count("is done") == 3, found.output
    told = re.findall(r"^mpips: refused.py:\d+: params\['w'\] of dtype <U4", found.output, re.M)
    assert len(told) == 1, "nobody catches it"
    assert "Traceback" not in found.output


@pytest.mark.launch
@pytest.mark.parametrize("name", thinned(ENDS, ["raises", "missing", "diverged", "at the start"]))
def test_a_program_ends_as_its_run(name: str, tmp_path: Path) -> None:
    """With the trainer's exit code, or a warning, which comes once."""
    has, code, told = ENDS[name]
    (tmp_path / "own.py").write_text(LOOP.substitute(PLAIN | has))
    output = run(3, ["own.py"], tmp_path).check(code).output
    assert re.search(told, output, re.M), output
    assert len(re.findall("^mpips: warning: the run", output, re.M)) == ("warning" in told)
    if "own.py" in told or name == "raises":
        assert "own.py" in output, "the line of the program is there"
        assert str(ROOT / "mpips") not in output, "and none of ours"
        assert output.count("mpips: ") in (1, 1 + (name == "unequal")), "once, or by both"


# Without ranks -------------------------------------------------------------------------------


def test_importing_starts_nothing() -> None:
    """Neither MPI nor NumPy is loaded before a name is used that needs it."""
    heavy = "print([m for m in ('mpi4py', 'numpy', 'numba', 'h5py', 'torch') if m in sys.modules])"
    code = f"import sys, mpips; mpips.Adam(1e-3); dir(mpips); {heavy}"
    assert python("-c", code, cwd=ROOT).stdout == "[]\n"


@pytest.mark.parametrize(
    ("package", "told"),
    [("torch", "no PyTorch"), ("jax", "expected jax >= 0.4.30; pip install 'mpips[jax]'")],
)
def test_without_a_package_its_extra_is_named(package: str, told: str) -> None:
    code = (
        f"import sys; sys.modules['{package}'] = None\nimport mpips\n"
        f"try:\n    import mpips.{package}\nexcept mpips.UserError as error:\n    print(error)"
    )
    found = python("-c", code, cwd=ROOT).stdout
    assert told in found
    assert f"pip install 'mpips[{package}]'" in found


@pytest.mark.launch
@pytest.mark.one_mpi
def test_the_program_in_the_documentation(tmp_path: Path) -> None:
    assert mpips.__doc__ is not None
    (program,) = re.findall(r"^    import sys\n.*?\n(?=\S)", mpips.__doc__, re.M | re.S)
    (tmp_path / "program.py").write_text(textwrap.dedent(program))
    told = run(2, ["program.py"], tmp_path, 60).check().output
    (found,) = {*re.findall(r"^\[(.*)\]$", told, re.M)}
    np.testing.assert_allclose([float(word) for word in found.split()], [1, 2, 3], atol=0.1)


RULES = [rule for rule in vars(optimizers).values() if getattr(rule, "name", "") in LEARNING_RATES]


@pytest.mark.parametrize("rule", RULES)
def test_an_optimizer_is_options_of_a_job(rule: Any) -> None:
    assert rule().options() == {"optimizer": rule.name}
    numbers = {field.name: 0.125 for field in dataclasses.fields(rule)}
    options = rule(**numbers).options()
    assert options == {"optimizer": rule.name, **numbers}
    validate(dataclasses.replace(Config(), **options))
    assert set(options) <= set(OPTIONS)
    assert len(RULES) == len(LEARNING_RATES)


def test_numbers_of_numpy_are_options() -> None:
    found = checked({"batch_size": np.int64(3)}, mpips.Adam(np.float64(0.125)))
    assert found == {"batch_size": 3, "optimizer": "adam", "lr": 0.125}
    assert type(found["lr"]) is float


X = np.arange(12.0).reshape(6, 2)
KINDS: dict[str, tuple[Any, Any, Any]] = {
    "number": (6, None, None),
    "array": (X, X[[4, 1]], None),
    "pair": ((X, X[:, 0]), X[[4, 1]], X[[4, 1], 0]),
    "named": ({"a": X, "b": X[:, 1]}, {"a": X[[4, 1]], "b": X[[4, 1], 1]}, None),
    "sequence": (["a", "b", "c", "d", "e", "f"], ["e", "b"], None),
}


@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_taken_as_they_are(kind: str) -> None:
    data, x, y = KINDS[kind]
    samples = Samples(data)
    found = samples.convert(*samples.read(np.array([4, 1])), np.dtype("f4"))
    np.testing.assert_equal(found, (x, y))
    assert samples.n == 6


def test_numbers_and_short_texts_are_logged() -> None:
    text = "x" * TEXT_MAX
    found = note(2, 7, {"a": np.float32(0.5), "b": np.ones(()), "c": True, "d": text})
    assert found == {"step": 7, "worker": 2, "a": 0.5, "b": 1.0, "c": True, "d": text}
    assert all(type(value) in (int, float, bool, str) for value in found.values())
