"""Batches as tensors, in data workers or without.

B batch, L sequence length, n masked tokens.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from .batches import Batches
from .blocks import PAD
from .masks import IGNORED


def pad(items: list[tuple[np.ndarray, np.ndarray]]) -> tuple[Tensor, Tensor]:
    """(ids, targets) [B, L] of items of `MaskedBlocks`, padded on the right."""
    ids, targets = ([torch.from_numpy(array) for array in arrays] for arrays in zip(*items, strict=True))
    return pad_sequence(ids, True, PAD), pad_sequence(targets, True, IGNORED)


def collate(items: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, Tensor]:
    """input_ids [B, L], padded on the right; output_indices [n]: where there is something to predict, in the flattened
    batch; labels [n]; num_tokens: without padding."""
    ids, targets = pad(items)
    targets = targets.flatten()
    indices = targets.ne(IGNORED).nonzero().squeeze(1)
    num_tokens = sum(len(source) for source, _ in items)
    return {"input_ids": ids, "output_indices": indices, "labels": targets[indices], "num_tokens": num_tokens}


def loader(dataset: Any, batches: Batches | list, workers: int = 0, collate: Callable = collate) -> DataLoader:
    """Drawing its batches changes no random numbers of the process. dataset: `MaskedBlocks` or `Examples`."""
    generator = torch.Generator().manual_seed(0)  # else PyTorch would draw a seed for workers that draw nothing
    # Forked workers are kept from the signals that stop a run (`run.stop`); Python 3.14 would start them otherwise.
    return DataLoader(
        dataset, batch_sampler=batches, collate_fn=collate, num_workers=workers, generator=generator,
        pin_memory=torch.cuda.is_available(), multiprocessing_context="fork" if workers else None,
    )  # fmt: skip
