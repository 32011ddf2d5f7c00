"""The models that are compared, and their training steps with the criterion and optimizer of their users.

B batch, L sequence length, C width, F feed-forward width, N layers, V vocabulary.
"""

import tupe.plugin  # noqa: F401  isort: skip  (first: registers the architectures, keeps fairseq's import quiet)
import importlib
from contextlib import suppress
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from fairseq import modules
from fairseq.data import Dictionary
from fairseq.dataclass.configs import FairseqConfig
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY
from fairseq.models.roberta import RobertaModel
from fairseq.optim import FP16Optimizer
from fairseq.optim.adam import Adam
from omegaconf import OmegaConf
from torch import Tensor, nn

from tupe.common.architectures import SIZES, with_size
from tupe.cpu import multiply
from tupe.plugin.optim import AdamW
from tupe.positions import Dims, LayerContext, Positions
from tupe.token_positions import TokenPositions

from .instrument import Step, timed
from .machine import PRECISIONS, autocast

MASKED = 0.15  # share of the tokens that are masked
OURS = {  # name -> (architecture, options on top of it)
    "tupe_r": ("tupe_r", {}),
    "tupe_a": ("tupe_a", {}),
    "bert_a": ("bert_a", {}),
    "nopos": ("bert_a", {"position": "nopos"}),
    "rope": ("bert_a", {"position": "rope"}),
    "rope-window": ("bert_a", {"position": "rope+window:size:128:every:3"}),  # as ModernBERT's layers
    "tupe_r-plain": ("tupe_r", {"attention": "plain"}),
    "tupe_r-sdpa": ("tupe_r", {"attention": "sdpa"}),
    "tupe_r-triton": ("tupe_r", {"attention": "triton"}),
    "nopos-triton": ("bert_a", {"position": "nopos", "attention": "triton"}),
    "tupe_r-compile": ("tupe_r", {"compile": "yes"}),
    "tupe_r-checkpoint": ("tupe_r", {"checkpoint_activations": True}),
}
HF = {  # of the transformers library: name -> (kind, options); flash: on GPUs in half precision
    "hf": ("Bert", {"attn_implementation": "sdpa"}),
    "hf-masked": ("Bert", {"attn_implementation": "sdpa"}),  # its head at masked tokens alone, as ours
    "hf-eager": ("Bert", {"attn_implementation": "eager"}),
    "hf-flash": ("Bert", {"attn_implementation": "flash_attention_2"}),
    "modernbert": ("ModernBert", {  # transformers' port: padded, its head at all tokens
        "attn_implementation": "sdpa", "embedding_dropout": 0.1, "attention_dropout": 0.1, "mlp_dropout": 0.1,
        "pad_token_id": 1, "eos_token_id": 2, "sep_token_id": 2, "bos_token_id": 0, "cls_token_id": 0,
    }),
    "export": ("Tupe", {"position": "untied+t5", "cls_position": "untied"}),  # what `tupe checkpoint export` writes
}  # fmt: skip
CONTENDERS = [*OURS, "fairseq", *HF]
PAD = 1
PEAK_SIZE = {"cpu": 2048, "cuda": 8192}  # of the square matrices of `matrix_peak`


@dataclass(frozen=True)
class Setting:
    size: str = "base"  # a name from `architectures.SIZES`
    layers: int = 0  # 0: those of the size
    length: int = 512
    batch: int = 4
    vocab: int = 32768
    precision: str = "float32"  # a name from machine.PRECISIONS
    device: str = "cpu"
    half_weights: bool = False  # beside float32 copies, as --fp16 and --bf16 of fairseq; else half is autocast

    @property
    def mode(self) -> str:
        """ "float32", "bf16 autocast", "fp16 weights" ..."""
        kinds = "" if self.precision == "float32" else " weights" if self.half_weights else " autocast"
        return self.precision + kinds

    def of_length(self, length: int, tokens: int) -> "Setting":
        """The same with a batch of so many tokens, of at least one sequence."""
        return replace(self, length=length, batch=max(1, tokens // length))

    def dims(self) -> tuple[int, int, int, int]:
        """(N, C, number of heads, F)."""
        layers, width, heads, ffn = SIZES[self.size]
        return self.layers or layers, width, heads, ffn

    def __str__(self) -> str:
        return f"{self.size}, N = {self.dims()[0]}, B = {self.batch}, L = {self.length}, {self.mode}"


def settings(base: Setting, lengths: list[int], tokens: int, precisions: list[str]) -> list[Setting]:
    """A setting for every length and precision, of batches of so many tokens.

    Raises ValueError for a length longer than a batch.
    """
    if max(lengths) > tokens:
        raise ValueError(f"a batch of {tokens} tokens holds no sequence of {max(lengths)}; use more --tokens")
    return [
        replace(base.of_length(length, tokens), precision=precision) for precision in precisions for length in lengths
    ]


def flops_per_token(setting: Setting, name: str = "") -> float:
    """FLOP of a contender's training step per token (default: of one that is not ours); see `step.ASSUMPTIONS`."""
    layers, width, _, ffn = setting.dims()
    weights = layers * (4 * width**2 + 2 * width * ffn) + MASKED * (width**2 + width * setting.vocab)
    if name in OURS:  # the last layer computes only masked tokens, from its attention on
        weights -= (1 - MASKED) * (width**2 + 2 * width * ffn)
    return 6 * weights + 12 * width * keys(setting, name)


def keys(setting: Setting, name: str = "") -> float:
    """How many keys a contender's query sees on average, in all layers together."""
    layers, width, heads, _ = setting.dims()
    options = OURS[name][1] if name in OURS else {}
    dims = Dims(setting.length, width, heads, layers, head_dim=width // heads, value_dim=width // heads)
    with torch.device("meta"):
        positions = Positions(options.get("position", "nopos"), dims)
    reaches = [positions.reach(LayerContext(n, TokenPositions(setting.length))) for n in range(layers)]
    seen = [
        setting.length if reach is None else 2 * reach + 1 - reach * (reach + 1) / setting.length for reach in reaches
    ]
    return sum(seen)


def masked_batch(setting: Setting, tokens: Tensor | None = None, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens [B, L], [CLS] (0) first, and targets [B, L], pad (1) where a token is not masked; the same for every
    contender. tokens: before they are masked; by default random ones."""
    generator = torch.Generator().manual_seed(seed)
    if tokens is None:
        tokens = torch.randint(5, setting.vocab - 1, (setting.batch, setting.length), generator=generator)
    tokens[:, 0] = 0
    targets = torch.full_like(tokens, 1)
    count = max(1, round(MASKED * tokens.numel()))
    words = tokens.view(-1).nonzero().view(-1)  # all but [CLS]
    indices = words[torch.randperm(len(words), generator=generator)[:count]]
    targets.view(-1)[indices] = tokens.view(-1)[indices]
    tokens.view(-1)[indices] = setting.vocab - 1
    return tokens.to(setting.device), targets.to(setting.device)


def dictionary(vocab: int) -> Dictionary:
    """A dictionary of `vocab` types, fairseq's special ones included."""
    words = Dictionary()
    for i in range(vocab - len(words)):
        words.add_symbol(f"w{i}")
    return words


def build_ours(arch: str, length: int, vocab: int, **options) -> nn.Module:
    """One of our architectures, its size in its name. options: of the model."""
    config = MODEL_DATACLASS_REGISTRY[arch](max_positions=length, **options)
    return ARCH_MODEL_REGISTRY[arch].build_model(config, SimpleNamespace(source_dictionary=dictionary(vocab)))


def build(name: str, setting: Setting, classes: int = 0, **more) -> nn.Module:
    """A model in training mode, with random weights: a masked language model, or with `classes` a classifier of texts.
    "modernbert" has as many weights as BERT: its feed-forward block has three matrices, each of two thirds. more:
    options of one that is ours.

    Raises ValueError for an unknown name.
    """
    torch.manual_seed(0)
    layers, width, heads, ffn = setting.dims()
    if name in OURS:
        arch, options = OURS[name]
        arch = with_size(arch, setting.size)
        model = build_ours(arch, setting.length, setting.vocab, encoder_layers=layers, **options, **more)
    elif name == "fairseq":
        config = SimpleNamespace(
            encoder_layers=layers, encoder_embed_dim=width, encoder_attention_heads=heads, encoder_ffn_embed_dim=ffn,
            max_positions=setting.length, dropout=0.1, attention_dropout=0.1,
        )  # fmt: skip
        model = RobertaModel.build_model(config, SimpleNamespace(source_dictionary=dictionary(setting.vocab)))
    elif name in HF:
        kind, options = HF[name]
        library = importlib.import_module("tupe.hf" if kind == "Tupe" else "transformers")
        config = getattr(library, f"{kind}Config")(
            vocab_size=setting.vocab, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
            intermediate_size=2 * ffn // 3 if kind == "ModernBert" else ffn, num_labels=classes,
            max_position_embeddings=setting.length, **options,
        )  # fmt: skip
        model = getattr(library, kind + ("ForSequenceClassification" if classes else "ForMaskedLM"))(config)
    else:
        raise ValueError(f"unknown contender {name!r}; valid: {', '.join(CONTENDERS)}")
    if classes and hasattr(model, "register_classification_head"):  # a model of fairseq's
        model.register_classification_head("head", num_classes=classes)
    return model.to(setting.device).train()


class Contender:
    """One model with the criterion and optimizer that its users train it with. `step` trains it: forward pass, backward
    pass, optimizer."""

    def __init__(self, name: str, setting: Setting, **more):
        self.name, self.setting = name, setting
        self.model = build(name, setting, **more)
        if setting.half_weights:
            self.model.to(PRECISIONS[setting.precision])
        self.optimizers = [self.build_optimizer(name)]
        self.take(*masked_batch(setting))
        self.step = timed(setting.device, self.forward, self.backward, self.update)

    def take(self, tokens: Tensor, targets: Tensor) -> None:
        """The batch of the next steps. Where it is masked is found here, as collating it does: no step waits for it."""
        self.tokens, self.targets, self.masked = tokens, targets, targets.ne(PAD)
        self.indices = self.masked.nonzero(as_tuple=True)

    @property
    def torch_optimizer(self) -> torch.optim.Optimizer:
        return self.optimizers[0].optimizer if self.setting.half_weights else self.optimizers[0]

    def kept(self) -> list[Tensor]:
        """The tensors that stay between two steps: weights and, after the first step, moments; float32 copies of half
        weights, with their gradients."""
        moments = (x for optimizer in self.optimizers for state in optimizer.state.values() for x in state.values())
        copies = ()
        if self.setting.half_weights:
            moments = (x for state in self.torch_optimizer.state.values() for x in state.values())
            copies = (x for group in self.torch_optimizer.param_groups for p in group["params"] for x in (p, p.grad))
        return [*self.model.parameters(), *self.model.buffers(), *copies, *filter(torch.is_tensor, moments)]

    def loss(self) -> Tensor:
        """The sum over masked tokens."""
        if self.name == "hf-masked":
            x = self.model.bert(self.tokens).last_hidden_state[self.indices]
            return F.cross_entropy(self.model.cls(x).float(), self.targets[self.indices], reduction="sum")
        if self.name in HF:
            labels = self.targets.masked_fill(~self.masked, -100)
            return self.model(self.tokens, labels=labels).loss * self.masked.sum()
        if self.name == "fairseq":
            logits, _ = self.model(self.tokens, masked_tokens=self.masked)
            return modules.cross_entropy(logits, self.targets[self.masked], reduction="sum", ignore_index=PAD)
        targets = self.targets[self.indices]  # the same as the criterion masked_lm_chunked
        options = {"masked_tokens": self.indices, "lm_targets": targets, "num_tokens": self.tokens.numel()}
        return self.model(self.tokens, **options)[0]

    def build_optimizer(self, name: str) -> torch.optim.Optimizer | FP16Optimizer:
        if self.setting.half_weights:
            return half_optimizer(self.setting, self.model, "adam" if name == "fairseq" else "adamw_fused")
        options = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01}
        if name in HF:  # the default of its Trainer
            return torch.optim.AdamW(self.model.parameters(), fused=True, **options)
        return (Adam if name == "fairseq" else AdamW)(self.model.parameters(), **options)

    def forward(self) -> None:
        with autocast(self.setting.device, "float32" if self.setting.half_weights else self.setting.precision):
            self.sum = self.loss()

    def backward(self) -> None:
        loss = self.sum / self.masked.sum()
        if self.setting.half_weights:
            self.optimizers[0].backward(loss)  # scaled, in fp16
        else:
            loss.backward()
        del self.sum

    def update(self) -> None:
        if self.setting.half_weights:
            (optimizer,) = self.optimizers
            with suppress(OverflowError):  # fairseq's training leaves out such an update, too
                optimizer.clip_grad_norm(1.0)
                optimizer.step()
            optimizer.zero_grad()
            return
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def half_optimizer(setting: Setting, model: nn.Module, name: str) -> FP16Optimizer:
    """What fairseq trains half weights with: it keeps float32 copies of them, which the named optimizer updates."""
    config = OmegaConf.structured(FairseqConfig)
    config.common.bf16 = setting.precision == "bf16"
    config.common.fp16_no_flatten_grads = setting.device == "cpu"  # one vector of all is for GPUs
    config.optimizer = {"_name": name, "lr": [1e-4], "adam_eps": 1e-6, "weight_decay": 0.01}
    optimizer = FP16Optimizer.build_optimizer(config, list(model.parameters()))
    optimizer.zero_grad()  # and from the first step on, gradients are divided by the scale of the loss
    return optimizer


def matrix_peak(setting: Setting) -> Step:
    """A step of three large matrix products in the same precision, by the fastest function available."""
    size, dtype = PEAK_SIZE[setting.device], PRECISIONS[setting.precision]
    a = torch.randn(size, size, device=setting.device, dtype=dtype)
    return timed(setting.device, *[lambda: multiply(a, a)] * 3)
