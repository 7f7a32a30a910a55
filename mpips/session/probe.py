"""Measurement of links and codecs at the start of a job.

Ranks of each node send to the next node and receive from the previous one. So both directions of
every link are busy, as in training. Transfers grow until their duration can be measured. All ranks
learn the duration on the slowest rank, so they stop after the same transfer.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from mpips.codecs import Codec, MessageId, buffer_for, codec_for, make_codec
from mpips.config import Config
from mpips.mpi.collectives import begin_maximum, begin_sum
from mpips.mpi.start import TAG_PROBE, Request
from mpips.mpi.waiting import all_done
from mpips.mpi.world import Cluster
from mpips.planning import choice
from mpips.planning.choice import RAW, Candidate, Choice, Speeds
from mpips.planning.explain import Topology, case_of
from mpips.planning.job import Job
from mpips.transport.remote_reads import WINDOW
from mpips.transport.wire import CHUNK_BYTES, pull_codec, push_codec

STREAMS = 4  # largest number of sending ranks on a node
WORD_BYTES, TRIES = 8, 5
FIRST_BYTES, LAST_BYTES, GROWTH = 64 << 10, 8 << 20, 4
PACKING_S = 0.01  # seconds of trials of one codec; sufficient on an idle core
LONG_S = 0.05  # a transfer of this duration is long enough: all together take at most 0.4 s
# Elements to pack, more than a cache holds; number of different ones.
SAMPLE, PERIOD = 1 << 20, 1 << 16
APART = "no shard crosses nodes"
SMALL = "shards of less than 64 KB go as they are"


def choose_codecs(job: Job) -> Choice:
    """Choose the codecs that `job` leaves open, by measurements.

    Returns:
        The choice, equal on every rank.

    Collective: yes. Blocks: for half a second, longer on links below 10 Mbit/s; never inside MPI.
    """
    c, cluster = job.config, job.cluster
    owners = zip(cluster.roles.owners, job.shards, strict=True)
    nodes = {cluster.node_of[rank] for rank in cluster.roles.workers}
    remote = [shard for rank, shard in owners if shard.size and nodes - {cluster.node_of[rank]}]
    if not remote:
        return choice.without(c, APART)
    size = max(shard.size for shard in remote)
    if codec_for(make_codec("fp16"), size, job.dtype) is None:
        return choice.without(c, SMALL)
    pushes, pulls = possible(c)
    rates = measure_codecs(cluster, [*pushes, *pulls], min(size, SAMPLE), size, job.dtype)
    speeds = measure_links(cluster)
    topology = Topology(cluster.hosts, cluster.node_of, job.layout.size, speeds.bytes_per_s)
    case = case_of(choice.without(c, "").applied(c), topology)
    return choice.choose(case, speeds, *([rates[k] for k in ks] for ks in (pushes, pulls)))


def possible(config: Config) -> tuple[list[Codec | None], list[Codec | None]]:
    """Return the possible codecs of pushes and of pulls, in order of increasing error."""
    pushes = choice.names(config.codec)
    pulls = choice.names(config.pull_codec, choice.packable_pulls(config))
    return (
        [push_codec(replace(config, codec=name)) for name in pushes],
        [pull_codec(replace(config, pull_codec=name)) for name in pulls],
    )


# Links -----------------------------------------------------------------------------------------


def neighbours_of(rank: int, node_of: Sequence[int]) -> tuple[int, int] | None:
    """Return the ranks that a rank sends to and receives from; None if it does neither.

    Args:
        rank: The rank.
        node_of: Node of each rank; at least two nodes.
    """
    ranks: dict[int, list[int]] = {}
    for other, node in enumerate(node_of):
        ranks.setdefault(node, []).append(other)
    stream = ranks[node_of[rank]].index(rank)
    if stream >= streams(node_of):
        return None
    node, nodes = node_of[rank], len(ranks)
    return ranks[(node + 1) % nodes][stream], ranks[(node - 1) % nodes][stream]


def streams(node_of: Sequence[int]) -> int:
    """Return the number of sending ranks of each node."""
    return min(STREAMS, int(np.bincount(node_of).min()))


def measure_links(cluster: Cluster) -> Speeds:
    """Return the speeds of the slowest link, and the cores of the nodes. Collective: yes."""
    senders = streams(cluster.node_of)
    latency_s = min(_exchange(cluster, WORD_BYTES) for _ in range(TRIES))
    nbytes = FIRST_BYTES
    while (spent_s := _exchange(cluster, nbytes)) < LONG_S and nbytes < LAST_BYTES:
        nbytes = min(GROWTH * nbytes, LAST_BYTES)
    if spent_s < 3 * LONG_S:  # measure again, as TCP starts slowly
        spent_s = min(spent_s, _exchange(cluster, nbytes))
    cores = np.zeros(cluster.nodes)
    cores[cluster.node_of[cluster.rank]] = cluster.cores_a_rank
    cluster.wait_request(begin_sum(cluster.comm, cores))
    return Speeds(senders * nbytes / spent_s, latency_s, tuple(cores.tolist()))


def _exchange(cluster: Cluster, nbytes: int) -> float:
    """Return the seconds in which each stream sends `nbytes` over every link."""
    pair = neighbours_of(cluster.rank, cluster.node_of)
    data, out = (np.ones(nbytes if pair else 0, "u1") for _ in range(2))
    cluster.barrier()
    cluster.barrier()  # ranks leave the first barrier at different times
    start = time.perf_counter()
    if pair is not None:
        _move(cluster, data, out, *pair)
    return float(_slowest(cluster, [time.perf_counter() - start])[0])


def _move(cluster: Cluster, data: np.ndarray, out: np.ndarray, dest: int, source: int) -> None:
    """Send and receive in chunks, as remote reads do, so that no direction waits for the other."""
    arrays, step = cluster.arrays, CHUNK_BYTES
    begins = range(0, data.size, step)
    receives = [arrays.begin_receive(out[b : b + step], source, TAG_PROBE) for b in begins]
    chunks = deque(data[b : b + step] for b in begins)
    sends: deque[Request] = deque()

    def done() -> bool:
        while sends and sends[0].Test():
            sends.popleft()
        while chunks and len(sends) < WINDOW:
            sends.append(arrays.begin_send(chunks.popleft(), dest, TAG_PROBE))
        return not sends and all_done(receives)

    cluster.wait(done)


def _slowest(cluster: Cluster, seconds: Sequence[float]) -> np.ndarray:
    mine, found = np.array(seconds), np.zeros(len(seconds))
    cluster.wait_request(begin_maximum(cluster.comm, mine, found))
    return found


# Codecs ----------------------------------------------------------------------------------------


def measure_codecs(
    cluster: Cluster, codecs: Sequence[Codec | None], n: int, whole: int, dtype: np.dtype
) -> dict[Codec | None, Candidate]:
    """Return ratio and rates of each codec, on the slowest core. Collective: yes.

    Args:
        cluster: The ranks, which all pack at the same time.
        codecs: Codecs to measure; compiled (`mpips.codecs.warm`).
        n: Number of elements to pack.
        whole: Number of elements that are packed in training.
        dtype: dtype of the elements.
    """
    grad = np.resize(np.random.default_rng(0).standard_normal(min(n, PERIOD)).astype(dtype), n)
    measured = list(dict.fromkeys(codec for codec in codecs if codec is not None))
    times = _slowest(cluster, [t for codec in measured for t in _times(codec, grad)])
    candidates: dict[Codec | None, Candidate] = {None: RAW}
    for codec, (pack_s, unpack_s) in zip(measured, times.reshape(-1, 2), strict=True):
        ratio = codec.wire_bytes(whole, dtype) / (whole * dtype.itemsize)
        rates = grad.nbytes / float(pack_s), grad.nbytes / float(unpack_s)
        candidates[codec] = Candidate(codec.name, ratio, *rates)
    return candidates


def _times(codec: Codec, grad: np.ndarray) -> tuple[float, float]:
    """Return the least seconds of packing and of unpacking in some trials."""
    message, out = buffer_for(codec.wire_bytes(grad.size, grad.dtype)), np.zeros_like(grad)
    state = codec.fresh_state(grad.size, grad.dtype)
    packing = _least(lambda: codec.encode(grad, message, state, MessageId()))
    return packing, _least(lambda: codec.decode(message, out))


def _least(work: Callable[[], object]) -> float:
    seconds: list[float] = []
    while len(seconds) < 2 or (len(seconds) < TRIES and sum(seconds) < PACKING_S):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
