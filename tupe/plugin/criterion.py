"""fairseq's masked-LM criterion with a loss that never holds all logits, and without a wait for the GPU to learn
whether there is padding. (fairseq resumes no run with another criterion, not even a run of `masked_lm` with this
one.)"""

import torch
from fairseq.criterions import register_criterion
from fairseq.criterions.masked_lm import MaskedLmConfig, MaskedLmLoss
from fairseq.models import BaseFairseqModel


def has_padding(sample: dict) -> bool:
    """Whether a batch has padding, by the number of real tokens, which the data loader counted."""
    return int(sample["ntokens"]) < sample["net_input"]["src_tokens"].numel()


@register_criterion("masked_lm_chunked", dataclass=MaskedLmConfig)
class ChunkedMaskedLmLoss(MaskedLmLoss):
    """The same numbers as `masked_lm`: the loss is the sum over masked tokens, the sample size their number."""

    def forward(self, model: BaseFairseqModel, sample: dict, reduce: bool = True) -> tuple[torch.Tensor, int, dict]:
        targets = sample["target"]
        masked = targets.ne(self.padding_idx).nonzero(as_tuple=True)  # rows, columns; only this waits for the GPU
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
