"""Checkpoint files: loading them without running code from them, their dictionary, writing, averaging, stripping and
merging them."""

import pickle
import re
import zipfile
from pathlib import Path
from types import SimpleNamespace

import torch
from fairseq import options
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import OmegaConf

from ..plugin.model import TupeModel

MASK = "<mask>"
NOT_OURS = (
    "no checkpoint of this project: it holds no configuration or no model (scripts/convert_checkpoint.py makes one of "
    "what the released TUPE code wrote)"
)
# fairseq 0.9 pickled its progress meters into checkpoints, as objects of a module that is gone. Classes of the same
# names that only hold data stand in for them; nothing of fairseq runs.
OLD_METERS = [
    type(name, (), {"__module__": "fairseq.meters"}) for name in ("AverageMeter", "TimeMeter", "StopwatchMeter")
]


def load_safely(path, mmap=False):
    """The contents of a checkpoint of this project, of fairseq, or of the released TUPE code, on the CPU.

    Only tensors and plain data are read: a file that asks for anything else is refused with a ValueError, and nothing
    of it is run. mmap: leave the tensors on disk until they are used, where the file's format allows it.
    """
    allowed = list(torch.serialization.get_safe_globals())  # torch 2.4 hands out the list itself
    torch.serialization.add_safe_globals(OLD_METERS)
    try:
        # the format of torch < 1.6 cannot be mapped
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap and zipfile.is_zipfile(path))
    except FileNotFoundError:
        raise ValueError(f"there is no checkpoint {path}") from None
    except pickle.UnpicklingError as error:
        named = re.search(r"(?:GLOBAL|Unsupported (?:global|class|operand))[: ]+(\S+( \S+)?)", str(error))
        what = f" ({named.group(1).rstrip('.')})" if named else ""
        raise ValueError(
            f"{path} is refused: it is no checkpoint, or holds more than tensors and plain data{what}"
        ) from error
    except Exception as error:  # reading a damaged pickle can fail in any way
        raise ValueError(f"{path} cannot be read: {error}") from error
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(allowed)


def training_state(path, mmap=False):
    """`load_safely` for a checkpoint of this project; anything else is a ValueError."""
    state = load_safely(path, mmap)
    if not isinstance(state, dict) or not state.get("cfg") or "model" not in state:
        raise ValueError(f"{path} is {NOT_OURS}")
    return state


def load_dictionary(path):
    """dict.txt with <mask> added, as fairseq's task masked_lm does."""
    if not Path(path).is_file():
        raise ValueError(f"there is no dictionary {path}; give the dict.txt that the model was trained with")
    dictionary = Dictionary.load(str(path))
    dictionary.add_symbol(MASK)
    return dictionary


def check_dictionary(state, path):
    """Raise ValueError unless the dict.txt `path` is the one that the model of a `training_state` was trained with."""
    dictionary, types = load_dictionary(path), len(state["model"]["encoder.tokens.weight"])
    if len(dictionary) != types:
        raise ValueError(
            f"{path} makes {len(dictionary)} types, the model has {types}: another model's dictionary; take the "
            "dict.txt of its own pre-training data"
        )
    fingerprint = TupeModel.get_extra_state(SimpleNamespace(dictionary=dictionary))
    if not torch.equal(state["model"].get("_extra_state", fingerprint), fingerprint):
        raise ValueError(f"{path} has as many types as the model's dictionary, but other ones or in another order")


def save_atomically(state, path):
    """Readers see the old file or the new one, never half of it."""
    partial = Path(f"{path}.partial")
    torch.save(state, partial)
    partial.replace(path)


def configuration(arch, model_options, task="masked_lm", criterion="masked_lm"):
    """The configuration, as plain dicts, that fairseq-train would store for `--arch arch` with these model options."""
    words = [f"--{key.replace('_', '-')}={value}" for key, value in model_options.items()]
    arguments = [".", f"--arch={arch}", f"--task={task}", f"--criterion={criterion}", "--optimizer=adam", *words]
    own = {"masked_lm": f"--tokens-per-sample={model_options['max_positions']}", "squad": "--squad=."}
    arguments.append(own[task])
    parsed = options.parse_args_and_arch(options.get_training_parser(), arguments)
    return OmegaConf.to_container(convert_namespace_to_omegaconf(parsed), resolve=True, enum_to_str=True)


def new_checkpoint(cfg, model):
    """A checkpoint with this configuration and model state, from which training starts at update 0 with a new
    optimizer."""
    history = {"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}, "num_updates": 0}
    return {
        "args": None,
        "cfg": cfg,
        "model": model,
        "criterion": {},
        "optimizer_history": [history],
        "task_state": {},
        "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0, "shuffle": True}, "val_loss": None},
        "last_optimizer_state": None,
    }


def num_updates(state):
    return state["optimizer_history"][-1]["num_updates"]


def strip(state):
    """The checkpoint without optimizer state: for use and fine-tuning, not for resuming."""
    return {**state, "last_optimizer_state": None}


def newest(folder, count):
    """The checkpoints of a run's folder after the most updates, oldest first; copies (best, last) count once.

    Raises ValueError if there are fewer than `count`.
    """
    found = {}
    for path in sorted(Path(folder).glob("checkpoint*.pt")):
        found.setdefault(num_updates(training_state(path)), path)
    if len(found) < count:
        raise ValueError(f"{folder} has checkpoints after {sorted(found)} updates: {len(found)}, not {count}")
    return [found[updates] for updates in sorted(found)[-count:]]


def average(paths):
    """The last checkpoint with the mean of the weights of all, without optimizer state.

    Sums are taken in float64. Tensors of integers (settings, the dictionary's fingerprint) must be equal everywhere.
    Raises ValueError if models differ.
    """
    if len(paths) < 2:
        raise ValueError(f"averaging needs at least two checkpoints, not {len(paths)}")
    total, state = {}, None
    for path in paths:
        state = training_state(path)
        model = state["model"]
        if total and {k: v.shape for k, v in model.items()} != {k: v.shape for k, v in total.items()}:
            differ = sorted(
                k for k in {*model, *total} if k not in model or k not in total or model[k].shape != total[k].shape
            )
            raise ValueError(f"{path} is another model than {paths[0]}: {', '.join(differ[:5])}")
        for key, value in model.items():
            if not value.is_floating_point():
                if not torch.equal(total.setdefault(key, value), value):
                    raise ValueError(f"{path} differs from {paths[0]} in {key}: other settings or another dictionary")
            else:
                total[key] = total[key] + value.double() if key in total else value.double()
    mean = {k: (v / len(paths)).to(model[k].dtype) if v.is_floating_point() else v for k, v in total.items()}
    return strip({**state, "model": mean})


def merge_shards(paths):
    """One checkpoint, without optimizer state, from the shards that `--ddp-backend fully_sharded --use-sharded-state`
    writes (checkpoint_last-shard0.pt, -shard1.pt, ...; one per process, in this order).

    A shard holds, per wrapped module, a slice of its flattened parameters, padded to equal length, and a description of
    what was flattened.
    """
    shards = [training_state(path) for path in paths]
    without = [str(path) for path, shard in zip(paths, shards, strict=True) if "fsdp_metadata" not in shard]
    if without:
        raise ValueError(f"{without[0]} is not a shard: it has no description of sharded parameters")
    if len({num_updates(shard) for shard in shards}) > 1:
        said = ", ".join(f"{path} {num_updates(shard)}" for path, shard in zip(paths, shards, strict=True))
        raise ValueError(f"the shards are of different numbers of updates ({said}); give those of one checkpoint")
    model, sharded = {}, set()
    for number, module in enumerate(shards[0]["fsdp_metadata"]["param_metadata"]):
        prefix = module["fsdp_path"] + "." if module["fsdp_path"] else ""
        for name, description in module["params"].items():
            key, slices = prefix + name, []
            for path, shard in zip(paths, shards, strict=True):
                if key not in shard["model"]:
                    raise ValueError(f"{path} has no parameters {key!r}: shards of another run?")
                padding = shard["fsdp_metadata"]["param_metadata"][number]["params"][name]["padding"]
                flat = shard["model"][key]
                slices.append(flat[: len(flat) - padding])
                if module["no_broadcast_optim_state"]:
                    break  # not sharded: every process has it whole
            sharded.add(key)
            whole = torch.cat(slices)
            if len(whole) != sum(description["numels"]):
                raise ValueError(
                    f"the {len(paths)} shards hold {len(whole)} of the {sum(description['numels'])} values of {key!r}: "
                    "is a shard missing, or one given twice?"
                )
            for own, flat, shape in zip(
                description["names"], whole.split(description["numels"]), description["shapes"], strict=True
            ):
                model[prefix + own] = flat.view(shape)
        for source, target in module["shared_param_info"]:
            model[prefix + target] = model[prefix + source]
    rest = {key: value for key, value in shards[0]["model"].items() if key not in sharded}  # buffers, settings
    return strip(
        {key: value for key, value in {**shards[0], "model": {**model, **rest}}.items() if key != "fsdp_metadata"}
    )
