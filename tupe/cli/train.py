"""The commands that train: pretrain and finetune. torch and fairseq are imported when one of them runs, after its words
are read and the memory allocator is chosen: a mistake is refused at once."""

import re
import shlex
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from .. import config
from ..common import console, options
from ..common.allocator import use_allocator
from ..common.options import CONFIGS, Command, did_you_mean, task_key
from ..common.prepared import check_name, tasks_in
from ..common.recipes import Settings, read
from ..config import FINETUNE, PRETRAIN
from ..names import schemes_in, unknown_scheme
from ..run.folder import is_locked

RECIPES = sorted({path.stem for path in CONFIGS.glob("*.yaml")} - {"finetune"})
OWN = "own"  # of configs/glue: any other task
GLUE = sorted({path.stem for path in (CONFIGS / "glue").glob("*.yaml")} - {OWN})  # cola, mnli, ...
ENGINES = {"fairseq": "plugin", "torch": "train"}  # where they are
ENGINE = options.OneOf(list(ENGINES), dict.fromkeys(config.TORCH, "torch"))
FURTHER = """They win over the recipe, configs/RECIPE.yaml. Any value of the recipe and any other setting of fairseq is
given as SECTION.KEY=VALUE, for example model.dropout=0 or checkpoint.restore_file=FILE."""
METAVARS = {int: " N", float: " X", bool: "", str: " WORD", config.PAIR: " '(X, X)'"}


def rows(command: str, *recipes: str) -> list[tuple[str, str]]:
    """(option, text with the values of these recipes) of all options of a command."""
    found, settings = [], [read(recipe, []) for recipe in recipes]
    for name, known in config.OPTIONS.items():
        if command in known.of and known.place not in SET_BY_COMMAND[command]:
            values = [each.batch[0] if name == "batch_size" and each.batch else each[name] for each in settings]
            shown = ["" if value in (False, "") else f"{value}".strip("[]") for value in values]
            value = shown[0] if len({*shown}) == 1 else "; ".join(shown)
            metavar = f" {'|'.join(known.choices)}" if known.choices else METAVARS.get(known.kind, " X")
            found.append((known.flag + metavar, known.help + (f"  [{value}]" if value else "")))
    return found


class Train(Command):
    """A command with further words: options of a training, and values of the recipe. recipes: those whose values its
    help shows."""

    def __init__(self, *args, recipes: tuple = (), **kwargs):
        super().__init__(*args, epilog=FURTHER, context_settings={"ignore_unknown_options": True}, **kwargs)
        self.recipes = recipes

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        command = FINETUNE if FINETUNE in self.recipes else PRETRAIN
        with formatter.section(f"Options of the recipe [value of {'; '.join(self.recipes)}]"):
            formatter.write_dl(rows(command, *self.recipes))
        super().format_epilog(ctx, formatter)

    def begin(self, ctx: click.Context) -> None:
        """Files of encodings are run by `start`, when the words are read."""


def launcher(function: Callable) -> Callable:
    """The options of every command that trains: what trains, where, and the further words."""
    whole, positive = click.IntRange(0), click.IntRange(1)
    for decorator in (
        click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[--OPTION VALUE] [SECTION.KEY=VALUE] ..."),
        click.option("--dry-run", is_flag=True, help="Print what would run: a command of fairseq-train, or settings."),
        click.option("--yes", is_flag=True, help="Train on a CPU even if that takes more than a week."),
        click.option("--allocator", help="The memory allocator to preload, or none (default: tcmalloc on CPUs)."),
        click.option("--micro-batch-size", type=positive, help="How many sequences a GPU takes at a time, at most; the "
                     "batch stays the same (default: the recipe's)."),
        click.option("--master-port", type=click.IntRange(1, 65535), default=29500, show_default=True,
                     help="A free port of that machine."),
        click.option("--master-addr", default="localhost", show_default=True, help="The name of the first machine."),
        click.option("--node-rank", type=whole, default=0, help="The number of this machine, from 0."),
        click.option("--nodes", type=positive, default=1, help="The number of machines."),
        click.option("--gpus", type=whole, help="GPUs of this machine (default: all visible); 0 takes the CPU."),
        click.option("--engine", type=ENGINE, default="fairseq", show_default=True,
                     help="What trains: fairseq, or a loop in plain PyTorch that writes transformers' folders."),
    ):  # fmt: skip
        function = decorator(function)
    return function


@click.command(cls=Train, recipes=("pretrain", "pretrain_small"))
@options.data()
@options.output("The folder of the run: checkpoints, record and train.log. An existing run is resumed.", shared=True)
@click.option("--recipe", type=options.OneOf(RECIPES), default="pretrain", show_default=True,
              help="The recipe: a file of configs/.")  # fmt: skip
@click.option("--preset", metavar="NAME", help="A model of configs/model.")
@click.option("--arch", metavar="NAME", help="The architecture; see `tupe list models` (default: the recipe's).")
@launcher
def pretrain(data, output, recipe, preset, arch, engine, words, **machine):
    """Train a masked language model or an ELECTRA, from scratch as the paper does, or further:

    tupe pretrain --recipe pretrain_further --finetune-from-model CHECKPOINT --data DATA --output DIR

    An update trains on the same batch whatever the number of GPUs: the recipe's, or --batch-size sequences. Mixed
    precision is --fp16 or --autocast bf16.

    The encoding is that of the architecture, or what --position says instead (`tupe list schemes`). [CLS] is then as in
    the architecture beside `untied`, and tied beside any other encoding, unless --cls says otherwise.
    """
    chosen = [f"model={preset}"] if preset is not None else []
    chosen += [f"--arch={arch}"] if arch is not None else []
    settings = settings_of(PRETRAIN, recipe, chosen, words, {"checkpoint.save_dir": output})
    if not machine["dry_run"]:
        check_data(data, settings)
    start(settings, data, machine, engine)


@click.command(cls=Train, recipes=("finetune",))
@click.option("--task", required=True, metavar="NAME", help="A task of GLUE, or your own.")
@options.data("The folder that `tupe prepare glue` or `labels` wrote.")
@options.checkpoint()
@options.output("The folder of the run: checkpoints, record with every score, predictions and train.log.", shared=True)
@launcher
def finetune(task, data, checkpoint, output, engine, words, **machine):
    """Fine-tune a checkpoint on a GLUE task or a task of your own, as the paper does. The model is the checkpoint's."""
    name, values = task_key(task), {"checkpoint.save_dir": output, "checkpoint.finetune_from_model": checkpoint}
    chosen = f"glue={name}"
    if name not in GLUE:
        own = [each for each in tasks_in(data) if task_key(each) not in GLUE]
        if name not in map(task_key, own):
            raise ValueError(f"unknown task {task!r}{did_you_mean(name, [*GLUE, *own])}")
        chosen = f"glue={OWN}"
        values["task.glue_task"] = next(each for each in own if task_key(each) == name)
    settings = settings_of(FINETUNE, "finetune", [chosen], words, values)
    if not machine["dry_run"]:
        check_data(data, settings, task)
    start(settings, data, machine, engine)


# ------------------------------------------------------------------------------------------------ before torch is there

# What a command sets itself -> the option that says it.
SET_BY_COMMAND = {
    PRETRAIN: {"checkpoint.save_dir": "--output", "task.data": "--data"},
    FINETUNE: {
        "checkpoint.save_dir": "--output", "task.data": "--data", "checkpoint.finetune_from_model": "--checkpoint",
        "task.glue_task": "--task", "glue": "--task",
    },
}  # fmt: skip


def settings_of(
    command: str, recipe: str, chosen: list[str], words: Iterable[str], values: dict[str, Any]
) -> Settings:  # fmt: skip
    """What a command was told. chosen, words: by its own options, and beside them; values: {place in the recipe: what
    the command sets itself}. Raises ValueError for what is unknown, or not valid."""
    for name, _ in config.split_words(words):
        known = config.named(name)
        if given := SET_BY_COMMAND[command].get(known.place if known else name.lstrip("+")):
            raise ValueError(f"{name}: give {given} instead")
    words = [*chosen, *options.position_file(), *words]
    settings = read(recipe, words, options.own_options(), values)
    if not settings["position_file"] and "common.user_dir" not in settings.values:
        check_schemes(str(settings.values.get("model.position", "")))
    return settings


def check_schemes(position: str) -> None:
    """Raise ValueError for a position encoding that no file of the package registers. Options of encodings are for
    `positions.parse`, which needs torch."""
    registered = re.compile(r'^@register\("(\w+)"\)', re.MULTILINE)
    files = sorted(CONFIGS.parent.glob("schemes*.py"))
    known = [name for path in files for name in registered.findall(path.read_text(encoding="utf-8"))]
    for name in schemes_in(position) if position else ():
        if name not in known:
            raise ValueError(unknown_scheme(name, position, known))


def check_data(data: Path, settings: Settings, task: str | None = None) -> None:
    """Raise ValueError for a folder that holds no prepared data, or not the splits or the task of a training."""
    from ..data.splits import folders_of, read_symbols  # only here: numpy takes as long to import as all the rest

    folders = folders_of(data)
    for folder in folders:
        check_name(folder)
        read_symbols(folder)
    if task is not None:
        if task_key(task) not in map(task_key, there := tasks_in(folders[0])):
            raise ValueError(f"{folders[0]} has no {task}; prepared there: {', '.join(there) or 'none'}")
        return
    validated = () if settings["disable_validation"] else settings["valid_subset"].split(",")
    for name in (settings["train_subset"], *validated):
        if not any((folders[0] / file).is_file() for file in (f"{name}.idx", name)):
            there = ", ".join(sorted(path.stem for path in folders[0].glob("*.idx"))) or "none is prepared there"
            raise ValueError(f"{folders[0]} has no split {name!r}; valid: {there}")


# -------------------------------------------------------------------------------------------------------------- with it


def start(settings: Settings, data: Path, machine: dict, engine: str = "fairseq") -> None:
    """Train: in this process, or in several that torchrun starts, each of which is this very command. machine: the
    options of `launcher`."""
    use_allocator(machine["allocator"])  # starts the process again if torch is not there yet
    options.run_own_files()
    import torch

    from ..run.torchrun import gpus_to_use, run_torchrun, words_of_nodes

    is_started, dry_run = torch.distributed.is_torchelastic_launched(), machine["dry_run"]
    gpus = gpus_to_use(machine["gpus"], machine["nodes"], machine["node_rank"], dry_run or is_started)
    processes = max(gpus, 1) * machine["nodes"]
    where = words_of_nodes(gpus, *(machine[name] for name in ("nodes", "node_rank", "master_addr", "master_port")))
    prepare = import_module(f"..{ENGINES[engine]}.launch", __package__).prepare
    with console.logged():
        shown, train = prepare(settings, data, processes, gpus, dry_run, machine["micro_batch_size"])
        if dry_run:
            several = processes > 1 and engine == "fairseq"
            print(f"torchrun {shlex.join(where)} --no-python {shown}" if several else shown)
        elif processes == 1 or is_started:
            train(machine["yes"])
        else:  # the other processes of a start that the lock refuses would end with errors of their own
            if machine["node_rank"] == 0 and is_locked(folder := settings["save_dir"]):
                raise BlockingIOError(f"another process is training in {folder}")
            run_torchrun([*where, "-m", "tupe", *sys.argv[1:]])
