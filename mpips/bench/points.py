"""What worlds have measured for ``--scale``: times and memory, in files, one or several joined."""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from mpips.errors import UserError


class Series(NamedTuple):
    """What points of one line have in common.

    Attributes:
        mode: "async": every worker pulls, computes and pushes, and servers apply; "sync": a round.
        hosts: Number of real hosts.
        ranks: Number of ranks.
        servers: Number of servers, 0 in mode sync.
        crowded: Whether ranks outnumber the cores of their host.
    """

    mode: str
    hosts: int
    ranks: int
    servers: int
    crowded: bool

    @property
    def workers(self) -> int:
        """Number of workers."""
        return self.ranks - self.servers


@dataclass(frozen=True)
class Point:
    """The time of a step.

    Attributes:
        series: In which world.
        size: Bytes of the parameters.
        step_s: Seconds in which every worker made one step; the median of the repeats.
    """

    series: Series
    size: int
    step_s: float

    @property
    def push_s(self) -> float:
        """Seconds in which one worker's gradient was exchanged, on average."""
        return self.step_s / self.series.workers


@dataclass(frozen=True)
class Memory:
    """What a server holds beyond its shard, after an exchange.

    Attributes:
        hosts: Number of real hosts.
        nodes: Number of nodes, which is larger where ranks of a host act as if far away.
        ranks: Number of ranks.
        servers: Number of servers; the one that holds most counts.
        size: Bytes of the parameters.
        beyond: Bytes in use by the process and by no other, what it shares with its node's
            workers apart: their gradients are in their own memory.
    """

    hosts: int
    nodes: int
    ranks: int
    servers: int
    size: int
    beyond: int

    @property
    def workers(self) -> int:
        """Number of workers."""
        return self.ranks - self.servers

    @property
    def way(self) -> str:
        """How pushes reach the server: by loads, or by messages."""
        return "messages" if self.nodes > 1 else "loads"


@dataclass(frozen=True)
class Points:
    """The points of one world or of several.

    Attributes:
        machines: Facts of each machine on which they were measured.
        times: Times of steps.
        memory: Memory of servers.
        left_out: What was not measured, and why.
        quick: Whether they were measured in passing, and say nothing about speed.
    """

    machines: tuple[Mapping[str, Any], ...] = ()
    times: tuple[Point, ...] = ()
    memory: tuple[Memory, ...] = ()
    left_out: tuple[str, ...] = ()
    quick: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the points as plain data."""
        times = [
            {**p.series._asdict(), "size": p.size, "step_s": p.step_s, "push_s": p.push_s}
            for p in self.times
        ]
        memory = [asdict(m) for m in self.memory]
        return {
            "machines": list(self.machines), "quick": self.quick, "times": times,
            "memory": memory, "left_out": list(self.left_out),
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Points":
        """Return the points that `to_json` gave.

        Raises:
            KeyError: If something is missing; TypeError: if something is of another kind.
        """
        times = [
            Point(Series(**{k: row[k] for k in Series._fields}), row["size"], row["step_s"])
            for row in data["times"]
        ]
        names = [f.name for f in fields(Memory)]
        memory = [Memory(**{k: row[k] for k in names}) for row in data["memory"]]
        return cls(
            tuple(data["machines"]), tuple(times), tuple(memory), tuple(data["left_out"]),
            data["quick"],
        )  # fmt: skip


def read(path: Path) -> Points:
    """Read the points of a file.

    Raises:
        UserError: If it cannot be read, or holds something else.
    """
    remedy = "write it with --scale --json FILE"
    try:
        return Points.from_json(json.loads(path.read_text()))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}", "a file to read", remedy) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path} without the points of --scale", "them", remedy) from None


def join(parts: Sequence[Points]) -> Points:
    """Put points of several worlds together; what was measured twice counts with its median.

    Raises:
        UserError: If they were measured with several MPI libraries, or on several processors:
            no line would go through them.
    """
    machines: list[Mapping[str, Any]] = []
    for machine in (m for part in parts for m in part.machines):
        if _but_date(machine) not in map(_but_date, machines):
            machines.append(machine)
    for name in ("mpi", "cpu"):
        found = sorted({str(m.get(name)) for m in machines})
        if len(found) > 1:
            remedy = "join those of each alone"
            raise UserError(f"points of {' and '.join(found)}", f"the same {name}", remedy)
    times: dict[Any, list[Point]] = {}
    memory: dict[Any, list[Memory]] = {}
    for part in parts:
        for point in part.times:
            times.setdefault((point.series, point.size), []).append(point)
        for used in part.memory:
            memory.setdefault(replace(used, beyond=0), []).append(used)
    return Points(
        tuple(machines),
        tuple(_merge(same, "step_s") for same in times.values()),
        tuple(_merge(same, "beyond") for same in memory.values()),
        tuple(dict.fromkeys(note for part in parts for note in part.left_out)),
        any(part.quick for part in parts),
    )


Measured = TypeVar("Measured", Point, Memory)


def _merge(same: Sequence[Measured], name: str) -> Measured:
    return replace(same[0], **{name: statistics.median(getattr(one, name) for one in same)})


def _but_date(machine: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in machine.items() if k != "date"}


def by_series(times: Iterable[Point]) -> dict[Series, dict[int, float]]:
    """Return the seconds by size of each series, both in order."""
    found: dict[Series, dict[int, float]] = {}
    for point in sorted(times, key=lambda p: (p.series, p.size)):
        found.setdefault(point.series, {})[point.size] = point.step_s
    return found
