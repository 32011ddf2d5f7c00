"""One table, written as Markdown, HTML or CSV. Needs only the standard library."""

import csv
import html
import io
from dataclasses import dataclass

EMPTY = "–"  # shown where a cell holds nothing
ALIGNMENTS = {"l": ("---", "left"), "r": ("---:", "right")}  # -> (Markdown, HTML)


@dataclass
class TextTable:
    """Rows of text under a header.

    rows: (kind, cells) each. A kind is a CSS class in HTML; rows of the kind "ours" are bold in Markdown; "" is an
    ordinary row. Cells are texts, "" where there is nothing. align: a letter per column, "l" or "r"; by default the
    first column stands left and the others right. title: a line above the table.
    """

    header: list
    rows: list
    title: str = ""
    align: str = ""

    def __post_init__(self):
        self.align = self.align or "l" + "r" * (len(self.header) - 1)
        widths = {len(self.header), len(self.align), *(len(cells) for _, cells in self.rows)}
        assert len(widths) == 1, f"rows of {widths} cells in one table: {self.title or self.header}"

    @classmethod
    def plain(cls, header: list, rows: list, **options) -> "TextTable":
        """A table of ordinary rows: lists of cells without their kind."""
        return cls(header, [("", cells) for cells in rows], **options)

    def markdown(self) -> str:
        """Lines that end with a newline; "|" inside of a cell is escaped."""
        lines = [[_markdown_cell(cell) for cell in self.header], [ALIGNMENTS[letter][0] for letter in self.align]]
        for kind, cells in self.rows:
            shown = [_markdown_cell(cell) or EMPTY for cell in cells]
            lines.append([f"**{text}**" if kind == "ours" and text != EMPTY else text for text in shown])
        above = f"{self.title}\n\n" if self.title else ""
        return above + "".join(f"| {' | '.join(cells)} |\n" for cells in lines)

    def html(self) -> str:
        """A <table> whose texts are escaped; a row's class is its kind, a cell's alignment a class too."""
        sides = [ALIGNMENTS[letter][1] for letter in self.align]
        head = "".join(
            f'<th scope="col" class="{side}">{html.escape(cell).replace("-", "&#8209;")}</th>'  # no break in MNLI-m
            for side, cell in zip(sides, self.header, strict=True)
        )
        lines = []
        for kind, cells in self.rows:
            inner = (
                f'<td class="{side}">{html.escape(cell) or EMPTY}</td>' for side, cell in zip(sides, cells, strict=True)
            )
            lines.append(f'<tr class="{html.escape(kind)}">{"".join(inner)}</tr>')
        caption = f"<caption>{html.escape(self.title)}</caption>" if self.title else ""
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"

    __html__ = html  # jinja2 inserts an object that has this as it is

    def csv(self) -> str:
        """The header and the cells; no title and no kinds."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.header, *(cells for _, cells in self.rows)])
        return text.getvalue()


def _markdown_cell(text):
    return text.replace("|", "\\|").replace("\n", " ")
