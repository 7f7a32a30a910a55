"""Pushes that are kept until they are applied: sent again, and by others."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from verdict import check

from mpips.codecs import make_codec
from mpips.kernels.atomics import observe
from mpips.layout import cut
from mpips.layout.roles import assign
from mpips.mpi.world import Cluster
from mpips.optim import make_rule
from mpips.ps.assemble import ServerHalf, WorkerHalf, assemble
from mpips.ps.design import Design
from mpips.ps.shard import Server
from mpips.transport.acknowledged import AcknowledgedPushSender
from mpips.transport.channel import Receiver
from mpips.transport.push_sender import PushSender
from mpips.transport.wire import Packing

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.world(max_size=4)]

N, PUSHES = 70_003, 12


def work(cluster: Cluster, half: WorkerHalf) -> list[object]:
    """Push, and send all again that is open now and then; what is applied counts once."""
    workers, out = cluster.roles.workers, np.zeros(N)
    push_sender = half.sender.push_sender
    for seq in range(1, PUSHES + 1):
        cluster.wait(lambda seq=seq: half.sender.writable(seq))  # type: ignore[misc]
        half.sender.buffer(seq)[:] = cluster.rank
        half.sender.push((0, 0, 1), 1, 0.0, half.puller.versions)
        if seq % 3 == 0:
            half.puller.pull(out)
        if seq % 4 == 0 and isinstance(push_sender, AcknowledgedPushSender):
            for sending in push_sender._shards:
                for again in (seq - 1, seq):
                    sending.send(again)
    cluster.wait(half.sender.push_sender.sent)
    for rank in cluster.roles.servers:
        cluster.send(rank, "fin", PUSHES)
    expected = float(PUSHES * sum(workers))
    cluster.wait(lambda: half.pull_final(out).min() == PUSHES * len(workers))
    half.leave()
    return [] if (out == expected).all() else [(out, expected)]


def serve(cluster: Cluster, half: ServerHalf, most: list[int]) -> None:
    """Apply and answer until no worker reads any more; notes how many bodies were here."""
    whole: set[int] = set()
    mine = cluster.roles.servers.index(cluster.rank)
    while len(whole) < len(cluster.roles.workers):
        push = half.receiver.take()
        most[0] = max(most[0], half.receiver.bodies)
        if push is not None:
            half.server.apply(push)
        half.server.serve_reads()
        for source, kind, payload in cluster.poll():
            if kind == "read":
                server, *request = payload
                assert server == mine
                half.server.want_read(source, tuple(request))
            elif kind == "whole":
                whole.add(source)
            else:
                assert kind == "fin", kind
        cluster.progress()


@contextlib.contextmanager
def halves(
    node_size: int, codec: str = "none", **placed: Any
) -> Iterator[tuple[Cluster, Any, list[object]]]:
    """This rank's half, a server's open, and a list for what is wrong: then all fail together."""
    cluster = Cluster(MPI.COMM_WORLD, node_size=node_size)
    cluster.roles = assign("async", cluster.hosts, cluster.node_of, **placed)
    packing = Packing(make_codec(codec), seed=3)
    design = Design(
        cut(N, len(cluster.roles.servers), 8), "float64", make_rule("sgd"), lambda version: -1.0,
        kept=True, far_read="reply", pushes=packing, replies=packing, consistent=True,
    )  # fmt: skip
    half, wrong = assemble(cluster, design), list[object]()
    if isinstance(half, ServerHalf):
        half.server.start_from(0)
        half.open(cluster.wait_request)
    yield cluster, half, wrong
    if isinstance(half, ServerHalf):
        half.close()
    half.free()
    cluster.free()
    check(MPI.COMM_WORLD, not wrong, wrong)


def push_twice(half: WorkerHalf) -> None:
    for seq in (1, 2):
        half.sender.buffer(seq)[:] = seq
        half.sender.push((0, 0, 1), 1, 0.0, half.puller.versions)


@pytest.mark.parametrize("codec", ["none", "fp16"])
def test_what_comes_twice_is_applied_once(codec: str) -> None:
    """Each rank is a node. Parameters are small whole numbers, which float16 holds."""
    servers = min(2, MPI.COMM_WORLD.size - 1)
    with halves(1, codec, servers=servers) as (cluster, half, wrong):
        if isinstance(half, ServerHalf):
            most = [0]
            serve(cluster, half, most)
            counts = [observe(half.server.applied, w) for w in range(len(cluster.roles.workers))]
            if most[0] > 2 or set(counts) != {PUSHES}:
                wrong += [f"{most[0]} bodies at a time", counts]
        else:
            wrong += work(cluster, half)


def test_a_buffer_is_free_when_its_push_is_applied() -> None:
    """Not as soon as it has left: whoever has it may die."""
    if MPI.COMM_WORLD.size > 2:
        pytest.skip("a server holds the pushes of one worker")
    with halves(1, servers=1) as (cluster, half, wrong):
        if isinstance(half, ServerHalf):

            def both_here() -> bool:
                half.receiver._remote.attend(None, fetch=True)
                return half.receiver.bodies == 2

            cluster.wait(both_here)
            cluster.barrier()
            cluster.barrier()
            for _ in range(3):  # the third gives the second back
                take_one(half.server, half.receiver)
        else:
            push_twice(half)
            cluster.barrier()
            cluster.wait(half.sender.push_sender.sent)
            wrong += ["free before it is applied"] if half.sender.writable(3) else []
            cluster.barrier()
            cluster.wait(lambda: half.sender.writable(3))
        cluster.barrier()


@pytest.mark.mpi(min_size=3)
def test_a_resender_sends_what_another_has_announced() -> None:
    """Another one of its node does, for a worker whose pushes nobody has sent."""
    placed, told = range(2, MPI.COMM_WORLD.size), list[tuple[int, str, object]]()
    with halves(2, server_ranks=placed) as (cluster, half, wrong):
        if cluster.rank == 0:
            half.sender.push_sender = PushSender()
            push_twice(half)
        cluster.barrier()
        if isinstance(half, ServerHalf):
            cluster.send(1, "lacking", (0, [(cluster.rank - 2, 0)]))
            cluster.wait(lambda: has_got(cluster, half, told))
            if told != [(1, "left", (0, 2))] or not (half.server.params == 3.0).all():
                wrong.append((told, half.server.params))
        elif cluster.rank == 1:

            def asked() -> bool:
                for source, kind, payload in cluster.poll():
                    half.handlers[kind](source, payload)
                    told.append((source, kind, payload))
                return len(told) == len(placed)

            cluster.wait(asked)
        cluster.barrier()


@pytest.mark.mpi(min_size=4)
def test_who_takes_a_shard_over_is_sent_what_is_open() -> None:
    """The server before has both pushes of a worker of another node, and has applied one."""
    with halves(2, server_ranks=(2, 3)) as (cluster, half, wrong):
        if cluster.rank == 0:
            push_twice(half)
        if cluster.rank == 2:
            remote, counts = half.receiver.acknowledged, list[int]()
            counts.append(remote.received(0))
            cluster.wait(lambda: take_one(half.server, half.receiver))
            cluster.wait(lambda: remote.attend(None, True) or remote.received(0) == 2)
            counts += half.server.version, remote.received(0)
            wrong += [] if counts == [0, 1, 2] else counts
        cluster.barrier()
        if cluster.rank == 3:
            store, receiver = half.serve(0)
            store.version = 1
            receiver.tell_all()
            both = (half.server, half.receiver), (store, receiver)
            cluster.wait(lambda: not any(take_one(*each) for each in both) and store.version == 2)
            wrong += [] if (store.params == 3.0).all() else [store.params]
            receiver.close()
        if cluster.rank == 0:
            cluster.wait(lambda: half.sender.writable(4))
        cluster.barrier()


def take_one(server: Server, receiver: Receiver) -> bool:
    """Apply a push, if one is here."""
    push = receiver.take()
    if push is not None:
        server.apply(push)
    return push is not None


def has_got(cluster: Cluster, half: ServerHalf, told: list[tuple[int, str, object]]) -> bool:
    take_one(half.server, half.receiver)
    told += cluster.poll()
    return bool(told) and half.server.version == 2
