"""The one list of what a training can be told. Each field of `Training` says what it is, where it stands in a recipe
(and in fairseq's configuration), what is valid, and what it means for a run that is resumed. The command line and its
help, both engines, sweeps, records and refusals read it. Needs neither torch nor fairseq.

Further settings are fairseq's: SECTION.KEY=VALUE hands one on as it is, and fairseq alone judges it.
"""

import ast
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatch
from typing import Any, NoReturn

from .model_config import ModelConfig
from .names import did_you_mean

PRETRAIN, FINETUNE = "pretrain", "finetune"
BOTH = (PRETRAIN, FINETUNE)
SEEDS = 2**32 - 1  # numpy's
MANY = 10**9
COUNT, UPDATES, SHARE, RATE = (1, MANY), (0, MANY), (0.0, 1.0), (0.0, 100.0)
PAIR = tuple[float, float]
TINY = 1e-30  # what is nearer to 0, but not 0, would vanish or overflow in float32 products
NO_GPU = "--fp16 needs a GPU; valid here: float32 without --fp16, or --autocast bf16"

# What a setting means for a run's record.
IDENTITY = "identity"  # it tells two runs apart
CHANGES = "changes"  # the numbers of the run do not follow from it: it may change on resuming, which is noted
APART = "apart"  # in a field of its own of the record, or of no account


def option(
    default: Any,
    section: str,
    help: str,
    range: tuple[float, ...] = (),
    *,
    key: str = "",
    none: float | None = None,
    choices: tuple[str, ...] = (),
    of: tuple[str, ...] = BOTH,
    transformers: tuple[str, ...] | None = None,
    record: str = IDENTITY,
) -> Any:
    """A field of `Training`. section, key: its place in a recipe, fairseq's (key: the field's name if not given).
    range: the least and the greatest number; none: a further one, which stands for "none". choices: the valid words.
    of: the commands that have it; transformers: those that have it with that engine (default: the same).
    record: `IDENTITY`, `CHANGES` or `APART`."""
    metadata = {
        "section": section, "help": help, "range": range, "key": key, "none": none, "choices": choices, "of": of,
        "transformers": of if transformers is None else transformers, "record": record,
    }  # fmt: skip
    return field(default_factory=lambda: default, metadata={**metadata, "default": default})


@dataclass
class Training:
    """A training, but for the options of its model, which are `ModelConfig`'s. Defaults are fairseq's; those of a
    recipe win over them."""

    seed: int = option(1, "common", "The seed of weights, order, masks and dropout.", (0, SEEDS), record=APART)
    fp16: bool = option(False, "common", "Mixed precision in float16, on GPUs.")
    amp: bool = option(False, "common", "Mixed precision by torch.amp instead.")
    cpu: bool = option(False, "common", "Train on the CPU even if there is a GPU.", record=CHANGES)
    log_interval: int = option(100, "common", "Updates between two lines of the log.", COUNT, record=CHANGES)
    tensorboard_logdir: str = option("", "common", "The folder of TensorBoard's logs.", record=CHANGES)
    wandb_project: str = option("", "common", "The project of Weights and Biases.", record=CHANGES)
    ddp_backend: str = option(
        "pytorch_ddp", "distributed_training", "How several processes share the model.",
    )  # fmt: skip
    batch_size: int = option(32, "dataset", "Sequences of an update, on all GPUs together.", COUNT)
    batch_size_valid: int = option(0, "dataset", "Sequences of a batch of held-out text.", COUNT)
    max_tokens: int = option(0, "dataset", "The most tokens of a batch.", COUNT, transformers=())
    num_workers: int = option(1, "dataset", "Processes that load data.", (0, 1024), record=CHANGES)
    train_subset: str = option("train", "dataset", "The split to train on.")
    valid_subset: str = option("valid", "dataset", "The splits to validate on.", record=APART)
    max_valid_steps: int = option(0, "dataset", "The most batches of a validation.", COUNT, of=(PRETRAIN,))
    validate_interval_updates: int = option(
        0, "dataset", "Updates between validations.", UPDATES, of=(PRETRAIN,), record=CHANGES
    )
    disable_validation: bool = option(False, "dataset", "Do not validate.", of=(PRETRAIN,), record=CHANGES)
    lr: list[float] = option([0.25], "optimization", "The highest learning rate.", RATE)
    max_update: int = option(
        0, "optimization", "The length of the run in updates.", COUNT, none=0, transformers=(PRETRAIN,), record=APART
    )
    max_epoch: int = option(0, "optimization", "The length of the run in epochs.", COUNT, none=0, record=APART)
    stop_time_hours: float = option(
        0.0, "optimization", "Hours after which to stop.", (0.0, 1e6), transformers=(), record=CHANGES
    )
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
        10**6, "lr_scheduler", "The update at which the decay ends.", COUNT, none=0, of=(PRETRAIN,)
    )
    cooldown_updates: int = option(
        0, "lr_scheduler", "Last updates, in which a constant rate falls.", UPDATES, of=(PRETRAIN,)
    )
    end_learning_rate: float = option(0.0, "lr_scheduler", "The learning rate at the end of the decay.", RATE)
    power: float = option(1.0, "lr_scheduler", "The power of the decay.", RATE)
    save_dir: str = option("checkpoints", "checkpoint", "The folder of the run: --output.", record=APART)
    finetune_from_model: str = option("", "checkpoint", "The checkpoint to start from, file or folder.", record=APART)
    restore_file: str = option("checkpoint_last.pt", "checkpoint", "The checkpoint to go on from.", transformers=())
    save_interval_updates: int = option(
        0, "checkpoint", "Updates between checkpoints.", UPDATES, of=(PRETRAIN,), record=CHANGES
    )
    keep_interval_updates: int = option(
        -1, "checkpoint", "How many of them are kept.", COUNT, none=-1, of=(PRETRAIN,), record=CHANGES
    )
    keep_interval_updates_pattern: int = option(
        -1, "checkpoint", "Multiples of this number of updates are kept for good.", COUNT, none=-1, of=(PRETRAIN,),
        record=CHANGES,
    )  # fmt: skip
    no_save: bool = option(False, "checkpoint", "Write no checkpoint.", transformers=(FINETUNE,), record=CHANGES)
    task: str = option(
        "tupe_masked_lm", "task", "What is learned.", key="_name", of=(PRETRAIN,), transformers=BOTH, record=APART
    )
    tokens_per_sample: int = option(512, "task", "Tokens of a sequence.", (3, 10**6), of=(PRETRAIN,))
    mask_prob: float = option(0.15, "task", "The share of the tokens that is predicted.", (0.001, 0.99), of=(PRETRAIN,))
    leave_unmasked_prob: float = option(0.1, "task", "The share of these that stay.", SHARE, of=(PRETRAIN,))
    random_token_prob: float = option(0.1, "task", "The share of these that become another.", SHARE, of=(PRETRAIN,))
    sample_break_mode: str = option("complete", "task", "Where a block of text ends.", of=(PRETRAIN,))
    long_sentences: str = option(
        "cut", "task", "Sentences that fit into no block are cut between words, or skipped.", choices=("cut", "skip"),
        of=(PRETRAIN,),
    )  # fmt: skip
    stop_at_jump: float = option(
        0.0, "task", "End if the loss is this far above its lowest.", (0.0, 1e6), transformers=(), record=CHANGES
    )
    glue_task: str = option("", "task", "The task: --task.", of=(FINETUNE,), record=APART)
    criterion: str = option("masked_lm", "criterion", "The loss.", key="_name")
    discriminator_weight: float = option(
        50.0, "criterion", "The weight of ELECTRA's discriminator.", (0.0, 1e6), of=(PRETRAIN,), transformers=()
    )
    arch: str = option("tupe_r", "model", "The architecture.", key="_name", of=(PRETRAIN,), record=APART)
    autocast: str = option(
        "none", "model", "Mixed precision without --fp16, for CPUs that it speeds up.", choices=("none", "bf16")
    )
    compile: bool = option(False, "model", "Compile the encoder.", record=CHANGES)
    position_file: str = option("", "model", "Files of position encodings of your own.")
    generator_fraction: int = option(
        3, "model", "Heads of ELECTRA's discriminator for one of the generator.", (1, 64), of=(PRETRAIN,),
        transformers=(),
    )  # fmt: skip


@dataclass(frozen=True)
class Option:
    """A field of `Training` or of `ModelConfig`, as the command line and recipes know it. name: of the option, as in
    Python; kind: its type; place: "section.key" of a recipe. The rest is as in `option`."""

    name: str
    kind: Any
    default: Any
    place: str
    help: str
    range: tuple[float, ...] = ()
    none: float | None = None
    choices: tuple[str, ...] = ()
    of: tuple[str, ...] = BOTH
    transformers: tuple[str, ...] = BOTH
    record: str = IDENTITY

    @property
    def flag(self) -> str:
        """As it is typed: "--batch-size"."""
        return flag(self.name)

    @property
    def several(self) -> bool:
        """Whether it takes more than one number."""
        return self.kind in (list[int], list[float], PAIR)

    @property
    def valid(self) -> str:
        """What it may be, in a few words."""
        if self.choices:
            return ", ".join(self.choices)
        if not self.range:
            return "true, false" if self.kind is bool else "a text"
        least, greatest = (f"{bound:g}" if isinstance(bound, float) else str(bound) for bound in self.range)
        numbers = f"{least} to {greatest}"
        if self.several:
            return f"{'two numbers' if self.kind == PAIR else 'numbers'} from {numbers}"
        return numbers if self.none is None else f"{numbers}, or {self.none:g}"

    def convert(self, value: Any) -> Any:
        """The value of a text, or of a number, as a recipe has it. Raises ValueError, with what is valid, if it is
        none."""
        try:
            return self._converted(value)
        except (ValueError, TypeError, SyntaxError, OverflowError, RecursionError, MemoryError):
            pass
        if self.choices and isinstance(value, str):
            raise ValueError(f"{self.flag}: unknown value {value!r}{did_you_mean(value, self.choices)}")
        raise ValueError(f"{self.flag} is {shown(value)}; valid: {self.valid}")

    def _converted(self, value: Any) -> Any:
        if self.kind is bool:
            known = {"true": True, "false": False, "1": True, "0": False}
            return known[text] if (text := str(value).lower()) in known else self._refuse()
        if self.kind is str:
            is_text = isinstance(value, (str, int, float)) and not isinstance(value, bool)
            if not is_text or self.default and value == "" or self.choices and value not in self.choices:
                self._refuse()
            return str(value)
        if not self.several:
            return self._number(value)
        numbers = ast.literal_eval(value.strip()) if isinstance(value, str) else value
        numbers = list(numbers) if isinstance(numbers, Iterable) else [numbers]
        if not numbers or self.kind == PAIR and len(numbers) != 2:
            self._refuse()
        numbers = [self._number(number) for number in numbers]
        return str(tuple(numbers)) if self.kind == PAIR else numbers

    def _number(self, value: Any) -> Any:
        kind = int if self.kind in (int, list[int]) else float
        number = kind(value)
        if isinstance(value, bool) or not isinstance(value, str) and value != number:
            self._refuse()
        least, greatest = self.range
        tiny = 0 < abs(number) < TINY
        if number not in (self.none, self.default) and (tiny or not least <= number <= greatest):
            self._refuse()
        return number if math.isfinite(number) else self._refuse()

    def _refuse(self) -> NoReturn:
        raise ValueError


def flag(name: str) -> str:
    """ "--batch-size" for "batch_size"."""
    return "--" + name.replace("_", "-")


def shown(value: Any) -> str:
    """A value in an error, on one line and cut."""
    text = repr(value) if isinstance(value, str) and not value.isprintable() or value == "" else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _options() -> list[Option]:
    found = []
    for each in fields(Training):
        about = dict(each.metadata)
        place = f"{about.pop('section')}.{about.pop('key') or each.name}"
        default = about.pop("default")
        default = str(default) if each.type == PAIR else default
        found.append(Option(each.name, each.type, default, place, **about))
    for each in fields(ModelConfig):
        free, name = each.metadata["free"], each.metadata["fairseq"] or each.name
        least, choices = each.metadata["least"], each.metadata["choices"] or ()
        bounds = () if least is None else (least, each.metadata["greatest"])
        # The structure of a model that is fine-tuned, and its longest input, are the checkpoint's.
        of = BOTH if free else (PRETRAIN,)
        there = (PRETRAIN,) if each.name in ("max_positions", "places") else of
        record = CHANGES if each.name in ("attention", "checkpoint_activations") else IDENTITY
        text, place = each.metadata["help"], f"model.{name}"
        text = f"{text[0].upper()}{text[1:]}."
        of_model = Option(name, each.type, each.default, place, text, bounds, None, choices, of, there, record)
        found.append(of_model)
    return found


OPTIONS = {each.name: each for each in _options()}
PLACES = {each.place: each for each in OPTIONS.values()}


def named(name: str) -> Option | None:
    """The option of a name in any spelling: "--batch-size", "batch_size" or "dataset.batch_size"."""
    if "." in name:
        return PLACES.get(name.lstrip("+"))
    return OPTIONS.get(name.lstrip("-").replace("-", "_"))


def is_number(name: str) -> bool:
    """Whether it is an option that takes numbers: a text may name what only an engine knows."""
    return (known := named(name)) is not None and bool(known.range)


def check(name: str, value: Any) -> None:
    """Raise ValueError, with what is valid, for what an option that takes numbers may not be. name: see `named`."""
    known = named(name)
    if known is not None and known.range and "${" not in str(value):
        known.convert(value)


def check_together(values: Mapping[str, Any]) -> None:
    """Raise ValueError for values that make no sense together. values: {"section.key": value}."""

    def value(name: str) -> Any:
        known = OPTIONS[name]
        return values.get(known.place, known.default)

    ends = [name for name in ("max_update", "max_epoch") if OPTIONS[name].place in values]
    if not any(value(name) > 0 for name in ends):
        raise ValueError("--max-update is 0, and so is --max-epoch: training would have no end; valid: at least 1")
    if value("lr_scheduler") == "polynomial_decay" and not value("total_num_update") > 0:
        raise ValueError("--total-num-update is 0; valid for polynomial_decay: at least 1")
    shares = [value(name) for name in ("leave_unmasked_prob", "random_token_prob")]
    if sum(shares) > 1:
        raise ValueError(f"--leave-unmasked-prob {shares[0]:g} and --random-token-prob {shares[1]:g}: sum above 1")
    if 0 < value("max_tokens") < value("tokens_per_sample") and "task.tokens_per_sample" in values:
        length = value("tokens_per_sample")
        raise ValueError(f"--max-tokens is {value('max_tokens')}: a sequence has {length}; valid: at least {length}")


# ------------------------------------------------------------------------------------------------------------ the words

OVERRIDE = re.compile(r"(~|\+{0,2}[A-Za-z_][\w.@]*=)")  # the beginning of section.key=value


def split_words(words: Iterable[str]) -> list[tuple[str, str | None]]:
    """(name, value) of the words of a command line: ("--lr", "1e-4"), ("--fp16", None), ("model.dropout", "0"), and
    ("~task.mask_prob", None), which takes a value out of the recipe. Raises ValueError for a word that is no part of
    any."""
    found: list[tuple[str, str | None]] = []
    words = list(words)
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        known = named(name) if name.startswith("--") else None
        if equals and (name.startswith("--") or OVERRIDE.match(word)):
            found.append((name, value))
        elif word.startswith("~"):
            found.append((word, None))
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

    limit: most sequences of a process in one step; the result has as few steps as possible. Raises ValueError if there
    is no such split; remedy: what else it says to do.
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


# ---------------------------------------------------------------------------------------------------- what may change

# Settings of fairseq's own that may change when a run is resumed, as those of ours with `CHANGES`.
MAY_CHANGE = (
    # how long, and what is saved, scored and logged meanwhile
    "checkpoint.save_*", "checkpoint.keep_*", "checkpoint.no_*", "checkpoint.best_*", "checkpoint.maximize_*",
    "checkpoint.patience", "checkpoint.write_*", "checkpoint.load_*", "checkpoint.checkpoint_*", "dataset.validate_*",
    "common.log_*", "common.no_progress_bar", "common.azureml_logging", "common.aim_*", "common.profile",
    "common.reset_logging", "common.suppress_crashes",
    # where it runs; `optimization.update_freq` is compared times the number of processes
    "distributed_training.distributed_world_size", "dataset.data_buffer_size", "dataset.update_epoch_batch_itr",
    "common.empty_cache_freq", "common.all_gather_list_size", "common.use_plasma_view", "common.plasma_path",
    # asked for in so many words: the data from epoch 1 again
    "checkpoint.reset_dataloader", "checkpoint.reset_meters",
)  # fmt: skip


def may_change(place: str) -> bool:
    """Whether a setting, "section.key", may change when a run is resumed; all others tell two runs apart."""
    if place in PLACES:
        return PLACES[place].record == CHANGES
    return any(fnmatch(place, pattern) for pattern in MAY_CHANGE)
