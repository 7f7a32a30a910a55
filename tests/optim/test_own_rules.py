"""Update rules of one's own: their loops, their numbers, and what is refused."""

import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from launch import ROOT, run

import mpips
from mpips.config import Config
from mpips.config.groups import RowOptimizer
from mpips.config.jobfile import resolve
from mpips.config.validation import check_resume
from mpips.errors import UserError
from mpips.kernels.vectors import addresses_of
from mpips.layout import Layout
from mpips.optim import Sum, grouped, make_rule, own_rules, rated, rule_of, warm
from mpips.optim.row_rules import make_row_rule

LION = f"{ROOT / 'jobs' / 'lion_rule.py'}:Lion"
PROGRAM = ROOT / "tests" / "library" / "programs" / "own_rules.py"
HALF = 0.5


def twice(x: float) -> float:
    """A function that a step calls."""
    return 2 * x


class Adam(mpips.UpdateRule):
    """As `mpips.Adam`, with rates of each update, and functions and numbers of the file."""

    lr: float = 0.002
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.0

    def rates(self, t: int, lr: float) -> dict[str, float]:
        """Return the rates of update t."""
        rests = {"rest1": 1 - self.beta1, "rest2": 1 - self.beta2}
        corrected = lr / (1 - self.beta1**t), 1 / math.sqrt(1 - self.beta2**t)
        return rests | dict(zip(("rate", "root"), corrected, strict=True))

    @staticmethod
    def step(
        w: float, g: float, m: float, v: float, /, beta1: float, beta2: float, rest1: float,
        rest2: float, rate: float, root: float, weight_decay: float,
    ) -> tuple[float, float, float]:  # fmt: skip
        """Return the new parameter and the new moments."""
        g = g + HALF * twice(weight_decay * w)
        m = beta1 * m + rest1 * g
        v = beta2 * v + rest2 * g * g
        return w - rate * m / (math.sqrt(v) * root + 1e-8), m, v


def updated(rule: Any, dtype: str, summed: bool = False) -> list[np.ndarray]:
    """Return parameters and state after some updates."""
    rng = np.random.default_rng(0)
    params = rng.normal(size=100).astype(dtype)
    slots = tuple(np.zeros(100, dtype) for _ in rule.slots)
    for t in range(1, 12):
        grad = rng.normal(size=100).astype(dtype)
        if summed:
            total = Sum(addresses_of([grad]), np.ones(1), 0, np.empty(30, dtype))
            rule.apply_sum(params, total, slots, t, 0.01)
        else:
            rule.apply(params, grad, slots, t, 0.01)
    return [params, *slots]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("summed", [False, True])
def test_the_loops_are_those_of_the_rules_that_come_with_mpips(dtype: str, summed: bool) -> None:
    adam = Adam(beta1=0.8).options()["optimizer"]
    for own, name, numbers in (
        (make_rule(f"{LION}: beta2=0.9, weight_decay=0.01"), "lion", {"beta2": 0.9}),
        (make_rule(adam, weight_decay=0.01), "adam", {"beta1": 0.8, "eps": 1e-8}),
    ):
        warm(own, dtype, rounds=summed)
        ours = updated(make_rule(name, weight_decay=0.01, **numbers), dtype, summed)
        for mine, his in zip(updated(own, dtype, summed), ours, strict=True):
            assert np.array_equal(mine, his), name


def beside(name: str, kind: str) -> ModuleType:
    """Return the module of a rule in the folder of jobs."""
    found: Any = own_rules.own_class(LION.replace("lion_rule.py:Lion", f"{name}.py:{kind}"))
    return sys.modules[found.__module__]


def test_lion_is_the_serial_one() -> None:
    rng = np.random.default_rng(1)
    params, grads = rng.normal(size=50), rng.normal(size=(30, 50))
    expected = beside("lion_rule", "Lion").serial(params, grads, 0.01, 0.1)
    rule, m = make_rule(LION, weight_decay=0.1), np.zeros(50)
    for t, grad in enumerate(grads, 1):
        rule.apply(params, grad, (m,), t, 0.01)
    np.testing.assert_allclose(params, expected, rtol=1e-13)


def test_the_matrix_of_muon_is_nearly_orthogonal() -> None:
    for shape in ((30, 8), (8, 30), (12, 12)):
        matrix = beside("muon", "Muon").orthogonal(np.random.default_rng(0).normal(size=shape))
        singular = np.linalg.svd(matrix, compute_uv=False)
        assert 0.6 < singular.min() <= singular.max() < 1.3


def test_numbers_come_from_the_text_the_run_and_the_class() -> None:
    options = Adam(0.1, beta1=0.5).options()
    assert options["lr"] == 0.1
    assert options["optimizer"].endswith("test_own_rules.py:Adam: beta1=0.5")
    assert make_rule(LION).weight_decay == 0
    assert make_rule(LION, weight_decay=0.2).weight_decay == 0.2
    assert make_rule(f"{LION}:weight_decay=0.1", weight_decay=0.2).weight_decay == 0.1
    by_text = f"{LION}: lr=0.25, beta1=0.5"
    for given, rate in (
        ({"optimizer": LION}, 3e-4),
        ({"optimizer": LION, "lr": 0.5}, 0.5),
        ({"optimizer": by_text}, 0.25),
        ({"optimizer": by_text, "lr": 0.5}, 0.5),
    ):
        assert rated(resolve(given)).learning_rate == rate
    assert make_rule(by_text) == make_rule(f"{LION}: beta1=0.5")
    moved = Config(optimizer=f"elsewhere/lion_rule.py:Lion:beta1={HALF}")
    check_resume(Config(optimizer=LION), moved)
    table = RowOptimizer(f"{LION}: weight_decay=0.1", {"lr": 0.5, "weight_decay": 0.2})
    row_rule: Any = make_row_rule(table)
    assert (row_rule.lr, row_rule.dense.weight_decay) == (0.5, 0.1), "as of dense parameters"
    with pytest.raises(UserError, match=r"on resume, expected .*:Lion' as in the saved run"):
        check_resume(Config(optimizer=LION), Config(optimizer="lion"))


def own(folder: Path, body: str, lr: str = "1.0") -> str:
    """Write a rule with this in its class; returns its name."""
    file = folder / "own.py"
    head = "import math\nimport mpips\nclass Own(mpips.UpdateRule):"
    file.write_text(f"{head}\n    lr = {lr}\n    {body}\n")
    return f"{file}:Own"


def after_one(rule: Any, *states: float) -> list[float]:
    """Return parameter and state, which begin as 1 and so, after an update of gradient 1."""
    params, *slots = (np.full(2, value, "f4") for value in (1, *states))
    rule.apply(params, np.ones(2, "f4"), tuple(slots), 1, 1.0)
    return [float(each[0]) for each in (params, *slots)]


def test_a_default_that_is_an_integer_takes_any_number(tmp_path: Path) -> None:
    body = "beta: float = 0\n    weight_decay: float = 0\n    count: int = 1\n"
    body += "    def step(w, g, /, lr, beta=3, weight_decay=3):\n"
    body += "        return (w - lr * (beta * g + weight_decay * w),)"
    rule: Any = make_rule(f"{own(tmp_path, body, '1')}: beta=0.5, weight_decay=0.25, count=2")
    assert type(rule.own.count) is int
    assert after_one(rule) == [0.25]


def test_a_weight_decay_of_0_replaces_that_of_the_class(tmp_path: Path) -> None:
    body = "weight_decay: float = 0.5\n    def step(w, g, /, lr, weight_decay):"
    name = own(tmp_path, f"{body} return (w - lr * (g + weight_decay * w),)")
    assert rule_of(resolve({"optimizer": name})).weight_decay == 0.5
    assert rule_of(resolve({"optimizer": name, "weight_decay": 0.0})).weight_decay == 0
    assert make_row_rule(RowOptimizer(name, {"weight_decay": 0.0})).numbers(1.0) == (1.0, 0.0)


HELPED = """def step(w, g, /, lr):
        '''A step that a helper takes an index for;
and whose docstring goes on at column 0.'''
# as does a comment
        for k in range(1):
            g = halved(k, g)
        return (w - lr * g,)
def halved(k, x):
    return x * 0.5 + k"""


def test_numbers_beside_an_index_stay_what_they_are(tmp_path: Path) -> None:
    rule = make_rule(own(tmp_path, HELPED))
    rule.check("float32")
    assert after_one(rule) == [0.5]


def test_an_array_may_be_a_state_of_its_next_update(tmp_path: Path) -> None:
    body = "def update(self, name, w, g, a, b, /, t, lr): return w - lr * g, w, a"
    assert after_one(make_rule(own(tmp_path, body)).of_array("x", (2,)), 7, 8) == [0, 1, 7]


BAD = {
    "def step(w, g, /, lr): return (w - float(str(g)),)": "which does not compile",
    "def step(w, g, m, /, lr): return w - lr * g": r"no tuple, expected \(w, m\), the new values",
    "def step(w, g, /, lr): return w, g": r"returns 2 values, expected \(w,\), the new",
    "def step(w, g, /, lr): return (w / nothing,)": "NameError: name 'nothing'",
    "def step(w, g, /, beta): return (w,)": "beta in step of Own, which is None there",
    "def step(self, w, g, lr): return (w,)": r"expected step\(w, g, STATE.., /, lr, ..\), without",
    "def step(w, g, /, *rates): return (w,)": r"step\(w, g, /, \*rates\) of Own, expected",
    "beta: float": "Own.beta without a default, expected one",
    "step = 3": "Own without step",
    "step = lambda w, g, /, lr: (w,)": "which is no def, expected a function that def makes",
    "def step(w, g, /, lr): return (f(w),)\ndef f(x, y=1): return x": "f with defaults, which a",
    "def step(w, g, /, lr): return (f(w),)\ndef f(x): return f(x)": "f, which calls itself",
    "def step(w, g, /, rate): return (w,)\n    def rates(self, t, lr): return 3": "returns int",
    "def update(self, w, g, /, t, lr): return (w,)": r"expected update\(self, name, w, g, STATE..",
    "def update(self, name, w, g, m, /, t, lr): return w": r"returns no tuple, expected \(w, m\)",
    "def update(self, name, w, g, /, t, lr): return w, g": r"returns 2 values, expected \(w,\), ",
    "def update(self, name, w, g, /, t, lr): return (w[0],)": r"returns shapes \[\(2,\)\]",
    "def update(self, name, w, g, /, t, lr): return (w @ g,)": "'a' raised ValueError: matmul",
    "def update(self, name, w, g, /, t, lr): return (w,)\n    step = 3": "with step and update",
}


@pytest.mark.parametrize("body", BAD)
def test_what_cannot_be_is_refused(body: str, tmp_path: Path) -> None:
    layout = Layout.of({"a": (3, 2), "b": (30, 20)})
    with pytest.raises(UserError, match=BAD[body]):
        grouped(make_rule(own(tmp_path, body)), layout, (), 1.0).check("float32")


NAMES = {  # a name that is no rule, and what is said of it
    f"{LION}: gamma=1": "unknown number of Lion 'gamma'",
    f"{LION}ess": "no class 'Lioness' in .*did you mean 'Lion'",
    LION.replace("lion", "line"): "expected an existing file",
    f"{ROOT / 'jobs' / 'words.py'}:Text": "is no update rule, expected class Text.mpips",
}


def test_names_and_numbers_that_cannot_be_are_refused(tmp_path: Path) -> None:
    for text, part in NAMES.items():
        with pytest.raises(UserError, match=part):
            make_rule(text)
    with pytest.raises(UserError, match=r"^beta3 of Adam, expected one of lr, beta1, beta2"):
        Adam(beta3=1)  # type: ignore[call-arg]
    muon = LION.replace("lion_rule.py:Lion", "muon.py:Muon")
    for table, part in (
        (RowOptimizer(muon, {}), r"Muon with update\(..\) as optimizer of a table"),
        (Adam(), r"Adam with rates\(..\) as optimizer of a table"),
        (RowOptimizer(LION, {"lr": -1.0}), "^lr -1.0 of Lion, expected a number > 0"),
    ):
        with pytest.raises(UserError, match=part):
            make_row_rule(table)
    for bad in ("x", None, math.nan, math.inf, [0.5]):
        with pytest.raises(UserError, match=r"^beta1 .* of Adam, expected a finite number"):
            Adam(beta1=bad).options()  # type: ignore[arg-type]
    options = Adam(beta1=-0.5, weight_decay=np.float32(0.25)).options()
    assert options["optimizer"].endswith(":Adam: beta1=-0.5, weight_decay=0.25")
    assert resolve(options).optimizer == options["optimizer"]
    rule: Any = make_rule(options["optimizer"])
    assert rule.own.beta1 == -0.5, "a rule's own numbers may be negative"
    with pytest.raises(UserError, match=r"^weight_decay -0.25 of Adam, expected a number >= 0"):
        make_rule(Adam(weight_decay=-0.25).options()["optimizer"])
    step = "def step(w, g, /, lr): return (w - lr * g,)"
    for lr in ("'x'", "None", "0.0"):
        with pytest.raises(UserError, match=r"^lr .* of Own, expected a number > 0; give lr="):
            rated(resolve({"optimizer": own(tmp_path, step, lr)}))


@pytest.mark.launch
@pytest.mark.one_mpi
def test_runs_of_all_kinds(tmp_path: Path) -> None:
    done = run(3, [str(PROGRAM), str(tmp_path)], tmp_path).check()
    assert done.output.count("all is well") == 3
