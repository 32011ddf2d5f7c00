"""The commands of the first protocol: what they train, score and write."""

import shutil

import pytest
from click.testing import CliRunner
from evidence_runs import write_experiment, write_run
from helpers import PLUGIN

from lab import first
from lab.__main__ import main
from lab.plan import PLAN, Trial
from tupe.common import plotting


def invoke(*words):
    return CliRunner().invoke(main, list(map(str, words)), prog_name="python -m lab")


def planned(place, *words):
    return invoke("evidence", "--data", place, "--output", place / "out", "--dry-run", *words)


def test_every_command_explains_itself():
    for name in main.commands:
        assert invoke(name, "--help").output.startswith(f"Usage: python -m lab {name} ")


def test_a_model_that_is_not_planned_is_refused(tmp_path):
    result = planned(tmp_path, "--models", "bert_b")
    assert result.exit_code == 2 and "'bert_b'; did you mean 'bert_" in result.output
    result = planned(tmp_path, "--models", "nopos", "--stages", "main")
    assert result.exit_code == 2 and "no stage of main has a model 'nopos'" in result.output


def test_stages_without_a_model_are_left_out(tmp_path):
    result = planned(tmp_path, "--models", "nopos", "--stages", "first,main")
    assert result.exit_code == 0 and len(result.output.splitlines()) == 3


def test_dry_run_prints_every_command(tmp_path):
    lines = planned(tmp_path, "--stages", "pilot", "--models", "cls_zero", "--cpu").output.splitlines()
    assert len(lines) == len(PLAN["learning_rates"])
    assert all("--cls=zero" in line and line.endswith("--cpu") for line in lines)
    assert not (tmp_path / "out").exists()
    write_experiment(tmp_path / "out", ["pilot"])
    (line,) = planned(tmp_path, "--stages", "main", "--models", "tupe_r", "--seeds", "2").output.splitlines()
    assert "--arch=tupe_r_mini" in line and "--lr=0.0005" in line  # half of the pilot's best


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """The committed tables beside pages that are out of date."""
    (tmp_path / "docs/evidence").mkdir(parents=True)
    for path in first.EVIDENCE.glob("*.gz"):
        shutil.copy(path, tmp_path / "docs/evidence")
    for page in ("README.md", "docs/results.md"):
        content = (first.ROOT / page).read_text(encoding="utf-8")
        before, after = content[: content.index(first.BEGIN)], content[content.index(first.END) :]
        (tmp_path / page).write_text(f"{before}{first.BEGIN}\nSTALE\n{after}", encoding="utf-8")
    monkeypatch.setattr(first, "ROOT", tmp_path)
    monkeypatch.setattr(first, "EVIDENCE", tmp_path / "docs/evidence")
    return tmp_path


def test_one_command_writes_the_committed_pages_and_the_figures(clone, monkeypatch):
    monkeypatch.setitem(plotting.plt.rcParams, "figure.dpi", 30)  # most of the time goes into pixels
    words = ["claims", "--evidence", clone / "docs/evidence"]
    result = invoke(*words)
    assert result.exit_code == 0, result.output
    drawn = {path.name for path in (clone / "docs/figures").iterdir()}
    assert drawn == {f"claims_{figure.__name__}.png" for figure in first.FIGURES}
    pages = ["README.md", "docs/results.md", *(f"docs/evidence/{name}.md" for name in first.PAGES)]
    for page in pages:
        assert (clone / page).read_text(encoding="utf-8") == (PLUGIN.parent / page).read_text(encoding="utf-8"), page
    shown = "".join((clone / page).read_text() for page in pages)
    assert all(f"figures/{name})" in shown for name in drawn)


def test_a_page_without_markers_is_refused(tmp_path):
    (tmp_path / "README.md").write_text("no markers")
    with pytest.raises(ValueError, match=r"README.md needs the lines"):
        first.fill_in(tmp_path / "README.md", "text")


def test_of_ones_own_runs_there_are_tables_only(clone):
    """... for `tupe compare --position` on other text."""
    for number, lr in enumerate(PLAN["learning_rates"]):
        write_run(clone / "out", Trial("pilot", "nopos", "tiny", 5000, lr, 101), 7 + number)
    result = invoke("claims", "--evidence", clone / "mine", "--runs", clone / "out")
    assert result.exit_code == 0 and result.output.endswith("mine: 3 runs\n"), result.output
    assert {path.suffix for path in (clone / "mine").iterdir()} == {".gz"}
    assert all("STALE" in (clone / page).read_text() for page in ("README.md", "docs/results.md"))
    assert invoke("claims", "--runs", clone / "nowhere").exit_code == 2
    result = invoke("claims", "--evidence", clone / "empty")
    assert result.exit_code == 2 and "no table of finished runs" in result.output
