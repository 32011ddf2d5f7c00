"""The cost of each position encoding: parameters, arithmetic, and time of a training step, relative to `nopos`.

All encodings take turns in ONE model: embeddings, layers, LM head and their optimizer are the same objects; only the
`Positions` module (with its own optimizer) is exchanged before each step. So a difference in time is due to the
encoding, and two dozen encodings need the memory of one model.

B batch, L sequence length, N layers.
"""

import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from matplotlib.figure import Figure
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from ..backends import BACKENDS
from ..common import options
from ..common.architectures import ARCHITECTURES
from ..common.options import FILE, Command, ListOf
from ..common.plotting import COLOURS, curves, save
from ..common.tables import TextTable
from ..encoder import BLOCKS, Encoder, init_bert
from ..plugin.optim import AdamW
from ..positions import Dims, Positions, overrides
from ..schemes import SCHEMES
from .contenders import Contender, Setting
from .machine import PRECISIONS, environment, facts
from .turns import take_turns, write

SUMS = ["shaw+shaw_values"]  # combinations that no architecture has
CONTROL = "nopos, a second time"  # its difference from 1 is noise
PAPER_NAMES = {
    "bert_a": "BERT-A", "bert_r": "BERT-R", "bert_a_d": "BERT-A^d", "tupe_a_tie_cls": "TUPE-A tie-cls",
    "tupe_a": "TUPE-A", "tupe_r": "TUPE-R",
}  # fmt: skip


def cases(names: list[str] | None = None) -> dict[str, tuple[str, str]]:
    """{label: (position, cls)}, `nopos` first. names: architectures, or schemes (joined by "+") with [CLS] tied;
    default: every registered scheme, every architecture, and SUMS."""
    names = [*SCHEMES, *ARCHITECTURES, *SUMS] if names is None else names
    pairs = dict.fromkeys([("nopos", "tied"), *(ARCHITECTURES.get(name, (name, "tied")) for name in names)])
    paper_name = {pair: f" ({PAPER_NAMES[arch]})" for arch, pair in ARCHITECTURES.items()}
    return {p + ", [CLS] untied" * (cls != "tied") + paper_name.get((p, cls), ""): (p, cls) for p, cls in pairs}


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

    def step(self, name: str, precision: str, turn: int) -> list[float]:
        """Train for a step with one encoding; returns the seconds of its parts."""
        self.contender.model.encoder.positions, self.contender.optimizers = self.parts[name]
        self.contender.setting = replace(self.contender.setting, precision=precision)
        return self.contender.step(turn)


def shown(ours: list[float], theirs: list[float]) -> tuple[str, str]:
    """The ratios of two lists of seconds as text: the median (and range) over rounds of the ratio within a round, and
    the ratio of the fastest steps, which is more stable if disturbances come in bursts."""
    within = np.divide(ours, theirs)
    return f"{statistics.median(within):.3f} ({min(within):.2f} to {max(within):.2f})", f"{min(ours) / min(theirs):.3f}"


def rows(
    encodings: dict, setting: Setting, rounds: int, precisions: list[str], say: Callable[[str], Any] = print
) -> list[dict]:
    """One dict per encoding and precision ("t5", and "t5, bf16" in one after the first): parameters and operations in
    excess of those of `nopos`, and the seconds of all steps. In every round each encoding takes one step in each
    precision, `nopos` twice; an uncounted round comes first. encodings: {label: (position, cls)}, `nopos` first; say:
    called with a line after each round."""
    names = [*encodings, CONTROL]
    steps = {name + f", {kind}" * (kind != precisions[0]): (name, kind) for kind in precisions for name in names}
    stage = Stage({**encodings, CONTROL: next(iter(encodings.values()))}, setting)
    times = take_turns({row: partial(stage.step, *step) for row, step in steps.items()}, rounds, say=say)
    counted = {name: (parameters(*pair, setting), *flops(*pair, setting)) for name, pair in encodings.items()}
    base, results = counted[next(iter(encodings))], []
    for name, (encoding, _) in steps.items():
        extra = [a - b for a, b in zip(counted.get(encoding, base), base, strict=True)]
        results.append({
            "encoding": name, "parameters": extra[0], "products": extra[1], "element_wise": extra[2],
            "seconds": times[name].sum(axis=1).tolist(),
        })  # fmt: skip
    return results


def markdown(result: dict) -> str:
    """The tables, one per length, and TUPE's time relative to BERT-A's. result: {"about", "options", "lengths"}."""
    lines = [facts(result["about"]), "", facts(result["options"]), ""]
    for length, measured in result["lengths"].items():
        seconds = statistics.median(measured["rows"][0]["seconds"])
        lines += [
            f"L = {length}, B = {measured['batch']}; a step of `nopos` takes {seconds:.2f} s and "
            f"{measured['products'] / 1e6:.1f} MFLOP of products per token in the encoder",
            "",
        ]
        header = ["encoding", "extra parameters", "extra kFLOP per token: products", "element-wise"]
        cells = []
        for row in measured["rows"]:
            cells.append([row["encoding"], f"{row['parameters']:,}"])
            cells[-1] += [f"{row[kind] / 1e3:,.1f}" for kind in ("products", "element_wise")]
            cells[-1] += shown(row["seconds"], measured["rows"][0]["seconds"])
        lines += [TextTable.plain([*header, "step time: median (range)", "fastest"], cells).markdown()]
        lines += [*against_bert(measured["rows"]), ""]
    return "\n".join(lines)


def against_bert(rows: list[dict]) -> list[str]:
    """Sentences on TUPE's time relative to BERT-A's, where both were measured."""
    times = {row["encoding"]: row["seconds"] for row in rows}
    names = {paper: name for name in times for paper in PAPER_NAMES.values() if name.endswith(f"({paper})")}
    if "BERT-A" not in names:
        return []
    lines = []
    for paper in ("TUPE-A", "TUPE-R"):
        if paper in names:
            middle, fastest = shown(times[names[paper]], times[names["BERT-A"]])
            lines.append(f"{paper} / BERT-A: median {middle}, fastest {fastest}")
    return lines


def draw(result: dict) -> Figure:
    """The time of a step beside `nopos`, a panel per length: median and range over rounds, sorted by the medians at the
    longest length. result: {"about", "options", "lengths"}."""
    lengths = sorted(result["lengths"], key=int)
    figure, axes = curves(len(lengths), width=3.0, height=5.6, sharex=True, sharey=True)
    within = {}  # {length: {encoding: ratio of each round}}
    for length in lengths:
        rows = result["lengths"][length]["rows"]
        within[length] = {row["encoding"]: np.divide(row["seconds"], rows[0]["seconds"]) for row in rows}
    order = sorted(within[lengths[-1]], key=lambda name: statistics.median(within[lengths[-1]][name]))
    for axis, length in zip(axes, lengths, strict=True):
        for place, name in enumerate(order):
            values, colour = within[length][name], COLOURS[0 if name in ("nopos", CONTROL) else 1]
            axis.plot([min(values), max(values)], [place, place], color=colour, linewidth=1.2)
            axis.plot(statistics.median(values), place, marker="o", color=colour, markersize=4)
        axis.axvline(1, color=COLOURS[0], linewidth=0.6)
        axis.set_title(f"{length} tokens")
        axis.set_xlabel("time of a step / nopos")
    axes[0].set_yticks(range(len(order)), order, fontsize=7)
    return figure


# ---- the command


MACHINE = ("cpu", "cores", "threads", "gpu", "torch")  # of what `environment` tells, what a time depends on


def measured_before(path: Path, about: dict, settings: dict, encodings: dict) -> dict:
    """{length: results} of an earlier run. Raises ValueError if the file has other settings or encodings, or is of
    another machine."""
    result = json.loads(path.read_text()) if path.exists() else {"about": about, "options": settings, "lengths": {}}
    names = {row["encoding"] for part in result["lengths"].values() for row in part["rows"]} or {*encodings}
    if result["options"] != settings or not {*encodings} <= names:
        raise ValueError(f"{path} holds other measurements ({result['options']}); choose another --output")
    if different := [f"{key} {result['about'].get(key)}" for key in MACHINE if result["about"].get(key) != about[key]]:
        raise ValueError(f"{path} holds measurements with {', '.join(different)}; choose another --output")
    return result["lengths"]


@click.command(cls=Command)
@options.size()
@click.option("--layers", type=click.IntRange(0), default=0, help="The number of layers (default: those of the size).")
@click.option("--lengths", type=ListOf(int, least=1), default="128,512,1024", show_default=True, metavar="L,...",
              help="Tokens of a sequence.")  # fmt: skip
@click.option("--tokens", default=1024, show_default=True, help="Tokens of a batch.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Measured steps of each encoding.")
@click.option("--positions", type=ListOf(), help="Schemes joined by '+', or architectures (default: all).")
@click.option("--precision", type=ListOf(list(PRECISIONS)), default="float32", show_default=True,
              help="The precision, or two to compare in one model.")  # fmt: skip
@click.option("--threads", default=0, help="Threads of PyTorch; 0 takes its default.")
@options.vocab_size()
@click.option("--output", type=Path, default=Path("scheme_cost"), show_default=True,
              help="The files to write: OUTPUT.json, .md and .png.")  # fmt: skip
@click.option("--draw", "drawn", type=FILE, metavar="FILE.json",
              help="Measure nothing. Draw FILE.png from these measurements, and print their tables.")  # fmt: skip
def command(size, layers, lengths, tokens, rounds, positions, precision, threads, vocab_size, output, drawn):
    """Measure what position encodings cost beside `nopos`: parameters, operations per token, time of a step.

    \b
    tupe bench schemes                            base size, L = 128, 512, 1024, every encoding
    tupe bench schemes --lengths 512 --positions bert_a,tupe_a,tupe_r --rounds 9 --output target

    Step times need a machine that is otherwise idle. Results are written after every length; those that
    OUTPUT.json has already are not measured again.
    """
    if drawn:
        result = json.loads(drawn.read_text())
        save(draw(result), drawn.with_suffix(".png"))
        click.echo(markdown(result))
        return
    if threads:
        torch.set_num_threads(threads)
    encodings = cases(positions)
    base = Setting(size, layers, vocab=vocab_size)
    settings = {
        "size": size, "tokens": tokens, "rounds": rounds, "precision": ",".join(precision), "vocab": vocab_size,
        "layers": base.dims()[0], "encodings": len(encodings),
    }  # fmt: skip
    about = environment()
    earlier = measured_before(Path(f"{output}.json"), about, settings, encodings)
    result = {"about": about, "options": settings, "lengths": earlier}
    for length in [length for length in lengths if str(length) not in earlier]:
        setting = base.of_length(length, tokens)
        measured = rows(encodings, setting, rounds, precision, lambda line, L=length: click.echo(f"L={L} {line}"))
        products = flops("nopos", "tied", setting)[0]
        result["lengths"][str(length)] = {"batch": setting.batch, "products": products, "rows": measured}
        write(output, result, markdown(result), draw(result))
    click.echo(markdown(result))
