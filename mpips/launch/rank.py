"""A rank under a supervisor: ``python -m mpips.launch.rank FOLDER (-m MODULE | PROGRAM) ...``."""

import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from mpips.errors import UserError
from mpips.launch import signs
from mpips.launch.mpirun import rank_of


def main(argv: Sequence[str]) -> int:
    """Run a module or a program as Python would, and have the supervisor see it.

    What is raised and not caught ends this process at once: Python would wait in MPI_Finalize for
    the others, who wait for it.
    """
    folder, *words = argv
    rank = rank_of(os.getpid())
    try:
        signs.begin(Path(folder), str(os.getpid() if rank is None else rank))
        if words[0] == "-m":
            sys.argv[:] = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv[:] = words
            if not sys.flags.safe_path:
                sys.path[0] = str(Path(words[0]).resolve().parent)
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        signs.tell_end(end.code if isinstance(end.code, int) else int(end.code is not None))
        raise
    except UserError as error:
        _leave(f"mpips: {error}", error.code)
    except Exception:
        _leave(traceback.format_exc().rstrip(), 1)
    signs.tell_end(0)
    return 0


def _leave(message: str, code: int) -> NoReturn:
    """Print a message, and end this process and with it the job."""
    sys.stdout.flush()
    print(message, file=sys.stderr, flush=True)
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
