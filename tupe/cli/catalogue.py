"""Commands that list architectures, position encodings, presets. Needs only the core."""

import click
import torch

from ..common import options
from ..common.architectures import ARCHITECTURES, SIZES, with_size
from ..common.options import CONFIGS, Command
from ..common.tables import TextTable
from ..encoder import Encoder, LMHead
from ..positions import Dims, PositionScheme, format_value, options_of, overrides
from ..schemes import SCHEMES

VOCAB, PAD, MAX_POSITIONS = 32768, 1, 512
HOOKS = [name for name, value in vars(PositionScheme).items() if callable(value) and not name.startswith("_")]
BASE = Dims(max_positions=MAX_POSITIONS, width=768, heads=12, layers=12, head_dim=64, value_dim=64)


def count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@click.command(cls=Command)
@options.size()
def list_models(size):
    """Every masked language model, its parameters, and what its position encoding adds.

    The counts are of the whole model with its LM head, for a vocabulary of 32,768 types; the parameters of positions
    are itemised below the table. `electra_a`, `electra_r`, `electra_tupe_a` and `electra_tupe_r` train two of these
    encoders, the generator narrower. `gau` has two gated attention units for each layer.
    """
    layers, width, heads, ffn = SIZES[size]
    rows, items = [], {}
    for name, (position, cls) in ARCHITECTURES.items():
        with torch.device("meta"):  # shapes only
            encoder = Encoder(
                VOCAB, PAD, layers=layers, width=width, ffn=ffn, heads=heads, max_positions=MAX_POSITIONS,
                position=position, cls=cls,
            )  # fmt: skip
            total = count(encoder) + count(LMHead(width, VOCAB))
        arch = with_size(name, size)
        items[arch] = {name: parameter.shape for name, parameter in encoder.positions.named_parameters()}
        rows.append([f"`{arch}`", position, cls, f"{total:,}", f"{count(encoder.positions):,}"])
    header = ["architecture", "position", "[CLS]", "parameters", "of these, position"]
    click.echo(TextTable.plain(header, rows, align="lllrr").markdown(), nl=False)
    for arch, shapes in items.items():
        click.echo(f"\n{arch}:")
        for name, shape in shapes.items():
            click.echo(f"  {name:24} {' x '.join(map(str, shape)):>12} = {shape.numel():,}")


@click.command(cls=Command)
def list_schemes():
    """Every position encoding: name, paper, formula, options with defaults, hooks, what happens farther away than in
    training, parameters at BERT-Base size.

    farther: sequences with more positions are refused; or all distances from some number on are treated as that one
    (which training must have had); or a formula continues to any distance.
    The table in docs/schemes.md is this command's output.
    """
    rows = []
    for name, scheme in SCHEMES.items():
        hooks = ", ".join(hook for hook in HOOKS if overrides(scheme, hook)) or "none"
        options = " ".join(f"`{option}:{format_value(known.default)}`" for option, known in options_of(scheme).items())
        built = scheme(BASE)
        shared = {None: "a formula continues", 0: "–"}.get(built.saturates_at, f"as at {built.saturates_at}")
        farther = "refused" if scheme.bounded else shared
        rows.append([f"`{name}`", scheme.paper, f"`{scheme.formula}`", options, hooks, farther, f"{count(built):,}"])
    header = ["name", "paper", "formula", "options", "hooks", "farther", "parameters (base, 512 positions)"]
    click.echo(TextTable.plain(header, rows, align="llllllr").markdown(), nl=False)


@click.command(cls=Command)
def list_presets():
    """Every model of configs/model, for `tupe pretrain --preset NAME`, or model=NAME."""
    rows = []
    for path in sorted((CONFIGS / "model").glob("*.yaml")):
        lines = path.read_text(encoding="utf-8").splitlines()[1:]  # the first one is Hydra's
        comment = " ".join(line.lstrip("# ") for line in lines if line.startswith("#"))
        values = [line for line in lines if line and not line.startswith("#")]
        rows.append([f"`{path.stem}`", comment, f"`{', '.join(values)}`"])
    click.echo(TextTable.plain(["preset", "what", "values"], rows, align="lll").markdown(), nl=False)
