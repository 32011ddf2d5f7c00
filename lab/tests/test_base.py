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
    hidden, free = targets != base.PAD, text.of["train"] > base.UNKNOWN
    assert 0.13 < hidden.sum() / free.sum() < 0.17 and not (hidden & ~free).any()
    assert 0.77 < (ids[hidden] == 63).mean() < 0.83 and 0.09 < (ids == targets)[hidden].mean() < 0.14
    assert (ids == text.of["train"])[~hidden].all()


def test_the_rule_takes_the_longest_runs_that_fit():
    # six runs of 5,000 updates are 122.9 million slots
    assert base.longest(350_000, 6, 420) == 5000 and base.longest(350_000, 6, 400) == 4000
    assert base.longest(10_000, 6, 60) == 2500


def test_a_run_ends_with_a_held_out_loss_and_a_stopped_one_has_its_schedule(pack, tmp_path, monkeypatch):
    monkeypatch.setattr(base, "EVERY", 2)
    text, files = base.Text(pack), {}
    for name, stop in (("whole", 6), ("stopped", 4)):
        files[name] = tmp_path / name
        base.train(text, "tupe_a", 1e-3, 1, 6, files[name], layers=1, width=64, stop=stop)
    whole, stopped = map(base.lines_of, files.values())
    assert [line["loss"] for line in whole[:2]] == [line["loss"] for line in stopped]
    assert 5 < whole[-1]["final"] < 8 and "final" not in stopped[-1]
    files["whole"].write_text(files["whole"].read_text() + '{"final')  # cut off
    assert base.lines_of(files["whole"]) == whole


def test_a_run_that_diverges_says_so_and_is_not_chosen(pack, tmp_path, monkeypatch):
    monkeypatch.setattr(base, "EVERY", 2)
    base.train(base.Text(pack), "bert_a", float("inf"), 1, 6, tmp_path / "run", layers=1, width=64, stop=6)
    assert base.lines_of(tmp_path / "run")[-1] == {"final": None}
    ends = [{"final": None}], [{"loss": 9.0}, {"loss": 9.0}, {"final": 9.0}], [{"final": None}]
    for rate, lines in zip(base.RATES, ends, strict=True):
        file = base.file_of(tmp_path, "bert_a", rate, base.PILOT_SEED, 100)
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert base.best_rate(tmp_path, "bert_a", 100) == base.RATES[1]


def test_rates_are_chosen_and_what_is_finished_is_not_repeated(tmp_path, monkeypatch):
    started = []

    class Process:
        def __init__(self, words):
            model, rate, seed, updates, target, *_ = words[words.index("--pack") + 2 :]
            started.append((model, float(rate), int(seed), int(updates)))
            lines = [{"updates": n, "loss": abs(float(rate) - 5e-4), "seconds": n / 10} for n in (50, 100)]
            lines += [] if "speed" in target else [{"final": 5.0}]
            base.Path(target).write_text("".join(json.dumps(line) + "\n" for line in lines))

        def wait(self):
            return 0

    monkeypatch.setattr(base.subprocess, "Popen", Process)
    args = SimpleNamespace(
        pack=tmp_path, output=tmp_path / "out", minutes=60, layers=1, width=64, pilot=100, lengths=(300, 200)
    )
    base.run(args)
    plan = json.loads((tmp_path / "out/plan.json").read_text())
    assert plan["rates"] == {"bert_a": 5e-4, "tupe_a": 5e-4} and plan["updates"] == 300
    assert plan["slots_per_second"] == 6 * 10 * 32 * 128
    assert len(started) == 6 + 6 + 6 and len({seed for *_, seed, updates in started if updates == 300}) == 3
    base.run(args)
    assert len(started) == 18
