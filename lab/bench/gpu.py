"""What only a GPU can show, in one command of fifteen minutes: the most informative section first, every row saved.

B batch, L sequence length.
"""

import tupe.plugin  # noqa: F401  isort: skip  (first: keeps fairseq's import quiet)
import gc
import itertools
import json
import math
import multiprocessing
import re
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import torch

from tupe.common import options
from tupe.common.active import reason
from tupe.common.options import Command, ListOf
from tupe.common.tables import TextTable
from tupe.encoder import ModelConfig
from tupe.run.folder import write_atomically
from tupe.train.graphs import Graphs, capture
from tupe.train.pretrain import new_model

from . import step
from .contenders import HF, PEAK_SIZE, Contender, Setting, masked_batch, matrix_peak
from .instrument import ratios, timed
from .kernels import Case, attention_case
from .machine import PRECISIONS, environment

CONTEXT = multiprocessing.get_context("spawn")  # a process that was forked cannot use CUDA
SECTIONS = {}  # name -> Section, in order
UPDATES = 300  # for losses
MODES = [("bf16", False), ("fp16", True), ("bf16", True)]  # (precision, half weights); the second is the recipe's
OURS = ["tupe_r-triton", "tupe_r-sdpa", "nopos", "nopos-triton"]  # the third by flash attention
TINY = ["tupe_r-sdpa", "nopos"]  # of a rehearsal
NAMES = "out", "q", "k", "v", "bias"
KINDS = {  # of kernels, by their names; the first that fits
    "fused by inductor": r"^triton_", "attention": r"flash|fmha|attention|^_forward|^_backward_(q|kv|bias)",
    "products": r"gemm|cutlass|nvjet|xmma|::(add|b)?mm", "others": "",
}  # fmt: skip


class Trial(NamedTuple):
    folder: Path
    device: str  # "cuda", or "cpu" for a rehearsal at tiny sizes

    def pick(self, full: Any, tiny: Any) -> Any:
        return full if self.device == "cuda" else tiny

    def setting(self, length: int = 512, precision: str = "bf16", half: bool = False, tokens: int = 2**14) -> Setting:
        """Base size with so many tokens in a batch; or the size of the rehearsal."""
        sizes = self.pick(Setting(), Setting("tiny", vocab=60)).of_length(*self.pick((length, tokens), (8, 16)))
        return replace(sizes, precision=precision, half_weights=half, device=self.device)


class Section(NamedTuple):
    title: str
    seconds: int  # at most
    columns: list[str]  # of a row, on the page
    measure: Callable[[Trial], Iterator[dict]]  # its docstring stands on the page


def section(title: str, seconds: int, columns: str) -> Callable:
    def add(function: Callable) -> Callable:
        SECTIONS[function.__name__] = Section(title, seconds, columns.split(), function)
        return function

    return add


def tried(about: dict, measure: Callable[[], dict]) -> dict:
    """A row. What fails is a row too, but for faults of CUDA, after which a process can measure nothing more."""
    try:
        return {**about, **measure()}
    except Exception as error:
        if "CUDA error" in str(error):
            raise
        return {**about, "failed": reason(error)}


@section("Card", 20, "what value")
def card(trial: Trial) -> Iterator[dict]:
    """Rates in GB/s (of what is read and written) and TFLOP/s. The largest product is the peak of all shares."""
    yield from ({"what": name, "value": value} for name, value in environment().items() if value is not None)
    if trial.device == "cuda":
        query = "driver_version,power.limit,clocks.max.sm,clocks.max.mem,memory.total"
        told = subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], stdout=subprocess.PIPE)
        yield {"what": query, "value": told.stdout.decode().strip()}
    data = torch.zeros(trial.pick(2**30, 2**20), dtype=torch.uint8, device=trial.device)
    copy = torch.empty_like(data)
    works = {"copy": (2 * len(data) / 1e9, timed(trial.device, *[lambda: copy.copy_(data)] * 9))}
    for precision in ("bf16", "fp16"):
        product = matrix_peak(trial.setting(precision=precision))
        works[f"product, {precision}"] = 2 * PEAK_SIZE[trial.device] ** 3 / 1e12, product
    for name, (work, turn) in works.items():
        yield {"what": name, "value": work / np.min([turn(0) for _ in range(3)])}


# ---- attention


@section("Attention beside the plain path", 40, "path precision dropout length padded out q k v bias failed")
def equality(trial: Trial) -> Iterator[dict]:
    """Relative errors of the output and of gradients, to be below 4e-3 in fp16 and 3e-2 in bf16. With dropout, of what
    holds only if all kernels drop the same weights: out . out = v . dv, q . dq = k . dk, and rows of the bias' gradient
    sum to 0."""
    lengths = trial.pick([(512, 0), (509, 0), (448, 61)], [(9, 0), (9, 4)])
    ours = trial.pick([("triton", 0.0, True), ("triton", 0.1, True)], [("plain", 0.1, True)])
    paths = [*ours, ("sdpa", 0.0, True), ("sdpa", 0.0, False)]
    for (length, padded), precision, (path, dropout, biased) in itertools.product(lengths, ("bf16", "fp16"), paths):
        name = path + ", no bias" * (not biased)
        about = {"path": name, "precision": precision, "dropout": dropout, "length": length, "padded": padded}
        sizes = {"batch": 4, "length": length, "dtype": PRECISIONS[precision], "device": trial.device, "padded": padded}
        case = partial(attention_case, dropout=dropout, biased=biased, **sizes)
        yield tried(about, partial(identities if dropout else differences, case(path), case("plain")))


def differences(ours: Case, plain: Case) -> dict:
    ours.forward()
    plain.forward()
    grad = torch.randn_like(ours.out)
    pairs = [(ours.out, plain.out)]
    pairs += zip(*(torch.autograd.grad(case.out, case.inputs, grad) for case in (ours, plain)), strict=True)
    return {name: float((a - b).norm() / b.norm()) for name, (a, b) in zip(NAMES, pairs, strict=False)}


def identities(ours: Case, plain: Case) -> dict:
    ours.forward()
    (q, k, v, _), out = (x.detach().double() for x in ours.inputs), ours.out.detach()
    dq, dk, dv, dbias = torch.autograd.grad(ours.out, ours.inputs, out)
    of_v, of_q = (v * dv).sum() / out.double().square().sum() - 1, (q * dq).sum() / (k * dk).sum() - 1
    return {"q": abs(float(of_q)), "v": abs(float(of_v)), "bias": float(dbias.sum(-1).norm() / dbias.norm())}


@section("Attention by replay of a graph", 90, "path batch length dropout forward_s backward_s tflop_per_s failed")
def attention(trial: Trial) -> Iterator[dict]:
    """In bf16, without the host. TFLOP/s count seven products for a call, whatever a kernel computes again."""
    paths = [("triton", True), ("sdpa", True), ("sdpa", False), ("triton", False)]  # without a bias: flash attention
    cases = itertools.product(trial.pick((512, 509, 448, 128), (8,)), (0.1, 0.0), trial.pick(paths, paths[1:3]))
    for length, dropout, (path, biased) in cases:
        setting = trial.setting(length)
        about = {"path": path + ", no bias" * (not biased), "batch": setting.batch, "length": setting.length}
        sizes = setting.batch, setting.length, torch.bfloat16, trial.device, dropout
        case = attention_case(path, *sizes, biased=biased)
        yield tried({**about, "dropout": dropout}, partial(replayed, case, trial.device))


def replayed(case: Case, device: str) -> dict:
    calls = case.forward, lambda: (case.forward(), case.backward())
    forward, whole = (np.median(timed(device, *[graphed(call, device)] * 20)(0)).item() for call in calls)
    flop = 14 * case.out.numel() * case.out.size(2)  # out: [B, H, L, D]
    return {"forward_s": forward, "backward_s": whole - forward, "tflop_per_s": flop / 1e12 / whole}


def graphed(function: Callable, device: str) -> Callable:
    """The function as a CUDA graph, which takes no time of the host; on a CPU itself, after a first call too."""
    if device == "cpu":
        function()
        return function
    return capture(function)[0].replay


# ---- steps


def prepared(name: str, setting: Setting, way: str, **more) -> Contender:
    """way: eager, compiled (each layer by itself), graph (of forward and backward pass), or compiled graph. more: of
    our models' options."""
    contender = Contender(name, setting, **more)
    if "compiled" in way:
        torch._dynamo.config.recompile_limit = 64  # contenders share the code of a layer
        backend = {"backend": "inductor" if setting.device == "cuda" else "eager"}
        for part in contender.model.bert.encoder.layer if name in HF else (contender.model.encoder,):
            part.compile(**backend)
        if name not in HF:
            contender.model.lm_head.compile(dynamic=False, **backend)
    contender.step(0)
    if "graph" in way and setting.device == "cuda":
        record(contender)
    return contender


def record(contender: Contender) -> None:
    """Forward and backward pass become a replay, which writes the gradients where they were at the recording."""
    forward, backward, weights = contender.forward, contender.backward, list(contender.model.parameters())

    def passes() -> None:
        contender.model.zero_grad()  # or gradients would be added to
        forward()
        backward()

    def replay_all() -> None:
        replay()
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient
        if contender.setting.half_weights:  # fairseq's optimizer has to learn that there are new gradients
            contender.optimizers[0].backward(torch.zeros((), requires_grad=True))

    replay = graphed(passes, "cuda")
    gradients = [weight.grad for weight in weights]
    contender.forward, contender.backward = replay_all, lambda: None
    contender.step = timed("cuda", contender.forward, contender.backward, contender.update)


def host_seconds(contender: Contender) -> list[float]:
    """What the host takes to launch forward pass, backward pass and update, waits for the card's answers included."""
    launch, turns = timed("cpu", contender.forward, contender.backward, contender.update), []
    for turn in range(5):
        if contender.setting.device == "cuda":
            torch.cuda.synchronize()
        turns.append(launch(turn))
    return np.median(turns, axis=0).tolist()


def kernels_of(contender: Contender) -> list[dict]:
    """The kernels of a step, the longest first; on a CPU its operations."""
    with torch.profiler.profile() as traced:
        contender.step(0)
    found, on_card = [], contender.setting.device == "cuda"
    for event in traced.key_averages():
        if (event.device_type != torch.autograd.DeviceType.CPU) == on_card and not event.is_user_annotation:
            seconds = (event.self_device_time_total if on_card else event.self_cpu_time_total) / 1e6
            kind = next(kind for kind, names in KINDS.items() if re.search(names, event.key))
            found.append({"kernel": event.key, "kind": kind, "count": event.count, "seconds": seconds})
    return sorted(found, key=lambda row: -row["seconds"])


def measured(trial: Trial, names: list[str], setting: Setting, way: str = "eager") -> Iterator[dict]:
    """A row for each contender; they take turns."""
    torch._dynamo.reset()  # of a second length it would make code for all
    made, about, counters = {}, {}, torch._dynamo.utils.counters

    def prepare(name: str) -> dict:
        counters.clear()
        begin, made[name] = time.monotonic(), prepared(name, setting, way)
        found = {"graphs": counters["stats"]["unique_graphs"], "breaks": counters["graph_break"].total()}
        return {"prepared_s": time.monotonic() - begin, **found}

    for name in names:
        row = {**asdict(setting), "contender": name, "mode": setting.mode, "way": way}
        about[name] = tried(row, partial(prepare, name))
        if name not in made:
            yield about[name]
    rows = step.measure(list(made), setting, trial.pick(5, 1), make=lambda name, _: made[name]) if made else []
    bases = [row for row in rows if row["contender"] == "nopos"]
    for row in rows:
        contender = made[row["contender"]]
        nopos = next((np.median(ratios(base, row)).item() for base in bases), None)
        kernels, host = kernels_of(contender), host_seconds(contender)
        row["launches"], row["kernels_s"] = (sum(each[of] for each in kernels) for of in ("count", "seconds"))
        yield {**row, **about[row["contender"]], "host_s": host, "x_nopos": nopos}
    made.clear()
    gc.collect()  # contenders are in circles of references
    torch.cuda.empty_cache()


COLUMNS = "contender mode way length tokens_per_s share_of_peak x_nopos forward_s backward_s optimizer_s kernels_s "
COLUMNS += "launches host_s memory_mib failed"


@section("Eager steps", 150, COLUMNS)
def eager(trial: Trial) -> Iterator[dict]:
    """Medians in seconds, 16,384 tokens a step. `weights`: half weights with float32 copies, as `--fp16` makes them;
    `autocast`: float32 weights. host_s: what the host takes to launch forward pass, backward pass and update."""
    for length, mode in itertools.product(trial.pick((512, 128), (8,)), MODES):
        yield from measured(trial, trial.pick(OURS[: 4 if length == 512 else 3], TINY), trial.setting(length, *mode))


@section("Steps with compiled layers", 150, COLUMNS + " prepared_s graphs breaks")
def compiled(trial: Trial) -> Iterator[dict]:
    """Layer by layer, for one length, and our head with its loss; three graphs and no break are right. Hugging Face's
    BERT computes its head at all tokens, `hf-masked` at the masked ones; their heads are not compiled."""
    for half in (True, False):
        names = trial.pick([*OURS[:3], *["hf", "hf-masked"] * (not half)], TINY)
        yield from measured(trial, names, trial.setting(half=half), "compiled")


@section("Steps as CUDA graphs", 75, COLUMNS.replace("memory_mib ", "prepared_s "))
def graphs(trial: Trial) -> Iterator[dict]:
    """Forward and backward pass are replayed."""
    ways = [("compiled graph", 512, True), ("compiled graph", 128, True), ("graph", 512, False)]
    for way, length, half in trial.pick(ways, ways[:1]):
        yield from measured(trial, trial.pick(OURS[:3], TINY), trial.setting(length, half=half), way)


def best(trial: Trial) -> tuple[str, Setting, str]:
    """(contender, setting, way) of the fastest TUPE-R at L = 512 so far."""
    rows = [row for name in ("eager", "compiled", "graphs") for row in (saved(trial, name) or {"rows": []})["rows"]]
    rows = [row for row in rows if row["contender"] in OURS[:2] and row["length"] == trial.setting().length]
    row = {"contender": TINY[0], "precision": "bf16", "half_weights": False, "way": "eager"}
    row = max(rows, key=lambda row: row.get("tokens_per_s", 0), default=row)
    return row["contender"], trial.setting(precision=row["precision"], half=row["half_weights"]), row["way"]


@section("Profile of the fastest", 60, "contender mode way kind kernel count seconds")
def profile(trial: Trial) -> Iterator[dict]:
    """A step's kernels."""
    name, setting, way = best(trial)
    kernels = kernels_of(prepared(name, setting, way))
    yield from ({"contender": name, "mode": setting.mode, "way": way, **kernel} for kernel in kernels)


@section("65,536 tokens a step", 60, COLUMNS)
def large(trial: Trial) -> Iterator[dict]:
    """As the fastest so far."""
    name, setting, way = best(trial)
    yield from measured(trial, [name, "nopos"], replace(setting, batch=trial.setting(tokens=2**16).batch), way)


@section(f"Losses of {UPDATES} updates", 120, "mode way update loss difference failed")
def losses(trial: Trial) -> Iterator[dict]:
    """Held-out losses of a tiny TUPE-R without dropout, trained on made-up text, and their differences from eager
    float32, which have to stay within 0.02."""
    expected, ways = {}, [("float32", False, "eager"), *((*mode, "eager") for mode in MODES), (*MODES[2], "compiled")]
    for precision, half, way in ways:
        setting = Setting("tiny", 0, *trial.pick((64, 64), (16, 2)), 100, precision, trial.device, half)
        row = tried({"mode": setting.mode, "way": way}, partial(train, setting, way, trial.pick(UPDATES, 9)))
        found = row.pop("losses", {})
        for update, loss in found.items():
            yield {**row, "update": update, "loss": loss, "difference": loss - expected.setdefault(update, loss)}
        if not found:
            yield row


@section("CUDA graphs in training", 75, "way update loss difference failed")
def loop(trial: Trial) -> Iterator[dict]:
    """Losses of a tiny TUPE-R without dropout in bf16 autocast, trained on made-up text: eager, compiled, and by the
    replays of `--compile graphs`, with their differences from eager, which have to stay within 0.02."""
    expected = {}
    for way in ("eager", "compiled", "graphs")[: trial.pick(3, 1)]:
        row = tried({"way": way}, partial(trained_by, way, trial, trial.pick(UPDATES, 9)))
        for update, loss in row.pop("losses", {}).items():
            yield {**row, "update": update, "loss": loss, "difference": loss - expected.setdefault(update, loss)}
        if "failed" in row:
            yield row


def trained_by(way: str, trial: Trial, updates: int) -> dict:
    """{"losses": {update: mean loss of the batch}}, of lengths in turns."""
    torch._dynamo.reset()
    config = ModelConfig(layers=2, width=128, heads=2, ffn=512, max_positions=128, dropout=0.0, attention_dropout=0.0)
    model = new_model(config, 100, 1, way != "eager").to(trial.device)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), {}

    def passes(inputs: dict, count: torch.Tensor) -> torch.Tensor:
        with torch.autocast(trial.device, torch.bfloat16):
            total = model(**inputs)
        (total / count).backward()
        return total.detach()

    step = Graphs(passes, model) if way == "graphs" else passes
    for update in range(1, updates + 1):
        setting = Setting("tiny", 0, (64, 128)[update % 2], trial.pick(64, 2), 100, device=trial.device)
        tokens, targets = made_up(setting, update)
        indices = targets.flatten().ne(1).nonzero().squeeze(1)
        inputs = {"input_ids": tokens, "output_indices": indices, "labels": targets.flatten()[indices]}
        inputs["num_tokens"] = tokens.numel()
        total = step(model.padded(**inputs) if way == "graphs" else inputs, torch.tensor(len(indices)).to(trial.device))
        optimizer.step()
        optimizer.zero_grad(set_to_none=way != "graphs")
        if update % (updates // 3) == 0:
            losses[update] = float(total) / len(indices)
    return {"losses": losses}


def train(setting: Setting, way: str, updates: int) -> dict:
    """{"losses": {update: loss of held-out text}} at every third of the updates."""
    contender, found = prepared("tupe_r-sdpa", setting, way, dropout=0.0, attention_dropout=0.0), {}
    for update in range(1, updates + 1):
        for group in contender.torch_optimizer.param_groups:
            group["lr"] = 1e-3 * min(1, 10 * update / updates)
        contender.take(*made_up(setting, update))
        contender.step(update)
        if update % (updates // 3) == 0:
            contender.take(*made_up(setting, updates + 1))
            contender.forward()
            found[update] = float(contender.sum) / int(contender.masked.sum())
    return {"losses": found}


def made_up(setting: Setting, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets; of two neighbours the second is up to three greater."""
    generator = torch.Generator().manual_seed(number)
    steps = torch.randint(1, 4, (setting.batch, setting.length), generator=generator)
    steps[:, 0] = torch.randint(setting.vocab, (setting.batch,), generator=generator)
    return masked_batch(setting, 5 + steps.cumsum(1) % (setting.vocab - 6), number)


# ---- the command


def saved(trial: Trial, name: str) -> dict | None:
    """What there is of a section on this device; its "end" is "complete", or why it failed, or None."""
    path = trial.folder / f"{name}.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    return found if found.get("device") == trial.device else None


def run(trial: Trial, name: str) -> str | None:
    """Measure a section, save it anew with every row, and say why it failed."""
    about, begin, rows = environment(), time.monotonic(), []
    before = (saved(trial, name) or {"rows": []})["rows"]  # of a section that did not end; kept until there are more
    if trial.device == "cpu":
        PEAK_SIZE["cpu"] = 64  # of this process, which rehearses

    def save(end: str | None) -> str | None:
        content = {"device": trial.device, "date": about["date"], "on": about["gpu"] or about["cpu"], "end": end}
        shown = rows if end == "complete" else max(rows, before, key=len)
        content = {**content, "seconds": round(time.monotonic() - begin), "rows": shown}
        write_atomically(trial.folder / f"{name}.json", json.dumps(content, indent=1, allow_nan=False) + "\n")
        return end

    try:
        save(None)
        torch._dynamo.reset()
        for row in SECTIONS[name].measure(trial):
            broken = {key: str(x) for key, x in row.items() if isinstance(x, float) and not math.isfinite(x)}
            rows.append({**row, **broken})
            save(None)
    except Exception as error:
        traceback.print_exc()
        return save(reason(error))
    save("complete")


def write_page(trial: Trial, reasons: dict[str, str]) -> None:
    """From the rows alone, and from why sections have none."""
    origin = "Written by `python -m lab bench gpu`; started again, it measures what is missing."
    lines = ["# What a GPU shows", "", origin]
    if trial.device == "cpu":
        lines += ["", "**A rehearsal on a CPU, at tiny sizes: no figure here says anything about GPUs.**"]
    for name, (title, _, columns, measure) in SECTIONS.items():
        lines += ["", f"## {title}", "", " ".join(measure.__doc__.split()), ""]
        content = saved(trial, name) or {"rows": []}
        columns = [column for column in columns if any(row.get(column) is not None for row in content["rows"])]
        if columns:
            rows = [[cell(row.get(column)) for column in columns] for row in content["rows"][:40]]
            lines.append(TextTable.plain(columns, rows, align="l" * len(columns)).markdown())
        if "end" in content:
            lines.append("Measured {date} on {on} in {seconds} s.".format_map(content))
        if content.get("end") != "complete":
            lines.append(f"Not complete: {content.get('end') or reasons.get(name, 'not measured')}.")
    write_atomically(trial.folder / "gpu.md", "\n".join(lines) + "\n")


def cell(value: object) -> str:
    if isinstance(value, list):
        return " + ".join(map(cell, value))
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


@click.command(cls=Command)
@options.output("The folder of the page gpu.md and of each section's rows, SECTION.json.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cuda", show_default=True,
              help="Where to measure; on the CPU it is a rehearsal at tiny sizes.")  # fmt: skip
@click.option("--minutes", default=15.0, show_default=True,
              help="Sections that might last longer wait for the next start; 0 only writes the page.")  # fmt: skip
@click.option("--sections", type=ListOf(list(SECTIONS)),
              help=f"Measure only these of {', '.join(SECTIONS)}; one alone has all of the time.")  # fmt: skip
def command(output, device, minutes, sections):
    """Measure on a GPU what could only be computed without one; write all rows, and a page.

    \b
    python -m lab bench gpu --output runs/gpu               on an otherwise idle card; again: what is missing
    python -m lab bench gpu --output try --device cpu       a rehearsal
    """
    if device == "cuda" and minutes and not torch.cuda.is_available():
        raise ValueError("--device cuda: this PyTorch sees no GPU; valid here: cpu")
    trial, begin, reasons, pool = Trial(output.resolve(), device), time.monotonic(), {}, None
    output.mkdir(parents=True, exist_ok=True)
    for name in sections or SECTIONS:
        left = 60 * minutes - (time.monotonic() - begin)
        seconds = left if sections and len(sections) == 1 else SECTIONS[name].seconds
        if (content := saved(trial, name)) and content["end"] == "complete":
            continue
        if left < seconds:
            reasons[name] = f"it takes up to {seconds} s, and {max(0, left):.0f} s were left"
            continue
        click.echo(f"{SECTIONS[name].title} ...")
        if pool is None:  # one process until a section fails: a fault of CUDA ends all that it could still measure
            pool = CONTEXT.Pool(1)
            pool.apply(saved, (trial, name))  # imports, in no section's time
        try:
            failed = pool.apply_async(run, (trial, name)).get(seconds)
        except multiprocessing.TimeoutError:
            failed = f"longer than {seconds:.0f} s"
        if failed:
            reasons[name] = failed
            pool.terminate()
            pool = None
        write_page(trial, reasons)
    write_page(trial, reasons)
    whole = sum((saved(trial, name) or {}).get("end") == "complete" for name in SECTIONS)
    click.echo(f"{output / 'gpu.md'}: {whole} of {len(SECTIONS)} sections")
    if reasons:
        listed = "; ".join(f"{name} ({why})" for name, why in reasons.items())
        raise click.ClickException(f"not measured: {listed}; started again, the command measures these")
