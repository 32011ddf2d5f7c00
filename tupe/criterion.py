"""fairseq's masked-LM criterion with a loss that never holds all logits, and without waiting for a GPU to find out
whether there is padding."""

from fairseq.criterions import register_criterion
from fairseq.criterions.masked_lm import MaskedLmConfig, MaskedLmLoss


@register_criterion("masked_lm_chunked", dataclass=MaskedLmConfig)
class ChunkedMaskedLmLoss(MaskedLmLoss):
    """The same numbers as `masked_lm`: the loss is the sum over masked tokens, the sample size their number."""

    def forward(self, model, sample, reduce=True):
        tokens, targets = sample["net_input"]["src_tokens"], sample["target"]
        masked = targets.ne(self.padding_idx).nonzero(as_tuple=True)  # rows, columns: the one thing a GPU is asked for
        padded = int(sample["ntokens"]) < tokens.numel()  # a number that the data loader counted
        loss, _ = model(**sample["net_input"], masked_tokens=masked, lm_targets=targets[masked], padded=padded)
        sample_size = len(masked[0])
        logging_output = {
            "loss": loss.data,
            "ntokens": sample["ntokens"],
            "nsentences": sample["nsentences"],
            "sample_size": sample_size,
        }
        return loss, sample_size, logging_output
