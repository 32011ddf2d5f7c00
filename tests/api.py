"""docs/api.md from the signatures and docstrings of what the core's modules name in `__all__`:

python tests/api.py > docs/api.md
"""

import ast
import re
import textwrap
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "tupe"
MODULES = "encoder", "positions", "token_positions", "schemes", "attention", "backends"
INTRODUCTION = """# The core on one page

`tupe.encoder`, `tupe.positions` and their neighbours need torch and numpy only. Letters: B batch, L sequence length,
C model width, H heads, D = C / H, E width of a head's values, N layers, V vocabulary. This page is the output of
`python tests/api.py`.

"""


def public_names(tree):
    """What a module's `__all__` holds."""
    (names,) = (node.value for node in tree.body if isinstance(node, ast.Assign) and names_of(node) == ["__all__"])
    return ast.literal_eval(names)


def names_of(node):
    """The names that a statement of a module defines."""
    if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return [alias.asname or alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []


def signature(function, name):
    """As in the source, without `self`; what a function returns behind it."""
    arguments = ast.parse(f"def f({ast.unparse(function.args)}): 0").body[0].args
    if arguments.args and arguments.args[0].arg in ("self", "cls"):
        del arguments.args[0]
    returned = "" if function.returns is None or name[0].isupper() else f" -> {ast.unparse(function.returns)}"
    spaced = re.sub(r"(: [^=,]+)=", r"\1 = ", ast.unparse(arguments))
    return f"{name}({spaced}){returned}"


def docstring(node):
    """A line for each paragraph."""
    paragraphs = (ast.get_docstring(node) or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def methods(node):
    """{name: the definition} of a class, in the order of the source."""
    return {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}


def entry(node, module):
    """The lines of one class, function, or other name."""
    if isinstance(node, ast.ImportFrom):
        return [f"### {', '.join(f'`{name}`' for name in names_of(node))}", "", f"From `tupe.{node.module}`."]
    if isinstance(node, ast.Assign):
        return [f"### `{names_of(node)[0]} = {ast.unparse(node.value):.90}`", "", comment(node, module)]
    if isinstance(node, ast.FunctionDef):
        return [f"### `{signature(node, node.name)}`", "", docstring(node)]
    begin = methods(node).get("__init__")
    lines = [f"### `{signature(begin, node.name) if begin else node.name}`", "", docstring(node)]
    if begin and ast.get_docstring(begin):
        lines += ["", docstring(begin)]
    lines.append("")
    for each in node.body:
        if isinstance(each, ast.AnnAssign):
            lines.append(field(each, module))
    for name, each in methods(node).items():
        if not name.startswith("_") and ast.get_docstring(each):
            text = " ".join(ast.get_docstring(each).split())
            is_property = any(ast.unparse(d) == "property" for d in each.decorator_list)
            lines.append(f"- `.{name}`: {text}" if is_property else f"- `.{signature(each, name)}`: {text}")
    return lines


def field(node, module):
    """The line of a field; what it is stands behind it, or is the second argument of `option`."""
    default, text = node.value, comment(node, module)
    if isinstance(default, ast.Call):
        default, told = default.args[:2]
        parts = told.values if isinstance(told, ast.JoinedStr) else [told]
        text = "".join(part.value if isinstance(part, ast.Constant) else "`SCHEMES`" for part in parts)
    value = "" if default is None else f" = {ast.unparse(default)}"
    return f"- `{node.target.id}: {ast.unparse(node.annotation)}{value}` {text}"


def comment(node, module):
    """What stands behind an assignment, in its first line."""
    return module.read_text(encoding="utf-8").splitlines()[node.lineno - 1].partition("  # ")[2]


def page():
    lines = [INTRODUCTION]
    for name in MODULES:
        path = PACKAGE / f"{name}.py"
        tree = ast.parse(path.read_text(encoding="utf-8"))
        lines += [f"## `tupe.{name}`", "", docstring(tree).partition("\n")[0], ""]
        found = {}
        for node in tree.body:
            found |= dict.fromkeys(names_of(node), node)
        shown = []
        for public in public_names(tree):
            node = found[public]
            if not any(node is each for each in shown):  # names that one line imports are one entry
                shown.append(node)
                lines += [*entry(node, path), ""]
    text = "\n".join(line.rstrip() for line in lines).replace("\n\n\n", "\n\n").rstrip()
    return "\n".join(map(wrapped, text.splitlines())) + "\n"


def wrapped(line):
    """A paragraph, or a point of a list, in lines of at most 120 columns; code and headings stay as they are."""
    if len(line) <= 120 or line.startswith("#"):
        return line
    whole = re.sub(r"`[^`]{1,80}`", lambda code: code[0].replace(" ", "\0"), line)  # a line ends in no code
    indent = "  " if line.startswith("- ") else ""
    lines = textwrap.wrap(whole, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ")


if __name__ == "__main__":
    print(page(), end="")
