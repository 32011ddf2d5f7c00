"""The commands that train: pretrain, continue, finetune. torch and fairseq are imported when one of them runs, after
the memory allocator is chosen."""

import re
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from ..common import limits, options
from ..common.allocator import use_allocator
from ..common.options import CONFIGS, Command, ListOf, did_you_mean, task_key

RECIPES = sorted({path.stem for path in CONFIGS.glob("*.yaml")} - {"continue", "finetune", "squad"})  # from scratch
GLUE = sorted(path.stem for path in (CONFIGS / "glue").glob("*.yaml"))  # cola, mnli, ...
SQUAD = {"squad11": "1.1", "squad20": "2.0"}
ENGINES = {"fairseq": "plugin", "transformers": "training"}  # where they are
FURTHER = """\b
Further words:
  --lr 1e-4 ...       any option of fairseq-train; wins over the recipe
  model.dropout=0 ... any value of the recipe, as for Hydra (no leading + needed)"""


class Train(Command):
    """A command with further words: options of fairseq-train and overrides of the recipe."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, epilog=FURTHER, context_settings={"ignore_unknown_options": True}, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        use_allocator(ctx.params.pop("allocator"))
        return super().invoke(ctx)


def launcher(function: Callable) -> Callable:
    """The options of every command that trains: where it trains, and the further words."""
    for decorator in (
        click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[--OPTION VALUE] [SECTION.KEY=VALUE] ..."),
        click.option("--dry-run", is_flag=True, help="print the command of fairseq-train that does the same, and end"),
        click.option("--allocator", help="library to take main memory from, or none (default: tcmalloc on CPUs)"),
        click.option(
            "--micro-batch-size", type=click.IntRange(1), help="most sequences that a GPU takes at a time; the batch "
            "stays the same (default: the recipe's)"
        ),
        click.option(
            "--master-port", type=click.IntRange(1, 65535), default=29500, show_default=True,
            help="a free port of that node",
        ),  # fmt: skip
        click.option("--master-addr", default="localhost", show_default=True, help="name of the first node"),
        click.option("--node-rank", type=click.IntRange(0), default=0, help="which of them this one is, from 0"),
        click.option("--nodes", type=click.IntRange(1), default=1, help="number of machines"),
        click.option(
            "--outer-options", type=ListOf(), default=[], hidden=True, help="of the command that starts this one"
        ),
        click.option("--gpus", type=click.IntRange(0), help="GPUs of this machine (default: all visible); 0: the CPU"),
    ):
        function = decorator(function)
    return function


engine = click.option("--engine", type=click.Choice(list(ENGINES)), default="fairseq", show_default=True, help="what "
                      "trains; transformers: Trainer, which needs no fairseq (see docs/engines.md)")  # fmt: skip


@click.command(cls=Train)
@options.data()
@options.output("folder of the run: checkpoints and record; an existing run is resumed")
@click.option("--recipe", type=click.Choice(RECIPES), default="pretrain", show_default=True, help="file of configs/")
@click.option("--preset", metavar="NAME", help="model of configs/model, see `tupe list presets`")
@click.option("--arch", metavar="NAME", help="architecture, see `tupe list models` (default: the recipe's)")
@engine
@launcher
def pretrain(data, output, recipe, preset, arch, engine, words, **machine):
    """Train a masked language model or an ELECTRA from scratch, as the paper does.

    An update trains on the same batch whatever the number of GPUs: the recipe's, or --batch-size sequences. Mixed
    precision is --fp16; --amp or --autocast bf16 choose another.

    The encoding is that of the architecture, or what --position, --cls, --normaliser and --block say (`tupe list
    schemes`).
    """
    chosen = [f"model={preset}"] if preset else []
    named = [f"--arch={arch}"] if arch else []
    run(recipe, chosen, [data, f"--save-dir={output}", *named], words, machine, engine)


@click.command("continue", cls=Train)
@options.data()
@options.checkpoint("checkpoint to go on from, for example of `tupe checkpoint swap`")
@options.output("folder of the runs: a folder for each length")
@click.option("--lengths", type=ListOf(int), default="128,512", show_default=True, help="tokens per sequence, in turn")
@click.option("--epochs", type=ListOf(int), default="5,2", show_default=True, help="epochs at each length")
@click.option("--next-sentence", is_flag=True, help="predict next sentences too; needs segment embeddings")
@click.option("--stretch", is_flag=True, help="make more vectors of tables that are shorter than a length, as "
              "`tupe checkpoint stretch` does")  # fmt: skip
@launcher
def continue_(data, checkpoint, output, lengths, epochs, next_sentence, stretch, words, **machine):
    """Train a checkpoint further, after Wang et al. (2021): 5 epochs at length 128, then 2 at length 512."""
    checkpoint = file_of(checkpoint)
    if len(lengths) != len(epochs) or len(set(lengths)) != len(lengths):
        raise ValueError(f"--lengths {lengths}, --epochs {epochs}: give one number of epochs for each length")
    for length, count in zip(lengths, epochs, strict=True):  # before the first of them is trained
        limits.check("tokens_per_sample", length)
        if count < 1:
            raise ValueError(f"--epochs {epochs}: valid: at least 1 at each length")
    objective = ["task.next_sentence=true", "criterion._name=masked_lm_next_sentence"] if next_sentence else []
    for length, count in zip(lengths, epochs, strict=True):
        folder = output / f"length{length}"
        if stretch and not machine["dry_run"]:
            with options.quiet_imports():
                from ..checkpoints.stretch import stretch_to  # only now, for the same reason as in `run`

            checkpoint = stretch_to(length, checkpoint, folder / "stretched.pt")
        arguments = [data, f"--save-dir={folder}", f"--finetune-from-model={checkpoint}"]
        arguments += [f"--tokens-per-sample={length}", f"--max-epoch={count}"]
        run("continue", objective, arguments, words, machine)
        checkpoint = folder / "checkpoint_last.pt"


@click.command(cls=Train)
@click.option("--task", required=True, metavar="NAME", help="RTE, STS-B, ... of GLUE, SQuAD-1.1 or SQuAD-2.0")
@options.data("folder that `tupe prepare glue` or `tupe prepare squad` wrote")
@options.checkpoint()
@options.output("folder of the run: checkpoints, record with every score, predictions")
@engine
@launcher
def finetune(task, data, checkpoint, output, engine, words, **machine):
    """Fine-tune a checkpoint on a GLUE task or SQuAD, as the paper does. The model is the checkpoint's."""
    name = task_key(task)
    if name not in [*GLUE, *SQUAD]:
        raise ValueError(f"unknown task {task!r}{did_you_mean(name, [*GLUE, *SQUAD])}")
    recipe, overrides = "finetune", [f"glue={name}"]
    if engine == "transformers":
        if name in SQUAD:
            raise ValueError(f"--task {task}: SQuAD is for --engine fairseq")
    else:
        checkpoint = file_of(checkpoint)
    if name in SQUAD:
        recipe, overrides = "squad", [f"task.squad_version='{SQUAD[name]}'"]
    arguments = [data, f"--save-dir={output}", f"--finetune-from-model={checkpoint}"]
    run(recipe, overrides, arguments, words, machine, engine)


def file_of(checkpoint: Path) -> Path:
    """The file to train from, of a folder of transformers too."""
    if not checkpoint.is_dir():
        return checkpoint
    with options.quiet_imports():
        from ..checkpoints.folders import as_file  # only now, for the same reason as in `run`

    return as_file(checkpoint)


def run(
    recipe: str, overrides: list[str], arguments: list, words: Sequence[str], machine: dict, engine: str = "fairseq"
) -> None:  # fmt: skip
    """Sort the further words and train. Words of the form a.b=c are overrides."""
    # Only now: `use_allocator` starts the process again if torch is not there yet.
    launch = import_module(f"..{ENGINES[engine]}.launch", __package__).launch

    is_override = [bool(re.match(r"(~|\+{0,2}[A-Za-z_][\w./@]*=)", word)) for word in words]
    overrides = [*overrides, *(word for word, override in zip(words, is_override, strict=True) if override)]
    further = [word for word, override in zip(words, is_override, strict=True) if not override]
    machine = dict(machine)  # the caller's serves its next run too
    own = [*options.own_options(), *machine.pop("outer_options")]
    arguments = [*map(str, arguments), *options.position_file(), *further]
    launch(recipe, overrides, arguments, own_options=tuple(own), **machine)
