"""An hour of chaos: long commands are started, killed, starved and their files damaged at random, and what comes out in
the end is equal to the bit.

    python -m lab chaos --minutes 60 --seed 1 --output chaos

Each command runs once without a disturbance. Then it is started again and again in a new folder: killed as a whole, or
one of its processes, or its parent alone; told to stop by a signal; with a bit flipped in a checkpoint that has another
whole one beside it. Whenever it comes to its end, the outcome is compared. OUTPUT/chaos.md is the table.
"""

import hashlib
import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import click
import numpy as np

from tupe.common import options
from tupe.common.tables import TextTable
from tupe.run import record
from tupe.run.checksums import damaged, read_signed
from tupe.run.folder import damage_in, write_atomically
from tupe.run.processes import PROGRAM

WORDS = ["the", "old", "king", "saw", "a", "river", "and", "never", "painted", "another", "dog"]
TINY = ["--recipe=pretrain_small", "--arch=tupe_r_tiny", "--gpus=0", "--tokens-per-sample=24", "--batch-size=4"]
TINY += [
    "--max-update=60",
    "--warmup-updates=5",
    "--save-interval-updates=10",
    "--keep-interval-updates=3",
    "--num-workers=1",
]
KINDS = ("all", "one process", "the parent alone", "a signal", "a flipped bit")


@dataclass
class Victim:
    """A command, and what is known of it. seconds: of an undisturbed run; outcome: of that."""

    name: str
    words: list[str]
    seconds: float = 0.0
    outcome: str = ""
    starts: int = 0
    ends: int = 0
    strikes: Counter = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def victims(place: Path) -> list[Victim]:
    data = f"--data={place / 'data'}"
    text = ["prepare", "corpus", str(place / "text.txt"), "--vocab-size=200", "--valid-fraction=0.1", "--jobs=2"]
    found = [
        Victim("prepare corpus", [*text, "--shard-mb=0.02"]),
        Victim("pretrain --engine torch", ["pretrain", "--engine=torch", data, *TINY]),
        Victim("sweep", ["sweep", "--recipe=pretrain_small", "--engine=torch", data, "--grid=seed=1,2,3", "--jobs=2",
                         "--retry-failed", *TINY[1:]]),
    ]  # fmt: skip
    if importlib.util.find_spec("fairseq"):
        found.append(Victim("pretrain --engine fairseq", ["pretrain", data, *TINY]))
    return found


def write_text(path: Path) -> None:
    rng = np.random.default_rng(0)
    lines = [" ".join(rng.choice(WORDS, 12)).capitalize() + f" number {n}." for n in range(4000)]
    path.write_text("\n\n".join(" ".join(lines[n : n + 4]) for n in range(0, len(lines), 4)), encoding="utf-8")


# ------------------------------------------------------------------------------------------------------------ processes


def begin(victim: Victim, output: Path, log: Path) -> subprocess.Popen:
    with log.open("a") as file:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen([*PROGRAM, *victim.words, f"--output={output}"], stdout=file, stderr=file,
                                start_new_session=True, env=environment)  # fmt: skip


def descendants(pid: int) -> list[int]:
    """A process and all that it has started."""
    found = [pid]
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += [each for child in (thread / "children").read_text().split() for each in descendants(int(child))]
    return found


def send(pids: list[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def strike(kind: str, process: subprocess.Popen, output: Path, chance: random.Random) -> bool:
    """Returns whether anything was done."""
    tree = descendants(process.pid)
    if kind == "a flipped bit":
        send(tree, signal.SIGKILL)
        process.wait()
        return flip(output, chance)
    if kind == "a signal":
        process.send_signal(chance.choice((signal.SIGTERM, signal.SIGINT, signal.SIGHUP)))
    else:
        some = {"all": tree, "one process": [chance.choice(tree)], "the parent alone": [process.pid]}[kind]
        send(some, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(60)
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in tree[1:]) and time.monotonic() < deadline:
        time.sleep(0.1)  # what lost its parent ends by itself
    send(descendants(process.pid), signal.SIGKILL)
    process.wait()
    return True


def flip(output: Path, chance: random.Random) -> bool:
    """Flip a bit of the last checkpoint of a run that is not over, if another one is whole."""
    for run in sorted(path.parent for path in output.rglob("record.json")):
        if record.state_of(run) == "finished":
            continue
        files = sorted(run.glob("checkpoint*.pt"), key=os.path.getmtime)
        folders = sorted(run.glob("checkpoint-*[0-9]"), key=lambda path: int(path.name.rpartition("-")[2]))
        whole = [path for path in files if damage_in(path) is None] or [p for p in folders if damaged(p) is None]
        if len(whole) < 2:
            continue
        path = whole[-1] if whole[-1].is_file() else whole[-1] / "optimizer.pt"
        content = bytearray(path.read_bytes())
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        path.write_bytes(content)
        return True
    return False


# -------------------------------------------------------------------------------------------------------------- outcome


def outcome(output: Path) -> str:
    """A hash of what a command has made: weights and scores of its runs, or the files of prepared data."""
    digest = hashlib.sha256()
    runs = sorted(output.rglob("record.json"))
    for path in runs:
        digest.update(json.dumps(record.read(path.parent).scores, sort_keys=True).encode())
        if (model := path.parent / "model.safetensors").exists():
            digest.update(model.read_bytes())
    if not runs:
        files = read_signed(output / "checksums.json")["files"]
        digest.update(json.dumps({name: entry["sha256"] for name, entry in files.items()}, sort_keys=True).encode())
        digest.update(str(damaged(output)).encode())
    return digest.hexdigest()


def table(found: list[Victim]) -> TextTable:
    rows = [
        [f"`{v.name}`", f"{v.starts}", f"{v.ends}", *(f"{v.strikes[kind]}" for kind in KINDS), f"{len(v.wrong)}"]
        for v in found
    ]
    header = ["command", "starts", "came to its end", *KINDS, "other bits"]
    return TextTable.plain(header, rows, align="l" + "r" * (len(header) - 1))


@click.command(cls=options.Command)
@click.option("--minutes", type=click.FloatRange(0), default=60, show_default=True, help="How long.")
@options.output("The folder of text, data and runs.")
@options.seed(help="The seed of all disturbances.")
def command(minutes, output, seed):
    """Start, kill, stop and damage long commands at random, and compare what comes out."""
    output, chance = output.resolve(), random.Random(seed)
    output.mkdir(parents=True, exist_ok=True)
    write_text(output / "text.txt")
    found, until = victims(output), time.monotonic() + 60 * minutes
    prepared = Victim("", [*found[0].words])
    if begin(prepared, output / "data", output / "log").wait():
        raise ValueError(f"the text cannot be prepared: see {output / 'log'}")
    for victim in found:
        began = time.monotonic()
        if begin(victim, output / "undisturbed", output / "log").wait():
            raise ValueError(f"{victim.name} fails where nothing disturbs it: see {output / 'log'}")
        victim.seconds, victim.outcome = time.monotonic() - began, outcome(output / "undisturbed")
        shutil.rmtree(output / "undisturbed")
        click.echo(f"{victim.name}: {victim.seconds:.0f} s undisturbed")
    while time.monotonic() < until:
        attack(chance.choice(found), output / "disturbed", output / "log", chance)
        write_atomically(output / "chaos.md", table(found).markdown())
    click.echo(table(found).markdown(), nl=False)
    if wrong := [f"{victim.name}: {said}" for victim in found for said in victim.wrong]:
        raise ValueError("; ".join(wrong))


def attack(victim: Victim, folder: Path, log: Path, chance: random.Random) -> None:
    """Disturb one command until it comes to its end, then compare."""
    shutil.rmtree(folder, ignore_errors=True)
    patience = 4
    while True:
        process = begin(victim, folder, log)
        victim.starts += 1
        try:
            status = process.wait(chance.uniform(0.2, 1.1) * victim.seconds if patience > 0 else None)
        except subprocess.TimeoutExpired:
            kind, patience = chance.choice(KINDS), patience - 1
            victim.strikes[kind] += strike(kind, process, folder, chance)
            continue
        if status == 0:
            break
        patience -= 1
        if patience < -4:
            victim.wrong.append(f"status {status} again and again")
            return
    victim.ends += 1
    if outcome(folder) != victim.outcome:
        victim.wrong.append(f"another outcome with {dict(victim.strikes)}")
