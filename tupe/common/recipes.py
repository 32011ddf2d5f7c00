"""The recipes of configs/ and their presets, without Hydra, and what a user says beside them. Needs only PyYAML."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import yaml

from .. import config
from ..config import OPTIONS, PLACES, PRECISIONS
from ..model_config import names_in
from ..names import ELECTRA, cls_beside, split_size
from .architectures import names
from .options import CONFIGS, did_you_mean

REFERENCE = re.compile(r"\$\{(\w+\.\w+)\}")  # to the value of another setting


def compose(recipe: str, groups: dict[str, str] | None = None) -> dict[str, Any]:
    """{"section.key": value} of a file of configs/ and those of its `defaults`, as Hydra puts them together. groups:
    {group: file} instead of the recipe's. Raises ValueError for a file that is not there, and another group."""
    own, found = yaml.safe_load((CONFIGS / f"{recipe}.yaml").read_text(encoding="utf-8")), {}
    known = [group for entry in own["defaults"] if isinstance(entry, dict) for group in entry]
    if unknown := [f"{group}={name}" for group, name in (groups or {}).items() if group not in known]:
        raise ValueError(f"{recipe}: {unknown[0]}: valid: SECTION.KEY=VALUE{''.join(f', {g}=NAME' for g in known)}")
    for entry in own.pop("defaults"):
        group, name = ("", entry) if isinstance(entry, str) else next(iter(entry.items()))
        content, package = own, "_global_"
        if name != "_self_":
            name = (groups or {}).get(group, name)
            path = CONFIGS / group / f"{name}.yaml"
            if not path.is_file():
                choices = sorted(path.stem for path in path.parent.glob("*.yaml"))
                raise ValueError(f"{group}={name} not found{did_you_mean(name, choices)}")
            text = path.read_text(encoding="utf-8")
            content, package = yaml.safe_load(text), re.search("^# @package (.+)$", text, re.M)[1]
        for section, part in (content if package == "_global_" else {package: content}).items():
            found |= {f"{section}.{key}": value for key, value in part.items() if section != "hydra"}
    return found


def check_preset(name: str, architecture: str) -> None:
    """Raise ValueError if a file of configs/model stands for another model than `architecture` (which may choose the
    size that the preset leaves open): the preset's options would change that other model."""
    own = yaml.safe_load((CONFIGS / "model" / f"{name}.yaml").read_text(encoding="utf-8"))["_name"]
    (stem, size), (other, other_size) = split_size(own), split_size(architecture)
    if stem != other or size not in ("base", other_size):
        raise ValueError(f"model={name} is {own}, not {architecture}; give one of them")


def value_of(override: str) -> Any:
    """What stands behind the = of an override: true, false, null, a list or a quoted text, as for Hydra; anything else
    as it is, for the setting to convert. Raises ValueError for brackets or quotes that do not end."""
    text = override.partition("=")[2]
    if text[:1] not in ("[", "'", '"') and text.lower() not in ("true", "false", "null"):
        return text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise ValueError(f"{override}: brackets or quotes do not end") from None


# ---------------------------------------------------------------------------------------------- a recipe and its user

ARCH, FROM_CHECKPOINT = "model._name", "from_checkpoint"
BATCH = ("dataset.batch_size", "optimization.update_freq")  # which every recipe says
LAUNCHERS = ("common.user_dir", "task.data")  # what a recipe leaves to whoever starts it
MODEL = {f"model.{theirs}": ours for ours, theirs in names_in("fairseq").items()}  # place -> option of `ModelConfig`


@dataclass
class Settings:
    """What a training was told: a recipe and the words of its user. values: {"section.key": value}, those that either
    of them names, in their types and without references; given: the places that the user names; batch: (sequences of an
    update, most of a step), None beside --update-freq, with which both numbers are those of a process, as fairseq's.
    `settings["lr"]` is the value of an option, its default if nobody names it."""

    recipe: str
    values: dict[str, Any]
    given: list[str] = field(default_factory=list)
    batch: tuple[int, int] | None = None

    def __getitem__(self, name: str) -> Any:
        known = OPTIONS[name]
        return self.values.get(known.place, known.default)

    def split(self, processes: int, micro_batch_size: int | None = None) -> None:
        """Split the batch over the processes, in steps of at most micro_batch_size or the recipe's batch_size. Raises
        ValueError if there is no such split."""
        if micro_batch_size and (not self.batch or "optimization.update_freq" in self.given):
            only = "beside --update-freq, --batch-size is per step"
            raise ValueError(f"--micro-batch-size, --update-freq: give one; {only}")
        if self.batch:
            batch, limit = self.batch
            size, steps = config.split_batch(batch, processes, micro_batch_size or limit)
            self.values |= {"dataset.batch_size": size, "optimization.update_freq": [steps]}
            if held_out := config.split_held_out(limit, processes, self["max_valid_steps"]):
                self.values.setdefault("dataset.batch_size_valid", held_out)

    def choose_precision(self, cuda: bool) -> None:
        """Turn the recipe's fp16 off on a CPU, or beside another precision. Raises ValueError if the user wants it."""
        if self["fp16"] and (not cuda or self["cpu"] or self["bf16"] or self["autocast"] == "bf16"):
            if "common.fp16" in self.given:
                raise ValueError(config.NO_GPU)
            self.values["common.fp16"] = False


def read(
    recipe: str, words: Iterable[str], own: Iterable[str] = (), fixed: dict[str, Any] | None = None
) -> Settings:  # fmt: skip
    """A recipe with a user's words: options (`--lr 1e-4`), which win, values of the recipe (`section.key=value`) and
    presets (`model=NAME`). own: further options of the command, for errors that suggest the nearest name; fixed:
    {place: value} that the command sets itself. Raises ValueError, naming it, for what is unknown or has no valid
    value; but settings of fairseq's own are for fairseq to judge."""
    command = config.FINETUNE if recipe == config.FINETUNE else config.PRETRAIN
    overrides: dict[str, Any] = {}
    options, presets = {}, {}
    for name, value in config.split_words(words):
        if name.startswith("--"):
            known = _option(name, command, own)
            if value is None and known.kind is not bool:
                raise ValueError(f"{name}: expected one argument")
            value = True if value is None else value
            options |= PRECISIONS[known.convert(value)] if known.name == "precision" else {known.place: value}
        elif "." in name:  # given twice, the last counts, as in Hydra
            overrides[name.lstrip("+")] = value_of(f"{name}={value}")
        elif (name := name.lstrip("+")) in presets:
            raise ValueError(f"{name}={value}: {name}={presets[name]} is given already")
        else:
            presets[name] = value
    given, fixed = {**overrides, **options}, {place: str(value) for place, value in (fixed or {}).items()}
    if odd := [value for value in fixed.values() if "${" in value]:
        raise ValueError(f"{odd[0]}: '${{' begins the name of another setting; choose another path")
    if twice := [place for place in given if place in fixed]:
        raise ValueError(f"{twice[0]}: the command has an option of its own for it")
    values = {place: value for place, value in compose(recipe, presets).items() if place not in LAUNCHERS} | overrides
    whole = {place: value for place, value in {**values, **options, **fixed}.items() if value != "???"}
    arch = whole.get(ARCH)
    if arch not in (*names(), FROM_CHECKPOINT) and "common.user_dir" not in whole:
        raise ValueError(f"--arch: unknown value {arch!r}{did_you_mean(str(arch), names())}")
    if "model" in presets:
        check_preset(presets["model"], arch)
    if "model.position" in given and "model.cls" in whole and "model.cls" not in given:  # the preset's
        whole["model.cls"] = cls_beside(str(whole["model.position"]), whole["model.cls"])
    for place, value in whole.items():
        if reference := REFERENCE.fullmatch(str(value)):  # of a recipe, to a value that the user may have chosen
            value = whole[reference[1]]
        whole[place] = PLACES[place].convert(value) if place in PLACES else value
    settings = Settings(recipe, whole, [*given])
    fit_schedule(settings)
    if "optimization.update_freq" in overrides and "dataset.batch_size" in options:
        raise ValueError("--batch-size, optimization.update_freq: give --update-freq instead, both are of a step then")
    if "optimization.update_freq" not in options:
        limit, steps = (PLACES[place].convert(values[place]) for place in BATCH)
        if len(steps) != 1:
            raise ValueError(f"optimization.update_freq={steps}: one number for each epoch is given as --update-freq")
        settings.batch = settings["batch_size"] if "dataset.batch_size" in options else limit * steps[0], limit
    config.check_together(whole)
    if settings["criterion"] == "electra" and arch in names() and split_size(arch)[0] not in ELECTRA:
        raise ValueError(f"--arch {arch} is no ELECTRA; valid with --criterion electra: {', '.join(ELECTRA)}")
    if settings["criterion"] != "electra" and arch in names() and split_size(arch)[0] in ELECTRA:
        raise ValueError(f"--arch {arch} is an ELECTRA; give --recipe pretrain_electra, which also masks as it needs")
    return settings


def fit_schedule(settings: Settings) -> None:
    """Leave out what a recipe says of its own schedule where the user takes another, and let a schedule that needs the
    length of the run end with it."""
    own = config.OF_SCHEDULE.get(settings["lr_scheduler"], ())
    for name in config.OF_SCHEDULES.difference(own):
        if (place := OPTIONS[name].place) not in settings.given:
            settings.values.pop(place, None)
    if "total_num_update" in own:
        settings.values.setdefault(OPTIONS["total_num_update"].place, settings["max_update"])


ELSEWHERE = {  # options of other programs -> ours
    "learning_rate": "lr", "epochs": "max_epoch", "num_train_epochs": "max_epoch", "steps": "max_update",
    "max_steps": "max_update", "updates": "max_update", "warmup_steps": "warmup_updates", "model": "arch",
    "gradient_accumulation_steps": "update_freq", "per_device_train_batch_size": "batch_size",
    "fp16": "precision", "bf16": "precision", "autocast": "precision", "amp": "precision", "dtype": "precision",
    "rel_pos": "arch tupe_r",
}  # fmt: skip


def _option(name, command, own):
    known = config.named(name)
    if known is None or command not in known.of:
        valid = [*own, *(each.flag for each in OPTIONS.values() if command in each.of)]
        near = did_you_mean(name, valid, own)
        ours, blank, value = ELSEWHERE.get(name.lstrip("-").replace("-", "_"), "").partition(" ")
        if ours and command in OPTIONS[ours].of:
            near = f"; did you mean {OPTIONS[ours].flag + blank + value!r}?"
        raise ValueError(f"unknown option {name}{near} (settings of fairseq's own: SECTION.KEY=VALUE)")
    return known
