"""What the steps of preparing text kept and dropped, and why; and the report of a data directory."""

import collections
import json
from collections.abc import Iterable
from pathlib import Path

from ..common.options import shorten
from ..common.tables import TextTable
from ..run.folder import write_atomically

EXAMPLE = 200  # characters of what was dropped that are kept


class Stats:
    """What a step kept and dropped, and why. The sum of those of all shards are those of the corpus.

    counts: {name: number}. dropped: {"document: reason": number}, and the first example of each in examples. sources:
    {source: {"train: documents": number, "valid: ids": number, ...}}.
    """

    def __init__(self):
        self.counts = collections.Counter()
        self.dropped = collections.Counter()
        self.examples = {}
        self.sources = collections.defaultdict(collections.Counter)

    def count(self, name: str, number: int = 1) -> None:
        self.counts[name] += number

    def drop(self, unit: str, why: str, example: str) -> None:
        """Count a dropped paragraph, document or file (the unit)."""
        reason = f"{unit}: {why}"
        self.dropped[reason] += 1
        self.examples.setdefault(reason, example[:EXAMPLE])

    def keep(self, source: str, split: str, ids: int) -> None:
        """Count a document that is in a split."""
        numbers = {f"{split}: documents": 1, f"{split}: ids": ids}
        self.counts.update(numbers)
        self.sources[source].update(numbers)

    def save(self, folder: Path) -> None:
        (folder / "stats.json").write_text(json.dumps(vars(self), allow_nan=False))

    @classmethod
    def load(cls, folders: Iterable[Path]) -> "Stats":
        """The sum of those in some folders."""
        total = cls()
        for folder in folders:
            data = json.loads((folder / "stats.json").read_text())
            total.counts.update(data["counts"])
            total.dropped.update(data["dropped"])
            total.examples = {**data["examples"], **total.examples}
            for source, numbers in data["sources"].items():
                total.sources[source].update(numbers)
        return total


# ---------------------------------------------------------------------------------------------------------- the report


def write_report(out: str | Path, manifest: dict) -> None:
    """Write report.md of a data directory: what was read, what was dropped and why, for a person to read."""
    counts = manifest["counts"]
    kept = [[name, f"{number:,}"] for name, number in counts.items() if ":" not in name]
    kept.append(["types of the vocabulary", f"{manifest['vocab_size']:,}"])
    splits = []
    for source, numbers in [*sorted(manifest["sources"].items()), ("all", counts)]:
        train, valid = numbers.get("train: ids", 0), numbers.get("valid: ids", 0)
        documents = f"{numbers.get('train: documents', 0):,} / {numbers.get('valid: documents', 0):,}"
        splits.append([source, documents, f"{train:,} / {valid:,}", f"{valid / (train + valid):.2%}"])
    dropped = [
        [reason, f"{number:,}", shorten(manifest["examples"][reason])]
        for reason, number in sorted(manifest["dropped"].items(), key=lambda item: -item[1])
    ]
    table = TextTable.plain(["reason", "times", "for example"], dropped, align="lrl").markdown()
    lines = [
        "# Corpus report",
        "",
        f"{len(manifest['settings']['inputs'])} input files.",
        "",
        TextTable.plain(["the corpus", ""], kept).markdown(),
        "## Training and validation, by source",
        "",
        TextTable.plain(["source", "documents", "ids", "held out"], splits).markdown(),
        "## Dropped, by reason",
        "",
        table if dropped else "Nothing was dropped.\n",
        "",
    ]
    write_atomically(Path(out) / "report.md", "\n".join(lines))
