"""`tupe predict`: what is refused. Predictions of trained models: tests/plugin/test_classification.py."""

import pytest
from click.testing import CliRunner

from tupe.evaluate.predict import FILES, command


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("CoLA", "CoLA not found"),
        ("SNLI=x.pt", "SNLI"),
        ("CoLA=x.pt", "no test set of CoLA"),
        ("RTE=x.pt", "x.pt is damaged"),
        ("RTE=y.pt", "RTE=y.pt not found"),
        ("RTE=x.pt --data=none", "data folder not found: none"),
    ],  # fmt: skip
)
def test_refusals(tmp_path, monkeypatch, argument, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.pt").touch()
    (tmp_path / "dict.txt").write_text("a 1\n")
    (tmp_path / "RTE" / "input0").mkdir(parents=True)
    (tmp_path / "RTE" / "input0" / "test.idx").touch()
    result = CliRunner().invoke(command, [f"--data={tmp_path}", f"--output={tmp_path / 'out'}", *argument.split()])
    assert result.exit_code == 2 and message in result.output
    assert not (tmp_path / "out").exists()


def test_a_task_has_one_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("x.pt", "y.pt"):
        (tmp_path / name).touch()
    result = CliRunner().invoke(command, ["RTE=x.pt", "RTE=y.pt", f"--data={tmp_path}", f"--output={tmp_path / 'out'}"])
    assert result.exit_code == 2 and "RTE stands for both x.pt and y.pt" in result.output


def test_file_names_are_those_of_the_server():
    names = ["CoLA", "SST-2", "MRPC", "STS-B", "QQP", "MNLI-m", "MNLI-mm", "QNLI", "RTE", "WNLI", "AX"]  # its FAQ
    assert sorted(FILES.values()) == sorted(f"{name}.tsv" for name in names)
