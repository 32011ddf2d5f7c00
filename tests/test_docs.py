"""The pages say what is there: commands parse, files and headings exist, the README's Python works."""

import argparse
import ast
import json
import os
import re
import shlex
import sys
from urllib.parse import unquote

import click
import pytest
import torch
from fairseq import options
from helpers import CONFIGS
from pages import COMMANDS, DOCS, PAGES, ROOT, TOUR, code_of, commands_of
from test_house import run

from tupe import cli, positions, schemes_bias
from tupe.cli.catalogue import card
from tupe.common.recipes import read
from tupe.config import split_words
from tupe.encoder import Encoder
from tupe.token_positions import TokenPositions


def shown(program):
    """A parameter for each command of this program in a page."""
    commands = [(page, words) for page in PAGES for name, words in commands_of(page) if name == program]
    return [pytest.param(words, id=f"{page.stem}: {shlex.join(words)[:80]}") for page, words in commands]


@pytest.mark.parametrize(
    ("program", "words"),
    [pytest.param(name, *case.values, id=case.id) for name in COMMANDS for case in shown(name)],
)
def test_a_command_parses(program, words):
    """Its options are known, valid and complete. Nothing runs; the files need not be there."""
    command, name = COMMANDS[program], program
    while isinstance(command, click.Group) and words:
        context = click.Context(command, info_name=name)
        words = command.make_parser(context).parse_args(words)[1]  # without options of `tupe` itself
        name, command, words = command.resolve_command(context, words)
    if not words:
        return  # named in a sentence
    context = click.Context(command, info_name=name, **command.context_settings)
    values = command.make_parser(context).parse_args([word for word in words if word != "..."])[0]
    values = {key: value for key, value in values.items() if isinstance(value, str | bool | list | tuple)}
    for parameter in command.params:
        value = values.get(parameter.name)
        assert value or not parameter.required or {"...", "--help"} & {*words}, f"{parameter.name} is missing"
        if isinstance(value, str) and "$" not in value and not isinstance(parameter.type, click.Path):
            parameter.type.convert(value, parameter, context)
    # What is left is for the training, and in a sweep also for the recipe's command.
    further = [word for word in values.get("words") or values.get("common") or () if not word.startswith("$")]
    of_command = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("--data", "--checkpoint", "--arch", "--engine"):
        of_command.add_argument(option)
    pairs = split_words(of_command.parse_known_args(further)[1])
    further = [word if value is None else f"{word}={value}" for word, value in pairs if "$" not in str(value)]
    if program == "tupe" and further and name in ("pretrain", "finetune", "sweep", "compare"):
        read(values.get("recipe") or {"sweep": "finetune", "compare": "pretrain_small"}.get(name, name), further)


@pytest.mark.parametrize("words", shown("fairseq-hydra-train"))
def test_hydra_finds_what_a_command_names(words):
    assert (CONFIGS / f"{words[words.index('--config-name') + 1]}.yaml").is_file()
    for group, choice in re.findall(r"\b(model|glue)=(\w+)", shlex.join(words)):
        assert (CONFIGS / group / f"{choice}.yaml").is_file()


@pytest.mark.parametrize("words", [case for case in shown("fairseq-train") if "--arch" in case.values[0]])
def test_fairseq_knows_the_options(words):
    words = [word.replace("$PWD", str(ROOT)) for word in words]
    options.parse_args_and_arch(options.get_training_parser(), words)


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
        assert (ROOT / "docs" in file.parents) >= (ROOT / "docs" in page.parents), f"{target} is no page of the site"
        if anchor and not re.search(r"^(:::|<!-- the) ", file.read_text(), re.MULTILINE):  # else made with the site
            assert anchor in headings(file), f"{target}#{anchor}"
    folders = "tupe|scripts|configs|tests|hydra_plugins"
    for name in re.findall(rf"(?<![\w/.$])(?:{folders})/[\w./*-]*[\w*/]", "\n".join(code_of(page))):
        assert any(ROOT.glob(name.rstrip("/"))), name


@pytest.mark.parametrize("page", [ROOT / "README.md", *DOCS], ids=lambda page: page.stem)
def test_the_site_cuts_no_line_of_code(page):
    """A page of 1280 pixels holds 88 letters."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    assert [line for block in blocks for line in block.splitlines() if len(line) > 88] == []


@pytest.mark.thorough
def test_the_site_builds(tmp_path):
    """Strictly: a broken link or anchor, or a page that `mkdocs.yml` names and nobody wrote, raises. No link of what
    was built leads nowhere, which the build does not see for folders."""
    pytest.importorskip("material")
    pytest.importorskip("mkdocs_jupyter")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path), strict=True))
    pages = {path: path.read_text() for path in tmp_path.rglob("*.html")}
    assert {tmp_path / "results.html", tmp_path / "tour.html"} <= pages.keys()
    for path, text in pages.items():
        for link in {*re.findall(r'(?:href|src)="([^"#:?]+)(?:#[^":]*)?"', text)} - {"/."}:
            assert (path.parent / unquote(link)).is_file() or path.name == "404.html", f"{path.name}: {link}"


def test_every_page_is_in_the_list_of_pages():
    """... of the site, or of one of its two rooms, each of which is one link of the site."""
    nav, listed = (ROOT / "mkdocs.yml").read_text(), set()
    for place in ("index.md", "dev/index.md", "evidence/README.md"):
        page = ROOT / "docs" / place
        links = re.findall(r"\]\(([\w/.-]+\.(?:md|ipynb))[)#]", page.read_text())
        listed |= {os.path.relpath(page.parent / link, ROOT / "docs") for link in links}
    names = {str(page.relative_to(ROOT / "docs")) for page in DOCS}
    assert names - listed == {"index.md"}
    rooms = [name for name in names if name.startswith(("dev/", "evidence/", "appendix/"))]
    assert [name for name in names - {*rooms} if f": {name}\n" not in nav] == []


@pytest.mark.thorough
def test_the_first_python_of_the_readme_runs():
    """It prints what it says. The core's encoder with one layer, the rest as it stands; in a process of its own, since
    transformers never forgets what `tupe.hf` registers."""
    pytest.importorskip("transformers")
    core, hf, *_ = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    core = core.replace("encoder = Encoder(", "encoder = Encoder(layers=1, ")
    hf = hf.replace('pipeline("fill-mask"', 'filled = pipeline("fill-mask"')
    printed = run(f"{core}\n{hf}\nprint(len(filled))").splitlines()
    assert printed[-2:] == [core.rpartition("# ")[2].strip(), "5"]


def code_cells():
    return [cell for cell in json.loads(TOUR.read_text())["cells"] if cell["cell_type"] == "code"]


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch, own_module_cache):
    """Every cell in turn, with 12 updates instead of 300."""
    pytest.importorskip("accelerate")
    monkeypatch.chdir(ROOT / "docs")
    monkeypatch.setenv("TOUR", str(tmp_path))
    monkeypatch.setenv("TOUR_UPDATES", "12")
    monkeypatch.setenv("MPLBACKEND", "agg")
    names = {"__name__": "tour"}
    for number, cell in enumerate(code_cells()):
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
    assert len(names["runs"]["untied"][1]) == 12 and 0 <= names["right"] <= 200


@pytest.fixture
def example():
    """The position encoding of README.md and docs/own-encoding.md."""
    pages = [(ROOT / name).read_text() for name in ("README.md", "docs/own-encoding.md")]
    blocks = {block for page in pages for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL)}
    (block,) = (block for block in blocks if "@register" in block)
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
        positions.load_scheme_file(tmp_path / "distance.py")
    sizes = {"layers": 1, "width": 8, "ffn": 8, "heads": 2, "max_positions": 6}
    tokens = torch.randint(3, 9, (2, 6))
    for position, cls in (("distance", "tied"), ("untied+distance", "untied")):
        encoder = Encoder(10, 1, position=position, cls=cls, **sizes)
        encoder.positions["distance"].slope.data.fill_(-0.5)
        bias = encoder.positions["distance"].bias(TokenPositions(6), 1.0)
        assert torch.equal(bias[0, 2], torch.tensor([-1.0, -0.5, 0, -0.5, -1.0, -1.5]))
        encoder(tokens)[0][..., 0].sum().backward()  # of one column: a layer norm makes the sum of all constant
        assert encoder.positions["distance"].slope.grad.abs().sum() > 0


def test_the_page_of_own_encodings_prints_what_it_shows(example, tmp_path, monkeypatch, capsys):
    page = (ROOT / "docs" / "own-encoding.md").read_text()
    (tmp_path / "distance.py").write_text(example)
    monkeypatch.syspath_prepend(tmp_path)
    code, shown = re.search(r"```python\n(import distance.*?)```\n\n```\n(.*?)```", page, re.DOTALL).groups()
    exec(code, {})
    monkeypatch.delitem(sys.modules, "distance")
    assert capsys.readouterr().out == shown
    assert f"```\n{card('distance')}```" in page
