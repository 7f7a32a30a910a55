"""Checks that all ranks of a world make together."""

import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mpips.checkpoint.run_folder import claim, is_claimed, release
from mpips.errors import Exit, UserError, counted, write_line
from mpips.mpi import abort
from mpips.mpi.collectives import broadcast, clock_skews, first_ranks
from mpips.mpi.start import check_world, whole_world
from mpips.mpi.world import Cluster
from mpips.optim import make_rule, warm
from mpips.tools.doctor import machine, network, storage, trials
from mpips.tools.doctor.facts import Facts, gather_facts, process_age_s
from mpips.tools.doctor.report import Finding, Options, Report, Watch, fail, ok, warn

COMPILING_S = 180.0
HOW = "mpirun -n 8 python -m mpips doctor"


@dataclass
class Visit:
    """State that the checks share.

    Attributes:
        cluster: The ranks.
        options: Options of the examination.
        facts: Facts of every rank, on rank 0; empty on the others.
    """

    cluster: Cluster
    options: Options
    facts: list[Facts] = field(default_factory=list)


class Check(NamedTuple):
    """One check.

    Attributes:
        name: Name, for the finding if the check fails or exceeds its time limit.
        examine: Function that all ranks call; returns the rank's result.
        judge: Function that rank 0 calls with the results of all ranks; returns the findings.
        least_s: Smallest time limit in seconds.
    """

    name: str
    examine: Callable[[Visit], Any]
    judge: Callable[[Visit, list[Any]], Iterable[Finding]]
    least_s: float = 0.0


def judge_launch(
    visit: Visit, parts: Sequence[tuple[Facts, machine.Library, float]]
) -> list[Finding]:
    """Judge the world, its MPI library and its hosts."""
    ranks = visit.cluster
    visit.facts = [part[0] for part in parts]
    hosts, first = len(set(ranks.hosts)), visit.facts[0]
    slurm = machine.judge_slurm(first.variables, ranks.world, hosts, len(first.cores))
    return [
        _judge_world(ranks, visit.options.node_size),
        *slurm,
        *machine.judge_libraries([part[1] for part in parts], ranks.nodes),
        machine.judge_start([part[2] for part in parts]),
        *machine.judge_machines(visit.facts),
    ]


def _judge_world(ranks: Cluster, node_size: int) -> Finding:
    text = f"{counted(ranks.world, 'rank')} on {counted(len(set(ranks.hosts)), 'host')}"
    if ranks.world == 1:
        return warn("world", "1 rank, which trains alone", f"{HOW}, or srun in a job")
    sizes = sorted({ranks.node_of.count(node) for node in ranks.node_of})
    text += f", {counted(ranks.nodes, 'node')} of {' or '.join(map(str, sizes))}"
    return ok("world", text + (" by --node-size" if node_size else ""))


def try_storage(visit: Visit) -> tuple[list[Finding], bool, bool]:
    """Try the folder of runs. Collective: yes.

    Returns:
        The findings of rank 0, empty elsewhere; on each host's first rank, whether it sees the
        folder, and whether it sees that rank 0 has locked it.
    """
    ranks = visit.cluster
    folder, found = None, list[Finding]()
    if ranks.rank == 0:
        folder, found = storage.try_folder(visit.options.out, visit.options.checkpoint_bytes)
    if folder is not None:
        with contextlib.suppress(OSError, UserError):  # then other hosts find it unlocked
            claim(folder)
    ranks.barrier()
    folder = broadcast(ranks.comm, folder)
    seen = held = False
    if folder is not None and ranks.rank in first_ranks(ranks.hosts):
        seen = storage.wait_for(folder)
        held = seen and is_claimed(folder)
    ranks.barrier()
    if folder is not None and ranks.rank == 0:
        release()
        shutil.rmtree(folder, ignore_errors=True)
    return found, seen, held


def judge_storage(
    visit: Visit, parts: Sequence[tuple[list[Finding], bool, bool]]
) -> Iterator[Finding]:
    """Judge the results of `try_storage`."""
    yield from parts[0][0]
    if not parts[0][1]:  # rank 0 could not create a folder
        return
    firsts = first_ranks(visit.cluster.hosts)
    hosts = [visit.cluster.hosts[rank] for rank in firsts]
    yield storage.judge_seen(hosts, [parts[rank][1] for rank in firsts])
    if len(hosts) > 1 and parts[firsts[1]][1]:
        yield storage.judge_remote_lock(hosts[1], parts[firsts[1]][2])


def load_kernels(visit: Visit) -> tuple[bool, float]:
    """Compile loops on each host's first rank, then load them on the others. Collective: yes.

    Returns:
        Whether this is the first rank of its host, and the seconds that it needed.
    """
    ranks, spent = visit.cluster, 0.0
    first = ranks.rank in first_ranks(ranks.hosts)
    for turn in (True, False):
        if first is turn:
            start = time.perf_counter()
            for name in ("sgd", "adam"):
                warm(make_rule(name), "float32")
            spent = time.perf_counter() - start
        ranks.barrier()
    return first, spent


def _judge_kernels(visit: Visit, parts: Sequence[tuple[bool, float]]) -> list[Finding]:
    compiled = max(s for was_first, s in parts if was_first)
    loaded = max((s for was_first, s in parts if not was_first), default=0.0)
    turns = max(visit.cluster.hosts.count(f.host) / len(f.cores) for f in visit.facts)
    return [machine.judge_kernels(compiled, loaded, turns)]


def judge_memory(visit: Visit, parts: Sequence[network.Need]) -> list[Finding]:
    """Judge the memory for the windows of a model on each host."""
    needs = dict(zip(visit.cluster.hosts, parts, strict=True))
    return network.judge_needs(needs, visit.options.parameters)


def _judge_remote_get(visit: Visit, parts: Sequence[network.RemoteGet | None]) -> list[Finding]:
    if visit.cluster.nodes == 1:
        return [ok("remote get", "one node, none needed (--node-size K plays several)")]
    return network.judge_remote_get(next(filter(None, parts)))


def _judge_links(visit: Visit, parts: Sequence[list[network.Link]]) -> list[Finding]:
    left_out = max(0, visit.cluster.nodes - 1 - len(network.pairs(visit.cluster.node_of)))
    return network.judge_links(parts[0], visit.facts[0].networks, left_out)


CHECKS = (
    Check(
        "launch",
        lambda visit: (gather_facts(), trials.gather_library(), process_age_s()),
        judge_launch,
    ),
    Check(
        "clocks",
        lambda visit: clock_skews(visit.cluster),
        lambda visit, parts: [network.judge_clocks(parts[0])],
    ),
    Check("storage", try_storage, judge_storage),
    Check("kernels", load_kernels, _judge_kernels, COMPILING_S),
    Check(
        "memory",
        lambda visit: trials.gather_need(visit.cluster, visit.options.parameters),
        judge_memory,
    ),
    Check(
        "window",
        lambda visit: trials.try_window(visit.cluster),
        lambda visit, parts: [network.judge_window(parts)],
    ),
    Check("remote get", lambda visit: trials.try_remote_get(visit.cluster), _judge_remote_get),
    Check("links", lambda visit: trials.try_links(visit.cluster), _judge_links),
    Check("ulfm", lambda visit: trials.try_ulfm(visit.cluster), lambda visit, parts: [parts[0]]),
)


def run(options: Options, watch: Watch, report: Report, checks: Sequence[Check] = CHECKS) -> int:
    """Run the checks; rank 0 prints the report. Collective: yes.

    Args:
        options: Options of the examination.
        watch: Time limit of each check.
        report: Gets the findings on rank 0.
        checks: The checks, in their order.

    Returns:
        The exit code, the same on every rank.
    """
    with watch.over("world"):
        try:
            check_world(whole_world())
        except UserError as error:
            report.add([refused("world", error)])  # every rank is a world of its own
            return report.end()
        ranks = Cluster(whole_world(), options.node_size)
        ranks.limit_threads()
        visit = Visit(ranks, options)
        report.title = f"{counted(ranks.world, 'rank')} on {counted(ranks.nodes, 'node')}"
        report.shown = ranks.rank == 0
        watch.then = lambda text: abort.abort(text, Exit.FAILED)
    for check in checks:
        with watch.over(check.name, check.least_s):
            report.add(_run_check(visit, check))
    with watch.over("end"):
        code: int = broadcast(ranks.comm, report.end() if ranks.rank == 0 else None)
        ranks.barrier()
        ranks.free()
    return code


def _run_check(visit: Visit, check: Check) -> list[Finding]:
    """Run one check; an exception on any rank becomes a finding. Collective: yes."""
    ranks = visit.cluster
    part: Any = None
    problem: Finding | None = None
    try:
        part = check.examine(visit)
    except UserError as error:
        problem = refused(check.name, error)
    except Exception as error:
        problem = _raised(check, f"rank {ranks.rank} on {ranks.hosts[ranks.rank]}", error)
        write_line(f"mpips doctor, {check.name}: {problem.found}", sys.stderr)
    parts = ranks.gather((part, problem))
    ranks.barrier()
    if parts is None:
        return []
    if problems := {p.found: p for _, p in parts if p is not None}:
        return list(problems.values())
    try:
        return list(check.judge(visit, [part for part, _ in parts]))
    except Exception as error:  # such as facts that an earlier check did not gather
        return [_raised(check, "rank 0, judging", error)]


def _raised(check: Check, where: str, error: Exception) -> Finding:
    text = f"{where}: {type(error).__name__}: {error}"
    return fail(check.name, text, "mend what it names, and run the doctor again")


def refused(check: str, error: UserError) -> Finding:
    """Turn a user's error into a finding."""
    text, _, remedy = str(error).rpartition("; ")
    return fail(check, text or remedy, remedy if text else "see mpips guide troubleshooting")
