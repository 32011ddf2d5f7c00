"""`tupe predict`: what is refused, and what is zipped. Predictions of trained models: tests/plugin/test_glue.py."""

import zipfile

import pytest
from click.testing import CliRunner

from tupe.evaluate.predict import FILES, command, zip_submission


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("CoLA", "TASK=CHECKPOINT"),
        ("SNLI=x.pt", "SNLI"),
        ("CoLA=x.pt", "no test set of CoLA"),
        ("RTE=x.pt", "x.pt cannot be read"),
        ("RTE=y.pt", "RTE=y.pt not found"),
    ],  # fmt: skip
)
def test_refusals(tmp_path, monkeypatch, argument, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.pt").touch()
    (tmp_path / "RTE" / "input0").mkdir(parents=True)
    (tmp_path / "RTE" / "input0" / "test.idx").touch()
    result = CliRunner().invoke(command, [argument, f"--data={tmp_path}", f"--output={tmp_path / 'out'}"])
    assert result.exit_code == 2 and message in result.output
    assert not (tmp_path / "out").exists()


def test_a_task_given_twice_is_refused(tmp_path):
    for name in ("a.pt", "b.pt"):
        (tmp_path / name).touch()
    words = [f"RTE={tmp_path / 'a.pt'}", f"rte={tmp_path / 'b.pt'}", f"--data={tmp_path}", f"--output={tmp_path}"]
    result = CliRunner().invoke(command, words)
    assert result.exit_code == 2 and f"RTE is given twice, {tmp_path / 'a.pt'} and" in result.output


def test_a_submission_holds_only_the_files_of_this_run(tmp_path):
    paths = [tmp_path / name for name in ("CoLA.tsv", "RTE.tsv")]
    for path in paths:
        path.write_text(path.name)
    for chosen in (paths, paths[:1]):
        with zipfile.ZipFile(zip_submission(tmp_path, chosen)) as archive:
            content = {name: archive.read(name).decode() for name in archive.namelist()}
        assert content == {path.name: path.name for path in chosen}


def test_file_names_are_those_of_the_server():
    names = ["CoLA", "SST-2", "MRPC", "STS-B", "QQP", "MNLI-m", "MNLI-mm", "QNLI", "RTE", "WNLI", "AX"]  # its FAQ
    assert sorted(FILES.values()) == sorted(f"{name}.tsv" for name in names)
