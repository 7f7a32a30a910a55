"""Search of the cheapest configuration that meets a deadline.

The search tries only codecs that round numbers. It tries the job's own mode, and the modes in which
every gradient is computed from the parameters of all workers. Formulas give a lower bound of each
configuration's cost. A configuration is not simulated if its bound exceeds the best cost so far.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mpips.config import Config
from mpips.config.jobfile import resolve
from mpips.errors import UserError
from mpips.planning import traffic
from mpips.planning.explain import Topology, case_of
from mpips.planning.simulator.prediction import Facts, Prediction, batches_of, predict
from mpips.planning.world import World

MODES = ("async", "ssp", "sync")
CODECS = (("none", "none"), ("fp16", "fp16"), ("int8", "fp16"))
FREE = {"server_ranks": (), "server_hosts": "", "backup_workers": 0}
STEPS = 100  # steps of each worker that a search simulates by default


@dataclass(frozen=True)
class Proposal:
    """Result of a search.

    Attributes:
        best: The cheapest configuration that meets the deadline; None if none does.
        fastest: The fastest of the simulated configurations.
        others: Configurations that differ from the best in one setting, each with its drawback.
        looked_at: Number of configurations.
    """

    best: Prediction | None
    fastest: Prediction
    others: tuple[tuple[Prediction, str], ...]
    looked_at: int

    @staticmethod
    def options(p: Prediction) -> str:
        """Return the options of a configuration, as on the command line."""
        c, roles = p.config, p.case.roles
        pull = f" --pull-codec {c.pull_codec}" if c.pull_codec != "none" else ""
        codec = f" --codec {c.codec}" if c.codec != "none" else ""
        servers = f" --servers {len(roles.servers) - roles.spares}" if roles.servers else ""
        return f"--workers {len(roles.workers)} --mode {c.mode}{servers}{codec}{pull}"


@dataclass(frozen=True)
class _Candidate:
    """A configuration that may be simulated.

    Attributes:
        key: Workers, mode, servers, codecs.
        config: The job.
        world: Host and node of each rank.
        least_s: Lower bound of the job's duration in seconds.
    """

    key: tuple[int, str, int, tuple[str, str]]
    config: Config
    world: World
    least_s: float

    @property
    def least_cost(self) -> float:
        """Lower bound of the rank seconds."""
        return self.least_s * len(self.world[1])


def variants(config: Config, workers: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield numbers of workers and changes of the job."""
    modes = dict.fromkeys((config.mode, *MODES))
    counts = sorted({max(1, workers >> k) for k in range(8)} | {max(1, 3 * workers // 4)})
    for count in counts:
        for mode in modes:
            without_servers = mode in ("sync", "local_sgd")
            servers = [0] if without_servers else [1 << k for k in range(7) if 1 << k <= count]
            if not without_servers and config.servers and config.servers not in servers:
                servers.append(config.servers)
            for k in servers:
                for codec, pull_codec in CODECS:
                    yield count, {"mode": mode, "servers": k, "codec": codec,
                                  "pull_codec": pull_codec}  # fmt: skip


def search(config: Config, workers: int, world_of: Callable[[int], World], facts: Facts,
           deadline_s: float = math.inf) -> Proposal:  # fmt: skip
    """Find the cheapest configuration.

    Args:
        config: The job.
        workers: Largest number of workers.
        world_of: Returns host and node of each rank, for a number of ranks.
        facts: Facts that hold for all configurations.
        deadline_s: Largest duration in seconds.

    Raises:
        UserError: If no configuration is valid.
    """
    facts = dataclasses.replace(facts, simulated=facts.simulated or STEPS)
    candidates = (_candidate(config, *each, world_of, facts) for each in variants(config, workers))
    valid = [candidate for candidate in candidates if candidate]
    if not valid:
        raise UserError("no configuration", "a job whose mode, servers and codec may differ")
    done: dict[Any, Prediction] = {}

    def run(candidate: _Candidate) -> Prediction:
        if candidate.key not in done:
            done[candidate.key] = predict(candidate.config, *candidate.world, facts)
        return done[candidate.key]

    best: _Candidate | None = None
    for candidate in sorted(valid, key=lambda c: c.least_cost):
        if best is not None and candidate.least_cost >= 3600 * run(best).core_hours:
            break
        if candidate.least_s > deadline_s or run(candidate).lifetime.mean_s > deadline_s:
            continue
        if best is None or run(candidate).core_hours < run(best).core_hours:
            best = candidate
    if best is None:
        return Proposal(None, run(min(valid, key=lambda c: c.least_s)), (), len(valid))
    others = [run(c) for c in valid if _differs(c, best)]
    others_why = [(p, _why(p, run(best), deadline_s)) for p in others]
    others_why.sort(key=lambda pair: pair[0].core_hours)
    return Proposal(run(best), run(best), tuple(others_why), len(valid))


def _candidate(config: Config, workers: int, changes: dict[str, Any],
               world_of: Callable[[int], World], facts: Facts) -> _Candidate | None:  # fmt: skip
    measured, speeds = facts.measured, facts.speeds
    try:
        changed = resolve({**FREE, **changes}, vars(config))
        hosts_nodes = world_of(workers + changes["servers"] + changed.spares)
        topology = Topology(
            *hosts_nodes, measured.parameters, speeds.link, speeds.step_s, facts.codecs,
            measured.tables or (),
        )  # fmt: skip
        case, factors = case_of(changed, topology), speeds.factors(workers)
    except UserError:
        return None
    # A round waits for the slowest worker; in other modes all count.
    mean = factors.max() if case.rounds else 1 / (1 / factors).mean()
    step_s = traffic.step_s(case, speeds.link, (speeds.step_s + speeds.between_s) * float(mean))
    key = workers, changes["mode"], changes["servers"], (changes["codec"], changes["pull_codec"])
    least_s = facts.start_s + batches_of(changed, case, measured.n_train) * step_s
    return _Candidate(key, changed, hosts_nodes, least_s)


def _differs(candidate: _Candidate, best: _Candidate) -> bool:
    """Return whether a configuration differs from the best in one setting, by one step."""
    (workers, mode, servers, codecs), (w, m, s, c) = candidate.key, best.key
    if mode != m:
        same_servers = servers == s or (0 in (servers, s) and servers in (0, 1))
        return workers == w and codecs == c and same_servers
    local = workers in (w // 2, 2 * w) or abs(workers - w) * 4 <= max(workers, w)
    differing = [workers != w, servers != s, codecs != c]
    if sum(differing) != 1:
        return False
    return local if workers != w else servers in (s // 2, s, 2 * s)


def _why(p: Prediction, best: Prediction, deadline_s: float) -> str:
    """Return the drawback of a configuration, as text."""
    name, share = p.bottleneck
    busy = f"{name} ({share:.0%})"
    if p.lifetime.mean_s > deadline_s:
        return f"too late: {busy}"
    dearer = p.core_hours / best.core_hours - 1
    return f"{dearer:+.0%}: {busy}"
