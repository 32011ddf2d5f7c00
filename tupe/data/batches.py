"""The order of data: update u of a run takes the same blocks, or examples, whatever the number of processes, the
micro-batch, the data workers and the engine.

Every epoch has a permutation of its own, which follows from the seed and is cut into batches of a micro-batch each. An
update takes the next `steps * processes` batches; the processes take turns. So an update is the next `size * steps *
processes` blocks of the permutation, however that product is made up. The permutation is computed where it is asked
for: nothing is stored, in memory or in a checkpoint, and any place of any epoch is as near as the first.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence

import numpy as np

from .masks import UNMASKED
from .splits import HELD_OUT_SEED

Batch = list[tuple[int, int]]  # (epoch, index) of each of its blocks or examples
ROUNDS = 8


class Permutation:
    """A permutation of range(count) that follows from `key`, on every machine: a Feistel network (Black and Rogaway,
    2002) over a grid of about sqrt(count) x sqrt(count), a row longer at most. A number that lands beyond the last one
    goes on until it does not, so that each is hit once.

    Called with numbers [n], it returns where they land [n].
    """

    def __init__(self, count: int, *key: int):
        self.count, self.rows = count, np.uint64(math.isqrt(max(count - 1, 0)) + 1)
        self.columns = np.uint64(-(-count // int(self.rows)))
        digest = hashlib.blake2b(" ".join(map(str, key)).encode(), digest_size=8 * ROUNDS).digest()
        self.keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)

    def __call__(self, numbers: np.ndarray) -> np.ndarray:
        found = self._network(np.asarray(numbers, dtype=np.uint64))
        while (beyond := found >= np.uint64(self.count)).any():
            found[beyond] = self._network(found[beyond])
        return found.astype(np.int64)

    def _network(self, numbers):
        rows, columns = self.rows, self.columns
        left, right = numbers % rows, numbers // rows
        for key in self.keys:  # the left half moves by a number that the right one chooses, and they change places
            left, right = right, (left + mixed(right + key) % rows) % rows
            rows, columns = columns, rows
        return left + rows * right


def mixed(numbers: np.ndarray) -> np.ndarray:
    """A hash of 64 bits: the last steps of SplitMix64 (Steele et al., 2014)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


class Epoch(Sequence):
    """The batches of an epoch, of all processes: `count` blocks or examples, `size` in a batch, fewer in the last."""

    def __init__(self, count: int, seed: int, size: int, epoch: int):
        self.count, self.size, self.epoch = count, size, epoch
        self.order = Permutation(count, seed, epoch)

    def __len__(self):
        return math.ceil(self.count / self.size)

    def __getitem__(self, number: int) -> Batch:
        if not 0 <= number < len(self):
            raise IndexError(number)
        start = number * self.size
        indices = self.order(np.arange(start, min(start + self.size, self.count)))
        return [(self.epoch, index) for index in indices.tolist()]


class Batches:
    """The batches of a whole training for one of several processes, as a batch sampler: `steps` of them for each
    update. The last update of an epoch may have fewer: what is missing is filled with batches in which nothing is
    predicted. count: of blocks or examples; start: number of updates that are done already.
    """

    def __init__(
        self, count: int, seed: int, size: int, updates: int, steps: int = 1, process: int = 0, processes: int = 1,
        start: int = 0,
    ):  # fmt: skip
        self.count, self.seed, self.size, self.steps, self.updates = count, seed, size, steps, updates
        self.process, self.processes, self.start = process, processes, start
        self.updates_per_epoch = math.ceil(count / (size * steps * processes))

    def epoch_of(self, update: int) -> int:
        """Epoch of an update (updates from 0, epochs from 1)."""
        return update // self.updates_per_epoch + 1

    def __len__(self):
        return self.updates * self.steps

    def __iter__(self) -> Iterator[Batch]:
        group = self.steps * self.processes
        for update in range(self.start, self.updates):
            epoch = Epoch(self.count, self.seed, self.size, self.epoch_of(update))
            first = update % self.updates_per_epoch * group
            for number in range(first + self.process, first + group, self.processes):
                yield epoch[number] if number < len(epoch) else [(UNMASKED, i) for _, i in epoch[first]]


def held_out(count: int, size: int, epoch: int = 1) -> list[Batch]:
    """Batches of `count` held-out blocks, always the same: masks are of epoch 1 whatever epoch it is."""
    order = np.argsort(np.random.RandomState(HELD_OUT_SEED).permutation(count))
    return [[(1, int(i)) for i in order[k : k + size]] for k in range(0, count, size)]
