"""Gives a trained model another position encoding, as Wang et al. (2021) do; all other weights stay.

`tupe pretrain --recipe pretrain_further` continues pre-training from the result.
"""

import copy
from pathlib import Path
from types import SimpleNamespace

import click
import torch
from fairseq import models, tasks
from fairseq.data import Dictionary
from omegaconf import OmegaConf

from ..common import options
from ..common.architectures import ARCHITECTURES, OTHER_BLOCKS, split_size
from ..common.options import FILE, FOLDER, Command
from ..names import cls_beside
from ..positions import CLS
from .files import new_checkpoint, save_new
from .folders import contents_of

SEGMENTS, SETTINGS = "encoder.segments.weight", "encoder._extra_state"


def dictionary_of(state: dict, data: str | Path | None = None) -> Dictionary:
    """The dictionary of a checkpoint's task, from its data folder or `data`. Raises ValueError if there is none."""
    task = {**state["cfg"]["task"], **({"data": str(data)} if data else {})}
    try:
        return tasks.setup_task(OmegaConf.create(task)).source_dictionary
    except FileNotFoundError:
        raise ValueError(f"dict.txt not found in {task['data']}; give the folder of the training data") from None


def swap_position(
    state: dict,
    dictionary: Dictionary,
    position: str,
    cls: str | None = None,
    segments: bool = False,
    seed: int = 1,
    keep: bool = False,
) -> dict:
    """A checkpoint with the weights of `state`, but the position schemes `position` with new parameters.

    state: from `folders.contents_of`. dictionary: the one it was trained with. cls: one of `positions.CLS`; None
    keeps the old one, where it can be kept (`cls_beside`). segments: add segment embeddings, if there are none, for the
    next-sentence objective. All schemes of `position` get new parameters, even one that the old model has too, unless
    keep: then parameters of the same name and shape stay as well. It holds no optimizer state, because that
    belongs to the old parameters. Raises ValueError for another kind of model, another dictionary, or a bad position.
    """
    cfg = copy.deepcopy(state["cfg"])
    valid = [*ARCHITECTURES, *OTHER_BLOCKS]
    if split_size(cfg["model"]["_name"])[0] not in valid:
        raise ValueError(f"positions can be swapped in {', '.join(valid)}, not in {cfg['model']['_name']}")
    cfg["model"].update(position=position, cls=cls or cls_beside(position, cfg["model"]["cls"]))
    if segments:
        cfg["model"]["segments"] = "learned"
    torch.manual_seed(seed)
    # Strict loading needs the heads that the checkpoint has, which are not in its configuration.
    config = OmegaConf.create({**cfg["model"], "load_checkpoint_heads": True})
    model = models.build_model(config, SimpleNamespace(source_dictionary=dictionary))
    kept = {key: value for key, value in state["model"].items() if not is_position(key)}
    new = {k: v for k, v in model.state_dict().items() if is_position(k) or (k == SEGMENTS and k not in kept)}
    old = {k: v for k, v in state["model"].items() if keep and k in new and k != SETTINGS and v.shape == new[k].shape}
    model.load_state_dict({**kept, **new, **old})
    cfg["model"].update(position=model.encoder.positions.name, _name=model.cfg._name)
    return new_checkpoint(cfg, model.state_dict(), state.get("task_state"))


def is_position(key: str) -> bool:
    """Whether a key of the state dict belongs to the positions, or holds the settings, which name them."""
    return key.startswith("encoder.positions.") or key == SETTINGS


@click.command(cls=Command)
@options.checkpoint("The checkpoint of a masked language model.")
@click.option("--position", required=True, help="Schemes joined by '+'; `tupe list schemes` shows them.")
@click.option("--cls", type=click.Choice(CLS), help="How [CLS] is treated (default: as in the "
              "checkpoint beside `untied`, else tied).")  # fmt: skip
@click.option("--segments", is_flag=True, help="Add segment embeddings, which the next-sentence objective needs.")
@click.option("--output", type=FILE, required=True, help="The checkpoint to write.")
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
    state = contents_of(checkpoint)
    swapped = swap_position(state, dictionary_of(state, data), position, cls, segments, seed, keep)
    save_new(swapped, output)
    old, new = (f"{s['cfg']['model']['position']}, [CLS] {s['cfg']['model']['cls']}" for s in (state, swapped))
    click.echo(f"{output}: {old} -> {new}")
