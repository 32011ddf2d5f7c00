"""Another position encoding for a trained model, in the manner of Wang et al. (2021); all else keeps its weights.

The result is a checkpoint to continue pre-training from (scripts/continue.sh, configs/continue.yaml).
"""

import copy
from types import SimpleNamespace

import torch
from fairseq import models, tasks
from omegaconf import OmegaConf

from ..architectures import ARCHITECTURES, split_size
from .files import new_checkpoint

SEGMENTS = "encoder.segments.weight"


def dictionary_of(state, data=None):
    """The dictionary of a checkpoint's task, from its data folder or the one given. ValueError if there is none."""
    task = {**state["cfg"]["task"], **({"data": str(data)} if data else {})}
    try:
        return tasks.setup_task(OmegaConf.create(task)).source_dictionary
    except FileNotFoundError:
        raise ValueError(f"there is no dict.txt in {task['data']}; give the folder of the training data") from None


def swap_position(state, dictionary, position, cls=None, segments=False, seed=1):
    """A checkpoint with the weights of `state`, but the position schemes `position` with fresh parameters.

    state: from `safe_load.read_checkpoint`. dictionary: the one it was trained with. cls: "tied" or "untied", default
    as before. segments: give it segment embeddings if it has none, for the next-sentence objective. Fresh are the
    parameters of all schemes of `position`, also of one that the old model has too. There is no optimizer state: it
    belongs to the old parameters. Raises ValueError for a checkpoint of another kind of model, another dictionary, or a
    position without meaning.
    """
    cfg = copy.deepcopy(state["cfg"])
    if split_size(cfg["model"]["_name"])[0] not in ARCHITECTURES:
        raise ValueError(f"positions can be swapped in {', '.join(ARCHITECTURES)}, not in {cfg['model']['_name']}")
    cfg["model"].update(position=position, cls=cls or cfg["model"]["cls"])
    if segments:
        cfg["model"]["segments"] = "learned"
    torch.manual_seed(seed)
    # Loading, which checks everything, needs the heads that the checkpoint holds; they are not in its configuration.
    options = OmegaConf.create({**cfg["model"], "load_checkpoint_heads": True})
    model = models.build_model(options, SimpleNamespace(source_dictionary=dictionary))
    kept = {key: value for key, value in state["model"].items() if not is_position(key)}
    new = {k: v for k, v in model.state_dict().items() if is_position(k) or (k == SEGMENTS and k not in kept)}
    model.load_state_dict({**kept, **new})
    cfg["model"]["position"] = model.encoder.positions.name
    return new_checkpoint(cfg, model.state_dict())


def is_position(key):
    """Whether a key of the state dict belongs to the positions, or is the note of the settings that names them."""
    return key.startswith("encoder.positions.") or key == "encoder._extra_state"
