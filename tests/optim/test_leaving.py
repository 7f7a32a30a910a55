"""Updates that leave arrays alone."""

import numpy as np

from mpips.config.groups import Group
from mpips.layout import Layout
from mpips.optim import FrozenMask, common, grouped, leaving_out, make_rule
from mpips.optim.rules import Adam, AdamW

LAYOUT = Layout.of({"a": (2, 3), "b": (2,), "c": (1,), "d": (4,)})
A, B, C, D = LAYOUT.slices().values()


def test_a_rule_has_no_part_for_what_is_left_alone() -> None:
    rule = AdamW(weight_decay=0.1)
    found = leaving_out(rule, (A, C), {})
    assert found.parts(0, 13) == [(6, 8, rule, 1.0), (9, 13, rule, 1.0)]
    assert found.parts(2, 7) == [(6, 7, rule, 1.0)]
    assert found.slots == rule.slots
    assert leaving_out(rule, (A, B, C, D), {}).parts(0, 13) == []


def test_groups_stay_and_each_array_counts_for_itself() -> None:
    whole = grouped(Adam(before=9), LAYOUT, [Group("[bc]", lr=0.5)], 1.0)
    one, two = Adam(before=7), Adam(before=9)
    skipped = {A: 2, B: 2, C: 2, D: 0}
    found = leaving_out(whole, (), skipped)
    assert found.parts(0, 13) == [(0, 6, one, 1.0), (6, 9, one, 0.5), (9, 13, two, 1.0)]
    assert leaving_out(whole, (B,), skipped).parts(5, 10) == [
        (5, 6, one, 1.0), (8, 9, one, 0.5), (9, 10, two, 1.0)
    ]  # fmt: skip


def test_updates_are_those_of_a_rule_for_each_array() -> None:
    """Frozen now and then, with the corrections of the bias that each array has by itself."""
    rng, rule = np.random.default_rng(0), make_rule("adamw", weight_decay=0.1)
    leaving, vectors = FrozenMask(rule), np.zeros((3, LAYOUT.size))
    vectors[0] = rng.random(LAYOUT.size)
    own, counts = vectors.copy(), dict.fromkeys((A, B, C, D), 0)
    for step in range(1, 13):
        frozen = (() if step > 9 else (A, C), (A,), (C, D))[step % 3]
        grad = rng.random(LAYOUT.size)
        leaving.leave(frozen)
        for begin, end, by, _ in leaving.rule.parts(0, LAYOUT.size):
            at = slice(begin, end)
            by.apply(vectors[0, at], grad[at], (vectors[1, at], vectors[2, at]), step, 0.1)
        leaving.count()
        for array in {A, B, C, D} - set(frozen):
            at = slice(*array)
            counts[array] += 1
            rule.apply(own[0, at], grad[at], (own[1, at], own[2, at]), counts[array], 0.1)
    np.testing.assert_array_equal(vectors, own)
    assert leaving.skipped == {array: 12 - n for array, n in counts.items() if n < 12}


def test_what_is_common() -> None:
    assert common([(A, B)]) == common([(A, B), (A, B)]) == (A, B)
    assert common([(A, B), (B, C), (B,)]) == (B,)
    assert common([(A, B), ()]) == ()
