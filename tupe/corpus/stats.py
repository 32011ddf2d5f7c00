"""What the steps of preparing text kept and dropped, and why; and the report of a data directory."""

import collections
import json
from pathlib import Path

import numpy as np

from ..common.record import write_atomically
from ..common.tables import TextTable

SAMPLES = 20  # examples of dropped text kept per reason, for a person to read
SAMPLE_CHARS = 200
BLOCKS = (128, 512)  # tokens of a sequence, of the recipes


class Stats:
    """What a step kept and dropped, and why. Adding the Stats of all shards, in order, gives those of the corpus."""

    def __init__(self, data: dict | None = None):
        data = data or {}
        self.counts = collections.Counter(data.get("counts"))
        self.dropped = collections.defaultdict(collections.Counter)
        for reason, domains in data.get("dropped", {}).items():
            self.dropped[reason].update(domains)
        self.samples = collections.defaultdict(list, data.get("samples", {}))
        self.lengths = collections.defaultdict(collections.Counter)
        for unit, lengths in data.get("lengths", {}).items():
            self.lengths[unit].update({int(length): count for length, count in lengths.items()})

    def count(self, name: str, number: int = 1) -> None:
        self.counts[name] += number

    def drop(self, unit: str, why: str, domain: str, example: str) -> None:
        """Count a dropped paragraph, document or file (the unit), and keep the first examples."""
        reason = f"{unit}: {why}"
        self.dropped[reason][domain] += 1
        if len(self.samples[reason]) < SAMPLES:
            self.samples[reason].append(example[:SAMPLE_CHARS])

    def length(self, unit: str, length: int) -> None:
        self.lengths[unit][length] += 1

    def __iadd__(self, other):
        self.counts.update(other.counts)
        for reason, domains in other.dropped.items():
            self.dropped[reason].update(domains)
            self.samples[reason] = (self.samples[reason] + other.samples[reason])[:SAMPLES]
        for unit, lengths in other.lengths.items():
            self.lengths[unit].update(lengths)
        return self

    def data(self) -> dict:
        """As JSON, with sorted keys: equal counts give equal text."""
        tables = {"counts": self.counts, "dropped": self.dropped, "samples": self.samples, "lengths": self.lengths}
        return {name: json.loads(json.dumps(table, sort_keys=True, allow_nan=False)) for name, table in tables.items()}

    def save(self, folder: str | Path) -> None:
        (Path(folder) / "stats.json").write_text(json.dumps(self.data(), allow_nan=False))

    @classmethod
    def load(cls, folder: str | Path) -> "Stats":
        return cls(json.loads((Path(folder) / "stats.json").read_text()))


# ---------------------------------------------------------------------------------------------------------- the report


def _share(part, whole):
    return f"{100 * part / whole:.2f} %" if whole else ""


def _typical(lengths):
    """The mean, the median and the 99th percentile of {length: how often}."""
    if not lengths:
        return ""
    pairs = sorted((int(length), count) for length, count in lengths.items())
    values, counts = np.array(pairs).T
    median, long = values[np.searchsorted(counts.cumsum(), [0.5 * counts.sum(), 0.99 * counts.sum()])]
    return f"{np.average(values, weights=counts):.1f}, {median}, {long}"


def write_report(out: str | Path, manifest: dict) -> None:
    """Write report.md of a data directory: what was read, what was dropped and why, for a person to read."""
    counts, dropped = collections.Counter(manifest["counts"]), manifest["dropped"]
    times = {reason: sum(domains.values()) for reason, domains in dropped.items()}
    left = counts["documents read"]
    flow = [["read", f"{left:,}"]]
    for reason in sorted((r for r in times if r.startswith("document: ")), key=lambda r: "copy" in r):
        left -= times[reason]
        flow.append([f"without: {reason.removeprefix('document: ')}", f"{left:,}"])

    def of_splits(what):
        return " / ".join(f"{counts[f'{split}: {what}']:,}" for split in ("train", "valid"))

    def too_long(length):
        return _share(
            counts[f"ids in sentences too long for {length} tokens"], counts["train: ids"] + counts["valid: ids"]
        )

    kept = [
        ["documents", f"{counts['documents kept']:,}"],
        ["of them for training / validation", of_splits("documents")],
        ["paragraphs", f"{counts['paragraphs kept']:,}"],
        ["sentences", f"{counts['sentences']:,}"],
        ["words and punctuation marks", f"{counts['tokens']:,}"],
        ["ids in train / valid, `</s>` included", of_splits("ids")],
        *(
            [f"of them in sentences that {length} tokens do not hold (training cuts those)", too_long(length)]
            for length in BLOCKS
        ),
        ["types of the vocabulary", f"{manifest['vocab_size']:,}"],
        ["pieces per word", f"{counts['pieces'] / counts['tokens']:.3f}" if counts["tokens"] else ""],
        ["pieces that are `<unk>`", _share(counts["pieces that are <unk>"], counts["pieces"])],
        ["words per sentence: mean, median, 99 %", _typical(manifest["lengths"].get("tokens per sentence"))],
    ]
    reasons = []
    for reason in sorted(dropped, key=times.get, reverse=True):
        top = sorted(dropped[reason].items(), key=lambda item: (-item[1], item[0]))[:3]
        reasons.append([reason, f"{times[reason]:,}", ", ".join(f"{domain} ({count:,})" for domain, count in top)])
    others = ("lines with bytes replaced by U+FFFD", "short paragraphs joined to the next")
    lines = [
        "# Corpus report",
        "",
        f"{len(manifest['settings']['inputs'])} input files, {manifest['raw bytes'] / 1e6:.1f} MB of raw text.",
        "",
        TextTable.plain(["documents", ""], flow).markdown(),
        TextTable.plain(["what is left", ""], kept).markdown(),
        "## Dropped, by reason and by where it came from",
        "",
        TextTable.plain(["reason", "times", "most often in"], reasons, align="lrl").markdown(),
        *(f"- {name}: {counts[name]:,}" for name in others if counts[name]),
        "",
        "`manifest.json` has all counts, and up to 20 examples of each reason.",
        "",
    ]
    write_atomically(Path(out) / "report.md", "\n".join(lines))
