"""`tupe bench corpus` from end to end on a little text. No claims about time."""

import subprocess
import sys

import pytest
from click.testing import CliRunner

from tupe.bench import corpus
from tupe.cli import main
from tupe.common import processes


def prepare_here(words, **options):
    """Instead of `subprocess.run`: the command `tupe prepare corpus`, in this process."""
    assert words[:3] == [sys.executable, "-m", "tupe"]
    done = CliRunner().invoke(main, words[3:], catch_exceptions=False)
    return subprocess.CompletedProcess(words, done.exit_code, "", done.output)


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("run", [prepare_here, pytest.param(subprocess.run, marks=pytest.mark.slow)])
def test_command(run, tmp_path, monkeypatch):
    monkeypatch.setattr(processes.subprocess, "run", run)
    lines = [f"The old man number {i} bought a {i % 7} dollar ship, and {i * i} sails for it." for i in range(400)]
    (tmp_path / "a.txt").write_text("\n\n".join(" ".join(lines[i : i + 4]) for i in range(0, 400, 4)))
    result = CliRunner().invoke(corpus.command, [str(tmp_path / "a.txt"), "--mb=0.02", "--times=3", "--vocab-size=200"])
    assert result.exit_code == 0, result.output
    for step in ("clean, filter, join", "sentences and tokens", "MinHash"):
        (row,) = (line for line in result.output.splitlines() if line.startswith(f"| {step}"))
        assert float(row.split("|")[2]) > 0
    assert result.output.count(" MB, 2 processes |") == 2 and "hours on 32 cores" in result.output
    result = CliRunner().invoke(corpus.command, [str(tmp_path / "a.txt"), "--mb=0.02", "--vocab-size=8192"])
    assert result.exit_code == 2 and "vocab" in result.output.splitlines()[-1]
