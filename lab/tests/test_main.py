"""The laboratory's commands."""

import pytest
from click.testing import CliRunner

from lab.__main__ import BENCH, COMMANDS, PLOT, main


@pytest.mark.parametrize(
    "words",
    [[name] for name in COMMANDS] + [["bench", name] for name in BENCH] + [["plot", name] for name in PLOT],
    ids=" ".join,
)
def test_every_command_explains_itself(words):
    result = CliRunner().invoke(main, [*words, "--help"], prog_name="python -m lab")
    assert result.exit_code == 0 and result.output.startswith(f"Usage: python -m lab {' '.join(words)} ")
