"""SQuAD v1.1 and v2.0: fine-tunes a Hugging Face folder as BERT's authors do, and computes the official scores.

    tupe checkpoint export --checkpoint checkpoint_last.pt --output hf
    python -m lab squad --model hf --squad SQUAD_FOLDER --version 2.0 --output OUT

B batch, L length of `<s> question </s> </s> window </s>`.
"""

import collections
import json
import re
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoModelForQuestionAnswering,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    get_linear_schedule_with_warmup,
)

import tupe.hf  # noqa: F401  (the Auto classes know our models)
from tupe.checkpoints.trained import read_model
from tupe.common import options
from tupe.common.architectures import plain_options
from tupe.run import record
from tupe.run.folder import write_atomically
from tupe.train.settle import variant

ANSWER_TOKENS = 30  # the longest answer that is predicted, as in BERT
QUESTION_TOKENS = 64  # of a question that are kept
STRIDE = 128  # tokens that a window shares with the one before it, at most half a window
METRICS = ["f1", "exact"]

# ------------------------------------------------------------------------------------------------ the official scores


def normalise_answer(text: str) -> str:
    """An answer as the official script compares it: lower case, no punctuation, no articles, single spaces."""
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(?:a|an|the)\b", " ", text).split())


def exact_match(prediction: str, gold: str) -> float:
    """1 if both are the same after normalisation, else 0."""
    return float(normalise_answer(prediction) == normalise_answer(gold))


def f1(prediction: str, gold: str) -> float:
    """Harmonic mean of precision and recall over words; 1 if both are empty, 0 if one is."""
    predicted, correct = normalise_answer(prediction).split(), normalise_answer(gold).split()
    if not predicted or not correct:
        return float(predicted == correct)
    common = sum((collections.Counter(predicted) & collections.Counter(correct)).values())
    return 2 * common / (len(predicted) + len(correct))


def best_over_golds(measure: Callable, prediction: str, golds: list[str], version: str = "2.0") -> float:
    """The best score against any gold answer; for a question without one, the empty string is correct.

    Version 2.0 of the official script ignores a gold answer that is all articles and punctuation; in 1.1 it can be
    matched exactly, but its F1 is 0.
    """
    real = [gold for gold in golds if normalise_answer(gold)]
    if version == "1.1" and golds:
        return max((measure(prediction, gold) for gold in (golds if measure is exact_match else real)), default=0.0)
    return max(measure(prediction, gold) for gold in real or [""])


def official_scores(predictions: dict, golds: dict, no_answer: dict | None = None) -> dict:
    """{"exact", "f1", "threshold"} in percent over all questions.

    predictions: {question id: text of the best answer}. golds: {question id: list of gold answers, empty if there is
    none}. no_answer: {question id: score of no answer minus that of the best span}: a question above the threshold is
    answered with the empty string. The threshold is the one with the highest F1, which the official script reports as
    "best_f1"; "exact" is at the same threshold. Without no_answer every answer counts, as in version 1.1.
    """
    ids = sorted(golds, key=lambda qid: no_answer[qid]) if no_answer else list(golds)
    version = "2.0" if no_answer else "1.1"
    given = {
        measure: np.array([best_over_golds(measure, predictions[qid], golds[qid], version) for qid in ids])
        for measure in (exact_match, f1)
    }
    empty = np.array([float(not golds[qid]) for qid in ids])
    answered, threshold = len(ids), None
    if no_answer:
        # When it looks for the threshold, no answer is right where there is none, and any other text is wrong.
        for values in given.values():
            values[empty == 1] = [not predictions[qid] for qid in ids if not golds[qid]]
        # F1 if the first k questions are answered, for k = 0 ... n; equal values are answered together.
        totals = np.concatenate([[0], np.cumsum(given[f1])]) + empty.sum() - np.concatenate([[0], np.cumsum(empty)])
        values = [no_answer[qid] for qid in ids]
        allowed = [k for k in range(len(ids) + 1) if k in (0, len(ids)) or values[k - 1] < values[k]]
        answered = max(allowed, key=lambda k: totals[k])
        threshold = values[answered - 1] if answered else values[0] - 1.0
    scores = {measure: (given[measure][:answered].sum() + empty[answered:].sum()) / len(ids) for measure in given}
    percent = {"exact": 100 * float(scores[exact_match]), "f1": 100 * float(scores[f1])}
    return {**percent, "threshold": float(threshold)} if no_answer else percent


# ------------------------------------------------------------------------------------------------ questions and windows


@dataclass
class Question:
    id: str
    text: str
    context: str
    answers: list[tuple[str, int]]  # (text, first character); empty if there is none


def read_squad(path: Path) -> list[Question]:
    """The questions of an official file. Raises ValueError if it is not one, or an answer is not where it should be."""
    questions = []
    try:
        for article in json.loads(path.read_text(encoding="utf-8"))["data"]:
            for paragraph in article["paragraphs"]:
                for entry in paragraph["qas"]:
                    answers = [(answer["text"], answer["answer_start"]) for answer in entry["answers"]]
                    questions.append(Question(entry["id"], entry["question"], paragraph["context"], answers))
    except FileNotFoundError:
        raise ValueError(f"not found: {path}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a SQuAD file: {type(error).__name__} {error}") from None
    for question in questions:
        for text, start in question.answers:
            if question.context[start : start + len(text)] != text:
                raise ValueError(f"{path}, question {question.id}: {options.shorten(text)} is not at {start}")
    return questions


@dataclass
class Window:
    """A question with a part of its paragraph. offsets: [L, 2], first character of each token and one past its last
    one, -1 for tokens that are not of the paragraph. target: positions of the answer's first and last token, those of
    <s> where it is not in this window."""

    question: Question
    ids: np.ndarray
    offsets: np.ndarray
    target: tuple[int, int]


def windows_of(question: Question, tokenizer: PreTrainedTokenizerBase, longest: int) -> Iterator[Window]:
    """The windows over a question's paragraph. longest: number of tokens that the model takes."""
    cut = {"add_special_tokens": False, "return_offsets_mapping": True, "truncation": True}
    limit = min(QUESTION_TOKENS, longest // 2)
    kept = tokenizer(question.text, max_length=limit, **cut)["offset_mapping"]
    text = question.text[: kept[-1][1]] if kept else ""
    encoded = tokenizer(
        text, question.context, max_length=longest, truncation="only_second", return_overflowing_tokens=True,
        stride=min(STRIDE, (longest - limit - 4) // 2), return_offsets_mapping=True,
    )  # fmt: skip
    for n, ids in enumerate(encoded["input_ids"]):
        inside = np.array([part == 1 for part in encoded.sequence_ids(n)])
        offsets = np.where(inside[:, None], np.array(encoded["offset_mapping"][n]), -1)
        yield Window(question, np.array(ids), offsets, target_of(question, offsets))


def target_of(question: Question, offsets: np.ndarray) -> tuple[int, int]:
    """Where the first gold answer is in a window, (0, 0) if not all of it is there."""
    if question.answers:
        text, first = question.answers[0]
        end = first + len(text)
        (tokens,) = np.nonzero((offsets[:, 0] < end) & (offsets[:, 1] > first))
        if len(tokens) and offsets[tokens[0], 0] <= first and offsets[tokens[-1], 1] >= end:
            return int(tokens[0]), int(tokens[-1])
    return 0, 0


def batch_of(windows: list[Window], pad: int, device: str) -> dict[str, Tensor]:
    """What the model takes."""
    ids = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(w.ids) for w in windows], True, pad)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(w.ids), dtype=torch.long) for w in windows], True)
    start, end = torch.tensor([w.target for w in windows]).T
    batch = {"input_ids": ids, "attention_mask": mask, "start_positions": start, "end_positions": end}
    return {name: tensor.to(device) for name, tensor in batch.items()}


# ---------------------------------------------------------------------------------------------- training and answering


def train(
    model: PreTrainedModel, windows: list[Window], pad: int, epochs: int, batch: int, lr: float, seed: int
) -> None:  # fmt: skip
    """AdamW with BERT's schedule: the rate rises over the first tenth and then falls linearly to 0."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.01}, {"params": others}], lr, weight_decay=0)
    updates = epochs * -(-len(windows) // batch)
    schedule = get_linear_schedule_with_warmup(optimizer, updates // 10, updates)
    model.train()
    for epoch in range(epochs):
        order = np.random.default_rng([seed, epoch]).permutation(len(windows))
        losses = []
        for start in range(0, len(order), batch):
            chosen = [windows[i] for i in order[start : start + batch]]
            loss = model(**batch_of(chosen, pad, model.device)).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        click.echo(f"epoch {epoch + 1}: loss {np.mean(losses):.4f}", err=True)


def best_span(start: Tensor, end: Tensor, inside: Tensor) -> tuple[float, int, int] | None:
    """(score, first, last) of the best span of at most ANSWER_TOKENS tokens of the paragraph; None if it has none.

    start, end: logits [L]. inside: which tokens are of the paragraph [L].
    """
    scores = start[:, None] + end[None, :]  # [L, L]
    possible = (inside[:, None] & inside[None, :]).triu().tril(ANSWER_TOKENS - 1)
    if not possible.any():
        return None
    best = int(scores.masked_fill(~possible, float("-inf")).argmax())
    first, last = divmod(best, len(start))
    return float(scores[first, last]), first, last


@torch.no_grad()
def answers(model: PreTrainedModel, windows: list[Window], pad: int, batch: int) -> tuple[dict, dict]:
    """({question id: best answer, in the characters of the paragraph}, {question id: score of no answer minus that of
    the best one})."""
    best, none = {}, {}
    model.eval()
    for begin in range(0, len(windows), batch):
        chosen = windows[begin : begin + batch]
        out = model(**batch_of(chosen, pad, model.device))
        logits = zip(out.start_logits.float().cpu(), out.end_logits.float().cpu(), strict=True)
        for window, (start, end) in zip(chosen, logits, strict=True):
            qid, size = window.question.id, len(window.ids)
            start, end, inside = start[:size], end[:size], torch.from_numpy(window.offsets[:, 0] >= 0)
            none[qid] = min(none.get(qid, float("inf")), float(start[0] + end[0]))
            span = best_span(start, end, inside)
            if span and (qid not in best or span[0] > best[qid][0]):
                first, last = window.offsets[span[1], 0], window.offsets[span[2], 1]
                best[qid] = span[0], window.question.context[first:last]
    texts = {qid: best[qid][1] if qid in best else "" for qid in none}
    return texts, {qid: none[qid] - best[qid][0] if qid in best else float("inf") for qid in none}


# --------------------------------------------------------------------------------------------------------- the command


def new_record(folder: Path, version: str, epochs: int, batch: int, lr: float, seed: int) -> record.Record:
    """The record of a run, by which `tupe report` and `python -m lab wang-tables` find it."""
    trained = read_model(folder, mmap=True)
    model, architecture = trained.config, trained.architecture
    return record.Record(
        task=f"SQuAD-{version}", architecture=architecture, seed=seed, lr=lr, splits=["dev"],
        variant=variant(vars(model), plain_options(architecture)),
        budget={"max_epoch": epochs}, metrics=METRICS, config={"dataset.batch_size": batch},
        **trained.origin(),
    )  # fmt: skip


@click.command("squad", cls=options.Command)
@click.option("--model", "folder", type=options.FOLDER, required=True, help="The Hugging Face folder to start from.")
@click.option(
    "--squad", type=options.FOLDER, required=True, help="The folder of train-vVERSION.json, dev-vVERSION.json."
)
@click.option("--version", type=click.Choice(["1.1", "2.0"]), default="1.1", show_default=True, help="SQuAD's version.")
@options.output("The folder to write: record.json with the scores, predictions.json and model/.")
@click.option("--epochs", type=click.IntRange(1), default=3, show_default=True, help="Epochs of training.")
@click.option("--batch-size", "batch", type=click.IntRange(1), default=32, show_default=True, help="Windows per step.")
@click.option("--lr", type=float, default=5e-5, show_default=True, help="The highest learning rate.")
@options.seed()
def command(folder, squad, version, output, epochs, batch, lr, seed):
    """Fine-tune a model on SQuAD with BERT's settings for v1.1 (its own for v2.0: 2 epochs, batches of 48), and score
    it on the development set. The threshold of v2.0 is the one with the highest F1, as in the official script."""
    if (output / record.NAME).exists():
        raise ValueError(f"{output} holds a run already; choose another folder")
    about = new_record(folder, version, epochs, batch, lr, seed)
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForQuestionAnswering.from_pretrained(folder)
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    about.begin(str(model.device))
    about.started_at = record.now()
    longest = model.config.max_position_embeddings
    questions = {split: read_squad(squad / f"{split}-v{version}.json") for split in ("train", "dev")}
    windows = {
        split: [window for question in questions[split] for window in windows_of(question, tokenizer, longest)]
        for split in questions
    }
    click.echo(f"{len(windows['train'])} windows to train on, {len(windows['dev'])} to score", err=True)
    train(model, windows["train"], tokenizer.pad_token_id, epochs, batch, lr, seed)
    texts, no_answer = answers(model, windows["dev"], tokenizer.pad_token_id, batch)
    golds = {question.id: [text for text, _ in question.answers] for question in questions["dev"]}
    scores = official_scores(texts, golds, no_answer if version == "2.0" else None)
    threshold = scores.pop("threshold", None)
    if threshold is not None:
        texts = {qid: text if no_answer[qid] <= threshold else "" for qid, text in texts.items()}
    updates = epochs * -(-len(windows["train"]) // batch)
    about.add_scores(epochs, updates, "dev", scores)
    about.end()
    output.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(output / "model")
    tokenizer.save_pretrained(output / "model")
    write_atomically(
        output / "predictions.json", json.dumps(texts, ensure_ascii=False, indent=1, allow_nan=False) + "\n"
    )
    about.save(output)
    click.echo(f"SQuAD {version}: exact {scores['exact']:.2f}, F1 {scores['f1']:.2f}")
