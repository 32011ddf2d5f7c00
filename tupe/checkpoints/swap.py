"""Gives a trained model another position encoding, as Wang et al. (2021) do; all other weights stay.

`tupe pretrain --recipe pretrain_further` continues pre-training from the result.
"""

from dataclasses import replace

import click
import torch

from ..common import options
from ..common.architectures import ARCHITECTURES, OTHER_BLOCKS, named, split_size
from ..common.options import FILE, FOLDER, Command
from ..data.blocks import EOS, PAD
from ..data.splits import folders_of
from ..encoder import Encoder
from ..names import cls_beside
from ..positions import CLS
from .files import write_model
from .trained import SETTINGS, Trained, check_dictionary, pack_settings, read_model, settings_of

SEGMENTS = "encoder.segments.weight"


def swap_position(
    trained: Trained, position: str, cls: str | None = None, segments: bool = False, seed: int = 1, keep: bool = False
) -> Trained:
    """A model with the weights of `trained`, but the position schemes `position` with new parameters.

    cls: one of `positions.CLS`; None keeps the old one, where it can be kept (`cls_beside`). segments: add segment
    embeddings, if there are none, for the next-sentence objective. All schemes of `position` get new parameters, even
    one that the old model has too, unless keep: then parameters of the same name and shape stay as well.
    Raises ValueError for another kind of model, or a bad position.
    """
    valid, old = [*ARCHITECTURES, *OTHER_BLOCKS], trained.config
    if split_size(trained.name)[0] not in valid:
        raise ValueError(f"positions can be swapped in {', '.join(valid)}, not in {trained.name}")
    config = replace(
        old, position=position, cls=cls or cls_beside(position, old.cls),
        segments="learned" if segments else old.segments,
    )  # fmt: skip
    torch.manual_seed(seed)
    fresh = {f"encoder.{key}": value for key, value in Encoder(trained.types, PAD, EOS, config).state_dict().items()}
    weights = {key: value for key, value in trained.weights.items() if not is_position(key)}
    new = {k: v for k, v in fresh.items() if is_position(k) or (k == SEGMENTS and k not in weights)}
    same = {k: v for k, v in trained.weights.items() if keep and k in new and v.shape == new[k].shape}
    weights |= {**new, **same, SETTINGS: pack_settings(settings_of(config))}
    name = {"_name": named(trained.name, config.position, config.cls)}
    cfg = {**trained.cfg, "model": {**trained.cfg.get("model", {}), **name}}
    return replace(trained, config=config, weights=weights, cfg=cfg, updates=0, extra={})


def is_position(key: str) -> bool:
    """Whether a name of a weight belongs to the positions, or is that of the settings, which name them."""
    return key.startswith("encoder.positions.") or key == SETTINGS


@click.command(cls=Command)
@options.checkpoint("The checkpoint of a masked language model.")
@click.option("--position", required=True, help="Schemes joined by '+'; `tupe list schemes` shows them.")
@click.option("--cls", type=click.Choice(CLS), help="How [CLS] is treated (default: as in the "
              "checkpoint beside `untied`, else tied).")  # fmt: skip
@click.option("--segments", is_flag=True, help="Add segment embeddings, which the next-sentence objective needs.")
@click.option("--output", type=FILE, required=True, help="NAME.pt: a file of fairseq's; else a folder.")
@click.option("--data", type=FOLDER, help="The folder of dict.txt (default: that of the training).")
@click.option("--keep", is_flag=True, help="Keep those parameters of positions that have the same name and shape.")
@options.seed(help="The seed of the new parameters.")
def command(checkpoint, position, cls, segments, output, data, keep, seed):
    """Give a trained model another position encoding and keep every other weight.

    \b
    tupe checkpoint swap --checkpoint checkpoint_last.pt --position untied+t5 --output swapped.pt
    tupe pretrain --recipe pretrain_further --finetune-from-model swapped.pt ...
    tupe checkpoint swap --checkpoint checkpoint_last.pt --position rope:yarn:4+t5 --keep --output longer.pt
    """
    trained = read_model(checkpoint)
    data = data or folders_of(trained.task.get("data", "."))[0]
    if not (data / "dict.txt").is_file():
        raise ValueError(f"dict.txt not found in {data}; give the folder of the training data")
    check_dictionary(trained.weights, data / "dict.txt")
    swapped = swap_position(trained, position, cls, segments, seed, keep)
    write_model(swapped, output, data)
    old, new = (f"{model.config.position}, [CLS] {model.config.cls}" for model in (trained, swapped))
    click.echo(f"{output}: {old} -> {new}")
