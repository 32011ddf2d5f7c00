"""One table in three forms: each is read back by a parser of that form and holds the same cells."""

import csv
import io
from html.parser import HTMLParser

import jinja2
import pytest

from tupe.common.tables import TextTable

HEADER = ["model", "a|b", "MNLI-m"]
ROWS = [("ours", ["<b>&", "1.00", ""]), ("spread", ['x, "y"', "", "p|q"])]


class Cells(HTMLParser):
    """Texts of th and td, row by row, and the classes of the rows."""

    def __init__(self, page):
        super().__init__()
        self.rows, self.kinds = [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        if tag == "tr":
            self.rows.append([])
            self.kinds.append(dict(attributes).get("class"))
        if tag in ("th", "td"):
            self.rows[-1].append("")

    def handle_data(self, text):
        self.rows[-1][-1] += text


def test_csv_reads_back():
    rows = list(csv.reader(io.StringIO(TextTable(HEADER, ROWS).csv())))
    assert rows == [HEADER, *(cells for _, cells in ROWS)]


def test_html_reads_back_with_dashes_for_empty_cells():
    page = Cells(TextTable(HEADER, ROWS).html())
    assert page.rows == [["model", "a|b", "MNLI\u2011m"], ["<b>&", "1.00", "–"], ['x, "y"', "–", "p|q"]]
    assert page.kinds == [None, "ours", "spread"]


def test_markdown():
    head, rule, ours, spread = TextTable(HEADER, ROWS).markdown().splitlines()
    assert rule == "| --- | ---: | ---: |"
    assert head == "| model | a\\|b | MNLI-m |"
    assert ours == "| **<b>&** | **1.00** | – |"
    assert spread == '| x, "y" | – | p\\|q |'


def test_title_and_alignment():
    table = TextTable.plain(["x", "y"], [["1", "2"]], title="A & B", align="rl")
    assert table.markdown().splitlines()[:4] == ["A & B", "", "| x | y |", "| ---: | --- |"]
    assert "<caption>A &amp; B</caption>" in table.html() and '<td class="left">2</td>' in table.html()
    assert table.csv() == "x,y\n1,2\n"


def test_a_page_that_escapes_inserts_a_table_as_it_is():
    table = TextTable(HEADER, ROWS)
    template = jinja2.Environment(autoescape=True).from_string("{{ table }}{{ text }}")
    assert template.render(table=table, text="<b>") == f"{table.html()}&lt;b&gt;"


def test_rows_of_another_width_are_a_mistake():
    with pytest.raises(AssertionError, match="one table"):
        TextTable.plain(["a", "b"], [["1"]])
