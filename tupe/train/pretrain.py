"""Masked-LM pre-training by the second engine, with the numbers of the first."""

from dataclasses import replace

import torch
from torch import Tensor

from .. import hf  # noqa: F401  (what is written here is read through the Auto classes)
from ..checkpoints.trained import read_model
from ..configuration_tupe import NAMES, TupeConfig
from ..data.batches import held_out
from ..data.blocks import Blocks
from ..data.loader import collate
from ..data.masks import IGNORED, MaskedBlocks
from ..data.splits import HELD_OUT_SEED, prefixes_of
from ..encoder import Encoder, LMHead, ModelConfig
from ..modeling_tupe import TupeForMaskedLM
from .loop import Place, Training
from .run import Run
from .settle import Settled


class ForPretraining(TupeForMaskedLM):
    """The sum of the losses of masked tokens only, without the logits of all at once: input_ids [B, L],
    output_indices [n] of masked tokens in the flattened batch, labels [n]; see `data.collate`."""

    _auto_class = None

    def forward(
        self, input_ids: Tensor, output_indices: Tensor, labels: Tensor, num_tokens: int | None = None
    ) -> Tensor:  # fmt: skip
        encoder = self.tupe.encoder
        x, _ = encoder(input_ids, False, num_tokens, output_indices)
        return self.lm_head.loss(x, encoder.tokens.weight, labels)


ForPretraining.__name__ = TupeForMaskedLM.__name__  # what config.json calls it


def new_model(
    config: ModelConfig, types: int, seed: int, compiles: bool = False, start: str = ""
) -> ForPretraining:  # fmt: skip
    """A model with the weights that the first engine gives it for this seed, or those of the checkpoint `start`."""
    torch.manual_seed(seed)
    encoder, head = Encoder(types, 1, 2, config), LMHead(config.width, types, config=config)
    options = {theirs: getattr(config, ours) for ours, theirs in NAMES.items()}
    model = ForPretraining(TupeConfig(vocab_size=types, architectures=["TupeForMaskedLM"], **options))
    model.tupe.encoder.load_state_dict(encoder.state_dict())
    model.lm_head.load_state_dict(head.state_dict())
    if start:
        model.load_state_dict(replace(read_model(start), config=config).model().state_dict())
    encoder = model.tupe.encoder
    encoder.config.places, encoder.attention_backend = config.places, config.attention
    encoder.checkpoint_activations = config.checkpoint_activations
    if compiles:
        encoder.compile()
    return model


class Pretraining(Training):
    def __init__(
        self, recipe: Settled, data: str, symbols: list[str], run: Run, place: Place, updates: int,
        start: int,
    ):  # fmt: skip
        masks = {name: recipe[name] for name in ("mask_prob", "leave_unmasked_prob", "random_token_prob")}
        length, seed, longest = recipe["tokens_per_sample"], recipe["seed"], recipe["max_positions"]

        def masked_blocks(split, seed):
            return MaskedBlocks(Blocks(prefixes_of(data, split), length, symbols), symbols, seed, **masks)

        masked = masked_blocks(recipe["train_subset"], seed)
        names = [] if recipe["disable_validation"] else recipe["valid_subset"].split(",")
        splits = {name: masked_blocks(name, HELD_OUT_SEED) for name in names}
        for split, part in {recipe["train_subset"]: masked, **splits}.items():
            if not any((part[1, i][1] != IGNORED).any() for i in range(len(part))):  # as a rule, the first one has some
                raise ValueError(f"{data}: {split!r} has too little text: none of its tokens is masked")
        model = new_model(recipe.model, len(symbols), seed, recipe["compile"], recipe["finetune_from_model"])
        super().__init__(model, masked, splits, collate, recipe, data, longest, run, place, updates, start)

    def scores_of(self, split: str, dataset: MaskedBlocks) -> dict:
        size, most = self.recipe["batch_size_valid"], self.recipe["max_valid_steps"]
        loss, _ = self.measure(dataset, held_out(len(dataset), size)[: most or None])
        self.run.add_scores(self.epoch(), self.done, split, {"loss": loss})
        return {"loss": loss}
