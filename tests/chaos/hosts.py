"""A host that crashes and returns: a namespace of this one, with its own name and shared memory.

Needs root.
"""

import shutil
import subprocess
from pathlib import Path

from mpips.launch import mpirun
from mpips.mpi.process import send_signal

# No namespace of process ids: UCX takes two of them for one host, and mixes them up.
UNSHARE = ["unshare", "--uts", "--mount", "--propagation", "slave"]
# As ssh. A host notes its processes.
RSH = f"""\
#!/bin/sh
while case $1 in -*) ;; *) false ;; esac; do shift; done
here=$(dirname "$0") host=$1
shift
if [ -e "$here/$host.down" ]; then echo "no route to $host" >&2; exit 255; fi
echo $$ >> "$here/$host.pids"
exec {" ".join(UNSHARE)} sh -c '
    hostname "$1" && mount -t tmpfs -o mode=1777 shm /dev/shm && exec /bin/sh -c "$2"
' sh "$host" "$*"
"""


def missing() -> str:
    """Return why there can be no other host here, or an empty text."""
    here = subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode == 0
    return "" if here else "namespaces take root"


def give_an_address() -> None:
    """SLURM finds no host, not even 127.0.0.1, where the machine has no address but that one."""
    if shutil.which("ip"):
        show = ["ip", "-4", "-oneline", "addr", "show", "scope", "global"]
        if not subprocess.check_output(show):
            add = ["ip", "addr", "add", "10.255.255.1/32", "dev", "lo"]
            subprocess.run(add, check=True)


def crash(rsh: Path, host: str) -> None:
    """Kill all processes of a host, which does not answer from now on.

    Args:
        rsh: The file of `RSH`.
        host: Its name.
    """
    rsh.with_name(f"{host}.down").touch()
    for pid in map(int, rsh.with_name(f"{host}.pids").read_text().split()):
        for member in mpirun.family(pid):
            send_signal(member)


def revive(rsh: Path, host: str) -> None:
    """Have a host that has crashed answer again."""
    for end in ("down", "pids"):
        rsh.with_name(f"{host}.{end}").unlink()
