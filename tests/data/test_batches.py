"""One order of data: the same updates for every number of processes, micro-batch and number of data workers."""

import itertools
import tracemalloc

import numpy as np
import pytest
import torch
from helpers import write_data

from tupe.data.batches import Batches, Epoch, Permutation, held_out
from tupe.data.blocks import PAD, Blocks
from tupe.data.loader import collate, loader
from tupe.data.masks import UNMASKED, MaskedBlocks
from tupe.data.splits import read_symbols

LENGTH = 20


# ---------------------------------------------------------------------------------------------------------- permutation


@pytest.mark.parametrize("count", [*range(1, 40), 97, 1000, 4096, 4097, 65536, 100_003])
def test_each_number_is_hit_once(count):
    assert sorted(Permutation(count, 1, 1)(np.arange(count)).tolist()) == list(range(count))


def test_it_looks_drawn():
    """Displacements, neighbours and fixed points are as far from a drawn permutation's as chance explains."""
    count = 100_003
    one, other = (Permutation(count, 1, epoch)(np.arange(count)) for epoch in (1, 2))
    for found in (one, other):
        assert np.abs(found - np.arange(count)).mean() / count == pytest.approx(1 / 3, abs=0.004)
        assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 0.02
        assert abs(np.corrcoef(found, np.arange(count))[0, 1]) < 0.02
        assert (found == np.arange(count)).sum() < 9
        high = found[:99_000].reshape(-1, 11).astype(float).mean(1)  # of batches: as of eleven that are drawn
        assert high.std() / count == pytest.approx(np.sqrt(1 / 12 / 11), rel=0.1)
    assert (one == other).sum() < 9
    first = [Permutation(10, seed, epoch)(np.arange(1))[0] for seed in range(40) for epoch in range(40)]
    assert np.bincount(first, minlength=10).min() > 110  # of 160


def test_it_is_the_same_for_ever():
    """On every machine, with every version: an open run goes on with it."""
    assert Permutation(10, 1, 1)(np.arange(10)).tolist() == [5, 3, 1, 7, 6, 8, 9, 4, 0, 2]
    far = Permutation(10**12, 7, 3)(np.array([0, 1, 10**11, 10**12 - 1]))
    assert far.tolist() == [337195270916, 474076992661, 168450946846, 830839379099]


# -------------------------------------------------------------------------------------------------------------- batches


def by_update(count, size, steps, processes, updates, start=0):
    """The batches of all processes in each update, in the order of the gradients' sum."""
    shares = [list(Batches(count, 1, size, updates, steps, p, processes, start)) for p in range(processes)]
    assert all(len(share) == (updates - start) * steps for share in shares)
    turns = [batch for k in range(len(shares[0])) for batch in (share[k] for share in shares)]
    return [turns[k : k + steps * processes] for k in range(0, len(turns), steps * processes)]


@pytest.mark.parametrize("count", [64, 101])
def test_updates_are_the_same_however_they_are_divided(count):
    def items(*arguments):
        return [[i for batch in update for i in batch if i[0] != UNMASKED] for update in by_update(*arguments)]

    one = items(count, 16, 1, 1, 20)
    length = -(-count // 16)
    assert [len(update) for update in one[:length]] == [16] * (length - 1) + [count - 16 * (length - 1)]
    for epoch in (1, 2):
        seen = [item for update in one[(epoch - 1) * length : epoch * length] for item in update]
        assert sorted(seen) == [(epoch, i) for i in range(count)]
    for processes, size in itertools.product((1, 2, 4), (1, 2, 4)):
        steps = 16 // (processes * size)
        assert items(count, size, steps, processes, 20) == one
        assert items(count, size, steps, processes, 20, length + 2) == one[length + 2 :]


def test_batches_change_from_epoch_to_epoch():
    one, two = (list(Epoch(100, 1, 10, epoch)) for epoch in (1, 2))
    assert not {frozenset(i for _, i in batch) for batch in one} & {frozenset(i for _, i in batch) for batch in two}
    assert Batches(100, 1, 10, 0).epoch_of(9) == 1 and Batches(100, 1, 10, 0).epoch_of(10) == 2


def test_the_order_takes_no_memory():
    """Of 10^9 blocks, from the middle of an epoch."""
    tracemalloc.start()
    batches = Batches(10**9, 1, 4, 10**6, 2, process=999, processes=1000, start=123_456)
    first = next(iter(batches))
    assert len({i for _, i in first}) == 4 and tracemalloc.get_traced_memory()[1] < 10**6
    tracemalloc.stop()


def test_held_out_batches_are_always_the_same():
    assert held_out(7, 3) == held_out(7, 3, epoch=2)
    assert sorted(i for batch in held_out(7, 3) for _, i in batch) == list(range(7))
    assert [i for batch in held_out(7, 3) for _, i in batch] == [3, 2, 1, 5, 4, 6, 0]


# --------------------------------------------------------------------------------------------------------------- loader


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = write_data(tmp_path_factory.mktemp("batches") / "data", lines=200)
    symbols = read_symbols(folder)
    return MaskedBlocks(Blocks(folder / "train", LENGTH, symbols), symbols, seed=1)


@pytest.mark.parametrize("workers", [0, 2])
def test_what_the_loader_gives(dataset, workers):
    """The same tensors whatever the number of workers; no random number is drawn."""
    batches, before = Batches(len(dataset), 1, 4, 6, steps=2), torch.random.get_rng_state()
    found = list(loader(dataset, batches, workers))
    assert torch.equal(torch.random.get_rng_state(), before) and len(found) == 12
    for batch, items in zip(found, batches, strict=True):
        expected = collate([dataset[item] for item in items])
        assert batch.keys() == expected.keys()
        assert all(np.array_equal(batch[key], expected[key]) for key in batch)
        assert batch["num_tokens"] == batch["input_ids"].ne(PAD).sum()
        assert len(batch["labels"]) == len(batch["output_indices"])


@pytest.mark.parametrize("workers", [0, 1])
def test_masks_change_from_epoch_to_epoch(dataset, workers):
    length = Batches(len(dataset), 1, 16, 0).updates_per_epoch
    batches, seen = Batches(len(dataset), 1, 16, 3 * length), {}
    for items, batch in zip(batches, loader(dataset, batches, workers), strict=True):
        where = torch.zeros(batch["input_ids"].numel(), dtype=torch.bool)
        where[batch["output_indices"]] = True
        for (epoch, block), row in zip(items, where.view_as(batch["input_ids"]), strict=True):
            seen.setdefault(block, {})[epoch] = row.nonzero().flatten().tolist()
    assert seen.keys() == {*range(len(dataset))} and all(epochs.keys() == {1, 2, 3} for epochs in seen.values())
    assert [block for block, epochs in seen.items() if epochs[1] == epochs[2] == epochs[3]] == []
