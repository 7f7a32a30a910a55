"""The sample allocator: each sample once an epoch, whoever takes it, stops, dies or resumes."""

import itertools
import json
import random
from collections import Counter, deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpips.datasets import ledger
from mpips.datasets.ledger import Range, SampleAllocator, leave, pieces, resize, share_clocks, split


def finished(allocator: SampleAllocator) -> bool:
    """Whether nothing is left to assign and everything assigned was applied."""
    return allocator.cursor[0] >= (allocator.epochs or 0) and not allocator.unfinished()


def drain(allocator: SampleAllocator, worker: int = 0) -> list[Range]:
    """Hand everything out to one worker, each batch applied at once."""
    found = []
    while (batch := allocator.next(worker)) is not None:
        allocator.applied(worker, batch)
        found.append(batch)
    return found


class Run:
    """A run whose workers take, apply, die, stop and change as a random number generator says."""

    def __init__(self, samples: int, epochs: int, chunk: int, seed: int) -> None:
        self.samples, self.epochs, self.chunk = samples, epochs, chunk
        self.random = random.Random(seed)
        self.applied: Counter[tuple[int, int]] = Counter()
        self.steps = 0
        self.start(3, None)

    def start(self, workers: int, state: dict | None) -> None:
        """Begin, or go on with batches of another size, none of which is larger."""
        self.most, how = self.random.randint(1, 12), {"epochs": self.epochs, "chunk": self.chunk}
        self.allocator = SampleAllocator(self.samples, self.most, workers, **how)
        if state is not None:
            self.allocator.restore(json.loads(json.dumps(state)))
        self.open: list[deque[Range]] = [deque() for _ in range(workers)]
        self.living, self.before, self.void = list(range(workers)), self.steps, set[int]()

    def go(self) -> None:
        for _ in range(100_000):
            if finished(self.allocator):
                return
            self.step(self.random.choice(self.living), self.random.random())
            self.check()
        raise AssertionError("does not end")

    def step(self, worker: int, what: float) -> None:
        mine = self.open[worker]
        if what < 0.5 and len(mine) < 4:
            if (batch := self.allocator.next(worker)) is not None:
                mine.append(batch)
                assert 0 < batch[2] - batch[1] <= self.most
        elif what < 0.93 and mine:
            self.apply(worker)
        elif 0.93 < what < 0.98 and len(self.living) > 1:
            self.living.remove(worker)
            keep = self.random.randint(0, len(mine))  # announced, and not applied yet
            self.void |= set(self.allocator.take_back(worker, keep))
            while len(mine) > keep:
                mine.pop()
            while mine:
                self.apply(worker)
        elif what > 0.99:
            self.start(self.random.randint(1, 5), self.allocator.state())

    def apply(self, worker: int) -> None:
        epoch, begin, end = batch = self.open[worker].popleft()
        self.allocator.applied(worker, batch)
        self.applied.update((epoch, sample) for sample in range(begin, end))
        self.steps += 1

    def check(self) -> None:
        done = sum(self.applied.values()) / self.samples
        assert self.allocator.epochs_done == done, "whatever was assigned ahead"
        assert sum(self.allocator.clocks) == self.steps
        assert self.allocator.may_come_back == any(self.open)
        under_way = sum(map(len, self.open)) + self.steps - self.before
        assert self.allocator.issued == under_way + len(self.void), "no number is given twice"
        rest = self.allocator.unfinished()
        assert rest == sorted(rest)
        assert not any((e, s) in self.applied for e, b, n in rest for s in range(b, n))


@settings(deadline=None, max_examples=120)
@given(st.integers(1, 60), st.integers(1, 3), st.integers(1, 4), st.integers(0, 10**6))
def test_every_sample_once_an_epoch_through_stops_and_deaths_and_changes_of_workers(
    samples: int, epochs: int, chunk: int, seed: int
) -> None:
    run = Run(samples, epochs, chunk, seed)
    run.go()
    assert run.applied == dict.fromkeys(itertools.product(range(epochs), range(samples)), 1)


def test_what_was_left_of_a_batch_is_handed_out_again() -> None:
    allocator = SampleAllocator(20, 6, 1, epochs=1)
    first, second = (0, 0, 6), (0, 6, 12)
    assert [allocator.next(0), allocator.next(0)] == [first, second]
    allocator.applied(0, first)
    leave(allocator, first, [(0, 4, 6)])
    assert (allocator.clocks, allocator.samples_done) == ([1], 4)
    allocator.applied(0, second)
    leave(allocator, second, [second])
    assert (allocator.clocks, allocator.samples_done) == ([1], 4), "all of it was left: no step"
    resumed = SampleAllocator(20, 6, 1, epochs=1)
    resumed.restore(allocator.state())
    assert resumed.samples_done == 4
    assert drain(resumed) == [(0, 4, 6), (0, 6, 12), (0, 12, 18), (0, 18, 20)]


@given(ahead=st.integers(0, 9), applied=st.integers(0, 4), size=st.integers(1, 12))
def test_batches_of_another_size_do_not_depend_on_how_many_were_assigned(
    ahead: int, applied: int, size: int
) -> None:
    """Those in work come again, every sample counts once, and none is larger."""
    found = []
    for more in (0, ahead):
        batches, counts = SampleAllocator(23, 8, workers=1, epochs=2), Counter[tuple[int, int]]()
        for _ in range(applied + more):
            batches.next(0)
        for batch, _ in batches.open_to(0)[:applied]:
            batches.applied(0, batch)
            counts.update((batch[0], sample) for sample in range(*batch[1:]))
        resize(batches, size)
        found.append(batches.state())
        for epoch, begin, end in drain(batches):
            assert end - begin <= size
            counts.update((epoch, sample) for sample in range(begin, end))
        assert counts == dict.fromkeys(itertools.product(range(2), range(23)), 1)
        assert batches.samples_done == 46
    assert found[0] == found[1]


def test_a_resumed_run_of_fewer_epochs_ends_with_them() -> None:
    """Batches of later epochs that were assigned ahead, or applied, count if it has more again."""
    first, shorter, longer = [SampleAllocator(10, 4, 2, epochs=n) for n in (2, 1, 2)]
    late, *_, ahead = [first.next(w) for w in (0, 1, 1, 1, 1)]
    first.applied(1, *(batch for batch, _ in first.open_to(1)[:3]))
    shorter.restore(first.state())
    assert (drain(shorter), shorter.samples_done, ledger.epochs_over(shorter)) == ([late], 14, 1)
    longer.restore(shorter.state())
    assert (drain(longer), longer.samples_done) == ([ahead, (1, 8, 10)], 20)


def test_a_quota_counts_steps_of_resumed_runs_too() -> None:
    allocator = SampleAllocator(10, 4, 2, quota=3)
    assert len(drain(allocator, 0)) == 3
    allocator.next(1)
    allocator.applied(1, (1, 0, 4))
    resumed = SampleAllocator(10, 4, 2, quota=5)
    resumed.restore(allocator.state())
    assert resumed.clocks == [3, 1]
    assert [len(drain(resumed, w)) for w in (0, 1)] == [2, 4]
    assert resumed.clocks == [5, 5]


def test_a_stop_hands_out_nothing_more() -> None:
    allocator = SampleAllocator(10, 2, 1, epochs=1)
    allocator.next(0)
    allocator.stopped = True
    assert allocator.next(0) is None
    assert not finished(allocator)
    allocator.applied(0, (0, 0, 2))
    assert allocator.epochs_done == pytest.approx(0.2)


def test_a_chunk_is_one_workers_block() -> None:
    """A block of a file is read by one worker; at the end the others help."""
    allocator = SampleAllocator(12, 1, 2, epochs=1, chunk=4)
    assert [allocator.next(w) for w in (0, 1, 0, 1)] == [(0, 0, 1), (0, 4, 5), (0, 1, 2), (0, 5, 6)]
    rest = []
    while (batch := allocator.next(1)) is not None:
        rest.append(batch[1])
    assert rest == [6, 7, 8, 9, 10, 11, 3, 2]  # what worker 0 has set aside comes last


def test_a_dead_workers_chunk_is_assigned_before_new_batches() -> None:
    """Or an epoch would end with the run, which may have no last epoch."""
    allocator = SampleAllocator(8, 1, 2, chunk=4)
    allocator.next(0)
    assert allocator.take_back(0, 0) == [0]
    assert [allocator.next(1) for _ in range(5)] == [(0, k, k + 1) for k in range(5)]


@given(clocks=st.lists(st.integers(0, 50), min_size=1, max_size=9), workers=st.integers(1, 9))
def test_clocks_are_shared_out(clocks: list[int], workers: int) -> None:
    shared = share_clocks(clocks, workers)
    assert len(shared) == workers
    assert sum(shared) == sum(clocks)
    assert shared == clocks if len(clocks) == workers else max(shared) - min(shared) <= 1


def assert_even(parts: list[Range], whole: Range) -> None:
    """Assert that parts make the whole, one behind the other, with one sample more at most."""
    epoch, begin, end = whole
    edges = [begin, *(part[2] for part in parts)]
    assert parts == [(epoch, a, b) for a, b in itertools.pairwise(edges)]
    assert edges[-1] == end
    sizes = np.diff(edges)
    assert sizes.max() - sizes.min() <= 1


@given(st.integers(0, 1000), st.integers(0, 500), st.integers(1, 20))
def test_a_batch_is_split_evenly(begin: int, size: int, workers: int) -> None:
    parts = split((3, begin, begin + size), workers)
    assert len(parts) == workers
    assert_even(parts, (3, begin, begin + size))


@given(st.integers(0, 50), st.integers(0, 300), st.integers(1, 40))
def test_pieces_are_as_few_as_go_and_equal(begin: int, samples: int, size: int) -> None:
    found = pieces((3, begin, begin + samples), size)
    assert len(found) == -(-samples // size)
    if samples:
        assert max(end - first for _, first, end in found) <= size
        assert_even(found, (3, begin, begin + samples))


@given(st.integers(1, 200), st.integers(1, 5), st.integers(1, 3), st.integers(1, 9))
def test_a_round_is_uneven_if_workers_have_other_numbers_of_batches(
    samples: int, workers: int, accumulate: int, size: int
) -> None:
    """Also one of local steps, of which each has batches of its own."""
    step_size, counts = accumulate * size, set[int]()
    for part in split((0, 0, samples), workers):
        steps = split(part, -(-samples // (step_size * workers)))
        counts.add(sum(len(pieces(step, size)) for step in steps))
    assert ledger.is_uneven(samples, workers, step_size, size) == (len(counts) > 1)
