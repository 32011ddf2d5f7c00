"""report.md and report.png of a data directory: what was read, what was dropped and why, for a person to read."""

import logging
from pathlib import Path

from ..common.record import write_atomically
from ..common.tables import TextTable
from .steps import BLOCKS


def _share(part, whole):
    return f"{100 * part / whole:.2f} %" if whole else ""


def _mean(lengths):
    total = sum(lengths.values())
    return sum(int(length) * count for length, count in lengths.items()) / total if total else 0.0


def _quantile(lengths, share):
    left = share * sum(lengths.values())
    for length in sorted(lengths, key=int):
        left -= lengths[length]
        if left <= 0:
            return int(length)
    return 0


def _flow(manifest):
    """[(step, documents left)]: how many of the documents that were read are left after each step."""
    dropped = {reason: sum(domains.values()) for reason, domains in manifest["dropped"].items()}
    left = manifest["counts"].get("documents read", 0)
    rows = [("read", left)]
    for reason in sorted((r for r in dropped if r.startswith("document: ")), key=lambda r: "copy" in r):
        left -= dropped[reason]
        rows.append((f"without: {reason.removeprefix('document: ')}", left))
    return rows


def write_report(out: str | Path, manifest: dict) -> None:
    """Write both files; the picture only if matplotlib is installed."""
    counts, lengths = manifest["counts"], manifest["lengths"]
    sentences = lengths.get("tokens per sentence", {})
    lines = ["# Corpus report", ""]
    inputs = manifest["settings"]["inputs"]
    lines += [f"{len(inputs)} input files, {manifest['raw bytes'] / 1e6:.1f} MB of raw text.", ""]
    steps = [[step, f"{left:,}"] for step, left in _flow(manifest)]
    pieces, tokens = counts.get("pieces", 0), counts.get("tokens", 0)
    all_ids = [counts.get(f"{split}: ids", 0) for split in ("train", "valid")]
    ids = [f"{number:,}" for number in all_ids]
    documents = [f"{counts.get(f'{split}: documents', 0):,}" for split in ("train", "valid")]
    kept = [
        ["documents", f"{counts.get('documents kept', 0):,}"],
        ["of them for training / validation", " / ".join(documents)],
        ["paragraphs", f"{counts.get('paragraphs kept', 0):,}"],
        ["sentences", f"{counts.get('sentences', 0):,}"],
        ["words and punctuation marks", f"{tokens:,}"],
        ["ids in train / valid, `</s>` included", " / ".join(ids)],
        *(
            [
                f"of them in sentences that {length} tokens do not hold (training cuts those)",
                _share(counts.get(f"ids in sentences too long for {length} tokens", 0), sum(all_ids)),
            ]
            for length in BLOCKS
        ),
        ["types of the vocabulary", f"{manifest['vocab_size']:,}"],
        ["pieces per word", f"{pieces / tokens:.3f}" if tokens else ""],
        ["pieces that are `<unk>`", _share(counts.get("pieces that are <unk>", 0), pieces)],
        [
            "words per sentence: mean, median, 99 %",
            f"{_mean(sentences):.1f}, {_quantile(sentences, 0.5)}, {_quantile(sentences, 0.99)}",
        ],
    ]
    dropped = []
    for reason, domains in sorted(manifest["dropped"].items(), key=lambda item: -sum(item[1].values())):
        top = sorted(domains.items(), key=lambda item: (-item[1], item[0]))[:3]
        where = ", ".join(f"{domain} ({count:,})" for domain, count in top)
        dropped.append([reason, f"{sum(domains.values()):,}", where])
    lines += [TextTable.plain(["documents", ""], steps).markdown()]
    lines += [TextTable.plain(["what is left", ""], kept).markdown()]
    lines += ["## Dropped, by reason and by where it came from", ""]
    lines += [TextTable.plain(["reason", "times", "most often in"], dropped, align="lrl").markdown()]
    other = {
        k: v
        for k, v in counts.items()
        if k in ("short paragraphs joined to the next", "lines with bytes replaced by U+FFFD")
    }
    lines += [*(f"- {name}: {count:,}" for name, count in sorted(other.items()))]
    lines += ["", "`manifest.json` has all counts, and up to 20 examples of each reason. ![lengths](report.png)", ""]
    write_atomically(Path(out) / "report.md", "\n".join(lines))
    _picture(Path(out) / "report.png", manifest)


def _picture(path, manifest):
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # INFO lists every font
    try:
        from ..common import plotting
    except ImportError:
        return
    first, second, third = plotting.COLOURS[1:4]
    figure, axes = plotting.curves(4, rows=2, width=5.5, height=3.5)
    flow = _flow(manifest)
    axes[0].barh([step for step, _ in flow][::-1], [left for _, left in flow][::-1], color=first)
    axes[0].set_title("documents left after each step")
    dropped = sorted(((sum(d.values()), r) for r, d in manifest["dropped"].items()), reverse=True)[:8]
    axes[1].barh([reason for _, reason in dropped][::-1], [count for count, _ in dropped][::-1], color=second)
    axes[1].set_xscale("log")
    axes[1].set_title("dropped, by reason")
    sentences = {int(k): v for k, v in manifest["lengths"].get("tokens per sentence", {}).items()}
    axes[2].hist(list(sentences), weights=list(sentences.values()), bins=range(0, 101, 2), color=third)
    axes[2].set(xlabel="words per sentence", ylabel="sentences")
    documents = {int(k): v for k, v in manifest["lengths"].get("tokens per document, power of 2", {}).items()}
    axes[3].bar([f"$2^{{{k}}}$" for k in sorted(documents)], [documents[k] for k in sorted(documents)], color=third)
    axes[3].set(xlabel="words per document, from", ylabel="documents")
    for axis in axes[:2]:
        axis.tick_params(axis="y", labelsize=7)
    axes[3].tick_params(axis="x", labelsize=7)
    plotting.save(figure, path)
