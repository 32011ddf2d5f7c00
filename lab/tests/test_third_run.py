"""The third protocol's runs: trunks at a constant rate, branches with a cool-down, and what is written of them."""

import csv
import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from evidence_runs import write_run
from helpers import write_data
from scipy import stats

from lab import collect, delay, third, third_run
from lab.estimates import first_below, with_interval
from lab.known import FIRST, TABLES, Runs
from lab.plan import HERE, LATER, THIRD, Trial, final_losses, trials
from tupe.evaluate.loading import load_model
from tupe.run import record


def test_commands_are_of_the_protocol(tmp_path):
    job = Trial("delay", "bert_a_trained", "mini", 5000, 1e-3, 1).job(tmp_path, tmp_path, (), LATER)
    words = " ".join(map(str, job.command))
    assert "--position=trained" in words and "--precision=autocast" in words
    assert f"--position-file={HERE / 'intervention.py'}" in words
    again = Trial("again", "tupe_a_tie_cls", "tiny", 5000, 4e-3, 4).job(tmp_path, tmp_path, (), LATER)
    assert "--precision=float32" in again.command
    third_seed = Trial("delay", "bert_a", "mini", 5000, 1e-3, 3).job(tmp_path, tmp_path, (), LATER)
    assert "--precision=float32" in third_seed.command
    assert third.precisions("delay") == "bfloat16 autocast (seeds 1, 2), float32 (seed 3)"
    assert third.precisions("drift") == "bfloat16 autocast"
    assert third.precisions("tiny_same_rate") == "float32"


def test_branches_continue_trunks_of_a_constant_rate(tmp_path):
    branch = Trial("lasting", "tupe_a", "mini", 8000, 1e-3, 1)
    words = third_run.job(branch, tmp_path, tmp_path).command
    assert {"--max-update=8000", "--lr-scheduler=constant_cooldown", "--cooldown-updates=1600"} <= set(words)
    trunk = third_run.trunk_job(branch, tmp_path, tmp_path)
    assert {"--max-update=6400", "--cooldown-updates=0", f"--output={trunk.folder}"} <= set(trunk.command)
    assert trunk.command.index(f"--output={trunk.folder}") > trunk.command.index(
        "--max-update=6400"
    )  # the last one counts


def test_a_run_begins_with_the_earlier_checkpoint_once(tmp_path):
    earlier, later = tmp_path / "earlier", tmp_path / "later"
    earlier.mkdir()
    (earlier / "checkpoint_last.pt").write_bytes(b"3200")
    third_run.begin(later, earlier)
    assert (later / "checkpoint_last.pt").read_bytes() == b"3200"
    (later / "checkpoint_last.pt").write_bytes(b"3300")
    (later / "record.json").write_text("{}")
    third_run.begin(later, earlier)
    assert (later / "checkpoint_last.pt").read_bytes() == b"3300"


def test_the_curve_of_a_branch_begins_with_its_trunks(tmp_path):
    branch = Trial("tiny_lasting", "tupe_a", "tiny", 8000, 4e-3, 4)
    write_run(tmp_path, branch, 5.0)
    for updates in (4000, 8000):
        folder = third_run.trunk(replace(branch, updates=updates), tmp_path)
        folder.mkdir(parents=True)
        (folder / "checkpoint_last.pt").touch()
        first = 50 if updates == 4000 else 3250
        logged = [
            {"num_updates": str(n), "loss": "9", "train_wall": "7"} for n in range(first, updates * 4 // 5 + 1, 50)
        ]
        (folder / "train.log").write_text("".join(f"| train_inner | {json.dumps(row)}\n" for row in logged))
    found = collect.collect(tmp_path)
    found["training"] = [row for row in found["training"] if int(row["updates"]) > 6400]
    rows = third_run.whole_curve(branch, found, tmp_path)
    assert [int(row["updates"]) for row in rows] == list(range(50, 8001, 50))
    assert {row["loss"] for row in rows[:128]} == {"9"} and "9" not in {row["loss"] for row in rows[128:]}
    for folder in (tmp_path / "trunks").iterdir():
        (folder / "train.log").unlink()
    with pytest.raises(ValueError, match="do not make one whole curve"):
        third_run.whole_curve(branch, found, tmp_path)


def test_a_trunk_that_diverged_takes_its_branch_along_and_no_other(tmp_path, monkeypatch):
    planned = [Trial("tiny_lasting", "tupe_a", "tiny", 4000, 4e-3, seed) for seed in (4, 5, 6)]
    reasons = {5: (f"{record.DIVERGENCE}: nan", record.DIVERGED), 6: ("out of memory", 1)}
    trained = []

    def run(jobs, slots, title):
        of = dict(zip(jobs, planned, strict=True))
        for job, trial in of.items():
            assert record.state_of(job.folder) != "failed" or trial.seed == 5  # what failed otherwise is tried again
            job.folder.mkdir(parents=True, exist_ok=True)
            (job.folder / "checkpoint_last.pt").touch()
            if trial.seed in reasons:
                record.note_failure(job.folder, *reasons[trial.seed])
        return {job: "failed" if trial.seed in reasons else "finished" for job, trial in of.items()}

    monkeypatch.setattr(third_run.runner, "run", run)
    monkeypatch.setattr(third_run, "check_data", lambda *_: None)
    monkeypatch.setattr(third_run, "train", lambda data, output, left, *rest: trained.append(left))
    for _ in range(2):
        with pytest.raises(SystemExit, match="trunks: 1 of 2 jobs did not finish: .*seed 6"):
            third_run.train_length(tmp_path, tmp_path, planned, 1, ())
        assert trained.pop() == planned[:2]
        assert final_losses(tmp_path) == {planned[1]: math.inf}


def test_a_branch_waits_for_a_trunk_that_was_stopped(tmp_path, monkeypatch):
    planned, trained = [Trial("tiny_lasting", "tupe_a", "tiny", 4000, 4e-3, seed) for seed in (4, 5)], []
    monkeypatch.setattr(third_run.runner, "run", lambda jobs, slots, title: dict.fromkeys(jobs, "open"))
    monkeypatch.setattr(third_run, "check_data", lambda *_: None)
    monkeypatch.setattr(third_run, "train", lambda data, output, left, *rest: trained.append(left))
    with pytest.raises(SystemExit, match="trunks: 2 of 2 jobs did not finish"):
        third_run.train_length(tmp_path, tmp_path, planned, 1, ())
    assert trained == [[]]


def test_data_that_are_too_small_are_refused_before_the_trunks(tmp_path, monkeypatch):
    monkeypatch.setattr(third_run.runner, "run", None)
    planned = [Trial("tiny_lasting", "tupe_a", "tiny", 4000, 4e-3, 4)]
    with pytest.raises(ValueError, match="holds .* tokens, fewer than the 400,000 of the evaluation"):
        third_run.train_length(write_data(tmp_path / "data"), tmp_path / "out", planned, 1, ())


def test_a_trunk_that_is_lost_begins_anew(tmp_path):
    branch = Trial("tiny_lasting", "tupe_a", "tiny", 8000, 4e-3, 4)
    mine = third_run.trunk(branch, tmp_path)
    assert third_run.trunks_of(branch, tmp_path) == [mine]
    earlier = third_run.trunk(replace(branch, updates=4000), tmp_path)
    earlier.mkdir(parents=True)
    (earlier / "checkpoint_last.pt").touch()
    assert third_run.trunks_of(branch, tmp_path) == [earlier, mine]


def test_a_model_that_no_stage_has_is_refused(tmp_path):
    words = ["--data", tmp_path, "--output", tmp_path / "out", "--stages", "drift", "--models", "both"]
    result = CliRunner().invoke(third_run.run, list(map(str, words)))
    assert result.exit_code and "no stage of drift has a model 'both'" in result.output


def test_an_evaluation_has_the_loss_of_each_document(pretrained, vocabulary, monkeypatch):
    monkeypatch.setattr(third_run, "SENTENCES", 10)
    content = third_run.evaluation(*load_model(pretrained, vocabulary), vocabulary)
    nats, tokens = (np.array([*content["further"][f"{name} by document"].values()]) for name in ("nats", "tokens"))
    assert tokens.sum() == content["loss"]["tokens"]
    assert nats.sum() / tokens.sum() == pytest.approx(content["loss"]["mean"], abs=1e-3)
    sizes = np.array([5, 4, 1, 3, 1, 1, 2])  # three documents, the third of which is empty, and the begin of a fourth
    assert third_run.documents_at(sizes, np.array([0, 5, 9, 10, 13, 14, 15])).tolist() == [0, 0, 0, 1, 1, 2, 3]


def known():
    """The committed tables without the third protocol's runs, some of which are made up below."""
    tables = collect.read(TABLES)
    return {name: [row for row in rows if Trial.parse(row["run"]).stage not in THIRD] for name, rows in tables.items()}


def row_of(lines, *cells):
    """The cells of the one row of a table that begins so."""
    (line,) = (line for line in lines.splitlines() if line.startswith(f"| {' | '.join(cells)} |"))
    return line.strip("| ").split(" | ")


def test_sections_are_written_once_all_runs_of_a_stage_have_ended(tmp_path):
    """(b) and (c), beside the committed runs of the second protocol."""
    ends = {"bert_a": 5.5, "tupe_a": 5.0, "tupe_r": 3.0}  # the lead of TUPE-R grows in the fresh seeds alone
    for stage in ("drift", "tiny_same_rate"):
        planned = trials(stage, {}, LATER)
        for trial in planned:
            bits = ends[trial.model] + 0.01 * trial.seed**2
            write_run(tmp_path / "out", trial, bits, exit=1800 if trial.model == "bert_a" else 400, plateau=8.25)
        collect.write(collect.merge(known(), collect.collect(tmp_path / "out")), tmp_path / "tables")
        runs = Runs(tmp_path / "tables")
        lines = "\n".join(third.outcomes(runs, delay.leads(runs)))
        assert ("### (b) The drift" in lines) and ("### (c) Tiny" in lines) == (stage == "tiny_same_rate")
        assert f"{len(planned)} of {len(planned)} runs." in lines and "### (a)" not in lines
    row_of(lines, "`bert_a` - `tupe_a`")
    by_model = {}
    for model in ("tupe_a", "tupe_r"):
        slopes = [one.drift for one in delay.leads() if (one.run.stage, one.run.model) == ("lasting", model)]
        for seed in (4, 5):  # straight lines from the plateau to the end at 8,000, whose gap has this slope
            end = {name: bits + 0.01 * seed**2 for name, bits in ends.items()}
            slopes.append(1000 * ((8.25 - end[model]) / 7600 - (8.25 - end["bert_a"]) / 6200))
        by_model[model] = slopes
    ps = {model: stats.ttest_1samp(slopes, 0).pvalue for model, slopes in by_model.items()}
    adjusted = {model: min(1, p if p == max(ps.values()) else 2 * p) for model, p in ps.items()}
    for model, slopes in by_model.items():
        _, shown, mean, p, verdict, gaps = row_of(lines, f"`{model}`")
        assert [float(part) for part in shown.split(", ")] == pytest.approx(slopes, abs=2e-3)
        low, high = stats.t.interval(0.95, 4, np.mean(slopes), stats.sem(slopes))
        numbers = [float(part.strip("[],")) for part in mean.split()]
        assert numbers == pytest.approx([np.mean(slopes), low, high], abs=2e-3)
        assert float(p) == pytest.approx(max(adjusted[model], min(adjusted.values())), rel=0.1)
        assert verdict.startswith("the offset stays, up to 4,400" if model == "tupe_a" else "not resolved")
        assert "–" not in gaps and len(gaps.split(", ")) == 5


def test_the_known_seeds_drift_as_the_protocol_says():
    page = " ".join((FIRST.parent / "third-protocol.md").read_text(encoding="utf-8").split())
    for model in ("tupe_a", "tupe_r"):
        drifts = [one.drift for one in delay.leads() if (one.run.stage, one.run.model) == ("lasting", model)]
        assert f"{with_interval(drifts)} for {model.upper().replace('_', '-')}" in page


def test_the_protocol_says_what_came_out_of_the_drift():
    page = " ".join((FIRST.parent / "third-protocol.md").read_text(encoding="utf-8").split())
    leads, gaps = [one for one in delay.leads() if one.run.stage in ("lasting", "drift")], {}
    for model in ("tupe_a", "tupe_r"):
        ones = [one for one in leads if one.run.model == model]
        assert [one.run.seed for one in ones] == [1, 2, 3, 4, 5]
        name = model.upper().replace("_", "-")
        assert f"{with_interval([one.drift for one in ones])} for {name}" in page
        gaps[model] = [one.gaps[delay.DRIFT[-1]] for one in ones[3:]]
    said = "{:.3f} and {:.3f} (TUPE-A, seeds 4 and 5), {:.3f} and {:.3f} (TUPE-R)."
    assert said.format(*gaps["tupe_a"], *gaps["tupe_r"]) in page
    first = min((one for one in leads if one.drift is not None), key=lambda one: one.drift)
    assert (first.run.model, first.run.seed) == ("tupe_a", 4)
    assert f"{first.gaps[2000]:.3f} bits ahead at 2,000, and so has the largest drift, {first.drift:.3f}." in page


def of_intervention(tmp_path, diverges=None):
    """(a)'s section after runs whose final losses differ by model and seed; one of them may diverge."""
    for trial in trials("delay", {}, LATER):
        bits = 5.0 + 0.01 * trial.seed**2
        if trial.model != "bert_a":
            bits -= 0.02 * trial.seed + (0.25 if trial.model.startswith("tupe") else 0.5)
        exit = 900 if trial.model == "bert_a_trained" else 2000
        state = "failed" if (trial.model, trial.seed) == diverges else "finished"
        write_run(tmp_path / "out", trial, bits, exit=exit, plateau=9, state=state)
    planned = trials("delay", {}, LATER)
    assert len(planned) == 9
    tables = collect.merge(known(), collect.collect(tmp_path / "out"))
    for trial, part in itertools.product(planned, range(20)):  # by document
        nats = 3.5 - 0.17 * trial.model.startswith("tupe") + 0.01 * part
        for name, value in (("nats", 100 * nats), ("tokens", 100)):
            row = {"run": str(trial), "measure": f"{name} by document", "part": str(part), "value": str(value)}
            tables["measures"].append(row)
    collect.write(tables, tmp_path / "tables")
    runs = Runs(tmp_path / "tables")
    return "\n".join(third.intervention(runs, delay.leads(runs))), runs.threshold


def test_the_intervention_is_read_once_all_nine_runs_have_ended(tmp_path):
    """A delayed model that leaves as late as BERT-A and ends a quarter bit below it."""
    lines, threshold = of_intervention(tmp_path)
    differences = [-0.27, -0.29, -0.31]
    low, high = stats.t.interval(0.95, 2, np.mean(differences), stats.sem(differences))
    _, by_seed, mean, drawn, after, exits, verdict = row_of(lines, "`tupe_a_from_1850` - `bert_a`")
    assert [float(value) for value in by_seed.split(", ")] == pytest.approx(differences)
    assert mean == f"-0.290 [{low:.3f}, {high:.3f}]" and verdict == "an offset that is no delay"
    assert drawn == f"[{-0.17 / math.log(2):.3f}, {-0.17 / math.log(2):.3f}]"  # the same in every document

    def line(end, begin):  # of the curve: (where it is at the threshold, its mean 2,000 updates later)
        slope = (9 - end) / (5000 - begin)
        exit = begin + (9 - threshold) / slope
        return exit, threshold - slope * (2000 - 225)  # ten points, 50 apart

    both = [(line(5 + 0.01 * s**2, 2000), line(5 + 0.01 * s**2 + d, 2000)) for s, d in enumerate(differences, 1)]
    assert exits == ", ".join(f"{model[0]:,.0f}" for _, model in both)
    assert row_of(lines, "`bert_a`")[-2] == ", ".join(f"{bert[0]:,.0f}" for bert, _ in both)
    assert [float(x) for x in after.split(", ")] == pytest.approx([m[1] - b[1] for b, m in both], abs=3e-3)
    row_of(lines, "`bert_a_trained` - `bert_a`")


def test_there_is_no_verdict_without_a_seed(tmp_path):
    lines, _ = of_intervention(tmp_path, diverges=("tupe_a_from_1850", 2))
    row = row_of(lines, "`tupe_a_from_1850` - `bert_a`")
    assert row[1] == "-0.270, –, -0.310" and row[-1] == "not resolved: no value of seed 2"
    assert row[4].split(", ")[1] == row[5].split(", ")[1] == "–"


def test_fine_tunings_are_compared_once_all_have_ended(tmp_path):
    """Medians over five seeds, one of which is an outlier; TUPE-R gains 3, TUPE-A 1, 2 and 3 points."""
    gains = {"bert_a": (0, 0, 0), "tupe_a": (1, 2, 3), "tupe_r": (3, 3, 3)}
    new = [
        third.Score(Trial("delay" if model == "bert_a" else "downstream", model, "mini", 5000, 1e-3, seed), task, 2e-4,
                    run, 60.0 + seed + gain + (-50 if run == 1 else 0), 50.0)
        for model, by_seed in gains.items() for seed, gain in enumerate(by_seed, 1)
        for task in third.TASKS for run in range(1, 6)
    ]  # fmt: skip
    other = [new[-1]._replace(**change) for change in
             ({"rate": 1e-4}, {"seed": 6}, {"trial": replace(new[-1].trial, stage="delay")})]  # fmt: skip
    third.add_scores([*new[:-1], *other], tmp_path)
    assert third.downstream(third.scores(tmp_path)) == ["### (d) Downstream\n", "179 of 180 fine-tunings.\n"]
    third.add_scores(new[-2:], tmp_path)  # one that is known, and the last
    assert set(third.scores(tmp_path)) == {*new, *other}
    text = "\n".join(third.downstream(third.scores(tmp_path)))
    for task in (*third.TASKS, "average"):
        (row,) = (line for line in text.splitlines() if line.startswith(f"| {task} | `tupe_a` |"))
        assert "| 62.0, 64.0, 66.0 | 64.0 |" in row and row.endswith("| 2.0 [-0.5, 4.5] |")
    assert "3.0 [3.0, 3.0]" in text


def test_the_scores_of_a_sweep_are_those_of_its_pre_training(tmp_path):
    folder = tmp_path / "evidence3/downstream/tupe_a/mini_5000_lr0.001_seed2"
    run = record.Record(
        task="RTE", architecture="tupe_a_mini", seed=4, lr=1e-4, splits=["valid"], pretrained=str(folder / "model.pt"),
        pretrained_updates=5000, metrics=["accuracy"], started_at="now", state="finished",
        scores=[{"split": "valid", "epoch": n, "accuracy": value, "best": n == 1} for n, value in ((1, 58.5), (2, 57))],
    )  # fmt: skip
    (tmp_path / "sweep/RTE").mkdir(parents=True)
    run.save(tmp_path / "sweep/RTE")
    (tmp_path / "sweep/CoLA").mkdir()
    run.task, run.scores, run.state = "CoLA", [], "failed"
    run.failure = {"reason": f"{record.DIVERGENCE}: nan", "status": record.DIVERGED}
    run.save(tmp_path / "sweep/CoLA")
    trial = Trial("downstream", "tupe_a", "mini", 5000, 1e-3, 2)
    assert third_run.scores_of(tmp_path / "sweep") == [
        (trial, "RTE", 1e-4, 4, 58.5, 57),
        (trial, "CoLA", 1e-4, 4, 0, 0),
    ]


def test_the_pilot_chose_the_delayed_model():
    """By the protocol's rule: a straight line through both exits, at the exit of BERT-A, rounded to 50."""
    curves = {}
    for row in csv.DictReader((TABLES / "delay_pilot.csv").open(encoding="utf-8")):
        updates, losses = curves.setdefault(Trial.parse(row["run"]).model, ([], []))
        updates.append(int(row["updates"]))
        losses.append(float(row["loss"]))
    runs = Runs()
    early, late = (first_below(*curves[f"tupe_a_from_{n}"], runs.threshold) for n in (1200, 1500))
    (bert,) = (
        lead.exit for lead in delay.leads(runs) if str(lead.run) == "mini_rates/bert_a/mini_5000_lr0.001_seed101"
    )
    chosen = 1200 + 300 * (bert - early) / (late - early)
    page = (FIRST.parent / "third-protocol.md").read_text(encoding="utf-8")
    assert f"they left at {early:,.0f} and {late:,.0f}" in page and f"{bert:,.0f} at {chosen:,.0f}" in page
    assert f"tupe_a_from_{50 * round(chosen / 50)}" in LATER["stages"]["delay"]["rates"]


def test_the_pilot_chose_the_rate_of_fine_tuning():
    """The one with the highest mean score of both released models on the four tasks."""
    scores = {}
    for row in csv.DictReader((TABLES / "finetuned_pilot.csv").open(encoding="utf-8")):
        scores.setdefault(float(row["rate"]), {})[row["model"], row["task"]] = float(row["best"])
    assert all(len(of) == 2 * len(third.TASKS) for of in scores.values())
    means = {rate: np.mean([*of.values()]) for rate, of in sorted(scores.items())}
    page = (FIRST.parent / "third-protocol.md").read_text(encoding="utf-8")
    assert "means of {:.2f}, {:.2f} and {:.2f}".format(*means.values()) in page
    assert max(means, key=means.get) == 2e-4 and "--grid lr=2e-4" in page
