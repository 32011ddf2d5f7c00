"""Prepared text -> masked blocks in batches: those of fairseq's tasks, without fairseq.

Blocks, their order and their batches are those of the first engine, and the masks too. All of it follows from the seed,
the epoch and the block: nothing depends on the number of data workers or processes, and nothing has to be stored to
resume a run.

B batch, L sequence length, V vocabulary, n masked tokens.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..text import MASK, TextEncoder
from .splits import HELD_OUT_SEED, Split, cut_long, parts_of

BOS, PAD, EOS = 0, 1, 2
IGNORED = -100
UNMASKED = -1  # an epoch: of batches that fill up an update, in which nothing is predicted


def fingerprint_of(symbols: list[str]) -> str:
    """12 hexadecimal digits of a dictionary, as in the record of a run."""
    return hashlib.sha256("\n".join(symbols).encode()).hexdigest()[:12]


class Blocks:
    """A split as FULL-SENTENCES blocks: `<s>` and whole sentences, as many as fit into `length` tokens. Sentences that
    do not fit are cut between words, and blocks without text are left out, as by the task `tupe_masked_lm`.

    sizes [blocks]: numbers of tokens. Raises ValueError for a split that is not there or not whole.
    """

    def __init__(self, prefix: str | Path, length: int, symbols: list[str]):
        if len(parts_of(str(prefix))) > 1:
            raise ValueError(f"{prefix} is in several parts, which only --engine fairseq reads")
        split, room = Split(prefix, len(symbols)), length - 1
        self.tokens = split.tokens
        _, _, sizes = cut_long(split.sizes, split.__getitem__, room, symbols)
        ends, borders = np.cumsum(sizes), []  # of the parts; borders: (first part, first part of the next block)
        while (first := borders[-1][1] if borders else 0) < len(sizes):
            limit = (ends[first - 1] if first else 0) + room
            borders.append((first, int(np.searchsorted(ends, limit, side="right"))))
        first, last = np.array(borders or [(0, 0)][:0], dtype=np.int64).reshape(-1, 2).T
        starts, stops = ends[first] - sizes[first], ends[last - 1]
        suspects = np.flatnonzero(stops - starts <= last - first)
        empty = [i for i in suspects if (self.tokens[starts[i] : stops[i]] == EOS).all()]
        self.starts, self.stops = np.delete(starts, empty), np.delete(stops, empty)
        self.sizes = self.stops - self.starts + 1
        if not len(self.sizes):
            raise ValueError(f"{prefix} holds no text")

    def __len__(self):
        return len(self.sizes)

    def __getitem__(self, i: int) -> np.ndarray:
        return np.append(BOS, self.tokens[self.starts[i] : self.stops[i]]).astype(np.int64)


class MaskedBlocks(Dataset):
    """Item (epoch, i) is block i with the masks of that epoch: ids with and ids without them, -100 where nothing is to
    be predicted. types: size of the vocabulary, the last of which is <mask>."""

    def __init__(
        self, blocks: Blocks, symbols: list[str], seed: int, mask_prob: float = 0.15, leave_unmasked_prob: float = 0.1,
        random_token_prob: float = 0.1,
    ):  # fmt: skip
        self.blocks, self.seed, self.mask = blocks, seed, symbols.index(MASK)
        self.mask_prob, self.leave_unmasked_prob, self.random_token_prob = (
            mask_prob, leave_unmasked_prob, random_token_prob
        )  # fmt: skip
        weights = np.ones(len(symbols))
        weights[: len(TextEncoder.SPECIALS)] = 0
        self.cumulative = np.cumsum(weights / weights.sum())
        self.cumulative /= self.cumulative[-1]

    def __len__(self):
        return len(self.blocks)

    def __getitem__(self, item: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        epoch, index = item
        block = self.blocks[index]
        if epoch == UNMASKED:
            return block, np.full(len(block), IGNORED)
        # The draws, and the order of them, are those of fairseq's MaskTokensDataset.
        rng, size = np.random.default_rng(int(hash((self.seed, epoch, int(index))) % 1e6)), len(block)
        count = int(self.mask_prob * size + rng.random())
        masked = np.zeros(size, dtype=bool)
        masked[rng.choice(size, count, replace=False)] = True
        targets = np.where(masked, block, IGNORED)
        left, drawn = self._spared(masked, rng)
        source = np.where(masked & ~left, self.mask, block)
        if number := int(drawn.sum()):
            source[drawn] = self.cumulative.searchsorted(rng.random(number), side="right")
        return source, targets

    def _spared(self, masked, rng):
        """Which masked tokens stay as they are, and which become random ones."""
        none, both = np.zeros_like(masked), self.random_token_prob + self.leave_unmasked_prob
        if not both > 0:
            return none, none
        spared = masked & (rng.random(len(masked)) < both)
        if self.random_token_prob == 0:
            return spared, none
        if self.leave_unmasked_prob == 0:
            return none, spared
        stays = rng.random(len(masked)) < self.leave_unmasked_prob / both
        return spared & stays, spared & ~stays


def pad(items: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """[B, L] of both parts of items of `MaskedBlocks`."""
    length = max(len(source) for source, _ in items)
    ids, targets = np.full((len(items), length), PAD), np.full((len(items), length), IGNORED)
    for row, (source, target) in enumerate(items):
        ids[row, : len(source)], targets[row, : len(target)] = source, target
    return ids, targets


def collate(items: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, Tensor]:
    """input_ids [B, L], padded on the right; output_indices [n]: where there is something to predict, in the flattened
    batch; labels [n]; num_tokens: without padding."""
    ids, targets = pad(items)
    targets, ids = torch.from_numpy(targets).flatten(), torch.from_numpy(ids)
    indices = targets.ne(IGNORED).nonzero().squeeze(1)
    num_tokens = sum(len(source) for source, _ in items)
    return {"input_ids": ids, "output_indices": indices, "labels": targets[indices], "num_tokens": num_tokens}


class Batches:
    """The batches of a whole training for one of several processes, as a batch sampler: `steps` of (epoch, index) lists
    for each update.

    An update takes `processes * steps` batches of `size` blocks of nearly the same length; processes take turns, so
    that an update is the same whatever their number. The last update of an epoch may have fewer: what is missing is
    filled with batches in which nothing is predicted. start: number of updates that are done already.
    """

    def __init__(
        self, sizes: np.ndarray, seed: int, size: int, updates: int, steps: int = 1, process: int = 0,
        processes: int = 1, start: int = 0,
    ):  # fmt: skip
        self.seed, self.size, self.steps, self.process, self.processes = seed, size, steps, process, processes
        self.updates, self.start = updates, start
        shuffle = np.random.RandomState(seed).permutation(len(sizes))
        self.order = np.lexsort([shuffle, sizes])
        self.batches = math.ceil(len(sizes) / size)
        self.updates_per_epoch = math.ceil(self.batches / (steps * processes))

    def epoch_of(self, update: int) -> int:
        """Epoch of an update (updates from 0, epochs from 1)."""
        return update // self.updates_per_epoch + 1

    def __len__(self):
        return self.updates * self.steps

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch, order, group = None, [], self.steps * self.processes
        for update in range(self.start, self.updates):
            if epoch != self.epoch_of(update):
                epoch, order = self.epoch_of(update), list(range(self.batches))
                np.random.RandomState(self.seed + epoch).shuffle(order)
            first = update % self.updates_per_epoch * group
            for slot in range(first + self.process, first + group, self.processes):
                there = slot < len(order)
                start = order[slot if there else first] * self.size
                yield [(epoch if there else UNMASKED, int(i)) for i in self.order[start : start + self.size]]


def held_out(blocks: Blocks, size: int, most: int | None = None) -> list[list[tuple[int, int]]]:
    """Batches of held-out blocks, always the same; at most so many of them."""
    order = np.argsort(np.random.RandomState(HELD_OUT_SEED).permutation(len(blocks)))
    return [[(1, int(i)) for i in order[k : k + size]] for k in range(0, len(order), size)][:most]


def loader(dataset: Dataset, batches: Batches | list, workers: int = 0, collate: Callable = collate) -> DataLoader:
    """Drawing its batches changes no random numbers of the process."""
    generator = torch.Generator().manual_seed(0)  # else PyTorch would draw a seed for workers that draw nothing
    return DataLoader(
        dataset, batch_sampler=batches, collate_fn=collate, num_workers=workers, generator=generator,
        pin_memory=torch.cuda.is_available(),
    )  # fmt: skip
