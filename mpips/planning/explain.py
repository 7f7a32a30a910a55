"""Traffic of a job's links, its bottleneck, and options that relieve it.

This module runs and measures nothing: the formulas of `mpips.planning.traffic` give the answer. To
find relief, it evaluates the same job with another ``--servers``, ``--mode`` and so on, on the same
ranks. It compares the largest samples/s that links and, if its time is known, computing allow.
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
from mpips.planning.table_rules import check_options
from mpips.planning.traffic import IN, OUT, SERVERS, WORKERS, Case, Rows, Tables
from mpips.planning.world import server_counts, spread
from mpips.problems import load_problem
from mpips.problems.rows import tables_of_problem, uses_rows

ACCUMULATE = 4  # factor on the number of accumulated batches; the gain is proportional
LEAST_GAIN = 1.05
MOST_RELIEFS = 8


@dataclass(frozen=True)
class Topology:
    """Hosts and links of a job's ranks, and sizes of its messages.

    Attributes:
        hosts: Host name of each rank.
        node_of: Node number of each rank.
        parameters: Number of parameters.
        rate: Rate of a link each way, in bytes per second.
        compute_s: Seconds in which a worker computes a gradient; 0 if unknown.
        codecs: Bytes on the wire, divided by bytes in memory, by name of the codec.
        tables: Rows of each table, numbers of a row, and rows that a batch needs.
        ends: Begin of the parameters and end of each array; empty if shards may divide arrays.
    """

    hosts: Sequence[str]
    node_of: Sequence[int]
    parameters: int
    rate: float
    compute_s: float = 0.0
    codecs: Mapping[str, float] = field(default_factory=dict)
    tables: Tables = ()
    ends: Sequence[int] = ()


@dataclass(frozen=True)
class Relief:
    """An option that makes the job faster.

    Attributes:
        option: Option as on the command line.
        step_s: Seconds of a step with it.
        gain: Samples/s with it, divided by the current samples/s.
    """

    option: str
    step_s: float
    gain: float


@dataclass(frozen=True)
class Explanation:
    """Explanation of one job on given ranks.

    Attributes:
        config: The job.
        topology: Hosts, links and message sizes.
        case: Quantities that determine the traffic.
        flows: Bytes on each node's link in a step; see `traffic.flows`.
        pushed: Bytes that all workers push in a step, local and remote, as the summary counts them.
        pulled: Bytes that all workers pull in a step, counted likewise.
        link_s: Seconds of a step in which the busiest link is busy.
        step_s: Least seconds of a step.
        busiest: Node of the busiest link.
        reliefs: Options that make the job faster, the best first.
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
        """Largest samples/s of all workers; infinite if a step takes no time."""
        samples = samples_of(self.config, self.case)
        return samples / self.step_s if self.step_s else float("inf")

    @property
    def bound_by_link(self) -> bool:
        """Whether the busiest link takes longer than computing."""
        return self.link_s > max(self.topology.compute_s, self.step_s - self.link_s)


def case_of(config: Config, topology: Topology) -> Case:
    """Return the quantities that determine a job's traffic.

    Raises:
        UserError: If the ranks do not allow the job's roles, or tables its options.
    """
    c, mode = config, config.mode
    node_of, whole_arrays = topology.node_of, rule_of(c).whole
    if topology.tables:
        check_options(c, max(node_of) + 1)
    roles = roles_of(c, topology.hosts, node_of)
    roles = with_portions(roles, c, node_of, whole_arrays, bool(topology.tables))
    itemsize = np.dtype(c.dtype).itemsize
    shards = shares(topology.parameters, roles, itemsize, topology.ends)
    sizes = [shard.size * itemsize for shard in shards]
    low_rank = c.codec == "powersgd"
    slices = any(is_large(size // itemsize // c.fragments, c.dtype) for size in sizes)
    packed = topology.codecs if slices or low_rank else {}
    vectors, results = moved_vectors(c), c.codec if mode == "local_sgd" else c.pull_codec
    return Case(
        roles,
        tuple(topology.node_of),
        tuple(sizes),
        rounds=c.in_rounds,
        streamed=streams(c) and not whole_arrays,
        allreduce=c.reduce == "allreduce" or low_rank,
        one_push=c.node_aggregation,
        one_pull=c.share_pulls and mode in OPTIONS["share_pulls"].modes and c.read == "relaxed",
        prefetch=c.prefetch,
        every=c.unit_size // c.batch_size,
        hidden=c.overlap_steps / c.round_steps,
        grads=vectors * packed.get(c.codec, 1.0) + (c.delay_compensation > 0),
        params=0.0 if low_rank else vectors * packed.get(results, 1.0),
        behind=mode == "hybrid",
        rows=Rows.of(topology.tables, itemsize, _of_rows(c, c.codec), _of_rows(c, c.pull_codec)),
    )


def _of_rows(config: Config, codec: str) -> Callable[[int], float]:
    """Return a function from the numbers of a row to the ratio of its packed bytes."""
    packs = make_codec(codec) if codec in CODECS else None

    def share(dim: int) -> float:
        row_codec = packs and packs.for_rows(dim)
        count = dim << 10  # enough that a partly filled bucket does not matter
        nbytes = count * np.dtype(config.dtype).itemsize
        return row_codec.wire_bytes(count, config.dtype) / nbytes if row_codec else 1.0

    return share


def samples_of(config: Config, case: Case) -> int:
    """Return the samples of all workers in a step, without those of backup workers."""
    return (len(case.roles.workers) - config.backup_workers) * config.batch_size


def moved_vectors(config: Config) -> float:
    """Return how many vectors of the parameters' size a worker sends in an exchange."""
    averaged = config.mode == "local_sgd" and config.local_slots == "average"
    whole = 1 + (len(rule_of(config).slots) if averaged else 0)
    return whole / config.fragments


def explain(config: Config, topology: Topology) -> Explanation:
    """Explain a job on given ranks.

    Raises:
        UserError: If the ranks do not allow the job's roles.
    """
    case = case_of(config, topology)
    flows = traffic.flows(case)
    whole = moved_vectors(config) * len(case.roles.workers) * case.vector / case.every
    loads = [traffic.busy_s(case, link[None], topology.rate) for link in flows.sum(axis=1)]
    now = Explanation(
        config, topology, case, flows, whole * (1 + (config.delay_compensation > 0)), whole,
        link_s=traffic.link_s(case, topology.rate),
        step_s=traffic.step_s(case, topology.rate, topology.compute_s),
        busiest=loads.index(max(loads)), reliefs=(),
    )  # fmt: skip
    return dataclasses.replace(now, reliefs=_reliefs(now) if case.nodes > 1 else ())


def _reliefs(base: Explanation) -> tuple[Relief, ...]:
    """Return the options that help, the best first; only the best number of servers."""
    reliefs = [relief for changes in _variations(base) if (relief := _relief(base, changes))]
    reliefs.sort(key=lambda relief: -relief.gain)
    servers = [relief for relief in reliefs if relief.option.startswith("--servers")]
    shown = [r for r in reliefs if r.gain >= LEAST_GAIN and r not in servers[1:]]
    return tuple(shown[:MOST_RELIEFS])


def _variations(base: Explanation) -> list[dict[str, Any]]:
    """Return the changes to try, by field. A change to the job's own value has no effect."""
    c, free = base.config, {"server_ranks": (), "server_hosts": ""}
    counts, tried = server_counts(len(base.topology.hosts)), list[dict[str, Any]]()
    tried += [{"servers": k, **free} for k in counts]
    tried += [
        {"mode": mode, "servers": None, **free}
        for mode in OPTIONS["mode"].legal
        if mode != c.mode and (mode != "hybrid" or base.topology.tables)
    ]
    tried += [{"node_aggregation": True}, {"share_pulls": True}, {"prefetch": True}]
    tried += [{"local_slots": "keep"}, {"reduce": "auto"}]
    tried += [{"accumulate": ACCUMULATE * c.accumulate}]
    for codec in base.topology.codecs:
        tried += [{"codec": codec}, {"pull_codec": codec}, {"codec": codec, "pull_codec": codec}]
    return tried


def _relief(base: Explanation, changes: dict[str, Any]) -> Relief | None:
    """Return the effect of changes; None if there is no such job, or it equals this one."""
    values = {name: value for name, value in changes.items() if value not in (None, (), "")}
    if any(getattr(base.config, name) == values[name] for name in values):
        return None
    try:
        config = resolve(changes, vars(base.config))  # without options that its mode lacks
        case = case_of(config, base.topology)
    except UserError:
        return None
    step_s = traffic.step_s(case, base.topology.rate, base.topology.compute_s)
    if not step_s:  # one worker that owns all parameters: its computing is not counted
        return None
    gain = samples_of(config, case) / step_s / base.samples_per_s
    return Relief(" ".join(_shown(name, values[name]) for name in values), step_s, gain)


def _shown(name: str, value: object) -> str:
    return OPTIONS[name].flag if value is True else f"{OPTIONS[name].flag} {value}"


def explain_alone(config: Config, question: Question) -> str:
    """Return the explanation of a job on hypothetical ranks. Needs no MPI.

    Raises:
        UserError: If the number of ranks is missing, or the job or its data is wrong.
    """
    if not question.ranks:
        raise UserError("--explain without a world", "--ranks N", "or start it by mpirun")
    world = spread(question.ranks, question.nodes, config.node_size)
    return explain_world(config, question, *world)


def explain_world(
    config: Config, question: Question, hosts: Sequence[str], node_of: Sequence[int]
) -> str:
    """Return the explanation of a job on given ranks. Collective: no.

    Raises:
        UserError: If the job, its data or its problem is wrong, or does not fit the ranks.
    """
    count = training(len(hosts), config.evaluators)
    hosts, node_of = hosts[:count], node_of[:count]
    problem = load_problem(config.problem, open_dataset(config).info, config)
    layout = problem.layout
    rows = "rows of tables are not counted: a batch says which it needs\n" * uses_rows(problem)
    if not layout.size:
        return f"mode {config.mode}, no parameters\n{rows}"
    codecs = codec_ratios(layout.size, config.dtype)
    codecs["powersgd"] = Factors.of(layout, config.dtype, config.powersgd_rank).sent / layout.size
    # Their rows are on the owners, and exclude some modes.
    tables = tuple((t.rows, t.dim, 0.0) for t in tables_of_problem(problem).values())
    ends = [0, *(end for _, end in layout.slices().values())] if rule_of(config).whole else ()
    speeds = question.bytes_per_s, question.step_ms / 1e3
    topology = Topology(hosts, node_of, layout.size, *speeds, codecs, tables, ends)
    text = ""
    if is_open(config):
        config = assumed(config, topology)
        text = f"{choice.chosen(config.codec, config.pull_codec)}, if packing took no time\n"
    return text + explanation_text(explain(config, topology), question.link) + rows


def assumed(config: Config, topology: Topology) -> Config:
    """Return a job with the codecs that "auto" would choose if packing took no time."""
    case = case_of(config, dataclasses.replace(topology, codecs={}))
    given = (config.codec, True), (config.pull_codec, choice.packable_pulls(config))
    item = np.dtype(config.dtype).itemsize
    slices = any(is_large(nbytes // item, config.dtype) for nbytes in case.shards)
    ratios = topology.codecs if slices else {}
    pushes, pulls = (
        [Candidate(name, ratios.get(name, 1.0)) for name in choice.names(*args)] for args in given
    )
    speeds = Speeds(topology.rate, 0.0, (math.inf,) * case.nodes)
    return choice.choose(case, speeds, pushes, pulls).applied(config)


def codec_ratios(n: int, dtype: str) -> dict[str, float]:
    """Return bytes on the wire of `n` parameters, divided by bytes in memory, by codec."""
    raw = n * np.dtype(dtype).itemsize
    if codec_for(make_codec("fp16"), n, dtype) is None:  # too small to be packed
        return {}
    codecs = {name: make_codec(name) for name in CODECS}
    return {name: codec.wire_bytes(n, dtype) / raw for name, codec in codecs.items() if codec}


def explanation_text(result: Explanation, link: str) -> str:
    """Return an explanation as printed.

    Args:
        result: The explanation.
        link: Rate of the links, as the user gave it.
    """
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
    """Return the table's rows for each node: its roles, and its link as a whole."""
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
    """Return the bottleneck and the largest speed, as text."""
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
