"""One table as Markdown and as CSV."""

import csv
import io

import pytest

from tupe.common.tables import TextTable

HEADER = ["model", "a|b", "MNLI-m"]
ROWS = [("ours", ["<b>&", "1.00", ""]), ("spread", ['x, "y"', "", "p|q"])]


def test_csv_reads_back():
    rows = list(csv.reader(io.StringIO(TextTable(HEADER, ROWS).csv())))
    assert rows == [HEADER, *(cells for _, cells in ROWS)]


def test_markdown():
    head, rule, ours, spread = TextTable(HEADER, ROWS).markdown().splitlines()
    assert rule == "| --- | ---: | ---: |"
    assert head == "| model | a\\|b | MNLI-m |"
    assert ours == "| **<b>&** | **1.00** | – |"
    assert spread == '| x, "y" | – | p\\|q |'


def test_alignment():
    table = TextTable.plain(["x", "y"], [["1", "2"]], align="rl")
    assert table.markdown().splitlines()[:2] == ["| x | y |", "| ---: | --- |"]
    assert table.csv() == "x,y\n1,2\n"


def test_rows_of_another_width_are_a_mistake():
    with pytest.raises(AssertionError, match="one table"):
        TextTable.plain(["a", "b"], [["1"]])
