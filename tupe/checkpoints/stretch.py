"""Longer tables of positions: a trained model for longer sequences than those of its training."""

import copy
import re

import click
import torch
import torch.nn.functional as F

from ..common import options
from ..common.options import FILE, Command
from ..plugin.state import pack_settings, unpack_settings
from ..positions import bounded_schemes
from ..schemes import SCHEMES
from .files import new_checkpoint, save_new
from .folders import contents_of

TABLE = re.compile(r"positions\.(\w+)\.(?:\d+\.)?table\.weight$")
SETTINGS = "_extra_state"  # of an encoder, see plugin/state.py


def stretch(state: dict, length: int) -> dict:
    """A checkpoint for `length` positions, whose vectors of positions are those of `state`, interpolated linearly.

    [CLS] keeps its vector, the first word's and the last position's become those of the first word and the last
    position. Encodings without such vectors stay as they are. The settings of the model say that it was stretched, and
    from which length. It holds no optimizer state. Raises ValueError for a length that is not longer, and for
    `nonparametric`, whose matrix of pairs has no vectors of positions.
    """
    cfg = copy.deepcopy(state["cfg"])
    old, names = cfg["model"]["max_positions"], cfg["model"]["position"]
    if length <= old:
        raise ValueError(f"--length {length}: the model has {old} positions already; valid: more")
    first_word_row = {name: scheme.first_word_row for name, scheme in SCHEMES.items() if scheme.first_word_row}
    if unknown := set(bounded_schemes(names)) - set(first_word_row):
        raise ValueError(f"{', '.join(unknown)} cannot be stretched; valid: {', '.join(first_word_row)}")
    cfg["model"]["max_positions"] = length
    model = {}
    for key, value in state["model"].items():
        table = TABLE.search(key)
        if table and (first := first_word_row.get(table[1])):
            rows = F.interpolate(value[first:].T[None].float(), length - 1, mode="linear", align_corners=True)[0].T
            value = torch.cat([value[:first], rows.to(value.dtype)])
        elif key.endswith(f".{SETTINGS}"):  # of an encoder; without a prefix it is the dictionary's
            value = pack_settings({"stretched_from": str(old), **unpack_settings(value)})
        model[key] = value
    return new_checkpoint(cfg, model, state.get("task_state"))


@click.command(cls=Command)
@options.checkpoint("The checkpoint to stretch.")
@click.option("--length", type=click.IntRange(3), required=True, help="Tokens of the longest sequence, [CLS] included.")
@click.option("--output", type=FILE, required=True, help="The checkpoint to write.")
def command(checkpoint, length, output):
    """Give a trained model longer tables of positions, by interpolation of its vectors.

    \b
    tupe checkpoint stretch --checkpoint checkpoint_last.pt --length 512 --output stretched.pt
    tupe pretrain --recipe pretrain_further --finetune-from-model stretched.pt --tokens-per-sample 512 ...
    """
    state = contents_of(checkpoint)
    save_new(stretch(state, length), output)
    click.echo(f"{output}: {state['cfg']['model']['max_positions']} -> {length} positions")
