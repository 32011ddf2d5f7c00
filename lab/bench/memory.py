"""The GPU memory of a training step, and a CPU's of a forward pass, counted without either.

B batch, L sequence length, H heads. The tensors of a step are counted on PyTorch's meta device, which has shapes but no
data. Attention is counted as a GPU's fused kernel: it keeps q, k, v, its output and one number per query, not the
[B, H, L, L] weights. On a CPU the blocked path keeps the same for long sequences, except that number; so a step there
checks the count (`lab/tests/bench/test_memory.py`). Of a compiled step, PyTorch's compiler chooses what is kept.
"""

import tupe.plugin  # noqa: F401  isort: skip  (first: registers the architectures, keeps fairseq's import quiet)
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
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
from tupe.config import PRECISIONS
from tupe.encoder import Encoder
from tupe.positions import autocast_device

from .contenders import build_ours
from .machine import Level

GIB = 2**30
RESERVE = 1.5 * GIB  # CUDA's context, communication buffers and fragmentation: an allowance, not a measurement
WEIGHTS = {"float32": torch.float32, "autocast": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Per parameter: weight, gradient and Adam's two moments in single precision; beside half-precision weights and their
# gradients, too.
STATE_BYTES = {name: 16 if dtype == torch.float32 else 16 + 2 + 2 for name, dtype in WEIGHTS.items()}


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
    """A GPU's kernel. It expands the bias, so that its gradient is [B, H, L, L]."""
    bias = attn_mask if attn_mask is None else attn_mask.expand(*q.shape[:3], k.size(2))
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    return kernel(*(low(x) for x in (q, k, v)), bias, True, options.get("dropout_p", 0.0))[0]


def drop(x: Tensor, p: float = 0.5, training: bool = True, *rest) -> Tensor:
    if not training or p == 0:
        return x
    return torch.native_dropout(x, p, True)[0] if torch.compiler.is_compiling() else Dropout.apply(x)


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str) -> Tensor:
    """The sum over all rows: of `F.nll_loss`, torch 2.13 finds no gradient on the meta device in compiled code."""
    return -F.log_softmax(logits, dim=-1).gather(1, targets[:, None]).sum()


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
        "dropout": drop, "cross_entropy": cross_entropy,
        "linear": lambda *inputs: linear(*map(low, inputs)),
        "layer_norm": lambda x, *rest, **more: norm(
            x.float() if torch.is_autocast_enabled("cpu") else x, *rest, **more
        ),
    }  # fmt: skip
    device = mock.patch("torch.utils.checkpoint._infer_device_type", lambda *args: "cpu")  # torch 2.4 has no torch.meta
    with mock.patch.multiple(F, **instead), device:
        yield


class Fused(torch.fx.Interpreter):
    """Runs a graph. In memory are only the results that products and attention make or read, and those of the graph:
    inductor computes all others within their readers."""

    def run_node(self, node: torch.fx.Node) -> Any:
        near = [str(other.target) for other in (node, *node.users)]
        in_memory = any(name == "output" or "mm." in name or "scaled_dot_product" in name for name in near)
        with nullcontext() if in_memory else mock.patch.object(Level, "counts", False):
            return super().run_node(node)


def compile_for_count(model: nn.Module) -> None:
    """`torch.compile` in place as training does it, of layers and of head with loss, without code for a card: the
    graphs that inductor would make, with its choice of what is kept and what is computed again, run as they are."""
    from torch._dynamo.backends.common import aot_autograd  # here, because these imports take seconds
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._guards import detect_fake_mode
    from torch._inductor import config
    from torch._inductor.compile_fx import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V

    def partition(graph, inputs, **options):
        # without folding of constants, which computes on a device
        with V.set_fake_mode(detect_fake_mode(inputs)), config.patch(joint_graph_constant_folding=False):
            joint_graph_passes(graph)
        return min_cut_rematerialization_partition(graph, inputs, compiler="inductor", **options)

    def run(graph, inputs):
        def call(args):
            return Fused(graph).boxed_run(args)  # which lets go of what was read for the last time

        call._boxed_call = True
        return call

    backend = aot_autograd(
        fw_compiler=run, bw_compiler=run, partition_fn=partition, decompositions=select_decomp_table()
    )
    model.encoder.compile(backend=backend)
    model.lm_head.compile(backend=backend, dynamic=False)


def step_bytes(
    arch: str, batch: int, length: int, vocabulary: int = 32768, precision: str = "fp16", padded: bool = True,
    compiled: bool = False, **options,
) -> dict[str, int]:  # fmt: skip
    """{"parameters": count, "state": bytes, "activations": bytes, "transient": bytes} of a step of masked-LM training
    in a precision of `tupe pretrain`: a step on the meta device, tensor by tensor.
    padded: with a token of padding, for which the bias has to be [B, H, L, L]. compiled: layers, and head with loss, by
    `--compile`. options: of the model, for example checkpoint_activations=True.

    activations: kept from the forward to the backward pass, including the log-probabilities of 15 % masked tokens.
    transient: what the peak of the step takes beside them: gradients of the logits, of the attention bias for every
    sequence, and with checkpoint_activations all that a layer keeps. Accumulated steps (--update-freq) follow each
    other and need no more. What an operation needs inside of itself is left out, and copies are counted that a GPU's
    kernels save: `tests/fake_cuda.py` holds that it is no less than the tensors of a step with a GPU's kernels.
    Raises ValueError for an unknown architecture, or one that needs the plain path.
    """
    with torch.device("meta"):
        model, tokens = build(arch, batch, length, vocabulary, options)
        model.to(WEIGHTS[precision])
    body, dtype = model.encoder, torch.bfloat16 if precision == "autocast" else WEIGHTS[precision]
    sdpa = Sdpa()
    if reason := sdpa.refuses(body.positions, body.normaliser, torch.device("cuda"), dtype):
        raise ValueError(f"{arch}: {reason}; only fused attention is counted")
    body.attention_backend = "sdpa"
    for p in model.parameters():
        p.grad = torch.empty_like(p)
    own = [x for p in model.parameters() for x in (p, p.grad)]
    with as_on_gpu():
        if compiled:
            compile_for_count(model)
            masked_loss(model, tokens, precision, padded).backward()  # makes the graphs
        with Level([*own, *model.buffers(), tokens]) as level:
            loss = masked_loss(model, tokens, precision, padded)
            activations = level.level
            loss.backward()
    if compiled:
        torch._dynamo.reset()
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
    """The usual criterion's loss at 15 % masked tokens: log-probabilities are float32 in every precision.
    Which tokens is all the same: only memory counts."""
    masked = torch.zeros(int(0.15 * tokens.numel()), dtype=torch.long, device=tokens.device)
    with torch.autocast(autocast_device(tokens.device.type), torch.bfloat16, enabled=precision == "autocast"):
        if model.encoder.compiled:  # as the second engine: the head computes its loss
            read, targets = model.encoder.pad_outputs(masked, masked)
            x, _ = model.encoder(tokens, num_tokens=tokens.numel() - padded, output_indices=read)
            return model.lm_head(x, model.encoder.tokens.weight, targets)
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
    for checkpointed, compiled in ((False, False), (True, False), (False, True)):
        for batch in (1, 2, 4, 8, 16, 32, 64):
            options = {"compiled": compiled, "checkpoint_activations": checkpointed}
            sizes = step_bytes(arch, batch, length, precision=precision, **options)
            parts = [sizes[part] for part in ("state", "activations", "transient")]
            fitting = [f"{card:g} GiB" for card in cards if sum(parts) + RESERVE <= card * GIB]
            cells = [f"{part / GIB:.2f}" for part in (*parts, sum(parts))]
            words = ["yes" if one else "no" for one in (checkpointed, compiled)]
            rows.append([str(batch), *words, *cells, ", ".join(fitting) or "none"])
    header = [
        "sequences",
        "activations checkpointed",
        "compiled",
        "state",
        "activations",
        "transient",
        "sum in GiB",
        "fits on",
    ]
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
              help="The precision, as of tupe pretrain.")  # fmt: skip
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
