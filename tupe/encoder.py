"""A post-layer-norm BERT encoder that knows no position scheme by name: it asks `Positions` for terms and adds them.

B batch, L sequence length, C model width, H heads, D = C / H, N layers.
"""

import torch
import torch.nn.functional as F
from torch import nn

from .positions import Dims, Positions


def attention_probs(q, k, scale, bias=None, content=None):
    """softmax((q . k + content) * scale + bias), statistics in float32. q, k: [B, H, L, D]; result [B, H, L, L] in q's
    dtype.

    The oracle that every faster path is tested against.
    """
    logits = (q * scale) @ k.transpose(2, 3)
    if content is not None:
        logits = logits + content * scale
    if bias is not None:
        logits = logits.float() + bias
    return torch.softmax(logits, dim=-1, dtype=torch.float32).to(q.dtype)


class Attention(nn.Module):
    """Multi-head self-attention. The position terms arrive as arguments: what all layers share is no attribute of a
    layer."""

    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x, positions, bias, layer):
        """x: [B, L, C]; bias: [H, L, L], [B, H, L, L] or None; layer: index of this layer."""
        qkv = self.qkv(x).unflatten(2, (3, self.heads, -1))  # [B, L, 3, H, D]
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # [B, H, L, D] each
        probs = attention_probs(q, k, positions.scale, bias, positions.content(q, k, layer))
        mixed = F.dropout(probs, self.dropout, self.training) @ v  # [B, H, L, D]
        return self.out(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attention and feed-forward block, each followed by dropout, residual sum and layer norm (post-LN, as BERT)."""

    def __init__(self, width, ffn, heads, dropout, attention_dropout, activation_dropout):
        super().__init__()
        self.dropout, self.activation_dropout = dropout, activation_dropout
        self.attention = Attention(width, heads, attention_dropout)
        self.attention_norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, ffn)
        self.fc2 = nn.Linear(ffn, width)
        self.ffn_norm = nn.LayerNorm(width)

    def forward(self, x, positions, bias, layer):
        y = self.attention(x, positions, bias, layer)
        x = self.attention_norm(x + F.dropout(y, self.dropout, self.training))
        y = F.dropout(F.gelu(self.fc1(x)), self.activation_dropout, self.training)
        return self.ffn_norm(x + F.dropout(self.fc2(y), self.dropout, self.training))


class Encoder(nn.Module):
    """Token ids [B, L] -> features [B, L, C].

    position, cls: see `Positions`. pad: the id of padding; padded positions are never attended to.
    Raises ValueError if heads do not divide the width, if a sequence exceeds max_positions, or for a position setting
    without meaning.
    """

    def __init__(
        self, vocab, pad, *, layers, width, ffn, heads, max_positions, position, cls="tied",
        dropout=0.1, attention_dropout=0.1, activation_dropout=0.0,
    ):  # fmt: skip
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is not a multiple of the number of heads {heads}")
        self.pad, self.dropout = pad, dropout
        self.tokens = nn.Embedding(vocab, width, padding_idx=pad)
        self.positions = Positions(position, Dims(max_positions, width, heads, layers), cls)
        self.embed_norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(
            Layer(width, ffn, heads, dropout, attention_dropout, activation_dropout) for _ in range(layers)
        )
        self.apply(init_bert)

    def forward(self, tokens, return_all_hiddens=False):
        """Returns features [B, L, C] and, if asked for, the list of N + 1 hidden states [B, L, C] (embeddings first),
        else None."""
        length = tokens.size(1)
        x = self.tokens(tokens)
        position_vectors = self.positions.embed(length)
        if position_vectors is not None:
            x = x + position_vectors
        x = F.dropout(self.embed_norm(x), self.dropout, self.training)
        # Once per forward; stays [H, L, L] and broadcasts over the batch unless there is padding to merge in.
        bias = merge_padding(self.positions.bias(length), tokens.eq(self.pad))
        hiddens = [x]
        for index, layer in enumerate(self.layers):
            x = layer(x, self.positions, bias, index)
            hiddens.append(x)
        return x, hiddens if return_all_hiddens else None


def merge_padding(bias, padding):
    """bias [H, L, L] or None and padding [B, L] (True at padding) -> bias with -inf at padded keys; unchanged if
    nothing is padded."""
    if not padding.any():
        return bias
    if bias is None:
        bias = padding.new_zeros(1, 1, 1, dtype=torch.float32)
    return bias.masked_fill(padding[:, None, None, :], float("-inf"))  # [B, H, L, L] ([B, 1, 1, L] without bias)


def init_bert(module):
    """All weights N(0, 0.02), biases 0, the padding row 0; layer norms keep PyTorch's ones and zeros."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            nn.init.zeros_(module.weight[module.padding_idx])


class LMHead(nn.Module):
    """Logits over the vocabulary: dense, GELU, layer norm, then the token embedding's weight (tied) plus a bias."""

    def __init__(self, width, vocab):
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.bias = nn.Parameter(torch.zeros(vocab))
        self.apply(init_bert)

    def forward(self, x, weight):
        """x: [..., C]; weight: [V, C]; result [..., V]."""
        return F.linear(self.norm(F.gelu(self.dense(x))), weight, self.bias)


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
