"""The pages say what is there: commands parse, files and headings that a page names exist, the README's example of a
position encoding works."""

import argparse
import ast
import functools
import re
import shlex

import click
import pytest
import torch
from helpers import CONFIGS, PLUGIN

from tupe import cli, positions, schemes_bias
from tupe.encoder import Encoder
from tupe.offsets import Places
from tupe.plugin.launch import parse

ROOT = PLUGIN.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
PROGRAM = re.compile(r"(?:^|[|;&(]|\bdo )\s*(?:\w+=\S+ +)*(tupe|bash|sbatch|fairseq-hydra-train) ([^|;)]*)")


def code_of(page):
    """Blocks of code, fenced or indented, and code within sentences; a continued line is one line."""
    text = re.sub(r"\\\n\s*", "", page.read_text())
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    indented = re.findall(r"^ {4,}(\S.*)$", prose, re.MULTILINE)
    inline = [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]
    return [*"".join(blocks).splitlines(), *indented, *inline]


def commands_of(page):
    """[(program, words)] of what a page shows; a script that hands its options to `tupe` is that command."""
    for line in code_of(page):
        line = re.sub(r"\s#.*", "", line).replace("[", "").replace("]", "")  # optional words must parse too
        for program, words in PROGRAM.findall(line):
            words = shlex.split(words)
            script = words[0].removeprefix("scripts/") if program in ("bash", "sbatch") else ""
            if script in ("pretrain.sh", "pretrain.sbatch", "finetune.sh") and words[1:]:
                yield "tupe", [script.partition(".")[0], *words[1:]]
            elif script in ("glue_sweep.sh", "download_corpus.sh") and words[1:]:
                yield "tupe", [{"glue_sweep.sh": "sweep", "download_corpus.sh": "download"}[script], *words[1:]]
            elif program == "fairseq-hydra-train" or words[0] in cli.main.list_commands(None):
                yield program, words


def shown(program):
    """A parameter for each command of this program in a page."""
    commands = [(page, words) for page in PAGES for name, words in commands_of(page) if name == program]
    return [pytest.param(words, id=f"{page.stem}: {shlex.join(words)[:80]}") for page, words in commands]


@pytest.mark.parametrize("words", shown("tupe"))
def test_a_command_parses(words):
    """Its options are known, valid and complete. Nothing runs; the files need not be there."""
    command, name = cli.main, "tupe"
    while isinstance(command, click.Group) and words:
        name, command, words = command.resolve_command(click.Context(command, info_name=name), words)
    if not words:
        return  # named in a sentence
    context = click.Context(command, info_name=name, **command.context_settings)
    values = command.make_parser(context).parse_args([word for word in words if word != "..."])[0]
    values = {key: value for key, value in values.items() if isinstance(value, str | bool | list | tuple)}
    for parameter in command.params:
        value = values.get(parameter.name)
        assert value or not parameter.required or "..." in words, f"{parameter.name} is missing"
        if isinstance(value, str) and "$" not in value and not isinstance(parameter.type, click.Path):
            parameter.type.convert(value, parameter, context)
    # What is left is for fairseq-train, and in a sweep also for the recipe's command.
    further = [word for word in values.get("words") or values.get("common") or () if not word.startswith("$")]
    of_command = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("--data", "--checkpoint", "--arch"):
        of_command.add_argument(option)
    further = [word for word in of_command.parse_known_args(further)[1] if not re.match(r"\w+\.\w+=", word)]
    kind = ["--task=tupe_masked_lm", "--arch=tupe_r"]
    if name == "finetune" or (name == "sweep" and values.get("recipe", "finetune") == "finetune"):
        kind = ["--task=glue", "--criterion=glue", "--arch=from_checkpoint", "--lr-scheduler=polynomial_decay_ratio"]
    parse_once("data", *kind, *further)


@functools.cache
def parse_once(*words):
    """Most commands have no words for fairseq-train."""
    parse(list(words))


@pytest.mark.parametrize("words", shown("fairseq-hydra-train"))
def test_hydra_finds_what_a_command_names(words):
    assert (CONFIGS / f"{words[words.index('--config-name') + 1]}.yaml").is_file()
    for group, choice in re.findall(r"\b(model|glue)=(\w+)", shlex.join(words)):
        assert (CONFIGS / group / f"{choice}.yaml").is_file()


def test_every_command_is_in_some_page():
    text = " ".join(" ".join(code) for code in map(code_of, PAGES))
    assert [name for name in cli.COMMANDS if f"tupe {name}" not in text] == []


def headings(page):
    """Anchors of a page, as GitHub makes them."""
    lines = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_that_a_page_names_exist(page):
    text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.DOTALL)
    for target, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", text):
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), target
        assert not anchor or anchor in headings(file), f"{target}#{anchor}"
    folders = "tupe|scripts|configs|tests|hydra_plugins"
    for name in re.findall(rf"(?<![\w/.$])(?:{folders})/[\w./*-]*[\w*/]", "\n".join(code_of(page))):
        assert any(ROOT.glob(name.rstrip("/"))), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_short(page):
    assert len(page.read_text().splitlines()) < 250


@pytest.fixture
def example():
    """The README's position encoding."""
    text = (ROOT / "README.md").read_text()
    (block,) = (block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "@register" in block)
    known = dict(positions.SCHEMES)
    yield block
    positions.SCHEMES.clear()
    positions.SCHEMES.update(known)


@pytest.mark.parametrize("place", ["a user's file", "schemes_bias.py"])
def test_the_example_of_a_position_encoding_works(place, example, tmp_path):
    if place == "schemes_bias.py":
        lines = ast.unparse([node for node in ast.parse(example).body if isinstance(node, ast.ClassDef)])
        exec(lines, dict(vars(schemes_bias)))
    else:
        (tmp_path / "distance.py").write_text(example)
        positions.load_schemes(tmp_path / "distance.py")
    sizes = {"layers": 1, "width": 8, "ffn": 8, "heads": 2, "max_positions": 6}
    tokens = torch.randint(3, 9, (2, 6))
    for position, cls in (("distance", "tied"), ("untied+distance", "untied")):
        encoder = Encoder(10, 1, position=position, cls=cls, **sizes)
        encoder.positions["distance"].slope.data.fill_(-0.5)
        bias = encoder.positions["distance"].bias(Places(6), 1.0)
        assert torch.equal(bias[0, 2], torch.tensor([-1.0, -0.5, 0, -0.5, -1.0, -1.5]))
        encoder(tokens)[0][..., 0].sum().backward()  # of one column: a layer norm makes the sum of all constant
        assert encoder.positions["distance"].slope.grad.abs().sum() > 0
