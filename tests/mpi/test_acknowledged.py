"""Pushes that are kept until they are applied: sent again, and by others."""

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from mpi4py import MPI
from rig import INBOX, Rig

from mpips.codecs import make_codec
from mpips.mpi.world import Cluster
from mpips.ps.shard import Server
from mpips.transport.channel import Receiver
from mpips.transport.push_sender import PushSender

pytestmark = pytest.mark.mpi(min_size=2)

N, PUSHES = 70_003, 12


@contextlib.contextmanager
def kept(node_size: int, servers: int | Sequence[int], codec: str = "none") -> Iterator[Rig]:
    """A rig on communicators of its own: the servers' last reports may stay on their way."""
    cluster, made = Cluster(MPI.COMM_WORLD, node_size), make_codec(codec)
    with Rig(cluster, N, servers, "reply", made, made, kept=True, consistent=True) as rig:
        yield rig
    cluster.free()


def push_twice(rig: Rig) -> None:
    for seq in (1, 2):
        rig.push(np.full(N, seq))


def take_one(server: Server, receiver: Receiver) -> bool:
    """Apply a push, if one is here."""
    push = receiver.take()
    if push is not None:
        server.apply(push)
    return push is not None


@pytest.mark.parametrize("codec", ["none", "fp16"])
def test_what_comes_twice_is_applied_once(codec: str) -> None:
    """Each rank is a node. Parameters are small whole numbers, which float16 holds."""
    with kept(1, min(2, MPI.COMM_WORLD.size - 1), codec) as rig:
        workers = rig.roles.workers
        if rig.worker:
            for seq in range(1, PUSHES + 1):
                rig.push(np.full(N, rig.cluster.rank))
                if seq % 3 == 0:
                    rig.puller.pull(rig.replica)
                for again in (seq - 1, seq) if seq % 4 == 0 else ():
                    for sending in rig.sender.push_sender._shards:
                        sending.send(again)
            rig.cluster.wait(rig.sender.push_sender.sent)
            while rig.puller.pull(rig.replica).min() < PUSHES * len(workers):
                pass
            rig.expect((rig.replica == PUSHES * sum(workers)).all(), rig.replica)
            rig.finish()
        else:
            bodies = list[int]()
            rig.serve(rig.server.apply, lambda: bodies.append(rig.receiver.bodies))
            ledger = rig.server.ledger
            rig.expect(max(bodies) <= INBOX, f"{max(bodies)} bodies at a time")
            rig.expect(ledger == [PUSHES] * len(workers), ledger)


def test_a_buffer_is_free_when_its_push_is_applied() -> None:
    """Not as soon as it has left: whoever has it may die."""
    if MPI.COMM_WORLD.size > 2:
        pytest.skip("a server holds the pushes of one worker")
    with kept(1, 1) as rig:
        cluster = rig.cluster
        if rig.worker:
            push_twice(rig)
            cluster.barrier()
            cluster.wait(rig.sender.push_sender.sent)
            rig.expect(not rig.sender.writable(3), "free before it is applied")
            cluster.barrier()
            cluster.wait(lambda: rig.sender.writable(3))
        else:
            remote = rig.receiver.acknowledged
            cluster.wait(lambda: remote.attend(None, fetch=True) or remote.bodies == 2)
            cluster.barrier()
            cluster.barrier()
            for _ in range(3):  # the third gives the second back
                take_one(rig.server, rig.receiver)
        cluster.barrier()


@pytest.mark.mpi(min_size=3)
def test_a_resender_sends_what_another_has_announced() -> None:
    """Another one of its node does, for a worker whose pushes nobody has sent."""
    servers, told = range(2, MPI.COMM_WORLD.size), list[tuple[int, str, object]]()
    with kept(2, servers) as rig:
        cluster = rig.cluster

        def has_got() -> bool:
            take_one(rig.server, rig.receiver)
            told.extend(cluster.poll())
            return bool(told) and rig.server.version == 2

        def asked() -> bool:
            for source, kind, payload in cluster.poll():
                rig.worker_half.handlers[kind](source, payload)
                told.append((source, kind, payload))
            return len(told) == len(servers)

        if cluster.rank == 0:
            rig.sender.push_sender = PushSender()
            push_twice(rig)
        cluster.barrier()
        if not rig.worker:
            cluster.send(1, "lacking", (0, [(rig.id, 0)]))
            cluster.wait(has_got)
            good = told == [(1, "left", (0, 2))] and (rig.server.params == 3.0).all()
            rig.expect(good, told, rig.server.params)
        elif cluster.rank == 1:
            cluster.wait(asked)
        cluster.barrier()


@pytest.mark.mpi(min_size=4)
def test_who_takes_a_shard_over_is_sent_what_is_open() -> None:
    """The server before has both pushes of a worker of another node, and has applied one."""
    with kept(2, (2, 3)) as rig:
        cluster = rig.cluster
        if cluster.rank == 0:
            push_twice(rig)
        if cluster.rank == 2:
            remote, counts = rig.receiver.acknowledged, list[int]()
            counts.append(remote.received(0))
            cluster.wait(lambda: take_one(rig.server, rig.receiver))
            cluster.wait(lambda: remote.attend(None, True) or remote.received(0) == 2)
            counts += rig.server.version, remote.received(0)
            rig.expect(counts == [0, 1, 2], counts)
        cluster.barrier()
        if cluster.rank == 3:
            store, receiver = rig.server_half.serve(0)
            store.version = 1
            receiver.acknowledged.tell_all()
            both = (rig.server, rig.receiver), (store, receiver)
            cluster.wait(lambda: not any(take_one(*each) for each in both) and store.version == 2)
            rig.expect((store.params == 3.0).all(), store.params)
            receiver.close()
        if cluster.rank == 0:
            cluster.wait(lambda: rig.sender.writable(4))
        cluster.barrier()
