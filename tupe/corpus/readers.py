"""Reading documents: from files, folders and globs, of any of the usual kinds and compressions.

A document is (source, domain, wiki, text): where it comes from, the group that the report counts it in, and either
plain text with one paragraph per line or, with wiki=True, the markup of a page, which `paragraphs` parses. Nothing is
cleaned here."""

import functools
import glob
import html
import importlib.util
import itertools
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple
from urllib.parse import urlsplit

from ..common.options import shorten, shorten_list
from ..common.record import files_below
from ..normaliser import is_blank
from . import records
from .records import DAMAGE, MAX_DOCUMENT, MORE_FIELDS, RECORDS, TOO_LONG, Reading, json_lines, open_binary, read_lines
from .stats import Stats

ABOUT_TABLES = ("dataset_info.json", "dataset_dict.json", "state.json")  # of a folder that `Dataset.save_to_disk` wrote
KINDS = (
    ".txt, .jsonl, .json, .csv, .tsv, .xml (MediaWiki or TEI), wiki_00 (wikiextractor), each also with .gz, .bz2, .xz "
    "or .zst; .parquet, .arrow; a folder, also of the library datasets; a glob"
)


class Document(NamedTuple):
    source: str
    domain: str
    wiki: bool
    text: str


class Input(NamedTuple):
    path: str
    kind: str  # a name from READERS
    size: int  # bytes
    mtime: int  # nanoseconds


# ---------------------------------------------------------------------------------------------------- finding the files


def kind_of(name: str, in_folder: bool) -> str | None:
    """The name from READERS of a file's kind, None if its name does not tell."""
    name = records.uncompressed(name)
    if name.endswith(".txt"):
        return "book" if in_folder else "lines"
    if re.fullmatch(r"wiki_\d+", name):
        return "wikiextractor"
    if kind := records.kind_of(name):
        return kind
    # dumps come in parts: ...articles1.xml-p1p41242.bz2
    return "xml" if re.search(r"\.xml(-p\w+(-\w+)*)?$", name) else None


def find_inputs(names: Iterable, out: Path | None = None) -> tuple[list[Input], list[str]]:
    """(inputs, names of skipped files): inputs in the order of `names`, sorted within a folder or glob, each file once.

    Hidden files of a folder are left out, as a glob leaves them out, and so are files in the folder `out`. Raises
    ValueError for a name that matches nothing, or a file of unknown kind.
    """
    inputs, skipped = {}, []
    for name in map(str, names):
        paths = [Path(name)] if Path(name).exists() else sorted(map(Path, glob.glob(name, recursive=True)))
        if not paths:
            raise ValueError(f"{name}: no such file or folder, and no file matches")
        for path in paths:
            folder = path.is_dir()
            files = files_below(path) if folder else [path]
            saved = any(file.name in ABOUT_TABLES for file in files)
            for file in files:
                beside = saved and (file.name in ABOUT_TABLES or file.name.startswith("cache-"))
                kind = None if beside else kind_of(file.name, folder)
                if kind is None and not folder:
                    raise ValueError(f"{file}: unknown kind of input; valid: {KINDS}")
                if not file.exists():
                    if kind:
                        raise ValueError(f"{file}: a link to {os.readlink(file)}, which is not there")
                    skipped.append(str(file))
                    continue
                stat, real = file.stat(), str(file.resolve())
                if out is not None and Path(real).is_relative_to(out):
                    if path == Path(name) and not folder:
                        raise ValueError(f"{file} lies in {out}, which is to be written; choose another output folder")
                    continue
                if kind is None or real in inputs:
                    skipped.append(str(file))
                else:
                    inputs[real] = Input(str(file), kind, stat.st_size, stat.st_mtime_ns)
    if not inputs:
        raise ValueError(f"no input in {', '.join(map(str, names))}; valid: {KINDS}")
    return list(inputs.values()), skipped


def packages(source: Input) -> list[str]:
    """The packages that reading an input needs and that not every installation has."""
    needed = {"xml": ["defusedxml"], "parquet": ["pyarrow"], "arrow": ["pyarrow"]}.get(source.kind, [])
    return ["zstandard"] * source.path.endswith(".zst") + needed


# ---------------------------------------------------------------------------------------------------------- the readers


def read_paragraph_lines(file: BinaryIO, path: str, reading: Reading, stats: Stats) -> Iterator[Document]:
    """One paragraph per line, an empty line between documents."""
    lines, start, size, domain = [], 1, 0, Path(path).name
    for number, line in read_lines(file, path, reading, stats):
        if line is None or not is_blank(line):
            start = start if lines or size else number
            size += MAX_DOCUMENT + 1 if line is None else len(line)
            if size > MAX_DOCUMENT:
                lines = []
            else:
                lines.append(line)
        elif size:
            yield from _document(f"{path}:{start}", domain, lines, size, stats)
            lines, size = [], 0
    if size:
        yield from _document(f"{path}:{start}", domain, lines, size, stats)


def _document(source, domain, lines, size, stats):
    """The document, unless it is too long."""
    stats.count("documents read")
    if size > MAX_DOCUMENT:
        stats.drop("document", f"longer than {MAX_DOCUMENT} characters", domain, source)
    else:
        yield Document(source, domain, False, "\n".join(lines))


def read_book(file: BinaryIO, path: str, reading: Reading, stats: Stats) -> Iterator[Document]:
    """The whole file is one document. If it has empty lines, they separate paragraphs, and other line ends only wrap
    the text."""
    lines, size = [], 0
    for _, line in read_lines(file, path, reading, stats):
        size += MAX_DOCUMENT + 1 if line is None else len(line)
        if size <= MAX_DOCUMENT:
            lines.append("" if is_blank(line) else line.strip())
    text = "\n".join(lines).strip()
    if "\n\n" in text:
        text = "\n".join(paragraph.replace("\n", " ") for paragraph in re.split(r"\n{2,}", text))
    if text or size > MAX_DOCUMENT:
        yield from _document(path, Path(path).parent.name, text.split("\n"), size, stats)


def read_records(kind: str, file: BinaryIO, path: str, reading: Reading, stats: Stats) -> Iterator[Document]:
    """The documents of a file with fields, one of which has their text. kind: of RECORDS."""
    what = (
        f'not a JSON object with a "{reading.field}"' if kind == "jsonl" else f"no text in the column {reading.field!r}"
    )
    found = RECORDS[kind](file, path, reading, stats, {reading.field: "--field"}, ["url"])
    yield from _records(found, path, reading, stats, what)


def _records(found, path, reading, stats, what):
    """The documents of records (place in words, place for short, record)."""
    field = reading.field
    for where, short, record in found:
        if record is TOO_LONG:
            record = {field: "x" * (MAX_DOCUMENT + 1)}
        text, why = record.get(field) if isinstance(record, dict) else None, what
        found = f"fields: {shorten_list(map(str, record))}" if isinstance(record, dict) and record else ""
        if isinstance(record, dict) and any(record.get(None, ())):  # a last comma loses nothing
            text, why, found = None, MORE_FIELDS, shorten_list(record[None])
        elif text is not None and not isinstance(text, str):
            found = f"{field!r} is {shorten(text)}"
        if not isinstance(text, str):
            if reading.errors == "strict":
                raise ValueError(
                    f"{where}: {why}{found and f' ({found})'}; fix it, or skip such lines with --errors replace"
                )
            stats.count("documents read")
            stats.drop("document", why, Path(path).name, found or str(record)[:200])
            continue
        url = str(record.get("url") or "")
        yield from _document(url or short, _host(url) or Path(path).name, [text], len(text), stats)


def read_wikiextractor(file: BinaryIO, path: str, reading: Reading, stats: Stats) -> Iterator[Document]:
    """The output of wikiextractor: `<doc id=... url=... title=...>`, the title, the text, `</doc>`; with --json an
    object per line."""
    lines = read_lines(file, path, reading, stats)
    first = next(lines, None)
    if first is None:
        return
    lines = itertools.chain([first], lines)
    if first[1] is None or first[1].startswith("{"):
        theirs = reading._replace(field="text")
        documents = _records(json_lines(lines, path), path, theirs, stats, 'not a JSON object with a "text"')
    else:
        documents = _wikiextractor(lines, path, reading, stats)
    for document in documents:
        yield document._replace(text=html.unescape(document.text))  # which it escapes


DOC = re.compile(r"<doc\b(.*)>\s*$")
ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


def _wikiextractor(lines, path, reading, stats):
    attributes, text, size, start = None, [], 0, 1
    for number, line in lines:
        opening = DOC.match(line or "")
        if attributes is None and opening:
            attributes, text, size, start = dict(ATTRIBUTE.findall(opening[1])), [], 0, number
        elif attributes is not None and line is not None and line.strip() == "</doc>":
            url, title = attributes.get("url", ""), html.unescape(attributes.get("title", ""))
            text = text[1:] if text and html.unescape(text[0]).strip() == title else text
            source = url or f"{path}: {title or start}"
            yield from _document(source, _host(url) or Path(path).name, text, size, stats)
            attributes = None
        elif opening or (attributes is None and (line is None or line.strip())):
            problem = "a <doc> inside a <doc>" if opening else "text outside of <doc ...> ... </doc>"
            if reading.errors == "strict":
                raise ValueError(f"{path}, line {number}: {problem}; fix it, or continue with --errors replace")
            stats.count(f"lines with {problem}")
            attributes = dict(ATTRIBUTE.findall(opening[1])) if opening else None
            text, size, start = [], 0, number
        elif attributes is not None:
            size += MAX_DOCUMENT + 1 if line is None else len(line)
            if size <= MAX_DOCUMENT:
                text.append(line)
    if attributes is not None:
        raise EOFError(f"the document that starts in line {start} has no end")


def _host(url):
    """The host name in a URL, None if there is none."""
    try:
        return urlsplit(url).hostname if re.match(r"https?://[^\s\[\]]+$", url) else None
    except ValueError:  # e.g. a full-width slash in the host
        return None


def read_xml(file: BinaryIO, path: str, reading: Reading, stats: Stats) -> Iterator[Document]:
    """A MediaWiki XML dump, or a TEI document (or several in a teiCorpus). Raises ValueError for other XML."""
    from defusedxml import DefusedXmlException
    from defusedxml.ElementTree import iterparse

    try:
        events = iter(iterparse(file, events=("start", "end"), forbid_dtd=True))
        _, root = next(events)
        kind = root.tag.rpartition("}")[2]
        if kind not in XML:
            raise ValueError(f"{path}: <{kind}> is not a known kind of document; valid: {', '.join(XML)}")
        yield from XML[kind](events, root, path, reading, stats)
    except DefusedXmlException as error:
        raise ValueError(f"{path}: refused, because it defines its own entities ({error!r})") from error


def _mediawiki(events, root, path, reading, stats):
    """The articles, without redirects."""
    if not importlib.util.find_spec("mwparserfromhell"):  # which has no wheel for Python 3.14
        raise ValueError(f"{path}: a dump of Wikipedia needs the package mwparserfromhell")
    for event, element in events:
        if event == "start" or element.tag.rpartition("}")[2] != "page":
            continue
        namespace = element.tag[: -len("page")]
        title = element.findtext(f"{namespace}title") or ""
        markup = element.findtext(f"{namespace}revision/{namespace}text") or ""
        stats.count("documents read")
        if element.findtext(f"{namespace}ns") not in (None, "0"):
            stats.drop("document", "a page that is no article", Path(path).name, title)
        elif element.find(f"{namespace}redirect") is not None or markup.lstrip()[:9].lower() == "#redirect":
            stats.drop("document", "a page that redirects", Path(path).name, title)
        elif len(markup) > MAX_DOCUMENT:
            stats.drop("document", f"longer than {MAX_DOCUMENT} characters", Path(path).name, title)
        else:
            yield Document(f"{path}: {title}", Path(path).name, True, markup)
        root.clear()


SILENT = frozenset(("note", "fw", "figure", "table", "bibl", "del", "sic", "orig"))  # corrected forms are read instead


def _tei(events, root, path, reading, stats):
    """The paragraphs (p, ab) and lines of verse (l) of each document's body, without headings, notes and page headers.

    TEI: https://tei-c.org/release/doc/tei-p5-doc/en/html/
    """
    bodies, silent, paragraphs, size = 0, 0, [], 0  # those that are open: a quoted letter has a body of its own
    for event, element in events:
        tag = element.tag.rpartition("}")[2]
        if tag == "body":
            bodies += 1 if event == "start" else -1
        elif tag in SILENT:
            silent += 1 if event == "start" else -1
        elif event == "end" and tag in ("p", "ab", "l") and bodies and not silent:
            text = " ".join("".join(_tei_text(element)).split())
            size += len(text)
            if size <= MAX_DOCUMENT:
                paragraphs.append(text)
            after = element.tail
            element.clear()  # of a paragraph within another one (a quotation, say) the outer one reads nothing twice
            element.tail = after
        elif event == "end" and tag == "TEI":
            title = next((e.text for e in element.iter() if e.tag.endswith("}title") and e.text), "")
            source = f"{path}: {' '.join(title.split())}".rstrip(": ")
            yield from _document(source, Path(path).parent.name, paragraphs, size, stats)
            paragraphs, size = [], 0
            element.clear()


def _tei_text(element):
    """The text inside an element. A line break that divides a word (`break="no"`) joins its halves."""
    if element.text:
        yield element.text
    for child in element:
        tag = child.tag.rpartition("}")[2] if isinstance(child.tag, str) else "comment"
        if tag in ("lb", "pb", "cb", "gap", "milestone"):
            yield "" if child.get("break") == "no" else " "
        elif tag != "comment" and tag not in SILENT:
            yield from _tei_text(child)
        if child.tail:
            yield child.tail


XML = {"mediawiki": _mediawiki, "TEI": _tei, "teiCorpus": _tei}
READERS = {
    "lines": read_paragraph_lines,
    "book": read_book,
    "wikiextractor": read_wikiextractor,
    "xml": read_xml,
    **{kind: functools.partial(read_records, kind) for kind in RECORDS},
}


def read(source: Input, reading: Reading, stats: Stats, base: str | Path = "") -> Iterator[Document]:
    """The documents of an input. base: the folder that its path is relative to.

    Raises ValueError for damage, with the file and the last good document; with errors="replace", damage ends the file
    and is counted.
    """
    last = "the start"
    try:
        with open_binary(source.path, base) as file:
            for document in READERS[source.kind](file, source.path, reading, stats):
                last = document.source
                yield document
    except (*DAMAGE, SyntaxError) as error:  # which an XML parser's error is
        if reading.errors == "strict":
            raise ValueError(
                f"{source.path}: cannot be read after {last}: {error!r}; "
                "download it again, or use the part before with --errors replace"
            ) from error
        stats.drop(
            "file", "damaged, read up to there", Path(source.path).name, f"{source.path} after {last}: {error!r}"
        )


# ---------------------------------------------------------------------------------------------------------- wiki markup

SKIPPED_TAGS = frozenset(
    ("ref", "references", "table", "math", "chem", "gallery", "timeline", "score", "syntaxhighlight", "source", "code")
    + ("pre", "imagemap", "graph", "hiero", "mapframe")
)
SKIPPED_LINKS = ("file:", "image:", "category:", "media:")
LANGUAGE_LINK = re.compile(r"(simple|[a-z]{2,3}(-[a-z]+)*):")  # to the article in another wiki; [[:de:...]] is text
MAGIC_WORD = re.compile(r"__[A-Z]+__")  # __NOTOC__ and the like
SKIPPED_SECTIONS = frozenset(
    (
        "references",
        "external links",
        "see also",
        "further reading",
        "notes",
        "bibliography",
        "sources",
        "footnotes",
        "citations",
    )
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
        raise ValueError(f"{document.source}: {error!r}") from error
    text = re.sub(r"'{2,}", "", "".join(out))  # '' and ''' are italics and bold
    return MAGIC_WORD.sub("", text).split("\n")
