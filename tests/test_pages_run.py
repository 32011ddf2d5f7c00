"""Every command of every page runs once (slow), at a reduced size, in a folder with what the pages' names stand for.

A command has the options of its page. OF_NAMES: which file of this folder a name of the page stands for. SMALL: what
makes a command short (the last of two options counts). ELSEWHERE: what cannot run here, and what runs in its place.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from contextlib import closing, redirect_stderr, redirect_stdout

import pytest
from helpers import ENGLISH_WORDS, fork, official_folder
from pages import PAGES, ROOT, before, commands_of

from tupe.cli import main

pytestmark = pytest.mark.slow

ELSEWHERE = {
    "python -m lab": "lab/tests",
    " compare --": "tests/sweep/test_compare.py",
    "--tokenizer ": "tests/corpus/test_tokenizers.py: too little text for these vocabularies",
    "finetune --engine torch": "tests/train/test_finetune.py",
    "sweep --engine": "the same",
    "--dask": "tests/corpus/test_engine.py, with a scheduler",
    "hydra/launcher=slurm": "needs Slurm; the same sweep without it: tests/plugin/test_launchers.py",
    "released.pt": "tests/checkpoints/test_convert.py, with the released code's files",
    "BERT_FOLDER": "tests/checkpoints/test_convert.py, with a Hugging Face BERT",
    "--checkpoint roberta": "the same",
    "figure2": "the same",
    "KERPLE=": "the same command with two checkpoints, of the same page; this one needs twelve trainings",
    "tupe predict ": "tests/evaluate/test_predict.py: needs a fine-tuned CoLA",
    "tupe prepare labels ": "tests/corpus/test_labels.py",
    "--task reviews ": "the same",
    "tupe report ": "tests/sweep/test_report.py",
    "constant_cooldown": "tests/plugin/test_schedule.py: a cool-down of two updates is none",
    "fairseq-train data --task masked_lm": "the same",
    "--onnx": "tests/checkpoints/test_export.py: needs three more packages",
    "...": "the same",
}

# What the pages call a thing -> what it is in the folder of these tests; the first that fits.
OF_NAMES = [
    (r"^FOLDER(_OF_TEXT)?$", "text"),
    (r"^(raw(/\w+)?|wiki\.xml\.bz2|enwiki-\*\.bz2|books.*|stubs.*|eltec.*|wiki.*|speeches|reviews(.jsonl)?)$", "text"),
    (r"^(GLUE_FOLDER|GLUE)$", "official/glue"),
    (r"^(PRETRAINING_DATA|DATA|data8k|data32k|data|babylm/data|outputs/quickstart/data)$", "data"),
    (r"^((BERT-A)=)?(\$bert|runs/bert_a)$", r"\1bert_a"),
    (r"^((TUPE-.)=)?(\$tupe|runs/tupe_[ar])$", r"\1tupe_r"),
    (r"^((T5|ALiBi)=)(runs/\w+)$", r"\1t5"),
    (r"^runs/tied/\S*\.pt$", "t5/checkpoint_last.pt"),
    (r"^(CHECKPOINT|FILE|runs/mine|runs/sentences|runs/distance|checkpoint\.pt|(evidence|RUN|runs|outputs)/\S*\.pt)$",
     "tupe_r/checkpoint_last.pt"),
    (r"^((BERT-A|TUPE-R)=)?(runs/babylm\S*|RUN|swapped|stretched)$", r"\1bert_a"),
    (r"^(OUT|hf)$", "hf"),
    (r"^BLiMP$", "pairs.jsonl"),
    (r"^dict\.txt$", "data/dict.txt"),
    (r"^sample-bin$", "glue-bin"),
]  # fmt: skip
TINY = "--encoder-layers 1 --encoder-embed-dim 32 --encoder-ffn-embed-dim 32 --encoder-attention-heads 2"
SHORT = f"--num-workers 0 --tokens-per-sample 20 --batch-size 4 --update-freq 1 --max-update 2 {TINY}"
FURTHER = "--gpus 0 --num-workers 0 --batch-size 4 --tokens-per-sample 20 --max-epoch 1"
SMALL = {
    "prepare corpus": "--vocab-size 120 --jobs 1 --valid-fraction 0.2",
    "pretrain": f"--gpus 0 {SHORT} --warmup-updates 1 --nodes 1",
    "finetune": "--gpus 0 --num-workers 0 --max-epoch 1",
    "sweep": "--dry-run",
    "order": "--sentences 2 --tokens 100",
    "extrapolate": "--lengths 20,40 --windows 2",
}


def cases():
    """A parameter for each different command with options, of all pages."""
    seen = {}
    for page in PAGES:
        for program, words in commands_of(page):
            line = shlex.join([program, *words])
            is_whole = any(word.startswith("-") for word in words)
            if is_whole and line not in seen and not any(sign in f"{line} " for sign in ELSEWHERE):
                seen[line] = pytest.param(program, words, id=f"{page.stem}: {line[:90]}")
    return list(seen.values())


ENVIRONMENT = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def run(*words, cwd):
    environment = {**os.environ, **ENVIRONMENT}
    done = subprocess.run(list(map(str, words)), cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


def tupe(*words, cwd):
    """In a copy of this process, which has imported most of what a command needs."""
    with tempfile.TemporaryFile("w+") as log:

        def begin():
            os.chdir(cwd)
            for descriptor in (1, 2):  # of the processes that it starts
                os.dup2(log.fileno(), descriptor)
            with redirect_stdout(log), redirect_stderr(log), closing(log):
                main()

        process = fork(begin, "tupe", *words, **ENVIRONMENT)
        process.join(600)
        process.kill()  # unless it has ended
        log.seek(0)
        assert process.exitcode == 0, log.read()[-3000:]


def script(name):
    return shutil.which(name, path=os.path.dirname(sys.executable))


@pytest.fixture(scope="module")
def folder(vocabulary, pretrained, tmp_path_factory):
    """A folder with text, prepared data, checkpoints, official files and a list of pairs; all tiny."""
    place = tmp_path_factory.mktemp("pages")
    shutil.copytree(vocabulary, place / "data")
    (place / "text").mkdir()
    for number in range(8):
        sentence = " ".join(ENGLISH_WORDS[number:] + ENGLISH_WORDS[:number]).capitalize()
        (place / "text" / f"{number}.txt").write_text(f"{sentence}. " * 6 + f"\n\nNumber {number} ends it here.\n")
    shutil.copytree(pretrained.parent, place / "tupe_r")
    words = f"--data data --output bert_a --arch bert_a --gpus 0 {SHORT} --warmup-updates 1 --save-interval-updates 1"
    words += " --keep-interval-updates 2"
    tupe("pretrain", *words.split(), cwd=place)
    tupe("pretrain", *words.replace("--output bert_a", "--output t5 --position t5").split(), cwd=place)
    official_folder(place / "official/glue")
    pair = {"sentence_good": "the cat sat.", "sentence_bad": "cat the sat.", "UID": "a", "linguistics_term": "order"}
    (place / "pairs.jsonl").write_text(json.dumps(pair) + "\n")
    tupe("prepare", "glue", "--glue=official/glue", "--data=data", "--output=glue-bin", cwd=place)
    tupe("checkpoint", "export", "--checkpoint=tupe_r/checkpoint_last.pt", "--data=data", "--output=hf", cwd=place)
    example = re.search(r"```python\n(import torch\nfrom torch import nn.*?)```", PAGES[0].read_text(), re.DOTALL)
    (place / "distance.py").write_text(example.group(1))
    return place


def here(word):
    for pattern, replacement in OF_NAMES:
        if re.search(pattern, word):
            return re.sub(pattern, replacement, word)
    return word.replace("${arch}", "bert_a").replace("$task", "identify").replace("$PWD/tupe", str(ROOT / "tupe"))


@pytest.mark.parametrize(("program", "words"), cases())
def test_a_command_runs(program, words, folder, tmp_path):
    words = [*map(here, words)]
    if "--output" in words:
        words[words.index("--output") + 1] = str(tmp_path / "output")
    if program == "tupe":
        command = words[before(words) :]
        name = next(name for name in (" ".join(command[:2]), command[0], "") if name in SMALL or not name)
        further = "pretrain_further" in words  # the model is the checkpoint's
        if name == "pretrain" and not further and "--preset" not in words:
            arch = words[words.index("--arch") + 1] if "--arch" in words else "tupe_r"
            words += ["--arch", re.sub("_(tiny|mini|large)$", "", arch)]
        tupe(*words, *(FURTHER if further else SMALL.get(name, "")).split(), cwd=folder)
    elif program == "fairseq-train":
        short = f"--cpu {SHORT} --save-dir={tmp_path} --total-num-update=2 --warmup-updates=1"
        run(script(program), *(word for word in words if word != "--fp16"), *short.split(), cwd=folder)
    else:
        for name, path in {"$PWD/runs/x": tmp_path, "$PWD/data32k": folder / "data", "$PWD": folder}.items():
            words = [word.replace(name, str(path)) for word in words]
        words[words.index("configs")] = str(ROOT / "configs")
        short = {
            "common.fp16": "false", "common.cpu": "true", "dataset.num_workers": 0, "task.tokens_per_sample": 20,
            "dataset.batch_size": 4, "optimization.update_freq": "[1]", "optimization.max_update": 2,
            "lr_scheduler.warmup_updates": 1, "+model.encoder_layers": 1, "+model.encoder_embed_dim": 32,
            "+model.encoder_ffn_embed_dim": 32, "+model.encoder_attention_heads": 2, "hydra.run.dir": tmp_path,
        }  # fmt: skip
        changes = [f"{key}={value}" for key, value in short.items()]
        run(script(program), *words, *changes, f"checkpoint.save_dir={tmp_path}", cwd=folder)
