"""`python -m reproduction COMMAND`, in a clone of the repository: the first protocol (docs/protocol.md) by
`evidence`, `claims` and `release`, the second one (docs/second-protocol.md) by `run`, `page` and `zorro`."""

import click

from . import diagrams, first, release, second


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """The experiments on TUPE's claims: `evidence`, `claims` and `release` are of the first protocol
    (docs/protocol.md), `run`, `page` and `zorro` of the second (docs/second-protocol.md). `diagrams` explains."""


commands = first.evidence_command, first.claims_command, release.command
for command in (*commands, second.run, second.write_page, second.score_zorro, diagrams.command):
    main.add_command(command)

if __name__ == "__main__":
    main(prog_name="python -m reproduction")
