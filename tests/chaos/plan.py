"""What is to go wrong in a run, and when: drawn from a seed."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from mpips.errors import unknown

FAULTS = {
    "kill:worker": "a worker dies (SIGKILL)",
    "kill:server": "an owner of a shard dies: a server, or where there is none any rank",
    "kill:job": "mpirun dies",
    "kill:all": "everything but the supervisor dies, in any order",
    "stop:worker": "a worker is stopped (SIGSTOP): it hangs",
    "stop:server": "an owner of a shard is stopped",
    "exception:worker": "a worker raises an exception",
    "exception:server": "an owner of a shard raises an exception",
    "disk:full": "no rank can write, for some seconds",
}
DEFAULT = "kill:worker,kill:server,stop:worker,exception:worker,kill:job,disk:full"
TRAINING, SAVING, STARTING = "training", "saving", "starting"
DELAYS_S = {TRAINING: 0.5, SAVING: 0.03, STARTING: 3.0}  # the longest behind each moment
MOST_SAVES = 3


@dataclass(frozen=True)
class Fault:
    """A fault: `saves` checkpoints and `delay_s` behind the start or the fault before, at a moment.

    `pick`, in [0, 1), says which of those that can be meant it hits.
    """

    name: str
    moment: str
    saves: int
    delay_s: float
    pick: float

    @property
    def action(self) -> str:
        return self.name.partition(":")[0]

    @property
    def target(self) -> str:
        return self.name.partition(":")[2]

    @property
    def role(self) -> str:
        return self.target if self.target in ("worker", "server") else ""

    @property
    def ends_job(self) -> bool:
        return self.action != "disk"


def chosen(text: str, what: str, known: Sequence[str]) -> list[str]:
    """Return the names in a list with commas, some perhaps several times; ``all`` for each."""
    names = list(known) if text == "all" else text.split(",")
    for name in names:
        if name not in known:
            raise unknown(what, name, known)
    return names


def draw(seed: int, names: Sequence[str], most: int = 0) -> list[Fault]:
    """Return the faults of a run in their order."""
    chance = random.Random(seed)
    if most:
        chosen = chance.choices(names, k=chance.randint(1, most))
    else:
        chosen = chance.sample(names, len(names))
    found: list[Fault] = []
    for name in chosen:
        moment = chance.choice((TRAINING, TRAINING, SAVING, STARTING))
        if moment == STARTING and not _may_come_at_start(name, found):
            moment = TRAINING
        saves, delay = chance.randint(1, MOST_SAVES), chance.uniform(0, DELAYS_S[moment])
        found.append(Fault(name, moment, saves, round(delay, 3), round(chance.random(), 6)))
    return found


def _may_come_at_start(name: str, before: Sequence[Fault]) -> bool:
    """Whether a fault may come as ranks start, and the supervisor, which may give up, goes on."""
    if name.startswith(("exception", "disk")):
        return False
    return not before or (before[-1].moment != STARTING and before[-1].ends_job)
