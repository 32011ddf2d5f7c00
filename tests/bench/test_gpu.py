"""The command rehearses on a CPU; figures of a card are in no test."""

import json
import os
import subprocess
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from helpers import fork

from tupe.bench import gpu


def copy_of_this_process(words, log):
    """In place of `subprocess.Popen`: all imports are there."""
    from tupe.cli import main

    process = fork(main, "tupe", *words)

    def wait():
        process.join()
        return process.exitcode

    return SimpleNamespace(poll=lambda: process.exitcode, wait=wait, send_signal=lambda n: os.kill(process.pid, n))


def rehearse(folder, *words):
    result = CliRunner().invoke(gpu.command, [f"--output={folder}", "--device=cpu", *words])
    return result, (folder / "gpu.md").read_text() if (folder / "gpu.md").exists() else ""


TRAINING = ["pretraining", "resume"]  # processes that train, one after another


@pytest.mark.parametrize(
    "names", [[name for name in gpu.PARTS if name not in TRAINING], pytest.param(TRAINING, marks=pytest.mark.slow)]
)
@pytest.mark.thorough
def test_a_rehearsal_measures_every_part_once(names, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "start", copy_of_this_process)
    monkeypatch.setattr(gpu, "UPDATES", 9)
    monkeypatch.setitem(gpu.contenders.PEAK_SIZE, "cpu", 64)
    result, page = rehearse(tmp_path, f"--parts={','.join(names)}")
    assert result.exit_code == 0 and f"{len(names)} of {len(gpu.PARTS)} parts" in result.output, result.output
    assert "A rehearsal on a CPU" in page and page.count("Measured 2") == len(names)
    rows = {}
    for name in names:
        assert f"## {gpu.PARTS[name].title}\n" in page
        for line in json.loads((tmp_path / f"{name}.json").read_text())["table"].splitlines()[2:]:
            what, *cells = line.strip("| ").split(" | ")
            rows[name, what] = cells
    if "resume" in names:
        assert rows["resume", "exit statuses"] == ["(85, 0)", "(85, 0)"]
        expected, measured = rows["resume", "losses"]
        assert expected == measured and expected.count(",") == 2
        assert rows["pretraining", "cpu_bf16, exit status 0"][1].count(",") == 2
    else:
        assert rows["tests", "exit status of pytest"] == ["0", "0"]
        assert float(rows["choice", "sdpa, fp16, L 9: error"][1]) < 4e-3
    monkeypatch.setitem(gpu.PARTS, names[1], gpu.PARTS[names[1]]._replace(measure=None))  # not called again
    result, _ = rehearse(tmp_path, f"--parts={names[1]}")
    assert result.exit_code == 0


def test_all_parts_have_time():
    assert sum(part.seconds for part in gpu.PARTS.values()) <= 25 * 60


def test_each_part_is_a_process_with_a_limit(tmp_path, monkeypatch):
    """Those that fail, take too long, or have no time left are named, and only those are missing."""

    def start(words, log, start_new_session):
        (name,) = (word.removeprefix("--parts=") for word in words if word.startswith("--parts="))

        def wait(seconds):
            if name == "tests":
                raise subprocess.TimeoutExpired(words, seconds)
            if name == "choice":
                return 1
            gpu.run(gpu.Trial(tmp_path, "cpu"), name)

        return SimpleNamespace(wait=wait, pid=0)

    killed = []
    monkeypatch.setattr(gpu, "start", start)
    monkeypatch.setattr(os, "killpg", lambda *process: killed.append(process))
    for name in {*gpu.PARTS} - {"device", "tests", "choice", "pretraining"}:
        monkeypatch.delitem(gpu.PARTS, name)
    result, page = rehearse(tmp_path, "--minutes=5")
    assert result.exit_code == 1 and "not measured: tests, choice, pretraining; started again" in result.output
    assert "Not measured: longer than 150 s; see tests.log." in page and "Not measured: 1; see choice.log." in page
    assert "Not measured: --minutes 5 are over." in page and page.count("Measured 2") == len(killed) == 1


def test_a_card_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(gpu.command, [f"--output={tmp_path}/new"])
    assert result.exit_code == 2 and "--device cuda: this PyTorch sees no GPU; valid here: cpu" in result.output
    assert not (tmp_path / "new").exists()
