"""Groups of arrays: their text, and which array is of which."""

import pytest

from mpips.config.groups import Group, members, parse_groups, text_of
from mpips.errors import UserError


def test_a_text_says_groups_and_groups_a_text() -> None:
    groups = Group("*.bias", weight_decay=0), Group("head.[ab] 1", 1e-5, 0.25)
    assert parse_groups("*.bias:weight_decay=0;head.[ab] 1: lr=1e-5 , weight_decay=.25") == groups
    assert text_of(groups) == "*.bias: weight_decay=0.0; head.[ab] 1: lr=1e-05, weight_decay=0.25"
    assert parse_groups(text_of(groups)) == groups
    assert parse_groups("") == ()


def test_an_array_is_of_the_first_group_that_matches() -> None:
    groups = Group("head.*", lr=1), Group("*.bias", lr=2), Group("none", lr=3)
    found = members(["a.bias", "head.bias", "a.weight", "head.weight"], groups)
    assert found == [["a.weight"], ["head.bias", "head.weight"], ["a.bias"], []]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("b",), "group 'b' without lr and weight_decay, expected one of them"),
        (("b", -1.0), "group 'b' with lr -1.0, expected a number >= 0"),
        (("b", None, float("nan")), "group 'b' with weight_decay nan"),
        (("b", "1"), "group 'b' with lr '1'"),
        (("a:b", 1.0), "group with the pattern 'a:b'"),
        (("", 1.0), "group with the pattern ''"),
    ],
)
def test_what_no_group_is(args: tuple[object, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Group(*args)  # type: ignore[arg-type]


def test_a_list_of_something_else() -> None:
    with pytest.raises(UserError, match=r"groups with \{'params': 1\}"):
        text_of([{"params": 1}])  # type: ignore[list-item]
