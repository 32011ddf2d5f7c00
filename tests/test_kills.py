"""Kills: every long command is killed with SIGKILL at random moments, finds its disk full or a checkpoint cut at a
random byte, and what comes out in the end is the same to the bit as without.

    pytest -m slow -s tests/test_kills.py --kills 27        a hundred and more in all; -s shows their numbers
"""

import logging
import os
import random
import shutil
import signal
import threading
import time
from contextlib import suppress
from functools import partial

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from helpers import descendants, file_system, fork, has_ended, load, print_into, wait_until
from tqdm import tqdm

from tupe.cli import main
from tupe.run.checksums import read_signed
from tupe.run.folder import damage_in
from tupe.run.record import read, state_of
from tupe.sweep import runner

MODES = ("all", "one worker", "the parent alone", "full disk")
TINY = ["--gpus=0", "--tokens-per-sample=24", "--batch-size=3", "--lr=0.01", "--warmup-updates=2"]
TINY += ["--disable-validation"]


@pytest.fixture(autouse=True)
def orphans_end_soon(monkeypatch):
    """Data workers look more often whether their parent is there."""
    for module in (torch.utils.data._utils, torch.utils.data._utils.worker):
        monkeypatch.setattr(module, "MP_STATUS_CHECK_INTERVAL", 0.1)


@pytest.fixture
def disk(tmp_path):
    """A file system of 400 MB for what the commands write."""
    with file_system(tmp_path / "disk", 400) as folder:
        yield folder


def start(words, log):
    """`tupe WORDS` in a copy of this process."""

    def run():
        os.setsid()
        print_into(log)
        logging.basicConfig(level=logging.WARNING, force=True)
        tqdm.set_lock(threading.RLock())  # not the one that a killed process holds for ever
        main()

    return fork(run, "tupe", *words)


def strike(process, mode, chance, disk):
    """Send SIGKILL, or fill the disk, and wait until all has ended, also what only lost its parent. Returns whether
    there was a process to kill."""
    tree, filler = descendants(process.pid), disk / "filler"
    worker = chance.sample(tree[1:], min(1, len(tree) - 1))
    targets = {"all": tree, "one worker": worker, "the parent alone": [process.pid], "full disk": []}[mode]
    for pid in targets:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    while mode == "full disk" and process.is_alive():  # what it deletes meanwhile is filled too
        with suppress(OSError), filler.open("ab", buffering=0) as file:
            while file.write(bytes(2**20)):
                pass
        process.join(0.1)
    process.join()  # where a worker was killed or the disk is full, it ends with an error, or goes on
    wait_until(lambda: all(has_ended(pid) for pid in tree), 300)  # jobs of a sweep that was killed go on
    filler.unlink(missing_ok=True)
    return bool(targets) or mode == "full disk"


def cut(folder, chance):
    """Cut a checkpoint_last.pt at a random byte, if the run is not over and another checkpoint of its folder is whole.
    Returns whether."""
    for last in folder.rglob("checkpoint_last.pt"):
        others = [path for path in last.parent.glob("checkpoint*.pt") if path != last and damage_in(path) is None]
        if others and state_of(last.parent) != "finished":
            with last.open("r+b") as file:
                file.truncate(chance.randrange(last.stat().st_size))
            return True
    return False


@pytest.fixture
def survive(pytestconfig):
    return partial(disturb, pytestconfig.getoption("kills"))


def disturb(times, command, outcome, disk, seed, share=1.0):
    """Disturb `tupe COMMAND --output=...` some times, start it again each time, and whenever it comes to its end,
    compare outcome(output) with that of an undisturbed run. A line of numbers is printed.

    share: of the time that it takes in all, the longest that it is left alone after a start.
    """
    chance, log = random.Random(seed), disk.parent / "log"
    # In this process: what it parses and puts together is there in its copies.
    done = CliRunner().invoke(main, [*command, f"--output={disk / 'undisturbed'}"])
    assert done.exit_code == 0, done.output
    expected, seconds, longest, process = outcome(disk / "undisturbed"), None, None, None
    shutil.rmtree(disk / "undisturbed")
    kills, cuts, ends = dict.fromkeys(MODES, 0), 0, 0
    while sum(kills.values()) < times or process.exitcode != 0:
        output = disk / f"disturbed {ends}"
        process, began = start([*command, f"--output={output}"], log), time.monotonic()
        mode = chance.choice(MODES)
        process.join(chance.uniform(0, seconds) if seconds and sum(kills.values()) < times else None)
        longest = longest or share * (time.monotonic() - began)  # of the first, which is left alone
        seconds = seconds or longest
        if process.exitcode is None and strike(process, mode, chance, disk):
            kills[mode] += 1
            seconds = min(1.1 * seconds, longest)
        else:  # it was quicker; so four of five are disturbed
            seconds *= 0.7
        process.join()
        if process.exitcode == 0:
            assert outcome(output) == expected
            shutil.rmtree(output)
            ends += 1
        else:
            assert sum(kills.values()), f"it fails where nothing disturbs it: see {log}"
            if chance.random() < 0.5:
                cuts += cut(output, chance)
    print(f"\n{command[0]}: {sum(kills.values())} times ({kills}), {cuts} checkpoints cut, {ends - 1} comparisons")


def training(folder):
    """Weights, optimizer and scores of every run in a folder."""
    return {
        str(path.parent.relative_to(folder)): (fingerprint(load(path)), read(path.parent).scores)
        for path in sorted(folder.rglob("checkpoint_last.pt"))
    }


def fingerprint(state):
    return [leaf for part in ("model", "last_optimizer_state") for leaf in leaves(state[part])]


def leaves(value):
    if isinstance(value, torch.Tensor):
        return [value.numpy().tobytes()]
    if isinstance(value, dict):
        return [leaf for key in value for leaf in leaves(value[key])]
    return [leaf for item in value for leaf in leaves(item)] if isinstance(value, (list, tuple)) else [value]


@pytest.mark.slow
def test_pre_training(data, disk, survive):
    words = ["--arch=tupe_r_tiny", "--update-freq=2", "--num-workers=2", "--max-update=30"]
    words += ["--save-interval-updates=10"]
    survive(["pretrain", f"--data={data}", *TINY, *words], training, disk, seed=1)


@pytest.mark.slow
def test_fine_tuning(learnable, pretrained, disk, survive):
    words = [f"--data={learnable}", f"--checkpoint={pretrained}", "--lr=0.003", "--batch-size=6", "--num-workers=1"]
    words += ["--gpus=0", "--max-epoch=4"]
    survive(["finetune", "--task=CoLA", *words], training, disk, seed=2)


@pytest.mark.slow
def test_a_sweep_of_eight_jobs(data, disk, monkeypatch, survive):
    monkeypatch.setattr(runner, "check", lambda job, slot: None)
    words = [f"--data={data}", *TINY, "--arch=tupe_r_tiny", "--update-freq=1", "--num-workers=0", "--max-update=9"]
    words += ["--save-interval-updates=3", "--jobs=2", "--retry-failed", "--grid=seed=1,2,3,4,5,6,7,8"]

    def outcome(folder):
        runs = training(folder)
        assert len(runs) == 8
        return runs

    survive(["sweep", "--recipe=pretrain", *words], outcome, disk, seed=3, share=0.25)


@pytest.mark.slow
def test_preparing_a_corpus(tmp_path, disk, survive):
    rng, words = np.random.default_rng(0), ["river", "king", "saw", "the", "a", "old", "never", "painted", "dog"]
    lines = [" ".join(rng.choice(words, 12)).capitalize() + f" number {n}." for n in range(1200)]
    paragraphs = [" ".join(lines[n : n + 4]) for n in range(0, len(lines), 4)]
    (tmp_path / "a.txt").write_text("\n\n".join(paragraphs))
    settings = ["--vocab-size=200", "--valid-fraction=0.1", "--shard-mb=0.005", "--jobs=2"]

    def outcome(folder):
        told = read_signed(folder / "checksums.json")["files"]  # beside the command, which names the folder
        return told, {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "checksums.json"}

    survive(["prepare", "corpus", str(tmp_path / "a.txt"), *settings], outcome, disk, seed=4)
