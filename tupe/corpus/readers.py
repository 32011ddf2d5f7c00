"""Reading documents: from files, folders and globs, of any of the usual kinds and compressions.

A document is (place, source, wiki, text): where it stands, the input that it belongs to as the user named it, and
either plain text with one paragraph per line or, with wiki=True, the markup of a page, which `paragraphs` parses.
Nothing is cleaned here."""

import functools
import glob
import itertools
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from ..common.options import shorten
from ..normaliser import is_blank
from ..run.folder import files_below
from . import records
from .records import DAMAGE, MAX_DOCUMENT, RECORDS, Bad, File, Reading, imported, open_binary, records_of
from .stats import Stats

KINDS = (
    ".txt, .jsonl, .csv, .tsv, .xml (MediaWiki or TEI), each also with .gz, .bz2, .xz or .zst; .parquet; a folder; "
    "a glob"
)


class Document(NamedTuple):
    place: str
    source: str
    wiki: bool
    text: str


class Input(NamedTuple):
    path: str  # absolute: a worker of a cluster has another working folder
    kind: str  # a name from READERS
    size: int  # bytes
    mtime: int  # nanoseconds
    source: str = ""  # the file, folder or glob that the user named


# ---------------------------------------------------------------------------------------------------- finding the files


def kind_of(name: str, in_folder: bool) -> str | None:
    """The name from READERS of a file's kind, None if its name does not tell."""
    name = records.uncompressed(name)
    if name.endswith(".txt"):
        return "book" if in_folder else "lines"
    if kind := records.kind_of(name):
        return kind
    # dumps come in several files: ...articles1.xml-p1p41242.bz2
    return "xml" if re.search(r"\.xml(-p\w+(-\w+)*)?$", name) else None


def find_inputs(names: Iterable, out: Path | None = None) -> tuple[list[Input], list[str]]:
    """(inputs, names of skipped files): inputs in the order of `names`, sorted within a folder or glob, each file once.

    Hidden files of a folder are left out, as a glob leaves them out, and so is what folders and globs have in the
    folder `out`. Raises ValueError for a name that matches nothing, or a file of unknown kind.
    """
    inputs, skipped = {}, []
    for name in map(str, names):
        if not name:
            raise ValueError("an INPUT is empty, as that of a variable which is not set")
        paths = [Path(name)] if Path(name).exists() else sorted(map(Path, glob.glob(name, recursive=True)))
        if not paths:
            raise ValueError(f"{name}: no such file or folder, and no file matches")
        for path in paths:
            folder = path.is_dir()
            for file in files_below(path) if folder else [path]:
                real, kind = file.resolve(), kind_of(file.name, folder)
                if out is not None and real.is_relative_to(out) and file != Path(name):
                    continue
                if kind is None and not folder:
                    raise ValueError(f"{file}: unknown kind of input; valid: {KINDS}")
                if kind is None or real in inputs:
                    skipped.append(str(file))
                else:
                    stat = file.stat()
                    inputs[real] = Input(os.path.abspath(file), kind, stat.st_size, stat.st_mtime_ns, name)
    if not inputs:
        raise ValueError(f"no input in {', '.join(map(str, names))}; valid: {KINDS}")
    return list(inputs.values()), skipped


# ---------------------------------------------------------------------------------------------------------- the readers


def _document(file, place, lines):
    """The document of some lines, unless they are too long."""
    file.stats.count("documents read")
    kept, size = [], 0
    for line in lines:
        size += len(line)
        if size <= MAX_DOCUMENT:
            kept.append(line)
    if size > MAX_DOCUMENT:
        file.stats.drop("document", f"longer than {MAX_DOCUMENT} characters", place)
    else:
        yield Document(place, file.source, False, "\n".join(kept))


def read_paragraph_lines(file: File) -> Iterator[Document]:
    """One paragraph per line, an empty line between documents."""
    for blank, lines in itertools.groupby(file.lines(), lambda numbered: is_blank(numbered[1])):
        if not blank:
            start, first = next(lines)
            others = (line for _, line in lines)
            yield from _document(file, f"{file.path}:{start}", itertools.chain([first], others))


def unwrapped(text: str, wrap: str) -> str:
    """A text without line ends. wrap: what stands for them; between two ASCII signs always a blank."""
    lines = [stripped for line in text.split("\n") if (stripped := line.strip())]
    joined = lines[:1]
    for before, line in itertools.pairwise(lines):
        joined += [" " if before[-1].isascii() and line[0].isascii() else wrap, line]
    return "".join(joined)


def read_book(file: File) -> Iterator[Document]:
    """The whole file is one document. If it has empty lines, they separate paragraphs, and other line ends only wrap
    the text, unless each line is a sentence."""
    if file.reading.wrap is None:
        yield from _document(file, file.path, (line for _, line in file.lines()))
        return
    lines = ("" if is_blank(line) else line.strip() for _, line in file.lines())
    for document in _document(file, file.path, lines):
        text = document.text.strip()
        if "\n\n" in text:
            text = "\n".join(unwrapped(paragraph, file.reading.wrap) for paragraph in re.split(r"\n{2,}", text))
        yield document._replace(text=text)


def read_records(kind: str, file: File) -> Iterator[Document]:
    """The documents of a file with fields, one of which has their text. kind: of RECORDS."""
    field = file.reading.field
    for place, record in records_of(file, kind, {field: "--field"}):
        if isinstance(record[field], str):
            yield from _document(file, place, [record[field]])
        else:
            file.refuse(place, f"{field!r} is not text", shorten(record[field]))


def read_xml(file: File) -> Iterator[Document]:
    """A MediaWiki XML dump, or a TEI document (or several in a teiCorpus). Raises ValueError for other XML."""
    defusedxml = imported("defusedxml.ElementTree", file.path)
    try:
        events = iter(defusedxml.iterparse(file.stream, events=("start", "end")))
        _, root = next(events)
        kind = root.tag.rpartition("}")[2]
        if kind not in XML:
            raise ValueError(f"{file.path}: <{kind}> is not a known kind of document; valid: {', '.join(XML)}")
        yield from XML[kind](events, root, file)
    except imported("defusedxml", file.path).DefusedXmlException as error:
        raise ValueError(f"{file.path}: refused, because it defines its own entities ({error!r})") from error


# Whose links are no text. In any wiki these names are valid beside its own.
NAMESPACES = {"-2": "Media", "6": "File", "14": "Category"}


def _mediawiki(events, root, file):
    """The articles, without redirects. Links to files and categories get their English names."""
    imported("mwparserfromhell", file.path)
    local = {}  # pattern of a name in the dump's language -> English name
    for event, element in events:
        tag = element.tag.rpartition("}")[2]
        if event == "end" and tag == "namespace" and element.get("key") in NAMESPACES and element.text:
            local["[ _]+".join(map(re.escape, element.text.split()))] = NAMESPACES[element.get("key")]
        if event == "start" or tag != "page":
            continue
        namespace = element.tag[: -len("page")]
        title = element.findtext(f"{namespace}title") or ""
        markup = element.findtext(f"{namespace}revision/{namespace}text") or ""
        for name, english in local.items():
            markup = re.sub(rf"\[\[\s*{name}\s*:", f"[[{english}:", markup, flags=re.IGNORECASE)
        is_redirect = element.find(f"{namespace}redirect") is not None or markup.lstrip()[:9].lower() == "#redirect"
        if is_redirect or element.findtext(f"{namespace}ns") not in (None, "0"):
            file.stats.count("documents read")
            file.stats.drop("document", "a page that redirects, or is no article", title)
        else:
            for document in _document(file, f"{file.path}: {title}", [markup]):
                yield document._replace(wiki=True)
        root.clear()


SILENT = frozenset(("note", "fw", "figure", "table", "bibl", "del"))
# Of the forms of one passage, those that an editor gives as the better ones.
PREFERRED = {"choice": ("corr", "reg", "expan"), "app": ("lem",)}
JOINED = "\0"  # no character of XML


def _tei(events, root, file):
    """The paragraphs (p, ab) and lines of verse (l) of each document's body, without headings, notes and page headers.

    TEI: https://tei-c.org/release/doc/tei-p5-doc/en/html/
    """
    bodies, silent, paragraphs = 0, 0, []  # those that are open: a quoted letter has a body of its own
    for event, element in events:
        tag = _name(element)
        if tag == "body":
            bodies += 1 if event == "start" else -1
        elif tag in SILENT:
            silent += 1 if event == "start" else -1
        elif event == "end" and tag in ("p", "ab", "l") and bodies and not silent:
            text = re.sub(rf"\s*{JOINED}\s*", "", "".join(_tei_text(element)))
            text = unwrapped(text, " " if file.reading.wrap is None else file.reading.wrap)
            paragraphs.append(" ".join(text.split()))
            after = element.tail
            element.clear()  # of a paragraph within another one (a quotation, say) the outer one reads nothing twice
            element.tail = after
        elif event == "end" and tag == "TEI":
            title = next((e.text for e in element.iter() if e.tag.endswith("}title") and e.text), "")
            yield from _document(file, f"{file.path}: {' '.join(title.split())}".rstrip(": "), paragraphs)
            paragraphs = []
            element.clear()


def _name(element):
    return element.tag.rpartition("}")[2] if isinstance(element.tag, str) else "comment"


def _tei_text(element):
    """The text inside an element. Where it has several forms of one passage, one is read. A line break that divides a
    word (`break="no"`) joins its halves, whatever blanks are beside it."""
    if preferred := PREFERRED.get(_name(element)):
        forms = [child for child in element if _name(child) not in ("comment", *SILENT)]
        if forms:
            yield from _tei_text(next((form for form in forms if _name(form) in preferred), forms[0]))
        return
    if element.text:
        yield element.text
    for child in element:
        tag = _name(child)
        if tag in ("lb", "pb", "cb", "gap", "milestone"):
            yield JOINED if child.get("break") == "no" else "\n"
        elif tag != "comment" and tag not in SILENT:
            yield from _tei_text(child)
        if child.tail:
            yield child.tail


XML = {"mediawiki": _mediawiki, "TEI": _tei, "teiCorpus": _tei}
READERS = {
    "lines": read_paragraph_lines,
    "book": read_book,
    "xml": read_xml,
    **{kind: functools.partial(read_records, kind) for kind in RECORDS},
}


def read(source: Input, reading: Reading, stats: Stats) -> Iterator[Document]:
    """The documents of an input. Raises ValueError for damage, with the file and the last good document; with
    errors="replace", damage ends the file and is counted. Raises OSError for a file that the system does not give."""
    last = "the start"
    try:
        with open_binary(source.path) as stream:
            for document in READERS[source.kind](File(source.path, stream, reading, stats, source.source)):
                last = document.place
                yield document
    except (*DAMAGE, SyntaxError, Bad) as error:  # SyntaxError is an XML parser's
        if isinstance(error, OSError) and error.errno:  # no damage: a lost mount, for example
            raise
        what = str(error) if isinstance(error, Bad) else f"{source.path}: cannot be read after {last}: {error!r}"
        if reading.errors == "strict":
            raise ValueError(f"{what}; replace the file, or go on with --errors replace") from error
        stats.drop("file", "damaged, read up to there", what)


# ---------------------------------------------------------------------------------------------------------- wiki markup

SKIPPED_TAGS = frozenset(
    ("ref", "references", "table", "math", "chem", "gallery", "timeline", "score", "syntaxhighlight", "source", "code")
    + ("pre", "imagemap", "graph", "hiero", "mapframe")
)
SKIPPED_LINKS = ("file:", "image:", "category:", "media:")
LANGUAGE_LINK = re.compile(r"(simple|[a-z]{2,3}(-[a-z]+)*):")  # to the article in another wiki; [[:de:...]] is text
MAGIC_WORD = re.compile(r"__[A-Z]+__")  # __NOTOC__ and the like
SKIPPED_SECTIONS = frozenset(
    ("references", "external links", "see also", "further reading", "notes", "bibliography", "sources", "footnotes")
    + ("citations",)
)
LINE_TAGS = frozenset(("br", "li", "dd", "dt", "hr", "p", "div"))


def _wiki_text(nodes, out):
    """Append the running text of parsed wiki code to the list `out`."""
    skipped_level = None
    for node in nodes:
        kind = type(node).__name__
        if kind == "Heading":
            if skipped_level is None or node.level <= skipped_level:
                skipped_level = node.level if str(node.title).strip().lower() in SKIPPED_SECTIONS else None
            out.append("\n")
        elif skipped_level is not None:
            continue
        elif kind == "Text":
            out.append(node.value)
        elif kind == "HTMLEntity":
            out.append(node.normalize() or "")
        elif kind == "Wikilink":
            target = str(node.title).strip()
            is_language_link = node.text is None and LANGUAGE_LINK.match(target)
            if not is_language_link and not target.lower().startswith(SKIPPED_LINKS):
                _wiki_text((node.text or node.title).nodes, out)
        elif kind == "ExternalLink":
            if node.title is not None:
                _wiki_text(node.title.nodes, out)
            elif not node.brackets:
                out.append(str(node.url))
        elif kind == "Tag":
            tag = str(node.tag).strip().lower()
            if tag in LINE_TAGS:
                out.append("\n")
            if tag not in SKIPPED_TAGS and node.contents is not None:
                _wiki_text(node.contents.nodes, out)


def paragraphs(document: Document) -> list[str]:
    """The paragraphs of a document; of a wiki page, without templates, tables, references, maths, comments, files,
    headings and end matter. Raises ValueError for markup that cannot be parsed."""
    if not document.wiki:
        return document.text.split("\n")
    import mwparserfromhell

    out = []
    try:
        _wiki_text(mwparserfromhell.parse(document.text, skip_style_tags=True).nodes, out)
    except (mwparserfromhell.parser.ParserError, RecursionError) as error:
        raise ValueError(f"{document.place}: {error!r}") from error
    return [_without_quotes(line) for line in MAGIC_WORD.sub("", "".join(out)).split("\n")]


def _without_quotes(line: str) -> str:
    """A line of wiki text without its marks of italics (two apostrophes) and bold (three; five for both), told from
    apostrophes as MediaWiki does: where both are left open, one mark of bold is an apostrophe before one of italics."""
    texts, sizes = re.split("'{2,}", line), [len(run) for run in re.findall("'{2,}", line)]
    for i, size in enumerate(sizes):
        sizes[i] = 3 if size == 4 else min(size, 5)
        texts[i] += "'" * (size - sizes[i])
    if sum(size != 3 for size in sizes) % 2 and sum(size != 2 for size in sizes) % 2:
        bold = [i for i, size in enumerate(sizes) if size == 3]
        # preferably behind a word of one letter, else behind a longer one, else behind a space
        rank = {i: 2 if texts[i].endswith(" ") else 0 if texts[i][-2:-1] == " " else 1 for i in bold}
        if bold:
            texts[min(bold, key=rank.__getitem__)] += "'"
    return "".join(texts)
