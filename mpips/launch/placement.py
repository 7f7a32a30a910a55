"""Placement of the next attempt: hosts, ranks, and changed options.

Messages:
    hosts for ..., of ... at least: A node does not answer. In a job of SLURM, the job is requeued
        when SLURM notices, or after 300 s.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from mpips.config import OPTIONS, Config
from mpips.errors import counted
from mpips.launch.hosts import Host, placed
from mpips.launch.order import Order
from mpips.launch.remote_execution import Question, RemoteExecution
from mpips.launch.watch import Rank
from mpips.layout.roles import Roles, assign, default_servers, matching, training

QUIET_S = 20.0  # without progress of the job, before its hosts are asked whether they are up
AGAIN_S = 10.0  # until a host that did not answer is asked again; then it is lost
NONE_BEGUN = "no rank has begun there"
SILENT = 2  # starts in which no rank began on a host; the next start omits it


class Placement:
    """Hosts of a job, and their choice for each attempt.

    Args:
        order: The job, with its hosts.
        remote: Runs commands on the hosts.

    Attributes:
        hosts: All hosts, with the largest number of ranks of each.
        wanted: Number of ranks that the job should have.
        used: Hosts of the next or the current attempt, with the ranks of each.
        trouble: Reason why a host cannot be used, by name.
        remote: Runs commands on the hosts.
    """

    def __init__(self, order: Order, remote: RemoteExecution) -> None:
        self._order, self.remote = order, remote
        self.hosts, self.wanted = order.hosts, order.ranks
        self.used: list[Host] = []
        self.trouble: dict[str, str] = {}
        self._silent: dict[str, int] = {}
        self._proven = set[str]()  # hosts of the last attempt that began a run
        self._question: Question | None = None
        self._asked = 0.0  # time of the question
        self._missed: set[str] = set()  # hosts of the attempt that did not answer the last question
        self._lost: set[str] = set()  # hosts that did not answer the last two

    @property
    def ranks(self) -> int:
        """Number of ranks of the next or the current attempt."""
        return sum(host.ranks for host in self.used)

    @property
    def nodes(self) -> list[str]:
        """Host name of each rank, as the host itself reports it."""
        return [self.remote.nodes[h.name] for h in self.used for _ in range(h.ranks)]

    def choose(self, stop: Callable[[], object]) -> str:
        """Ask all hosts, and choose the hosts of the next attempt.

        Args:
            stop: Returns whether to stop waiting for answers.

        Returns:
            Why the job cannot start; empty if it can.
        """
        self.find_again()
        self.trouble = self.remote.ask([host.name for host in self.hosts], stop, self._lost)
        self._lost = set()
        left_out = {name for name, count in self._silent.items() if count >= SILENT}
        for name in left_out - set(self.trouble):
            self.trouble[name] = NONE_BEGUN
            self._silent[name] = 0  # a later attempt tries it again
        usable = [host for host in self.hosts if host.name not in self.trouble]
        self.used = placed(usable, self.wanted)
        if self.ranks >= self._order.least:
            return ""
        room = f"hosts for {counted(self.ranks, 'rank')}, of {self._order.least}"
        return f"{room} at least: {self.left_out}"

    @property
    def left_out(self) -> str:
        """Reasons why hosts are left out, as text."""
        return "; ".join(f"{name}: {text}" for name, text in self.trouble.items())

    @property
    def summary(self) -> str:
        """Hosts of the ranks, and hosts left out, as text."""
        wanted = counted(self.wanted, "rank")
        where = f"{self.ranks} of {wanted} on {','.join(map(str, self.used))}"
        return f"{where} ({self.left_out})" if self.trouble else where

    def look(self, quiet_s: float, now: float) -> str:
        """Ask the hosts of a job without progress, and do not wait. Return the lost hosts as text.

        Args:
            quiet_s: Seconds since the job's last progress.
            now: Seconds on the clock of all calls.
        """
        if self._question is None:
            if quiet_s < QUIET_S:
                self._missed = set()
            elif now - self._asked >= AGAIN_S:
                self._question = self.remote.begin(host.name for host in self.used)
                self._asked = now
            return ""
        if self._question.is_open():
            return ""
        trouble = self.remote.end(self._question)
        self._question = None
        if quiet_s < QUIET_S:  # the job makes progress again
            trouble = {}
        self._lost, self._missed = self._missed & set(trouble), set(trouble)
        return "; ".join(f"{name} does not answer: {trouble[name]}" for name in sorted(self._lost))

    def find_again(self) -> None:
        """Read the current hosts, if they can change."""
        if self._order.again is not None:
            self.hosts = self._order.again()
            if self._order.grows:
                self.wanted = sum(host.ranks for host in self.hosts)

    def ranks_with(self, names: Collection[str]) -> int:
        """Return the number of ranks of an attempt that also uses these hosts."""
        there = {host.name for host in self.used}.union(names)
        return sum(h.ranks for h in placed([h for h in self.hosts if h.name in there], self.wanted))

    def settle(self, begun: bool, ranks: Iterable[Rank], ended: Iterable[str]) -> None:
        """Record how an attempt ended on its hosts.

        The next question ends processes that are left there.

        Args:
            begun: Whether a run began.
            ranks: Ranks that reported to the supervisor.
            ended: Names of the ranks that reported an exit code.
        """
        if self._question is not None:
            self.remote.end(self._question)
        self._question, self._missed = None, set()
        ranks, done = list(ranks), set(ended)
        for rank in ranks:
            if rank.name not in done:
                self.remote.leave(rank.host, rank.pid, rank.started)
        seen = {rank.host for rank in ranks}
        for host in self.used:
            silent = seen and not begun and self.remote.nodes[host.name] not in seen
            self._silent[host.name] = self._silent.get(host.name, 0) + 1 if silent else 0
        if begun:
            self._proven = {host.name for host in self.used}
        elif self._proven and not seen:  # a launcher may refuse the other hosts of this start
            new = {host.name for host in self.used} - self._proven
            self._silent |= dict.fromkeys(new, SILENT)

    def finish(self) -> str:
        """End processes that the last attempt left. Return the hosts without an answer, as text."""
        trouble = self.remote.ask(list(self.remote.left))
        return "; ".join(f"{name}: {text}" for name, text in trouble.items())


def words_of(options: Mapping[str, Any]) -> list[str]:
    """Return options as words of a command line."""
    values = {k: ",".join(map(str, v)) if isinstance(v, tuple) else v for k, v in options.items()}
    return [f"{OPTIONS[name].flag}={value}" for name, value in values.items()]


def changed_options(given: Mapping[str, Any], ranks: int, nodes: Sequence[str]) -> dict[str, Any]:
    """Return the options of a job that change on fewer ranks.

    The number of servers shrinks in proportion to the ranks, if the job gives one. Servers at given
    ranks or hosts stay there, if these remain. If none remains, the servers are spread over the
    nodes as by default. The number of evaluators stays. Backup workers are reduced, so that a round
    waits for at least one worker. Spares are removed.

    Args:
        given: Options of the job, without defaults.
        ranks: Number of ranks that the job asks for.
        nodes: Host of each rank in the next attempt.

    Raises:
        UserError: If the mode needs more ranks.
    """
    evaluators = given.get("evaluators") or 0
    nodes, ranks = nodes[: training(len(nodes), evaluators)], ranks - evaluators
    world = len(nodes)
    if world == ranks:
        return {}
    mode = given.get("mode", Config.mode)
    by_hand, glob = tuple(given.get("server_ranks") or ()), given.get("server_hosts") or ""
    asked = given.get("servers")
    changes: dict[str, Any] = {}
    if by_hand:
        remaining = tuple(rank for rank in by_hand if rank < world)
        if len(remaining) == world or not remaining:
            changes = {"server_ranks": (), "servers": _share(len(by_hand), ranks, world)}
        elif remaining != by_hand:
            changes = {"server_ranks": remaining, "servers": asked and len(remaining)}
    elif asked:
        changes = {"servers": _share(asked, ranks, world)}
    roles = _roles(mode, nodes, {**given, **changes})
    if roles is None:
        matches = len(matching(nodes, glob))
        count = changes.get("servers", default_servers(mode, world) if asked is None else asked)
        changes["servers"] = min(count, matches) or count
        if not matches:
            changes["server_hosts"] = ""
        roles = _roles(mode, nodes, {**given, **changes})
        assert roles is not None, "they fit"
    if given.get("spares"):
        changes["spares"] = 0
    most_backups = len(roles.workers) - 1
    if given.get("backup_workers", 0) > most_backups:
        changes["backup_workers"] = most_backups
    return {name: value for name, value in changes.items() if given.get(name) != value}


def _share(count: int, ranks: int, world: int) -> int:
    """Return the number of servers on `world` ranks, if the job asks for `count` on `ranks`."""
    return max(1, min(world - 1, round(count * world / ranks)))


def _roles(mode: str, nodes: Sequence[str], given: Mapping[str, Any]) -> Roles | None:
    """Return the roles, or None if the hosts that match have too few ranks for the servers.

    Raises:
        UserError: If another setting is wrong.
    """
    names, servers = sorted(set(nodes)), given.get("servers")
    glob = given.get("server_hosts") or ""
    count = default_servers(mode, len(nodes)) if servers is None else servers
    if len(matching(nodes, glob)) < count:
        return None
    node_of = [names.index(node) for node in nodes]
    return assign(mode, nodes, node_of, servers, given.get("server_ranks") or (), glob)
