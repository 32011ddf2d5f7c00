"""Updates per second of both engines, of whole trainings by `tupe pretrain`."""

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click
import numpy as np

from ..common import options
from ..common.processes import PROGRAM, complete
from ..common.tables import TextTable
from .turns import take_turns

ENGINES = "fairseq", "transformers"


def processor_time() -> float:
    """Seconds, of all processes that this one has started and that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def seconds(
    engine: str, data: Path, updates: int, words: Sequence[str], clock: Callable[[], float] = time.perf_counter
) -> float:  # fmt: skip
    """Of a training from its start to its end. Raises ValueError with its last line if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*PROGRAM, "pretrain", f"--engine={engine}", f"--data={data}", f"--output={folder}/run"]
        command += [f"--max-update={updates}", "--disable-validation", *words]
        began = clock()
        complete(command)
        return clock() - began


@click.command(cls=options.Command, context_settings={"ignore_unknown_options": True})
@options.data()
@click.option(
    "--updates", type=click.IntRange(1), default=200, show_default=True, help="Updates that are measured in each turn."
)
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Turns of each engine.")
@click.option("--cpu", is_flag=True, help="Count seconds of the processor, which other work changes little.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS OF THE PRE-TRAINING]...")
def command(data, updates, rounds, cpu, words):
    """Updates per second of both engines, which take turns. Nothing else should run on the machine, or give --cpu.

    \b
    tupe bench engines --data DATA --arch tupe_r_tiny --recipe pretrain_small
    tupe bench engines --data DATA --arch tupe_r --updates 10 --batch-size 8

    A turn of an engine is two trainings, of which one is so many updates longer: start and end cancel out.
    """

    def turn_of(engine):
        clock = processor_time if cpu else time.perf_counter
        return lambda turn: [seconds(engine, data, n, words, clock) * sign for n, sign in ((updates + 10, 1), (10, -1))]

    steps = {engine: turn_of(engine) for engine in ENGINES}
    kept = take_turns(steps, rounds, warmup=0, say=lambda line: click.echo(line, err=True))
    speeds = {engine: updates / kept[engine].sum(axis=1) for engine in ENGINES}
    ratio = speeds["transformers"] / speeds["fairseq"]  # within each turn
    named = [*speeds.items(), ("transformers : fairseq", ratio)]
    rows = [[name, *(f"{value:.3g}" for value in (np.median(of), of.min(), of.max()))] for name, of in named]
    click.echo(TextTable.plain(["updates per second", "median of the turns", "least", "most"], rows).markdown())
