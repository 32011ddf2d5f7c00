"""The runs at BERT-Base's size, as a driver for one card: rehearsed with a layer, on made-up text."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from lab import base
from tupe.data.splits import write_split


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    """2,000 sentences of 24 to 90 tokens, one too long."""
    folder = tmp_path_factory.mktemp("base")
    draws = np.random.default_rng(1)
    sentences = [[*draws.integers(4, 63, draws.integers(23, 90)), 2] for _ in range(2000)]
    sentences[10] = [5] * 200
    for name in ("train", "valid"):
        write_split(folder / name, sentences, 64)
    (folder / "dict.txt").write_text("".join(f"w{n} 1\n" for n in range(59)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "HELD_OUT", 40)
        base.pack(folder, folder / "pack", updates=10)
    return folder / "pack"


def test_a_block_is_whole_sentences_and_none_comes_twice(pack):
    text = base.Text(pack)
    rows = text.of["train"]
    sizes = (rows != base.PAD).sum(1)
    assert text.types == 64 and rows.shape == (320, base.LENGTH) and set(rows[:, 0]) == {base.BOS}
    assert (rows[np.arange(320), sizes - 1] == 2).all() and sizes.min() > base.LENGTH - 90
    assert len(np.unique(rows, axis=0)) == 320 and not (rows[:, 1:150] == 5).all(1).any()
    seen = np.concatenate([np.where(targets == base.PAD, ids, targets) for ids, targets in text.batches(1, 10)])
    assert sorted(map(tuple, seen)) == sorted(map(tuple, rows))


def test_masks_are_berts_and_the_same_for_all_models(pack):
    text = base.Text(pack)
    ids, targets = text.masked(text.of["train"], 1, 2)
    again = text.masked(text.of["train"], 1, 2)
    assert all(np.array_equal(a, b) for a, b in zip((ids, targets), again, strict=True))
    hidden, free = targets != base.PAD, text.of["train"] != base.PAD
    assert 0.13 < hidden.sum() / free.sum() < 0.17 and not (hidden & ~free).any()
    of_blocks = np.isin(targets, (base.BOS, 2))  # <s> and </s> are hidden as often: `tupe.data.masks` hides them, too
    assert 0.1 < of_blocks.sum() / np.isin(text.of["train"], (base.BOS, 2)).sum() < 0.2
    assert 0.77 < (ids[hidden] == 63).mean() < 0.83 and 0.09 < (ids == targets)[hidden].mean() < 0.14
    assert (ids == text.of["train"])[~hidden].all()


def test_the_rule_takes_the_longest_runs_that_fit():
    # six runs of 5,000 updates are 122.9 million slots
    assert base.longest(350_000, 6, 420) == 5000 and base.longest(350_000, 6, 400) == 4000
    assert base.longest(10_000, 6, 60) == 2500


def test_a_run_ends_with_a_held_out_loss(pack, tmp_path, monkeypatch):
    monkeypatch.setattr(base, "EVERY", 2)
    base.train(base.Text(pack), "tupe_a", 1e-3, 1, 6, tmp_path / "run", layers=1, width=64)
    lines = base.lines_of(tmp_path / "run")
    assert [line.get("updates") for line in lines] == [2, 4, 6, None] and 5 < lines[-1]["final"] < 8
    with open(tmp_path / "run", "a") as file:
        file.write('{"final')  # cut off
    assert base.lines_of(tmp_path / "run") == lines


def test_a_run_that_diverges_says_so_and_is_not_chosen(pack, tmp_path, monkeypatch):
    monkeypatch.setattr(base, "EVERY", 2)
    base.train(base.Text(pack), "bert_a", float("inf"), 1, 6, tmp_path / "run", layers=1, width=64)
    assert base.lines_of(tmp_path / "run")[-1] == {"final": None}
    ends = [{"final": None}], [{"loss": 9.0}, {"loss": 9.0}, {"final": 9.0}], [{"final": None}]
    for rate, lines in zip(base.RATES, ends, strict=True):
        file = base.file_of(tmp_path, "bert_a", rate, base.PILOT_SEED, 100)
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert base.best_rate(tmp_path, "bert_a", 100) == base.RATES[1]


@pytest.fixture
def started(monkeypatch):
    """The runs that are started; each writes a curve at once, of as many lines as `cut` says, and if it says None, all
    and its end. A later run begins a second later."""
    runs, cut = [], [None]

    class Process:
        def __init__(self, words):
            model, rate, seed, updates, target, *_ = words[words.index("--pack") + 2 :]
            runs.append((model, float(rate), int(seed), int(updates)))
            points = range(50, int(updates) + 1, 50)
            lines = [{"updates": n, "loss": 9 - n / 500 + abs(float(rate) - 5e-4), "time": len(runs) + n / 10}
                     for n in points][: cut[0]]  # fmt: skip
            lines += [{"final": 5.0}] if cut[0] is None else []
            base.Path(target).write_text("".join(json.dumps(line) + "\n" for line in lines))

        def wait(self):
            return 0

    monkeypatch.setattr(base.subprocess, "Popen", Process)
    return runs, cut


def arguments(folder, **more):
    sizes = {"layers": 1, "width": 64, "pilot": 100, "lengths": (3000, 200)}
    return SimpleNamespace(pack=folder, output=folder / "out", minutes=60, **{**sizes, **more})


def test_rates_are_chosen_and_what_is_finished_is_not_repeated(tmp_path, started):
    started, _ = started
    args = arguments(tmp_path)
    base.run(args)
    plan = json.loads((tmp_path / "out/plan.json").read_text())
    assert plan["rates"] == {"bert_a": 5e-4, "tupe_a": 5e-4} and plan["updates"] == 3000
    # six times 50 updates, from the first run's first line to the last run's last one, which is 5 s later than its own
    assert plan["slots_per_second"] == 6 * 50 * 32 * 128 / (5 + 5)
    assert len(started) == 6 + 6 and len({seed for *_, seed, updates in started if updates == 3000}) == 3
    base.run(args)
    assert len(started) == 12
    # curves of TUPE-A and BERT-A are the same: no delay, no gap
    page = base.table(tmp_path / "out")
    assert page.count("500 updates after the exits 0.00 bits ahead, 1,000 updates after") == 3
    assert page.count("final loss 5.000") == 6 and "| base | `tupe_a` | 0.0005 | 3 |" in page


def test_a_curve_that_was_cut_off_is_kept_until_the_new_one_is_longer(tmp_path, started):
    started, cut = started
    args = arguments(tmp_path)
    args.output.mkdir()
    cut[0] = 1
    base.run_all(args, [("bert_a", 5e-4, base.PILOT_SEED)], args.pilot)
    cut[0] = None
    base.run(args)  # pilots that did not end are started again, all of them
    (tmp_path / "out" / "plan.json").write_text((tmp_path / "out" / "plan.json").read_text().replace("3000", "4000"))
    before = len(started)
    for lines in (40, 10):
        cut[0] = lines
        base.run(args)
    assert len(started) == before + 12
    file = base.file_of(tmp_path / "out", "tupe_a", 5e-4, 2, 4000)
    assert len(base.lines_of(file)) == 10 and len(base.curve_of(file)) == 40
    page = base.table(tmp_path / "out")
    assert page.count("500 updates after the exits 0.00 bits ahead") == 3 and "final loss" not in page
    for model in base.MODELS:
        for path in (tmp_path / "out").glob(f"{model}_4000_*_seed3.*"):
            path.unlink()
    assert "| base | `tupe_a` | 0.0005 | 2 |" in base.table(tmp_path / "out")
    with pytest.raises(SystemExit, match="has no plan.json"):
        base.table(tmp_path)
