"""The command `tupe`: a line per command. A command's module is imported when the command runs, and no other."""

import importlib
import os
import sys
from typing import Any

import click

from .. import __version__
from ..common.options import did_you_mean, needs, own_files, quiet_imports

GROUPS = {  # as `tupe --help` shows them: words of a command -> (module:click command, what it does)
    "Data": {
        "prepare corpus": ("corpus.engine:command", "Turn raw text into data for pre-training."),
        "prepare glue": ("corpus.tasks:glue_command", "Turn GLUE's official files into data for fine-tuning."),
        "prepare labels": ("corpus.tasks:labels_command", "Turn a table with labels of your own into a task."),
    },
    "Train": {
        "pretrain": ("cli.train:pretrain", "Train a masked language model or an ELECTRA."),
        "finetune": ("cli.train:finetune", "Fine-tune a checkpoint on a GLUE task or your own."),
        "sweep": ("sweep.grid:command", "Run a recipe with every combination of some values."),
        "compare": ("sweep.compare:command", "Pre-train encodings alike: a table of their losses."),
    },
    "Evaluate": {
        "report": ("sweep.report:command", "Put runs in one page beside published numbers."),
        "predict": ("evaluate.predict:command", "Write predictions in the format of GLUE."),
        "minimal-pairs": ("evaluate.minimal_pairs:command", "Score minimal pairs (BLiMP), word order separately."),
        "order": ("evaluate.order:command", "Measure what a model knows of the order of words."),
        "extrapolate": ("evaluate.extrapolate:command", "Measure the loss on longer sequences than in training."),
    },
    "Checkpoints": {
        "checkpoint average": ("checkpoints.change:average_command", "Take the mean of several checkpoints' weights."),
        "checkpoint convert": ("checkpoints.convert:command", "Convert checkpoints of TUPE's code, BERT or RoBERTa."),
        "checkpoint export": ("checkpoints.export:command", "Write a folder that the transformers library loads."),
        "checkpoint stretch": ("checkpoints.change:stretch_command", "Interpolate longer tables of positions."),
        "checkpoint swap": ("checkpoints.change:swap_command", "Exchange the position encoding of a trained model."),
    },
    "Look": {
        "verify": ("cli.verify:command", "Compare the files of folders with their checksums."),
        "list models": ("cli.catalogue:list_models", "List architectures and their parameters."),
        "list schemes": ("cli.catalogue:list_schemes", "List position encodings with formula and paper."),
    },
}
COMMANDS = {words: entry for group in GROUPS.values() for words, entry in group.items()}


class Lazy(click.Group):
    """A group that imports the module of a command when it is called. prefix: the words before, "" or "prepare "."""

    def __init__(self, prefix: str = "", **options):
        super().__init__(**options)
        self.prefix = prefix

    def list_commands(self, ctx: click.Context) -> list[str]:
        words = [name.removeprefix(self.prefix).split()[0] for name in COMMANDS if name.startswith(self.prefix)]
        return list(dict.fromkeys(words))

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        full = self.prefix + name
        if full in COMMANDS:
            module, _, attribute = COMMANDS[full][0].partition(":")
            try:
                with quiet_imports():
                    return getattr(importlib.import_module(f"tupe.{module}"), attribute)
            except ModuleNotFoundError as error:
                if error.name is None or error.name.startswith("tupe."):
                    raise
                raise needs(f"tupe {full}", error) from error
        if any(command.startswith(f"{full} ") for command in COMMANDS):
            return Lazy(f"{full} ", name=name, help=f"See `tupe {full} COMMAND --help`.")
        return None

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple:
        if args and args[0] not in self.list_commands(ctx):
            whole = [words for words in COMMANDS if words.startswith(self.prefix) and words.endswith(f" {args[0]}")]
            near = f"; did you mean {whole[0]!r}?" if whole else did_you_mean(args[0], self.list_commands(ctx))
            raise click.UsageError(f"unknown command {self.prefix + args[0]!r}{near}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(len(name) for name in COMMANDS if name.startswith(self.prefix))
        for title, group in GROUPS.items():
            lines = [(f"{name:{width}}", what) for name, (_, what) in group.items() if name.startswith(self.prefix)]
            if lines:
                with formatter.section(title):
                    formatter.write_dl(lines)


class Tupe(Lazy):
    def main(self, args: list[str] | None = None, *more: Any, **options: Any) -> Any:
        for word in [*(sys.argv[1:] if args is None else args), os.getcwd()]:
            if not word.isprintable() and any("\ud800" <= sign <= "\udfff" for sign in word):
                click.echo(f"tupe: {word!r} is not UTF-8; rename the file or folder", err=True)
                sys.exit(2)
        return super().main(args, *more, **options)


main = Tupe(
    name="tupe",
    params=[
        own_files(
            metavar="FILE",
            help="A Python file that registers position encodings of your own, for every command. Can be repeated. "
            "Every command that loads a checkpoint of such an encoding needs the file.",
        )
    ],
    help="TUPE and its rivals: train, compare and understand position encodings of BERT-like encoders.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
main = click.version_option(__version__)(main)
