"""Lines of a record of pushes, one a push, in a buffer of bytes; see `mpips.ps.replay_log`."""

import numpy as np

from mpips.kernels.compiled import Vector, kernel

WORDS = 16  # of 4 bytes, of a shard that are summed at a time: a cache line
SPREAD = 0x9E3779B1  # odd: versions that follow each other have lines far from each other
WORD = 0xFFFFFFFF
STALE_BYTES, SUM_BYTES, POSITION_BYTES, SAMPLES_BYTES, LOSS_BYTES = 2, 1, 8, 4, 8
STALE_BITS = 8 * STALE_BYTES
FILLED, WHOLE, WORKER_BYTES = range(3)  # of a buffer: lines in it; how they are made up


@kernel(quick=True)
def place_of(n_words: int, version: int) -> int:
    """Return which word of a shard the line begins at that is summed at `version`."""
    lines = (n_words + WORDS - 1) // WORDS
    return ((version * SPREAD & WORD) * lines >> 32) * WORDS


@kernel(quick=True)
def line_sum(words: Vector, version: int) -> int:
    """Return a byte that depends on each bit of the line of a shard that is at `version`.

    Args:
        words: The shard, shape (n,), uint32; the last line may be shorter.
        version: How many updates it has.
    """
    begin, total = place_of(words.size, version), 0
    for i in range(begin, min(begin + WORDS, words.size)):
        total = (total ^ int(words[i])) * SPREAD & WORD
        total ^= total >> 15
    return (total * SPREAD & WORD) >> 24


@kernel(quick=True)
def put(lines: Vector, at: int, size: int, value: int) -> int:
    """Write the lowest bytes of a number, the lowest one first; returns where they end."""
    for i in range(size):
        lines[at + i] = value >> 8 * i & 0xFF
    return at + size


@kernel(quick=True)
def note(
    lines: Vector,
    made: Vector,
    words: Vector,
    version: int,
    worker: int,
    stale: int,
    position: int,
    samples: int,
    loss: float,
) -> int:
    """Write a push's line behind those that are in a buffer; returns how many there are then.

    It is: whose push, how stale, and `line_sum`; in whole lines also which samples it was made of,
    and its loss. Before a push that is too stale for its line there is one of nobody's with the
    higher bits. It takes 9 arguments since a loop takes neither tuple nor object: every scalar
    stands alone.

    Args:
        lines: The buffer, uint8, with room for two lines.
        made: What it has, shape (3,), int64.
        words: The shard, shape (n,), uint32.
        version: Updates of the shard, with the push.
        worker: Its worker's number.
        stale: Its staleness.
        position: Of its first sample, epochs behind each other.
        samples: Tsuccessor number.
        loss: Tsuccessor mean loss.
    """
    of_worker = int(made[WORKER_BYTES])
    width = of_worker + STALE_BYTES + SUM_BYTES
    if made[WHOLE]:
        width += POSITION_BYTES + SAMPLES_BYTES + LOSS_BYTES
    at = made[FILLED] * width
    if at + 2 * width > lines.size:
        raise ValueError("a buffer of lines is full")
    if stale >> STALE_BITS:
        end = put(lines, at, of_worker, -1)
        put(lines, end, STALE_BYTES, stale >> STALE_BITS)
        at += width
        made[FILLED] += 1
    at = put(lines, at, of_worker, worker)
    at = put(lines, at, STALE_BYTES, stale)
    at = put(lines, at, SUM_BYTES, line_sum(words, version))
    if made[WHOLE]:
        at = put(lines, at, POSITION_BYTES, position)
        at = put(lines, at, SAMPLES_BYTES, samples)
        put(lines, at, LOSS_BYTES, int(np.float64(loss).view(np.int64)))
    made[FILLED] += 1
    return made[FILLED]


def warm() -> None:
    """Compile, or load from the cache on disk, what a recorder needs."""
    lines, words = np.zeros(64, np.uint8), np.zeros(1, np.uint32)
    note(lines, np.array([0, 0, 1]), words, 0, 0, 0, 0, 0, 0.0)
