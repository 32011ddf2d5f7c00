"""Times of single operations, measured in turns: products, dropout, attention by every path.

B batch, L sequence length, H heads, D width of a head, C = H D, F feed-forward width.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator

import click
import torch
import torch.nn.functional as F
from torch import Tensor

from tupe import cpu
from tupe.attention import Batch
from tupe.backends import BACKENDS
from tupe.common.options import Command, ListOf
from tupe.packing import NO_PADDING, Packing
from tupe.run.record import command_line
from tupe.token_positions import TokenPositions

from .instrument import batches, compared, comparison, timed, write
from .machine import PRECISIONS, environment

COLUMNS = {"forward ms": "{ms[0]:.2f}", "backward ms": "{ms[1]:.2f}"}
ELSEWHERE = {"cpu": "triton", "cuda": "blocked"}  # device -> the backend that it has not


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
    padded: tokens of padding at the end of the first sequence, whose output is 0. Without a bias, they go to flash
    attention on a GPU, as the batches of BERT-A do."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape, dtype=dtype):
        return torch.randn(*shape, device=device, dtype=dtype, generator=generator).requires_grad_()

    qkv = [random(batch, heads, length, width) for _ in range(3)]
    bias = random(heads, length, length, dtype=torch.float32)
    real = torch.ones(batch, length, dtype=torch.bool, device=device)
    real[0, length - padded :] = False
    packing = Packing(real, on_the_right=True) if padded else NO_PADDING
    backend, whole = BACKENDS[path](), Batch(TokenPositions(length, device), dtype, heads, packing)

    def call():
        prepared = backend.prepare(bias if biased else None, None, None, whole)
        out = backend.mix(*qkv, None, prepared, (2 * width) ** -0.5, dropout)[0]
        return out * real[:, None, :, None] if padded else out

    return Case(call, (*qkv, bias) if biased else qkv)


def cases(
    paths: list[str], lengths: list[int], tokens: int, dtype: torch.dtype, device: str
) -> Iterator[tuple[str, dict[str, Case]]]:
    """(what is computed, {by what: Case}) at base size: a product [tokens, C] x [C, F], dropout of [tokens, F],
    attention by each path with dropout and without."""
    x, weight, hidden = (
        torch.randn(*shape, device=device, dtype=dtype, requires_grad=True)
        for shape in ((tokens, 768), (3072, 768), (tokens, 3072))
    )
    yield (
        f"product of {tokens} tokens",
        {
            "PyTorch": Case(lambda: F.linear(x, weight), (x, weight)),
            "here": Case(lambda: cpu.linear(x, weight), (x, weight)),
        },
    )
    yield (
        f"dropout of {tokens} tokens",
        {
            "PyTorch": Case(lambda: F.dropout(hidden, 0.1), (hidden,)),
            "here": Case(lambda: cpu.dropout(hidden, 0.1, True), (hidden,)),
        },
    )
    for dropout, length in itertools.product((0.1, 0.0), lengths):
        batch = max(1, tokens // length)
        yield (
            f"attention, B = {batch}, L = {length}, dropout {dropout:g}",
            {path: attention_case(path, batch, length, dtype, device, dropout) for path in paths},
        )


@click.command(cls=Command)
@click.option("--paths", type=ListOf(list(BACKENDS)),
              help=f"Paths of {', '.join(BACKENDS)} (default: all for the device).")  # fmt: skip
@batches
@comparison
def command(paths, lengths, tokens, precision, device, turns, output):
    """Measure single operations of a training step at base size: products, dropout, attention by every path.

    \b
    python -m lab bench kernels --lengths 512,128 --precision float32,bf16 --output kernels
    python -m lab bench kernels --paths plain,blocked --lengths 2048 --output kernels
    """
    paths = paths or [name for name in BACKENDS if name != ELSEWHERE[device]]
    if ELSEWHERE[device] in paths:
        raise ValueError(f"--paths {ELSEWHERE[device]}: not for {device}; valid: the others")
    about, rows = {"command": command_line(), **environment()}, []
    for kind in precision:
        for what, ways in cases(paths, lengths, tokens, PRECISIONS[kind], device):
            steps = {way: timed(device, case.forward, case.backward) for way, case in ways.items()}
            rows += compared(steps, turns, {"setting": f"{what}, {kind}"})
    click.echo(write(output, about, rows, COLUMNS))
