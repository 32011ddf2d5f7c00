"""Averages, strips and merges checkpoints: files of fairseq's and folders of transformers alike."""

import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import click
import torch

from ..common import options as choices
from ..common.folder import written
from ..common.safe_load import num_updates
from ..data.splits import folders_of
from .export import check_finite, export
from .gate import read_checkpoint
from .trained import Trained, of_state, read_model, updates_of


def save_atomically(state: dict, path: str | Path) -> None:
    """Write a checkpoint of fairseq's, and its folder."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with written(path) as file:
        torch.save(state, file)


def write_model(trained: Trained, output: str | Path, data: str | Path | None = None) -> None:
    """Write a model where nothing is yet: a file of fairseq's if its name ends in .pt, else a folder of transformers.
    data: the folder of its dict.txt (default: the one that the model names). Raises ValueError if there is something,
    and for weights that are not finite."""
    output, data = Path(output), data or folders_of(trained.task.get("data", "."))[0]
    if output.suffix != ".pt":
        export(trained, output, data, code=False)
        return
    if output.exists():
        raise ValueError(f"{output} exists already; choose another file or remove it")
    check_finite(trained.weights)
    save_atomically(trained.state(), output)


@contextmanager
def as_file(checkpoint: str | Path) -> Iterator[Path]:
    """The file of a checkpoint, for fairseq to train from: of a folder a temporary one."""
    if not Path(checkpoint).is_dir():
        yield Path(checkpoint)
        return
    state = read_model(checkpoint).state()
    state["extra_state"]["made_from"] = str(Path(checkpoint).resolve())  # what the run's record is to call it
    with tempfile.TemporaryDirectory(prefix="tupe-") as folder:
        save_atomically(state, file := Path(folder, "checkpoint.pt"))
        yield file


def newest(folder: str | Path, count: int) -> list[Path]:
    """The `count` checkpoints of a run's folder with the most updates, oldest first; copies (best, last) count once,
    averages not at all.

    Raises ValueError if there are fewer than `count`.
    """
    paths = {updates_of(path): path for path in Path(folder).glob("checkpoint-*") if (path / "config.json").is_file()}
    for path in sorted(Path(folder).glob("checkpoint*.pt")):
        state = read_checkpoint(path, mmap=True)
        if "fsdp_metadata" in state:
            raise ValueError(f"{path} is a part of a checkpoint; `tupe checkpoint merge` makes one file of its parts")
        if "averaged" not in state["extra_state"]:
            paths.setdefault(num_updates(state), path)
    if len(paths) < count:
        raise ValueError(f"{folder} has checkpoints after {sorted(paths)} updates: {len(paths)}, not {count}")
    return [paths[updates] for updates in sorted(paths)[-count:]]


def average(paths: Sequence) -> Trained:
    """The last model with the mean of all weights.

    Sums are in float64. Tensors of integers (settings, the dictionary's fingerprint) must be equal everywhere.
    Raises ValueError if the models differ.
    """
    if len(paths) < 2:
        raise ValueError(f"averaging needs at least two checkpoints, not {len(paths)}")
    total, last = {}, None
    for path in paths:
        last = read_model(path)
        if total and {k: v.shape for k, v in last.weights.items()} != {k: v.shape for k, v in total.items()}:
            differ = sorted(
                k for k in {*last.weights, *total}
                if k not in last.weights or k not in total or last.weights[k].shape != total[k].shape
            )  # fmt: skip
            raise ValueError(f"{path} is another model than {paths[0]}: {', '.join(differ[:5])}")
        for key, value in last.weights.items():
            if not value.is_floating_point():
                if not torch.equal(total.setdefault(key, value), value):
                    raise ValueError(f"{path} differs from {paths[0]} in {key}: other settings or another dictionary")
            else:
                total[key] = total[key] + value.double() if key in total else value.double()
    mean = {k: (v / len(paths)).to(last.weights[k].dtype) if v.is_floating_point() else v for k, v in total.items()}
    extra = {key: value for key, value in last.extra.items() if key != "best"}
    return replace(last, weights=mean, extra={**extra, "val_loss": None, "averaged": len(paths)})


def merge_shards(paths: Sequence) -> Trained:
    """The model in the shards that `--ddp-backend fully_sharded --use-sharded-state`
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
    return of_state({**shards[0], "model": {**model, **rest}}, paths[0])


# ------------------------------------------------------------------------------------------------------- the commands

INPUT = click.Path(path_type=Path)
OUTPUT = click.option("--output", type=choices.FILE, required=True, help="NAME.pt: a file of fairseq's; else a folder.")


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
    """Keep of a checkpoint what is the model: no optimizer state."""
    write(read_model(checkpoint), [checkpoint], output)


@click.command("merge", cls=choices.Command)
@click.argument("shards", nargs=-1, required=True, type=INPUT)
@OUTPUT
def merge_command(shards, output):
    """Merge the shards of --use-sharded-state into one checkpoint (without optimizer state)."""
    paths = sorted(shards, key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)])  # 2 before 10
    write(merge_shards(paths), paths, output)


def write(trained: Trained, paths: Sequence, output: Path) -> None:
    """Write a model and print its size and those of what it was made from."""
    write_model(trained, output)
    for path in paths:
        click.echo(f"read  {path}: {size_of(path):,} bytes")
    click.echo(f"wrote {output}: {size_of(output):,} bytes")


def size_of(path: Path) -> int:
    """Bytes of a file, or of all in a folder."""
    return sum(file.stat().st_size for file in path.iterdir()) if path.is_dir() else path.stat().st_size
