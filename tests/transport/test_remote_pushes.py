"""Pushes between nodes by themselves: a server's half, and a node aggregator's."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from headers import pack

from mpips.codecs import make_codec
from mpips.codecs.topk import TopK
from mpips.kernels.atomics import observe, publish
from mpips.layout import Shard
from mpips.layout.roles import Roles
from mpips.mpi import window
from mpips.mpi.start import BODIES, HEADERS, tag_of
from mpips.optim import Sgd
from mpips.transport.acknowledged import Sending
from mpips.transport.channel import BUFFERS
from mpips.transport.push import HEADER_WORDS, Push
from mpips.transport.push_receiver import IN_TURN, PushReceiver
from mpips.transport.push_sender import (
    PUSHED,
    Announced,
    NodeAggregator,
    PushOptions,
    ShardSender,
)
from mpips.transport.wire import Packer, Packing, Unpacker

N, PIECES = 10 * IN_TURN, 2 * IN_TURN


class Line:
    """Messages on their way from the ranks of workers, each on a node: in the order of each."""

    def __init__(self, *ranks: int) -> None:
        self.ranks = ranks
        self.headers: list[tuple[int, np.ndarray]] = []
        self.pieces: dict[int, list[np.ndarray]] = {rank: [] for rank in ranks}
        self.asked: list[tuple[np.ndarray, np.ndarray]] = []

    def send(self, worker: int, seq: int) -> None:
        header = np.zeros((1, HEADER_WORDS), "i8")
        pack(header[0], worker, seq, (0, 0, 1), 1, 0.0, 0)
        self.headers.append((self.ranks[worker], header))
        self.pieces[self.ranks[worker]] += np.split(seq * np.arange(N, dtype="f8"), PIECES)

    def rows(self, tag: int, width: int) -> list[tuple[int, np.ndarray]]:
        assert tag == tag_of(0, HEADERS)
        found, self.headers = self.headers, []
        return found

    def find(self, source: int, tag: int) -> Any:
        assert tag == tag_of(0, BODIES)
        receive = lambda out: self.begin_receive(out, source)  # noqa: E731
        return SimpleNamespace(Irecv=receive) if self.pieces[source] else None

    def begin_receive(self, out: np.ndarray, source: int, tag: int = 0) -> Any:
        self.asked.append((out, self.pieces[source].pop(0)))
        mine = self.asked[-1]
        return SimpleNamespace(Test=lambda: all(mine is not each for each in self.asked))

    def let_in(self, which: int) -> None:
        """Have a piece come that was asked for."""
        out, piece = self.asked.pop(which)
        out[:] = piece

    def receiver(self, applied: np.ndarray, inbox: int, aggregate: bool = False) -> PushReceiver:
        """Return that of a server on the first rank."""
        failures = SimpleNamespace(lost=set(), attempt=lambda call, *args: call(*args))
        cluster: Any = SimpleNamespace(
            roles=Roles((0,), self.ranks), node_of=range(9), arrays=self, failures=failures,
            is_local=lambda rank: rank == 0,
        )  # fmt: skip
        return PushReceiver(cluster, 0, N, "f8", applied, PushOptions(inbox, aggregate=aggregate))


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "TRANSFER_MAX_BYTES", 8 * N // PIECES)


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("which", [0, -1])  # of those asked for comes first
def test_a_body_is_asked_for_and_taken_before_the_next(which: int) -> None:
    """Its pieces have the tag of the next one's, and no more than a few are asked for at a time."""
    line, applied = Line(1), np.zeros(1, "i8")
    receiver = line.receiver(applied, inbox=2)
    for seq in (1, 2):
        line.send(0, seq)
    for seq in (1, 2):
        while (push := receiver.take()) is None:
            receiver.attend(None, fetch=True)
            assert len(line.asked) <= 2 * IN_TURN
            line.let_in(which)
        assert push.seq == seq
        np.testing.assert_array_equal(push.grad, seq * np.arange(N))
        applied[0] = seq
        receiver.give_back()


def taken_up_to(
    limit: np.ndarray, line: Line, receiver: PushReceiver, applied: np.ndarray
) -> list[tuple[int, int]]:
    """Return worker and number of each push that a server takes on its way to a snapshot."""
    taken = list[tuple[int, int]]()
    for _ in range(4 * PIECES):
        receiver.give_back()
        receiver.attend(limit, fetch=True)
        assert receiver.bodies <= 2
        if line.asked:
            line.let_in(0)
        if (push := receiver.take(limit)) is not None:
            applied[push.worker] = push.seq
            taken.append((push.worker, push.seq))
    return taken


@pytest.mark.usefixtures("pieces")
def test_what_a_snapshot_wants_comes_in_beside_what_has_to_wait() -> None:
    """There is one place more for it, and what fills the others is not taken."""
    line, applied = Line(1, 2, 3), np.zeros(3, "i8")
    receiver = line.receiver(applied, inbox=1)
    line.send(0, 1)
    receiver.attend(None, fetch=True)
    assert receiver.bodies == 1
    line.send(1, 1)
    line.send(2, 1)
    taken = taken_up_to(np.array([0, 1, 1]), line, receiver, applied)
    assert sorted(taken) == [(1, 1), (2, 1)]


@pytest.mark.usefixtures("pieces")
def test_an_aggregator_s_message_beyond_a_limit_is_taken_before_the_one_that_is_needed() -> None:
    """The servers agree once more."""
    line, applied = Line(1, 1), np.array([4, 2])
    receiver = line.receiver(applied, inbox=1, aggregate=True)
    line.send(0, 5)
    line.send(1, 3)
    assert taken_up_to(np.array([4, 3]), line, receiver, applied) == [(0, 5), (1, 3)]


@pytest.mark.usefixtures("pieces")
def test_each_sender_has_its_turn() -> None:
    """Also beside a worker that always has a further push announced."""
    line, applied, taken = Line(1, 2), np.zeros(2, "i8"), list[int]()
    receiver = line.receiver(applied, inbox=1)
    for worker, seq in ((0, 1), (0, 2), (1, 1)):
        line.send(worker, seq)
    while len(taken) < 4:
        receiver.give_back()
        receiver.attend(None, fetch=True)
        if line.asked:
            line.let_in(0)
        if (push := receiver.take()) is not None:
            applied[push.worker] = push.seq
            taken.append(push.worker)
            if not push.worker:
                line.send(0, push.seq + 2)
    assert 1 in taken


SIZE, MESSAGES, WORKERS = 20_000, 60, 6  # x / k * k is x for k up to 6
SHARD = Shard(100, SIZE)


class Sent:
    """What a node aggregator sends, in the order in which it does."""

    def __init__(self) -> None:
        self.sent: list[np.ndarray] = []

    def begin_send(self, array: np.ndarray, rank: int, tag: int) -> None:
        self.sent.append(array.copy())

    begin_synchronous_send = begin_send


def member(worker: int) -> Announced:
    shapes = (8,), (BUFFERS, HEADER_WORDS), (BUFFERS, 1)
    words, headers, versions = (np.zeros(shape, "i8") for shape in shapes)
    return Announced(worker, words, headers, versions, np.zeros((BUFFERS, SIZE)))


def announce(worker: Announced, grad: np.ndarray) -> None:
    seq = observe(worker.words, PUSHED) + 1
    worker.grads[seq % BUFFERS] = grad
    pack(worker.headers[seq % BUFFERS], worker.worker, seq, (0, seq, seq + 1), 1, 0.5, seq)
    publish(worker.words, PUSHED, seq)


def test_a_report_from_a_dead_server_that_comes_late() -> None:
    """A worker stays with the server that took the shard over from that one."""
    begin = lambda call, what, rank, tag: call(what, rank, tag)  # noqa: E731
    failures = SimpleNamespace(begin_send=begin, lost={1, 2})
    cluster: Any = SimpleNamespace(arrays=Sent(), failures=failures)
    sending = Sending(cluster, (0, 1, SHARD), member(0), Packing())
    for rank in (3, 2):
        sending.follow(rank, 0)
    assert sending.rank == 3


def arrives(aggregator: NodeAggregator, line: Sent, unpacker: Unpacker) -> Push:
    """Return the next message as the server takes it."""
    before = aggregator.messages
    while aggregator.messages == before:
        aggregator.send(0)
    headers, message = line.sent
    line.sent.clear()
    place = unpacker.place()
    place[: message.size] = message
    return Push.unpack_all(headers, unpacker.unpack(place))


@pytest.mark.parametrize("name", ["none", "fp16", "topk", "dgc", "onebit"])
def test_nothing_is_lost_where_messages_hold_one_push_or_many(name: str) -> None:
    """Parameters, at as many times the rate as there are pushes, and residuals are all of them."""
    codec = TopK(0.05, 0.5) if name == "dgc" else make_codec(name)
    line, rng, rule = Sent(), np.random.default_rng(0), Sgd()
    members = [member(k) for k in range(WORKERS)]
    begin = lambda call, what, rank, tag: call(what, rank, tag)  # noqa: E731
    failures = SimpleNamespace(begin_send=begin, done=lambda requests: True)
    cluster: Any = SimpleNamespace(arrays=line, failures=failures)
    to = ShardSender(cluster, (0, 0, SHARD), members[-1], Packing(codec))
    aggregator = NodeAggregator([to], np.zeros(WORKERS, "i8"), members[-1], members)
    unpacker = Unpacker(codec, SHARD.size, "f8")
    alone = Packer(Packing(codec), SHARD, "f8", WORKERS - 1, 1)
    its = Unpacker(codec, SHARD.size, "f8")
    params, sums, expected, counts = *np.zeros((3, SHARD.size)), set()
    for number in range(1, MESSAGES + 1):
        grads = rng.integers(-8, 9, (rng.integers(1, WORKERS + 1), SIZE)).astype("f8")
        for worker, grad in zip(rng.permutation(WORKERS), grads, strict=False):
            announce(members[worker], grad)
        push = arrives(aggregator, line, unpacker)
        rule.apply(params, push.grad, (), number, -1.0 * push.count)
        counts.add(push.count)
        total = grads.sum(axis=0)[SHARD.range]
        sums += total
        message = its.place()
        (sent,) = alone.pack(total, number, 0)
        message[: sent.size] = sent
        expected += its.unpack(message)
    assert counts == set(range(1, WORKERS + 1))
    bound = 1.0 if name == "fp16" else 1e-9
    np.testing.assert_allclose(params, expected, rtol=0, atol=bound)
    kept = aggregator.state["residual"][0][1] if aggregator.state else 0
    if name == "topk":
        np.testing.assert_array_equal(params + kept, sums)
    elif name != "dgc":  # where momentum makes more of a gradient
        np.testing.assert_allclose(params + kept, sums, rtol=0, atol=bound)
