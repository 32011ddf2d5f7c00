"""The recipes of configs/ and a user's options, for the second engine: what it takes, under fairseq's names, and what
it refuses."""

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import yaml

from ..common import limits
from ..common.architectures import ELECTRA, SIZES, preset, split_size, with_size
from ..common.options import CONFIGS, did_you_mean
from ..encoder import ModelConfig, names_in

NAMES = names_in("fairseq")  # our option of a model -> fairseq's
OPTIONS = {  # "section.key" -> the default where a recipe does not say, which is fairseq's
    "common.seed": 1, "common.log_interval": 100, "common.fp16": False, "common.amp": False, "common.cpu": False,
    "common.tensorboard_logdir": "", "common.wandb_project": "", "task.tokens_per_sample": 512, "task.mask_prob": 0.15,
    "task.leave_unmasked_prob": 0.1, "task.random_token_prob": 0.1, "dataset.batch_size": 32,
    "dataset.batch_size_valid": 0, "dataset.num_workers": 1, "dataset.train_subset": "train",
    "dataset.valid_subset": "valid", "dataset.max_valid_steps": 0, "dataset.validate_interval_updates": 0,
    "dataset.disable_validation": False, "optimization.max_update": 0, "optimization.max_epoch": 0,
    "optimization.update_freq": [1], "optimization.lr": [0.25], "optimization.clip_norm": 0.0,
    "optimizer.adam_betas": "(0.9, 0.999)", "optimizer.adam_eps": 1e-8, "optimizer.weight_decay": 0.0,
    "lr_scheduler.warmup_updates": 0, "lr_scheduler.total_num_update": 1e6, "lr_scheduler.end_learning_rate": 0.0,
    "lr_scheduler.power": 1.0, "checkpoint.save_dir": "checkpoints", "checkpoint.save_interval_updates": 0,
    "checkpoint.keep_interval_updates": -1, "checkpoint.keep_interval_updates_pattern": -1, "model.autocast": "none",
    "model.compile": False, "model.position_file": "", "model.layer": "",
    **{f"model.{NAMES[f.name]}": f.default for f in fields(ModelConfig)},
}  # fmt: skip
PARTS = {  # which of each kind this engine has; all of one kind compute the same numbers here
    "task._name": ("tupe_masked_lm",), "criterion._name": ("masked_lm", "masked_lm_chunked"),
    "optimizer._name": ("adam", "adamw_fused"), "lr_scheduler._name": ("polynomial_decay",),
    "task.sample_break_mode": ("complete",), "task.long_sentences": ("cut",), "model.autocast": ("none", "bf16"),
}  # fmt: skip
ALWAYS_SO = {  # in the recipes for fairseq's sake: this engine knows no other way, or has no use for them
    "common.user_dir", "common.log_format", "dataset.required_batch_size_multiple", "dataset.update_epoch_batch_itr",
    "dataset.skip_invalid_size_inputs_valid_test", "checkpoint.no_epoch_checkpoints", "task.data",
}  # fmt: skip
ARCH = "model._name"
PLACES = {key.partition(".")[2]: key for key in (*OPTIONS, *PARTS) if not key.endswith("._name")}
PLACES |= {key.partition(".")[0]: key for key in PARTS if key.endswith("._name")} | {"arch": ARCH}
TUNABLE = {NAMES[f.name] for f in fields(ModelConfig) if f.metadata["free"]}


@dataclass
class Recipe:
    """values: {"section.key": value} of every option in `OPTIONS`; variant: how the model differs from what its
    architecture's name stands for, in the words of a run's record; given: the keys that the user names. `recipe["lr"]`
    is a value."""

    values: dict
    architecture: str
    model: ModelConfig
    variant: str
    given: set

    def __getitem__(self, name: str) -> Any:
        return self.values[PLACES[name]]

    def changed(self) -> dict:
        """What is not the default of its option, or of the architecture."""
        defaults = {**OPTIONS, **{f"model.{NAMES[name]}": v for name, v in preset(self.architecture).items()}}
        return {name: value for name, value in self.values.items() if value != defaults[name]}


def read(
    recipe: str, overrides: Iterable[str], words: list[str], processes: int = 1,
    micro_batch_size: int | None = None,
) -> Recipe:  # fmt: skip
    """A recipe with the user's overrides (`section.key=value`, `model=PRESET`) and options (`--lr 1e-4`), which win.
    The batch is split over the processes as by the first engine.

    Raises ValueError, naming it, for what this engine does not have, and for values without meaning.
    """
    given, presets = _options(words), []
    for word in overrides:
        key, _, value = word.lstrip("+").partition("=")
        if "." in key:
            given.setdefault(key, yaml.safe_load(value))
        elif key == "model":
            presets.append(value)
        else:
            raise ValueError(f"{word}: valid with --engine transformers: model=PRESET and section.key=value")
    values = _compose(recipe, {"model": presets[-1]} if presets else {})
    size, steps = values["dataset.batch_size"], values["optimization.update_freq"][0]
    values.setdefault("dataset.batch_size_valid", size)
    values.update(given)
    if values.get("criterion._name") == "electra" or split_size(values[ARCH])[0] in ELECTRA:
        raise ValueError(f"--recipe {recipe}, --arch {values[ARCH]}: an ELECTRA, which only --engine fairseq does")
    if unknown := [key for key in values if key not in {*OPTIONS, *PARTS, *ALWAYS_SO, ARCH}]:
        near = did_you_mean(unknown[0], PLACES.values())
        raise ValueError(f"{unknown[0]} is not known to --engine transformers{near}")
    for key, valid in PARTS.items():
        if key in values and values[key] not in valid:
            raise ValueError(f"{key}={values[key]}: valid with --engine transformers: {', '.join(valid)}")
    architecture = values[ARCH]
    if presets:
        _check_preset(presets[-1], architecture)
    model_defaults = {f"model.{NAMES[name]}": value for name, value in preset(architecture).items()}
    values = {**OPTIONS, **model_defaults, **{key: _resolved(values, key) for key in values if key in OPTIONS}}
    limits.check_all({key.rpartition(".")[2]: value for key, value in values.items() if value != OPTIONS[key]} |
                     {"lr_scheduler": "polynomial_decay", "max_update": values["optimization.max_update"],
                      "max_epoch": values["optimization.max_epoch"]})
    values = {key: _converted(key, value) for key, value in values.items()}
    for key in ("optimization.lr", "optimization.update_freq"):
        if len(values[key]) != 1:
            raise ValueError(f"{key}={values[key]}: one number for each epoch is for --engine fairseq; give one")
    if "optimization.update_freq" not in given:
        batch = values["dataset.batch_size"] if "dataset.batch_size" in given else size * steps
        values["dataset.batch_size"], steps = limits.split_batch(batch, processes, micro_batch_size or size)
        values["optimization.update_freq"] = [steps]
    elif micro_batch_size:
        raise ValueError("--micro-batch-size, --update-freq: give one; beside --update-freq, --batch-size is per step")
    if values["common.fp16"] and values["common.fp16"] is not given.get("common.fp16"):
        values["common.fp16"] = not (values["common.amp"] or values["model.autocast"] == "bf16")
    elif values["common.fp16"] and (values["common.amp"] or values["model.autocast"] == "bf16"):
        raise ValueError("--fp16 beside --amp or --autocast: give one")
    options = {ours: values[f"model.{theirs}"] for ours, theirs in NAMES.items()}
    model = ModelConfig(**options, layer=values["model.layer"])
    values.update({"model.position": model.position, "model.block": model.block, "model.layer": ""})
    plain = vars(ModelConfig(**preset(architecture)))
    differs = {NAMES[name]: value for name, value in vars(model).items() if str(value) != str(plain[name])}
    variant = ", ".join(f"{name} {differs[name]}" for name in sorted(differs) if name not in TUNABLE)
    return Recipe(values, architecture, model, variant, set(given))


def _compose(recipe, groups):
    """{"section.key": value} of a file of configs/ and those of its `defaults`, as Hydra puts them together. groups:
    {group: file} instead of the recipe's."""
    own, found = yaml.safe_load((CONFIGS / f"{recipe}.yaml").read_text(encoding="utf-8")), {}
    for entry in own.pop("defaults"):
        group, name = ("", entry) if isinstance(entry, str) else next(iter(entry.items()))
        content, package = own, "_global_"
        if name != "_self_":
            path = CONFIGS / group / f"{groups.get(group, name)}.yaml"
            if not path.is_file():
                choices = sorted(path.stem for path in path.parent.glob("*.yaml"))
                raise ValueError(f"{group}={path.stem} not found{did_you_mean(path.stem, choices)}")
            text = path.read_text(encoding="utf-8")
            content, package = yaml.safe_load(text), re.search("^# @package (.+)$", text, re.M)[1]
        for section, part in (content if package == "_global_" else {package: content}).items():
            found |= {f"{section}.{key}": value for key, value in part.items() if section != "hydra"}
    return found


def _resolved(values, key):
    """A value; of `${section.key}`, that of the other setting."""
    value = values[key]
    while isinstance(value, str) and (other := re.fullmatch(r"\$\{(\w+\.\w+)\}", value)):
        value = values.get(other[1], OPTIONS.get(other[1]))
    return value


def _options(words):
    """{"section.key": text} of `--name value`, `--name=value` and `--switch`."""
    given, words = {}, list(words)
    while words:
        name, equals, value = words.pop(0).partition("=")
        if not name.startswith("--"):
            raise ValueError(f"{name!r} is the value of no option")
        key = name[2:].replace("-", "_")
        place = PLACES.get(key) or next((place for place in ALWAYS_SO if place.endswith(f".{key}")), None)
        if place is None:
            raise ValueError(f"{name} is not known to --engine transformers"
                             f"{did_you_mean(name, ['--' + key.replace('_', '-') for key in PLACES])}")
        if not equals and isinstance(OPTIONS.get(place), bool):
            value = True
        elif not equals:
            if not words:
                raise ValueError(f"{name}: expected one argument")
            value = words.pop(0)
        given[place] = value
    return given


def _converted(key, value):
    """A value in the type of its option's default."""
    default = OPTIONS[key]
    if isinstance(value, str) and not isinstance(default, str):
        try:
            value = ast.literal_eval(value.capitalize() if value in ("true", "false") else value)
        except (ValueError, SyntaxError):
            raise ValueError(f"{key} is {value!r}; valid: {type(default).__name__}") from None
    if isinstance(default, list):
        return [float(v) if isinstance(default[0], float) else v
                for v in (value if isinstance(value, (list, tuple)) else [value])]
    return str(value or default) if isinstance(default, str) else type(default)(default if value is None else value)


def _check_preset(name, architecture):
    """Raise ValueError if a preset stands for another model than the architecture: its options would change that."""
    own = yaml.safe_load((CONFIGS / "model" / f"{name}.yaml").read_text(encoding="utf-8"))["_name"]
    (stem, size), (other, other_size) = split_size(own), split_size(architecture)
    if stem != other or size not in ("base", other_size):
        sizes = f"; valid: {', '.join(with_size(stem, s) for s in SIZES)}" if size == "base" else ""
        raise ValueError(f"model={name} is {own}, not {architecture}; give one of them{sizes}")
