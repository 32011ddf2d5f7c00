"""A disk that is full or read-only, for every command that writes: one line with the file and the reason, the status
of a refusal, and nothing half-written."""

import subprocess

import pytest
from click.testing import CliRunner
from helpers import file_system, official_folder

from tupe.cli import main

WRITERS = {
    "checkpoint average": ["{pretrained}", "{pretrained}", "--output={out}/a"],
    "checkpoint swap": ["--checkpoint={pretrained}", "--data={data}", "--position=untied", "--output={out}/a"],
    "checkpoint stretch": ["--checkpoint={pretrained}", "--length=40", "--output={out}/a"],
    "checkpoint export": ["--checkpoint={pretrained}", "--data={data}", "--output={out}"],
    "prepare corpus": ["{source}/a.txt", "--output={out}", "--vocab-size=60", "--jobs=1", "--valid-fraction=0.3"],
    "prepare glue": ["--glue={source}/glue", "--data={data}", "--output={out}", "--tasks=RTE"],
    "minimal-pairs": ["{pretrained}", "--data={data}", "--pairs={source}/pairs.jsonl", "--output={out}"],
    "order": ["{pretrained}", "--data={data}", "--tokens=100", "--sentences=2", "--output={out}"],
    "extrapolate": ["{pretrained}", "--data={data}", "--lengths=20,40", "--windows=2", "--output={out}"],
    "pretrain": ["--data={data}", "--output={out}", "--arch=bert_a_tiny", "--recipe=pretrain_small", "--gpus=0",
                 "--max-update=1", "--tokens-per-sample=20", "--num-workers=0", "--allocator=none"],
    "finetune": ["--task=CoLA", "--data={learnable}", "--checkpoint={pretrained}", "--output={out}", "--gpus=0",
                 "--max-epoch=1", "--num-workers=0", "--allocator=none"],
}  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Texts of all kinds."""
    folder = tmp_path_factory.mktemp("source")
    (folder / "a.txt").write_text("\n\n".join(f"The cat {i} sat on the old mat, the birds sang." for i in range(80)))
    (folder / "pairs.jsonl").write_text('{"sentence_good": "The cat sat.", "sentence_bad": "Cat the sat."}\n')
    official_folder(folder / "glue")
    return folder


FULL, READ_ONLY = "the disk is full", "Read-only file system"
# A full disk shows what is half-written; on one that is read-only nothing is begun, which a command of each kind tries.
SOME = ["checkpoint average", "checkpoint export", "prepare corpus", "prepare glue", "minimal-pairs"]
SOME += ["pretrain"]


@pytest.fixture(scope="module")
def disk(request, tmp_path_factory):
    """(a folder on such a disk, what is said of it)"""
    with file_system(tmp_path_factory.mktemp("disk") / "disk", 1) as folder:
        if request.param == FULL:
            with pytest.raises(OSError, match="No space left"):
                (folder / "filler").write_bytes(bytes(2**21))
        else:
            subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
        yield folder, request.param


@pytest.mark.parametrize(
    ("disk", "name"),
    [
        *((FULL, name) for name in WRITERS),
        *((READ_ONLY, name) for name in SOME),
    ],
    indirect=["disk"],
)
def test_every_writer_says_what_is_wrong_with_the_disk(name, disk, source, pretrained, vocabulary, learnable):
    folder, reason = disk
    places = {"pretrained": pretrained, "data": vocabulary, "source": source, "learnable": learnable}
    words = [word.format(out=folder / name, **places) for word in WRITERS[name]]
    result = CliRunner().invoke(main, [*name.split(), *words])
    line = result.stderr.splitlines()[-1]
    assert result.exit_code == 2 and reason in line and str(folder) in line, result.output
    assert "Traceback" not in result.output and line.count(str(folder)) == 1, line
    left = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size and path.name != "filler"]
    assert not left, left
