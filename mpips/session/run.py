"""Job from its command line to its exit code, on every rank."""

from mpips.checkpoint import Checkpoint
from mpips.checkpoint.run_folder import EVALUATION, writing_to
from mpips.config import Config
from mpips.config.command_line import CommandLine
from mpips.errors import Exit, write_line
from mpips.mpi.collective_errors import on_root
from mpips.mpi.collectives import gather_to_first
from mpips.mpi.evaluator_link import Link, agreed
from mpips.mpi.start import Comm, check_world, whole_world
from mpips.planning.job import Job
from mpips.problems.accumulate import follow
from mpips.problems.evaluation import evaluate, mean_evaluation, share
from mpips.session import folder
from mpips.session.folder import Run
from mpips.session.metrics import write_json
from mpips.session.setup import assign_roles, held_run, make_cluster, make_job, shown, tell_ranks
from mpips.session.training import train


def run(line: CommandLine, started: float, comm: Comm | None = None) -> int:
    """Run a job, and return the exit code. Collective: yes.

    Args:
        line: The command line.
        started: `time.perf_counter` when the process started.
        comm: The job's ranks. Default: all ranks.

    Raises:
        CollectiveError: If the job is refused, on every rank.
        UserError: If an error occurs on this rank alone; the caller ends the job.
    """
    world = whole_world() if comm is None else comm
    if "explain" in line.flags:
        return _explain(line, world)

    def find() -> Run:
        check_world(world)
        return folder.find_run(line)

    with held_run(world, find) as found:
        return _run(found, world, started)


def _explain(line: CommandLine, comm: Comm) -> int:
    """Print the explanation of the job on these ranks, without running it. Collective: yes."""

    def find() -> Config:
        check_world(comm)
        return folder.find_config(line)[0]

    from mpips.planning.binding import binding_text, bound
    from mpips.planning.explain import explain_world

    config = on_root(comm, find)
    ranks = make_cluster(comm, config)
    world, cores = (ranks.hosts, ranks.node_of), gather_to_first(comm, bound()) or []

    def tell() -> str:
        return explain_world(config, line.question, *world) + binding_text(config, *world, cores)

    text = on_root(comm, tell)
    if comm.rank == 0:
        print(text, end="", flush=True)
    ranks.free()
    return Exit.DONE


def _run(found: Run, comm: Comm, started: float) -> int:
    config = found.config
    link = Link(comm, config.evaluators) if config.evaluators and not config.eval_only else None
    ranks = agreed(link, lambda: assign_roles(link or comm, config))
    with shown(ranks, config, link) as where:
        if config.eval_only:
            code = _evaluate_only(make_job(found, ranks, started), found)
        elif link is not None and link.evaluates:
            from mpips.session.evaluator import evaluate_for

            code = evaluate_for(found, ranks, link)
        else:
            tell_ranks(ranks, found, where, link)
            job = agreed(link, lambda: make_job(found, ranks, started))
            agreed(link, lambda: None)  # evaluators have read the data's index
            code = follow(job.problem, train(job, found, link=link)).code
    if link is not None and not link.evaluates:
        link.part(code, ranks.failures.lost)
    if link is None or not link.missing:
        ranks.free()
    if link is not None:
        link.free()
    return code


def _evaluate_only(job: Job, found: Run) -> int:
    """Evaluate given parameters. Print the result, and write it if ``--out`` is given.

    Collective: yes.
    """
    assert job.initial is not None, "config checks that one is named"
    parts, saved = None, job.initial if isinstance(job.initial, Checkpoint) else None
    if job.worker_id is not None and job.info.n_test:
        from mpips.tables.saved_rows import SavedRows

        flat = saved.read_model(job.config.eval_ema) if saved else job.initial.read_params()
        params = job.layout.views(flat, writable=False)
        part = share(job.info.n_test, job.worker_id, len(job.cluster.roles.workers))
        parts = evaluate(job, params, *part, SavedRows(saved) if saved else None)
    gathered = gather_to_first(job.cluster.comm, parts)
    means = on_root(job.cluster.comm, lambda: mean_evaluation(job, gathered or []))
    if job.config.out:
        step = saved.step if saved is not None else None
        result = {"path": str(job.initial.path), "step": step, "samples": job.info.n_test}

        def write() -> None:
            with writing_to(found.out):
                write_json(found.out / EVALUATION, {**result, "metrics": means})

        on_root(job.cluster.comm, write)
    if gathered is not None and not job.config.quiet:
        for note in found.notes:
            write_line(note)
        text = ", ".join(f"{name} {value:.6f}" for name, value in sorted(means.items()))
        write_line(f"{job.initial.path} on {job.info.n_test} held-out samples: {text}")
    return Exit.DONE
