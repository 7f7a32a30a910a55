"""Packed pushes between nodes: what arrives is what the codec makes of what was sent."""

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


def push_all(rig: Rig) -> None:
    for seq in range(1, PUSHES + 1):
        rig.push(gradient(rig.id, seq), origin=origin(rig.id, seq))
    rig.finish()


def remote_bytes(rig: Rig, codec: Codec, origins: bool) -> int:
    """Return what a worker's pushes to remote servers take."""
    total = 0
    for rank, shard in zip(rig.roles.servers, rig.shards, strict=True):
        if shard.size and not rig.cluster.is_local(rank):
            kind = codec_for(codec, shard.size, "f8")
            for seq in range(1, PUSHES + 1):
                total += 8 * HEADER_WORDS + origins * 8 * shard.size
                if isinstance(kind, TopK):
                    total += 8 + 12 * kind.count(shard.size, seq)
                else:
                    total += kind.wire_bytes(shard.size, "f8") if kind else 8 * shard.size
    return total


@REMOTE
@pytest.mark.parametrize(
    ("name", "servers", "piece_bytes", "factor"),
    [
        *((name, 2, None, 0.0) for name in ALL),
        *((name, 1, 1024, 0.0) for name in ("int8", "topk-warm")),
        *((name, 1, size, 0.1) for name in ("int8", "topk") for size in (None, 1 << 14)),
    ],
)
def test_what_arrives_is_what_the_codec_makes(
    cluster: Cluster,
    name: str,
    servers: int,
    piece_bytes: int | None,
    factor: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where it is compensated, what it was computed from comes behind it, unpacked."""
    if piece_bytes:
        monkeypatch.setattr(windows, "TRANSFER_MAX_BYTES", piece_bytes)
    codec, stale = ALL[name], Staleness(compensation=factor)
    with Rig(cluster, N, servers, codec=codec, stale=stale) as rig:
        if rig.worker:
            push_all(rig)
            sent, due = rig.sender.push_sender.bytes_sent, remote_bytes(rig, codec, factor > 0)
            rig.expect(sent == due, sent, due)
        else:
            arriving, part, w = arrive_all(rig, codec), rig.shard.range, np.zeros(rig.shard.size)

            def compare(push: Push) -> None:
                grad = arriving[push.worker][push.seq - 1]
                read = origin(push.worker, push.seq)[part]
                w[:] += grad + factor * grad * grad * (w - read)
                same = not factor or np.array_equal(push.origin, read)
                rig.expect(same and np.array_equal(push.grad, grad), push, grad, read)
                rig.server.apply(push)
                near = np.allclose(rig.server.params, w, rtol=1e-12, atol=1e-12)
                rig.expect(near, push, rig.server.params - w)

            rig.serve(compare)
            version = rig.server.version
            rig.expect(version == PUSHES * len(rig.roles.workers), version)


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
                good = all(close(kind, part, params[shard.range]) for part in parts)
                rig.expect(good, rank, remote, parts)
                good = kind is None or np.array_equal(*parts[:2]) == (name != "int8")
                rig.expect(good, "draws of two replies that are alike")
                chunk = {"none": 8, "fp16": 2, "bf16": 2, "int8": 1}[name] * shard.size
                expected += remote * (chunk + (name == "int8") * 8 * -(-shard.size // 512))
            received = rig.puller.remote.bytes_received
            rig.expect(share or received == 3 * expected, received, expected)
            rig.finish()
        else:
            rig.server.params[:] = params[rig.shard.range]
            cluster.barrier()
            rig.serve(rig.server.apply)
        cluster.barrier()
        if rig.worker:
            rig.worker_half.pull_final(rig.replica)
            rig.expect(np.array_equal(rig.replica, params), "the last read is not exact")
