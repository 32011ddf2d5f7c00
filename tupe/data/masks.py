"""Blocks with masks that follow from the seed, the epoch and the number of the block."""

from pathlib import Path

import numpy as np

from ..text import MASK, TextEncoder
from .blocks import Blocks
from .splits import prefixes_of

IGNORED = -100
UNMASKED = -1  # an epoch: of batches that fill up an update, in which nothing is predicted


class MaskedBlocks:
    """Item (epoch, i) is block i with the masks of that epoch: ids with and ids without them, -100 where nothing is to
    be predicted. symbols: the dictionary's types, <mask> among them. mask_prob: the share of tokens to be predicted; of
    these, the share leave_unmasked_prob stays, random_token_prob becomes a random type, and all others <mask>."""

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


def masked_blocks(data: str | Path, split: str, length: int, symbols: list[str], seed: int, **shares) -> MaskedBlocks:
    """Those of a split. data: as `folders_of` reads it. Raises ValueError for so little text that nothing is masked."""
    masked = MaskedBlocks(Blocks(prefixes_of(data, split), length, symbols), symbols, seed, **shares)
    if not any((masked[1, i][1] != IGNORED).any() for i in range(len(masked))):  # as a rule, the first one has some
        raise ValueError(f"{data}: {split!r} has too little text: none of its tokens is masked")
    return masked
