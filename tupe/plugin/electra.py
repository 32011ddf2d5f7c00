"""ELECTRA (Clark et al., 2020) with any position scheme: a generator fills in masked tokens, and a discriminator
finds the tokens of the result that were replaced. Fine-tuning keeps only the discriminator.

B batch, L sequence length, C width of the discriminator, G of the generator, V vocabulary. Trained on the batches of
the pre-training task with the criterion `electra`.
"""

import math
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.data import Dictionary
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from fairseq.models import BaseFairseqModel
from fairseq.tasks import FairseqTask
from fairseq.tasks.masked_lm import MaskedLMTask
from omegaconf import DictConfig
from torch import Tensor, nn

from ..common.architectures import ELECTRA
from ..encoder import Encoder, LMHead, ModelConfig, init_bert
from ..positions import Positions, overrides
from .masked_lm import nothing_masked
from .model import (
    Masked,
    StackWithSettings,
    TupeConfig,
    TupeModel,
    flat_indices,
    refuse_long_blocks,
    register_architectures,
    spell_names,
)


@dataclass
class ElectraConfig(TupeConfig):
    generator_fraction: int = field(
        default=3, metadata={"help": "heads of the discriminator per head of the generator; all heads are equally wide"}
    )


class Generator(StackWithSettings):
    """The masked language model: as deep as the discriminator, about a third as wide (whole heads of the same width).

    It reads the discriminator's embeddings (tokens, positions, layer norm), projected from C to G. The position
    vectors in its attention are the discriminator's too, p [L, C], with projections C -> G of its own. A scheme's
    tables per head or per offset are its own.
    """

    def __init__(self, tied: Encoder, fraction: int):
        """tied: the discriminator's encoder. fraction: heads of the discriminator per head of the generator."""
        config = tied.config
        heads = max(1, round(config.heads / fraction))
        width, ffn = (size * heads // config.heads for size in (config.width, config.ffn))
        own = replace(config, heads=heads, width=width, ffn=ffn, segments="none")
        super().__init__(own, tied.pad, position_width=config.width)
        self.reset_parameters()
        self.project = nn.Linear(config.width, width)
        self.head = LMHead(config.width, len(tied.tokens.weight), inputs=width, config=config)
        self.project.apply(init_bert)
        tie_position_vectors(self.positions, tied.positions)

    def forward(self, tokens: Tensor, tied: Encoder, masked_tokens: Masked, num_tokens: int | None = None) -> Tensor:
        """LM logits [masked, V] at masked_tokens. tied: the discriminator's encoder. Other arguments: see
        `TupeModel.forward`."""
        packing, positions = self.packing(tokens, num_tokens), self.token_positions(tokens)
        x = self.project(tied.embed(tokens, packing, positions))
        x, _ = self.transform(x, positions, packing, output_indices=flat_indices(masked_tokens, tokens))
        return self.head(x, tied.tokens.weight)


def tie_position_vectors(own: Positions, tied: Positions) -> None:
    """Make `own` use the tables of `tied` whose vectors have the model's width C (if D = C, this includes vectors of a
    head's width), unless its own layers project the vectors, which then have these layers' width."""
    for name, scheme in tied.items():
        if not isinstance(scheme, nn.ModuleList) and overrides(scheme, "embed"):  # such a scheme is never per layer
            own[name] = scheme  # acts only on the embeddings, which are shared
    for name, module in tied.named_modules():
        if isinstance(module, nn.Embedding) and module.embedding_dim == tied.dims.width:
            own_table = own.get_submodule(name)
            if own_table.embedding_dim == module.embedding_dim:
                own_table.weight = module.weight


class DiscriminatorHead(nn.Module):
    """One logit per token: positive means replaced."""

    def __init__(self, width: int):
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.out = nn.Linear(width, 1)
        self.apply(init_bert)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, C] -> [B, L]."""
        return self.out(F.gelu(self.dense(x))).squeeze(-1)


def sample_gumbel(logits: torch.Tensor) -> torch.Tensor:
    """One index per row of logits [..., V], drawn from softmax(logits): the largest of logits plus Gumbel noise."""
    logits = logits.detach().float()
    return (logits - torch.empty_like(logits).exponential_().log()).argmax(dim=-1)


class ElectraModel(TupeModel):
    """`encoder` is the discriminator. The generator and the discriminator's head exist only in pre-training; other
    tasks (fine-tuning) build the encoder only and drop the rest from the checkpoint."""

    def __init__(self, cfg: ElectraConfig, dictionary: Dictionary, pretraining: bool):
        super().__init__(cfg, dictionary)
        self.generator = self.discriminator = None
        if pretraining:
            self.generator = Generator(self.encoder, cfg.generator_fraction)
            self.discriminator = DiscriminatorHead(cfg.encoder_embed_dim)

    def compile_parts(self) -> None:
        super().compile_parts()
        if self.generator is not None:
            nn.Module.compile(self.generator, dynamic=True)  # whole: its outputs are of any number

    def build_lm_head(self, config: ModelConfig) -> None:
        """The generator has its own."""

    @classmethod
    def build_model(cls, cfg: DictConfig, task: FairseqTask) -> "ElectraModel":
        refuse_long_blocks(cfg, task)
        spell_names(cfg)
        return cls(cfg, task.source_dictionary, pretraining=isinstance(task, MaskedLMTask))

    def forward(
        self, src_tokens: Tensor, features_only: bool = False, classification_head_name: str | None = None,
        masked_tokens: Masked | None = None, original: Tensor | None = None, num_tokens: int | None = None, **unused,
    ) -> tuple:  # fmt: skip
        """src_tokens [B, L]. For features and classes as TupeModel.forward, of the discriminator.

        In pre-training, original [B, L] are the tokens before masking, and the output is the generator's LM logits
        [masked, V] at masked_tokens and logits [B, L] that a token was replaced. The second result has the tokens
        [B, L] that the discriminator read under "corrupted", and the correct answers [B, L] (bool) under "replaced".
        """
        if features_only or classification_head_name is not None:
            return super().forward(src_tokens, features_only, classification_head_name, num_tokens=num_tokens)
        if original is None:
            raise ValueError("this criterion would train only the generator; ELECTRA needs --criterion electra")
        self.begin(src_tokens.device, False)
        with self.precision():
            lm_logits = self.generator(src_tokens, self.encoder, masked_tokens, num_tokens)
            corrupted = self.corrupt(original, masked_tokens, lm_logits)
            features, _ = self.encoder(corrupted, num_tokens=num_tokens)
            logits = self.discriminator(features)
        return (lm_logits, logits), {"corrupted": corrupted, "replaced": corrupted.ne(original)}

    def corrupt(self, original: Tensor, masked_tokens: Masked, lm_logits: Tensor) -> Tensor:
        """original [B, L] with the masked tokens drawn from lm_logits [masked, V], without a gradient."""
        allowed = lm_logits.detach().clone()
        allowed[:, self.encoder.pad].fill_(-math.inf)  # a drawn padding token would be hidden, not replaced
        corrupted = original.clone()
        corrupted[masked_tokens] = sample_gumbel(allowed)
        return corrupted

    def upgrade_state_dict_named(self, state_dict: dict, name: str) -> None:
        super().upgrade_state_dict_named(state_dict, name)
        if self.generator is None:
            prefix = f"{name}." if name else ""
            for key in [k for k in state_dict if k.startswith((f"{prefix}generator.", f"{prefix}discriminator."))]:
                del state_dict[key]


@dataclass
class ElectraCriterionConfig(FairseqDataclass):
    discriminator_weight: float = field(default=50.0, metadata={"help": "weight of the discriminator's loss"})


@register_criterion("electra", dataclass=ElectraCriterionConfig)
class ElectraCriterion(FairseqCriterion):
    """Mean LM loss of the masked tokens + weight * mean binary loss of all tokens ([CLS] and </s> included).

    `<s>` and `</s>` are never masked nor replaced: what the task has masked of them is undone here, for every task and
    recipe, so that [CLS] is there in every sequence. All other tokens keep the task's masks.

    fairseq divides the loss by the sample size, summed over processes and steps. The sample size is the number of
    masked tokens, so each batch weights the discriminator's mean by it.
    """

    def __init__(self, task: FairseqTask, discriminator_weight: float):
        super().__init__(task)
        self.weight = discriminator_weight
        self.specials = task.source_dictionary.bos(), task.source_dictionary.eos()

    def forward(self, model: BaseFairseqModel, sample: dict, reduce: bool = True) -> tuple[torch.Tensor, int, dict]:
        """sample: a batch of the task masked_lm, "target" [B, L] with padding where nothing is masked."""
        tokens, target = sample["net_input"]["src_tokens"], sample["target"]
        masked = target.ne(self.padding_idx)
        original = torch.where(masked, target, tokens)
        special = original.eq(self.specials[0]) | original.eq(self.specials[1])
        masked, tokens = masked & ~special, torch.where(special, original, tokens)
        not_padding = original.ne(self.padding_idx)
        positions = masked.nonzero(as_tuple=True)  # rows, columns; only this waits for the GPU
        options = {"masked_tokens": positions, "original": original, "num_tokens": int(sample["ntokens"])}
        (lm_logits, logits), extra = model(**{**sample["net_input"], "src_tokens": tokens}, **options)
        replaced = extra["replaced"]
        lm_loss = F.cross_entropy(lm_logits.float(), target[positions], reduction="sum")
        weight = not_padding.float()
        disc_loss = F.binary_cross_entropy_with_logits(logits.float(), replaced.float(), weight, reduction="sum")
        n_masked, num_tokens = len(positions[0]), not_padding.sum()
        loss = lm_loss + self.weight * disc_loss * n_masked / num_tokens
        logs = {
            "loss": loss.data,
            "lm_loss": lm_loss.data,
            "disc_loss": disc_loss.data,
            "num_tokens": num_tokens,
            "n_replaced": (replaced & not_padding).sum(),
            "sample_size": n_masked,
            "ntokens": sample["ntokens"],
            "nsentences": sample["nsentences"],
        }
        return loss, n_masked, logs

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict]) -> None:
        """loss (as trained), lm_loss (bits per masked token), disc_loss (bits per token), and the share of tokens that
        were replaced."""
        total = {key: float(sum(log.get(key, 0) for log in logging_outputs)) for key in logging_outputs[0]}
        masked, tokens = total["sample_size"], total["num_tokens"]
        if not nothing_masked(logging_outputs):
            metrics.log_scalar("loss", total["loss"] / masked, masked, round=3)
        lm_loss = total["lm_loss"] / masked / math.log(2) if masked else None
        metrics.log_scalar("lm_loss", lm_loss, masked, round=3)
        metrics.log_scalar("disc_loss", total["disc_loss"] / max(tokens, 1) / math.log(2), tokens, round=4)
        metrics.log_scalar("replaced", total["n_replaced"] / max(tokens, 1), tokens, round=4)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        return True


register_architectures(ElectraModel, ElectraConfig, ELECTRA)
