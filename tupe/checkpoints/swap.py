"""Gives a trained model another position encoding, as Wang et al. (2021) do; all other weights stay.

`tupe pretrain --recipe pretrain_further` continues pre-training from the result.
"""

from dataclasses import replace

import click
import torch

from ..common import options
from ..common.options import Command
from ..data.blocks import EOS, PAD
from ..encoder import Encoder
from ..names import cls_beside
from ..positions import CLS
from .export import export, text_option
from .trained import Trained, read_model

POSITIONS, SEGMENTS = "encoder.positions.", "encoder.segments.weight"


def swap_position(
    trained: Trained, position: str, cls: str | None = None, segments: bool = False, seed: int = 1, keep: bool = False
) -> Trained:
    """A model with the weights of `trained`, but the position schemes `position` with new parameters.

    cls: one of `positions.CLS`; None keeps the old one, where it can be kept (`cls_beside`). segments: add segment
    embeddings, if there are none, for the next-sentence objective. All schemes of `position` get new parameters, even
    one that the old model has too, unless keep: then parameters of the same name and shape stay as well.
    Raises ValueError for a bad position.
    """
    old = trained.config
    config = replace(
        old, position=position, cls=cls or cls_beside(position, old.cls),
        segments="learned" if segments else old.segments,
    )  # fmt: skip
    torch.manual_seed(seed)
    fresh = {f"encoder.{key}": value for key, value in Encoder(trained.types, PAD, EOS, config).state_dict().items()}
    weights = {key: value for key, value in trained.weights.items() if not key.startswith(POSITIONS)}
    new = {k: v for k, v in fresh.items() if k.startswith(POSITIONS) or (k == SEGMENTS and k not in weights)}
    same = {k: v for k, v in trained.weights.items() if keep and k in new and v.shape == new[k].shape}
    return replace(trained, config=config, weights={**weights, **new, **same}, name="", updates=0)


@click.command(cls=Command)
@options.checkpoint("The checkpoint of a masked language model.")
@click.option("--position", required=True, help="Schemes joined by '+'; `tupe list schemes` shows them.")
@click.option("--cls", type=click.Choice(CLS), help="How [CLS] is treated (default: as in the "
              "checkpoint beside `untied`, else tied).")  # fmt: skip
@click.option("--segments", is_flag=True, help="Add segment embeddings, which the next-sentence objective needs.")
@options.output("The folder to write.")
@text_option
@click.option("--keep", is_flag=True, help="Keep those parameters of positions that have the same name and shape.")
@options.seed(help="The seed of the new parameters.")
def command(checkpoint, position, cls, segments, output, data, keep, seed):
    """Give a trained model another position encoding and keep every other weight.

    \b
    tupe checkpoint swap --checkpoint RUN --position untied+t5 --output swapped
    tupe pretrain --recipe pretrain_further --finetune-from-model swapped ...
    tupe checkpoint swap --checkpoint RUN --position rope:yarn:4+t5 --keep --output longer
    """
    trained = read_model(checkpoint)
    swapped = swap_position(trained, position, cls, segments, seed, keep)
    export(swapped, output, data, code=False)
    old, new = (f"{model.config.position}, [CLS] {model.config.cls}" for model in (trained, swapped))
    click.echo(f"{output}: {old} -> {new}")
