"""What mkdocs runs when it builds the site: it fills in what the program itself can print."""

import inspect
import re

import click
from click.testing import CliRunner
from mkdocs.structure.pages import Page

from tupe import cli, schemes_absolute, schemes_bias, schemes_content, schemes_rotation
from tupe.cli.catalogue import card, list_schemes
from tupe.common.tables import TextTable
from tupe.plugin import patches
from tupe.positions import HOOKS, overrides
from tupe.schemes import SCHEMES

FAMILIES = {
    schemes_absolute: "Vectors of the input",
    schemes_bias: "Logits without content",
    schemes_content: "Logits of words and positions",
    schemes_rotation: "Rotations, gates, windows",
}


def cards() -> str:
    lines = []
    for module, title in FAMILIES.items():
        names = [name for name, scheme in SCHEMES.items() if inspect.getmodule(scheme) is module]
        lines += [f"## {title}\n", *map(card, names)]
    return "\n".join(lines)


def table_of_patches() -> str:
    rows = [[f"`{patch.attribute}`", patch.when, patch.reason, patch.until] for patch in patches.PATCHES]
    return TextTable.plain(["attribute", "replaced", "because", "needed until"], rows, align="llll").markdown()


def by_hook() -> str:
    rows = []
    for hook in HOOKS:
        names = [f"`{name}`" for name, scheme in SCHEMES.items() if overrides(scheme, hook)]
        rows.append(f"| `{hook}` | {', '.join(names)} |")
    return "\n".join(["| hook | encodings |", "|---|---|", *rows])


PRINTED = {
    "the encodings by hook": by_hook,
    "the table of schemes": lambda: CliRunner().invoke(list_schemes).output,
    "the cards of schemes": cards,
    "the table of patches": table_of_patches,
}


def on_page_markdown(markdown: str, page: Page, **more) -> str:
    """Put the output in place of a line "<!-- NAME: how to print it without the site -->"."""
    return re.sub(r"^<!-- ([\w ]+): .* -->$", lambda line: PRINTED[line[1]](), markdown, flags=re.MULTILINE)


def on_pre_build(config: object) -> None:
    """mkdocs-click takes a command's heading from its own name, which is that of its function."""
    for words in cli.COMMANDS:
        *group, name = words.split()
        parent = cli.Lazy(f"{group[0]} ") if group else cli.main
        command = parent.get_command(click.Context(parent), name)
        assert command
        command.name = name


def on_page_content(html: str, page: Page, **more) -> str:
    """Mend what extensions leave: a bar in code of a table keeps its backslash; examples of a command's help are one
    paragraph, and no default has a name of click's own. For narrow screens, a cell of a table says that its text is
    long."""

    def cell(found: re.Match) -> str:
        kind = ' class="long"' if len(re.sub(r"<.*?>", "", found[2])) > 45 else ""
        return f"<td{kind}{found[1]}>{found[2]}</td>".replace(r"\|", "|")

    html = re.sub(r"<td([^>]*)>(.*?)</td>", cell, html)
    if page.file.src_uri == "commands.md":
        html = html.replace("<code>Sentinel.UNSET</code>", "")
        block = r'<div class="highlight"><pre><code>\1</code></pre></div>'
        html = re.sub(r"<p>(tupe .*?)</p>", block, html, flags=re.DOTALL)
    return html
