"""Files with fields: opening them, whatever compresses them, and reading their lines, records and values."""

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
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, NamedTuple

from ..common.options import shorten, shorten_list
from .stats import Stats

MAX_DOCUMENT = 20_000_000  # characters; a longer one is a broken export
DAMAGE = (EOFError, OSError, lzma.LZMAError)
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")


class Bad(ValueError):
    """Something in a file that is not text, or not a record. With --errors replace, reading goes on after it."""


class Reading(NamedTuple):
    """How files are read. errors: "strict" stops at bad bytes, records and files, "replace" counts them and goes on.
    field: that of the text. unquoted: quotation marks of .csv and .tsv are text. columns: those of a table without a
    header line. numbered: what is made of the rows of a table is numbered by row, so that a row without a word counts,
    too. wrap: what stands for a line end within a paragraph of a book; None: each line is a sentence."""

    errors: str = "strict"
    field: str = "text"
    unquoted: bool = False
    columns: tuple = ()
    numbered: bool = False
    wrap: str | None = " "


def imported(package: str, path: str) -> ModuleType:
    """A package that reading a file needs. Raises ValueError if it is not installed."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError:
        name = package.partition(".")[0]
        raise ValueError(f"{path} needs {name}: pip install {name}") from None


# ------------------------------------------------------------------------------------------------------- opening a file


def uncompressed(name: str) -> str:
    """A file's name without the suffix of its compression."""
    stem, suffix = os.path.splitext(name)
    return stem if suffix in COMPRESSED else name


def open_binary(path: str) -> BinaryIO:
    """The decompressed bytes of a file. pyarrow refuses bytes that belong to no stream, and a stream that is cut off.
    Python's own reader of .bz2 stops at the former, and zstandard at the latter, without a word."""
    suffix = Path(path).suffix
    if suffix == ".xz":  # which pyarrow does not read
        return lzma.open(path)
    if suffix in COMPRESSED:
        return io.BufferedReader(imported("pyarrow", path).input_stream(path), 1 << 20)
    return open(path, "rb")


class File:
    """A file that is being read. path: its name in errors; source: what its documents are counted under."""

    def __init__(self, path: str, stream: BinaryIO, reading: Reading, stats: Stats, source: str = ""):
        self.path, self.stream, self.reading, self.stats, self.source = path, stream, reading, stats, source

    def text(self, content: bytes, place: str) -> str:
        """What bytes say. Raises `Bad` for some that are not UTF-8, or counts them. place: as "line 7"."""
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            what = f"{self.path}, {place}: byte 0x{content[error.start]:02x} is not UTF-8"
            if self.reading.errors == "strict":
                raise Bad(f"{what}: convert the file") from error
            self.stats.drop("line", "bytes replaced by U+FFFD", what)
            return content.decode("utf-8", "replace")

    def lines(self) -> Iterator[tuple[int, str]]:
        """(line number, text without the line end) ..."""
        for number, line in enumerate(self.stream, 1):
            text = self.text(line, f"line {number}")
            if number == 1:
                text = text.removeprefix("\ufeff")  # a byte-order mark, as Windows writes it
            yield number, text.rstrip("\r\n")

    def refuse(self, place: str, why: str, found: str = "") -> None:
        """Raise `Bad` for something that is not a record, or count it."""
        if self.reading.errors == "strict":
            raise Bad(f"{place}: {why}{found and f' ({found})'}")
        self.stats.count("documents read")
        self.stats.drop("document", why, f"{place}: {found}")


# ---------------------------------------------------------------------------------------------------------- the records

# The functions of RECORDS yield (place, what is there). fields: names of what has to be there, with the option that
# chooses each; further: of what is read beside it.


def _json(file, fields, further):
    """An object per line."""
    for number, line in file.lines():
        if line.strip():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = line[:200]
            yield f"{file.path}, line {number}", record


def _table(file, fields, further, delimiter=","):
    """A table of text: one that begins with the names of its columns, unless `Reading` has them."""
    names = file.reading.columns
    for place, row in _rows(file, delimiter):
        if not row or not (any(row) or names and file.reading.numbered):  # a blank line, or a spreadsheet's empty row
            continue
        if not names:
            names = row
            check_columns(names, fields, file.path)
        elif any(row[len(names) :]):  # a last comma loses nothing
            file.refuse(place, "more fields than columns", shorten_list(row[len(names) :]))
        else:
            yield place, dict(zip(names, row, strict=False))
    if not names:
        raise ValueError(f"{file.path} has no column: it is empty")


def _rows(file, delimiter):
    """(place, fields) of each row of a table."""
    if file.reading.unquoted:
        yield from ((f"{file.path}, line {n}", line.split(delimiter) if line else []) for n, line in file.lines())
        return
    csv.field_size_limit(max(csv.field_size_limit(), MAX_DOCUMENT))  # of the whole process
    rows = csv.reader((f"{line}\n" for _, line in file.lines()), delimiter=delimiter, strict=True)
    while True:
        first = rows.line_num + 1
        place = f"{file.path}, line {first}"
        try:
            row = next(rows, None)
        except csv.Error as error:
            why = "a carriage return in a field without quotation marks"
            if "new-line" not in str(error):
                why = (
                    f"{error}; a field that begins with a quotation mark must end with one, and double those inside: "
                    "read such marks as text with --unquoted"
                )
            if rows.line_num > first or "unexpected end" in str(error):  # it may hold other rows
                raise Bad(f"{place}: {why}") from None
            file.refuse(place, why)
            continue
        if row is None:
            return
        yield place, row


def check_columns(names: Sequence[str], fields: dict, path: str | Path) -> None:
    """Raise ValueError for a header that names a column twice, or lacks one of `fields` ({name: the option that chooses
    it})."""
    if twice := [name for name, count in collections.Counter(names).items() if name and count > 1]:
        raise ValueError(f"{path} has more than one column {twice[0]!r}: rename one")
    for field, option in fields.items():
        if field not in names:
            found = shorten_list(map(str, names))
            raise ValueError(f"{path} has no column {field!r}; it has {found}{option and f': choose with {option}'}")


def _parquet(file, fields, further):
    parquet, pyarrow = imported("pyarrow.parquet", file.path), imported("pyarrow", file.path)
    try:
        table = parquet.ParquetFile(file.stream)
        names = table.schema_arrow.names
        check_columns(names, fields, file.path)
        columns = [name for name in names if name in fields or name in further]
        count = 0
        for batch in table.iter_batches(batch_size=1000, columns=columns):
            for row in _rows_of_batch(file, batch, count):
                count += 1
                yield f"{file.path}, row {count}", row
    except pyarrow.ArrowInvalid as error:
        raise EOFError(str(error)) from error


def _rows_of_batch(file, batch, before):
    """The rows of a batch of .parquet, whose text need not be UTF-8. before: number of the rows before it."""
    pyarrow = imported("pyarrow", file.path)
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:
        strings = pyarrow.string(), pyarrow.large_string()
        texts = {field.name for field in batch.schema if field.type in strings}
        columns = {
            name: column.cast(pyarrow.large_binary()) if name in texts else column
            for name, column in zip(batch.schema.names, batch.columns, strict=True)
        }
        for number, row in enumerate(pyarrow.table(columns).to_pylist(), before + 1):
            place = f"row {number}"
            yield {n: file.text(x, place) if n in texts and x is not None else x for n, x in row.items()}


RECORDS = {  # a file's suffix -> what reads it
    **dict.fromkeys(("json", "jsonl", "ndjson"), _json),
    "csv": _table,
    "tsv": functools.partial(_table, delimiter="\t"),
    "parquet": _parquet,
}


def kind_of(name: str) -> str | None:
    """The name from RECORDS of a file's kind, None if it has no fields."""
    kind = os.path.splitext(uncompressed(name))[1].removeprefix(".")
    return kind if kind in RECORDS else None


def records_of(file: File, kind: str, fields: dict, further: Sequence[str] = ()) -> Iterator[tuple[str, dict]]:
    """(place, {field: value}) of each record of an open file: all of `fields` ({name: the option that chooses it}), and
    those of `further` that are there. kind: of RECORDS."""
    for place, record in RECORDS[kind](file, fields, further):
        if not isinstance(record, dict):
            file.refuse(place, "not a JSON object", shorten(record))
            continue
        missing = next((field for field in fields if record.get(field) is None), None)
        if missing is None:
            yield place, record
        else:
            found = shorten_list(str(name) for name, value in record.items() if value is not None)
            option = fields[missing] and f": choose with {fields[missing]}"
            file.refuse(place, f"no {missing!r}", f"the fields there: {found or 'none'}{option}")


def read_fields(
    path: str | Path, fields: dict, further: Sequence[str] = (), reading: Reading | None = None,
    stats: Stats | None = None,
) -> Iterator[tuple[str, dict]]:  # fmt: skip
    """`records_of` of a file. Raises ValueError with the place for what is not such a record, and for damage."""
    path = str(path)
    kind = kind_of(Path(path).name)
    if kind is None:
        raise ValueError(f"{path}: not a file with fields; valid: .csv, .tsv, .jsonl, .parquet")
    try:
        with open_binary(path) as stream:
            yield from records_of(File(path, stream, reading or Reading(), stats or Stats()), kind, fields, further)
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
