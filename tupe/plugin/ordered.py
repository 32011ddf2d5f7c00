"""The data sets and the order of `tupe.data`, as fairseq takes them."""

from collections.abc import Callable, Sequence
from typing import Any

from fairseq.data import FairseqDataset
from fairseq.data.iterators import EpochBatchIterator

REMEDY = (
    "resume with the old settings, or begin again at epoch 1 of the data with --reset-dataloader (of `tupe`: "
    "checkpoint.reset_dataloader=true)"
)


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

    @classmethod
    def of(cls, batches: Sequence, process: int, processes: int) -> "Share":
        rounds = -(-len(batches) // processes)
        return cls(batches, range(process, process + rounds * processes, processes))

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
        return Share.of(self._batches(self.dataset, epoch), self.shard_id, self.num_shards)

    def state_dict(self) -> dict:
        state = super().state_dict()
        taken = state["iterations_in_epoch"] * self.num_shards * self.size
        return {**state, "taken": taken, "count": len(self.dataset)}

    def load_state_dict(self, state: dict) -> None:
        """Raises ValueError if the order that a checkpoint is in the middle of is not that of this data."""
        if state["iterations_in_epoch"]:
            if state.get("count") != len(self.dataset):
                raise ValueError(
                    "the checkpoint was written in the middle of an epoch of other data, of blocks of another "
                    f"length, or in the order of another version, so the position in the data is lost: {REMEDY}"
                )
            position, rest = divmod(state["taken"], self.num_shards * self.size)
            if rest:
                raise ValueError(
                    f"the checkpoint was written after {state['taken']} sequences of an epoch; {self.num_shards} "
                    f"processes with batches of {self.size} cannot continue exactly there: {REMEDY}"
                )
            state = {**state, "iterations_in_epoch": position}
        super().load_state_dict(state)


class OrderedTask:
    """Mixin for tasks whose data sets are `Items`; it goes before the fairseq class."""

    def has_sharded_data(self, split: str) -> bool:
        """Several folders are one after the other, in every epoch; fairseq reads one of them in each."""
        return False

    def get_batch_iterator(
        self, dataset: Items, max_tokens: int | None = None, max_sentences: int | None = None,
        num_shards: int = 1, shard_id: int = 0, num_workers: int = 0, epoch: int = 1, data_buffer_size: int = 0,
        disable_iterator_cache: bool = False, skip_remainder_batch: bool = False, **options,
    ) -> EpochBatchIterator:  # fmt: skip
        """What else fairseq's own would take decides how batches are cut and shuffled."""
        size = dataset.batch_size(max_sentences, max_tokens)
        known = self.dataset_to_epoch_iter
        if dataset not in known or disable_iterator_cache:
            iterator = OrderedIterator(
                dataset, size, num_shards=num_shards, shard_id=shard_id, num_workers=num_workers, epoch=epoch,
                buffer_size=data_buffer_size, skip_remainder_batch=skip_remainder_batch, reuse_dataloader=True,
            )  # fmt: skip
            if disable_iterator_cache:
                return iterator
            known[dataset] = iterator
        return known[dataset]
