"""One table, written as Markdown or CSV. Needs only the standard library."""

import csv
import io
from dataclasses import dataclass

EMPTY = "–"  # shown where a cell holds nothing
ALIGNMENTS = {"l": "---", "r": "---:"}


@dataclass
class TextTable:
    """Rows of text under a header.

    rows: (kind, cells) each. Rows of the kind "ours" are bold in Markdown; "" is an ordinary row. Cells are texts, ""
    where there is nothing. align: a letter per column, "l" or "r"; by default the first column stands left and the
    others right.
    """

    header: list
    rows: list
    align: str = ""

    def __post_init__(self):
        self.align = self.align or "l" + "r" * (len(self.header) - 1)
        widths = {len(self.header), len(self.align), *(len(cells) for _, cells in self.rows)}
        assert len(widths) == 1, f"rows of {widths} cells in one table: {self.header}"

    @classmethod
    def plain(cls, header: list, rows: list, **options) -> "TextTable":
        """A table of ordinary rows: lists of cells without their kind."""
        return cls(header, [("", cells) for cells in rows], **options)

    def markdown(self) -> str:
        """Lines that end with a newline; "|" inside of a cell is escaped."""
        lines = [[_markdown_cell(cell) for cell in self.header], [ALIGNMENTS[letter] for letter in self.align]]
        for kind, cells in self.rows:
            shown = [_markdown_cell(cell) or EMPTY for cell in cells]
            lines.append([f"**{text}**" if kind == "ours" and text != EMPTY else text for text in shown])
        return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)

    def csv(self) -> str:
        """The header and the cells, without kinds."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.header, *(cells for _, cells in self.rows)])
        return text.getvalue()


def _markdown_cell(text):
    return text.replace("|", "\\|").replace("\n", " ")
