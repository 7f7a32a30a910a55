"""Training of a model: ``mpirun -n 8 python -m mpips.train [JOB.toml] [--option value ...]``."""

import gc
import time

STARTED = time.perf_counter()

from mpips.mpi import signals  # noqa: E402  (handlers are installed before the heavy imports)

if __name__ == "__main__":
    signals.install()
    gc.disable()  # during the imports, which leave no garbage

import os  # noqa: E402
import sys  # noqa: E402
from collections.abc import Sequence  # noqa: E402

from mpips.config import command_line  # noqa: E402
from mpips.errors import Exit, UserError, complain  # noqa: E402

LAUNCHED = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")


def launched() -> str | None:
    """Return the launcher's number of this process; None without a launcher."""
    return next((os.environ[name] for name in LAUNCHED if name in os.environ), None)


def main(argv: Sequence[str]) -> int:
    """Run one job on all ranks of the world; returns the exit code.

    Help and the resolved job do not start MPI. Without a launcher, neither does a mistake on the
    command line.
    """
    rank = launched()
    try:
        line = command_line.parse_command_line(argv)
    except UserError as error:
        return refuse(error, rank)
    text = command_line.requested_text(line, None)
    if text is None and rank is not None and not line.needs_no_world:
        return _start(line)  # one rank reads the job file: the others might not find it
    if rank not in (None, "0"):
        return Exit.DONE
    try:
        if text is None:
            text = _first_look(line)
    except UserError as error:
        return refuse(error, None)
    if text is None:
        return _start(line)
    print(text, end="")
    return Exit.DONE


def _first_look(line: command_line.CommandLine) -> str | None:
    """Resolve the job. Returns a requested text, or None to continue with the run.

    `--explain` for a given world needs no running one.

    Raises:
        UserError: If the command line, the job file or the run to continue is invalid, or the
            checked gradient is wrong.
    """
    from mpips.session import folder

    gc.enable()
    config = folder.find_config(line)[0]
    text = command_line.requested_text(line, config)
    if text is None and "explain" in line.flags:
        from mpips.planning.explain import explain_alone

        return explain_alone(config, line.question)
    if text is None and "check_gradient" in line.flags:
        from mpips.planning.needs import memory_bytes
        from mpips.problems.gradient_check import check_gradient

        text, error = check_gradient(config, memory_bytes())
        if error is not None:
            print(text, end="", flush=True)
            raise error
    return text


def refuse(error: UserError, rank: str | None) -> int:
    """Print an error of all ranks once, and return its exit code.

    Args:
        error: The error.
        rank: The launcher's number of this process; None without a launcher.

    Collective: yes, with a launcher.
    """
    if rank is not None:
        from mpips.mpi.collectives import barrier
        from mpips.mpi.start import whole_world

        world = whole_world()
        if world.size > 1 or not rank:  # in several worlds of one rank, the launcher's number
            rank = str(world.rank)
        barrier(world)  # launchers may kill the other ranks when the first one exits
    if rank in (None, "0"):
        complain(error)
    if rank is not None:
        barrier(world)
    return error.code


def _start(line: command_line.CommandLine) -> int:
    from mpips.launch import heartbeat
    from mpips.mpi import abort
    from mpips.mpi.collective_errors import CollectiveError
    from mpips.session import run as session

    gc.freeze()  # imported objects live to the end: neither collections nor the exit visit them
    gc.enable()
    try:
        code = session.run(line, STARTED)
        if abort.any_died():
            heartbeat.report_exit(code)
            abort.leave(code)
        return code
    except CollectiveError as error:
        return refuse(error, launched() or "")
    except BaseException as error:  # only this rank raised it
        message = str(error) if isinstance(error, UserError) else abort.raised(error)
        heartbeat.report_exit(abort.code_of(error))
        abort.abort(message, abort.code_of(error))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
