"""A post-layer-norm BERT encoder that knows no position scheme by name: it asks `Positions` for terms and hands them
to every layer.

B batch, L sequence length, C model width, H heads, D = C / H, N layers.
"""

import logging

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from .attention import NORMALISERS, Terms, attend, attention_weights, choose
from .kernels import Linear, autocast_device, dropout, linear, lm_loss, split_heads
from .positions import Dims, Positions
from .schemes import SCHEMES  # noqa: F401  (so that wherever an encoder is built, every name is known)

logger = logging.getLogger(__name__)


class Attention(nn.Module):
    """Multi-head self-attention. Position terms arrive as arguments: what all layers share is no attribute of a
    layer."""

    def __init__(self, dims, dropout, normaliser):
        super().__init__()
        self.heads, self.dropout, self.normaliser = dims.heads, dropout, normaliser
        self.qkv = Linear(dims.width, 3 * dims.width)
        self.out = Linear(dims.width, dims.width)

    def project(self, x):
        """[B, L, C] -> q, k, v, [B, H, L, D] each."""
        return split_heads(self.qkv(x), self.heads)

    def forward(self, x, positions, terms, layer):
        q, k, v = self.project(x)
        p = self.dropout if self.training else 0.0
        mixed = attend(q, k, v, positions, terms, layer, self.normaliser, p)  # [B, H, L, D]
        return self.out(mixed.transpose(1, 2).flatten(2))


class TransformerLayer(nn.Module):
    """Attention and feed-forward block, each followed by dropout, residual sum and layer norm (post-LN, as BERT)."""

    def __init__(self, dims, ffn, dropout, attention_dropout, activation_dropout, normaliser):
        super().__init__()
        self.dropout, self.activation_dropout = dropout, activation_dropout
        self.attention = Attention(dims, attention_dropout, normaliser)
        self.attention_norm = nn.LayerNorm(dims.width)
        self.fc1 = Linear(dims.width, ffn)
        self.fc2 = Linear(ffn, dims.width)
        self.ffn_norm = nn.LayerNorm(dims.width)

    @staticmethod
    def dims(max_positions, width, heads, layers):
        if width % heads:
            raise ValueError(f"width {width} is not a multiple of the number of heads {heads}")
        return Dims(max_positions, width, heads, layers, head_dim=width // heads, value_dim=width // heads)

    def forward(self, x, positions, terms, layer):
        """x: [B, L, C]; layer: index of this layer."""
        y = self.attention(x, positions, terms, layer)
        x = self.attention_norm(x + dropout(y, self.dropout, self.training))
        y = dropout(F.gelu(self.fc1(x)), self.activation_dropout, self.training)
        return self.ffn_norm(x + dropout(self.fc2(y), self.dropout, self.training))


class GatedAttentionLayer(nn.Module):
    """Gated attention unit (Hua et al., 2022): one block in place of attention and feed-forward, with a single head.

    u, v = silu(x W_u), silu(x W_v) of width E = 2C; z = silu(x W_z) of width D = 128; q, k = z scaled and shifted per
    column; output (u * (weights v)) W_o, then dropout, residual sum and layer norm. Two of them cost about one
    Transformer layer. `ffn` and the number of heads have no meaning here, `activation_dropout` is refused; the paper's
    normaliser is relu2.
    """

    head_dim = 128

    def __init__(self, dims, ffn, dropout, attention_dropout, activation_dropout, normaliser):
        if activation_dropout:
            raise ValueError(f"activation_dropout={activation_dropout} has no meaning in a gated attention unit; use 0")
        super().__init__()
        self.dropout, self.attention_dropout, self.normaliser = dropout, attention_dropout, normaliser
        self.u = Linear(dims.width, dims.value_dim)
        self.v = Linear(dims.width, dims.value_dim)
        self.z = Linear(dims.width, dims.head_dim)
        self.scale = nn.Parameter(torch.ones(2, dims.head_dim))  # of q and k
        self.shift = nn.Parameter(torch.zeros(2, dims.head_dim))
        self.out = Linear(dims.value_dim, dims.width)
        self.norm = nn.LayerNorm(dims.width)

    @classmethod
    def dims(cls, max_positions, width, heads, layers):
        return Dims(max_positions, width, 1, layers, head_dim=cls.head_dim, value_dim=2 * width)

    def project(self, x):
        """[B, L, C] -> q, k [B, 1, L, D] and v [B, 1, L, E]."""
        z = F.silu(self.z(x)).unsqueeze(1)
        scales, shifts = self.scale.to(z.dtype), self.shift.to(z.dtype)  # else autocast would make float32 of q and k
        pairs = zip(scales, shifts, strict=True)
        q, k = (z * scale + shift for scale, shift in pairs)
        return q, k, F.silu(self.v(x)).unsqueeze(1)

    def forward(self, x, positions, terms, layer):
        q, k, v = self.project(x)
        p = self.attention_dropout if self.training else 0.0
        mixed = attend(q, k, v, positions, terms, layer, self.normaliser, p).squeeze(1)  # [B, L, E]
        y = self.out(F.silu(self.u(x)) * mixed)
        return self.norm(x + dropout(y, self.dropout, self.training))


LAYERS = {"transformer": TransformerLayer, "gau": GatedAttentionLayer}


class Encoder(nn.Module):
    """Token ids [B, L] -> features [B, L, C].

    position, cls: see `Positions`. layer: a name from LAYERS. normaliser: a name from NORMALISERS. pad: the id of
    padding; padded positions are never attended to. separator: the id of </s> to add a learned vector to each segment
    of a pair `<s> A </s> </s> B </s>`, None for no such vectors.
    attention: how attention is computed, see `attention.choose`.
    checkpoint_activations: keep only the inputs of layers and compute the rest again in the backward pass.
    Raises ValueError for sizes or names that do not fit.
    """

    def __init__(
        self, vocab, pad, *, layers, width, ffn, heads, max_positions, position, cls="tied", layer="transformer",
        normaliser="softmax", dropout=0.1, attention_dropout=0.1, activation_dropout=0.0, attention="auto",
        checkpoint_activations=False, separator=None,
    ):  # fmt: skip
        super().__init__()
        for name, table in ((layer, LAYERS), (normaliser, NORMALISERS)):
            if name not in table:
                what = "layer" if table is LAYERS else "normaliser"
                raise ValueError(f"unknown {what} {name!r}; valid: {', '.join(table)}")
        if max_positions < 1:
            raise ValueError(f"max_positions={max_positions}; valid: 1 or more")
        kind = LAYERS[layer]
        dims = kind.dims(max_positions, width, heads, layers)
        self.pad, self.dropout, self.normaliser = pad, dropout, normaliser
        self.attention, self.attention_path, self.checkpoint_activations = attention, None, checkpoint_activations
        self.tokens = nn.Embedding(vocab, width, padding_idx=pad)
        self.positions = Positions(position, dims, cls)
        self.separator, self.segments = separator, None if separator is None else nn.Embedding(2, width)
        self.embed_norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(
            kind(dims, ffn, dropout, attention_dropout, activation_dropout, normaliser) for _ in range(layers)
        )
        self.settings = {
            "position": self.positions.name, "cls": cls, "layer": layer, "normaliser": normaliser,
            "heads": str(dims.heads),
        }  # fmt: skip
        self.apply(init_bert)
        if layer == "transformer" and normaliser in ("l2", "swish_l2"):
            self.apply(calm_values(max_positions))

    def forward(self, tokens, return_all_hiddens=False, padded=None):
        """Returns features [B, L, C] and, if asked for, the list of N + 1 hidden states [B, L, C] (embeddings
        first). padded: whether there is padding, for callers that know; else a GPU is waited for to find out."""
        return self.transform(self.embed(tokens), tokens, return_all_hiddens, padded)

    def transform(self, x, tokens, return_all_hiddens=False, padded=None):
        """All layers on embedded tokens x [B, L, C]; returns what `forward` does."""
        terms = self.terms(tokens, self.choose_path(x), padded)
        again = self.checkpoint_activations and self.training and torch.is_grad_enabled()
        hiddens = [x]
        for index, layer in enumerate(self.layers):
            args = x, self.positions, terms[index], index
            x = checkpoint(layer, *args, use_reentrant=False) if again else layer(*args)
            if return_all_hiddens:
                hiddens.append(x)
        return x, hiddens if return_all_hiddens else None

    def embed(self, tokens):
        """[B, L] -> [B, L, C], the input of the first layer."""
        x = self.tokens(tokens)
        position_vectors = self.positions.embed(tokens.size(1))
        if position_vectors is not None:
            x = x + position_vectors.to(x.dtype)
        if self.segments is not None:
            x = x + self.segments(second_segment(tokens, self.separator))
        return dropout(self.embed_norm(x), self.dropout, self.training)

    def choose_path(self, x):
        """How attention is computed on x's device and dtype; says so when the answer changes."""
        path, reason = choose(self.attention, self.positions, self.normaliser, x.device, x.dtype)
        if path != self.attention_path:
            self.attention_path = path
            logger.info(f"attention path: {path} ({reason})")
        return path

    def terms(self, tokens, path="plain", padded=None):
        """One `Terms` per layer; made once per forward, and one and the same object unless a scheme is per layer.

        Without padding the bias stays [H, L, L] and broadcasts over the batch. Padding is merged into it, once and out
        of place, under softmax; other normalisers get it as a mask, because they do not turn -inf into 0, and so does
        the blocked path, because it then needs nothing of size B x H x L x L. GPU kernels read the bias in the queries'
        precision: it is rounded here, once, and not in every layer.
        """
        padding = tokens.eq(self.pad)
        padded = bool(padding.any()) if padded is None else padded
        padding = padding[:, None, None, :] if padded else None  # [B, 1, 1, L]
        scale = self.positions.scale

        def merge(bias, gate):
            if path == "sdpa" and bias is not None:
                bias = bias.to(self.precision(tokens.device.type))
            if padding is None:
                return Terms(scale, bias, gate, None, path)
            if self.normaliser != "softmax" or path == "blocked":
                return Terms(scale, bias, gate, ~padding, path)
            bias = padding.new_zeros(1, 1, 1, dtype=torch.float32) if bias is None else bias
            return Terms(scale, bias.masked_fill(padding, float("-inf")), gate, None, path)  # [B, H or 1, L or 1, L]

        pairs = self.positions.terms(tokens.size(1))
        return [merge(*pair) for pair in pairs] if self.positions.per_layer else [merge(*pairs[0])] * len(pairs)

    def precision(self, device):
        """Of queries and keys. (Not every encoder has a token table: ELECTRA's generator reads another one's.)"""
        own, device = next(self.layers.parameters()).dtype, autocast_device(device)
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else own

    def attention_weights(self, tokens, layer=0):
        """The weights [B, H, L, L] of one layer, for probes and figures (without dropout)."""
        assert not self.training, "call eval() first: dropout would make the weights random"
        x, terms = self.embed(tokens), self.terms(tokens)
        for index in range(layer):
            x = self.layers[index](x, self.positions, terms[index], index)
        block = self.layers[layer]
        q, k, v = (block.attention if hasattr(block, "attention") else block).project(x)
        content = self.positions.content(q, k, layer)
        q, k, _ = self.positions.rotate(q, k, v)
        return attention_weights(q, k, terms[layer], content, self.normaliser)

    # The settings travel in the state dict, so that loading a checkpoint into a contradicting model fails even where
    # both have the same parameters (or none). An integer tensor, because weights-only loading and checkpoint averaging
    # accept it.
    def get_extra_state(self):
        return torch.tensor(list(describe(self.settings).encode()), dtype=torch.long)

    def set_extra_state(self, state):
        saved = bytes(state.tolist()).decode()
        # Older checkpoints say nothing of heads.
        if {**self.settings, **dict(pair.split("=", 1) for pair in saved.split(" "))} != self.settings:
            raise ValueError(f"the checkpoint was trained with {saved}; this model has {describe(self.settings)}")


def second_segment(tokens, separator):
    """[B, L] -> [B, L]: 1 from the second of the first two separators in a row on (segment B), 0 before."""
    found = tokens.eq(separator)
    return F.pad(found[:, 1:] & found[:, :-1], (1, 0)).cumsum(1).clamp(max=1)


def describe(settings):
    return " ".join(f"{key}={value}" for key, value in settings.items())


def init_bert(module):
    """All weights N(0, 0.02), biases 0, the padding row 0; layer norms keep PyTorch's ones and zeros."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            with torch.no_grad():
                module.weight[module.padding_idx].zero_()


def set_norm_eps(eps):
    """Function for `module.apply` that gives every layer norm this epsilon."""

    def set_eps(module):
        if isinstance(module, nn.LayerNorm):
            module.eps = eps

    return set_eps


def calm_values(max_positions):
    """Initialiser for l2-normalised attention followed by a feed-forward block: W_V and W_O shrink by n^(1/4) each.

    Rows of l2 weights sum to as much as sqrt(n) where softmax's sum to 1; the product of the two factors takes that
    back at the longest n, which is the reduction of variance that Su (2022) asks for (how much is our choice).
    """

    def shrink(module):
        if isinstance(module, Attention):
            with torch.no_grad():
                factor = max_positions**-0.25
                module.qkv.weight[-len(module.qkv.weight) // 3 :].mul_(factor)  # rows of W_V
                module.out.weight.mul_(factor)

    return shrink


class LMHead(nn.Module):
    """Logits over the vocabulary: dense, GELU, layer norm, then the token embedding's weight (tied) plus a bias."""

    def __init__(self, width, vocab):
        super().__init__()
        self.dense = Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.bias = nn.Parameter(torch.zeros(vocab))
        self.apply(init_bert)

    def forward(self, x, weight):
        """x: [..., C]; weight: [V, C]; result [..., V]."""
        return linear(self.norm(F.gelu(self.dense(x))), weight, self.bias)

    def loss(self, x, weight, targets):
        """Sum of the cross-entropies of targets [n], as `cross_entropy(forward(x, weight), targets)`; x: [n, C]."""
        return lm_loss(self.norm(F.gelu(self.dense(x))), weight, self.bias, targets)


class ClassificationHead(nn.Module):
    """Logits of a sequence from its [CLS] feature: dense, tanh, dropout, output. PyTorch's default initialisation."""

    def __init__(self, width, inner, classes, dropout):
        super().__init__()
        self.dense = nn.Linear(width, inner)
        self.dropout = nn.Dropout(dropout)
        self.out_proj = nn.Linear(inner, classes)

    def forward(self, features):
        """[B, L, C] -> [B, classes]."""
        x = torch.tanh(self.dense(features[:, 0]))
        return self.out_proj(self.dropout(x))
