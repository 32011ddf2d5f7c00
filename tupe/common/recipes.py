"""The recipes of configs/ and their presets, without Hydra, and what a user says beside them. Needs only PyYAML."""

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import yaml

from .. import config
from ..config import OPTIONS, PLACES
from ..model_config import names_in
from ..names import ELECTRA, SIZES, cls_beside
from .architectures import names, preset, split_size, with_size
from .options import CONFIGS, did_you_mean

REFERENCE = re.compile(r"\$\{(\w+\.\w+)\}")


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
        sizes = f"; valid: {', '.join(with_size(stem, s) for s in SIZES)}" if size == "base" else ""
        raise ValueError(f"model={name} is {own}, not {architecture}; give one of them{sizes}")


def value_of(override: str) -> Any:
    """What stands behind the = of an override: a number, true, false, null, a list or a quoted text, as for Hydra; of
    anything else the text, as it is. Raises ValueError for brackets or quotes that do not end."""
    text = override.partition("=")[2]
    if not isinstance(number := _number(text), str):
        return number
    if text[:1] not in ("[", "'", '"') and text.lower() not in ("true", "false", "null"):
        return text
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ValueError(f"{override}: brackets or quotes do not end") from None
    if isinstance(value, list):  # YAML takes 1e-4 for a text
        value = [_number(each) if isinstance(each, str) else each for each in value]
    return value


def _number(text):
    """The number that a text is, else the text."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def resolved(values: dict[str, Any], key: str, defaults: dict[str, Any] | None = None) -> Any:
    """A value; instead of `${section.key}`, or in a text, that of the other setting. Raises ValueError if there is
    none, or one that leads back."""
    known = {**(defaults or {}), **values}

    def of(key, passed):
        def other(found):
            if found[1] not in known:
                raise ValueError(f"{key}={known[key]}: {found[1]} not found{did_you_mean(found[1], known)}")
            if found[1] in passed:
                raise ValueError(f"{key}={known[key]} leads back to itself: {' -> '.join((*passed, found[1]))}")
            return of(found[1], (*passed, found[1]))

        value = known[key]
        if not isinstance(value, str):
            return value
        if whole := REFERENCE.fullmatch(value):
            return other(whole)
        value = REFERENCE.sub(lambda found: str(other(found)), value)
        if "${" in value:
            raise ValueError(f"{key}={value}: valid: ${{section.key}}")
        return value

    return of(key, (key,))


# ---------------------------------------------------------------------------------------------- a recipe and its user

ARCH, FROM_CHECKPOINT = "model._name", "from_checkpoint"
BATCH = ("dataset.batch_size", "optimization.update_freq")  # which every recipe says
LAUNCHERS = ("common.user_dir", "task.data")  # what a recipe leaves to whoever starts it
MODEL = {f"model.{theirs}": ours for ours, theirs in names_in("fairseq").items()}  # place -> option of `ModelConfig`


@dataclass
class Settings:
    """What a training was told: a recipe and the words of its user. values: {"section.key": value}, those that either
    of them names, in their types and without references; given: the places that the user names; presets: {group: file
    of configs/} that the user chooses; batch: (sequences of an update, most of a step), None beside --update-freq, with
    which both numbers are those of a process, as fairseq's. `settings["lr"]` is the value of an option, its default if
    nobody names it."""

    recipe: str
    values: dict[str, Any]
    given: list[str] = field(default_factory=list)
    presets: dict[str, str] = field(default_factory=dict)
    batch: tuple[int, int] | None = None

    def __getitem__(self, name: str) -> Any:
        known = OPTIONS[name]
        return self.values.get(known.place, known.default)

    def split(self, processes: int, micro_batch_size: int | None = None) -> None:
        """Split the batch over the processes, in steps of at most micro_batch_size or the recipe's batch_size. Raises
        ValueError if there is no such split."""
        if self.batch:
            batch, limit = self.batch
            size, steps = config.split_batch(batch, processes, micro_batch_size or limit)
            self.values |= {"dataset.batch_size": size, "optimization.update_freq": [steps]}
            if self["max_valid_steps"] and limit % processes == 0:  # then losses are of the same text on any machine
                self.values.setdefault("dataset.batch_size_valid", limit // processes)
        elif micro_batch_size:
            only = "beside --update-freq, --batch-size is per step"
            raise ValueError(f"--micro-batch-size, --update-freq: give one; {only}")

    def choose_precision(self, cuda: bool) -> None:
        """Turn half precision off on a CPU, or if another one is chosen. Raises ValueError if the user wants it
        there."""
        other = self["amp"] or self["autocast"] == "bf16"
        if not self["fp16"] or cuda and not self["cpu"] and not other:
            return
        if "common.fp16" in self.given:
            raise ValueError("--fp16 beside --amp or --autocast: give one" if other else config.NO_GPU)
        self.values["common.fp16"] = False


def read(
    recipe: str, words: Iterable[str], own: Iterable[str] = (), fixed: dict[str, Any] | None = None
) -> Settings:  # fmt: skip
    """A recipe with a user's words: options (`--lr 1e-4`), which win, values of the recipe (`section.key=value`,
    `~section.key` takes one out) and presets (`model=NAME`). own: further options of the command, for errors that
    suggest the nearest name; fixed: {place: value} that the command sets itself. Raises ValueError, naming it, for what
    is unknown or has no valid value; but settings of fairseq's own are for fairseq to judge."""
    command = config.FINETUNE if recipe == config.FINETUNE else config.PRETRAIN
    overrides, options, presets, taken_out = {}, {}, {}, []
    for name, value in config.split_words(words):
        if name.startswith("--"):
            known = _option(name, command, own)
            if value is None and known.kind is not bool:
                raise ValueError(f"{name}: expected one argument")
            options[known.place] = True if value is None else value
        elif value is None:
            taken_out.append(name[1:])
        elif "." in name:  # given twice, the last counts, as in Hydra
            overrides[name.lstrip("+")] = value_of(f"{name}={value}")
        else:
            presets[name.lstrip("+")] = value
    values = {place: value for place, value in compose(recipe, presets).items() if place not in LAUNCHERS}
    for place in taken_out:
        if place not in values or place in BATCH or place.endswith("._name"):
            section = place.partition(".")[0]
            near = [f"~{known}" for known in values if known.startswith(f"{section}.") and known not in BATCH]
            raise ValueError(f"~{place}: {recipe} has none to take out{did_you_mean(f'~{place}', near)}")
        del values[place]
    values = {place: value for place, value in (values | overrides).items() if value != "???"}
    fixed = {place: str(value) for place, value in (fixed or {}).items()}
    for value in fixed.values():
        if "${" in value:
            raise ValueError(f"{value}: '${{' begins the name of another setting; choose another path")
    whole = values | options | fixed
    if whole.get(ARCH) not in (*names(), FROM_CHECKPOINT) and "common.user_dir" not in whole:
        raise ValueError(f"--arch: unknown value {whole.get(ARCH)!r}{did_you_mean(str(whole.get(ARCH)), names())}")
    if "model" in presets:
        check_preset(presets["model"], whole[ARCH])
    given = {**overrides, **options}
    if "model.position" in given and "model.cls" in whole and "model.cls" not in given:  # the preset's
        whole["model.cls"] = cls_beside(str(whole["model.position"]), whole["model.cls"])
    limit, steps = (_checked({**values, ARCH: whole[ARCH]}, place, options) for place in BATCH)
    whole = {place: _checked(whole, place) for place in whole}
    settings = Settings(recipe, whole, [*given], presets)
    if "optimization.update_freq" not in options:
        if len(steps) != 1:
            raise ValueError(f"optimization.update_freq={steps}: one number for each epoch is given as --update-freq")
        settings.batch = settings["batch_size"] if "dataset.batch_size" in options else limit * steps[0], limit
    config.check_together(whole)
    if settings["fp16"] and "common.fp16" in given and (settings["amp"] or settings["autocast"] == "bf16"):
        settings.choose_precision(True)
    arch = whole[ARCH]
    if settings["criterion"] == "electra" and arch in names() and split_size(arch)[0] not in ELECTRA:
        raise ValueError(f"--arch {arch} is no ELECTRA; valid with --criterion electra: {', '.join(ELECTRA)}")
    return settings


ELSEWHERE = {  # options of other programs -> ours
    "learning_rate": "lr", "epochs": "max_epoch", "num_train_epochs": "max_epoch", "steps": "max_update",
    "max_steps": "max_update", "updates": "max_update", "warmup_steps": "warmup_updates", "model": "arch",
    "gradient_accumulation_steps": "update_freq", "per_device_train_batch_size": "batch_size",
}  # fmt: skip


def _option(name, command, own):
    known = config.named(name)
    if known is None or command not in known.of:
        valid = [*own, *(each.flag for each in OPTIONS.values() if command in each.of)]
        near = did_you_mean(name, valid, own)
        if (ours := ELSEWHERE.get(name.lstrip("-").replace("-", "_"))) and command in OPTIONS[ours].of:
            near = f"; did you mean {OPTIONS[ours].flag!r}?"
        raise ValueError(f"unknown option {name}{near} (settings of fairseq's own: SECTION.KEY=VALUE)")
    return known


def _checked(values, place, more=()):
    """A value without references, as its option has it. more: places that references may follow too."""
    value, known = values.get(place), PLACES.get(place)
    if isinstance(value, str) and "${" in value:
        value = resolved({**values, **dict(more)}, place, _defaults(values[ARCH]))
    return known.convert(value) if known else value


def _defaults(architecture):
    """{place: value} of what neither a recipe nor a user says."""
    defaults = {place: known.default for place, known in PLACES.items()}
    if architecture in names():
        own = preset(architecture)
        defaults |= {place: own[ours] for place, ours in MODEL.items() if ours in own}
    return defaults
