"""The recipes of configs/ and a user's options, for the second engine: what it takes, under fairseq's names, and what
it refuses."""

import ast
import functools
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from ..checkpoints.trained import read_model
from ..common import limits
from ..common.architectures import (
    ELECTRA,
    architecture_of,
    named,
    preset,
    split_size,
)
from ..common.options import did_you_mean
from ..common.recipes import check_preset, compose, resolved, value_of
from ..encoder import ModelConfig, names_in
from ..names import cls_beside

NAMES = names_in("fairseq")  # our option of a model -> fairseq's
EXPORTED = names_in("hugging_face")  # -> its name in config.json
FREE = {f.name for f in fields(ModelConfig) if f.metadata["free"]}
COMMON = {  # "section.key" -> the default where a recipe does not say, which is fairseq's
    "common.seed": 1, "common.log_interval": 100, "common.fp16": False, "common.amp": False, "common.cpu": False,
    "common.tensorboard_logdir": "", "common.wandb_project": "", "distributed_training.ddp_backend": "pytorch_ddp",
    "dataset.batch_size": 32,
    "dataset.batch_size_valid": 0, "dataset.num_workers": 1, "dataset.train_subset": "train",
    "dataset.valid_subset": "valid", "optimization.max_epoch": 0, "optimization.update_freq": [1],
    "optimization.lr": [0.25], "optimization.clip_norm": 0.0, "optimizer.adam_betas": "(0.9, 0.999)",
    "optimizer.adam_eps": 1e-8, "optimizer.weight_decay": 0.0, "lr_scheduler.end_learning_rate": 0.0,
    "lr_scheduler.power": 1.0, "checkpoint.save_dir": "checkpoints", "model.autocast": "none", "model.compile": False,
}  # fmt: skip
COMMON_PARTS = {
    "optimizer._name": ("adam", "adamw_fused"), "model.autocast": ("none", "bf16"),
    "distributed_training.ddp_backend": ("pytorch_ddp", "fully_sharded"),
}  # fmt: skip
ALWAYS_SO = {  # in the recipes for fairseq's sake: this engine knows no other way, or has no use for them
    "common.user_dir", "common.log_format", "common.fp16_init_scale", "common.fp16_scale_window",
    "common.threshold_loss_scale", "dataset.required_batch_size_multiple",
    "dataset.skip_invalid_size_inputs_valid_test", "distributed_training.find_unused_parameters",
    "checkpoint.no_epoch_checkpoints", "checkpoint.best_checkpoint_metric",
    "checkpoint.maximize_best_checkpoint_metric", "task.data",
}  # fmt: skip
ARCH, FROM_CHECKPOINT = "model._name", "from_checkpoint"


@dataclass(frozen=True)
class Kind:
    """What can be trained. options: {"section.key": default}; parts: {"section.key": valid names}, all of which compute
    the same numbers here."""

    options: dict
    parts: dict

    @functools.cached_property
    def places(self) -> dict:
        """{"key", as of an option: "section.key"}"""
        named = {key.partition(".")[0]: key for key in self.parts if key.endswith("._name")}
        keys = {key.partition(".")[2]: key for key in (*self.options, *self.parts) if not key.endswith("._name")}
        return {**keys, **named, "arch": ARCH}


PRETRAINING = Kind({
    **COMMON, "task.tokens_per_sample": 512, "task.mask_prob": 0.15, "task.leave_unmasked_prob": 0.1,
    "task.random_token_prob": 0.1, "dataset.max_valid_steps": 0, "dataset.validate_interval_updates": 0,
    "dataset.disable_validation": False, "optimization.max_update": 0, "lr_scheduler.warmup_updates": 0,
    "lr_scheduler.total_num_update": 1e6, "lr_scheduler._name": "polynomial_decay", "lr_scheduler.cooldown_updates": 0,
    "checkpoint.save_interval_updates": 0, "checkpoint.keep_interval_updates": -1,
    "checkpoint.keep_interval_updates_pattern": -1, "model.position_file": "",
    **{f"model.{NAMES[f.name]}": f.default for f in fields(ModelConfig)},
}, {
    **COMMON_PARTS, "task._name": ("tupe_masked_lm",), "criterion._name": ("masked_lm", "masked_lm_chunked"),
    "lr_scheduler._name": ("polynomial_decay", "constant_cooldown"), "task.sample_break_mode": ("complete",),
    "task.long_sentences": ("cut",),
})  # fmt: skip
FINETUNING = Kind({  # the structure of the model, and its longest input, are the checkpoint's
    **COMMON, "task.glue_task": "", "lr_scheduler.warmup_ratio": 0.06, "checkpoint.finetune_from_model": "",
    "checkpoint.no_save": False, "model.position_file": "",
    **{f"model.{NAMES[f.name]}": f.default for f in fields(ModelConfig)
       if f.name in FREE - {"max_positions", "places"}},
}, {
    **COMMON_PARTS, "task._name": ("glue",), "criterion._name": ("glue",),
    "lr_scheduler._name": ("polynomial_decay_ratio",),
})  # fmt: skip


@dataclass
class Recipe:
    """values: {"section.key": value} of every option of its kind; variant: how the model differs from what its
    architecture's name stands for, in the words of a run's record; given: the keys that the user names. `recipe["lr"]`
    is a value."""

    kind: Kind
    values: dict
    architecture: str
    model: ModelConfig
    variant: str
    given: set

    def __getitem__(self, name: str) -> Any:
        return self.values[self.kind.places[name]]

    def changed(self) -> dict:
        """What is not the default of its option, or of the architecture."""
        defaults = {**self.kind.options, **_of_model(plain_options(self.architecture))}
        return {name: value for name, value in self.values.items() if value != defaults[name]}


def read(
    recipe: str, overrides: Iterable[str], words: list[str], processes: int = 1,
    micro_batch_size: int | None = None,
) -> Recipe:  # fmt: skip
    """A recipe with the user's overrides (`section.key=value`, `model=PRESET`) and options (`--lr 1e-4`), which win.
    The batch is split over the processes as by the first engine, and as many held-out texts are scored.

    Raises ValueError, naming it, for what this engine does not have, and for values without meaning.
    """
    kind = FINETUNING if recipe == "finetune" else PRETRAINING
    overridden, groups = {}, {}
    for word in overrides:
        key, _, value = word.lstrip("+").partition("=")
        if word.startswith("~"):
            raise ValueError(f"{word}: taking values out of a recipe is for --engine fairseq")
        if "." in key:
            overridden[key] = value_of(word)  # given twice, the last counts, as in Hydra
        else:
            groups[key] = value
    values = compose(recipe, groups)
    options = _options(kind, words, values)
    given, always = {**overridden, **options}, {key: values[key] for key in ALWAYS_SO & values.keys()}
    for key in sorted(given.keys() & always.keys()):
        if value_of(f"={given[key]}") != always[key]:
            raise ValueError(f"{key} is {given[key]}; valid with --engine transformers: {always[key]}")
    values.update(overridden)
    of_batch = ("dataset.batch_size", "optimization.update_freq")
    size, steps = (_converted(kind, key, resolved(values, key, kind.options)) for key in of_batch)
    values.update(options)
    if "model.position" in given and "model.cls" in values and "model.cls" not in given:  # the preset's
        values["model.cls"] = cls_beside(values["model.position"], values["model.cls"])
    if values.get("criterion._name") == "electra" or split_size(values[ARCH])[0] in ELECTRA:
        raise ValueError(f"--recipe {recipe}, --arch {values[ARCH]}: an ELECTRA, which only --engine fairseq does")
    if unknown := [key for key in values if key not in {*kind.options, *kind.parts, *always, ARCH}]:
        near = did_you_mean(unknown[0], kind.places.values())
        raise ValueError(f"{unknown[0]} is not known to --engine transformers{near}")
    for key, valid in kind.parts.items():
        if key in values and values[key] not in valid:
            raise ValueError(f"{key}={values[key]}: valid with --engine transformers: {', '.join(valid)}")
    if kind is PRETRAINING:
        architecture, config = values[ARCH], {}
        if "model" in groups:
            check_preset(groups["model"], architecture)
    else:
        known = read_model(values["checkpoint.finetune_from_model"], mmap=True).config
        config, architecture = {name: getattr(known, name) for name in EXPORTED}, architecture_of(known)
    of_architecture = _of_model(preset(architecture))
    defaults = {name: of_architecture.get(name, value) for name, value in kind.options.items()}
    values = defaults | {key: resolved(values, key, defaults) for key in values if key in defaults}
    ends = {"max_update": values.get("optimization.max_update", 0), "max_epoch": values["optimization.max_epoch"]}
    changed = {key.rpartition(".")[2]: value for key, value in values.items() if value != kind.options[key]}
    schedule = values.get("lr_scheduler._name", "polynomial_decay")
    limits.check_all(changed | {"lr_scheduler": schedule, **ends})
    values = {key: _converted(kind, key, value) for key, value in values.items()}
    if kind is PRETRAINING:
        _check_schedule(values)
    for key in ("optimization.lr", "optimization.update_freq"):
        if len(values[key]) != 1:
            raise ValueError(f"{key}={values[key]}: one number for each epoch is for --engine fairseq; give one")
    is_split, most = "optimization.update_freq" not in options, values.get("dataset.max_valid_steps")
    if is_split:
        batch = values["dataset.batch_size"] if "dataset.batch_size" in options else size * steps[0]
        values["dataset.batch_size"], steps = limits.split_batch(batch, processes, micro_batch_size or size)
        values["optimization.update_freq"] = [steps]
    elif micro_batch_size:
        raise ValueError("--micro-batch-size, --update-freq: give one; beside --update-freq, --batch-size is per step")
    if most and not values["dataset.batch_size_valid"] and is_split and size % processes == 0:
        values["dataset.batch_size_valid"] = size  # of all processes: the same text on any machine
    else:
        values["dataset.batch_size_valid"] = values["dataset.batch_size_valid"] or values["dataset.batch_size"]
        if most:  # fairseq counts the steps of a process
            values["dataset.max_valid_steps"] = most * processes
    if values["common.fp16"] and "common.fp16" not in given:
        values["common.fp16"] = not (values["common.amp"] or values["model.autocast"] == "bf16")
    elif values["common.fp16"] and (values["common.amp"] or values["model.autocast"] == "bf16"):
        raise ValueError("--fp16 beside --amp or --autocast: give one")
    values["optimizer.adam_betas"] = str(adam_betas(values["optimizer.adam_betas"]))
    options = {ours: values[f"model.{theirs}"] for ours, theirs in NAMES.items() if f"model.{theirs}" in values}
    model = ModelConfig(**{**config, **options})
    if kind is PRETRAINING:
        values |= {f"model.{name}": getattr(model, name) for name in ("position", "cls", "block")}
        architecture = named(architecture, model.position, model.cls)
    plain = plain_options(architecture)
    differs = {NAMES[name]: value for name, value in vars(model).items() if str(value) != str(plain[name])}
    free = {NAMES[name] for name in FREE}
    variant = ", ".join(f"{name} {differs[name]}" for name in sorted(differs) if name not in free)
    return Recipe(kind, values, architecture, model, variant, set(given))


def _check_schedule(values):
    """Raise ValueError for what fairseq's schedule of the same name does not take."""
    name = values["lr_scheduler._name"]
    is_constant = name == "constant_cooldown"
    for option in ("power", "end_learning_rate") if is_constant else ("cooldown_updates",):
        key = f"lr_scheduler.{option}"
        if values[key] != PRETRAINING.options[key]:
            raise ValueError(f"{key}={values[key]}: {name} has no such option")
    names = "warmup_updates", "cooldown_updates", "total_num_update"
    warmup, cooldown, total = (values[f"lr_scheduler.{name}"] for name in names)
    if is_constant and warmup + cooldown > total:
        raise ValueError(f"{warmup} updates of warm-up and {cooldown} of cool-down: valid: at most {total:.0f} in all")


def adam_betas(text: str) -> tuple[float, ...]:
    """Of "(0.9, 0.98)", however it is spaced."""
    return tuple(float(beta) for beta in text.strip("()[] ").split(","))


def plain_options(architecture: str) -> dict:
    """{option of `ModelConfig`: value} of an architecture as its name says."""
    return vars(ModelConfig(**preset(architecture)))


def _of_model(options):
    return {f"model.{NAMES[name]}": value for name, value in options.items()}


def _options(kind, words, recipe):
    """{"section.key": text} of `--name value`, `--name=value` and `--switch`. recipe: the values of the recipe."""
    given, words = {}, list(words)
    while words:
        name, equals, value = words.pop(0).partition("=")
        if not name.startswith("--"):
            raise ValueError(f"{name!r} is the value of no option")
        key = name[2:].replace("-", "_")
        always = (place for place in ALWAYS_SO if place in recipe and place.endswith(f".{key}"))
        place = kind.places.get(key) or next(always, None)
        if place is None:
            near = did_you_mean(name, map(limits.option, kind.places))
            raise ValueError(f"{name} is not known to --engine transformers{near}")
        if not equals and isinstance(kind.options.get(place, recipe.get(place)), bool):
            value = True
        elif not equals:
            if not words or words[0].startswith("--"):
                raise ValueError(f"{name}: expected one argument")
            value = words.pop(0)
        given[place] = value
    return given


def _converted(kind, key, value):
    """A value in the type of its option's default. Raises ValueError if it is of another one."""
    default = kind.options[key]
    if isinstance(value, str) and not isinstance(default, str):
        try:
            value = ast.literal_eval(value.capitalize() if value in ("true", "false") else value)
        except (ValueError, SyntaxError):
            raise ValueError(f"{key} is {value!r}; valid: {type(default).__name__}") from None
    if isinstance(default, bool):
        if value not in (True, False):
            raise ValueError(f"{key} is {value!r}; valid: true, false")
        return bool(value)
    if isinstance(default, list):
        numbers, of = value if isinstance(value, (list, tuple)) else [value], type(default[0])
        if not numbers or not all(isinstance(n, (int, float)) and of(n) == n for n in numbers):
            raise ValueError(f"{key} is {value!r}; valid: {'numbers' if of is float else 'whole numbers'}")
        return [of(n) for n in numbers]
    if isinstance(default, str):
        if value is None or isinstance(value, (bool, list)) or default and value == "":
            raise ValueError(f"{key} is {value!r}; valid: a text")
        return str(value)
    if value is None or isinstance(value, (list, tuple, dict)):
        raise ValueError(f"{key} is {value!r}; valid: {type(default).__name__}")
    return type(default)(value)
