"""Rank under a supervisor: ``python -m mpips.launch.rank FOLDER (-m MODULE | PROGRAM) ...``."""

import os
import runpy
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from mpips.errors import Exit, UserError, write_line
from mpips.launch import heartbeat
from mpips.mpi.excepthook import located, text_of
from mpips.mpi.process import rank_in

TURN_S, TURNS_S = 0.3, 3.0


def main(argv: Sequence[str]) -> NoReturn:
    """Run a module or a program as Python would, and report it to the supervisor.

    An uncaught exception ends this process at once. Otherwise Python would wait in MPI_Finalize for
    the other ranks, which wait for this one.

    Args:
        argv: The supervisor's folder, and the words of `run`.
    """
    folder, *words = argv
    rank = rank_in(os.environ)
    try:
        heartbeat.begin(Path(folder), str(os.getpid() if rank is None else rank))
        heartbeat.end_when_over(Path(folder))
        run(words)
        end = SystemExit(Exit.DONE)
    except SystemExit as ended:
        end = ended
    except UserError as error:
        _leave(f"mpips: {located(error, error.__traceback__)}", error.code, rank or 0)
    except Exception as error:
        _leave(*_end_by(error), rank or 0)
    code = end.code & 255 if isinstance(end.code, int) else Exit.FAILED * (end.code is not None)
    heartbeat.report_exit(code)
    _leave_the_dead(code)
    raise end


def run(words: Sequence[str]) -> None:
    """Run ``-m MODULE`` or a program, with its options, in this process as Python would."""
    if words[0] == "-m":
        sys.argv[:] = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = words
        if not sys.flags.safe_path:
            sys.path[0] = str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")


def _end_by(error: Exception) -> tuple[str, int]:
    """Return the message of an uncaught exception, and the exit code that it sets."""
    abort = sys.modules.get("mpips.mpi.abort")  # absent if the program has not started MPI
    if abort is None or not abort.is_death(error):
        return text_of(error), Exit.FAILED
    message = abort.raised(error)  # of one of the living ranks
    return message and f"mpips: {message}", abort.code_of(error)


def _leave_the_dead(code: int) -> None:
    """End this process directly, if its run has continued without ranks that died."""
    abort = sys.modules.get("mpips.mpi.abort")  # absent if the program has not started MPI
    if abort is not None and abort.any_died():
        abort.leave(code)


def _leave(message: str, code: int, rank: int) -> NoReturn:
    """Print a message, and end this process and so the job.

    All ranks may raise the same error. Rank 0 prints it first. The others wait, and are ended
    meanwhile. If MPI does not end them, they see that another rank has failed, and print nothing.
    """
    time.sleep(min(TURN_S * rank, TURNS_S))
    sys.stdout.flush()
    if message and not heartbeat.another_failed():
        write_line(message, sys.stderr)
    heartbeat.report_exit(code)
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
