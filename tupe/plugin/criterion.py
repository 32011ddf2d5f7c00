"""fairseq's masked-LM criterion with a loss that never holds all logits, and without waiting for a GPU to find out
whether there is padding. (fairseq continues no run with another criterion than it began with, not even with this one
after `masked_lm`.)"""

from fairseq.criterions import register_criterion
from fairseq.criterions.masked_lm import MaskedLmConfig, MaskedLmLoss


def has_padding(sample):
    """From the number of real tokens, which the data loader counted."""
    return int(sample["ntokens"]) < sample["net_input"]["src_tokens"].numel()


@register_criterion("masked_lm_chunked", dataclass=MaskedLmConfig)
class ChunkedMaskedLmLoss(MaskedLmLoss):
    """The same numbers as `masked_lm`: the loss is the sum over masked tokens, the sample size their number."""

    def forward(self, model, sample, reduce=True):
        targets = sample["target"]
        masked = targets.ne(self.padding_idx).nonzero(as_tuple=True)  # rows, columns: the only wait for the GPU
        options = {"masked_tokens": masked, "lm_targets": targets[masked], "padded": has_padding(sample)}
        loss, _ = model(**sample["net_input"], **options)
        sample_size = len(masked[0])
        logging_output = {
            "loss": loss.data,
            "ntokens": sample["ntokens"],
            "nsentences": sample["nsentences"],
            "sample_size": sample_size,
        }
        return loss, sample_size, logging_output
