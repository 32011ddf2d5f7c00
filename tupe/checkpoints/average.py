"""The mean of several models' weights."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click
import torch

from ..common import options
from .export import export, text_option
from .trained import FINGERPRINT, Trained, read_model, settings_of


def average(paths: Sequence) -> Trained:
    """The last model with the mean of all weights. Sums are in float64. Raises ValueError if the models differ."""
    if len(paths) < 2:
        raise ValueError(f"averaging needs at least two checkpoints, not {len(paths)}")
    first, total = read_model(paths[0]), {}
    for path in paths:
        last = read_model(path)
        shapes, theirs = ({key: value.shape for key, value in of.weights.items()} for of in (first, last))
        if differ := sorted(key for key in {*shapes, *theirs} if shapes.get(key) != theirs.get(key)):
            raise ValueError(f"{path} is another model than {paths[0]}: {', '.join(differ[:5])}")
        if settings_of(last.config) != settings_of(first.config):
            raise ValueError(f"{path} has other settings than {paths[0]}")
        if FINGERPRINT in first.weights and not torch.equal(first.weights[FINGERPRINT], last.weights[FINGERPRINT]):
            raise ValueError(f"{path} has another dictionary than {paths[0]}")
        for key, value in last.weights.items():
            if value.is_floating_point():
                total[key] = total[key] + value.double() if key in total else value.double()
    mean = {key: (value / len(paths)).to(last.weights[key].dtype) for key, value in total.items()}
    return replace(last, weights={**last.weights, **mean}, averaged=len(paths))


@click.command("average", cls=options.Command)
@click.argument("checkpoints", nargs=-1, required=True, type=click.Path(path_type=Path))
@options.output("The folder to write.")
@text_option
def command(checkpoints, output, data):
    """Average the weights of several checkpoints, whose last one says all else.

    \b
    tupe checkpoint average RUN/checkpoint_1_8000.pt RUN/checkpoint_1_9000.pt --output mean
    """
    export(average(checkpoints), output, data, code=False)
    click.echo(f"{output}: the mean of {', '.join(map(str, checkpoints))}")
