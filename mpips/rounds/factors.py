"""PowerSGD's factors on a node, in the memory of its leader."""

from collections.abc import Iterator
from time import perf_counter
from typing import NamedTuple

import numpy as np

from mpips.codecs.powersgd import (
    Factors,
    cut_rows,
    drawn,
    orthogonalize,
    product_squares,
    rebuild,
)
from mpips.kernels.vectors import addresses_of, sum_rows, sum_squares
from mpips.mpi.collectives import begin_sum
from mpips.mpi.start import Comm, Request
from mpips.mpi.window import Window, transfer_pieces
from mpips.optim import Slots, clip_factor
from mpips.planning.job import Job
from mpips.rounds.base import Transfers

BLOCK_BYTES = 1 << 18  # of a matrix: in the cache from the sum to its product with Q


class NodeFactors:
    """Views of a node's factors.

    Args:
        shapes: Where each matrix and its factors lie.
        window: Of the node's ranks.
        leader: The rank whose segment holds them.

    Attributes:
        shapes: As given.
        first: P of all matrices, and then what goes raw, which is `raw`.
        q: Q of all matrices, each transposed.
        own: Q_w of all matrices, likewise: the node's part.
        scale: Element 0 is the factor of clipping.
        ps: P or P^ of each matrix, shape (m, r).
        qs: The transpose of Q of each, shape (r, n).
    """

    def __init__(self, shapes: Factors, window: Window, leader: int) -> None:
        self.shapes, r = shapes, shapes.rank
        self.first, self.q, self.own = (window.view(leader, k) for k in ("first", "q", "own"))
        self.scale = window.view(leader, "scale")
        self.raw = self.first[shapes.p_size :]
        self.ps = [
            self.first[x.p_begin : x.p_begin + x.m * r].reshape(x.m, r) for x in shapes.matrices
        ]
        self.qs = self.cut_q(self.q)

    def cut_q(self, vector: np.ndarray) -> list[np.ndarray]:
        """Return the part of each matrix of a vector like `q`, shape (r, n)."""
        r = self.shapes.rank
        return [
            vector[x.q_begin : x.q_begin + r * x.n].reshape(r, x.n) for x in self.shapes.matrices
        ]


class Rows(NamedTuple):
    """A rank's rows of one matrix, as views.

    Attributes:
        begin: Of their first element in the flat vector.
        p: Of P or P^, shape (rows, r).
        error: E_w, and M_w within a round, shape (rows, n).
        q: The transpose of Q, shape (r, n); `own` that of Q_w, `part` what these rows add to it.
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
    """What one rank computes: the rows of each matrix that are its share, and of what goes raw.

    Args:
        job: The run.
        node: The node's factors.
        part: Where this rank adds to Q_w, of the shape of all Q.
        addresses: Of the gradients of the node's workers.
        replica: The node's parameters, shape (n_params,).
        slots: The node's slots, each of that shape.
        transfers: Where the time is counted.

    Attributes:
        rows: This rank's rows of each matrix that it has any of.
        rule: What is applied to them.
    """

    def __init__(
        self,
        job: Job,
        node: NodeFactors,
        part: np.ndarray,
        addresses: np.ndarray,
        replica: np.ndarray,
        slots: Slots,
        transfers: Transfers,
    ) -> None:
        self._cluster, self._node, self._addresses = job.cluster, node, addresses
        self._replica, self._slots, self._transfers = replica, slots, transfers
        self.rule, self._rate, self._max_norm = job.rule, job.rate(), job.config.clip
        self._trained = job.trained
        k, count = self._cluster.my_node.index(self._cluster.rank), len(self._cluster.my_node)
        self.rows = list(_rows_of(node, part, k, count))
        begin, end = cut_rows(node.shapes.raw_size, [k], count)[0]
        self._raw_parts = node.shapes.raw_parts(begin, end)
        sizes = (flat.stop - flat.start for rows in self.rows for _, flat in rows.blocks())
        self._grad = np.zeros(max(sizes, default=0), job.dtype)

    def compress(self, weights: np.ndarray) -> None:
        """Set M_w and P of this rank's rows, and the node's sums of its raw elements."""
        start = perf_counter()
        for rows in self.rows:
            for block, flat in rows.blocks():
                grad = self._grad[: flat.stop - flat.start]
                sum_rows(self._addresses, weights, flat.start, grad)
                error = rows.error[block]
                error += grad.reshape(error.shape)
                np.matmul(error, rows.q.T, out=rows.p[block])
            self._cluster.progress()
        for at, part in self._raw_parts:
            raw = self._node.raw[at : at + part.size]
            sum_rows(self._addresses, weights, part.begin, raw)
        self._transfers.busy_s += perf_counter() - start

    def project(self) -> None:
        """Set what this rank's rows add to Q_w, from P^."""
        for rows in self.rows:
            np.matmul(rows.p.T, rows.error, out=rows.part)

    def update(self, step: int, factor: float = 1.0) -> None:
        """Make the gradient, the error and the update of this rank's elements.

        Args:
            step: Number of the update.
            factor: Of the learning rate.
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
            trained = grad[: max(0, self._trained - flat.start)]
            trained *= grad.dtype.type(self._node.scale[0])
        for begin, end, rule, scale in self.rule.parts(flat.start, flat.stop):
            at, part = slice(begin, end), grad[begin - flat.start : end - flat.start]
            slots: Slots = tuple(slot[at] for slot in self._slots)
            rule.apply(self._replica[at], part, slots, step, lr * scale)


def _rows_of(node: NodeFactors, part: np.ndarray, k: int, count: int) -> Iterator[Rows]:
    """Yield the rows of each matrix that are those of rank k of `count` on the node."""
    views = zip(
        node.shapes.matrices, node.ps, node.qs, node.cut_q(node.own), node.cut_q(part), strict=True
    )
    for x, p, q, own, mine in views:
        a, b = cut_rows(x.m, [k], count)[0]
        if a < b:
            error = np.zeros((b - a, x.n), part.dtype)
            yield Rows(x.begin + a * x.n, p[a:b], error, q, own, mine)


class FactorSums:
    """What a node's leader computes: the sums of the factors over ranks and nodes.

    Args:
        job: The run.
        node: The node's factors.
        parts: What each of the node's ranks adds to Q_w.
        leaders: Communicator of the nodes' leaders.
        transfers: Where bytes and time are counted.
    """

    def __init__(
        self,
        job: Job,
        node: NodeFactors,
        parts: list[np.ndarray],
        leaders: Comm,
        transfers: Transfers,
    ) -> None:
        self._node, self._leaders, self._transfers = node, leaders, transfers
        self._seed, self._max_norm = job.config.seed, job.config.clip
        self._raw = node.raw[: node.raw.size - (job.layout.size - job.trained)]
        self._parts, self._once = addresses_of(parts), np.ones(len(parts))
        self._lost: list[np.ndarray] = []  # columns of each P that are no longer independent

    def _begin(self, vector: np.ndarray) -> list[Request]:
        return [self._transfers.begin_sum(self._leaders, p) for p in transfer_pieces(vector)]

    def add_p(self, others: list[Request]) -> None:
        """Add up P and what goes raw over the nodes, and make P^; completes `others` too."""
        self._transfers.wait(self._begin(self._node.first) + others)
        self._lost = []
        for p in self._node.ps:
            lost = np.zeros(p.shape[1], np.bool_)
            orthogonalize(p, np.zeros(p.shape[::-1]), lost)
            self._lost.append(lost)

    def add_q(self, step: int) -> None:
        """Add up Q_w over the node's ranks, and Q' over the nodes."""
        node = self._node
        sum_rows(self._parts, self._once, 0, node.own)
        np.copyto(node.q, node.own)
        sums = self._begin(node.q)
        # One node tells the others, which might round another way.
        squares = np.array([sum_squares(self._raw) if self._leaders.rank == 0 else 0.0])
        if self._max_norm:
            sums.append(begin_sum(self._leaders, squares))
        self._transfers.wait(sums)
        if self._max_norm:
            pairs = zip(node.ps, node.qs, strict=True)
            total = float(squares[0]) + sum(product_squares(p, q) for p, q in pairs)
            node.scale[0] = clip_factor(total, self._max_norm)
        for index, (q, lost) in enumerate(zip(node.qs, self._lost, strict=True)):
            if lost.any():  # a column of zeroes would stay one; it adds nothing to G, as P^ has it
                q[lost] = drawn(self._seed, step, index, q.shape)[lost]
