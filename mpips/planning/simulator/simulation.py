"""Simulation of rounds, and of modes with servers by events.

**Rounds** wait for their slowest worker. Without backup workers, a round ends when all workers have
computed. With b backup workers, it ends when all but b have. A late worker finishes its unused
gradient before it takes the next one.

In **modes with servers**, a step is a **unit**: the work of a worker between two pushes. Servers
are alike if they have a node of their own and shards of one size. If there are many of them, they
are simulated as `MOST_LANES` servers with proportionally faster links.
"""

import dataclasses
import time

import numpy as np

from mpips.planning import traffic
from mpips.planning.simulator import arrays as sim
from mpips.planning.simulator.loop import simulate as run_events
from mpips.planning.simulator.model import Simulated, Work, grouped
from mpips.planning.traffic import Case

LATENCIES = 4  # of a round: a barrier or an announcement before the sums and before the results
MOST_LANES = 16  # largest number of servers that are alike
EVENTS = 20_000_000  # approximate number of events, if the number of steps is not given
UNITS, LEAST_UNITS = 1000, 30
WARM = 0.1  # share of the steps before measuring
# Messages share links in pieces. With 5 workers a message has 32 pieces, which predicted 17 runs
# best. With more workers it has fewer, and from 41 workers on a single one, to save events.
PIECES, LEAST_PIECES, PIECES_OF_ALL = 32, 4, 160
MOST_PLACES = sim.RING - 4


def simulate(work: Work, units: int = 0) -> Simulated:
    """Simulate a job, and return the result.

    Args:
        work: The job. Batches are assigned on request, or in equal number to each worker.
        units: Number of rounds, or mean number of units of each worker, at least 2; 0 for a default
            that takes some seconds.
    """
    begun = time.perf_counter()
    if work.case.rounds or work.backup:
        found = _rounds(work, max(2, units or UNITS))
    else:
        found = _served(work, max(2, units or default_units(work)))
    return dataclasses.replace(found, took_s=time.perf_counter() - begun)


# Rounds ----------------------------------------------------------------------------------------


def exchange_s(work: Work) -> float:
    """Return the seconds of an exchange without overlap: messages, packing, and the update."""
    case, speeds = work.case, work.speeds
    moving = 0.0
    if case.nodes > 1:
        links = traffic.flows(case).sum(axis=1)
        nbytes = traffic.busy_s(dataclasses.replace(case, rounds=True), links, 1.0)
        moving = case.every * nbytes / speeds.link * speeds.rounds
        moving += LATENCIES * speeds.latency_s
    served = work.workers - 1 if work.backup else 1  # pushes that a server applies one by one
    applying = max(case.shards) * served * (1 / speeds.apply + 1 / work.unpack)
    rows = case.every * work.workers * case.rows.grads / sum(case.row_shares)
    applying += rows / speeds.apply
    return moving + applying + case.vector / speeds.copy + work.pack_s


def reading_s(work: Work) -> float:
    """Return the least seconds to read a round's data, while workers compute."""
    case, nbytes = work.case, work.speeds.batch_bytes * work.case.every
    largest = int(case.workers.max())
    return max(nbytes * work.workers / work.speeds.storage, nbytes * largest / work.speeds.link)


def _rounds(work: Work, units: int) -> Simulated:
    compute = work.speeds.compute_s(work.workers, units, work.case.every, work.seed)
    exchange, reading = exchange_s(work), reading_s(work)
    if work.backup:
        rounds, dropped = _with_backups(compute, work.backup, exchange)
    else:
        slowest, dropped = compute.max(axis=0), 0.0
        rounds = slowest + np.maximum(0.0, exchange - work.case.hidden * slowest)
    rounds = np.maximum(rounds, reading)
    round_s = float(rounds.mean())
    step_s, link = round_s / work.case.every, work.speeds.link
    links = traffic.flows(work.case).sum(axis=(1, 2))
    links[:, traffic.IN] += work.speeds.batch_bytes * work.case.workers
    busy = min(1.0, float(compute.mean()) / round_s)
    moving = min(exchange / round_s, 1 - busy)
    parts = {"compute": busy, "pull": 0.0, "push": moving, "wait": 1 - busy - moving}
    return Simulated(
        step_s, units * work.workers * work.case.every, units, parts,
        links=grouped(work, links / link / step_s) if work.case.nodes > 1 else (),
        applying=max(work.case.shards) / work.speeds.apply / round_s,
        storage=work.speeds.batch_bytes * work.workers / work.speeds.storage / step_s,
        dropped=dropped,
    )  # fmt: skip


def _with_backups(compute: np.ndarray, backup: int, exchange: float) -> tuple[np.ndarray, float]:
    """Return the seconds of each round, and the share of gradients that were too late.

    Args:
        compute: Seconds of the gradients, shape (workers, rounds).
        backup: Number of gradients that a round does not wait for.
        exchange: Seconds between the last gradient of a round and the next round.
    """
    workers, rounds = compute.shape
    free, begun = np.zeros(workers), 0.0
    took, late = np.zeros(rounds), 0
    for k in range(rounds):
        ends = np.maximum(free, begun) + compute[:, k]
        over = np.partition(ends, workers - backup - 1)[workers - backup - 1]
        missed = ends > over
        # A worker that is still late has not begun a gradient of this round, so none is dropped.
        began = np.maximum(free, begun) <= over
        late += int((missed & began).sum())
        free = np.where(missed & ~began, free, ends)
        took[k] = over + exchange - begun
        begun = over + exchange
    return took, late / (workers * rounds)


# Modes with servers ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Lane:
    """Shards of a node, or of several nodes that are alike.

    Attributes:
        nodes: Numbers of the nodes.
        nbytes: Bytes of all their shards.
        share: Their share of all rows of tables.
        largest: Bytes of the largest shard, which one core applies.
        alone: Whether these nodes have no workers.
    """

    nodes: tuple[int, ...]
    nbytes: int
    share: float
    largest: int
    alone: bool


def lanes_of(case: Case) -> list[_Lane]:
    """Return the lanes of a job; equal ones are merged."""
    sizes, shares = np.array(case.shards), np.array(case.row_shares) / sum(case.row_shares)
    nodes = np.array([case.node_of[rank] for rank in case.roles.owners])
    owning = (sizes > 0) | (shares > 0) & (case.rows.params > 0)
    lanes, counts = list[_Lane](), set[int]()  # counts of owners on nodes without workers
    for node in dict.fromkeys(nodes[owning].tolist()):
        owned, without_workers = owning & (nodes == node), not case.workers[node]
        lanes.append(_Lane((node,), int(sizes[owned].sum()), float(shares[owned].sum()),
                           int(sizes[owned].max()), without_workers))  # fmt: skip
        counts |= {int(owned.sum())} if without_workers else set()
    dedicated = [lane for lane in lanes if lane.alone]
    if len(dedicated) <= MOST_LANES or len(counts) > 1:
        return lanes
    parts = (dedicated[k * len(dedicated) // MOST_LANES : (k + 1) * len(dedicated) // MOST_LANES]
             for k in range(MOST_LANES))  # fmt: skip
    return [lane for lane in lanes if not lane.alone] + [
        _Lane(tuple(lane.nodes[0] for lane in part), sum(lane.nbytes for lane in part),
              sum(lane.share for lane in part), max(lane.largest for lane in part), True)
        for part in parts
    ]  # fmt: skip


def pieces(work: Work) -> int:
    """Return the number of pieces of a message."""
    found = min(PIECES, PIECES_OF_ALL // work.workers)
    return found if found >= LEAST_PIECES else 1


def default_units(work: Work) -> int:
    """Return the default number of units of each worker to simulate."""
    each = (2 * pieces(work) + 2) * len(lanes_of(work.case)) + 2
    return int(np.clip(EVENTS // (each * work.workers), LEAST_UNITS, UNITS))


class _Arrays:
    """Arrays of a job for `mpips.planning.simulator.loop.simulate`."""

    def __init__(self, work: Work, units: int) -> None:
        self.work, self.lanes = work, lanes_of(work.case)
        workers, count = work.workers, len(self.lanes)
        # Nodes with workers come first, then nodes of lanes, then the data storage.
        on = [work.case.node_of[rank] for rank in work.case.roles.workers]
        self.number = {node: k for k, node in enumerate(dict.fromkeys(on))}
        self.pipe_of = [self.number.get(lane.nodes[0], -1) for lane in self.lanes]
        pipes = len(self.number)
        for k, pipe in enumerate(self.pipe_of):
            if pipe < 0:
                self.pipe_of[k], pipes = pipes, pipes + 1
        self.pipes = np.zeros((pipes + 1, sim.PIPE_COLUMNS))
        self.pipes[:, sim.QUEUE :] = -1
        # Of each lane, as many remote pushes wait to be applied as it has receive slots.
        self.events = np.zeros((workers * (4 * count + 8) + MOST_PLACES * count + 16, 3))
        self.batches = workers * units
        self.tally = np.zeros(sim.BINS + self.batches, np.int64)
        self.tally[sim.BINS :] = count
        self.times = self._times(units)
        self.numbers = self._numbers(units)
        self.at_lanes = self._lanes()
        self.workers = self._workers([self.number[node] for node in on])
        self.parts = np.zeros((workers * (count + 1), sim.PART_COLUMNS))
        self.parts[:, sim.JOINED] = self.parts[:, sim.ASKED] = -1

    def _times(self, units: int) -> np.ndarray:
        """Draw the seconds of gradients, and then those between steps, shape (2 * workers, units).

        The seconds between steps are exponential. After them, a worker reads its local shards. With
        a bound on clocks or with prefetching, it reads them at another time; then the seconds
        between steps count as computing.
        """
        work, batches = self.work, self.work.case.every
        speeds, pause_s = work.speeds, batches * work.speeds.between_s
        if work.bound is not None or work.case.prefetch:
            pause_s = 0.0
        else:
            speeds = dataclasses.replace(speeds, between_s=0.0)
        pauses = np.random.default_rng((work.seed, 1)).exponential(pause_s, (work.workers, units))
        gradients = speeds.compute_s(work.workers, units, batches, work.seed) + work.pack_s
        return np.concatenate((gradients, pauses))

    def _numbers(self, units: int) -> np.ndarray:
        work, workers = self.work, self.work.workers
        found = np.zeros(sim.NUMBERS, np.int64)
        found[[sim.WORKERS, sim.LANES, sim.TOTAL]] = workers, len(self.lanes), self.batches
        found[sim.QUOTA] = units if work.quota else 0
        found[sim.BOUND] = -1 if work.bound is None else work.bound
        found[[sim.PREFETCH, sim.SHARES]] = work.case.prefetch, work.case.one_pull
        found[sim.PIECES] = pieces(work)
        found[sim.READS] = work.speeds.batch_bytes > 0
        found[sim.WARM] = workers * int(WARM * units)
        found[sim.LAST] = workers * (units - 1)
        return found

    def _lanes(self) -> np.ndarray:
        work, speeds, case = self.work, self.work.speeds, self.work.case
        found = np.zeros((len(self.lanes) + 1, sim.LANE_COLUMNS))
        found[:, [sim.HEAD, sim.TAIL]] = -1
        found[:, sim.DELAY] = speeds.latency_s
        for row, lane, pipe in zip(found, self.lanes, self.pipe_of, strict=False):
            own, every = len(lane.nodes), case.every
            pull = lane.nbytes * case.params + lane.share * every * case.rows.params
            push = lane.nbytes * case.grads + lane.share * every * case.rows.grads
            applied = lane.largest + every * case.rows.grads / sum(case.row_shares)
            row[[sim.AT, sim.SLOTS]] = pipe, min(MOST_PLACES, own * work.places)
            row[[sim.PULL_IN, sim.PULL_OUT]] = np.array([1, 1 / own]) * pull / speeds.link
            row[[sim.PUSH_OUT, sim.PUSH_IN]] = np.array([1, 1 / own]) * push / speeds.link
            row[sim.APPLY] = applied / speeds.apply + lane.largest / work.unpack
        store = found[-1]
        nbytes = speeds.batch_bytes * work.case.every
        store[sim.AT], store[sim.PULL_OUT] = len(self.pipes) - 1, nbytes / speeds.storage
        store[sim.PULL_IN] = nbytes / speeds.link
        return found

    def _workers(self, node_of: list[int]) -> np.ndarray:
        found = np.zeros((len(node_of), sim.WORKER_COLUMNS))
        ranks = np.bincount(node_of)
        local = np.zeros(len(ranks))
        remote = np.full(len(ranks), len(self.lanes))
        for lane, pipe in zip(self.lanes, self.pipe_of, strict=True):
            if pipe < len(ranks):
                local[pipe] += lane.nbytes + lane.share * self.work.case.rows.params
                remote[pipe] -= 1
        found[:, sim.NODE] = node_of
        found[:, sim.COPY_S] = local[node_of] / self.work.speeds.copy
        found[:, sim.REMOTE] = remote[node_of]
        found[:, sim.SHARE] = 1 / ranks[node_of] if self.work.case.one_push else 1
        needed = found[:, sim.REMOTE] + self.numbers[sim.READS]
        found[:, sim.MISSING] = found[:, sim.MISSING + 1] = needed
        return found

    def shares(self, seconds: float) -> np.ndarray:
        """Return the shares of the time in which nodes send and receive, shape (nodes, 2)."""
        found = np.zeros((self.work.case.nodes, 2))
        for lane, pipe in zip(self.lanes, self.pipe_of, strict=True):
            for node in lane.nodes:
                found[node] = self.pipes[pipe, sim.OUT_BUSY : sim.IN_BUSY + 1]
        for node, pipe in self.number.items():
            found[node] = self.pipes[pipe, sim.OUT_BUSY : sim.IN_BUSY + 1]
        return np.asarray(found / seconds)


def _served(work: Work, units: int) -> Simulated:
    arrays = _Arrays(work, units)
    events = run_events(
        arrays.events, arrays.numbers, arrays.workers, arrays.at_lanes, arrays.parts, arrays.pipes,
        arrays.times, arrays.tally,
    )  # fmt: skip
    n, at, end = arrays.numbers, arrays.events[0], arrays.events[0, sim.END_AT]
    measured = int(n[sim.LAST] - n[sim.WARM])
    unit_s = work.workers * float(at[sim.LAST_AT] - at[sim.WARM_AT]) / measured
    if work.quota:  # a worker that has finished leaves the links to the others
        unit_s = float(end) / units
    times = arrays.workers[:, sim.COMPUTE : sim.WAIT + 1].sum(axis=0)
    names = ("compute", "pull", "push", "wait")
    counts = arrays.tally[: sim.BINS]
    return Simulated(
        step_s=unit_s / work.case.every,
        steps=arrays.batches * work.case.every, events=int(events),
        parts={k: float(v) for k, v in zip(names, times / max(times.sum(), 1e-300), strict=True)},
        staleness=np.trim_zeros(counts, "b").copy() if counts.any() else counts[:1].copy(),
        links=grouped(work, arrays.shares(end)) if work.case.nodes > 1 else (),
        applying=float(arrays.at_lanes[:, sim.BUSY].max() / end),
        storage=float(arrays.pipes[-1, sim.OUT_BUSY] / end),
    )  # fmt: skip
