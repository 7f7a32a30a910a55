"""Measurement of links and codecs at the start of a job.

So that both directions of every link are in use, as they are in training, ranks of each node send
to the next node and receive from the one before. Transfers grow until they take long enough to be
timed; all ranks know how long each took on the slowest, so that all stop after the same one.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from mpips.codecs import AUTO, Codec, MessageId, buffer_for, codec_for, make_codec
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

STREAMS = 4  # at most, of a node
WORD_BYTES, TRIES = 8, 5
FIRST_BYTES, LAST_BYTES, GROWTH = 64 << 10, 8 << 20, 4
PACKING_S = 0.01  # of tries of one codec: enough for all where nobody else takes the core
LONG_S = 0.05  # a transfer of this or more is long enough: all of them take 0.4 s at most
SAMPLE, PERIOD = 1 << 20, 1 << 16  # elements to pack, more than a cache holds; of them random
APART = "no shard crosses nodes"
SMALL = "shards of less than 64 KB go as they are"


def choose_codecs(job: Job) -> Choice:
    """Choose what `job` leaves open, by measuring.

    Returns:
        The choice, the same on every rank.

    Collective: yes. Blocks: for half a second, longer on links of less than 10 Mbit/s; never
    inside MPI.
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
    """Return the codecs that pushes and pulls of a job may go by, those that lose least first."""
    if config.codec == AUTO:
        pushes = [make_codec(name) for name in choice.names(config.codec)]
    else:
        pushes = [push_codec(config)]
    if config.pull_codec == AUTO:
        packable = choice.packable_pulls(config)
        return pushes, [make_codec(name) for name in choice.names(config.pull_codec, packable)]
    return pushes, [pull_codec(config)]


# Links -----------------------------------------------------------------------------------------


def neighbours_of(rank: int, node_of: Sequence[int]) -> tuple[int, int] | None:
    """Return whom a rank sends to and receives from, or None where it does neither.

    Args:
        rank: The rank.
        node_of: Node of each rank; at least two nodes.
    """
    ranks: dict[int, list[int]] = {}
    for other, node in enumerate(node_of):
        ranks.setdefault(node, []).append(other)
    mine = ranks[node_of[rank]].index(rank)
    if mine >= streams(node_of):
        return None
    here, nodes = node_of[rank], len(ranks)
    return ranks[(here + 1) % nodes][mine], ranks[(here - 1) % nodes][mine]


def streams(node_of: Sequence[int]) -> int:
    """Return how many ranks of each node send."""
    return min(STREAMS, int(np.bincount(node_of).min()))


def measure_links(cluster: Cluster) -> Speeds:
    """Return the speeds of the slowest link, and the cores of the nodes. Collective: yes."""
    several = streams(cluster.node_of)
    latency_s = min(_exchange(cluster, WORD_BYTES) for _ in range(TRIES))
    nbytes = FIRST_BYTES
    while (spent_s := _exchange(cluster, nbytes)) < LONG_S and nbytes < LAST_BYTES:
        nbytes = min(GROWTH * nbytes, LAST_BYTES)
    if spent_s < 3 * LONG_S:  # once more: TCP is slow to start
        spent_s = min(spent_s, _exchange(cluster, nbytes))
    cores = np.zeros(cluster.nodes)
    cores[cluster.node_of[cluster.rank]] = cluster.cores_a_rank
    cluster.wait_request(begin_sum(cluster.comm, cores))
    return Speeds(several * nbytes / spent_s, latency_s, tuple(cores.tolist()))


def _exchange(cluster: Cluster, nbytes: int) -> float:
    """Return the seconds in which so many bytes of each stream cross every link."""
    pair = neighbours_of(cluster.rank, cluster.node_of)
    data, out = (np.ones(nbytes if pair else 0, "u1") for _ in range(2))
    cluster.barrier()
    cluster.barrier()  # all come out of the first one at their leisure
    start = time.perf_counter()
    if pair is not None:
        _move(cluster, data, out, *pair)
    return float(_slowest(cluster, [time.perf_counter() - start])[0])


def _move(cluster: Cluster, data: np.ndarray, out: np.ndarray, dest: int, source: int) -> None:
    """Send and receive in chunks, as far reads do, so that no direction waits for the other."""
    arrays, step = cluster.arrays, CHUNK_BYTES
    begins = range(0, data.size, step)
    coming = [arrays.begin_receive(out[b : b + step], source, TAG_PROBE) for b in begins]
    left = deque(data[b : b + step] for b in begins)
    going: deque[Request] = deque()

    def done() -> bool:
        while going and going[0].Test():
            going.popleft()
        while left and len(going) < WINDOW:
            going.append(arrays.begin_send(left.popleft(), dest, TAG_PROBE))
        return not going and all_done(coming)

    cluster.wait(done)


def _slowest(cluster: Cluster, seconds: Sequence[float]) -> np.ndarray:
    mine, found = np.array(seconds), np.zeros(len(seconds))
    cluster.wait_request(begin_maximum(cluster.comm, mine, found))
    return found


# Codecs ----------------------------------------------------------------------------------------


def measure_codecs(
    cluster: Cluster, codecs: Sequence[Codec | None], n: int, whole: int, dtype: np.dtype
) -> dict[Codec | None, Candidate]:
    """Return what each codec takes, on the slowest core. Collective: yes.

    Args:
        cluster: The ranks, which pack all at once.
        codecs: To be measured; compiled (`mpips.codecs.warm`).
        n: Elements to pack.
        whole: Elements that are packed in training.
        dtype: Of the elements.
    """
    grad = np.resize(np.random.default_rng(0).standard_normal(min(n, PERIOD)).astype(dtype), n)
    measured = list(dict.fromkeys(codec for codec in codecs if codec is not None))
    times = _slowest(cluster, [t for codec in measured for t in _times(codec, grad)])
    found: dict[Codec | None, Candidate] = {None: RAW}
    for codec, (pack_s, unpack_s) in zip(measured, times.reshape(-1, 2), strict=True):
        ratio = codec.wire_bytes(whole, dtype) / (whole * dtype.itemsize)
        rates = grad.nbytes / float(pack_s), grad.nbytes / float(unpack_s)
        found[codec] = Candidate(codec.name, ratio, *rates)
    return found


def _times(codec: Codec, grad: np.ndarray) -> tuple[float, float]:
    """Return the seconds of packing and of unpacking, the least of some tries each."""
    message, out = buffer_for(codec.wire_bytes(grad.size, grad.dtype)), np.zeros_like(grad)
    state = codec.fresh_state(grad.size, grad.dtype)
    packing = _least(lambda: codec.encode(grad, message, state, MessageId()))
    return packing, _least(lambda: codec.decode(message, out))


def _least(work: Callable[[], object]) -> float:
    found: list[float] = []
    while len(found) < 2 or (len(found) < TRIES and sum(found) < PACKING_S):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return min(found)
