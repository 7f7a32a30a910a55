"""Judgement of MPI, packages and processors."""

from collections.abc import Sequence
from dataclasses import dataclass

from mpips.tools.doctor.finding import Finding, fail, ok, warn, warn_if


@dataclass(frozen=True)
class Library:
    """What a rank runs on.

    Attributes:
        mpi: Library and version.
        device: The library's own word for its transport; empty if it has none.
        loaded: Transport libraries that are mapped into the process.
        multiple: Whether any thread may call MPI at any time.
        versions: Of mpips, Python, NumPy and mpi4py.
        cpu: Model of the processor.
    """

    mpi: str
    device: str
    loaded: tuple[str, ...]
    multiple: bool
    versions: tuple[tuple[str, str], ...]
    cpu: str


def judge_libraries(ranks: Sequence[Library], nodes: int) -> list[Finding]:
    """Judge what the ranks run on; they should all run on the same."""
    first = ranks[0]
    found = [_judge_mpi(ranks, nodes)]
    text = ", ".join(f"{name} {version}" for name, version in first.versions)
    if len({r.versions for r in ranks}) > 1:
        others = {f"{k} {v}" for r in ranks for k, v in r.versions if (k, v) not in first.versions}
        remedy = "start the same virtual environment on all hosts"
        found.append(fail("software", f"{text}; elsewhere {', '.join(sorted(others))}", remedy))
    else:
        found.append(ok("software", text))
    cpus = sorted({r.cpu for r in ranks})
    remedy = "ask for nodes of one kind (--constraint) where the same bits are wanted each time"
    return [*found, warn_if(len(cpus) > 1, "processor", "; ".join(cpus), remedy)]


def _judge_mpi(ranks: Sequence[Library], nodes: int) -> Finding:
    first = ranks[0]
    names = sorted({r.mpi for r in ranks})
    if len(names) > 1:
        return fail("mpi", " and ".join(names), "start the same virtual environment on all hosts")
    way = [f"device {first.device}"] if first.device else []
    way += [f"{' and '.join(first.loaded)} loaded"] if first.loaded else []
    text = ", ".join([first.mpi, *way])
    if not all(r.multiple for r in ranks):
        text += ", without threads, which several nodes want"
        remedy = "use an MPI built with MPI_THREAD_MULTIPLE: else ranks that compute do not answer"
        return warn("mpi", text, remedy) if nodes > 1 else ok("mpi", text)
    return ok("mpi", f"{text}, threads allowed")
