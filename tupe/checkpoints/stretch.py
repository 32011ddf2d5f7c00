"""Longer tables of positions: a trained model for longer sequences than those of its training."""

import re
from dataclasses import replace

import click
import torch
import torch.nn.functional as F

from ..common import options
from ..common.options import FILE, Command
from ..positions import bounded_schemes
from ..schemes import SCHEMES
from .files import write_model
from .trained import FINGERPRINT, Trained, pack_settings, read_model, unpack_settings

TABLE = re.compile(r"positions\.(\w+)\.(?:\d+\.)?table\.weight$")


def stretch(trained: Trained, length: int) -> Trained:
    """A model for `length` positions, whose vectors of positions are those of `trained`, interpolated linearly.

    [CLS] keeps its vector, the first word's and the last position's become those of the first word and the last
    position. Encodings without such vectors stay as they are. The settings of the model say that it was stretched, and
    from which length. Raises ValueError for a length that is not longer, and for `nonparametric`, whose matrix of pairs
    has no vectors of positions.
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
        elif key.endswith(f".{FINGERPRINT}"):  # of an encoder
            weights[key] = pack_settings({"stretched_from": str(old), **unpack_settings(value)})
    config = replace(trained.config, max_positions=length)
    return replace(trained, config=config, weights=weights, updates=0, extra={})


@click.command(cls=Command)
@options.checkpoint("The checkpoint to stretch.")
@click.option("--length", type=click.IntRange(3), required=True, help="Tokens of the longest sequence, [CLS] included.")
@click.option("--output", type=FILE, required=True, help="NAME.pt: a file of fairseq's; else a folder.")
def command(checkpoint, length, output):
    """Give a trained model longer tables of positions, by interpolation of its vectors.

    \b
    tupe checkpoint stretch --checkpoint checkpoint_last.pt --length 512 --output stretched.pt
    tupe pretrain --recipe pretrain_further --finetune-from-model stretched.pt --tokens-per-sample 512 ...
    """
    trained = read_model(checkpoint)
    write_model(stretch(trained, length), output)
    click.echo(f"{output}: {trained.config.max_positions} -> {length} positions")
