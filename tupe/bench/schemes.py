"""What each position encoding costs: parameters, arithmetic, and time of a training step, relative to `nopos`.

All encodings take turns in ONE model: embeddings, layers, LM head and their optimizer are the same objects, only the
`Positions` module (with an optimizer of its own) is exchanged before each step. So a difference in time is the
encoding's, and two dozen encodings need the memory of one model.

B batch, L sequence length, N layers.
"""

import json
import random
import statistics
import time
from dataclasses import replace
from pathlib import Path

import click
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from .. import options
from ..architectures import ARCHITECTURES
from ..encoder import LAYERS, Encoder, init_bert
from ..options import Command, ListOf
from ..plugin.optim import AdamW
from ..positions import Positions
from ..schemes import SCHEMES
from ..tables import Table
from . import step as bench

SUMS = ["shaw+shaw_values"]  # beside those of the architectures
CONTROL = "nopos, a second time"  # what it differs from 1 by is noise
PAPER_NAMES = {
    "bert_a": "BERT-A", "bert_r": "BERT-R", "bert_a_d": "BERT-A^d", "tupe_a_tie_cls": "TUPE-A tie-cls",
    "tupe_a": "TUPE-A", "tupe_r": "TUPE-R",
}  # fmt: skip


def cases(names=None):
    """{label: (position, cls)}, `nopos` first. names: architectures, or schemes (joined by "+") with [CLS] tied;
    default: every registered scheme, every architecture, and SUMS."""
    names = [*SCHEMES, *ARCHITECTURES, *SUMS] if names is None else names
    pairs = dict.fromkeys([("nopos", "tied"), *(ARCHITECTURES.get(name, (name, "tied")) for name in names)])
    called = {pair: PAPER_NAMES[arch] for arch, pair in ARCHITECTURES.items()}
    return {label(*pair) + (f" ({called[pair]})" if pair in called else ""): pair for pair in pairs}


def label(position, cls):
    return position if cls == "tied" else f"{position}, [CLS] untied"


def dims(setting):
    layers, width, heads, _ = setting.dims()
    return LAYERS["transformer"].dims(setting.length, width, heads, layers)


def parameters(position, cls, setting):
    """Of the encoding alone, for L positions."""
    with torch.device("meta"):
        return sum(p.numel() for p in Positions(position, dims(setting), cls).parameters())


# ---- arithmetic


class ElementWise(TorchDispatchMode):
    """Counts one operation per result of an element-wise floating-point operation, one per summand of a sum."""

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


def flops(position, cls, setting):
    """(of products, element-wise) operations per token, forward and backward, of the encoder with this encoding.

    Counted on PyTorch's meta device, not derived: products by `torch.utils.flop_counter` (2 per multiplication and
    addition), the rest by `ElementWise`, which leaves out softmax, layer norm, GELU and dropout: these are the same
    for every encoding. It is the arithmetic of the plain path; what a faster one computes twice is not counted. Work
    that is shared by the batch is divided by B.
    """
    layers, width, heads, ffn = setting.dims()
    sizes = {"layers": layers, "width": width, "heads": heads, "ffn": ffn, "max_positions": setting.length}
    plain = {"attention": "plain", "dropout": 0.0, "attention_dropout": 0.0}
    products, rest = FlopCounterMode(display=False), ElementWise()
    with torch.device("meta"):
        encoder = Encoder(setting.vocab, 1, position=position, cls=cls, **plain, **sizes).train()
        tokens = torch.zeros(setting.batch, setting.length, dtype=torch.long)
        with products, rest:
            features, _ = encoder(tokens, padded=False)
            features.backward(torch.empty_like(features))
    return products.get_total_flops() / tokens.numel(), rest.total / tokens.numel()


# ---- time


class Together:
    """Several optimizers as one."""

    def __init__(self, *optimizers):
        self.optimizers = optimizers

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none=True):
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)


class Stage:
    """One model whose position encoding is exchanged."""

    def __init__(self, wanted, setting):
        self.contender = bench.Contender("nopos", setting)
        shared = self.contender.optimizer
        self.parts = {}
        for name, (position, cls) in wanted.items():
            positions = Positions(position, dims(setting), cls).apply(init_bert).to(setting.device)
            own = list(positions.parameters())
            self.parts[name] = positions, Together(shared, AdamW(own, lr=1e-4)) if own else shared

    def step(self, name):
        """Seconds of a training step with one encoding."""
        self.contender.model.encoder.positions, self.contender.optimizer = self.parts[name]
        return sum(self.contender.step())


def measure(wanted, setting, rounds, say=print):
    """{label: seconds [rounds]}. In every round each encoding takes one step, in a new random order, `nopos` twice; a
    round that is not counted comes first. say: is told how far it is."""
    reference = next(iter(wanted))
    wanted = {**wanted, CONTROL: wanted[reference]}
    stage, order, shuffle = Stage(wanted, setting), list(wanted), random.Random(0)
    times, start = {name: [] for name in wanted}, time.perf_counter()
    for turn in range(rounds + 1):
        shuffle.shuffle(order)
        for index, name in enumerate(order):
            seconds = stage.step(name)
            if turn:
                times[name].append(seconds)
            done, total = turn * len(order) + index + 1, (rounds + 1) * len(order)
            left = (time.perf_counter() - start) / done * (total - done)
            state = f"round {turn}/{rounds}" if turn else "warm-up"
            say(f"L={setting.length} {state}: {name} {seconds:.2f} s; {left / 60:.0f} min left for this length")
    return times


def ratios(ours, theirs):
    """How two lists of seconds compare, in words: the median over rounds of the ratio within a round, and the ratio of
    the fastest steps, which is the steadier one where what disturbs comes in bursts."""
    within = [a / b for a, b in zip(ours, theirs, strict=True)]
    return f"{statistics.median(within):.3f} ({min(within):.2f} to {max(within):.2f})", f"{min(ours) / min(theirs):.3f}"


def rows(wanted, setting, rounds, say=print):
    """One dict per encoding: what `nopos` has is subtracted from parameters and operations, and divides times."""
    times = measure(wanted, setting, rounds, say)
    reference = next(iter(wanted))
    counted = {name: (parameters(*pair, setting), *flops(*pair, setting)) for name, pair in wanted.items()}
    base, found = counted[reference], []
    for name in times:
        extra = [a - b for a, b in zip(counted.get(name, base), base, strict=True)]
        found.append({
            "encoding": name, "parameters": extra[0], "products": extra[1], "element_wise": extra[2],
            "seconds": times[name],
        })  # fmt: skip
    return found


def setting_of(base, length, tokens):
    return replace(base, length=length, batch=max(1, tokens // length))


def markdown(result):
    """The tables, one per length, and what TUPE costs beside BERT-A. result: {"about", "options", "lengths"}."""
    about = ", ".join(f"{key} {value}" for key, value in result["about"].items() if value is not None)
    lines = [about, "", ", ".join(f"{key} {value}" for key, value in result["options"].items()), ""]
    for length, found in result["lengths"].items():
        seconds = statistics.median(found["rows"][0]["seconds"])
        lines += [
            f"L = {length}, B = {found['batch']}; a step of `nopos` takes {seconds:.2f} s and "
            f"{found['products'] / 1e6:.1f} MFLOP of products per token in the encoder",
            "",
        ]
        header = ["encoding", "extra parameters", "extra kFLOP per token: products", "element-wise"]
        cells = []
        for row in found["rows"]:
            cells.append([row["encoding"], f"{row['parameters']:,}"])
            cells[-1] += [f"{row[kind] / 1e3:,.1f}" for kind in ("products", "element_wise")]
            cells[-1] += ratios(row["seconds"], found["rows"][0]["seconds"])
        lines += [Table.plain([*header, "step time: median (range)", "fastest"], cells).markdown()]
        lines += [*against_bert(found["rows"]), ""]
    return "\n".join(lines)


def against_bert(found):
    """Sentences on TUPE's time relative to BERT-A's, where both were measured."""
    times = {row["encoding"]: row["seconds"] for row in found}
    names = {paper: name for name in times for paper in PAPER_NAMES.values() if name.endswith(f"({paper})")}
    if "BERT-A" not in names:
        return []
    lines = []
    for paper in ("TUPE-A", "TUPE-R"):
        if paper in names:
            middle, fastest = ratios(times[names[paper]], times[names["BERT-A"]])
            lines.append(f"{paper} / BERT-A: median {middle}, fastest {fastest}")
    return lines


# ---- the command


def read_earlier(path, settings, wanted):
    """{length: results} of an earlier run that measured the same; {} if there is none.

    Raises ValueError if the file holds something else.
    """
    if not path.exists():
        return {}
    earlier = json.loads(path.read_text())
    if earlier["options"] != settings:
        raise ValueError(f"{path} holds other measurements ({earlier['options']}); choose another --output")
    for length, measured in earlier["lengths"].items():
        names = [row["encoding"] for row in measured["rows"]]
        if {*names} != {*wanted, CONTROL}:
            there = ", ".join(names)
            raise ValueError(f"{path} holds other encodings ({there} at L={length}); choose another --output")
    return earlier["lengths"]


@click.command(cls=Command)
@options.size()
@click.option("--layers", type=click.IntRange(0), default=0, help="default: those of the size")
@click.option("--lengths", type=ListOf(int), default="128,512,1024", show_default=True, metavar="L,...")
@click.option("--tokens", default=1024, show_default=True, help="tokens of a batch; B = tokens / L")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="measured steps of each encoding")
@click.option("--positions", type=ListOf(), help="schemes joined by '+', or architectures; default: all")
@click.option("--precision", type=click.Choice(["float32", "bf16"]), default="float32", show_default=True)
@click.option("--threads", default=0, help="0: PyTorch's default")
@options.vocab_size()
@click.option("--output", type=Path, default=Path("scheme_cost"), show_default=True, help="OUTPUT.json and .md")
def command(size, layers, lengths, tokens, rounds, positions, precision, threads, vocab_size, output):
    """What position encodings cost relative to `nopos`: parameters, operations per token, time of a training step.

    \b
    tupe bench schemes                            base size, L = 128, 512, 1024, every encoding
    tupe bench schemes --lengths 512 --positions bert_a,tupe_a,tupe_r --rounds 9 --output target

    Step times need a machine that does nothing else. Lengths that OUTPUT.json holds already are not measured again.
    """
    if threads:
        torch.set_num_threads(threads)
    wanted = cases(positions)
    base = bench.Setting(size, layers, vocab=vocab_size, precision=precision)
    settings = {
        "size": size, "tokens": tokens, "rounds": rounds, "precision": precision, "vocab": vocab_size,
        "layers": base.dims()[0], "encodings": len(wanted),
    }  # fmt: skip
    path = output.with_suffix(".json")
    earlier = read_earlier(path, settings, wanted)
    result = {"about": bench.environment(), "options": settings, "lengths": earlier}
    output.parent.mkdir(parents=True, exist_ok=True)
    for length in lengths:
        if str(length) in result["lengths"]:
            continue
        setting = setting_of(base, length, tokens)
        measured = rows(wanted, setting, rounds, bench.print_now)
        products = flops("nopos", "tied", setting)[0]
        result["lengths"][str(length)] = {"batch": setting.batch, "products": products, "rows": measured}
        path.write_text(json.dumps(result, indent=1) + "\n")
        output.with_suffix(".md").write_text(markdown(result))
    click.echo(markdown(result))
