"""fairseq's masked-LM criterion with a loss that never holds all logits, and without a wait for the GPU to learn
how much padding there is. (fairseq resumes no run with another criterion, not even a run of `masked_lm` with this
one.) Also for fairseq's own: batches in which nothing is masked have no loss."""

from collections.abc import Callable

import torch
from fairseq.criterions import register_criterion
from fairseq.criterions.masked_lm import MaskedLmConfig, MaskedLmLoss
from fairseq.logging import metrics
from fairseq.models import BaseFairseqModel


def count_tokens(sample: dict) -> int:
    """The number of tokens of a batch without padding, which the data loader counted: the GPU need not be asked."""
    return int(sample["ntokens"])


def nothing_masked(logging_outputs: list[dict]) -> bool:
    """Whether no token of these batches was masked. Then their loss is logged as None, which no mean counts."""
    if sum(log.get("sample_size", 0) for log in logging_outputs) > 0:
        return False
    metrics.log_scalar("loss", None, 0, round=3)
    return True


def reduce_metrics(logging_outputs: list[dict], original: Callable) -> None:
    """As fairseq's, which divides by the number of masked tokens, even if that is 0."""
    if not nothing_masked(logging_outputs):
        original(logging_outputs)


@register_criterion("masked_lm_chunked", dataclass=MaskedLmConfig)
class ChunkedMaskedLmLoss(MaskedLmLoss):
    """The same numbers as `masked_lm`: the loss is the sum over masked tokens, the sample size their number."""

    def forward(self, model: BaseFairseqModel, sample: dict, reduce: bool = True) -> tuple[torch.Tensor, int, dict]:
        targets = sample["target"]
        masked = targets.ne(self.padding_idx).nonzero(as_tuple=True)  # rows, columns; only this waits for the GPU
        options = {"masked_tokens": masked, "lm_targets": targets[masked], "num_tokens": count_tokens(sample)}
        loss, _ = model(**sample["net_input"], **options)
        sample_size = len(masked[0])
        logging_output = {
            "loss": loss.data,
            "ntokens": sample["ntokens"],
            "nsentences": sample["nsentences"],
            "sample_size": sample_size,
        }
        return loss, sample_size, logging_output
