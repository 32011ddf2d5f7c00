"""Writes, averages, strips and merges checkpoint files."""

import re
from collections.abc import Sequence
from pathlib import Path

import click
import torch
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import OmegaConf

from ..common import options as choices
from ..common.safe_load import num_updates
from ..plugin.gate import read_checkpoint
from ..plugin.model import spell_names
from ..plugin.saving import save
from .export import check_finite


def save_atomically(state: dict, path: str | Path) -> None:
    """Write a checkpoint, and its folder, so that readers see the old file or the new one, never half a file."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    save(state, str(path))


def save_new(state: dict, path: str | Path) -> None:
    """`save_atomically` where there is no file yet. Raises ValueError if there is one, and for weights that are not
    finite."""
    if Path(path).exists():
        raise ValueError(f"{path} exists already; choose another file or remove it")
    check_finite(state["model"])
    save_atomically(state, path)


def configuration(arch: str, model_options: dict, task: str = "tupe_masked_lm", criterion: str = "masked_lm") -> dict:
    """The configuration, as plain dicts, that fairseq-train would store for `--arch arch` with these model options."""
    words = [f"--{key.replace('_', '-')}={value}" for key, value in model_options.items()]
    arguments = [".", f"--arch={arch}", f"--task={task}", f"--criterion={criterion}", "--optimizer=adam", *words]
    own = {"tupe_masked_lm": [f"--tokens-per-sample={model_options['max_positions']}"]}
    arguments += own.get(task, [])
    parsed = options.parse_args_and_arch(options.get_training_parser(), arguments)
    config = convert_namespace_to_omegaconf(parsed)
    spell_names(config.model)
    return OmegaConf.to_container(config, resolve=True, enum_to_str=True)


def new_checkpoint(cfg: dict, model: dict, task_state: dict | None = None) -> dict:
    """A checkpoint with this configuration and model state, from which training starts at update 0 with a new
    optimizer. task_state: of the checkpoint that it is made of, whose labels stay."""
    history = {"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}, "num_updates": 0}
    return {
        "args": None,
        "cfg": cfg,
        "model": model,
        "criterion": {},
        "optimizer_history": [history],
        "task_state": {name: value for name, value in (task_state or {}).items() if name in ("labels", "layout")},
        "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0, "shuffle": True}, "val_loss": None},
        "last_optimizer_state": None,
    }


def strip(state: dict) -> dict:
    """The checkpoint without optimizer state: good for use and fine-tuning, not for resuming."""
    return {**state, "last_optimizer_state": None}


def newest(folder: str | Path, count: int) -> list[Path]:
    """The `count` checkpoints of a run's folder with the most updates, oldest first; copies (best, last) count once,
    averages not at all.

    Raises ValueError if there are fewer than `count`.
    """
    paths = {}  # updates -> checkpoint
    for path in sorted(Path(folder).glob("checkpoint*.pt")):
        state = read_checkpoint(path, mmap=True)
        if "fsdp_metadata" in state:
            raise ValueError(f"{path} is a part of a checkpoint; `tupe checkpoint merge` makes one file of its parts")
        if "averaged" not in state["extra_state"]:
            paths.setdefault(num_updates(state), path)
    if len(paths) < count:
        raise ValueError(f"{folder} has checkpoints after {sorted(paths)} updates: {len(paths)}, not {count}")
    return [paths[updates] for updates in sorted(paths)[-count:]]


def average(paths: Sequence) -> dict:
    """The last checkpoint with the mean of all weights, without optimizer state.

    Sums are in float64. Tensors of integers (settings, the dictionary's fingerprint) must be equal everywhere.
    Raises ValueError if the models differ.
    """
    if len(paths) < 2:
        raise ValueError(f"averaging needs at least two checkpoints, not {len(paths)}")
    total, state = {}, None
    for path in paths:
        state = read_checkpoint(path)
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
    extra = {key: value for key, value in state["extra_state"].items() if key != "best"}
    return strip({**state, "model": mean, "extra_state": {**extra, "val_loss": None, "averaged": len(paths)}})


def merge_shards(paths: Sequence) -> dict:
    """One checkpoint, without optimizer state, from the shards that `--ddp-backend fully_sharded --use-sharded-state`
    writes (checkpoint_last-shard0.pt, -shard1.pt, ...; one per process, in this order).

    For each wrapped module a shard holds a slice of its flattened parameters, padded to equal length, and a description
    of these parameters. Raises ValueError for files that are not all the shards of one checkpoint.
    """
    shards = [read_checkpoint(path) for path in paths]
    without = [str(path) for path, shard in zip(paths, shards, strict=True) if "fsdp_metadata" not in shard]
    if without:
        raise ValueError(f"{without[0]} is not a shard: it has no description of sharded parameters")
    if len({num_updates(shard) for shard in shards}) > 1:
        counts = ", ".join(f"{path} {num_updates(shard)}" for path, shard in zip(paths, shards, strict=True))
        raise ValueError(f"the shards have different numbers of updates ({counts}); give those of one checkpoint")
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
                    break  # not sharded: every process has all of it
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


# ------------------------------------------------------------------------------------------------------- the commands

INPUT = click.Path(path_type=Path)
OUTPUT = click.option("--output", type=choices.FILE, required=True, help="The file to write.")


@click.command("average", cls=choices.Command)
@click.argument("checkpoints", nargs=-1, required=True, type=INPUT)
@click.option(
    "--last", type=click.IntRange(2), metavar="K", help="Average the last K of a run. CHECKPOINTS is its folder."
)
@OUTPUT
def average_command(checkpoints, last, output):
    """Average the weights of several checkpoints (without optimizer state)."""
    if last and len(checkpoints) != 1:
        raise ValueError(f"--last takes the folder of one run, not {len(checkpoints)} paths")
    paths = newest(checkpoints[0], last) if last else checkpoints
    write(average(paths), paths, output)


@click.command("strip", cls=choices.Command)
@click.argument("checkpoint", type=INPUT)
@OUTPUT
def strip_command(checkpoint, output):
    """Remove the optimizer state of a checkpoint."""
    write(strip(read_checkpoint(checkpoint)), [checkpoint], output)


@click.command("merge", cls=choices.Command)
@click.argument("shards", nargs=-1, required=True, type=INPUT)
@OUTPUT
def merge_command(shards, output):
    """Merge the shards of --use-sharded-state into one checkpoint (without optimizer state)."""
    paths = sorted(shards, key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)])  # 2 before 10
    write(merge_shards(paths), paths, output)


def write(state: dict, paths: Sequence, output: Path) -> None:
    """Write a checkpoint and print its size and those of the files it was made from."""
    save_new(state, output)
    for path in paths:
        click.echo(f"read  {path}: {path.stat().st_size:,} bytes")
    click.echo(f"wrote {output}: {output.stat().st_size:,} bytes")
