"""What a step of preparing text kept and dropped, and why."""

import collections
import json
from pathlib import Path

SAMPLES = 20  # examples of dropped text kept per reason, for a person to read
SAMPLE_CHARS = 200


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
