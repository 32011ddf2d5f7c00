"""Masked-LM pre-training by the second engine, with the numbers of the first."""

import logging
from dataclasses import replace

import torch
from torch import Tensor

from .. import hf  # noqa: F401  (what is written here is read through the Auto classes)
from ..checkpoints.trained import read_model
from ..configuration_tupe import NAMES, TupeConfig
from ..data.batches import held_out
from ..data.loader import collate
from ..data.masks import MaskedBlocks, masked_blocks
from ..data.splits import HELD_OUT_SEED
from ..encoder import Encoder, LMHead, ModelConfig
from ..modeling_tupe import TupeForMaskedLM
from ..tracing import can_compile
from .loop import Loop

logger = logging.getLogger(__name__)


class ForPretraining(TupeForMaskedLM):
    """The sum of the losses of masked tokens only, without the logits of all at once: input_ids [B, L],
    output_indices [n] of masked tokens in the flattened batch, labels [n]; see `data.loader.collate`."""

    _auto_class = None

    def forward(
        self, input_ids: Tensor, output_indices: Tensor, labels: Tensor, num_tokens: int | None = None
    ) -> Tensor:  # fmt: skip
        encoder = self.tupe.encoder
        output_indices, labels = encoder.pad_outputs(output_indices, labels)
        x, _ = encoder(input_ids, False, num_tokens, output_indices)
        return self.lm_head(x, encoder.tokens.weight, labels)

    def padded(
        self, input_ids: Tensor, output_indices: Tensor, labels: Tensor, num_tokens: int
    ) -> dict[str, Tensor | int]:  # fmt: skip
        """The arguments of `forward` in one of the few shapes that compiled layers have. Of num_tokens it matters there
        only whether there is padding."""
        encoder, ids, indices = self.tupe.encoder, input_ids, output_indices
        if not encoder.draws_positions:  # it draws none for columns that it appends itself
            ids, indices, _ = encoder.pad_columns(input_ids, output_indices)
        indices, labels = encoder.pad_outputs(indices, labels)
        known = ids.numel() - (num_tokens < ids.numel())
        return {"input_ids": ids, "output_indices": indices, "labels": labels, "num_tokens": known}


def new_model(
    config: ModelConfig, types: int, seed: int, compiles: bool = False, start: str = ""
) -> ForPretraining:  # fmt: skip
    """A model with the weights that the first engine gives it for this seed, or those of the checkpoint `start`."""
    options = {theirs: getattr(config, ours) for ours, theirs in NAMES.items()}
    model = ForPretraining(TupeConfig(vocab_size=types, architectures=["TupeForMaskedLM"], **options))
    torch.manual_seed(seed)
    model.tupe.encoder, model.lm_head = Encoder(types, 1, 2, config), LMHead(config.width, types, config=config)
    model.tie_weights()
    if start:
        trained = replace(read_model(start), config=config)
        if "lm_head.bias" not in trained.weights:
            logger.warning(f"{start} has no language-model head; a new one is initialised")
        model.load_state_dict(trained.model().state_dict())
    if compiles:
        model.tupe.encoder.compile()
        model.lm_head.compile(dynamic=False)
    return model


class Pretraining(Loop):
    collate = staticmethod(collate)

    def build(self, data: str, symbols: list[str]) -> tuple[ForPretraining, MaskedBlocks, dict[str, MaskedBlocks]]:
        recipe = self.recipe
        shares = {name: getattr(recipe, name) for name in ("mask_prob", "leave_unmasked_prob", "random_token_prob")}

        def blocks_of(split, seed):
            return masked_blocks(data, split, recipe.tokens_per_sample, symbols, seed, **shares)

        names = [] if recipe.disable_validation else recipe.valid_subset.split(",")
        splits = {name: blocks_of(name, HELD_OUT_SEED) for name in names}
        compiles = can_compile(self.place.device) if recipe.compile == "auto" else recipe.compile != "no"
        model = new_model(recipe.model, len(symbols), recipe.seed, compiles, recipe.finetune_from_model)
        return model, blocks_of(recipe.train_subset, recipe.seed), splits

    def scores_of(self, split: str, dataset: MaskedBlocks) -> dict:
        size, most = self.recipe.batch_size_valid, self.recipe.max_valid_steps
        loss, _ = self.measure(dataset, held_out(len(dataset), size)[: most or None])
        self.run.add_scores(self.epoch(), self.done, split, {"loss": loss})
        return {"loss": loss}
