"""transformers' own examples, unchanged, on small data, from models/tupe_r_mini.

They are in no wheel: TRANSFORMERS_EXAMPLES names a copy of its folder examples/pytorch, of the 4.57 series, whose
scripts transformers 5 runs too. What they ask of `evaluate` is a script of the hub, so a metric of this file is in its
place. They need the libraries datasets and evaluate.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES, ROOT = os.environ.get("TRANSFORMERS_EXAMPLES"), Path(__file__).resolve().parents[1]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not EXAMPLES, reason="TRANSFORMERS_EXAMPLES names no folder examples/pytorch of transformers"),
]
RUNNER = """
import runpy, sys
import evaluate
import tupe.hf

class Metric:
    def compute(self, predictions, references):
        if isinstance(predictions[0], dict):  # of SQuAD
            right = [p["prediction_text"] in r["answers"]["text"] for p, r in zip(predictions, references)]
            return {"exact_match": 100 * sum(right) / len(right)}
        if isinstance(predictions[0], list):  # of tagging
            pairs = [pair for p, r in zip(predictions, references) for pair in zip(p, r)]
            share = sum(p == r for p, r in pairs) / len(pairs)
            return {f"overall_{name}": share for name in ("precision", "recall", "f1", "accuracy")}
        return {"accuracy": sum(int(p) == int(r) for p, r in zip(predictions, references)) / len(predictions)}

evaluate.load = lambda *names, **options: Metric()
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""
NAMES, PLACES = ["Ann", "Henri", "Maria", "Otto"], ["Paris", "London", "Rome", "Cairo"]


def questions(folder):
    rows = [
        {
            "id": str(n), "title": "t", "question": f"Where did {name} live?",
            "context": f"{name} lived in {place}. " * (1 + n % 3) + "The rest is about the weather. " * (n % 20),
            "answers": {"text": [place], "answer_start": [len(f"{name} lived in ")]},
        }
        for n, (name, place) in enumerate(zip(NAMES * 12, PLACES * 12, strict=True))
    ]  # fmt: skip
    (folder / "data.json").write_text(json.dumps({"data": rows}))


def names(folder):
    rows = [
        {"tokens": [name, "saw", "the", "river", "in", place, "."],
         "ner_tags": ["B-PER", "O", "O", "O", "O", "B-LOC", "O"]}
        for name in NAMES for place in PLACES for _ in range(3)
    ]  # fmt: skip
    (folder / "data.json").write_text("".join(json.dumps(row) + "\n" for row in rows))


def sentences(folder):
    lines = [f"{name} saw the old river near {place} and went home." for name in NAMES for place in PLACES]
    (folder / "data.txt").write_text("\n".join(2 * lines) + "\n")


def pairs(folder):
    rows = [f"{name} lived here.,{other} lived here.,{int(name == other)}" for name in NAMES * 2 for other in NAMES * 2]
    (folder / "data.csv").write_text("\n".join(["sentence1,sentence2,label", *rows]) + "\n")


CASES = {  # script -> (its data, its options, the score in its results)
    "question-answering/run_qa.py": (
        questions, ["data.json", "--max_seq_length=64", "--doc_stride=16"], "eval_exact_match"
    ),
    "token-classification/run_ner.py": (
        names, ["data.json", "--text_column_name=tokens", "--label_column_name=ner_tags"], "eval_accuracy"
    ),
    "language-modeling/run_mlm.py": (sentences, ["data.txt", "--line_by_line", "--max_seq_length=32"], "perplexity"),
    "text-classification/run_glue.py": (pairs, ["data.csv", "--max_seq_length=32"], "eval_accuracy"),
}  # fmt: skip


@pytest.mark.parametrize("script", CASES)
def test_the_script_runs_unchanged(script, tmp_path):
    for library in ("datasets", "evaluate", "accelerate", "sentencepiece", "sacremoses", "spacy"):
        pytest.importorskip(library)
    write, (data, *options), score = CASES[script]
    write(tmp_path)
    (tmp_path / "runner.py").write_text(RUNNER)
    common = ["--model_name_or_path", ROOT / "models" / "tupe_r_mini", "--train_file", data, "--validation_file", data]
    common += ["--do_train", "--do_eval", "--output_dir=out", "--max_steps=8", "--use_cpu", "--report_to=none"]
    common += ["--per_device_train_batch_size=8", "--learning_rate=1e-3", "--warmup_steps=1", "--seed=1"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {
        **os.environ, "PYTHONPATH": path, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, "runner.py", Path(EXAMPLES, script), *common, *options]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((tmp_path / "out" / "all_results.json").read_text())
    if script.endswith("run_ner.py"):  # two kinds of names, by their places in the sentence
        assert results[score] > 0.8
    assert results[score] >= 0 and results["eval_loss" if "eval_loss" in results else "train_loss"] > 0
    assert (tmp_path / "out" / "tokenizer_config.json").is_file()
