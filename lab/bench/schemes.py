"""The cost of each position encoding: parameters, arithmetic, and time of a training step, relative to `nopos`.

All encodings take turns in ONE model: embeddings, layers, LM head and their optimizer are the same objects; only the
`Positions` module (with its own optimizer) is exchanged before each step. So a difference in time is due to the
encoding, and two dozen encodings need the memory of one model.

B batch, L sequence length, N layers.
"""

from functools import partial

import click
import torch
from matplotlib.figure import Figure
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tupe.backends import BACKENDS
from tupe.common import options
from tupe.common.architectures import ARCHITECTURES
from tupe.common.options import Command, ListOf
from tupe.encoder import BLOCKS, Encoder, init_bert
from tupe.plugin.optim import AdamW
from tupe.positions import Dims, Positions, overrides
from tupe.run.record import command_line
from tupe.schemes import SCHEMES

from ..pictures import costs
from ..plotting import save
from .contenders import Contender, Setting, settings
from .instrument import batches, compared, comparison, ratios, write
from .machine import environment

SUMS = ["shaw+shaw_values"]  # combinations that no architecture has
CONTROL = "nopos, a second time"  # its difference from 1 is noise
COLUMNS = {
    "extra parameters": "{parameters:,}", "extra kFLOP per token: products": "{products_k:,.1f}",
    "element-wise": "{element_wise_k:,.1f}", "ms": "{ms[0]:.1f}",
}  # fmt: skip


def cases(names: list[str] | None = None) -> dict[str, tuple[str, str]]:
    """{label: (position, cls)}, `nopos` first. names: architectures, or schemes (joined by "+") with [CLS] tied;
    default: every registered scheme, every architecture, and SUMS."""
    names = [*SCHEMES, *ARCHITECTURES, *SUMS] if names is None else names
    pairs = [("nopos", "tied"), *(ARCHITECTURES.get(name, (name, "tied")) for name in names)]
    return {position + ", [CLS] untied" * (cls == "untied"): (position, cls) for position, cls in pairs}


def dims(setting: Setting) -> Dims:
    layers, width, heads, _ = setting.dims()
    return BLOCKS["transformer"].dims(setting.length, width, heads, layers)


def parameters(position: str, cls: str, setting: Setting) -> int:
    """Number of parameters of only the encoding, for L positions."""
    with torch.device("meta"):
        return sum(p.numel() for p in Positions(position, dims(setting), cls).parameters())


# ---- arithmetic


class ElementWise(TorchDispatchMode):
    """Counts one operation per entry of an element-wise floating-point result, and one per summand of a sum."""

    def __init__(self):
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.is_floating_point():
            if torch.Tag.pointwise in func.tags:
                self.total += out.numel()
            elif func.overloadpacket is torch.ops.aten.sum:
                self.total += args[0].numel()
        return out


def flops(position: str, cls: str, setting: Setting) -> tuple[float, float]:
    """(of products, element-wise) operations per token, forward and backward, of the encoder with this encoding.

    Counted on PyTorch's meta device, not derived: products by `torch.utils.flop_counter` (2 per multiplication and
    addition), the rest by `ElementWise`, which leaves out softmax, layer norm, GELU and dropout: these are the same
    for every encoding. This is the arithmetic of the plain path, without what a faster path computes twice; with a
    window, that of a fast one, which leaves out what is not seen. Work that the batch shares is divided by B.
    """
    layers, width, heads, ffn = setting.dims()
    sizes = {"layers": layers, "width": width, "heads": heads, "ffn": ffn, "max_positions": setting.length}
    plain = {"attention": "plain", "dropout": 0.0, "attention_dropout": 0.0}
    products, rest = FlopCounterMode(display=False), ElementWise()
    with torch.device("meta"):
        encoder = Encoder(setting.vocab, 1, position=position, cls=cls, **plain, **sizes).train()
        positions, tokens = encoder.positions, torch.zeros(setting.batch, setting.length, dtype=torch.long)
        if any(overrides(scheme, "reach") for scheme in positions.of_layer(0)):
            obstacle = BACKENDS["sdpa"]().refuses(positions, encoder.normaliser, tokens.device, torch.float32)
            encoder.attention_backend = "plain" if obstacle else "sdpa"
        with products, rest:
            features, _ = encoder(tokens, num_tokens=tokens.numel())
            features.backward(torch.empty_like(features))
    return products.get_total_flops() / tokens.numel(), rest.total / tokens.numel()


# ---- time


class Stage:
    """One model whose position encoding can be exchanged. encodings: {label: (position, cls)}"""

    def __init__(self, encodings: dict, setting: Setting):
        self.contender = Contender("nopos", setting)
        shared = self.contender.optimizers
        self.parts = {}
        for name, (position, cls) in encodings.items():
            positions = Positions(position, dims(setting), cls).apply(init_bert).to(setting.device)
            own = list(positions.parameters())
            self.parts[name] = positions, [*shared, AdamW(own, lr=1e-4)] if own else shared

    def step(self, name: str, turn: int) -> list[float]:
        """Train for a step with one encoding; returns its seconds."""
        self.contender.model.encoder.positions, self.contender.optimizers = self.parts[name]
        return [sum(self.contender.step(turn))]


def measure(encodings: dict, setting: Setting, turns: int) -> list[dict]:
    """A row per encoding: parameters and operations in excess of those of `nopos`, and the seconds of its steps.
    encodings: {label: (position, cls)}, `nopos` first, which takes part twice."""
    encodings = {**encodings, CONTROL: ("nopos", "tied")}
    stage = Stage(encodings, setting)
    rows = compared({name: partial(stage.step, name) for name in encodings}, turns, {"setting": str(setting)})
    counted = {pair: (parameters(*pair, setting), *flops(*pair, setting)) for pair in encodings.values()}
    base = counted["nopos", "tied"]
    for row in rows:
        extra = [a - b for a, b in zip(counted[encodings[row["contender"]]], base, strict=True)]
        row.update(parameters=extra[0], products_k=extra[1] / 1e3, element_wise_k=extra[2] / 1e3)
    return rows


def draw(rows: list[dict]) -> Figure:
    """The time of a step beside `nopos`, by setting, which is named by what differs."""
    found = {}  # {setting: {encoding: ratio of each turn}}
    for row in rows:
        if row["setting"] not in found:
            nopos = row
        found.setdefault(row["setting"], {})[row["contender"]] = ratios(row, nopos)
    parts = [setting.split(", ") for setting in found]
    differing = [{*places} for places in zip(*parts, strict=True)]
    names = [", ".join(part for part, all_of in zip(one, differing, strict=True) if len(all_of) > 1) for one in parts]
    return costs(dict(zip(names, found.values(), strict=True)))


@click.command(cls=Command)
@click.option("--positions", type=ListOf(), help="Schemes joined by '+', or architectures (default: all).")
@options.size()
@click.option("--layers", type=click.IntRange(0), default=0, help="The number of layers (default: those of the size).")
@click.option("--vocab-size", type=click.IntRange(1), default=32768, show_default=True, help="Types of the vocabulary.")
@batches
@comparison
def command(positions, size, layers, vocab_size, lengths, tokens, precision, device, turns, output):
    """Measure what position encodings cost beside `nopos`: parameters, operations per token, time of a step.

    \b
    python -m lab bench schemes --lengths 128,512,1024 --tokens 1024 --output schemes        every encoding
    python -m lab bench schemes --positions bert_a,tupe_a,tupe_r --output target

    Step times need a machine that is otherwise idle. Results are written after every length, with a figure,
    OUTPUT.png.
    """
    about, encodings, rows = {"command": command_line(), **environment()}, cases(positions), []
    for setting in settings(Setting(size, layers, vocab=vocab_size, device=device), lengths, tokens, precision):
        rows += measure(encodings, setting, turns)
        page = write(output, about, rows, COLUMNS)
        save(draw(rows), f"{output}.png")
    click.echo(page)
