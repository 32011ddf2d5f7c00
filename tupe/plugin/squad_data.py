"""Reads and prepares SQuAD's official files (encoding paragraphs and questions once), and makes windows over
paragraphs.

B batch, L length of `<s> question </s> </s> window </s>`.
"""

import io
import json
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import numpy as np
import torch
from fairseq.data import Dictionary, FairseqDataset, data_utils
from torch import nn

from ..common import options
from ..common.options import shorten
from ..common.prepared import check_name, encoding, worker
from ..common.record import write_atomically
from ..normaliser import is_blank

VERSIONS = ("1.1", "2.0")
FILES = {"train": "train", "valid": "dev"}  # split -> official file


# ---------------------------------------------------------------------------------------------------------- the files


@dataclass
class Question:
    id: str
    text: str
    context: int  # number of the paragraph
    answers: list  # [(text, first character)]; empty if there is none


def read_squad(path: str | Path) -> tuple[list[str], list[Question]]:
    """(paragraphs, questions) of an official file. Raises ValueError with the place in the file, or the question's id,
    for anything unexpected."""
    if not Path(path).is_file():
        raise ValueError(f"not found: {path}" if not Path(path).exists() else f"{path} is not a file")
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8-sig"))  # with a byte-order mark, or without
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a SQuAD file: byte {error.start} is not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a SQuAD file: {error}") from None
    contexts, questions, ids = [], [], set()
    for n, article in enumerate(_get(content, "data", list, str(path))):
        for m, paragraph in enumerate(_get(article, "paragraphs", list, f"{path}, article {n}")):
            place = f"{path}, article {n}, paragraph {m}"
            context = _text(paragraph, "context", place)
            for i, entry in enumerate(_get(paragraph, "qas", list, place)):
                identity = _text(entry, "id", f"{place}, question {i}")
                where = f"{path}, question {shorten(identity)}"
                if identity in ids:
                    raise ValueError(f"{where} is there twice")
                ids.add(identity)
                text, impossible = _text(entry, "question", where), entry.get("is_impossible", False)
                if not isinstance(impossible, bool):
                    raise ValueError(f"{where}: 'is_impossible' must be true or false, not {shorten(impossible)}")
                answers = _get(entry, "answers", list, where) if "answers" in entry or not impossible else []
                answers = [_answer(answer, context, where) for answer in answers]
                if bool(answers) == impossible:
                    what = "answers, but" if answers else "no answer, and not"
                    raise ValueError(f"{where}: {what} marked as impossible")
                questions.append(Question(identity, text, len(contexts), answers))
            contexts.append(context)
    if not questions:
        raise ValueError(f"{path} has no question")
    return contexts, questions


def _get(entry, key, kind, place):
    """entry[key] of a kind. Raises ValueError, naming the place, if it is not there or of another kind."""
    value = entry.get(key) if isinstance(entry, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        names = {list: "list", str: "text", int: "whole number"}
        shown = "missing" if value is None else shorten(value)
        raise ValueError(f"{place}: {key!r} must be a {names[kind]}, not {shown}")
    return value


def _text(entry, key, place):
    text = _get(entry, key, str, place)
    if "\0" in text:
        raise ValueError(f"{place}: {key!r} has a NUL character")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"{place}: {key!r} has half of a surrogate pair") from None
    return text


def _answer(answer, context, where):
    """(text, first character) of an answer that is in its paragraph."""
    text, start = _text(answer, "text", where), _get(answer, "answer_start", int, where)
    if is_blank(text):
        raise ValueError(f"{where}: an empty answer")
    if start < 0 or context[start : start + len(text)] != text:
        actual = context[max(start, 0) : max(start, 0) + len(text)]
        raise ValueError(f"{where}: {shorten(text)} is not at {start}, but {shorten(actual)}")
    return text, start


@dataclass
class Encoded:
    """The paragraphs and questions of one file as pieces. In a folder: NAME.json (text) and NAME.npz (pieces)."""

    contexts: list  # text of each paragraph
    questions: list  # of Question
    ids: list  # of each paragraph: the ids of its pieces
    begins: list  # of each paragraph: first character of each piece, int32
    ends: list  # of each paragraph: one past the last character of each piece, int32
    queries: list  # of each question: the ids of its pieces

    def save(self, folder: Path, name: str) -> None:
        arrays = {key: np.concatenate([np.array(part, dtype=np.int32) for part in getattr(self, key)]) for key in PARTS}
        arrays["pieces"] = np.array([len(part) for part in self.ids])  # of each paragraph
        arrays["query_pieces"] = np.array([len(part) for part in self.queries])
        (folder / f"{name}.json").unlink(missing_ok=True)  # what has no text is not there, see `load`
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)
        write_atomically(folder / f"{name}.npz", buffer.getvalue())
        content = {"contexts": self.contexts, "questions": [asdict(question) for question in self.questions]}
        write_atomically(folder / f"{name}.json", json.dumps(content, ensure_ascii=False, allow_nan=False) + "\n")

    @staticmethod
    def check(folder: Path, file: str, version: str) -> None:
        """Raise ValueError, naming the file, unless both of its files are there, to their ends."""
        text, pieces = (folder / f"{file}-v{version}.{suffix}" for suffix in ("json", "npz"))
        for path in (text, pieces):
            if not path.is_file():
                raise ValueError(f"{path} not found; `tupe prepare squad` writes it")
        for path, whole in ((text, text.read_bytes().endswith(b"}\n")), (pieces, zipfile.is_zipfile(pieces))):
            if not whole:
                raise ValueError(f"{path} is cut off; prepare the data again")

    @classmethod
    def load(cls, folder: Path, file: str, version: str) -> "Encoded":
        """What `prepare` wrote. file: "train" or "dev"."""
        cls.check(folder, file, version)
        name = f"{file}-v{version}"
        content = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        with np.load(folder / f"{name}.npz", allow_pickle=False) as arrays:
            borders = {key: np.cumsum(arrays["query_pieces" if key == "queries" else "pieces"])[:-1] for key in PARTS}
            parts = {key: np.split(arrays[key], borders[key]) for key in PARTS}
        for key in ("ids", "queries"):
            parts[key] = [part.tolist() for part in parts[key]]
        questions = [Question(**entry) for entry in content["questions"]]
        return cls(content["contexts"], questions, **parts)


PARTS = ("ids", "begins", "ends", "queries")


# ---------------------------------------------------------------------------------------------------------- preparing


def _encode_paragraph(text):
    """(ids, first characters, ends) of the pieces of a paragraph."""
    encoder = worker.encoder
    spans = encoder.spans(text)
    ids = [encoder.ids.get(span.text, encoder.ids["<unk>"]) for span in spans]
    return ids, [span.start for span in spans], [span.end for span in spans]


def _encode_question(question):
    return worker.encoder.encode(question.text)


def prepare(
    source: str | Path, vocabulary: str | Path, output: str | Path, workers: int | None = 1, overwrite: bool = False
) -> Iterator[tuple[str, Encoded]]:
    """Encode the official files of a folder, of every version that it has.

    vocabulary: folder of the pre-training data, for its encoder. output: gets the encoded files and the encoder's.
    workers: see `prepared.encoding`. Yields (name of a file, its contents). Raises ValueError for bad input, and if an
    encoded file exists already; further as `prepared.encoding`.
    """
    check_name(output)
    source, vocabulary, output = Path(source), Path(vocabulary), Path(output)
    names = {version: [f"{file}-v{version}" for file in FILES.values()] for version in VERSIONS}
    versions = [version for version in VERSIONS if (source / f"{names[version][0]}.json").exists()]
    given = [name for version in versions for name in names[version]]
    if not given:
        raise ValueError(f"{source} has none of the files {', '.join(f'{files[0]}.json' for files in names.values())}")
    older = [name for name in given if (output / f"{name}.json").exists()]
    if official := [name for name in older if not (output / f"{name}.npz").exists()]:
        raise ValueError(f"{output / official[0]}.json is no prepared file: choose another output folder")
    if older and not overwrite:
        raise ValueError(f"{output} has {', '.join(older)} already; pass --overwrite to replace it")
    files = {name: read_squad(source / f"{name}.json") for name in given}
    with encoding(vocabulary, output, [f"SQuAD-{version}" for version in versions], workers) as map_texts:
        for name, (contexts, questions) in files.items():
            ids, begins, ends = zip(*map_texts(_encode_paragraph, contexts), strict=True)
            encoded = Encoded(contexts, questions, ids, begins, ends, list(map_texts(_encode_question, questions)))
            encoded.save(output, name)
            yield name, encoded


@click.command(cls=options.Command)
@click.option("--squad", required=True, type=options.FOLDER,
              help="The folder of train-v1.1.json and dev-v1.1.json, of those of v2.0, or of both.")  # fmt: skip
@options.data("The pre-training data, whose dictionary and pieces are used.")
@options.output("The folder to write.")
@options.jobs("The number of processes that encode text (default: one per core).")
@click.option("--overwrite", is_flag=True, help="Replace what was prepared before.")
def command(squad, data, output, jobs, overwrite):
    """Turn the official SQuAD files into data for fine-tuning, with the vocabulary of the pre-training data."""
    for name, encoded in prepare(squad, data, output, jobs, overwrite):
        pieces = sum(map(len, encoded.ids))
        blank = sum(is_blank(question.text) for question in encoded.questions)
        click.echo(
            f"{name}: {len(encoded.questions)} questions, {len(encoded.contexts)} paragraphs, {pieces} pieces"
            + f"; {blank} blank questions" * bool(blank)
        )


# ------------------------------------------------------------------------------------------------------------ windows


class Windows(FairseqDataset):
    """Every question with every window over its paragraph.

    A paragraph that does not fit is cut into overlapping windows: each starts `stride` pieces after the previous one. A
    piece may start an answer only in the window in which it has the most context (on the side with less of it). In
    training, the answer of a window without the whole answer is [CLS].
    """

    def __init__(self, encoded: "Encoded", dictionary: Dictionary, max_positions: int, stride: int, max_query: int):
        self.contexts, self.questions = encoded.contexts, encoded.questions
        self.ids, self.begins, self.ends = encoded.ids, encoded.begins, encoded.ends
        self.queries = [query[:max_query] for query in encoded.queries]
        self.shortened = sum(len(query) > max_query for query in encoded.queries)
        self.bos, self.pad, self.eos = dictionary.bos(), dictionary.pad(), dictionary.eos()
        self.windows = []  # (question, first piece, one past the last piece)
        for q, question in enumerate(self.questions):
            room = max_positions - len(self.queries[q]) - 4
            if room < 2:
                raise ValueError(f"max_query {max_query} leaves no room for a paragraph in {max_positions} positions")
            total = len(self.ids[question.context])
            step = min(stride, max(room // 2, 1))  # windows overlap even if the model is short
            starts = range(0, max(total - room, 0) + step, step) if total > room else [0]
            for start in starts:
                if start == 0 or start - step + room < total:
                    self.windows.append((q, start, min(start + room, total)))
        self.spans = [self._span(question) for question in self.questions]
        fitting = {q for q, start, end in self.windows if (s := self.spans[q]) and start <= s[0] and s[1] < end}
        self.answered = sum(bool(question.answers) for question in self.questions)
        self.left_out = self.answered - len(fitting)  # answers that training never sees
        self.sizes = np.array([len(self.queries[q]) + 4 + end - start for q, start, end in self.windows])
        self.best_window = self._best_windows()

    def _best_windows(self):
        """{question: for each piece of its paragraph, the window in which it has the most context}"""
        best = {}
        for w, (q, start, end) in enumerate(self.windows):
            total = len(self.ids[self.questions[q].context])
            positions = np.arange(start, end)
            context = np.minimum(positions - start, end - 1 - positions) + 0.01 * (end - start)
            scores, owners = best.setdefault(q, (np.full(total, -1.0), np.zeros(total, dtype=int)))
            better = context > scores[start:end]
            scores[start:end][better] = context[better]
            owners[start:end][better] = w
        return {q: owners for q, (_, owners) in best.items()}

    def target(self, w: int) -> tuple[int, int]:
        """(start, end) of the first gold answer as positions of the sequence, or (0, 0) if it is not in this window."""
        q, start, end = self.windows[w]
        span, offset = self.spans[q], self.offset(w) - start
        if span is None or span[0] < start or span[1] >= end:
            return 0, 0
        return span[0] + offset, span[1] + offset

    def _span(self, question):
        """(first, last) piece of the first gold answer in its paragraph, None if there is none."""
        if not question.answers:
            return None
        text, first = question.answers[0]
        begins, ends = self.begins[question.context], self.ends[question.context]
        (inside,) = np.nonzero((begins < first + len(text)) & (ends > first))
        return (int(inside[0]), int(inside[-1])) if len(inside) else None

    def offset(self, w: int) -> int:
        """Position of the window's first piece in the sequence."""
        return len(self.queries[self.windows[w][0]]) + 3

    def answer(self, w: int, start: int, end: int) -> str:
        """The characters of the paragraph from which the pieces at two positions of the sequence were made."""
        q, first, _ = self.windows[w]
        context = self.questions[q].context
        shift = first - self.offset(w)
        return self.contexts[context][self.begins[context][start + shift] : self.ends[context][end + shift]]

    def __len__(self):
        return len(self.windows)

    def __getitem__(self, w):
        q, start, end = self.windows[w]
        context = self.questions[q].context
        middle = [self.eos, self.eos]
        tokens = [self.bos, *self.queries[q], *middle, *self.ids[context][start:end], self.eos]
        owner = np.zeros(len(tokens), dtype=bool)
        owner[self.offset(w) : -1] = self.best_window[q][start:end] == w
        inside = np.zeros(len(tokens), dtype=bool)
        inside[self.offset(w) : -1] = True
        return {"id": w, "tokens": torch.tensor(tokens), "starts": owner, "inside": inside, "target": self.target(w)}

    def collater(self, samples: list) -> dict:
        if not samples:
            return {}
        tokens = data_utils.collate_tokens([sample["tokens"] for sample in samples], self.pad)

        def masks(key):
            parts = [torch.from_numpy(sample[key]) for sample in samples]
            return nn.utils.rnn.pad_sequence(parts, batch_first=True)

        lengths = torch.tensor([len(sample["tokens"]) for sample in samples])
        return {
            "id": torch.tensor([sample["id"] for sample in samples]),
            "net_input": {"src_tokens": tokens, "src_lengths": lengths},
            "starts": masks("starts"),  # [B, L] may be the start of an answer
            "inside": masks("inside"),  # [B, L] is a piece of the paragraph
            "target": torch.tensor([sample["target"] for sample in samples]),  # [B, 2]
            "nsentences": len(samples),
            "ntokens": int(lengths.sum()),
        }

    def num_tokens(self, w: int) -> int:
        return int(self.sizes[w])

    size = num_tokens
