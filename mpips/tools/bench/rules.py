"""Update rules on one core, beside a triad of equal memory traffic."""

from functools import partial

import numpy as np
from numba import njit

from mpips.config.jobfile import shared_files
from mpips.mpi.world import Cluster
from mpips.optim import RULES, Rule, make_rule, warm
from mpips.tools.bench.measure import Options, Row, in_turn, milliseconds

SIZE = 8_000_000
QUICK_SIZE = 80_000
REACH = 1 / 1.3
OWN, OWN_REACH = "lion_rule.py", 0.8


@njit(error_model="numpy", nogil=True)
def triad(out: np.ndarray, x: np.ndarray, y: np.ndarray) -> None:
    """Set ``out = out + 0.5 x + 0.25 y``, which writes one stream and reads three."""
    a, b = out.dtype.type(0.5), out.dtype.type(0.25)
    for i in range(out.size):
        out[i] += a * x[i] + b * y[i]


def run(cluster: Cluster, options: Options) -> list[Row]:
    """Compare each rule."""
    size = QUICK_SIZE if options.quick else SIZE
    rows = [_of(cluster, make_rule(name), size, options) for name in RULES]
    return [*rows, _own(cluster, size, options)]


def _own(cluster: Cluster, size: int, options: Options) -> Row:
    """Compare a rule in a user's file with the built-in rule of the same formula."""
    own, built_in = make_rule(f"{shared_files('jobs')[OWN]}:Lion"), make_rule("lion")
    vectors = np.zeros((3, size), "f4")
    for rule in (own, built_in):
        warm(rule, "f4")
    args = vectors[0], vectors[1], (vectors[2],), 1, 1e-3
    sides = {"own": partial(own.apply, *args), "built in": partial(built_in.apply, *args)}
    times = in_turn(cluster, sides, 3 * options.repeats)
    names = "own update rule", f"{own.name}, {size / 1e6:g} M parameters", "mpips.Lion"
    return milliseconds(names, 1, (times["own"], times["built in"]), OWN_REACH)


def _of(cluster: Cluster, rule: Rule, size: int, options: Options) -> Row:
    streams = 3 + 2 * len(rule.slots)  # reads and writes parameters and slots, reads the gradient
    params, grad, *slots = (np.zeros(size, "f4") for _ in range(2 + len(rule.slots)))
    warm(rule, "f4")
    x, y, z = (np.zeros(size, "f4") for _ in range(3))
    triad(x[:1], y[:1], z[:1])
    apply = partial(rule.apply, params, grad, tuple(slots), 1, 1e-3)
    sides = {"rule": apply, "memory": partial(triad, x, y, z)}
    times = in_turn(cluster, sides, 3 * options.repeats)
    ideal = [t * streams / 4 for t in times["memory"]]
    case = f"{rule.name}, {size / 1e6:g} M parameters, {streams} streams"
    names = "update rule", case, "its streams at the rate of a triad"
    return milliseconds(names, 1, (times["rule"], ideal), REACH)
