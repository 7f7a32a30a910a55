"""Judgement of the launch: SLURM's variables, start and compilation time."""

from collections.abc import Mapping, Sequence

from mpips.errors import counted
from mpips.tools.doctor.finding import Finding, ok, warn, warn_if

SLOW_START_S = 60.0
SLOW_LOADING_S = 5.0


def judge_slurm(variables: Mapping[str, str], world: int, hosts: int, cores: int) -> list[Finding]:
    """Judge what SLURM says that it gave against what the world has.

    Args:
        variables: Of rank 0's environment.
        world: Number of ranks.
        hosts: Number of hosts with ranks.
        cores: Cores that rank 0 may run on.
    """
    if "SLURM_JOB_ID" not in variables:
        return [ok("slurm", "not in a SLURM job")]
    tasks, nodes, each = (
        int(text) if (text := variables.get(name, "")).isdigit() else 0
        for name in ("SLURM_NTASKS", "SLURM_JOB_NUM_NODES", "SLURM_CPUS_PER_TASK")
    )
    found = []
    given = f"{counted(world, 'rank')} in an allocation of {counted(tasks, 'task')}"
    if tasks > world and nodes != tasks:  # mpirun's own step has one task a node
        remedy = f"start {counted(tasks, 'rank')}, or ask for --ntasks={world}"
        found.append(warn("slurm", given, remedy))
    if 0 < tasks < world and tasks != hosts:
        remedy = f"ask for --ntasks={world}, or start {counted(tasks, 'rank')}"
        found.append(warn("slurm", given, remedy))
    if nodes > hosts:
        remedy = f"ask for --nodes={hosts}, or spread the ranks: --ntasks-per-node"
        found.append(warn("slurm", f"ranks on {hosts} of {nodes} nodes", remedy))
    if each > cores:
        remedy = "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK before srun, or give srun -c"
        found.append(warn("slurm", f"{cores} cores a rank, where {each} were asked for", remedy))
    where = f"{counted(world, 'rank')} on {counted(hosts, 'node')}, as asked for"
    return found or [ok("slurm", f"job {variables['SLURM_JOB_ID']}: {where}")]


def judge_start(seconds: Sequence[float]) -> Finding:
    """Judge how long the ranks took from their first line of Python until MPI was up."""
    longest = max(seconds)
    text = f"Python and MPI were up after {longest:.1f} s"
    remedy = "put the virtual environment on a disk of each node (sbcast, $TMPDIR)"
    return warn_if(longest > SLOW_START_S, "start", text, remedy, longest_s=longest)


def judge_kernels(compiled_s: float, loaded_s: float, turns: float) -> Finding:
    """Judge how long the compiled loops took to get.

    Args:
        compiled_s: On the first rank of each host, the longest.
        loaded_s: On the others, which should find them in the cache.
        turns: Ranks that share a core.
    """
    text = f"compiled or loaded in {compiled_s:.1f} s, by a host's other ranks in {loaded_s:.1f} s"
    figures = {"compiled_s": compiled_s, "loaded_s": loaded_s}
    remedy = "set XDG_CACHE_HOME to a folder on a local disk that each rank can write"
    late = loaded_s > SLOW_LOADING_S * max(1.0, turns)
    return warn_if(late, "kernels", text, remedy, **figures)
