import math
import re
import shutil

import pytest
import yaml
from click.testing import CliRunner
from evidence_runs import write_run

from reproduction import second
from tupe import positions
from tupe.experiments.plan import Trial, best_rates, lengths_of, trials
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
    assert second.adopted(losses) == {Trial("decide", "tupe_a", "mini", 5000, 1e-3, 2): 5.2}


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
    assert (second.FIRST / "second.md").read_text(encoding="utf-8") == second.page()


def test_the_protocol_names_the_models_of_its_yaml():
    text = (second.HERE.parent / "docs/second-protocol.md").read_text(encoding="utf-8")
    own = yaml.safe_load((second.HERE / "second.yaml").read_text(encoding="utf-8"))
    for stage, plan in own["stages"].items():
        assert f"`{stage}`" in text or stage == "again_bf16"
        assert all(f"{updates:,}" in text for updates in lengths_of(plan))
    assert all(f"`{model}`" in text for model in own["models"])


def test_zorro_is_scored_of_what_is_kept_and_shown_by_seed(pretrained, vocabulary, tmp_path, monkeypatch):
    monkeypatch.setattr(second, "ZORRO", tmp_path / "tables/zorro.csv.gz")
    monkeypatch.setattr(second, "FIRST", tmp_path)
    monkeypatch.setattr(second, "HERE", tmp_path / "here")
    monkeypatch.setattr(second, "page", lambda: "\n".join(second.zorro_table()))
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
    scores = second.zorro_scores()
    assert [name[-1] for name in scores] == ["4", "5"] and all(set(of) == {"case", "order"} for of in scores.values())
    (row,) = re.findall(r"\| `again/tupe_a_tie_cls/tiny_5000_lr0.004` \| 2 \| (\S+), (\S+) \|", second.page())
    assert [float(value) for value in row] == pytest.approx([100 * sum(of.values()) / 2 for of in scores.values()])
