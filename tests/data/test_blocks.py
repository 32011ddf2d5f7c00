"""Blocks, masks and batches of the second engine against those of the fairseq task."""

import numpy as np
import pytest
import torch
from helpers import fairseq_task, split_documents, write_data

from tupe.data import blocks as training_data
from tupe.data.blocks import IGNORED, PAD, Batches, Blocks, MaskedBlocks, collate, held_out, loader
from tupe.data.splits import read_symbols

LENGTH = 20


@pytest.fixture(scope="module", params=["lines", "documents"])
def folder(request, tmp_path_factory):
    folder = write_data(tmp_path_factory.mktemp(request.param) / "data", lines=200)
    if request.param == "documents":
        split_documents(folder)
    return folder


@pytest.mark.parametrize("length", [6, 9, LENGTH, 64])  # 6: sentences are cut
def test_blocks_are_those_of_the_fairseq_task(folder, length):
    symbols = read_symbols(folder)
    task = fairseq_task(folder, length)
    assert symbols == task.source_dictionary.symbols
    for split in ("train", "valid"):
        theirs = task._load_dataset_split(split, 1, False)
        ours = Blocks(folder / split, length, symbols)
        assert len(ours) == len(theirs) > 1 and ours.sizes.tolist() == np.asarray(theirs.sizes).tolist()
        assert [block.tolist() for block in ours] == [theirs[i].tolist() for i in range(len(theirs))]


def test_some_sentences_are_cut(folder):
    symbols = read_symbols(folder)
    assert Blocks(folder / "train", 6, symbols).sizes.max() == 6
    sizes = np.fromfile(folder / "train.idx", dtype=np.int32, offset=26, count=200)
    assert sizes.max() > 6


SHARES = [(0.1, 0.1), (0.0, 0.0), (0.3, 0.0), (0.0, 0.3)]


@pytest.mark.parametrize("left, drawn", SHARES)
def test_masks_are_those_of_the_fairseq_task(folder, left, drawn):
    symbols, shares = read_symbols(folder), {"leave_unmasked_prob": left, "random_token_prob": drawn}
    theirs = fairseq_task(folder, **shares).datasets["train"]
    ours = MaskedBlocks(Blocks(folder / "train", LENGTH, symbols), symbols, seed=3, **shares)
    for epoch in (1, 2):
        theirs.set_epoch(epoch)
        for i in range(len(ours)):
            source, target = ours[epoch, i]
            assert source.tolist() == theirs[i]["net_input.src_tokens"].tolist()
            assert np.where(target == IGNORED, PAD, target).tolist() == theirs[i]["target"].tolist()


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


@pytest.mark.parametrize("batch, steps", [(4, 1), (4, 3), (7, 2)])
def test_batches_are_those_of_fairseq(folder, batch, steps):
    """Order and grouping of three epochs."""
    from fairseq.data import iterators

    task = fairseq_task(folder)
    itr = task.get_batch_iterator(
        task.datasets["train"], max_sentences=batch, max_positions=LENGTH, seed=3, num_workers=0, epoch=1
    )
    theirs = []
    for _ in range(3):
        groups = iterators.GroupedIterator(itr.next_epoch_itr(shuffle=True), steps)
        theirs += [[sample["id"].tolist() for sample in group] for group in groups]
    sizes = np.asarray(Blocks(folder / "train", LENGTH, read_symbols(folder)).sizes)
    ours = Batches(sizes, 3, batch, len(theirs), steps)
    mine = iter(list(ours))
    grouped = [[next(mine) for _ in range(steps)] for _ in theirs]
    epochs = [{epoch for step in group for epoch, _ in step if epoch > 0} for group in grouped]
    assert [[[i for _, i in step] for step in group if step[0][0] > 0] for group in grouped] == theirs
    assert len(theirs) == 3 * ours.updates_per_epoch
    assert epochs == [{n // ours.updates_per_epoch + 1} for n in range(len(theirs))]


def test_updates_are_the_same_for_any_number_of_processes_and_from_any_start():
    sizes = np.random.default_rng(0).integers(5, 20, 52)
    one = list(Batches(sizes, 1, 4, 9, steps=4))
    for processes, steps in ((2, 2), (4, 1)):
        shares = [list(Batches(sizes, 1, 4, 9, steps, p, processes)) for p in range(processes)]
        assert all(len(share) == 9 * steps for share in shares)
        turns = [batch for k in range(len(shares[0])) for batch in (share[k] for share in shares)]
        assert turns == one
    assert list(Batches(sizes, 1, 4, 9, steps=4, start=5)) == one[5 * 4 :]
    assert any(epoch == training_data.UNMASKED for batch in one for epoch, _ in batch), "no update is filled up"


@pytest.mark.parametrize("workers", [0, 2])
def test_what_the_loader_gives(folder, workers):
    """The same tensors whatever the number of workers; no random number is drawn."""
    symbols = read_symbols(folder)
    dataset = MaskedBlocks(Blocks(folder / "train", LENGTH, symbols), symbols, seed=1)
    batches, before = Batches(dataset.blocks.sizes, 1, 4, 6, steps=2), torch.random.get_rng_state()
    found = list(loader(dataset, batches, workers))
    assert torch.equal(torch.random.get_rng_state(), before) and len(found) == 12
    for batch, items in zip(found, batches, strict=True):
        expected = collate([dataset[item] for item in items])
        assert batch.keys() == expected.keys()
        assert all(np.array_equal(batch[key], expected[key]) for key in batch)
        assert batch["num_tokens"] == batch["input_ids"].ne(PAD).sum()
        assert len(batch["labels"]) == len(batch["output_indices"])


@pytest.mark.parametrize("workers", [0, 1])
def test_masks_change_from_epoch_to_epoch(folder, workers):
    symbols = read_symbols(folder)
    dataset = MaskedBlocks(Blocks(folder / "train", LENGTH, symbols), symbols, seed=1)
    length = Batches(dataset.blocks.sizes, 1, 16, 0).updates_per_epoch
    batches, seen = Batches(dataset.blocks.sizes, 1, 16, 3 * length), {}
    for items, batch in zip(batches, loader(dataset, batches, workers), strict=True):
        where = torch.zeros(batch["input_ids"].numel(), dtype=torch.bool)
        where[batch["output_indices"]] = True
        for (epoch, block), row in zip(items, where.view_as(batch["input_ids"]), strict=True):
            seen.setdefault(block, {})[epoch] = row.nonzero().flatten().tolist()
    assert seen.keys() == {*range(len(dataset))} and all(epochs.keys() == {1, 2, 3} for epochs in seen.values())
    assert [block for block, epochs in seen.items() if epochs[1] == epochs[2] == epochs[3]] == []


def test_held_out_batches_are_those_of_fairseq(folder):
    task = fairseq_task(folder, split="valid")
    theirs = [[int(i) for i in batch] for batch in task.get_batch_iterator(
        task.datasets["valid"], max_sentences=3, max_positions=LENGTH, seed=3
    ).frozen_batches]  # fmt: skip
    blocks = Blocks(folder / "valid", LENGTH, read_symbols(folder))
    assert [[i for _, i in batch] for batch in held_out(blocks, 3)] == theirs
    assert held_out(blocks, 3, 1) == held_out(blocks, 3)[:1]


def test_errors_name_what_is_wrong(tmp_path, folder):
    with pytest.raises(ValueError, match="data folder not found"):
        read_symbols(tmp_path / "nothing")
    with pytest.raises(ValueError, match="has no dict.txt"):
        read_symbols(tmp_path)
    (tmp_path / "dict.txt").write_text("word\n")
    with pytest.raises(ValueError, match="'word' is no symbol and its count"):
        read_symbols(tmp_path)
    with pytest.raises(ValueError, match="has no split 'test'"):
        training_data.Blocks(folder / "test", LENGTH, read_symbols(folder))
