"""Raw text -> a fairseq data directory for masked-LM pre-training, in restartable steps over shards
(`tupe prepare corpus`).

    read      inputs           -> shards of raw documents                               (one task per group of files)
    text      a shard          -> clean paragraphs, sentences, tokens, hashes           (one task per shard)
    select    all hashes       -> which documents are copies, which are held out, which train SentencePiece
    vocabulary  the sample     -> the SentencePiece model, or another tokeniser
    encode    a shard          -> ids of its pieces                                     (one task per shard)
    merge     all shards       -> dict.txt, train and valid in mmap format; engine.py adds the report and manifest.json

A task fills a folder that gets its final name only when it is complete, so a kill at any moment loses no more than the
tasks that were running, and the same command continues. Shards and all choices depend only on the inputs and options:
the result has the same bytes whatever the number of workers, and however often it was killed. readers.py and records.py
read, tupe/normaliser.py normalises, engine.py runs the tasks. This file has the steps themselves: pure functions that
keep statistics.
"""

import functools
import gzip
import hashlib
import itertools
import json
import re
import unicodedata
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from ..data.splits import write_index
from ..normaliser import UNK, Normaliser, Raw
from ..text import load_sentencepiece, load_tokenizer, ordinary
from .readers import Document, Input, paragraphs, read
from .records import Reading
from .stats import EXAMPLE, Stats
from .vocabulary import Pieces, train_sentencepiece, write_dictionary

SHORT = {"words": 8, "characters": 16}  # a paragraph of fewer (a heading, a line of dialogue) is joined to the next one
LONG_WORD = 1000  # characters; a paragraph with a longer word is not prose
SAMPLE = 200_000_000  # characters of the text that trains the vocabulary
MIN_LETTERS = 0.6  # minimal share of letters and blanks in a paragraph's characters; tables and formulas have less

# what `select` decides about a document
COPY, TRAIN, VALID = range(3)
SPLITS = {TRAIN: "train", VALID: "valid"}
# what `text_shard` knows of a document: the hashes of `hashes_of`, how many tokens and characters it has
DOCUMENT = [("order", "V16"), ("shared", "V16"), ("tokens", np.int64), ("chars", np.int64)]


# --------------------------------------------------------------------------------------------------------------- read


def read_shards(folder: Path, inputs: list[Input], reading: Reading, shard_bytes: int) -> None:
    """Task: write the documents of `inputs` to 000000.gz, 000001.gz ... of about `shard_bytes` of text each."""
    stats, number = Stats(), itertools.count()
    documents = (document for source in inputs for document in read(source, reading, stats))
    lines = (json.dumps(document, allow_nan=False).encode() for document in documents)
    for line in lines:
        size = 0
        with gzip.open(folder / f"{next(number):06}.gz", "wb", compresslevel=1) as shard:
            while line:
                shard.write(line + b"\n")
                size += len(line)
                line = next(lines, b"") if size < shard_bytes else b""
    stats.save(folder)


# --------------------------------------------------------------------------------------------------------------- text

_LETTERS = re.compile(r"[^\W\d_]+| ")


def _no_prose(text, normaliser):
    """Why a cleaned paragraph is not prose; None if it is."""
    if normaliser.unit == "words" and len(text) > LONG_WORD and len(max(text.split(" "), key=len)) > LONG_WORD:
        return f"a word of more than {LONG_WORD} characters"
    letters = sum(map(len, _LETTERS.findall(text)))
    if letters < MIN_LETTERS * len(text) and not text.isascii():  # vowels may be marks, as in Hindi
        letters += sum(unicodedata.category(sign)[0] == "M" for sign in text)
    return "few letters" if letters < MIN_LETTERS * len(text) else None


def clean_paragraphs(texts: Iterable[str], stats: Stats, normaliser: Normaliser | Raw) -> list[str]:
    """Clean each paragraph. Where sentences are found by rules, drop junk and repetitions, and join short ones to the
    next; else a paragraph is a line of anything, and each is kept."""
    kept, seen, short, prose = [], set(), "", normaliser.mode == "rules"
    length = {"words": lambda text: text.count(" ") + 1, "characters": len}[normaliser.unit]
    least = SHORT[normaliser.unit]
    for paragraph in texts:
        text = normaliser.clean(paragraph)
        if not text:
            continue
        if prose and (why := _no_prose(text, normaliser)):
            stats.drop("paragraph", why, text)
        elif prose and text in seen:
            stats.drop("paragraph", "repeated in its document", text)
        else:
            seen.add(text)
            text = f"{short} {text}" if short else text
            short = text if prose and length(text) < least else ""
            if not short:
                kept.append(text)
    if short and kept:
        kept[-1] += " " + short
    elif short:
        stats.drop("document", f"fewer than {least} {normaliser.unit}", short)
    elif not kept:
        stats.drop("document", "no paragraph left", " ".join(texts)[:EXAMPLE].strip())
    return kept


# Numbers with the sign before each digit, words, signs.
_WORDS = re.compile(r"[-.,:/]?\d[^\W_]*|[^\W_]+|[^\w\s]")


def _says_nothing(word):
    """Whether a copy of a document may lack a word: a mark of punctuation."""
    return len(word) == 1 and unicodedata.category(word)[0] == "P" and word not in "%&#@/\\"


def document_hash(text: str) -> bytes:
    """16 bytes."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def hashes_of(texts: list[str], normaliser: Normaliser | Raw) -> tuple[bytes, bytes]:
    """(hash that orders documents, hash that copies share). Copies of prose have the same words, numbers and signs, in
    the same case where the text is cased; their white space and punctuation may differ. Copies of other text are equal.
    """
    if normaliser.mode != "rules":
        return (document_hash("\n".join(texts)),) * 2
    letters = re.sub(r"[\W_]+", "", "".join(texts).lower())
    text = " ".join(word for text in texts for word in _WORDS.findall(text) if not _says_nothing(word))
    cased = getattr(normaliser, "cased", True)
    return document_hash(letters), document_hash(text if cased else text.lower())


def normalise_document(document: Document, normaliser: Normaliser | Raw, stats: Stats) -> tuple | None:
    """(hashes, [[token, ...], ...]) of a raw document; None if cleaning leaves nothing."""
    try:
        raw = paragraphs(document)
    except ValueError as error:
        stats.drop("document", "markup that the parser gives up on", str(error))
        return None
    kept = clean_paragraphs(raw, stats, normaliser)
    if not kept:
        return None
    sentences = [sentence for paragraph in kept for sentence in normaliser.sentences(paragraph)]
    if normaliser.mode == "none" and sentences:
        sentences = [[token for sentence in sentences for token in sentence]]
    return hashes_of(kept, normaliser), sentences


@functools.cache  # one per process
def normaliser_of(kind: type, *settings: tuple) -> Normaliser | Raw:
    """A normaliser with settings, as pairs."""
    return kind(**dict(settings))


def text_shard(folder: Path, path: Path, normaliser: tuple) -> None:
    """Task: write tokens.gz (a sentence per line, an empty line after each document), docs.npz (see DOCUMENT)
    and sources.json for a shard of `read_shards`. normaliser: the arguments of `normaliser_of`."""
    normaliser, stats, docs, sources = normaliser_of(*normaliser), Stats(), [], []
    with gzip.open(path) as file, gzip.open(folder / "tokens.gz", "wb", compresslevel=1) as out:
        for line in file:
            document = Document(*json.loads(line))
            normalised = normalise_document(document, normaliser, stats)
            if normalised is None:
                continue
            hashes, sentences = normalised
            text = "".join(" ".join(sentence) + "\n" for sentence in sentences)
            out.write(text.encode() + b"\n")
            docs.append((*hashes, sum(map(len, sentences)), len(text)))
            sources.append(document.source)
    np.savez(folder / "docs.npz", docs=np.array(docs, dtype=DOCUMENT))
    (folder / "sources.json").write_text(json.dumps(sources, allow_nan=False))
    stats.save(folder)


def read_tokens(path: str | Path) -> Iterator[list[list[str]]]:
    """The documents of a tokens.gz, each a list of sentences, which are lists of tokens."""
    sentences = []
    with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
        for line in file:
            if line != "\n":
                sentences.append(line.rstrip("\n").split(" "))
            else:
                yield sentences
                sentences = []


# ------------------------------------------------------------------------------------------------------------- select


def choose_valid(digests: np.ndarray, sizes: np.ndarray, sources: np.ndarray, fraction: float) -> np.ndarray:
    """A mask of the documents to hold out: `fraction` of the tokens of each source, and at least one document. Those
    that are alone in their source count as one source together. There are two documents or more."""
    _, source, count = np.unique(sources, return_inverse=True, return_counts=True)
    source[count[source] == 1] = -1
    chosen = np.zeros(len(digests), dtype=bool)
    for one in np.unique(source):
        (members,) = np.nonzero(source == one)
        if len(members) > 1:
            chosen[members] = _choose_of_source(digests[members], sizes[members], fraction)
    return chosen


def _choose_of_source(digests, sizes, fraction):
    """In the order of their hashes, so that only their text decides, until they have `fraction` of all tokens. A single
    document with more than twice that is skipped; if all have, the smallest one is taken. One is left."""
    chosen, total, target = np.zeros(len(digests), dtype=bool), 0, fraction * sizes.sum()
    for i in np.argsort(digests, kind="stable"):
        if total >= target:
            break
        if sizes[i] <= 2 * target:
            chosen[i] = True
            total += sizes[i]
    if not chosen.any():
        chosen[np.argmin(sizes)] = True
    if chosen.all():
        chosen[np.argmax(sizes)] = False
    return chosen


def choose_sample(digests: np.ndarray, chars: np.ndarray, limit: int) -> np.ndarray:
    """A mask of the documents that train the vocabulary: in an order that depends on their text alone, and is not that
    of `choose_valid`, until they have `limit` characters."""
    salt = (1).to_bytes(8, "little")
    keys = np.array([hashlib.blake2b(bytes(d), digest_size=8, salt=salt).digest() for d in digests])
    order = np.argsort(keys, kind="stable")
    before = np.cumsum(chars[order]) - chars[order]
    chosen = np.zeros(len(digests), dtype=bool)
    chosen[order[before < limit]] = True
    return chosen


def select(folder: Path, shards: list[Path], valid_fraction: float, dropped: str) -> None:
    """Task: write to <shard>.npz what becomes of each document (`use`) and whether it trains SentencePiece (`sample`).

    Raises ValueError if fewer than two documents are left. dropped: what was dropped before, and why, for that.
    """
    tables = [np.load(shard / "docs.npz")["docs"] for shard in shards]
    docs = np.concatenate([np.zeros(0, DOCUMENT), *tables])
    order, shared = (np.array([d.tobytes() for d in docs[name]], dtype=object) for name in ("order", "shared"))
    use = np.full(len(docs), COPY, dtype=np.uint8)
    if len(docs):
        use[np.unique(shared, return_index=True)[1]] = TRAIN
    kept = np.flatnonzero(use == TRAIN)
    if len(kept) < 2:
        raise ValueError(
            f"{len(kept) or 'no'} document is left, beside {len(use) - len(kept)} copies: training and validation need "
            f"one each (a .txt file that is named itself is cut at empty lines, and in a folder each file is one); "
            f"dropped: {dropped or 'nothing'}"
        )
    number = {}  # of each source
    names = (name for shard in shards for name in json.loads((shard / "sources.json").read_text()))
    sources = np.array([number.setdefault(name, len(number)) for name in names])
    use[kept[choose_valid(order[kept], docs["tokens"][kept], sources[kept], valid_fraction)]] = VALID
    train = np.flatnonzero(use == TRAIN)
    sample = np.zeros(len(docs), dtype=bool)
    sample[train[choose_sample(order[train], docs["chars"][train], SAMPLE)]] = True
    start = 0
    for shard, table in zip(shards, tables, strict=True):
        rows = slice(start, start + len(table))
        np.savez(folder / f"{shard.name}.npz", use=use[rows], sample=sample[rows])
        start = rows.stop


# --------------------------------------------------------------------------------------------------------- vocabulary


def vocabulary(
    folder: Path, shards: list[Path], selected: Path, vocab_size: int, given: str | Pieces | None
) -> None:  # fmt: skip
    """Task: train sentencepiece.bpe.model on the sample, or write the given tokenizer.json or pieces."""
    if isinstance(given, str):
        (folder / "tokenizer.json").write_text(given, encoding="utf-8")
        return
    if given is not None:
        (folder / "sentencepiece.bpe.model").write_bytes(given.model)
        (folder / "dict.txt").write_text(given.dictionary, encoding="utf-8")
        return

    def sample():
        for shard in shards:
            chosen = np.load(selected / f"{shard.name}.npz")["sample"]
            if chosen.any():
                for is_chosen, document in zip(chosen, read_tokens(shard / "tokens.gz"), strict=True):
                    for sentence in document if is_chosen else ():
                        if kept := [token for token in sentence if token != UNK]:
                            yield " ".join(kept)

    (folder / "sentencepiece.bpe.model").write_bytes(train_sentencepiece(sample(), vocab_size))


# ------------------------------------------------------------------------------------------------------------- encode


@functools.lru_cache(1)
def _encoder(model_path):
    """(sentence, as tokens -> ids of the SentencePiece model or tokenizer.json, number of ids, id of <unk>). One per
    process."""
    if model_path.suffix == ".json":
        tokenizer = load_tokenizer(model_path.read_text(encoding="utf-8"), model_path)
        text = ordinary(tokenizer)
        return lambda tokens: text(" ".join(tokens)).ids, tokenizer.get_vocab_size(), 3
    model = load_sentencepiece(model_path)

    @functools.lru_cache(2**17)
    def encode(token):
        return (model.unk_id(),) if token == UNK else tuple(model.encode(token))

    return lambda tokens: [i for token in tokens for i in encode(token)], len(model), model.unk_id()


def encode_shard(folder: Path, shard: Path, selected: Path, model_path: Path) -> None:
    """Task: write ids.npz: the ids of train and valid (</s> is one more id), the length of each line, and the counts of
    the training ids."""
    encode, eos, unk = _encoder(model_path)
    stats = Stats()
    ids, sizes = ({kind: array("i") for kind in SPLITS} for _ in range(2))
    use = np.load(selected / f"{shard.name}.npz")["use"].tolist()
    sources = json.loads((shard / "sources.json").read_text())
    for kind, source, document in zip(use, sources, read_tokens(shard / "tokens.gz"), strict=True):
        lines = [] if kind == COPY else [line for sentence in document if (line := encode(sentence))]
        if not lines:  # it would be an empty line, which ends a document
            why = "a copy of an earlier document" if kind == COPY else "the tokeniser leaves nothing of it"
            stats.drop("document", why, " ".join(document[0]))
            continue
        for line in [*lines, []]:
            ids[kind].extend([*line, eos])
            sizes[kind].append(len(line) + 1)
        stats.count("documents kept")
        stats.count("sentences", len(lines))
        stats.count("tokens", sum(map(len, document)))
        stats.keep(source, SPLITS[kind], sum(map(len, lines)) + len(lines) + 1)
    arrays = {"counts": np.bincount(np.array(ids[TRAIN], dtype=np.int32), minlength=eos + 1)}
    for kind, name in SPLITS.items():
        arrays[name] = np.array(ids[kind], dtype=np.int32)
        arrays[f"{name} sizes"] = np.array(sizes[kind], dtype=np.int32)
        stats.count("pieces", len(ids[kind]) - len(sizes[kind]))
        stats.count("pieces that are `<unk>`", int((arrays[name] == unk).sum()))
    np.savez(folder / "ids.npz", **arrays)
    stats.save(folder)


# -------------------------------------------------------------------------------------------------------------- merge


def merge(folder: Path, shards: list[Path], model_path: Path) -> None:
    """Task: write the files of the data directory, except the report and the manifest: ids in fairseq's mmap format, as
    fairseq-preprocess does. Each sentence ends with </s>, and an empty line (only </s>) ends a document. All ids are
    never in memory together."""
    counts = sum(np.load(shard / "ids.npz")["counts"] for shard in shards)
    table = write_dictionary(model_path, counts, folder / "dict.txt")  # id of a shard -> id of the dictionary
    for split in SPLITS.values():
        with open(folder / f"{split}.bin", "wb") as file:
            for shard in shards:
                file.write(table[np.load(shard / "ids.npz")[split]])
        sizes = [np.load(shard / "ids.npz")[f"{split} sizes"] for shard in shards]
        write_index(folder / split, sizes, table.dtype.type)
    (folder / model_path.name).write_bytes(model_path.read_bytes())
