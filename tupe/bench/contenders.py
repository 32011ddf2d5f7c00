"""The models whose training steps are compared, each with the criterion and optimizer that its users train it with.

B batch, L sequence length, C width, F feed-forward width, N layers, V vocabulary.
"""

import tupe.plugin  # noqa: F401  isort: skip  (first: registers the architectures, keeps fairseq's import quiet)
import importlib.util
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from fairseq import modules
from fairseq.data import Dictionary
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY
from fairseq.models.roberta import RobertaModel
from fairseq.optim.adam import Adam
from torch import nn

from ..common.architectures import SIZES, with_size
from ..kernels import multiply
from ..plugin.optim import AdamW
from .machine import Clock

MASKED = 0.15  # share of the tokens that are masked
OURS = {  # name -> (architecture, options on top of it)
    "tupe_r": ("tupe_r", {}),
    "tupe_a": ("tupe_a", {}),
    "bert_a": ("bert_a", {}),
    "nopos": ("bert_a", {"position": "nopos"}),
    "tupe_r-plain": ("tupe_r", {"attention": "plain"}),
    "tupe_r-sdpa": ("tupe_r", {"attention": "sdpa"}),
    "tupe_r-compile": ("tupe_r", {"compile": True}),
    "tupe_r-checkpoint": ("tupe_r", {"checkpoint_activations": True}),
}
HF = {"hf": "sdpa", "hf-eager": "eager", "hf-flash": "flash_attention_2"}  # flash: on GPUs in half precision
CONTENDERS = [*OURS, "fairseq", *HF]
DEFAULT = ["tupe_r", "tupe_a", "bert_a", "nopos", "fairseq", "hf"]


@dataclass(frozen=True)
class Setting:
    size: str = "base"  # a name from `architectures.SIZES`
    layers: int = 0  # 0: those of the size
    length: int = 512
    batch: int = 4
    vocab: int = 32768
    precision: str = "float32"  # a name from machine.PRECISIONS; bf16: autocast, float32 weights
    device: str = "cpu"
    threads: int = 0  # 0: PyTorch's default

    def dims(self) -> tuple[int, int, int, int]:
        """(N, C, number of heads, F)."""
        layers, width, heads, ffn = SIZES[self.size]
        return self.layers or layers, width, heads, ffn


def flops_per_token(setting: Setting, name: str = "") -> float:
    """FLOP of a contender's training step per token (default: of one that is not ours); see `report.ASSUMPTIONS`."""
    layers, width, _, ffn = setting.dims()
    weights = layers * (4 * width**2 + 2 * width * ffn) + MASKED * (width**2 + width * setting.vocab)
    if name in OURS:  # the last layer computes masked tokens alone, from its attention on
        weights -= (1 - MASKED) * (width**2 + 2 * width * ffn)
    return 6 * weights + 12 * layers * width * setting.length


def masked_batch(setting: Setting) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [B, L], [CLS] (0) first, and targets [B, L], pad (1) where a token is not masked; the same for every
    contender."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, setting.vocab - 1, (setting.batch, setting.length), generator=generator)
    tokens[:, 0] = 0
    targets = torch.full_like(tokens, 1)
    count = max(1, round(MASKED * tokens.numel()))
    words = tokens.view(-1).nonzero().view(-1)  # all but [CLS]
    places = words[torch.randperm(len(words), generator=generator)[:count]]
    targets.view(-1)[places] = tokens.view(-1)[places]
    tokens.view(-1)[places] = setting.vocab - 1
    return tokens.to(setting.device), targets.to(setting.device)


def dictionary(vocab: int) -> Dictionary:
    """A dictionary of `vocab` types, fairseq's special ones included."""
    words = Dictionary()
    for i in range(vocab - len(words)):
        words.add_symbol(f"w{i}")
    return words


class Contender:
    """One model with the criterion and optimizer that its users train it with."""

    def __init__(self, name: str, setting: Setting):
        if name not in CONTENDERS:
            raise ValueError(f"unknown contender {name!r}; valid: {', '.join(CONTENDERS)}")
        torch.manual_seed(0)
        self.setting = setting
        self.tokens, self.targets = masked_batch(setting)
        build = self.build_hf if name in HF else self.build_fairseq if name == "fairseq" else self.build_ours
        self.model = build(name).to(setting.device).train()
        self.optimizer = self.build_optimizer(name)

    def build_ours(self, name: str) -> nn.Module:
        arch, options = OURS[name]
        layers, *_ = self.setting.dims()
        config = MODEL_DATACLASS_REGISTRY[with_size(arch, self.setting.size)](
            encoder_layers=layers, max_positions=self.setting.length, **options
        )
        model = ARCH_MODEL_REGISTRY[with_size(arch, self.setting.size)].build_model(
            config, SimpleNamespace(source_dictionary=dictionary(self.setting.vocab))
        )

        def loss():  # the same as the criterion masked_lm_chunked
            masked = self.targets.ne(1).nonzero(as_tuple=True)
            options = {"masked_tokens": masked, "lm_targets": self.targets[masked], "n_real": self.tokens.numel()}
            return self.model(self.tokens, **options)[0]

        self.loss = loss
        return model

    def build_fairseq(self, name: str) -> nn.Module:
        layers, width, heads, ffn = self.setting.dims()
        config = SimpleNamespace(
            encoder_layers=layers, encoder_embed_dim=width, encoder_attention_heads=heads, encoder_ffn_embed_dim=ffn,
            max_positions=self.setting.length, dropout=0.1, attention_dropout=0.1,
        )  # fmt: skip
        model = RobertaModel.build_model(config, SimpleNamespace(source_dictionary=dictionary(self.setting.vocab)))
        masked = self.targets.ne(1)

        def loss():
            logits, _ = self.model(self.tokens, masked_tokens=masked)
            return modules.cross_entropy(logits, self.targets[masked], reduction="sum", ignore_index=1)

        self.loss = loss
        return model

    def build_hf(self, name: str) -> nn.Module:
        from transformers import BertConfig, BertForMaskedLM

        layers, width, heads, ffn = self.setting.dims()
        config = BertConfig(
            vocab_size=self.setting.vocab, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
            intermediate_size=ffn, max_position_embeddings=self.setting.length, attn_implementation=HF[name],
        )  # fmt: skip
        labels = self.targets.masked_fill(self.targets.eq(1), -100)
        count = labels.ne(-100).sum()
        self.loss = lambda: self.model(self.tokens, labels=labels).loss * count
        return BertForMaskedLM(config)

    def build_optimizer(self, name: str) -> torch.optim.Optimizer:
        options = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01}
        if name in HF:  # the default of its Trainer
            return torch.optim.AdamW(self.model.parameters(), fused=True, **options)
        if name == "fairseq":
            return Adam(self.model.parameters(), **options)
        return AdamW(self.model.parameters(), **options)

    def step(self) -> list[float]:
        """Train for a step; returns the seconds of forward pass, backward pass and optimizer."""
        clock = Clock(self.setting.device)
        bf16 = self.setting.precision == "bf16"
        with torch.autocast(self.setting.device, torch.bfloat16) if bf16 else nullcontext():
            loss = self.loss()
        clock.lap()
        (loss / self.targets.ne(1).sum()).backward()
        clock.lap()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        clock.lap()
        return clock.seconds()


class MatrixPeak:
    """A large matrix product in the same precision, by the fastest function available."""

    def __init__(self, setting: Setting):
        self.device, size = setting.device, peak_size(setting)
        dtype = torch.bfloat16 if setting.precision == "bf16" else torch.float32
        self.a = torch.randn(size, size, device=setting.device, dtype=dtype)

    def step(self) -> list[float]:
        clock = Clock(self.device)
        for _ in range(3):
            multiply(self.a, self.a)
            clock.lap()
        return [min(clock.seconds())]


def peak_size(setting: Setting) -> int:
    return 8192 if setting.device == "cuda" else 2048


def check_available(names: list[str]) -> None:
    """Raise ValueError for an unknown contender, or one whose library is not installed."""
    if unknown := [name for name in names if name not in CONTENDERS]:
        raise ValueError(f"unknown contender {unknown[0]!r}; valid: {', '.join(CONTENDERS)}")
    hugging_face = [name for name in names if name in HF]
    if hugging_face and importlib.util.find_spec("transformers") is None:
        raise ValueError(f"the contender {hugging_face[0]!r} needs `pip install transformers`")


def default_models() -> list[str]:
    """Ours and the two others; without Hugging Face's (and with a message) if transformers is not installed."""
    if importlib.util.find_spec("transformers") is not None:
        return DEFAULT
    print("transformers is not installed: Hugging Face's BERT is left out")
    return [name for name in DEFAULT if name != "hf"]
