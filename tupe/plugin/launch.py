"""Turns a recipe of configs/ into arguments of `fairseq-train`: its values are written once for both launchers."""

import logging
import os
import pickle
import shutil
from pathlib import Path

import torch
from fairseq import options
from omegaconf import OmegaConf

from ..safe_load import num_updates
from .compat import compose

logger = logging.getLogger(__name__)


def fairseq_arguments(config_dir, recipe, overrides, user_arguments, processes=1, cuda=True, dry_run=False):
    """Arguments with which `fairseq-train` does on `processes` processes what the recipe says.

    recipe, overrides: as for `fairseq-hydra-train --config-dir config_dir --config-name recipe overrides...`.
    user_arguments: more arguments of fairseq-train, the data folder among them. They win over the recipe, and values
    of the recipe that refer to another value follow it. Three things are adjusted: the batch is split over the
    processes (`split_batch`; not if the user gives --update-freq), half precision is dropped where it cannot be or
    another precision is asked for, and a damaged checkpoint_last.pt is replaced (`stand_in_checkpoint`; a dry_run
    writes nothing).
    Raises ValueError for a value that no option can say, an impossible split, or checkpoints that are all damaged.
    """
    config = compose(config_dir, recipe, overrides)
    OmegaConf.set_struct(config, False)
    raw = OmegaConf.to_container(config, resolve=False)
    leaves = {}  # destination in fairseq's parser -> its places in the configuration
    for section, fields in raw.items():
        if not isinstance(fields, dict):
            raise ValueError(f"{recipe}: {section}={fields} belongs to no section; valid: {', '.join(raw)}")
        for key, value in fields.items():
            # Folders are not the recipe's to say: what Hydra fills in, and the data.
            if value != "???" and "${hydra:" not in str(value) and key != "data":
                name = key if key != "_name" else "arch" if section == "model" else section
                leaves.setdefault(name, []).append(f"{section}.{key}")

    parts = [(name, places[0]) for name, places in leaves.items() if places[0].endswith("._name")]
    chosen = [f"{_option(name)}={OmegaConf.select(config, place)}" for name, place in parts]
    parser = options.get_training_parser()
    given = vars(options.parse_args_and_arch(parser, [*chosen, *user_arguments], suppress_defaults=True))
    actions = {action.dest: action for action in parser._actions}

    for name, places in leaves.items():
        if name in given:
            for place in places:
                OmegaConf.update(config, place, given[name], merge=False)
    values = {}
    for name, places in leaves.items():
        found = [OmegaConf.select(config, place) for place in places]
        if name not in actions:
            raise ValueError(f"{recipe}: {places[0]} is no option of fairseq-train {' '.join(chosen)}")
        if any(value != found[0] for value in found):
            raise ValueError(f"{recipe}: {' and '.join(places)} share the option {_option(name)} but differ: {found}")
        values[name] = found[0]

    if "update_freq" not in given:
        batch = raw["dataset"]["batch_size"] * raw["optimization"]["update_freq"][0]
        values["batch_size"], steps = split_batch(batch, processes, values["batch_size"])
        values["update_freq"] = [steps]
    if processes > 1:
        values["distributed_world_size"] = processes
    if not cuda:
        values["cpu"] = True
    said = {**values, **given}
    if said.get("cpu") or said.get("amp") or str(said.get("autocast")) == "bf16":
        values["fp16"] = False
    if "restore_file" not in given:
        stand_in = stand_in_checkpoint(values["save_dir"])
        if stand_in and not given.get("finetune_from_model"):
            values["restore_file"] = stand_in
        elif stand_in and not dry_run:
            # fairseq takes only one of --restore-file and --finetune-from-model: put a copy where it looks.
            copy = Path(shutil.copyfile(stand_in, f"{stand_in}.{os.getpid()}.copy"))  # other nodes do the same
            copy.replace(Path(values["save_dir"]) / "checkpoint_last.pt")
    # The recipe goes last: it has taken in what the user said.
    return [*user_arguments, *(word for name, value in values.items() for word in _words(actions[name], value))]


def _option(name):
    return "--" + name.replace("_", "-")


def _words(action, value):
    """A value as the words of a command line: ["--lr=[0.1]"], and a switch as ["--fp16"] or []."""
    if action.nargs == 0:
        return [_option(action.dest)] if bool(value) != bool(action.default) else []
    return [f"{_option(action.dest)}={value}"]


def split_batch(batch, processes, limit):
    """(sequences per process and step, steps per update), whose product times `processes` is exactly `batch`.

    limit: most sequences that a process takes in one step; as few steps as possible.
    """
    if batch % processes:
        divisors = [n for n in range(1, batch + 1) if batch % n == 0]
        raise ValueError(
            f"a batch of {batch} sequences cannot be split evenly over {processes} processes; use one of {divisors} "
            "processes, or choose another batch with --batch-size and --update-freq"
        )
    if limit < 1:
        raise ValueError(f"--batch-size is {limit}; at least 1 sequence per process and step is needed")
    share = batch // processes
    steps = next(n for n in range(1, share + 1) if share % n == 0 and share // n <= limit)
    return share // steps, steps


def stand_in_checkpoint(save_dir):
    """The newest loadable checkpoint of a folder whose checkpoint_last.pt is damaged, else None.

    checkpoint_last.pt is a copy of another checkpoint; a run that is killed meanwhile leaves half of it.
    """
    last = Path(save_dir) / "checkpoint_last.pt"
    if not last.exists() or _num_updates(last) is not None:
        return None
    found = [(_num_updates(path), str(path)) for path in Path(save_dir).glob("checkpoint*.pt")]
    found = [(updates, path) for updates, path in found if updates is not None]
    if not found:
        raise ValueError(f"{last} is damaged, and no other checkpoint there can be loaded; move it away to start anew")
    updates, path = max(found)
    logger.warning(f"{last} is damaged; resuming from {path} ({updates} updates), the newest that can be loaded")
    return path


def _num_updates(path):
    """Updates after which a checkpoint was written, None if the file cannot be loaded. Does not read the tensors."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return num_updates(state)
    except (RuntimeError, EOFError, OSError, KeyError, pickle.UnpicklingError):
        return None
