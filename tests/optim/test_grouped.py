"""Update rules with settings of their own for some arrays."""

import numpy as np
import pytest

from mpips.config.groups import Group
from mpips.errors import UserError
from mpips.layout import Layout
from mpips.optim import grouped
from mpips.optim.rules import AdamW

LAYOUT = Layout.of({"a.weight": (2, 3), "a.bias": (2,), "b.bias": (1,), "b.weight": (4,)})


def test_ranges_of_the_vector_have_their_settings() -> None:
    rule = AdamW(weight_decay=0.1)
    found = grouped(rule, LAYOUT, [Group("*.bias", weight_decay=0), Group("b.*", lr=0.5)], 2.0)
    plain = AdamW()
    assert found.parts(0, 13) == [(0, 6, rule, 1.0), (6, 9, plain, 1.0), (9, 13, rule, 0.25)]
    assert found.parts(4, 8) == [(4, 6, rule, 1.0), (6, 8, plain, 1.0)]
    assert found.parts(9, 9) == []
    assert found.slots == rule.slots


def test_without_groups_the_rule_is_as_it_was() -> None:
    rule = AdamW(weight_decay=0.1)
    assert grouped(rule, LAYOUT, [], 2.0) is rule
    assert rule.parts(3, 8) == [(3, 8, rule, 1.0)]


def test_statistics_change_by_what_is_pushed_whatever_the_rate() -> None:
    found = grouped(AdamW(weight_decay=0.1), LAYOUT, [Group("*", lr=1)], 2.0, ["b.weight"])
    assert [part[:2] for part in found.parts(8, 13)] == [(8, 9), (9, 13)]
    w, g = np.array([3.0, 4.0]), np.array([1.0, 0.5])
    found.parts(9, 13)[0].rule.apply(w, g, (g, g), 1, 0.0)
    assert w.tolist() == [2, 3.5]


@pytest.mark.parametrize("pattern", ["*.bais", "a.bias"])
def test_a_group_without_an_array(pattern: str) -> None:
    groups = [Group("a.*", lr=1), Group(pattern, lr=1)]
    with pytest.raises(UserError, match=f"group '{pattern.replace('*', '.')}', which no array"):
        grouped(AdamW(), LAYOUT, groups, 2.0)
