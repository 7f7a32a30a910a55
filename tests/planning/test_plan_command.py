"""``python -m mpips plan``: its words, its errors, its JSON, and runs beside their predictions."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_simulator import SUMMARY

from mpips.config.jobfile import resolve, to_toml
from mpips.errors import UserError
from mpips.layout import Layout
from mpips.planning.needs import BASE_BYTES, check_memory, installed_bytes
from mpips.planning.simulator.asked import BYTES, Asked, count, quantity, rate, seconds, shown_time
from mpips.planning.simulator.prediction import START_S
from mpips.tools import plan

MODEL = "--parameters 1M --samples 100k --step-time 50ms --epochs 2"
WORLD = f"{MODEL} --workers 4 --simulate 40"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder, as `mpips.train` leaves it."""
    folder = tmp_path / "tried"
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps(SUMMARY))
    (folder / "config.toml").write_text(to_toml(resolve({"servers": 1, "epochs": 2})))
    lines: list[dict[str, Any]] = [{"kind": "start", "time_s": 1.0, "step": 0, "world": 3}]
    lines += [
        {"kind": "train", "time_s": 1.0 + t, "step": 20 * t, "epoch": t / 5, "samples": 640 * t,
         "loss": 1.0, "staleness": 1.5}
        for t in range(1, 11)
    ]  # fmt: skip
    lines += [{"kind": "end", "time_s": 12.0, "step": 200, "reason": "epochs"}]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


def test_units() -> None:
    times = {"0.3": 0.3, "300ms": 0.3, "12h": 43200, "2min": 120, "30d": 2_592_000, "50us": 5e-5}
    assert {text: seconds(text) for text in times} == pytest.approx(times)
    assert seconds("", 7.0) == 7
    assert (count("25.6M"), count("7"), count("")) == (25_600_000, 7, 0)
    assert [quantity(size, BYTES) for size in ("150kB", "12", "3MB", "5B")] == [150e3, 12, 3e6, 5]
    assert rate("10gbit") == 1.25e9
    assert Asked(slow="1x3,2x1.5").slow_workers == ((1, 3.0), (2, 1.5))
    words = {3e-5: "30 us", 0.31: "310 ms", 4.5: "4.5 s", 80: "1 min 20 s", 7200: "2 h",
             183_600: "2 d 3 h", 59.99: "60 s", 3599.9: "1 h", float("inf"): "never"}  # fmt: skip
    assert {value: shown_time(value) for value in words} == words


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (MODEL, "a plan without a world, expected --workers N; or --from RUN"),
        ("--parameters 25M --workers 4", "25M without --step-time, expected --step-time TIME; a "),
        (f"{WORLD} --link fast", "link 'fast', expected a rate such as 100mbit or 25gbit"),
        (f"{WORLD} --slow 1x0.5", "slow '1x0.5', expected factors >= 1"),
        (f"{WORLD} --slow 5x2", "5 slow workers of 4, expected at most as many as there are"),
        (f"{WORLD} --nodes 9", "nodes 9 with 5 ranks, expected nodes <= 5"),
        (f"{WORLD} --deadline 3h", "--deadline without --search, expected --search with it"),
        (f"{WORLD} --from nowhere", "--from nowhere, expected the folder of a run"),
        (f"{WORLD} --mode sync --codec powersgd", "--codec powersgd with --parameters, expected"),
        (f"{WORLD} --mtbf 10s", "expected checkpoints that are reached"),
        (f"{WORLD} --frm x", "unknown option --frm, expected one of those"),
    ],
)
def test_mistakes(words: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(words.split()) == 2
    told = capsys.readouterr().err
    assert told.startswith("mpips: ")
    assert error in told


def text_of(words: str) -> str:
    return plan.write(words.split())


def planned(words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text_of(f"{words} --json"))
    return found


def test_json_of_a_plan() -> None:
    found, again = (planned(f"{WORLD} --servers 1") for _ in range(2))
    for each in (found, again):
        del each["simulation"]["seconds"]
    assert found == again, "equal words make equal plans"
    assert (found["ranks"], found["nodes"], found["parameter_bytes"]) == (5, 5, 4_000_000)
    link = found["links"][0]
    assert (link["nodes"], link["servers"], link["workers"]) == (1, 1, 0)
    assert link.keys() == {"nodes", "servers", "workers", "sends", "receives"}
    assert sum(found["staleness"]["histogram"]) == 4 * 40
    assert found["worker_bytes"] == pytest.approx(BASE_BYTES + 5 * 4e6)  # shared pulls' is the last
    assert found["server_bytes"] == pytest.approx(BASE_BYTES + (2 * 3 + 1 + 2) * 4e6)
    assert found["batches"] == 2 * math.ceil(100_000 / (32 * 4))
    trained_s = found["batches"] * found["step_s"]
    assert found["end_s"] == pytest.approx(START_S + trained_s, rel=0.01)
    assert found["core_hours"] == pytest.approx(5 * found["end_s"] / 3600)
    assert found["samples_per_s"] == pytest.approx(4 * 32 / found["step_s"])
    assert found["step_s"] >= 0.98 * found["step_formula_s"]
    assert sum(found["workers_time"].values()) == pytest.approx(1)
    for more, what in (("", "computing"), (" --link 100mbit", "links of 1 node with 1 server")):
        assert planned(f"{WORLD} --servers 1{more}")["bottleneck"]["what"] == what


def test_figures_that_are_not_given_are_told() -> None:
    """In text and JSON; a start takes seconds."""
    given = f"{WORLD} --link 1gbit --batch-size 32 --mtbf 1000d"
    found = planned(given)
    assert found["assumed"] == {
        "mpi": "mpich", "servers": "1", "nodes": "one a rank", "latency": "50us", "jitter": "0.1",
        "slow": "none", "sample_bytes": "0", "storage": "no limit", "restart": "2min",
        "start_up": "5 s",
    }  # fmt: skip
    told = " ".join(text_of(given).split())
    listed = ", ".join(f"{name} {value}" for name, value in found["assumed"].items())
    assert told.endswith(f"assumed: {listed}")
    here = planned("--workers 2 --epochs 1 --mode sync")
    assert here["lifetime"]["start_s"] == START_S
    assert here["end_s"] == START_S + here["batches"] * here["step_s"]
    assert here["assumed"]["parameters"] == "17,226 (problem mlp)"
    assert here["assumed"]["step_time"].endswith(" (measured here)")
    assert not {"epochs", "servers", "restart"} & set(here["assumed"])


def test_a_job_is_measured_where_nothing_is_said(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text('problem = "softmax"\nepochs = 2\nmode = "sync"\n')
    found = planned(f"{job} --workers 2")
    assert (found["mode"], found["parameter_bytes"]) == ("sync", 4 * 650)
    assert (found["batches"], found["servers"]) == (2 * 23, 0)
    served = planned(f"{MODEL} --workers 9 --simulate 20")
    assert (served["servers"], served["ranks"]) == (2, 11), "as in a world of all these"


@pytest.mark.parametrize(
    ("options", "nodes", "workers"),
    [
        ({"mode": "sync"}, 1, 7),  # a gradient each, and the replica that a round shares
        ({"mode": "sync", "reduce": "allreduce"}, 1, 4),  # and a replica each
        ({"mode": "sync", "codec": "powersgd", "optimizer": "momentum"}, 1, 7),
        # The error, and slots that others own too.
        ({"mode": "sync", "codec": "powersgd", "optimizer": "momentum"}, 2, 5),
        ({"prefetch": True}, 1, 2),
        ({"mode": "local_sgd", "optimizer": "sgd"}, 1, 3),
        ({"mode": "easgd", "optimizer": "momentum"}, 1, 1),
    ],
)
def test_a_model_that_a_host_cannot_hold(options: dict[str, Any], nodes: int, workers: int) -> None:
    eighth = Layout.of({"w": (installed_bytes() // 8 // 4,)})
    check_memory(eighth, resolve(options), workers, nodes)
    with pytest.raises(UserError, match=f"{workers + 1} workers with .* take"):
        check_memory(eighth, resolve(options), workers + 1, nodes)


def test_a_job_with_tables(tmp_path: Path) -> None:
    """Its rows cross links and take memory; where a batch's are not known, the plan says so."""
    file = tmp_path / "sparse.svm"
    chance = np.random.default_rng(1)
    ids = (np.sort(chance.choice(5000, 12, replace=False) + 1) for _ in range(640))
    lines = (f"{each[0] % 2} {':1 '.join(map(str, each))}:1\n" for each in ids)
    file.write_text("".join(lines))
    job = f"--problem factorization_machine --dataset {file} --epochs 2"
    job += " --workers 3 --servers 2 --link 100mbit --simulate 40"
    found = planned(f"{job} --step-time 1ms")
    rows, dim, moved = 32 * 12 * 0.95, 8 + 1, found["row_bytes"]  # some of a batch's are alike
    assert moved["params"] == pytest.approx(4 * dim * rows, rel=0.05)
    lists = moved["grads"] - moved["params"]
    assert 2 * rows * 0.95 < lists < 2 * rows * 1.05  # 1 byte a row in each list
    assert found["step_s"] > moved["params"] / 12.5e6
    half = planned(f"{job} --step-time 1ms --codec fp16")
    assert half["row_bytes"]["grads"] - lists == pytest.approx(moved["params"] / 2)
    assert "rows of tables: a batch reads 13" in text_of(job)
    unknown = f"{job} --parameters 9 --samples 640 --step-time 1ms"
    assert "rows of tables, if any, are not counted" in text_of(unknown)
    without = planned(unknown)
    assert without["row_bytes"] is None
    assert found["server_bytes"] - without["server_bytes"] > 5000 * dim * 4 / 2


@pytest.mark.parametrize(
    "words",
    [
        "--mode easgd --tau 4",
        "--mode ssp --staleness-bound 0 --servers 2",
        "--mode sync --servers 2 --backup-workers 1",
        "--mode sync --codec powersgd",
        "--mode sync --reduce allreduce --nodes 2",
        "--mode local_sgd --local-steps 4 --overlap-steps 2 --local-slots keep",
        "--accumulate 4 --nodes 1 --steps 50",
        "--nodes 2 --node-aggregation --prefetch --codec topk",
        "--node-size 2 --server-ranks 0,3 --checkpoint-every 20steps --mtbf 30h",
        "--spares 1 --evaluators 1 --servers 2",
    ],
)
def test_every_kind_of_job(words: str) -> None:
    length = "" if "--steps" in words else "--epochs 2"
    found = planned(f"--step-time 50ms --workers 6 --simulate 40 {length} {words}")
    assert found["workers"] == 6
    assert 0.3 * 0.05 < found["step_s"] < 0.2
    assert found["step_s"] > 0.98 * found["step_formula_s"] or found["nodes"] > 1
    assert found["end_s"] > found["batches"] * found["step_s"] > 0
    assert found["worker_bytes"] > 1e8


def test_rounds_take_longer_by_open_mpi() -> None:
    """By a fifth of what their bytes need on links; what is served does not."""
    world = f"{MODEL} --workers 3 --link 1gbit --jitter 0 --simulate 20 --mode"
    sync, served = (
        [planned(f"{world} {mode} {mpi}")["step_s"] for mpi in ("", "--mpi openmpi")]
        for mode in ("sync", "async")
    )
    moved = 2 * 2 / 3 * 4e6 / (0.94 * 125e6)
    assert sync[1] - sync[0] == pytest.approx(0.2 * moved, rel=1e-3)
    assert served[0] == served[1]


def test_a_search_in_words_and_json() -> None:
    words = f"{MODEL} --workers 4 --search --simulate 20 --deadline"
    told, found, late = text_of(f"{words} 1h"), planned(f"{words} 1h"), text_of(f"{words} 1s")
    assert told.startswith("cheapest of ")
    assert "why not another" in told
    assert "\nassumed: mpi mpich, " in told
    assert found["best"]["end_s"] <= 3600
    assert all(other["why"] for other in found["others"])
    assert "link" in found["assumed"]
    assert not {"servers", "mode", "codec"} & set(found["assumed"])
    assert late.startswith("none of ")
    assert "the fastest takes" in late


def test_the_start_up_is_the_run_s(run: Path) -> None:
    """From its start to its first step, by what it took in all."""
    at_once = planned(f"--from {run}")
    assert at_once["assumed"]["start_up"] == "5 s"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines[1:]:
        line["time_s"] += 0.5  # before the first step, which is not between steps
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    later = {"wall_s": 15.0, "train_s": SUMMARY["train_s"] + 0.5}
    (run / "summary.json").write_text(json.dumps({**SUMMARY, **later}))
    found = planned(f"--from {run}")
    assert found["step_s"] == pytest.approx(at_once["step_s"], rel=1e-9)
    assert found["lifetime"]["start_s"] == pytest.approx(15 - 11)
    told = {"link", "latency", "jitter", "slow", "sample_bytes", "storage", "mtbf"}
    assert set(found["assumed"]) == told
    with pytest.raises(UserError, match="without --step-time, expected --step-time TIME"):
        planned(f"--from {run} --parameters 25M")


def test_a_run_beside_its_prediction(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = text_of(f"--from {run} --link 1gbit")
    assert "1 server and 2 workers on 2 nodes" in told
    assert "the run itself:    measured  predicted" in told
    found = planned(f"--from {run}")["run"]
    assert found["step_s"] == pytest.approx(0.1)  # 640 samples a second of two workers
    assert found["staleness"] == 1.5
    head, rule, row = text_of(f"--compare {run} {run}").splitlines()[:3]
    assert head.count("|") == rule.count("|") == row.count("|")
    assert row.startswith("| tried | 10gbit | 2 nodes, 1 + 2 ranks | 100 | ")
    elsewhere = text_of(f"--from {run} --workers 6 --servers 2")
    assert "2 servers and 6 workers on 8 nodes" in elsewhere
    assert "the run itself" not in elsewhere
    (run / "summary.json").unlink()
    assert plan.main(["--from", str(run)]) == 2
    assert "expected a run that has ended; it has no summary.json" in capsys.readouterr().err
