"""Problems with tables, on the command line: optima, exact zeros, resumes, what is refused."""

import dataclasses
import itertools
import json
import re
import runpy
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from launch import ROOT
from runs import Plan, final, summary

from mpips.config import Config
from mpips.datasets import open_dataset
from mpips.datasets.csr import Csr
from mpips.errors import UserError
from mpips.planning.needs import measure, needs
from mpips.problems import load_problem
from mpips.problems.gradient_check import check_gradient
from mpips.problems.sparse import ROWS, cross_entropy
from mpips.tables.saved_rows import find_rows

CLICKS = str(ROOT / "jobs" / "clicks.svm")
SPARSE = ("logistic_sparse", "factorization_machine")

OWN = """
import numpy as np
from mpips.layout import Layout
from mpips.layout.tables import Table, Zeros

class Means:
    '''Learns the mean label of each feature; no subclass of Problem.'''
    def __init__(self, data, config):
        mean = Table(rows=data.x_shape[0], dim=1, init=Zeros())
        self.layout = Layout.of({"all": (1,)}, tables={"mean": mean})
    def init(self, rng):
        return {"all": np.zeros(1)}
    def loss_and_grad_rows(self, params, rows, batch, out):
        error = rows.pull("mean", batch.x.indices)[:, 0] - batch.y[batch.x.samples]
        rows.push("mean", batch.x.indices, error[:, None] / error.size)
        out["all"][0] = params["all"][0] - batch.y.mean()
        return float((error ** 2).mean() / 2 + (params["all"][0] - batch.y.mean()) ** 2 / 2)
    def evaluate_rows(self, params, rows, batch):
        error = rows.pull("mean", batch.x.indices)[:, 0] - batch.y[batch.x.samples]
        return {"loss": float((error ** 2).mean())}
"""


def weights(plan: Plan, name: str) -> np.ndarray:
    found = final(plan.out(name))
    rows: np.ndarray = find_rows(found, ROWS, np.arange(found.tables[ROWS]["rows"]))
    return rows[:, 0]


@pytest.mark.launch
@pytest.mark.long
@pytest.mark.other_mpi
def test_in_one_world(tmp_path: Path) -> None:
    plan = Plan(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    clicks = ["--problem", "logistic_sparse", "--dataset", CLICKS, "--optimizer", "adagrad"]
    whole = ["--batch-size", "2000", "--mode", "sync", "--dtype", "float64", "--lr", "0.5"]
    plan.add("clicks", 2, [*clicks, *whole, "--test-dataset", CLICKS, "--epochs", "150"])
    for name, l1 in (("plain", 0), ("few", 1)):
        rule = f"ftrl: lr=0.2, l1={l1}"
        plan.add(name, 3, [*clicks, "--row-optimizer", rule, "--epochs", "4"])
    remote = ["--epochs", "5", "--node-size", "1"]  # so that rows come from another node
    plan.add("few", 3, ["--resume", *remote])
    pairs = ["--problem", "factorization_machine", *clicks[2:], "--lr", "0.1", "--factors", "4"]
    plan.add("pairs", 3, [*pairs, "--servers", "1", "--epochs", "8"])
    plan.add("pairs", 3, ["--resume", "--servers", "2", "--epochs", "16"])
    plan.add("pairs", 2, ["--resume", "--eval-only"], quiet=False)
    own = ["--problem", f"{tmp_path}/own.py:Means", "--dataset", f"{CLICKS}::sparse"]
    how = ["--mode", "ssp", "--optimizer", "adagrad", "--lr", "0.3", "--epochs", "3"]
    plan.add("own", 3, [*own, *how])
    if find_spec("torch"):
        deep = ["--problem", "wide_deep", *clicks[2:], "--lr", "0.2", "--hidden", "16"]
        plan.add("deep", 2, [*deep, "--batch-size", "64", "--epochs", "8"])
    plan.add("no tables", 3, ["--row-optimizer", "sgd"], 2)
    plan.run(240, tmp_path)
    if find_spec("sklearn"):
        check_clicks(plan)
    check_zeros(plan)
    check_pairs(plan)
    if find_spec("torch"):
        assert summary(plan.out("deep"))["accuracy"] > 0.77
    assert summary(plan.out("own"))["eval_loss"] < 0.25
    assert "row_optimizer 'sgd' without" in "\n".join(plan.errors())


def test_rules_that_are_none_of_rows() -> None:
    for options, told in (
        ({"row_optimizer": "momentum"}, "unknown optimizer of a table 'momentum'"),
        ({"optimizer": "momentum"}, "'momentum', which is no rule of rows, expected one of sgd, a"),
        ({"row_optimizer": "ftrl: l3=1"}, "unknown number of ftrl for tables 'l3'"),
    ):
        with pytest.raises(UserError, match=told):
            measure(Config(**{"problem": "logistic_sparse", "dataset": CLICKS, **options}))


def check_clicks(plan: Plan) -> None:
    """Rounds of all bundled clicks end where scikit-learn does."""
    from sklearn.datasets import load_svmlight_file
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import log_loss

    x, y = load_svmlight_file(CLICKS)
    best = LogisticRegression(C=1e12, tol=1e-10, max_iter=10_000).fit(x, y)
    least = log_loss(y, best.predict_proba(x))
    z = x @ weights(plan, "clicks") + float(final(plan.out("clicks")).read_params()[0])
    assert abs(np.mean(np.logaddexp(0, z) - y * z) - least) < 1e-8
    assert abs(summary(plan.out("clicks"))["eval_loss"] - least) < 1e-8


def check_zeros(plan: Plan) -> None:
    """With l1 weights of little evidence are 0, not just small, and little is lost."""
    plain, few = summary(plan.out("plain")), summary(plan.out("few"))
    assert (weights(plan, "plain") != 0).all()
    assert 10 <= (weights(plan, "few") == 0).sum() <= 40
    assert abs(few["accuracy"] - plain["accuracy"]) < 0.03
    rows = few["tables"][ROWS]
    assert 0 < rows["ahead"] < rows["pulled"]
    assert plain["tables"][ROWS]["ahead"] == 0


def check_pairs(plan: Plan) -> None:
    """Better than without pairs; a resume on other servers goes on, and evaluates to the same."""
    found = summary(plan.out("pairs"))
    assert found["accuracy"] > 0.77 > 0.67 > summary(plan.out("plain"))["accuracy"]
    assert found["samples"] == 16 * 3200
    (loss,) = re.findall(r"loss ([\d.]+)", plan.outputs("pairs")[2])
    assert abs(float(loss) - found["eval_loss"]) < 1e-5
    lines = (plan.out("pairs") / "metrics.jsonl").read_text().splitlines()
    evaluated = [json.loads(line) for line in lines if '"kind": "eval"' in line]
    assert len(evaluated) >= 2  # a worker evaluates, where it is in time
    assert all({"loss", "accuracy"} <= set(line) for line in evaluated)


def test_clicks_are_as_their_script_writes_them(tmp_path: Path) -> None:
    runpy.run_path(str(ROOT / "jobs" / "make_clicks.py"))["main"](str(tmp_path / "again.svm"))
    assert (tmp_path / "again.svm").read_bytes() == Path(CLICKS).read_bytes()


@pytest.mark.parametrize("name", ["logistic_sparse", "factorization_machine", "wide_deep"])
def test_gradients(name: str, tmp_path: Path) -> None:
    if name == "wide_deep":
        pytest.importorskip("torch")
    path = tmp_path / "a.svm"
    path.write_text("1 1:0.5 3:2\n0\n0 2:-1 3:1 6:0.3\n1 1:1\n")
    config = Config(problem=name, dataset=str(path), batch_size=3, seed=1, hidden=(5,))
    text, error = check_gradient(config, 100_000_000)
    assert error is None
    assert "the gradient is right" in text
    assert text.count(ROWS) == 1
    few = dataclasses.replace(config, batch_size=1, row_optimizer="ftrl")
    dim = 1 if name == "logistic_sparse" else 1 + config.factors
    found = measure(few)
    parameters = 1 if name != "wide_deep" else config.factors * 5 + 5 + 5 + 1
    assert (found.parameters, found.table_bytes) == (parameters, 6 * 3 * dim * 4)
    more = dataclasses.replace(found, table_bytes=10**9)
    wants = [needs(few, measured, 1, 3).server_bytes for measured in (found, more)]
    assert wants[1] - wants[0] == pytest.approx(2e9, rel=1e-3)


def test_a_factorization_machine_is_its_sum_over_pairs() -> None:
    rng, config = np.random.default_rng(0), Config(factors=3)
    data = open_dataset(Config(problem="factorization_machine", dataset=CLICKS))
    problem: Any = load_problem("factorization_machine", data.info, config)
    table = rng.normal(size=(6, 4))
    dense = rng.normal(size=(5, 6)) * (rng.random((5, 6)) < 0.6)
    starts = np.concatenate(([0], np.cumsum((dense != 0).sum(1))))
    x = Csr(starts, np.nonzero(dense)[1], dense[dense != 0], 6)
    rows = SimpleNamespace(pull=lambda name, ids: table[ids])
    for i, row in enumerate(dense):
        wanted = row @ table[:, 0]
        for j, k in itertools.combinations(range(6), 2):
            wanted += row[j] * row[k] * table[j, 1:] @ table[k, 1:]
        one = SimpleNamespace(x=x[i : i + 1], y=np.array([1]))
        found = problem.evaluate_rows({"b": np.zeros(1)}, rows, one)["loss"]
        assert found == pytest.approx(np.logaddexp(0, -wanted), rel=1e-12)


def test_cross_entropy_of_any_logits() -> None:
    z, y = np.array([0.3, -2, 800, -800, 800]), np.array([1, 0, 1, 1, 0])
    loss, delta = cross_entropy(z, y)
    wanted = [np.log1p(np.exp(-0.3)), np.log1p(np.exp(-2)), 0, 800, 800]
    np.testing.assert_allclose(loss, np.mean(wanted))
    p = [1 / (1 + np.exp(-0.3)), 1 / (1 + np.exp(2)), 1, 0, 1]
    np.testing.assert_allclose(delta, (np.array(p) - y) / 5, atol=1e-300)
    assert np.isnan(cross_entropy(np.array([np.nan, 0]), np.array([0, 1]))[0])


def test_data_that_does_not_fit(tmp_path: Path) -> None:
    config, digits, path = Config(), open_dataset(Config()).info, tmp_path / "a.svm"
    path.write_text("2 1:1\n0 1:1\n1 2:1\n0 2:2\n1 1:1\n")
    three = open_dataset(Config(dataset=f"{path}::sparse", batch_size=1)).info
    for info, name, told in (
        (three, "softmax", "problem 'softmax' with the sparse samples of"),
        *((digits, name, "samples are dense") for name in SPARSE),
        *((three, name, "the 3 classes of") for name in SPARSE),
    ):
        with pytest.raises(UserError, match=told):
            load_problem(name, info, config)
