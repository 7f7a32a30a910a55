"""Packed pushes between nodes: what arrives is what the codec makes of what was sent."""

import time
from collections.abc import Sequence

import numpy as np
import pytest
from rig import Rig

from mpips.codecs import CODECS, Codec, MessageId, buffer_for, codec_for, make_codec
from mpips.codecs.topk import TopK
from mpips.layout import Shard
from mpips.mpi import window as windows
from mpips.mpi.world import Cluster
from mpips.optim.staleness import Staleness
from mpips.transport.push import HEADER_WORDS, Push
from mpips.transport.push_sender import BUFFERS

pytestmark = pytest.mark.mpi(min_size=2)
REMOTE = pytest.mark.world(max_size=4, min_nodes=2)

N = 17011  # of float64: two shards of it are large enough to be packed
PUSHES = 6
ALL = {name: make_codec(name) for name in CODECS}
ALL["topk-warm"] = TopK(ratio=0.05, momentum=0.5, warmup=4)


def gradient(worker: int, seq: int) -> np.ndarray:
    return np.random.default_rng([worker, seq]).standard_normal(N)


def origin(worker: int, seq: int) -> np.ndarray:
    return gradient(worker, 100 + seq)


def arrive(codec: Codec, worker: int, shard: Shard) -> list[np.ndarray]:
    """Return what a remote server sees of a worker's pushes, one after another."""
    state, out = codec.fresh_state(shard.size, "f8"), []
    for seq in range(1, PUSHES + 1):
        message = buffer_for(codec.wire_bytes(shard.size, "f8"))
        grad = gradient(worker, seq)[shard.range].copy()
        codec.encode(grad, message, state, MessageId(1, worker, seq, shard.begin))
        out.append(np.zeros(shard.size))
        codec.decode(message, out[-1])
    return out


def arrive_all(rig: Rig, codec: Codec) -> dict[int, list[np.ndarray]]:
    """Return what this server sees of every worker's pushes."""
    packed = codec_for(codec, rig.shard.size, "f8")
    assert packed, "the shard is too small for this test"
    part, found = rig.shard.range, dict[int, list[np.ndarray]]()
    for worker, rank in enumerate(rig.roles.workers):
        plain = [gradient(worker, seq)[part] for seq in range(1, PUSHES + 1)]
        local = rig.cluster.is_local(rank)
        found[worker] = plain if local else arrive(packed, worker, rig.shard)
    return found


def push_all(rig: Rig, which: Sequence[int] = range(1, PUSHES + 1)) -> None:
    """Push gradients; a buffer that may be written is overwritten at once."""
    push_some(rig, which)
    rig.finish()


def push_some(rig: Rig, which: Sequence[int]) -> None:
    for seq, number in enumerate(which, rig.sender.seq + 1):
        rig.cluster.wait(lambda seq=seq: rig.sender.writable(seq))
        rig.sender.buffer(seq).fill(np.nan)
        rig.sender.buffer(seq)[:] = gradient(rig.id, number)
        rig.replicas[seq % BUFFERS] = origin(rig.id, number)
        rig.sender.push((0, seq, seq + 1), 1, 0.0, np.zeros(len(rig.shards), "i8"))


def remote_bytes(rig: Rig, codec: Codec) -> int:
    """Return what a worker's pushes to remote servers take."""
    total = 0
    for rank, shard in zip(rig.roles.servers, rig.shards, strict=True):
        if shard.size and not rig.cluster.is_local(rank):
            kind = codec_for(codec, shard.size, "f8")
            for seq in range(1, PUSHES + 1):
                total += 8 * HEADER_WORDS
                if isinstance(kind, TopK):
                    total += 8 + 12 * kind.count(shard.size, seq)
                else:
                    total += kind.wire_bytes(shard.size, "f8") if kind else 8 * shard.size
    return total


@REMOTE
@pytest.mark.parametrize(
    ("name", "servers", "piece_bytes"),
    [*((name, 2, None) for name in ALL), *((name, 1, 1024) for name in ("int8", "topk-warm"))],
)
def test_what_arrives_is_what_the_codec_makes(
    cluster: Cluster,
    name: str,
    servers: int,
    piece_bytes: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if piece_bytes:
        monkeypatch.setattr(windows, "TRANSFER_MAX_BYTES", piece_bytes)
    codec = ALL[name]
    with Rig(cluster, N, servers, codec=codec) as rig:
        if rig.worker:
            push_all(rig)
            if rig.sender.push_sender.bytes_sent != remote_bytes(rig, codec):
                rig.wrong.append((rig.sender.push_sender.bytes_sent, remote_bytes(rig, codec)))
        else:
            arriving = arrive_all(rig, codec)

            def compare(push: Push) -> None:
                expected = arriving[push.worker][push.seq - 1]
                if not np.array_equal(push.grad, expected):
                    rig.wrong.append((push.worker, push.seq, push.grad, expected))
                rig.server.apply(push)

            rig.serve(compare)
            if rig.server.version != PUSHES * len(rig.roles.workers):
                rig.wrong.append(rig.server.version)


@REMOTE
@pytest.mark.parametrize("piece_bytes", [1 << 30, 1 << 14])
@pytest.mark.parametrize("name", ["int8", "topk"])
def test_what_it_was_computed_from_comes_unpacked(
    cluster: Cluster, name: str, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the packed gradient, which is compensated as it arrives."""
    monkeypatch.setattr(windows, "TRANSFER_MAX_BYTES", piece_bytes)
    with Rig(cluster, N, 1, codec=ALL[name], stale=Staleness(compensation=0.1)) as rig:
        if rig.worker:
            push_all(rig)
        else:
            arriving, part = arrive_all(rig, ALL[name]), rig.shard.range
            w = np.zeros(rig.shard.size)

            def compare(push: Push) -> None:
                grad = arriving[push.worker][push.seq - 1]
                read = origin(push.worker, push.seq)[part]
                w[:] += grad + 0.1 * grad * grad * (w - read)
                same = np.array_equal(push.grad, grad) and np.array_equal(push.origin, read)
                rig.server.apply(push)
                if not same or not np.allclose(rig.server.params, w, rtol=1e-12, atol=1e-12):
                    rig.wrong.append((push.worker, push.seq, push.origin, read))

            rig.serve(compare)
            if rig.server.version != PUSHES * len(rig.roles.workers):
                rig.wrong.append(rig.server.version)


def whole(rig: Rig) -> dict[str, np.ndarray]:
    """Return copies of what codecs keep at a worker, as whole vectors."""
    found = {name: np.zeros(N) for name in rig.sender.push_sender.state}
    for name, pieces in rig.sender.push_sender.state.items():
        for begin, view in pieces:
            found[name][begin : begin + view.size] = view
    return found


def before_snapshot(worker: int) -> int:
    return 4 + worker


def pause(rig: Rig) -> dict[str, np.ndarray]:
    """Hold as for a snapshot, until all workers do; returns what is kept then."""
    if rig.id % 2 == 0:
        time.sleep(
            0.05
        )  # a node aggregator is the last of its node, and has to wait for the others
    rig.cluster.wait(lambda: rig.sender.push_sender.hold(1))
    state = whole(rig)
    here = rig.workers.Ibarrier()

    def all_here() -> bool:
        rig.sender.push_sender.resting()
        return bool(here.Test())

    rig.cluster.wait(all_here)
    return state


@pytest.mark.world(min_nodes=2)
@pytest.mark.parametrize("name", ["onebit", "topk"])
def test_carried_sums_and_residuals_lose_nothing_at_a_snapshot_and_at_the_end(
    cluster: Cluster, name: str
) -> None:
    """What came from a node, and what its aggregator kept, is all that was pushed there."""
    with Rig(cluster, N, 1, codec=make_codec(name), aggregate=True) as rig:
        kept: list[np.ndarray] = []  # at the snapshot and at the end
        lost = np.zeros((cluster.nodes, 2, N))
        if rig.worker:
            last = before_snapshot(rig.id)
            push_some(rig, range(1, last + 1))
            state = pause(rig)
            push_all(rig, range(last + 1, last + 4))
            if state:
                kept = [state["residual"], whole(rig)["residual"]]
        else:

            def note(push: Push) -> None:
                time.sleep(0.01)  # so that pushes wait for their node aggregator
                before = {part.seq <= before_snapshot(part.worker) for part in push}
                if len(before) > 1:
                    rig.wrong.append([(part.worker, part.seq) for part in push])
                total = sum(gradient(part.worker, part.seq) for part in push)
                node = cluster.node_of[rig.roles.workers[push.worker]]
                lost[node, 0 if before == {True} else 1 :] += total - push.count * push.grad
                rig.server.apply(push)

            rig.serve(note)
        for rank, residuals in enumerate(cluster.comm.allgather(kept)):
            if residuals and not rig.worker:
                left = np.array(residuals) - lost[cluster.node_of[rank]]
                if not all(map(np.any, residuals)) or np.abs(left).max() > 1e-12:
                    rig.wrong.append((rank, np.abs(left).max()))
                lost[cluster.node_of[rank]] = 0
        if lost.any():  # on nodes that pack nothing
            rig.wrong.append(lost)


def close(codec: Codec | None, came: np.ndarray, params: np.ndarray) -> bool:
    """Whether `came` is within the codec's error of `params`, and within no smaller one."""
    if codec is None:
        return bool(np.array_equal(came, params))
    bound = {"fp16": 2.0**-11, "bf16": 2.0**-8, "int8": 1 / 127}[codec.name]
    error = np.abs(came - params).max() / np.abs(params).max()
    return bool(bound / 100 < error <= bound * 1.001)


@REMOTE
@pytest.mark.parametrize(
    ("name", "share", "consistent"),
    [
        ("none", False, False),
        ("none", True, True),
        ("fp16", False, True),
        ("bf16", True, False),
        *(("int8", share, consistent) for share in (False, True) for consistent in (False, True)),
    ],
)
def test_remote_shards_are_read_packed(
    cluster: Cluster, name: str, share: bool, consistent: bool
) -> None:
    servers = min(2, cluster.world - 1)
    codec = make_codec(name)
    args = {"consistent": consistent, "remote": "reply", "share": share, "pull_codec": codec}
    with Rig(cluster, N, servers, **args) as rig:  # type: ignore[arg-type]
        params = np.random.default_rng(5).standard_normal(N)
        if rig.worker:
            cluster.barrier()
            seen = []
            for _ in range(3):
                rig.puller.pull(rig.replica)
                seen.append(rig.replica.copy())
            expected = 0
            for rank, shard in zip(rig.roles.servers, rig.shards, strict=True):
                remote = not cluster.is_local(rank)
                kind = codec if remote else None
                parts = [came[shard.range] for came in seen]
                if not all(close(kind, part, params[shard.range]) for part in parts):
                    rig.wrong.append((rank, remote, parts))
                if kind is not None and np.array_equal(parts[0], parts[1]) != (name != "int8"):
                    rig.wrong.append("draws of two replies that are alike")
                chunk = {"none": 8, "fp16": 2, "bf16": 2, "int8": 1}[name] * shard.size
                expected += remote * (chunk + (name == "int8") * 8 * -(-shard.size // 512))
            if not share and rig.puller.remote.bytes_received != 3 * expected:
                rig.wrong.append((rig.puller.remote.bytes_received, expected))
            rig.finish()
        else:
            rig.server.params[:] = params[rig.shard.range]
            cluster.barrier()
            rig.serve(rig.server.apply)
        cluster.barrier()
        if rig.worker:
            rig.worker_half.pull_final(rig.replica)
            if not np.array_equal(rig.replica, params):
                rig.wrong.append("the last read is not exact")
