"""Job as every rank holds it, resolved and checked."""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpips.checkpoint import Checkpoint
from mpips.checkpoint.run_folder import RunFolder
from mpips.config import OPTIONS, Config
from mpips.config.groups import parse_groups
from mpips.config.names import IN_ROUNDS
from mpips.datasets import DataInfo, Dataset
from mpips.datasets.ledger import SampleAllocator
from mpips.errors import UserError
from mpips.layout import Layout, Shard
from mpips.layout.roles import shares, with_portions
from mpips.mpi.process import cpu_name
from mpips.mpi.start import mpi_name
from mpips.mpi.world import Cluster
from mpips.optim import (
    FrozenMask,
    Range,
    Ranges,
    Rule,
    RuleState,
    grouped,
    leaving_out,
    rule_of,
    schedule,
)
from mpips.optim.staleness import Staleness
from mpips.planning.needs import shard_slots
from mpips.planning.outcome import parsed, skipped_before, skipped_updates, updates_before
from mpips.problems import Problem
from mpips.problems.base import initial_vector, statistics
from mpips.problems.rows import tables_of_problem

if TYPE_CHECKING:
    from mpips.checkpoint.exchange import ParameterFile
    from mpips.ps.replay_log import Recorder
    from mpips.snapshot.evaluations import Evaluations
    from mpips.tables.step_rows import StepRows

STOPPED = "stopped"  # reason of a run's end that its program asked for
OWN_PARAMS = "own_params"  # a worker's own parameters between two exchanges
# In addition to options that a resume may not change, these determine a synchronous run's bits.
BITWISE_FIELDS = (
    *("mode", "reduce", "lr", "momentum", "beta1", "beta2", "eps", "decay", "weight_decay"),
    *("groups", "clip", "schedule", "warmup_steps", "step_every", "step_factor"),
    *("backup_workers", "codec", "pull_codec", "topk_ratio", "topk_momentum", "topk_warmup"),
    *("powersgd_rank", "optimizer", "ema"),
)


@dataclass
class Job:
    """A run, as each rank holds it.

    Attributes:
        config: The resolved configuration.
        cluster: The job's ranks, with their roles.
        info: Description of the data.
        dataset: The open dataset; None on servers.
        problem: The model.
        out: Folder of the run.
        block: Number of samples that are read at once; 0 for data in memory.
        checkpoint: The checkpoint that the run continues, or None.
        initial: Source of the initial parameters; None if the problem creates them.
        started: `time.perf_counter` when the process started.
        run_folder: On the coordinator, the open folder of the run while it trains; None elsewhere.
        begun: Whether this rank has computed or applied a gradient.
        stopping: Whether this rank's program has asked for the end; see `STOPPED`.
        left: Whether the program has left its loop: it computes nothing for a round's last batches.
        heard_stop: On a worker without rounds, handles messages while its program waits, and
            returns whether one of them ends its loop.
        few: Whether some workers have fewer batches than others of the current round, or else the
            last one.
        sets_rate: Whether a worker's program may set a factor of the learning rate, on any rank.
        rate_factor: The factor that this rank's program has set for the current step.
        lr_scale: Factor of all ranks' learning rate after deaths; see option ``scale_lr``.
        frozen: Ranges of the arrays that the program has frozen in the current step.
        evaluations: On the coordinator, results of the evaluators, if there are any.
        rows: On a worker while it trains, reads and pushes rows of tables, if there are any.
        recorder: On a server, records the pushes that it applies, if the job asks for it.
        held: Cleanup before the run's memory is freed.
        versions: On a worker, updates in its parameters, by shard; in rounds one number.
    """

    config: Config
    cluster: Cluster
    info: DataInfo
    dataset: Dataset | None
    problem: Problem
    out: Path
    block: int
    checkpoint: Checkpoint | None = None
    initial: "Checkpoint | ParameterFile | None" = None
    started: float = field(default_factory=time.perf_counter)
    run_folder: RunFolder | None = None
    begun: bool = False
    stopping: bool = False
    left: bool = False
    heard_stop: Callable[[], bool] = bool
    few: bool = False
    sets_rate: bool = False
    rate_factor: float = 1.0
    lr_scale: float = 1.0
    frozen: Ranges = ()
    evaluations: "Evaluations | None" = None
    rows: "StepRows | None" = None
    recorder: "Recorder | None" = None
    held: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        c, ranks = self.config, self.cluster
        self.layout: Layout = self.problem.layout
        self.dtype, ranges = np.dtype(c.dtype), self.layout.slices()
        rule, tables = rule_of(c), bool(tables_of_problem(self.problem))
        ranks.roles = with_portions(ranks.roles, c, ranks.node_of, rule.whole, tables)
        ends = [0, *(end for _, end in ranges.values())] if rule.whole else ()
        self.shards = shares(self.layout.size, ranks.roles, self.dtype.itemsize, ends)
        kept, groups = statistics(self.problem), parse_groups(c.groups)
        saved = self.checkpoint.state if self.checkpoint else {}
        # Source of slots; a user's class need not be a `Problem`.
        self.begins_with: Checkpoint | RuleState | None = self.checkpoint
        if self.checkpoint is None:
            self.begins_with = state = getattr(self.problem, "rule_state", None)
            before = state.steps if state is not None else 0
        else:
            before = updates_before(self.checkpoint, c, rule)
        rule = grouped(rule.continued(before), self.layout, groups, c.learning_rate, kept)
        skipped = {ranges[name]: n for name, n in skipped_before(self, before).items()}
        self.rule: Rule = leaving_out(rule, (), skipped) if skipped else rule
        self.leaving = FrozenMask(self.rule)  # dense parts of servers have their own
        if kept and c.mode in ("async", "ssp"):  # all workers' pushes together count as one
            self.problem.share = 1 / len(self.cluster.roles.workers)
        # Number of trained parameters; statistics follow them in the vector.
        self.trained = min((ranges[name][0] for name in kept), default=self.layout.size)
        self.staleness = Staleness.of(c)
        self.slots = shard_slots(c, self.rule)
        keep = c.mode == "local_sgd" and c.local_slots == "keep"
        self.own_slots = self.rule.slots if keep else ()  # each worker's own, in checkpoints too
        self.own_slots += (OWN_PARAMS,) if c.streaming else ()
        _check_states(self)
        self.base_step = int(saved.get("step", 0))
        self.base_samples = int(saved.get("samples", 0))
        self.base_position = self._position(saved.get("schedule"))
        self.versions = np.array([self.base_step])
        worker = self.worker_id
        self.delay = 1.0 if worker is None else c.delays.get(worker, 1.0)

    @property
    def shard(self) -> Shard:
        """This rank's shard; only on owners."""
        return self.shards[self.cluster.roles.owners.index(self.cluster.rank)]

    @property
    def worker_id(self) -> int | None:
        """This rank's number among the workers; None on servers."""
        workers = self.cluster.roles.workers
        return workers.index(self.cluster.rank) if self.cluster.rank in workers else None

    @property
    def updates_per_epoch(self) -> int:
        """Number of updates in an epoch."""
        return -(-self.info.n_train // self.samples_per_update)

    @property
    def gradients_per_update(self) -> int:
        """Workers whose gradients an update contains, if enough of them push."""
        workers = len(self.cluster.roles.workers)
        return workers - self.config.backup_workers if self.config.mode in IN_ROUNDS else 1

    @property
    def total_steps(self) -> int:
        """Updates of the whole run, earlier parts included."""
        steps, workers = self.config.steps, len(self.cluster.roles.workers)
        if steps:
            return -(-steps * workers // self.gradients_per_update)
        return self.config.epochs * self.updates_per_epoch

    @property
    def samples_per_update(self) -> int:
        """Samples of an update with complete batches."""
        return self.config.unit_size * self.gradients_per_update

    def rate(self, lr: float | None = None, steps: int = 1) -> Callable[[int], float]:
        """Return the learning rate as a function of the number of the update, or of its step.

        Args:
            lr: Initial rate of the schedule. Default: the job's.
            steps: Steps of an update. The function takes the number of such a step.
        """
        c, total = self.config, max(1, steps * self.total_steps)
        lr = c.learning_rate if lr is None else lr
        if (own := getattr(self.problem, "rate_schedule", None)) is not None:
            return lambda step: lr / c.learning_rate * own(step)
        found = schedule(
            c.schedule, lr, total_steps=total, warmup_steps=steps * c.warmup_steps,
            step_every=steps * c.step_every, step_factor=c.step_factor,
        )  # fmt: skip
        ahead = steps * (self.base_position - self.base_step) if c.schedule == "cosine" else 0
        return (lambda step: found(step + ahead)) if ahead else found

    def _position(self, saved: Mapping[str, int] | None) -> int:
        """Return a resumed run's position in the schedule, in updates of this job.

        If the samples of an update differ, the earlier job made another number of updates, and a
        schedule that ends with the run would end at another time. With --steps, steps of workers
        count.
        """
        if saved is None or saved["samples_per_update"] == self.samples_per_update:
            return saved["position"] if saved else self.base_step
        if self.config.steps:
            clocks, in_rounds = self.allocator().clocks, self.config.in_rounds
            return clocks[0] if in_rounds else -(-sum(clocks) // self.gradients_per_update)
        epochs, rest = divmod(self.base_samples, self.info.n_train)
        return epochs * self.updates_per_epoch - (-rest // self.samples_per_update)

    def allocator(self) -> SampleAllocator:
        """Return the allocator of the run's batches, at the position of the checkpoint.

        A synchronous run without backup workers has a single taker, the round, whose batch all
        share.
        """
        c, sync = self.config, self.config.in_rounds
        workers = len(self.cluster.roles.workers)
        size = c.unit_size * (workers if sync else 1)
        out = SampleAllocator(
            samples=self.info.n_train,
            batch_size=size,
            workers=1 if sync else workers,
            epochs=None if c.steps else c.epochs,
            quota=c.steps or None,
            chunk=1 if sync else max(1, self.block // size),
        )
        if self.checkpoint is not None:
            state = dict(self.checkpoint.state["allocator"])
            if sync:  # rounds are steps of each worker
                state["clocks"] = [max(state["clocks"])]
            out.restore(state)
        return out

    def state(
        self,
        step: int,
        allocator: dict[str, Any],
        samples: int,
        skipped: Mapping[Range, int] | None = None,
    ) -> dict[str, Any]:
        """Return the state of a checkpoint, without its arrays.

        Args:
            step: Number of updates.
            allocator: State of the sample allocator.
            samples: Number of samples.
            skipped: Updates of this job that were made without an array, by its range.
        """
        part = 0 if self.recorder is None else self.recorder.part
        recorded = {"recorded": part} if self.config.record else {}
        return recorded | {
            "step": step,
            "steps_before": self.rule.before,
            "skipped": skipped_updates(self, skipped or {}),
            "samples": samples,
            "schedule": {
                "position": self.base_position + step - self.base_step,
                "samples_per_update": self.samples_per_update,
            },
            "allocator": allocator,
            "block": self.block,
            "n_train": self.info.n_train,
            "mode": self.config.mode,
            "statistics": list(statistics(self.problem)),
            "world": self.world(),
        }

    def world(self) -> dict[str, Any]:
        """Return everything that determines a synchronous run's bits; see `differences`."""
        cluster, c = self.cluster, self.config
        fields = set(BITWISE_FIELDS)
        if c.mode == "local_sgd":
            fields |= {name for name, option in OPTIONS.items() if option.modes == (c.mode,)}
        if c.schedule == "cosine":
            fields |= {"epochs", "steps"}
        return {
            "job": {name: getattr(c, name) for name in sorted(fields)} | {"lr": c.learning_rate},
            "threads": cluster.threads,
            "ranks": cluster.world,
            "servers": list(cluster.roles.servers),
            "node_of": list(cluster.node_of),
            "mpi": mpi_name(),
            "cpu": cpu_name(),
        }

    def differences(self) -> list[str]:
        """Return the differences between this job and the checkpoint's, as text."""
        if self.checkpoint is None:
            return []
        saved, now = self.checkpoint.state.get("world", {}), self.world()
        before = asdict(saved_config(self))  # for options that the world does not record
        saved, now = {**before, **saved, **saved.get("job", {})}, {**now, **now["job"]}
        names = [name for name in now if name != "job"]
        return [f"{k}: {saved.get(k)} -> {now[k]}" for k in names if saved.get(k) != now[k]]

    def fill(self, params: np.ndarray, slots: tuple[np.ndarray, ...], shard: Shard) -> None:
        """Set the parameters and slots of a shard, from a checkpoint or to initial values.

        Raises:
            UserError: If a file cannot be read.
        """
        if self.initial is None:
            whole = initial_vector(self.problem, self.config.seed, self.dtype)
            np.copyto(params, whole[shard.range])
        else:
            self.initial.read_params(shard.begin, shard.end, out=params)
        self.rule.init(params, slots)
        if self.begins_with is not None:
            read_slots(self.begins_with, self.slots, slots, shard)

    def fill_own(self, slots: tuple[np.ndarray, ...]) -> None:
        """Set this worker's own vectors, each of shape (n_params,), as `fill` does.

        If the checkpoint has another number of workers, each worker starts from the mean of their
        vectors. If its mode shared the slots, each worker starts from those.

        Raises:
            UserError: If the checkpoint cannot be read.
        """
        worker, workers = self.worker_id, len(self.cluster.roles.workers)
        for name, slot in zip(self.own_slots, slots, strict=True):
            slot.fill(0)
            if self.begins_with is None or worker is None:
                continue
            if self.checkpoint is not None and name in self.checkpoint.worker_names:
                if len(self.checkpoint.workers) == workers:
                    self.checkpoint.read_worker(name, worker, slot)
                else:
                    self.checkpoint.read_workers_share(name, 0, slot)
            elif name in self.begins_with.slot_names:
                self.begins_with.read_slot(name, out=slot)


def _check_states(job: Job) -> None:
    """Refuse a user's rule that does not suit the job."""
    names = job.slots + job.own_slots
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        got = f"state {duplicate!r} of {job.rule.name}, which the job has too"
        raise UserError(got, "another name", "rename it in the rule")
    if job.rule.whole and job.config.codec == "powersgd":
        got = f"codec 'powersgd' with {job.rule.name}, which takes whole arrays"
        raise UserError(got, "another codec", "leave out --codec")
    if job.rule.whole:
        job.rule.check(job.dtype)


def read_slots(
    saved: Checkpoint | RuleState,
    names: tuple[str, ...],
    slots: tuple[np.ndarray, ...],
    shard: Shard,
) -> None:
    """Read the slots of a shard; slots that are not saved keep their values.

    Raises:
        UserError: If a file cannot be read.
    """
    for name, slot in zip(names, slots, strict=True):
        if name in saved.slot_names:  # otherwise the mode of the saved run had none
            saved.read_slot(name, shard.begin, shard.end, out=slot)
        elif isinstance(saved, Checkpoint) and name in saved.worker_names:
            saved.read_workers_share(name, shard.begin, out=slot)


def steps_before(job: Job) -> int:
    """Return the mean number of steps that each worker made in the resumed run, earlier.

    They count as this job counts updates; see `Job.state`.
    """
    samples = job.base_position * job.samples_per_update
    return samples // (job.config.step_size * len(job.cluster.roles.workers))


def saved_config(job: Job) -> Config:
    """Return the configuration of the run's checkpoint."""
    assert job.checkpoint is not None, "nothing was saved"
    return parsed(job.checkpoint.config)
