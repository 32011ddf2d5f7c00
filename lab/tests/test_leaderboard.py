"""The leaderboard's commands and its page."""

import shutil

from click.testing import CliRunner
from evidence_runs import write_run
from helpers import write_data

from lab import collect, leaderboard
from lab.__main__ import main
from lab.plan import Trial
from lab.standings import ENCODINGS, PROTOCOL


def invoke(*words):
    return CliRunner().invoke(main, list(map(str, words)), prog_name="python -m lab")


def test_dry_run_prints_what_is_left(tmp_path):
    words = ["leaderboard", "--data", tmp_path, "--output", tmp_path / "out", "--dry-run"]
    assert len(invoke(*words).output.splitlines()) == 6 * len(ENCODINGS)
    write_run(tmp_path / "out", Trial("bert", "rope", "tiny", PROTOCOL["updates"], 2e-3, 1), 5.5)
    lines = invoke(*words, "--encodings", "rope", "--blocks", "bert").output.splitlines()
    assert len(lines) == 2 and all("--position=rope" in line for line in lines)
    assert "did you mean 'rope'" in invoke(*words, "--encodings", "roep").output


def test_finished_runs_get_into_the_tables(tmp_path):
    write_run(tmp_path / "out", Trial("bert", "rope", "tiny", PROTOCOL["updates"], 2e-3, 1), 5.5)
    write_data(tmp_path / "data")
    (tmp_path / "tables").mkdir()
    result = invoke("standings", "--runs", tmp_path / "out", "--tables", tmp_path / "tables")
    assert result.exit_code == 0 and "1 runs" in result.output
    tables = collect.read(tmp_path / "tables")
    assert {row["measure"] for row in tables["measures"]} == {"order"} and not tables["blocks"]
    assert len(tables["training"]) == PROTOCOL["updates"] // 50


def test_the_committed_page_is_the_one_of_the_committed_tables(tmp_path):
    page = (leaderboard.DOCS / "leaderboard.md").read_text(encoding="utf-8")
    assert page == leaderboard.page(collect.read(leaderboard.TABLES))
    shutil.copytree(leaderboard.TABLES, tmp_path / "tables")
    assert all(f"`{name}`" in page for name in ENCODINGS)
