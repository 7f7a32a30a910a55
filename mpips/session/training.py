"""Training of a run: from its first line to its summary.

Messages:
    step N is not saved: The last checkpoint could not be written. The message names the newest
        whole one.
    expected a finite loss: The loss is NaN or infinite: a smaller ``--lr``, or ``--clip``.
        ``--resume`` continues from the checkpoint before it.
"""

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mpips.checkpoint import run_folder
from mpips.codecs import is_open
from mpips.config import Config
from mpips.config.schema import LOG_EVERY_S
from mpips.datasets import csr
from mpips.errors import Exit, UserError, complain
from mpips.health import status_board
from mpips.launch import heartbeat
from mpips.mpi import abort
from mpips.mpi.collectives import PIECE, begin_sum, broadcast_polled
from mpips.mpi.evaluator_link import Link
from mpips.mpi.pages import keep_freed_memory
from mpips.mpi.world import Cluster
from mpips.planning.job import Job
from mpips.planning.outcome import Outcome
from mpips.problems.accumulate import Tasks
from mpips.problems.evaluation import evaluate, mean_evaluation, share
from mpips.session import folder, metrics
from mpips.session.folder import Run
from mpips.session.metrics import Listener, Log
from mpips.session.setup import traced
from mpips.session.summary import (
    say_failure_policy,
    say_left_out,
    say_start,
    summarise,
    summary_text,
)
from mpips.strategies import strategy, survivable_ranks

# The coordinator waits so long for others to get the exit code, after a rank has died.
LEAVING_S = 5.0


@dataclass
class Ended:
    """End of a run, on every rank.

    Attributes:
        code: The job's exit code.
        params: All parameters at the end, shape (n_params,), if `train` keeps them; else empty.
        summary: Contents of ``summary.json`` on the coordinator, and on every rank if `train` keeps
            parameters; else empty.
    """

    code: int
    params: np.ndarray = field(default_factory=lambda: np.zeros(0))
    summary: dict[str, Any] = field(default_factory=dict)


def train(
    job: Job,
    found: Run,
    keep: bool = False,
    listener: Listener | None = None,
    link: Link | None = None,
) -> Tasks[Ended]:
    """Train, evaluate, save and print the summary. Collective: yes.

    Args:
        job: The run.
        found: Its folder, and the run that it continues.
        keep: Whether every rank gets the final parameters.
        listener: Called on the coordinator with each line of ``metrics.jsonl``.
        link: Link to evaluators; None without evaluators.

    Raises:
        UserError: If an error occurs on this rank alone; the caller ends the job.
    """
    if job.worker_id is not None:
        keep_freed_memory()
    try:
        ended = yield from _train(job, found, keep, listener, link)
    except UserError as error:
        error.code = Exit.FAILED if job.begun else error.code
        raise
    if link is not None and job.cluster.is_coordinator:
        for rank in link.evaluators:
            link.send(rank, "end", ended.code)
    return ended


def _train(
    job: Job, found: Run, keep: bool, listener: Listener | None, link: Link | None
) -> Tasks[Ended]:
    c, coordinator = job.config, job.cluster.is_coordinator
    finished = coordinator and _take_place(job, link)
    with traced(c, job.cluster, job.out, link), _log(job, listener) as log:
        if coordinator and link is not None:
            from mpips.snapshot.evaluations import Evaluations

            job.evaluations = Evaluations(job, link, log, survivable_ranks(job))
        say_start(job, found.notes, log)
        if is_open(c):
            from mpips.session.probe import choose_codecs

            choice = choose_codecs(job)  # in config.toml the choice stays open
            job.config = choice.applied(job.config)
            log.say("\n".join(choice.lines))
        say_left_out(job, log)
        say_failure_policy(job, log)
        begun = time.perf_counter()
        log.start_at(job.base_samples)
        outcome = yield from strategy("backup" if c.backup_workers else c.mode)(job, log)
        train_s = time.perf_counter() - begun
        status_board.set_phase(status_board.EVALUATING, begun + train_s)
        evaluation = _final_evaluation(job, outcome)
        status_board.set_phase(status_board.ENDING, time.perf_counter())
        summary = _gather(job, outcome, evaluation, train_s, log, finished)
        code: int = Exit.DONE
        if summary is not None:
            code = _leave(job, outcome, summary, log, finished)
    ended = Ended(code, summary=summary or {})
    if keep:
        ended.params = _share_params(job, outcome)
        ended.summary = job.cluster.share(summary, job.cluster.roles.coordinator)
    # Polled, as freeing a window waits for all ranks.
    ended.code = _from_coordinator(job.cluster, code)
    job.held.close()
    if not job.cluster.failures.lost:  # freeing a window would wait for dead ranks
        outcome.release()
    return ended


def _take_place(job: Job, link: Link | None) -> bool:
    """Open the run's folder for training, on the coordinator.

    Returns whether the run was finished before.
    """
    spares = (*survivable_ranks(job), *(link.survivable if link is not None else ()))
    heartbeat.report_run(job.out, job.config.resume, _log_every_s(job.config), spares)
    folder.save_config(job.out, job.config)
    done = job.out / run_folder.DONE
    finished = done.exists()
    done.unlink(missing_ok=True)
    job.run_folder = run_folder.RunFolder(job.out)
    return finished


def _log_every_s(config: Config) -> float:
    return LOG_EVERY_S if config.log_every is None else config.log_every


@contextlib.contextmanager
def _log(job: Job, listener: Listener | None) -> Iterator[Log]:
    """Open the log of the run; only the coordinator's writes."""
    c, path = job.config, job.out / run_folder.METRICS if job.cluster.is_coordinator else None
    with contextlib.ExitStack() as stack:
        if path is not None and c.tensorboard:
            from mpips.session.tensorboard import EventFiles

            events = EventFiles(job.out, job.base_step, listener)
            listener = stack.enter_context(contextlib.closing(events))
        log = Log(
            path, job.started, job.total_steps, _log_every_s(c), c.quiet, listener,
            hushed=abort.another_speaks, sparse=c.log_every is None,
        )  # fmt: skip
        yield stack.enter_context(log)


def _share_params(job: Job, outcome: Outcome) -> np.ndarray:
    """Return a copy of the final parameters, shape (n_params,), on every rank.

    Collective: yes.
    """
    ranks = job.cluster
    workers = ranks.failures.living(ranks.roles.workers)
    params = np.zeros(job.layout.size, job.dtype)
    if ranks.rank in workers:
        np.copyto(params, outcome.params)
    if ranks.roles.servers and not ranks.failures.left_out:
        broadcast_polled(ranks.comm, params, workers[0], ranks.wait_request)
    elif ranks.roles.servers:  # collectives fail without dead ranks
        for begin in range(0, params.size, PIECE):
            piece = params[begin : begin + PIECE]
            piece[:] = ranks.share(piece, workers[0])
    return params


def _from_coordinator(ranks: Cluster, code: int) -> int:
    """Return the coordinator's exit code on every rank, once all have called this.

    Collective: yes.

    If a rank has died, collectives fail, and messages replace them: a rank that has the code may
    end at once.
    """
    if ranks.failures.left_out:
        return _by_messages(ranks, code)
    code_sum = np.array([code if ranks.is_coordinator else 0])
    ranks.wait_request(begin_sum(ranks.comm, code_sum))
    return int(code_sum[0])


def _by_messages(ranks: Cluster, code: int) -> int:
    """Return the coordinator's exit code on every live rank, by messages."""
    coordinator = ranks.roles.coordinator
    others = set(range(ranks.world)) - ranks.failures.left_out - {coordinator}
    ranks.failures.spare(ranks.failures.left_out | others)  # a rank that has the code may end
    codes: dict[int, int] = {}
    deadline = time.perf_counter() + LEAVING_S

    def all_heard() -> bool:
        codes.update((source, code) for source, kind, code in ranks.poll() if kind == "code")
        if not ranks.is_coordinator:
            return coordinator in codes
        return others <= set(codes) | ranks.failures.lost or time.perf_counter() > deadline

    if ranks.is_coordinator:
        for rank in others:
            ranks.send(rank, "code", code)
    ranks.wait(all_heard)
    if ranks.is_coordinator:
        return code
    ranks.send(coordinator, "code", codes[coordinator])
    return codes[coordinator]


def exit_code(reason: str) -> int:
    """Return 0 for a finished run, 85 for one that was saved at a signal, 1 for a failed one."""
    if reason.startswith("SIG"):
        return Exit.SAVED
    return Exit.FAILED if reason == "diverged" else Exit.DONE


def _final_evaluation(job: Job, outcome: Outcome) -> dict[str, float] | None:
    """Return this worker's part of the sums over the held-out samples; None on servers."""
    if job.worker_id is None or not job.info.n_test or exit_code(outcome.reason) != 0:
        return None
    ranks = job.cluster
    living = ranks.failures.living(ranks.roles.workers)
    part = share(job.info.n_test, living.index(ranks.rank), len(living))
    return evaluate(job, job.layout.views(outcome.params, writable=False), *part)


def _gather(
    job: Job,
    outcome: Outcome,
    evaluation: dict[str, float] | None,
    train_s: float,
    log: Log,
    finished: bool,
) -> dict[str, Any] | None:
    """Gather every rank's part on the coordinator, which returns the summary. Collective: yes.

    The final evaluation also becomes a line of the log, unless the run was `finished` before and
    had nothing left to do.
    """
    peak_mb = round(metrics.peak_memory_mb(), 1)
    part = {**outcome.stats, "peak_memory_mb": peak_mb, "eval": evaluation}
    part["hashed"] = csr.seen.bits if job.worker_id is not None else None
    if job.evaluations is not None:
        job.evaluations.finish(exit_code(outcome.reason) == 0)
    parts = job.cluster.gather(part)
    if parts is None:
        if not job.cluster.failures.lost:  # otherwise the exit code arrives as a message
            job.cluster.poll()  # otherwise the process's next run would get the message
        return None
    for rank, pushes in outcome.lost.items():
        parts[rank] = {"lost": True, "steps": pushes, "pushes_sent": pushes, "eval": None}
        parts[rank] |= {"applied": pushes, "busy_s": 0.0}  # for a worker that owned a slice
    for part in [part for part in parts if part is not None]:
        outcome.taken_over |= part.pop("taken_over", {})
    for rank, stats in outcome.taken_over.items():
        parts[rank] = {"lost": True, "eval": None, **stats}
    means = mean_evaluation(job, [parts[r]["eval"] for r in job.cluster.roles.workers])
    for _, kind, payload in job.cluster.poll():
        if kind in ("eval", "log"):  # arrived after the end of training
            log.heard(kind, payload)
    is_new = outcome.samples > job.base_samples or not finished
    # With an average, these metrics are of other parameters. The best is a checkpoint.
    if job.evaluations is not None and not (job.config.eval_ema or outcome.unsaved):
        job.evaluations.add_last(outcome.step, outcome.epochs, means)
    elif means and is_new and log.last_eval.get("step") != outcome.step:
        log.heard("eval", {"step": outcome.step, **means, "epoch": round(outcome.epochs, 4)})
    return summarise(job, outcome, parts, means, train_s)


def _leave(job: Job, outcome: Outcome, summary: dict[str, Any], log: Log, finished: bool) -> int:
    """Write the run's last files on the coordinator, print the summary, and return the exit code.

    If a run that was `finished` before had nothing left to do, its old summary stays.
    """
    log.progress(outcome.step, outcome.epochs, outcome.samples, force=True)
    if outcome.samples > job.base_samples:
        summary["loss"] = log.last_loss
    assert job.run_folder is not None, "the coordinator holds the folder"
    current = job.run_folder.path()
    job.out = current or job.out
    log.event("end", outcome.step, reason=outcome.reason, eval_loss=summary["eval_loss"])
    summary["warnings"] = list(log.warnings)
    if outcome.samples > job.base_samples or not finished:
        path = job.out / run_folder.SUMMARY
        try:
            metrics.write_json(path, summary)
        except OSError as problem:
            log.warn(f"{path} cannot be written: {problem.strerror}")
    failed = outcome.unsaved or job.run_folder.moved or current is None
    code = Exit.FAILED if failed else exit_code(outcome.reason)
    if code == Exit.DONE:
        code = _mark_done(job.out / run_folder.DONE, outcome.reason)
    sys.stdout.flush()
    if outcome.unsaved:
        complain(f"step {outcome.step} is not saved: {outcome.unsaved}")
    elif job.run_folder.moved or current is None:
        got = job.run_folder.moved or f"{job.out} was removed while the job ran"
        remedy = f"what is saved is in {current}: --resume goes on there" if current else ""
        complain(UserError(got, "a folder that stays", remedy))
    job.run_folder.close()
    if outcome.reason == "diverged":
        complain(
            f"{outcome.detail}, expected a finite loss; the checkpoints in "
            f"{job.out / run_folder.CHECKPOINTS} are from before it; use a smaller --lr, or --clip"
        )
    log.say(summary_text(job, summary))
    return code


def _mark_done(path: Path, reason: str) -> int:
    """Mark a run as finished, and return the exit code."""
    try:
        path.write_text(f"{reason}\n")
        return Exit.DONE
    except OSError as problem:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)  # an empty file would mark it too
        remedy = "the run is over and saved: free some space, and --resume writes it"
        complain(UserError(f"{path}: {problem.strerror}", "a file that can be written", remedy))
        return Exit.FAILED
