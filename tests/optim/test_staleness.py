"""Whole jobs that do something about stale gradients: limits, rates, delay compensation."""

import numpy as np
import pytest
from runs import COUNT, HERE, Plan, counting, final, names_asked, samples_file, shared_out, summary

pytestmark = pytest.mark.launch

ORIGINS = f"{HERE / 'problems' / 'origins.py'}:Origins"
STEPS = 40
COMPENSATED = {  # ranks, the last of which is the worker; options
    "near": (3, "--servers 2"),
    "remote": (3, "--servers 2 --node-size 1"),
    "local and remote": (4, "--servers 3 --node-size 2"),
    "by get": (2, "--servers 1 --node-size 1 --far-read get"),
    "adaptive": (3, "--servers 2 --delay-adaptive"),
    "adaptive and remote": (3, "--servers 2 --delay-adaptive --node-size 1"),
    "with a bound": (3, "--servers 2 --node-size 1 --mode ssp --staleness-bound 1"),
}
N, EPOCHS = 120, 3
LIMITED = {
    "near": (6, 2, "--max-staleness 4"),
    "nodes of one": (5, 2, "--max-staleness 3 --node-size 1"),
    "nodes of two": (6, 2, "--max-staleness 3 --node-size 2"),
    "means of nodes": (6, 2, "--max-staleness 4 --node-size 3 --node-aggregation"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Plan:
    plan, asked = Plan(tmp_path_factory.mktemp("runs")), names_asked(request)
    data = samples_file(plan.folder, N)
    files = ["--dataset", data, "--test-dataset", data.replace("train-", "test-")]
    for name in filter(asked.__contains__, COMPENSATED):
        ranks, text = COMPENSATED[name]
        where = ["--server-ranks", ",".join(map(str, range(ranks - 1)))]
        words = ["--problem", ORIGINS, *COUNT, *files, *where, "--hidden", "67", *text.split()]
        words += ["--steps", str(STEPS), "--delay-compensation", "0.7", "--eval-every", "0"]
        plan.add(f"compensated {name}", ranks, words)
    for name in filter(asked.__contains__, LIMITED):
        ranks, servers, text = LIMITED[name]
        words = [*counting(data, kind="SlowCounting"), "--servers", str(servers), *text.split()]
        words += ["--epochs", str(EPOCHS), "--batch-size", "4", "--checkpoint-every", "9steps"]
        plan.add(f"limited {name}", ranks, words)
    rates = [*counting(data), "--epochs", "3", "--batch-size", "2", "--servers", "1"]
    plan.add("rates", 5, [*rates, "--staleness-lr"])
    plan.run(200)
    return plan


@pytest.mark.parametrize(
    "name",
    shared_out(COMPENSATED, ["local and remote", "adaptive and remote"], ["local and remote"]),
)
def test_compensation_knows_what_was_read(name: str, runs: Plan) -> None:
    """The problem has checked every read, and the final parameters."""
    out = runs.out(f"compensated {name}")
    s = summary(out)
    assert s["pushes_applied"] == STEPS
    assert final(out).slot_names == (("mean_square",) if "adaptive" in name else ())


@pytest.mark.long
@pytest.mark.one_mpi
def test_something_was_compensated(runs: Plan) -> None:
    outs = [out for name in COMPENSATED if (out := runs.out(f"compensated {name}")).exists()]
    found = [summary(out)["staleness"]["max"] for out in outs]
    assert max(found) > 0


@pytest.mark.parametrize("name", shared_out(LIMITED, ["means of nodes"], ()))
def test_what_is_dropped_is_counted(name: str, runs: Plan) -> None:
    """Its batch counts as handled; only the parameters lack it, shard by shard."""
    out = runs.out(f"limited {name}")
    s = summary(out)
    assert s["pushes_sent"] == s["pushes_applied"] == s["global_step"] == EPOCHS * N // 4
    assert s["samples"] == EPOCHS * N
    found = final(out)
    assert sum(server["pushes_dropped"] for server in s["per_server"]) > 0
    last = found.layout.views(found.read_params())["updates"][-1]
    assert last == s["global_step"] - s["per_server"][-1]["pushes_dropped"]


def test_rates_fall_with_staleness(runs: Plan) -> None:
    """With a mean staleness above 1, sgd with rate 1 counts fewer updates than there were."""
    found, s = final(runs.out("rates")), summary(runs.out("rates"))
    counts = s["staleness"]["histogram"]
    expected = counts[0] + sum(n / k for k, n in enumerate(counts) if k)
    updates = found.layout.views(found.read_params())["updates"]
    np.testing.assert_allclose(updates, expected, rtol=1e-12)
    assert expected < s["global_step"]
