"""Files with fields: JSON, CSV, TSV, Parquet; the text's field; values."""

import csv
import gzip
import io
import json

import pytest

from tupe.corpus import readers
from tupe.corpus.readers import find_inputs
from tupe.corpus.records import Reading, number_of, text_of
from tupe.corpus.stats import Stats

TEXTS = ['He said: "no, never".\nA second line', "é, 中 and\ttabs", "third"]


def read(path, field="text", errors="strict", unquoted=False):
    inputs, _ = find_inputs([path])
    stats, reading = Stats(), Reading(errors, field, unquoted)
    return [document for source in inputs for document in readers.read(source, reading, stats)], stats


def write_records(path, rows):
    """A file of the kind that its name says; tables begin with a byte-order mark, as Windows writes it."""
    kind = path.name.removesuffix(".gz").rpartition(".")[2]
    if kind == "parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)
        return path
    if kind in ("csv", "tsv"):
        file = io.StringIO()
        writer = csv.writer(file, "excel" if kind == "csv" else "excel-tab")
        writer.writerows([rows[0], *(row.values() for row in rows)])
        content = f"\ufeff{file.getvalue()}"
    else:
        content = "\n".join(map(json.dumps, rows))
    path.write_bytes((gzip.compress if path.suffix == ".gz" else bytes)(content.encode()))
    return path


def write(folder, name, field, texts=TEXTS):
    """Text in one of several columns."""
    return write_records(folder / name, [{"id": n, field: text, "url": "x"} for n, text in enumerate(texts)])


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.tsv", "a.csv.gz", "a.parquet"])
def test_every_kind_of_records(tmp_path, name):
    path = write(tmp_path, name, "content")
    documents, stats = read(path, "content")
    assert [document.text for document in documents] == TEXTS
    assert documents[2].place.startswith(f"{path}, ") and documents[2].source == str(path)
    assert stats.counts["documents read"] == 3
    with pytest.raises(
        ValueError, match=f"{'the fields there:' if 'json' in name else 'has'} id, content, url: choose with --field"
    ):
        read(path)


def test_a_table_with_a_hole_names_its_row(tmp_path):
    for name, place in (("a.jsonl", "line 7"), ("a.csv", "line 8"), ("a.parquet", "row 7")):
        path = write(tmp_path, name, "text", [*"abcdef", None, *"hij"])
        if name == "a.csv":
            path.write_text("id,text\n" + "".join(f"{n},{t}\n" for n, t in enumerate("abcdef")) + "6\n7,h\n")
        with pytest.raises(ValueError, match=f"{name}, {place}: .*go on with --errors replace"):
            read(path)
        documents, stats = read(path, errors="replace")
        assert len(documents) == (7 if name == "a.csv" else 9) and stats.dropped.total() == 1


@pytest.mark.parametrize("kind", ["string", "large_string"])
def test_bytes_of_parquet_that_are_not_utf8_have_a_place(tmp_path, kind):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = pyarrow.array([b"One", None, b"caf\xe9", b"f\xc3\xbcr"], pyarrow.large_binary())
    column = texts.cast(pyarrow.binary()).view(kind) if kind == "string" else texts.view(kind)
    parquet.write_table(pyarrow.table({"id": [1, 2, 3, 4], "text": column}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a.parquet, row 2: no 'text'"):
        read(tmp_path / "a.parquet")
    documents, stats = read(tmp_path / "a.parquet", errors="replace")
    assert [document.text for document in documents] == ["One", "caf\ufffd", "für"]
    assert stats.dropped["line: bytes replaced by U+FFFD"] == 1
    (tmp_path / "a.parquet").unlink()
    parquet.write_table(pyarrow.table({"text": column.take([0, 2])}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a.parquet, row 2: byte 0xe9 is not UTF-8: convert the file"):
        read(tmp_path / "a.parquet")


def test_no_text_of_a_row_is_left_out(tmp_path):
    """Commas that are not quoted, columns of one name, and a file without any."""
    path = tmp_path / "a.csv"
    path.write_text("id,text\n1,One\n2,Two, and more, too\n3,Three\n")
    with pytest.raises(ValueError, match=r"a.csv, line 3: more fields than columns \( and more,  too\); replace"):
        read(path)
    documents, stats = read(path, errors="replace")
    assert len(documents) == 2 and stats.dropped == {"document: more fields than columns": 1}
    path.write_text("\n\r\nid,text,,\n1,One,,,\n\n2,Two\n")  # blank lines, and commas too many that lose nothing
    assert [document.text for document in read(path)[0]] == ["One", "Two"]
    for content, message in (("text,id,text\na,1,b\n", "more than one column 'text'"), ("", "no column: it is empty")):
        path.write_text(content)
        with pytest.raises(ValueError, match=f"a.csv has {message}"):
            read(path)
    path = write(tmp_path, "a.jsonl", "text", ["One.", 5])
    with pytest.raises(ValueError, match=r"a.jsonl, line 2: 'text' is not text \(5\)"):
        read(path)


@pytest.mark.parametrize(
    "name, content, place, kept",
    [
        ("a.tsv", 'text\tid\none\t1\n\n"two\t2\nthree\t3\n', "4: unexpected end", ["one"]),
        ("a.csv", 'id,text\n1,"one ""a"""\n2,"two\n3,"three"\n4,"fo', "3: .* expected after", ['one "a"']),
    ],
)
def test_a_quotation_mark_that_stays_open_swallows_no_row(tmp_path, name, content, place, kept):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=f"{name}, line {place}.*; a field that begins .*go on with --errors replace"):
        read(tmp_path / name)
    documents, stats = read(tmp_path / name, errors="replace")
    assert [document.text for document in documents] == kept
    assert stats.dropped == {"file: damaged, read up to there": 1}


@pytest.mark.parametrize(
    "row, why", [('2,"Good" movie', "expected after .* --unquoted"), ("2,a\rb", "a carriage return in a field without")]
)
def test_a_bad_row_of_one_line_loses_no_other(tmp_path, row, why):
    (tmp_path / "a.csv").write_bytes(f"id,text\n1,One\n{row}\n3,Three\n4,Four\n".encode())
    with pytest.raises(ValueError, match=f"a.csv, line 3: .*{why}"):
        read(tmp_path / "a.csv")
    documents, stats = read(tmp_path / "a.csv", errors="replace")
    assert [document.text for document in documents] == ["One", "Three", "Four"]
    assert list(stats.dropped.values()) == [1] and next(iter(stats.dropped)).startswith("document: ")


def test_quotation_marks_may_be_text(tmp_path):
    """As in most .tsv files of data sets: none is lost, and none joins rows."""
    (tmp_path / "a.tsv").write_text('id\ttext\n1\t"one\n2\tsaid "two"\n3\t"three"\n')
    documents, stats = read(tmp_path / "a.tsv", unquoted=True)
    assert [document.text for document in documents] == ['"one', 'said "two"', '"three"'] and not stats.dropped
    with pytest.raises(ValueError, match="a.tsv, line 2: .* read such marks as text with --unquoted"):
        read(tmp_path / "a.tsv")


def test_values():
    numbers = {"1": 1, "-1.5": -1.5, "+.5": 0.5, "2.": 2, "1e-05": 1e-5}
    words = ["18_24", "12E5", "\u0663", "inf", "1e999", "1,5", "0x10", "-", ".", "one"]
    assert {text: number_of(text) for text in [*numbers, *words]} == {**numbers, **dict.fromkeys(words)}
    assert [text_of(value) for value in (True, 1, 1.0, " a ", "none", "-")] == ["true", "1", "1.0", "a", "none", "-"]
    assert {text_of(value) for value in (None, "", " ", "NaN", float("nan"), "NULL", "n/a", "#N/A", "<NA>")} == {None}
    for value in (["a"], {"a": 1}, b"a"):
        with pytest.raises(ValueError, match="not a word or a number"):
            text_of(value)
