"""Placement of the next attempt: hosts, ranks, and options that change.

Messages:
    hosts for ..., of ... at least: A node does not answer. In a job of SLURM, the job is
        requeued when SLURM notices, or after 300 s.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from mpips.config import OPTIONS, Config
from mpips.errors import counted
from mpips.launch.hosts import Host, placed
from mpips.launch.remote_execution import Question, RemoteExecution
from mpips.launch.watch import Rank
from mpips.layout.roles import Roles, assign, default_servers, matching, training

QUIET_S = 20.0  # of a job, before its hosts are asked whether they are there
AGAIN_S = 10.0  # until a host that did not answer is asked once more: then it is lost
NONE_BEGUN = "no rank has begun there"
SILENT = 2  # starts in which no rank of a host began: it is left out of the next


class Placement:
    """The hosts of a job.

    Args:
        hosts: All of them, with the ranks that each may have.
        ranks: Of the job, as long as there are hosts for them.
        least: With how many it goes on.
        reach: The way to them.
        again: Returns the hosts as they are by now; None if they never change.
        grows: Whether the job is to have all ranks that they have then.

    Attributes:
        hosts: All of them.
        wanted: How many ranks it is to have.
        used: Hosts of the next or the current attempt, with the ranks of each.
        trouble: Why hosts cannot be used, by name.
    """

    def __init__(
        self, hosts: Sequence[Host], ranks: int, least: int, reach: RemoteExecution,
        again: Callable[[], Sequence[Host]] | None = None, grows: bool = False,
    ) -> None:  # fmt: skip
        self._again, self._grows = again, grows
        self.hosts, self.wanted, self._least, self.reach = hosts, ranks, least, reach
        self.used: list[Host] = []
        self.trouble: dict[str, str] = {}
        self._silent: dict[str, int] = {}
        self._proven = set[str]()  # hosts of the last attempt in which a run began
        self._question: Question | None = None
        self._asked = 0.0  # when it was asked
        self._missed: set[str] = set()  # hosts of the attempt that have not answered the last time
        self._lost: set[str] = set()  # nor the time before

    @property
    def ranks(self) -> int:
        """Of the next or the current attempt."""
        return sum(host.ranks for host in self.used)

    @property
    def nodes(self) -> list[str]:
        """What the host of each rank calls itself."""
        return [self.reach.nodes[h.name] for h in self.used for _ in range(h.ranks)]

    def choose(self, stop: Callable[[], object]) -> str:
        """Ask all hosts, and choose those of the next attempt; returns what lacks, if anything.

        Args:
            stop: Whether to wait no longer for answers.
        """
        self.find_again()
        self.trouble = self.reach.ask([host.name for host in self.hosts], stop, self._lost)
        self._lost = set()
        left_out = {name for name, count in self._silent.items() if count >= SILENT}
        for name in left_out - set(self.trouble):
            self.trouble[name] = NONE_BEGUN
            self._silent[name] = 0  # later it is tried again
        there = [host for host in self.hosts if host.name not in self.trouble]
        self.used = placed(there, self.wanted)
        if self.ranks >= self._least:
            return ""
        room = f"hosts for {counted(self.ranks, 'rank')}, of {self._least}"
        return f"{room} at least: {self.left_out}"

    @property
    def left_out(self) -> str:
        """Why hosts are left out, in words."""
        return "; ".join(f"{name}: {text}" for name, text in self.trouble.items())

    @property
    def summary(self) -> str:
        """Where the ranks are, and what is left out."""
        wanted = counted(self.wanted, "rank")
        where = f"{self.ranks} of {wanted} on {','.join(map(str, self.used))}"
        return f"{where} ({self.left_out})" if self.trouble else where

    def look(self, quiet_s: float, now: float) -> str:
        """Ask the hosts of a job that is quiet, and wait for nothing; returns which are lost.

        Args:
            quiet_s: How long the job has done nothing.
            now: Seconds on a clock that the looks go by.
        """
        if self._question is None:
            if quiet_s < QUIET_S:
                self._missed = set()
            elif now - self._asked >= AGAIN_S:
                self._question = self.reach.begin(host.name for host in self.used)
                self._asked = now
            return ""
        if self._question.is_open():
            return ""
        trouble = self.reach.end(self._question)
        self._question = None
        if quiet_s < QUIET_S:  # it goes on
            trouble = {}
        self._lost, self._missed = self._missed & set(trouble), set(trouble)
        return "; ".join(f"{name} does not answer: {trouble[name]}" for name in sorted(self._lost))

    def find_again(self) -> None:
        """Learn of hosts that are new."""
        if self._again is not None:
            self.hosts = self._again()
            if self._grows:
                self.wanted = sum(host.ranks for host in self.hosts)

    def ranks_with(self, names: Collection[str]) -> int:
        """Return the ranks of an attempt that has these hosts beside those of the current one."""
        there = {host.name for host in self.used}.union(names)
        return sum(h.ranks for h in placed([h for h in self.hosts if h.name in there], self.wanted))

    def settle(self, begun: bool, ranks: Iterable[Rank], ended: Iterable[str]) -> None:
        """Note what an attempt has left on its hosts: it is ended when they are asked again.

        Args:
            begun: Whether a run began.
            ranks: That have told of themselves.
            ended: The names of those that have come to their end.
        """
        if self._question is not None:
            self.reach.end(self._question)
        self._question, self._missed = None, set()
        ranks, done = list(ranks), set(ended)
        for rank in ranks:
            if rank.name not in done:
                self.reach.leave(rank.host, rank.pid, rank.started)
        seen = {rank.host for rank in ranks}
        for host in self.used:
            silent = seen and not begun and self.reach.nodes[host.name] not in seen
            self._silent[host.name] = self._silent.get(host.name, 0) + 1 if silent else 0
        if begun:
            self._proven = {host.name for host in self.used}
        elif self._proven and not seen:  # a start with other hosts, such as a launcher may refuse
            new = {host.name for host in self.used} - self._proven
            self._silent |= dict.fromkeys(new, SILENT)

    def finish(self) -> str:
        """End what the last attempt has left; returns which hosts could not be asked to."""
        trouble = self.reach.ask(list(self.reach.left))
        return "; ".join(f"{name}: {text}" for name, text in trouble.items())


def words_of(options: Mapping[str, Any]) -> list[str]:
    """Return options as words of a command line."""
    values = {k: ",".join(map(str, v)) if isinstance(v, tuple) else v for k, v in options.items()}
    return [f"{OPTIONS[name].flag}={value}" for name, value in values.items()]


def changed_options(given: Mapping[str, Any], ranks: int, nodes: Sequence[str]) -> dict[str, Any]:
    """Return the options of a job that are to be others on fewer ranks.

    A number of servers that was given shrinks as the ranks do. Servers that were placed by rank or
    by host stay so on the ranks and hosts that are left; where none of them is, they are spread
    over the nodes as if nothing had been said. As many evaluate as before. Some of the backup
    workers go, if a round would wait for nobody, and all spares.

    Args:
        given: Values of the job, without defaults.
        ranks: That it was asked for.
        nodes: The host of each rank that it has now.

    Raises:
        UserError: If a job of its mode cannot be on so few ranks.
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
        kept = tuple(rank for rank in by_hand if rank < world)
        if len(kept) == world or not kept:
            changes = {"server_ranks": (), "servers": _share(len(by_hand), ranks, world)}
        elif kept != by_hand:
            changes = {"server_ranks": kept}
            if asked is not None:
                changes["servers"] = len(kept)
    elif asked:
        changes = {"servers": _share(asked, ranks, world)}
    roles = _roles(mode, nodes, {**given, **changes})
    if roles is None:
        there = len(matching(nodes, glob))
        count = changes.get("servers", default_servers(mode, world) if asked is None else asked)
        changes["servers"] = min(count, there) or count
        if not there:
            changes["server_hosts"] = ""
        roles = _roles(mode, nodes, {**given, **changes})
        assert roles is not None, "they fit"
    if given.get("spares"):
        changes["spares"] = 0
    most = len(roles.workers) - 1
    if given.get("backup_workers", 0) > most:
        changes["backup_workers"] = most
    return {name: value for name, value in changes.items() if given.get(name) != value}


def _share(count: int, ranks: int, world: int) -> int:
    """Return the servers of `world` ranks, where `count` were asked for on `ranks`."""
    return max(1, min(world - 1, round(count * world / ranks)))


def _roles(mode: str, nodes: Sequence[str], given: Mapping[str, Any]) -> Roles | None:
    """Return who is a server then, or None where the hosts that match have too few ranks.

    Raises:
        UserError: If something else is wrong.
    """
    names, servers = sorted(set(nodes)), given.get("servers")
    glob = given.get("server_hosts") or ""
    count = default_servers(mode, len(nodes)) if servers is None else servers
    if len(matching(nodes, glob)) < count:
        return None
    node_of = [names.index(node) for node in nodes]
    return assign(mode, nodes, node_of, servers, given.get("server_ranks") or (), glob)
