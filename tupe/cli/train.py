"""The commands that train: pretrain and finetune. torch and fairseq are imported when one of them runs, after its words
are read and the memory allocator is chosen: a mistake is refused at once."""

import logging
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from .. import config
from ..common import console, options
from ..common.architectures import preset
from ..common.options import CONFIGS, Command, did_you_mean, task_key
from ..common.prepared import check_name, tasks_in
from ..common.recipes import MODEL, Settings, read
from ..config import FINETUNE, PRETRAIN
from ..names import schemes_in, unknown_scheme
from ..run.folder import is_locked

RECIPES = [name for name in options.RECIPES if name != "finetune"]
OWN = "own"  # of configs/glue: any other task
GLUE = sorted({path.stem for path in (CONFIGS / "glue").glob("*.yaml")} - {OWN})  # cola, mnli, ...
ENGINES = {"fairseq": "plugin", "torch": "train"}  # where they are
ENGINE = options.OneOf(list(ENGINES))
FURTHER = """They win over the recipe, configs/RECIPE.yaml. Any value of the recipe and any other setting of fairseq is
given as SECTION.KEY=VALUE, for example model.dropout=0 or checkpoint.continue_once=FILE."""
SET_BY_COMMAND = {  # of a training's options, by these of the command
    PRETRAIN: {"save_dir": "--output"},
    FINETUNE: {"save_dir": "--output", "finetune_from_model": "--checkpoint", "glue_task": "--task"},
}
logger = logging.getLogger(__name__)
METAVARS = {int: " N", float: " X", bool: "", str: " WORD", config.PAIR: " '(X, X)'"}


def rows(command: str) -> list[tuple[str, str]]:
    """(option, text with the value of the command's recipe and its architecture) of all options of a command."""
    found, settings = [], read(command, [])
    others = [read(command, [f"glue={task}"]).values for task in GLUE] if command == FINETUNE else []
    architecture = preset(settings["arch"]) if command == PRETRAIN else {}
    for name, known in config.OPTIONS.items():
        if command in known.of and name not in (*SET_BY_COMMAND[command], "arch"):  # --arch is the command's own
            value = settings.values.get(known.place, architecture.get(MODEL.get(known.place, ""), known.default))
            value = settings.batch[0] if name == "batch_size" else value
            if name == "precision" and settings["fp16"]:
                value = "fp16 on a GPU, else float32"
            if any(each.get(known.place) != settings.values.get(known.place) for each in others):
                value = ""  # the task decides
            value = "" if value in (False, "") else f"{value}".strip("[]")
            metavar = f" {'|'.join(known.choices)}" if known.choices else METAVARS.get(known.kind, " X")
            found.append((known.flag + metavar, known.help + (f"  [{value}]" if value else "")))
    return found


class Train(Command):
    """A command with further words: options of a training, and values of the recipe."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, epilog=FURTHER, context_settings={"ignore_unknown_options": True}, **kwargs)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section(f"Options of the recipe [value of {self.name}]"):
            formatter.write_dl(rows(self.name))
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
        click.option("--allocator", type=click.Choice(["tcmalloc", "none"]), help="On a CPU, what memory comes from."),
        click.option("--micro-batch-size", type=positive, help="How many sequences a GPU takes at a time, at most; the "
                     "batch stays the same (default: the recipe's)."),
        click.option("--master-port", type=click.IntRange(1, 65535),
                     help="A free port of that machine (default: 29500; with one machine any that is free)."),
        click.option("--master-addr", default="localhost", show_default=True, help="The name of the first machine."),
        click.option("--node-rank", type=whole, default=0, help="The number of this machine, from 0."),
        click.option("--nodes", type=positive, default=1, help="The number of machines."),
        click.option("--gpus", type=whole, help="GPUs of this machine (default: all visible); 0 takes the CPU."),
        click.option("--engine", type=ENGINE, default="fairseq", show_default=True,
                     help="What trains: fairseq, or a loop in plain PyTorch that writes transformers' folders."),
    ):  # fmt: skip
        function = decorator(function)
    return function


@click.command(cls=Train)
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

    An update trains on the same batch whatever the number of GPUs: the recipe's, or --batch-size sequences. --precision
    fp16 and bf16 train half-precision weights beside float32 copies.

    The encoding is that of the architecture, or what --position says instead (`tupe list schemes`). [CLS] is then as in
    the architecture beside `untied`, and tied beside any other encoding, unless --cls says otherwise.
    """
    chosen = [f"model={preset}"] if preset is not None else []
    chosen += [f"--arch={arch}"] if arch is not None else []
    settings = settings_of(recipe, chosen, words, {"checkpoint.save_dir": output, "task.data": data})
    if not machine["dry_run"]:
        check_data(data, settings)
    start(settings, data, machine, engine)


@click.command(cls=Train)
@click.option("--task", required=True, metavar="NAME", help="A task of GLUE, or your own.")
@options.data("The folder that `tupe prepare glue` or `labels` wrote.")
@options.checkpoint()
@options.output("The folder of the run: checkpoints, record with every score, predictions and train.log.", shared=True)
@launcher
def finetune(task, data, checkpoint, output, engine, words, **machine):
    """Fine-tune a checkpoint on a GLUE task or a task of your own, as the paper does. The model is the checkpoint's."""
    name, chosen = task_key(task), f"glue={task_key(task)}"
    values = {"checkpoint.save_dir": output, "checkpoint.finetune_from_model": checkpoint, "task.data": data}
    if name not in GLUE:
        own = [each for each in tasks_in(data) if task_key(each) not in GLUE]
        if name not in map(task_key, own):
            missing = "" if data.is_dir() else f"; data folder not found: {data}"
            raise ValueError(f"unknown task {task!r}{did_you_mean(name, [*GLUE, *own])}{missing}")
        chosen = f"glue={OWN}"
        values["task.glue_task"] = next(each for each in own if task_key(each) == name)
    settings = settings_of("finetune", [chosen], words, values)
    if not machine["dry_run"]:
        check_data(data, settings, task)
    start(settings, data, machine, engine)


# ------------------------------------------------------------------------------------------------ before torch is there


def settings_of(recipe: str, chosen: list[str], words: Iterable[str], values: dict[str, Any]) -> Settings:
    """What a command was told. chosen, words: by its own options, and beside them; values: {place in the recipe: what
    the command sets itself}. Raises ValueError for what is unknown, or not valid."""
    settings = read(recipe, [*chosen, *options.position_file(), *words], options.own_options(), values)
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
    """Raise ValueError for a folder that holds no prepared data, or not the splits or the task of a training, whole."""
    from ..data.glue import check_glue, glue_name  # only here: numpy takes as long to import as all the rest
    from ..data.splits import Split, folders_of, prefixes_of, read_symbols, validated

    folders = folders_of(data)
    for folder in folders:
        check_name(folder)
        types = len(read_symbols(folder))
    train = settings["train_subset"]
    if len(folders) > 1 and not train.startswith("train"):  # see `prefixes_of`
        raise ValueError(f"--train-subset {train}: in several folders of data, its name has to begin with 'train'")
    held_out = validated(settings["valid_subset"], train)
    names = [train, *([] if settings["disable_validation"] else held_out)]
    if task is not None:
        if task_key(task) not in map(task_key, there := tasks_in(folders[0])):
            raise ValueError(f"{folders[0]} has no {task}; prepared there: {', '.join(there) or 'none'}")
        for name in names:
            check_glue(folders[0] / glue_name(task, folders[0]), name, labelled=True)
        return
    for name in names:
        if not (folders[0] / f"{name}.idx").is_file():
            there = ", ".join(sorted(path.stem for path in folders[0].glob("*.idx"))) or "none is prepared there"
            raise ValueError(f"{folders[0]} has no split {name!r}; valid: {there}")
        for prefix in prefixes_of(data, name):
            Split(prefix, types)  # raises ValueError for one that is not whole


def use_allocator() -> None:
    """Take main memory from tcmalloc on machines that have it and no GPU: start the process again with LD_PRELOAD.

    glibc returns a step's memory to the system, which clears every page anew for the next one; what that costs on a CPU
    is in docs/benchmarks.md. Where LD_PRELOAD is set already, if to nothing, and in a process that has loaded torch,
    all stays as it is.
    """
    if "LD_PRELOAD" in os.environ or "torch" in sys.modules or Path("/dev/nvidiactl").exists():
        return
    if library := tcmalloc():
        click.echo(f"memory from {library}", err=True)
        os.execve(sys.executable, sys.orig_argv, {**os.environ, "LD_PRELOAD": library})


def tcmalloc() -> str | None:
    """Path of the library, None if it is not installed."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/sbin", "/usr/sbin"])
    try:
        known = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, env={"PATH": path}).stdout
    except FileNotFoundError:
        return None
    return next(reversed(re.findall(r"libtcmalloc(?:_minimal)?\.so.* => (\S+)", known)), None)


# -------------------------------------------------------------------------------------------------------------- with it


def start(settings: Settings, data: Path, machine: dict, engine: str = "fairseq") -> None:
    """Train: in this process, or in several that torchrun starts, each of which is this very command. machine: the
    options of `launcher`."""
    if machine["allocator"] != "none":
        use_allocator()  # starts the process again if torch is not there yet
    options.run_own_files()
    import torch

    from ..run.torchrun import check_environment, free_port, gpus_to_use, run_torchrun

    is_started, dry_run = torch.distributed.is_torchelastic_launched(), machine["dry_run"]
    wanted = 0 if machine["gpus"] is None and settings["cpu"] else machine["gpus"]
    gpus = gpus_to_use(wanted, machine["nodes"], machine["node_rank"], dry_run or is_started)
    processes = max(gpus, 1) * machine["nodes"]
    where = [f"--nproc-per-node={max(gpus, 1)}", f"--nnodes={machine['nodes']}", f"--node-rank={machine['node_rank']}"]
    port = machine["master_port"] or (free_port() if processes > 1 == machine["nodes"] and not dry_run else 29500)
    where += [f"--master-addr={machine['master_addr']}", f"--master-port={port}"]
    prepare = import_module(f"..{ENGINES[engine]}.launch", __package__).prepare
    with console.logged(Path(settings["save_dir"])):
        rises, ends = settings["warmup_updates"], settings["max_update"]
        if 0 < ends < rises and not (dry_run or is_started):
            logger.warning(
                f"the learning rate rises for {rises:,} updates, the run ends at {ends:,}: give fewer --warmup-updates"
            )
        shown, train = prepare(settings, data, processes, gpus, dry_run, machine["micro_batch_size"])
        if dry_run:
            several = processes > 1 and engine == "fairseq"
            print(f"torchrun {shlex.join(where)} --no-python {shown}" if several else shown)
        elif processes == 1 or is_started:
            check_environment(processes)
            train(machine["yes"])
        else:  # the other processes of a start that the lock refuses would end with errors of their own
            if machine["node_rank"] == 0 and is_locked(folder := settings["save_dir"]):
                raise BlockingIOError(f"another process is training in {folder}")
            run_torchrun([*where, "-m", "tupe", *sys.argv[1:]])
