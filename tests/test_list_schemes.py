"""The table of schemes in docs/ is what the command prints."""

import runpy
from pathlib import Path

from tupe.positions import overrides
from tupe.schemes import SCHEMES

ROOT = Path(__file__).parent.parent


def test_table_in_docs_is_what_the_command_prints(capsys):
    runpy.run_path(str(ROOT / "scripts" / "list_schemes.py"))["main"]([])
    printed = capsys.readouterr().out
    page = (ROOT / "docs" / "schemes.md").read_text()
    assert printed in page, "put what scripts/list_schemes.py prints into docs/schemes.md"
    rows = printed.splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == list(SCHEMES)
    for name, row in zip(SCHEMES, rows, strict=True):
        hooks = row.split(" | ")[-2]
        assert (hooks == "none") == (name == "nopos")
        assert ("gate" in hooks) == overrides(SCHEMES[name], "gate")
