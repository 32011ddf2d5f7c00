"""docs/commands.md, what `--help` says of every command:

python tests/commands.py > docs/commands.md
"""

import click

from tupe import cli

INTRODUCTION = """# Commands

What `--help` says of every command, as `python tests/commands.py` prints it. How to begin: [start](start.md)."""


def walk(command, name):
    """[(words of a command, the command)], groups before their members, as they stand in the table of commands."""
    yield name, command
    if isinstance(command, click.Group):
        context = click.Context(command, info_name=name)
        for member in command.list_commands(context):
            yield from walk(command.get_command(context, member), f"{name} {member}")


def page():
    parts = [INTRODUCTION]
    for name, command in walk(cli.main, "tupe"):
        context = click.Context(command, info_name=name, terminal_width=100, **command.context_settings)
        parts += [f"## {name}", f"```text\n{command.get_help(context).rstrip()}\n```"]
    return "\n".join(line.rstrip() for line in "\n\n".join(parts).splitlines()) + "\n"


if __name__ == "__main__":
    print(page(), end="")
