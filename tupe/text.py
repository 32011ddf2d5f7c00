"""Text as the ids of pre-training, and back: normalised (normaliser.py), then cut into pieces.

    encoder = TextEncoder(data_dir)                            a folder that `tupe prepare corpus` made
    encoder.pieces(text)        -> [piece, ...]                no <s>, </s>: callers add them
    encoder.encode(text)        -> [id, ...]
    encoder.decode(ids)         -> "tok tok ..."

In the paper's pipeline, a piece that starts a word starts with "\u2581"."""

import functools
import itertools
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from .normaliser import CACHE, CACHED_LENGTH, SPACE, UNK, UNSPACED, Aligned, Normaliser, Raw, Span, clean, library

MASK = "<mask>"


def load_sentencepiece(path: Path) -> Any:
    """A model of SentencePiece, which opens files itself only by names in UTF-8. Raises ValueError for another file."""
    content, sentencepiece = Path(path).read_bytes(), library("sentencepiece")
    try:
        if content:  # nothing would do as a model without pieces
            return sentencepiece.SentencePieceProcessor(model_proto=content)
    except RuntimeError:
        pass
    raise ValueError(f"{path} is not a SentencePiece model, or is cut off")


MARKS = (SPACE, "\u0120", "##")  # how a dictionary's symbols begin where a word begins, or, with ##, goes on


def word_marks(symbols: list[str]) -> list[bool]:
    """Whether a word begins with a symbol, by the mark that most symbols have. If none has one, every symbol is a
    word."""
    counts = {mark: sum(symbol.startswith(mark) for symbol in symbols) for mark in MARKS}
    mark = max(counts, key=counts.__getitem__)
    return [not counts[mark] or symbol.startswith(mark) == (mark != "##") for symbol in symbols]


def read_dictionary(path: Path) -> list[str]:
    """The types of a dict.txt with the special ones, in the order of their ids. Raises ValueError for another kind of
    file, and for a file that is not as long as the manifest.json beside it says."""
    try:
        lines = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a dictionary: byte {error.start} is not UTF-8 ({error.reason})") from None
    if wrong := [line for line in lines if not line.rpartition(" ")[2].isdecimal()]:
        raise ValueError(f"{path} is not a dictionary: {wrong[0][:60]!r} is not a symbol and its count")
    symbols = [*TextEncoder.SPECIALS, *(line.rsplit(" ", 1)[0] for line in lines)]
    symbols = symbols if MASK in symbols else [*symbols, MASK]  # as fairseq's task adds it
    if len(set(symbols)) < len(symbols):
        twice = next(symbol for symbol, count in Counter(symbols).items() if count > 1)
        raise ValueError(f"{path} is not a dictionary: it has the type {twice[:60]!r} twice")
    types = read_manifest(path.parent).get("vocab_size") if path.name == "dict.txt" else None
    if types not in (None, len(symbols)):
        raise ValueError(f"{path} makes {len(symbols)} types, not the {types} of manifest.json: cut off?")
    return symbols


class TextEncoder:
    """Raw text -> the pieces and ids of pre-training, and back, from the files that `tupe prepare corpus` wrote to
    `data_dir`. It is one of the classes below: `TokenizerText` where there is a tokenizer.json, else `PaperText`.

    normaliser: `Normaliser` or `Raw`, for text that is not encoded yet. has_words: False for a language without blanks
    between words. Raises ValueError if a file is missing.
    """

    FILES: tuple[str, ...] = ("dict.txt", "sentencepiece.bpe.model", "tokenizer.json", "manifest.json")
    SPECIALS = ("<s>", "<pad>", "</s>", UNK)  # fairseq's first four ids; <mask> comes last, after dict.txt
    SETTINGS = ("language", "cased", "sentences")  # of a manifest, what a normaliser takes
    name = ""
    normaliser_of: type[Normaliser] | type[Raw]
    normaliser: Normaliser | Raw

    def __new__(cls, data_dir: str | Path) -> "TextEncoder":
        if cls is TextEncoder:
            cls = TokenizerText if Path(data_dir, "tokenizer.json").is_file() else PaperText
        return super().__new__(cls)

    def __init__(self, data_dir: str | Path):
        self.folder = Path(data_dir)
        for name in self.FILES:
            if name != "manifest.json" and not (self.folder / name).is_file():
                raise ValueError(f"{self.folder} has no {name}; `tupe prepare corpus` makes such a folder")
        self.symbols = read_dictionary(self.folder / "dict.txt")
        self.ids = {symbol: i for i, symbol in enumerate(self.symbols)}
        manifest = read_manifest(self.folder)
        self.has_words = manifest.get("language") not in UNSPACED
        settings = {name: manifest[name] for name in self.SETTINGS if name in manifest}
        self.normaliser = self.normaliser_of(**settings)

    def __reduce__(self) -> tuple[type, tuple[Path]]:
        """Pickled by its folder: caches cannot be."""
        return type(self), (self.folder,)

    def __len__(self) -> int:
        """The number of types, <s> <pad> </s> <unk> and <mask> included: the rows of the model's embedding."""
        return len(self.symbols)

    def save(self, folder: str | Path, prefix: str = "") -> list[Path]:
        """Copy the encoder's files into a folder; returns their paths there."""
        saved = []
        for file in (self.folder / name for name in self.FILES):
            if file.is_file() or file.name != "manifest.json":
                target = Path(folder) / (prefix + file.name)
                if not target.exists() or not target.samefile(file):
                    shutil.copyfile(file, target)
                saved.append(target)
        return saved

    def pieces(self, text: str) -> list[str]:
        """The pieces of raw text, without <s> and </s>."""
        raise NotImplementedError

    def encode(self, text: str) -> list[int]:
        """The ids of `pieces`."""
        unk = self.ids[UNK]
        return [self.ids.get(piece, unk) for piece in self.pieces(text)]

    def word_ids(self, text: str) -> list[list[int]]:
        """The ids of `encode`, in the words that the pipeline makes of the text, where the paper's takes a punctuation
        mark for one; piece by piece where `has_words` is False."""
        return self.group_words(self.encode(text))

    def group_words(self, ids: list[int]) -> list[list[int]]:
        """Ids of running text, grouped into words by the marks in the pieces. Where words
        have no blanks between them, a piece is a word."""
        if not self.has_words:
            return [[i] for i in ids]
        words: list[list[int]] = []
        for i in ids:
            if not words or self.word_marks[i]:
                words.append([])
            words[-1].append(i)
        return words

    @functools.cached_property
    def word_marks(self) -> list[bool]:
        return word_marks(self.symbols)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, without <s>, <pad> and </s>."""
        raise NotImplementedError


def read_manifest(folder: Path) -> dict[str, Any]:
    """What `tupe prepare corpus` says of its data; {} if the folder does not say. Raises ValueError if it is cut."""
    path = folder / "manifest.json"
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}; prepare the data again") from None


class PaperText(TextEncoder):
    """The paper's: `Normaliser`, then the SentencePiece model of sentencepiece.bpe.model."""

    FILES = ("dict.txt", "sentencepiece.bpe.model", "manifest.json")
    name = "paper"
    normaliser_of = Normaliser
    normaliser: Normaliser

    def __init__(self, data_dir: str | Path):
        super().__init__(data_dir)
        self.model = load_sentencepiece(self.folder / "sentencepiece.bpe.model")
        self._pieces = functools.lru_cache(CACHE)(self._split)

    def _split(self, token: str) -> tuple[str, ...]:
        return (UNK,) if token == UNK else tuple(self.model.encode(token, out_type=str))

    def token_pieces(self, tokens: list[str]) -> list[str]:
        """The pieces of normalised tokens. A piece that is not in dict.txt (a character too rare for the model) has the
        id of <unk>."""
        return [piece for t in tokens for piece in (self._pieces if len(t) <= CACHED_LENGTH else self._split)(t)]

    def pieces(self, text: str) -> list[str]:
        return self.token_pieces(self.normaliser.tokens(text))

    def word_spans(self, text: str, whole: Collection[str] = ()) -> list[list[Span]]:
        """The pieces of `pieces`, word by word, each with the characters text[start:end] that it was made from. whole:
        strings, such as "<mask>", that are pieces themselves; the text around one becomes what it is around a word with
        a capital letter, such as a name."""
        out, aligned = [], self.normaliser.align(text)
        back = self._hide(aligned, whole)
        hidden = re.compile(f"({'|'.join(back)})") if back else None
        for token, chars in self.normaliser.aligned(aligned):
            start = 0
            for part in filter(None, hidden.split(token) if hidden else [token]):
                covered = chars[start : start + len(part)]
                mark = back.get(part)
                out.append([Span(mark, covered[0][0], covered[-1][1])] if mark else [*self._spans(part, covered)])
                start += len(part)
        return out

    def _hide(self, aligned: Aligned, whole: Collection[str]) -> dict[str, str]:
        """Put a word that is nowhere else in place of each mark of `whole`. Returns {that word, as a token: mark}."""
        pattern = "|".join(map(re.escape, sorted(whole, key=len, reverse=True)))  # of two that fit, the longer one
        marks = dict.fromkeys(re.findall(pattern, aligned.text)) if pattern else ()
        if not marks:
            return {}
        known = re.findall("zq+", clean(aligned.text).lower())
        stem = f"Z{max(known, key=len, default='z')[1:]}q"
        words = {mark: f"{stem}{number}z" for number, mark in enumerate(marks)}
        # Between blanks, or a link would swallow it; only "'s" and the like is cut off by itself.
        aligned.sub(re.compile(f"(?:{pattern})(?=['’]\\w)"), lambda mark: f" {words[mark]}", as_one=True)
        aligned.sub(re.compile(pattern), lambda mark: f" {words[mark]} ", as_one=True)
        return {word if self.normaliser.cased else word.lower(): mark for mark, word in words.items()}

    def _spans(self, token: str, chars: list[tuple[int, int]]) -> Iterator[Span]:
        start = 0
        for piece in self.token_pieces([token]):
            length = len(token) if piece == UNK else len(piece.removeprefix(SPACE))
            covered = chars[start : start + max(length, 1)]  # a lone "\u2581" gets the next character's span
            yield Span(piece, covered[0][0], covered[-1][1])
            start += length

    def decode(self, ids: Iterable[int]) -> str:
        """The tokens, joined by blanks, without <s>, <pad> and </s>."""
        pieces = [self.symbols[int(i)] for i in ids]
        text = "".join(f" {p}" if p in (UNK, "<mask>") else p for p in pieces if p not in ("<s>", "<pad>", "</s>"))
        return " ".join(text.replace(SPACE, " ").split())


class TokenizerText(TextEncoder):
    """Any tokeniser of the library `tokenizers`, from a tokenizer.json with the ids of dict.txt: fairseq's special
    tokens, then its own tokens, whatever they are called there. Special tokens in a text are ordinary text."""

    FILES = ("dict.txt", "tokenizer.json", "manifest.json")
    name = "tokenizers"
    normaliser_of = Raw

    def __init__(self, data_dir: str | Path):
        super().__init__(data_dir)
        file = self.folder / "tokenizer.json"
        self.tokenizer = load_tokenizer(file.read_text(encoding="utf-8"), file)
        if self.tokenizer.get_vocab_size() != len(self):
            raise ValueError(f"{file} has {self.tokenizer.get_vocab_size()} tokens, dict.txt and the rest {len(self)}")
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self._encode = ordinary(self.tokenizer)

    def pieces(self, text: str) -> list[str]:
        return [self.symbols[i] for i in self._encode(text).ids]

    def word_ids(self, text: str) -> list[list[int]]:
        if not self.has_words:
            return super().word_ids(text)
        encoding = self._encode(text)
        pairs = zip(encoding.word_ids, encoding.ids, strict=True)
        return [[i for _, i in word] for _, word in itertools.groupby(pairs, key=lambda pair: pair[0])]

    def decode(self, ids: Iterable[int]) -> str:
        return self.tokenizer.decode([i for i in map(int, ids) if i > 2], skip_special_tokens=False).strip()


def ordinary(tokenizer: Any) -> Callable[[str], Any]:
    """A function from text to its encoding by a `tokenizers.Tokenizer`, in which a special token is text as any
    other."""
    last = tokenizer.get_vocab_size() - 1
    names = [tokenizer.id_to_token(i) for i in (0, 1, 2, last)]
    tokenizer.encode_special_tokens = True

    def encode(text: str) -> Any:
        encoding = tokenizer.encode(text, add_special_tokens=False)
        if any(name in text for name in names) and not {0, 1, 2, last}.isdisjoint(encoding.ids):
            for name in names:  # a unigram model has them among its pieces
                text = text.replace(name, f"\u2039{name[1:]}")
            encoding = tokenizer.encode(text, add_special_tokens=False)
        return encoding

    return encode


def load_tokenizer(content: str, name: Any) -> Any:
    """A `tokenizers.Tokenizer`. name: the file's, for the ValueError if the content is something else."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # threads and worker processes do not go together
    try:
        return library("tokenizers").Tokenizer.from_str(content)
    except ModuleNotFoundError:
        raise
    except Exception as error:  # the library raises nothing more precise
        raise ValueError(f"{name} is not a tokenizer.json: {' '.join(str(error).split())[:100]}") from None
