"""A position encoding in a Transformer of your own: docs/own-attention.md shows it in two models.

    positions = PositionEncoding("untied+t5", width=768, heads=12, layers=12)    # once, in the model
    x, terms = positions(x, mask=mask)                                          # in `forward`, before the layers
    out = terms.attention(q, k, v, layer=3)                                     # in a layer, where softmax(q k) v was

B batch, L sequence length, C model width, H heads, D = C / H.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import Backend, Batch, attend, mask_logits
from .backend_sdpa import Sdpa
from .backends import choose
from .encoder import init_bert
from .packing import Packing
from .positions import IN_LAYERS, SCHEMES, Dims, LayerContext, Positions, precision_of
from .token_positions import TokenPositions
from .tracing import is_exported, is_traced


class PositionEncoding(nn.Module):
    """Any encoding or sum of encodings, for attention that you wrote: it owns the encoding's parameters, and computes
    what all layers share once per forward pass.

    position: a name with options, such as "rope:base:160000" or "untied+t5" (`tupe list schemes`). heads, layers: of
    your model; head_dim: width / heads if not given. max_positions: the longest sequence in training; encodings with a
    vector per position refuse longer ones, and rope:yarn, fope and log_length compute with the number. cls: "untied" if
    the first token is [CLS] and is to be untied from positions (TUPE, section 3.2). attention: "auto" takes PyTorch's
    kernels, ours where they are faster; "plain" is the formula, for checks. Raises ValueError for names or sizes that
    do not fit together.
    """

    def __init__(
        self, position: str, *, width: int, heads: int, layers: int = 1, max_positions: int = 512, cls: str = "tied",
        head_dim: int | None = None, attention: str = "auto",
    ):  # fmt: skip
        super().__init__()
        if head_dim is None and width % heads:
            raise ValueError(f"width={width} is not a multiple of heads={heads}; give head_dim, or sizes that fit")
        head_dim = head_dim or width // heads
        dims = Dims(max_positions, width, heads, layers, head_dim=head_dim, value_dim=head_dim)
        self.positions = Positions(position, dims, cls).apply(init_bert)
        self.backend = attention

    def forward(self, x: Tensor, mask: Tensor | None = None, causal: bool = False) -> tuple[Tensor, "Terms"]:
        """x [B, L, C], the embedded tokens -> x with the encoding's vectors added, if it has some, and the terms of
        attention. mask: [B, L], True at tokens and False at padding, which stands on the right: positions count from
        the first column. causal: no token sees a later one. Raises ValueError for a mask of another kind, and for a
        sequence that is too long."""
        positions = self.positions.token_positions(x.size(1), x.device)
        vectors = self.positions.embed(positions)
        x = x if vectors is None else x + vectors.to(x.dtype)
        terms = Terms(self, positions, check_mask(mask, x), causal)
        terms.prepare_layers(precision_of(x))
        return x, terms

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False,
        layer: int | None = None, dropout: float = 0.0, **of_layer: Any,
    ) -> Tensor:  # fmt: skip
        """softmax(q k + positions) v for one layer alone: q, k, v [B, H, L, D] -> [B, H, L, D]. In a model of several
        layers, `forward` computes the terms once for all of them. Raises ValueError for an encoding that adds vectors
        to the input, which this call does not see, and as `Terms.attention`."""
        if adding := self.positions.having["embed"]:
            raise ValueError(f"{adding[0]} adds vectors to the embedded tokens x: call x, terms = positions(x) before "
                             "the layers, and terms.attention in them")  # fmt: skip
        positions = self.positions.token_positions(q.size(2), q.device)
        terms = Terms(self, positions, check_mask(mask, q.transpose(1, 2)), causal)
        return terms.attention(q, k, v, layer, dropout, **of_layer)


class Terms:
    """The terms of attention in one forward pass, which all layers share."""

    def __init__(self, encoding: PositionEncoding, token_positions: TokenPositions, mask: Tensor | None, causal: bool):
        self.positions, self.request = encoding.positions, encoding.backend
        if causal and (unfit := [name for name in self.positions if not SCHEMES[name].causal]):
            raise ValueError(f"causal=True does not go with {unfit[0]}, which needs later tokens; leave {unfit[0]} out")
        self.token_positions, self.mask, self.causal = token_positions, mask, causal
        self.terms: list[tuple[Tensor | None, Tensor | None]] = []  # of the layers, once they are asked for
        self.prepared: dict[tuple[int, int | None, torch.dtype], tuple[Backend, Any]] = {}
        own = any(self.positions.having[hook] for hook in ("content", "gate", "value", "reach"))
        # Nothing but q k, of rotated q and k: PyTorch chooses its fastest kernel, and hides later tokens itself.
        self.bare = encoding.backend == "auto" and mask is None and not own and not self.positions.has_bias()

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, layer: int | None = None, dropout: float = 0.0,
        project: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]] | None = None, x: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """softmax(q k + positions) v: q, k, v [B, H, L, D] -> [B, H, L, D], in the layer of this index. dropout: the
        probability, 0 outside of training.

        project: the layer's own projections, vectors [1, R, C] -> q, k, v [1, H, R, D], with which deberta_v2 projects
        its vectors. x: what the layer projects to q, k and v [B, L, C], from which cable and selective_rope compute
        distances and angles.
        Raises ValueError for vectors of another shape than the encoding has, and where one of the two, or the layer, is
        missing and the encoding needs it.
        """
        if isinstance(layer, Tensor):
            raise ValueError("layer is a tensor; valid: the layer's index. A mask goes into `positions(x, mask=mask)`")
        name = self.positions.name
        if layer is None:
            if self.positions.is_numbered(*IN_LAYERS, "reach"):
                missing("layer=, the layer's index (0 if each layer has an encoding of its own, unless layers differ)",
                        name)()  # fmt: skip
            layer = 0
        self.check(q, k, v, layer)
        dtype = precision_of(v)
        q, k, v = (y.to(dtype) for y in (q, k, v))  # under autocast, norms of q and k make them float32
        of_layer = LayerContext(
            layer, self.token_positions, project or missing("project=, the layer's own projections", name),
            missing("x=, the layer's input", name) if x is None else lambda: x, self.mask, self.positions.scale,
        )  # fmt: skip
        if self.bare:
            q, k, v = self.positions.rotate(q, k, v, of_layer)
            out = F.scaled_dot_product_attention(q, k, v, None, dropout, self.causal, scale=self.positions.scale)
            return self.positions.unrotate(out, of_layer)
        backend, prepared = self.prepare(of_layer, dtype)
        return attend(q, k, v, self.positions, prepared, of_layer, backend, dropout)

    def check(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> None:
        """Raise ValueError for vectors or a layer of which the encoding would make other numbers, silently."""
        dims, length = self.positions.dims, self.token_positions.length
        if not is_exported():  # a trace takes a comparison of sizes for a constant
            valid = [q.size(0), dims.heads, length, dims.head_dim]
            for name, x, shape in (("q", q, valid), ("k", k, valid), ("v", v, valid[:3])):
                if [*x.shape[: len(shape)]] != shape:
                    raise ValueError(
                        f"{name} is {[*x.shape]}; valid: {[*map(int, valid)]}, [B, H, L, D]. Keys of earlier calls (a "
                        "cache) have no place here; repeat heads that queries share"
                    )
        of_layers = self.positions.per_layer or any(SCHEMES[name].own_projections for name in self.positions)
        if of_layers and not 0 <= layer < dims.layers:
            raise ValueError(f"layer={layer}; valid: 0 to {dims.layers - 1}. Give layers= to `PositionEncoding`")

    def prepare_layers(self, dtype: torch.dtype) -> None:
        """Prepare all layers now: under activation checkpointing, what the first layer computes for all of them would
        have no gradient."""
        for index in range(0 if self.bare else self.positions.dims.layers):
            self.prepare(LayerContext(index, self.token_positions), dtype)

    def prepare(self, of_layer: LayerContext, dtype: torch.dtype) -> tuple[Backend, Any]:
        """The backend, and what it prepared for this layer: layers that see equally far share it. dtype: of queries
        and keys."""
        own, reach = of_layer.index if self.positions.per_layer else 0, self.positions.reach(of_layer)
        if (own, reach, dtype) not in self.prepared:
            length, device, heads = self.token_positions.length, self.token_positions.device, self.positions.dims.heads
            request = self.request
            if request == "auto" and is_traced() and not Sdpa().refuses(self.positions, "softmax", device, dtype):
                request = "sdpa"  # compiled code is one graph, on a CPU too
            backend, _ = choose(request, self.positions, "softmax", device, dtype, length)
            batch = Batch(self.token_positions, dtype, heads, Packing(self.mask), self.positions.untie_cls)
            self.terms = self.terms or self.positions.terms(self.token_positions)
            bias, gate = self.terms[own]
            if self.causal:
                earlier = torch.ones(length, length, dtype=torch.bool, device=device).tril()
                bias = mask_logits(bias, earlier).expand(heads, -1, -1)
            self.prepared[own, reach, dtype] = backend, backend.prepare(bias, gate, reach, batch)
        return self.prepared[own, reach, dtype]


def missing(what: str, name: str) -> Callable[..., Any]:
    """In place of an argument that an encoding turns out to need."""

    def refuse(*_: Any) -> Any:
        raise ValueError(f"the encoding {name} needs {what}, in the call of `attention`")

    return refuse


def check_mask(mask: Tensor | None, x: Tensor) -> Tensor | None:
    """The mask, if it is one of x [B, L, ...]. Raises ValueError otherwise."""
    if mask is not None and (mask.dtype != torch.bool or mask.shape != x.shape[:2]):
        raise ValueError(
            f"mask is {mask.dtype} of shape {list(mask.shape)}; valid: torch.bool of shape {list(x.shape[:2])}, "
            "True at tokens and False at padding"
        )
    return mask
