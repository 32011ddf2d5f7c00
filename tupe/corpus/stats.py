"""What the steps of preparing text kept and dropped, and why; and the report of a data directory."""

import collections
import json
from collections.abc import Iterable
from pathlib import Path

from ..common.options import shorten
from ..common.tables import TextTable
from ..run.folder import write_atomically

SAMPLES = 20  # examples of dropped text kept per reason, for a person to read
SAMPLE_CHARS = 200
BLOCKS = (128, 512)  # tokens of a sequence, of the recipes


class Stats:
    """What a step kept and dropped, and why. The sum of those of all shards, in order, are those of the corpus.

    counts: {name: number}. dropped: {reason: {source: number}}, and some examples of each reason in samples. sources:
    {source: {"train: documents", "valid: ids", ...: number}}.
    """

    def __init__(self):
        self.counts = collections.Counter()
        self.dropped = collections.defaultdict(collections.Counter)
        self.samples = collections.defaultdict(list)
        self.sources = collections.defaultdict(collections.Counter)

    def count(self, name: str, number: int = 1) -> None:
        self.counts[name] += number

    def drop(self, unit: str, why: str, source: str, example: str) -> None:
        """Count a dropped paragraph, document or file (the unit), and keep the first examples."""
        reason = f"{unit}: {why}"
        self._add({}, {reason: {source: 1}}, {reason: [example[:SAMPLE_CHARS]]}, {})

    def keep(self, source: str, split: str, ids: int) -> None:
        """Count a document that is in a split."""
        numbers = {f"{split}: documents": 1, f"{split}: ids": ids}
        self._add(numbers, {}, {}, {source: numbers})

    def _add(self, counts, dropped, samples, sources):
        self.counts.update(counts)
        for reason, numbers in dropped.items():
            self.dropped[reason].update(numbers)
        for reason, examples in samples.items():
            self.samples[reason] = (self.samples[reason] + examples)[:SAMPLES]
        for source, numbers in sources.items():
            self.sources[source].update(numbers)

    def data(self) -> dict:
        """As JSON, with sorted keys: equal counts give equal text."""
        tables = {"counts": self.counts, "dropped": self.dropped, "samples": self.samples, "sources": self.sources}
        return json.loads(json.dumps(tables, sort_keys=True, allow_nan=False))

    def save(self, folder: Path) -> None:
        (folder / "stats.json").write_text(json.dumps(self.data(), allow_nan=False))

    @classmethod
    def load(cls, folders: Iterable[Path]) -> "Stats":
        """The sum of those in some folders."""
        total = cls()
        for folder in folders:
            total._add(**json.loads((folder / "stats.json").read_text()))
        return total


# ---------------------------------------------------------------------------------------------------------- the report


def _share(part, whole):
    return f"{100 * part / whole:.2f} %" if whole else ""


def write_report(out: str | Path, manifest: dict) -> None:
    """Write report.md of a data directory: what was read, what was dropped and why, for a person to read."""
    counts, dropped = collections.Counter(manifest["counts"]), manifest["dropped"]
    times = {reason: sum(sources.values()) for reason, sources in dropped.items()}
    left = counts["documents read"]
    flow = [["read", f"{left:,}"]]
    for reason in sorted((r for r in times if r.startswith("document: ")), key=lambda r: "copy" in r):
        left -= times[reason]
        flow.append([f"without: {reason.removeprefix('document: ')}", f"{left:,}"])
    ids = counts["train: ids"] + counts["valid: ids"]
    kept = [
        ["documents", f"{counts['documents kept']:,}"],
        ["of them for training / validation", f"{counts['train: documents']:,} / {counts['valid: documents']:,}"],
        ["sentences", f"{counts['sentences']:,}"],
        ["words and punctuation marks", f"{counts['tokens']:,}"],
        ["ids in train / valid, `</s>` included", f"{counts['train: ids']:,} / {counts['valid: ids']:,}"],
        *(
            [
                f"of them in sentences that {length} tokens do not hold (training cuts those)",
                _share(counts[f"ids in sentences too long for {length} tokens"], ids),
            ]
            for length in BLOCKS
        ),
        ["types of the vocabulary", f"{manifest['vocab_size']:,}"],
        ["pieces per word", f"{counts['pieces'] / counts['tokens']:.3f}" if counts["tokens"] else ""],
        ["pieces that are `<unk>`", _share(counts["pieces that are <unk>"], counts["pieces"])],
        ["words per sentence", f"{counts['tokens'] / counts['sentences']:.1f}" if counts["sentences"] else ""],
    ]
    held_out = []
    for source, numbers in sorted(manifest["sources"].items()):
        train, valid = numbers.get("train: ids", 0), numbers.get("valid: ids", 0)
        documents = f"{numbers.get('train: documents', 0):,} / {numbers.get('valid: documents', 0):,}"
        held_out.append([source, documents, f"{train:,} / {valid:,}", _share(valid, train + valid)])
    reasons = []
    for reason in sorted(dropped, key=times.get, reverse=True):
        top = sorted(dropped[reason].items(), key=lambda item: (-item[1], item[0]))[:3]
        most = ", ".join(f"{source} ({count:,})" for source, count in top)
        reasons.append([reason, f"{times[reason]:,}", most, shorten(manifest["samples"][reason][0])])
    others = ("lines with bytes replaced by U+FFFD", "short paragraphs joined to the next")
    lines = [
        "# Corpus report",
        "",
        f"{len(manifest['settings']['inputs'])} input files, {manifest['raw bytes'] / 1e6:.1f} MB of raw text.",
        "",
        TextTable.plain(["documents", ""], flow).markdown(),
        TextTable.plain(["what is left", ""], kept).markdown(),
        "## Held out, by source (train / valid)",
        "",
        TextTable.plain(["source", "documents", "ids", "held out"], held_out).markdown(),
        "## Dropped, by reason and by where it came from",
        "",
        TextTable.plain(["reason", "times", "most often in", "for example"], reasons, align="lrll").markdown(),
        *(f"- {name}: {counts[name]:,}" for name in others if counts[name]),
        "",
        "`manifest.json` has all counts, and up to 20 examples of each reason.",
        "",
    ]
    write_atomically(Path(out) / "report.md", "\n".join(lines))
