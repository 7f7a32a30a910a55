"""Traffic of a job's links, its bottleneck, and options that relieve it.

Nothing is run and nothing is measured: the answer follows from the formulas of
`mpips.planning.traffic`. What relieves is found by asking for the same job with another
``--servers``, ``--mode`` and so on in the same world, and comparing the samples a second that the
links, and computing where its time is known, allow at best.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpips.codecs import CODECS, codec_for, is_large, is_open, make_codec
from mpips.codecs.powersgd import Factors
from mpips.config import OPTIONS, Config
from mpips.config.command_line import Question
from mpips.config.jobfile import resolve
from mpips.datasets import open_dataset
from mpips.errors import UserError, counted, human_bytes
from mpips.layout.roles import roles_of, shares, streams, training, with_portions
from mpips.optim import rule_of
from mpips.planning import choice, traffic
from mpips.planning.choice import Candidate, Speeds
from mpips.planning.traffic import IN, OUT, SERVERS, WORKERS, Case, Rows, Tables
from mpips.problems import load_problem
from mpips.problems.rows import uses_rows

ACCUMULATE = 4  # times as many batches as now; what it gives is proportional to it
LEAST_GAIN = 1.05
MOST_RELIEFS = 8
World = tuple[list[str], list[int]]  # of each rank its host and its node


@dataclass(frozen=True)
class Topology:
    """A world of ranks, and what a job moves in it.

    Attributes:
        hosts: Host name of each rank.
        node_of: Node number of each rank.
        parameters: Number of parameters.
        rate: Of a link, each way, in bytes a second.
        compute_s: Seconds in which a worker computes a gradient; 0 if not known.
        codecs: Bytes on the wire over bytes in memory, by the name of the codec.
        tables: Of each table its rows, their numbers, and how many rows a batch needs.
    """

    hosts: Sequence[str]
    node_of: Sequence[int]
    parameters: int
    rate: float
    compute_s: float = 0.0
    codecs: Mapping[str, float] = field(default_factory=dict)
    tables: Tables = ()


@dataclass(frozen=True)
class Relief:
    """Another option, and what it would do.

    Attributes:
        option: As on the command line.
        step_s: Seconds of a step then.
        gain: Samples a second then, over those now.
    """

    option: str
    step_s: float
    gain: float


@dataclass(frozen=True)
class Explanation:
    """The answer for one job in one world.

    Attributes:
        config: The job.
        topology: The world.
        case: What the bytes depend on.
        flows: What crosses each node's link in a step; see `traffic.flows`.
        pushed: Bytes a step that all workers push, local and remote, as the summary counts them.
        pulled: Likewise, that they pull.
        link_s: Seconds of a step for which the busiest link is busy.
        step_s: Least seconds of a step.
        busiest: The node whose link that is.
        reliefs: What would make it faster, the best first.
    """

    config: Config
    topology: Topology
    case: Case
    flows: np.ndarray
    pushed: float
    pulled: float
    link_s: float
    step_s: float
    busiest: int
    reliefs: tuple[Relief, ...]

    @property
    def samples_per_s(self) -> float:
        """Samples a second of all workers, at best; infinite where nothing takes time."""
        samples = len(self.case.roles.workers) * self.config.batch_size
        return samples / self.step_s if self.step_s else float("inf")

    @property
    def bound_by_link(self) -> bool:
        """Whether the busiest link takes longer than computing."""
        return self.link_s > max(self.topology.compute_s, self.step_s - self.link_s)


def varied(config: Config, changes: Mapping[str, Any]) -> Config | None:
    """Return a job with changes, without what its mode does not have; None if there is none."""
    try:
        return resolve(changes, vars(config))
    except UserError:
        return None


def case_of(config: Config, topology: Topology) -> Case:
    """Return what the bytes of a job depend on.

    Raises:
        UserError: If the world does not allow the job's roles.
    """
    c, mode = config, config.mode
    node_of, whole = topology.node_of, rule_of(c).whole
    roles = roles_of(c, topology.hosts, node_of)
    roles = with_portions(roles, c, node_of, whole, bool(topology.tables))
    item = np.dtype(c.dtype).itemsize
    sizes = [shard.size * item for shard in shares(topology.parameters, roles, item)]
    low_rank = c.codec == "powersgd"
    slices = any(is_large(size // item // c.fragments, c.dtype) for size in sizes)
    packed = topology.codecs if slices or low_rank else {}
    vectors, results = moved_vectors(c), c.codec if mode == "local_sgd" else c.pull_codec
    return Case(
        roles,
        tuple(topology.node_of),
        tuple(sizes),
        rounds=c.in_rounds,
        streamed=streams(c) and not whole,
        allreduce=c.reduce == "allreduce" or low_rank,
        one_push=c.node_aggregation,
        one_pull=c.share_pulls and mode in OPTIONS["share_pulls"].modes and c.read == "relaxed",
        prefetch=c.prefetch,
        every=c.unit_size // c.batch_size,
        hidden=c.overlap_steps / c.round_steps,
        grads=vectors * packed.get(c.codec, 1.0) + (c.delay_compensation > 0),
        params=0.0 if low_rank else vectors * packed.get(results, 1.0),
        behind=mode == "hybrid",
        rows=Rows.of(topology.tables, item, _of_rows(c, c.codec), _of_rows(c, c.pull_codec)),
    )


def _of_rows(config: Config, codec: str) -> Callable[[int], float]:
    """Return what gives the bytes of rows on the wire over those in memory, by their numbers."""
    packs = make_codec(codec) if codec in CODECS else None

    def share(dim: int) -> float:
        found = packs and packs.for_rows(dim)
        many = dim << 10  # so that a bucket that is not full does not count
        nbytes = many * np.dtype(config.dtype).itemsize
        return found.wire_bytes(many, config.dtype) / nbytes if found else 1.0

    return share


def moved_vectors(config: Config) -> float:
    """Return how many vectors of the parameters' size a worker brings into an exchange."""
    averaged = config.mode == "local_sgd" and config.local_slots == "average"
    whole = 1 + (len(rule_of(config).slots) if averaged else 0)
    return whole / config.fragments


def explain(config: Config, topology: Topology) -> Explanation:
    """Explain a job in a world.

    Raises:
        UserError: If the world does not allow the job's roles.
    """
    case = case_of(config, topology)
    found = traffic.flows(case)
    whole = moved_vectors(config) * len(case.roles.workers) * case.vector / case.every
    loads = [traffic.busy_s(case, link[None], topology.rate) for link in found.sum(axis=1)]
    now = Explanation(
        config, topology, case, found, whole * (1 + (config.delay_compensation > 0)), whole,
        link_s=traffic.link_s(case, topology.rate),
        step_s=traffic.step_s(case, topology.rate, topology.compute_s),
        busiest=loads.index(max(loads)), reliefs=(),
    )  # fmt: skip
    return dataclasses.replace(now, reliefs=_reliefs(now) if case.nodes > 1 else ())


def _reliefs(now: Explanation) -> tuple[Relief, ...]:
    """Return what would help, the best first; of the numbers of servers, the best alone."""
    found = [relief for changes in _variations(now) if (relief := _relief(now, changes))]
    found.sort(key=lambda relief: -relief.gain)
    servers = [relief for relief in found if relief.option.startswith("--servers")]
    kept = [r for r in found if r.gain >= LEAST_GAIN and r not in servers[1:]]
    return tuple(kept[:MOST_RELIEFS])


def _variations(now: Explanation) -> list[dict[str, Any]]:
    """Return the changes to try, by field; those that the job has already change nothing."""
    c, free = now.config, {"server_ranks": (), "server_hosts": ""}
    tried: list[dict[str, Any]] = [{"servers": k, **free} for k in range(len(now.topology.hosts))]
    tried += [
        {"mode": mode, "servers": None, **free}
        for mode in OPTIONS["mode"].legal
        if mode != c.mode and (mode != "hybrid" or now.topology.tables)
    ]
    tried += [{"node_aggregation": True}, {"share_pulls": True}, {"prefetch": True}]
    tried += [{"local_slots": "keep"}]
    tried += [{"reduce": "auto"}, {"accumulate": ACCUMULATE * now.config.accumulate}]
    for codec in now.topology.codecs:
        tried += [{"codec": codec}, {"pull_codec": codec}, {"codec": codec, "pull_codec": codec}]
    return tried


def _relief(now: Explanation, changes: dict[str, Any]) -> Relief | None:
    """Return what changes would do, or None where there is no such job or it is this one."""
    said = {name: value for name, value in changes.items() if value not in (None, (), "")}
    config = varied(now.config, changes)
    if config is None or any(getattr(now.config, name) == said[name] for name in said):
        return None
    try:
        case = case_of(config, now.topology)
    except UserError:
        return None
    step_s = traffic.step_s(case, now.topology.rate, now.topology.compute_s)
    if not step_s:  # one worker that owns all: what it computes is not counted
        return None
    gain = len(case.roles.workers) * now.step_s / (len(now.case.roles.workers) * step_s)
    return Relief(" ".join(_shown(name, said[name]) for name in said), step_s, gain)


def _shown(name: str, value: object) -> str:
    return OPTIONS[name].flag if value is True else f"{OPTIONS[name].flag} {value}"


def explain_alone(config: Config, question: Question) -> str:
    """Explain a job in a world that is only spoken of; the text. Needs no MPI.

    Raises:
        UserError: If no world is named, or the job or its data is wrong.
    """
    if not question.ranks:
        raise UserError("--explain without a world", "--ranks N", "or start it by mpirun")
    return explain_world(
        config, question, *spread(question.ranks, question.nodes, config.node_size)
    )


def spread(ranks: int, nodes: int, node_size: int) -> World:
    """Return hosts and nodes of so many ranks, on as many nodes, one a node where neither is said.

    Raises:
        UserError: If there are more nodes than ranks.
    """
    if nodes > ranks:
        raise UserError(f"nodes {nodes} with {ranks} ranks", f"nodes <= {ranks}", "set --nodes")
    nodes = nodes or ranks
    node_of = [rank // node_size if node_size else rank * nodes // ranks for rank in range(ranks)]
    return [f"node{node}" for node in node_of], node_of


def explain_world(
    config: Config, question: Question, hosts: Sequence[str], node_of: Sequence[int]
) -> str:
    """Explain a job in a world; the text. Collective: no.

    Raises:
        UserError: If the job, its data or its problem is wrong, or does not fit the world.
    """
    count = training(len(hosts), config.evaluators)
    hosts, node_of = hosts[:count], node_of[:count]
    problem = load_problem(config.problem, open_dataset(config).info, config)
    layout = problem.layout
    rows = "rows of tables are not counted: a batch says which it needs\n" * uses_rows(problem)
    if not layout.size:
        return f"mode {config.mode}, no parameters\n{rows}"
    compute_s = question.step_ms / 1e3
    rate, codecs = question.bytes_per_s, codec_ratios(layout.size, config.dtype)
    codecs["powersgd"] = Factors.of(layout, config.dtype, config.powersgd_rank).sent / layout.size
    topology = Topology(hosts, node_of, layout.size, rate, compute_s, codecs)
    if not is_open(config):
        return explanation_text(explain(config, topology), question.link) + rows
    settled = assumed(config, topology)
    text = f"{choice.chosen(settled.codec, settled.pull_codec)}, if packing took no time\n"
    return text + explanation_text(explain(settled, topology), question.link) + rows


def assumed(config: Config, topology: Topology) -> Config:
    """Return a job with the codecs that "auto" would choose if packing took no time."""
    case = case_of(config, dataclasses.replace(topology, codecs={}))
    given = (config.codec, True), (config.pull_codec, choice.packable_pulls(config))
    item = np.dtype(config.dtype).itemsize
    slices = any(is_large(nbytes // item, config.dtype) for nbytes in case.shards)
    ratios = topology.codecs if slices else {}
    pushes, pulls = (
        [Candidate(name, ratios.get(name, 1.0)) for name in choice.names(*how)] for how in given
    )
    speeds = Speeds(topology.rate, 0.0, (math.inf,) * case.nodes)
    return choice.choose(case, speeds, pushes, pulls).applied(config)


def codec_ratios(n: int, dtype: str) -> dict[str, float]:
    """Return the bytes on the wire over those in memory of `n` parameters, by codec."""
    raw = n * np.dtype(dtype).itemsize
    if codec_for(make_codec("fp16"), n, dtype) is None:  # too small to be packed
        return {}
    found = {name: make_codec(name) for name in CODECS}
    return {name: codec.wire_bytes(n, dtype) / raw for name, codec in found.items() if codec}


def explanation_text(result: Explanation, link: str) -> str:
    """Return an explanation as it is printed, for links of the rate that `link` names."""
    c, case = result.config, result.case
    item = np.dtype(c.dtype).itemsize
    bound = "" if case.rounds and not case.allreduce else ", at least"
    pulled = "as much" if result.pulled == result.pushed else human_bytes(result.pulled)
    lines = [
        f"mode {c.mode}, {result.topology.parameters:,} parameters of {item} bytes: "
        f"{human_bytes(case.vector)}",
        f"a step is {c.batch_size} samples of each of {len(case.roles.workers)} workers, who push "
        f"{human_bytes(result.pushed)} in it, and pull {pulled}",
        f"what crosses each node's link in a step{bound}:" if case.nodes > 1 else "",
        *(_table(result) if case.nodes > 1 else ["one node: no link is crossed"]),
        *_verdict(result, link),
        f"beside them {c.evaluators} evaluate: they read checkpoints alone" * bool(c.evaluators),
        *_relief_lines(result),
    ]
    return "\n".join(line for line in lines if line) + "\n"


def _table(result: Explanation) -> list[str]:
    """Return the rows of each node: its roles, and its link with all of them."""
    case, rate = result.case, result.topology.rate
    lines = ["node  host              ranks             sent    received  time"]
    hosts = dict(zip(case.node_of, result.topology.hosts, strict=True))
    ranks = np.stack((case.workers, case.servers), axis=1)
    for node, (counts, flows) in enumerate(zip(ranks, result.flows, strict=True)):
        for role, word in ((SERVERS, "server"), (WORKERS, "worker")):
            if counts[role]:
                lines.append(_row(node, hosts[node], counted(int(counts[role]), word), flows[role]))
        link = flows.sum(axis=0)
        time_ms = 1e3 * traffic.busy_s(case, link[None], rate)
        lines.append(f"{_row(node, hosts[node], 'link', link)}  {time_ms:.3g} ms")
    return lines


def _row(node: int, host: str, name: str, flow: np.ndarray) -> str:
    sent, received = map(human_bytes, flow.sum(axis=0))
    return f"{node:4d}  {host[:16]:16s}  {name:10s}  {sent:>10s}  {received:>10s}"


def _verdict(result: Explanation, link: str) -> list[str]:
    """Return where the bottleneck is, and how fast the job can be at best."""
    topology, case = result.topology, result.case
    if case.nodes == 1:
        return ["the bottleneck is computing, or the memory of the node"]
    whole = result.flows[result.busiest].sum(axis=(0, 1))
    where = (
        f"node {result.busiest}'s link sends {human_bytes(whole[OUT])} and receives "
        f"{human_bytes(whole[IN])}: {1e3 * result.link_s:.3g} ms at {link} each way (--link)"
    )
    if result.bound_by_link:
        where = f"bottleneck: {where}"
    elif topology.compute_s:
        where = f"bottleneck: computing, {1e3 * topology.compute_s:.3g} ms a step; {where}"
    rate = f"{result.samples_per_s:,.0f} samples/s"
    known = "" if topology.compute_s else " (computing not counted: give --step-ms)"
    return [where, f"a step takes at least {1e3 * result.step_s:.3g} ms: at most {rate}{known}"]


def _relief_lines(result: Explanation) -> list[str]:
    if not result.reliefs:
        return ["no other option of these would relieve it"] if result.case.nodes > 1 else []
    lines = ["what would relieve it, the most first (speed alone, not what it does to the result):"]
    width = max(len(relief.option) for relief in result.reliefs)
    for relief in result.reliefs:
        more = f"{relief.gain:.3g} times the samples/s"
        lines.append(f"  {relief.option:{width}s}  {1e3 * relief.step_s:8.3g} ms a step, {more}")
    return lines
