"""What the second engine makes of a training's settings: the value of every option that it has, and the model."""

import ast
from dataclasses import dataclass, field, replace
from typing import Any

from ..checkpoints.trained import read_model
from ..common.architectures import ELECTRA, architecture_of, named, plain_options, preset, split_size
from ..common.options import did_you_mean
from ..common.rates import check_constant
from ..common.recipes import ARCH, FROM_CHECKPOINT, MODEL, Settings
from ..config import COMPILE, FINETUNE, OF_SCHEDULE, OF_SCHEDULES, OPTIONS, PRETRAIN, Training
from ..encoder import Encoder
from ..model_config import FREE, ModelConfig, check_blocks, names_in

THEIRS = {ours: place.partition(".")[2] for place, ours in MODEL.items()}  # option of `ModelConfig` -> its name here
SAME = {"optimizer": ("adam", "adamw_fused"), "ddp_backend": ("pytorch_ddp", "fully_sharded")}
VALID = {  # of these options the words that this engine has
    PRETRAIN: {
        **SAME, "task": ("tupe_masked_lm",), "criterion": ("masked_lm", "masked_lm_chunked"),
        "lr_scheduler": ("polynomial_decay", "constant_cooldown", "polynomial_decay_ratio"),
    },
    FINETUNE: {
        **SAME, "criterion": ("glue",), "lr_scheduler": ("polynomial_decay_ratio",), "compile": COMPILE,
    },
}  # fmt: skip


@dataclass
class Settled(Training):
    """A training of this engine. command: "pretrain" or "finetune"; variant: how the model differs from what its
    architecture's name stands for, in the words of a run's record. values: {place in a recipe: value} of all options
    that the command has; defaults: of the option, or of the architecture; changed: the values that differ from it."""

    command: str = PRETRAIN
    architecture: str = ""
    variant: str = ""
    model: ModelConfig = field(default_factory=ModelConfig)
    values: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)

    @property
    def changed(self) -> dict[str, Any]:
        return {place: value for place, value in self.values.items() if value != self.defaults[place]}


def settle(settings: Settings, processes: int = 1, micro_batch_size: int | None = None, gpus: int = 1) -> Settled:
    """The settings on so many processes. The batch is split as by the first engine, and as many held-out texts are
    scored. Raises ValueError, naming it, for what this engine does not have."""
    command = FINETUNE if settings.recipe == FINETUNE else PRETRAIN
    settings = replace(settings, values=dict(settings.values))
    check_known(settings, command)
    shares_held_out_text = "dataset.batch_size_valid" not in settings.values
    if settings["compile"] == "graphs" and (processes > 1 or gpus < 1 or settings["cpu"]):
        raise ValueError(f"--compile graphs is for one GPU; valid here: {', '.join(COMPILE)}")
    settings.split(processes, micro_batch_size)
    settings.choose_precision(gpus > 0)
    architecture, config, of_model, known = settings["arch"], {}, {}, None
    if checkpoint := settings["finetune_from_model"]:
        known = read_model(checkpoint, mmap=True)
    if command == FINETUNE or architecture == FROM_CHECKPOINT:
        if known is None:
            flag = "--checkpoint" if command == FINETUNE else "--finetune-from-model"
            raise ValueError(f"{flag}: give the model to start from")
        # An ELECTRA stays one when it is fine-tuned; trained further on masked words, its discriminator is a BERT.
        name = known.electra or known.architecture if command == FINETUNE else ""
        architecture = name or architecture_of(known.config)
        of_model = {name: value for name, value in vars(known.config).items() if name not in FREE}
    if command == FINETUNE:
        config = {name: getattr(known.config, name) for name in names_in("hugging_face")}
    plain = plain_options(architecture)
    defaults = {option.place: option.default for option in OPTIONS.values() if command in option.torch}
    values = {**defaults, **places_of({**preset(architecture), **of_model}, defaults), **settings.values}
    count_held_out_text(values, shares_held_out_text, processes)
    if known and command == PRETRAIN:
        if any(name.startswith("generator.") for name in known.weights):
            folder = "the folder that tupe checkpoint export makes of it"
            raise ValueError(f"{checkpoint} is an ELECTRA, no masked language model; valid: {folder}")
        if "model.max_positions" in settings.given:
            raise ValueError("--max-positions: a model that trains further keeps its own, or takes --tokens-per-sample")
        values["model.max_positions"] = known.longest(settings["tokens_per_sample"])
    model = ModelConfig(**{**config, **{ours: values[place] for place, ours in MODEL.items() if place in values}})
    if command == PRETRAIN:
        if known and (wrong := contradictions(known.config, model)):
            raise ValueError(f"the model contradicts the checkpoint {checkpoint}: {wrong}")
        values |= {f"model.{name}": getattr(model, name) for name in ("position", "cls", "block")}
        architecture = named(architecture, model.position, model.cls)
        plain = plain_options(architecture)
    defaults |= places_of(plain, defaults)
    own = {option.name: values[option.place] for option in OPTIONS.values() if option.place in values}
    settled = Settled(
        **{name: value for name, value in own.items() if name in Training.__dataclass_fields__},
        command=command, architecture=architecture, model=model, values=values,
        variant=variant(vars(model), plain), defaults=defaults,
    )  # fmt: skip
    Encoder.check(model)
    settled.adam_betas = ast.literal_eval(values["optimizer.adam_betas"])
    if command == PRETRAIN:
        check_schedule(settled)
        check_blocks(settled.tokens_per_sample, model.max_positions, model.places)
    return settled


def differing(model: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """{name here: value} of options of `ModelConfig` that define what it computes, and that `other` has otherwise."""
    return {THEIRS[name]: value for name, value in model.items() if name not in FREE and str(value) != str(other[name])}


def variant(model: dict[str, Any], other: dict[str, Any]) -> str:
    """The same in the words of a run's record: "position shaw, segments learned", or ""."""
    return ", ".join(f"{name} {value}" for name, value in sorted(differing(model, other).items()))


def contradictions(trained: ModelConfig, model: ModelConfig) -> str:
    """In what a checkpoint's model is another than the one to be trained, for an error; "" if in nothing."""
    there, here = differing(vars(trained), vars(model)), differing(vars(model), vars(trained))
    return "; ".join(f"{name}={value} in the checkpoint, {here[name]} here" for name, value in there.items())


def places_of(model: dict[str, Any], valid: dict[str, Any]) -> dict[str, Any]:
    """{place in a recipe: value} of options of `ModelConfig`; valid: the places that a command has."""
    return {place: model[ours] for place, ours in MODEL.items() if ours in model and place in valid}


def check_known(settings: Settings, command: str) -> None:
    """Raise ValueError for what this engine does not have. What only the recipe says of fairseq is left out."""
    values = settings.values
    if values.get("criterion._name") == "electra" or split_size(values[ARCH])[0] in ELECTRA:
        raise ValueError(f"--recipe {settings.recipe}, --arch {values[ARCH]}: an ELECTRA needs --engine fairseq")
    known = {option.place: option for option in OPTIONS.values() if command in option.torch}
    for place in values.keys() - known.keys():
        if place in settings.given:
            raise ValueError(f"{place} is not known to --engine torch{did_you_mean(place, known)}")
        del values[place]
    for name, words in VALID[command].items():
        if (value := settings[name]) not in words and OPTIONS[name].place in values:
            raise ValueError(f"{OPTIONS[name].flag} {value}: valid with --engine torch: {', '.join(words)}")
    if len(settings["lr"]) != 1 or len(settings["update_freq"]) != 1:
        raise ValueError("--lr, --update-freq: one number for each epoch is for --engine fairseq; give one")


def count_held_out_text(values: dict[str, Any], shares: bool, processes: int) -> None:
    """Of a batch of all processes, where the recipe's number is split; or of a process, as fairseq counts. shares:
    whether the user leaves it to the recipe."""
    most, size = values.get("dataset.max_valid_steps"), "dataset.batch_size_valid"
    if most and values[size] and shares:
        values[size] *= processes
    else:
        values[size] = values[size] or values["dataset.batch_size"]
        if most:
            values["dataset.max_valid_steps"] = most * processes


def check_schedule(settled: Settled) -> None:
    """Raise ValueError for a part of the schedule that it does not have, or that does not fit into it."""
    for name in OF_SCHEDULES.difference(OF_SCHEDULE[settled.lr_scheduler]):
        if OPTIONS[name].place in settled.changed:
            valid = ", ".join(other for other in VALID[PRETRAIN]["lr_scheduler"] if name in OF_SCHEDULE[other])
            raise ValueError(f"{OPTIONS[name].flag}: valid with --lr-scheduler {valid}")
    if settled.lr_scheduler == "constant_cooldown":
        check_constant(settled.warmup_updates, settled.cooldown_updates, settled.total_num_update)
