"""Rounds of codec powersgd, which sum factors over nodes.

See `mpips.codecs.powersgd` for the method. The unit is the node, whose ranks share the matrices by
rows. Each rank sums the local gradients of its rows, adds the error that it keeps of them, and
multiplies by Q. The node's leader sums P over the nodes, and then Q'. Every node then knows the
product of the two, so no parameters are sent. Every node has a whole replica and whole slots, in
the memory of its leader, and each rank updates its rows. All nodes compute from the same bits in
the same order (MPI-4.1, section 6.9.6: all processes receive identical results of an Allreduce). So
they stay equal; they are compared before each checkpoint.

    barrier | M_w of own rows, P of them | barrier | leader: Allreduce of P, orthogonalize
    barrier | own rows' part of Q_w | barrier | leader: Q_w, Allreduce of Q'
    barrier | gradient, error and update of own rows | barrier

For checkpoints, an owner's parameters and slots are its shard of the node's; between two rounds no
rank writes them.
"""

import zlib
from collections.abc import Iterator
from functools import partial
from time import perf_counter
from typing import NamedTuple

import numpy as np

from mpips.codecs import BASIS, ERROR
from mpips.codecs.powersgd import Factors, drawn, orthogonalize, product_squares, rebuild
from mpips.datasets.ledger import part as part_of
from mpips.errors import UserError
from mpips.kernels.vectors import addresses_of, all_finite, scale, sum_rows, sum_squares
from mpips.mpi.collectives import begin_maximum, begin_sum, first_ranks
from mpips.mpi.start import TAG_START, Comm, Request
from mpips.mpi.window import Field, Parts, Window, transfer_pieces
from mpips.optim import Part, Rule, Slots, clip_factor
from mpips.planning.job import Job
from mpips.rounds.base import OwnState, Report, Transfers, Weights
from mpips.rounds.node import NodeRound

BLOCK_BYTES = 1 << 18  # of a matrix: in the cache from the sum to its product with Q


class NodeFactors:
    """Views of a node's vectors and factors, in its leader's segment.

    Args:
        job: The run.
        shapes: Positions of each matrix and its factors.
        window: Window of the node's ranks.
        addresses: Addresses of the gradients of the node's workers.

    Attributes:
        shapes: As given; `addresses` as well.
        replica: The parameters, shape (n_params,); `slots` are of the same shape each.
        parts: Each local rank's part of Q_w, of the shape of all Q.
        first: P of all matrices, and then the uncompressed elements, which are `raw`.
        q: Q of all matrices, each transposed.
        own: Q_w of all matrices, each transposed: the node's part.
        scale: Element 0 is the factor of clipping.
        ps: P or P^ of each matrix, shape (m, r).
        qs: Transposed Q of each matrix, shape (r, n).
    """

    def __init__(self, job: Job, shapes: Factors, window: Window, addresses: np.ndarray) -> None:
        ranks, r, self.shapes, self.addresses = job.cluster.my_node, shapes.rank, shapes, addresses
        view = partial(window.view, ranks[0])
        self.replica = view("replica")
        self.slots: Slots = tuple(view(f"slots/{s}") for s in job.rule.slots)
        self.first, self.q, self.own, self.scale = map(view, ("first", "q", "own", "scale"))
        self.parts = [window.view(rank, "part") for rank in ranks]
        self.raw = self.first[shapes.p_size :]
        self.ps = [
            self.first[x.p_begin : x.p_begin + x.m * r].reshape(x.m, r) for x in shapes.matrices
        ]
        self.qs = self.cut_q(self.q)

    def cut_q(self, vector: np.ndarray) -> list[np.ndarray]:
        """Return the part of each matrix in a vector like `q`, shape (r, n)."""
        r = self.shapes.rank
        return [
            vector[x.q_begin : x.q_begin + r * x.n].reshape(r, x.n) for x in self.shapes.matrices
        ]


class Rows(NamedTuple):
    """A rank's rows of one matrix, as views.

    Attributes:
        begin: Position of their first element in the flat vector.
        p: Their rows of P or P^, shape (rows, r).
        error: E_w, and M_w within a round, shape (rows, n).
        q: Transposed Q, shape (r, n); `own` is that of Q_w, `part` these rows' contribution to it.
    """

    begin: int
    p: np.ndarray
    error: np.ndarray
    q: np.ndarray
    own: np.ndarray
    part: np.ndarray

    def blocks(self) -> Iterator[tuple[slice, slice]]:
        """Yield blocks of rows, each also as a range of the flat vector."""
        rows, n = self.error.shape
        step = max(1, BLOCK_BYTES // (n * self.error.itemsize))
        for a in range(0, rows, step):
            b = min(a + step, rows)
            yield slice(a, b), slice(self.begin + a * n, self.begin + b * n)


class RankRows:
    """Computation of one rank: its rows of each matrix, and its share of the uncompressed elements.

    Args:
        job: The run.
        node: The node's factors.
        transfers: Counts the time.

    Attributes:
        rows: This rank's rows of each matrix, if it has any of it.
    """

    def __init__(self, job: Job, node: NodeFactors, transfers: Transfers) -> None:
        self._cluster, self._node, self._transfers = job.cluster, node, transfers
        self._rate, self._max_norm, self._trained = job.rate(), job.config.clip, job.trained
        k, count = self._cluster.my_node.index(self._cluster.rank), len(self._cluster.my_node)
        self.rows = list(_rows_of(node, k, count))
        _, begin, end = part_of((0, 0, node.shapes.raw_size), k, count)
        self._raw_parts = node.shapes.raw_parts(begin, end)
        blocks = [flat for rows in self.rows for _, flat in rows.blocks()]
        self._grad = np.zeros(max((b.stop - b.start for b in blocks), default=0), job.dtype)
        self._ranges = [*blocks, *(part.range for _, part in self._raw_parts)]
        self.cut(job.rule)

    def cut(self, rule: Rule) -> None:
        """Use this rule from now on, and make the views of its parts of each range."""
        params, slots = self._node.replica, self._node.slots
        self._updates: dict[int, list[tuple[Part, np.ndarray, Slots]]] = {}
        for flat in self._ranges:
            views = self._updates[flat.start] = []
            for part in rule.parts(flat.start, flat.stop):
                at = slice(part.begin, part.end)
                views.append((part, params[at], tuple(slot[at] for slot in slots)))

    @np.errstate(over="ignore", invalid="ignore")  # what is not finite ends the run
    def compress(self, weights: np.ndarray) -> None:
        """Compute M_w and P of this rank's rows, and the sums of its uncompressed elements."""
        start = perf_counter()
        for rows in self.rows:
            for block, flat in rows.blocks():
                grad = self._grad[: flat.stop - flat.start]
                sum_rows(self._node.addresses, weights, flat.start, grad)
                error = rows.error[block]
                error += grad.reshape(error.shape)
                np.matmul(error, rows.q.T, out=rows.p[block])
            self._cluster.progress()
        for at, part in self._raw_parts:
            raw = self._node.raw[at : at + part.size]
            sum_rows(self._node.addresses, weights, part.begin, raw)
        self._transfers.busy_s += perf_counter() - start

    @np.errstate(over="ignore", invalid="ignore")
    def project(self) -> None:
        """Compute this rank's contribution to Q_w, from P^."""
        for rows in self.rows:
            np.matmul(rows.p.T, rows.error, out=rows.part)

    def update(self, step: int, factor: float = 1.0) -> None:
        """Compute the gradient and error of this rank's elements, and update them.

        Args:
            step: Number of the update.
            factor: Factor of the learning rate.
        """
        start, lr = perf_counter(), self._rate(step) * factor
        for rows in self.rows:
            for block, flat in rows.blocks():
                grad, error = self._grad[: flat.stop - flat.start], rows.error[block]
                rebuild(rows.p[block], rows.q, rows.own, error, grad.reshape(error.shape))
                self._apply(flat, grad, step, lr)
            self._cluster.progress()
        for at, part in self._raw_parts:
            self._apply(part.range, self._node.raw[at : at + part.size], step, lr)
        self._transfers.busy_s += perf_counter() - start

    def _apply(self, flat: slice, grad: np.ndarray, step: int, lr: float) -> None:
        if self._max_norm:
            scale(grad[: max(0, self._trained - flat.start)], self._node.scale.item(0))
        for (begin, end, rule, factor), params, slots in self._updates[flat.start]:
            part = grad[begin - flat.start : end - flat.start]
            rule.apply(params, part, slots, step, lr * factor)


def _rows_of(node: NodeFactors, k: int, count: int) -> Iterator[Rows]:
    """Yield the rows of each matrix of the k-th of `count` ranks on the node."""
    owns, parts = node.cut_q(node.own), node.cut_q(node.parts[k])
    views = zip(node.shapes.matrices, node.ps, node.qs, owns, parts, strict=True)
    for x, p, q, own, mine in views:
        _, a, b = part_of((0, 0, x.m), k, count)
        if a < b:
            error = np.zeros((b - a, x.n), mine.dtype)
            yield Rows(x.begin + a * x.n, p[a:b], error, q, own, mine)


class FactorSums:
    """Computation of a node's leader: sums of the factors over ranks and nodes.

    Args:
        job: The run.
        node: The node's factors.
        leaders: Communicator of the nodes' leaders.
        transfers: Counts bytes and time.
    """

    def __init__(self, job: Job, node: NodeFactors, leaders: Comm, transfers: Transfers) -> None:
        self._node, self._leaders, self._transfers = node, leaders, transfers
        self._seed, self._max_norm = job.config.seed, job.config.clip
        # The part of parameters, which is clipped; statistics follow them in both.
        trained = [x for x in node.shapes.matrices if x.begin < job.trained]
        self._raw = node.raw[: job.trained - sum(x.m * x.n for x in trained)]
        self._pairs = [*zip(node.ps, node.qs, strict=True)][: len(trained)]
        self._parts, self._once = addresses_of(node.parts), np.ones(len(node.parts))
        self._lost: list[np.ndarray] = []  # linearly dependent columns of each P

    def _begin(self, vector: np.ndarray) -> list[Request]:
        return [self._transfers.begin_sum(self._leaders, p) for p in transfer_pieces(vector)]

    def add_p(self, others: list[Request]) -> None:
        """Sum P and uncompressed elements over the nodes, and compute P^; completes `others`."""
        self._transfers.wait(self._begin(self._node.first) + others)
        self._lost = []
        for p in self._node.ps:
            lost = np.zeros(p.shape[1], np.bool_)
            orthogonalize(p, np.zeros(p.shape[::-1]), lost)
            self._lost.append(lost)

    def add_q(self, step: int) -> None:
        """Sum Q_w over the node's ranks, and Q' over the nodes."""
        node = self._node
        sum_rows(self._parts, self._once, 0, node.own)
        np.copyto(node.q, node.own)
        sums = self._begin(node.q)
        # One node computes it for all, since another might round differently.
        squares = np.array([sum_squares(self._raw) if self._leaders.rank == 0 else 0.0])
        if self._max_norm:
            sums.append(begin_sum(self._leaders, squares))
        self._transfers.wait(sums)
        if self._max_norm:
            total = float(squares[0]) + sum(product_squares(p, q) for p, q in self._pairs)
            node.scale[0] = clip_factor(total, self._max_norm)
        for index, (q, lost) in enumerate(zip(node.qs, self._lost, strict=True)):
            if lost.any():  # a column of zeros would stay zero, and add nothing to G
                q[lost] = drawn(self._seed, step, index, q.shape)[lost]


class PowerSgdRound(NodeRound):
    """Rounds by PowerSGD, on several nodes."""

    def __init__(self, job: Job) -> None:
        """See `Round.__init__`."""
        shapes = Factors.of(job.layout, job.dtype, job.config.powersgd_rank)
        written = _row_parts(job, shapes)
        super().__init__(job, None, None, _factor_fields(job, shapes, written), written)
        node = NodeFactors(job, shapes, self._window, self._addresses)
        self._node_slots = node.slots
        if self._cluster.rank in self._cluster.roles.owners:
            self.slots = tuple(slot[job.shard.range] for slot in node.slots)
        self._rows = RankRows(job, node, self.transfers)
        self._sums: FactorSums | None = None  # on leaders
        self._state: OwnState = {ERROR: [(r.begin, r.error.reshape(-1)) for r in self._rows.rows]}
        if self._leads:
            self._sums = FactorSums(job, node, self._leaders, self.transfers)
            self._state[BASIS] = [(0, node.q)]
            node.q[:] = shapes.first_basis(job.config.seed, job.dtype)

    def own_state(self) -> OwnState:
        """See `Round.own_state`: E_w by the flat vector; on leaders Q by the vector of all Q."""
        return self._state

    def publish_start(self) -> None:
        """Send the owners' parameters and slots to every node. Collective: yes."""
        cluster, arrays = self._cluster, self._cluster.arrays
        vectors = (self.replica, *self._node_slots)
        requests: list[Request] = []
        for rank, shard in zip(cluster.roles.owners, self._job.shards, strict=True):
            pieces = [p for v in vectors for p in transfer_pieces(v[shard.range])]
            if rank == cluster.rank:
                remote = [r for r in first_ranks(cluster.node_of) if not cluster.is_local(r)]
                requests += [
                    arrays.begin_send(p, leader, TAG_START) for leader in remote for p in pieces
                ]
            elif self._leads and not cluster.is_local(rank):
                requests += [arrays.begin_receive(p, rank, TAG_START) for p in pieces]
                self.transfers.bytes_received += sum(p.nbytes for p in pieces)
        self.transfers.wait(requests)
        self._barrier.wait()

    def exchange(self, step: int, weights: Weights, report: Report) -> Report:
        """See `Round.exchange`."""
        self._barrier.enter(report)
        self._rows.compress(np.asarray(weights)[self._workers])
        self._barrier.wait()
        if self._sums is not None:
            self._sums.add_p(self._begin_report_sum())
            self._publish_report_sum()
        self._barrier.wait()
        self._rows.project()
        self._barrier.wait()
        if self._sums is not None:
            self._sums.add_q(step)
        self._barrier.wait()
        if self._sets_rate:
            self._leave_frozen(self._barrier.frozen)
        self._rows.update(step, self._barrier.factor)
        return self._barrier.leave()

    def _apply_by(self, rule: Rule) -> None:
        self._rows.cut(rule)

    def compare(self, step: int) -> None:
        """See `Round.compare`: compares the leaders' CRCs of the replicas and slots."""
        mine = np.full(2, np.iinfo("i8").min)
        if self._leads:
            mine[:] = 0  # else other checks refuse it; a NaN has many bit patterns
            if all_finite(self.replica):
                crc = 0
                for vector in (self.replica, *self._node_slots):
                    crc = zlib.crc32(vector.data, crc)
                mine[:] = crc, -crc
        most = np.zeros_like(mine)
        self.transfers.wait([begin_maximum(self._cluster.comm, mine, most)])
        if most[0] != -most[1]:
            got = f"replicas that differ from node to node at step {step}"
            wanted = "the same bits on all nodes, which powersgd keeps by equal arithmetic"
            remedy = "go on from the last checkpoint, on nodes of one kind or with another --codec"
            raise UserError(got, wanted, remedy)

    def free(self) -> None:
        """See `Round.free`."""
        super().free()
        self._sums, self._state, self._node_slots = None, {}, ()


def _row_parts(job: Job, shapes: Factors) -> Parts:
    """Return the ranges of the flat vector that each rank of this node updates."""
    ranks, found = job.cluster.my_node, list[tuple[int, int, int]]()
    for k, rank in enumerate(ranks):
        for x in shapes.matrices:
            _, a, b = part_of((0, 0, x.m), k, len(ranks))
            found.append((rank, x.begin + a * x.n, x.begin + b * x.n))
        raw = shapes.raw_parts(*part_of((0, 0, shapes.raw_size), k, len(ranks))[1:])
        found += [(rank, part.begin, part.end) for _, part in raw]
    return tuple(found)


def _factor_fields(job: Job, shapes: Factors, parts: Parts) -> list[list[Field]]:
    """Return the fields of the factors and slots in each rank's segment."""
    dtype, n = job.config.dtype, job.layout.size
    part = Field("part", dtype, (shapes.q_size,))
    on_leaders = [
        Field("first", dtype, (shapes.p_size + shapes.raw_size,)),
        Field("q", dtype, (shapes.q_size,)),
        Field("own", dtype, (shapes.q_size,)),
        Field("scale", "f8", (8,)),
        *(Field(f"slots/{name}", dtype, (n,), parts=parts) for name in job.rule.slots),
    ]
    leading = first_ranks(job.cluster.node_of)
    return [[part, *(on_leaders if r in leading else ())] for r in range(job.cluster.world)]
