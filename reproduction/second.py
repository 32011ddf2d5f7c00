"""The second protocol (docs/second-protocol.md): what it trains, as second.yaml says, and the page of what came out.

    python -m reproduction run --data DATA --output OUT     train and evaluate what is left; an OUT is resumed
    python -m reproduction page --runs OUT                  add finished runs to docs/evidence/second, write second.md
    python -m reproduction zorro --runs OUT --pairs ZORRO   score kept weights on Zorro's minimal pairs, for the page

Runs, their evaluation and their tables are those of the first protocol (`tupe.experiments`).
"""

import csv
import functools
import gzip
import io
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click
import numpy as np
import yaml

from tupe.common import options, record
from tupe.common.options import ListOf
from tupe.common.tables import TextTable
from tupe.evaluation import minimal_pairs
from tupe.evaluation.loading import load_model
from tupe.experiments import collect, runner
from tupe.experiments.plan import PLAN, Trial, final_losses, lengths_of, trials
from tupe.experiments.statistics import contrast, with_interval
from tupe.experiments.training import train, train_stage
from tupe.positions import load_scheme_file
from tupe.text import TextEncoder

from . import statistics

HERE = Path(__file__).parent
FIRST, TABLES = HERE.parent / "docs/evidence", HERE.parent / "docs/evidence/second"
ZORRO, PAIRS = TABLES / "zorro.csv.gz", 200  # pairs of each paradigm, the first ones
PROTOCOL = yaml.safe_load((HERE / "second.yaml").read_text(encoding="utf-8"))
PROTOCOL["models"] |= PLAN["models"]
for model in PROTOCOL["models"].values():
    if "position-file" in model:
        model["position-file"] = str(HERE / model["position-file"])


def precision(stage: str) -> str:
    """What a stage trains in, as the tables call it."""
    return collect.PRECISIONS[PROTOCOL["stages"][stage].get("autocast", PROTOCOL["autocast"])]


def known(folder: Path) -> dict[tuple[Trial, str], float]:
    """{(trial, precision): final loss} of the finished runs in tables, infinite for one that diverged."""
    losses = {}
    for row in collect.read(folder)["runs"]:
        if row["loss"] or row["reason"].startswith(record.DIVERGENCE):
            losses[Trial.parse(row["run"]), row["precision"]] = float(row["loss"] or "inf")
    return losses


def adopted(losses: dict[tuple[Trial, str], float]) -> dict[Trial, float]:
    """{trial: final loss} of the runs of other stages, of the first protocol or of this one, that count for one."""
    found = {}
    for stage, plan in PROTOCOL["stages"].items():
        for (trial, of), loss in losses.items():
            same = trial.size == plan["size"] and trial.updates in lengths_of(plan) and of == precision(stage)
            same = same and trial.seed in plan["seeds"]
            if same and trial.stage in plan.get("counts", ()):
                found[replace(trial, stage=stage)] = loss
    return found


def known_losses(output: Path | None) -> dict[Trial, float]:
    """{trial: final loss} of all runs that count: of the first protocol, of the tables, and of a folder."""
    mine = {trial: loss for (trial, _), loss in known(TABLES).items()} if TABLES.exists() else {}
    return adopted(known(FIRST) | known(TABLES)) | mine | (final_losses(output) if output else {})


# ----------------------------------------------------------------------------------------------------------- the jobs


def job(trial: Trial, data: Path, output: Path, further: Sequence[str] = ()) -> runner.Job:
    """The command that trains it; of a stage with a cool-down, only that, from what `begin` puts there."""
    made = trial.job(data, output, further, PROTOCOL)
    cooldown = cooldown_of(trial)
    return replace(made, command=(*made.command, *constant(cooldown))) if cooldown else made


def trunk_job(trial: Trial, data: Path, output: Path, further: Sequence[str] = ()) -> runner.Job:
    """The command that trains at a constant rate up to the update at which a trial's cool-down begins."""
    until, folder = trial.updates - cooldown_of(trial), trunk(trial, output)
    made = replace(trial, updates=until).job(data, output, further, PROTOCOL)
    return runner.Job(f"trunk of {made.name}", folder, (*made.command, f"--output={folder}", *constant(0)))


def trunk(trial: Trial, output: Path) -> Path:
    """The folder of the run at a constant rate from whose end a trial branches off."""
    until = trial.updates - cooldown_of(trial)
    return output / "trunks" / f"{trial.model}_{trial.size}_{until}_lr{trial.lr:g}_seed{trial.seed}"


def cooldown_of(trial: Trial) -> int:
    """Updates of its cool-down, 0 if its stage has none."""
    return round(PROTOCOL["stages"][trial.stage].get("cooldown", 0) * trial.updates)


def constant(cooldown: int) -> tuple[str, ...]:
    return "--lr-scheduler=constant_cooldown", f"--cooldown-updates={cooldown}"


def begin(folder: Path, earlier: Path) -> None:
    """Let a run that has not begun continue another one's last checkpoint."""
    if not (folder / record.NAME).exists():
        folder.mkdir(parents=True, exist_ok=True)
        record.write_atomically(folder / "checkpoint_last.pt", (earlier / "checkpoint_last.pt").read_bytes())


def train_length(data: Path, output: Path, planned: list[Trial], jobs: int | None, further: Sequence[str]) -> None:
    """Train what is left of one stage and length; where there is a cool-down, first the trunks, each from the one of
    the next shorter length."""
    branches = [trial for trial in planned if cooldown_of(trial)]
    for trial in branches:
        shorter = [updates for updates in lengths_of(PROTOCOL["stages"][trial.stage]) if updates < trial.updates]
        if shorter:
            begin(trunk(trial, output), trunk(replace(trial, updates=max(shorter)), output))
    trunks = [trunk_job(trial, data, output, further) for trial in branches]
    if trunks:
        runner.exit_if_unfinished(runner.run(trunks, runner.slots(jobs), title="trunks"), "trunks")
    for trial in branches:
        begin(trial.folder(output), trunk(trial, output))
    train(data, output, planned, jobs, further, job)


# ------------------------------------------------------------------------------------------------------------- the page


def tables_of_losses(losses: dict[Trial, float]) -> list[str]:
    """A section for each stage that has runs: final losses by model and rate, a column for each seed."""
    lines = []
    for stage, plan in PROTOCOL["stages"].items():
        rows, planned = defaultdict(dict), trials(stage, losses, PROTOCOL)
        for trial in planned:
            if trial in losses:
                rows[trial.model, f"{trial.lr:g}", f"{trial.updates:,}"][trial.seed] = f"{losses[trial]:.3f}"
        done = sum(trial in losses for trial in planned)
        lines.append(f"## {stage}: {plan['size']}, {precision(stage)}\n")
        lines.append(f"{done} of {len(planned)} runs.\n")
        if rows:
            header = ["model", "rate", "updates", *(f"seed {seed}" for seed in plan["seeds"])]
            cells = [("", [*key, *(row.get(seed, "–") for seed in plan["seeds"])]) for key, row in rows.items()]
            lines.append(TextTable(header, cells, align="lrr" + "r" * len(plan["seeds"])).markdown())
    return lines


def by_seed(losses: dict[Trial, float], stage: str, model: str) -> dict[int, float]:
    return {trial.seed: loss for trial, loss in losses.items() if (trial.stage, trial.model) == (stage, model)}


def again(losses: dict[Trial, float]) -> list[str]:
    """Stage A, once all of it has run: what the controls of `tupe_a_tie_cls` are with all seeds."""
    stages = ("again", "again_bf16", "neighbours")
    if not all(trial in losses for stage in stages for trial in trials(stage, losses, PROTOCOL)):
        return []
    first = {trial: loss for (trial, of), loss in known(FIRST).items() if trial.stage == "controls" and of == "float32"}
    seeds = {
        model: by_seed(first, "controls", model) | by_seed(losses, stage, model)
        for stage in ("again", "neighbours")
        for model in PROTOCOL["stages"][stage]["rates"]
    }
    mine, rows = seeds["tupe_a_tie_cls"], []
    for model, theirs in seeds.items():
        if model != "tupe_a_tie_cls":
            mean, low, high, p = statistics.welch(theirs.values(), mine.values())
            verdict = "not resolved" if low <= 0 <= high else "lower" if mean < 0 else "higher"
            rows.append(("", [f"`{model}` - `tupe_a_tie_cls`", f"{len(theirs)}, {len(mine)}",
                              f"{mean:.3f} [{low:.3f}, {high:.3f}]", f"{p:.2g}", verdict]))  # fmt: skip
    header = ["difference, all seeds in float32", "seeds", "mean [95 % interval], Welch", "p", "result"]
    lines = ["## A: are three equal seeds luck?\n", TextTable(header, rows, align="lrrrl").markdown()]
    one = contrast(by_seed(losses, "again_bf16", "tupe_a_tie_cls"), by_seed(first, "controls", "tupe_a_tie_cls"))
    seen, (low, high) = ", ".join(f"{value:.3f}" for value in one.differences.values()), one.interval
    lines.append(f"`tupe_a_tie_cls` in bfloat16 minus float32: {seen}; mean {one.mean:.3f} [{low:.3f}, {high:.3f}].\n")
    return lines


def zorro_scores() -> dict[str, dict[str, float]]:
    """{run, or folder of a released model: {paradigm: accuracy}}, as committed."""
    scores = defaultdict(dict)
    if ZORRO.exists():
        for row in csv.DictReader(io.StringIO(gzip.decompress(ZORRO.read_bytes()).decode())):
            scores[row["run"]][row["paradigm"]] = float(row["accuracy"])
    return dict(scores)


def zorro_table() -> list[str]:
    """Macro averages over Zorro's paradigms, a row for each model, size, stage and rate."""
    groups = defaultdict(list)
    for name, by_paradigm in sorted(zorro_scores().items()):
        groups[name.rpartition("_seed")[0] or name].append(100 * np.mean(list(by_paradigm.values())))
    rows = [
        ("", [f"`{name}`", str(len(values)), ", ".join(f"{value:.1f}" for value in values), with_interval(values, 1)])
        for name, values in groups.items()
    ]
    text = f"Per cent right of the first {PAIRS} pairs of each paradigm (`phueb/Zorro`), macro average; chance is 50.\n"
    header = ["weights", "seeds", "accuracy", "mean [95 % interval]"]
    return ["## Zorro\n", text, TextTable(header, rows, align="lrrr").markdown()] if rows else []


def page() -> str:
    """docs/evidence/second.md, only from the committed tables."""
    losses = known_losses(None)
    lines = [
        "# The second protocol: runs\n",
        "Final losses, bits per masked token, written by `python -m reproduction page` from the tables in `second/`;\n"
        "[the protocol](../second-protocol.md) says what they decide.\n",
        *again(losses),
        *tables_of_losses(losses),
        *zorro_table(),
    ]
    return "\n".join(lines)


# --------------------------------------------------------------------------------------------------------- the commands


@click.command(cls=options.QuietCommand, context_settings={"ignore_unknown_options": True})
@options.data("The prepared text; docs/protocol.md says how the protocol's is made.")
@options.output("The folder of the runs. An existing one is resumed.")
@click.option("--stages", type=ListOf(list(PROTOCOL["stages"])), help="Run only these stages.")
@click.option("--models", type=ListOf(list(PROTOCOL["models"])), help="Run only these models.")
@click.option("--seeds", type=ListOf(int), help="Run only these seeds.")
@options.jobs()
@click.option("--dry-run", is_flag=True, help="Print the commands, and run none.")
@click.argument("further", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS OF EVERY TRAINING]...")
def run(data, output, stages, models, seeds, jobs, dry_run, further):
    """Train and evaluate what is left, stage by stage."""
    data, output = data.resolve(), output.resolve()
    for model in PROTOCOL["models"].values():
        if "position-file" in model:
            load_scheme_file(model["position-file"])  # for the evaluation

    def planned(stage):
        losses = known_losses(output)
        return [trial for trial in trials(stage, losses, PROTOCOL, models, seeds) if trial not in losses]

    def train_lengths(new):
        for updates in sorted({trial.updates for trial in new}):
            train_length(data, output, [trial for trial in new if trial.updates == updates], jobs, further)

    for stage in stages or PROTOCOL["stages"]:
        if dry_run:
            for trial in planned(stage):
                click.echo(" ".join(map(str, job(trial, data, output, further).command)))
        else:
            train_stage(functools.partial(planned, stage), train_lengths)


@click.command("page", cls=options.QuietCommand)
@click.option("--runs", type=options.FOLDER, help="The folder of `run`, whose finished runs are added.")
@click.option("--data", type=options.FOLDER, help="The folder of data (default: what the weights of a run name).")
def write_page(runs, data):
    """Add finished runs to the tables, then write docs/evidence/second.md from them."""
    if runs:
        tables = collect.read(TABLES)
        collect.write(collect.merge(tables, collect.collect(runs, data)), TABLES)
    record.write_atomically(FIRST / "second.md", page())


@click.command("zorro", cls=options.QuietCommand)
@click.option(
    "--runs", type=options.FOLDER, required=True, help="The folder of `run`. Released models are scored, too."
)
@options.data("The folder of dict.txt and the pieces.")
@click.option(
    "--pairs", type=options.FOLDER, required=True, help="The folder sentences/babyberta of the repository phueb/Zorro."
)
def score_zorro(runs, data, pairs):
    """Score kept weights on Zorro's minimal pairs; then write the page."""
    weights = {str(trial): trial.folder(runs) / "model.pt" for trial in final_losses(runs)}
    weights |= {f"models/{path.name}": path for path in sorted((HERE.parent / "models").iterdir())}
    paradigms, encoder, scores = minimal_pairs.read_paradigms(pairs, PAIRS), TextEncoder(data), zorro_scores()
    for name, path in weights.items():
        if path.exists():
            click.echo(name)
            results = minimal_pairs.evaluate(load_model(path, data)[0], encoder, paradigms, runs / "zorro" / name)
            credits = minimal_pairs.accuracies(results)
            scores[name] = {paradigm: float(credit.mean()) for paradigm, credit in credits.items()}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    rows = [(name, paradigm, f"{value:.4f}") for name in scores for paradigm, value in scores[name].items()]
    writer.writerows([("run", "paradigm", "accuracy"), *sorted(rows)])
    record.write_atomically(ZORRO, gzip.compress(text.getvalue().encode(), mtime=0))
    record.write_atomically(FIRST / "second.md", page())
