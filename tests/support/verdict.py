"""One verdict for all ranks."""

from mpi4py import MPI


class FailedTogetherError(AssertionError):
    """A failure that every rank raises, at the same place."""


def together(comm: MPI.Comm, failure: str | None) -> None:
    """Fail on every rank if any has a failure to tell, with all that they tell.

    Collective: yes. A rank that asserts on what differs between ranks must do it through this,
    so that all ranks go on together or stop together.
    """
    found = [(rank, text) for rank, text in enumerate(comm.allgather(failure)) if text]
    if found:
        texts = "\n".join(f"rank {rank}: {text}" for rank, text in found)
        raise FailedTogetherError(f"failed on {len(found)} of {comm.size} ranks:\n{texts}")


def check(comm: MPI.Comm, good: bool, what: object = "") -> None:
    """Fail on every rank unless `good` holds on all; `what` is told by those where it fails."""
    together(comm, None if good else f"not as expected: {what}")
