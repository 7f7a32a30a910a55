"""Simulation of rounds, which wait for their slowest worker.

Without backup workers a round is over when all have computed; with b of them, when all but b have,
and whoever is late goes on with the gradient that nobody waits for before it takes the next.
"""

import time

import numpy as np

from mpips.planning import traffic
from mpips.planning.simulator.model import Simulated, Work, grouped

LATENCIES = 4  # of a round: a barrier or an announcement before the sums and before the results


def exchange_s(work: Work) -> float:
    """Return the seconds of an exchange by itself: messages, packing, and the update."""
    case, speeds = work.case, work.speeds
    found = traffic.totals(traffic.flows(case))
    moving = 0.0
    if case.nodes > 1:
        sums = max(max(flow.grads_out, flow.grads_in) for flow in found)
        results = max(max(flow.params_out, flow.params_in) for flow in found)
        moving = case.every * (sums + results) / speeds.link * speeds.rounds
        moving += LATENCIES * speeds.latency_s
    served = work.workers - 1 if work.backup else 1  # pushes that a server applies one by one
    applying = max(case.shards) * served * (1 / speeds.apply + 1 / work.unpack)
    rows = case.every * work.workers * case.rows.grads / sum(case.row_shares)
    applying += rows / speeds.apply
    return moving + applying + case.vector / speeds.copy + work.pack_s


def reading_s(work: Work) -> float:
    """Return the least seconds in which the data of a round is read, while others compute."""
    case, nbytes = work.case, work.speeds.batch_bytes * work.case.every
    most = max(case.ranks(traffic.WORKERS, node) for node in range(case.nodes))
    return max(nbytes * work.workers / work.speeds.storage, nbytes * most / work.speeds.link)


def simulate(work: Work, units: int) -> Simulated:
    """Simulate so many rounds.

    Args:
        work: The job.
        units: Rounds; at least 2.
    """
    begun = time.perf_counter()
    compute = work.speeds.compute_s(work.workers, units, max(1, work.case.every), work.seed)
    exchange, reading = exchange_s(work), reading_s(work)
    if work.backup:
        rounds, dropped = _with_backups(compute, work.backup, exchange)
    else:
        slowest, dropped = compute.max(axis=0), 0.0
        rounds = slowest + np.maximum(0.0, exchange - work.case.hidden * slowest)
    rounds = np.maximum(rounds, reading)
    round_s = float(rounds.mean())
    flows = traffic.totals(traffic.flows(work.case)) if work.case.nodes > 1 else []
    data = work.speeds.batch_bytes * np.array(
        [work.case.ranks(traffic.WORKERS, node) for node in range(work.case.nodes)]
    )
    step_s, link = round_s / work.case.every, work.speeds.link
    shares = np.array([(f.sent, f.received + d) for f, d in zip(flows, data, strict=False)])
    busy = min(1.0, float(compute.mean()) / round_s)
    moving = min(exchange / round_s, 1 - busy)
    parts = {"compute": busy, "pull": 0.0, "push": moving, "wait": 1 - busy - moving}
    return Simulated(
        step_s, units * work.workers * work.case.every, units, parts,
        links=grouped(work, shares / link / step_s) if flows else (),
        applying=max(work.case.shards) / work.speeds.apply / round_s,
        storage=work.speeds.batch_bytes * work.workers / work.speeds.storage / step_s,
        dropped=dropped, took_s=time.perf_counter() - begun,
    )  # fmt: skip


def _with_backups(compute: np.ndarray, backup: int, exchange: float) -> tuple[np.ndarray, float]:
    """Return the seconds of each round, and the share of gradients that came too late.

    Args:
        compute: Seconds of the gradients, shape (workers, rounds).
        backup: Gradients that a round does without.
        exchange: Seconds between the last gradient of a round and the next round.
    """
    workers, rounds = compute.shape
    free, begun = np.zeros(workers), 0.0
    took, late = np.zeros(rounds), 0
    for k in range(rounds):
        ends = np.maximum(free, begun) + compute[:, k]
        over = np.partition(ends, workers - backup - 1)[workers - backup - 1]
        missed = ends > over
        # One that was late before and has not begun with this round has none of it to drop.
        began = np.maximum(free, begun) <= over
        late += int((missed & began).sum())
        free = np.where(missed & ~began, free, ends)
        took[k] = over + exchange - begun
        begun = over + exchange
    return took, late / (workers * rounds)
