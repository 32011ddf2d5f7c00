"""The page with a card for each encoding, from the registry: `python tests/cards.py > docs/encodings.md`."""

import inspect

from tupe import schemes_absolute, schemes_bias, schemes_content, schemes_rotation
from tupe.cli.catalogue import card
from tupe.schemes import SCHEMES

FAMILIES = {
    schemes_absolute: "Vectors of the input",
    schemes_bias: "Logits without content",
    schemes_content: "Logits of words and positions",
    schemes_rotation: "Rotations, gates, windows",
}
HEAD = """# A card for each encoding

`tupe list schemes NAME` prints a card, and `python tests/cards.py > docs/encodings.md` writes this page of them. [The
table](schemes.md) has all at a glance, with what the words mean; the [leaderboard](leaderboard.md) compares them.
"""


def page() -> str:
    lines = [HEAD]
    for module, title in FAMILIES.items():
        names = [name for name, scheme in SCHEMES.items() if inspect.getmodule(scheme) is module]
        lines += [f"## {title}\n", *map(card, names)]
    return "\n".join(lines)


if __name__ == "__main__":
    print(page(), end="")
