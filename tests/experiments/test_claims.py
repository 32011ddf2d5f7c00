"""The numbers of the experiment on TUPE's claims against scipy and formulas, on runs made up for the purpose."""

import csv
import gzip
import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from evidence_runs import write_experiment, write_run
from helpers import PLUGIN
from scipy import stats

from tupe.experiments import claims, claims_page, claims_tables, collect
from tupe.experiments.claims import Evidence
from tupe.experiments.plan import CLAIMS, Trial
from tupe.experiments.statistics import bootstrap

ROOT = PLUGIN.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evidence")
    write_experiment(folder / "out")
    collect.write(collect.collect(folder / "out", collect.read(folder / "tables")), folder / "tables")
    return folder


@pytest.fixture(scope="module")
def evidence(folder):
    return Evidence(collect.read(folder / "tables"))


def run(model, stage="main", seed=1, size="mini", updates=5000, lr=None):
    return Trial(stage, model, size, updates, lr or (5e-4 if stage == "main" else 1e-3), seed)


def evaluated(folder, trial):
    return json.loads((trial.folder(folder / "out") / "evaluation.json").read_text())


def test_contrasts_are_paired_t_tests_corrected_by_holm(folder, evidence):
    results, p = claims.judged(evidence.finals("main")), []
    for result in results:
        a, b = (
            [evaluated(folder, run(model, seed=seed))["loss"]["mean"] / math.log(2) for seed in (1, 2, 3)]
            for model in (result.a, result.b)
        )
        test = stats.ttest_rel(a, b)
        assert result.contrast.mean == pytest.approx(np.mean(a) - np.mean(b), abs=1e-4)
        assert result.contrast.interval == pytest.approx(tuple(test.confidence_interval()), abs=1e-4)
        p.append(test.pvalue)
    order = np.argsort(p)
    by_hand = np.maximum.accumulate([(5 - rank) * p[i] for rank, i in enumerate(order)])
    assert [results[i].p for i in order] == pytest.approx(by_hand, rel=0.05)
    assert {result.verdict for result in results} == {"confirmed"}


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([-0.2, -0.21, -0.2], "confirmed"),
        ([0.2, 0.21, 0.2], "refuted"),
        ([-0.2, 0.1, 0.0], "not resolved"),
        ([-0.2, -0.201], "too few seeds"),
        ([-0.2], "too few seeds"),
        ([], "not run"),
    ],
)
def test_verdicts(differences, verdict):
    finals = {"bert_a": {1: 6.0, 2: 6.1, 3: 6.2}}
    finals["tupe_a_tie_cls"] = {seed: finals["bert_a"][seed] + d for seed, d in enumerate(differences, 1)}
    exploratory = {"confirmed": "lower", "refuted": "higher"}
    assert claims.judged(finals, exploratory=True)[0].verdict == exploratory.get(verdict, verdict)
    first, *others = claims.judged(finals)
    assert first.verdict == verdict and {result.verdict for result in others} == {"not run"}


def test_one_contrast_is_corrected_for_five():
    a, b = {1: 5.8, 2: 5.85, 3: 5.9}, {1: 6.0, 2: 6.1, 3: 6.2}
    first, *_ = claims.judged({"tupe_a_tie_cls": a, "bert_a": b})
    assert first.p == pytest.approx(min(1, 5 * stats.ttest_rel([*a.values()], [*b.values()]).pvalue))


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of the main stage have two models."""
    monkeypatch.setitem(CLAIMS, "contrasts", [{"models": ["tupe_a", "bert_a"], "claim": "untying"}])


def read_back(out):
    """The evidence of the runs in a folder."""
    tables = out.parent / "tables"
    collect.write(collect.collect(out, collect.read(tables)), tables)
    return Evidence(collect.read(tables))


def write_plateau(out, loss):
    """The pilot of nopos, whose best rate has this loss."""
    for number, lr in enumerate(CLAIMS["learning_rates"]):
        write_run(out, Trial("pilot", "nopos", "tiny", 5000, lr, 101), loss + 0.1 * number)


def test_exit_and_shares_follow_from_straight_curves(small_blocks, tmp_path):
    """From 8 bits at `exit` a curve falls to `final` at the end, and is at y after (8 - y) / (8 - final) of the way."""
    out, losses = tmp_path / "out", {"bert_a": 6.0, "tupe_a": 5.0}
    write_run(out, Trial("pilot", "nopos", "tiny", 5000, 2e-3, 101), 7.5)
    assert read_back(out).threshold("main") is None  # its other rates may be better
    shutil.rmtree(out)
    write_plateau(out, 7.5)
    for stage, size in (("main", "mini"), ("controls", "tiny")):
        for model, loss in losses.items():
            write_run(out, run(model, stage, size=size), loss, exit={"bert_a": 3010, "tupe_a": 1000}[model])
    for updates, loss in ((1250, 7.0), (2500, 6.5), (3500, 5.5)):
        write_run(out, Trial("share", "tupe_a", "tiny", updates, 1e-3, 1), loss, exit=500)
    assert claims.schedule_shares(read_back(out), "tupe_a") == {}  # one length is missing
    write_run(out, Trial("share", "tupe_a", "tiny", 1750, 1e-3, 1), 6.8, exit=500)
    evidence = read_back(out)
    assert evidence.threshold("main") == pytest.approx(7.0, abs=1e-4)  # the best rate's 7.5, minus one half
    exits = evidence.by_seed("main", evidence.exit)
    assert exits["tupe_a"][1] == pytest.approx(1000 + 4000 / 3, abs=2)
    assert exits["bert_a"][1] == pytest.approx(3010 + 1990 / 2, abs=2)
    reaches = 1000 + 4000 * 2 / 3  # TUPE's curve at BERT's 6 bits
    assert claims.paper_shares(evidence, "main", "tupe_a")[1] == pytest.approx(reaches / 5000, abs=1e-3)
    off = (reaches - exits["tupe_a"][1]) / (5000 - exits["bert_a"][1])
    assert claims.paper_shares(evidence, "main", "tupe_a", without_plateau=True)[1] == pytest.approx(off, abs=1e-3)
    fair = math.exp((math.log(0.5) + math.log(0.7)) / 2)  # half-way between 6.5 and 5.5 bits, on a logarithmic scale
    assert claims.schedule_shares(evidence, "tupe_a") == {1: pytest.approx(fair, abs=1e-3)}
    assert claims.paper_shares(evidence, "main", "tupe_r") == {}
    table, n = claims.after_exit(evidence, "main")
    assert n == 950  # BERT-A has 995 updates left
    assert table["bert_a"][1] == pytest.approx(7 - n * 2 / 1990, abs=2e-3)
    assert claims.late(evidence, "main") == ["bert_a"]


@pytest.mark.parametrize(
    ("shares", "text"),
    [
        ({1: 0.5, 2: 0.5}, "50 % (50, 50)"),  # no interval from two seeds
        ({1: 0.5, 2: 0.5, 3: 0.5}, "50 % [50, 50] (50, 50, 50)"),
        ({1: 0.5, 2: math.inf}, "> 100 % (50, > 100)"),
        ({1: 0.5, 2: math.nan}, "– (50, –)"),
        ({1: 0.25, 2: 0.49}, "≤ 35 % (≤ 25, 49)"),
        ({}, "–"),
    ],
)
def test_a_share_that_is_not_known_is_none(shares, text, evidence, monkeypatch):
    monkeypatch.setattr(claims_tables, "schedule_shares", lambda *_: shares)
    rows = claims_tables.share_table(evidence).markdown().splitlines()
    assert rows[3].split("|")[3].strip() == text


def test_without_the_plateau_shares_need_both_exits(small_blocks, tmp_path):
    """Seed 1: BERT-A never leaves it; 2: TUPE reaches BERT-A's loss before its own exit; 3: it never reaches it."""
    out = tmp_path / "out"
    write_plateau(out, 7.5)
    for seed, bert, tupe in ((1, 7.2, 5.0), (2, 7.3, 5.0), (3, 5.0, 5.5)):
        write_run(out, run("bert_a", seed=seed), bert, exit=1000)
        write_run(out, run("tupe_a", seed=seed), tupe, exit=1000)
    evidence = read_back(out)
    shares = [claims.paper_shares(evidence, "main", "tupe_a", without_plateau=off) for off in (False, True)]
    assert shares[0][1] < 1 and shares[0][2] < 1 and shares[0][3] == math.inf
    assert math.isnan(shares[1][1]) and math.isnan(shares[1][2]) and shares[1][3] == math.inf


def test_only_whole_blocks_of_one_length_count(small_blocks, tmp_path):
    for seed, models in ((1, ("bert_a", "tupe_a")), (2, ("bert_a",))):
        for model in models:
            write_run(tmp_path / "out", run(model, seed=seed), 6.0)
    write_run(tmp_path / "out", run("bert_a", updates=10000), 5.0)
    assert read_back(tmp_path / "out").finals("main") == dict.fromkeys(("bert_a", "tupe_a"), {1: pytest.approx(6.0)})
    write_run(tmp_path / "out", run("tupe_a", updates=10000), 5.0)
    assert {trial.updates for trial in read_back(tmp_path / "out").trials("main")} == {5000}  # one block of each


def test_a_longer_training_counts_once_it_has_as_many_blocks_as_are_required(small_blocks, monkeypatch, tmp_path):
    monkeypatch.setitem(CLAIMS, "required_seeds", 2)
    for seed, updates in ((1, 5000), (2, 5000), (3, 5000), (1, 10000)):
        for model in ("bert_a", "tupe_a"):
            write_run(tmp_path / "out", run(model, seed=seed, updates=updates), 6.0)
    assert {trial.updates for trial in read_back(tmp_path / "out").trials("main")} == {5000}
    for model in ("bert_a", "tupe_a"):
        write_run(tmp_path / "out", run(model, seed=2, updates=10000), 6.0)
    assert {trial.updates for trial in read_back(tmp_path / "out").trials("main")} == {10000}


def test_verdicts_are_read_at_three_blocks_and_at_five(small_blocks, tmp_path):
    """Seeds 4 and 5 turn the verdict, but not one of them alone; then both are named."""
    for seed in range(1, 6):
        write_run(tmp_path / "out", run("bert_a", seed=seed), 6.0)
        write_run(tmp_path / "out", run("tupe_a", seed=seed), 5.5 + 0.01 * seed if seed < 4 else 7.0)
        evidence = read_back(tmp_path / "out")
        assert {seed for _, seed in evidence.blocks("main")} == set(range(1, min(seed, 3) + 1 if seed < 5 else 6))
    assert "| not resolved | confirmed |" in claims_tables.contrast_table(evidence, "main").markdown()
    assert "not resolved (3 seeds: confirmed)" in claims_tables.summary(evidence)


def test_a_model_without_contrasts_does_not_hold_up_a_block(small_blocks, tmp_path):
    """It is shown with the seeds it has."""
    for seed in (1, 2):
        for model in ("bert_a", "tupe_a"):
            write_run(tmp_path / "out", run(model, seed=seed), 6.0)
    write_run(tmp_path / "out", run("bert_a_d", seed=2), 6.0)
    evidence = read_back(tmp_path / "out")
    assert {model: set(seeds) for model, seeds in evidence.finals("main").items()} == {
        "bert_a": {1, 2}, "tupe_a": {1, 2}, "bert_a_d": {2},
    }  # fmt: skip
    table = claims_tables.parts_table(evidence).markdown()
    assert "| bert_a_d (1 of 2 seeds) |" in table
    assert "position 1 |" in table and "position 0 |" not in table  # 900 masked tokens, and 100


def test_a_run_that_diverged_at_another_rate_completes_no_block(small_blocks, tmp_path):
    write_experiment(tmp_path / "out", ["pilot"])
    write_run(tmp_path / "out", run("tupe_a", lr=5e-4), 6.0)
    write_run(tmp_path / "out", run("bert_a", lr=1e-3), 6.0, state="failed")
    assert not read_back(tmp_path / "out").blocks("main")
    write_run(tmp_path / "out", run("bert_a", lr=5e-4), 6.0, state="failed")
    assert read_back(tmp_path / "out").blocks("main") == {(5000, 1)}


def test_a_run_counts_at_the_rate_that_the_pilot_decided(tmp_path):
    """The pilot was not over when the first run of a control began; its rate turned out to be another one."""
    write_experiment(tmp_path / "out", ["pilot", "controls"])
    early = run("tupe_a", "controls", 1, "tiny", lr=4e-3)
    write_run(tmp_path / "out", early, 1.0)
    evidence = read_back(tmp_path / "out")
    assert early in evidence.runs and early not in evidence.trials("controls")
    assert evidence.finals("controls")["tupe_a"][1] > 5
    assert "controls 51 of 51 and 1 more" in claims_tables.coverage(evidence)


def test_a_run_that_diverges_is_the_worst_of_its_model(tmp_path):
    write_experiment(tmp_path / "out", ["pilot"])
    trial = run("nopos", "pilot", 101, "tiny", lr=2e-3)
    shutil.rmtree(trial.folder(tmp_path / "out"))
    write_run(tmp_path / "out", trial, 0, state="failed")
    evidence = read_back(tmp_path / "out")
    assert evidence.by_rate("pilot")["nopos"][2e-3] == math.inf
    assert evidence.best_rates["nopos"] == 1e-3 and evidence.threshold("main") == pytest.approx(7, abs=0.01)
    row = next(line for line in claims_tables.rates_table(evidence).markdown().splitlines() if "nopos" in line)
    assert [cell.strip() for cell in row.split("|")][4:7:2] == ["diverged", "inf"]
    assert f"`{trial}` (diverged)" in claims_tables.coverage(evidence)


def test_a_block_with_a_run_that_diverged_counts(small_blocks, tmp_path):
    for seed in (1, 2):
        write_run(tmp_path / "out", run("tupe_a", seed=seed), 6.0)
        write_run(tmp_path / "out", run("bert_a", seed=seed), 6.0, state="finished" if seed == 1 else "failed")
    finals = read_back(tmp_path / "out").finals("main")
    assert finals["tupe_a"].keys() == {1, 2} and finals["bert_a"].keys() == {1}


def test_no_plateau_where_nopos_diverged(tmp_path):
    for seed in CLAIMS["stages"]["first"]["seeds"]:
        state = "failed" if seed == CLAIMS["stages"]["first"]["seeds"][0] else "finished"
        write_run(tmp_path / "out", run("nopos", "first", seed, "tiny", 1250, 2e-3), 7.5, state=state)
    assert read_back(tmp_path / "out").threshold("first") is None


@pytest.mark.parametrize("content", [b"", None])
def test_a_damaged_table_is_named(content, folder, tmp_path):
    shutil.copytree(folder / "tables", tmp_path / "tables")
    path = tmp_path / "tables" / "training.csv.gz"
    path.write_bytes(path.read_bytes()[:100] if content is None else content)
    with pytest.raises(ValueError, match=r"training\.csv\.gz is (damaged|empty)"):
        collect.read(tmp_path / "tables")


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    whole = '| INFO | train_inner | {"num_updates": "50", "loss": "8.1", "train_wall": "7"}'
    (tmp_path / "train.log").write_text(f'{whole}\n| train_inner | {{"num_updates": "100", "lo$ tupe pretrain\n')
    assert collect.training_losses(tmp_path / "train.log") == {50: ("8.1", "7")}


def test_pairs_that_are_not_all_scored_are_not_collected(tmp_path):
    write_run(tmp_path / "out", run("tupe_a"), 5.7, along=(500, 5000))
    (run("tupe_a").folder(tmp_path / "out") / "pairs" / "500" / collect.SCORED).unlink()
    rows = collect.collect(tmp_path / "out", collect.read(tmp_path))["pairs"]
    assert {row["updates"] for row in rows} == {"5000"}


def test_scores_of_pairs_stay_while_they_are_scored_again(folder):
    known = collect.read(folder / "tables")
    new = {**known, "pairs": []}
    assert collect.merge(known, new)["pairs"] == known["pairs"]


def test_what_is_known_stays_where_a_copy_lacks_it(folder, tmp_path):
    """A run that is evaluated or scored again, on a copy that has less."""
    known, trial = collect.read(folder / "tables"), run("tupe_a")
    out = tmp_path / "out"
    write_run(out, trial, 5.0, along=(1000,))
    merged = collect.merge(known, collect.collect(out, known))
    for table, where in (("pairs", {}), ("measures", {"measure": "along"})):
        mine, theirs = (
            {int(row["updates"]) for row in rows[table] if row["run"] == str(trial) and where.items() <= row.items()}
            for rows in (merged, known)
        )
        assert theirs and mine == theirs | ({1000} if table == "pairs" else {500, 1000}), table
    (trial.folder(out) / "evaluation.json").unlink()
    merged = collect.merge(known, collect.collect(out, known))
    assert [row for row in merged["runs"] if row["run"] == str(trial)][0]["loss"]


def test_paradigms_that_are_not_all_scored_have_no_accuracy(folder):
    tables = collect.read(folder / "tables")
    trial = run("tupe_a")
    whole = Evidence(tables)
    assert whole.pairs_accuracy(trial, 5000, False) is not None
    one = next(row for row in tables["pairs"] if row["run"] == str(trial) and row["updates"] == "5000")
    tables["pairs"].remove(one)
    partly = Evidence(tables)
    assert partly.pairs_accuracy(trial, 5000, False) is None and partly.pairs_accuracy(trial, 1500, False) is not None
    assert partly.credits(trial, 5000, False).keys() == whole.credits(trial, 5000, False).keys() - {one["paradigm"]}
    tables["pairs"] = [row for row in tables["pairs"] if row["run"] == str(trial)]
    assert "not been scored" in claims_tables.pair_errors(Evidence(tables))


def test_a_share_of_the_rates_from_another_seed_says_so(tmp_path):
    write_experiment(tmp_path / "out", ["pilot"])
    for model, lr, seed in (("bert_a", 5e-4, 101), ("tupe_r", 5e-4, 101), ("bert_a", 2.5e-4, 1)):
        write_run(tmp_path / "out", run(model, "rates", seed, lr=lr), 6.0)
    write_run(tmp_path / "out", run("tupe_r", "rates", 101, lr=2.5e-4), 6.0, state="failed")
    rows = claims_tables.rate_shares_table(read_back(tmp_path / "out")).markdown().splitlines()
    cells = {row.split("|")[1].strip(): [cell.strip() for cell in row.split("|")[2:-1]] for row in rows}
    assert cells["model"] == ["0.5", "0.25"] and cells["bert_a"] == ["6.000", "6.000 (seed 1)"]
    assert cells["tupe_r"] == ["6.000", "diverged"] and cells["mean"] == ["6.000", "diverged"]


def test_a_block_has_one_precision(tmp_path):
    tables = collect.read(tmp_path)
    for model, precision in (("bert_a", "float32"), ("tupe_a", "bfloat16 autocast")):
        name = str(run(model, "controls", size="tiny"))
        tables["runs"].append({"run": name, "state": "finished", "loss": "6", "precision": precision, "data": ""})
    with pytest.raises(ValueError, match="stage controls, seed 1: bfloat16 autocast and float32"):
        Evidence(tables)
    tables["runs"][-1]["run"] = str(run("tupe_a", "share", size="tiny", updates=1250))  # compared with the controls
    with pytest.raises(ValueError, match="stage share, seed 1: bfloat16 autocast and float32"):
        Evidence(tables)


def test_runs_on_other_data_are_refused(tmp_path):
    tables = collect.read(tmp_path)
    for model, data in (("bert_a", "one"), ("tupe_a", "two")):
        name = str(run(model, "controls", size="tiny"))
        tables["runs"].append({"run": name, "state": "finished", "loss": "6", "precision": "", "data": data})
    with pytest.raises(ValueError, match="different data .*one, two"):
        Evidence(tables)


def test_equal_time_is_the_end_of_the_quickest(small_blocks, tmp_path):
    write_run(tmp_path / "out", run("bert_a"), 6.0, exit=1000, seconds=5)
    write_run(tmp_path / "out", run("tupe_a"), 5.0, exit=1000, seconds=10)
    collect.write(collect.collect(tmp_path / "out", collect.read(tmp_path)), tmp_path)
    table = claims.equal_time(Evidence(collect.read(tmp_path)), "main")
    assert table["bert_a"][1] == pytest.approx(6.0, abs=1e-3)
    assert table["tupe_a"][1] == pytest.approx(8 - 3 * 1500 / 4000, abs=1e-3)  # after 2,500 updates


def test_pairs_come_back_from_their_letters(folder, evidence):
    trial = run("tupe_r", seed=2)
    for only_order, names in ((False, ["agreement", "order"]), (True, ["order"])):
        expected = []
        for name in names:
            with np.load(trial.folder(folder / "out") / "pairs" / "5000" / f"{name}.npz") as arrays:
                word = arrays["word"]
            expected.append(np.mean([0.5 if abs(d) <= 1e-4 else float(d > 0) for d in word]))
            row = next(r for r in evidence.rows["pairs"][str(trial)] if (r["updates"], r["paradigm"]) == ("5000", name))
            np.testing.assert_allclose([int(d) / 10 for d in row["differences"].split()], word, atol=0.051)
        assert evidence.pairs_accuracy(trial, 5000, only_order) == pytest.approx(np.mean(expected))


def test_tables_of_ones_own_leave_the_page_of_the_project_alone(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder / "out", tmp_path / "runs")
    Path("README.md").write_text(f"{claims_page.BEGIN}\n{claims_page.END}\n")
    result = CliRunner().invoke(claims_page.command, ["--runs", "runs", "--evidence", "mine"])
    assert result.exit_code == 0, result.output
    assert "| tupe_a_tie_cls - bert_a |" in Path("mine/results.md").read_text() and any(Path("mine/figures").iterdir())
    assert len(Path("README.md").read_text().splitlines()) == 2 and not Path("docs").exists()
    assert CliRunner().invoke(claims_page.command, ["--runs", "nowhere"]).exit_code == 2


def test_runs_of_several_machines_come_together(small_blocks, folder, tmp_path):
    write_run(tmp_path / "a", run("bert_a"), 6.0)
    write_run(tmp_path / "b", run("bert_a"), 5.9)
    write_run(tmp_path / "b", run("tupe_a"), 5.5)
    write_run(tmp_path / "c", run("bert_a"), 0.0, state="failed")
    write_run(tmp_path / "c", run("bert_r"), 0.0, state="failed")
    write_run(tmp_path / "c", run("tupe_r"), 0.0, state="running")
    for name in "abc":
        known = collect.read(tmp_path)
        collect.write(collect.merge(known, collect.collect(tmp_path / name, known)), tmp_path)
    evidence = Evidence(collect.read(tmp_path))
    assert evidence.finals("main") == {"bert_a": {1: pytest.approx(5.9)}, "tupe_a": {1: pytest.approx(5.5)}}
    assert evidence.failed == {run("bert_r"): "diverged"}
    assert len(evidence.curve(run("bert_a"))[0]) == 100
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.gz")}
    known = collect.read(tmp_path)
    collect.write(collect.merge(known, collect.collect(tmp_path / "b", known)), tmp_path)  # nothing new
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.gz")} == before


def test_one_command_writes_page_and_figures(folder, pretrained, vocabulary, tmp_path):
    """Figure 6 comes from the weights of a TUPE-A, here of another model with untied positions."""
    out = tmp_path / "out"
    write_run(out, run("tupe_a"), 5.7, along=(5000,))
    shutil.copy(pretrained, run("tupe_a").folder(out) / "model.pt")
    shutil.copytree(folder / "tables", tmp_path / "evidence")
    page = tmp_path / "page.md"
    page.write_text(f"# Title\n{claims_page.BEGIN}\nSTALE\n{claims_page.END}\nrest\n")
    readme = tmp_path / "README.md"
    readme.write_text(page.read_text())
    words = ["--evidence", tmp_path / "evidence", "--page", page, "--readme", readme]
    more = ["--runs", out, "--data", vocabulary]
    first = CliRunner().invoke(claims_page.command, [*map(str, words + more)])
    assert first.exit_code == 0, first.output
    drawn = {path.name for path in (tmp_path / "figures").iterdir()}
    assert drawn == {f"claims_{figure.__name__}.png" for figure in claims_page.FIGURES}
    text = page.read_text()
    assert text.startswith("# Title\n") and text.endswith("rest\n") and "STALE" not in text
    assert all(f"(figures/{name})" in text for name in drawn)
    assert "| tupe_a_tie_cls - bert_a |" in text and len(text.splitlines()) < 160
    assert "(evidence/pilot.md)" in text
    pilot = [float(row["loss"]) for row in collect.read(folder / "tables")["runs"] if "pilot/bert_a/" in row["run"]]
    assert f"| **{min(pilot):.3f}** |" in (tmp_path / "evidence" / "pilot.md").read_text()
    assert "| positions apart from words | `tupe_a_tie_cls` - `bert_a` |" in readme.read_text()
    shutil.rmtree(out)  # the tables alone give the same page
    names = [figure.__name__ for figure in claims_page.FIGURES]
    collected = Evidence(collect.read(tmp_path / "evidence"))
    assert claims_page.results(collected, names, "figures", "evidence") in text


def test_the_first_look_has_its_own_plateau_and_complete_models_only(tmp_path):
    out, seeds = tmp_path / "out", CLAIMS["stages"]["first"]["seeds"]
    for model, loss, count in (("nopos", 7.6, 3), ("bert_a", 7.5, 3), ("tupe_a_tie_cls", 6.5, 3), ("tupe_a", 6.0, 2)):
        for seed in seeds[:count]:
            write_run(out, run(model, "first", seed, "tiny", 1250, 2e-3), loss + 0.01 * (seed % 3), exit=500)
    collect.write(collect.collect(out, collect.read(tmp_path)), tmp_path)
    evidence = Evidence(collect.read(tmp_path))
    assert set(evidence.finals("first")) == {"nopos", "bert_a", "tupe_a_tie_cls"}
    assert evidence.threshold("first") == pytest.approx(7.6 + 0.01 - 0.5, abs=1e-4)  # the mean over seeds, minus a half
    assert evidence.threshold("main") is None
    assert evidence.by_seed("first", evidence.exit).keys() == {"tupe_a_tie_cls"}
    text = claims_page.results(evidence, [], "figures", "evidence")
    assert "(evidence/first.md)" in text and "never, never, never" in claims_page.first_page(evidence)
    assert claims_tables.change_rows(evidence, "first") == []


@pytest.mark.parametrize(("raw", "result"), [(6.9, "above 0"), (6.1, "below 0"), (6.5, "includes 0")])
def test_exploratory_differences(raw, result, tmp_path):
    for seed in (1, 2, 3):
        write_run(tmp_path / "out", run("tupe_a_tie_cls", "controls", seed, "tiny", 5000), 6.5)
        write_run(tmp_path / "out", run("untied_raw", "controls", seed, "tiny", 5000), raw + 0.01 * (seed - 2))
    collect.write(collect.collect(tmp_path / "out", collect.read(tmp_path)), tmp_path)
    (row,) = claims_tables.change_rows(Evidence(collect.read(tmp_path)), "controls")
    assert row[1] == "`untied_raw` - `tupe_a_tie_cls`" and row[3] == result


def test_a_stage_includes_runs_of_another(tmp_path):
    """Seed 4 of the main stage is no seed of `slower`, where one model is better by 0.2 bits."""
    for seed in (1, 2, 3, 4):
        for model in ("bert_a", "tupe_a_tie_cls", "tupe_a", "bert_r", "tupe_r"):
            write_run(tmp_path / "out", run(model, "main", seed), 5.4)
    for seed in (1, 2, 3):
        write_run(tmp_path / "out", run("tupe_a_tie_cls", "slower", seed), 5.2 + 0.01 * (seed - 2))
    evidence = read_back(tmp_path / "out")
    assert {model: set(seeds) for model, seeds in evidence.finals("slower").items()} == {
        "bert_a": {1, 2, 3}, "tupe_a_tie_cls": {1, 2, 3}
    }  # fmt: skip
    first, *others = evidence.judged("slower")
    assert first.contrast.mean == pytest.approx(-0.2, abs=1e-4) and first.verdict == "lower"
    assert {result.verdict for result in others} == {"not run"}
    table = claims_tables.stage_table(evidence, "slower", against="main").markdown().splitlines()
    included, trained = ([cell.strip() for cell in row.split("|")[5:7]] for row in table[2:])
    assert included == ["5.400 [5.400, 5.400]", "–"] and trained[1].startswith("-0.200 [")
    assert not claims.is_complete(evidence, "slower")
    page = claims_page.results(evidence, [], "figures", "evidence")
    assert "All models at 0.0005 and 0.001 (`bert_a`, `bert_a_d`: their runs of the main stage)" in page


def test_longer_runs_have_a_page_without_intervals(tmp_path):
    """... with two seeds. BERT-A ends at 5 bits; TUPE-R falls from 8 after 1,000 updates to 4.5."""
    losses = {"bert_a": 5.0, "bert_r": 4.9, "tupe_a": 4.8, "tupe_r": 4.5}
    for seed in (1, 2):
        for model, loss in losses.items():
            write_run(tmp_path / "out", run(model, "longer", seed, "tiny", 20000), loss + 0.1 * seed, exit=1000)
    evidence = read_back(tmp_path / "out")
    page = claims_page.longer_page(evidence)
    rows = [row.split("|")[1].strip() for row in page.splitlines() if "too few seeds" in row]
    assert rows[:3] == ["bert_r - bert_a", "tupe_r - bert_r", "tupe_r - tupe_a"]  # of the models that the stage has
    assert not re.search(r"\[-?[\d.]+, ", page) and "| tupe_a | 4.900 | 5.000 | 4.950 |" in page
    shares = [row for row in claims_tables.share_table(evidence).markdown().splitlines() if "20,000 updates" in row]
    assert len(shares) == 2 and "[" not in "".join(shares)


@pytest.mark.parametrize("stages", [["pilot"], ["main"], ["controls"]])
def test_what_has_not_run_is_named(stages, tmp_path):
    write_experiment(tmp_path / "out", stages, seeds=1)
    collect.write(collect.collect(tmp_path / "out", collect.read(tmp_path)), tmp_path)
    evidence = Evidence(collect.read(tmp_path))
    text = claims_page.results(evidence, [], "figures", "evidence")
    for stage, planned in {"pilot": 18 * 3, "main": 6 * 5, "controls": 17 * 3, "share": 2 * 4 * 3}.items():
        finished = planned // len(CLAIMS["stages"][stage]["seeds"]) if stage in stages else 0
        assert f"{stage} {finished} of {planned}" in text
    assert ("### Main stage, mini: the five contrasts" in text) == (stages == ["main"])
    assert ("(evidence/controls.md)" in text) == (stages == ["controls"])
    with pytest.raises(ValueError, match="tupe claims --runs"):
        Evidence(collect.read(tmp_path / "empty"))


def test_losses_of_blocks_come_back(folder, evidence):
    """... for the bootstrap; a run that was evaluated before they were stored has none."""
    trial = run("tupe_a", seed=2)
    losses, tokens = evidence.block_losses(trial)
    assert tokens.tolist() == [20] * 5
    assert losses.sum() / tokens.sum() == pytest.approx(evidence.loss(trial), abs=1e-3)
    blocks = [{n: evidence.block_losses(run(model, seed=n)) for n in (1, 2, 3)} for model in ("tupe_a", "bert_a")]
    mean, (low, high) = bootstrap(*blocks)
    difference = claims.paired(evidence.finals("main"), "tupe_a", "bert_a").mean
    assert low <= mean <= high and mean == pytest.approx(difference, abs=1e-3)
    tables = collect.read(folder / "tables")
    tables["blocks"] = []
    assert Evidence(tables).block_losses(trial) is None


@pytest.mark.parametrize("changed", [None, "Welch", "other sample"])
def test_an_exploratory_contrast_is_lower_only_if_other_tests_agree(changed, tmp_path):
    """Three seeds that agree closely in their differences, like [CLS] at one rate: in Welch's test the seeds of each
    model differ more; on the other held-out sample the differences do."""
    spread = 0.1 if changed == "Welch" else 0.001
    for seed in (1, 2, 3):
        for model, off in (("tupe_a", -0.02), ("tupe_a_tie_cls", 0.0)):
            loss = 5.2 + off + spread * seed + 0.0005 * (seed == 2) * (model == "tupe_a")
            write_run(tmp_path / "out", run(model, "slower", seed), loss)
    tables = collect.collect(tmp_path / "out", collect.read(tmp_path))
    for row in tables["runs"]:
        if changed == "other sample" and "/tupe_a/" in row["run"]:
            row["validation_loss"] = f"{float(row['validation_loss']) + 0.05 * Trial.parse(row['run']).seed:.5f}"
    evidence = Evidence(tables)
    contrast = evidence.judged("slower")[1]
    assert contrast.p < 0.05 and contrast.verdict == ("not resolved" if changed else "lower")
    tests = {name: ps[1] for name, ps in evidence.sensitivity("slower").items()}
    assert tests[claims.PAIRED] == contrast.p
    assert (tests[claims.WELCH] > 0.05) == (changed == "Welch")
    assert (tests[claims.OTHER_SAMPLE] > 0.05) == (changed == "other sample")


def test_sentences_of_the_readme_need_their_numbers(tmp_path):
    """Without a pilot no exits are known, so the first is not said; the second goes where dropping the terms of words
    and positions lowers the loss, the third where more than half of the lead is left."""
    out = tmp_path / "out"
    for seed in (1, 2, 3):
        small = 0.01 * (seed == 2)
        for model in ("bert_a", "bert_r", "tupe_a", "tupe_r", "tupe_a_tie_cls", "bert_a_d"):
            lead = 0.0 if model == "bert_a" else 0.7
            write_run(out, run(model, "main", seed), 6 - lead + small, exit=1000)
            if "bert_a" not in model:
                write_run(out, run(model, "slower", seed), 6 - lead + small / 2, exit=1000)
            if model in ("bert_a", "tupe_a"):
                write_run(out, run(model, "controls", seed, "tiny"), 6 - lead, exit=1000)
                write_run(out, run(model, "longer", seed, "tiny", 20000), 5 - lead / 10, exit=1000)
    evidence = read_back(out)
    told = [f(evidence) for f in (claims_tables.earlier, claims_tables.apart, claims_tables.longer_text)]
    assert not told[0] and "shows no gain (" in told[1]
    assert "2 seeds: -0.70 and -0.70 bits, then -0.07 and -0.07)" in told[2]
    tables = collect.read(out.parent / "tables")
    for row in tables["runs"]:
        lead = {"slower/tupe_a_tie_cls": 0.3, "longer/tupe_a": 0.4}.get(row["run"].rpartition("/")[0], 0)
        row["loss"] = f"{float(row['loss']) - lead:.5f}"
    evidence = Evidence(tables)
    assert claims_tables.apart(evidence) == claims_tables.longer_text(evidence) == ""


# --------------------------------------------------------------------------------- the pages against the committed runs


@pytest.fixture(scope="module")
def committed():
    return Evidence(collect.read(ROOT / "docs" / "evidence"))


def text_of(name):
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_pages_are_those_of_the_tables(committed):
    names = [figure.__name__ for figure in claims_page.FIGURES]
    assert f"\n\n{claims_page.results(committed, names, 'figures', 'evidence')}\n" in text_of("docs/results.md")
    assert f"\n\n{claims_tables.summary(committed)}\n" in text_of("README.md")
    for stage, page in claims_page.PAGES.items():
        assert text_of(f"docs/evidence/{stage}.md") == page(committed)


def test_the_readme_has_five_rows_and_three_sentences(committed):
    text = claims_tables.summary(committed)
    *_, sentences = text.strip().split("\n")
    assert len(re.findall(r"\.(?= [A-Z]|$)", sentences)) == 3
    assert len([line for line in text.splitlines() if line.startswith("|")]) == 2 + 5


def in_words(evidence):
    """What docs/results.md says in words, with the numbers of the tables."""

    def of(stage, a, b):
        return claims.paired(evidence.finals(stage), a, b)

    def cell(one, sign=1, digits=3):
        low, high = sorted(sign * bound for bound in one.interval)
        return f"{sign * one.mean:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"

    def span(values, digits=0):
        return f"{min(values):,.{digits}f} to {max(values):,.{digits}f}"

    tie, bert = "tupe_a_tie_cls", "bert_a"
    exits = {model: evidence.by_seed("main", evidence.exit)[model].values() for model in (bert, tie)}
    yield f"{tie}` ends {cell(of('main', tie, bert), -1)} bits below BERT-A"
    yield f"{cell(of('slower', tie, 'bert_a_d'))} at one rate; in the main stage"
    yield f"{cell(of('main', tie, 'bert_a_d'))}, which is worse"
    yield f"leaves it after {span(exits[bert])} of 5,000 updates, `{tie}` after {span(exits[tie])}."

    lower = [
        claims.paired({"a": losses, "b": evidence.finals("main")[model]}, "a", "b")
        for model, losses in evidence.finals("slower").items()
        if model not in (bert, "bert_a_d")
    ]
    clear = sum(one.interval[1] < 0 for one in lower)
    assert clear == 1
    yield f"{span([-one.mean for one in lower], 2)} bits lower (means; one of four intervals excludes 0)"
    judged = evidence.judged("slower")
    assert [result.verdict for result in judged] == ["lower", "not resolved", "lower", "lower", "not resolved"]
    means = [f"({result.contrast.mean:.3f})" for result in judged if result.verdict == "lower"]
    yield "positions apart {}, a relative bias on BERT-A {}, positions apart beside a relative bias {}".format(*means)
    yield f"[CLS] apart ({judged[1].contrast.mean:.3f}; "
    yield f"a relative bias on TUPE-A ({cell(judged[4].contrast)})"
    assert evidence.judged("controls")[1].verdict == "not resolved"
    yield f"not resolved either ({cell(of('controls', 'tupe_a', tie))})"

    left = {}
    for stage in ("slower", "main"):
        after, finals = claims.after_exit(evidence, stage)[0], evidence.finals(stage)
        pairs = [[claims.paired(losses, model, bert).mean for losses in (after, finals)] for model in finals]
        left[stage] = [100 * since / final for since, final in pairs if final]
    yield f"{span(left['slower'])} % of each model's distance from BERT-A is left at one rate ({span(left['main'])} %"

    def longer(model, stage="longer", sign=-1):
        return [f"{abs(d):.2f}" for d in (of(stage, model, bert).differences[seed] for seed in (1, 2))]

    assert [d > 0 for d in of("longer", "bert_r", bert).differences.values()] == [True, False]
    assert all(d < 0 for model in ("tupe_a", "tupe_r") for d in of("longer", model, bert).differences.values())
    yield "TUPE-A is {} and {} bits below BERT-A, where it was {} and {} after 5,000 (same seeds)".format(
        *longer("tupe_a"), *longer("tupe_a", "controls")
    )
    yield "TUPE-R {} and {} below".format(*longer("tupe_r"))
    yield "BERT-R {} above and {} below".format(*longer("bert_r"))
    curves = {}
    for trial in evidence.trials("longer"):
        updates, losses = evidence.curve(trial, "validation")
        curves[trial.model, trial.seed] = losses[updates.index(10000)], losses[-1]
    moved = [
        abs((end - curves[bert, seed][1]) - (half - curves[bert, seed][0]))
        for (model, seed), (half, end) in curves.items()
        if model != bert
    ]
    assert max(moved) < 0.04
    yield "From update 10,000 to the end these distances, on the validation sample, change by less than 0.04 bits"

    main, one_rate, long = (
        claims_tables.share_cell(claims.paper_shares(evidence, stage, "tupe_r"))
        for stage in ("main", "slower", "longer")
    )
    at_end = re.search(r"\((\d+), (\d+)\)", long).groups()
    yield f"after {main.partition(' (')[0]} of the updates in the main stage, {one_rate.partition(' (')[0]} at one rate"
    yield "and {} and {} % in the two longer runs".format(*at_end)

    finals = evidence.finals("controls")
    gaps = [
        100 * (finals[bert][n] - finals["absolute_0.06"][n]) / (finals[bert][n] - finals[tie][n]) for n in (1, 2, 3)
    ]
    yield "recovers {:.0f}, {:.0f} and {:.0f} % (by seed)".format(*gaps)
    yield f"and {cell(of('controls', tie, 'absolute_0.06'), -1)} bits remain"
    yield f"ten times as large end {cell(of('controls', 'absolute_0.2', 'absolute_0.06'))} above that"
    raw, large, nopos = (evidence.by_rate("pilot")[model] for model in ("untied_raw", "absolute_0.06", "nopos"))
    assert raw[1e-3] > evidence.threshold("main")
    yield f"end at {np.mean([*finals['untied_raw'].values()]):.2f} bits at 4e-3"
    yield f"at 2e-3 ({raw[2e-3]:.2f}; {large[2e-3]:.2f}) and at 1e-3 still on the plateau ({raw[1e-3]:.2f})"

    ours = [*finals[tie].values()]
    yield "within 0.015 bits of each other"
    assert max(ours) - min(ours) < 0.015
    with gzip.open(ROOT / "docs/evidence/second/runs.csv.gz", "rt") as file:
        again = [float(row["loss"]) for row in csv.DictReader(file) if row["run"].startswith("again/")]
    nine = ours + again
    assert len(nine) == 9
    yield f"between {min(nine):.3f} and {max(nine):.3f} bits, with a standard deviation of {np.std(nine, ddof=1):.3f}"
    second = text_of("docs/evidence/second.md")
    for neighbour in ("cls_zero", "factored", "nonparametric", "untied_raw_large"):
        row = re.search(rf"`{neighbour}` - `{tie}` \| 4, 9 \| -(\S+) \[-(\S+), -(\S+)\]", second)
        yield f"{row[1]} [{row[3]}, {row[2]}]"
    yield "{} [{}] bits (three seeds)".format(*re.search(r"float32: .*mean (\S+) \[(.*)\]", second).groups())
    for a, b in (("bert_r_25", "bert_r"), ("cls_zero", "tupe_a"), ("untied_layer", tie)):
        low, high = of("controls", a, b).interval
        assert low < 0 < high  # not resolved

    trials = [trial for trial in evidence.trials("main") if evidence.are_scored(trial, trial.updates)]
    orders = [100 * evidence.pairs_accuracy(trial, trial.updates, True) for trial in trials]
    yield f"at chance on BLiMP ({span(orders, 1)} %)"
    released = {name: Trial("rates", name, "mini", 5000, lr, 101) for name, lr in (("tupe_r", 2e-3), (bert, 1e-3))}
    blimp = [f"{100 * evidence.pairs_accuracy(trial, 5000, False):.1f}" for trial in released.values()]
    yield "BLiMP does not ({} and {} %)".format(*blimp)
    yield f"run at 2e-3 ({evidence.loss(released['tupe_r']):.3f} bits)"
    yield f"ended at {evidence.loss(Trial('rates', 'tupe_r', 'mini', 5000, 1e-3, 101)):.3f} at 1e-3"


def test_what_is_said_in_words_are_the_numbers_of_the_tables(committed):
    words = " ".join(text_of("docs/results.md").partition(claims_page.BEGIN)[0].split())
    assert [sentence for sentence in in_words(committed) if sentence not in words] == []


def test_the_papers_own_table_is_quoted():
    published = text_of("tupe/experiments/published.json")
    quoted = "GLUE averages of 82.96 (BERT-A), 83.64 (BERT-A^d) and 83.81 (TUPE-A, [CLS] tied)"
    assert quoted in " ".join(text_of("docs/results.md").split())
    assert [score for score in re.findall(r"\d\d\.\d\d", quoted) if score not in published] == []


FORBIDDEN = (
    "untying itself", "as the paper counts", "as the paper says", "falls with every update", "written before the",
    "[0.141, 0.154]", "projections count", "is level with", "ends level",
)  # fmt: skip
REPEATS = ["README.md", "CITATION.cff", "docs/tour.ipynb", "tupe/experiments/card.jinja"]
REPEATS += [f"docs/{name}.md" for name in ("index", "results", "paper", "probes", "schemes", "start")]
REPEATS += [f"docs/evidence/{stage}.md" for stage in claims_page.PAGES]
REPEATS += [str(path.relative_to(ROOT)) for path in ROOT.glob("models/*/README.md")]


@pytest.mark.parametrize("name", REPEATS)
def test_sentences_that_the_tables_do_not_carry_stay_away(name):
    """... and "confirmed" is a verdict in a row, nothing that prose says."""
    text = " ".join(text_of(name).split())
    assert [words for words in FORBIDDEN if words in text] == []
    lines = [line for line in text_of(name).splitlines() if "confirmed" in line.lower()]
    assert [line for line in lines if not re.match(r"\|.* \| confirmed \|", line)] == []


def test_no_interval_comes_from_two_seeds(committed):
    assert {len(seeds) for seeds in committed.finals("longer").values()} == {2}
    assert not re.search(r"\[-?[\d.]+, ", text_of("docs/evidence/longer.md"))
    rows = [line for line in text_of("docs/results.md").splitlines() if "20,000 updates |" in line]
    assert rows and "[" not in "".join(rows)


def test_dated_changes_are_as_many_as_the_pages_say():
    changes = re.findall(r"^\| (\d+) \| 2026-11-2\d \|", text_of("docs/evidence/changes.md"), re.MULTILINE)
    assert [int(number) for number in changes] == list(range(1, 13))
    for name in ("README.md", "docs/results.md", "docs/reproduction.md"):
        assert "twelve dated changes" in " ".join(text_of(name).lower().split())
        assert "The paper measures GLUE scores" in text_of(name)


def test_a_number_of_numpy_is_rounded_as_any_other():
    """numpy multiplies before it rounds: of the accuracies of 2,000 sentences some would move."""
    for value in (-1.985, 0.9365, -1.95, 0.0625):
        assert claims_tables.number(np.float64(value), 2) == f"{value:.2f}"
    assert claims_tables.number(np.float64(-0.0004)) == "0.000" and claims_tables.number(None) == ""
