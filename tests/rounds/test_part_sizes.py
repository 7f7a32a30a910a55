"""In how large parts slices go between nodes."""

from types import SimpleNamespace
from typing import Any

import pytest

from mpips.rounds.reduction import is_slow


@pytest.mark.parametrize(("rate", "between_hosts", "on_a_host"), [
    (0.1e9, True, True), (1e9, True, False), (5e9, False, False),
])  # fmt: skip
def test_a_link_of_10_gbit_is_slow_and_memory_is_not(
    rate: float, between_hosts: bool, on_a_host: bool
) -> None:
    apart: Any = SimpleNamespace(hosts=["a", "a", "b", "b"], nodes=2)
    together: Any = SimpleNamespace(hosts=["a", "a", "a", "a"], nodes=2)
    assert (is_slow(apart, rate), is_slow(together, rate)) == (between_hosts, on_a_host)
