"""The commands that train: pretrain and finetune. torch and fairseq are imported when one of them runs, after
the memory allocator is chosen."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path

import click

from ..common import console, options
from ..common.allocator import use_allocator
from ..common.architectures import ARCHITECTURES
from ..common.options import CONFIGS, Command, ListOf, did_you_mean, task_key
from ..common.prepared import tasks_in
from ..common.recipes import compose, resolved
from . import checks

RECIPES = sorted({path.stem for path in CONFIGS.glob("*.yaml")} - {"finetune"})
OWN = "own"  # of configs/glue: any other task
GLUE = sorted({path.stem for path in (CONFIGS / "glue").glob("*.yaml")} - {OWN})  # cola, mnli, ...
ENGINES = {"fairseq": "plugin", "transformers": "training"}  # where they are
EVERYDAY = {  # options of the recipe that most runs change: the option -> (its place in a recipe, what it is)
    "--position NAME": ("model.position", "The position encoding; see `tupe list schemes`."),
    "--lr X": ("optimization.lr", "The highest learning rate."),
    "--batch-size N": ("dataset.batch_size", "Sequences of an update, on all GPUs together."),
    "--max-update N": ("optimization.max_update", "The length of the run in updates."),
    "--max-epoch N": ("optimization.max_epoch", "The length of the run in epochs."),
    "--warmup-updates N": ("lr_scheduler.warmup_updates", "Updates in which the learning rate rises."),
    "--warmup-ratio X": ("lr_scheduler.warmup_ratio", "The share of updates in which the rate rises."),
    "--tokens-per-sample N": ("task.tokens_per_sample", "Tokens of a sequence."),
    "--mask-prob X": ("task.mask_prob", "The share of the tokens that is predicted."),
    "--seed N": ("common.seed", "The seed of weights, order, masks and dropout."),
    "--validate-interval-updates N": ("dataset.validate_interval_updates", "Updates between validations."),
    "--save-interval-updates N": ("checkpoint.save_interval_updates", "Updates between checkpoints."),
    "--num-workers N": ("dataset.num_workers", "Processes that load data."),
    "--autocast bf16": ("model.autocast", "Mixed precision without --fp16, for CPUs that it speeds up."),
}
FURTHER = """Any other option of fairseq-train is valid too, and wins over the recipe. So is any value of the recipe
(configs/RECIPE.yaml), for example model.dropout=0."""


def everyday(*recipes: str) -> list[tuple[str, str]]:
    """(option, text with the values of these recipes) of what most runs change."""
    rows, composed = [], [compose(recipe) for recipe in recipes]
    for values in composed:
        values["dataset.batch_size"] *= values["optimization.update_freq"][0]
        values["optimization.lr"] = values["optimization.lr"][0]
        if values["model._name"] in ARCHITECTURES:
            values |= {"model.position": ARCHITECTURES[values["model._name"]][0], "model.autocast": "none"}
    for option, (place, text) in EVERYDAY.items():
        found = [f"{resolved(values, place)}" for values in composed if place in values]
        if len(found) == len(recipes):
            rows.append((option, f"{text}  [{found[0] if len({*found}) == 1 else '; '.join(found)}]"))
    return rows


class Train(Command):
    """A command with further words: options of fairseq-train and overrides of the recipe. recipes: those whose values
    its help shows."""

    def __init__(self, *args, recipes: tuple = (), **kwargs):
        super().__init__(*args, epilog=FURTHER, context_settings={"ignore_unknown_options": True}, **kwargs)
        self.recipes = recipes

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section(f"Options of the recipe [value of {'; '.join(self.recipes)}]"):
            formatter.write_dl(everyday(*self.recipes))
        super().format_epilog(ctx, formatter)

    def begin(self, ctx: click.Context) -> None:
        checks.check(ctx.info_name, ctx.params, options.own_options(), bool(options.position_file()))
        use_allocator(ctx.params.pop("allocator"))
        super().begin(ctx)
        checks.check_with_torch(ctx.params)


def launcher(function: Callable) -> Callable:
    """The options of every command that trains: where it trains, and the further words."""
    for decorator in (
        click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[--OPTION VALUE] [SECTION.KEY=VALUE] ..."),
        click.option("--dry-run", is_flag=True, help="Print what would run: a command of fairseq-train, or settings."),
        click.option("--yes", is_flag=True, help="Train on a CPU even if that takes more than a week."),
        click.option("--allocator", help="The memory allocator to preload, or none (default: tcmalloc on CPUs)."),
        click.option(
            "--micro-batch-size",
            type=click.IntRange(1),
            help="How many sequences a GPU takes at a time, at most; the batch stays the same (default: the recipe's).",
        ),  # fmt: skip
        click.option(
            "--master-port",
            type=click.IntRange(1, 65535),
            default=29500,
            show_default=True,
            help="A free port of that machine.",
        ),  # fmt: skip
        click.option("--master-addr", default="localhost", show_default=True, help="The name of the first machine."),
        click.option("--node-rank", type=click.IntRange(0), default=0, help="The number of this machine, from 0."),
        click.option("--nodes", type=click.IntRange(1), default=1, help="The number of machines."),
        click.option(
            "--outer-options", type=ListOf(), default=[], hidden=True, help="of the command that starts this one"
        ),
        click.option(
            "--gpus", type=click.IntRange(0), help="GPUs of this machine (default: all visible); 0 takes the CPU."
        ),
    ):
        function = decorator(function)
    return function


engine = click.option("--engine", type=click.Choice(list(ENGINES)), default="fairseq", show_default=True, help="What "
                      "trains: fairseq, or the Trainer of transformers, which needs no fairseq.")  # fmt: skip


@click.command(cls=Train, recipes=("pretrain", "pretrain_small"))
@options.data()
@options.output("The folder of the run: checkpoints, record and train.log. An existing run is resumed.")
@click.option("--recipe", type=options.OneOf(RECIPES), default="pretrain", show_default=True,
              help="The recipe: a file of configs/.")  # fmt: skip
@click.option("--preset", metavar="NAME", help="A model of configs/model; see `tupe list presets`.")
@click.option("--arch", metavar="NAME", help="The architecture; see `tupe list models` (default: the recipe's).")
@engine
@launcher
def pretrain(data, output, recipe, preset, arch, engine, words, **machine):
    """Train a masked language model or an ELECTRA, from scratch as the paper does, or further:

    tupe pretrain --recipe pretrain_further --finetune-from-model FILE --data DATA --output DIR

    An update trains on the same batch whatever the number of GPUs: the recipe's, or --batch-size sequences. Mixed
    precision is --fp16; --amp or --autocast bf16 choose another.

    The encoding is that of the architecture, or what --position says instead (`tupe list schemes`). [CLS] is then as in
    the architecture beside `untied`, and tied beside any other encoding, unless --cls says otherwise.
    """
    chosen = [f"model={preset}"] if preset is not None else []
    named = [f"--arch={arch}"] if arch is not None else []
    run(recipe, chosen, [data, f"--save-dir={output}", *named], words, machine, engine)


@click.command(cls=Train, recipes=("finetune",))
@click.option("--task", required=True, metavar="NAME", help="A task of GLUE, or your own.")
@options.data("The folder that `tupe prepare glue` or `labels` wrote.")
@options.checkpoint()
@options.output("The folder of the run: checkpoints, record with every score, predictions and train.log.")
@engine
@launcher
def finetune(task, data, checkpoint, output, engine, words, **machine):
    """Fine-tune a checkpoint on a GLUE task or a task of your own, as the paper does. The model is the checkpoint's."""
    name = task_key(task)
    overrides = [f"glue={name}"]
    if name not in GLUE:
        own = [each for each in tasks_in(data) if task_key(each) not in GLUE]
        if name not in map(task_key, own):
            raise ValueError(f"unknown task {task!r}{did_you_mean(name, [*GLUE, *own])}")
        overrides = [f"glue={OWN}", f"task.glue_task='{next(each for each in own if task_key(each) == name)}'"]
    with file_of(checkpoint, engine == "transformers" or machine["dry_run"]) as file:
        arguments = [data, f"--save-dir={output}", f"--finetune-from-model={file}"]
        run("finetune", overrides, arguments, words, machine, engine)


def file_of(checkpoint: Path, as_it_is: bool) -> AbstractContextManager[Path]:
    """The file for fairseq to train from, of a Hugging Face folder too; or the checkpoint as it is."""
    if as_it_is or not checkpoint.is_dir():
        return nullcontext(checkpoint)
    with options.quiet_imports():
        from ..checkpoints.files import as_file  # only now, for the same reason as in `run`

    return as_file(checkpoint)


def run(
    recipe: str, overrides: list[str], arguments: list, words: Sequence[str], machine: dict, engine: str = "fairseq"
) -> None:  # fmt: skip
    """Sort the further words and train. Words of the form a.b=c are overrides."""
    # Only now: `use_allocator` starts the process again if torch is not there yet.
    launch = import_module(f"..{ENGINES[engine]}.launch", __package__).launch

    own_overrides, further = checks.sort_words(words)
    overrides = [*overrides, *own_overrides]
    machine = dict(machine)  # the caller's serves its next run too
    own = [*options.own_options(), *machine.pop("outer_options")]
    arguments = [*map(str, arguments), *options.position_file(), *further]
    with console.logged():
        launch(recipe, overrides, arguments, own_options=tuple(own), **machine)
