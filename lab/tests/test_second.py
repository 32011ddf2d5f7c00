import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from click.testing import CliRunner
from evidence_runs import rows_of, write_run
from scipy import stats

from lab import collect, second, second_page, second_plan, tables
from lab.evidence import Evidence
from lab.plan import Trial, best_rates, final_losses, lengths_of, trials
from tupe import positions
from tupe.common import record
from tupe.experiments.statistics import contrast, paired
from tupe.positions import Dims, Positions


def run(model, lr, seed=101, stage="mini_rates"):
    return Trial(stage, model, "mini", 5000, lr, seed)


def test_every_run_of_the_protocol_is_planned_once():
    losses = {trial: 5.0 for stage in second.PROTOCOL["stages"] for trial in trials(stage, {}, second.PROTOCOL)}
    planned = [trial for stage in second.PROTOCOL["stages"] for trial in trials(stage, losses, second.PROTOCOL)]
    assert len(planned) == len(set(planned))
    assert len(trials("again", {}, second.PROTOCOL)) == 6 and len(trials("neighbours", {}, second.PROTOCOL)) == 4
    assert trials("decide", {}, second.PROTOCOL) == []  # no rates yet


def test_a_rate_at_the_edge_is_used_once_the_next_has_run():
    losses = {run("tupe_r", 1e-3): 5.2, run("tupe_r", 5e-4): 5.1}
    assert best_rates(losses, "mini_rates", second.PROTOCOL) == ({}, {"tupe_r": [2.5e-4]})
    assert run("tupe_r", 2.5e-4) in trials("mini_rates", losses, second.PROTOCOL)
    losses[run("tupe_r", 2.5e-4)] = 5.3
    assert best_rates(losses, "mini_rates", second.PROTOCOL) == ({"tupe_r": 5e-4}, {})
    assert run("tupe_r", 5e-4, 4, "decide") in trials("decide", losses, second.PROTOCOL)


def test_a_rate_is_not_chosen_before_all_planned_ones_have_run():
    assert best_rates({run("tupe_r", 1e-3): 5.2}, "mini_rates", second.PROTOCOL) == ({}, {})


def test_only_the_choosing_seed_chooses():
    losses = {run("tupe_r", 1e-3): 5.0, run("tupe_r", 5e-4): 5.1, run("tupe_r", 5e-4, 1): 4.0}
    assert best_rates(losses, "mini_rates", second.PROTOCOL)[0] == {"tupe_r": 1e-3}


def test_the_page_shows_the_rates_that_are_chosen():
    losses = {run("tupe_r", 1e-3): 5.0, run("tupe_r", 5e-4): 5.1, run("bert_r", 1e-3): 5.5}
    rows = dict(rows_of(second_page.rates(SimpleNamespace(losses=losses))))
    assert len(rows) == 6 and rows["`tupe_r`"] == "0.001" and rows["`bert_r`"] == "–"
    assert second_page.rates(SimpleNamespace(losses={})) == []


def test_controls_of_the_bundle_train_at_their_neighbours_rates():
    losses = {run("bert_a", lr): abs(lr - 7e-4) for lr in (5e-4, 7e-4, 1e-3, 1.4e-3)}
    rates = {trial.model: trial.lr for trial in trials("bundle", losses, second.PROTOCOL)}
    assert rates == {"absolute_0.06": 7e-4, "absolute_halved": 7e-4}


def test_runs_of_the_first_protocol_count_in_their_precision_and_length():
    losses = {
        (Trial("slower", "tupe_a", "mini", 5000, 1e-3, 2), "bfloat16 autocast"): 5.2,
        (Trial("main", "tupe_a", "mini", 5000, 2e-3, 2), "float32"): 5.3,
        (Trial("main", "tupe_a", "mini", 10000, 2e-3, 2), "bfloat16 autocast"): 5.1,
        (Trial("longer", "tupe_a", "tiny", 5000, 1e-3, 2), "bfloat16 autocast"): 5.0,
    }
    assert second_plan.adopted(losses) == {Trial("decide", "tupe_a", "mini", 5000, 1e-3, 2): 5.2}


def test_commands_are_of_the_protocol(tmp_path):
    job = Trial("bundle", "absolute_halved", "mini", 5000, 1e-3, 1).job(tmp_path, tmp_path, (), second.PROTOCOL)
    words = " ".join(map(str, job.command))
    assert "--position=absolute+halved" in words and "--autocast=bf16" in words
    assert f"--position-file={second.HERE / 'halved.py'}" in words
    again = Trial("again", "tupe_a_tie_cls", "tiny", 5000, 4e-3, 4).job(tmp_path, tmp_path, (), second.PROTOCOL)
    assert "--autocast=none" in again.command


def test_branches_continue_trunks_of_a_constant_rate(tmp_path):
    branch = Trial("lasting", "tupe_a", "mini", 8000, 1e-3, 1)
    words = second.job(branch, tmp_path, tmp_path).command
    assert {"--max-update=8000", "--lr-scheduler=constant_cooldown", "--cooldown-updates=1600"} <= set(words)
    trunk = second.trunk_job(branch, tmp_path, tmp_path)
    assert {"--max-update=6400", "--cooldown-updates=0", f"--output={trunk.folder}"} <= set(trunk.command)
    assert trunk.command.index(f"--output={trunk.folder}") > trunk.command.index(
        "--max-update=6400"
    )  # the last one counts


def test_a_run_begins_with_the_earlier_checkpoint_once(tmp_path):
    earlier, later = tmp_path / "earlier", tmp_path / "later"
    earlier.mkdir()
    (earlier / "checkpoint_last.pt").write_bytes(b"3200")
    second.begin(later, earlier)
    assert (later / "checkpoint_last.pt").read_bytes() == b"3200"
    (later / "checkpoint_last.pt").write_bytes(b"3300")
    (later / "record.json").write_text("{}")
    second.begin(later, earlier)
    assert (later / "checkpoint_last.pt").read_bytes() == b"3300"


def test_halved_logits_are_the_ones_of_a_lower_temperature(monkeypatch):
    monkeypatch.setattr(positions, "SCHEMES", dict(positions.SCHEMES))
    positions.load_scheme_file(second.HERE / "halved.py")
    dims = Dims(max_positions=16, width=8, heads=2, layers=1, head_dim=4, value_dim=4)
    plain, halved = Positions("absolute", dims), Positions("absolute+halved", dims)
    assert math.isclose(halved.scale * math.sqrt(2), plain.scale)


def test_the_committed_page_is_the_one_of_the_committed_tables():
    assert (second.FIRST / "second.md").read_text(encoding="utf-8") == second_page.page()


def test_the_protocol_names_the_models_of_its_yaml():
    pages = {2: "second-protocol.md", 3: "third-protocol.md"}
    texts = {n: (second.HERE.parent / "docs" / name).read_text(encoding="utf-8") for n, name in pages.items()}
    own = yaml.safe_load((second.HERE / "second.yaml").read_text(encoding="utf-8"))
    for stage, plan in own["stages"].items():
        text = texts[plan.get("protocol", 2)]
        assert f"`{stage}`" in text or stage == "again_bf16"
        assert all(f"{updates:,}" in text for updates in lengths_of(plan))
    assert all(any(f"`{model}`" in text for text in texts.values()) for model in own["models"])


def tables_of(tmp_path, losses):
    """Tables of runs, {trial: final loss, infinite if it diverged}: plateau at 9 bits until update 1,000, BERT-A's
    until 2,000."""
    for trial, loss in losses.items():
        exit, state = 2000 if trial.model == "bert_a" else 1000, "failed" if math.isinf(loss) else "finished"
        write_run(tmp_path / "out", trial, min(loss, 8), exit, state, plateau=9)
    collect.write(collect.collect(tmp_path / "out"), tmp_path / "tables")
    return second_page.Runs(tmp_path / "tables")


def losses_of(stage, of_model, seeds=(4, 5, 6, 7, 8)):
    plan = second.PROTOCOL["stages"][stage]
    return {
        Trial(stage, model, "tiny", updates, plan["rates"][model][0], seed): of_model[model](updates, seed)
        for model in of_model
        for updates in lengths_of(plan)
        for seed in seeds
    }


def noise(model, seed):
    """A little, of which no two models have the same."""
    return 0.02 * np.random.default_rng([seed, len(model)]).normal()


def test_five_seeds_decide_the_contrasts_and_the_bundle(tmp_path):
    means = {"bert_a": 6.5, "bert_a_d": 5.7, "tupe_a_tie_cls": 5.71, "tupe_a": 5.7, "bert_r": 5.9, "tupe_r": 6.0}
    parts = {"absolute_0.06": 6.2, "untied_raw": 5.705, "both": 6.51, "absolute_halved": 6.49}
    d = losses_of("tiny_decide", {m: lambda _, seed, m=m: means[m] + noise(m, seed) for m in means})
    c = losses_of("tiny_bundle", {m: lambda _, seed, m=m: parts[m] + noise(m, seed) for m in parts})
    runs = tables_of(tmp_path, d | c)
    found = {row[0]: row for row in rows_of(second_page.decided(runs, "tiny_decide"))}
    assert {name: row[-1] for name, row in found.items()} == {
        "`tupe_a_tie_cls` - `bert_a`": "confirmed",
        "`tupe_a` - `tupe_a_tie_cls`": "no more than 0.1 bits",
        "`bert_r` - `bert_a`": "confirmed",
        "`tupe_r` - `bert_r`": "refuted",
        "`tupe_r` - `tupe_a`": "refuted",
        "`tupe_a_tie_cls` - `bert_a_d`": "no more than 0.1 bits",
    }
    each = [0.01 + noise("tupe_a_tie_cls", seed) - noise("bert_a_d", seed) for seed in (4, 5, 6, 7, 8)]
    row = found["`tupe_a_tie_cls` - `bert_a_d`"]
    assert [float(value) for value in row[2].split(", ")] == pytest.approx(each, abs=6e-4)
    assert float(row[5]) == pytest.approx(stats.ttest_1samp(each, 0).pvalue, rel=0.1)
    results = [row[-1] for row in rows_of(second_page.bundle(runs, "tiny_bundle", "tiny_decide"))]
    assert results == ["lower", "not resolved", "not resolved", "lower", "not resolved"]


@pytest.mark.parametrize("lost", [1, 3, 5])
def test_a_model_with_runs_that_diverged_is_tested_on_the_other_seeds(lost, tmp_path):
    """... if these are three; it takes nothing from the other contrasts but its part in Holm's."""
    stages = [second.PROTOCOL["stages"][name]["rates"] for name in ("tiny_decide", "tiny_bundle")]
    models = [model for rates in stages for model in rates]

    def loss(model, number):
        draw = {seed: 0.02 * np.random.default_rng([seed, number]).normal() for seed in range(4, 9)}
        lost_seeds = range(9 - lost, 9) if model == "bert_a" else ()
        return lambda _, seed: math.inf if seed in lost_seeds else 6 - 0.2 * number + draw[seed]

    of = {model: loss(model, number) for number, model in enumerate(models)}
    names = "tiny_decide", "tiny_bundle"
    d, c = (losses_of(name, {m: of[m] for m in rates}) for name, rates in zip(names, stages, strict=True))
    runs = tables_of(tmp_path, d | c)
    rows = {row[0]: row for row in rows_of(second_page.decided(runs, "tiny_decide"))}
    bundle = {row[0]: row for row in rows_of(second_page.bundle(runs, "tiny_bundle", "tiny_decide"))}
    mine = rows["`bert_r` - `bert_a`"]
    assert [cell == "–" for cell in mine[2].split(", ")] == [False] * (5 - lost) + [True] * lost
    assert mine[-1] == ("confirmed" if lost == 1 else "too few seeds")
    assert bundle["`both` - `bert_a`"][-1] == ("lower" if lost == 1 else "too few seeds")
    other = rows["`tupe_r` - `tupe_a`"]
    p = stats.ttest_1samp([float(value) for value in other[2].split(", ")], 0).pvalue
    assert other[-1] == "confirmed" and float(other[5]) <= 5.1 * p
    line = next(line for line in second_page.tables_of_losses(runs) if "| bert_a | 0.002 | 5,000" in line)
    assert line.count("diverged") == lost
    decisions = second_page.contrasts(runs, "tiny_decide")
    assert decisions["tupe_r", "tupe_a"].verdict == "confirmed"
    *shown, _ = rows_of([tables.claims_table(Evidence(runs.first), decisions, decisions).markdown()])
    for row, (pair, one) in zip(shown, decisions.items(), strict=False):  # ... of docs/results.md, without the last row
        assert row[1] == "`{}` over `{}`".format(*pair)
        assert row[4:] == 2 * ["–" if one.paired is None else tables.of_gain(one.contrast), one.verdict]


def test_a_run_in_another_precision_does_not_count():
    trial = Trial("tiny_decide", "bert_a", "tiny", 5000, 2e-3, 6)
    row = {"run": str(trial), "loss": "5.1", "reason": ""}
    for of, counts in (("float32", True), ("bfloat16 autocast", False)):
        tables = {"runs": [row | {"precision": of}]}
        assert (trial in second_plan.losses_in({"runs": []}, tables)) == counts


def test_intervals_of_seeds_and_text_are_of_the_stored_blocks(tmp_path):
    means = {"bert_a": 6.5, "tupe_a_tie_cls": 6.0}
    models = {m: lambda _, seed, m=m: means[m] + noise(m, seed) for m in means}
    runs = tables_of(tmp_path, losses_of("tiny_decide", models))
    low, high = map(float, re.findall(r"-?\d\.\d+", runs.resampled("tupe_a_tie_cls", "bert_a", "tiny_decide")))
    of_seeds = paired(runs.finals("tiny_decide"), "tupe_a_tie_cls", "bert_a")
    assert of_seeds.interval[0] < low < of_seeds.mean < high < of_seeds.interval[1] < 0  # these blocks are all alike
    runs.blocks.clear()
    assert runs.resampled("tupe_a_tie_cls", "bert_a", "tiny_decide") == ""


def test_a_stage_is_read_once_all_of_it_has_run(tmp_path):
    losses = losses_of("tiny_decide", {m: lambda _, seed: 6 for m in second.PROTOCOL["stages"]["tiny_decide"]["rates"]})
    losses.popitem()
    runs = tables_of(tmp_path, losses)
    assert second_page.decided(runs, "tiny_decide") == [] == second_page.bundle(runs, "tiny_bundle", "tiny_decide")


@pytest.mark.parametrize(
    ("left", "seeds", "verdict"),
    [
        (0.2, (4, 5, 6, 7, 8), "the gain lasts: 0.20 bits are left"),
        (0.05, (4, 5, 6, 7, 8), "the gain lasts: 0.05 bits are left, no more than 0.1"),
        (0.0, (4, 5, 6, 7, 8), "no more than 0.1 bits are left"),
        (-0.2, (4, 5, 6, 7, 8), "reversed"),
        (0.2, (4, 5, 6), "–"),
        (0.2, (4, 5, 6, 7, -8), "the gain lasts: 0.20 bits are left"),  # -8: BERT-A's longest run diverged
    ],
)
def test_what_lasts_is_the_gap_at_the_largest_budget(left, seeds, verdict, tmp_path):
    bert = {4000: 6.8, 8000: 6.0, 16000: 5.0}
    gap = {4000: 1.0, 8000: 0.5, 16000: left}
    models = {
        "bert_a": lambda updates, seed: (
            math.inf if updates == 16000 and -seed in seeds else bert[updates] + noise("bert_a", seed)
        ),
        "tupe_a": lambda updates, seed: bert[updates] - gap[updates] + noise("bert_a", seed) + 0.001 * (seed - 6),
        "tupe_r": lambda updates, seed: bert[updates] - 0.5 + noise("tupe_r", seed),
    }
    all_seeds = sorted(map(abs, seeds))
    runs = tables_of(tmp_path, losses_of("tiny_lasting", models, all_seeds))
    lines = second_page.lasting(runs, "tiny_lasting")
    rows = rows_of(lines[:3])[:3]
    assert [row[:2] for row in rows] == [["`tupe_a`", "4,000"], ["`tupe_a`", "8,000"], ["`tupe_a`", "16,000"]]
    assert [float(row[3].split()[0]) for row in rows] == pytest.approx(list(gap.values()), abs=2e-3)
    assert [row[-1] for row in rows] == ["–", "–", verdict]
    summary = rows_of([second_page.lasting_summary(runs).markdown()])
    assert [row[3] for row in summary if row[1] == "verdict"] == [verdict] * (verdict != "–")
    if min(seeds) < 0:
        assert rows[-1][2].split(", ")[-1] == "–" and rows[1][2].split(", ")[-1] != "–"
        return
    assert float(rows[-1][5].split()[0]) == pytest.approx(1 - left, abs=2e-3)  # of the first gap
    # TUPE-A has BERT-A's losses of 4,000 and 8,000 updates, 6.8 and 6.0, in its shortest run already, which ends at 5.8
    assert rows[0][6] == ", ".join(["≤ 100"] * len(seeds)) and rows[1][6] == ", ".join(["≤ 50"] * len(seeds))


def test_the_results_show_what_e_has_so_far(tmp_path):
    models = {m: lambda updates, seed, gap=gap: gap - updates / 1e4 for m, gap in (("bert_a", 7.0), ("tupe_a", 6.5))}
    losses = losses_of("tiny_lasting", models, (4, 5, 6))
    first = {trial: loss for trial, loss in losses.items() if trial.updates == 4000}
    assert second_page.lasting_summary(tables_of(tmp_path / "first", first)) == ""
    runs = tables_of(tmp_path / "all", losses)
    table = second_page.lasting_summary(runs).markdown()
    *budgets, after = rows_of([table])
    assert [row[:4] for row in budgets] == [["tiny", f"{n:,}", "3", "0.50 [0.50, 0.50]"] for n in (4000, 8000, 16000)]
    n, one = second_page.after_exit(runs, "tiny_lasting")["tupe_a"]
    assert after[:3] == ["tiny", f"{n:,} after exit, at twice BERT-A's rate", "3"] and after[3].startswith(
        f"{one.mean:.2f} ["
    )


def test_the_updates_needed_lie_between_the_budgets(tmp_path):
    finals = {"bert_a": {4000: 7.0, 8000: 6.0, 16000: 4.0}, "tupe_a": {4000: 6.5, 8000: 5.5, 16000: 5.0}}
    models = {m: lambda updates, seed, m=m: finals[m][updates] for m in finals}
    runs = tables_of(tmp_path, losses_of("tiny_lasting", models, (4, 5, 6)))
    at = {n: second_page.updates_share(runs, "tiny_lasting", "tupe_a", n).split(", ")[0] for n in finals["bert_a"]}
    # 6.0 bits are half way from 6.5 to 5.5, so after 4,000 x sqrt(2) updates
    assert at == {4000: "≤ 100", 8000: f"{100 * 4000 * 2**0.5 / 8000:.0f}", 16000: "> 100"}


def test_seeds_that_were_known_do_not_confirm_alone():
    one = contrast({1: 5.0, 2: 5.0, 4: 5.0, 5: 5.3}, {1: 6.0, 2: 6.0, 4: 6.0, 5: 5.2})
    assert second_page.verdict_of_claim(one, 0.01, None, False, fresh=(4, 5)) == "not resolved"
    assert second_page.verdict_of_claim(one, 0.01, None, False, fresh=(4,)) == "confirmed"
    assert second_page.verdict_of_claim(one, 0.01, None, True) == "lower, uncorrected"


def test_after_the_exit_models_are_compared_at_equal_updates_of_a_constant_rate(tmp_path):
    finals = {"bert_a": 5.0, "tupe_a": 4.8}
    models = {m: lambda updates, seed, m=m: finals[m] + noise("bert_a", seed) for m in finals}
    runs = tables_of(tmp_path, losses_of("tiny_lasting", models, (4, 5, 6)))
    ((model, (updates, one)),) = second_page.after_exit(runs, "tiny_lasting").items()
    threshold, exits, slopes = Evidence(runs.first).threshold("controls"), {}, {}
    for model, start in (("bert_a", 2000), ("tupe_a", 1000)):
        slopes[model] = (9 - finals[model]) / (16000 - start)
        exits[model] = start + (9 - threshold) / slopes[model]
    n = (12800 - exits["bert_a"]) // 50 * 50
    assert (model, updates, [*one.differences]) == ("tupe_a", n, [4, 5, 6])
    assert one.mean == pytest.approx((slopes["tupe_a"] - slopes["bert_a"]) * n, abs=0.01)
    # What has begun changes nothing: a further seed's first budget, a further model's.
    begun = losses_of("tiny_lasting", models, (7,)) | losses_of("tiny_lasting", {"absolute_0.06": models["tupe_a"]})
    runs = tables_of(tmp_path / "begun", {t: loss for t, loss in begun.items() if t.updates == 4000})
    again = tables_of(tmp_path / "again", losses_of("tiny_lasting", models, (4, 5, 6)))
    runs.curves |= again.curves
    runs.losses |= again.losses
    assert second_page.after_exit(runs, "tiny_lasting")["tupe_a"] == (updates, one)
    assert len(second_page.lasting_summary(runs).markdown().splitlines()) == 2 + 3 + 1


def test_the_curve_of_a_branch_begins_with_its_trunks(tmp_path):
    branch = Trial("tiny_lasting", "tupe_a", "tiny", 8000, 4e-3, 4)
    write_run(tmp_path, branch, 5.0)
    for updates in (4000, 8000):
        folder = second.trunk(replace(branch, updates=updates), tmp_path)
        folder.mkdir(parents=True)
        (folder / "checkpoint_last.pt").touch()
        first = 50 if updates == 4000 else 3250
        logged = [
            {"num_updates": str(n), "loss": "9", "train_wall": "7"} for n in range(first, updates * 4 // 5 + 1, 50)
        ]
        (folder / "train.log").write_text("".join(f"| train_inner | {json.dumps(row)}\n" for row in logged))
    found = collect.collect(tmp_path)
    found["training"] = [row for row in found["training"] if int(row["updates"]) > 6400]
    rows = second.whole_curve(branch, found, tmp_path)
    assert [int(row["updates"]) for row in rows] == list(range(50, 8001, 50))
    assert {row["loss"] for row in rows[:128]} == {"9"} and "9" not in {row["loss"] for row in rows[128:]}


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

    monkeypatch.setattr(second.runner, "run", run)
    monkeypatch.setattr(second, "train", lambda data, output, left, *rest: trained.append(left))
    for _ in range(2):
        with pytest.raises(SystemExit, match="trunks: 1 of 2 jobs did not finish: .*seed 6"):
            second.train_length(tmp_path, tmp_path, planned, 1, ())
        assert trained.pop() == planned[:2]
        assert final_losses(tmp_path) == {planned[1]: math.inf}


def test_a_trunk_that_is_lost_begins_anew(tmp_path):
    branch = Trial("tiny_lasting", "tupe_a", "tiny", 8000, 4e-3, 4)
    mine = second.trunk(branch, tmp_path)
    assert second.trunks_of(branch, tmp_path) == [mine]
    earlier = second.trunk(replace(branch, updates=4000), tmp_path)
    earlier.mkdir(parents=True)
    (earlier / "checkpoint_last.pt").touch()
    assert second.trunks_of(branch, tmp_path) == [earlier, mine]


def test_a_model_that_no_stage_has_is_refused(tmp_path):
    words = ["--data", tmp_path, "--output", tmp_path / "out", "--stages", "tiny_lasting", "--models", "both"]
    result = CliRunner().invoke(second.run, list(map(str, words)))
    assert result.exit_code and "no stage of tiny_lasting has a model 'both'" in result.output


def test_zorro_is_scored_of_what_is_kept_and_shown_by_seed(pretrained, vocabulary, tmp_path, monkeypatch):
    for module in (second, second_page):
        monkeypatch.setattr(module, "ZORRO", tmp_path / "tables/zorro.csv.gz")
    monkeypatch.setattr(second, "FIRST", tmp_path)
    monkeypatch.setattr(second, "HERE", tmp_path / "here")
    monkeypatch.setattr(second, "page", lambda: "\n".join(second_page.zorro_table()))
    loaded = []
    monkeypatch.setattr(second, "load_scheme_file", loaded.append)
    (tmp_path / "models").mkdir()
    (tmp_path / "tables").mkdir()
    (tmp_path / "zorro").mkdir()
    for name in ("case", "order"):
        (tmp_path / f"zorro/{name}.txt").write_text("cat the sat on a mat .\nthe cat sat on a mat .\n" * 2)
    for seed in (4, 5, 6):
        trial = Trial("again", "tupe_a_tie_cls", "tiny", 5000, 4e-3, seed)
        write_run(tmp_path / "out", trial, 5.7)
        if seed != 6:
            shutil.copy(pretrained, trial.folder(tmp_path / "out") / "model.pt")
    words = ["--runs", tmp_path / "out", "--data", vocabulary, "--pairs", tmp_path / "zorro"]
    result = CliRunner().invoke(second.score_zorro, list(map(str, words)))
    assert result.exit_code == 0, result.output
    assert [Path(file).name for file in loaded] == ["halved.py", "intervention.py"]  # models' own encodings
    scores = second_page.zorro_scores()
    assert [name[-1] for name in scores] == ["4", "5"] and all(set(of) == {"case", "order"} for of in scores.values())
    (row,) = re.findall(r"\| `again/tupe_a_tie_cls/tiny_5000_lr0.004` \| 2 \| (\S+), (\S+) \|", second.page())
    assert [float(value) for value in row] == pytest.approx([100 * sum(of.values()) / 2 for of in scores.values()])
