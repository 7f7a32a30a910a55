"""Values that are texts: groups of arrays, workers that are slowed, the words before a job's."""

import time

import pytest

from mpips.config.delay import DELAYS, check_delays, linger, parse_delays
from mpips.config.groups import Group, members, parse_groups, text_of
from mpips.config.jobfile import split_words
from mpips.errors import UserError


def test_a_text_says_groups_and_groups_a_text() -> None:
    groups = Group("*.bias", weight_decay=0), Group("head.[ab] 1", 1e-5, 0.25)
    assert parse_groups("*.bias:weight_decay=0;head.[ab] 1: lr=1e-5 , weight_decay=.25") == groups
    assert text_of(groups) == "*.bias: weight_decay=0.0; head.[ab] 1: lr=1e-05, weight_decay=0.25"
    assert parse_groups(text_of(groups)) == groups
    assert parse_groups("") == ()
    with pytest.raises(UserError, match=r"groups with \{'params': 1\}"):
        text_of([{"params": 1}])  # type: ignore[list-item]


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
    ],
)
def test_what_no_group_is(args: tuple[object, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Group(*args)  # type: ignore[arg-type]


def test_workers_that_are_slowed() -> None:
    """Whole jobs: tests/matrix."""
    for text, found in (("", {}), ("3:1,0:2.5", {3: 1.0, 0: 2.5})):
        assert DELAYS.fullmatch(text)
        assert parse_delays(text) == found
        check_delays(found, 4)
    with pytest.raises(UserError, match="names worker 3, expected workers 0 to 2"):
        check_delays({0: 2.0, 3: 2.0}, 3)


def test_lingering_sleeps_and_lets_mpi_get_on() -> None:
    calls: list[float] = []
    start, computed = time.perf_counter(), time.thread_time()
    linger(0.1, lambda: calls.append(0.0))
    assert time.perf_counter() - start >= 0.1
    assert time.thread_time() - computed < 0.05, "it spins"
    assert len(calls) > 1
    calls.clear()
    linger(-1.0, lambda: calls.append(0.0))
    assert not calls


def test_words_of_a_job() -> None:
    lines = {"-n 4 -- --lr 1": ("-n 4", "--lr 1"), "-- a.py -- b": ("", "a.py -- b")}
    for line, (ours, job) in lines.items():
        assert split_words(line.split()) == (ours.split(), job.split())
    assert split_words(["-n", "4", "--"]) == (["-n", "4"], [])
    assert split_words(["-n", "4"]) == (["-n", "4"], None)
