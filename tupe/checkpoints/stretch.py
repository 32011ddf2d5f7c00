"""Longer tables of positions: a trained model for longer sequences than those of its training."""

import re
from dataclasses import replace

import click
import torch
import torch.nn.functional as F

from ..common import options
from ..common.options import Command
from ..positions import bounded_schemes
from ..schemes import SCHEMES
from .export import export, text_option
from .trained import Trained, read_model

TABLE = re.compile(r"positions\.(\w+)\.(?:\d+\.)?table\.weight$")


def stretch(trained: Trained, length: int) -> Trained:
    """A model for `length` positions, whose vectors of positions are those of `trained`, interpolated linearly.

    [CLS] keeps its vector, the first word's and the last position's become those of the first word and the last
    position. Encodings without such vectors stay as they are. Raises ValueError for a length that is not longer, and
    for `nonparametric`, whose matrix of pairs has no vectors of positions.
    """
    old, names = trained.config.max_positions, trained.config.position
    if length <= old:
        raise ValueError(f"--length {length}: the model has {old} positions already; valid: more")
    first_word_row = {name: scheme.first_word_row for name, scheme in SCHEMES.items() if scheme.first_word_row}
    if unknown := set(bounded_schemes(names)) - set(first_word_row):
        raise ValueError(f"{', '.join(unknown)} cannot be stretched; valid: {', '.join(first_word_row)}")
    weights = dict(trained.weights)
    for key, value in weights.items():
        table = TABLE.search(key)
        if table and (first := first_word_row.get(table[1])):
            rows = F.interpolate(value[first:].T[None].float(), length - 1, mode="linear", align_corners=True)[0].T
            weights[key] = torch.cat([value[:first], rows.to(value.dtype)])
    return replace(trained, config=replace(trained.config, max_positions=length), weights=weights, updates=0)


@click.command(cls=Command)
@options.checkpoint("The checkpoint to stretch.")
@click.option("--length", type=click.IntRange(3), required=True, help="Tokens of the longest sequence, [CLS] included.")
@options.output("The folder to write.")
@text_option
def command(checkpoint, length, output, data):
    """Give a trained model longer tables of positions, by interpolation of its vectors.

    \b
    tupe checkpoint stretch --checkpoint RUN --length 512 --output stretched
    tupe pretrain --recipe pretrain_further --finetune-from-model stretched --tokens-per-sample 512 ...
    """
    trained = read_model(checkpoint)
    export(stretch(trained, length), output, data, code=False)
    click.echo(f"{output}: {trained.config.max_positions} -> {length} positions")
