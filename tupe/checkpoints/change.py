"""A trained model changed: the mean of several, another position encoding, longer tables of positions. `tupe pretrain
--recipe pretrain_further` goes on from what comes out."""

import re
from collections.abc import Sequence
from dataclasses import replace

import click
import torch
import torch.nn.functional as F

from ..common import options
from ..common.options import Command
from ..data.blocks import EOS, PAD
from ..encoder import Encoder
from ..names import cls_beside
from ..positions import CLS, bounded_schemes
from ..schemes import SCHEMES
from .export import export, text_option
from .trained import FINGERPRINT, Trained, read_model, settings_of

POSITIONS = "encoder.positions."
TABLE = re.compile(r"positions\.([\w-]+)\.(?:\d+\.)?table\.weight$")


def average(paths: Sequence) -> Trained:
    """The last model with the mean of all weights. Sums are in float64. Raises ValueError if the models differ."""
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


@click.command("average", cls=Command)
@click.argument("checkpoints", nargs=-1, required=True, type=click.Path())
@options.output("The folder to write.")
@text_option
def average_command(checkpoints, output, data):
    """Average the weights of several checkpoints, the last of which says everything else.

    \b
    tupe checkpoint average RUN/checkpoint_1_8000.pt RUN/checkpoint_1_9000.pt --output mean
    """
    export(average(checkpoints), output, data, code=False)
    click.echo(f"{output}: the mean of {', '.join(map(str, checkpoints))}")


def swap_position(
    trained: Trained, position: str, cls: str | None = None, seed: int = 1, keep: bool = False
) -> Trained:
    """A model with the weights of `trained`, but the position schemes `position` with new parameters, as Wang et al.
    (2021) do it.

    cls: one of `positions.CLS`; None keeps the old one, where it can be kept (`cls_beside`). All schemes of `position`
    get new parameters, even one that the old model has too, unless keep: then parameters of the same name and shape
    stay as well. Raises ValueError for a bad position.
    """
    old = trained.config
    config = replace(old, position=position, cls=cls or cls_beside(position, old.cls))
    torch.manual_seed(seed)
    fresh = {f"encoder.{key}": value for key, value in Encoder(trained.types, PAD, EOS, config).state_dict().items()}
    weights = {key: value for key, value in trained.weights.items() if not key.startswith(POSITIONS)}
    new = {key: value for key, value in fresh.items() if key.startswith(POSITIONS)}
    same = {k: v for k, v in trained.weights.items() if keep and k in new and v.shape == new[k].shape}
    return replace(trained, config=config, weights={**weights, **new, **same}, name="", updates=0)


@click.command("swap", cls=Command)
@options.checkpoint("The checkpoint of a masked language model.")
@click.option("--position", required=True, help="Schemes joined by '+'; `tupe list schemes` shows them.")
@click.option("--cls", type=click.Choice(CLS), help="How [CLS] is treated (default: as in the "
              "checkpoint beside `untied`, else tied).")  # fmt: skip
@options.output("The folder to write.")
@text_option
@click.option("--keep", is_flag=True, help="Keep those parameters of positions that have the same name and shape.")
@options.seed(help="The seed of the new parameters.")
def swap_command(checkpoint, position, cls, output, data, keep, seed):
    """Give a trained model another position encoding and keep every other weight.

    \b
    tupe checkpoint swap --checkpoint RUN --position untied+t5 --output swapped
    tupe pretrain --recipe pretrain_further --finetune-from-model swapped ...
    tupe checkpoint swap --checkpoint RUN --position rope:yarn:4+t5 --keep --output longer
    """
    trained = read_model(checkpoint)
    swapped = swap_position(trained, position, cls, seed, keep)
    export(swapped, output, data, code=False)
    old, new = (f"{model.config.position}, [CLS] {model.config.cls}" for model in (trained, swapped))
    click.echo(f"{output}: {old} -> {new}")


def stretch(trained: Trained, length: int) -> Trained:
    """A model for `length` positions, whose vectors of positions are those of `trained`, interpolated linearly.

    [CLS] keeps its vector, the first word's and the last position's become those of the first word and the last
    position. Encodings without such vectors stay as they are. Raises ValueError for a length that is not longer, and
    for `nonparametric`, whose matrix of pairs has no vectors of positions.
    """
    old, names = trained.config.max_positions, trained.config.position
    if length <= old:
        raise ValueError(f"--length {length}: the model has {old} positions already; give more than {old}")
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


@click.command("stretch", cls=Command)
@options.checkpoint("The checkpoint to stretch.")
@click.option("--length", type=click.IntRange(3), required=True, help="Tokens of the longest sequence, [CLS] included.")
@options.output("The folder to write.")
@text_option
def stretch_command(checkpoint, length, output, data):
    """Give a trained model longer tables of positions, by interpolation of its vectors.

    \b
    tupe checkpoint stretch --checkpoint RUN --length 512 --output stretched
    tupe pretrain --recipe pretrain_further --finetune-from-model stretched --tokens-per-sample 512 ...
    """
    trained = read_model(checkpoint)
    export(stretch(trained, length), output, data, code=False)
    click.echo(f"{output}: {trained.config.max_positions} -> {length} positions")
