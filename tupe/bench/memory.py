"""The GPU memory of a training step, counted without a GPU, and the same measured on a CPU.

B batch, L sequence length, H heads, C width, V vocabulary. Tensors that autograd keeps for the backward pass are
counted on PyTorch's meta device, which has shapes but no data. Attention is counted as a GPU's fused kernel: it
keeps q, k, v, its output and one number per query, not the [B, H, L, L] weights. On a CPU the blocked path keeps the
same for long sequences, except that number; so a step there checks the count (`measured_bytes`).
"""

import tupe.plugin  # noqa: F401  isort: skip  (first: registers the architectures, keeps fairseq's import quiet)
import itertools
from collections.abc import Callable
from typing import Any

import click
import torch
import torch.nn.functional as F
from fairseq.models import MODEL_REGISTRY
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import FunctionCtx
from torch.autograd.profiler_util import MEMORY_EVENT_NAME
from torch.overrides import TorchFunctionMode

from .. import backend_cpu
from ..backends import make
from ..common.architectures import SIZES
from ..common.options import Command, ListOf
from ..common.tables import TextTable
from ..encoder import Encoder
from ..packing import Selection
from ..windows import InChunks
from .contenders import build_ours
from .machine import Level

GIB = 2**30
RESERVE = 1.5 * GIB  # CUDA's context, communication buffers and fragmentation: an allowance, not a measurement
# Per parameter: weight, gradient and Adam's two moments in single precision; with fairseq's --fp16 also the weight and
# the gradient in half precision.
STATE_BYTES = {torch.float32: 4 + 4 + 4 + 4, torch.float16: 4 + 4 + 4 + 4 + 2 + 2}


class Fused(torch.autograd.Function):
    """The shapes of fused attention without its values: the tensors it keeps."""

    @staticmethod
    def forward(ctx: FunctionCtx, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        out, per_query = torch.empty_like(v), q.new_empty(q.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, bias, out, per_query)
        return out


class Dropout(torch.autograd.Function):
    """The shapes of dropout on a GPU, which keeps one byte per entry."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(torch.empty_like(x, dtype=torch.bool))
        return torch.empty_like(x)


class AsOnGpu(TorchFunctionMode):
    """In this context PyTorch's fused attention and dropout keep the tensors that they keep on a GPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return Fused.apply(*args, kwargs["attn_mask"])
        if func is F.dropout and kwargs["training"] and kwargs["p"]:
            return Dropout.apply(*args)
        return func(*args, **kwargs)


def step_bytes(
    arch: str, batch: int, length: int, vocabulary: int = 32768, dtype: torch.dtype = torch.float16, **options
) -> dict[str, int]:
    """{"parameters": count, "state": bytes, "activations": bytes, "transient": bytes} of masked-LM training with
    --fp16, or in single precision with dtype float32. options: of the model, for example checkpoint_activations=True.

    activations: kept from the forward to the backward pass, including the log-probabilities of 15 % masked tokens.
    transient: the additional peak of the backward pass: gradients of the logits and of the token table; or, within one
    layer, of the attention bias for every sequence or of the feed-forward block, and with checkpoint_activations all
    that this layer keeps. Accumulated steps (--update-freq) follow each other and need no more.
    The attention bias is counted in every layer, although layers share it if a kernel reads it as it is: an upper
    bound. Raises ValueError for an unknown architecture, or one that needs the plain path.
    """
    with torch.device("meta"):
        model, tokens = build(arch, batch, length, vocabulary, options)
        model.to(dtype)
    body, config, item = model.encoder, model.cfg, dtype.itemsize
    backend = make("sdpa", body.positions)
    if reason := backend.refuses(body.positions, body.normaliser, torch.device("cuda"), dtype):
        raise ValueError(f"{arch}: {reason}; only fused attention is counted")
    body.attention_backend = "sdpa"
    masked, width = count_masked(tokens), config.encoder_embed_dim
    with AsOnGpu():
        x, outside = kept(model, lambda: body.embed(tokens))
        terms, of_bias = kept(model, lambda: body.layer_inputs(length, backend))
        indices = torch.empty(masked, dtype=torch.long, device="meta")
        last = len(body.layers) - 1
        of_last = terms[last]._replace(selection=Selection(indices, indices, length))
        _, in_last = kept(model, lambda: body.layers[last](x, of_last))
        x, in_layer = kept(model, lambda: body.layers[0](x, terms[0]))
        rows = x.new_empty(masked, width).requires_grad_()
        _, head = kept(model, lambda: log_probabilities(model.lm_head(rows, body.tokens.weight)))
    recomputed = config.checkpoint_activations
    prepared = terms[0].prepared.near if isinstance(terms[0].prepared, InChunks) else terms[0].prepared
    bias = 0 if prepared.bias is None else prepared.bias.numel()  # [H, L, L]
    inside = 4 * bias + len(body.layers) * x.numel() * item if recomputed else last * in_layer + in_last
    bias_gradient = item * batch * bias
    ffn_gradient = 2 * item * batch * length * config.encoder_ffn_embed_dim
    logit_gradient = (4 + item) * masked * vocabulary + item * vocabulary * width
    parameters = sum(p.numel() for p in model.parameters())
    return {
        "parameters": parameters,
        "state": STATE_BYTES[dtype] * parameters,
        "activations": outside + of_bias + inside + head,
        "transient": max(logit_gradient, max(bias_gradient, ffn_gradient) + (in_layer if recomputed else 0)),
    }


def build(arch: str, batch: int, length: int, vocabulary: int, options: dict) -> tuple[nn.Module, Tensor]:
    """(model in training mode, token ids [B, L]) for masked-LM training. Raises ValueError for an unknown name."""
    if arch not in MODEL_REGISTRY or not arch.startswith(("tupe_", "bert_")):
        raise ValueError(f"unknown architecture {arch!r} for masked-LM training")
    return build_ours(arch, length, vocabulary, **options).train(), torch.full((batch, length), 4)


def count_masked(tokens: Tensor) -> int:
    """Number of masked tokens in a batch: 15 %."""
    return int(0.15 * tokens.numel())


def log_probabilities(logits: Tensor) -> Tensor:
    """In single precision, as fairseq's masked-LM loss computes and keeps them."""
    return F.log_softmax(logits, dim=-1, dtype=torch.float32)


def kept(model: nn.Module, forward: Callable) -> tuple[Any, int]:
    """(result of forward(), bytes that autograd keeps for it, without the model's own tensors)."""
    own = {t.untyped_storage()._cdata for t in [*model.parameters(), *model.buffers()]}
    seen = {}

    def remember(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            seen[storage._cdata] = storage  # keeps it alive, so that no other storage gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        result = forward()
    return result, sum(storage.nbytes() for storage in seen.values())


def measured_bytes(
    arch: str, batch: int, length: int, vocabulary: int = 32768, update_freq: int = 1, **options
) -> dict[str, int]:
    """{"activations": bytes, "peak": bytes} that PyTorch allocates in training on this CPU, beside weights and
    gradients, in single precision: at the end of a forward pass, and at the peak of `update_freq` accumulated steps.
    options: of the model.

    Comparable with `step_bytes` at lengths above `SAVE_WEIGHTS_UP_TO`, at which attention does not keep its weights.
    """
    model, tokens = build(arch, batch, length, vocabulary, options)
    masked = torch.zeros(tokens.shape, dtype=torch.bool)
    masked.view(-1)[: count_masked(tokens)] = True
    targets = tokens[masked]
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    activations, levels = 0, [0]
    for _ in range(update_freq):
        loss, forward = allocations(
            lambda: F.nll_loss(log_probabilities(model(tokens, masked_tokens=masked)[0]), targets, reduction="sum")
        )
        activations = max(activations, levels[-1] + sum(forward))
        _, backward = allocations(loss.backward)
        levels += itertools.islice(itertools.accumulate([*forward, *backward], initial=levels[-1]), 1, None)
    return {"activations": activations, "peak": max(levels)}


def forward_bytes(
    position: str, length: int, size: str = "base", layers: int | None = None, measure: bool = False
) -> dict[str, int]:
    """{"weights": bytes, "peak": bytes} of the encoder's forward pass for one sequence on a CPU, in float32 and without
    gradients; the peak includes the weights. Counted without data, so that any length takes seconds: memory that an
    operation needs inside of itself is left out. measure: as PyTorch allocates it on this CPU."""
    depth, width, heads, ffn = SIZES[size]
    sizes = {"layers": layers or depth, "width": width, "heads": heads, "ffn": ffn, "max_positions": length}
    model, tokens = Encoder(32768, 1, position=position, **sizes).eval(), torch.full((1, length), 4)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    with torch.no_grad():
        if measure:
            _, steps = allocations(lambda: model(tokens, num_tokens=length))
            return {"weights": weights, "peak": weights + max(itertools.accumulate(steps))}
        with FakeTensorMode(allow_non_fake_inputs=True) as shapes_only:
            own = [shapes_only.from_tensor(x) for x in [tokens, *model.parameters(), *model.buffers()]]
            with Level(own) as level:
                model(tokens, num_tokens=length)
    return {"weights": weights, "peak": weights + level.peak}


def allocations(function: Callable) -> tuple[Any, list[int]]:
    """(result of function(), bytes of each allocation on the CPU during the call, in order; negative for a release)."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = function()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == MEMORY_EVENT_NAME]
    return result, [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]


# ---- the command


def table_of_fits(arch: str, length: int, cards: list[float]) -> TextTable:
    """The memory of batches of 1 to 64 sequences, and the cards (sizes in GiB) that they fit on."""
    rows = []
    for checkpointed in (False, True):
        for batch in (1, 2, 4, 8, 16, 32, 64):
            sizes = step_bytes(arch, batch, length, checkpoint_activations=checkpointed)
            parts = [sizes[part] for part in ("state", "activations", "transient")]
            fitting = [f"{card:g} GiB" for card in cards if sum(parts) + RESERVE <= card * GIB]
            cells = [f"{part / GIB:.2f}" for part in (*parts, sum(parts))]
            rows.append([str(batch), "yes" if checkpointed else "no", *cells, ", ".join(fitting) or "none"])
    header = ["sequences", "activations checkpointed", "state", "activations", "transient", "sum in GiB", "fits on"]
    return TextTable.plain(header, rows)


def table_of_checks(arch: str, length: int) -> TextTable:
    """Counted and measured MiB in single precision without dropout, beside weights and gradients."""
    if length <= (kept_whole := backend_cpu.SAVE_WEIGHTS_UP_TO):
        raise ValueError(f"--check compares from length {kept_whole + 1} on: a CPU keeps more for shorter ones")
    rows = []
    for checkpointed in (False, True):
        options = {"dropout": 0.0, "attention_dropout": 0.0, "checkpoint_activations": checkpointed}
        for batch, update_freq in ((1, 1), (4, 1), (1, 4)):
            sizes = step_bytes(arch, batch, length, dtype=torch.float32, **options)
            counted = sizes["activations"], sizes["activations"] + sizes["transient"]
            measured = measured_bytes(arch, batch, length, update_freq=update_freq, **options)
            pairs = zip(counted, (measured["activations"], measured["peak"]), strict=True)
            cells = [f"{size / 2**20:.1f}" for pair in pairs for size in pair]
            rows.append([str(batch), str(update_freq), "yes" if checkpointed else "no", *cells])
    header = ["sequences", "update_freq", "activations checkpointed"]
    header += ["kept: counted", "measured", "peak: counted", "measured"]
    return TextTable.plain(header, rows)


def table_of_forwards(positions: list[str], length: int, check: bool) -> TextTable:
    """GB of weights, and at the peak of a forward pass of one sequence; with `check` also as measured here."""
    rows = []
    for position in positions:
        counted = forward_bytes(position, length)
        numbers = [counted["weights"], counted["peak"]]
        numbers += [forward_bytes(position, length, measure=True)["peak"]] if check else []
        rows.append([f"`{position}`", *(f"{number / 1e9:.2f}" for number in numbers)])
    header = ["encoding", "weights, GB", f"peak for {length} tokens: counted", *["measured"] * check]
    return TextTable.plain(header, rows)


@click.command(cls=Command)
@click.option("--arch", default="tupe_r_large", show_default=True, help="architecture")
@click.option("--length", type=click.IntRange(1), default=512, show_default=True, help="tokens of a sequence")
@click.option("--cards", type=ListOf(float), default="16,32", show_default=True, help="memory of GPUs in GiB")
@click.option("--check", is_flag=True, help="compare with the memory allocated on this CPU (MiB)")
@click.option("--positions", type=ListOf(str), help="count one forward pass on a CPU with these encodings instead, at "
              "base size, of a single sequence of --length tokens")  # fmt: skip
def command(arch, length, cards, check, positions):
    """Count how many sequences fit on a GPU in masked-LM training with --fp16; needs no GPU.

    \b
    tupe bench memory --arch tupe_r_large --cards 16,32
    tupe bench memory --check --arch bert_a_small --length 1024
    tupe bench memory --positions rope,t5 --length 8192
    """
    if positions:
        click.echo(table_of_forwards(positions, length, check).markdown(), nl=False)
        return
    table = table_of_checks(arch, length) if check else table_of_fits(arch, length, cards)
    click.echo(table.markdown(), nl=False)
