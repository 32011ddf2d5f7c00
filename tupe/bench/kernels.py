"""Times of the parts of a training step, measured in turns: products, dropout, a layer, attention by every path.

B batch, L sequence length, H heads, D width of a head, C = H D.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence

import click
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .. import cpu
from ..attention import Batch
from ..backends import BACKENDS
from ..common import options
from ..common.options import Command, ListOf
from ..common.tables import TextTable
from ..encoder import Encoder, LMHead
from ..packing import NO_PADDING, Packing
from ..token_positions import TokenPositions
from .machine import DEVICE, PRECISIONS, environment, facts
from .turns import Step, take_turns, timed


class Case:
    """A function and the tensors to differentiate it by; `forward()` and `backward()` are measured."""

    def __init__(self, compute: Callable[[], Tensor], inputs: Iterable[Tensor]):
        self.compute, self.inputs, self.grad = compute, tuple(inputs), None

    def forward(self) -> None:
        self.out = self.compute()

    def backward(self) -> None:
        if self.grad is None:  # the values do not matter, but zeros might be faster
            self.grad = torch.randn_like(self.out)
        torch.autograd.grad(self.out, self.inputs, self.grad)


def attention_case(
    path: str, batch: int, length: int, dtype: torch.dtype, device: str, dropout: float, heads: int = 12,
    width: int = 64, biased: bool = True, padded: int = 0,
) -> Case:  # fmt: skip
    """Attention by one path on random inputs. The bias [H, L, L] is given, as layers share it, and gets a gradient.
    padded: tokens of padding at the end of the first sequence, whose output is 0."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape, dtype=dtype):
        return torch.randn(*shape, device=device, dtype=dtype, generator=generator).requires_grad_()

    qkv = [random(batch, heads, length, width) for _ in range(3)]
    bias = random(heads, length, length, dtype=torch.float32)
    real = torch.ones(batch, length, dtype=torch.bool, device=device)
    real[0, length - padded :] = False
    packing = Packing(real) if padded else NO_PADDING
    backend, whole = BACKENDS[path](), Batch(TokenPositions(length, device), dtype, heads, packing)

    def call():
        prepared = backend.prepare(bias if biased else None, None, None, whole)
        out = backend.mix(*qkv, None, prepared, (2 * width) ** -0.5, dropout)[0]
        return out * real[:, None, :, None] if padded else out

    return Case(call, (*qkv, bias) if biased else qkv)


def step_cases(
    batch: int, length: int, width: int, ffn: int, vocab: int, dtype: torch.dtype, device: str
) -> dict[str, Case]:
    """{name: Case} of the parts of a step of TUPE-R: a layer, and what a step computes once. dtype: of autocast."""

    def autocast(compute):
        def call():
            with torch.autocast(device, dtype, enabled=dtype != torch.float32):
                return compute()

        return call

    torch.manual_seed(0)
    sizes = {"layers": 1, "width": width, "ffn": ffn, "heads": width // 64, "max_positions": length}
    encoder = Encoder(vocab, 1, position="untied+t5", cls="untied", **sizes).to(device).train()
    head = LMHead(width, vocab).to(device).train()
    tokens = torch.randint(2, vocab, (batch, length), device=device)
    x = torch.randn(batch, length, width, device=device, requires_grad=True)
    masked = torch.randn(round(0.15 * batch * length), width, device=device, requires_grad=True)
    targets = tokens.view(-1)[: len(masked)]
    positions, layer, embedding = encoder.positions, encoder.layers[0], encoder.tokens.weight
    with torch.no_grad():
        (terms,) = encoder.layer_inputs(length, encoder.choose_backend(x, None, length))
    bias = terms.prepared.bias.requires_grad_()
    inputs = {
        "layer": (lambda: layer(x, terms), (x, bias, *layer.parameters())),
        "position terms": (lambda: positions.terms(length)[0][0], positions.parameters()),
        "token embeddings": (lambda: encoder.tokens(tokens), (embedding,)),
        "LM head and loss": (lambda: head.loss(masked, embedding, targets), (masked, embedding, *head.parameters())),
    }
    return {name: Case(autocast(compute), tensors) for name, (compute, tensors) in inputs.items()}


def table(
    header: list[str], steps: dict[tuple[str, str], Step], turns: int, ratio: Callable | None = None
) -> TextTable:
    """Milliseconds of each part of the steps, medians over turns, all in turns. steps: {(row, column): step}. ratio:
    makes one more cell of {row: cells} and a row."""
    rows = {row: [] for row, _ in steps}
    for (row, _), times in take_turns(steps, turns).items():
        rows[row] += (1e3 * np.median(times, axis=0)).tolist()
    more = {row: [ratio(rows, row)] if ratio else [] for row in rows}
    return TextTable.plain(header, [[row, *(f"{cell:.2f}" for cell in rows[row] + more[row])] for row in rows])


def attention_table(
    names: Sequence[str], shapes: list[tuple[int, int]], dtypes: Iterable[torch.dtype], device: str, turns: int,
    dropout: float,
) -> TextTable:  # fmt: skip
    """A row per dtype, (batch, length), path: milliseconds forward and backward, and how many times as fast as the
    first path."""
    steps = {}
    for dtype, (batch, length), name in itertools.product(dtypes, shapes, names):
        case = attention_case(name, batch, length, dtype, device, dropout)
        row = f"{name}, {str(dtype).removeprefix('torch.')}, B {batch}, L {length}"
        steps[row, ""] = timed(device, case.forward, case.backward)
    header = [f"attention, H 12, D 64, dropout {dropout}", "forward ms", "backward ms", f"times as fast as {names[0]}"]
    return table(header, steps, turns, lambda rows, row: sum(rows[names[0] + row[row.index(",") :]]) / sum(rows[row]))


def step_table(
    batch: int, length: int, width: int, ffn: int, vocab: int, precisions: dict[str, torch.dtype | None], device: str,
    turns: int,
) -> TextTable:  # fmt: skip
    """A row per part of a step: milliseconds forward and backward in each precision, and the first's over the
    last's."""
    steps = {
        (part, precision): timed(device, case.forward, case.backward)
        for precision, dtype in precisions.items()
        for part, case in step_cases(batch, length, width, ffn, vocab, dtype, device).items()
    }
    header = [f"of TUPE-R, B {batch}, L {length}, C {width}, V {vocab}"]
    header += [f"{precision}: {way} ms" for precision in precisions for way in ("forward", "backward")]
    return table([*header, "times as fast"], steps, turns, lambda rows, row: sum(rows[row][:2]) / sum(rows[row][-2:]))


def parts_table(tokens: int, width: int, ffn: int, device: str, turns: int) -> TextTable:
    """Milliseconds of one product and one dropout, by PyTorch and by `cpu`."""
    x, weight = (torch.randn(n, width, device=device) for n in (tokens, ffn))
    hidden = torch.randn(tokens, ffn, device=device)
    half, half_weight = x.bfloat16(), weight.bfloat16()
    calls = {
        ("product, float32", "PyTorch"): lambda: x @ weight.t(),
        ("product, float32", "here"): lambda: cpu.multiply(x, weight),
        ("product, bf16", "PyTorch"): lambda: half @ half_weight.t(),
        ("product, bf16", "here"): lambda: cpu.multiply(half, half_weight),
        ("dropout, float32", "PyTorch"): lambda: F.dropout(hidden, 0.1),
        ("dropout, float32", "here"): lambda: cpu.dropout(hidden, 0.1, True),
    }
    header = [f"{tokens} x {width} by {width} x {ffn}; dropout of {tokens} x {ffn}", "PyTorch ms", "here ms"]
    return table(header, {name: timed(device, call) for name, call in calls.items()}, turns)


# ---- the command

ELSEWHERE = {"cpu": "triton", "cuda": "blocked"}  # device -> the backend that it has not


@click.command(cls=Command)
@click.option(
    "--paths", type=ListOf(list(BACKENDS)), help=f"Paths of {', '.join(BACKENDS)} (default: all for the device)."
)
@click.option("--lengths", type=ListOf(int, least=1), default="512,128", show_default=True, metavar="L,...",
              help="Tokens of a sequence.")  # fmt: skip
@click.option("--tokens", default=2048, show_default=True, help="Tokens of a batch.")
@options.vocab_size()
@click.option("--precision", type=ListOf(list(PRECISIONS)), default="float32,bf16", show_default=True,
              help="Precisions to measure in.")  # fmt: skip
@click.option(
    "--dropout", type=ListOf(float), default="0.1,0", show_default=True, help="Dropout of the attention weights."
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default=DEVICE,
              help="Where to measure (default: a GPU if there is one).")  # fmt: skip
@click.option("--turns", type=click.IntRange(1), default=9, show_default=True, help="Measured calls of each function.")
def command(paths, lengths, tokens, vocab_size, precision, dropout, device, turns):
    """Measure the parts of a training step at base size: products, dropout, a layer, attention by every path.

    \b
    tupe bench kernels
    tupe bench kernels --paths plain,blocked --lengths 2048 --precision float32
    """
    paths = paths or [name for name in BACKENDS if name != ELSEWHERE[device]]
    if ELSEWHERE[device] in paths:
        raise ValueError(f"--paths {ELSEWHERE[device]}: not for {device}; valid: the others")
    precisions = {name: PRECISIONS[name] for name in precision}
    shapes = [(max(1, tokens // length), length) for length in lengths]
    click.echo(facts(environment()) + "\n")
    click.echo(parts_table(tokens, 768, 3072, device, turns).markdown())
    click.echo(step_table(*shapes[0], 768, 3072, vocab_size, precisions, device, turns).markdown())
    for p in dropout:
        click.echo(attention_table(paths, shapes, precisions.values(), device, turns, p).markdown())
