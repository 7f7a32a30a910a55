"""Rounds of codec powersgd, which add up factors over nodes.

See `mpips.codecs.powersgd` for the method.
The unit is the node. Its ranks share the matrices by rows: each sums the local gradients of its
rows and adds the error that it keeps of them, multiplies them by Q, and the node's leader adds up P
over the nodes; likewise Q'. The product of the two is then known on every node, so that no
parameter
crosses: every node has a whole replica and whole slots, in the memory of its leader, and its ranks
make the update of their rows. All nodes compute it from the same bits in the same order (MPI-4.1,
section 6.9.6: all processes receive identical results of an Allreduce), so that they stay equal;
before each checkpoint they are compared.

    barrier | M_w of own rows, P of them | barrier | leader: Allreduce of P, orthogonalize
    barrier | own rows' part of Q_w | barrier | leader: Q_w, Allreduce of Q'
    barrier | gradient, error and update of own rows | barrier

An owner's parameters and slots are its shard of the node's, for checkpoints; between two rounds
nobody writes there.
"""

import zlib

import numpy as np

from mpips.codecs.powersgd import Factors
from mpips.errors import UserError
from mpips.kernels.vectors import all_finite
from mpips.mpi.collectives import begin_maximum
from mpips.mpi.start import Request
from mpips.mpi.tags import TAG_START
from mpips.mpi.window import Field, transfer_pieces
from mpips.optim import Rule, Slots
from mpips.planning.job import Job
from mpips.rounds.base import OwnState, Report, Weights
from mpips.rounds.factors import FactorSums, NodeFactors, RankRows
from mpips.rounds.node import NodeRound, leaders

ERROR, BASIS = "error", "basis"


class PowerSgdRound(NodeRound):
    """Rounds by PowerSGD, on several nodes."""

    def __init__(self, job: Job) -> None:
        """See `Round.__init__`."""
        shapes = Factors.of(job.layout, job.dtype, job.config.powersgd_rank)
        super().__init__(job, None, None, _factor_fields(job, shapes))
        cluster, view = self._cluster, self._window.view
        names = (f"slots/{name}" for name in self._rule.slots)
        self._node_slots: Slots = tuple(view(self._leader, name) for name in names)
        if cluster.rank in cluster.roles.owners:
            self.params = self.replica[job.shard.range]
            self.slots = tuple(slot[job.shard.range] for slot in self._node_slots)
        node = NodeFactors(shapes, self._window, self._leader)
        vectors = self._addresses, self.replica, self._node_slots
        self._rows = RankRows(job, node, view(cluster.rank, "part"), *vectors, self.transfers)
        self._sums: FactorSums | None = None  # on leaders
        self._state: OwnState = {ERROR: [(r.begin, r.error.reshape(-1)) for r in self._rows.rows]}
        if self._leads:
            parts = [view(rank, "part") for rank in cluster.my_node]
            self._sums = FactorSums(job, node, parts, self._leaders, self.transfers)
            self._state[BASIS] = [(0, node.q)]
            node.q[:] = shapes.first_basis(job.config.seed, job.dtype)

    def own_state(self) -> OwnState:
        """See `Round.own_state`: E_w by the flat vector, on leaders Q by that of all Q."""
        return self._state

    def publish_start(self) -> None:
        """Bring the owners' parameters and slots to every node. Collective: yes."""
        cluster, arrays = self._cluster, self._cluster.arrays
        vectors = (self.replica, *self._node_slots)
        requests: list[Request] = []
        for rank, shard in zip(cluster.roles.owners, self._job.shards, strict=True):
            pieces = [p for v in vectors for p in transfer_pieces(v[shard.range])]
            if rank == cluster.rank:
                remote = [r for r in leaders(cluster.node_of) if not cluster.is_local(r)]
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
        self._rows.rule = rule

    def compare(self, step: int) -> None:
        """See `Round.compare`: the replicas and slots, by a CRC that leaders bring."""
        mine = np.full(2, np.iinfo("i8").min)
        if self._leads:
            mine[:] = 0  # what is not finite is refused elsewhere, and a NaN has many faces
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


def _factor_fields(job: Job, shapes: Factors) -> list[list[Field]]:
    """Return the fields of the factors and slots in each rank's segment."""
    dtype, n = job.config.dtype, job.layout.size
    part = Field("part", dtype, (shapes.q_size,))
    on_leaders = [
        Field("first", dtype, (shapes.p_size + shapes.raw_size,)),
        Field("q", dtype, (shapes.q_size,)),
        Field("own", dtype, (shapes.q_size,)),
        Field("scale", "f8", (8,)),
        *(Field(f"slots/{name}", dtype, (n,)) for name in job.rule.slots),
    ]
    leading = leaders(job.cluster.node_of)
    return [[part, *(on_leaders if r in leading else ())] for r in range(job.cluster.world)]
