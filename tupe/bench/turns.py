"""The instrument of every comparison: contenders compute one step at a time, in turns, so that disturbances of the
machine affect all of them. Of two contenders, compare the times within a turn (`ratios`)."""

import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from matplotlib.figure import Figure

from ..common import plotting
from ..common.record import write_atomically
from .machine import Clock

Step = Callable[[int], list[float]]  # number of the turn, from 0 and with warm-ups -> seconds of each part of the step


class Lost(ValueError):
    """A contender cannot go on, such as one whose process the system has killed."""


def timed(device: str, *parts: Callable[[], Any]) -> Step:
    """A step that calls the functions one after another and measures each."""

    def step(turn: int) -> list[float]:
        clock = Clock(device)
        for part in parts:
            part()
            clock.lap()
        return clock.seconds()

    return step


def take_turns(
    steps: dict[Any, Step], turns: int, warmup: int = 1, say: Callable[[str], Any] = lambda line: None
) -> dict[Any, list[list[float]]]:
    """{contender: the seconds that its step took in every turn, by part}. Every turn has a new random order; the first
    `warmup` turns are not kept. say: called with a line after each turn.

    If a contender is `Lost` after the first turn that is kept, what was measured before remains.
    """
    kept, order, shuffle = {name: [] for name in steps}, list(steps), random.Random(0)
    start = time.monotonic()
    for turn in range(warmup + turns):
        shuffle.shuffle(order)
        try:
            seconds = {name: steps[name](turn) for name in order}
        except Lost as error:
            if turn <= warmup:
                raise
            click.echo(f"stopped in turn {turn - warmup + 1}/{turns}: {error}", err=True)
            break
        if turn >= warmup:
            for name in steps:
                kept[name].append(seconds[name])
        label = f"turn {turn - warmup + 1}/{turns}" if turn >= warmup else "warm-up"
        left = (time.monotonic() - start) / (turn + 1) * (warmup + turns - turn - 1)
        listed = "  ".join(f"{name} {sum(seconds[name]):.2f} s" for name in steps)
        say(f"{label}: {listed}; {left / 60:.1f} minutes left for these turns")
    return kept


def medians(times: list[list[float]]) -> list[float]:
    """The median over turns of each part."""
    return [statistics.median(part) for part in zip(*times, strict=True)]


def totals(times: list[list[float]]) -> list[float]:
    """Seconds of a whole step in every turn."""
    return [sum(parts) for parts in times]


def ratios(a: list[float], b: list[float]) -> list[float]:
    """The seconds of a divided by those of b, within every turn."""
    return [x / y for x, y in zip(a, b, strict=True)]


def write(output: Path, result: dict, markdown: str, figure: Figure) -> None:
    """OUTPUT.json, .md and .png."""
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(f"{output}.json", json.dumps(result, indent=1, allow_nan=False) + "\n")
    write_atomically(f"{output}.md", markdown)
    plotting.save(figure, f"{output}.png")
