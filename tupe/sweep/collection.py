"""What folders of runs hold: finished runs of fine-tuning, and everything else with its reason."""

import os
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..common.architectures import plain_options
from ..data.glue import TASKS, own_task
from ..model_config import names_in
from ..run import record
from ..run.folder import files_below
from ..run.record import Record


@dataclass(frozen=True, order=True)
class Model:
    """A pre-trained model: what the runs of one row of a table share."""

    architecture: str
    updates: int  # of pre-training
    checkpoint: str
    variant: str = ""  # how it differs from its architecture
    path: str = ""  # of the checkpoint, as far as it is needed to tell two models apart
    settings: str = ""  # of its fine-tuning, as far as they are needed to tell two runs apart

    @property
    def name(self) -> str:
        differs = ", ".join(filter(None, (self.variant, self.settings)))
        return f"{self.architecture}{differs and f' ({differs})'}{self.path and f' [{self.path}]'}"

    def __str__(self):
        return f"{self.name} @ {with_unit(self.updates)}"


def with_unit(updates: int) -> str:
    """1000000 -> "1M", 300000 -> "300k", 2450 -> "2450"."""
    for unit, name in ((1_000_000, "M"), (1000, "k")):
        if updates >= unit and updates % unit == 0:
            return f"{updates // unit}{name}"
    return str(updates)


def settings_of(content: Record) -> dict[str, str]:
    """{name: value} of what may change a run's scores and is in no column of its own: its budget, its data, what it is
    scored on, and the settings that are not the default."""
    prints = {"data": content.data, "vocabulary": content.dictionary}
    settings = {**content.budget, **{name: value for name, value in prints.items() if value}}
    settings["scored on"] = ",".join(content.splits)
    config = {name: value for name, value in content.config.items() if not record.may_change(name)}
    sizes = record.sequences_of(content.config)
    if not record.BATCH.isdisjoint(config) and len(sizes) == 1:  # however it was divided among processes and steps
        config = {name: value for name, value in config.items() if name not in record.BATCH}
        config["sequences an update"] = sizes[0]
    return {name: str(value) for name, value in {**settings, **config}.items()}


def settings_text(settings: dict[str, str]) -> str:
    """ "max_epoch 10, model.dropout 0" """
    return ", ".join(f"{name} {value}".strip() for name, value in sorted(settings.items()))


@dataclass(frozen=True)
class FinishedRun:
    """A run of fine-tuning that came to its end."""

    model: Model
    record: Record
    folder: Path

    @property
    def key(self) -> tuple:
        """(model, task, learning rate, seed): what is counted once."""
        return self.model, self.record.task, self.record.lr, self.record.seed

    def score(self, split: str, metric: str) -> float:
        """At the best epoch."""
        return [entry[metric] for entry in self.record.scores if entry["split"] == split and entry["best"]][-1]


@dataclass
class Collection:
    """finished: {key: FinishedRun}. failed, unfinished, left_out: (folder, reason) of every run that failed, that has
    not come to its end, and that does not count."""

    finished: dict = field(default_factory=dict)
    failed: list = field(default_factory=list)
    unfinished: list = field(default_factory=list)
    left_out: list = field(default_factory=list)

    @property
    def of_no_score(self) -> dict[str, list]:
        return {"failed": self.failed, "unfinished": self.unfinished, "left out": self.left_out}


def collect(folders: Iterable[str | Path]) -> Collection:
    """Look through folders, and all that is in them, for runs of fine-tuning. Each run counts once, though its folder
    is reached twice, or was copied.

    Raises ValueError if no run is finished and none failed.
    """
    collection, layouts = Collection(), {}  # {task: `Glue`} of those with labels of their own
    runs = {}  # {folder without symbolic links: folder as given}
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder")
        for path in files_below(folder):
            if path.name == record.NAME:
                runs.setdefault(path.parent.resolve(), path.parent)
    for folder in runs.values():
        _add_run(collection, folder, layouts)
    _tell_apart(collection)
    if not collection.finished and not collection.failed:
        raise ValueError(f"no finished or failed run of fine-tuning in {', '.join(map(str, folders))}")
    return collection


def _add_run(collection, folder, layouts):
    state = record.state_of(folder)
    try:
        content = record.read(folder)
        began = content.started_at is not None
        if state == "failed" and (content.metrics or not began):  # without metrics: one that could not begin
            collection.failed.append((folder, content.failure["reason"]))
        if state == "failed" or not began or not content.metrics:  # without metrics: a pre-training
            return
        if content.layout:
            own = own_task(content.layout)
            known = layouts.setdefault(content.task, own)
            if replace(own, text=known.text, label=known.label) != known:
                collection.left_out.append((folder, f"other labels of {content.task} than those of earlier runs"))
                return
            TASKS[content.task] = own
        model = Model(
            content.architecture, content.pretrained_updates, content.pretrained, content.variant,
            settings=settings_text({**settings_of(content), "weights": content.pretrained_weights or ""}),
        )  # fmt: skip
        run = FinishedRun(model, content, folder)
        if state in ("open", "running"):
            collection.unfinished.append((folder, "running" if state == "running" else "stopped before its end"))
        elif run.key in collection.finished:
            other = collection.finished[run.key]
            same = "same" if other.record.scores == content.scores else "OTHER"
            collection.left_out.append((folder, f"duplicate of {other.folder}, {same} scores"))
        else:
            for split in content.splits:
                for metric in content.metrics:
                    float(run.score(split, metric))  # fails here, not in a table
            collection.finished[run.key] = run
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        collection.left_out.append((folder, f"not a run of this project ({type(error).__name__}: {error})"))


def _tell_apart(collection):
    """Give models the names that tell them apart, and no more.

    Of the settings of fine-tuning, those stay that are unlike those of other models: scores of other settings are no
    seeds of one configuration, and rows to compare should show them. Where checkpoints of two pre-trainings would have
    one name, all of that name get their paths added, and their weights where a checkpoint held others later.
    """
    groups, names, weights = defaultdict(set), {}, defaultdict(set)
    for run in collection.finished.values():
        model = replace(run.model, settings="")
        groups[model.architecture, model.variant].add(model)
        weights[model].add(run.record.pretrained_weights)
    for models in groups.values():
        if len({model.updates for model in models}) == len(models):
            continue
        top = os.path.commonpath([Path(model.checkpoint).parent for model in models])
        names.update({model: os.path.relpath(model.checkpoint, top) for model in models})
    renamed = []
    for run, shown in unusual([*collection.finished.values()]):
        model = replace(run.model, settings="")
        if len(weights[model]) > 1:
            shown["weights"] = run.record.pretrained_weights
        named = replace(run.model, path=names.get(model, ""), settings=settings_text(shown))
        renamed.append(replace(run, model=named))
    collection.finished = {run.key: run for run in renamed}


def unusual(runs: list[FinishedRun]) -> list[tuple[FinishedRun, dict[str, str]]]:
    """Each run with those of its settings that most runs of its task do not have. Where two values are equally frequent
    in a task, the usual one is that of more runs of all tasks; if that is no answer either, both are unusual. Data are
    compared among runs of one vocabulary: those of another one always differ."""
    settings = [settings_of(run.record) for run in runs]
    shown: list[dict[str, str]] = [{} for _ in runs]
    for name in sorted(set().union(*settings)):
        values = [of_run.get(name, "default") for of_run in settings]
        everywhere, groups = Counter(values), defaultdict(list)
        for number, run in enumerate(runs):
            groups[run.record.task, run.record.dictionary if name == "data" else None].append(number)
        for group in groups.values():
            counts = Counter(values[number] for number in group)
            first, *others = sorted(counts, key=lambda value: (counts[value], everywhere[value]), reverse=True)
            tied = [x for x in others if (counts[x], everywhere[x]) == (counts[first], everywhere[first])]
            for number in group:
                if tied or values[number] != first:
                    shown[number][name] = values[number]
    return [*zip(runs, shown, strict=True)]


def pretraining_record(model: Model) -> Record | None:
    """The record of a model's pre-training, beside its checkpoint, or in it where that is a run's folder. None without
    one, and if it is another model's."""
    checkpoint = Path(model.checkpoint)
    try:
        content = record.read(checkpoint if (checkpoint / record.NAME).is_file() else checkpoint.parent)
    except ValueError:
        return None
    known = content and not content.metrics
    same = known and structure(content.architecture, content.variant) == structure(model.architecture, model.variant)
    return content if same else None


def structure(architecture: str, variant: str) -> dict[str, str]:
    """{option: value} of a model that a record describes. One model may have several descriptions: a pre-training keeps
    the architecture that the user named, and a fine-tuning takes the nearest one."""
    try:
        names = names_in("fairseq")
        plain = {names.get(ours, ours): str(value) for ours, value in plain_options(architecture).items()}
    except ValueError:  # of a file of the user's own
        plain = {"architecture": architecture}
    return plain | dict(pair.split(" ", 1) for pair in variant.split(", ") if pair)
