"""The instrument of every comparison: contenders compute one step at a time, in turns, so that disturbances of the
machine affect all of them. Of two contenders, compare the times within a turn."""

import itertools
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from ..common import plotting
from ..common.record import write_atomically

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


def take_turns(
    steps: dict[Any, Step], turns: int, warmup: int = 1, say: Callable[[str], Any] = lambda line: None
) -> dict[Any, np.ndarray]:
    """{contender: seconds of its step [turns, parts]}. Every turn has a new random order; the first
    `warmup` turns are not kept. say: called with a line after each turn."""
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
        say(f"{label}: {listed}; {left / 60:.1f} minutes left for these turns")
    return {name: np.array(seconds) for name, seconds in kept.items()}


def compared(
    steps: dict[str, Step], turns: int, about: dict, say: Callable[[str], Any] = lambda line: None
) -> list[dict]:
    """A row per contender: `about`, which names the "setting"; its "steps", seconds [turns, parts]; and for each other
    one how many "times_as_fast" it is, the median over turns of the ratio within a turn."""
    times = take_turns(steps, turns, say=say)
    sums = {name: seconds.sum(axis=1) for name, seconds in times.items()}
    return [
        {
            **about, "contender": name, "steps": times[name].tolist(),
            "times_as_fast": {b: statistics.median(sums[b] / sums[name]) for b in sums if b != name},
        }
        for name in steps
    ]  # fmt: skip


def write(output: Path, result: dict, markdown: str, figure: Figure) -> None:
    """OUTPUT.json, .md and .png."""
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(f"{output}.json", json.dumps(result, indent=1, allow_nan=False) + "\n")
    write_atomically(f"{output}.md", markdown)
    plotting.save(figure, f"{output}.png")
