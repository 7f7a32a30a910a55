"""Loading the loops of a run before it starts."""

import numpy as np

from mpips.kernels import atomics, barrier, vectors
from mpips.optim.rules import Rule, Sum


def warm(rule: Rule, dtype: np.typing.DTypeLike, rounds: bool = False) -> None:
    """Compile, or load from the cache on disk, every loop that a run needs.

    Args:
        rule: The rule of the run.
        dtype: dtype of the parameters, float32 or float64.
        rounds: Whether it has rounds.
    """
    words = np.zeros(1, np.int64)
    atomics.publish(words, 0, 1)
    atomics.observe(words, 0)
    ours = vectors.addresses_of([words])
    atomics.find_ahead(ours, np.zeros(1, np.int64), words, words, 0)
    barrier.meet(ours, 1, 0)
    barrier.meet_and_add(ours, 1, 0, ours[:0], np.zeros(1))
    params, grad, *slots = (np.ones(1, dtype) for _ in range(2 + len(rule.slots)))
    addresses = vectors.addresses_of([grad])
    vectors.sum_rows(addresses, np.ones(1), 0, params)
    vectors.sum_rows(addresses[:0], np.ones(0), 0, np.zeros(1))
    vectors.sum_squares(grad)
    vectors.all_finite(grad)
    vectors.copy_finite(grad, params)
    vectors.scale(grad, 1.0)
    vectors.add_scaled(grad, 1.0, params, 1.0)
    rule.init(params, tuple(slots))
    rule.apply(params, grad, tuple(slots), 1, 0.1)
    if rounds:
        total = Sum(addresses, np.ones(1), 0, np.ones(1, dtype))
        rule.apply_sum(params, total, tuple(slots), 1, 0.1)
