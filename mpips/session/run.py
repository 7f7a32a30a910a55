"""One job from its command line to its summary, on every rank."""

import contextlib
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from mpips.checkpoint import Checkpoint, open_checkpoint, place
from mpips.checkpoint.fits import check_checkpoint, check_length, check_samples
from mpips.cluster import signals
from mpips.cluster.agreement import Agreed, everywhere, on_root
from mpips.cluster.collectives import begin_sum, broadcast, gather_to_first
from mpips.cluster.library import check_world
from mpips.cluster.start import Comm, whole_world
from mpips.cluster.world import Cluster
from mpips.config import Config
from mpips.config.command_line import CommandLine
from mpips.config.delay import check_delays
from mpips.datasets import DataInfo, Dataset, describe, make_dataset, open_parts
from mpips.errors import UserError
from mpips.layout.roles import Roles, assign
from mpips.planning.explain import explain_world
from mpips.planning.job import Job
from mpips.planning.memory import check_memory
from mpips.planning.outcome import Outcome
from mpips.problems import load_problem
from mpips.problems.evaluation import evaluate, mean_evaluation, share
from mpips.session import folder, metrics
from mpips.session.announcements import say_left_out, say_start
from mpips.session.folder import Run
from mpips.session.loading import load_loops
from mpips.session.metrics import Log
from mpips.session.probe import choose_codecs
from mpips.session.summary import summarise, summary_text
from mpips.strategies import strategy


def run(line: CommandLine, started: float, comm: Comm | None = None) -> int:
    """Run a job; returns the exit code. Collective: yes.

    Args:
        line: The command line.
        started: `time.perf_counter` when the process started.
        comm: The job's ranks; by default all that were started.

    Raises:
        Agreed: If the job is refused, on every rank.
        UserError: If something fails on this rank alone; the caller ends the job.
    """
    world = whole_world() if comm is None else comm
    if "explain" in line.flags:
        return _explain(line, world)
    try:
        found = on_root(world, lambda: _find(line, world))
        try:
            return _run(found, world, started)
        except Agreed:
            if world.rank == 0 and not found.resumed and not found.config.eval_only:
                folder.forget(found.out)
            raise
    finally:
        place.release()


def _explain(line: CommandLine, comm: Comm) -> int:
    """Say what the job would do in this world, instead of doing it. Collective: yes."""

    def find() -> Config:
        check_world(comm)
        return folder.find_config(line)[0]

    config = on_root(comm, find)
    ranks = make_cluster(comm, config)
    text = on_root(comm, lambda: explain_world(config, line.question, ranks.hosts, ranks.node_of))
    if comm.rank == 0:
        print(text, end="", flush=True)
    ranks.free()
    return 0


def make_cluster(comm: Comm, config: Config) -> Cluster:
    """Return the job's ranks, on the nodes that the job sees. Collective: yes."""
    return Cluster(comm, 1 if config.window == "private" else config.node_size)


def _find(line: CommandLine, comm: Comm) -> Run:
    check_world(comm)
    return folder.find_run(line)


def _run(found: Run, comm: Comm, started: float) -> int:
    config = found.config
    ranks = make_cluster(comm, config)
    ranks.roles = everywhere(comm, lambda: _roles(config, ranks))
    ranks.limit_threads(config.threads)
    job = make_job(found, ranks, started)
    try:
        code = _evaluate_only(job, found) if config.eval_only else _train(job, found)
    except UserError as error:
        error.code = 1 if job.begun else error.code
        raise
    ranks.free()
    return code


def _roles(config: Config, ranks: Cluster) -> Roles:
    if config.eval_only:  # needs no server: every rank evaluates a part
        return Roles((), tuple(range(ranks.world)))
    roles = assign(
        config.mode, ranks.hosts, ranks.node_of, config.servers, config.server_ranks,
        config.server_hosts,
    )  # fmt: skip
    workers = len(roles.workers)
    check_delays(config.delays, workers)
    if config.backup_workers >= workers:
        got = f"backup_workers {config.backup_workers} of {workers} workers"
        raise UserError(got, f"backup_workers <= {workers - 1}", "a round needs a gradient")
    return roles


def make_job(found: Run, ranks: Cluster, started: float) -> Job:
    """Open the data, build the problem, read the checkpoint's index. Collective: yes.

    Raises:
        Agreed: If anything about them is wrong, on every rank.
    """
    config, comm = found.config, ranks.comm
    info, dataset = open_data(config, ranks, strict=not (found.resumed or config.eval_only))
    block = dataset.train.block(config.batch_size) if dataset else 0
    block = broadcast(comm, block, ranks.roles.workers[0])
    load_loops(ranks, config)

    near = sum(ranks.hosts[r] == ranks.hosts[ranks.rank] for r in ranks.roles.workers)

    def build() -> Job:
        problem = load_problem(config.problem, info, config)
        check_memory(problem.layout, config, near, ranks.nodes)
        saved: Checkpoint | None = open_checkpoint(found.checkpoint) if found.checkpoint else None
        if saved is not None:
            check_checkpoint(saved, problem.layout, config.dtype)
            if found.resumed:
                check_samples(saved, info.n_train)
        kept = int(saved.state["block"]) if saved is not None and found.resumed else block
        job = Job(
            config, ranks, info, dataset, problem, found.out, kept, saved, found.resumed, started
        )
        if found.resumed:
            check_length(job.handout().epochs_done, config)
        job.rate()  # checks the schedule
        if config.backup_workers and not all(shard.size for shard in job.shards):
            got = f"servers {len(job.shards)} for {problem.layout.size} parameters"
            raise UserError(got, "a share for each, with backup_workers", "use fewer servers")
        return job

    return everywhere(comm, build)


def open_data(config: Config, ranks: Cluster, strict: bool) -> tuple[DataInfo, Dataset | None]:
    """Open the data on workers; one of them looks at the targets for all. Collective: yes.

    Returns:
        What the data is, on every rank, and the data itself, on workers.

    Raises:
        Agreed: As `mpips.datasets.open_dataset`; with `strict` alone for odd labels.
    """
    comm, first = ranks.comm, ranks.roles.workers[0]
    works = ranks.rank in ranks.roles.workers
    parts = everywhere(comm, lambda: open_parts(config) if works else None)
    looks = parts if ranks.rank == first else None
    found = everywhere(comm, lambda: describe(config, looks, strict) if looks else None)
    info: DataInfo = broadcast(comm, found, first)
    return info, everywhere(comm, lambda: make_dataset(config, parts, info) if parts else None)


def _train(job: Job, found: Run) -> int:
    chief = job.cluster.is_chief
    done = job.out / place.DONE
    finished = chief and done.exists()
    if chief:
        folder.save_config(job.out, job.config)
        done.unlink(missing_ok=True)
        job.place = place.Place(job.out)
    path = job.out / place.METRICS if chief else None
    c = job.config
    with Log(path, job.started, job.total_steps, c.log_every, c.quiet) as log:
        say_start(job, found.notes, log)
        _choose_codecs(job, log)
        say_left_out(job, log)
        begun = time.perf_counter()
        log.start_at(job.base_samples)
        outcome = strategy("backup" if c.backup_workers else c.mode)(job, log)
        train_s = time.perf_counter() - begun
        evaluation = _final_evaluation(job, outcome)
        summary = _gather(job, outcome, evaluation, train_s)
        for _, kind, payload in job.cluster.poll():
            if kind == "eval":  # overtaken by the end
                log.evaluation(payload)
        code = 0
        if summary is not None:
            code = _leave(job, outcome, summary, log, finished)
    code = _from_chief(job.cluster, code)  # polled: to free a window waits in MPI for everybody
    outcome.release()
    return code


def _from_chief(ranks: Cluster, code: int) -> int:
    """Return the chief's exit code on every rank, when all have come. Collective: yes."""
    said = np.array([code if ranks.is_chief else 0])
    ranks.wait_request(begin_sum(ranks.comm, said))
    return int(said[0])


def exit_code(reason: str) -> int:
    """Return 0 for a finished run, 85 for one that was saved at a signal, 1 for a failed one."""
    if reason.startswith("SIG"):
        return signals.EXIT_SAVED
    return 1 if reason == "diverged" else 0


def _choose_codecs(job: Job, log: Log) -> None:
    """Settle what ``auto`` leaves open; ``config.toml`` keeps it open. Collective: yes."""
    choice = choose_codecs(job)
    if choice is not None:
        job.config = choice.applied(job.config)
        log.say("\n".join(choice.lines))


def _final_evaluation(job: Job, outcome: Outcome) -> dict[str, float] | None:
    """Return this worker's part of the sums over the held-out samples; None on servers."""
    if job.worker_id is None or not job.info.n_test or exit_code(outcome.reason) != 0:
        return None
    part = share(job.info.n_test, job.worker_id, len(job.cluster.roles.workers))
    return evaluate(job, job.layout.views(outcome.params, writable=False), *part)


def _gather(
    job: Job, outcome: Outcome, evaluation: dict[str, float] | None, train_s: float
) -> dict[str, Any] | None:
    """Bring every rank's part to the chief, which returns the summary. Collective: yes."""
    part = {**outcome.stats, "peak_memory_mb": metrics.peak_memory_mb(), "eval": evaluation}
    parts = job.cluster.gather(part)
    return None if parts is None else summarise(job, outcome, parts, train_s)


def _leave(job: Job, outcome: Outcome, summary: dict[str, Any], log: Log, finished: bool) -> int:
    """Write what the run leaves, on the chief, and say how it ended; returns the exit code.

    The summary of a run that was `finished` before stays if there was nothing left to do.
    """
    if summary["accuracy"] is not None:
        log.last_eval = {"accuracy": summary["accuracy"]}
    log.progress(outcome.step, outcome.epochs, outcome.samples, force=True)
    if outcome.samples > job.base_samples:
        summary["loss"] = log.last_loss
    assert job.place is not None, "the chief holds the folder"
    there = job.place.where()
    job.out = there or job.out
    log.event("end", outcome.step, reason=outcome.reason, eval_loss=summary["eval_loss"])
    summary["warnings"] = list(log.warnings)
    if outcome.samples > job.base_samples or not finished:
        _write_summary(job.out / place.SUMMARY, summary, log)
    failed = outcome.unsaved or job.place.moved or there is None
    code = 1 if failed else exit_code(outcome.reason)
    if code == 0:
        code = _mark_done(job.out / place.DONE, outcome.reason)
    sys.stdout.flush()
    if outcome.unsaved:
        got = f"step {outcome.step} is not saved: {outcome.unsaved}"
        print(f"mpips: {got}", file=sys.stderr, flush=True)
    elif job.place.moved or there is None:
        got = job.place.moved or f"{job.out} was removed while the job ran"
        remedy = f"what is saved is in {there}: --resume goes on there" if there else ""
        error = UserError(got, "a folder that stays", remedy)
        print(f"mpips: {error}", file=sys.stderr, flush=True)
    job.place.close()
    if outcome.reason == "diverged":
        print(
            f"mpips: {outcome.detail}, expected a finite loss; the checkpoints in "
            f"{job.out / place.CHECKPOINTS} are from before it; use a smaller --lr, or --clip",
            file=sys.stderr, flush=True,
        )  # fmt: skip
    log.say(summary_text(job, summary))
    return code


def _write_summary(path: Path, summary: dict[str, Any], log: Log) -> None:
    try:
        metrics.write_json(path, summary)
    except OSError as problem:
        log.warn(f"{path} cannot be written: {problem.strerror}")


def _mark_done(path: Path, reason: str) -> int:
    """Mark a run as finished; returns the exit code."""
    try:
        path.write_text(f"{reason}\n")
        return 0
    except OSError as problem:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)  # an empty one would say the same
        remedy = "the run is over and saved: free some space, and --resume writes it"
        error = UserError(f"{path}: {problem.strerror}", "a file that can be written", remedy)
        print(f"mpips: {error}", file=sys.stderr, flush=True)
        return 1


def _evaluate_only(job: Job, found: Run) -> int:
    """Evaluate the checkpoint that was named, and print the result. Collective: yes."""
    assert job.checkpoint is not None, "config checks that one is named"
    parts = None
    if job.worker_id is not None and job.info.n_test:
        params = job.layout.views(job.checkpoint.read_params(), writable=False)
        part = share(job.info.n_test, job.worker_id, len(job.cluster.roles.workers))
        parts = evaluate(job, params, *part)
    gathered = gather_to_first(job.cluster.comm, parts)
    means = on_root(job.cluster.comm, lambda: mean_evaluation(job, gathered or []))
    if gathered is not None and not job.config.quiet:
        for note in found.notes:
            print(note)
        text = ", ".join(f"{name} {value:.6f}" for name, value in sorted(means.items()))
        print(f"{job.checkpoint.path} on {job.info.n_test} held-out samples: {text}", flush=True)
    return 0
