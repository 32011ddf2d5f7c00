"""BERT-Base's size on one card, in ten minutes: delay and offset of TUPE-A beside those of the small models.

    python -m lab.base pack --data DATA --output base_pack       once, where the text is: about 17 MB
    python -m lab.base run --pack base_pack --output OUT         on the card; again: the runs that did not end
    python -m lab.base table --output OUT                        where the repository's tables are

On the card it needs torch, numpy and this repository, no fairseq. What is fixed before: `bert_a` and `tupe_a` train at
2.5e-4, 5e-4 and 1e-3 with seed 101; each takes the rate of its lowest training loss; then both train with seeds 1 to 3
at a constant rate with a cool-down over the last fifth. A batch is 32 blocks of 128 tokens. The seeds have the largest
of `LENGTHS` that the speed of the runs before allows in the time that is left. Where BERT-A never leaves the plateau,
the delay is at least what is left of the trunk.

Every run is a process; all of a part run at once, since one alone does not fill a card. A run that is cut off starts
over, and the curve that it had is kept until the new one is longer.
"""

import argparse
import json
import lzma
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np

from tupe.common.rates import constant

MODELS = {"bert_a": ("absolute", "tied"), "tupe_a": ("untied", "untied")}
RATES, PILOT_SEED, SEEDS = (2.5e-4, 5e-4, 1e-3), 101, (1, 2, 3)
PILOT, LENGTHS = 1200, (5000, 4000, 3200, 2500)  # updates of a run that chooses rates, of the others
BATCH, LENGTH, HELD_OUT = 32, 128, 3000  # blocks of an update; tokens of a block; held-out blocks of the final loss
BOS, PAD, UNKNOWN = 0, 1, 3  # fairseq's ids; words come after them
EVERY, WARM_UP, COOL_DOWN = 50, 500, 0.2
SPARE = 0.85  # of the time that is left, planned with

# ------------------------------------------------------------------------------------------------------------- the text


def blocks_of(split, count: int, parts: int = 500) -> tuple[np.ndarray, np.ndarray]:
    """(ids of all blocks, sizes of blocks): `count` blocks of whole sentences as training makes them, `<s>` in front,
    from `parts` evenly spaced places of a split. A sentence that does not fit is left out."""
    ids, sizes = [], []
    for part in range(parts):
        wanted, block, size = count * (part + 1) // parts - len(sizes), [], 0
        for sentence in range(len(split) * part // parts, len(split) * (part + 1) // parts):
            if wanted == 0:
                break
            length = int(split.sizes[sentence])
            if length > LENGTH - 1:
                continue
            if size + length > LENGTH - 1:
                ids += [np.array([BOS]), *block]
                sizes.append(size + 1)
                wanted, block, size = wanted - 1, [], 0
            block.append(split[sentence])
            size += length
    if len(sizes) < count:
        raise ValueError(f"the text has {len(sizes):,} blocks, {count:,} are needed")
    return np.concatenate(ids).astype("<u2"), np.array(sizes, "<u2")


def pack(data: Path, output: Path, updates: int) -> None:
    """Write the blocks of the longest run and of the held-out loss, compressed."""
    from tupe.data.splits import Split

    output.mkdir(parents=True, exist_ok=True)
    types = len((data / "dict.txt").read_text(encoding="utf-8").splitlines()) + 5  # <s> <pad> </s> <unk>, <mask>
    for name, count, parts in (("train", updates * BATCH, 500), ("valid", HELD_OUT, 20)):
        ids, sizes = blocks_of(Split(data / name), count, parts)
        for kind, values in (("ids", ids), ("sizes", sizes)):
            (output / f"{name}.{kind}.xz").write_bytes(lzma.compress(values.tobytes(), preset=9))
        print(f"{name}: {len(sizes):,} blocks, {len(ids):,} ids")
    (output / "types").write_text(f"{types}\n")
    print(f"{output}: {sum(path.stat().st_size for path in output.iterdir()) / 1e6:.1f} MB")


class Text:
    """Packed blocks, as rows of one length."""

    def __init__(self, folder: Path):
        self.types = int((folder / "types").read_text())
        self.of = {}
        for name in ("train", "valid"):
            ids, sizes = (
                np.frombuffer(lzma.decompress((folder / f"{name}.{kind}.xz").read_bytes()), "<u2")
                for kind in ("ids", "sizes")
            )
            rows = np.full((len(sizes), LENGTH), PAD, np.int64)
            rows[np.arange(LENGTH) < sizes[:, None]] = ids
            self.of[name] = rows

    def masked(self, rows: np.ndarray, *seed: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids with 15 % of the tokens hidden, 80/10/10; the hidden ones, PAD elsewhere). The last id is `<mask>`.
        `<s>` and `</s>` are hidden, too, as in the runs of the small models: they are part of the loss there."""
        draws = np.random.default_rng(seed)
        chosen = (rows != PAD) & (draws.random(rows.shape) < 0.15)
        kind = draws.random(rows.shape)
        words = draws.integers(UNKNOWN + 1, self.types - 1, rows.shape)
        hidden = np.where(kind < 0.8, self.types - 1, np.where(kind < 0.9, words, rows))
        return np.where(chosen, hidden, rows), np.where(chosen, rows, PAD)

    def batches(self, seed: int, updates: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The same for every model of a seed; no block comes twice."""
        order = np.random.default_rng(seed).permutation(len(self.of["train"]))
        for update in range(updates):
            yield self.masked(self.of["train"][order[update * BATCH : (update + 1) * BATCH]], seed, update)


# ------------------------------------------------------------------------------------------------------------- training


def train(text: Text, model: str, rate: float, seed: int, updates: int, file: Path, layers: int, width: int):
    """One run, whose curve goes to a file line by line."""
    import torch
    import torch.nn.functional as F

    from tupe.common.adamw import AdamW
    from tupe.encoder import Encoder, LMHead

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.set_num_threads(1)
    torch.manual_seed(seed)
    position, cls = MODELS[model]
    encoder = Encoder(
        text.types, PAD, position=position, cls=cls, layers=layers, width=width, heads=max(width // 64, 1),
        ffn=4 * width, max_positions=LENGTH, dropout=0.0, attention_dropout=0.0,
        attention="sdpa" if device == "cuda" else "auto",  # else each process would choose, by times under load
    ).to(device)  # fmt: skip
    head = LMHead(width, text.types).to(device)
    weights = [*encoder.parameters(), *head.parameters()]
    adam = AdamW(weights, lr=rate, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01)

    def loss_of(ids, targets):
        ids, targets = (torch.from_numpy(x).to(device, non_blocking=True) for x in (ids, targets))
        where = targets.flatten().ne(PAD).nonzero().squeeze(1)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            features = encoder(ids, output_indices=where)[0]
            logits = head(features, encoder.tokens.weight)
        return F.cross_entropy(logits.float(), targets.flatten()[where]) / np.log(2)

    total, cooldown = 0.0, round(COOL_DOWN * updates)
    with open(file, "w") as log:
        for update, (ids, targets) in enumerate(text.batches(seed, updates)):
            for group in adam.param_groups:
                group["lr"] = rate * constant(update, WARM_UP, cooldown, updates)
            loss = loss_of(ids, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            adam.step()
            adam.zero_grad(set_to_none=True)
            total = total + loss.detach()
            if (update + 1) % EVERY == 0 or update + 1 == updates:
                count = (update % EVERY) + 1
                mean, total = float(total) / count, 0.0
                if not np.isfinite(mean):  # a run that diverged has no final loss
                    log.write(json.dumps({"final": None}, allow_nan=False) + "\n")
                    return
                line = {"updates": update + 1, "loss": round(mean, 5), "time": time.time()}
                log.write(json.dumps(line, allow_nan=False) + "\n")
                log.flush()
        encoder.eval()
        held_out, losses, counts = text.of["valid"], [], []
        with torch.no_grad():
            for start in range(0, len(held_out), BATCH):
                ids, targets = text.masked(held_out[start : start + BATCH], 0, start)
                losses.append(float(loss_of(ids, targets)))
                counts.append((targets != PAD).sum())
        final = {"final": float(np.average(losses, weights=counts))}
        log.write(json.dumps(final, allow_nan=False) + "\n")


# ----------------------------------------------------------------------------------------------------------- the driver


def file_of(output: Path, model: str, rate: float, seed: int, updates: int) -> Path:
    return output / f"{model}_{updates}_lr{rate:g}_seed{seed}.jsonl"


def lines_of(file: Path) -> list[dict]:
    """Whole lines of a run; the last one has its final loss once it is finished."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def is_finished(file: Path) -> bool:
    return "final" in (lines_of(file) or [{}])[-1]


def curve_of(file: Path) -> list[dict]:
    """The lines of a run, or those that it had before it was cut off, if they are more."""
    return max(lines_of(file), lines_of(file.with_suffix(".cut")), key=len)


def run_all(args: argparse.Namespace, runs: list[tuple[str, float, int]], updates: int) -> None:
    """Every run that is not finished, all at once. Raises RuntimeError for those that fail, once the others have
    ended."""
    processes = {}
    for model, rate, seed in runs:
        file = file_of(args.output, model, rate, seed, updates)
        if is_finished(file):
            continue
        if (before := lines_of(file)) and before == curve_of(file):
            file.replace(file.with_suffix(".cut"))
        words = [model, rate, seed, updates, file, args.layers, args.width]
        command = [sys.executable, "-m", "lab.base", "train", "--pack", args.pack, *words]
        processes[file.name] = subprocess.Popen(list(map(str, command)))
    failed = [name for name, process in processes.items() if process.wait()]
    if failed:
        raise RuntimeError(f"failed: {', '.join(failed)}")


def slots_per_second(curves: list[list[dict]]) -> float:
    """Places for tokens, of all runs together, in a second from the first line of any to the last line of any. So it is
    too low, if anything: some runs begin later, and some end earlier."""
    lines = [[line for line in curve if "time" in line] for curve in curves]
    lines = [curve for curve in lines if curve]  # others diverged at once
    begin, end = min(curve[0]["time"] for curve in lines), max(curve[-1]["time"] for curve in lines)
    return BATCH * LENGTH * sum(curve[-1]["updates"] - curve[0]["updates"] for curve in lines) / (end - begin)


def longest(speed: float, runs: int, seconds: float, lengths: tuple[int, ...] = LENGTHS) -> int:
    """The rule: the most updates of `lengths` for which all runs end in the time that is left; else the fewest."""
    fit = [updates for updates in lengths if runs * updates * BATCH * LENGTH / speed <= SPARE * seconds]
    return max(fit, default=min(lengths))


def best_rate(output: Path, model: str, pilot: int) -> float:
    """The rate of the run of the pilot with the lowest mean training loss over its last 100 updates."""

    def last(rate):
        lines = lines_of(file_of(output, model, rate, PILOT_SEED, pilot))
        return np.inf if lines[-1]["final"] is None else float(np.mean([line["loss"] for line in lines[-3:-1]]))

    return min(RATES, key=last)


def run(args: argparse.Namespace) -> None:
    """Rates, speed, seeds; what was decided is kept in OUT/plan.json, so that a later call goes on with it."""
    begin, plan_file = time.time(), args.output / "plan.json"
    args.output.mkdir(parents=True, exist_ok=True)
    pilots = [(model, rate, PILOT_SEED) for rate, model in product(RATES, MODELS)]
    if plan_file.exists():
        plan = json.loads(plan_file.read_text())
    else:
        files = [file_of(args.output, *pilot, args.pilot) for pilot in pilots]
        if not all(map(is_finished, files)):  # all anew: together they show the speed
            for file in files:
                file.unlink(missing_ok=True)
        run_all(args, pilots, args.pilot)
        speed = slots_per_second([lines_of(file) for file in files])
        rates = {model: best_rate(args.output, model, args.pilot) for model in MODELS}
        left = 60 * args.minutes - (time.time() - begin)
        updates = longest(speed, len(MODELS) * len(SEEDS), left, tuple(args.lengths))
        plan = {"slots_per_second": round(speed), "rates": rates, "updates": updates, "layers": args.layers,
                "width": args.width, "pilot": args.pilot}  # fmt: skip
        plan_file.write_text(json.dumps(plan, indent=1, allow_nan=False) + "\n")
    print(plan_file.read_text(), flush=True)
    run_all(args, [(model, plan["rates"][model], seed) for seed, model in product(SEEDS, MODELS)], plan["updates"])
    print(f"{time.time() - begin:.0f} s")


def table(output: Path) -> str:
    """The rows of docs/evidence/delay.md, constant rate, with those of this size; below, of each run, what there is of
    the gap after the exits and of the final loss. Runs that were cut off count as far as they went."""
    from .delay import AFTER, Curve, constant_table, lead, leads
    from .estimates import first_below
    from .known import Runs
    from .plan import Trial

    if not (output / "plan.json").exists():
        raise SystemExit(f"{output} has no plan.json: its `run` has not chosen the rates yet")
    runs, plan = Runs(), json.loads((output / "plan.json").read_text())
    updates = plan["updates"]
    curves, finals = {}, {}
    for model, seed in product(MODELS, SEEDS):
        lines = curve_of(file_of(output, model, plan["rates"][model], seed, updates))
        kept = [line for line in lines if line.get("updates", updates) <= updates * (1 - COOL_DOWN)]
        if not kept:
            continue
        points, losses = (np.array([line[name] for line in kept]) for name in ("updates", "loss"))
        exit = first_below(points.tolist(), losses.tolist(), runs.threshold)
        trial = Trial("base", model, "base", updates, plan["rates"][model], seed)
        curves[trial], finals[trial] = Curve(points, losses, exit, True), lines[-1].get("final")
    berts = {trial.seed: curve for trial, curve in curves.items() if trial.model == "bert_a"}
    found = [lead(trial, curve, berts.get(trial.seed), (500, *AFTER)) for trial, curve in curves.items()]
    lines = [constant_table([*leads(runs), *found]).markdown()]
    for one in found:
        shown = [f"{n:,} updates after the exits {gap:.2f} bits ahead" for n, gap in one.gaps.items()]
        shown += [f"final loss {loss:.3f}"] if (loss := finals[one.run]) is not None else []
        lines += [f"{one.run}: {', '.join(shown)}"] if shown else []
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lab.base", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("pack", "run", "table", "train"):
        command = commands.add_parser(name)
        if name == "pack":
            command.add_argument("--data", type=Path, required=True)
            command.add_argument("--updates", type=int, default=max(LENGTHS))
        if name in ("run", "train"):
            command.add_argument("--pack", type=Path, required=True)
        if name != "train":
            command.add_argument("--output", type=Path, required=True)
        if name == "run":
            command.add_argument("--minutes", type=float, default=10)
            command.add_argument("--layers", type=int, default=12)  # fewer: a rehearsal
            command.add_argument("--width", type=int, default=768)
            command.add_argument("--pilot", type=int, default=PILOT)
            command.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
        if name == "train":
            for kind, names in ((str, ["model"]), (float, ["rate"]), (int, ["seed", "updates"]), (Path, ["file"]),
                                (int, ["layers", "width"])):  # fmt: skip
                for one in names:
                    command.add_argument(one, type=kind)
    args = parser.parse_args()
    if args.command == "pack":
        pack(args.data, args.output, args.updates)
    elif args.command == "run":
        run(args)
    elif args.command == "table":
        print(table(args.output))
    else:
        options = {name: value for name, value in vars(args).items() if name not in ("command", "pack")}
        train(Text(args.pack), **options)


if __name__ == "__main__":
    main()
