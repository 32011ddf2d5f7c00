"""A run is a folder, and its record is `FOLDER/record.json`: what is run and how, and how it ended. Needs only the
standard library.

States of a folder: "open" (nothing there, or stopped before its end: the next start resumes it), "running" (a process
holds its lock), "finished", "failed". A record itself says "stopped" of a run that ended before its end, and "running"
of one that was killed.
"""

import importlib.metadata
import json
import logging
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from .. import __version__
from ..config import may_change
from .checksums import check, read_signed, signed
from .folder import is_locked, write_atomically

logger = logging.getLogger(__name__)

NAME = "record.json"
STOPPED = 85  # exit status of training that a signal stopped: the same command resumes it (ERESTART)
DIVERGED = 86  # of training whose loss is not finite
DIVERGENCE = "diverged"  # how the reason of such a failure begins
STALLED = 87  # of training that made no progress for the time that was asked for
REFUSED = 2  # of a command that did not begin, because of its options or of what its folder holds
BUSY = 75  # exit status of a process that found its folder locked by another one (EX_TEMPFAIL)

OF_BUDGET = {"lr_scheduler.total_num_update", "lr_scheduler.cooldown_updates"}  # change with it, and not without it


@dataclass
class Record:
    """One run. What tells it from another one comes first, see `differences`: a folder holds one run only.

    task: "masked_lm", "electra", or the data set it is fine-tuned on. variant: how the model differs from what its
    architecture's name stands for, "" if in nothing. budget: of the run, {"max_epoch": 10} or {"max_update": 5000}.
    pretrained: path of the checkpoint it starts from, None for a run from scratch. pretrained_weights, data,
    dictionary: fingerprints of them; the data is what it is trained and scored on. data_folder: where that was, as
    `folders_of` reads it. config: {"section.key": value} of all settings that are neither the default nor in another
    field, and "engine": "torch" where that engine trained. metrics: names of the scores, the first of which, maximised,
    chooses the best validation; empty for pre-training, where the loss is minimised.
    layout: of a task with labels of its own, see `Glue.plain`. changes: what changed when it was resumed,
    {"num_updates": from here on, name: [old, new]}. scores: one entry per validation and split, unrounded: epoch,
    num_updates, split, loss (`loss_unit` in pre-training), the metrics, best (whether it was the best so far).
    failure: {"reason": one line, "status": exit status}. A record without `started_at` is of a process that ended
    before the first update: the run that begins in this folder may be any.
    """

    task: str = ""
    architecture: str = ""
    variant: str = ""
    seed: int = 0
    lr: float = 0.0
    budget: dict = field(default_factory=dict)
    splits: list = field(default_factory=list)
    pretrained: str | None = None
    pretrained_updates: int | None = None
    pretrained_weights: str | None = None
    data: str | None = None
    data_folder: str | None = None
    dictionary: str | None = None
    config: dict = field(default_factory=dict)
    metrics: list = field(default_factory=list)
    layout: dict | None = None
    command: str = ""
    versions: dict = field(default_factory=dict)
    commit: str | None = None
    device: str = ""
    started_at: str | None = None
    finished_at: str | None = None
    state: str = "running"
    failure: dict | None = None
    changes: list = field(default_factory=list)
    scores: list = field(default_factory=list)

    IDENTITY = (
        "task", "architecture", "seed", "lr", "splits", "pretrained", "pretrained_updates", "pretrained_weights",
        "data", "dictionary",
    )  # fmt: skip
    # What else is noted when it changes.
    OF_A_START = ("command", "versions", "commit", "device", "budget", "data_folder")

    def differences(self, earlier: "Record") -> dict:
        """{name: (value in `earlier`, value here)} of what tells two runs apart; None for a setting with its default.
        Pre-training may be made longer."""
        names = [*self.IDENTITY, "budget"] if self.pretrained or self.metrics else self.IDENTITY
        pairs = {name: (getattr(earlier, name), getattr(self, name)) for name in names}
        longer = OF_BUDGET if self.budget != earlier.budget else set()
        settings = {name: pair for name, pair in self._settings(earlier) if not (may_change(name) or name in longer)}
        if settings.keys() <= BATCH and sequences_of(earlier.config) == sequences_of(self.config):
            settings = {}  # as many sequences in an update, otherwise divided
        pairs.update(settings)
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    def _settings(self, earlier):
        old, new = earlier.config, self.config
        names = sorted({**old, **new})
        return [(name, (old.get(name), new.get(name))) for name in names if old.get(name) != new.get(name)]

    def go_on(self, earlier: "Record", updates: int) -> None:
        """Take over what a run has done so far, and note what has changed since. updates: from where it is resumed."""
        changed = dict(self._settings(earlier))
        changed |= {name: (getattr(earlier, name), getattr(self, name)) for name in self.OF_A_START}
        changed = {name: list(pair) for name, pair in changed.items() if pair[0] != pair[1]}
        self.scores = [entry for entry in earlier.scores if entry["num_updates"] <= updates]
        self.started_at = earlier.started_at
        self.changes = earlier.changes + ([{"num_updates": updates, **changed}] if changed else [])

    @property
    def metric(self) -> str:
        """What chooses the best validation."""
        return self.metrics[0] if self.metrics else "loss"

    @property
    def loss_unit(self) -> str:
        """Of the loss of a pre-training."""
        if self.task == "electra":
            return "nats per masked token, discriminator included"
        return "bits per masked token"

    def best(self) -> tuple:
        """(`metric`, its best value on the first split)."""
        best = [entry for entry in self.of_first_split() if entry["best"]]
        return self.metric, best[-1][self.metric]

    def of_first_split(self) -> list[dict]:
        """The scores of the split that decides, the latest last."""
        return [entry for entry in self.scores if entry["split"] == self.splits[0]]

    def add_scores(self, epoch: int, updates: int, split: str, scores: dict) -> bool:
        """Add the scores of a validation. Returns whether that validation is the best so far."""
        same = [entry for entry in self.scores if entry["num_updates"] == updates]
        if same:  # as in fairseq, only the first split decides ...
            best = same[0]["best"]
        else:  # ... and the later of equals wins
            name, sign = (self.metrics[0], 1) if self.metrics else ("loss", -1)
            earlier = [sign * entry[name] for entry in self.scores if entry["split"] == split]
            best = not earlier or sign * scores[name] >= max(earlier)
        self.scores.append({"epoch": epoch, "num_updates": updates, "split": split, **scores, "best": best})
        return best

    def save(self, folder: str | Path) -> None:
        write_atomically(Path(folder) / NAME, signed(asdict(self)))

    def begin(self, device: str = "") -> None:
        """Fill in how and where this process runs it."""
        self.command, self.versions, self.commit, self.device = command_line(), versions(), git_commit(), device
        self.state, self.failure, self.finished_at = "running", None, None

    def end(self, failure: str | None = None, status: int = 1) -> None:
        """failure: reason in one line; None for a run that came to its end."""
        self.finished_at, self.state = now(), "failed" if failure else "finished"
        self.failure = {"reason": failure, "status": status} if failure else None


def read(folder: str | Path) -> Record | None:
    """The record of a folder, None if there is none. Raises ValueError, naming the file, if it is not readable."""
    path = Path(folder) / NAME
    try:
        content = read_signed(path)
        return Record(**{f.name: content[f.name] for f in fields(Record) if f.name in content})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not a run record ({error})") from None


def begun(folder: str | Path) -> Record | None:
    """The record of the run that has begun in a folder, if there is one; one that is not readable is none."""
    try:
        record = read(folder)
    except ValueError as error:  # truncated by a power failure, for example
        logger.warning(f"{error}: a new one is begun")
        return None
    return record if record and record.started_at else None


BATCH = {"dataset.batch_size", "optimization.update_freq"}  # the second times the number of processes


def sequences_of(config: dict) -> list:
    """Numbers of sequences in an update (of one epoch each, if they differ); where `max_tokens` or nothing limits a
    batch, what tells its numbers apart."""
    size, steps = config.get("dataset.batch_size"), config.get("optimization.update_freq") or [1]
    return [size, steps] if config.get("dataset.max_tokens") or not size else [size * each for each in steps]


def another(folder: str | Path, differences: dict, defaults: dict | None = None) -> str:
    """What to say of a folder that holds another run. differences: see `Record`; defaults: {name: default}."""

    def said(name, value):
        if value is None and name.startswith("model.") and "architecture" in differences:
            return "the architecture's"  # `defaults` are those of the one here
        value = (defaults or {}).get(name) if value is None else value
        return "none" if value in ("", None) else value

    parts = [f"{name} {said(name, old)} there, {said(name, new)} here" for name, (old, new) in differences.items()]
    return f"{folder} holds another run ({'; '.join(parts)}); choose another folder or remove it"


def updates_of(folder: str | Path) -> int:
    """After how many updates the model in a Hugging Face folder was written, as far as the folder says so."""
    if number := re.fullmatch(r"checkpoint-(\d+)", Path(folder).resolve().name):
        return int(number[1])
    if isinstance(updates := training_of(folder).get("updates"), int):
        return updates
    about = read(folder)
    return max((entry["num_updates"] for entry in about.scores), default=0) if about else 0


def training_of(folder: str | Path) -> dict:
    """What training.json says beside the model in a Hugging Face folder: its updates, and the blocks and masks of its
    training. Nothing where there is none."""
    path = Path(folder) / "training.json"
    check(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def contents(folder: str | Path) -> bytes | None:
    """The record of a folder as it is written, None if there is none."""
    path = Path(folder) / NAME
    return path.read_bytes() if path.exists() else None


def state_of(folder: str | Path) -> str:
    """ "open", "running", "finished" or "failed"."""
    if is_locked(folder):
        return "running"  # even with its last scores: its checkpoint is written after them
    try:
        record = read(folder)
    except ValueError:
        return "open"  # cut off by a power failure, for example: the run starts over
    return record.state if record and record.state in ("finished", "failed") else "open"


def note_failure(folder: str | Path, reason: str, status: int) -> None:
    """Record the failure of a process that could not do so itself. status: its exit status; one that was killed by
    signal N has -N, or 128 + N, and its run stays open, as that of one that was `STOPPED`."""
    if is_locked(folder):
        return  # another process has begun the run again
    try:
        record = read(folder) or Record()
    except ValueError:
        record = Record()
    if record.state == "finished":
        return  # what failed was another run that did not belong here
    record.failure = {"reason": reason, "status": status}
    if 0 <= status < 128 and status != STOPPED:
        record.finished_at, record.state = now(), "failed"
    else:
        record.state = "stopped"
    record.save(folder)


# ------------------------------------------------------------------------------------------------- facts of a process


def now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S%z")


def command_line() -> str:
    """The command of this process, as it can be pasted into a shell."""
    program, *arguments = sys.argv
    if program.endswith(("tupe/__main__.py", "bin/tupe")):
        return shlex.join(["tupe", *arguments])
    return shlex.join(["python"] * program.endswith(".py") + [program, *arguments])


def versions() -> dict:
    installed = {"tupe": __version__, "python": platform.python_version()}
    for name in ("torch", "fairseq", "fairseq-fixed"):
        try:
            installed[name.removesuffix("-fixed")] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def git_commit() -> str | None:
    """Commit of this source tree, marked if files differ from it; None outside of a repository of its own."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists() or not shutil.which("git"):  # installed, maybe in another project's folder
        return None
    words = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip() or None
