"""Raw text -> a fairseq data directory for masked-LM pre-training: the steps of scripts/prepare_corpus.py.

A document is (source, [paragraph, ...]). Each step is a function from one document to another that counts, in `stats`,
what it kept and what it dropped and why. Normalisation, sentences and tokens are those of tupe.text."""

import bz2
import collections
import hashlib
import io
import json
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tupe.text import PLACEHOLDERS, SPACE, UNK, Normaliser, TextEncoder, clean

SHORT = 8  # a paragraph of fewer words (a heading, a line of dialogue) is joined to the next one
LONG_WORD = 1000  # characters; a paragraph with a longer word is not prose
MIN_LETTERS = 0.6  # the share of letters and blanks among the characters of a paragraph; tables and formulas have less
SPECIALS = 5  # <s> <pad> </s> <unk> and, added by the task when it starts, <mask>


class Document(NamedTuple):
    source: str
    paragraphs: list


# -------------------------------------------------------------------------------------------------------------- reading


def decode(data, errors, where, stats):
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        if errors == "replace":
            stats["lines with bytes replaced by U+FFFD"] += 1
            return data.decode("utf-8", "replace")
        raise ValueError(
            f"{where}: byte 0x{data[error.start]:02x} at column {error.start + 1} is not UTF-8; "
            "convert the file, or read such bytes as U+FFFD with --errors replace"
        ) from error


def read_txt(path, errors, stats):
    """One paragraph per line, an empty line between documents. errors="strict" refuses bytes that are not UTF-8,
    "replace" reads U+FFFD."""
    paragraphs, number = [], 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            line = decode(line, errors, f"{path}, line {number}", stats)
            for paragraph in line.rstrip("\r\n").split("\r"):  # a lone \r ended lines once
                if paragraph.strip():
                    paragraphs.append(paragraph)
                elif paragraphs:
                    yield Document(f"{path}:{number}", paragraphs)
                    paragraphs = []
    if paragraphs:
        yield Document(f"{path}:{number}", paragraphs)


SKIPPED_TAGS = {
    "ref",
    "references",
    "table",
    "math",
    "gallery",
    "timeline",
    "score",
    "syntaxhighlight",
    "source",
    "code",
    "pre",
    "imagemap",
}
SKIPPED_LINKS = ("file:", "image:", "category:", "media:")
SKIPPED_SECTIONS = {
    "references",
    "external links",
    "see also",
    "further reading",
    "notes",
    "bibliography",
    "sources",
    "footnotes",
}


def _wiki_text(nodes, out):
    """Appends the running text of parsed wiki code to the list `out`."""
    skip_from = None
    for node in nodes:
        kind = type(node).__name__
        if kind == "Heading":
            if skip_from is None or node.level <= skip_from:
                skip_from = node.level if str(node.title).strip().lower() in SKIPPED_SECTIONS else None
            out.append("\n")
        elif skip_from is not None:
            continue
        elif kind == "Text":
            out.append(node.value)
        elif kind == "HTMLEntity":
            out.append(node.normalize() or "")
        elif kind == "Wikilink":
            target = str(node.title)
            if not target.strip().lower().startswith(SKIPPED_LINKS):
                out.append(target if node.text is None else "")
                _wiki_text(node.text.nodes if node.text is not None else (), out)
        elif kind == "ExternalLink":
            if node.title is not None:
                _wiki_text(node.title.nodes, out)
            elif not node.brackets:
                out.append(str(node.url))
        elif kind == "Tag":
            tag = str(node.tag).strip().lower()
            if tag in ("br", "li", "dd", "dt", "hr"):
                out.append("\n")
            if tag not in SKIPPED_TAGS and node.contents is not None:
                _wiki_text(node.contents.nodes, out)


def wiki_paragraphs(markup):
    """The paragraphs of a page: no templates, tables, references, maths, comments, files, headings or end matter."""
    import mwparserfromhell

    out = []
    _wiki_text(mwparserfromhell.parse(markup, skip_style_tags=True).nodes, out)
    text = re.sub(r"'{2,}", "", "".join(out))  # bold and italics
    return [line.strip() for line in text.split("\n") if line.strip()]


def read_wiki(path, stats):
    """A MediaWiki XML dump (.xml, .xml.bz2): the articles, without redirects."""
    from defusedxml import DefusedXmlException
    from defusedxml.ElementTree import ParseError, iterparse

    title = None
    try:
        with (bz2.open if str(path).endswith(".bz2") else open)(path, "rb") as file:
            root = None
            for event, element in iterparse(file, events=("start", "end")):
                root = element if root is None else root
                if event == "start" or not element.tag.endswith("}page"):
                    continue
                namespace = element.tag[: -len("page")]
                title = element.findtext(f"{namespace}title")
                markup = element.findtext(f"{namespace}revision/{namespace}text") or ""
                stats["pages"] += 1
                if element.findtext(f"{namespace}ns") not in (None, "0"):
                    stats["dropped: page that is no article"] += 1
                elif element.find(f"{namespace}redirect") is not None or markup.lstrip()[:9].lower() == "#redirect":
                    stats["dropped: page that redirects"] += 1
                else:
                    yield Document(f"{path}: {title}", wiki_paragraphs(markup))
                root.clear()
    except (ParseError, EOFError, OSError, DefusedXmlException) as error:
        raise ValueError(
            f"{path}, after page {title!r}: {error!r}; the file is damaged or no MediaWiki dump"
        ) from error


def read_documents(paths, errors, stats):
    """Documents of .txt files and MediaWiki dumps, in the order of `paths`."""
    for path in map(str, paths):
        if path.endswith(".txt"):
            yield from read_txt(path, errors, stats)
        elif re.search(r"\.xml(-p\w+(-\w+)*)?(\.bz2)?$", path):  # also parts: enwiki-...-articles1.xml-p1p41242.bz2
            yield from read_wiki(path, stats)
        else:
            raise ValueError(f"{path}: unknown kind of input; valid: .txt, .xml, .xml.bz2")


# ---------------------------------------------------------------------------------------------------------------- steps


def clean_paragraphs(paragraphs, stats):
    """Cleans each paragraph (tupe.text.clean), drops junk and repetitions, joins short ones to what follows."""
    kept, seen, short = [], set(), ""
    for paragraph in paragraphs:
        stats["paragraphs"] += 1
        text = clean(paragraph)
        letters = sum(map(len, re.findall(r"[^\W\d_]+| ", text)))
        if not text:
            stats["dropped: paragraph without visible text"] += 1
        elif len(max(text.split(" "), key=len)) > LONG_WORD:
            stats[f"dropped: paragraph with a word of more than {LONG_WORD} characters"] += 1
        elif letters < MIN_LETTERS * len(text):
            stats["dropped: paragraph of few letters"] += 1
        elif text in seen:
            stats["dropped: paragraph repeated in its document"] += 1
        else:
            seen.add(text)
            text = f"{short} {text}" if short else text
            short = text if text.count(" ") + 1 < SHORT else ""
            if short:
                stats["joined: short paragraph"] += 1
            else:
                kept.append(text)
    if short:
        if kept:
            kept[-1] += " " + short
        else:
            stats[f"dropped: document of fewer than {SHORT} words"] += 1
    return kept


def document_hash(paragraphs):
    """What two copies of a document share: its letters and digits, in lower case."""
    text = re.sub(r"[\W_]+", "", "".join(paragraphs).lower())
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def sentences_of(documents, normaliser, stats):
    """(hash, [[token, ...], ...]) of each document that is not empty and not a copy."""
    seen = set()
    for document in documents:
        stats["documents"] += 1
        paragraphs = clean_paragraphs(document.paragraphs, stats)
        if not paragraphs:
            stats["dropped: document without a paragraph left"] += 1
            continue
        digest = document_hash(paragraphs)
        if digest in seen:
            stats["dropped: document that is a copy"] += 1
            continue
        seen.add(digest)
        stats["documents kept"] += 1
        stats["paragraphs kept"] += len(paragraphs)
        sentences = [sentence for paragraph in paragraphs for sentence in normaliser.sentences(paragraph)]
        stats["sentences"] += len(sentences)
        stats["tokens"] += sum(map(len, sentences))
        yield digest, sentences


# -------------------------------------------------------------------------------------------- vocabulary and data files


def train_sentencepiece(sentences, vocab_size, path):
    """BPE over normalised sentences (iterable of strings). `vocab_size` counts SPECIALS, so the model has vocab_size -
    5 pieces + <unk>."""
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size - SPECIALS + 1,
            user_defined_symbols=[SPACE + name for name in PLACEHOLDERS],
            normalization_rule_name="identity",  # tupe.text has normalised: pieces keep their offsets
            character_coverage=0.9995,
            bos_id=-1,
            eos_id=-1,
            unk_id=0,
            max_sentence_length=100_000,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ValueError(
            f"SentencePiece cannot make {vocab_size} types from this text; choose another --vocab-size: {error}"
        ) from error
    Path(path).write_bytes(model.getvalue())


def write_dictionary(model_path, counts, path):
    """dict.txt in fairseq's format, most frequent first; every piece of the model is there, counted or not."""
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_file=str(model_path))
    pieces = [model.id_to_piece(i) for i in range(len(model)) if not model.is_unknown(i)]
    pieces.sort(key=lambda piece: -counts[piece])
    Path(path).write_text("".join(f"{piece} {counts[piece]}\n" for piece in pieces), encoding="utf-8")


def write_split(prefix, documents, ids):
    """fairseq's mmap format, as fairseq-preprocess writes it: each sentence ends with </s>, and an empty line (only
    </s>) ends a document. `documents`: lists of sentences, which are lists of pieces. Returns the number of ids
    written."""
    from fairseq.data.indexed_dataset import MMapIndexedDataset, best_fitting_int_dtype

    dtype = best_fitting_int_dtype(len(ids))
    eos, unk = ids["</s>"], ids[UNK]
    sizes = []
    with open(f"{prefix}.bin", "wb") as file:
        for sentences in documents:
            for sentence in [*sentences, []]:
                line = np.array([*(ids.get(piece, unk) for piece in sentence), eos], dtype=dtype)
                file.write(line.tobytes())
                sizes.append(len(line))
    with MMapIndexedDataset.Index.writer(f"{prefix}.idx", dtype) as index:
        index.write(sizes)
    return sum(sizes)


def choose_valid(digests, sizes, fraction):
    """The indices of the documents to hold out: in the order of their hashes, so that nothing but their text decides,
    until they hold `fraction` of all tokens. A document that alone has more than twice that is passed over; if all do,
    the smallest one is taken."""
    if len(digests) < 2:
        raise ValueError(
            f"{len(digests)} document after cleaning: training and validation need at least one each; "
            "documents in .txt files are separated by empty lines"
        )
    chosen, total, wanted = set(), 0, fraction * sum(sizes)
    for i in sorted(range(len(digests)), key=digests.__getitem__):
        if total >= wanted:
            break
        if sizes[i] <= 2 * wanted and len(chosen) < len(digests) - 1:
            chosen.add(i)
            total += sizes[i]
    return chosen or {min(range(len(digests)), key=lambda i: (sizes[i], digests[i]))}


def prepare(
    inputs,
    out,
    vocab_size=32768,
    valid_fraction=0.005,
    errors="strict",
    overwrite=False,
    spacy_model=None,
    progress=lambda _: None,
):
    """Does it all, writes into the folder `out` and returns the manifest (a dict, also in manifest.json). Raises
    ValueError."""
    out = Path(out)
    if out.exists() and any(out.iterdir()):
        if not overwrite:
            raise ValueError(f"{out} is not empty; choose another folder, or replace what is there with --overwrite")
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    stats = collections.Counter()
    normaliser = Normaliser(spacy_model)
    progress("cleaning, sentences, tokens")
    documents = list(sentences_of(read_documents(inputs, errors, stats), normaliser, stats))
    if not documents:
        raise ValueError(f"no text left of {', '.join(map(str, inputs))}; counts: {dict(stats)}")
    progress(f"{stats['documents kept']} documents, {stats['sentences']} sentences, {stats['tokens']} tokens")
    progress("training SentencePiece")
    sizes = [sum(map(len, sentences)) for _, sentences in documents]
    held_out = choose_valid([digest for digest, _ in documents], sizes, valid_fraction)
    train = [sentences for i, (_, sentences) in enumerate(documents) if i not in held_out]
    valid = [sentences for i, (_, sentences) in enumerate(documents) if i in held_out]
    model_path = out / "sentencepiece.bpe.model"
    train_sentencepiece((" ".join(s) for document in train for s in document), vocab_size, model_path)
    progress("encoding")
    (out / "dict.txt").touch()
    encoder = TextEncoder(out)
    pieces = {
        name: [[encoder.token_pieces(s) for s in document] for document in split]
        for name, split in (("train", train), ("valid", valid))
    }
    counts = collections.Counter(piece for document in pieces["train"] for sentence in document for piece in sentence)
    write_dictionary(model_path, counts, out / "dict.txt")
    ids = TextEncoder(out).ids
    assert len(ids) == vocab_size, (len(ids), vocab_size)
    splits = {
        name: {"documents": len(split), "ids": write_split(out / name, split, ids)} for name, split in pieces.items()
    }
    manifest = {
        "inputs": [str(path) for path in inputs],
        "vocab_size": vocab_size,
        "spacy_model": spacy_model,
        "counts": dict(sorted(stats.items())),
        **splits,
    }
    (out / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    return manifest
