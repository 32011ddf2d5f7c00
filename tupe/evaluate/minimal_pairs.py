"""Minimal pairs: how often a model finds the grammatical sentence of two more likely than the other (BLiMP: Warstadt et
al., 2020).

`tupe minimal-pairs` reads BLiMP's and BabyLM's JSON lines, a folder or a file. The score of a sentence is its
pseudo-log-likelihood (`tupe.evaluate.likelihood`); the sum with the later pieces of a word masked is the primary one. A
difference of at most 1e-4 nats is a tie and counts one half, so that a model without positions is exactly at one half
on pairs that differ only in the order of their words.
"""

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
from tqdm import tqdm

from ..common.options import QuietCommand, output
from ..common.prepared import text_encoder
from ..common.tables import TextTable
from ..normaliser import is_blank
from ..run.folder import files_below
from ..text import TextEncoder
from .likelihood import pseudo_log_likelihoods
from .loading import Model, models, write_results

TIE = 1e-4  # nats: below it, a difference is rounding
MINIMUM = 10  # pairs of a paradigm in which only order differs: fewer (how many is chance) count as none in the average
MEASURES = ("word", "single")  # the first is the primary one
PHENOMENA = {"s-selection": "argument_structure"}  # the paper's twelve phenomena count one paradigm of BLiMP's 67 there


@dataclass(frozen=True)
class Paradigm:
    """The pairs of one file: "adjunct_island" of the phenomenon "island_effects"."""

    name: str
    phenomenon: str
    pairs: list[tuple[str, str]]  # (good, bad)


# ------------------------------------------------------------------------------------------------------------ reading


def read_paradigms(source: str | Path) -> list[Paradigm]:
    """The paradigms of a .jsonl file, or of a folder of them, sorted by name. Raises ValueError, with file and line,
    for what is not a pair."""
    source = Path(source)
    files = [path for path in files_below(source) if path.suffix == ".jsonl"] if source.is_dir() else [source]
    if not files:
        raise ValueError(f"{source} holds no .jsonl file (an archive has to be unpacked)")
    paradigms = [_paradigm(path) for path in files]
    if twice := [name for name, count in Counter(paradigm.name for paradigm in paradigms).items() if count > 1]:
        raise ValueError(f"{source} has the paradigm {twice[0]} twice")
    return sorted(paradigms, key=lambda paradigm: paradigm.name)


def _paradigm(path: Path) -> Paradigm:
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: byte {error.start} is not UTF-8") from None
    pairs, row = [], {}
    for number, line in enumerate(lines, 1):
        if is_blank(line):
            continue
        try:
            row = json.loads(line)
            pair = row["sentence_good"], row["sentence_bad"]
            if not all(isinstance(sentence, str) and not is_blank(sentence) for sentence in pair):
                raise TypeError
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ValueError(f'{path}, line {number}: no object with "sentence_good" and "sentence_bad"') from None
        pairs.append(pair)
    if not pairs:
        raise ValueError(f"{path} holds no pair")
    phenomenon = str(row.get("linguistics_term", path.stem))  # the same in all of its rows
    return Paradigm(path.stem, PHENOMENA.get(phenomenon, phenomenon), pairs)


# ------------------------------------------------------------------------------------------------------------ scoring


def evaluate(model: Model, encoder: TextEncoder, paradigms: list[Paradigm]) -> dict[str, dict]:
    """{paradigm: {measure: good minus bad in nats [pairs], "only_order": [pairs], "same_pieces": [pairs]}}.

    same_pieces: both sentences are one and the same for the model (words that differ in case, or are unknown).
    only_order: they are not, but have the same words, each in the same pieces.
    """
    results = {}
    for paradigm in tqdm(paradigms, unit="paradigm", disable=None):
        words = [[encoder.word_ids(sentence) for sentence in pair] for pair in paradigm.pairs]
        try:
            scores = pseudo_log_likelihoods(model, [sentence for pair in words for sentence in pair])
        except ValueError as error:
            raise ValueError(f"{paradigm.name}: {error} (two sentences are a pair)") from None
        better = np.array(scores[::2]) - np.array(scores[1::2])
        same = np.array([good == bad for good, bad in words])
        same_words = np.array([Counter(map(tuple, good)) == Counter(map(tuple, bad)) for good, bad in words])
        results[paradigm.name] = {
            **dict(zip(MEASURES, better.T, strict=True)), "only_order": same_words & ~same, "same_pieces": same,
        }  # fmt: skip
    return results


def credit(difference: np.ndarray) -> np.ndarray:
    """1 where the good sentence is more likely, 0 where the bad one is, one half for a tie."""
    return np.where(np.abs(difference) <= TIE, 0.5, (difference > 0).astype(float))


def accuracies(results: dict, measure: str = MEASURES[0], only_order: bool = False) -> dict[str, np.ndarray]:
    """{paradigm: credit of its pairs}; only_order: of the pairs with the same words, if it has `MINIMUM` of them."""
    credits = {name: credit(arrays[measure]) for name, arrays in results.items()}
    if not only_order:
        return credits
    credits = {name: values[results[name]["only_order"]] for name, values in credits.items()}
    return {name: values for name, values in credits.items() if len(values) >= MINIMUM}


def macro_average(credits: dict[str, np.ndarray]) -> tuple[float, float, float | None]:
    """(mean over paradigms, its standard error over pairs within paradigms, its standard error over paradigms). One
    paradigm says nothing of how paradigms vary: its error over them is None."""
    count = len(credits)
    means = np.array([values.mean() for values in credits.values()])
    over_pairs = math.sqrt(sum(values.var() / len(values) for values in credits.values())) / count
    over_paradigms = float(means.std(ddof=1)) / math.sqrt(count) if count > 1 else None
    return float(means.mean()), over_pairs, over_paradigms


# ------------------------------------------------------------------------------------------------------------- tables


def summary(results: dict, paradigms: list[Paradigm]) -> dict:
    """Accuracies as plain numbers: per measure the macro average with both standard errors, on all pairs and on those
    where only order decides; per paradigm and phenomenon; numbers of pairs and ties."""
    phenomenon = {paradigm.name: paradigm.phenomenon for paradigm in paradigms}
    content = {"pairs": sum(len(paradigm.pairs) for paradigm in paradigms)}
    for key, only_order in (("all", False), ("order", True)):
        for measure in MEASURES:
            if not (credits := accuracies(results, measure, only_order)):
                continue
            mean, over_pairs, over_paradigms = macro_average(credits)
            groups = {}
            for name, values in credits.items():
                groups.setdefault(phenomenon[name], []).append(values.mean())
            content.setdefault(key, {})[measure] = {
                "accuracy": mean,
                "error_over_pairs": over_pairs,
                "error_over_paradigms": over_paradigms,
                "pairs": sum(map(len, credits.values())),
                "ties": int(sum((values == 0.5).sum() for values in credits.values())),
                "paradigms": {name: float(values.mean()) for name, values in credits.items()},
                "phenomena": {name: float(np.mean(values)) for name, values in sorted(groups.items())},
            }
    content["indistinguishable"] = int(sum(arrays["same_pieces"].sum() for arrays in results.values()))
    return content


def tables(summaries: dict[str, dict]) -> str:
    """Markdown: macro averages of every model, then its phenomena. summaries: {model: see `summary`}."""
    rows = []
    for label, content in summaries.items():
        for key, what in (("all", "all pairs"), ("order", "only order differs")):
            for measure, values in content.get(key, {}).items():
                shown = (values["accuracy"], values["error_over_pairs"], values["error_over_paradigms"])
                cells = ["" if value is None else f"{100 * value:.2f}" for value in shown]
                rows.append([label, what, measure, *cells, str(values["pairs"]), str(values["ties"])])
    header = ["model", "subset", "score", "accuracy", "s.e. over pairs", "s.e. over paradigms", "pairs", "ties"]
    of_models = [content["all"][MEASURES[0]]["phenomena"] for content in summaries.values()]
    by_phenomenon = [[name, *(f"{100 * of[name]:.1f}" for of in of_models)] for name in of_models[0]]
    averages = TextTable.plain(header, rows, align="lllrrrrr")
    return averages.markdown() + "\n" + TextTable.plain(["phenomenon", *summaries], by_phenomenon).markdown()


def of_pairs(results: dict[str, dict]) -> str:
    """CSV with a row for every pair of every model. results: {model: see `evaluate`}."""
    rows = []
    for label, of_model in results.items():
        for paradigm, arrays in of_model.items():
            columns = zip(*(arrays[name] for name in (*MEASURES, "only_order")), strict=True)
            for number, (word, single, only_order) in enumerate(columns, 1):
                rows.append([label, paradigm, str(number), f"{word:.5f}", f"{single:.5f}", str(int(only_order))])
    return TextTable.plain(["model", "paradigm", "pair", *MEASURES, "only order"], rows).csv()


@click.command(cls=QuietCommand)
@models
@click.option("--pairs", required=True, type=click.Path(exists=True), help="The pairs: a .jsonl file, or a folder.")
@output("The folder of the results: minimal_pairs.json and .md, and pairs.csv with each pair's difference of scores.")
def command(models, pairs, output):
    """Accuracy on minimal pairs: per paradigm, per phenomenon, and where only the order of the words differs."""
    paradigms = read_paradigms(pairs)
    results = {label: evaluate(model, text_encoder(text.data), paradigms) for label, model, text in models}
    summaries = {label: summary(of_model, paradigms) for label, of_model in results.items()}
    write_results(output, "minimal_pairs", summaries, tables(summaries), {"pairs.csv": of_pairs(results)})
