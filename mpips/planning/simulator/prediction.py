"""Prediction of a job by formulas and simulation, with node failures.

Nodes fail at random, with a given mean time between failures. A failure loses the training since
the newest checkpoint, and a restart takes time. Mean and spread are those of `LIVES` simulated
jobs. The mean is that of J. Daly, "A higher order estimate of the optimum checkpoint interval for
restart dumps", FGCS 2006.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpips.codecs import is_open
from mpips.config import Config
from mpips.config.names import IN_ROUNDS
from mpips.errors import UserError, counted
from mpips.optim import rule_of
from mpips.planning import traffic
from mpips.planning.explain import Topology, assumed, case_of, samples_of
from mpips.planning.needs import Measured, Needs, needs_of, shard_slots
from mpips.planning.simulator.model import PACK, Busy, Simulated, Speeds, Work
from mpips.planning.simulator.simulation import simulate
from mpips.planning.traffic import Case

BUSY = 0.85  # least share of the time for a bottleneck
START_S = 5.0  # default time before the first step
LIVES, FAILURES = 500, 2_000_000  # simulated jobs, and failures in all of them, at most
HOPELESS = 1000  # largest mean number of failures between two checkpoints


@dataclass(frozen=True)
class Facts:
    """Facts that hold for all jobs that are compared.

    Attributes:
        measured: Measurements of the model, its data and its tables.
        speeds: Speeds of the machines.
        mtbf_s: Mean time between failures of a node.
        restart_s: Seconds from a failure to the next step.
        codecs: Bytes on the wire, divided by bytes in memory, by codec.
        simulated: Number of steps of each worker to simulate; 0 for the default.
        start_s: Seconds from the start to the first step.
    """

    measured: Measured
    speeds: Speeds
    mtbf_s: float = math.inf
    restart_s: float = 120.0
    codecs: Mapping[str, float] = field(default_factory=dict)
    simulated: int = 0
    start_s: float = START_S


@dataclass(frozen=True)
class Hazards:
    """Failures of a job, and its checkpoints.

    Attributes:
        mtbf_s: Mean time between two failures of any of its nodes; infinite for no failures.
        restart_s: Seconds from a failure to the next step.
        period_s: Seconds of training between two checkpoints; infinite for one at the end.
        save_s: Seconds for which a checkpoint stops training.
        start_s: Seconds before the first step.
    """

    mtbf_s: float = math.inf
    restart_s: float = 120.0
    period_s: float = 60.0
    save_s: float = 0.0
    start_s: float = 0.0


@dataclass(frozen=True)
class Lifetime:
    """Duration of a job, including start and lost time.

    Attributes:
        mean_s: Mean duration.
        p90_s: Duration that 90 % of the jobs do not exceed.
        failures: Mean number of failures.
        lost_s: Mean seconds of training that are repeated.
        saving_s: Seconds in which checkpoints stop training.
        start_s: Seconds before the first step.
    """

    mean_s: float
    p90_s: float
    failures: float
    lost_s: float
    saving_s: float
    start_s: float


@dataclass(frozen=True)
class Prediction:
    """Prediction of a job.

    Attributes:
        config: The job, with chosen codecs.
        case: Quantities that determine its traffic.
        formula_s: Least seconds of a step, by the formulas of ``--explain``.
        found: Result of the simulation.
        batches: Number of batches of each worker in the whole job.
        lifetime: Duration of the job.
        needs: Memory of its ranks.
        ranks: Number of ranks, evaluators included.
        cores: Cores of a rank.
        without_rows: Whether tables' rows are left out, as their number is unknown.
    """

    config: Config
    case: Case
    formula_s: float
    found: Simulated
    batches: int
    lifetime: Lifetime
    needs: Needs
    ranks: int
    cores: int
    without_rows: bool

    @property
    def samples_per_s(self) -> float:
        """Samples/s of all workers, without dropped gradients."""
        return samples_of(self.config, self.case) / self.found.step_s

    @property
    def core_hours(self) -> float:
        """Hours of all cores for the whole job."""
        return self.ranks * self.cores * self.lifetime.mean_s / 3600

    @property
    def bottleneck(self) -> tuple[str, float]:
        """The bottleneck, as text, and the share of the time in which it is busy."""
        loads = [(f"links of {nodes_text(b)}", max(b.sends, b.receives)) for b in self.found.links]
        loads += [("servers, which apply", self.found.applying)]
        loads += [("storage, which data is read from", self.found.storage)]
        name, share = max(loads, key=lambda pair: pair[1])
        if share >= BUSY:
            return name, share
        parts = self.found.parts
        if parts["wait"] > max(1 - BUSY, parts["push"]) and self.case.rounds:
            return "the slowest worker, whom the others wait for", parts["wait"]
        # Nothing is busy all the time, but most of the time is not computing.
        if parts["compute"] < 0.5:
            part = max(("pull", "push", "wait"), key=lambda name: parts[name])
            return f"{part}, which computing does not hide", parts[part]
        return "computing", parts["compute"]


def nodes_text(busy: Busy) -> str:
    """Return a description of nodes with equal roles."""
    roles = ((busy.servers, "server"), (busy.workers, "worker"))
    has = " and ".join(counted(count, name) for count, name in roles if count)
    return f"{counted(busy.nodes, 'node')} with {has or 'nothing'}"


def predict(config: Config, hosts: Sequence[str], node_of: Sequence[int],
            facts: Facts) -> Prediction:  # fmt: skip
    """Predict speed, duration and memory of a job on given ranks.

    Raises:
        UserError: If the ranks do not allow the job's roles.
    """
    speeds = facts.speeds
    topology = Topology(
        hosts, node_of, facts.measured.parameters, speeds.link, speeds.step_s, facts.codecs,
        facts.measured.tables or (),
    )  # fmt: skip
    if is_open(config):
        config = assumed(config, topology)
    case = case_of(config, topology)
    work = work_of(config, case, speeds)
    units = -(-facts.simulated // case.every) if facts.simulated else 0
    found = simulate(work, units)
    batches = batches_of(config, case, facts.measured.n_train, found.dropped)
    hazards = hazards_of(config, case, facts, found.step_s)
    return Prediction(
        config, case, traffic.step_s(case, speeds.link, speeds.step_s + speeds.between_s),
        found, batches, live(batches * found.step_s, hazards, config.seed),
        needs_of(config, facts.measured, case.roles, case.nodes), len(node_of) + config.evaluators,
        max(1, config.threads), facts.measured.tables is None,
    )  # fmt: skip


def work_of(config: Config, case: Case, speeds: Speeds) -> Work:
    """Return a job to simulate."""
    free = (math.inf, math.inf)
    pack, unpack = (1 / rate for rate in PACK.get(config.codec, free))
    packs, unpacks = (1 / rate for rate in PACK.get(config.pull_codec, free))
    remote = float(case.remote[case.workers > 0].max())
    if case.rounds:  # the ranks of a node share the packing
        remote /= case.workers.max()
    at_server = unpack + packs
    rate = 1 / at_server if at_server else math.inf
    return Work(
        case, speeds, config.bound if config.mode == "ssp" else None, config.backup_workers,
        config.steps > 0, config.inbox, remote * (pack + unpacks), rate, config.seed,
    )  # fmt: skip


def batches_of(config: Config, case: Case, samples: int, dropped: float = 0.0) -> int:
    """Return the number of batches of each worker in the whole job.

    Args:
        config: The job.
        case: Quantities that determine its traffic.
        samples: Samples of an epoch.
        dropped: Share of the gradients that come too late for their round.
    """
    workers = len(case.roles.workers)
    each = workers - config.backup_workers + dropped * workers  # gradients of a round
    rounds = config.epochs * math.ceil(samples / (config.unit_size * each))
    if config.steps:
        rounds = math.ceil(config.steps * workers / each)
    return rounds * case.every


def hazards_of(config: Config, case: Case, facts: Facts, step_s: float) -> Hazards:
    """Return a job's failures, and how long its checkpoints stop it.

    Args:
        config: The job.
        case: Quantities that determine its traffic.
        facts: Speeds and failures.
        step_s: Seconds between two steps of a worker.
    """
    seconds, steps = config.checkpoint_period
    state = max(case.shards) * (1 + len(shard_slots(config, rule_of(config))))
    if steps is not None:  # updates, of all workers
        together = 1 if config.mode in IN_ROUNDS else len(case.roles.workers)
        seconds = steps * case.every * step_s / together
    return Hazards(
        facts.mtbf_s / case.nodes, facts.restart_s, seconds or math.inf,
        state / facts.speeds.copy, facts.start_s,
    )  # fmt: skip


def live(work_s: float, hazards: Hazards, seed: int, lives: int = LIVES) -> Lifetime:
    """Simulate failures of a job, and return its duration.

    Args:
        work_s: Seconds of training.
        hazards: Failures and checkpoints.
        seed: Seed of the failures.
        lives: Number of simulated jobs; fewer if they fail so often that each is like the mean.

    Raises:
        UserError: If it would hardly ever get from one checkpoint to the next.
    """
    h = dataclasses.replace(hazards, period_s=min(hazards.period_s, 2 * work_s + 1))
    piece_s = min(work_s, h.period_s) + h.save_s + h.restart_s
    if piece_s > h.mtbf_s * math.log(HOPELESS):
        got = f"a failure every {h.mtbf_s:.3g} s with {piece_s:.3g} s to a checkpoint"
        raise UserError(got, "checkpoints that are reached", "set a shorter --checkpoint-every")
    failures = max(1.0, work_s / h.period_s) * math.expm1(piece_s / h.mtbf_s)
    lives = min(lives, math.ceil(FAILURES / failures)) if failures else 1
    rng = np.random.default_rng(seed)
    found = np.array([_life(work_s, h, rng) for _ in range(lives)])
    (mean_s, failures, lost_s), p90_s = found.mean(axis=0).tolist(), np.percentile(found[:, 0], 90)
    saving_s = work_s // h.period_s * h.save_s
    return Lifetime(mean_s, float(p90_s), failures, lost_s, saving_s, h.start_s)


def _life(work_s: float, h: Hazards, rng: np.random.Generator) -> tuple[float, int, float]:
    """Return the seconds of one simulated job, its failures, and its lost seconds of training."""
    at = done = lost = 0.0
    for failures in itertools.count():
        start_s = h.restart_s if failures else h.start_s
        left = rng.exponential(h.mtbf_s) - start_s
        at += min(0.0, left) + start_s
        if left > 0:
            ahead = work_s - done
            ahead += ahead // h.period_s * h.save_s
            if left >= ahead:
                return at + ahead, failures, lost
            saved = left // (h.period_s + h.save_s)
            lost += left - saved * (h.period_s + h.save_s)
            at, done = at + left, done + saved * h.period_s
    raise AssertionError("a life ends")


def told(prediction: Prediction) -> dict[str, Any]:
    """Return a prediction for JSON: times in seconds, sizes in bytes, shares from 0 to 1."""
    p, found = prediction, prediction.found
    name, share = p.bottleneck
    return {
        "mode": p.config.mode, "ranks": p.ranks, "servers": len(p.case.roles.servers),
        "workers": len(p.case.roles.workers), "nodes": p.case.nodes,
        "codec": p.config.codec, "pull_codec": p.config.pull_codec,
        "parameter_bytes": p.case.vector,
        "row_bytes": None if p.without_rows else dataclasses.asdict(p.case.rows),
        "step_s": found.step_s, "step_formula_s": p.formula_s, "samples_per_s": p.samples_per_s,
        "bottleneck": {"what": name, "share": share},
        "links": [dataclasses.asdict(busy) for busy in found.links],
        "applying": found.applying, "storage": found.storage,
        "workers_time": found.parts, "dropped": found.dropped,
        "staleness": {**found.stale(), "histogram": np.asarray(found.staleness).tolist()},
        "batches": p.batches, "end_s": p.lifetime.mean_s,
        "lifetime": dataclasses.asdict(p.lifetime),
        "server_bytes": p.needs.server_bytes, "worker_bytes": p.needs.worker_bytes,
        "core_hours": p.core_hours,
        "simulation": {"steps": found.steps, "events": found.events, "seconds": found.took_s},
    }  # fmt: skip
