"""BERT-like encoders, of the blocks of 2018 and of today. The encoder never names a scheme: `Positions` computes the
terms, and every layer receives them.

B batch, L sequence length, C model width, H heads, D = C / H, N layers; T rows of token-wise work: where there is
padding, x [B, L, C] becomes [T, C] after the embeddings (`packing.Packing`), and so it stays outside of attention.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .attention import Backend, Batch, Plain, attend
from .backends import choose
from .cpu import Linear, dropout, linear, split_heads
from .losses import lm_loss
from .model_config import BLOCK_DEFAULTS, ModelConfig, names_in
from .names import cls_beside
from .packing import NO_PADDING, Packing, Selection
from .positions import IN_LAYERS, Dims, LayerContext, Positions, autocast_device, bounded_schemes, precision_of
from .schemes import Table
from .token_positions import TokenPositions, draw_positions
from .tracing import allow_graphs, is_traced

__all__ = [
    "Encoder", "ModelConfig", "names_in", "BLOCK_DEFAULTS", "LMHead", "ClassificationHead", "of_cls",
]  # fmt: skip

logger = logging.getLogger(__name__)

# Of compiled code: lengths and numbers of outputs become multiples of these, and so many graphs are made at most.
LENGTH_STEP, OUTPUTS_STEP, MOST_GRAPHS = 64, 256, 256


@dataclass
class Shared:
    """The objects that all layers call. It is not a tuple, because accelerate moves the tensors and modules that it
    finds in tuples among a layer's arguments to the layer's device."""

    positions: Positions
    backend: Backend


class LayerInputs(NamedTuple):
    """A layer's arguments beside its input. What all layers share is an argument, because no layer owns it."""

    shared: Shared
    token_positions: TokenPositions  # where the tokens stand
    packing: Packing  # what makes [B, L, C] of the layer's tokens, in the order in which the backend takes sequences
    prepared: Any  # by the backend, of this layer
    index: int  # type: ignore[assignment]  # of this layer; hides a method of tuples that nobody calls
    selection: Selection | None = None  # the tokens whose output is read; None: all

    def attend(self, x: Tensor, own: "Attention | GatedAttentionLayer") -> Tensor:
        """[B, L, C] or [T, C] -> mixed values [B, H, L, E]. own: the module of the layer that projects to q, k, v."""
        q, k, v = own.project(x, self.packing)
        tokens = partial(self.packing.unpack, x), self.packing.mask
        layer = LayerContext(self.index, self.token_positions, own.project, *tokens, self.shared.positions.scale)
        dropout = own.attention_dropout if own.training else 0.0
        return attend(q, k, v, self.shared.positions, self.prepared, layer, self.shared.backend, dropout)

    def outputs(self, mixed: Tensor) -> Tensor:
        """The rows of mixed values [B, L, C] whose output is read: [T, C], [B, L, C] or [m, C]."""
        return self.packing.pack(mixed) if self.selection is None else self.selection.take_padded(mixed)

    def residual(self, x: Tensor) -> Tensor:
        """The same rows of the layer's input [B, L, C] or [T, C]."""
        return x if self.selection is None else self.selection.take_packed(x)


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) times a gain, in no less than float32: squares overflow in half precision."""

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(dtype), self.normalized_shape, self.weight.to(dtype), self.eps).to(x.dtype)


NORMS: dict[str, Callable[..., nn.Module]] = {
    "layer": nn.LayerNorm, "layer_no_bias": partial(nn.LayerNorm, bias=False),
    "layer_plain": partial(nn.LayerNorm, elementwise_affine=False), "rms": RMSNorm,
}  # fmt: skip
# name -> (function, whether it is applied to one half of the columns, as a factor of the other half)
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "gelu": (F.gelu, False), "geglu": (F.gelu, True), "geglu_tanh": (partial(F.gelu, approximate="tanh"), True),
    "swiglu": (F.silu, True),
}  # fmt: skip


class Attention(nn.Module):
    """Multi-head self-attention."""

    def __init__(self, dims: Dims, config: ModelConfig):
        super().__init__()
        self.heads, self.attention_dropout = dims.heads, config.attention_dropout
        bias = config.resolve("linear_bias") != "no"
        self.qkv = Linear(dims.width, 3 * dims.width, bias)
        self.out = Linear(dims.width, dims.width, bias)
        self.norm = nn.LayerNorm(dims.width) if config.resolve("inner_norms") == "yes" else None
        if config.normaliser in ("l2", "swish_l2"):
            # Rows of l2 weights sum to as much as sqrt(n) where softmax's sum to 1: W_V and W_O start divided by
            # n^(1/4) each, for the longest n. Su (2022) asks for less variance; how much less is our choice.
            factor = config.max_positions**-0.25
            self.qkv.shrunk, self.out.shrunk = (slice(2 * dims.width, None), factor), (slice(None), factor)

    def project(self, x: Tensor, packing: Packing = NO_PADDING) -> tuple[Tensor, Tensor, Tensor]:
        """[B, L, C] or [T, C] -> q, k, v, [B, H, L, D] each."""
        return split_heads(packing.unpack(self.qkv(x)), self.heads)

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        mixed = inputs.attend(x, self)  # [B, H, L, D]
        y = self.out(inputs.outputs(mixed.transpose(1, 2).flatten(2)))
        return y if self.norm is None else self.norm(y)


class TransformerLayer(nn.Module):
    """Attention and feed-forward block, each followed by dropout and residual sum, with a norm behind the sum (post, as
    BERT) or before the block (pre, as ModernBERT). See `BLOCK_DEFAULTS`."""

    def __init__(self, dims: Dims, config: ModelConfig):
        super().__init__()
        self.dropout, self.activation_dropout = config.dropout, config.activation_dropout
        self.pre, norm = config.resolve("norm_order") == "pre", NORMS[config.resolve("norm")]
        self.activation, self.gated = ACTIVATIONS[config.resolve("activation")]
        bias = config.resolve("linear_bias") == "yes"
        self.attention = Attention(dims, config)
        self.attention_norm = norm(dims.width)
        self.fc1 = Linear(dims.width, config.ffn * (2 if self.gated else 1), bias)
        self.inner_norm = norm(config.ffn) if config.resolve("inner_norms") == "yes" else None
        self.fc2 = Linear(config.ffn, dims.width, bias)
        self.ffn_norm = norm(dims.width)

    @staticmethod
    def dims(max_positions: int, width: int, heads: int, layers: int) -> Dims:
        """The sizes that position schemes need. Raises ValueError if the heads cannot share the width."""
        if width % heads:
            raise ValueError(f"width {width} is not a multiple of the number of heads {heads}")
        return Dims(max_positions, width, heads, layers, head_dim=width // heads, value_dim=width // heads)

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """[B, L, C] or [T, C] -> the same shape, or of a selection [m, C]."""
        y = self.attention(self.attention_norm(x) if self.pre else x, inputs)
        x = inputs.residual(x) + dropout(y, self.dropout, self.training)
        x = x if self.pre else self.attention_norm(x)
        y = self.feed_forward(self.ffn_norm(x) if self.pre else x)
        x = x + dropout(y, self.dropout, self.training)
        return x if self.pre else self.ffn_norm(x)

    def feed_forward(self, x: Tensor) -> Tensor:
        """[..., C] -> [..., C]"""
        x = self.fc1(x)  # [..., F], or [..., 2F]
        if self.gated:
            x, factor = x.chunk(2, dim=-1)  # [..., F] each
        x = self.activation(x)
        x = x * factor if self.gated else x
        x = x if self.inner_norm is None else self.inner_norm(x)
        return self.fc2(dropout(x, self.activation_dropout, self.training))


class GatedAttentionLayer(nn.Module):
    """Gated attention unit (Hua et al., 2022): one block in place of attention and feed-forward, with a single head.

    u, v = silu(x W_u), silu(x W_v) of width E = 2C; z = silu(x W_z) of width D = 128; q, k = z scaled and shifted per
    column; output (u * (weights v)) W_o, then dropout, residual sum and layer norm. Two of them cost about one
    Transformer layer. `ffn` and the number of heads have no meaning here, `activation_dropout` and the options of
    `BLOCK_DEFAULTS` are refused; the usual normaliser is relu2.
    """

    head_dim = 128

    def __init__(self, dims: Dims, config: ModelConfig):
        if config.activation_dropout:
            raise ValueError(f"activation_dropout={config.activation_dropout} has no meaning in a gated attention unit")
        if own := [name for name in BLOCK_DEFAULTS["gau"] if getattr(config, name) != "auto"]:
            raise ValueError(f"{own[0]}={config.resolve(own[0])} has no meaning in a gated attention unit; valid: auto")
        super().__init__()
        self.dropout, self.attention_dropout = config.dropout, config.attention_dropout
        self.u = Linear(dims.width, dims.value_dim)
        self.v = Linear(dims.width, dims.value_dim)
        self.z = Linear(dims.width, dims.head_dim)
        self.scale = nn.Parameter(torch.ones(2, dims.head_dim))  # of q and k
        self.shift = nn.Parameter(torch.zeros(2, dims.head_dim))
        self.out = Linear(dims.value_dim, dims.width)
        self.norm = nn.LayerNorm(dims.width)

    @classmethod
    def dims(cls, max_positions: int, width: int, heads: int, layers: int) -> Dims:
        """The sizes that position schemes need: one head, whatever `heads` says."""
        return Dims(max_positions, width, 1, layers, head_dim=cls.head_dim, value_dim=2 * width)

    def project(self, x: Tensor, packing: Packing = NO_PADDING) -> tuple[Tensor, Tensor, Tensor]:
        """[B, L, C] or [T, C] -> q, k [B, 1, L, D] and v [B, 1, L, E]."""
        z = F.silu(self.z(x))
        scales, shifts = self.scale.to(z.dtype), self.shift.to(z.dtype)  # else autocast would turn q and k into float32
        pairs = zip(scales, shifts, strict=True)
        q, k = (z * scale + shift for scale, shift in pairs)
        q, k, v = (packing.unpack(y).unsqueeze(1) for y in (q, k, F.silu(self.v(x))))
        return q, k, v

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """The same shapes as `TransformerLayer.forward`."""
        mixed = inputs.attend(x, self)  # [B, 1, L, E]
        mixed, x = inputs.outputs(mixed.squeeze(1)), inputs.residual(x)
        y = self.out(F.silu(self.u(x)) * mixed)
        return self.norm(x + dropout(y, self.dropout, self.training))


BLOCKS: dict[str, type[TransformerLayer] | type[GatedAttentionLayer]] = {
    "transformer": TransformerLayer, "gau": GatedAttentionLayer, "modern": TransformerLayer,
}  # fmt: skip


class Stack(nn.Module):
    """Positions and layers: embedded tokens -> features. Whoever adds embeddings calls `reset_parameters` last.

    pad: the id of padding; padded positions are never attended to. position_width: width of the position schemes'
    vectors, if it differs from the layers'. Raises ValueError for sizes or names that do not fit together.
    """

    def __init__(self, config: ModelConfig, pad: int, *, position_width: int | None = None):
        super().__init__()
        self.config, self.pad, self.dropout, self.normaliser = config, pad, config.dropout, config.normaliser
        kind = BLOCKS[config.block]
        dims = kind.dims(config.max_positions, config.width, config.heads, config.layers)
        self.attention_backend = config.attention  # as requested
        self.backends: list[str] = []  # taken so far
        self.compiled = False  # layer by layer, by `compile`
        self.bounded = bool(bounded_schemes(config.position))
        self.checkpoint_activations = config.checkpoint_activations
        # Draws of positions do not change those that follow: models of one seed start with the same weights in the
        # layers that they share, whatever their position encoding.
        seed = int(torch.randint(2**62, (), device="cpu"))
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            position_dims = replace(dims, width=position_width or config.width, input_width=config.width)
            self.positions = Positions(config.position, position_dims, config.cls).apply(init_bert)
        self.layers = nn.ModuleList(kind(dims, config) for _ in range(config.layers))
        self.final_norm = NORMS[config.resolve("norm")](config.width) if config.resolve("norm_order") == "pre" else None

    def compile(self, **options: Any) -> None:
        """`torch.compile` in place, layer by layer: layers of a kind share a graph, the last one still computes only
        what is read, and under DDP gradients are exchanged as the layers yield them. Each shape has code of its own, so
        lengths become multiples of `LENGTH_STEP`, and padding is computed too."""
        self.compiled = True
        allow_graphs(MOST_GRAPHS)
        for layer in self.layers:
            layer.compile(dynamic=False, **options)

    def reset_parameters(self) -> None:
        """Initialise everything but the positions, as BERT does."""
        for name, module in self.named_children():
            if name != "positions":
                module.apply(init_bert)
        for norm in self.modules():
            if isinstance(norm, nn.LayerNorm | nn.RMSNorm):
                norm.eps = self.config.layer_norm_eps

    @property
    def draws_positions(self) -> bool:
        return self.training and self.config.places != "consecutive"

    def token_positions(self, tokens: Tensor, extra: int = 0) -> TokenPositions:
        """The positions of [B, L] tokens, for all rows the same: 0 .. L-1, or in training what `config.places` draws.
        extra: columns of padding at the end, for which none are drawn. Raises ValueError for a sequence that is too
        long."""
        if self.draws_positions:
            length, config = tokens.size(1) - extra, self.config
            return draw_positions(length, config.max_positions, config.places, tokens.device, extra)
        return self.positions.token_positions(tokens.size(1), tokens.device)

    def packing(self, tokens: Tensor, num_tokens: int | None = None) -> Packing:
        """Where the tokens of [B, L] are. num_tokens: how many are not padding, all of which stands on the right;
        without it the encoder counts, and waits for the GPU. On a CPU it always counts, and raises ValueError for a
        wrong number, which would make padding of tokens."""
        on_cpu, traced = tokens.device.type == "cpu", is_traced()
        if num_tokens == tokens.numel() and not on_cpu:
            return NO_PADDING
        mask = tokens.ne(self.pad)
        has_values = on_cpu and type(mask) is Tensor  # fake tensors have none
        on_the_right = not on_cpu  # as who gives the number says; on a CPU nothing asks
        if has_values and not traced:
            counted = int(mask.numpy().sum())
            if num_tokens not in (None, counted):
                raise ValueError(f"num_tokens={num_tokens}: the batch has {counted} tokens beside padding")
            num_tokens = counted
        elif num_tokens is None and not traced:  # compiled code does without
            num_tokens, holes = torch.stack([mask.sum(), (mask[:, 1:] > mask[:, :-1]).sum()]).tolist()
            on_the_right = not holes
        if self.compiled:  # for one shape, and every batch has another T
            return NO_PADDING if num_tokens == tokens.numel() else Packing(mask, on_the_right=on_the_right)
        return Packing.of(mask, num_tokens or 0, on_the_right)

    def transform(
        self, x: Tensor, token_positions: TokenPositions, packing: Packing, return_all_hiddens: bool = False,
        output_indices: Tensor | None = None, backend: Backend | str | None = None,
    ) -> tuple[Tensor, list[Tensor] | None]:  # fmt: skip
        """Run all layers on embedded tokens x [B, L, C] or [T, C]; returns what `forward` does."""
        backend = self.choose_backend(x, backend, token_positions.length)
        inputs = self.layer_inputs(token_positions, backend, packing, precision_of(x))
        recompute = self.checkpoint_activations and self.training and torch.is_grad_enabled()
        # All hidden states include the last one; compiled code would be made anew for every n.
        selected = None if return_all_hiddens or is_traced() else output_indices
        if selected is not None:
            extra = -len(selected) % OUTPUTS_STEP if self.compiled else 0
            selection = packing.select(F.pad(selected, (0, extra)), inputs[-1].packing)
            inputs[-1] = inputs[-1]._replace(selection=selection)
        hiddens = [x]
        for layer, of_layer in zip(self.layers, inputs, strict=True):
            x = checkpoint(layer, x, of_layer, use_reentrant=False) if recompute else layer(x, of_layer)
            if self.final_norm is not None and layer is self.layers[-1]:
                x = self.final_norm(x)
            if return_all_hiddens:
                hiddens.append(x)
        if selected is not None:
            return packing.zeroed(x[: len(selected)], selected), None
        x = packing.unpack(x)
        all_hiddens = [packing.unpack(h) for h in hiddens] if return_all_hiddens else None
        return (x if output_indices is None else x.flatten(0, 1)[output_indices]), all_hiddens

    def choose_backend(self, x: Tensor, backend: Backend | str | None, length: int) -> Backend:
        """The backend that computes attention on x's device; logs each one that is taken."""
        backend = backend or self.attention_backend
        if isinstance(backend, Backend):
            return backend
        chosen, reason = choose(backend, self.positions, self.normaliser, x.device, precision_of(x), length)
        if not is_traced() and chosen.name not in self.backends:
            self.backends.append(chosen.name)
            logger.info(f"attention backend: {chosen.name} ({reason})")
        return chosen

    def layer_inputs(
        self, token_positions: TokenPositions | int, backend: Backend | None = None, packing: Packing = NO_PADDING,
        dtype: torch.dtype = torch.float32,
    ) -> list[LayerInputs]:  # fmt: skip
        """One `LayerInputs` per layer, prepared once per forward pass; layers that see equally far share what was
        prepared, unless a scheme is per layer. backend: None for the plain one. dtype: of queries and keys."""
        if isinstance(token_positions, int):
            token_positions = self.positions.token_positions(token_positions, next(self.layers.parameters()).device)
        backend = backend or Plain(self.normaliser)
        packing = backend.order(packing)
        batch = Batch(token_positions, dtype, self.positions.dims.heads, packing, self.positions.untie_cls)
        pairs = backend.terms(self.positions, token_positions)
        shared = Shared(self.positions, backend)
        prepared: dict[tuple[int, int | None], Any] = {}
        inputs: list[LayerInputs] = []
        counts = not self.compiled or self.positions.is_numbered(*IN_LAYERS)
        for index in range(len(self.layers)):
            own = index if self.positions.per_layer else 0
            reach = self.positions.reach(LayerContext(index, token_positions))
            if (own, reach) not in prepared:
                prepared[own, reach] = backend.prepare(*pairs[own], reach, batch)
            number = index if counts else 0
            inputs.append(LayerInputs(shared, token_positions, packing, prepared[own, reach], number))
        return inputs


class Encoder(Stack):
    """Token ids [B, L] -> features [B, L, C].

    vocab: number of ids. separator: the id of </s>, which segments="learned" needs: in `<s> A </s> </s> B </s>` the
    tokens from the second of two separators on get another vector than those before. The model's options are a
    `ModelConfig`, or its fields by name. Raises ValueError for sizes or names that do not fit together.
    """

    @staticmethod
    def check(config: ModelConfig) -> None:
        """Raise ValueError for options that no encoder can be built with, without building a large one."""
        with torch.device("meta"), suppress(RuntimeError, TypeError):  # of a scheme that looks at its numbers
            Encoder(8, 1, 2, replace(config, layers=1))

    def __init__(
        self, vocab: int, pad: int, separator: int | None = None, config: ModelConfig | None = None, **options: Any
    ):
        config = config or ModelConfig()
        if isinstance(options.get("position"), str):  # replaces the configuration's
            options.setdefault("cls", cls_beside(options["position"], config.cls))
        config = replace(config, **options)
        if config.segments == "learned" and separator is None:
            raise ValueError("segments=learned needs the id of the separator </s>")
        tokens = nn.Embedding(vocab, config.width, padding_idx=pad)
        super().__init__(config, pad)
        self.tokens, self.separator = tokens, separator
        self.segments = nn.Embedding(2, config.width) if config.segments == "learned" else None
        self.embed_norm = NORMS[config.resolve("norm")](config.width)
        if config.resolve("embed_norm") == "no":
            self.embed_norm = nn.Identity()
        elif config.resolve("norm_order") == "pre":  # the first layer's would come right after it
            self.layers[0].attention_norm = nn.Identity()
        for name in ("positions", "segments", "embed_norm", "layers", "final_norm"):  # as saved optimizers count
            if name in self._modules:
                self._modules[name] = self._modules.pop(name)
        self.reset_parameters()

    def forward(
        self,
        tokens: Tensor,
        return_all_hiddens: bool = False,
        num_tokens: int | None = None,
        output_indices: Tensor | None = None,
        vectors: Tensor | None = None,
        backend: Backend | str | None = None,
    ) -> tuple[Tensor, list[Tensor] | None]:
        """Returns features [B, L, C] and, with return_all_hiddens, the list of N + 1 hidden states [B, L, C]
        (embeddings first); at padding they mean nothing. Padding stands on the right: the first column is position 0,
        also where it is padding. num_tokens: see `packing`. output_indices: [n], into the flattened batch [B L]: only
        these features are returned, as [n, C]; the last layer skips the rest. vectors: [B, L, C], of the tokens, in
        place of the table's. backend: in place of `attention_backend`."""
        length = tokens.size(1)
        tokens, output_indices, extra = self.pad_columns(tokens, output_indices)
        if extra and vectors is not None:
            vectors = F.pad(vectors, (0, 0, 0, extra))
        packing, positions = self.packing(tokens, num_tokens), self.token_positions(tokens, extra)
        x = self.embed(tokens, packing, positions, vectors)
        x, hiddens = self.transform(x, positions, packing, return_all_hiddens, output_indices, backend)
        if extra:
            x = x if output_indices is not None else x[:, :length]
            hiddens = hiddens if hiddens is None else [hidden[:, :length] for hidden in hiddens]
        return x, hiddens

    def pad_columns(self, tokens: Tensor, output_indices: Tensor | None) -> tuple[Tensor, Tensor | None, int]:
        """Tokens [B, L] with columns of padding, so that compiled layers meet few lengths; the indices [n] of the same
        outputs; the number of columns. Where nothing is compiled, there are none."""
        length, extra = tokens.size(1), 0
        if self.compiled and not is_traced():
            extra = -length % LENGTH_STEP
            if self.bounded:  # it has no position for more columns
                extra = max(0, min(extra, self.config.max_positions - length))
        if extra:
            tokens = F.pad(tokens, (0, extra), value=self.pad)
            output_indices = None if output_indices is None else output_indices + output_indices // length * extra
        return tokens, output_indices, extra

    def pad_outputs(self, output_indices: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Indices and targets [n] of outputs for a compiled head: more of them, a multiple of `OUTPUTS_STEP`, whose
        targets are ignored. Where nothing is compiled, as they are."""
        extra = -len(targets) % OUTPUTS_STEP if self.compiled else 0
        return F.pad(output_indices, (0, extra)), F.pad(targets, (0, extra), value=-100)

    def embed(
        self, tokens: Tensor, packing: Packing = NO_PADDING, token_positions: TokenPositions | None = None,
        vectors: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """[B, L] -> [B, L, C] or [T, C], the input of the first layer."""
        x = self.tokens(tokens) if vectors is None else vectors
        position_vectors = self.positions.embed(token_positions or self.token_positions(tokens))
        if position_vectors is not None:
            x = x + position_vectors.to(x.dtype)
        if self.segments is not None and self.separator is not None:
            x = x + self.segments(second_segment(tokens, self.separator))
        return dropout(self.embed_norm(packing.pack(x)), self.dropout, self.training)


def of_cls(tokens: Tensor) -> Tensor:
    """[B, L] -> [B]: the index of each sequence's [CLS] in the flattened batch."""
    return torch.arange(0, tokens.numel(), tokens.size(1), device=tokens.device)


def second_segment(tokens: Tensor, separator: int) -> Tensor:
    """[B, L] -> [B, L]: 0 in segment A, 1 in segment B, which starts with the second of two separators in a row."""
    is_separator = tokens.eq(separator)
    return F.pad(is_separator[:, 1:] & is_separator[:, :-1], (1, 0)).cumsum(1).clamp(max=1)


def init_bert(module: nn.Module) -> None:
    """For `module.apply`: weights N(0, 0.02), biases 0, the padding row 0. Position tables keep their own standard
    deviation, layer norms PyTorch's ones and zeros."""
    if isinstance(module, Table | HeadLinear):
        module.reset_parameters()
    elif isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, Linear) and module.shrunk is not None:
            rows, factor = module.shrunk
            with torch.no_grad():
                module.weight[rows].mul_(factor)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            with torch.no_grad():
                module.weight[module.padding_idx].zero_()


class LMHead(nn.Module):
    """Logits over the vocabulary: dense, GELU, norm, then the token embedding's weight (tied) plus a bias."""

    def __init__(self, width: int, vocab: int, inputs: int | None = None, config: ModelConfig | None = None):
        """inputs: width of the features, if it differs from the embedding's. config: of the model whose norm and bias
        the head shares."""
        config = config or ModelConfig()
        super().__init__()
        self.dense = Linear(inputs or width, width, config.resolve("linear_bias") != "no")
        self.norm = NORMS[config.resolve("norm")](width, config.layer_norm_eps)
        self.bias = nn.Parameter(torch.zeros(vocab))
        self.apply(init_bert)

    def forward(
        self, x: Tensor, weight: Tensor | None = None, targets: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """x [..., inputs], weight [V, C] -> [..., V]. Without the weight: x [..., C] to be multiplied by it, and the
        bias [V], a copy: shards are taken away when a module's call is over. With targets [n], x [n, inputs]: the sum
        of their cross-entropies."""
        x = self.norm(F.gelu(self.dense(x)))
        if weight is not None and targets is not None:
            if not is_traced() and self._compiled_call_impl is not None:  # Dynamo has given up, or was told to
                x, targets = x[targets.ne(-100)], targets[targets.ne(-100)]
            return lm_loss(x, weight, self.bias, targets)
        return (x, self.bias.clone()) if weight is None else linear(x, weight, self.bias)


class HeadLinear(nn.Linear):
    """A linear layer on features, which starts as PyTorch's do, as in fairseq. It computes in float32 at least, also
    with weights in half precision and under autocast: rounded, near logits would be equal."""

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        with torch.autocast(autocast_device(x.device.type), enabled=False):
            return F.linear(x.to(dtype), self.weight.to(dtype), self.bias.to(dtype))


class ClassificationHead(nn.Module):
    """Logits of a sequence from its [CLS] feature: dense, tanh, dropout, output."""

    def __init__(self, width: int, inner: int, classes: int, dropout: float):
        super().__init__()
        self.dense = HeadLinear(width, inner)
        self.dropout = nn.Dropout(dropout)
        self.out_proj = HeadLinear(inner, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Features [B, C] of the first token -> logits [B, classes]."""
        x = torch.tanh(self.dense(x))
        return self.out_proj(self.dropout(x))
