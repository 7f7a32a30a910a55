"""A node aggregator by itself: its messages hold the pushes of a number of workers that varies."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from headers import pack

from mpips.codecs import make_codec
from mpips.codecs.topk import TopK
from mpips.kernels.atomics import observe, publish
from mpips.layout import Shard
from mpips.optim import Sgd
from mpips.transport.channel import BUFFERS
from mpips.transport.push import HEADER_WORDS, Push
from mpips.transport.push_sender import PUSHED, Announced, NodeAggregator, ShardSender
from mpips.transport.wire import Packer, Packing, Unpacker

N, MESSAGES, WORKERS = 20_000, 60, 6  # x / k * k is x for k up to 6
SHARD = Shard(100, N)


class Line:
    """What a node aggregator sends, in the order in which it does."""

    def __init__(self) -> None:
        self.sent: list[np.ndarray] = []

    def begin_send(self, array: np.ndarray, rank: int, tag: int) -> None:
        self.sent.append(array.copy())

    begin_synchronous_send = begin_send


def member(worker: int) -> Announced:
    shapes = (8,), (BUFFERS, HEADER_WORDS), (BUFFERS, 1)
    words, headers, versions = (np.zeros(shape, "i8") for shape in shapes)
    return Announced(worker, words, headers, versions, np.zeros((BUFFERS, N)))


def announce(worker: Announced, grad: np.ndarray) -> None:
    seq = observe(worker.words, PUSHED) + 1
    worker.grads[seq % BUFFERS] = grad
    pack(worker.headers[seq % BUFFERS], worker.worker, seq, (0, seq, seq + 1), 1, 0.5, seq)
    publish(worker.words, PUSHED, seq)


def arrives(aggregator: NodeAggregator, line: Line, unpacker: Unpacker) -> Push:
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
    line, rng, rule = Line(), np.random.default_rng(0), Sgd()
    members = [member(k) for k in range(WORKERS)]
    begin = lambda call, what, rank, tag: call(what, rank, tag)  # noqa: E731
    failures = SimpleNamespace(begin_send=begin, done=lambda requests: True)
    cluster: Any = SimpleNamespace(arrays=line, failures=failures)
    to = ShardSender(cluster, (0, 0, SHARD), members[-1], Packing(codec))
    aggregator = NodeAggregator([to], np.zeros(WORKERS, "i8"), members[-1], members)
    unpacker = Unpacker(codec, SHARD.size, "f8")
    alone, its = (
        Packer(Packing(codec), SHARD, "f8", WORKERS - 1, 1),
        Unpacker(codec, SHARD.size, "f8"),
    )
    params, sums, expected, counts = *np.zeros((3, SHARD.size)), set()
    for number in range(1, MESSAGES + 1):
        grads = rng.integers(-8, 9, (rng.integers(1, WORKERS + 1), N)).astype("f8")
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
