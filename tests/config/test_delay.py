"""Workers that are slowed on purpose: `mpips.config.delay`, and jobs with ``--inject-delay``."""

import json
import time
from typing import Any

import pytest
from runs import (
    Plan,
    assert_counts,
    counting,
    final,
    names_asked,
    samples_file,
    shared_out,
    summary,
)

from mpips.config.delay import DELAYS, check_delays, linger, parse_delays
from mpips.errors import UserError

PAUSE_S = 2e-3  # what a gradient of the problems `Slow` takes at least
FACTOR, SAMPLES = 20.0, 512


def test_a_text_names_workers_and_factors() -> None:
    for text, found in (("", {}), ("3:1,0:2.5", {3: 1.0, 0: 2.5})):
        assert DELAYS.fullmatch(text)
        assert parse_delays(text) == found
        check_delays(found, 4)
    with pytest.raises(UserError, match="names worker 3, expected workers 0 to 2"):
        check_delays({0: 2.0, 3: 2.0}, 3)


def test_lingering_sleeps_and_lets_mpi_get_on() -> None:
    calls: list[float] = []
    start, computed = time.perf_counter(), time.thread_time()
    linger(0.1, lambda: calls.append(time.perf_counter()))
    assert time.perf_counter() - start >= 0.1
    assert time.thread_time() - computed < 0.05, "it spins"
    assert len(calls) > 1
    calls.clear()
    linger(0.0, lambda: calls.append(0.0))
    linger(-1.0, lambda: calls.append(0.0))
    assert not calls


# Whole jobs.

JOBS = {  # options, number of workers, the worker that is slowed
    "async": ("--servers 1", 3, 1),
    "sync": ("--mode sync", 4, 3),
    "sync with servers": ("--mode sync --servers 1 --reduce allreduce", 3, 0),
    "remote by get": ("--servers 1 --node-size 2 --prefetch --far-read get", 3, 2),
    "remote by reply": ("--servers 2 --node-size 2 --node-aggregation --far-read reply", 2, 0),
}


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Plan:
    plan = Plan(tmp_path_factory.mktemp("delays"))
    data = samples_file(plan.folder, SAMPLES)
    for name in filter(names_asked(request).__contains__, JOBS):
        options, _, slow = JOBS[name]
        job = counting(data, kind="MeanCounting" if "sync" in name.split() else "SlowCounting")
        line = f"{options} --epochs 1 --batch-size 8 --inject-delay {slow}:{FACTOR:g}"
        plan.add(name, 4, [*job, *line.split()])
    plan.run(240)
    return plan


@pytest.mark.launch
@pytest.mark.parametrize("name", shared_out(JOBS, ["async"], ()))
def test_a_job_with_a_slow_worker(name: str, plan: Plan) -> None:
    _, workers, slow = JOBS[name]
    found = summary(plan.out(name))
    assert found["inject_delay"] == {str(slow): FACTOR}
    each: list[dict[str, Any]] = found["per_worker"]
    assert len(each) == workers
    took_s = [w["compute_s"] / w["steps"] for w in each]
    assert min(took_s[:slow] + took_s[slow + 1 :]) < FACTOR * PAUSE_S <= took_s[slow]
    if found["mode"] == "async":
        assert all(w["steps"] > each[slow]["steps"] for w in each if w is not each[slow])
        assert_counts(final(plan.out(name)), SAMPLES, epochs=1)
    lines = (plan.out(name) / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["inject_delay"] == {str(slow): FACTOR}
