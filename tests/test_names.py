"""Odd names of folders, which are refused in one line."""

import os
import shutil

import pytest
from click.testing import CliRunner
from helpers import official_folder

from tupe.cli import main


def test_names_that_are_not_utf_8_are_refused(tmp_path, monkeypatch):
    folder = tmp_path / os.fsdecode("é".encode("latin-1"))
    folder.mkdir()

    def refused(words):
        result = CliRunner().invoke(main, words)
        assert result.exit_code == 2 and result.stderr.count("\n") == 1 and "is not UTF-8; rename" in result.stderr

    refused(["list", "schemes", "--output", str(folder)])
    monkeypatch.chdir(folder)
    refused(["list", "schemes"])


@pytest.mark.parametrize("sign", [":", "${seed}"])
def test_names_that_fairseq_does_not_take_are_refused(sign, vocabulary, pretrained, tmp_path, monkeypatch):
    """... where the folder is made, also if it is the working directory's name; not only where it is read."""
    official_folder(tmp_path / "glue")
    odd = tmp_path / f"a{sign}b"
    shutil.copytree(vocabulary, odd / "data")
    (odd / "a.txt").write_text("The cat sat on the old mat.")
    monkeypatch.chdir(odd)
    before = sorted(odd.rglob("*"))
    for words in (
        "prepare corpus a.txt", f"prepare glue --glue {tmp_path}/glue --data {vocabulary}",
        "pretrain --data data", f"finetune --task RTE --data data --checkpoint {pretrained}",
    ):  # fmt: skip
        result = CliRunner().invoke(main, [*words.split(), "--output=x"])
        said = f"fairseq takes {sign[:2]!r}" in result.stderr or "choose another path" in result.stderr
        assert result.exit_code == 2 and said, result.output
        assert result.stderr.count("\n") == 1 and sorted(odd.rglob("*")) == before
