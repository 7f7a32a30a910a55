"""The measure of bytes on the wire: what it has sent, and what it says where no counter sees it."""

from pathlib import Path

import pytest
from verdict import check

from mpips.bench import wire
from mpips.bench.link import Sides
from mpips.bench.measure import Options
from mpips.cluster.world import Cluster
from mpips.codecs import make_codec
from mpips.errors import UserError
from mpips.transport.push import HEADER_WORDS

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.world(max_size=2, min_nodes=2)]
SIZE = 1 << 20


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


def test_what_no_counter_sees_is_an_error(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    still = tmp_path / "dev"
    still.write_text("two lines\nof headings\neth0: 1 0 0 0 0 0 0 0 1 0 0 0 0 0 0 0\n")
    monkeypatch.setattr(wire, "COUNTERS", still)
    failure = ""
    try:
        wire.run(cluster, Options(sizes=(SIZE,)))
    except UserError as error:
        failure = str(error)
    told = "0 bytes counted for a push of 1,048,576 bytes, expected at least 90% of them; let MPI"
    check(cluster.comm, failure.startswith(told), failure)
