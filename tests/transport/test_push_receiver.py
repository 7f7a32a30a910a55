"""A server's remote pushes by themselves: a body of many pieces, and what is behind it."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from headers import pack

from mpips.layout.roles import Roles
from mpips.mpi import window
from mpips.mpi.start import BODIES, HEADERS, tag_of
from mpips.transport.push import HEADER_WORDS
from mpips.transport.push_receiver import IN_TURN, PushReceiver
from mpips.transport.push_sender import PushOptions

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


@pytest.fixture(autouse=True)
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "TRANSFER_MAX_BYTES", 8 * N // PIECES)


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


def test_what_a_snapshot_wants_comes_in_beside_what_has_to_wait() -> None:
    """There is one place more for it, and what fills the others is not taken."""
    line, applied = Line(1, 2, 3), np.zeros(3, "i8")
    receiver, limit = line.receiver(applied, inbox=1), np.array([0, 1, 1])
    line.send(0, 1)
    receiver.attend(None, fetch=True)
    assert receiver.bodies == 1
    line.send(1, 1)
    line.send(2, 1)
    for _ in range(4 * PIECES):
        receiver.attend(limit, fetch=True)
        assert receiver.bodies <= 2
        if line.asked:
            line.let_in(0)
        if (push := receiver.take(limit)) is not None:
            applied[push.worker] = push.seq
            receiver.give_back()
    assert applied.tolist() == [0, 1, 1]


def test_an_aggregator_s_message_beyond_a_limit_is_taken_before_the_one_that_is_needed() -> None:
    """The servers agree once more."""
    line, applied, taken = Line(1, 1), np.array([4, 2]), list[tuple[int, int]]()
    receiver, limit = line.receiver(applied, inbox=1, aggregate=True), np.array([4, 3])
    line.send(0, 5)
    line.send(1, 3)
    for _ in range(4 * PIECES):
        receiver.give_back()
        receiver.attend(limit, fetch=True)
        if line.asked:
            line.let_in(0)
        if (push := receiver.take(limit)) is not None:
            applied[push.worker] = push.seq
            taken.append((push.worker, push.seq))
    assert taken == [(0, 5), (1, 3)]
