"""The measure of streaming DiLoCo on several nodes: its rows, and what no counter sees."""

import itertools
from pathlib import Path

import pytest
from verdict import check

from benchmarks import streaming
from mpips.bench import wire
from mpips.bench.measure import Options
from mpips.cluster.world import Cluster
from mpips.errors import UserError

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.world(max_size=2, min_nodes=2)]
QUICK = Options(repeats=1, quick=True)


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(streaming.DILOCO, "local_steps", 24)


def test_each_way_has_its_rows(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = itertools.count(0, 1_000_000)
    monkeypatch.setattr(wire, "bytes_sent", lambda text: {"eth0": next(counter)})
    rows = streaming.run(cluster, QUICK)
    found = [(row.measure, row.reach) for row in rows]
    aims = [None, None, streaming.TIME, streaming.TIME]
    due = [*(("streaming step", aim) for aim in aims), *[("streaming peak", streaming.PEAK)] * 3]
    check(cluster.comm, found == due, found)
    check(cluster.comm, all(row.value > 0 and row.ratio > 0 for row in rows), rows)


def test_what_no_counter_sees(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    still = tmp_path / "dev"
    still.write_text("two lines\nof headings\neth0: 1 0 0 0 0 0 0 0 1 0 0 0 0 0 0 0\n")
    monkeypatch.setattr(wire, "COUNTERS", still)
    failure = ""
    try:
        streaming.run(cluster, QUICK)
    except UserError as error:
        failure = str(error)
    told = "0 bytes counted for a host's exchange of "
    check(cluster.comm, failure.startswith(told), failure)
