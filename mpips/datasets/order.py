"""Order of an epoch's samples: a function of seed and epoch.

Data in memory is permuted as a whole. Data that is read in blocks is shuffled in two levels: first
the blocks, then the samples in each block. So reads are contiguous, and the order takes only 8
bytes a block.

Permutations sort random bits of Philox, rather than call `Generator.permutation`: a resumed run
needs the same order, and NumPy guarantees stable bits across releases, but not permutations.
"""

from functools import lru_cache

import numpy as np

from mpips.layout import mixed

WHOLE, BLOCKS, WITHIN, SPLIT = range(4)
CACHED_BLOCKS = 8
CACHED_EPOCHS = 2


def _philox(*key: int) -> np.random.Philox:
    words = [half for number in (len(key), *key) for half in (number & 0xFFFFFFFF, number >> 32)]
    return np.random.Philox(np.random.SeedSequence(words))


def shuffled(n: int, *key: int) -> np.ndarray:
    """Return a permutation of 0 to n-1, shape (n,), int64, which depends only on `key`.

    Args:
        n: Length.
        key: Non-negative numbers below 2**64; each tuple gives another permutation.
    """
    keys = _philox(*key).random_raw(n)
    # Random bits above, the index below: all keys differ, so every sorting algorithm agrees.
    bits = np.uint64(max(n - 1, 0).bit_length())
    keys <<= bits
    keys |= np.arange(n, dtype=np.uint64)
    keys.sort()
    keys &= (np.uint64(1) << bits) - np.uint64(1)
    return keys.view(np.int64)


def bits_of(numbers: np.ndarray, *key: int) -> np.ndarray:
    """Return 64 random bits for each number, which depend only on the number and on `key`.

    Args:
        numbers: Shape (n,), int64, at least 0.
        key: See `shuffled`.

    Returns:
        Shape (n,), uint64, by SplitMix64 from a random start (Steele et al., OOPSLA 2014).
    """
    start, step = _philox(*key).random_raw(2).tolist()
    return mixed(np.asarray(numbers).astype("u8") * np.uint64(step | 1) + np.uint64(start))


class Order:
    """Order of the samples: the sample at each position of each epoch.

    Args:
        n: Number of samples.
        block: Samples that are read at once; 1 if each sample is read separately, 0 for data in
            memory.
        seed: Seed of the order.
        shuffle: If False, every epoch has the order of the source.

    Attributes:
        count: Number of blocks; 0 for data in memory.
    """

    def __init__(self, n: int, block: int, seed: int, *, shuffle: bool = True) -> None:
        self.n = n
        self.block = block
        self.count = -(-n // block) if block else 0
        self.seed = seed
        self.shuffle = shuffle
        self._within = lru_cache(CACHED_BLOCKS)(self._permute_block)
        self._blocks = lru_cache(CACHED_EPOCHS)(self._permute_blocks)
        self._all = lru_cache(CACHED_EPOCHS)(self._permute_all)

    def sample_ids(self, epoch: int, begin: int, end: int) -> np.ndarray:
        """Return the samples at positions ``[begin, end)`` of `epoch`, shape (end - begin,), int64.

        Raises:
            ValueError: If the range is not within ``[0, n]``, or the epoch is negative.
        """
        if not 0 <= begin <= end <= self.n or epoch < 0:
            raise ValueError(f"no positions [{begin}, {end}) in epoch {epoch} of {self.n} samples")
        if not self.shuffle or begin == end:
            return np.arange(begin, end, dtype=np.int64)
        if self.block <= 1:
            return self._all(epoch)[begin:end].copy()
        return self._from_blocks(epoch, begin, end)

    def place(self, epoch: int, position: int) -> int:
        """Return the number of blocks in `epoch` before the one that contains `position`."""
        _, short_at = self._blocks(epoch)
        missing = -self.n % self.block
        before = position < (short_at + 1) * self.block - missing
        return (position if before else position + missing) // self.block

    def block_at(self, place: int) -> int:
        """Return the number of the block at an index that counts through all epochs."""
        epoch, place = divmod(place, self.count)
        return int(self._blocks(epoch)[0][place])

    def _from_blocks(self, epoch: int, begin: int, end: int) -> np.ndarray:
        blocks, short_at = self._blocks(epoch)
        out = np.empty(end - begin, np.int64)
        position = begin
        while position < end:
            place = self.place(epoch, position)
            # Blocks after the short one begin earlier by the samples that it lacks.
            first = place * self.block - (-self.n % self.block if place > short_at else 0)
            number = int(blocks[place])
            inner = self._within(epoch, number)[position - first : end - first]
            done = position - begin
            np.add(inner, number * self.block, out=out[done : done + len(inner)])
            position += len(inner)
        return out

    def _permute_all(self, epoch: int) -> np.ndarray:
        return shuffled(self.n, BLOCKS if self.block else WHOLE, self.seed, epoch)

    def _permute_blocks(self, epoch: int) -> tuple[np.ndarray, int]:
        """Return the blocks in order, and the index of the source's last block, the short one."""
        key = BLOCKS, self.seed, epoch
        blocks = shuffled(self.count, *key) if self.shuffle else np.arange(self.count)
        return blocks, int(np.argmax(blocks))

    def _permute_block(self, epoch: int, number: int) -> np.ndarray:
        size = min(self.block, self.n - number * self.block)
        return shuffled(size, WITHIN, self.seed, epoch, number)
