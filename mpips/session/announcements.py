"""Output of a run at its start."""

from collections.abc import Sequence

from mpips import __version__
from mpips.config.delay import delays_text
from mpips.launch import heartbeat
from mpips.planning.job import Job
from mpips.planning.tables import tables_of
from mpips.rounds import state as round_state
from mpips.session import metrics
from mpips.session.metrics import Log
from mpips.snapshot import worker_state


def say_failure_policy(job: Job, log: Log) -> None:
    """Say on the coordinator what happens if a rank dies, unless MPI just ends the job."""
    if not job.cluster.is_coordinator:
        return
    if job.cluster.failures.on or job.config.spares or heartbeat.terms() is not None:
        from mpips.failover.policy import announcement

        log.say(announcement(job))


def say_start(job: Job, notes: Sequence[str], log: Log) -> None:
    """Say on the coordinator what the run is, who does what, and what it goes on from.

    Args:
        job: The run.
        notes: What was found with its folder.
        log: Of the run.
    """
    if not job.cluster.is_coordinator:
        return
    ranks, c = job.cluster, job.config
    item = job.dtype.itemsize * (1 + len(job.slots))
    owned = dict(zip(ranks.roles.owners, (s.size * item for s in job.shards), strict=True))
    sizes = [owned.get(r, 0) for r in range(ranks.world)]
    names = [ranks.roles.name(r) for r in range(ranks.world)]
    log.say(f"mpips {__version__}: {c.problem} on {job.info.name}, mode {c.mode}, {c.optimizer}")
    log.say(f"{job.layout.size:,} parameters, {job.info.n_train:,} samples, run in {job.out}")
    for table in tables_of(job):
        shape = f"{table.table.rows:,} rows of {table.dim}{', lazy' * table.table.lazy}"
        log.say(f"table {table.name}: {shape}, {table.rule.name} at {table.rule.rate:g}")
    log.say(metrics.role_table(ranks.hosts, ranks.node_of, names, sizes))
    if c.evaluators:
        first, last = ranks.world, ranks.world + c.evaluators - 1
        which = f"rank {first} evaluates" if first == last else f"ranks {first} to {last} evaluate"
        log.say(f"{which} a checkpoint every {c.eval_every:g} epochs")
    for note in (*notes, *job.info.notes):
        log.say(note)
    asked, held = job.samples_per_update, job.info.n_train
    if asked > held:
        log.say(
            f"each update takes a whole epoch: {asked:,} samples are asked for, it has {held:,}"
        )
    if job.checkpoint:
        _say_resumed(job, log)
    if c.delays:
        log.say(f"slowed: {delays_text(c.delays)}")
    log.event(
        "start", job.base_step, mode=c.mode, world=ranks.world + c.evaluators,
        resumed=bool(job.checkpoint), inject_delay=c.delays, data=job.info.notes,
    )  # fmt: skip
    for note in notes:
        log.note(note)


def _say_resumed(job: Job, log: Log) -> None:
    assert job.checkpoint is not None
    log.say(f"resumed at step {job.base_step} from {job.checkpoint.path}")
    if job.config.in_rounds:
        changed = "; ".join(job.differences())
        held = f"does not hold ({changed})" if changed else "holds"
        log.say(f"bitwise equality with an uninterrupted run {held}")
    left = job.allocator()
    if all(left.next(taker) is None for taker in range(left.workers)):
        length = "steps" if job.config.steps else "epochs"
        asked = getattr(job.config, length)
        log.say(f"nothing is left to do: {asked} {length} are over, and no more are asked for")


def say_left_out(job: Job, log: Log) -> None:
    """Say what workers or ranks had for themselves, and nothing in a resumed run reads.

    Args:
        job: The run, with codecs that are settled.
        log: Of the run.
    """
    if job.checkpoint is None:
        return
    state = round_state if job.config.in_rounds else worker_state
    read = {*state.read_names(job), *state.names(job), *job.own_slots, *job.slots}
    lost = [name for name in job.checkpoint.worker_names if name not in read]
    if lost:
        log.say(f"{', '.join(lost)} is left out: this run has none")
