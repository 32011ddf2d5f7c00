"""Runs of a plan as compressed tables, which the repository keeps (docs/evidence): all numbers of docs/results.md come
only from them.

A table is FOLDER/<name>.csv.gz. Collecting again replaces what is there of a run and leaves other runs alone, so that
runs of several machines come together.
"""

import csv
import gzip
import hashlib
import io
import json
from contextlib import suppress
from pathlib import Path

from tupe.checkpoints.gate import read_checkpoint
from tupe.run import record
from tupe.run.folder import is_locked, write_atomically

from .plan import BITS, PRECISIONS, Trial, records

RUN = ("run",)  # str(Trial)
COLUMNS = {
    # losses in bits per masked token; `loss` is the final one, on 400,000 tokens
    "runs": RUN + ("state", "reason", "loss", "loss_error", "validation_loss", "data", "precision", "device",
                   "commit", "started_at", "finished_at"),
    "training": RUN + ("updates", "loss", "seconds"),  # means over the 50 updates before; seconds of these updates
    "validation": RUN + ("updates", "loss"),
    "measures": RUN + ("updates", "measure", "part", "value", "error", "count"),
}  # fmt: skip


def collect(output: Path, data: Path | None = None) -> dict[str, list[dict]]:
    """The tables of all finished and failed runs in a folder of trials: {table: rows}.

    data: folder that all runs were trained on (default: the one that a run's weights name).
    """
    tables, prints = {name: [] for name in COLUMNS}, {}
    for trial, run in records(output).items():
        folder = trial.folder(output)
        if run.state in ("finished", "failed") and not is_locked(folder):
            for name, rows in tables_of(trial, run, folder).items():
                tables[name] += rows
            if (folder / "model.pt").exists():
                config = read_checkpoint(folder / "model.pt", mmap=True)["cfg"]
                path = data or Path(config["task"]["data"])
                if path not in prints:
                    prints[path] = fingerprint(path) if (path / "dict.txt").exists() else ""
                tables["runs"][-1] |= {"data": prints[path], "precision": precision_of(config)}
    return tables


def precision_of(config: dict) -> str:
    """What a model was trained in, of the configuration in its checkpoint."""
    halves = [name for name in ("fp16", "bf16", "amp") if config["common"].get(name)]
    return f"--{halves[0]}" if halves else PRECISIONS[str(config["model"].get("autocast") or "none")]


def fingerprint(data: Path) -> str:
    """What tells prepared data from other data: a hash of its dictionary and held-out text, and the size of its
    training text. Raises ValueError if these are not there."""
    digest = hashlib.sha256()
    for name in ("dict.txt", "valid.idx", "valid.bin", "train.bin"):
        path = data / name
        if not path.exists():
            raise ValueError(f"{path} not found: {data} is not a folder of pre-training data")
        digest.update(str(path.stat().st_size).encode() if name == "train.bin" else path.read_bytes())
    return digest.hexdigest()[:12]


def tables_of(trial: Trial, run: record.Record, folder: Path) -> dict[str, list[dict]]:
    """{table: rows} of one run."""
    tables = {name: [] for name in COLUMNS}

    def add(table, **cells):
        tables[table].append({"run": str(trial), **cells})

    def measure(name, part, value, **more):
        add("measures", updates=trial.updates, measure=name, part=part, value=value, **more)

    facts = dict.fromkeys(COLUMNS["runs"][1:], "")
    facts |= {name: getattr(run, name) for name in ("state", "device", "commit", "started_at", "finished_at")}
    facts["reason"] = run.failure["reason"] if run.failure else ""
    for entry in run.scores:
        add("validation", updates=entry["num_updates"], loss=f"{entry['loss']:.5f}")
        facts["validation_loss"] = f"{entry['loss']:.5f}"
    for updates, (loss, seconds) in training_losses(folder / "train.log").items():
        add("training", updates=updates, loss=loss, seconds=seconds)
    if (folder / "evaluation.json").exists():
        evaluation = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
        loss, order = evaluation["loss"], evaluation["order"]
        facts["loss"] = f"{BITS * loss['mean']:.5f}"
        if loss["error"] is not None:  # as it is of one block
            facts["loss_error"] = f"{BITS * loss['error']:.5f}"
        for positions, (value, count) in loss["by_position"].items():
            measure("loss by position", positions, f"{BITS * value:.5f}", count=count)
        for layer, ratios in enumerate(evaluation["cls"]["ratio"], 1):
            for head, ratio in enumerate(ratios, 1):
                measure("cls attention", f"{layer}.{head}", f"{ratio:.4f}")
        for part in ("accuracy", "margin"):
            error = f"{order[f'{part}_error']:.5f}"
            measure("order", part, f"{order[part]:.5f}", error=error, count=order["sentences"])
        for name, parts in evaluation.get("further", {}).items():
            for part, value in parts.items():
                measure(name, part, f"{value:.10g}")
    add("runs", **facts)
    return tables


def training_losses(log: Path) -> dict[int, tuple[str, str]]:
    """{updates: (mean loss in bits of the updates since the last line, seconds they took)} of a log of training. The
    line that a process was writing when it was killed is left out."""
    losses = {}
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else ():
        if "| train_inner | {" in line:
            with suppress(json.JSONDecodeError):
                row = json.loads(line[line.index("{") :])
                losses[int(row["num_updates"])] = row["loss"], row["train_wall"]
    return losses


# --------------------------------------------------------------------------------------------------- tables in a folder


def read(folder: Path) -> dict[str, list[dict]]:
    """{table: rows}, each a dict of texts; [] for a table that is not there."""
    return {name: read_table(folder / f"{name}.csv.gz") for name in COLUMNS}


def read_table(path: Path) -> list[dict]:
    """The rows of one table; [] if it is not there."""
    return list(csv.DictReader(io.StringIO(gzip.decompress(path.read_bytes()).decode()))) if path.exists() else []


def write(tables: dict[str, list[dict]], folder: Path) -> None:
    """Write tables, but no new one without rows; the same rows give the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, columns in COLUMNS.items():
        path = folder / f"{name}.csv.gz"
        if not tables[name] and not path.exists():
            continue
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(tables[name])
        write_atomically(path, gzip.compress(text.getvalue().encode(), mtime=0))


def merge(known: dict[str, list[dict]], new: dict[str, list[dict]]) -> dict[str, list[dict]]:
    """Both, sorted by run: of a run that both have, the new rows, unless they alone say that it failed, or has no final
    loss yet."""
    has = {row["run"] for row in known["runs"] if row["state"] != "failed"}
    with_loss = {row["run"] for row in known["runs"] if row["loss"]}
    failed = {row["run"] for row in new["runs"] if row["state"] == "failed"}
    without_loss = {row["run"] for row in new["runs"] if not row["loss"]}
    replaced = {row["run"] for row in new["runs"]} - (failed & has) - (without_loss & with_loss)
    merged = {}
    for name in COLUMNS:
        kept = [row for row in known[name] if row["run"] not in replaced]
        added = [row for row in new[name] if row["run"] in replaced]
        merged[name] = sorted(kept + added, key=lambda row: row["run"])  # the order within a run stays
    return merged
