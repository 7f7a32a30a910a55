"""What a command line does, from outside: what is printed, what a run leaves, how it goes on."""

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch import ROOT, python, train
from runs import Plan, assert_same_state, final, newest, state, summary

from mpips import __version__
from mpips.checkpoint import list_checkpoints
from mpips.config import Config
from mpips.config.command_line import help_text
from mpips.config.jobfile import from_toml
from tests.chaos.exact import check_run

pytestmark = [pytest.mark.launch, pytest.mark.one_mpi]

LIMIT_S = 60.0
SHORT = ("--problem", "softmax", "--epochs", "2")


def test_texts_need_no_mpi(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('mode = "sync"\nseed = 3\nkeep = 7\n')
    lines = [
        ["--nonsense", "--help"],
        ["--version", "--mode", "sync"],
        ["job.toml", "--seed", "4", "--print-config"],
        ["--explain", "--ranks", "4", "--nodes", "2"],
    ]
    code = f"from mpips.train import main\nfor a in {lines}: assert main(a) == 0; print('====')"
    code += "\nimport sys; assert 'mpi4py' not in sys.modules"
    done = python("-c", code, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert done.stderr == ""
    helped, version, job, told, _ = done.stdout.split("====\n")
    assert helped == help_text()
    assert version == f"mpips {__version__}\n"
    assert from_toml(job) == Config(mode="sync", seed=4, keep=7)
    assert told.startswith("mode async, 17,226 parameters of 4 bytes: 68.9 kB\n")
    assert os.listdir(tmp_path) == ["job.toml"]


TARGET = ("--target-accuracy", "0.5", "--epochs", "500", "--eval-every", "0.5")
PLACED = ("--server-hosts", "*", "--servers", "2")


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Many runs, made in one world of 3 ranks."""
    folder = tmp_path_factory.mktemp("runs")
    plan = Plan(folder)
    plan.add("target", 3, (*TARGET, *PLACED))
    for mode in ("async", "sync"):
        every = ("--checkpoint-every", "5steps", "--log-every", "0", "--seed", "5")
        plan.add(f"first {mode}", 3, ("--mode", mode, *every, "--epochs", "2", "--clip", "9"))
    last = str(plan.out("first async"))
    other = ("--optimizer", "momentum", "--epochs", "1", "--init-from", last)
    plan.add("from async", 3, other)
    plan.add("evaluated async", 3, ("--init-from", last, "--eval-only"))
    rng = np.random.default_rng(0)
    given = {"b": np.full(10, 0.5, "f4"), "w": rng.normal(size=(64, 10)), "other": np.zeros(3)}
    np.savez(folder / "given.npz", **given)
    short = ("--problem", "softmax", "--init-from", str(folder / "given.npz"))
    plan.add("file", 3, (*short, "--mode", "local_sgd", "--steps", "3"))
    plan.add("file evaluated", 3, (*short, "--eval-only"), quiet=False)
    plan.add("again sync", 3, (str(plan.out("first sync") / "config.toml"),))
    plan.add("auto", 3, (*SHORT, "--prefetch", "--resume", "auto"))
    plan.add("auto", 3, (*SHORT, "--resume", "auto"))
    plan.add("auto", 3, ("--epochs", "3", "--resume", "--mode", "sync", "--servers", "1"))
    plan.add("turned", 3, (*SHORT, "--mode", "sync"))
    plan.add("turned", 3, ("--resume", "--mode", "async", "--epochs", "3"))
    plan.add("elastic", 3, (*SHORT[:2], "--epochs", "1", "--mode", "easgd"))
    each = ("--checkpoint-every", "1steps", "--keep", "1000")
    plan.add("elastic", 3, ("--resume", "--mode", "sync", "--epochs", "2", *each))
    plan.add("elastic", 3, ("--resume", "--mode", "async", "--epochs", "3"))
    plan.run(4 * LIMIT_S)
    return plan


def test_a_target_ends_the_run(plan: Plan) -> None:
    """Of a worker whose servers are placed by host."""
    out = plan.out("target")
    found = summary(out)
    assert (found["servers"], found["workers"]) == (2, 1)
    assert (found["stop_reason"], (out / "DONE").read_text()) == ("target", "target\n")
    assert found["epochs"] < 500
    assert found["accuracy"] >= 0.4  # the final parameters may be some updates further
    assert [row["reason"] for row in rows(out) if row["kind"] == "stop"] == ["target"]
    assert max(row["accuracy"] for row in rows(out) if row["kind"] == "eval") >= 0.5
    final(out)


def test_a_saved_job_runs_again(plan: Plan) -> None:
    first, again = plan.out("first sync"), plan.out("again sync")
    assert (first / "config.toml").read_text() == (again / "config.toml").read_text()
    assert_same_state(final(first), final(again))


def test_init_from_takes_the_parameters_alone(plan: Plan) -> None:
    out, source = plan.out("from async"), final(plan.out("first async"))
    begun, found = newest(list_checkpoints(out)[0]), summary(out)
    params, slots = state(begun)
    np.testing.assert_array_equal(params, source.read_params())
    assert (begun.step, slots.any()) == (0, False)
    assert (found["resumed_from"], found["epochs"]) == (None, 1)
    assert found["global_step"] == newest(out).step
    assert from_toml((out / "config.toml").read_text()).init_from == str(plan.out("first async"))


def test_init_from_a_file(plan: Plan) -> None:
    out = plan.out("file")
    begun = newest(list_checkpoints(out)[0])
    assert begun.step == 0
    found = begun.layout.views(begun.read_params())
    assert found.keys() == {"w", "b"}
    with np.load(plan.folder / "given.npz") as file:
        for name, array in found.items():
            np.testing.assert_array_equal(array, file[name].astype("f4"))
    (warning,) = (row["text"] for row in rows(out) if row["kind"] == "warning")
    assert re.fullmatch(r"not in the model, left out of .*given\.npz: other", warning)
    assert summary(out)["resumed_from"] is None
    (told,) = plan.outputs("file evaluated")
    assert re.search(r"given\.npz on 359 held-out samples: accuracy 0\.\d+, loss \d", told)


def test_resume_auto_starts_and_goes_on(plan: Plan) -> None:
    """A run that was started, found finished, and then given one epoch more in another mode."""
    out = plan.out("auto")
    starts = [row for row in rows(out) if row["kind"] == "start"]
    begun, found = starts[1]["step"], summary(out)
    assert [row["resumed"] for row in starts] == [False, True, True]
    assert [row["step"] for row in starts] == [0, begun, begun]
    assert (found["mode"], found["servers"], found["workers"]) == ("sync", 1, 2)
    assert (found["samples"], found["epochs"]) == (3 * 1438, 3)
    assert found["resumed_from"].endswith(f"step-{begun:012d}")
    assert final(out).step == found["global_step"] == begun + -(-1438 // 64)
    assert from_toml((out / "config.toml").read_text()).epochs == 3


@pytest.mark.parametrize("name", ["auto", "turned", "elastic"])
def test_a_run_that_goes_on_in_another_mode_is_complete(name: str, plan: Plan) -> None:
    assert check_run(plan.out(name)) == []


def test_slots_that_begin_anew_count_from_one(plan: Plan) -> None:
    """Replicas had them before. The first step of Adam, from slots of zeros, is its rate."""
    folders = list_checkpoints(plan.out("elastic"))
    before, after = (newest(folder).read_params() for folder in folders[1:3])
    assert np.abs(after - before).max() == pytest.approx(Config().learning_rate, rel=1e-3)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_the_numbers_of_a_summary_fit_together(mode: str, plan: Plan) -> None:
    s = summary(plan.out(f"first {mode}"))
    workers, servers = s["per_worker"], s["per_server"]
    assert (s["mode"], s["world"], s["seed"], s["epochs"]) == (mode, 3, 5, 2)
    assert s["parameters"] == 64 * 128 + 128 + 128 * 64 + 64 + 64 * 10 + 10
    assert s["samples"] == 2 * 1438 == sum(w["samples"] for w in workers)
    assert [w["steps"] for w in workers] == s["steps"]
    assert (len(workers), len(servers)) == (s["workers"], s["servers"] or s["workers"])
    assert len(s["peak_memory_mb"]) == 3
    assert sorted(r for node in s["nodes"] for r in node["ranks"]) == [0, 1, 2]
    assert {row["rank"] for row in [*workers, *servers]} == {0, 1, 2}
    for way in ("bytes_sent", "bytes_received"):
        assert sum(row[way] for row in workers) == s[way]
    applied = servers[0]["applied"]
    assert s["pushes_sent"] == s["pushes_applied"]
    assert applied == s["global_step"]
    assert sum(s["staleness"]["histogram"]) == applied * len(servers)
    # Parameters and Adam's two slots.
    assert sum(owner["bytes"] for owner in servers) == 3 * 4 * s["parameters"]
    assert s["wall_s"] >= s["train_s"]


def rows(out: Path) -> list[dict[str, Any]]:
    """Return the lines of ``metrics.jsonl``; each must be JSON by the letter, without NaN."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not JSON")

    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_metrics(mode: str, plan: Plan) -> None:
    found, result = rows(plan.out(f"first {mode}")), summary(plan.out(f"first {mode}"))
    kinds = [row["kind"] for row in found]
    assert set(kinds) == {"start", "train", "eval", "checkpoint", "end"}
    assert (kinds[0], kinds[-1]) == ("start", "end")
    told = [row for row in found if row["kind"] == "eval"][-1]
    ended = result["global_step"], result["eval_loss"], result["accuracy"]
    assert (told["step"], told["loss"], told["accuracy"]) == ended
    assert found[-1]["step"] == result["global_step"]
    stale = [row["staleness"] for row in found if row["kind"] == "train" and "staleness" in row]
    assert mode == "sync" or (stale and np.isfinite(stale).all())
    times = [row["time_s"] for row in found]
    assert times == sorted(times)
    for kind in ("train", "checkpoint"):
        steps = [row["step"] for row in found if row["kind"] == kind]
        assert steps == sorted(steps)


def test_a_quiet_evaluation_leaves_its_result(plan: Plan) -> None:
    out, run = plan.out("evaluated async"), plan.out("first async")
    assert plan.outputs("evaluated async") == ["\n"]
    assert os.listdir(out) == ["evaluation.json"]
    found, ended, saved = (
        json.loads((out / "evaluation.json").read_text()),
        summary(run),
        final(run),
    )
    means = found.pop("metrics")
    assert found == {"path": str(saved.path), "step": saved.step, "samples": 359}
    assert means["accuracy"] == pytest.approx(ended["accuracy"], abs=1e-12)
    assert means["loss"] == pytest.approx(ended["eval_loss"], rel=1e-6)


@pytest.mark.long
def test_a_run_in_the_default_folder(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('problem = "softmax"\nepochs = 5\nseed = 9\n')

    def job(*words: str, code: int = 0) -> str:
        return train(2, *words, cwd=tmp_path, timeout_s=LIMIT_S).check(code).output

    begun = job("job.toml", "--epochs", "1")
    (out,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"softmax-async-\d{8}-\d{6}", out.name)
    assert begun.count(f"run in runs/{out.name}\n") == 1
    saved = from_toml((out / "config.toml").read_text())
    assert saved == Config(problem="softmax", epochs=1, seed=9, lr=Config().learning_rate)
    assert summary(out)["command"] == "python -m mpips.train job.toml --epochs 1"
    older = tmp_path / "runs" / "softmax-async-20200101-000000"
    older.mkdir()
    (older / "config.toml").write_text("")
    (tmp_path / "runs" / "softmax-async-29990101-000000").mkdir()  # no run

    assert job("--resume", "--epochs", "2", "--quiet") == ""
    ended = summary(out)
    assert ended["epochs"] == 2
    short = job("--resume", "--epochs", "1", code=2)
    assert short.count("epochs 1 on resume, expected at least 2: 2.00 are over; leave out") == 1
    over = job("--resume")
    assert over.count("nothing is left to do: 2 epochs are over, and no more are asked for\n") == 1
    assert summary(out) == ended, "the figures of the run that trained"
    huge = job("job.toml", "--epochs", "1", "--accumulate", "99", "--out", "huge")
    each = "each update takes a whole epoch: 3,168 samples are asked for, it has 1,438\n"
    assert huge.count(each) == 1

    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "runs").rglob("*")}
    where = f"runs/{out.name}/checkpoints/step-{final(out).step:012d} on 359 held-out samples"
    told = f"{where}: accuracy {ended['accuracy']:.6f}, loss {ended['eval_loss']:.6f}"
    for options in (("--resume",), ("--init-from", f"runs/{out.name}", "--problem", "softmax")):
        done = train(1, "--eval-only", *options, cwd=tmp_path, timeout_s=LIMIT_S).check()
        assert done.output.splitlines() == [told]
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "runs").rglob("*")} == before
