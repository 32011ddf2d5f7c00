"""Reading documents: from files, folders, globs and standard input, of any of the usual kinds and compressions.

A document is (source, domain, wiki, text): where it comes from, the group that the report counts it in, and either
plain text with one paragraph per line or, with wiki=True, the markup of a page, which `paragraphs` parses. Nothing is
cleaned here."""

import bz2
import collections
import csv
import functools
import glob
import html
import importlib.util
import io
import itertools
import json
import lzma
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple
from urllib.parse import urlsplit

from ..common.options import shorten, shorten_list
from ..common.record import files_below
from ..normaliser import is_blank
from .stats import Stats

MAX_DOCUMENT = 20_000_000  # characters (of a line: bytes); a longer one is a broken export
DAMAGE = (EOFError, OSError, zlib.error, lzma.LZMAError)
ABOUT_TABLES = ("dataset_info.json", "dataset_dict.json", "state.json")  # of a folder that `Dataset.save_to_disk` wrote
KINDS = (
    ".txt, .jsonl, .json, .csv, .tsv, .xml (MediaWiki or TEI), wiki_00 (wikiextractor), each also with .gz, .bz2, .xz "
    "or .zst; .parquet, .arrow; a folder, also of the library datasets; a glob; - (standard input)"
)
REPLACE = ", or read such bytes as U+FFFD with --errors replace"
FIELD = "text"
CHUNK = 1 << 20  # characters
TOO_LONG = object()  # in place of a record
MORE_FIELDS = "more fields than columns"


class Document(NamedTuple):
    source: str
    domain: str
    wiki: bool
    text: str


class Input(NamedTuple):
    path: str  # "-" is standard input
    kind: str  # a name from READERS
    size: int  # bytes
    mtime: int  # nanoseconds
    field: str = FIELD  # of a record, with its text


# ---------------------------------------------------------------------------------------------------- finding the files


def kind_of(name: str, in_folder: bool) -> str | None:
    """The name from READERS of a file's kind, None if its name does not tell."""
    name = re.sub(r"\.(gz|bz2|xz|zst)$", "", name)
    if name.endswith(".txt"):
        return "book" if in_folder else "lines"
    if name.endswith((".jsonl", ".ndjson", ".json")):
        return "jsonl"
    if re.fullmatch(r"wiki_\d+", name):
        return "wikiextractor"
    if name.endswith((".csv", ".tsv", ".parquet", ".arrow")):
        return name.rpartition(".")[2]
    # dumps come in parts: ...articles1.xml-p1p41242.bz2
    return "xml" if re.search(r"\.xml(-p\w+(-\w+)*)?$", name) else None


def find_inputs(names: Iterable, out: Path | None = None, field: str = FIELD) -> tuple[list[Input], list[str]]:
    """(inputs, names of skipped files): inputs in the order of `names`, sorted within a folder or glob, each file once.
    field: of records, with their text.

    Hidden files of a folder are left out, as a glob leaves them out, and so are files in the folder `out`. Raises
    ValueError for a name that matches nothing, or a file of unknown kind.
    """
    inputs, skipped = {}, []
    for name in map(str, names):
        if name == "-":
            inputs.setdefault("-", Input("-", "lines", 0, 0, field))
            continue
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
                    inputs[real] = Input(str(file), kind, stat.st_size, stat.st_mtime_ns, field)
    if not inputs:
        raise ValueError(f"no input in {', '.join(map(str, names))}; valid: {KINDS}")
    return list(inputs.values()), skipped


# ------------------------------------------------------------------------------------------------------- opening a file


def packages(source: Input) -> list[str]:
    """The packages that reading an input needs and that not every installation has."""
    tables = ["pyarrow"] * (source.kind in ("parquet", "arrow"))
    return ["zstandard"] * source.path.endswith(".zst") + ["defusedxml"] * (source.kind == "xml") + tables


class _Streams(io.RawIOBase):
    """The bytes of a compressed file: of all its streams, one behind the other, with or without zeros between them.

    Anything else between them or at the end is an error, and so is an end too early: Python's own readers of .bz2 and
    .xz stop without a word at what is no stream, and zstandard's does not notice that the last frame is cut off."""

    def __init__(self, file: BinaryIO, new_stream: Callable, error: type[Exception]):
        self.file, self.new_stream, self.error = file, new_stream, error
        self.stream, self.data, self.rest = new_stream(), b"", b""  # no stream: behind one; rest: not yet handed out

    def readable(self):
        return True

    def readinto(self, buffer):
        while not self.rest:
            data, self.data = self.data or self.file.read(1 << 12), b""  # little: a hostile file is thousands in one
            if not self.stream and data:
                if not (data := data.lstrip(b"\0")):
                    continue
                self.stream = self.new_stream()
            if not data:
                if self.stream:
                    raise EOFError("the file is cut off")
                return 0
            try:
                self.rest = self.stream.decompress(data)
            except self.error as error:
                raise OSError(str(error)) from error
            if self.stream.eof:
                self.stream, self.data = None, self.stream.unused_data
        count = min(len(buffer), len(self.rest))
        buffer[:count], self.rest = self.rest[:count], self.rest[count:]
        return count

    def close(self):
        self.file.close()
        super().close()


def _zstd(path):
    try:
        import zstandard
    except ModuleNotFoundError:
        raise ValueError(f"{path} needs zstandard: pip install zstandard") from None
    return lambda: zstandard.ZstdDecompressor().decompressobj(), zstandard.ZstdError


# A compressed file's suffix -> function from its name to (function that makes a stream's decompressor, its error).
COMPRESSIONS = {
    ".gz": lambda path: (lambda: zlib.decompressobj(zlib.MAX_WBITS | 16), zlib.error),
    ".bz2": lambda path: (bz2.BZ2Decompressor, OSError),
    ".xz": lambda path: (lzma.LZMADecompressor, lzma.LZMAError),
    ".zst": _zstd,
}


def open_binary(path: str, base: str | Path = "") -> BinaryIO:
    """The decompressed bytes of a file, or standard input for "-". base: the folder that `path` is relative to."""
    if path == "-":
        return sys.stdin.buffer
    path = os.path.join(base, path)
    if (suffix := Path(path).suffix) in COMPRESSIONS:
        how = COMPRESSIONS[suffix](path)
        return io.BufferedReader(_Streams(open(path, "rb"), *how), 1 << 20)
    return open(path, "rb")


# ---------------------------------------------------------------------------------------------------------- the readers


def read_lines(file: BinaryIO, path: str, errors: str, stats: Stats) -> Iterator[tuple[int, str | None]]:
    """(line number, text without the line end) ...; the text is None for a line that is too long. A lone \\r ends a
    line too."""
    number, skipping = 0, False
    while line := file.readline(MAX_DOCUMENT):
        is_whole = line.endswith(b"\n")
        if not is_whole and len(line) == MAX_DOCUMENT:
            skipping = True
            continue
        number += 1
        if skipping:
            skipping = False
            yield number, None
            continue
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            if errors != "replace":
                raise ValueError(
                    f"{path}, line {number}: byte 0x{line[error.start]:02x} at column {error.start + 1} is not UTF-8; "
                    f"convert the file{REPLACE * (errors == 'strict')}"
                ) from error
            stats.count("lines with bytes replaced by U+FFFD")
            text = line.decode("utf-8", "replace")
        text = text.removeprefix("\ufeff") if number == 1 else text  # a byte-order mark, as Windows writes it
        for part in text.rstrip("\r\n").split("\r"):
            yield number, part
    if skipping:
        yield number + 1, None


def read_paragraph_lines(file: BinaryIO, path: str, errors: str, stats: Stats) -> Iterator[Document]:
    """One paragraph per line, an empty line between documents."""
    lines, start, size, domain = [], 1, 0, Path(path).name
    for number, line in read_lines(file, path, errors, stats):
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


def read_book(file: BinaryIO, path: str, errors: str, stats: Stats) -> Iterator[Document]:
    """The whole file is one document. If it has empty lines, they separate paragraphs, and other line ends only wrap
    the text."""
    lines, size = [], 0
    for _, line in read_lines(file, path, errors, stats):
        size += MAX_DOCUMENT + 1 if line is None else len(line)
        if size <= MAX_DOCUMENT:
            lines.append("" if is_blank(line) else line.strip())
    text = "\n".join(lines).strip()
    if "\n\n" in text:
        text = "\n".join(paragraph.replace("\n", " ") for paragraph in re.split(r"\n{2,}", text))
    if text or size > MAX_DOCUMENT:
        yield from _document(path, Path(path).parent.name, text.split("\n"), size, stats)


# The functions of RECORDS yield (place in words, place for short, what is there). fields: names of what has to be
# there, with the option that chooses each; further: of what is read beside it.


def _json(file, path, errors, stats, fields, further):
    """An object per line, or an array of objects."""
    is_array = path != "-" and file.peek(64).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"["
    return _array(file, path, errors) if is_array else _json_lines(read_lines(file, path, errors, stats), path)


def _json_lines(lines, path):
    """The records of lines that are not blank."""
    for number, line in lines:
        if line is not None and not line.strip():
            continue
        try:
            record = TOO_LONG if line is None else json.loads(line)
        except (ValueError, RecursionError):
            record = line[:200]
        yield f"{path}, line {number}", f"{path}:{number}", record


def _array(file, path, errors):
    """Those of a JSON array, in bounded memory."""
    text = io.TextIOWrapper(file, "utf-8-sig", errors="replace" if errors == "replace" else "strict")
    decoder, blank = json.JSONDecoder(), re.compile(r"[\s,]*")
    number, buffer, at = 1, "", 0
    try:
        buffer = text.read(CHUNK)
        at = buffer.index("[") + 1
        while not buffer.startswith("]", at := blank.match(buffer, at).end()):
            try:
                record, end = decoder.raw_decode(buffer, at)
            except ValueError as error:
                more = text.read(max(CHUNK, len(buffer) - at)) if len(buffer) - at <= 4 * MAX_DOCUMENT else ""
                if not more:
                    raise EOFError(f"object {number} is not JSON: {error.msg}") from None
                buffer, at = buffer[at:] + more, 0
                continue
            yield f"{path}, object {number}", f"{path}:{number}", record
            number, at = number + 1, end
        rest = buffer[at + 1 :]
        while not rest or rest.isspace():
            if not (rest := text.read(CHUNK)):
                return
        raise EOFError(f"after the array's end comes {shorten(rest.strip())}")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}, after object {number - 1}: a byte is not UTF-8 ({error.reason}); convert the file"
            f"{REPLACE * (errors == 'strict')}"
        ) from None


def _csv(file, path, errors, stats, fields, further):
    """A table with a header line, its columns divided by commas, or in .tsv by tabs. A row that is none takes only its
    first line with it: what a quotation mark has swallowed is read again."""
    csv.field_size_limit(max(csv.field_size_limit(), MAX_DOCUMENT))  # of the whole process
    lines = read_lines(file, path, errors, stats)
    dialect = "excel-tab" if kind_of(Path(path).name, False) == "tsv" else "excel"
    again, taken, begin, names = collections.deque(), [], 1, None  # taken: the lines of this row, from line `begin`

    def feed():
        while again:
            taken.append(again.popleft())
            yield taken[-1]
        for number, line in lines:
            if line is None:
                place, what = f"{path}:{number}", f"longer than {MAX_DOCUMENT} characters"
                if errors == "refuse":
                    raise ValueError(f"{place}: a line {what}")
                stats.count("documents read")
                stats.drop("document", what, Path(path).name, place)
            taken.append((line or "") + "\n")
            if names is not None or taken[-1].strip():  # blank lines before the header are none
                yield taken[-1]

    while True:
        rows = csv.DictReader(feed(), names, dialect=dialect, strict=True)
        try:
            if names is None:
                names = rows.fieldnames or ()
                _check_fields(names, fields, path)
                begin += len(taken)
                taken.clear()
            for row in rows:
                number = begin + len(taken) - 1
                yield f"{path}, line {number}", f"{path}:{number}", row
                begin += len(taken)
                taken.clear()
            return
        except csv.Error as error:
            while taken[0] == "\n":  # which is no row
                begin += 1
                del taken[0]
            place = f"{path}, line {begin}: {error}"
            if errors != "replace" or names is None:
                raise ValueError(
                    f"{place}; a field that begins with a quotation mark must end with one, and double those inside"
                    + ": fix it, or skip such rows with --errors replace" * (errors == "strict")
                ) from None
            stats.count("documents read")
            stats.drop("document", "no row of a table", Path(path).name, f"{place}: {taken[0].strip()}")
            again.extendleft(reversed(taken[1:]))
            begin += 1
            taken.clear()


def _check_fields(names, fields, path):
    if not names:
        raise ValueError(f"{path} has no column: it is empty")
    for field, option in fields.items():
        if list(names).count(field) > 1:
            raise ValueError(f"{path} has more than one column {field!r}: rename one")
        if field not in names:
            found = shorten_list(map(str, names))
            raise ValueError(f"{path} has no column {field!r}; it has {found}: choose with {option}")


def _table(file, path, errors, stats, fields, further):
    """A .parquet file, or an .arrow file as the library datasets saves it."""
    try:
        import pyarrow
        from pyarrow import ipc, parquet
    except ModuleNotFoundError:
        raise ValueError(f"{path} needs pyarrow: pip install pyarrow") from None
    try:
        if path.endswith(".parquet"):
            table = parquet.ParquetFile(file)
            schema = table.schema_arrow
        else:
            place = getattr(file, "name", path)  # what is compressed has none, and is no table either
            with pyarrow.memory_map(place) as mapped:
                is_file = mapped.read(6) == b"ARROW1"
            table = (ipc.open_file if is_file else ipc.open_stream)(pyarrow.memory_map(place))
            schema = table.schema
        _check_fields(schema.names, fields, path)
        columns = [*fields, *(name for name in further if schema.names.count(name) == 1 and name not in fields)]
        if path.endswith(".parquet"):
            batches = table.iter_batches(batch_size=1000, columns=columns)
        else:
            batches = map(table.get_batch, range(table.num_record_batches)) if is_file else table
        rows = (row for batch in batches for row in batch.select(columns).to_pylist())
        yield from ((f"{path}, row {n}", f"{path}:{n}", row) for n, row in enumerate(rows, 1))
    except pyarrow.ArrowInvalid as error:
        raise EOFError(str(error)) from error


RECORDS = {"jsonl": _json, "csv": _csv, "tsv": _csv, "parquet": _table, "arrow": _table}  # kinds with fields


def read_records(
    reader: Callable, file: BinaryIO, path: str, errors: str, stats: Stats, field: str = FIELD
) -> Iterator[Document]:
    """The documents of a file with fields, one of which has their text. reader: of RECORDS."""
    what = f'not a JSON object with a "{field}"' if reader is _json else f"no text in the column {field!r}"
    records = reader(file, path, errors, stats, {field: "--field"}, ["url"])
    yield from _records(records, path, errors, stats, field, what)


def _records(records, path, errors, stats, field, what):
    """The documents of records (place in words, place for short, record)."""
    for where, short, record in records:
        if record is TOO_LONG:
            record = {field: "x" * (MAX_DOCUMENT + 1)}
        text, why = record.get(field) if isinstance(record, dict) else None, what
        found = f"fields: {shorten_list(map(str, record))}" if isinstance(record, dict) and record else ""
        if isinstance(record, dict) and any(record.get(None, ())):  # of the library csv; a last comma loses nothing
            text, why, found = None, MORE_FIELDS, shorten_list(record[None])
        elif text is not None and not isinstance(text, str):
            found = f"{field!r} is {shorten(text)}"
        if not isinstance(text, str):
            if errors == "strict":
                raise ValueError(
                    f"{where}: {why}{found and f' ({found})'}; fix it, or skip such lines with --errors replace"
                )
            stats.count("documents read")
            stats.drop("document", why, Path(path).name, found or str(record)[:200])
            continue
        url = str(record.get("url") or "")
        yield from _document(url or short, _host(url) or Path(path).name, [text], len(text), stats)


def read_wikiextractor(file: BinaryIO, path: str, errors: str, stats: Stats) -> Iterator[Document]:
    """The output of wikiextractor: `<doc id=... url=... title=...>`, the title, the text, `</doc>`; with --json an
    object per line."""
    lines = read_lines(file, path, errors, stats)
    first = next(lines, None)
    if first is None:
        return
    lines = itertools.chain([first], lines)
    if first[1] is None or first[1].startswith("{"):
        records = _json_lines(lines, path)
        documents = _records(records, path, errors, stats, FIELD, f'not a JSON object with a "{FIELD}"')
    else:
        documents = _wikiextractor(lines, path, errors, stats)
    for document in documents:
        yield document._replace(text=html.unescape(document.text))  # which it escapes


DOC = re.compile(r"<doc\b(.*)>\s*$")
ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


def _wikiextractor(lines, path, errors, stats):
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
            if errors == "strict":
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


def read_xml(file: BinaryIO, path: str, errors: str, stats: Stats) -> Iterator[Document]:
    """A MediaWiki XML dump, or a TEI document (or several in a teiCorpus). Raises ValueError for other XML."""
    from defusedxml import DefusedXmlException
    from defusedxml.ElementTree import iterparse

    try:
        events = iter(iterparse(file, events=("start", "end"), forbid_dtd=True))
        _, root = next(events)
        kind = root.tag.rpartition("}")[2]
        if kind not in XML:
            raise ValueError(f"{path}: <{kind}> is not a known kind of document; valid: {', '.join(XML)}")
        yield from XML[kind](events, root, path, errors, stats)
    except DefusedXmlException as error:
        raise ValueError(f"{path}: refused, because it defines its own entities ({error!r})") from error


def _mediawiki(events, root, path, errors, stats):
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


def _tei(events, root, path, errors, stats):
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
    **{kind: functools.partial(read_records, reader) for kind, reader in RECORDS.items()},
}


def read(source: Input, errors: str, stats: Stats, base: str | Path = "") -> Iterator[Document]:
    """The documents of an input. base: the folder that its path is relative to.

    Raises ValueError for damage, with the file and the last good document; with errors="replace", damage ends the file
    and is counted.
    """
    last = "the start"
    try:
        with open_binary(source.path, base) as file:
            choices = {"field": source.field} if source.kind in RECORDS else {}
            for document in READERS[source.kind](file, source.path, errors, stats, **choices):
                last = document.source
                yield document
    except (*DAMAGE, SyntaxError) as error:  # which an XML parser's error is
        if errors == "strict":
            raise ValueError(
                f"{source.path}: cannot be read after {last}: {error!r}; "
                "download it again, or use the part before with --errors replace"
            ) from error
        stats.drop(
            "file", "damaged, read up to there", Path(source.path).name, f"{source.path} after {last}: {error!r}"
        )


def read_fields(path: str | Path, fields: dict, further: Sequence[str] = ()) -> Iterator[tuple[str, dict]]:
    """(place, {field: value}) of each record of a file with fields: all of `fields` ({name: the option that chooses
    it}), and those of `further` that are there. Raises ValueError with the place for what is not such a record, and for
    damage."""
    path, last = str(path), "the start"
    kind = kind_of(Path(path).name, False)
    if kind not in RECORDS:
        raise ValueError(f"{path}: not a file with fields; valid: .csv, .tsv, .jsonl, .json, .parquet, .arrow")
    try:
        with open_binary(path) as file:
            for where, _, record in RECORDS[kind](file, path, "refuse", Stats(), fields, further):
                if not isinstance(record, dict):
                    raise ValueError(f"{where}: not a JSON object")
                if any(record.get(None, ())):  # of the library csv
                    raise ValueError(f"{where}: {MORE_FIELDS}; quote a field that contains the separator")
                if missing := [field for field in fields if record.get(field) is None]:
                    found = shorten_list(str(name) for name, value in record.items() if value is not None)
                    raise ValueError(f"{where}: no {missing[0]!r}; the fields there: {found or 'none'}")
                yield where, record
                last = where
    except DAMAGE as error:
        raise ValueError(f"{path}: cannot be read after {last}: {error!r}") from error


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
