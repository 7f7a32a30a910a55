"""Workers that are slowed on purpose: `mpips.config.delay`. Whole jobs: tests/matrix."""

import time

import pytest

from mpips.config.delay import DELAYS, check_delays, linger, parse_delays
from mpips.errors import UserError


def test_a_text_names_workers_and_factors() -> None:
    for text, found in (("", {}), ("3:1,0:2.5", {3: 1.0, 0: 2.5})):
        assert DELAYS.fullmatch(text)
        assert parse_delays(text) == found
        check_delays(found, 4)
    with pytest.raises(UserError, match="names worker 3, expected workers 0 to 2"):
        check_delays({0: 2.0, 3: 2.0}, 3)


def test_lingering_sleeps_and_lets_mpi_get_on() -> None:
    calls: list[float] = []
    start, computed = time.perf_counter(), time.thread_time()
    linger(0.1, lambda: calls.append(time.perf_counter()))
    assert time.perf_counter() - start >= 0.1
    assert time.thread_time() - computed < 0.05, "it spins"
    assert len(calls) > 1
    calls.clear()
    linger(0.0, lambda: calls.append(0.0))
    linger(-1.0, lambda: calls.append(0.0))
    assert not calls
