"""The data sets and the order of `tupe.data`, as fairseq takes them."""

from collections.abc import Callable, Sequence
from typing import Any

from fairseq.data import FairseqDataset
from fairseq.data.iterators import EpochBatchIterator


class Items(FairseqDataset):
    """A data set of `tupe.data`. Batches hold pairs (epoch, index), so data workers need not be told of a new epoch.

    items: `MaskedBlocks` or `Examples`; collate: a list of (index, item) -> a batch; batches: (size, epoch) -> those of
    an epoch, as a sequence. An index alone is of epoch 0: where nothing is trained.
    """

    def __init__(self, items: Any, collate: Callable, batches: Callable[[int, int], Sequence], longest: int):
        self.items, self.collate, self.batches, self.longest = items, collate, batches, longest

    def __len__(self):
        return len(self.items)

    def __getitem__(self, item):
        epoch, index = item if isinstance(item, tuple) else (0, int(item))
        return index, self.items[epoch, index]

    def collater(self, samples: list) -> dict:
        return self.collate(samples) if samples else {}  # a process that has no batch left in an epoch

    def batch_size(self, max_sentences: int | None, max_tokens: int | None) -> int:
        """Sequences in a batch: `max_sentences`, and at most as many as fit into `max_tokens` if all are of the
        greatest length. Raises ValueError if that is none."""
        if max_tokens and max_tokens < self.longest:
            raise ValueError(
                f"max_tokens={max_tokens}: a sequence has up to {self.longest} tokens; valid: at least as many"
            )
        return min(max_sentences or len(self), max_tokens // self.longest if max_tokens else len(self))


class Share(Sequence):
    """Every `processes`th of some batches, from number `process` on: as many for each process, the last may be empty.
    Nothing is stored, and a slice is as good as the whole."""

    def __init__(self, batches: Sequence, numbers: range):
        self.batches, self.numbers = batches, numbers

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, k):
        number = self.numbers[k]
        if isinstance(k, slice):
            return Share(self.batches, number)
        return self.batches[number] if number < len(self.batches) else []


class OrderedIterator(EpochBatchIterator):
    """fairseq's, whose batches are not shuffled and not stored: `Items.batches` has them in their order. The position
    in an epoch is a number of blocks, so a run goes on with other numbers of processes or blocks in a batch. size: of a
    batch; options: fairseq's."""

    def __init__(self, dataset: Items, size: int, **options):
        super().__init__(dataset, dataset.collater, self._batches, **options)
        self.size = size

    def _batches(self, dataset, epoch):
        return dataset.batches(self.size, epoch)

    @property
    def frozen_batches(self) -> Sequence:
        """Of the epoch."""
        return self._batches(self.dataset, self.epoch)

    def ordered_batches(self, epoch: int, fix_batches_to_gpus: bool, shuffle: bool) -> Share:
        batches, step = self._batches(self.dataset, epoch), self.num_shards
        rounds = -(-len(batches) // step)
        return Share(batches, range(self.shard_id, self.shard_id + rounds * step, step))

    def state_dict(self) -> dict:
        state = super().state_dict()
        taken = state["iterations_in_epoch"] * self.num_shards * self.size
        return {**state, "taken": taken, "count": len(self.dataset)}

    def load_state_dict(self, state: dict) -> None:
        """Raises ValueError if the order that a checkpoint is in the middle of is not that of this data."""
        if state["iterations_in_epoch"]:
            position, rest = divmod(state.get("taken", 1), self.num_shards * self.size)
            if rest or state.get("count") != len(self.dataset):
                raise ValueError(
                    f"the checkpoint was written after {state.get('taken')} of {state.get('count')} sequences: "
                    f"{self.num_shards} processes with batches of {self.size} of {len(self.dataset)} cannot go on. "
                    "Resume with the old settings, or begin again at epoch 1 with checkpoint.reset_dataloader=true"
                )
            state = {**state, "iterations_in_epoch": position}
        super().load_state_dict(state)
