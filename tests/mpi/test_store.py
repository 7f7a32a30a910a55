"""The channel and the store together: pushes, updates, and what a pull may see meanwhile.

Of a remote shard also: which way it is read, and that a node's workers share what they read.
"""

import itertools
import time

import numpy as np
import pytest
from rig import INBOX, Rig
from verdict import check

from mpips.kernels.atomics import observe
from mpips.mpi import window as windows
from mpips.mpi.start import mpi_name
from mpips.mpi.world import Cluster
from mpips.ps import assemble, parts
from mpips.tools.bench.pushpull import Exchange
from mpips.tools.bench.vector import make_job
from mpips.transport.push import Push

pytestmark = pytest.mark.mpi(min_size=2)
REMOTE = pytest.mark.world(max_size=4, min_nodes=2)

PUSHES = 12


def gradient(worker: int, seq: int, n: int) -> np.ndarray:
    """Whole numbers, so that sums are exact in any order."""
    return (worker + 1) * 1000.0 + seq + np.arange(n)


def work(rig: Rig) -> list[np.ndarray]:
    """Pull and push `PUSHES` times, every second pull around a push; returns the versions read."""
    seen = []
    for seq in range(1, PUSHES + 1):
        rig.cluster.wait(lambda seq=seq: rig.sender.writable(seq))
        grad = rig.sender.buffer(seq)
        grad.fill(np.nan)  # whoever still reads it would show
        versions = rig.puller.finish() if rig.puller.reading else rig.puller.pull(rig.replica)
        seen.append(versions.copy())
        grad[:] = gradient(rig.id, seq, len(grad))
        batch = (seq // 5, 10 * seq, 10 * seq + rig.id)
        ahead = seq % 2 and seq < PUSHES
        if ahead:
            rig.cluster.wait(lambda seq=seq: rig.sender.writable(seq + 1))
            rig.puller.begin(rig.replica)
        assert rig.sender.push(batch, seq + rig.id, 0.1 * seq - 1, seen[-1]) == seq
        if ahead:
            rig.puller.fetch()
    rig.finish()
    return seen


class Applied:
    """What a server saw, in the order in which it applied it; slow now and then."""

    def __init__(self, rig: Rig, n: int) -> None:
        self.rig, self.n = rig, n
        self.rows: list[tuple[int, int, int]] = []

    def __call__(self, push: Push) -> None:
        rig, before = self.rig, self.rig.server.version
        expected = sum(gradient(p.worker, p.seq, self.n)[rig.shard.range] for p in push)
        good = np.array_equal(push.grad * push.count, expected)
        if len(self.rows) % 3 == 0:
            time.sleep(0.002)
        version = rig.server.apply(push)
        for part in push:
            seq, worker = part.seq, part.worker
            self.rows.append((worker, seq, before - part.version))
            told = (part.batch, part.samples, part.loss)
            meant = ((seq // 5, 10 * seq, 10 * seq + worker), seq + worker, 0.1 * seq - 1)
            good = good and told == meant
        good = good and version == len(self.rows) and rig.receiver.bodies <= INBOX
        rig.expect(good, push, version, expected)


@pytest.mark.parametrize(
    ("n", "servers", "piece_bytes", "remote", "aggregate"),
    [
        (1003, 1, None, "get", False),
        (1003, 2, 1024, "get", False),
        (20011, 2, None, "reply", False),
        (5, 2, None, "get", False),
        (1003, 1, 1024, "get", True),
        (20011, 2, None, "reply", True),
    ],
)
def test_pushes_are_applied_once_and_in_order(
    cluster: Cluster,
    n: int,
    servers: int,
    piece_bytes: int | None,
    remote: str,
    aggregate: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if piece_bytes:
        monkeypatch.setattr(windows, "TRANSFER_MAX_BYTES", piece_bytes)
    with Rig(cluster, n, servers, remote=remote, aggregate=aggregate) as rig:
        workers = len(rig.roles.workers)
        if rig.worker:
            seen = work(rig)
            rig.expect(all((a <= b).all() for a, b in itertools.pairwise(seen)), seen)
        else:
            applied = Applied(rig, n)
            rig.serve(applied)
            check_ledger(rig, applied, workers)
        check(cluster.comm, not rig.wrong, rig.wrong)
        cluster.barrier()
        if rig.worker:
            versions = rig.worker_half.pull_final(rig.replica)
            pushes = [(w, seq) for w in range(workers) for seq in range(1, PUSHES + 1)]
            total = sum(gradient(w, seq, n) for w, seq in pushes)
            rig.expect(np.array_equal(rig.replica, total), rig.replica - total)
            due = [PUSHES * workers if s.size else 0 for s in rig.shards]
            rig.expect(versions.tolist() == due, versions)
            rig.expect(rig.puller.bytes == PUSHES * n * 8, rig.puller.bytes)


def check_ledger(rig: Rig, applied: Applied, workers: int) -> None:
    """Compare a server's counts with what was seen."""
    server, tally, each = rig.server, rig.server.tally, PUSHES if rig.shard.size else 0
    for w in range(workers):
        seqs = [seq for worker, seq, _ in applied.rows if worker == w]
        rig.expect(seqs == list(range(1, each + 1)) and observe(server.applied, w) == each, w, seqs)
    stale = [row[2] for row in applied.rows]
    counts = np.bincount(stale, minlength=len(tally.staleness))
    rig.expect(np.array_equal(counts, tally.staleness), stale, tally.staleness)
    told = tally.staleness_sum, tally.staleness_max
    rig.expect(told == (sum(stale), max(stale, default=0)), told, stale)
    rig.expect(server.version == counts.sum() == each * workers, server.version, counts)


def test_nothing_is_taken_where_nothing_may_be_fetched(cluster: Cluster) -> None:
    """As in a snapshot; what its limit holds back: the jobs that count in tests/matrix."""
    with Rig(cluster, 40, 1) as rig:
        if rig.worker:
            for seq in (1, 2):
                rig.push(np.full(40, seq))
            cluster.barrier()
            rig.finish()
        else:
            cluster.barrier()  # all have pushed twice
            deadline = time.monotonic() + 0.05
            while time.monotonic() < deadline:
                cluster.progress()
                taken = rig.receiver.take(fetch=False) is not None or rig.receiver.bodies
                rig.expect(not taken, "taken though nothing may be fetched")
            rig.serve(rig.server.apply)
            due = 3 * len(rig.roles.workers)
            rig.expect((rig.server.params == due).all(), rig.server.params)


class Busy:
    """A server that updates its shard without a pause: version v leaves every element at v."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.ones = np.ones(rig.shard.size)
        self.seq = 0

    def __call__(self) -> None:
        self.seq += 1
        version = self.rig.server.version
        push = Push(0, self.seq, (0, 0, 1), 1, 0.0, version, self.ones)
        self.rig.server.apply(push)


def look(rig: Rig, replica: np.ndarray, whole: bool = True) -> bool:
    """Pull once and compare what came with the versions; returns whether it is torn.

    Of a torn read a number is as old as the version or newer, or half of one if not `whole`.
    """
    before = rig.puller.torn
    versions = rig.puller.pull(replica)
    torn = rig.puller.torn > before
    for shard, version in zip(rig.shards, versions.tolist(), strict=True):
        low, high = replica[shard.range].min(), replica[shard.range].max()
        rig.expect(low >= version or (torn and not whole), "an update is missing", version, low)
        rig.expect(torn or low == high == version, "torn, and not counted", version, low, high)
    return torn


@pytest.mark.parametrize("remote", ["get", "reply"])
@pytest.mark.world(max_size=3)
def test_torn_reads_happen_and_are_counted(cluster: Cluster, remote: str) -> None:
    with Rig(cluster, 1 << 18, 1, remote=remote) as rig:
        pulls = torn = mixed = 0
        if rig.worker:
            deadline = time.monotonic() + 20
            while (torn < 3 or mixed < 1 or pulls < 20) and time.monotonic() < deadline:
                look(rig, rig.replica)
                mixed += rig.replica.min() != rig.replica.max()
                torn, pulls = rig.puller.torn, pulls + 1
            rig.see_enough()
            rig.expect(torn >= 3 and mixed >= 1, f"{torn} torn reads counted, {mixed} seen", pulls)
        else:
            rig.serve_reads(Busy(rig))


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.world(max_size=4)
def test_consistent_reads_are_never_torn(
    cluster: Cluster, servers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "BLOCK_BYTES", 1 << 15)  # so that updates are of several blocks
    with Rig(cluster, 1 << 16, servers, consistent=True) as rig:
        if rig.worker:
            last = np.zeros(servers)
            for _ in range(20):
                rig.expect(not look(rig, rig.replica), "torn")
                rig.expect((rig.puller.versions >= last).all(), last, rig.puller.versions.copy())
                last = rig.puller.versions.copy()
            rig.see_enough()
        else:
            rig.serve_reads(Busy(rig))


@REMOTE
def test_nodes_of_one_host_read_by_reply_with_open_mpi(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There, owners would lose memory by Get; elsewhere it is measured, and here found faster."""
    monkeypatch.setattr(assemble, "faster", lambda times: "get")
    exchange = Exchange(make_job(cluster, 1000, "async", servers=1))
    exchange.exchange(3)
    way = exchange.remote_way
    exchange.free()
    expected = "reply" if "Open MPI" in mpi_name() else "get"
    check(cluster.comm, way == expected, way)


@REMOTE
@pytest.mark.parametrize(("remote", "share"), [("get", False), ("reply", False), ("get", True)])
def test_a_read_is_not_here_before_it_is_asked_for(
    cluster: Cluster, remote: str, share: bool
) -> None:
    """Nor where one before it has come whole."""
    with Rig(cluster, 1003, 1, remote=remote, share=share) as rig:
        if rig.worker:
            for k in range(3):
                rig.puller.begin(rig.replica)
                rig.expect(not (rig.puller.looks_ahead and rig.puller.advance()), k)
                rig.puller.fetch()
                rig.puller.finish()
            rig.finish()
        else:
            rig.serve(rig.server.apply)
        cluster.barrier()
    with pytest.raises(KeyError):
        rig.window.view(cluster.rank, "header")


@pytest.mark.mpi(min_size=4)
@REMOTE
@pytest.mark.parametrize("remote", ["get", "reply"])
def test_what_is_joined_is_what_was_fetched(cluster: Cluster, remote: str) -> None:
    """Which fetches are joined: tests/transport/test_single_flight_reads.py."""
    with Rig(cluster, 30011, 1, remote=remote, share=True) as rig:
        if rig.worker:
            last = -1
            for k in range(30):
                whole = remote == "reply" or cluster.is_local(0)
                look(rig, rig.replicas[k % 2], whole)
                rig.expect(rig.puller.versions[0] >= last, "older than the one before", last)
                last = int(rig.puller.versions[0])
            rig.see_enough()
        else:
            rig.serve_reads(Busy(rig))
