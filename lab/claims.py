"""What the runs of the first protocol say of TUPE's claims: the numbers of its pages, from the tables in docs/evidence
only. docs/protocol.md says how each is computed."""

import functools
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml

from tupe.evaluation.minimal_pairs import MINIMUM
from tupe.experiments.statistics import ALPHA, FEWEST, Contrast, Seeds, contrast, first_below, holm, paired

from .estimates import pooled, share_of_schedule, welch
from .evidence import Evidence
from .plan import PLAN, Trial

CLAIMS = yaml.safe_load(Path(__file__).with_name("claims.yaml").read_text(encoding="utf-8"))
COMPARED = {model for entry in CLAIMS["contrasts"] for model in entry["models"]}
CREDITS = {"0": 0.0, "h": 0.5, "1": 1.0}  # of a pair, by its letter in the table
PAIRED, WELCH, POOLED = "paired t, the protocol's", "Welch", "pooled variance"
OTHER_SAMPLE = "paired t, other held-out sample"

# ------------------------------------------------------------------------------------------------------- the contrasts


@dataclass(frozen=True)
class Judged:
    """A contrast of claims.yaml with what came out."""

    a: str
    b: str
    claim: str
    contrast: Contrast
    p: float | None  # corrected by Holm for all contrasts
    verdict: str


def judged(evidence: Evidence, stage: str) -> list[Judged]:
    """The contrasts of which a stage has both models. They are "confirmed" or "refuted" in the main stage only.
    Elsewhere they are "lower" or "higher", if Welch's test and the other held-out sample agree."""
    finals, tests, results = evidence.finals(stage), corrected(evidence, stage), []
    words, needed = ("lower", "higher"), [PAIRED, WELCH, OTHER_SAMPLE]
    if stage == "main":
        words, needed = ("confirmed", "refuted"), [PAIRED]
    for number, entry in enumerate(CLAIMS["contrasts"]):
        one, ps = paired(finals, *entry["models"]), [tests[name][number] for name in needed]
        if one is None:
            continue
        verdict = "too few seeds" if None in ps else "not resolved" if max(ps) > ALPHA else words[one.mean > 0]
        results.append(Judged(*entry["models"], entry["claim"], one, ps[0], verdict))
    return results


def corrected(evidence: Evidence, stage: str) -> dict[str, list[float | None]]:
    """{test: p-value of each contrast of claims.yaml}, corrected by Holm for all of them. None for fewer than `FEWEST`
    seeds of a model, which counts as 1."""
    finals, other = evidence.finals(stage), evidence.by_seed(stage, functools.partial(validation_loss, evidence))
    models = [finals[model] for model in sorted(COMPARED) if model in finals]

    def of(test, losses):
        ps = []
        for entry in CLAIMS["contrasts"]:
            a, b = (losses.get(model, {}) for model in entry["models"])
            ps.append(test(a, b) if min(len(a), len(b)) >= FEWEST else None)
        return holm(ps)

    return {
        PAIRED: of(lambda a, b: contrast(a, b).p, finals),
        WELCH: of(lambda a, b: welch(a.values(), b.values())[-1], finals),
        POOLED: of(functools.partial(pooled, groups=models), finals),
        OTHER_SAMPLE: of(lambda a, b: contrast(a, b).p, other),
    }


def validation_loss(evidence: Evidence, trial: Trial) -> float | None:
    """The final loss on the other held-out sample, which training uses."""
    text = evidence.runs[trial].get("validation_loss")
    return float(text) if text else None


# ------------------------------------------------------------------------------------------------------- minimal pairs


def credits(evidence: Evidence, trial: Trial, updates: int, only_order: bool) -> dict[str, np.ndarray]:
    """{paradigm: credit of each pair}; only_order: as `minimal_pairs.accuracies`. {} unless all paradigms have been
    scored."""
    flags = {row["paradigm"]: row for row in evidence.tables["paradigms"]}
    rows = [row for row in evidence.rows["pairs"][str(trial)] if int(row["updates"]) == updates]
    of_paradigm = {}
    for row in rows if {row["paradigm"] for row in rows} >= flags.keys() else ():
        values = np.array([CREDITS[letter] for letter in row["word"]])
        if only_order:
            same = flags[row["paradigm"]]
            pairs = zip(same["same_words"], same["same_pieces"], strict=True)
            values = values[np.array([words == "1" and pieces == "0" for words, pieces in pairs][: len(values)])]
        if len(values) >= (MINIMUM if only_order else 1):
            of_paradigm[row["paradigm"]] = values
    return of_paradigm


def pairs_accuracy(evidence: Evidence, trial: Trial, updates: int, only_order: bool) -> float | None:
    """Macro average over paradigms; None unless all have been scored."""
    of_paradigm = credits(evidence, trial, updates, only_order)
    return float(np.mean([values.mean() for values in of_paradigm.values()])) if of_paradigm else None


# ------------------------------------------------------------------------------------------------ the share of updates


def paper_shares(evidence: Evidence, stage: str, model: str, without_plateau: bool = False) -> Seeds:
    """{seed: share of BERT-A's updates after which the validation loss of `model` is BERT-A's final one}, which every
    run of the experiment reaches. without_plateau: the exit updates of both models are taken off."""
    trials = {(trial.model, trial.seed): trial for trial in evidence.trials(stage)}
    shares = {}
    for (name, seed), trial in trials.items():
        bert = trials.get(("bert_a", seed))
        if name != model or bert is None:
            continue
        target = evidence.curve(bert, "validation")[1][-1]
        after, of = first_below(*evidence.curve(trial, "validation"), target), bert.updates
        if without_plateau:
            after, of = after - evidence.exit(trial), of - evidence.exit(bert)
        shares[seed] = after / of
    return shares


def schedule_shares(evidence: Evidence, model: str) -> Seeds:
    """{seed: share of the updates with which `model`, trained with full decay, ends at BERT-A's final loss}, at tiny
    size: the shortest share if that is enough. Only seeds with all lengths."""
    trials, shares = evidence.trials("share"), {}
    bert = {trial.seed: trial for trial in trials if trial.model == "bert_a"}
    for seed, trial in bert.items():
        finals = {t.updates / trial.updates: evidence.loss(t) for t in trials if (t.model, t.seed) == (model, seed)}
        if set(finals) >= {updates / trial.updates for updates in (*PLAN["stages"]["share"]["updates"], trial.updates)}:
            shares[seed] = share_of_schedule(finals, evidence.loss(trial))
    return shares


# ----------------------------------------------------------------------------------- losses after the exit, and in time


def after_exit(evidence: Evidence, stage: str) -> tuple[dict[str, Seeds], int]:
    """({model: {seed: training loss n updates after its exit}}, n), n being the largest multiple of 50 that all runs of
    the stage which left the plateau have."""
    exits = {trial: evidence.exit(trial) for trial in evidence.trials(stage)}
    exits = {trial: update for trial, update in exits.items() if update is not None}
    n = int(min((trial.updates - update for trial, update in exits.items()), default=0) // 50 * 50)
    table = defaultdict(dict)
    for trial, update in exits.items():
        table[trial.model][trial.seed] = float(np.interp(update + n, *evidence.curve(trial)))
    return dict(table), n


def equal_time(evidence: Evidence, stage: str) -> dict[str, Seeds]:
    """{model: {seed: training loss when a run of the quickest model ended}}: by the seconds per update that are the
    median of the model's runs, since a machine is not equally loaded at all times."""
    trials, per_update = evidence.trials(stage), defaultdict(list)
    for trial in trials:
        per_update[trial.model].append(evidence.seconds(trial)[-1] / evidence.curve(trial)[0][-1])
    pace = {model: float(np.median(values)) for model, values in per_update.items()}
    budget = min(pace.values()) * max(trial.updates for trial in trials)
    table = defaultdict(dict)
    for trial in trials:
        table[trial.model][trial.seed] = float(np.interp(budget / pace[trial.model], *evidence.curve(trial)))
    return dict(table)


def late(evidence: Evidence, stage: str) -> list[str]:
    """Models of a stage (all but `nopos`) with a run that had not left the plateau by half of its updates."""
    runs = [trial for trial in evidence.trials(stage) if trial.model != "nopos"]
    exits = [(trial, evidence.exit(trial)) for trial in runs]
    return sorted({trial.model for trial, update in exits if update is None or update > trial.updates / 2})
