"""`python -m reproduction COMMAND`, in a clone of the repository: the first protocol (docs/protocol.md) by
`evidence`, `claims` and `release`, the second one (docs/second-protocol.md) by `run`, `page` and `zorro`, and
docs/leaderboard.md by `leaderboard` and `standings`."""

import click

from . import diagrams, first, leaderboard, release, second


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """The experiments on TUPE's claims: `evidence`, `claims` and `release` are of the first protocol
    (docs/protocol.md), `run`, `page` and `zorro` of the second (docs/second-protocol.md), `leaderboard` and
    `standings` of docs/leaderboard.md. `diagrams` explains."""


commands = first.evidence_command, first.claims_command, release.command
commands += second.run, second.write_page, second.score_zorro, leaderboard.command, leaderboard.standings
for command in (*commands, diagrams.command):
    main.add_command(command)

if __name__ == "__main__":
    main(prog_name="python -m reproduction")
