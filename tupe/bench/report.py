"""Tables of the results of `tupe bench step`, and the picture of all comparisons. L sequence length, N layers."""

import matplotlib.ticker
from matplotlib.figure import Figure

from ..common import plotting
from ..common.tables import TextTable
from .machine import facts

PAPER_TOKENS = 1_000_000 * 256 * 512  # updates x sequences x tokens
BASELINES = ("nopos", "bert_a", "fairseq", "hf", "hf-eager", "hf-flash", "modernbert")
ASSUMPTIONS = """\
FLOP per token of one training step: 6 per weight of a matrix product (2 forward, 4 backward); 12 C L per layer for
q . k and weights . v over the full length; LM head, and of ours the last layer after its attention, at the 15 % masked
tokens only (Hugging Face's BERT computes its head at all, which counts as time but not as FLOP). Not counted:
recomputation, embeddings, position terms, element-wise operations, the optimizer.

Every contender has the same sizes, tokens, masked positions, dropout 0.1 and precision (half: autocast with
float32 weights), and clips gradients at 1; ours and Hugging Face's use PyTorch's fused AdamW, fairseq's RoBERTa uses
fairseq's Adam, as their users do. Contenders take turns in one process, each turn in a new random order.
Times are medians over turns; `x NAME` is the median over turns of tokens/s divided by NAME's in the same turn. MiB:
the most that a contender's tensors take at once in a step, weights, gradients and moments included. Matrix peak: the
fastest square product of size 2048 (on a GPU 8192), three in every turn."""


def markdown(rows: list[dict], about: dict, devices: int) -> str:
    """A table per setting. devices: number of devices to project the paper's run to, or 0."""
    settings = dict.fromkeys(row["setting"] for row in rows)
    tables = [contenders([row for row in rows if row["setting"] == setting], devices) for setting in settings]
    return "\n".join([f"{facts(about)}\n", f"{ASSUMPTIONS}\n", *(table.markdown() for table in tables)])


def contenders(rows: list[dict], devices: int) -> TextTable:
    """Speed and memory in one setting."""
    baselines = [name for name in BASELINES if any(r["contender"] == name for r in rows) and len(rows) > 1]
    first = rows[0]
    title = (
        f"{first['mode']}, {first['layers']} layers, B = {first['batch']}, L = {first['length']}, "
        f"{first['device']}, {first['rounds']} turns; {first['flops_per_token'] / 1e6:.0f} MFLOP per token, "
        f"matrix peak {first['peak_flops'] / 1e9:.0f} GFLOP/s"
    )
    header = ["", "tokens/s", *(f"x {name}" for name in baselines), "forward ms", "backward ms", "optimizer ms", "MiB"]
    cells = []
    for r in rows:
        cells.append([r["contender"], f"{r['tokens_per_s']:.0f}"])
        cells[-1] += [f"{r['times_as_fast'][b]:.2f}" if b in r["times_as_fast"] else "1" for b in baselines]
        cells[-1] += [f"{1e3 * r[key]:.1f}" for key in ("forward_s", "backward_s", "optimizer_s")]
        cells[-1] += [f"{r['memory_mib']:.0f}", f"{100 * r['share_of_peak']:.0f} %"]
        cells[-1] += [f"{project(r['tokens_per_s'], devices):.1f}"] if devices else []
    return TextTable.plain([*header, "of peak", *[f"days on {devices}"] * bool(devices)], cells, title=title)


def project(tokens_per_s: float, devices: int) -> float:
    """Days of the paper's pre-training on `devices` devices of this speed, without loss by communication."""
    return PAPER_TOKENS / (tokens_per_s * devices) / 86400


def picture(rows: list[dict]) -> Figure:
    """A line per setting: the speed of the first contender over each of the others on a logarithmic axis."""
    first = rows[0]["contender"]
    ratios = {row["setting"]: row["times_as_fast"] for row in rows if row["contender"] == first}
    names = list(dict.fromkeys(name for others in ratios.values() for name in others))
    figure, (axis,) = plotting.curves(width=6, height=0.22 * len(ratios) + 0.8)
    for index, name in enumerate(names):
        points = [(others[name], row) for row, others in enumerate(ratios.values()) if name in others]
        look = {**plotting.style(index), "linestyle": "none", "markersize": 5}
        axis.plot(*zip(*points, strict=True), label=name, **look)
    axis.axvline(1, color="0.5", linewidth=0.8)
    axis.set_yticks(range(len(ratios)), list(ratios))
    axis.invert_yaxis()
    axis.set(xscale="log", xlabel=f"{first}: times as fast")
    axis.xaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=[1, 1.5, 2, 3, 4, 5, 7]))
    axis.xaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    axis.xaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    plotting.legend(figure, columns=5)
    return figure
