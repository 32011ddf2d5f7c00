"""The instrument of every comparison. Contenders compute one step at a time, in turns, so that disturbances of the
machine affect all of them. Of two contenders, compare the times within a turn."""

import itertools
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from tupe.common import options
from tupe.common.options import ListOf
from tupe.common.tables import TextTable
from tupe.run.folder import write_atomically

from .machine import DEVICE, PRECISIONS, facts

Step = Callable[[int], list[float]]  # number of the turn, from 0 and with warm-ups -> seconds of each part of the step


def timed(device: str, *parts: Callable[[], Any]) -> Step:
    """A step that calls the functions one after another and measures each. On a GPU it reads the time in the GPU's own
    queue, and so waits for it only at the beginning and at the end."""

    def lap():
        if device != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def step(turn: int) -> list[float]:
        wait = torch.cuda.synchronize if device == "cuda" else lambda: None
        wait()
        laps = [lap()]
        for part in parts:
            part()
            laps.append(lap())
        wait()
        pairs = itertools.pairwise(laps)
        return [a.elapsed_time(b) / 1000 if device == "cuda" else b - a for a, b in pairs]

    return step


def take_turns(steps: dict[str, Step], turns: int, setting: str = "", warmup: int = 1) -> dict[str, np.ndarray]:
    """{contender: seconds of its step [turns, parts]}. Every turn has a new random order; the first
    `warmup` turns are not kept. setting: what the line of progress after each turn begins with."""
    kept, order, shuffle = {name: [] for name in steps}, list(steps), random.Random(0)
    start = time.monotonic()
    for turn in range(warmup + turns):
        shuffle.shuffle(order)
        seconds = {name: steps[name](turn) for name in order}
        if turn >= warmup:
            for name in steps:
                kept[name].append(seconds[name])
        label = f"turn {turn - warmup + 1}/{turns}" if turn >= warmup else "warm-up"
        left = (time.monotonic() - start) / (turn + 1) * (warmup + turns - turn - 1)
        listed = "  ".join(f"{name} {sum(seconds[name]):.2f} s" for name in steps)
        click.echo(f"{setting} {label}: {listed}; {left / 60:.1f} minutes left for these turns", err=True)
    return {name: np.array(seconds) for name, seconds in kept.items()}


def compared(steps: dict[str, Step], turns: int, about: dict) -> list[dict]:
    """A row per contender: `about`, which names the "setting"; its "steps", seconds [turns, parts]; and "ms", the
    median of each part."""
    times = take_turns(steps, turns, about["setting"])
    return [
        {**about, "contender": name, "steps": seconds.tolist(), "ms": (1e3 * np.median(seconds, axis=0)).tolist()}
        for name, seconds in times.items()
    ]


def ratios(row: dict, other: dict) -> np.ndarray:
    """[turns]: the time of one row's contender over that of another's in the same turn."""
    return np.sum(row["steps"], axis=1) / np.sum(other["steps"], axis=1)


def table(rows: list[dict], columns: dict[str, str]) -> TextTable:
    """A line per row. columns: {header: the cell, a format of the row}. The last column is the row's time over that of
    the first contender of its setting: the median over turns, and the range."""
    first, lines = {}, []
    for row in rows:
        within = ratios(row, first.setdefault(row["setting"], row))
        cells = [cell.format_map(row) for cell in columns.values()]
        relative = f"{np.median(within):.3f} ({within.min():.2f} to {within.max():.2f})"
        lines.append([row["setting"], row["contender"], *cells, relative])
    header = ["setting", "contender", *columns, "time, the first one's is 1 (range)"]
    return TextTable.plain(header, lines, align="ll" + "r" * (len(columns) + 1))


def write(output: Path, about: dict, rows: list[dict], columns: dict[str, str], note: str = "") -> str:
    """Write OUTPUT.json and OUTPUT.md, and return what is in the latter. about: the command and the machine. note: what
    has to be known of the figures."""
    page = "\n\n".join(filter(None, [facts(about), note, table(rows, columns).markdown()]))
    output.parent.mkdir(parents=True, exist_ok=True)
    result = {"about": about, "rows": rows}
    write_atomically(f"{output}.json", json.dumps(result, indent=1, allow_nan=False) + "\n")
    write_atomically(f"{output}.md", page)
    return page


# ---- options


def comparison(command: Callable) -> Callable:
    """Adds the options of every comparison."""
    for option in (
        options.output("The files to write: OUTPUT.json and OUTPUT.md."),
        click.option("--turns", type=click.IntRange(1), default=7, show_default=True, help="Measured steps of each."),
        click.option("--device", type=click.Choice(["cpu", "cuda"]), default=DEVICE,
                     help="Where to measure (default: a GPU if there is one)."),
        click.option("--precision", type=ListOf(list(PRECISIONS)), default="float32", show_default=True,
                     help="Precisions to measure in; half ones by autocast."),
    ):  # fmt: skip
        command = option(command)
    return command


def batches(command: Callable) -> Callable:
    """Adds the options of batches of random tokens."""
    for option in (
        click.option("--tokens", type=click.IntRange(1), default=2048, show_default=True, help="Tokens of a batch."),
        click.option("--lengths", type=ListOf(click.IntRange(1)), default="512", show_default=True, metavar="L,...",
                     help="Tokens of a sequence."),
    ):  # fmt: skip
        command = option(command)
    return command
