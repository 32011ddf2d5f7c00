"""Commands that list architectures and position encodings. Needs only the core."""

import functools
import inspect

import click
import torch

from ..common import options
from ..common.architectures import ARCHITECTURES, OTHER_BLOCKS, preset, with_size
from ..common.options import CONFIGS, Command
from ..common.tables import TextTable
from ..encoder import Encoder, LMHead
from ..names import schemes_in
from ..positions import Dims, PositionScheme, format_value, options_of, overrides, parse
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

    The counts are of the whole model with its LM head, for a vocabulary of 32,768 types. `electra_a`, `electra_r`,
    `electra_tupe_a` and `electra_tupe_r` train two of these encoders, the generator narrower. `gau` has two gated
    attention units for each layer.
    """
    rows = []
    for arch in (with_size(name, size) for name in (*ARCHITECTURES, *OTHER_BLOCKS)):
        with torch.device("meta"):  # shapes only
            encoder = Encoder(VOCAB, PAD, max_positions=MAX_POSITIONS, **preset(arch))
            total = count(encoder) + count(LMHead(encoder.config.width, VOCAB, config=encoder.config))
        config, own = encoder.config, f"{count(encoder.positions):,}"
        rows.append([f"`{arch}`", config.block, config.position, config.cls, f"{total:,}", own])
    header = ["architecture", "block", "position", "[CLS]", "parameters", "of these, position"]
    click.echo(TextTable.plain(header, rows, align="llllrr").markdown(), nl=False)


def facts(name: str) -> tuple[str, str, int]:
    """(hooks, whether sequences longer than in training are computed, parameters at BERT-Base size) of a scheme."""
    scheme = SCHEMES[name]
    hooks = ", ".join(hook for hook in HOOKS if overrides(scheme, hook)) or "none"
    return hooks, "refused" if scheme.bounded else "computed", count(scheme(BASE))


def card(name: str) -> str:
    """What its class says of a scheme, its options with their defaults, and its presets, as Markdown."""
    scheme, (hooks, longer, parameters) = SCHEMES[name], facts(name)
    options = ", ".join(f"`{option}:{format_value(known.default)}`" for option, known in options_of(scheme).items())
    presets = ", ".join(f"`{preset}`" for preset, names in schemes_of_presets().items() if name in names)
    lines = [
        f"### {name}", "", f"`{scheme.formula}`", "", inspect.getdoc(scheme), "", f"- Paper: {scheme.paper}.",
        f"- Options: {options or 'none'}.", f"- Hooks: {hooks}. Longer sequences than in training are {longer}.",
        f"- Parameters at base size, 512 positions: {parameters:,}.",
    ]  # fmt: skip
    return "\n".join(lines + [f"- Presets: {presets}."] * bool(presets)) + "\n"


@functools.cache
def schemes_of_presets() -> dict[str, list[str]]:
    """{file of configs/model: the schemes of its position}."""
    import yaml  # which the core does without

    found = {}
    for path in sorted((CONFIGS / "model").glob("*.yaml")):
        own = yaml.safe_load(path.read_text(encoding="utf-8"))
        found[path.stem] = schemes_in(own.get("position") or preset(own["_name"])["position"])
    return found


@click.command(cls=Command)
@click.argument("names", nargs=-1)
def list_schemes(names):
    """Every position encoding in a table, or a card for each in NAMES, with its options.

    longer: whether sequences with more positions than in training are computed. Parameters are counted at BERT-Base
    size with 512 positions.
    """
    if names:
        click.echo("\n".join(card(part.name) for name in names for part in parse(name)), nl=False)
        return
    rows = []
    for name, scheme in SCHEMES.items():
        hooks, longer, parameters = facts(name)
        rows.append([f"`{name}`", scheme.paper, f"`{scheme.formula}`", hooks, longer, f"{parameters:,}"])
    header = ["name", "paper", "formula", "hooks", "longer", "parameters"]
    click.echo(TextTable.plain(header, rows, align="lllllr").markdown(), nl=False)
