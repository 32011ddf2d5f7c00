"""What the second engine makes of a training's settings: every option that it has, with its value, and the model."""

import ast
from dataclasses import dataclass, replace

from ..checkpoints.trained import read_model
from ..common.architectures import ELECTRA, architecture_of, named, plain_options, preset, split_size
from ..common.options import did_you_mean
from ..common.recipes import ARCH, FROM_CHECKPOINT, MODEL, Settings
from ..config import FINETUNE, PLACES, PRETRAIN
from ..model_config import FREE, ModelConfig, names_in

ALWAYS_SO = {  # in the recipes for fairseq's sake: this engine knows no other way, or has no use for them
    "common.log_format", "common.fp16_init_scale", "common.fp16_scale_window", "common.threshold_loss_scale",
    "dataset.required_batch_size_multiple", "dataset.skip_invalid_size_inputs_valid_test",
    "distributed_training.find_unused_parameters", "checkpoint.no_epoch_checkpoints",
    "checkpoint.best_checkpoint_metric", "checkpoint.maximize_best_checkpoint_metric",
}  # fmt: skip
SAME = {  # valid names, all of which compute the same numbers here
    "optimizer._name": ("adam", "adamw_fused"), "model.autocast": ("none", "bf16"),
    "distributed_training.ddp_backend": ("pytorch_ddp", "fully_sharded"),
}  # fmt: skip
VALID = {
    PRETRAIN: {
        **SAME, "task._name": ("tupe_masked_lm",), "criterion._name": ("masked_lm", "masked_lm_chunked"),
        "lr_scheduler._name": ("polynomial_decay", "constant_cooldown", "polynomial_decay_ratio"),
        "task.sample_break_mode": ("complete",), "task.long_sentences": ("cut",),
    },
    FINETUNE: {
        **SAME, "task._name": ("glue",), "criterion._name": ("glue",),
        "lr_scheduler._name": ("polynomial_decay_ratio",),
    },
}  # fmt: skip


@dataclass
class Settled(Settings):
    """Settings in which every option of this engine has its value. command: "pretrain" or "finetune"; variant: how the
    model differs from what its architecture's name stands for, in the words of a run's record."""

    command: str = PRETRAIN
    architecture: str = ""
    model: ModelConfig | None = None
    variant: str = ""

    def changed(self) -> dict:
        """What is not the default of its option, or of the architecture."""
        defaults = {**defaults_of(self.command), **_of_model(plain_options(self.architecture))}
        return {place: value for place, value in self.values.items() if value != defaults[place]}


def defaults_of(command: str) -> dict:
    """{place: default} of the options that a command has with this engine."""
    return {place: known.default for place, known in PLACES.items() if command in known.transformers}


def settle(settings: Settings, processes: int = 1, micro_batch_size: int | None = None, gpus: int = 1) -> Settled:
    """The settings on so many processes. The batch is split as by the first engine, and as many held-out texts are
    scored. Raises ValueError, naming it, for what this engine does not have."""
    command = FINETUNE if settings.recipe == FINETUNE else PRETRAIN
    defaults, settings = defaults_of(command), replace(settings, values=dict(settings.values))
    values, recipe = settings.values, settings.recipe
    if values.get("criterion._name") == "electra" or split_size(values[ARCH])[0] in ELECTRA:
        raise ValueError(f"--recipe {recipe}, --arch {values[ARCH]}: an ELECTRA, which only --engine fairseq does")
    ignored = ALWAYS_SO - {*settings.given}
    for place in [place for place in values if place not in defaults and place != ARCH]:
        if place not in ignored:
            name, near = (PLACES[place].flag, "") if place in PLACES else (place, did_you_mean(place, defaults))
            raise ValueError(f"{name} is not known to --engine transformers{near}")
        del values[place]
    for place, valid in VALID[command].items():
        if place in values and values[place] not in valid:
            raise ValueError(f"{place}={values[place]}: valid with --engine transformers: {', '.join(valid)}")
    architecture, config, known, of_model = values[ARCH], {}, None, {}
    if checkpoint := values.get("checkpoint.finetune_from_model"):
        known = read_model(checkpoint, mmap=True)
    elif command == FINETUNE or architecture == FROM_CHECKPOINT:
        flag = "--checkpoint" if command == FINETUNE else "--finetune-from-model"
        raise ValueError(f"{flag}: give the model to start from")
    if command == FINETUNE:
        config = {name: getattr(known.config, name) for name in names_in("hugging_face")}
    if command == FINETUNE or architecture == FROM_CHECKPOINT:
        architecture = architecture_of(known.config)
        of_model = {name: value for name, value in vars(known.config).items() if name not in FREE}
    shares_held_out_text = "dataset.batch_size_valid" not in values
    settings.split(processes, micro_batch_size)
    of_architecture = _of_model({**preset(architecture), **of_model})
    values = {place: of_architecture.get(place, value) for place, value in defaults.items()} | values
    settings = replace(settings, values=values)
    settings.choose_precision(gpus > 0)
    if command == PRETRAIN:
        _check_schedule(settings)
    if len(settings["lr"]) != 1 or len(settings["update_freq"]) != 1:
        raise ValueError("--lr, --update-freq: one number for each epoch is for --engine fairseq; give one")
    _count_held_out_text(values, shares_held_out_text, processes)
    if known and command == PRETRAIN:
        values["model.max_positions"] = known.longest(settings["tokens_per_sample"])
    model = ModelConfig(**{**config, **{ours: values[place] for place, ours in MODEL.items() if place in values}})
    theirs = {ours: place.partition(".")[2] for place, ours in MODEL.items()}
    if known and command == PRETRAIN:
        wrong = [
            f"{theirs[name]}={value} in the checkpoint, {getattr(model, name)} here"
            for name, value in vars(known.config).items()
            if name not in FREE and value != getattr(model, name)
        ]
        if wrong:
            raise ValueError(f"the model contradicts the checkpoint {checkpoint}: {'; '.join(wrong)}")
    if command == PRETRAIN:
        values |= {f"model.{name}": getattr(model, name) for name in ("position", "cls", "block")}
        architecture = named(architecture, model.position, model.cls)
        longest, length = settings["max_positions"], settings["tokens_per_sample"]
        if length > longest:
            raise ValueError(f"sequences of {length} tokens: the model has {longest} positions")
    values.pop(ARCH)
    plain = plain_options(architecture)
    differs = {theirs[name]: value for name, value in vars(model).items() if str(value) != str(plain[name])}
    free = {theirs[name] for name in FREE}
    variant = ", ".join(f"{name} {differs[name]}" for name in sorted(differs) if name not in free)
    more = {"command": command, "architecture": architecture, "model": model, "variant": variant}
    return Settled(**{**vars(settings), **more})


def _count_held_out_text(values, shares, processes):
    """Of a batch of all processes, where the recipe's number is split; or of a process, as fairseq counts. shares:
    whether the user leaves it to the recipe."""
    most, size = values.get("dataset.max_valid_steps"), "dataset.batch_size_valid"
    if most and values[size] and shares:
        values[size] *= processes
    else:
        values[size] = values[size] or values["dataset.batch_size"]
        if most:
            values["dataset.max_valid_steps"] = most * processes


def _check_schedule(settings):
    """Raise ValueError for what fairseq's schedule of the same name does not take."""
    name, ends = settings["lr_scheduler"], {"power", "end_learning_rate"}
    own = {
        "polynomial_decay": {*ends, "warmup_updates", "total_num_update"},
        "constant_cooldown": {"warmup_updates", "cooldown_updates", "total_num_update"},
        "polynomial_decay_ratio": {*ends, "warmup_ratio"},
    }
    for option in sorted(set().union(*own.values()) - own[name]):
        place = f"lr_scheduler.{option}"
        if settings.values[place] != PLACES[place].default:
            raise ValueError(f"{place}={settings.values[place]}: {name} has no such option")
    warmup, cooldown, total = (settings[name] for name in ("warmup_updates", "cooldown_updates", "total_num_update"))
    if name == "constant_cooldown" and warmup + cooldown > total:
        raise ValueError(f"{warmup} updates of warm-up and {cooldown} of cool-down: valid: at most {total} in all")


def adam_betas(text: str) -> tuple[float, float]:
    """Of "(0.9, 0.98)"."""
    return ast.literal_eval(text)


def _of_model(options):
    return {place: options[ours] for place, ours in MODEL.items() if ours in options}
