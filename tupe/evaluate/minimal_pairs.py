"""Minimal pairs: how often a model finds the grammatical sentence of two more likely than the other (BLiMP: Warstadt et
al., 2020).

`tupe minimal-pairs` reads BLiMP's and BabyLM's JSON lines (folder, files or zip archive) and plain text with two lines
per pair, the bad one first. The score of a sentence is its pseudo-log-likelihood (`tupe.evaluate.likelihood`); the
sum with the later pieces of a word masked is the primary one. A difference of at most 1e-4 nats is a tie and counts one
half, so that a model without positions is exactly at one half on pairs that differ only in the order of their words.
"""

import hashlib
import io
import json
import math
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
import torch
from tqdm import tqdm

from ..common import record
from ..common.options import FOLDER, QuietCommand, output, seed, shorten, shorten_list
from ..common.tables import TextTable
from ..normaliser import is_blank
from ..positions import files_behind
from ..text import TextEncoder
from .likelihood import Sentence, pseudo_log_likelihoods
from .loading import file_names, labelled, load_model

if TYPE_CHECKING:  # transformers takes as long to import as torch
    from ..modeling_tupe import TupeForMaskedLM

TIE = 1e-4  # nats: below it, a difference is rounding
MINIMUM = 10  # pairs of a paradigm in which only order differs: fewer (how many is chance) count as none in the average
LARGEST = 2**28  # bytes of a file in an archive, which may unpack to anything
MEASURES = ("word", "mean", "single")  # the first is the primary one
ORIGIN = "origin"  # beside the arrays in a file: a hash of what they depend on
PHENOMENA = {"s-selection": "argument_structure"}  # the paper's twelve phenomena count one paradigm of BLiMP's 67 there


@dataclass(frozen=True)
class Pair:
    good: str
    bad: str


@dataclass(frozen=True)
class Paradigm:
    """One kind of pairs: "adjunct_island" of the phenomenon "island_effects"."""

    name: str
    phenomenon: str
    pairs: list


# ------------------------------------------------------------------------------------------------------------ reading


def read_paradigms(source: str | Path, limit: int | None = None) -> list[Paradigm]:
    """The paradigms of a .jsonl or .txt file, a folder of them, or a .zip archive, sorted by name. limit: pairs of
    each, the first ones (default: all).

    Raises ValueError, with file and line, for what is not a pair.
    """
    source = Path(source)
    if not source.exists():
        raise ValueError(f"not found: {source}; give a .jsonl, .txt or .zip file, or a folder of them")
    paradigms = [_paradigm(name, text) for name, text in _files(source)]
    if not paradigms:
        raise ValueError(f"{source} holds no .jsonl and no .txt file")
    twice = [name for name, count in Counter(paradigm.name for paradigm in paradigms).items() if count > 1]
    if twice:
        raise ValueError(f"{source} has the paradigm {twice[0]} twice")
    paradigms = [replace(paradigm, pairs=paradigm.pairs[:limit]) for paradigm in paradigms]
    return sorted(paradigms, key=lambda paradigm: paradigm.name)


def _files(source: Path) -> Iterator[tuple[str, str]]:
    """(name, text) of each file of pairs."""
    if source.suffix == ".zip":
        try:
            with zipfile.ZipFile(source) as archive:
                files = {}
                for part in archive.infolist():
                    if _is_pairs(Path(part.filename)):
                        if part.file_size > LARGEST:
                            raise ValueError(f"{shorten(part.filename)} has {part.file_size:,} bytes")
                        files[f"{source}/{part.filename}"] = archive.read(part)
        except Exception as error:  # a damaged archive fails in many ways
            raise ValueError(f"{source} cannot be read: {shorten(str(error))}") from None
        for name, content in files.items():
            yield name, _decode(content, name)
        return
    for path in record.files_below(source) if source.is_dir() else [source]:
        if _is_pairs(path.relative_to(source if source.is_dir() else source.parent)):
            yield str(path), _decode(path.read_bytes(), str(path))


def _is_pairs(path: Path) -> bool:
    hidden = any(part.startswith((".", "__MACOSX")) for part in path.parts)
    return path.suffix in (".jsonl", ".txt") and not hidden


def _decode(content: bytes, name: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: byte {error.start} is not UTF-8") from None


def _paradigm(name: str, text: str) -> Paradigm:
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if not is_blank(line)]
    stem = Path(name).stem
    if name.endswith(".txt"):
        if len(lines) % 2:
            raise ValueError(f"{name}: {len(lines)} lines; a pair is two lines, the bad sentence first")
        pairs = [Pair(good.strip(), bad.strip()) for (_, bad), (_, good) in zip(lines[::2], lines[1::2], strict=True)]
        if not pairs:
            raise ValueError(f"{name} holds no pair")
        return Paradigm(stem, stem, pairs)
    pairs, phenomena, names = [], set(), set()
    for number, line in lines:
        try:
            row = json.loads(line)
            pair = Pair(row["sentence_good"], row["sentence_bad"])
            if not all(isinstance(sentence, str) and not is_blank(sentence) for sentence in (pair.good, pair.bad)):
                raise TypeError
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ValueError(f'{name}, line {number}: no object with "sentence_good" and "sentence_bad"') from None
        for key in ("sentence_good", "sentence_bad", "linguistics_term", "UID"):
            if re.search("[\0\ud800-\udfff]", str(row.get(key))):  # no name of a file, and no text
                shown = shorten(row[key])
                raise ValueError(f"{name}, line {number}: {key} {shown} has a NUL or half of a surrogate pair")
        pairs.append(pair)
        phenomena.add(str(row.get("linguistics_term", stem)))
        names.add(str(row.get("UID", stem)))
    if not pairs:
        raise ValueError(f"{name} holds no pair")
    phenomenon = phenomena.pop() if len(phenomena) == 1 else stem
    own = names.pop() if len(names) == 1 else stem  # of the file that keeps its scores, too
    return Paradigm(own if Path(own).name == own else stem, PHENOMENA.get(phenomenon, phenomenon), pairs)


# ------------------------------------------------------------------------------------------------------------ scoring


def differences(model: "TupeForMaskedLM", words: list[list[Sentence]]) -> dict[str, np.ndarray]:
    """{measure: good minus bad in nats [pairs], "same_words": [pairs], "same_pieces": [pairs]}.

    words: the good and the bad sentence of each pair. same_words: both have the same words, each in the same pieces, so
    that only their order tells them apart. same_pieces: they are one and the same for the model (words that differ in
    case, or are unknown).
    """
    flat = [sentence for pair in words for sentence in pair]
    scores = list(pseudo_log_likelihoods(model, flat))
    good, bad = scores[::2], scores[1::2]
    return {
        "word": np.array([g.word - b.word for g, b in zip(good, bad, strict=True)]),
        "mean": np.array([g.word / g.pieces - b.word / b.pieces for g, b in zip(good, bad, strict=True)]),
        "single": np.array([g.single - b.single for g, b in zip(good, bad, strict=True)]),
        "same_words": np.array([Counter(map(tuple, g)) == Counter(map(tuple, b)) for g, b in words]),
        "same_pieces": np.array([g == b for g, b in words]),
    }


def credit(difference: np.ndarray) -> np.ndarray:
    """1 where the good sentence is more likely, 0 where the bad one is, one half for a tie."""
    return np.where(np.abs(difference) <= TIE, 0.5, (difference > 0).astype(float))


def accuracies(results: dict, measure: str = MEASURES[0], only_order: bool = False) -> dict[str, np.ndarray]:
    """{paradigm: credit of its pairs}; only_order: of the pairs with the same words, if it has `MINIMUM` of them."""
    credits = {name: credit(arrays[measure]) for name, arrays in results.items()}
    if not only_order:
        return credits
    credits = {name: values[_only_order(results[name])] for name, values in credits.items()}
    return {name: values for name, values in credits.items() if len(values) >= MINIMUM}


def _only_order(arrays):
    return arrays["same_words"] & ~arrays["same_pieces"]


def macro_average(credits: dict[str, np.ndarray], resamples: int = 1000, seed: int = 1) -> tuple[float, float, float]:
    """(mean over paradigms, its standard error over pairs, its standard error over paradigms and pairs).

    By the bootstrap: for the first one pairs are drawn anew within each paradigm, for the second one paradigms, whose
    accuracies vary by their pairs, too. One paradigm says nothing of how paradigms vary: its error over them is NaN.
    """
    rng = np.random.default_rng(seed)
    means = np.array([values.mean() for values in credits.values()])
    drawn = np.stack(  # [paradigms, resamples]
        [values[rng.integers(len(values), size=(resamples, len(values)))].mean(axis=1) for values in credits.values()]
    )
    over_pairs = drawn.mean(axis=0)
    over_paradigms = means[rng.integers(len(means), size=(len(means), resamples))].mean(axis=0)
    spread = float(over_paradigms.std(ddof=1)) if len(means) > 1 else math.nan
    return float(means.mean()), float(over_pairs.std(ddof=1)), spread


def fingerprint(model: "TupeForMaskedLM") -> str:
    """A hash of a model's settings and weights, and of a user's own encoding."""
    config = model.tupe.encoder.config
    digest = hashlib.sha256(repr(config).encode())
    if files := files_behind(config.position):
        digest.update(record.fingerprint(files).encode())
    for name, value in model.state_dict().items():
        digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        digest.update(value.cpu().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def evaluate(
    model: "TupeForMaskedLM",
    encoder: TextEncoder,
    paradigms: list[Paradigm],
    folder: Path,
    say: Callable[[str], Any] = print,
) -> dict[str, dict]:
    """{paradigm: arrays of `differences`}, rounded to 1e-5 nats. They are kept in `folder`; what is there of the same
    model, tokeniser and pairs is read, the rest computed. say: gets one line if something there is not known to be."""
    folder.mkdir(parents=True, exist_ok=True)
    results, of_model, told = {}, fingerprint(model), False
    for paradigm in tqdm(paradigms, unit="paradigm", disable=None):
        words = [[encoder.word_ids(text) for text in (pair.good, pair.bad)] for pair in paradigm.pairs]
        # Ids, not texts: they are what scores depend on, of the pairs and the tokeniser.
        origin = hashlib.sha256(f"{of_model} {json.dumps(words, allow_nan=False)}".encode()).hexdigest()
        path = folder / f"{paradigm.name}.npz"
        if path.exists():
            arrays = _read(path)
            if str(arrays.pop(ORIGIN, "")) == origin:
                results[paradigm.name] = arrays
                continue
            if not told:
                say(f"{folder} has scores that may be of another model, tokeniser or pairs: recomputing")
                told = True
        try:
            arrays = differences(model, words)
        except ValueError as error:
            raise ValueError(f"{paradigm.name}: {error} (two sentences are a pair)") from None
        rounded = {name: np.round(v, 5).astype("f4") if v.dtype == float else v for name, v in arrays.items()}
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **rounded, **{ORIGIN: origin})
        record.write_atomically(path, buffer.getvalue())
        results[paradigm.name] = rounded
    return results


def _read(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file, none of a damaged one."""
    try:
        with np.load(path) as file:
            return dict(file)
    except (EOFError, OSError, ValueError, zipfile.BadZipFile):
        return {}


# ------------------------------------------------------------------------------------------------------------- tables


def summary(results: dict, paradigms: list[Paradigm], seed: int = 1) -> dict:
    """Accuracies as plain numbers: per measure the macro average with both standard errors, on all pairs and on those
    where only order decides; per paradigm and phenomenon; numbers of pairs and ties. too_few: {paradigm: number of the
    latter, which is less than `MINIMUM`, so that they do not count}. An error that is NaN is None: JSON has no NaN."""
    phenomenon = {paradigm.name: paradigm.phenomenon for paradigm in paradigms}
    content = {"pairs": int(sum(len(arrays["word"]) for arrays in results.values()))}
    for key, only_order in (("all", False), ("order", True)):
        for measure in MEASURES:
            credits = accuracies(results, measure, only_order)
            if not credits:
                continue
            mean, over_pairs, over_paradigms = macro_average(credits, seed=seed)
            groups = {}
            for name, values in credits.items():
                groups.setdefault(phenomenon[name], []).append(values.mean())
            content.setdefault(key, {})[measure] = {
                "accuracy": mean,
                "error_over_pairs": over_pairs,
                "error_over_paradigms": None if math.isnan(over_paradigms) else over_paradigms,
                "pairs": int(sum(map(len, credits.values()))),
                "ties": int(sum((values == 0.5).sum() for values in credits.values())),
                "paradigms": {name: float(values.mean()) for name, values in credits.items()},
                "phenomena": {name: float(np.mean(values)) for name, values in sorted(groups.items())},
            }
    few = {name: int(_only_order(arrays).sum()) for name, arrays in results.items()}
    content["too_few"] = {name: count for name, count in few.items() if 0 < count < MINIMUM}
    content["indistinguishable"] = int(sum(arrays["same_pieces"].sum() for arrays in results.values()))
    return content


def tables(summaries: dict[str, dict]) -> list[TextTable]:
    """Macro averages of every model, then its phenomena. summaries: {model: see `summary`}."""
    rows = []
    for label, content in summaries.items():
        for key, what in (("all", "all pairs"), ("order", "only order differs")):
            for measure, values in content.get(key, {}).items():
                shown = ("accuracy", "error_over_pairs", "error_over_paradigms")
                cells = ["" if values[name] is None else f"{100 * values[name]:.2f}" for name in shown]
                rows.append([label, what, measure, *cells, str(values["pairs"]), str(values["ties"])])
    header = ["model", "subset", "score", "accuracy", "s.e. over pairs", "s.e. over paradigms", "pairs", "ties"]
    names = sorted({name for content in summaries.values() for name in content["all"][MEASURES[0]]["phenomena"]})
    by_phenomenon = [
        [name, *(f"{100 * c['all'][MEASURES[0]]['phenomena'].get(name, np.nan):.1f}" for c in summaries.values())]
        for name in names
    ]
    return [
        TextTable.plain(header, rows, align="lllrrrrr"),
        TextTable.plain(["phenomenon", *summaries], by_phenomenon),
    ]


@click.command(cls=QuietCommand)
@click.argument("checkpoints", nargs=-1, required=True, metavar="[LABEL=]CHECKPOINT...")
@click.option(
    "--pairs", required=True, type=click.Path(path_type=Path), help="The pairs: a zip archive, a folder or a file."
)
@click.option("--data", type=FOLDER, help="The folder of dict.txt and the pieces (default: that of the training).")
@click.option("--limit", type=click.IntRange(1), help="Score only the first pairs of each paradigm (default: all).")
@output("The folder of the results. What it holds of the same models and pairs is kept.")
@seed(help="The seed of the bootstrap.")
def command(checkpoints, pairs, data, limit, output, seed):
    """Accuracy on minimal pairs: per paradigm, per phenomenon, and where only the order of the words differs."""
    paths = labelled(checkpoints)
    names = file_names(paths)
    paradigms = read_paradigms(pairs, limit)
    summaries = {}
    for label, path in paths.items():
        model, text = load_model(path, data)
        folder = output / names[label]
        results = evaluate(model, TextEncoder(text.data), paradigms, folder, say=click.echo)
        summaries[label] = summary(results, paradigms, seed)
        record.write_atomically(folder / "summary.json", json.dumps(summaries[label], indent=1, allow_nan=False) + "\n")
    for table in tables(summaries):
        click.echo(table.markdown())
    if few := {name for content in summaries.values() for name in content["too_few"]}:
        names = shorten_list(sorted(few))
        click.echo(f"only order differs: without {names}, which have fewer than {MINIMUM} such pairs")
