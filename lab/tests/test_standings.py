"""The leaderboard, and a user's encoding in it: what is trained, and the numbers; runs are made up, nothing is
trained."""

import json
import math
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from evidence_runs import write_run
from helpers import write_data
from scipy import stats

from lab import collect, execute, leaderboard, standings
from lab.plan import Trial
from lab.standings import BLOCKS, ENCODINGS, PROTOCOL, Standings, planned
from tupe.common.architectures import preset, with_size
from tupe.encoder import Encoder
from tupe.positions import SCHEMES, parse

UPDATES = PROTOCOL["updates"]
LOSSES = {1: 5.3, 2: 5.32, 3: 5.31}


def finish(output, name, loss, lr=2e-3, seed=1, block="bert", exit=800, lengths=(1, 2, 4, 16)):
    trial = Trial(block, name, "tiny", UPDATES, lr, seed)
    if not math.isfinite(loss):
        write_run(output, trial, 0, state="failed")
        return
    write_run(output, trial, loss, exit=exit)
    path = trial.folder(output) / "evaluation.json"
    further = {"length": {str(n): 4 + 0.1 * n for n in lengths}, "encoding": {"parameters": 1234, "cost": 1.25 + seed}}
    path.write_text(json.dumps({**json.loads(path.read_text()), "further": further}))


def finish_all(output, name, losses=LOSSES, block="bert", **how):
    for lr in PROTOCOL["learning_rates"]:
        finish(output, name, losses[1] + abs(math.log2(lr / 2e-3)), lr, block=block, **how)
    for seed in PROTOCOL["seeds"][1:]:
        finish(output, name, losses[seed], seed=seed, block=block, **how)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Tables of nopos and tupe_r, and finished runs of `rope`; every planned run has to be one of these."""
    finish_all(tmp_path / "runs", "nopos", {1: 7.5, 2: 7.5, 3: 7.5}, exit=1900)
    finish_all(tmp_path / "runs", "tupe_r", {1: 5.0, 2: 5.1, 3: 5.2}, lengths=(1,))
    collect.write(collect.collect(tmp_path / "runs"), tmp_path / "tables")
    finish_all(tmp_path / "out", standings.name_of("rope", "bert_a"))
    write_data(tmp_path / "data")

    def no_training(jobs, *args, **options):
        assert {execute.record.state_of(job.folder) for job in jobs} <= {"finished", "failed"}
        return dict.fromkeys(jobs, "finished")

    monkeypatch.setattr(execute.runner, "run", no_training)
    monkeypatch.setitem(PROTOCOL, "tokens", 50)
    return tmp_path


def run(place, *words):
    given = ["--data", place / "data", "--output", place / "out", "--tables", place / "tables", *words]
    return CliRunner().invoke(leaderboard.row, list(map(str, given)))


def rows_of(markdown):
    lines = [line.strip("| \n").split(" | ") for line in markdown.splitlines() if line.startswith("|")]
    return {cells[0].strip("*`"): [cell.strip(" *") for cell in cells] for cells in lines[2:]}


def test_every_encoding_of_the_registry_has_a_place():
    there = {part.name for about in ENCODINGS.values() for part in parse(about["position"])}
    assert there >= {name for name, scheme in SCHEMES.items() if scheme.__module__.startswith("tupe.")}


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("name", ENCODINGS)
def test_every_encoding_can_be_built_in_both_blocks(name, block):
    about = preset(with_size(BLOCKS[block], "tiny")) | ENCODINGS[name]
    encoder = Encoder(20, 1, max_positions=8, **about | {"width": 16, "heads": 2, "ffn": 16})
    encoder(torch.randint(4, 20, (2, 8)))[0].sum().backward()


def test_rates_then_seeds_at_the_best():
    first = planned({}, "rope", "modern")
    assert [(trial.lr, trial.seed) for trial in first] == [(lr, 1) for lr in PROTOCOL["learning_rates"]]
    losses = {trial: abs(trial.lr - 4e-3) for trial in first}
    assert [(trial.lr, trial.seed) for trial in planned(losses, "rope", "modern")[3:]] == [(4e-3, 2), (4e-3, 3)]
    losses[replace(first[0], lr=4e-3)] = math.inf
    assert {trial.lr for trial in planned(losses, "rope", "modern")[3:]} == {2e-3}
    assert planned(dict.fromkeys(first, math.inf), "rope", "modern") == first


def test_a_job_says_what_the_protocol_says(tmp_path):
    words = standings.job(Trial("modern", "tupe_r", "tiny", UPDATES, 2e-3, 1), tmp_path, tmp_path, ["--cpu"]).command
    given = {"--arch=modernbert_tiny", "--position=untied+t5", "--cls=untied", f"--max-update={UPDATES}", "--cpu"}
    assert {*given, *PROTOCOL["options"]} <= set(words)


def test_a_row_is_what_its_runs_say(place):
    standings = Standings(collect.read(place / "tables"))
    rows = rows_of(standings.table("bert").markdown())
    assert list(rows)[:2] == ["tupe_r", "nopos"] and rows["alibi"][2:] == ["0 of 5", *"–" * 9]
    low, high = stats.t.interval(0.95, 2, 5.1, stats.sem([5.0, 5.1, 5.2]))
    assert rows["tupe_r"][1:5] == ["`untied+t5`, [CLS] untied", "5 of 5", "0.002", f"5.100 [{low:.3f}, {high:.3f}]"]
    exits = [800 + (UPDATES - 800) * 1 / (8 - loss) for loss in (5.0, 5.1, 5.2)]  # 8 bits, then a line; 7 is left
    assert [int(number.replace(",", "")) for number in rows["tupe_r"][5].split(", ")] == [
        pytest.approx(update, abs=1) for update in exits
    ]
    assert rows["tupe_r"][6] == "61.0, 62.0, 63.0"  # 60 and the seed
    assert rows["tupe_r"][7:] == ["refused", "refused", "refused", "1,234", "3.25"]
    assert rows["nopos"][5] == "never, never, never" and rows["nopos"][7:10] == ["+0.10", "+0.30", "+1.50"]
    assert rows_of(standings.table("modern").markdown())["tupe_r"][2:] == ["0 of 5", *"–" * 9]


def test_a_users_encoding_gets_the_same_row(place):
    result = run(place, "--position=rope")
    assert result.exit_code == 0, result.output
    text = (place / "out" / "leaderboard.md").read_text()
    assert text in result.output and rows_of(text)[standings.name_of("rope", "bert_a")][1:4] == ["`rope`", "5 of 5",
                                                                                                   "0.002"]  # fmt: skip
    assert "own_rope" not in ENCODINGS and "| **`own_rope" in text


def test_divergence_is_counted(place):
    name = standings.name_of("rope", "bert_a")
    tables = collect.read(place / "tables")
    finish(place / "other", name, math.inf, 4e-3)
    finish(place / "other", name, 5.3, 2e-3)
    finish(place / "other", name, 5.4, 8e-3)
    tables = collect.merge(tables, collect.collect(place / "other"))
    row = Standings(tables, {**ENCODINGS, name: {"position": "rope"}}).row(name, "bert")
    assert row[2:4] == ["3 of 5, 1 diverged", "0.002"]


def test_a_failed_run_stops_no_other(tmp_path, monkeypatch):
    trained = []

    def train(data, output, new, *args):
        trained.append(new[0].model)
        if new[0].model == "rope":
            raise SystemExit("rope: 1 of 3 jobs did not finish")
        if new[0].model == "shaw":
            raise SystemExit(143)

    monkeypatch.setattr(standings, "train", train)
    with pytest.raises(SystemExit, match="1 of 3 jobs"):
        standings.train_entries(tmp_path, tmp_path, [("rope", "bert"), ("t5", "bert")], 1)
    assert trained == ["rope", "t5"]
    with pytest.raises(SystemExit, match="143"):  # a signal stops all
        standings.train_entries(tmp_path, tmp_path, [("shaw", "bert"), ("t5", "bert")], 1)
    assert trained[2:] == ["shaw"]


@pytest.mark.parametrize("word", ["--seed=2", "--fp16", "optimization.lr=[1]", "--autocast", "model.dropout=0.1"])
def test_what_the_protocol_fixes_is_refused(word, place):
    result = run(place, "--position=rope", word)
    assert result.exit_code == 2 and f"{word.partition('=')[0]}: the protocol" in result.output


def test_tables_that_do_not_compare_are_refused(place):
    tables = collect.read(place / "tables")
    for row in tables["runs"]:
        row["data"] = "another"
    collect.write(tables, place / "tables")
    result = run(place, "--position=rope")
    assert result.exit_code == 2 and "losses do not compare" in result.output
    (place / "nothing").mkdir()
    result = run(place, "--position=rope", "--tables", place / "nothing")
    assert result.exit_code == 2 and "no runs to compare with" in result.output
    for word in ("--position=rop", "--arch=gau", "--arch=electra_a"):
        assert run(place, "--position=rope" if "arch" in word else word, word).exit_code == 2


def test_encodings_that_are_spelt_alike_have_folders_of_their_own():
    names = {standings.name_of(position, "bert_a") for position in ("absolute+t5", "absolute:t5", "absolute+t5")}
    assert len(names) == 2 and all(re.fullmatch(r"[\w.]+", name) for name in names)


def test_an_encoding_s_file_that_has_changed_is_another_encoding(tmp_path):
    names, file = [], tmp_path / "mine.py"
    for text in ("slope = 1", "slope = 2", "slope = 1"):
        file.write_text(text)
        names.append(standings.name_of("mine", "bert_a", [f"--position-file={file}"]))
    assert names[0] == names[2] != names[1]


def test_cost_leaves_the_model_as_it_is():
    encoder = Encoder(20, 1, layers=1, width=8, ffn=8, heads=2, max_positions=8, position="t5")
    model = SimpleNamespace(tupe=SimpleNamespace(encoder=encoder))
    own = encoder.positions
    assert standings.cost(model, 8, 2) > 0 and encoder.positions is own
    assert all(parameter.grad is None for parameter in encoder.parameters())
