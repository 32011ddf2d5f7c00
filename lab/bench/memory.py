"""The GPU memory of a training step, and a CPU's of a forward pass, counted without either.

B batch, L sequence length, H heads. The tensors of a step are counted on PyTorch's meta device, which has shapes but no
data. Attention is counted as a GPU's fused kernel: it keeps q, k, v, its output and one number per query, not the
[B, H, L, L] weights. On a CPU the blocked path keeps the same for long sequences, except that number; so a step there
checks the count (`lab/tests/bench/test_memory.py`).
"""

import tupe.plugin  # noqa: F401  isort: skip  (first: registers the architectures, keeps fairseq's import quiet)
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import click
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import FunctionCtx

from tupe.backend_sdpa import Sdpa
from tupe.common.architectures import ARCHITECTURES, OTHER_BLOCKS, SIZES, split_size, with_size
from tupe.common.options import Command, ListOf, did_you_mean
from tupe.common.tables import TextTable
from tupe.encoder import Encoder
from tupe.positions import autocast_device

from .contenders import build_ours
from .machine import PRECISIONS, Level

GIB = 2**30
RESERVE = 1.5 * GIB  # CUDA's context, communication buffers and fragmentation: an allowance, not a measurement
# Per parameter: weight, gradient and Adam's two moments in single precision; with fairseq's --fp16 also the weight and
# the gradient in half precision.
STATE_BYTES = {"float32": 4 + 4 + 4 + 4, "bf16": 4 + 4 + 4 + 4, "fp16": 4 + 4 + 4 + 4 + 2 + 2}


class Fused(torch.autograd.Function):
    """The shapes of fused attention without its values: what it keeps, and gradients; the bias's is [B, H, L, L]."""

    @staticmethod
    def forward(ctx: FunctionCtx, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        out, per_query = torch.empty_like(v), q.new_empty(q.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, bias, out, per_query)
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
        return tuple(torch.empty_like(x) if needed else None for x, needed in pairs)


class Dropout(torch.autograd.Function):
    """The shapes of dropout on a GPU, which keeps one byte per entry."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(torch.empty_like(x, dtype=torch.bool))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> Tensor:
        return torch.empty_like(grad)


def attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, **options) -> Tensor:
    bias = attn_mask if attn_mask is None else attn_mask.expand(*q.shape[:3], k.size(2))
    return Fused.apply(*(low(x) for x in (q, k, v)), bias)


def low(x: Tensor | None) -> Tensor | None:
    """As autocast casts the inputs of products."""
    return x.bfloat16() if x is not None and torch.is_autocast_enabled("cpu") else x


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """In this context PyTorch's fused attention and dropout keep the tensors that they keep on a GPU; and autocast does
    to the meta device, which it leaves alone, what it does to a GPU: products in bfloat16, layer norms in float32. (A
    mode of functions would not reach layers that are computed again.)"""
    linear, norm = F.linear, F.layer_norm
    instead = {
        "scaled_dot_product_attention": attention,
        "dropout": lambda x, p=0.5, training=True, *rest: Dropout.apply(x) if training and p else x,
        "linear": lambda *inputs: linear(*map(low, inputs)),
        "layer_norm": lambda x, *rest: norm(x.float() if torch.is_autocast_enabled("cpu") else x, *rest),
    }
    device = mock.patch("torch.utils.checkpoint._infer_device_type", lambda *args: "cpu")  # torch 2.4 has no torch.meta
    with mock.patch.multiple(F, **instead), device:
        yield


def step_bytes(
    arch: str, batch: int, length: int, vocabulary: int = 32768, precision: str = "fp16", padded: bool = True, **options
) -> dict[str, int]:
    """{"parameters": count, "state": bytes, "activations": bytes, "transient": bytes} of a step of masked-LM training
    with half-precision weights, autocast, or in float32: a step on the meta device, tensor by tensor.
    padded: with a token of padding, for which the bias has to be [B, H, L, L]. options: of the model, for example
    checkpoint_activations=True.

    activations: kept from the forward to the backward pass, including the log-probabilities of 15 % masked tokens.
    transient: what the peak of the step takes beside them: gradients of the logits, of the attention bias for every
    sequence, and with checkpoint_activations all that a layer keeps. Accumulated steps (--update-freq) follow each
    other and need no more. What an operation needs inside of itself is left out, and copies are counted that a GPU's
    kernels save: `tests/fake_cuda.py` holds that it is no less than the tensors of a step with a GPU's kernels.
    Raises ValueError for an unknown architecture, or one that needs the plain path.
    """
    with torch.device("meta"):
        model, tokens = build(arch, batch, length, vocabulary, options)
        model.to(torch.float16 if precision == "fp16" else torch.float32)
    body, dtype = model.encoder, PRECISIONS[precision]
    sdpa = Sdpa()
    if reason := sdpa.refuses(body.positions, body.normaliser, torch.device("cuda"), dtype):
        raise ValueError(f"{arch}: {reason}; only fused attention is counted")
    body.attention_backend = "sdpa"
    for p in model.parameters():
        p.grad = torch.empty_like(p)
    own = [x for p in model.parameters() for x in (p, p.grad)]
    with as_on_gpu(), Level([*own, *model.buffers(), tokens]) as level:
        loss = masked_loss(model, tokens, precision, padded)
        activations = level.level
        loss.backward()
    parameters = sum(p.numel() for p in model.parameters())
    state = STATE_BYTES[precision] * parameters
    transient = level.peak - activations
    return {"parameters": parameters, "state": state, "activations": activations, "transient": transient}


def build(arch: str, batch: int, length: int, vocabulary: int, options: dict) -> tuple[nn.Module, Tensor]:
    """(model in training mode, token ids [B, L]) for masked-LM training. Raises ValueError for an unknown name."""
    if split_size(arch)[0] not in {*ARCHITECTURES, *OTHER_BLOCKS}:
        valid = [with_size(name, size) for name in (*ARCHITECTURES, *OTHER_BLOCKS) for size in SIZES]
        raise ValueError(f"unknown architecture {arch!r} for masked-LM training{did_you_mean(arch, valid)}")
    return build_ours(arch, length, vocabulary, **options).train(), torch.full((batch, length), 4)


def masked_loss(model: nn.Module, tokens: Tensor, precision: str, padded: bool) -> Tensor:
    """The usual criterion's loss at 15 % masked tokens, in fp16 or with autocast: log-probabilities are float32.
    Which tokens is all the same: only memory counts."""
    masked = torch.zeros(int(0.15 * tokens.numel()), dtype=torch.long, device=tokens.device)
    with torch.autocast(autocast_device(tokens.device.type), torch.bfloat16, enabled=precision == "bf16"):
        logits, _ = model(tokens, masked_tokens=(masked, masked), num_tokens=tokens.numel() - padded)
    return F.nll_loss(F.log_softmax(logits, dim=-1, dtype=torch.float32), masked, reduction="sum")


def forward_bytes(position: str, length: int, size: str = "base") -> dict[str, int]:
    """{"weights": bytes, "peak": bytes} of the encoder's forward pass for one sequence on a CPU, in float32 and without
    gradients; the peak includes the weights. Counted without data, so that any length takes seconds: memory that an
    operation needs inside of itself is left out."""
    layers, width, heads, ffn = SIZES[size]
    sizes = {"layers": layers, "width": width, "heads": heads, "ffn": ffn, "max_positions": length}
    model, tokens = Encoder(32768, 1, position=position, **sizes).eval(), torch.full((1, length), 4)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as shapes_only:
        own = [shapes_only.from_tensor(x) for x in [tokens, *model.parameters(), *model.buffers()]]
        with Level(own) as level:
            model(tokens, num_tokens=length)
    return {"weights": weights, "peak": weights + level.peak}


# ---- the command


def table_of_fits(arch: str, length: int, precision: str, cards: list[float]) -> TextTable:
    """The memory of batches of 1 to 64 sequences, and the cards (sizes in GiB) that they fit on."""
    rows = []
    for checkpointed in (False, True):
        for batch in (1, 2, 4, 8, 16, 32, 64):
            sizes = step_bytes(arch, batch, length, precision=precision, checkpoint_activations=checkpointed)
            parts = [sizes[part] for part in ("state", "activations", "transient")]
            fitting = [f"{card:g} GiB" for card in cards if sum(parts) + RESERVE <= card * GIB]
            cells = [f"{part / GIB:.2f}" for part in (*parts, sum(parts))]
            rows.append([str(batch), "yes" if checkpointed else "no", *cells, ", ".join(fitting) or "none"])
    header = ["sequences", "activations checkpointed", "state", "activations", "transient", "sum in GiB", "fits on"]
    return TextTable.plain(header, rows)


def table_of_forwards(positions: list[str], length: int) -> TextTable:
    """GB of weights, and at the peak of a forward pass of one sequence."""
    rows = []
    for position in positions:
        counted = forward_bytes(position, length)
        rows.append([f"`{position}`", *(f"{counted[key] / 1e9:.2f}" for key in ("weights", "peak"))])
    return TextTable.plain(["encoding", "weights, GB", f"peak for {length} tokens"], rows)


@click.command(cls=Command)
@click.option("--arch", default="tupe_r_large", show_default=True, help="The architecture.")
@click.option("--length", type=click.IntRange(1), default=512, show_default=True, help="Tokens of a sequence.")
@click.option("--cards", type=ListOf(float), default="16,32", show_default=True, help="Memory of the GPUs in GiB.")
@click.option("--precision", type=click.Choice(list(PRECISIONS)), default="fp16", show_default=True,
              help="The precision, as of --precision.")  # fmt: skip
@click.option("--positions", type=ListOf(str), help="Count instead one forward pass on a CPU with these encodings, at "
              "base size, of a single sequence of --length tokens.")  # fmt: skip
def command(arch, length, cards, precision, positions):
    """Count how many sequences fit on a GPU in masked-LM training, some of them padded; needs no GPU.

    \b
    python -m lab bench memory --arch tupe_r_large --cards 16,32
    python -m lab bench memory --positions rope,t5 --length 8192
    """
    table = table_of_forwards(positions, length) if positions else table_of_fits(arch, length, precision, cards)
    click.echo(table.markdown(), nl=False)
