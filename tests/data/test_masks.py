"""Masks against those of fairseq."""

import numpy as np
import pytest
from helpers import write_data

from tupe.data.blocks import PAD, Blocks
from tupe.data.masks import IGNORED, UNMASKED, MaskedBlocks
from tupe.data.splits import read_symbols

LENGTH = 20
SHARES = [(0.1, 0.1), (0.0, 0.0), (0.3, 0.0), (0.0, 0.3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("masks") / "data", lines=200)


@pytest.mark.parametrize("left, drawn", SHARES)
def test_masks_are_fairseqs(folder, left, drawn):
    pytest.importorskip("fairseq")
    import torch
    from fairseq.data import Dictionary, ListDataset, MaskTokensDataset

    symbols, shares = read_symbols(folder), {"leave_unmasked_prob": left, "random_token_prob": drawn}
    blocks, dictionary = Blocks(folder / "train", LENGTH, symbols), Dictionary.load(str(folder / "dict.txt"))
    mask = dictionary.add_symbol("<mask>")
    items = ListDataset([torch.from_numpy(block) for block in blocks], blocks.sizes)
    theirs = MaskTokensDataset.apply_mask(items, dictionary, PAD, mask, seed=3, mask_prob=0.15, **shares)
    ours = MaskedBlocks(blocks, symbols, seed=3, **shares)
    for epoch in (1, 2):
        for part in theirs:
            part.set_epoch(epoch)
            part.__getitem__.cache_clear()
        for i in range(len(ours)):
            source, target = ours[epoch, i]
            assert source.tolist() == theirs[0][i].tolist()
            assert np.where(target == IGNORED, PAD, target).tolist() == theirs[1][i].tolist()


@pytest.mark.parametrize("left, drawn", SHARES)
def test_shares_of_the_masks(folder, left, drawn):
    symbols, blocks = read_symbols(folder), Blocks(folder / "train", LENGTH, read_symbols(folder))
    options = {"mask_prob": 0.5, "leave_unmasked_prob": left, "random_token_prob": drawn}
    ours = MaskedBlocks(blocks, symbols, seed=1, **options)
    counts = np.zeros(4)  # tokens, masked, left, drawn
    for epoch in range(1, 30):
        for i in range(len(ours)):
            (source, target), block = ours[epoch, i], blocks[i]
            masked = target != IGNORED
            assert (target[masked] == block[masked]).all() and (source[~masked] == block[~masked]).all()
            stays, becomes = masked & (source == block), masked & (source != block) & (source != ours.mask)
            assert source[becomes].size == 0 or source[becomes].min() >= 4
            counts += len(block), masked.sum(), stays.sum(), becomes.sum()
    tokens, masked, stays, becomes = counts
    assert abs(masked / tokens - 0.5) < 0.01
    near = 0.03  # a random token may be <mask> or the same
    assert abs(stays / masked - left) < near and abs(becomes / masked - drawn) < near


def test_masks_change_with_seed_epoch_and_block(folder):
    symbols = read_symbols(folder)
    blocks = Blocks(folder / "train", LENGTH, symbols)
    masks = {
        tuple(np.flatnonzero(MaskedBlocks(blocks, symbols, seed, mask_prob=0.5)[epoch, i][1] != IGNORED))
        for seed in (1, 2) for epoch in (1, 2) for i in (0, 1)
    }  # fmt: skip
    assert len(masks) == 8
    source, target = MaskedBlocks(blocks, symbols, 1)[UNMASKED, 0]
    assert (source == blocks[0]).all() and (target == IGNORED).all()
