"""Every command that reads a model, on a folder that the second engine wrote, with and without fairseq."""

import json
import sys

import pytest
from click.testing import CliRunner
from helpers import ended, fork, print_into

from tupe.cli import main
from tupe.train.saved import newest

PAIRS = [("The cat sat on a mat.", "The cat on sat a mat."), ("Dogs ran in the parks.", "Dogs in ran the parks.")]
COMMANDS = {  # name: words, in which {} are the model, its data and the output
    "minimal-pairs": "minimal-pairs m={model} --data={data} --pairs={output}.jsonl --output={output}",
    "order": "order m={model} --data={data} --output={output} --sentences=4 --tokens=60",
    "extrapolate": "extrapolate m={model} --data={data} --output={output} --lengths=8,16 --windows=4",
}


def words_of(name, **places):
    return [word.format(**places) for word in COMMANDS[name].split()]


def write_pairs(path):
    rows = [{"sentence_good": a, "sentence_bad": b, "linguistics_term": "order", "UID": "swap"} for a, b in PAIRS]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("name", COMMANDS)
def test_it_is_read(name, small, vocabulary, tmp_path):
    """Also a checkpoint within the run."""
    for model in (small, newest(small)[1]):
        write_pairs(tmp_path / "out.jsonl")
        words = words_of(name, model=model, data=vocabulary, output=tmp_path / "out")
        result = CliRunner().invoke(main, words)
        assert result.exit_code == 0, result.output
        written = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "out.jsonl"]
        assert written


def test_own_text_to_a_fine_tuned_and_evaluated_model_without_fairseq(small, vocabulary, tmp_path):
    """The README's commands in three processes that cannot import fairseq, Hydra and OmegaConf."""
    from helpers import official_folder

    commands = []

    def run():
        print_into(tmp_path / "log")
        sys.modules.update(dict.fromkeys(["fairseq", "fairseq_cli", "hydra", "omegaconf"]))
        from tupe.cli import main

        for words in commands:
            sys.argv[1:] = words
            main(standalone_mode=False)

    def without(*words, last=False):
        commands.append(list(map(str, words)))
        if last:
            assert ended(fork(run, "tupe", anew=True)) == 0, (tmp_path / "log").read_text()
            commands.clear()

    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"The cats sat on {n} old mats . Dogs ran in parks ." for n in range(400)))
    corpus = ["--output", tmp_path / "data", "--vocab-size=64", "--valid-fraction=0.2", "--jobs=1"]
    without("prepare", "corpus", text, *corpus)
    tiny = ["--gpus=0", "--allocator=none", "--num-workers=0"]
    more = ["--arch=tupe_r_tiny", "--max-update=2", "--batch-size=4", "--tokens-per-sample=32", *tiny]
    engine = ["--engine=torch", "--data", tmp_path / "data"]
    without("pretrain", *engine, "--output", tmp_path / "run", *more, last=True)
    write_pairs(tmp_path / "minimal-pairs.jsonl")
    for name in COMMANDS:
        without(*words_of(name, model=tmp_path / "run", data=tmp_path / "data", output=tmp_path / name))
    official_folder(tmp_path / "official")
    test_set = "index\tsentence1\tsentence2\n0\tThe cat sat .\tDogs ran .\n"
    (tmp_path / "official" / "RTE" / "test.tsv").write_text(test_set)
    glue = ["--glue", tmp_path / "official", "--data", tmp_path / "data", "--output", tmp_path / "glue"]
    without("prepare", "glue", *glue, "--tasks=RTE")
    tune = ["--task=RTE", "--engine=torch", "--data", tmp_path / "glue", "--checkpoint", tmp_path / "run"]
    without("finetune", *tune, "--output", tmp_path / "runs" / "rte", "--max-epoch=1", *tiny, last=True)
    without("predict", "--data", tmp_path / "glue", "--output", tmp_path / "sent", f"RTE={tmp_path / 'runs' / 'rte'}")
    without("report", tmp_path / "runs", "--output", tmp_path / "report", last=True)
    assert "RTE" in (tmp_path / "report" / "report.md").read_text()
