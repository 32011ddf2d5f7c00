"""A new position encoding by the protocol of docs/protocol.md: tiny, every learning rate of the pilot, then the
three seeds of the controls at the best one. The result stands beside the committed runs, seed by seed."""

import functools
import hashlib
import re
from pathlib import Path

import click
import numpy as np

from ..common.record import write_atomically
from ..common.tables import TextTable
from . import collect
from .evidence import Evidence, worst_minus_best
from .plan import PLAN, Trial, final_losses, trials
from .statistics import ALPHA, holm, number, of_contrast, paired, with_interval
from .training import train, train_stage

COST = 500  # updates of BERT-A that are trained here too, because seconds of other machines do not compare


def name_of(position: str, arch: str) -> str:
    """The name that the runs of an encoding get."""
    digest = hashlib.sha256(f"{position} {arch}".encode()).hexdigest()[:6]  # `a+b` and `a:b` are spelt alike below
    return f"own_{re.sub(r'[^A-Za-z0-9.]+', '_', position)}_{digest}"


def in_precision(further: tuple, theirs: set[str], folder: Path) -> tuple:
    """The options of every training, with the precision of the controls. Raises ValueError if they name another one."""
    words = " ".join(further).replace("=", " ").split()
    named = [value for name, value in zip(words, words[1:], strict=False) if name in ("--autocast", "model.autocast")]
    valid = [name for name, precision in collect.PRECISIONS.items() if precision in theirs]
    if len(valid) > 1:
        raise ValueError(f"{folder}: the controls were trained in {' and '.join(sorted(theirs))}; valid: one precision")
    if valid and named and named[-1] != valid[0]:
        raise ValueError(f"--autocast {named[-1]}: valid: {valid[0]}, as the controls of {folder} were trained")
    return further if named or not valid else (*further, "--autocast", valid[0])


def run(data: Path, output: Path, position: str, arch: str, jobs: int | None, further: tuple, folder: Path) -> None:
    """Train an encoding by the protocol and write OUTPUT/protocol.md. folder: the tables of the experiment.

    Raises ValueError for tables without controls, or of other data, and if training diverges at every learning rate.
    """
    known = collect.read(folder)
    baselines = [row for row in known["runs"] if row["run"].startswith("controls/") and row["state"] == "finished"]
    if not baselines:
        raise ValueError(
            f"{folder} has no runs of the stage controls to compare with; `python -m reproduction evidence` "
            "trains them, and `python -m reproduction claims --runs DIR` makes tables of them"
        )
    theirs, ours = {row["data"] for row in baselines} - {""}, collect.fingerprint(data)
    if theirs and theirs != {ours}:
        raise ValueError(
            f"{data} (fingerprint {ours}) is not the data of {folder} ({', '.join(theirs)}): losses do not compare; "
            "prepare the same text (docs/data.md), or train pilot and controls on yours with "
            "`python -m reproduction evidence`"
        )
    further = in_precision(further, {row["precision"] for row in baselines} - {""}, folder)
    name = name_of(position, arch)
    stages = {stage: {**PLAN["stages"][stage], "models": [name]} for stage in ("pilot", "controls")}
    plan = {**PLAN, "models": {**PLAN["models"], name: {"arch": arch, "position": position}}, "stages": stages}

    def planned(stage):
        return trials(stage, final_losses(output), plan)

    def train_planned(new):
        train(data, output, new, jobs, further, functools.partial(Trial.job, protocol=plan))

    train_stage(functools.partial(planned, "pilot"), train_planned)
    controls = planned("controls")
    if not controls:
        raise ValueError(f"{position} diverged at every learning rate of the pilot: {output / 'pilot' / name}")
    train_planned([*controls, Trial("cost", "bert_a", "tiny", COST, controls[0].lr, 1)])
    tables = collect.merge(known, collect.collect(output, data))
    text = report(Evidence(tables, name), name, position)
    write_atomically(output / "protocol.md", text)
    click.echo(text)


def report(evidence: Evidence, name: str, position: str) -> str:
    """The encoding beside the models of the controls, as Markdown. name: see `name_of`."""
    finals = evidence.finals("controls")
    models = sorted(finals, key=lambda model: float(np.mean(list(finals[model].values()))))
    models += [name] * (name not in finals)  # it diverged with every seed
    seeds = sorted(trial.seed for trial in evidence.diverged if (trial.stage, trial.model) == ("controls", name))
    contrasts = {model: paired(finals, name, model) for model in models if model != name}
    tested = {model: one.p for model, one in contrasts.items() if one and one.p is not None}
    adjusted = dict(zip(tested, holm([*tested.values()]), strict=True))
    order = evidence.by_seed("controls", evidence.final_measure("order", "accuracy"))
    rates, spread = pilot(evidence)
    has_exits, rows = evidence.threshold("controls") is not None, []
    for model in models:
        exits = [evidence.exit(trial) for trial in evidence.trials("controls") if trial.model == model]
        kind = "ours" if model == name else ""
        one, p = contrasts.get(model), adjusted.get(model)
        preferred = [100 * value for value in order.get(model, {}).values()]
        cells = [
            position if model == name else model, with_interval(finals[model].values()) if model in finals else "",
            of_contrast(one), "" if p is None else f"{p:.2g}", "" if p is None else verdict(one.mean, p),
            ", ".join(f"{update:,.0f}" if update else "never" for update in exits) if has_exits else "",
            with_interval(preferred, 1) if preferred else "", rates.get(model, ""), spread.get(model, ""),
        ]  # fmt: skip
        rows.append((kind, cells))
    header = [
        "model", "final loss, bits", "own minus it", "p (Holm)", "own is", "exit updates", "order preferred, %",
        "best rate", "worst rate - best",
    ]  # fmt: skip
    cost = cost_of(evidence, name)
    lines = [
        f"# {position}, by the protocol of docs/protocol.md (tiny)\n",
        "Means over pre-training seeds with 95 % t-intervals; differences are paired by seed, corrected by Holm.\n",
        TextTable(header, rows, align="lrrrlrrrr").markdown(),
        f"It diverged with seed {', '.join(map(str, seeds))}.\n" if seeds else "",
        f"Time of an update here, over BERT-A's: {cost:.2f}.\n" if cost else "",
    ]
    return "\n".join(line for line in lines if line)


def verdict(mean: float, p: float) -> str:
    """ "better", "worse" or "not resolved"."""
    if p > ALPHA:
        return "not resolved"
    return "better" if mean < 0 else "worse"


def pilot(evidence: Evidence) -> tuple[dict[str, str], dict[str, str]]:
    """({model: best learning rate}, {model: loss at the worst of the planned rates minus that at their best})."""
    losses, rates, spread = evidence.by_rate("pilot"), {}, {}
    for model, by_lr in losses.items():
        rates[model] = f"{min(by_lr, key=by_lr.get):g}"
        spread[model] = number(worst_minus_best(by_lr), 2)
    return rates, spread


def cost_of(evidence: Evidence, name: str) -> float | None:
    """Seconds of an update of a model, over those of the BERT-A that was trained beside it."""
    mine = [trial for trial in evidence.trials("controls") if trial.model == name]
    bert = evidence.trials("cost")
    if not mine or not bert:
        return None

    def per_update(runs):
        return float(np.mean([evidence.seconds(trial)[-1] / evidence.curve(trial)[0][-1] for trial in runs]))

    return per_update(mine) / per_update(bert)
