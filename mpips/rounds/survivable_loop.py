"""Loop of rounds that continue without a dead worker.

The rounds detect dead workers (`mpips.rounds.survivable`). This loop assigns their samples again,
has others evaluate their parts, and counts them.
"""

from typing import Any

from mpips.datasets.ledger import Range, leave, resize, split
from mpips.planning.outcome import Outcome
from mpips.problems.evaluation import evaluate, mean_evaluation, share
from mpips.rounds.base import Report
from mpips.rounds.loop import RoundEvaluation, RoundLoop


class SurvivableEvaluation(RoundEvaluation):
    """Evaluation by the living workers; servers take part in the agreement on these."""

    def __init__(self, *args: Any) -> None:
        """See `RoundEvaluation`."""
        super().__init__(*args)
        self._takes_part, self._tells = True, self._cluster.is_coordinator

    def _means(self) -> dict[str, float]:
        """See `RoundEvaluation`; others evaluate the parts of workers that die meanwhile."""
        workers, cluster = self._cluster.roles.workers, self._cluster
        living = [rank for rank in workers if rank not in self._rounds.left]
        asked = {rank: rank for rank in living}  # rank whose part each worker evaluates
        parts: dict[int, dict[str, float] | None] = dict.fromkeys(workers)
        means: dict[str, float] = {}
        while asked:
            part = asked.get(cluster.rank)
            found = cluster.gather(None if part is None else self._evaluate(living, part))
            if found is not None:
                parts |= {of: found[rank] for rank, of in asked.items()}
                missing = [rank for rank in living if parts[rank] is None]
                able = [rank for rank in living if rank not in cluster.failures.lost]
                asked = dict(zip(able, missing, strict=False))
                means = {} if missing else mean_evaluation(self._job, [*parts.values()])
            asked, means = cluster.share((asked, means), cluster.roles.coordinator)
        return means

    def _evaluate(self, living: list[int], rank: int) -> dict[str, float]:
        part_of = share(self._job.info.n_test, living.index(rank), len(living))
        return evaluate(self._job, self._params, *part_of)


class SurvivableLoop(RoundLoop):
    """Rounds of a run whose workers may die."""

    evaluation = SurvivableEvaluation

    def __init__(self, *args: Any) -> None:
        """See `RoundLoop`."""
        super().__init__(*args)
        self._lost: dict[int, int] = {}  # number of rounds that each dead rank has made

    def _living(self) -> list[int]:
        return [rank for rank in self._cluster.roles.workers if rank not in self._lost]

    def _parts(self, batch: Range) -> list[Range]:
        """See `RoundLoop`; dead workers have empty parts."""
        living = self._living()
        parts = dict(zip(living, split(batch, len(living)), strict=True))
        nothing = (batch[0], batch[1], batch[1])
        return [parts.get(rank, nothing) for rank in self._cluster.roles.workers]

    def _give_back(self, batch: Range, agreed: Report) -> int:
        """Continue without ranks that died in the last round, or just before it.

        Collective: yes. Blocks: until no checkpoint is under way here.
        """
        left = self._rounds.left
        if len(left) == len(self._lost):
            return 0
        parts, again = self._parts(batch), list[Range]()
        for rank in sorted(left.keys() - self._lost):
            _, begin, end = parts[self._cluster.roles.workers.index(rank)]
            brought = left[rank] > self._step
            again += [(batch[0], begin, end)] if end > begin and not brought else []
            self._lost[rank] = left[rank] - 1 - self._job.base_step
            self._log_death(rank, left[rank], 0 if brought else end - begin)
        leave(self._allocator, batch, again)
        living = self._living()
        resize(self._allocator, self._job.config.unit_size * len(living))
        self._ahead.clear()
        self._weights.clear()
        if self._worker is not None:
            self._worker.reassign(living.index(self._cluster.rank), len(living))
        self._checkpoints.reassign(self._rounds.owners())
        return sum(end - begin for _, begin, end in again)

    def _log_death(self, rank: int, first: int, samples: int) -> None:
        """Log the death of a rank, with the first round without it and its open samples."""
        if not self._cluster.is_coordinator:
            return
        worker, host = self._cluster.roles.workers.index(rank), self._cluster.hosts[rank]
        text = f"worker {worker} (rank {rank} on {host}) has died; its {samples} open samples "
        self._log.warn(f"{text}go to the others, which go on from round {first} without it")
        known = {"rank": rank, "worker": worker, "first": first, "samples": samples}
        self._log.event("lost", self._step, **known)

    def _end_rounds(self) -> None:
        """See `RoundLoop`; a later death ends the job."""
        self._cluster.failures.leave_out(self._lost)
        super()._end_rounds()

    def _outcome(self, reason: str) -> Outcome:
        """See `RoundLoop`, with the number of rounds of each worker."""
        outcome, before = super()._outcome(reason), self._allocator.before[0]
        made, workers = self._allocator.clocks[0] - before, self._cluster.roles.workers
        outcome.clocks = [before + self._lost.get(rank, made) for rank in workers]
        outcome.lost = self._lost
        return outcome
