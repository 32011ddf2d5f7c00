"""What only a GPU can show, in one command of fifteen minutes: the most informative part first, every row saved.

B batch, L sequence length.
"""

import tupe.plugin  # noqa: F401  isort: skip  (first: keeps fairseq's import quiet)
import itertools
import json
import math
import multiprocessing
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import torch

from tupe.common import options
from tupe.common.active import reason
from tupe.common.options import Command, ListOf
from tupe.common.record import write_atomically
from tupe.common.tables import TextTable

from . import kernels, step
from .contenders import PEAK_SIZE, Setting, matrix_peak
from .instrument import ratios, timed
from .machine import environment

CONTEXT = multiprocessing.get_context("spawn")  # a process that was forked cannot use CUDA
PARTS = {}  # name -> Part, in order
MODES = [("bf16", False), ("fp16", True), ("bf16", True)]  # (precision, half weights); the second is the recipe's


class Trial(NamedTuple):
    folder: Path
    device: str  # "cuda", or "cpu" for a rehearsal at tiny sizes

    def pick(self, full: Any, tiny: Any) -> Any:
        return full if self.device == "cuda" else tiny

    def setting(self, length: int = 512, precision: str = "bf16", half: bool = False, tokens: int = 2**14) -> Setting:
        """Of base size, so many tokens in a batch; or the rehearsal's."""
        sizes = self.pick(Setting(), Setting("tiny", vocab=60)).of_length(*self.pick((length, tokens), (8, 16)))
        return replace(sizes, precision=precision, half_weights=half, device=self.device)


class Part(NamedTuple):
    title: str
    seconds: int  # at most
    columns: list[str]  # of a row, on the page
    measure: Callable[[Trial], Iterator[dict]]  # its docstring stands on the page


def part(title: str, seconds: int, columns: str) -> Callable:
    def add(function: Callable) -> Callable:
        PARTS[function.__name__] = Part(title, seconds, columns.split(), function)
        return function

    return add


@part("Card", 20, "what value")
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


@part("Operations", 90, "setting contender forward_ms backward_ms")
def operations(trial: Trial) -> Iterator[dict]:
    """Of 16,384 tokens in bf16, in turns: products, dropout, attention with a bias by both fused paths. That they are
    right on a card, `tests/test_attention.py -k cuda` tests."""
    paths, lengths = trial.pick((["triton", "sdpa"], [512, 509, 448, 128]), (["sdpa"], [8]))
    for row in kernels.measure(paths, lengths, trial.pick(2**14, 16), "bf16", trial.device, trial.pick(20, 2)):
        forward, backward = row["ms"]
        yield {**row, "forward_ms": forward, "backward_ms": backward}


COLUMNS = "contender mode length tokens_per_s share_of_peak x_nopos forward_s backward_s optimizer_s memory_mib failed"


def measured(trial: Trial, names: list[str], setting: Setting) -> Iterator[dict]:
    """A row for each contender; they take turns. The one that others are compared with is the last. What fails is a row
    too, but for faults of CUDA, after which a process can measure nothing more."""
    torch._dynamo.reset()  # of a second length it would make code for all
    try:
        rows = step.measure(names, setting, trial.pick(5, 1))
    except Exception as error:
        if "CUDA error" in str(error):
            raise
        rows = []
        yield {"contender": " beside ".join(names), "mode": setting.mode, "length": setting.length,
               "failed": reason(error)}  # fmt: skip
    for row in rows:
        yield {**row, "x_nopos": np.median(ratios(rows[-1], row)).item()}


@part("Eager steps", 150, COLUMNS)
def eager(trial: Trial) -> Iterator[dict]:
    """Medians in seconds, 16,384 tokens a step. `weights`: half weights with float32 copies, as `--fp16` makes them;
    `autocast`: float32 weights."""
    names = trial.pick(["tupe_r-sdpa", "tupe_r-triton"], ["tupe_r-sdpa"])
    for name, length, mode in itertools.product(names, trial.pick((512, 128), (8,)), MODES):
        yield from measured(trial, [name, "nopos"], trial.setting(length, *mode))


@part("Steps with compiled layers", 150, COLUMNS)
def compiled(trial: Trial) -> Iterator[dict]:
    """The same, layer by layer compiled, for one length."""
    for half in (True, False):
        yield from measured(trial, ["tupe_r-compile", "nopos-compile"], trial.setting(half=half))


# ---- the command


def saved(trial: Trial, name: str) -> dict | None:
    """What there is of a part on this device; its "end" is "complete", or why it failed, or None."""
    path = trial.folder / f"{name}.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    return found if found.get("device") == trial.device else None


def run(trial: Trial, name: str) -> str | None:
    """Measure a part, save it anew with every row, and say why it failed."""
    about, begin, rows = environment(), time.monotonic(), []
    if trial.device == "cpu":
        PEAK_SIZE["cpu"] = 64  # of this process, which rehearses

    def save(end: str | None) -> str | None:
        content = {"device": trial.device, "date": about["date"], "on": about["gpu"] or about["cpu"], "end": end}
        content = {**content, "seconds": round(time.monotonic() - begin), "rows": rows}
        write_atomically(trial.folder / f"{name}.json", json.dumps(content, indent=1, allow_nan=False) + "\n")
        return end

    try:
        save(None)
        torch._dynamo.reset()
        for row in PARTS[name].measure(trial):
            broken = {key: str(x) for key, x in row.items() if isinstance(x, float) and not math.isfinite(x)}
            rows.append({**row, **broken})
            save(None)
    except Exception as error:
        traceback.print_exc()
        return save(reason(error))
    save("complete")


def write_page(trial: Trial, reasons: dict[str, str]) -> None:
    """From the rows alone, and from why parts have none."""
    origin = "Written by `python -m lab bench gpu`; started again, it measures what is missing."
    lines = ["# What a GPU shows", "", origin]
    if trial.device == "cpu":
        lines += ["", "**A rehearsal on a CPU, at tiny sizes: no figure here says anything about GPUs.**"]
    for name, (title, _, columns, measure) in PARTS.items():
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
@options.output("The folder of the page gpu.md and of each part's rows, PART.json.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cuda", show_default=True,
              help="Where to measure; on the CPU it is a rehearsal at tiny sizes.")  # fmt: skip
@click.option("--minutes", default=15.0, show_default=True,
              help="Parts that might last longer wait for the next start; 0 only writes the page.")  # fmt: skip
@click.option("--parts", type=ListOf(list(PARTS)), help=f"Measure only these of {', '.join(PARTS)}.")
def command(output, device, minutes, parts):
    """Measure on a GPU what could only be computed without one; write all rows, and a page.

    \b
    python -m lab bench gpu --output runs/gpu               on an otherwise idle card; again: what is missing
    python -m lab bench gpu --output try --device cpu       a rehearsal
    """
    if device == "cuda" and minutes and not torch.cuda.is_available():
        raise ValueError("--device cuda: this PyTorch sees no GPU; valid here: cpu")
    trial, begin, reasons, pool = Trial(output.resolve(), device), time.monotonic(), {}, None
    output.mkdir(parents=True, exist_ok=True)
    for name in parts or PARTS:
        seconds, left = PARTS[name].seconds, 60 * minutes - (time.monotonic() - begin)
        if (content := saved(trial, name)) and content["end"] == "complete":
            continue
        if left < seconds:
            reasons[name] = f"it takes up to {seconds} s, and {max(0, left):.0f} s were left"
            continue
        click.echo(f"{PARTS[name].title} ...")
        if pool is None:  # one process until a part fails: a fault of CUDA ends all that it could still measure
            pool = CONTEXT.Pool(1)
            pool.apply(saved, (trial, name))  # imports, in no part's time
        try:
            failed = pool.apply_async(run, (trial, name)).get(seconds)
        except multiprocessing.TimeoutError:
            failed = f"longer than {seconds} s"
        if failed:
            reasons[name] = failed
            pool.terminate()
            pool = None
        write_page(trial, reasons)
    write_page(trial, reasons)
    whole = sum((saved(trial, name) or {}).get("end") == "complete" for name in PARTS)
    click.echo(f"{output / 'gpu.md'}: {whole} of {len(PARTS)} parts")
    if reasons:
        listed = "; ".join(f"{name} ({why})" for name, why in reasons.items())
        raise click.ClickException(f"not measured: {listed}; started again, the command measures these")
