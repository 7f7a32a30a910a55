"""Measures of links and of many ranks: their rows, and the bytes that they count."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from verdict import check

from benchmarks import streaming
from mpips.codecs import make_codec
from mpips.errors import UserError
from mpips.mpi.collectives import gather_all
from mpips.mpi.world import Cluster
from mpips.tools.bench import link, remote_rows, scale, wire
from mpips.tools.bench.link import Sides
from mpips.tools.bench.measure import Options
from mpips.transport.push import HEADER_WORDS

pytestmark = pytest.mark.mpi(min_size=2)
PAIR = pytest.mark.world(max_size=2, min_nodes=2)
QUICK = Options(repeats=1, quick=True)
SIZE = 1 << 20
MB = 1_000_000


@pytest.mark.mpi(min_size=3)
@pytest.mark.world(max_size=4)
def test_all_workers_beside_the_fewest(cluster: Cluster) -> None:
    rows = list(scale.run(cluster, Options(repeats=1, quick=True, sizes=(8192, 4096))))
    workers = cluster.world - 1
    due = [
        (f"{mode}, {size} KB, {count} workers", f"{more:g} x a step of {few}")
        for size in (4, 8)
        for mode, count, more, few in (
            ("async", workers, workers, 1),
            ("sync", workers + 1, cluster.world / 2, 2),
        )
    ]
    due += [(f"memory of the server, 8 KB, {workers} workers", "with 1, + 10 MB")]
    found = [(row.case, row.beside) for row in rows]
    check(cluster.comm, found == due, (found, due))
    check(cluster.comm, all(0 < row.value < 1e4 and row.ratio > 0 for row in rows), rows)


@pytest.mark.world(max_size=4, min_nodes=2)
def test_remote_rows_beside_raw_tcp(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_rows, "STEPS", 4)
    rows = list(remote_rows.run(cluster, QUICK))
    (found, *_) = gather_all(cluster.comm, [(row.beside, row.case) for row in rows])
    workers = min(2, cluster.node_of.count(1))
    due = [
        f"{who}, {way}{codec}"
        for who in ["1 worker", "2 workers"][:workers]
        for codec in ("", " by fp16", " by int8")
        for way in ("pull", "pull ahead", "push")
    ]
    told = [case for beside, case in found if beside == "raw TCP"]
    check(cluster.comm, told == due and len(found) == len(due) + 2, found)
    check(cluster.comm, all(row.value > 0 and row.ratio > 0 for row in rows), rows)


@PAIR
def test_a_link_has_its_rows(cluster: Cluster) -> None:
    found = [row.measure for row in link.run(cluster, QUICK)]
    due = [
        "remote pull",
        "remote push",
        "remote pull+push",
        *["remote step"] * 3,
        "remote read",
        "remote round",
    ]
    check(cluster.comm, found == due, found)


# Bytes on the wire ---------------------------------------------------------------------------


@PAIR
@pytest.mark.parametrize("name", ["none", *wire.AIMS])
def test_pushes_go_by_their_codec(cluster: Cluster, name: str) -> None:
    sides = Sides(cluster, SIZE, False, 1, codec=name)
    sides.push()
    codec, pushes = make_codec(name), sides.times
    body = codec.wire_bytes(SIZE // 4, "f4") if codec else SIZE
    worker = sides.exchange.server is None
    sent = sides.exchange.sender.bytes_sent if worker else 0
    sides.free()
    due = pushes * (body + 8 * HEADER_WORDS)
    check(cluster.comm, not worker or sent == due, (sent, due))


@PAIR
@pytest.mark.parametrize("name", ["none", *wire.PULLED])
def test_pulls_go_by_their_codec(cluster: Cluster, name: str) -> None:
    sides = Sides(cluster, SIZE, False, 1, pull_codec=name)
    worker = sides.exchange.server is None
    before = sides.exchange.puller.bytes_received if worker else 0
    sides.pull()
    came = sides.exchange.puller.bytes_received - before if worker else 0
    codec, pulls = make_codec(name), sides.times
    each = codec.wire_bytes(SIZE // 4, "f4") if codec else SIZE
    sides.free()
    check(cluster.comm, not worker or came == pulls * each, came)


@pytest.mark.mpi(min_size=3)
@pytest.mark.world(max_size=4, min_nodes=2)
def test_each_counts_where_it_is_sent(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    of_my_node = (cluster.node_of[cluster.rank] + 1) * MB * wire.STEPS
    counter = itertools.count(0, of_my_node)
    monkeypatch.setattr(wire, "bytes_sent", lambda text: {"eth0": next(counter)})
    rows = wire.neighbours(cluster, 64 << 10)
    found = [(row.measure, row.value, row.other, row.ratio, row.reach) for row in rows]
    if cluster.node_of.count(1) == 1:  # nobody there has a neighbour
        check(cluster.comm, not rows, found)
        return
    home = cluster.node_of[cluster.roles.servers[0]]
    pushed, pulled = 2.0 - home, 1.0 + home
    due = [("wire push", pushed, pushed, 1, 1.7), ("wire pull", pulled, pulled, 1, 1.7)]
    check(cluster.comm, found == due, (found, due))


@PAIR
def test_streaming_has_its_rows(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = itertools.count(0, MB)
    monkeypatch.setitem(streaming.DILOCO, "local_steps", 24)
    monkeypatch.setattr(wire, "bytes_sent", lambda text: {"eth0": next(counter)})
    rows = streaming.run(cluster, QUICK)
    found = [(row.measure, row.reach) for row in rows]
    aims = [None, None, streaming.TIME, streaming.TIME]
    due = [*(("streaming step", aim) for aim in aims), *[("streaming peak", streaming.PEAK)] * 3]
    check(cluster.comm, found == due, found)
    check(cluster.comm, all(row.value > 0 and row.ratio > 0 for row in rows), rows)


@PAIR
@pytest.mark.parametrize(
    ("measure", "told"),
    [
        (
            lambda cluster: list(wire.run(cluster, Options(sizes=(SIZE,)))),
            "0 bytes counted for a push of 1,048,576 bytes, expected at least 90% of them; let MPI",
        ),
        (lambda cluster: streaming.run(cluster, QUICK), "0 bytes counted for a host's exchange of"),
    ],
    ids=["wire", "streaming"],
)
def test_what_no_counter_sees_is_an_error(
    cluster: Cluster,
    measure: Callable[[Cluster], object],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    still = tmp_path / "dev"
    still.write_text("two lines\nof headings\neth0: 1 0 0 0 0 0 0 0 1 0 0 0 0 0 0 0\n")
    monkeypatch.setattr(wire, "COUNTERS", still)
    monkeypatch.setitem(streaming.DILOCO, "local_steps", 24)
    failure = ""
    try:
        measure(cluster)
    except UserError as error:
        failure = str(error)
    check(cluster.comm, failure.startswith(told), failure)
