"""Files with fields: opening them, whatever compresses them, and reading their lines, records and values."""

import bz2
import collections
import csv
import functools
import importlib
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
from types import ModuleType
from typing import Any, BinaryIO, NamedTuple

from ..common.options import shorten_list
from .stats import Stats

MAX_DOCUMENT = 20_000_000  # characters; a longer one is a broken export
DAMAGE = (EOFError, OSError, zlib.error, lzma.LZMAError)


class Bad(ValueError):
    """Something in a file that is not text, or not a record. With --errors replace, reading goes on after it."""


class Reading(NamedTuple):
    """How files are read. errors: "strict" stops at bad bytes, records and files, "replace" counts them and goes on.
    field: that of the text. unquoted: quotation marks of .csv and .tsv are text."""

    errors: str = "strict"
    field: str = "text"
    unquoted: bool = False


def imported(package: str, path: str) -> ModuleType:
    """A package that reading a file needs. Raises ValueError if it is not installed."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError:
        name = package.partition(".")[0]
        raise ValueError(f"{path} needs {name}: pip install {name}") from None


# ------------------------------------------------------------------------------------------------------- opening a file


class _Streams(io.RawIOBase):
    """The bytes of a compressed file: of all its streams, one behind the other, with or without zeros between them.

    Anything else between them or at the end is an error, and so is an end too early: Python's own readers of .bz2 and
    .xz, and so those of fsspec, stop without a word at bytes that begin no stream, and zstandard's does not notice that
    the last frame is cut off."""

    def __init__(self, file: BinaryIO, new_stream: Callable):
        self.file, self.new_stream = file, new_stream
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
            except Exception as error:  # each library has its own
                raise OSError(str(error)) from error
            if self.stream.eof:
                self.stream, self.data = None, self.stream.unused_data
        count = min(len(buffer), len(self.rest))
        buffer[:count], self.rest = self.rest[:count], self.rest[count:]
        return count

    def close(self):
        self.file.close()
        super().close()


COMPRESSIONS = {  # a file's suffix -> what makes a decompressor
    ".gz": lambda: zlib.decompressobj(zlib.MAX_WBITS | 16),
    ".bz2": bz2.BZ2Decompressor,
    ".xz": lzma.LZMADecompressor,
    ".zst": lambda: imported("zstandard", "a .zst file").ZstdDecompressor().decompressobj(),
}


def uncompressed(name: str) -> str:
    """A file's name without the suffix of its compression."""
    stem, suffix = os.path.splitext(name)
    return stem if suffix in COMPRESSIONS else name


def open_binary(path: str, base: str | Path = "") -> BinaryIO:
    """The decompressed bytes of a file. base: the folder that `path` is relative to."""
    file, suffix = open(os.path.join(base, path), "rb"), Path(path).suffix  # noqa: SIM115
    return io.BufferedReader(_Streams(file, COMPRESSIONS[suffix]), 1 << 20) if suffix in COMPRESSIONS else file


class File:
    """A file that is being read. path: its name in errors; source: what its documents are counted under."""

    def __init__(self, path: str, stream: BinaryIO, reading: Reading, stats: Stats, source: str = ""):
        self.path, self.stream, self.reading, self.stats, self.source = path, stream, reading, stats, source

    def lines(self) -> Iterator[tuple[int, str]]:
        """(line number, text without the line end) ..."""
        for number, line in enumerate(self.stream, 1):
            yield number, self.decode(line, number).rstrip("\r\n")

    def decode(self, data: bytes, number: int = 1) -> str:
        """The text of bytes that begin in line `number`."""
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            if self.reading.errors == "strict":
                line = number + data.count(b"\n", 0, error.start)
                column = error.start - data.rfind(b"\n", 0, error.start)
                what = f"byte 0x{data[error.start]:02x} at column {column} is not UTF-8: convert the file"
                raise Bad(f"{self.path}, line {line}: {what}") from error
            self.stats.count("lines with bytes replaced by U+FFFD")
            text = data.decode("utf-8", "replace")
        return text.removeprefix("\ufeff") if number == 1 else text  # a byte-order mark, as Windows writes it

    def refuse(self, place: str, why: str, found: str = "") -> None:
        """Raise `Bad` for something that is not a record, or count it."""
        if self.reading.errors == "strict":
            raise Bad(f"{place}: {why}{found and f' ({found})'}")
        self.stats.count("documents read")
        self.stats.drop("document", why, self.source, found or place)


# ---------------------------------------------------------------------------------------------------------- the records

# The functions of RECORDS yield (place, what is there). fields: names of what has to be there, with the option that
# chooses each; further: of what is read beside it.


def _json(file, fields, further):
    """An object per line, or an array of objects, which is read as a whole."""
    if file.stream.peek(64).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"[":
        try:
            rows = json.loads(file.decode(file.stream.read()))
        except (json.JSONDecodeError, RecursionError) as error:
            raise EOFError(str(error)) from None
        yield from ((f"{file.path}, object {n}", row) for n, row in enumerate(rows, 1))
        return
    for number, line in file.lines():
        if line.strip():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = line[:200]
            yield f"{file.path}, line {number}", record


def _csv(file, fields, further, dialect="excel"):
    """A table with a header line."""
    csv.field_size_limit(max(csv.field_size_limit(), MAX_DOCUMENT))  # of the whole process
    quoting = csv.QUOTE_NONE if file.reading.unquoted else csv.QUOTE_MINIMAL
    rows = csv.reader((f"{line}\n" for _, line in file.lines()), dialect, quoting=quoting, strict=True)
    names = None
    while True:
        place = f"{file.path}, line {rows.line_num + 1}"
        try:
            row = next(rows, None)
        except csv.Error as error:
            raise Bad(
                f"{place}: {error}; a field that begins with a quotation mark must end with one, and double those "
                "inside: read such marks as text with --unquoted"
            ) from None
        if row == []:
            continue
        if names is None:
            check_columns(row or (), fields, file.path)
            names = row
        elif row is None:
            return
        elif any(row[len(names) :]):  # a last comma loses nothing
            file.refuse(place, "more fields than columns", shorten_list(row[len(names) :]))
        else:
            yield place, dict(zip(names, row, strict=False))


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


def _parquet(file, fields, further):
    parquet, pyarrow = imported("pyarrow.parquet", file.path), imported("pyarrow", file.path)
    try:
        table = parquet.ParquetFile(file.stream)
        names = table.schema_arrow.names
        check_columns(names, fields, file.path)
        columns = [name for name in names if name in fields or name in further]
        batches = table.iter_batches(batch_size=1000, columns=columns)
        rows = (row for batch in batches for row in batch.to_pylist())
        yield from ((f"{file.path}, row {n}", row) for n, row in enumerate(rows, 1))
    except pyarrow.ArrowInvalid as error:
        raise EOFError(str(error)) from error


RECORDS = {
    "jsonl": _json,
    "csv": _csv,
    "tsv": functools.partial(_csv, dialect="excel-tab"),
    "parquet": _parquet,
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
    path = str(path)
    kind = kind_of(Path(path).name)
    if kind is None:
        raise ValueError(f"{path}: not a file with fields; valid: .csv, .tsv, .jsonl, .json, .parquet")
    try:
        with open_binary(path) as stream:
            file = File(path, stream, Reading(unquoted=unquoted), Stats())
            for place, record in RECORDS[kind](file, fields, further):
                if not isinstance(record, dict):
                    raise ValueError(f"{place}: not a JSON object")
                if missing := [field for field in fields if record.get(field) is None]:
                    found = shorten_list(str(name) for name, value in record.items() if value is not None)
                    raise ValueError(f"{place}: no {missing[0]!r}; the fields there: {found or 'none'}")
                yield place, record
    except DAMAGE as error:
        raise ValueError(f"{path}: cannot be read: {error!r}") from error


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
