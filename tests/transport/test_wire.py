"""Packing between nodes and reads by message, of an owner that is this process itself."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpips.codecs import MessageId, make_codec
from mpips.config import Config
from mpips.layout import Layout, Shard, cut
from mpips.layout.roles import assign
from mpips.layout.tables import Table
from mpips.mpi.abort import Failures
from mpips.mpi.collectives import Arrays
from mpips.mpi.start import REPLIES, tag_of
from mpips.optim import make_rule
from mpips.optim.row_rules import Sgd
from mpips.planning.tables import JobTable
from mpips.ps.assemble import agree
from mpips.ps.design import Design
from mpips.transport.remote_reads import COMMITTED, Replies, ReplyReads
from mpips.transport.remote_rows import RemoteRows, RowReplies, ServedRows
from mpips.transport.wire import CHUNK_BYTES, Chunks, Packing, announcement, packed_by

N, VERSION = 40, 7
ROWS, DIM = 5000, 32


def arranged(config: Config, node_size: int, servers: int, n: int) -> Any:
    """Return what a job of four ranks says of itself."""
    node_of = [rank // node_size for rank in range(4)]
    roles = assign(config.mode, ["host"] * 4, node_of, servers)
    cluster = SimpleNamespace(roles=roles, node_of=node_of, nodes=len(set(node_of)))
    layout = Layout.of({"w": (n // 64, 64), "b": (n % 64,)})
    shards = cut(n, len(roles.owners))
    return SimpleNamespace(config=config, cluster=cluster, shards=shards, layout=layout)


BOTH, SYNC = Config(codec="int8", pull_codec="fp16"), Config(mode="sync", codec="onebit")
BY_BOTH = "packed between nodes: pushes by int8, pulls by fp16; "
BY_ONEBIT, NOTHING = "packed between nodes: pushes by onebit; ", "nothing is packed: "
FACTORS = Config(mode="sync", codec="powersgd", powersgd_rank=2)
MANY = Config(mode="sync", codec="powersgd", powersgd_rank=64)
BY_FACTORS = "packed between nodes: sums by powersgd of rank 2; 1 of 2 arrays are worth it; "
BY_MANY = "packed between nodes: sums by powersgd of rank 64; 0 of 2 arrays are worth it; "


@pytest.mark.parametrize(
    ("config", "node_size", "servers", "n", "names", "said"),
    [
        (Config(), 1, 1, 1 << 20, "", None),
        (BOTH, 2, 2, 1 << 20, "fp16 int8", f"{BY_BOTH}2 of 2 slices have the 64 KB"),
        (BOTH, 1, 1, 16383, "", f"{BY_BOTH}0 of 3 slices have the 64 KB"),
        (BOTH, 4, 1, 1 << 20, "", f"{NOTHING}no worker is on another node than a server"),
        # In rounds a slice crosses once a node.
        (SYNC, 1, 0, 1 << 20, "onebit", f"{BY_ONEBIT}12 of 12 slices have the 64 KB"),
        (SYNC, 2, 1, 1 << 20, "onebit", f"{BY_ONEBIT}1 of 1 slices have the 64 KB"),
        (SYNC, 4, 0, 1 << 20, "", f"{NOTHING}no worker is on another node than an owner"),
        (FACTORS, 2, 0, 64_005, "powersgd", f"{BY_FACTORS}of 64,005 elements 2,133 are sent"),
        (FACTORS, 4, 0, 64_005, "", f"{NOTHING}all ranks are on one node"),
        (MANY, 2, 0, 64_005, "", f"{BY_MANY}of 64,005 elements 64,005 are sent"),
    ],
)
def test_what_is_packed_is_said(
    config: Config, node_size: int, servers: int, n: int, names: str, said: str | None
) -> None:
    job = arranged(config, node_size, servers, n)
    assert " ".join(sorted(packed_by(job))) == names
    assert announcement(job) == said


def test_reads_between_nodes_whose_ranks_may_die_are_not_measured() -> None:
    """They are by reply in any case."""
    job, rule = arranged(Config(), 1, 1, N), make_rule("sgd")
    job.cluster.hosts = "abcd"
    design = Design(job.shards, "float32", rule, lambda step: 1.0, kept=True)
    assert agree(job.cluster, design, None, lambda request: None) is None


@pytest.mark.parametrize("name", ["none", "fp16", "bf16", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_chunks_are_bounded_and_make_the_shard_again(name: str, dtype: str) -> None:
    size = 150_001
    owner, reader = (Chunks.of_shard(make_codec(name), size, np.dtype(dtype)) for _ in range(2))
    params = np.random.default_rng(0).standard_normal(size).astype(dtype)
    out = np.zeros_like(params)
    theirs, mine = owner.cut(params), reader.cut(out)
    for k, (live, chunk) in enumerate(zip(theirs, mine, strict=True)):
        place = reader.message(chunk)
        message = owner.pack(live, MessageId(), live=True)
        assert message.nbytes == place.nbytes <= CHUNK_BYTES
        assert not np.shares_memory(message, params), "MPI would read what is being updated"
        assert k == len(mine) - 1 or message.nbytes > 0.9 * CHUNK_BYTES
        place[:] = message
        reader.unpack(place, chunk)
    error = np.abs(out - params).max() / np.abs(params).max()
    bounds = {"none": 0, "fp16": 2.0**-11, "bf16": 2.0**-8, "int8": 1 / 127}
    assert error <= bounds[name]
    assert (error > 0) == (name != "none")


def test_a_reply_is_the_shard_between_two_headers() -> None:
    """Alike chunks of it have draws of their own."""
    sent: list[np.ndarray] = []
    arrays = SimpleNamespace(begin_send=lambda part, rank, tag: sent.append(part))
    failures = SimpleNamespace(
        begin_send=lambda begin, *args: begin(*args), done=lambda requests: True
    )
    cluster: Any = SimpleNamespace(arrays=arrays, failures=failures)
    alike = np.tile(np.linspace(-1, 1, 512, dtype="f4"), 400)[:200_000]
    packing = Packing(make_codec("int8"), seed=1)
    header = np.arange(8)
    replies = Replies(cluster, header, alike, Shard(0, alike.size), 0, packing)
    for _ in range(2):
        replies.ask(3, consistent=False)
    half = len(sent) // 2
    for header_sent in sent[0], sent[half - 1], sent[half], sent[-1]:
        np.testing.assert_array_equal(header_sent[:3], header[:3])
    chunks = [*sent[1 : half - 2], *sent[half + 1 : -2]]  # without the last ones, which are shorter
    assert len({chunk.tobytes() for chunk in chunks}) == len(chunks) > 4


@pytest.mark.parametrize("name", ["none", "int8"])
@pytest.mark.parametrize("rows", [1, 100, 5000])
def test_the_first_chunks_of_an_answer_are_short(name: str, rows: int) -> None:
    """So they leave while others are read; none is empty."""
    chunks = Chunks.of_rows(make_codec(name), rows, 32, np.dtype("f4"))
    lengths = [len(chunk) for chunk in chunks.cut(np.zeros((rows, 32), "f4"))]
    assert sum(lengths) == rows
    assert min(lengths) > 0
    assert lengths[0] <= chunks.step // 4
    assert max(lengths) <= chunks.step


@pytest.mark.parametrize("may_die", [False, True])
def test_a_read_that_has_come_is_stamped(may_die: bool) -> None:
    """Also where all comes at once, and MPI lets a job go on without the dead."""
    failures, tag = Failures([]), tag_of(0, REPLIES)
    failures.on = may_die
    arrays, shard, sent = Arrays(MPI.COMM_SELF), np.arange(N, dtype="f8"), list[Any]()
    header = np.zeros(8, "i8")
    header[COMMITTED] = VERSION

    def send(rank: int, kind: str, asked: tuple[Any, ...]) -> None:
        assert (rank, kind, asked) == (0, "read", (0, False))
        sent.extend(arrays.begin_send(part, 0, tag) for part in (header, shard, header))

    cluster: Any = SimpleNamespace(arrays=arrays, failures=failures, send=send)
    reads = ReplyReads(cluster, [(0, 0, Shard(0, N))], 1, False)
    for _ in range(2):
        out, versions = np.zeros(N), np.zeros(1, "i8")
        reads.begin(out)
        assert not reads.stamped()
        reads.fetch()
        while not reads.advance():
            pass
        assert reads.stamped()
        assert (reads.result(versions), versions.tolist()) == (0, [VERSION])
        np.testing.assert_array_equal(out, shard)
    MPI.Request.Waitall(sent)


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_rows_are_written_as_they_come(codec: str) -> None:
    """All requests of a call want the same updates, also those that follow a change of mind."""
    wanted = list[tuple[int, ...]]()

    def lets(rank: int, *needs: int) -> bool:
        wanted.append(needs)
        return True

    rng, packed = np.random.default_rng(0), make_codec(codec)
    held, ids = rng.standard_normal((ROWS, DIM), "f4"), rng.integers(0, ROWS, 9000)
    cluster: Any = SimpleNamespace(
        arrays=Arrays(MPI.COMM_SELF), failures=Failures([]), is_local=lambda rank: False,
        roles=SimpleNamespace(owners=(0,)),
    )  # fmt: skip
    table = JobTable("rows", Table(ROWS, DIM), Sgd(1.0), 0, ROWS // 3, lambda version: 1.0)
    ownership = table.owned_by(1)
    served = ServedRows(lambda places, out: np.take(held, places, 0, out), DIM)
    replies = RowReplies(cluster, [served], np.dtype("f4"), Packing(packed), 0, lets=lets)
    remote = RemoteRows(cluster, 0, table, np.dtype("f4"), packed)
    places = ownership.places(ids)
    remote.want(5, 6)
    coming, out = remote.begin(ownership.sort(places)), np.full((len(ids), DIM), np.nan, "f4")
    remote.want(4, 5)
    here, turns = False, [0]
    while not here:
        replies.serve(most=1)
        here = coming.advance(out)
        turns.append(int(np.isfinite(out).all(axis=1).sum()))
    assert turns == sorted(turns), "a row that was written stays"
    assert len(set(turns)) > 3, "some were written before all had come"
    assert wanted == [(5, 6)] * 3
    np.testing.assert_allclose(out, held[places], atol=0.05 * (codec == "int8"), rtol=0)
