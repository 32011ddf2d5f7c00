"""Commands that list architectures and position encodings. Needs only the core."""

import inspect

import click
import torch

from ..common import options
from ..common.architectures import ARCHITECTURES, OTHER_BLOCKS, preset, with_size
from ..common.options import Command
from ..common.tables import TextTable
from ..encoder import Encoder, LMHead
from ..positions import format_value, options_of, parse
from ..schemes import SCHEMES

VOCAB, PAD, MAX_POSITIONS = 32768, 1, 512


@click.command(cls=Command)
@options.size()
def list_models(size):
    """Every masked language model with its sizes, and its parameters for 32,768 types and 512 positions.

    `electra_a`, `electra_r`, `electra_tupe_a` and `electra_tupe_r` train two of these encoders, the generator narrower.
    """
    rows = []
    for arch in (with_size(name, size) for name in (*ARCHITECTURES, *OTHER_BLOCKS)):
        with torch.device("meta"):  # shapes only
            encoder = Encoder(VOCAB, PAD, max_positions=MAX_POSITIONS, **preset(arch))
            config = encoder.config
            head = LMHead(config.width, VOCAB, config=config)
        parameters = sum(each.numel() for module in (encoder, head) for each in module.parameters())
        sizes = [str(each) for each in (config.layers, config.width, config.heads)]
        rows.append([f"`{arch}`", *sizes, f"{parameters:,}"])
    header = ["architecture", "layers", "width", "heads", "parameters"]
    click.echo(TextTable.plain(header, rows, align="lrrrr").markdown(), nl=False)


def card(name: str) -> str:
    """What its class says of a scheme, and its options with their defaults, as Markdown."""
    scheme = SCHEMES[name]
    options = ", ".join(f"`{option}:{format_value(known.default)}`" for option, known in options_of(scheme).items())
    lines = [
        f"### {name}", f"`{scheme.formula}`", inspect.getdoc(scheme),
        f"- Paper: {scheme.paper}.\n- Options: {options or 'none'}.",
    ]  # fmt: skip
    return "\n\n".join(lines) + "\n"


@click.command(cls=Command)
@click.argument("names", nargs=-1)
def list_schemes(names):
    """Every position encoding with its formula and paper, or those in NAMES with their options."""
    if names:
        click.echo("\n".join(card(part.name) for name in names for part in parse(name)), nl=False)
        return
    rows = [[f"`{name}`", f"`{scheme.formula}`", scheme.paper] for name, scheme in SCHEMES.items()]
    click.echo(TextTable.plain(["name", "formula", "paper"], rows, align="lll").markdown(), nl=False)
