"""What mkdocs runs when it builds the site: it fills in what the program itself can print."""

import inspect
import re

from click.testing import CliRunner
from mkdocs.structure.pages import Page

from tupe import schemes_absolute, schemes_bias, schemes_content, schemes_rotation
from tupe.cli.catalogue import card, list_schemes
from tupe.plugin import patches
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


PRINTED = {
    "the table of schemes": lambda: CliRunner().invoke(list_schemes).output,
    "the cards of schemes": cards,
    "the table of patches": patches.table,
}


def on_page_markdown(markdown: str, page: Page, **more) -> str:
    """Put the output in place of a line "<!-- NAME: how to print it without the site -->"."""
    return re.sub(r"^<!-- ([\w ]+): .* -->$", lambda line: PRINTED[line[1]](), markdown, flags=re.MULTILINE)
