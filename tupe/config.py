"""The one list of training options. Each field of `Training` says what it is, where it stands in a recipe
(and in fairseq's configuration), what is valid, and what it means for a run that is resumed. The command line and its
help, both engines, sweeps, records and refusals read it. Needs neither torch nor fairseq.

Further settings are fairseq's: SECTION.KEY=VALUE hands one on as it is, and fairseq alone judges it.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatch
from typing import Any

from .model_config import ModelConfig
from .names import did_you_mean

PRETRAIN, FINETUNE = "pretrain", "finetune"
BOTH = (PRETRAIN, FINETUNE)
SEEDS = 2**32 - 1  # numpy's
MANY = 10**9
COUNT, UPDATES, SHARE, RATE = (1, MANY), (0, MANY), (0.0, 1.0), (0.0, 100.0)
PAIR = tuple[float, float]
NO_GPU = "fp16 needs a GPU; valid here: --precision float32, autocast or bf16 (fairseq-train: without --fp16)"
# --precision -> what it is in a recipe, and to fairseq. bf16 and fp16 train float32 copies of half-precision weights.
PRECISIONS = {
    name: {"common.fp16": name == "fp16", "common.bf16": name == "bf16", "model.autocast": autocast}
    for name, autocast in {"float32": "none", "autocast": "bf16", "bf16": "none", "fp16": "none"}.items()
}

OF_SCHEDULE = {  # which of the options of schedules each has; of fairseq's own those with a warm-up
    **dict.fromkeys(("cosine", "fixed", "inverse_sqrt"), ("warmup_updates",)),
    "polynomial_decay": ("warmup_updates", "total_num_update"),
    "constant_cooldown": ("warmup_updates", "total_num_update", "cooldown_updates"),
    "polynomial_decay_ratio": ("warmup_ratio",),
}
OF_SCHEDULES = frozenset().union(*OF_SCHEDULE.values())
COMPILE = ("auto", "yes", "no")

# What a setting means for a run's record.
IDENTITY = "identity"  # it tells two runs apart
CHANGES = "changes"  # it does not determine the run's numbers: it may change on resuming, which is noted
APART = "apart"  # the record has it in another field, or does not need it


def option(
    default: Any,
    section: str,
    help: str,
    range: tuple[float, ...] = (),
    *,
    key: str = "",
    choices: tuple[str, ...] = (),
    of: tuple[str, ...] = BOTH,
    torch: tuple[str, ...] | None = None,
    record: str = IDENTITY,
) -> Any:
    """A field of `Training`. section, key: its place in a recipe, fairseq's (key: the field's name if not given).
    range: the least and the greatest number, beside the default. choices: the valid words. of: the commands that have
    it; torch: those that have it with --engine torch (default: the same). record: `IDENTITY`, `CHANGES` or `APART`."""
    about = {
        "default": default, "help": help, "range": range, "choices": choices, "of": of,
        "torch": of if torch is None else torch, "record": record,
    }  # fmt: skip
    return field(default_factory=lambda: default, metadata={"section": section, "key": key, "about": about})


@dataclass
class Training:
    """A training without the options of its model, which are `ModelConfig`'s. Defaults are fairseq's; a recipe's values
    win over them."""

    seed: int = option(1, "common", "The seed of weights, order, masks and dropout.", (0, SEEDS), record=APART)
    precision: str = option(
        "float32", "common", "The numbers of weights and products; autocast: weights in float32, products in bfloat16.",
        choices=tuple(PRECISIONS), torch=(), record=APART,
    )  # fmt: skip
    fp16: bool = option(False, "common", "See `PRECISIONS`.", of=(), torch=BOTH)
    bf16: bool = option(False, "common", "See `PRECISIONS`.", of=(), torch=BOTH)
    cpu: bool = option(False, "common", "Train on the CPU even if there is a GPU.", record=CHANGES)
    log_interval: int = option(100, "common", "Updates between two lines of the log.", COUNT, record=CHANGES)
    tensorboard_logdir: str = option("", "common", "The folder of TensorBoard's logs.", record=CHANGES)
    wandb_project: str = option("", "common", "The project of Weights and Biases.", record=CHANGES)
    ddp_backend: str = option(
        "pytorch_ddp", "distributed_training", "How several processes share the model.", record=CHANGES
    )
    batch_size: int = option(32, "dataset", "Sequences per update, over all GPUs.", COUNT)
    batch_size_valid: int = option(0, "dataset", "Sequences per batch of held-out text.", COUNT)
    num_workers: int = option(1, "dataset", "Processes that load data.", (0, 1024), record=CHANGES)
    train_subset: str = option("train", "dataset", "The split to train on.")
    valid_subset: str = option("valid", "dataset", "The splits to validate on.", record=APART)
    max_valid_steps: int = option(0, "dataset", "The largest number of batches in a validation.", COUNT, of=(PRETRAIN,))
    validate_interval_updates: int = option(
        0,
        "dataset",
        "Updates between validations; fairseq validates at checkpoints, too.",
        UPDATES,
        of=(PRETRAIN,),
        record=CHANGES,
    )
    disable_validation: bool = option(False, "dataset", "Do not validate.", of=(PRETRAIN,), record=CHANGES)
    lr: list[float] = option([0.25], "optimization", "The highest learning rate.", RATE)
    max_update: int = option(
        0, "optimization", "The length of the run in updates.", COUNT, torch=(PRETRAIN,), record=APART
    )
    max_epoch: int = option(0, "optimization", "The length of the run in epochs.", COUNT, record=APART)
    update_freq: list[int] = option([1], "optimization", "Steps of an update, on each GPU.", (1, 10**6))
    clip_norm: float = option(0.0, "optimization", "The norm that gradients are clipped to.", (0.0, 1e6))
    optimizer: str = option("adam", "optimizer", "The optimizer.", key="_name")
    adam_betas: tuple[float, float] = option((0.9, 0.999), "optimizer", "Adam's two decay rates.", (0.0, 0.999999))
    adam_eps: float = option(1e-8, "optimizer", "Adam's epsilon.", (1e-16, 1.0))
    weight_decay: float = option(0.0, "optimizer", "Weight decay.", (0.0, 10.0))
    lr_scheduler: str = option("polynomial_decay", "lr_scheduler", "How the learning rate changes.", key="_name")
    warmup_updates: int = option(
        0, "lr_scheduler", "Updates in which the learning rate rises.", UPDATES, of=(PRETRAIN,)
    )
    warmup_ratio: float = option(0.06, "lr_scheduler", "The share of updates in which the rate rises.", (0.0, 0.99))
    total_num_update: int = option(
        10**6, "lr_scheduler", "The update at which the decay ends.", UPDATES, of=(PRETRAIN,)
    )
    cooldown_updates: int = option(
        0, "lr_scheduler", "Last updates, in which a constant rate falls.", UPDATES, of=(PRETRAIN,)
    )
    save_dir: str = option("checkpoints", "checkpoint", "The folder of the run: --output.", record=APART)
    finetune_from_model: str = option("", "checkpoint", "The checkpoint to start from, file or folder.", record=APART)
    save_interval_updates: int = option(
        0, "checkpoint", "Updates between checkpoints.", UPDATES, of=(PRETRAIN,), record=CHANGES
    )
    keep_interval_updates: int = option(
        -1, "checkpoint", "How many of the latest periodic checkpoints are kept.", COUNT, of=(PRETRAIN,), record=CHANGES
    )
    keep_interval_updates_pattern: int = option(
        -1, "checkpoint", "Multiples of this number of updates are kept for good.", COUNT, of=(PRETRAIN,),
        record=CHANGES,
    )  # fmt: skip
    no_save: bool = option(False, "checkpoint", "Write no checkpoint.", torch=(FINETUNE,), record=CHANGES)
    task: str = option(
        "tupe_masked_lm", "task", "What is learned.", key="_name", of=(PRETRAIN,), torch=BOTH, record=APART
    )
    tokens_per_sample: int = option(512, "task", "Tokens of a sequence.", (3, 10**6), of=(PRETRAIN,))
    mask_prob: float = option(0.15, "task", "The share of the tokens that is predicted.", (0.001, 0.99), of=(PRETRAIN,))
    leave_unmasked_prob: float = option(
        0.1, "task", "The share of the predicted tokens that stay as they are.", SHARE, of=(PRETRAIN,)
    )
    random_token_prob: float = option(
        0.1, "task", "The share of the predicted tokens that become a random one.", SHARE, of=(PRETRAIN,)
    )
    glue_task: str = option("", "task", "The task: --task.", of=(FINETUNE,), record=APART)
    criterion: str = option("masked_lm", "criterion", "The loss.", key="_name")
    arch: str = option("tupe_r", "model", "The architecture.", key="_name", of=(PRETRAIN,), record=APART)
    autocast: str = option("none", "model", "See `PRECISIONS`.", choices=("none", "bf16"), of=(), torch=BOTH)
    compile: str = option(
        "auto", "model", "Compile the layers, and the head with its loss. auto: of masked LMs, on GPUs that can; "
        "graphs: and replay CUDA graphs, on one GPU with --engine torch.", choices=(*COMPILE, "graphs"), record=CHANGES,
    )  # fmt: skip
    position_file: str = option("", "model", "Files of position encodings of your own.")


@dataclass(frozen=True)
class Option:
    """A field of `Training` or of `ModelConfig`, as the command line and recipes know it. name: its name in Python;
    kind: its type; place: "section.key" in a recipe. The rest is as in `option`."""

    name: str
    kind: Any
    place: str
    default: Any
    help: str
    range: tuple[float, ...]
    choices: tuple[str, ...]
    of: tuple[str, ...]
    torch: tuple[str, ...]
    record: str

    @property
    def flag(self) -> str:
        """The option as it is typed: "--batch-size"; its place if only a recipe has it."""
        return flag(self.name) if self.of else self.place

    @property
    def several(self) -> bool:
        """Whether the option takes more than one number."""
        return self.kind in (list[int], list[float], PAIR)

    @property
    def valid(self) -> str:
        """The valid values, in a few words."""
        if self.choices:
            return ", ".join(self.choices)
        if not self.range:
            return "true, false" if self.kind is bool else "a text"
        least, greatest = (f"{bound:g}" if isinstance(bound, float) else str(bound) for bound in self.range)
        if self.several:
            return f"{'two numbers' if self.kind == PAIR else 'numbers'} from {least} to {greatest}"
        beside = "" if self.range[0] <= self.default <= self.range[1] else f", or {self.default:g}"
        return f"{least} to {greatest}{beside}"

    def convert(self, value: Any) -> Any:
        """The value of a text, or of a number, as a recipe has it. Raises ValueError, with what is valid, for another
        one."""
        try:
            return self._converted(value)
        except (ValueError, TypeError, KeyError, OverflowError):
            pass
        if self.choices and isinstance(value, str):
            raise ValueError(f"{self.flag}: unknown value {value!r}{did_you_mean(value, self.choices)}")
        raise ValueError(f"{self.flag} is {shown(value)}; valid: {self.valid}")

    def _converted(self, value: Any) -> Any:
        if self.kind is bool:
            return {"true": True, "false": False, "1": True, "0": False}[str(value).lower()]
        if self.kind is str:
            is_text = isinstance(value, (str, int, float)) and not isinstance(value, bool)
            if not is_text or self.default and value == "" or self.choices and value not in self.choices:
                raise ValueError
            return str(value)
        if not self.several:
            return self._number(value)
        numbers = value.strip("([ ])").split(",") if isinstance(value, str) else value
        numbers = [self._number(each) for each in (numbers if isinstance(numbers, Iterable) else [numbers])]
        if not numbers or self.kind == PAIR and len(numbers) != 2:
            raise ValueError
        return str(tuple(numbers)) if self.kind == PAIR else numbers

    def _number(self, value: Any) -> Any:
        number = int(value) if self.kind in (int, list[int]) else float(value)
        is_whole = isinstance(value, str) or value == number
        least, greatest = self.range
        if isinstance(value, bool) or not is_whole or not (number == self.default or least <= number <= greatest):
            raise ValueError
        return number


def flag(name: str) -> str:
    """ "--batch-size" for "batch_size"."""
    return "--" + name.replace("_", "-")


def shown(value: Any) -> str:
    """A value in an error, on one line and cut."""
    text = repr(value) if value == "" or not str(value).isprintable() else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _options() -> list[Option]:
    found = []
    for each in fields(Training):
        section, key, about = (each.metadata[name] for name in ("section", "key", "about"))
        default = str(about["default"]) if each.type == PAIR else about["default"]
        found.append(Option(each.name, each.type, f"{section}.{key or each.name}", **{**about, "default": default}))
    for each in fields(ModelConfig):
        about, name = each.metadata, each.metadata["fairseq"] or each.name
        bounds = () if about["least"] is None else (about["least"], about["greatest"])
        # The structure of a model that is fine-tuned, and its longest input, are the checkpoint's.
        of = BOTH if about["free"] else (PRETRAIN,)
        torch = (PRETRAIN,) if each.name in ("max_positions", "places") else of
        record = CHANGES if each.name in ("attention", "checkpoint_activations") else IDENTITY
        text, choices = f"{about['help'][0].upper()}{about['help'][1:]}.", about["choices"] or ()
        found.append(Option(name, each.type, f"model.{name}", each.default, text, bounds, choices, of, torch, record))
    return found


OPTIONS = {each.name: each for each in _options()}
PLACES = {each.place: each for each in OPTIONS.values()}


def named(name: str) -> Option | None:
    """The option with this name in any spelling: "--batch-size", "batch_size" or "dataset.batch_size"."""
    if "." in name:
        return PLACES.get(name.lstrip("+"))
    return OPTIONS.get(name.lstrip("-").replace("-", "_"))


def is_number(name: str) -> bool:
    """Whether this option takes numbers. A text may name something that only an engine knows."""
    return (known := named(name)) is not None and bool(known.range)


def check(name: str, value: Any) -> None:
    """Raise ValueError, with what is valid, for a wrong value of an option that takes numbers. name: see `named`."""
    known = named(name)
    if known is not None and known.range:
        known.convert(value)


def check_together(values: Mapping[str, Any]) -> None:
    """Raise ValueError for values that make no sense together. values: {"section.key": value}."""

    def value(name: str) -> Any:
        known = OPTIONS[name]
        return values.get(known.place, known.default)

    ends = [name for name in ("max_update", "max_epoch") if OPTIONS[name].place in values]
    if not any(value(name) > 0 for name in ends):
        raise ValueError("--max-update is 0, and so is --max-epoch: training would have no end; valid: at least 1")
    by_share = value("lr_scheduler") == "polynomial_decay_ratio"
    if not (by_share or value("total_num_update") > 0):
        raise ValueError(f"--lr-scheduler {value('lr_scheduler')} needs the length of the run: give --max-update")
    shares = [value(name) for name in ("leave_unmasked_prob", "random_token_prob")]
    if sum(shares) > 1:
        raise ValueError(f"--leave-unmasked-prob {shares[0]:g} and --random-token-prob {shares[1]:g}: sum above 1")


# ------------------------------------------------------------------------------------------------------------ the words

OVERRIDE = re.compile(r"\+{0,2}[A-Za-z_][\w.@]*=")  # the beginning of section.key=value


def split_words(words: Iterable[str]) -> list[tuple[str, str | None]]:
    """(name, value) of the words of a command line: ("--lr", "1e-4"), ("--compile", None), ("model.dropout", "0").
    Raises ValueError for a word that is no part of any."""
    found: list[tuple[str, str | None]] = []
    words = list(words)
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        known = named(name) if name.startswith("--") else None
        if equals and (name.startswith("--") or OVERRIDE.match(word)):
            found.append((name, value))
        elif not name.startswith("--"):
            raise ValueError(f"{word!r} is neither an option (--name value) nor an override (section.key=value)")
        elif known and known.kind is bool or not words or words[0].startswith("--"):
            found.append((name, None))
        elif known or not OVERRIDE.match(words[0]):
            found.append((name, words.pop(0)))
        else:
            found.append((name, None))
    return found


def split_batch(
    batch: int, processes: int, limit: int, remedy: str = "choose another --batch-size"
) -> tuple[int, int]:  # fmt: skip
    """(sequences per process and step, steps per update), whose product times `processes` is exactly `batch`.

    limit: the most sequences of a process in one step; the result has as few steps as possible. Raises ValueError if
    the batch cannot be split; remedy: another way out that the error names.
    """
    if batch % processes:
        divisors = [n for n in range(1, min(batch, 1024) + 1) if batch % n == 0]
        raise ValueError(
            f"a batch of {batch} sequences cannot be split evenly over {processes} processes; use one of {divisors} "
            f"processes, or {remedy}"
        )
    share = batch // processes
    steps = next(n for n in range(1, share + 1) if share % n == 0 and share // n <= limit)
    return share // steps, steps


def split_held_out(batch: int, processes: int, max_valid_steps: int | None) -> int | None:
    """Held-out sequences of a process in one step, so that losses are of the same text with any number of processes;
    None where the batch of one process does not divide, or all held-out text is scored anyway."""
    return batch // processes if max_valid_steps and batch % processes == 0 else None


# ---------------------------------------------------------------------------------------------------- what may change

# fairseq's own settings that may change when a run is resumed, as our options with `CHANGES` may.
MAY_CHANGE = (
    # how long, and what is saved, scored and logged meanwhile
    "checkpoint.save_*", "checkpoint.keep_*", "checkpoint.no_*", "checkpoint.best_*", "checkpoint.maximize_*",
    "checkpoint.patience", "checkpoint.write_*", "checkpoint.load_*", "checkpoint.checkpoint_*", "dataset.validate_*",
    "common.log_*", "common.no_progress_bar", "optimization.stop_time_hours",
    # where it runs; `optimization.update_freq` is compared times the number of processes
    "distributed_training.distributed_world_size", "dataset.data_buffer_size", "dataset.update_epoch_batch_itr",
    "common.empty_cache_freq", "common.all_gather_list_size",
    # asked for in so many words: the data from epoch 1 again
    "checkpoint.reset_dataloader", "checkpoint.reset_meters",
)  # fmt: skip


def may_change(place: str) -> bool:
    """Whether a setting, "section.key", may change when a run is resumed; all others tell two runs apart."""
    if place in PLACES:
        return PLACES[place].record == CHANGES
    return any(fnmatch(place, pattern) for pattern in MAY_CHANGE)
