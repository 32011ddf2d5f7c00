"""Prepared tasks of GLUE as examples in batches.

B batch, L length of its longest example.
"""

import logging
from pathlib import Path

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from .batches import Batch
from .blocks import BOS, EOS, PAD
from .glue import check_glue, lengths, read_targets
from .masks import UNMASKED
from .splits import Split

logger = logging.getLogger(__name__)


class Examples:
    """Item (epoch, i) is (i, `<s> A </s>` or `<s> A </s> </s> B </s>`, target); no target for `UNMASKED`,
    or where the split has none.

    folder: of the task; limit: most tokens of an example. shortened: number of examples that lost some. Raises
    ValueError for data that is not there or not whole.
    """

    def __init__(self, folder: Path, split: str, limit: int):
        check_glue(folder, split)
        self.texts = [Split(path / split) for path in sorted(folder.glob("input*"))]
        self.targets = read_targets(folder, split)
        self.keep, self.shortened = lengths([text.sizes - 1 for text in self.texts], limit)  # each ends in </s>
        self.sizes = self.keep.sum(axis=1) + 2 * len(self.texts)
        if self.shortened:
            logger.warning(f"{split}: {self.shortened} of {len(self)} inputs were cut to the model's length")

    def __len__(self):
        return len(self.keep)

    def __getitem__(self, item: tuple[int, int]) -> tuple[int, list, float | None]:
        epoch, i = item
        (first, *second) = (text[i][:size] for text, size in zip(self.texts, self.keep[i], strict=True))
        tokens = [BOS, *first, EOS, *(token for text in second for token in (EOS, *text, EOS))]
        return i, tokens, None if epoch == UNMASKED or self.targets is None else self.targets[i]

    def longest_first(self, size: int, epoch: int = 1) -> list[Batch]:
        """Batches with little padding, the same in every epoch."""
        order = np.argsort(-self.sizes, kind="stable")
        return [[(1, int(i)) for i in order[k : k + size]] for k in range(0, len(order), size)]


def collate(items: list[tuple]) -> dict:
    """input_ids [B, L], padded on the right; labels [B], [0] of a batch that only fills up an update; num_tokens:
    without padding; rows: numbers of the examples."""
    rows, tokens, targets = zip(*items, strict=True)
    ids = pad_sequence([torch.from_numpy(np.array(some, dtype=np.int64)) for some in tokens], True, PAD)
    labels = torch.tensor([target for target in targets if target is not None])
    return {"input_ids": ids, "labels": labels, "num_tokens": sum(map(len, tokens)), "rows": rows}
