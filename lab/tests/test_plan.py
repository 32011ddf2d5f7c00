"""What the experiments train, at which rates, and which committed runs count."""

import yaml

from lab.known import Runs, adopted, losses_in
from lab.plan import HERE, LATER, PLAN, THIRD, Trial, best_rates, lengths_of, trials


def run(model, lr, seed=101, stage="mini_rates"):
    return Trial(stage, model, "mini", 5000, lr, seed)


def test_every_run_of_the_protocol_is_planned_once():
    losses = {trial: 5.0 for stage in LATER["stages"] for trial in trials(stage, {}, LATER)}
    planned = [trial for stage in LATER["stages"] for trial in trials(stage, losses, LATER)]
    assert len(planned) == len(set(planned))
    assert len(trials("again", {}, LATER)) == 6 and len(trials("neighbours", {}, LATER)) == 4
    assert trials("decide", {}, LATER) == []  # no rates yet


def test_a_rate_at_the_edge_is_used_once_the_next_has_run():
    losses = {run("tupe_r", 1e-3): 5.2, run("tupe_r", 5e-4): 5.1}
    assert best_rates(losses, "mini_rates", LATER) == ({}, {"tupe_r": [2.5e-4]})
    assert run("tupe_r", 2.5e-4) in trials("mini_rates", losses, LATER)
    losses[run("tupe_r", 2.5e-4)] = 5.3
    assert best_rates(losses, "mini_rates", LATER) == ({"tupe_r": 5e-4}, {})
    assert run("tupe_r", 5e-4, 4, "decide") in trials("decide", losses, LATER)


def test_a_rate_is_not_chosen_before_all_planned_ones_have_run():
    assert best_rates({run("tupe_r", 1e-3): 5.2}, "mini_rates", LATER) == ({}, {})


def test_only_the_choosing_seed_chooses():
    losses = {run("tupe_r", 1e-3): 5.0, run("tupe_r", 5e-4): 5.1, run("tupe_r", 5e-4, 1): 4.0}
    assert best_rates(losses, "mini_rates", LATER)[0] == {"tupe_r": 1e-3}


def test_controls_of_the_bundle_train_at_their_neighbours_rates():
    losses = {run("bert_a", lr): abs(lr - 7e-4) for lr in (5e-4, 7e-4, 1e-3, 1.4e-3)}
    rates = {trial.model: trial.lr for trial in trials("bundle", losses, LATER)}
    assert rates == {"absolute_0.06": 7e-4, "absolute_halved": 7e-4}


def test_runs_of_the_first_protocol_count_in_their_precision_and_length():
    losses = {
        (Trial("slower", "tupe_a", "mini", 5000, 1e-3, 2), "bfloat16 autocast"): 5.2,
        (Trial("main", "tupe_a", "mini", 5000, 2e-3, 2), "float32"): 5.3,
        (Trial("main", "tupe_a", "mini", 10000, 2e-3, 2), "bfloat16 autocast"): 5.1,
        (Trial("longer", "tupe_a", "tiny", 5000, 1e-3, 2), "bfloat16 autocast"): 5.0,
    }
    assert adopted(losses) == {Trial("decide", "tupe_a", "mini", 5000, 1e-3, 2): 5.2}


def test_a_run_in_another_precision_does_not_count():
    expected = {
        Trial("tiny_decide", "bert_a", "tiny", 5000, 2e-3, 6): "float32",
        Trial("delay", "bert_a", "mini", 5000, 1e-3, 2): "bfloat16 autocast",
        Trial("delay", "bert_a", "mini", 5000, 1e-3, 3): "float32",  # of one of its float32_seeds
    }
    for trial, planned in expected.items():
        for of in ("float32", "bfloat16 autocast"):
            row = {"run": str(trial), "loss": "5.1", "reason": "", "precision": of}
            assert (trial in losses_in([], [row])) == (of == planned)


def test_the_protocol_names_the_models_of_its_yaml():
    pages = {2: "second-protocol.md", 3: "third-protocol.md"}
    texts = {n: (HERE.parent / "docs" / name).read_text(encoding="utf-8") for n, name in pages.items()}
    own = yaml.safe_load((HERE / "second.yaml").read_text(encoding="utf-8"))
    for stage, plan in own["stages"].items():
        text = texts[plan.get("protocol", 2)]
        assert f"`{stage}`" in text or stage == "again_bf16"
        assert all(f"{updates:,}" in text for updates in lengths_of(plan))
    assert all(any(f"`{model}`" in text for text in texts.values()) for model in own["models"])


def test_committed_runs_count_at_the_rate_that_the_pilot_decided():
    """... and in another stage that includes them, with its seeds."""
    runs = Runs()
    assert {t.lr for t in runs.planned("main") if t.model in ("bert_a", "tupe_a")} == {1e-3, 2e-3}
    stages = {t.model: t.stage for t in runs.planned("slower")}
    assert stages["bert_a"] == "main" and stages["tupe_a"] == "slower"
    assert set(runs.finals("slower")["bert_a"]) == {1, 2, 3}
    assert runs.is_complete("decide") and not runs.is_complete("lasting")
    assert THIRD and set(THIRD).isdisjoint(PLAN["stages"])
