"""What servers and the coordinator count of pushes, and the rates of the compiled loop."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from headers import pack

from mpips.config import Config
from mpips.datasets.ledger import SampleAllocator
from mpips.optim import RULES, rule_of
from mpips.ps.coordinator import Coordinator
from mpips.ps.local_pushes import UnknownRate, numbers_of
from mpips.ps.shard import STALENESS_BINS, Tally
from mpips.transport.push import HEADER_WORDS, Push, batches_of

WORKERS = 3


def coordinator() -> tuple[Coordinator, list[Any]]:
    """Return a coordinator, and the losses that it logs."""
    losses = list[Any]()
    log: Any = SimpleNamespace(count=lambda *batches: losses.extend(batches), heard=None)
    problem = SimpleNamespace(layout=SimpleNamespace(tables={}))
    job: Any = SimpleNamespace(cluster=None, base_samples=40, problem=problem, config=None)
    allocator = SampleAllocator(100, 7, WORKERS, epochs=2)
    fakes: Any = SimpleNamespace(answer=None, handlers={}, allocator=allocator)
    return Coordinator(job, fakes, fakes, fakes, log), losses


def test_pushes_of_a_loop_are_counted_as_one_by_one() -> None:
    (one, losses), (other, more) = coordinator(), coordinator()
    said, random = np.zeros((20, HEADER_WORDS), np.int64), np.random.default_rng(0)
    for seq, worker in enumerate(random.integers(WORKERS, size=len(said)).tolist()):
        batch = one.allocator.next(worker)
        assert batch is not None
        assert other.allocator.next(worker) == batch
        pack(said[seq], worker, seq, batch, batch[2] - batch[1], random.random(), seq)
    for words in said:
        one.applied(Push.unpack(words, np.zeros(0)).batches)
    for part in (said[:1], said[1:18], said[18:]):
        other.applied(batches_of(part))
    assert one.allocator.state() == other.allocator.state()
    assert one.allocator.samples_done == other.allocator.samples_done == one.samples - 40
    assert one.samples == other.samples
    assert losses == more
    assert len(more) == 20


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_rates_made_of_an_unknown_one_have_the_bits_of_the_rule(
    name: str, decay: float, ema: float
) -> None:
    rule = rule_of(Config(optimizer=name, weight_decay=decay, ema=ema))
    for update, lr in enumerate([0.1, 0.0, *np.random.default_rng(0).random(20)], 1):
        numbers = np.reshape(numbers_of(rule, update), (-1, 3)).tolist()
        made = [lr * times / over * then if over else times for times, over, then in numbers]
        assert np.array(made).tobytes() == np.array(rule.scalars(update, lr)).tobytes()
    with pytest.raises(TypeError):
        UnknownRate() + 1.0


def test_the_mean_staleness_since_it_was_last_asked() -> None:
    def push(version: int, *others: Push) -> Push:
        return Push(0, 1, (0, 0, 1), 1, 0.0, version, np.zeros(0), others=others)

    tally, most = Tally(), STALENESS_BINS + 4
    assert tally.recent() is None
    for staleness in (0, 1, most):
        tally.count(push(most - staleness), most, staleness, 0.0)
    assert tally.recent() == (most + 1) / 3
    assert tally.recent() is None
    tally.count(push(5, push(6)), 7, 2, 0.0)
    assert tally.recent() == 1.5
    assert (tally.handled, tally.staleness_max) == (5, most)
