"""The fairseq model: configuration, named architectures, and heads in checkpoints.

B batch, L sequence length, C model width, V vocabulary.
"""

import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, make_dataclass
from enum import Enum
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models import BaseFairseqModel, register_model
from fairseq.tasks import FairseqTask
from fairseq.tasks.masked_lm import MaskedLMTask
from omegaconf import DictConfig
from torch import Tensor, nn

from ..checkpoints.trained import (
    NAMES,
    check_settings,
    fingerprint,
    pack_settings,
    settings_of,
    spelled,
    unpack_settings,
)
from ..common.architectures import ARCHITECTURES, OTHER_BLOCKS, SIZES, named, preset, with_size
from ..common.options import split_files
from ..config import COMPILE
from ..encoder import ClassificationHead, Encoder, LMHead, ModelConfig, Stack, of_cls
from ..model_config import check_blocks
from ..names import cls_beside
from ..positions import load_scheme_file
from ..tracing import can_compile

logger = logging.getLogger(__name__)

Masked = Tensor | tuple[Tensor, Tensor]  # where tokens are masked: bool [B, L], or their rows and columns


def flat_indices(masked: Masked, tokens: Tensor) -> Tensor:
    """[n]: the indices of masked tokens in the flattened batch, tokens [B, L]."""
    if isinstance(masked, tuple):
        return masked[0] * tokens.size(1) + masked[1]
    return masked.flatten().nonzero().squeeze(1)


@dataclass
class TrainingConfig(FairseqDataclass):
    """Options that fairseq models have beside `ModelConfig`: how a model runs, not what it computes."""

    autocast: ChoiceEnum(["none", "bf16"]) = field(
        default="none",
        metadata={"help": "bf16: forward in bfloat16 autocast with float32 weights, on GPU and CPU", "free": True},
    )
    position_file: str = field(
        default="",
        metadata={"help": "Python files that register position schemes of your own, joined by ':'", "free": True},
    )
    compile: ChoiceEnum(list(COMPILE)) = field(
        default="auto",
        metadata={"help": "torch.compile layers, and head with loss; auto: a masked LM, on a GPU", "free": True},
    )


def fairseq_fields() -> Iterator[tuple]:
    """(name, type, field) of every option of `ModelConfig`.

    No bool may differ between presets: the command-line switch of a bool that is True by default sets it to False.
    """
    for option in fields(ModelConfig):
        choices = option.metadata["choices"]
        kind = ChoiceEnum(list(choices)) if choices else option.type
        metadata = {"help": option.metadata["help"], "free": option.metadata["free"]}
        yield NAMES[option.name], kind, field(default=option.default, metadata=metadata)


TupeConfig = make_dataclass(
    "TupeConfig", fairseq_fields(), bases=(TrainingConfig,), namespace={"__module__": __name__}
)  # fmt: skip
# Options that fine-tuning may change. All others define the function that was pre-trained.
TUNABLE = frozenset(option.name for option in fields(TupeConfig) if option.metadata.get("free"))


def core_config(cfg: DictConfig) -> ModelConfig:
    """The `ModelConfig` of a model's configuration in fairseq. Raises ValueError for values without meaning."""
    values = {option: getattr(cfg, name) for option, name in NAMES.items()}
    values = {name: value.value if isinstance(value, Enum) else value for name, value in values.items()}
    return ModelConfig(**values)


def load_scheme_files(cfg: DictConfig) -> None:
    """Register the schemes of `--position-file`. Tasks call this for a model to train, never for one from a checkpoint:
    loading must not run a file that the checkpoint names. Whoever loads it names the file."""
    for file in split_files(cfg.position_file):
        load_scheme_file(file)


def spell_names(cfg: DictConfig) -> None:
    """Replace `position` by its canonical spelling, `cls` "auto" by what it means there, and the architecture by the
    one that comes of both (`named`), in a model's configuration and in the whole one, which checkpoints keep. Raises
    ValueError for an unknown scheme."""
    cfg.position = spelled(cfg.position, cfg.position_file)
    cfg.cls = cls_beside(cfg.position) if str(cfg.cls) == "auto" else cfg.cls
    cfg._name = cfg._name and named(cfg._name, cfg.position, str(cfg.cls))
    root = cfg._get_parent() if isinstance(cfg, DictConfig) else None
    if root is not None and "model" in root:
        root.model.update({key: cfg[key] for key in ("_name", "position", "cls") if key in root.model})


def refuse_long_blocks(cfg: DictConfig, task: FairseqTask) -> None:
    """Raise ValueError if the task's blocks are longer than the model's positions: fairseq would skip every block that
    does not fit, which is nearly all."""
    length = getattr(task.cfg, "tokens_per_sample", None) if isinstance(task, MaskedLMTask) else None
    if length is not None:
        check_blocks(length, cfg.max_positions, cfg.places)


class StackWithSettings(Stack):
    """A stack whose state dict holds its settings too, under `_extra_state`: a model with others refuses it, even where
    all names and sizes agree."""

    def settings(self) -> dict[str, str]:
        own = {"position": self.positions.name, "heads": str(self.positions.dims.heads)}
        return {**settings_of(self.config), **own}

    def get_extra_state(self) -> Tensor:
        return pack_settings(self.settings())

    def set_extra_state(self, state: Tensor) -> None:
        """Raises ValueError for the state of a model with other settings."""
        check_settings(unpack_settings(state), self.settings())


class EncoderWithSettings(StackWithSettings, Encoder):
    """The encoder of fairseq's models."""


class TupeModel(BaseFairseqModel):
    """Encoder, LM head with the token embedding's weight, and any number of classification heads."""

    def __init__(self, cfg: TupeConfig, dictionary: Dictionary):
        super().__init__()
        self.cfg, self.dictionary = cfg, dictionary
        config = core_config(cfg)
        self.encoder = EncoderWithSettings(len(dictionary), dictionary.pad(), dictionary.eos(), config)
        self.lm_head = self.build_lm_head(config)
        self.classification_heads = nn.ModuleDict()
        self.to_compile = str(cfg.compile)

    def begin(self, device: torch.device, by_itself: bool) -> None:
        """Compile at the first batch, when the model is where it computes. by_itself: also for `auto`, if a GPU can."""
        choice, self.to_compile = self.to_compile, "no"
        if choice == "yes" or choice == "auto" and by_itself and can_compile(device):
            self.compile_parts()

    def compile_parts(self) -> None:
        """The layers, and the head with its loss."""
        self.encoder.compile()
        if self.lm_head is not None:
            self.lm_head.compile(dynamic=False)

    def build_lm_head(self, config: ModelConfig) -> LMHead | None:
        """The head on the encoder's features; None for a model without one."""
        return LMHead(config.width, len(self.dictionary), config=config)

    @classmethod
    def build_model(cls, cfg: DictConfig, task: FairseqTask) -> "TupeModel":
        refuse_long_blocks(cfg, task)
        spell_names(cfg)
        return cls(cfg, task.source_dictionary)

    def forward(
        self,
        src_tokens: Tensor,
        features_only: bool = False,
        classification_head_name: str | None = None,
        masked_tokens: Masked | None = None,
        lm_targets: Tensor | None = None,
        num_tokens: int | None = None,
        **unused,
    ) -> tuple:
        """src_tokens [B, L] -> (output, {}).

        The output is [B, classes] for a classification head, features [B, L, C] with features_only, else LM logits:
        [B, L, V], or [number of masked tokens, V] with masked_tokens, which says where: bool [B, L], or a pair of rows
        and columns. With lm_targets [number of masked tokens], the sum of their cross-entropies replaces the LM logits,
        which are then never all in memory at once. num_tokens: see `Encoder.packing`.
        """
        self.begin(src_tokens.device, self.training and masked_tokens is not None)
        indices = None
        if classification_head_name is not None:
            indices = of_cls(src_tokens)
        elif masked_tokens is not None and not features_only:
            indices = flat_indices(masked_tokens, src_tokens)
            if lm_targets is not None:
                indices, lm_targets = self.encoder.pad_outputs(indices, lm_targets)
        with self.precision():
            x, _ = self.encoder(src_tokens, num_tokens=num_tokens, output_indices=indices)  # [B, L, C] or [indices, C]
        if classification_head_name is not None:
            return self.classification_heads[classification_head_name](x), {}
        if features_only:
            return x, {}
        with self.precision():
            weight = self.encoder.tokens.weight
            x = self.lm_head(x, weight) if lm_targets is None else self.lm_head(x, weight, lm_targets)
        return x, {}

    def precision(self) -> AbstractContextManager:
        """The context manager for bfloat16 autocast. Raises ValueError if the weights are not float32."""
        if str(self.cfg.autocast) != "bf16":
            return nullcontext()  # not a disabled autocast, which would switch off that of a caller
        weight = self.encoder.tokens.weight
        if weight.dtype != torch.float32:
            raise ValueError("autocast keeps float32 weights; do not combine it with --fp16 or --bf16")
        return torch.autocast(weight.device.type, torch.bfloat16)

    def max_positions(self) -> int:
        return self.cfg.max_positions

    def register_classification_head(
        self, name: str, num_classes: int | None = None, inner_dim: int | None = None, **unused
    ) -> None:
        """Create head `name`, or replace it."""
        width, inner_dim = self.cfg.encoder_embed_dim, inner_dim or self.cfg.encoder_embed_dim
        self.classification_heads[name] = ClassificationHead(width, inner_dim, num_classes, self.cfg.pooler_dropout)

    def upgrade_state_dict_named(self, state_dict: dict, name: str) -> None:
        """Reconcile a checkpoint's heads with those of this model before strict loading."""
        super().upgrade_state_dict_named(state_dict, name)
        prefix, own = (f"{name}." if name else "") + "classification_heads.", self.classification_heads.state_dict()
        for head in sorted({key[len(prefix) :].split(".")[0] for key in state_dict if key.startswith(prefix)}):
            keys = [key for key in state_dict if key.startswith(f"{prefix}{head}.")]
            if any(state_dict[key].shape != getattr(own.get(key[len(prefix) :]), "shape", None) for key in keys):
                logger.warning(f"dropping the checkpoint's head {head!r}: this model has none of its sizes")
                for key in keys:
                    del state_dict[key]
        for key, value in own.items():
            state_dict.setdefault(prefix + key, value)  # heads that are new here keep their fresh weights

    # The state dict has a fingerprint of the dictionary, to refuse another one, also of the right size.
    def get_extra_state(self) -> Tensor:
        return fingerprint(self.dictionary.symbols)

    def set_extra_state(self, state: Tensor) -> None:
        if not torch.equal(state.cpu(), self.get_extra_state()):
            raise ValueError(
                "the dictionary is not the checkpoint's: "
                "prepare the data with the dict.txt of the checkpoint's own pre-training data"
            )


def register_architectures(model: type, config: type, architectures: Iterable[str]) -> None:
    """Register every architecture in every size as a model of its own.

    fairseq's launchers disagree about named architectures (fairseq-hydra-train ignores their presets), but both read a
    model's dataclass. So each name gets a dataclass whose defaults are the preset, and a class to carry it.
    """
    for name in (with_size(arch, size) for arch in architectures for size in SIZES):
        defaults = {NAMES[option]: value for option, value in preset(name).items()}
        types, doc = config.__dataclass_fields__, f"{model.__name__} with {defaults}"
        fields = [(key, types[key].type, redefault(config, key, value)) for key, value in defaults.items()]
        dc = make_dataclass(f"{name}_config", fields, bases=(config,), namespace={"__module__": config.__module__})
        kind = type(name, (model,), {"__module__": model.__module__, "__doc__": doc})
        vars(sys.modules[model.__module__]).update({dc.__name__: dc, kind.__name__: kind})  # for pickle
        register_model(name, dataclass=dc)(kind)


def redefault(config: type, key: str, value: Any) -> Any:
    """The field `key` of a dataclass with another default."""
    return field(default=value, metadata=dict(config.__dataclass_fields__[key].metadata))


register_architectures(TupeModel, TupeConfig, [*ARCHITECTURES, *OTHER_BLOCKS])
