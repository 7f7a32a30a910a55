"""``python -m mpips plan``: its simulator beside closed forms, and its words, errors and JSON."""

import contextlib
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpips.config.jobfile import resolve, to_toml
from mpips.errors import UserError
from mpips.layout import Layout
from mpips.layout.roles import assign, shares
from mpips.optim import rule_of
from mpips.planning import traffic
from mpips.planning.explain import Topology, case_of
from mpips.planning.needs import (
    BASE_BYTES,
    Measured,
    available_bytes,
    check_memory,
    memory_bytes,
    needs,
    shard_slots,
)
from mpips.planning.simulator.asked import BYTES, Asked, count, quantity, rate, seconds, shown_time
from mpips.planning.simulator.model import (
    Simulated,
    Speeds,
    Work,
    mpi_of,
    run_of,
    speeds_of,
    table_bytes_of,
    tables_of,
)
from mpips.planning.simulator.prediction import START_S, Facts, Hazards, live, predict
from mpips.planning.simulator.search import Proposal, search, variants
from mpips.planning.simulator.simulation import MOST_LANES, lanes_of, simulate
from mpips.planning.traffic import Case, Rows
from mpips.tools import plan

N = 16 * 36_000  # parameters: as many cache lines for each of up to 6 servers
M = 4 * N
LINK = 1e8
PIPE_S = M / LINK  # of all parameters over a link
FAST: dict[str, Any] = {"link": LINK, "latency_s": 0.0, "apply": 1e15, "copy": 1e15}


def case(workers: int, servers: int, node_of: list[int] | None = None, **kinds: Any) -> Case:
    """Return a served job, by default of a node a rank, the servers first."""
    node_of = node_of or list(range(workers + servers))
    hosts = [f"host{node}" for node in node_of]
    mode = "sync" if kinds.get("rounds") else "async"
    roles = assign(mode, hosts, node_of, servers, tuple(range(servers)))
    sizes = tuple(shard.size * 4 for shard in shares(N, roles, 4))
    return Case(roles, tuple(node_of), sizes, **kinds)


def simulated(of: Case, speeds: Speeds, units: int = 200, **more: Any) -> Simulated:
    return simulate(Work(of, speeds, **more), units)


def test_one_worker_and_one_server() -> None:
    """A step is computing, the way there and back, and the pull; the push is hidden."""
    found = simulated(case(1, 1), Speeds(0.5, **{**FAST, "latency_s": 1e-3}))
    assert found.step_s == pytest.approx(0.5 + 2e-3 + PIPE_S, rel=1e-12)
    assert found.stale()["mean"] == pytest.approx(1, abs=0.01)  # its own push is not in its read
    # A pipe that is full: the push after this one waits for it.
    assert simulated(case(1, 1), Speeds(0.0, **FAST)).step_s == pytest.approx(PIPE_S)
    near = simulated(case(1, 1, [0, 0]), Speeds(0.5, **{**FAST, "copy": LINK, "apply": LINK}))
    assert near.step_s == pytest.approx(0.5 + PIPE_S)


def test_a_near_shard_is_read_before_the_remote_ones_are_here() -> None:
    """So a worker's own push is in neither, unless a bound on clocks has it wait for that."""
    of, speeds = case(1, 2, [0, 1, 0]), Speeds(0.5, **{**FAST, "apply": 10 * LINK})
    assert simulated(of, speeds).stale()["mean"] == pytest.approx(1, abs=0.01)
    assert simulated(of, speeds, bound=1).stale()["mean"] == 0
    # Its server has applied it if it takes less than the time between steps, of which it is random.
    pause_s = PIPE_S / 4
    for apply_s, near in ((1e-9, 0.0), (0.1, 1.0), (pause_s, 1 - math.exp(-1))):
        paused = dataclasses.replace(speeds, between_s=pause_s, apply=M / 2 / apply_s)
        found = simulated(of, paused, 5000)
        assert found.stale()["mean"] == pytest.approx((1 + near) / 2, abs=0.02)
        assert found.parts["compute"] * found.step_s == pytest.approx(0.5 + pause_s, rel=0.01)


@pytest.mark.parametrize("rounds_", [False, True])
def test_rows_are_messages_too(rounds_: bool) -> None:
    """As many bytes of rows as of parameters take as long; here no core is waited for."""
    plain = case(3, 0, [0, 1, 2], rounds=True) if rounds_ else case(2, 2)
    empty = dataclasses.replace(plain, shards=(0,) * len(plain.shards))
    rows = dataclasses.replace(empty, rows=Rows(float(M), float(M)))
    found, expected = (simulated(of, Speeds(PIPE_S, **FAST)).step_s for of in (rows, plain))
    assert simulated(empty, Speeds(0.5, **FAST), quota=True).step_s == pytest.approx(0.5)
    many = 2.0 if rounds_ else 1.0  # workers send their rows by themselves, as there in sums
    assert found == pytest.approx(expected, rel=0.02 * many)


def test_an_idle_link_is_the_formula_s() -> None:
    """Workers whose pulls do not meet: computing and a pull, or with prefetch computing alone."""
    speeds = Speeds(10.0, 0.5, **FAST)
    for ahead in (False, True):
        of = case(3, 1, prefetch=ahead)
        formula = traffic.step_s(of, LINK, 10.0)
        assert simulated(of, speeds, 1000).step_s == pytest.approx(formula, rel=0.03)


def test_a_slow_server_that_receives_many_pushes_at_a_time() -> None:
    """The worker is ahead of it by as many; each is an event that has not come yet."""
    found = simulated(case(1, 1), Speeds(0.0, **{**FAST, "apply": LINK / 10}), places=1000)
    assert found.stale()["max"] == pytest.approx(61, abs=1)
    assert found.step_s == pytest.approx(10 * PIPE_S, rel=0.4)


def test_steps_of_each_worker() -> None:
    """With a number of steps a worker that is near its server is done before the others."""
    of, speeds = case(3, 1, [0, 0, 1, 2]), Speeds(0.001, **FAST)
    shared, alone = simulated(of, speeds), simulated(of, speeds, quota=True)
    assert alone.step_s == pytest.approx(2 * PIPE_S, rel=0.02)
    assert shared.step_s < 0.5 * alone.step_s
    assert alone.staleness.sum() == shared.staleness.sum() == 600


def test_servers_that_are_alike_are_taken_together() -> None:
    many = case(48, 32)
    assert len(lanes_of(many)) == MOST_LANES
    found = simulated(many, Speeds(0.01, 0.1, link=LINK), 60)
    assert found.step_s == pytest.approx(traffic.step_s(many, LINK, 0.01), rel=0.05)
    assert sum(busy.nodes for busy in found.links) == 80


def test_reading_data_can_be_the_bottleneck() -> None:
    speeds = Speeds(0.01, **FAST, batch_bytes=1e6, storage=2e6)
    found = simulated(case(4, 1), speeds)
    assert found.step_s == pytest.approx(4 * 0.5, rel=0.01)
    assert found.storage == pytest.approx(1, abs=0.02)
    assert simulated(case(4, 0, rounds=True), speeds).step_s == pytest.approx(4 * 0.5)


def test_a_slow_worker() -> None:
    """Of six one takes five times as long: in rounds all do, elsewhere it alone."""
    speeds = Speeds(1.0, slow=((1, 5.0),), **FAST)
    alone = simulated(case(6, 1), speeds, 500)
    assert alone.step_s == pytest.approx(6 / 5.2, rel=0.04)
    assert simulated(case(6, 0, rounds=True), speeds).step_s >= 5
    backed = simulated(case(6, 1), speeds, backup=1)
    words = "--step-time 1s --workers 6 --servers 1 --mode sync --backup-workers 1 --slow 1x5"
    found = planned(f"{words} --steps 60 --parameters 1M --samples 100k --jitter 0.1")
    assert found["samples_per_s"] == pytest.approx(5 * 32 / found["step_s"])
    assert 60 < found["batches"] < 60 * 6 / 5
    assert backed.step_s < 1.3
    assert 0.02 < backed.dropped < 1 / 6
    bound = simulated(case(6, 1), speeds, 500, bound=1)
    assert alone.step_s < bound.step_s < 5
    assert bound.parts["wait"] > 0.2
    with pytest.raises(UserError, match="7 slow workers of 6, expected at most as many"):
        simulated(case(6, 1), Speeds(1.0, slow=((7, 2.0),)))


def test_rounds_of_equal_times() -> None:
    of = case(4, 0, rounds=True)
    assert simulated(of, Speeds(0.2, **FAST)).step_s == pytest.approx(traffic.step_s(of, LINK, 0.2))
    local = case(4, 0, rounds=True, every=5, hidden=0.4)
    whole = traffic.step_s(dataclasses.replace(local, hidden=0), LINK, 0.2)
    found = simulated(local, Speeds(0.2, **FAST)).step_s
    assert found == pytest.approx(whole - min(traffic.link_s(local, LINK), 0.4 * 0.2))
    slower = simulated(of, Speeds(0.2, 0.3, **FAST), 2000)
    draws = np.random.default_rng(0).lognormal(sigma=math.sqrt(math.log1p(0.09)), size=(9999, 4))
    mean = draws.max(axis=1).mean() / math.sqrt(1.09)
    assert slower.step_s == pytest.approx(0.2 * mean + traffic.link_s(of, LINK), rel=0.02)


JOINED = case(3, 1, [0, 1, 1, 1], one_pull=True, one_push=True, grads=0.1)
BESIDE = case(6, 2, [0, 1, 2, 2, 2, 3, 3, 3], one_pull=True)
FOUND = (  # a job, seconds of a step, of a gradient's application, and the bound; what comes of it
    (BESIDE, 0.05, 1e9, None, (0.08365590407946542, 9.5125, 25)),
    (JOINED, 0.001, 1e09, None, (0.06628312500000451, 3.033333333333333, 5)),
    (case(5, 1), 0.2, 3e7, 2, (0.40399243316311545, 3.9, 9)),
    (case(7, 3), 0.001, 1e9, 2, (0.05643343427768523, 5.421428571428572, 7)),
    (case(7, 3), 0.05, 1e9, 0, (0.20382171515317693, 3, 6)),
)


@pytest.mark.parametrize(("of", "step_s", "apply", "bound", "found"), FOUND)
def test_events(
    of: Case, step_s: float, apply: float, bound: int | None, found: tuple[float, float, int]
) -> None:
    """Seconds of a step, mean staleness and the largest, of 20 steps of each worker."""
    speeds = Speeds(step_s, 0.4, ((1, 2.0),), link=LINK, latency_s=1e-4, apply=apply,
                    batch_bytes=1e4 * (of is JOINED), storage=1e6)  # fmt: skip
    came = simulate(Work(of, speeds, bound=bound, seed=3), 20)
    workers, servers = len(of.roles.workers), len(of.roles.servers)
    assert came.staleness.sum() == workers * servers * 20
    assert (came.step_s, came.stale()["mean"], came.stale()["max"]) == pytest.approx(found, 1e-9)


def test_failures_are_daly_s() -> None:
    hazards = Hazards(mtbf_s=5000, restart_s=100, period_s=600, save_s=20, start_s=30)
    found = live(36_000, hazards, seed=0, lives=3000)
    # Daly's formula, with a whole number of periods.
    expected_s = 5000 * math.exp(100 / 5000) * 60 * math.expm1(620 / 5000)
    assert found.mean_s == pytest.approx(30 + expected_s, rel=0.03)
    assert found.p90_s > found.mean_s
    assert found.lost_s > 0
    assert found.failures == pytest.approx(found.mean_s / 5000, rel=0.1)
    trained = 36_000 + 60 * 20 + found.lost_s  # and saved
    assert found.mean_s == pytest.approx(30 + trained + 100 * found.failures, rel=0.01)
    never = Hazards(period_s=100, save_s=2, start_s=7)  # fails, and takes no restart
    found = live(1000, never, seed=0)
    assert (found.mean_s, found.p90_s, found.failures, found.lost_s) == (1027, 1027, 0, 0)
    often = live(86_400, Hazards(mtbf_s=30, save_s=1), seed=0)  # in a second, not in minutes
    assert often.mean_s > 100 * 86_400
    with pytest.raises(UserError, match="shorter --checkpoint-every"):
        live(1e6, Hazards(mtbf_s=100, period_s=3600), seed=0)


def world(ranks: int) -> tuple[list[str], list[int]]:
    return [f"host{k}" for k in range(ranks)], list(range(ranks))


FACTS = Facts(
    Measured(N, 100_000, 0, 0),
    Speeds(0.05, link=LINK),
    codecs={"fp16": 0.5, "int8": 0.25},
    simulated=40,
)


def test_the_search_finds_the_cheapest() -> None:
    """It leaves out what cannot be: the result is that of trying all."""
    config = resolve({"epochs": 2})
    free = search(config, 8, world, FACTS)
    deadline_s = 0.6 * free.fastest.lifetime.mean_s
    found = search(config, 8, world, FACTS, deadline_s)
    jobs = []
    for workers, changes in variants(config, 8):
        with contextlib.suppress(UserError):
            job = resolve({"server_ranks": (), "backup_workers": 0, **changes}, vars(config))
            jobs.append(predict(job, *world(workers + changes["servers"]), FACTS))
    best = found.best
    cheapest = min(job.core_hours for job in jobs if job.lifetime.mean_s <= deadline_s)
    assert best is not None
    assert best.core_hours == pytest.approx(cheapest)
    assert best.core_hours > free.fastest.core_hours
    assert best.lifetime.mean_s <= deadline_s
    assert found.others
    assert all(why.startswith(("too late: ", "+")) or "%" in why for _, why in found.others)
    assert "--mode" in Proposal.options(best)


SUMMARY: dict[str, Any] = {
    "nodes": [{"host": "a", "ranks": [0, 2]}, {"host": "b", "ranks": [1]}],
    "servers": 1, "workers": 2, "parameters": N, "samples": 6400, "epochs": 2.0,
    "samples_per_s": 640.0, "train_s": 10.0, "bytes_pulled": 100 * M,
    "staleness": {"mean": 1.5},
    "per_worker": [
        {"rank": 1, "samples": 3200, "compute_s": 4.0, "pull_s": 2.0, "push_s": 1.0, "wait_s": 2.0},
        {"rank": 2, "samples": 3200, "compute_s": 8.0, "pull_s": 0.5, "push_s": 0.5, "wait_s": 0.5},
    ],
    "per_server": [{"rank": 0, "bytes": M, "applied": 200, "busy_s": 2.0}],
}  # fmt: skip


def test_a_run_s_times_are_taken() -> None:
    config = resolve({})
    found = speeds_of(SUMMARY, config, Speeds(0.0, link=LINK))
    assert found.step_s == pytest.approx(0.06)
    assert found.each == pytest.approx((4 / 6, 8 / 6))
    assert found.between_s == pytest.approx((20 - 9 - 9.5) / 200)
    begun = speeds_of(SUMMARY, config, Speeds(0.0), start_s=0.25)
    assert begun.between_s == pytest.approx((20 - 0.5 - 9 - 9.5) / 200)
    assert found.apply == pytest.approx(200 * M / 2)
    assert found.copy == Speeds(0.0).copy  # its pulls went over links
    run = run_of(SUMMARY, config)
    assert (run.node_of, run.hosts, run.server_ranks) == ((0, 1, 0), ("a", "b", "a"), (0,))
    assert (run.samples, run.staleness) == (3200, 1.5)
    assert (mpi_of(SUMMARY), mpi_of({"mpi": "Open MPI v5.0.7"})) == ("mpich", "openmpi")
    assert run.step_s == pytest.approx(2 * 32 / 640)
    assert case_of(config, Topology(run.hosts, run.node_of, N, LINK)).nodes == 2
    with pytest.raises(UserError, match="a summary without times"):
        run_of({k: v for k, v in SUMMARY.items() if k != "nodes"}, config)


def test_a_run_s_rows_are_taken() -> None:
    """Of 200 batches; what a server has beside parameters and slots are rows."""
    config = resolve({"optimizer": "momentum"})
    server = {**SUMMARY["per_server"][0], "bytes": 2 * M + 3000, "rows_pushed": {"t": 4000}}
    tables = {"t": {"rows": 100, "dim": 8, "changed": 50}}
    run = {**SUMMARY, "per_server": [server], "tables": tables}
    assert tables_of(run, config) == ((100, 8, 20.0),)
    assert table_bytes_of(run, config) == 3000
    applied = 200 * (M + 4 * 8 * 20)
    assert speeds_of(run, config, Speeds(0.0)).apply == pytest.approx(applied / 2)
    assert tables_of({**run, "per_server": SUMMARY["per_server"]}, config) is None
    assert (tables_of(SUMMARY, config), table_bytes_of(SUMMARY, config)) == ((), 0)


MODEL = "--parameters 1M --samples 100k --step-time 50ms --epochs 2"
WORLD = f"{MODEL} --workers 4 --simulate 40"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder, as `mpips.train` leaves it."""
    folder = tmp_path / "tried"
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps(SUMMARY))
    (folder / "config.toml").write_text(to_toml(resolve({"epochs": 2})))
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
        (f"{WORLD} --nodes 2 --node-size 3", "nodes 2 with node_size 3, expected one of them"),
        (f"{WORLD} --deadline 3h", "--deadline without --search, expected --search with it"),
        (WORLD.replace("--epochs", "--search --steps"), "--search with steps 2, expected --epochs"),
        (f"{WORLD} --from nowhere", "--from nowhere, expected the folder of a run"),
        ("--compare a --json", "--compare with --from, --search or --json, expected --compare"),
        (f"{WORLD} --mode sync --codec powersgd", "--codec powersgd with --parameters, expected"),
        (f"{WORLD} --mtbf 10s", "expected checkpoints that are reached"),
        (f"{WORLD} --mtbf 0", "a failure every 0 s with"),
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


@pytest.mark.parametrize(("mode", "together"), [("async", 4), ("sync", 1), ("local_sgd", 1 / 8)])
def test_checkpoints_by_updates(mode: str, together: float) -> None:
    """All workers make updates, of a step each or of several, and the step takes its whole time."""
    world = f"{WORLD} --mode {mode} --link 100mbit --mtbf 30h --checkpoint-every"
    found = planned(f"{world} 40steps")
    assert found["lifetime"]["saving_s"] > 0
    again = planned(f"{world} {40 * found['step_s'] / together:.6f}")
    for name in ("saving_s", "lost_s"):
        assert found["lifetime"][name] == pytest.approx(again["lifetime"][name], rel=0.1)


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
    few, each = (planned(f"{MODEL} --workers 5 --simulate 20 --nodes {n}") for n in (4, 6))
    assert few["server_bytes"] == each["server_bytes"], "of the one server"


@pytest.mark.parametrize(
    ("options", "slots"),
    [
        ({"ema": 0.9}, ("ema", "m", "v")),
        ({"mode": "easgd"}, ()),
        ({"mode": "local_sgd"}, ("m", "v")),
        ({"mode": "local_sgd", "outer_momentum": 0.9}, ("m", "v", "outer_velocity")),
        ({"mode": "local_sgd", "local_slots": "keep", "fragments": 2}, ("outer_velocity",)),
        ({"delay_compensation": 1, "delay_adaptive": True}, ("m", "v", "mean_square")),
    ],
)
def test_the_slots_of_a_shard_take_memory(options: dict[str, Any], slots: tuple[str, ...]) -> None:
    config, measured = resolve({**options, "snapshot": "stall"}), Measured(1000, 100, 0, 0)
    assert shard_slots(config, rule_of(config)) == slots
    least, more = (needs(config, measured, 1, 2), needs(resolve(options), measured, 1, 2))
    owners = least.servers or least.workers
    owned = (more.server_bytes or more.worker_bytes) - (least.server_bytes or least.worker_bytes)
    assert owned == pytest.approx(4000 * (1 + len(slots)) / owners)  # copied for a checkpoint


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
    eighth = Layout.of({"w": (memory_bytes() // 8 // 4,)})
    check_memory(eighth, resolve(options), workers, nodes)
    with pytest.raises(UserError, match=f"{workers + 1} workers with .* take"):
        check_memory(eighth, resolve(options), workers + 1, nodes)


def test_a_model_that_a_control_group_cannot_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As SLURM limits a job to --mem."""
    (tmp_path / "memory.max").write_text("1000000\n")
    monkeypatch.setattr("mpips.planning.needs.groups", lambda _: [tmp_path])
    assert available_bytes() == 1_000_000
    with pytest.raises(UserError, match=r"at most 1\.0 MB, its memory or that of"):
        check_memory(Layout.of({"w": (300_000,)}), resolve({"mode": "sync"}), 1, 1)


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
    others = planned(f"{words} 1h --spares 1")["others"]
    (served,) = (each for each in others if each["mode"] == "async")
    assert (served["workers"], served["servers"], served["ranks"]) == (1, 2, 3), "and a spare"
    assert "--workers 1 --mode async --servers 1 " in text_of(f"{words} 1h --spares 1")
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
    for words, roles in (
        ("--mode sync", "sync: 3 workers"),
        ("--server-ranks 0,2", "2 servers and 1 worker"),
        ("--node-size 2", "1 server and 2 workers on 3 nodes"),
    ):
        assert roles in text_of(f"--from {run} {words}")
    assert plan.main(["--from", str(run), "--nodes", "2"]) == 2
    assert "--nodes without --workers, expected both" in capsys.readouterr().err
    with (run / "config.toml").open("a") as file:
        file.write("of_another_version = 1\n")
    assert plan.main(["--from", str(run)]) == 2
    assert "unknown key 'of_another_version'" in capsys.readouterr().err
    with (run / "config.toml").open("r+") as file:
        file.truncate((run / "config.toml").stat().st_size - len("of_another_version = 1\n"))
    (run / "summary.json").unlink()
    assert plan.main(["--from", str(run)]) == 2
    assert "expected a run that has ended; it has no summary.json" in capsys.readouterr().err
