"""Tables and a picture of the results of `step.run`. L sequence length, N layers."""

import statistics

import matplotlib.ticker
from matplotlib.figure import Figure

from ..common import plotting
from ..common.tables import Table
from .machine import facts

PAPER_TOKENS = 1_000_000 * 256 * 512  # updates x sequences x tokens
BASELINES = ("nopos", "bert_a", "fairseq", "hf", "hf-eager", "hf-flash")
ASSUMPTIONS = """\
FLOP per token of one training step: 6 per weight of a matrix product (2 forward, 4 backward); 12 C L per layer for
q . k and weights . v over the full length; LM head, and of ours the last layer after its attention, at the 15 % masked
tokens only (Hugging Face's BERT computes its head at all, which counts as time but not as FLOP). Not counted:
recomputation, embeddings, position terms, element-wise operations, the optimizer.

Every contender has the same sizes, tokens, masked positions, dropout 0.1 and precision (bf16: autocast with float32
weights), and clips gradients at 1; ours and Hugging Face's use PyTorch's fused AdamW, fairseq's RoBERTa uses
fairseq's Adam, as their users do. Contenders take turns, each in a new random order: first a step that is not timed,
because contenders release unused memory between turns, then a step that is timed.
Times are medians over turns; `x NAME` is the median over turns of tokens/s divided by NAME's in the same turn. MiB:
peak memory of the contender's process (on a GPU: allocated) beyond the libraries. Matrix peak: the fastest square
product of size 2048 (on a GPU 8192), three in every turn."""


def markdown(rows: list[dict], about: dict, devices: int) -> str:
    """The tables: one per setting, the growth of cost, bf16 against float32. devices: number of devices to project the
    paper's run to, or 0."""
    parts = [f"{facts(about)}\n", f"{ASSUMPTIONS}\n"]
    settings = dict.fromkeys((r["precision"], r["length"], r["layers"]) for r in rows)
    for setting in settings:
        part = [r for r in rows if (r["precision"], r["length"], r["layers"]) == setting]
        parts.append(contenders(part, devices).markdown())
    tables = [*growth(rows, "length", "layers"), *growth(rows, "layers", "length"), *precisions(rows)]
    return "\n".join(parts + [table.markdown() for table in tables])


def contenders(rows: list[dict], devices: int) -> Table:
    """Speed and memory in one setting."""
    baselines = [name for name in BASELINES if any(r["contender"] == name for r in rows) and len(rows) > 1]
    first = rows[0]
    title = (
        f"{first['precision']}, {first['layers']} layers, B = {first['batch']}, L = {first['length']}, "
        f"{first['device']}, {first['rounds']} turns; {first['flops_per_token'] / 1e6:.0f} MFLOP per token, "
        f"matrix peak {first['peak_flops'] / 1e9:.0f} GFLOP/s"
    )
    header = ["", "tokens/s", *(f"x {name}" for name in baselines), "forward s", "backward s", "optimizer s", "MiB"]
    cells = []
    for r in rows:
        cells.append([r["contender"], f"{r['tokens_per_s']:.0f}"])
        cells[-1] += [f"{r['times_as_fast'][b]:.2f}" if b in r["times_as_fast"] else "1" for b in baselines]
        cells[-1] += [f"{r[key]:.2f}" for key in ("forward_s", "backward_s", "optimizer_s")]
        cells[-1] += [f"{r['memory_mib']:.0f}", f"{100 * r['share_of_peak']:.0f} %"]
        cells[-1] += [f"{project(r['tokens_per_s'], devices):.1f}"] if devices else []
    return Table.plain([*header, "of peak", *[f"days on {devices}"] * bool(devices)], cells, title=title)


def growth(rows: list[dict], key: str, fixed: str) -> list[Table]:
    """Tables, one per precision: microseconds per token by `key`, at the most common value of `fixed`."""
    symbol = {"length": "L", "layers": "N"}
    tables = []
    for precision in dict.fromkeys(r["precision"] for r in rows):
        part = [r for r in rows if r["precision"] == precision]
        at = most_common(part, fixed)
        part = [r for r in part if r[fixed] == at]
        values = sorted({r[key] for r in part})
        if len(values) < 2:
            continue
        cells = []
        for name in dict.fromkeys(r["contender"] for r in part):
            cost = {r[key]: 1e6 / r["tokens_per_s"] for r in part if r["contender"] == name}
            cells.append([name, *(f"{cost[v]:.0f}" if v in cost else "" for v in values)])
        title = f"Microseconds per token by {symbol[key]}, {symbol[fixed]} = {at}, {precision}"
        tables.append(Table.plain(["", *(f"{symbol[key]} = {value}" for value in values)], cells, title=title))
    return tables


def most_common(rows: list, key: str) -> int:
    """The value of `key` that most rows have."""
    return statistics.mode(r[key] for r in rows)


def precisions(rows: list[dict]) -> list:
    """A table of bf16's tokens/s divided by float32's, where both were measured; [] if they were not."""
    keys = ("contender", "length", "layers", "batch")
    cells = []
    for r in rows:
        for half in rows:
            if (r["precision"], half["precision"]) == ("float32", "bf16") and all(r[k] == half[k] for k in keys):
                times = [half[k] / r[k] for k in ("tokens_per_s", "peak_flops")]
                cells.append([r["contender"], str(r["length"]), str(r["layers"]), *(f"{x:.2f}" for x in times)])
    header = ["", "L", "N", "x float32", "matrix peak x float32"]
    title = "bf16 against float32 (measured one after the other)"
    return [Table.plain(header, cells, title=title)] if cells else []


def project(tokens_per_s: float, devices: int) -> float:
    """Days of the paper's pre-training on `devices` devices of this speed, without loss by communication."""
    return PAPER_TOKENS / (tokens_per_s * devices) / 86400


def picture(rows: list[dict]) -> Figure:
    """Tokens per second against L and against N, a line per contender and precision."""
    figure, axes = plotting.curves(2, sharey=True)
    layers, length = most_common(rows, "layers"), most_common(rows, "length")
    names = list(dict.fromkeys(r["contender"] for r in rows))
    dashes = {"float32": "-", "bf16": "--"}
    for axis, key, fixed, value in ((axes[0], "length", "layers", layers), (axes[1], "layers", "length", length)):
        part = [r for r in rows if r[fixed] == value]
        for name, precision in dict.fromkeys((r["contender"], r["precision"]) for r in rows):
            curve = [r for r in part if (r["contender"], r["precision"]) == (name, precision)]
            points = sorted((r[key], r["tokens_per_s"]) for r in curve)
            style = {**plotting.style(names.index(name)), "linestyle": dashes[precision]}
            axis.plot([x for x, _ in points], [y for _, y in points], label=f"{name} {precision}", **style)
        title = {"length": f"N = {layers}", "layers": f"L = {length}"}[key]
        axis.set(xlabel={"length": "L", "layers": "N"}[key], xscale="log", title=title, ylim=(0, None))
        axis.set_xticks(sorted({r[key] for r in part}), minor=False)
        axis.get_xaxis().set_major_formatter(matplotlib.ticker.ScalarFormatter())
        axis.minorticks_off()
    axes[0].set_ylabel("tokens / s")
    plotting.legend(figure, columns=4)
    return figure
