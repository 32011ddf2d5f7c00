"""Tasks of length generalisation: answers against Python's own, what is learned, and the command."""

import json

import pytest
import torch
from click.testing import CliRunner

from lab import lengths
from lab.lengths import TASKS, accuracies, command, tabulate, train


def stepped(string):
    place = 0
    for action in string:
        place = (place + action - 1) % 5
    return [place]


def missing(string):
    half = len(string) // 2  # an odd string has a 3 at the end
    return [b if a == 2 else a for a, b in zip(string[:half], string[half:], strict=False) if 2 in (a, b)]


ORACLES = {
    "even_pairs": lambda s: [("".join(map(str, s)).count("01") + "".join(map(str, s)).count("10")) % 2],
    "modular_arithmetic": lambda s: [eval("".join("01234+-*"[x] for x in s)) % 5],
    "parity_check": lambda s: [s.count(1) % 2],
    "cycle_navigation": stepped,
    "reverse_string": lambda s: s[::-1],
    "duplicate_string": lambda s: s + s,
    "missing_duplicate": missing,
    "odds_first": lambda s: [x for i, x in enumerate(s) if i % 2] + [x for i, x in enumerate(s) if i % 2 == 0],
    "bucket_sort": sorted,
}


@pytest.mark.parametrize("n", [1, 2, 3, 8, 13])
@pytest.mark.parametrize("name", TASKS)
def test_answers(name, n):
    task = TASKS[name]
    strings, answers = task.make(n, 50, torch.Generator().manual_seed(n))
    raised = max(n, 2) if name == "missing_duplicate" else n
    assert strings.size(1) == (n - (n % 2 == 0) if name == "modular_arithmetic" else raised)
    for string, answer in zip(strings.tolist(), answers.tolist(), strict=True):
        assert answer == ORACLES[name](string)
    assert strings.min() >= 0 and strings.max() < task.symbols and answers.min() >= 0 and answers.max() < task.classes


def test_something_is_learned():
    """Reversing needs positions; strings of one symbol do not."""
    sizes = {"steps": 150, "batch": 16, "trained": 3, "span": 32, "layers": 1, "width": 32, "heads": 2, "ffn": 64}
    shares = {}
    for position in ("absolute", "nopos"):
        model = train("reverse_string", position, "consecutive", seed=1, lr=1e-2, **sizes)
        shares[position] = accuracies(model, "reverse_string", [1, 3], 200)
    assert shares["absolute"][3] > 0.95 > 0.85 > shares["nopos"][3] and shares["nopos"][1] == 1


def test_random_positions_are_drawn_in_tests_too():
    sizes = {"steps": 1, "batch": 2, "trained": 3, "span": 32, "layers": 1, "width": 16, "heads": 2, "ffn": 16}
    model = train("parity_check", "absolute", "random", seed=1, lr=1e-3, **sizes)
    tokens = torch.full((1, 9), 3)
    assert not torch.equal(model(tokens), model(tokens))


def test_best_run_counts():
    run = {"task": "parity_check", "position": "t5", "places": "random", "score": 0.5, "short": 0.9}
    other = {**run, "task": "even_pairs", "position": "rope", "places": "consecutive"}
    runs = [run, {**run, "score": 0.625, "short": 0.75}, other]
    rows = tabulate(runs).markdown().splitlines()[2:]
    assert rows == ["| even_pairs | – | 50.0 (90) |", "| parity_check | 62.5 (75) | – |"]


def test_command_keeps_its_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(lengths, "SETTING", {"batch": 3, "trained": 4, "span": 32})
    monkeypatch.setattr(lengths, "SIZES", {"layers": 1, "width": 16, "heads": 2, "ffn": 32})
    monkeypatch.setattr(lengths, "LONGEST", 9)
    words = ["--steps=2", "--tests=3", "--tasks=bucket_sort,parity_check", "--positions=t5"]
    for seeds, stored in [("1", 4), ("1", 4), ("1,2", 8)]:
        result = CliRunner().invoke(command, [*words, f"--output={tmp_path}/new/runs.jsonl", f"--seeds={seeds}"])
        assert result.exit_code == 0, result.output
        lines = (tmp_path / "new/runs.jsonl").read_text().splitlines()
        assert len(lines) == stored and "| task | t5 | t5, random |" in result.output
    run = json.loads(lines[0])
    assert list(run["accuracies"]) == ["5", "7", "9"] and run["options"]["trained"] == 4


def test_command_refuses_before_it_trains(tmp_path):
    result = CliRunner().invoke(command, ["--positions=alibo", f"--output={tmp_path}/runs.jsonl"])
    assert result.exit_code == 2 and "alibo" in result.output and not list(tmp_path.iterdir())
