"""Files with fields: opening them, whatever compresses them, and reading their lines, records and values."""

import bz2
import collections
import csv
import functools
import io
import json
import lzma
import math
import numbers
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ..common.options import shorten_list
from .stats import Stats

MAX_DOCUMENT = 20_000_000  # characters (of a line: bytes); a longer one is a broken export
DAMAGE = (EOFError, OSError, zlib.error, lzma.LZMAError)
TOO_LONG = object()  # in place of a record
MORE_FIELDS = "more fields than columns"


class Reading(NamedTuple):
    """How files are read. errors: what happens at bad bytes, lines and files: "strict" stops and names `--errors
    replace`, "replace" counts them and goes on, "refuse" stops. field: that of the text. unquoted: quotation marks
    of .csv and .tsv are text."""

    errors: str = "strict"
    field: str = "text"
    unquoted: bool = False

    def or_replace(self, what: str) -> str:
        """The end of an error."""
        return f", or {what} with --errors replace" if self.errors == "strict" else ""


# ------------------------------------------------------------------------------------------------------- opening a file


class _Streams(io.RawIOBase):
    """The bytes of a compressed file: of all its streams, one behind the other, with or without zeros between them.

    Anything else between them or at the end is an error, and so is an end too early: Python's own readers of .bz2 and
    .xz, and so those of fsspec, stop without a word at what is no stream, and zstandard's does not notice that the last
    frame is cut off."""

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


def uncompressed(name: str) -> str:
    """A file's name without the suffix of its compression."""
    stem, suffix = os.path.splitext(name)
    return stem if suffix in COMPRESSIONS else name


def open_binary(path: str, base: str | Path = "") -> BinaryIO:
    """The decompressed bytes of a file. base: the folder that `path` is relative to."""
    path = os.path.join(base, path)
    if (suffix := Path(path).suffix) in COMPRESSIONS:
        how = COMPRESSIONS[suffix](path)
        return io.BufferedReader(_Streams(open(path, "rb"), *how), 1 << 20)
    return open(path, "rb")


def _decode(data, path, number, reading, stats):
    """The text of bytes that begin in a line of a file."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        if reading.errors != "replace":
            line = number + data.count(b"\n", 0, error.start)
            column = error.start - data.rfind(b"\n", 0, error.start)
            raise ValueError(
                f"{path}, line {line}: byte 0x{data[error.start]:02x} at column {column} is not UTF-8; "
                f"convert the file{reading.or_replace('read such bytes as U+FFFD')}"
            ) from error
        stats.count("lines with bytes replaced by U+FFFD")
        text = data.decode("utf-8", "replace")
    return text.removeprefix("\ufeff") if number == 1 else text  # a byte-order mark, as Windows writes it


def read_lines(
    file: BinaryIO, path: str, reading: Reading, stats: Stats, lone: str = "\r"
) -> Iterator[tuple[int, str | None]]:
    """(line number, text without the line end) ...; the text is None for a line that is too long. lone: a sign that
    ends a line too, without counting."""
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
        for part in _decode(line, path, number, reading, stats).rstrip("\r\n").split(lone):
            yield number, part
    if skipping:
        yield number + 1, None


# ---------------------------------------------------------------------------------------------------------- the records

# The functions of RECORDS yield (place in words, place for short, what is there). fields: names of what has to be
# there, with the option that chooses each; further: of what is read beside it.


def _json(file, path, reading, stats, fields, further):
    """An object per line, or an array of objects, which is read as a whole."""
    if file.peek(64).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] != b"[":
        yield from json_lines(read_lines(file, path, reading, stats), path)
        return
    try:
        rows = json.loads(_decode(file.read(), path, 1, reading, stats))
    except json.JSONDecodeError as error:
        raise EOFError(f"line {error.lineno}: {error.msg}") from None
    except RecursionError:
        raise EOFError("too many brackets within brackets") from None
    yield from ((f"{path}, object {n}", f"{path}:{n}", row) for n, row in enumerate(rows, 1))


def json_lines(lines: Iterator, path: str) -> Iterator[tuple]:
    """The records of lines that are not blank."""
    for number, line in lines:
        if line is not None and not line.strip():
            continue
        try:
            record = TOO_LONG if line is None else json.loads(line)
        except (ValueError, RecursionError):
            record = line[:200]
        yield f"{path}, line {number}", f"{path}:{number}", record


def _csv(file, path, reading, stats, fields, further, dialect="excel"):
    """A table with a header line. A row that is none takes only its first line with it: what a quotation mark has
    swallowed is read again."""
    csv.field_size_limit(max(csv.field_size_limit(), MAX_DOCUMENT))  # of the whole process
    quoting = csv.QUOTE_NONE if reading.unquoted else csv.QUOTE_MINIMAL
    lines, again = read_lines(file, path, reading, stats), collections.deque()

    def feed(taken):
        while again or (found := next(lines, None)):
            taken.append(again.popleft() if again else _line_of_table(*found, path, reading, stats))
            yield taken[-1]

    names, begin = None, 1
    while True:
        taken = []  # the lines of this row, from line `begin`
        try:
            row = next(csv.reader(feed(taken), dialect, quoting=quoting, strict=True), None)
        except csv.Error as error:
            place = f"{path}, line {begin}: {error}"
            if reading.errors != "replace" or names is None:
                raise ValueError(
                    f"{place}; a field that begins with a quotation mark must end with one, and double those inside: "
                    f"fix it, or read such marks as text with --unquoted{reading.or_replace('skip such rows')}"
                ) from None
            stats.count("documents read")
            stats.drop("document", "no row of a table", Path(path).name, f"{place}: {taken[0].strip()}")
            again.extendleft(reversed(taken[1:]))
            begin += 1
            continue
        begin += len(taken)
        if row is None:
            break
        if row and names is None:
            check_columns(row, fields, path)
            names = row
        elif row:
            record = dict.fromkeys(names) | dict(zip(names, row, strict=False)) | {None: row[len(names) :]}
            yield f"{path}, line {begin - 1}", f"{path}:{begin - 1}", record
    if names is None:
        check_columns((), fields, path)


def _line_of_table(number, line, path, reading, stats):
    if line is None:
        place, what = f"{path}:{number}", f"longer than {MAX_DOCUMENT} characters"
        if reading.errors == "refuse":
            raise ValueError(f"{place}: a line {what}")
        stats.count("documents read")
        stats.drop("document", what, Path(path).name, place)
    return (line or "") + "\n"


def check_columns(names: Sequence[str], fields: dict, path: str | Path) -> None:
    """Raise ValueError for a header that names a column twice, or lacks one of `fields` ({name: the option that chooses
    it})."""
    if not names:
        raise ValueError(f"{path} has no column: it is empty")
    if twice := [name for name, count in collections.Counter(names).items() if name and count > 1]:
        raise ValueError(f"{path} has more than one column {twice[0]!r}: rename one")
    for field, option in fields.items():
        if field not in names:
            found = shorten_list(map(str, names))
            raise ValueError(f"{path} has no column {field!r}; it has {found}: choose with {option}")


def _table(file, path, reading, stats, fields, further):
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
        check_columns(schema.names, fields, path)
        columns = list(dict.fromkeys([*fields, *(name for name in further if name in schema.names)]))
        if path.endswith(".parquet"):
            batches = table.iter_batches(batch_size=1000, columns=columns)
        else:
            batches = map(table.get_batch, range(table.num_record_batches)) if is_file else table
        rows = (row for batch in batches for row in batch.select(columns).to_pylist())
        yield from ((f"{path}, row {n}", f"{path}:{n}", row) for n, row in enumerate(rows, 1))
    except pyarrow.ArrowInvalid as error:
        raise EOFError(str(error)) from error


RECORDS = {
    "jsonl": _json,
    "csv": _csv,
    "tsv": functools.partial(_csv, dialect="excel-tab"),
    "parquet": _table,
    "arrow": _table,
}


def kind_of(name: str) -> str | None:
    """The name from RECORDS of a file's kind, None if it has no fields."""
    suffix = os.path.splitext(uncompressed(name))[1].removeprefix(".")
    kind = "jsonl" if suffix in ("ndjson", "json") else suffix
    return kind if kind in RECORDS else None


def read_fields(
    path: str | Path, fields: dict, further: Sequence[str] = (), unquoted: bool = False
) -> Iterator[tuple[str, dict]]:
    """(place, {field: value}) of each record of a file with fields: all of `fields` ({name: the option that chooses
    it}), and those of `further` that are there. Raises ValueError with the place for what is not such a record, and for
    damage."""
    path, last = str(path), "the start"
    kind = kind_of(Path(path).name)
    if kind is None:
        raise ValueError(f"{path}: not a file with fields; valid: .csv, .tsv, .jsonl, .json, .parquet, .arrow")
    try:
        with open_binary(path) as file:
            reading = Reading("refuse", unquoted=unquoted)
            for where, _, record in RECORDS[kind](file, path, reading, Stats(), fields, further):
                if not isinstance(record, dict):
                    raise ValueError(f"{where}: not a JSON object")
                if any(record.get(None, ())):
                    raise ValueError(f"{where}: {MORE_FIELDS}; quote a field that contains the separator")
                if missing := [field for field in fields if record.get(field) is None]:
                    found = shorten_list(str(name) for name, value in record.items() if value not in (None, []))
                    raise ValueError(f"{where}: no {missing[0]!r}; the fields there: {found or 'none'}")
                yield where, record
                last = where
    except DAMAGE as error:
        raise ValueError(f"{path}: cannot be read after {last}: {error!r}") from error


# ----------------------------------------------------------------------------------------------------------- the values

MISSING = frozenset(("", "nan", "null", "n/a", "#n/a", "<na>"))  # in lower case, as spreadsheets and pandas write it
NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?")  # no 12E5, which is a house, and no 18_24


def text_of(value: Any) -> str | None:
    """A value of a table as text; None for a missing one. Raises ValueError for a list and the like."""
    if value is not None and not isinstance(value, (str, numbers.Number)):
        raise ValueError("not a word or a number")
    text = str(value).lower() if isinstance(value, bool) else str("" if value is None else value).strip()
    return None if text.lower() in MISSING else text


def number_of(text: str) -> float | None:
    """The finite number that a text is, in ASCII; None for any other text."""
    number = float(text) if NUMBER.fullmatch(text) else math.inf
    return number if math.isfinite(number) else None
