"""fairseq's batches are those of `tupe.data`, for every number of processes and size of a batch, from every place."""

import functools

import pytest
import torch
from fairseq.data import iterators
from helpers import fairseq_task, write_data

from tupe.data.batches import Batches, Epoch
from tupe.data.blocks import Blocks
from tupe.data.masks import UNMASKED, MaskedBlocks
from tupe.data.splits import read_symbols
from tupe.plugin.ordered import Items, OrderedIterator, Share

UPDATE = 8  # sequences


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("ordered") / "data", lines=101)


def iterator_of(task, size, processes, process, workers=0):
    return task.get_batch_iterator(
        task.dataset("train"), max_sentences=size, num_shards=processes, shard_id=process, num_workers=workers,
        required_batch_size_multiple=8, grouped_shuffling=True, max_positions=20, disable_iterator_cache=True,
    )  # fmt: skip


def updates_of(iterators_of_all, steps):
    """[(epoch, blocks)] of each update in what is left of the epoch, in the order of their numbers."""
    found = []
    epochs = [each.next_epoch_itr(shuffle=True) for each in iterators_of_all]
    for passes in zip(*(iterators.GroupedIterator(each, steps) for each in epochs), strict=True):
        samples = [passes[process][k] for k in range(len(passes[0])) for process in range(len(passes))]
        found.append([i for sample in samples if sample for i in sample["id"].tolist()])
    return found


@pytest.mark.parametrize("processes, size", [(1, 8), (1, 2), (2, 4), (2, 1), (4, 2), (4, 1)])
def test_updates_are_those_of_the_other_engine(folder, processes, size):
    """Into the second epoch, and after a stop within the first with other processes and batches."""
    task, steps = fairseq_task(folder), UPDATE // (processes * size)
    count = len(task.dataset("train"))
    expected = [
        [i for epoch, i in batch if epoch != UNMASKED] for batch in Batches(count, 3, UPDATE, 2 * -(-count // UPDATE))
    ]
    length = len(expected) // 2
    assert count % UPDATE and length > 4
    all_of = [iterator_of(task, size, processes, process) for process in range(processes)]
    assert updates_of(all_of, steps) + updates_of(all_of, steps) == expected

    for others, other_size in ((1, 8), (2, 2), (4, 1)):
        stopped = iterator_of(task, other_size, others, 0)
        running = iterators.GroupedIterator(stopped.next_epoch_itr(), UPDATE // (others * other_size))
        [next(running) for _ in range(3)]
        resumed = [iterator_of(task, size, processes, process) for process in range(processes)]
        for each in resumed:
            each.load_state_dict(stopped.state_dict())
        assert updates_of(resumed, steps) == expected[3:length]
        assert updates_of(resumed, steps) == expected[length:]


@pytest.mark.parametrize("workers", [0, 2])
def test_masks_are_those_of_the_other_engine(folder, workers):
    task, symbols = fairseq_task(folder), read_symbols(folder)
    masked = MaskedBlocks(Blocks(folder / "train", 20, symbols), symbols, seed=3)
    iterator = iterator_of(task, 8, 1, 0, workers)
    for epoch in (1, 2):
        for sample in iterator.next_epoch_itr():
            for i, tokens, length in zip(sample["id"], *sample["net_input"].values(), strict=True):
                assert tokens[:length].tolist() == masked[epoch, int(i)][0].tolist()
            assert sample["ntokens"] == sample["net_input"]["src_tokens"].ne(1).sum()


def test_a_position_that_is_none_of_this_order_is_refused(folder):
    task = fairseq_task(folder)
    stopped = iterator_of(task, 3, 1, 0)
    next(stopped.next_epoch_itr())
    state = stopped.state_dict()
    with pytest.raises(ValueError, match="after 3 of .* sequences: 2 processes with batches of 4 of .* cannot"):
        iterator_of(task, 4, 2, 0).load_state_dict(state)
    for wrong in ({**state, "count": 7}, {name: value for name, value in state.items() if name != "count"}):
        with pytest.raises(ValueError, match="cannot go on"):
            iterator_of(task, 3, 1, 0).load_state_dict(wrong)
    iterator_of(task, 4, 2, 0).load_state_dict({"epoch": 2, "iterations_in_epoch": 0, "version": 2})  # a new epoch


def test_as_many_sequences_as_fit_into_max_tokens(folder):
    task = fairseq_task(folder)
    data = task.dataset("train")
    assert len(task.get_batch_iterator(data, max_tokens=79, disable_iterator_cache=True).frozen_batches[0]) == 3
    with pytest.raises(ValueError, match="max_tokens=10: a sequence has up to 20 tokens"):
        task.get_batch_iterator(data, max_tokens=10)


def test_nothing_is_stored_for_a_batch():
    """Of 10^9 sequences over 1,000 processes, from the middle of an epoch."""

    class Numbers:
        def __len__(self):
            return 10**9

        def __getitem__(self, item):
            return item

    items = Items(Numbers(), lambda samples: samples, functools.partial(Epoch, 10**9, 1), 1)
    iterator = OrderedIterator(items, 4, num_shards=1000, shard_id=999)
    state = {"epoch": 1, "taken": 4 * 1000 * 100_000, "count": 10**9, "iterations_in_epoch": 12, "version": 2}
    iterator.load_state_dict(state)
    epoch = iterator.next_epoch_itr()
    assert epoch.n == 100_000 and len(epoch) == 250_000
    assert [item for _, item in next(epoch)] == Epoch(10**9, 1, 4, 1)[100_000 * 1000 + 999]
    share = Share(range(10), range(3, 15, 4))
    assert list(share) == [3, 7, []] and list(share[1:]) == [7, []]


def test_items_alone_have_the_masks_of_held_out_text(folder):
    task = fairseq_task(folder, split="valid")
    data = task.dataset("valid")
    one, two = (data.collater([data[item]]) for item in (0, (0, 0)))
    assert torch.equal(one["target"], two["target"]) and data.collater([]) == {}
