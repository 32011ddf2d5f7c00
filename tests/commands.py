"""The page of all commands, from click's: `python tests/commands.py > docs/commands.md`."""

import inspect
import re
import textwrap

import click

from tupe.cli import COMMANDS, GROUPS, main
from tupe.cli.train import everyday

HEAD = """# Commands

`python tests/commands.py > docs/commands.md` writes this page. `tupe COMMAND --help` says the same, and more.
`tupe --position-file FILE COMMAND` adds position encodings of your own to every command.
"""
WORDS = {"INTEGER": "N", "FLOAT": "X", "TEXT": "TEXT", "DIRECTORY": "FOLDER", "PATH": "PATH", "STR,...": "A,B,..."}
WORDS |= {"INT,...": "N,...", "FLOAT,...": "X,...", "INTEGER RANGE": "N", "FILE": "FILE"}


def command_of(words: str) -> click.Command:
    command = main
    for word in words.split():
        command = command.get_command(click.Context(command), word)
    return command


def options_of(command: click.Command) -> list[click.Option]:
    """Those that have to be given come first."""
    options = [each for each in command.params if isinstance(each, click.Option) and not each.hidden]
    return sorted(options, key=lambda option: not option.required)


def line_of(option: click.Option) -> str:
    """One item of a list: "`--name VALUE` (required): its text Default: this."."""
    context = click.Context(click.Command("x"))
    names, text = option.get_help_record(context)
    names = names.replace(" / ", ", ")  # --code / --no-code
    name, _, value = names.rpartition(", ")[2].partition(" ")
    value = WORDS.get(value, value)
    text = " ".join(text.split())
    notes = re.search(r" \[([^\[\]]*)\]$", text)
    text = text[: notes.start()] if notes else text
    default = re.search(r"default: (.*?)(; [\d.]*<?=?x[<>=\d.]*|; required)?$", notes[1]) if notes else None
    text = re.sub(r"(<\w+>)", r"`\1`", text) + (f" Default: {default[1]}." if default else "")
    both = ", ".join(f"`{each}`" for each in names.split(", "))
    both = both if option.is_flag or not value else f"`{name} {value}`"
    return wrapped(f"- {both}{' (required)' * option.required}: {text}")


def wrapped(text: str) -> str:
    return textwrap.fill(text, 140, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def section_of(words: str, what: str, before: set[str]) -> list[str]:
    """The lines of a command. before: items that stood under an earlier command, which end here as one line."""
    command = command_of(words)
    lines, options = [f"### tupe {words}", "", what], options_of(command)
    if isinstance(command, click.Group):
        context = click.Context(command)
        parts = {name: command.get_command(context, name) for name in command.list_commands(context)}
        options = {option.opts[0]: option for part in parts.values() for option in options_of(part)}.values()
        about = {
            name: " ".join(inspect.cleandoc(part.help).partition("\n\n")[0].split()) for name, part in parts.items()
        }
        lines += ["", *(wrapped(f"- {words} {name}: {text}") for name, text in about.items()), "", "Options of these:"]
    elif arguments := [each for each in command.params if isinstance(each, click.Argument)]:
        lines[-1] += f" After the options: `{' '.join(each.metavar or each.name.upper() for each in arguments)}`"
    items = [line_of(option) for option in options]
    lines += ["", *(item for item in items if item not in before)]
    if known := [item.partition("`:")[0].split()[1].strip("`") for item in items if item in before]:
        lines += ["", wrapped(f"As in `tupe pretrain`: {', '.join(f'`{name}`' for name in known)}.")]
    if recipes := getattr(command, "recipes", ()):
        of_recipe = [f"`{name}`: {' '.join(text.split())}" for name, text in everyday(*recipes)]
        lines += ["", f"Options of the recipe [value of {'; '.join(recipes)}], and any other of fairseq-train:", ""]
        lines += [wrapped(f"- {item}") for item in of_recipe]
    return [*lines, ""]


def page() -> str:
    lines, training = [HEAD], {*map(line_of, options_of(command_of("pretrain")))}
    for title, group in GROUPS.items():
        lines += [f"## {title}", ""]
        for words in group:
            before = training if words in ("continue", "finetune") else set()
            lines += section_of(words, COMMANDS[words][1], before)
    return re.sub("\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


if __name__ == "__main__":
    print(page(), end="")
