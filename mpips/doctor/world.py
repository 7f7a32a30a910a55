"""The checks that the ranks of one world make together, one after the other."""

import contextlib
import fcntl
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mpips.cluster import clocks, ending
from mpips.cluster.library import check_world
from mpips.cluster.start import whole_world
from mpips.cluster.window import Window
from mpips.cluster.world import Cluster
from mpips.doctor import library, links, memory, network, software, storage, windows
from mpips.doctor.facts import Facts, gather_facts, process_age_s
from mpips.doctor.finding import Finding, fail, ok, warn
from mpips.doctor.launcher import judge_kernels, judge_slurm, judge_start
from mpips.doctor.machine import judge_machines
from mpips.doctor.network import judge_clocks
from mpips.doctor.options import Options
from mpips.doctor.report import Report
from mpips.doctor.watch import Watch
from mpips.errors import UserError, counted, write_line
from mpips.optim import make_rule, warm

COMPILING_S = 180.0
HOW = "mpirun -n 8 python -m mpips.doctor"


@dataclass
class Visit:
    """What the checks share.

    Attributes:
        cluster: The ranks.
        options: What to do.
        facts: Of every rank; empty but on rank 0.
        window: What the check of windows has made.
    """

    cluster: Cluster
    options: Options
    facts: list[Facts] = field(default_factory=list)
    window: Window | None = None

    def tell(self, value: Any) -> Any:
        """Return rank 0's value on all ranks. Collective: yes."""
        ranks = self.cluster
        if ranks.rank == 0:
            for rank in range(1, ranks.world):
                ranks.send(rank, "tell", value)
            return value
        received: list[Any] = []

        def heard() -> bool:
            received.extend(payload for _, _, payload in ranks.poll())
            return bool(received)

        ranks.wait(heard)
        return received[0]


class Check(NamedTuple):
    """One check.

    Attributes:
        name: Its name, which the line has if it does not end.
        run: What all ranks do; the findings that it returns on rank 0 count.
        least_s: Seconds that it may take even if the limit is less.
    """

    name: str
    run: Callable[[Visit], Sequence[Finding]]
    least_s: float = 0.0


def check_launch(visit: Visit) -> list[Finding]:
    """Look at the world, its MPI, its hosts."""
    ranks = visit.cluster
    parts = ranks.gather((gather_facts(), library.gather_library(), process_age_s()))
    if parts is None:
        return []
    visit.facts = [part[0] for part in parts]
    hosts, first = len(set(ranks.hosts)), visit.facts[0]
    slurm = judge_slurm(first.variables, ranks.world, hosts, len(first.cores))
    return [
        _judge_world(ranks, visit.options.node_size),
        *slurm,
        *software.judge_libraries([part[1] for part in parts], ranks.nodes),
        judge_start([part[2] for part in parts]),
        *judge_machines(visit.facts),
    ]


def _judge_world(ranks: Cluster, node_size: int) -> Finding:
    text = f"{counted(ranks.world, 'rank')} on {counted(len(set(ranks.hosts)), 'host')}"
    if ranks.world == 1:
        return warn("world", "1 rank, which trains alone", f"{HOW}, or srun in a job")
    sizes = sorted({ranks.node_of.count(node) for node in ranks.node_of})
    text += f", {counted(ranks.nodes, 'node')} of {' or '.join(map(str, sizes))}"
    return ok("world", text + (" by --node-size" if node_size else ""))


def check_clocks(visit: Visit) -> list[Finding]:
    """Compare the hosts' clocks."""
    return [judge_clocks(clocks.skews(visit.cluster))]


def check_storage(visit: Visit) -> list[Finding]:
    """Try the folder of runs: on rank 0, and whether the other hosts see it and its locks."""
    ranks = visit.cluster
    found: list[Finding] = []
    folder: Path | None = None
    if ranks.rank == 0:
        folder, found = storage.try_folder(visit.options.out, visit.options.checkpoint_bytes)
    lock = open(folder / "afar", "a") if folder else None  # noqa: SIM115  (closed below)
    if lock is not None:
        with contextlib.suppress(OSError):  # then the others tell that it is free
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    folder = visit.tell(folder)
    firsts = clocks.first_ranks(ranks)
    mine = None
    if folder is not None and ranks.rank in firsts:
        seen = storage.wait_for(folder)
        mine = seen, storage.lock_state(folder / "afar") if seen else storage.NONE
    parts = ranks.gather(mine)
    if parts is None or folder is None or lock is None:
        return found
    lock.close()
    storage.remove(folder)
    hosts = [ranks.hosts[r] for r in firsts]
    found.append(storage.judge_seen(hosts, [parts[r][0] for r in firsts]))
    if len(hosts) > 1 and parts[firsts[1]][0]:
        found.append(storage.judge_lock_afar(hosts[1], parts[firsts[1]][1]))
    return found


def check_kernels(visit: Visit) -> list[Finding]:
    """Compile the loops once a host, and load them on the other ranks from the cache."""
    ranks = visit.cluster
    first = ranks.rank in clocks.first_ranks(ranks)
    spent = 0.0
    for turn in (True, False):
        if first is turn:
            start = time.perf_counter()
            for name in ("sgd", "adam"):
                warm(make_rule(name), "float32")
            spent = time.perf_counter() - start
        ranks.barrier()
    parts = ranks.gather((first, spent))
    if parts is None:
        return []
    compiled = max(s for was_first, s in parts if was_first)
    loaded = max((s for was_first, s in parts if not was_first), default=0.0)
    turns = max(ranks.hosts.count(f.host) / len(f.cores) for f in visit.facts)
    return [judge_kernels(compiled, loaded, turns)]


def check_memory(visit: Visit) -> list[Finding]:
    """Compare what the windows of a model need with what each host has."""
    ranks, parameters = visit.cluster, visit.options.parameters
    parts = ranks.gather(windows.gather_need(ranks, parameters))
    if parts is None:
        return []
    needs = dict(zip(ranks.hosts, parts, strict=True))
    return [
        *memory.judge_needs(needs, parameters),
        *memory.judge_quota(visit.facts, needs),
    ]


def check_window(visit: Visit) -> list[Finding]:
    """Make a window, and read what others wrote in it."""
    ranks = visit.cluster
    visit.window, seconds = windows.open_window(ranks)
    parts = ranks.gather((windows.wrong_reads(ranks, visit.window), seconds))
    if parts is None:
        return []
    wrong = {rank: part[0] for rank, part in enumerate(parts)}
    return [memory.judge_window(wrong, max(part[1] for part in parts))]


def check_far_reads(visit: Visit) -> list[Finding]:
    """Read from another node, from an owner that polls and from one that computes."""
    ranks = visit.cluster
    if ranks.nodes == 1:
        return [ok("far get", "one node, none needed (--node-size K plays several)")]
    if visit.window is None:
        return [fail("far get", "not tried without a window", "see window above")]
    parts = ranks.gather(windows.try_far_get(ranks, visit.window))
    return [] if parts is None else memory.judge_far_get(next(filter(None, parts)))


def close_window(visit: Visit) -> list[Finding]:
    """Free the window."""
    if visit.window is not None:
        visit.cluster.barrier()
        visit.window.free()
    return []


def check_links(visit: Visit) -> list[Finding]:
    """Measure links, one after the other."""
    ranks = visit.cluster
    pairs = network.pairs(ranks.node_of)
    found = [links.try_link(ranks, pair) for pair in pairs]
    if ranks.rank != 0:
        return []
    left_out = max(0, ranks.nodes - 1 - len(pairs))
    measured = [link for link in found if link is not None]
    return network.judge_links(measured, visit.facts[0].networks, left_out)


def check_ulfm(visit: Visit) -> list[Finding]:
    """Find out whether dead ranks can be survived."""
    return library.try_ulfm(visit.cluster)


CHECKS = (
    Check("launch", check_launch),
    Check("clocks", check_clocks),
    Check("storage", check_storage),
    Check("kernels", check_kernels, COMPILING_S),
    Check("memory", check_memory),
    Check("window", check_window),
    Check("far get", check_far_reads),
    Check("closing the window", close_window),
    Check("links", check_links),
    Check("ulfm", check_ulfm),
)


def run(options: Options, watch: Watch, report: Report, checks: Sequence[Check] = CHECKS) -> int:
    """Make the checks; rank 0 prints the report. Collective: yes.

    Args:
        options: What to do.
        watch: Watches over each check.
        report: Filled on rank 0.
        checks: What to do, in this order.

    Returns:
        The exit code, the same on every rank.
    """
    with watch.over("world"):
        try:
            check_world(whole_world())
        except UserError as error:
            report.add([refused("world", error)])  # in each of several worlds of one rank
            return report.end()
        ranks = Cluster(whole_world(), options.node_size)
        ranks.limit_threads()
        visit = Visit(ranks, options)
        report.title = f"{counted(ranks.world, 'rank')} on {counted(ranks.nodes, 'node')}"
        report.shown = ranks.rank == 0
        watch.then(lambda text: ending.abort(text, 1))
    for check in checks:
        with watch.over(check.name, check.least_s):
            report.add(_take(visit, check))
    with watch.over("end"):
        code: int = visit.tell(report.end() if ranks.rank == 0 else None)
        ranks.barrier()
        ranks.free()
    return code


def _take(visit: Visit, check: Check) -> list[Finding]:
    """Make one check; an exception on any rank is what it has found. Collective: yes."""
    ranks = visit.cluster
    found: Sequence[Finding] = []
    problem: Finding | None = None
    try:
        found = check.run(visit)
    except UserError as error:
        problem = refused(check.name, error)
    except Exception as error:
        text = f"rank {ranks.rank} on {ranks.hosts[ranks.rank]}: {type(error).__name__}: {error}"
        problem = fail(check.name, text, "mend what it names, and run the doctor again")
        write_line(f"mpips.doctor, {check.name}: {text}", sys.stderr)
    problems = ranks.gather(problem)
    ranks.barrier()
    told_once = {p.found: p for p in problems or [] if p is not None}
    return [*found, *told_once.values()]


def refused(check: str, error: UserError) -> Finding:
    """Return an error that is meant for a person as a finding."""
    text, _, remedy = str(error).rpartition("; ")
    return fail(check, text or remedy, remedy if text else "see mpips guide troubleshooting")
