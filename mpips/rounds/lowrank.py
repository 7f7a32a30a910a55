"""Rounds of codec powersgd: nodes add up the factors of their gradients (`mpips.codecs.powersgd`).

The unit is the node. Its ranks share the matrices by rows: each sums the near gradients of its rows
and adds the error that it keeps of them, multiplies them by Q, and the node's leader adds up P over
the nodes; likewise Q'. The product of the two is then known on every node, so that no parameter
crosses: every node has a whole replica and whole slots, in the memory of its leader, and its ranks
make the update of their rows. All nodes compute it from the same bits in the same order (MPI-4.1,
section 6.9.6: all processes receive identical results of an Allreduce), so that they stay equal;
before each checkpoint they are compared.

    meet | M_w of own rows, P of them | meet | leader: Allreduce of P, orthogonalize
    meet | own rows' part of Q_w | meet | leader: Q_w, Allreduce of Q'
    meet | gradient, error and update of own rows | meet

An owner's parameters and slots are its shard of the node's, for checkpoints; between two rounds
nobody writes there.
"""

import zlib
from collections.abc import Iterator
from functools import cached_property
from time import perf_counter
from typing import NamedTuple

import numpy as np

from mpips.cluster.window import Field, transfer_pieces
from mpips.cluster.world import Request, begin_maximum, begin_sum
from mpips.codecs.powersgd import (
    Factors,
    cut_rows,
    drawn,
    orthogonalize,
    product_squares,
    rebuild,
)
from mpips.errors import UserError
from mpips.kernels.vectors import addresses_of, all_finite, sum_rows, sum_squares
from mpips.optim import Slots, clip_factor
from mpips.planning.job import Job
from mpips.rounds.meeting import NodeRound, OwnState, Report, Weights, leaders

TAG_START = 6
ERROR, BASIS = "error", "basis"
BLOCK_BYTES = 1 << 18  # of a matrix: in the cache from the sum to its product with Q


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


class LowRankRound(NodeRound):
    """Rounds by PowerSGD, on several nodes."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        cluster, view, factors = self._cluster, self._window.view, self._factors
        lead = self._leader
        self._all_slots = tuple(view(lead, f"slots/{name}") for name in self._rule.slots)
        self._first, self._q, self._own = (view(lead, name) for name in ("first", "q", "own"))
        self._scale = view(lead, "scale")
        self._raw = self._first[factors.p_size :]
        if self._owner:
            self.params = self.replica[job.shard.range]
            self.slots = tuple(slot[job.shard.range] for slot in self._all_slots)
        self._rows = list(self._own_rows())
        k, count = cluster.my_node.index(cluster.rank), len(cluster.my_node)
        begin, end = cut_rows(factors.raw_size, [k], count)[0]
        self._raw_parts = factors.raw_parts(begin, end)
        largest = max(
            (b.stop - b.start for rows in self._rows for _, b in rows.blocks()), default=0
        )
        self._grad_block = np.zeros(largest, job.dtype)
        self._parts = addresses_of([view(rank, "part") for rank in cluster.my_node])
        self._once = np.ones(count)
        if self._leads:
            self._q[:] = factors.first_basis(job.config.seed, job.dtype)

    @cached_property
    def _factors(self) -> Factors:
        job = self._job
        return Factors.of(job.layout, job.dtype, job.config.powersgd_rank)

    def _fields(self, rank: int) -> list[Field]:
        factors, dtype, n = self._factors, self._job.config.dtype, self._job.layout.size
        found = [Field("part", dtype, (factors.q_size,))]
        if rank in leaders(self._cluster.node_of):
            found.append(Field("first", dtype, (factors.p_size + factors.raw_size,)))
            found += [Field(name, dtype, (factors.q_size,)) for name in ("q", "own")]
            found.append(Field("scale", "f8", (8,)))
            found += [Field(f"slots/{name}", dtype, (n,)) for name in self._rule.slots]
        return found

    def _own_rows(self) -> Iterator[Rows]:
        cluster, r = self._cluster, self._factors.rank
        part = self._window.view(cluster.rank, "part")
        k, count = cluster.my_node.index(cluster.rank), len(cluster.my_node)
        for x, p in zip(self._factors.matrices, self._p_of_all(), strict=True):
            a, b = cut_rows(x.m, [k], count)[0]
            if a == b:
                continue
            q, own, mine = (
                vector[x.q_begin : x.q_begin + r * x.n].reshape(r, x.n)
                for vector in (self._q, self._own, part)
            )
            error = np.zeros((b - a, x.n), self._job.dtype)
            yield Rows(x.begin + a * x.n, p[a:b], error, q, own, mine)

    def _p_of_all(self) -> list[np.ndarray]:
        """Return each matrix's P, shape (m, r)."""
        r = self._factors.rank
        return [
            self._first[x.p_begin : x.p_begin + x.m * r].reshape(x.m, r)
            for x in self._factors.matrices
        ]

    def _q_of_all(self) -> list[np.ndarray]:
        """Return each matrix's Q transposed, shape (r, n)."""
        r = self._factors.rank
        return [
            self._q[x.q_begin : x.q_begin + r * x.n].reshape(r, x.n) for x in self._factors.matrices
        ]

    def own_state(self) -> OwnState:
        """See `Round.own_state`: E_w by the flat vector, on leaders Q by that of all Q."""
        found: OwnState = {ERROR: [(rows.begin, rows.error.reshape(-1)) for rows in self._rows]}
        return found | ({BASIS: [(0, self._q)]} if self._leads else {})

    def publish_start(self) -> None:
        """Bring the owners' parameters and slots to every node. Collective: yes."""
        cluster, comm = self._cluster, self._cluster.comm
        vectors = (self.replica, *self._all_slots)
        requests: list[Request] = []
        for rank, shard in zip(cluster.roles.owners, self._job.shards, strict=True):
            pieces = [p for v in vectors for p in transfer_pieces(v[shard.range])]
            if rank == cluster.rank:
                far = [r for r in leaders(cluster.node_of) if not cluster.near(r)]
                requests += [comm.Isend(p, leader, TAG_START) for leader in far for p in pieces]
            elif self._leads and not cluster.near(rank):
                requests += [comm.Irecv(p, rank, TAG_START) for p in pieces]
        self._wait(requests)
        self._meet()

    def exchange(self, step: int, weights: Weights, report: Report) -> Report:
        """See `Round.exchange`."""
        self._enter(report)
        self._compress(np.asarray(weights)[self._workers])
        self._meet()
        if self._leads:
            self._add_first()
        self._meet()
        for rows in self._rows:
            np.matmul(rows.p.T, rows.error, out=rows.part)
        self._meet()
        if self._leads:
            self._add_second(step)
        self._meet()
        self._update(step)
        return self._leave()

    def _compress(self, weights: np.ndarray) -> None:
        """Set M_w and P of this rank's rows, and the node's sums of its raw elements."""
        start = perf_counter()
        for rows in self._rows:
            for block, flat in rows.blocks():
                grad = self._grad_block[: flat.stop - flat.start]
                sum_rows(self._addresses, weights, flat.start, grad)
                error = rows.error[block]
                error += grad.reshape(error.shape)
                np.matmul(error, rows.q.T, out=rows.p[block])
            self._cluster.progress()
        for at, part in self._raw_parts:
            sum_rows(self._addresses, weights, part.begin, self._raw[at : at + part.size])
        self.busy_s += perf_counter() - start

    def _add_first(self) -> None:
        """Add up P, what goes raw and the reports over the nodes; make P^."""
        sums = [self._add_up(self._leaders, part) for part in transfer_pieces(self._first)]
        self._wait(sums + self._begin_agreeing())
        self._agree()
        self._lost = []
        for p in self._p_of_all():
            lost = np.zeros(p.shape[1], np.bool_)
            orthogonalize(p, np.zeros(p.shape[::-1]), lost)
            self._lost.append(lost)

    def _add_second(self, step: int) -> None:
        """Add up Q_w over the node's ranks, and Q' over the nodes."""
        sum_rows(self._parts, self._once, 0, self._own)
        np.copyto(self._q, self._own)
        sums = [self._add_up(self._leaders, part) for part in transfer_pieces(self._q)]
        # One node tells the others, which might round another way.
        squares = np.array([sum_squares(self._raw) if self._leaders.rank == 0 else 0.0])
        if self._max_norm:
            sums.append(begin_sum(self._leaders, squares))
        self._wait(sums)
        if self._max_norm:
            pairs = zip(self._p_of_all(), self._q_of_all(), strict=True)
            total = float(squares[0]) + sum(product_squares(p, q) for p, q in pairs)
            self._scale[0] = clip_factor(total, self._max_norm)
        for index, (q, lost) in enumerate(zip(self._q_of_all(), self._lost, strict=True)):
            if lost.any():  # a column of zeroes would stay one; it adds nothing to G, as P^ has it
                q[lost] = drawn(self._job.config.seed, step, index, q.shape)[lost]

    def _update(self, step: int) -> None:
        """Make the gradient, the error and the update of this rank's elements."""
        start, lr = perf_counter(), self._rate(step)
        for rows in self._rows:
            for block, flat in rows.blocks():
                grad, error = self._grad_block[: flat.stop - flat.start], rows.error[block]
                rebuild(rows.p[block], rows.q, rows.own, error, grad.reshape(error.shape))
                self._apply_to(flat, grad, step, lr)
            self._cluster.progress()
        for at, part in self._raw_parts:
            self._apply_to(part.range, self._raw[at : at + part.size], step, lr)
        self.busy_s += perf_counter() - start

    def _apply_to(self, flat: slice, grad: np.ndarray, step: int, lr: float) -> None:
        if self._max_norm:
            grad *= grad.dtype.type(self._scale[0])
        slots: Slots = tuple(slot[flat] for slot in self._all_slots)
        self._rule.apply(self.replica[flat], grad, slots, step, lr)

    def compare(self, step: int) -> None:
        """See `Round.compare`: the replicas and slots, by a CRC that leaders bring."""
        mine = np.full(2, np.iinfo("i8").min)
        if self._leads:
            mine[:] = 0  # what is not finite is refused elsewhere, and a NaN has many faces
            if all_finite(self.replica):
                crc = 0
                for vector in (self.replica, *self._all_slots):
                    crc = zlib.crc32(vector.data, crc)
                mine[:] = crc, -crc
        most = np.zeros_like(mine)
        self._wait([begin_maximum(self._cluster.comm, mine, most)])
        if most[0] != -most[1]:
            got = f"replicas that differ from node to node at step {step}"
            wanted = "the same bits on all nodes, which powersgd keeps by equal arithmetic"
            remedy = "go on from the last checkpoint, on nodes of one kind or with another --codec"
            raise UserError(got, wanted, remedy)

    def free(self) -> None:
        """See `Round.free`."""
        self._first = self._q = self._own = self._raw = self._scale = np.zeros(0)
        self._all_slots, self._rows, self._raw_parts = (), [], []
        super().free()
