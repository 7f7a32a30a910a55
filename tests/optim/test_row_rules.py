"""Update rules of rows against the papers' equations, serial, in float64."""

import math
from collections import Counter, defaultdict

import numpy as np
import pytest
from test_optim import PAPER as DENSE

import mpips
from mpips.errors import UserError
from mpips.kernels import row_reads, rows
from mpips.layout.tables import Normal, Ownership, Table, Zeros
from mpips.optim.row_rules import ROW_RULES, make_row_rule

TOLERANCE = {np.float32: 2e-5, np.float64: 1e-12}
ROWS, STEPS = 40, 60


# The papers' equations: w, g, the slots of one row, and how often it was updated. ----------------


def paper_row_adagrad(w, g, s, t, lr=0.02, eps=1e-8, weight_decay=0.0):
    g = g + weight_decay * w
    s["sum"] = s["sum"] + (g**2).mean()
    return w - lr * g / (math.sqrt(s["sum"]) + eps)


def paper_ftrl(w, g, s, t, lr=0.1, beta=1.0, l1=0.0, l2=0.0):
    """Algorithm 1, which begins at w = 0, or at the z that its equation gives for w."""
    if "z" not in s:
        s["n"] = np.zeros_like(w)
        s["z"] = np.where(w == 0, 0.0, -np.sign(w) * (np.abs(w) * (beta / lr + l2) + l1))
    sigma = (np.sqrt(s["n"] + g**2) - np.sqrt(s["n"])) / lr
    s["z"] = s["z"] + g - sigma * w
    s["n"] = s["n"] + g**2
    z, n = s["z"], s["n"]
    found = -(z - np.sign(z) * l1) / ((beta + np.sqrt(n)) / lr + l2)
    return np.where(np.abs(z) <= l1, 0.0, found)


RATES = {"sgd": 0.1, "adagrad": 0.02, "rmsprop": 0.001, "adam": 0.002}  # of rows, if none is given
PAPER = {**DENSE, "row_adagrad": paper_row_adagrad, "ftrl": paper_ftrl}
CASES = [
    *(mpips.SGD(), mpips.SGD(0.5, weight_decay=0.1)),
    *(mpips.Adagrad(), mpips.Adagrad(0.1, eps=0.1, weight_decay=0.1)),
    *(mpips.RowAdagrad(), mpips.RowAdagrad(0.1, eps=1e-3, weight_decay=0.1)),
    *(mpips.RMSprop(), mpips.RMSprop(0.1, decay=0.5, eps=1e-3, weight_decay=0.1)),
    *(mpips.Adam(), mpips.Adam(0.1, beta1=0.5, beta2=0.9, eps=1e-3, weight_decay=0.1)),
    mpips.Adam(beta1=0.0),
    *(mpips.FTRL(), mpips.FTRL(0.5, beta=0.1, l1=0.5, l2=0.1), mpips.FTRL(0.05, l1=2.0)),
]


class Lines:
    """The memory of one server's rows, and a rule's loop on it."""

    def __init__(self, optimizer, dim, dtype, init):
        self.rule = make_row_rule(optimizer)
        self.key = Ownership("item", Table(ROWS, dim, init), 1).key()
        self.lines = np.zeros((ROWS, self.rule.width(dim)), dtype)
        self.stripes = np.zeros(-(-ROWS // rows.STRIPE), np.int64)
        self.dim, self.dtype = dim, dtype

    def apply(self, which, grads):
        numbers = np.array(self.rule.numbers(self.rule.rate))
        self.rule.loop(which, which, grads, self.lines, self.stripes, self.key, numbers)

    def read(self):
        out, places = np.empty((ROWS, self.dim), self.dtype), np.arange(ROWS)
        memory = [self.lines.ctypes.data, self.stripes.ctypes.data, 0, 0, 0]
        begins, none = np.array([0, ROWS]), np.zeros(0, np.uint32)
        width = self.lines.shape[1]
        row_reads.gather(places, begins, np.array([memory]), self.key, width, none, out)
        return out


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("dim", [1, 7, 16])
@pytest.mark.parametrize("optimizer", CASES, ids=lambda o: f"{o.name}-{CASES.index(o)}")
def test_rows_follow_the_paper(optimizer, dim, dtype):
    init = Zeros() if "l1" in optimizer.options() and optimizer.l1 > 1 else Normal(0.1)
    ours = Lines(optimizer, dim, dtype, init)
    rng = np.random.default_rng(0)
    begin = ours.read().astype("f8")
    w, slots, count = begin.copy(), [defaultdict(float) for _ in range(ROWS)], Counter()
    options = {k: v for k, v in optimizer.options().items() if k != "optimizer"}
    if optimizer.name in RATES:
        options = {"lr": RATES[optimizer.name], "weight_decay": 0.0, **options}
    for _ in range(STEPS):
        which = np.sort(rng.choice(ROWS, 10, replace=False))
        grads = rng.standard_normal((10, dim)).astype(dtype)
        ours.apply(which, grads)
        for k, g in zip(which, grads.astype("f8"), strict=True):
            count[k] += 1
            w[k] = PAPER[optimizer.name](w[k], g, slots[k], count[k], **options)
    found = ours.read()
    difference = np.linalg.norm(found - w) / np.linalg.norm(w - begin)
    assert difference < TOLERANCE[dtype]
    if optimizer.name == "ftrl":
        assert ((found == 0) == (w == 0)).all()
        assert (w == 0).any() == (optimizer.l1 is not None)


@pytest.mark.parametrize("name", ROW_RULES)
def test_nan_goes_into_its_own_row_alone(name):
    optimizer = next(case for case in CASES if case.name == name)
    lines = Lines(optimizer, 4, np.float32, Normal(0.1))
    grads = np.ones((3, 4), "f4")
    grads[1, 2] = np.nan
    lines.apply(np.array([3, 4, 5]), grads)
    assert np.isnan(lines.read()).any(1).nonzero()[0].tolist() == [4]


def test_what_rows_do_not_have_is_refused():
    for optimizer, message in (
        (mpips.Momentum(), "optimizer of a table 'momentum'"),
        (mpips.SGD(-1), "lr=-1 of a table's sgd"),
        (mpips.Adagrad("x"), "lr='x' of a table's adagrad, expected a finite lr > 0"),
        (mpips.SGD(math.inf), "lr=inf"),
        (mpips.SGD(0), "lr=0"),
        (mpips.Adam(beta2=1.0), "0 <= beta2 < 1"),
        (mpips.RMSprop(decay=1.0), "0 <= decay < 1"),
        (mpips.FTRL(l1=-1), "l1=-1 of a table's ftrl"),
        (mpips.Adagrad(eps=0), "eps=0 of a table's adagrad, expected a finite eps > 0"),
        ("adagrad", "optimizer='adagrad' of a table, expected one such as"),
    ):
        with pytest.raises(UserError, match=message):
            make_row_rule(optimizer)
