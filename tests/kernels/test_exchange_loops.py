"""Loops of an exchange on a node: pushes applied in turn, shards copied, words waited for."""

import threading
import time

import numpy as np
import pytest

from mpips.kernels import update_rules
from mpips.kernels.atomics import no_limit, publish
from mpips.kernels.exchange import LONG_NS, announce, pull, reached, serving, whole_round
from mpips.kernels.rule_loops import dense
from mpips.kernels.vectors import addresses_of
from mpips.ps.local_pushes import no_undo
from mpips.transport.push import Push

N, WORKERS, HEADER = 33, np.array([0, 2, 3]), 11
NUMBER, FACTOR, VERSION = 8, 9, 7
NOBODY = (np.zeros(0, np.int64),) * 4
SECOND = 10**9


def bits(number: float) -> int:
    """Return the bits of a float64 as an int64."""
    return int(np.array(number).view(np.int64))


class Node:
    """A server's memory, and three workers', each with two pushes announced."""

    def __init__(self, dtype: str) -> None:
        random = np.random.default_rng(0)
        self.params = random.standard_normal(N).astype(dtype)
        self.slots = [np.zeros(N, dtype), np.zeros(N, dtype)]
        self.header, self.applied = np.zeros(8, np.int64), np.zeros(4, np.int64)
        self.pushed = np.zeros((3, 8), np.int64)
        self.pushed[:, 0] = 2
        self.headers, self.versions = np.zeros((3, 2, HEADER), np.int64), np.zeros((3, 2), np.int64)
        self.headers[:, :, FACTOR] = bits(1.0)
        self.headers[:, :, NUMBER] = 10 + np.arange(6).reshape(3, 2)
        self.versions[:] = np.arange(6).reshape(3, 2)
        self.grads = random.standard_normal((3, 2, N)).astype(dtype)
        self.rates = np.zeros((8, 28))
        self.rates[:, 0], self.rates[:, 1::3] = np.nan, random.random((8, 9)) + 0.5
        self.said, self.state = np.zeros((8, HEADER), np.int64), np.zeros(4, np.int64)
        self.limit, self.others, self.undo = no_limit(4), NOBODY, no_undo(dtype)

    def serve(self, budget_ns: int = SECOND, patience_ns: int = 0) -> int:
        """Apply what is there by the loop of Adam."""
        places = [
            addresses_of([*self.headers[k], *(self.versions[k, i : i + 1] for i in (0, 1)),
                          *self.grads[k]])
            for k in range(3)
        ]  # fmt: skip
        done: int = serving(update_rules.adam)(
            self.params, *self.slots, self.header, self.applied, WORKERS, self.limit,
            addresses_of(self.pushed), np.array(places), self.rates, self.said, *self.others,
            np.array([1, 0, VERSION, FACTOR]), *self.undo, self.state, budget_ns, patience_ns,
        )  # fmt: skip
        return done


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_pushes_are_applied_in_turn_and_have_the_bits_of_the_dense_loop(dtype: str) -> None:
    node, serial = Node(dtype), Node(dtype)
    assert node.serve() == 6
    order = [(0, 1), (1, 1), (2, 1), (0, 0), (1, 0), (2, 0)]
    for k, (worker, parity) in enumerate(order):
        grad = serial.grads[worker, parity]
        dense(update_rules.adam)(serial.params, grad, *serial.slots, *serial.rates[k, 1::3])
    for one, other in zip((node.params, *node.slots), (serial.params, *serial.slots), strict=True):
        assert one.tobytes() == other.tobytes()
    assert node.header.tolist() == [6, 6, 0, 0, 0, 0, 0, 0]
    assert node.applied.tolist() == [2, 0, 2, 2]
    assert node.said[:6, NUMBER].tolist() == [10 + 2 * k + parity for k, parity in order]
    assert node.said[:6, VERSION].tolist() == [2 * k + parity for k, parity in order]
    assert node.state[1] > 0
    assert node.serve() == 0


def test_it_ends_at_limits_and_for_what_it_cannot_do() -> None:
    node = Node("f4")
    node.limit = np.array([1, 0, 0, 1])
    assert node.serve() == 2
    assert node.applied.tolist() == [1, 0, 0, 1]

    node.limit = no_limit(4)
    assert node.serve(budget_ns=0) == 1

    word = np.ones(8, np.int64)
    node.others = addresses_of([word]), np.zeros(1, np.int64), np.zeros(1, np.int64), no_limit(1)
    assert node.serve() == 1

    node.others = NOBODY
    node.headers[1, 0, FACTOR] = bits(0.5)
    assert node.serve() == 1
    assert (node.applied.tolist(), node.state[1] > 0) == ([2, 0, 1, 2], True)
    assert node.serve() == 0
    assert node.state[1] == -1
    assert node.header[0] == node.header[1] == 5


def test_it_waits_for_the_next_push() -> None:
    node = Node("f4")
    publish(node.pushed[1], 0, 2)  # compiles it
    assert node.serve() == 6
    begun = time.monotonic()
    assert node.serve(patience_ns=SECOND // 20) == 0
    assert time.monotonic() - begun >= 0.05

    def push() -> None:
        time.sleep(0.05)
        publish(node.pushed[1], 0, 3)

    thread = threading.Thread(target=push)
    thread.start()
    assert node.serve(patience_ns=5 * SECOND, budget_ns=0) == 1
    thread.join()


def test_it_notes_the_gaps_between_pushes() -> None:
    node = Node("f4")
    node.state[2] = LONG_NS
    assert node.serve() == 6
    # The first came after a long time, the others at once: five eighths of the mean are new.
    assert LONG_NS * (7 / 8) ** 5 <= node.state[2] + 6 < LONG_NS
    assert node.serve(patience_ns=LONG_NS) == 0
    assert node.state[2] == LONG_NS


def test_a_pull_copies_shards_and_counts_torn_ones() -> None:
    headers, out = np.zeros((2, 8), np.int64), np.zeros(10, "f4")
    shards, versions = [np.arange(4, dtype="f4"), np.arange(6, dtype="f4")], np.zeros(3, np.int64)
    headers[0, :2], headers[1, :2] = (7, 7), (9, 8)
    bounds = np.array([[6, 10, 0], [0, 6, 2]])
    words = np.array([1, 0])
    awaited = np.array([5, 4])
    args = addresses_of(headers), addresses_of(shards), bounds, words, out, versions
    assert pull(addresses_of([awaited, awaited[1:]]), 5, *args) == -1
    assert not out.any()
    assert not versions.any()
    assert pull(addresses_of([awaited, awaited[1:]]), 4, *args) == 1
    assert out.tolist() == [*range(6), *range(4)]
    assert versions.tolist() == [7, 0, 8]
    bounds[0, 1] = 11
    with pytest.raises(ValueError, match="within the vector"):
        pull(NOBODY[0], 0, *args)


def test_an_announced_push_is_read_as_it_was_said() -> None:
    header, read, pushed = np.full(HEADER, -1), np.zeros(2, np.int64), np.zeros(8, np.int64)
    versions, said = np.array([4, 2]), (3, 7, 1, 16, 48, 32, 0.25, 5, 0.5)
    with pytest.raises(ValueError, match="a version of each shard"):
        announce(pushed, header, header.view("f8"), read[:1], versions, *said)
    assert (header == -1).all()
    assert not pushed.any()
    announce(pushed, header, header.view("f8"), read, versions, *said)
    push = Push.unpack(header, np.zeros(0))
    batch = push.batch, push.samples, push.loss, push.number, push.factor
    assert (push.worker, push.seq, *batch) == (3, 7, (1, 16, 48), 32, 0.25, 5, 0.5)
    assert (push.version, read.tolist(), pushed.tolist()) == (0, [4, 2], [7, *[0] * 7])
    assert header[HEADER - 1] == -1


def test_words_are_waited_for() -> None:
    words = np.array([[3], [5]])
    assert reached(addresses_of(words), 3, 0)
    begun = time.monotonic()
    assert not reached(addresses_of(words), 4, SECOND // 20)
    assert time.monotonic() - begun >= 0.05
    assert reached(addresses_of(words[:0]), 4, 0)


def test_a_round_goes_as_far_as_the_others_have_come() -> None:
    turns, reports, sums = np.zeros((2, 8), np.int64), np.arange(16.0).reshape(2, 8), np.zeros(8)
    params, grads, seconds = np.ones(9), np.arange(18.0).reshape(2, 9), np.zeros(2)

    def loop(turn: int, met: int) -> int:
        return whole_round(update_rules.sgd)(
            addresses_of(turns), 0, addresses_of(reports), sums, reports[0], seconds, params[2:],
            addresses_of(grads), 2, np.zeros(4), np.array([0.5, 0.25]), turn, met, 0.5, 0.0,
            *range(1, 9),
        )  # fmt: skip

    assert loop(1, met=0) == 0
    assert turns[:, 0].tolist() == [1, 0]
    assert (params == 1).all()
    assert not sums.any()
    turns[1, 0], waited = 1, seconds[0]
    assert loop(1, met=0) == 1  # the other has not come to the second barrier
    want = 1 - 0.5 * (0.5 * grads[0] + 0.25 * grads[1])
    assert params.tolist() == [1, 1, *want[2:]]
    assert sums.tolist() == [1 + 8 + 2 * k for k in range(8)]
    assert turns[0, 0] == 2
    turns[1, 0], before = 4, seconds.copy()
    assert loop(3, met=1) == 2
    assert params[2:].tolist() == (2 * want - 1)[2:].tolist()
    assert waited > 0
    assert seconds[0] > before[0]  # also of the call before
    assert seconds[1] > 0


def test_a_round_whose_arguments_do_not_fit_says_so() -> None:
    turns, sums, params = np.zeros(8, np.int64), np.zeros(8), np.ones(9, "f4")
    loop = whole_round(update_rules.momentum)
    for slot, buffer, weights in ((8, 4, 1), (9, 0, 1), (9, 4, 2)):
        with pytest.raises(ValueError, match="weights and a buffer are expected"):
            loop(
                addresses_of([turns]), 0, addresses_of([sums]), sums, sums, np.zeros(2), params,
                np.ones(slot, "f4"), addresses_of([params]), 0, np.zeros(buffer, "f4"),
                np.ones(weights), 1, 0, 0.5, 0.9, 0.0, *sums,
            )  # fmt: skip
    assert (params == 1).all()
