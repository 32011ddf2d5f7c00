"""BabyLM's track of ten million words: its folder as data, and our recipe beside Hugging Face's run_mlm
(docs/babylm.md).

    python -m lab babylm sample --raw RAW --output train_10M          text of package registries in the track's form
    python -m lab babylm prepare train_10M --output OUT               OUT/tokenizer.json and OUT/data
    python -m lab babylm compare --data OUT/data --output RUNS ...    train and score what is left; resumes RUNS
    python -m lab babylm page --runs RUNS                             add what has finished to the page

RUNS/<arm>_seed<seed> is a run. Once it is over, result.json holds what it was measured on.
"""

import csv
import io
import json
import math
import os
import re
import resource
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np
import torch

from tupe.common import options
from tupe.common.tables import TextTable
from tupe.data.blocks import BOS, EOS, PAD
from tupe.data.splits import HELD_OUT_SEED, Split
from tupe.evaluate import minimal_pairs
from tupe.evaluate.loading import load_model, losses_at
from tupe.run import record, stop
from tupe.run.folder import write_atomically
from tupe.run.processes import PROGRAM
from tupe.text import TextEncoder

from .bench import machine
from .estimates import welch
from .execute import check_data

ARMS, SEEDS = ("tupe_r", "run_mlm"), (1, 2, 3)
LENGTH, BATCH, UPDATES, WARMUP, RATE = 64, 32, 2000, 200, 1e-3
WORDS_OF_A_DOCUMENT = 2000  # of neighbouring lines: what is held out is whole documents, and most files have no borders
HELD_OUT_LINES, PAIRS = 2000, 100  # pairs of each paradigm
DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE, ROWS = DOCS / "babylm.md", DOCS / "evidence" / "babylm" / "runs.csv"
NEXT = "Next: [fine-tune](finetune.md) the model, or [look inside](inspect.md).\n"
COLUMNS = ("arm", "seed", "updates", "bits", "blimp", "blimp_error", "cpu_seconds", "seconds", "device", "commit",
           "finished_at")  # fmt: skip


def complete(command: list) -> None:
    """Run a command to its end, and show nothing of it. Raises ValueError with its last line if it fails."""
    done = subprocess.run([*map(str, command)], capture_output=True, encoding="utf-8", errors="backslashreplace")
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}"
        raise ValueError(said.splitlines()[-1])


# ------------------------------------------------------------------------------------------------------------- the text


def sentences(raw: Path) -> Iterator[tuple[str, str]]:
    """(source, sentence) of what `python -m lab download --kinds books,speeches,reviews` wrote. The cut is rough, as
    the track's own lines are."""
    for source, text in texts(raw):
        for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z\"'])", " ".join(text.split())):
            yield source, sentence


def texts(raw: Path) -> Iterator[tuple[str, str]]:
    for source in ("books", "speeches"):
        for path in sorted((raw / source).glob("*.txt")):
            for paragraph in path.read_text(encoding="utf-8").split("\n\n"):
                yield source, paragraph
    with (raw / "reviews" / "imdb.jsonl").open(encoding="utf-8") as file:
        for line in file:
            yield "reviews", json.loads(line)["text"]


@click.command(cls=options.QuietCommand)
@click.option("--raw", required=True, type=options.FOLDER, help="The folder of `python -m lab download`.")
@click.option("--words", type=click.IntRange(1), default=10_000_000, show_default=True, help="How many, by blanks.")
@options.output("The folder of the .train files.")
def sample(raw, words, output):
    """Write text of package registries as the track has it: SOURCE.train, a sentence in each line."""
    lines, left = {}, words
    for source, line in sentences(raw):
        count = len(line.split())
        if count and left > 0:
            lines.setdefault(source, []).append(line)
            left -= count
    if left > 0:
        raise ValueError(
            f"{raw} has {words - left:,} words, not {words:,}; valid here: --words {words - left} or fewer"
        )
    output.mkdir(parents=True, exist_ok=True)
    for source, of_source in lines.items():
        write_atomically(output / f"{source}.train", "\n".join(of_source) + "\n")
        click.echo(f"{source}: {len(of_source):,} lines, {sum(len(line.split()) for line in of_source):,} words")


@click.command(cls=options.QuietCommand)
@click.argument("folder", type=options.FOLDER)
@click.option("--vocab-size", type=click.IntRange(300), default=8192, show_default=True)
@options.output("The folder that gets text, tokenizer.json and data.")
def prepare(folder, vocab_size, output):
    """Make data of a folder of .train files: a cased byte-level BPE of them, and every line as a sequence."""
    files = sorted(folder.glob("*.train"))
    if not files:
        raise ValueError(f"{folder} has no .train file; valid: the folder train_10M of BabyLM's text track")
    (output / "text").mkdir(parents=True, exist_ok=True)
    texts = [output / "text" / f"{path.stem}.txt" for path in files]
    for path, text in zip(files, texts, strict=True):
        write_atomically(text, with_documents(path.read_text(encoding="utf-8").split("\n")))
    train_tokenizer(texts, vocab_size, output / "tokenizer.json")
    complete([*PROGRAM, "prepare", "corpus", *texts, "--output", output / "data", "--tokenizer",
              output / "tokenizer.json", "--sentences", "lines", "--valid-fraction", "0.01"])  # fmt: skip
    click.echo((output / "data" / "report.md").read_text(encoding="utf-8"))


def with_documents(lines: list[str]) -> str:
    """The lines that have text, with an empty one after each `WORDS_OF_A_DOCUMENT` words."""
    found, words = [], 0
    for line in lines:
        if line.strip():
            found.append(line)
            words += len(line.split())
            if words >= WORDS_OF_A_DOCUMENT:
                found.append("")
                words = 0
    return "\n".join(found) + "\n"


def train_tokenizer(texts: list[Path], types: int, output: Path) -> None:
    """Byte-level BPE, as in docs/text.md: no byte is unknown, and transformers reads it without code of ours."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    special, alphabet = [*TextEncoder.SPECIALS, "<mask>"], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=types, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train([str(text) for text in texts], trainer)
    tokenizer.save(str(output))


# ------------------------------------------------------------------------------------------------------- the comparison


class Run(NamedTuple):
    arm: str
    seed: int

    def folder(self, output: Path) -> Path:
        return output / f"{self.arm}_seed{self.seed}"

    def command(self, data: Path, output: Path, python: str, script: Path) -> list:
        """Both: the same size, vocabulary, lines of text, updates, tokens of an update and rates. All else is each
        one's own default."""
        if self.arm == "tupe_r":
            return [*PROGRAM, "pretrain", "--engine", "torch", "--recipe", "pretrain_small", "--arch", "tupe_r_mini",
                    "--data", data, "--output", self.folder(output), "--seed", self.seed, "--lr", RATE,
                    "--batch-size", BATCH, "--tokens-per-sample", LENGTH, "--max-update", UPDATES,
                    "--warmup-updates", WARMUP, "--precision", "float32", "--num-workers", 0,
                    "--validate-interval-updates", UPDATES, "--save-interval-updates", 500]  # fmt: skip
        types = len(TextEncoder(data))
        size = {"vocab_size": types, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
                "intermediate_size": 1024, "max_position_embeddings": LENGTH, "pad_token_id": PAD}  # fmt: skip
        return [python, script, "--model_type", "bert", "--config_overrides",
                ",".join(f"{name}={value}" for name, value in size.items()),
                "--tokenizer_name", output / "tokenizer", "--train_file", output / "train.txt",
                "--validation_file", output / "valid.txt", "--max_seq_length", LENGTH, "--do_train",
                "--output_dir", self.folder(output), "--per_device_train_batch_size", BATCH, "--max_steps", UPDATES,
                "--learning_rate", RATE, "--warmup_steps", WARMUP, "--seed", self.seed, "--save_strategy", "no",
                "--logging_steps", 100, "--report_to", "none", "--disable_tqdm", "True", "--use_cpu",
                "True"]  # fmt: skip


def write_for_run_mlm(data: Path, output: Path) -> None:
    """The lines of both splits, and the data's tokeniser, as run_mlm reads them: the very text that our recipe gets."""
    from transformers import PreTrainedTokenizerFast

    encoder = TextEncoder(data)
    for split in ("train", "valid"):
        lines = (encoder.decode(ids) for ids in Split(data / split))
        write_atomically(output / f"{split}.txt", "".join(f"{line}\n" for line in lines if line))
    names = dict(zip(("bos_token", "pad_token", "eos_token", "unk_token"), TextEncoder.SPECIALS, strict=True))
    PreTrainedTokenizerFast(
        tokenizer_file=str(data / "tokenizer.json"), **names, cls_token="<s>", sep_token="</s>", mask_token="<mask>",
        model_max_length=LENGTH, model_input_names=["input_ids", "attention_mask"],
    ).save_pretrained(output / "tokenizer")  # fmt: skip


def held_out_bits(model, data: Path, lines: int = HELD_OUT_LINES) -> float:
    """Bits per masked piece of held-out lines, drawn without replacement, each alone as `<s> line </s>`, so that
    neither way of filling blocks counts. 15 % of a line's pieces (at least one) are <mask>, the same for all models."""
    split, draw, losses = Split(data / "valid"), np.random.default_rng(HELD_OUT_SEED), []
    for index in draw.permutation(len(split))[:lines]:
        pieces = split[index][: LENGTH - 2]
        pieces = torch.tensor(pieces[pieces != EOS].astype(np.int64))
        if not len(pieces):
            continue
        where = torch.from_numpy(draw.permutation(len(pieces))[: max(1, round(0.15 * len(pieces)))])
        ids = torch.cat([torch.tensor([BOS]), pieces, torch.tensor([EOS])])
        ids[1 + where] = model.config.mask_token_id
        losses.append(losses_at(model, ids[None], (torch.zeros_like(where), 1 + where), pieces[where]))
    return float(torch.cat(losses).mean()) / math.log(2)


def score(folder: Path, data: Path, pairs: Path) -> dict:
    """What a trained model is measured on. A BERT of run_mlm is converted, so that the same code scores both."""
    if json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"] == "bert":
        if not (folder / "converted").exists():
            complete([*PROGRAM, "checkpoint", "convert", "--from", folder, "--output", folder / "converted"])
        folder = folder / "converted"
    model, _ = load_model(folder, data)
    paradigms = [replace(each, pairs=each.pairs[:PAIRS]) for each in minimal_pairs.read_paradigms(pairs)]
    found = minimal_pairs.summary(minimal_pairs.evaluate(model, TextEncoder(data), paradigms), paradigms)
    found = found["all"]["single"]  # what BabyLM's pipeline computes: one mask at a time
    return {"bits": held_out_bits(model, data), "blimp": found["accuracy"], "blimp_error": found["error_over_pairs"],
            "phenomena": found["phenomena"]}  # fmt: skip


def train(run: Run, data: Path, output: Path, python: str, script: Path) -> dict:
    """Train a run to its end -> {"cpu_seconds", "seconds"}, None for one that was interrupted: ours goes on, one of
    run_mlm begins anew. Raises ValueError if it fails."""
    folder, log = run.folder(output), output / f"{run.folder(output).name}.log"
    if run.arm == "run_mlm" and folder.exists():
        shutil.rmtree(folder)
    resumed, began, before = folder.exists(), time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "HF_HOME": str(output / "cache"), "HF_HUB_OFFLINE": "1"}
    with log.open("ab") as file:
        words = [str(word) for word in run.command(data, output, python, script)]
        process = subprocess.Popen(words, stdout=file, stderr=file, env=environment)
        with stop.handled(stop.SIGNALS, lambda number, frame: process.terminate()):
            status = process.wait()
    if status:
        raise ValueError(f"{folder.name} ended with status {status}: see {log}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    took = {"cpu_seconds": round(cpu), "seconds": round(time.monotonic() - began)}
    return dict.fromkeys(took) if resumed else took


@click.command(cls=options.QuietCommand)
@options.data("The data that `prepare` made.")
@click.option("--pairs", required=True, type=options.FOLDER, help="The folder of BLiMP's .jsonl files.")
@click.option("--script", required=True, type=options.FILE, help="transformers' examples/.../run_mlm.py.")
@click.option("--python", required=True, help="The Python that runs it, with transformers, datasets and evaluate.")
@options.output("The folder of the runs. An existing one is resumed.")
def compare(data, pairs, script, python, output):
    """Train and score three seeds of our recipe and three of run_mlm, one after the other; resumes OUTPUT."""
    data, output = data.resolve(), output.resolve()
    check_data(data, output, needed=0)
    if not (output / "tokenizer").exists():
        write_for_run_mlm(data, output)
    for run in [Run(arm, seed) for seed in SEEDS for arm in ARMS]:
        result, trained = (run.folder(output) / name for name in ("result.json", "trained.json"))
        if not trained.exists():
            write_atomically(trained, json.dumps(train(run, data, output, python, script)))
        if not result.exists():
            took = json.loads(trained.read_text(encoding="utf-8"))
            content = {**run._asdict(), "updates": UPDATES, **score(run.folder(output), data, pairs), **took}
            content |= {"device": machine.environment()["cpu"], "commit": record.git_commit()}
            content |= {"finished_at": record.now()}
            write_atomically(result, json.dumps(content, indent=1, allow_nan=False) + "\n")
        found = json.loads(result.read_text(encoding="utf-8"))
        click.echo(f"{run.arm} {run.seed}: {found['bits']:.3f} bits, BLiMP {100 * found['blimp']:.1f} %")


# ------------------------------------------------------------------------------------------------------------- the page


def read_rows() -> dict[Run, dict]:
    """The committed rows."""
    if not ROWS.exists():
        return {}
    return {Run(row["arm"], int(row["seed"])): row for row in csv.DictReader(ROWS.open(encoding="utf-8"))}


def table(rows: list[dict]) -> str:
    """A row for each run, and one for the mean of an arm whose three seeds have ended."""
    cells = []
    for arm in ARMS:
        of_arm = [row for row in rows if row["arm"] == arm]
        for row in of_arm:
            minutes = f"{float(row['cpu_seconds']) / 60:.0f}" if row["cpu_seconds"] else "interrupted"
            blimp, error = (100 * float(row[name]) for name in ("blimp", "blimp_error"))
            cells.append([arm, row["seed"], f"{float(row['bits']):.2f}", f"{blimp:.1f} ± {error:.1f}", minutes])
        if len(of_arm) == len(SEEDS):
            bits, blimp = ([float(row[name]) for row in of_arm] for name in ("bits", "blimp"))
            spread = 100 * statistics.stdev(blimp)
            cells.append([arm, "mean, s.d.", f"{statistics.mean(bits):.2f}, {statistics.stdev(bits):.2f}",
                          f"{100 * statistics.mean(blimp):.1f}, {spread:.1f}", ""])  # fmt: skip
    header = ["recipe", "seed", "held-out bits", "BLiMP, % ± s.e. over pairs", "CPU minutes"]
    return TextTable.plain(header, cells, align="lrrrr").markdown()


def difference(rows: list[dict], measure: str, scale: float, digits: int) -> str:
    """Our recipe minus run_mlm: mean and Welch's 95 % interval over seeds, which the two do not share."""
    ours, theirs = ([scale * float(row[measure]) for row in rows if row["arm"] == arm] for arm in ARMS)
    mean, low, high, _ = welch(ours, theirs)
    return f"{mean:+.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


SAID = """
`tupe_r` minus `run_mlm`, with 95 % intervals over seeds: {bits} bits and {blimp} points of BLiMP.
Where an interval contains 0, this budget does not tell the recipes apart. Chance is 50 % in BLiMP, so a model near
that needs a larger budget before its score means anything.

The two recipes differ in more than positions (the table above), and neither rate was tuned. So this says what each
gives to those who type it with four million tokens to spend, and not why.
"""


def results(rows: list[dict]) -> str:
    """The page's last section."""
    left = len(ARMS) * len(SEEDS) - len(rows)
    if not rows:
        return "No run has finished, so there is no table yet.\n"
    text = "`python -m lab babylm page` draws this table from [the rows](evidence/babylm/runs.csv).\n\n" + table(rows)
    if left:
        return f"{text}\nRuns that have not finished: {left} of six.\n"
    return text + SAID.format(bits=difference(rows, "bits", 1, 2), blimp=difference(rows, "blimp", 100, 1))


@click.command(cls=options.QuietCommand)
@click.option("--runs", type=options.FOLDER, help="The folder of `compare`, whose finished runs are added.")
def write_page(runs):
    """Write the table of docs/babylm.md from the committed rows."""
    rows = read_rows()
    for path in runs.glob("*/result.json") if runs else ():
        found = json.loads(path.read_text(encoding="utf-8"))
        row = {name: "" if found[name] is None else str(found[name]) for name in COLUMNS}
        rows[Run(found["arm"], found["seed"])] = row
    rows = [rows[key] for key in sorted(rows)]
    if rows:
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        ROWS.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(ROWS, text.getvalue())
    head = PAGE.read_text(encoding="utf-8").partition("## Results\n")[0]
    write_atomically(PAGE, f"{head}## Results\n\n{results(rows)}\n{NEXT}")
