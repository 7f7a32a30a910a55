"""Hosts that crash and return: namespaces of this one, with their own names and shared memory.

They have networks of their own, too, behind `join`. Needs root.
"""

import ctypes
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from mpips.errors import UserError
from mpips.launch import mpirun
from mpips.mpi.process import send_signal

# No namespace of process ids: UCX takes two of them for one host, and mixes them up.
UNSHARE = ["unshare", "--uts", "--mount", "--propagation", "slave"]
CLONE_NEWNS, CLONE_NEWNET = 0x00020000, 0x40000000  # unshare(2)
# The namespaces of networks are mounted where nobody else sees them, and go with the last process.
# Interfaces have the same name everywhere: MPICH is told of one. /sys shows those of who mounts it.
NETWORK = """\
set -e
rate=$1 here=$2 net=10.77.0
shift 2
mount --make-rslave /
mkdir -p /run/netns && mount -t tmpfs netns /run/netns && mount -t sysfs sysfs /sys
printf '127.0.0.1 localhost\\n%s.254 %s\\n' $net "$here" > /run/netns/.hosts
mount --bind /run/netns/.hosts /etc/hosts
ip link set lo up
ip link add name eth0 type bridge
ip addr add $net.254/24 dev eth0
ip link set dev eth0 up
k=0
for host; do
    k=$((k + 1)) port=port$k
    echo "$net.$k $host" >> /etc/hosts
    ip netns add "$host"
    ip link add name $port type veth peer name eth0 netns "$host"
    ip link set dev $port master eth0 up
    ip -netns "$host" link set lo up
    ip -netns "$host" addr add $net.$k/24 dev eth0
    ip -netns "$host" link set dev eth0 up
    if [ "$rate" ]; then
        shape="root tbf rate $rate burst 128kb latency 10ms"
        tc qdisc add dev $port $shape
        tc -netns "$host" qdisc add dev eth0 $shape
    fi
done
"""
# As ssh. A host notes its processes.
RSH = f"""\
#!/bin/sh
while case $1 in -*) ;; *) false ;; esac; do shift; done
here=$(dirname "$0") host=$1
shift
if [ -e "$here/$host.down" ]; then echo "no route to $host" >&2; exit 255; fi
echo $$ >> "$here/$host.pids"
way=
if [ -e "/run/netns/$host" ]; then way="ip netns exec $host"; fi
exec $way {" ".join(UNSHARE)} sh -c '
    hostname "$1" && mount -t tmpfs -o mode=1777 shm /dev/shm && exec /bin/sh -c "$2"
' sh "$host" "$*"
"""


def missing(links: bool = False) -> str:
    """Return why there can be no other host here, or none behind a link; or an empty text."""
    if links and not (shutil.which("ip") and shutil.which("tc")):
        return "links take the commands ip and tc"
    here = subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode == 0
    return "" if here else "namespaces take root"


def join(names: Sequence[str], rate: str = "") -> None:
    """Give this process, for its life, a network of hosts behind links of a rate, and no other."""
    why = missing(links=True)
    if why or ctypes.CDLL(None).unshare(CLONE_NEWNET | CLONE_NEWNS):
        raise UserError(f"no other hosts: {why or 'no namespaces'}", "root on Linux")
    words = ["sh", "-c", NETWORK, "sh", rate, platform.node(), *names]
    made = subprocess.run(words, capture_output=True, text=True, check=False)
    if made.returncode:
        raise UserError(f"no other hosts: {made.stderr.strip()}", "links between namespaces")
    # By shared memory and by reading each other's, UCX would go past the links.
    ucx = {"TLS": "tcp,self", "NET_DEVICES": "eth0", "TCP_BRIDGE_ENABLE": "y"}
    os.environ |= {f"UCX_{name}": value for name, value in ucx.items()}


def give_an_address() -> None:
    """SLURM finds no host, not even 127.0.0.1, where the machine has no address but that one."""
    if shutil.which("ip"):
        show = ["ip", "-4", "-oneline", "addr", "show", "scope", "global"]
        if not subprocess.check_output(show):
            add = ["ip", "addr", "add", "10.255.255.1/32", "dev", "lo"]
            subprocess.run(add, check=True)


def crash(rsh: Path, host: str) -> None:
    """Kill all processes of a host, which does not answer by the file of `RSH` from now on."""
    rsh.with_name(f"{host}.down").touch()
    for pid in map(int, rsh.with_name(f"{host}.pids").read_text().split()):
        for member in mpirun.family(pid):
            send_signal(member)


def revive(rsh: Path, host: str) -> None:
    """Have a host that has crashed answer again."""
    for end in ("down", "pids"):
        rsh.with_name(f"{host}.{end}").unlink()
