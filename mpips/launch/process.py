"""A process of this host, as the kernel tells of it. Loads nothing heavy: every rank has it."""

from pathlib import Path

NAME, STATE, PARENT, SESSION, STARTED = 0, 1, 2, 4, 20  # of `stat_of`


def stat_of(pid: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` (proc(5)) behind the process id.

    Among them are its name, its state, such as ``T``, its parent and session, and when it started,
    in ticks since the boot.

    Raises:
        OSError: If there is none.
    """
    head, _, tail = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    return [head.partition("(")[2], *tail.split()]
