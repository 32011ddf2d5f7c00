"""Makes a resumed run continue at the right place in the data, or fail with the reason."""

import logging
from collections.abc import Callable

from fairseq.data.iterators import EpochBatchIterator

from .ordered import REMEDY

logger = logging.getLogger(__name__)

# fairseq stores the position in an epoch as a number of batches *per process*. With another number of processes,
# or after the data was cut into other batches, the same number points somewhere else, and fairseq does not notice.
# So the numbers of processes and of batches are stored beside it: the position is moved exactly, or refused.


def position_in_epoch(state: dict, num_shards: int, num_batches: int, grouped_shuffling: bool) -> int:
    """The stored position, in batches per process of an iterator with `num_shards` processes and `num_batches` in all.

    state: what `EpochBatchIterator.state_dict` returned when the checkpoint was written.
    Raises ValueError if no position of the new iterator is the same place in the data.
    """
    position, old_shards, old_batches = state["iterations_in_epoch"], state["num_shards"], state["num_batches"]
    if position == 0 or (old_shards, old_batches) == (num_shards, num_batches):
        return position
    if old_batches != num_batches:
        raise ValueError(
            f"the checkpoint was written in the middle of an epoch of {old_batches} batches, now an epoch has "
            f"{num_batches} (other batch size, sequence length or data), so the position in the data is lost: {REMEDY}"
        )
    consumed = position * old_shards  # the processes take turns on one list of batches
    if grouped_shuffling or consumed % num_shards:
        raise ValueError(
            f"the checkpoint was written by {old_shards} processes after {consumed} batches of an epoch; "
            f"{num_shards} processes cannot continue exactly there: {REMEDY}"
        )
    logger.warning(
        f"resuming on {num_shards} processes a run of {old_shards}, after the same {consumed} batches of the epoch; "
        "keep batch size x update_freq x processes the same (`tupe pretrain` does)"
    )
    return consumed // num_shards


def state_dict(self: EpochBatchIterator, original: Callable) -> dict:
    return {**original(self), "num_shards": self.num_shards, "num_batches": len(self.frozen_batches)}


def load_state_dict(self: EpochBatchIterator, state: dict, original: Callable) -> None:
    if "num_shards" in state:  # absent from checkpoints that were written without this plugin
        position = position_in_epoch(state, self.num_shards, len(self.frozen_batches), self.grouped_shuffling)
        state = {**state, "iterations_in_epoch": position}
    original(self, state)
