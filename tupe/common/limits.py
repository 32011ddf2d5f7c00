"""Valid ranges of training options, fairseq's and ours, in one table. Needs only the standard library."""

import ast
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NO_GPU = "--fp16 needs a GPU; valid here: float32 without --fp16, or --autocast bf16"
MANY = 10**9
TINY = 1e-30  # what is nearer to 0, but not 0, would vanish or overflow in float32 products
SEEDS = 2**32 - 1  # numpy's
COUNT, UPDATES, SHARE, RATE = (1, MANY), (0, MANY), (0.0, 1.0), (0.0, 100.0)
OR_NONE = (1, MANY, -1)

# Name of the option -> (least, greatest) or (least, greatest, a value that stands for "none"). The option takes whole
# numbers, unless one of the bounds has a point.
LIMITS = {
    # common
    "log_interval": COUNT, "seed": (0, SEEDS), "empty_cache_freq": UPDATES, "all_gather_list_size": (1, 2**31 - 1),
    "model_parallel_size": (1, 1), "fp16_init_scale": (1, 2**30), "fp16_scale_window": COUNT,
    "fp16_scale_tolerance": SHARE, "min_loss_scale": (1e-12, 1e6), "threshold_loss_scale": (1e-12, 1e9),
    "amp_batch_retries": (0, 1000), "amp_init_scale": (1, 2**30), "amp_scale_window": COUNT,
    # dataset
    "num_workers": (0, 1024), "max_tokens": COUNT, "batch_size": COUNT, "max_tokens_valid": COUNT,
    "batch_size_valid": COUNT, "required_batch_size_multiple": COUNT, "required_seq_len_multiple": COUNT,
    "data_buffer_size": UPDATES, "validate_interval": COUNT, "validate_interval_updates": UPDATES,
    "validate_after_updates": UPDATES, "fixed_validation_seed": (0, SEEDS), "max_valid_steps": COUNT,
    "curriculum": UPDATES, "num_shards": COUNT, "shard_id": UPDATES,
    # distributed_training
    "distributed_world_size": (1, 10**6), "distributed_num_procs": (1, 10**6), "distributed_rank": (0, 10**6),
    "distributed_port": (1, 65535, -1), "device_id": (0, 1023), "nprocs_per_node": (1, 1024), "bucket_cap_mb": COUNT,
    "heartbeat_timeout": OR_NONE, "slowmo_momentum": SHARE, "localsgd_frequency": COUNT, "pipeline_chunks": UPDATES,
    # optimization, optimizer
    "max_epoch": (1, MANY, 0), "max_update": (1, MANY, 0), "stop_time_hours": (0.0, 1e6), "clip_norm": (0.0, 1e6),
    "update_freq": (1, 10**6), "lr": RATE, "stop_min_lr": (0.0, 100.0, -1), "weight_decay": (0.0, 10.0),
    "adam_betas": (0.0, 0.999999), "adam_eps": (1e-16, 1.0),
    # lr_scheduler
    "warmup_updates": UPDATES, "warmup_ratio": (0.0, 0.99), "cooldown_updates": UPDATES, "force_anneal": UPDATES,
    "total_num_update": (1.0, 1e9, 0), "end_learning_rate": RATE, "power": RATE,
    # checkpoint
    "save_interval": COUNT, "save_interval_updates": UPDATES, "keep_interval_updates": OR_NONE,
    "keep_interval_updates_pattern": OR_NONE, "keep_last_epochs": OR_NONE, "keep_best_checkpoints": OR_NONE,
    "patience": OR_NONE, "checkpoint_shard_count": (1, 1024), "ema_decay": SHARE, "ema_start_update": UPDATES,
    "ema_update_freq": COUNT,
    # model
    "encoder_layers": (1, 1000), "encoder_embed_dim": (1, 2**17), "encoder_ffn_embed_dim": (1, 2**20),
    "encoder_attention_heads": (1, 4096), "max_positions": (1, 10**6), "dropout": (0.0, 0.99),
    "attention_dropout": (0.0, 0.99), "activation_dropout": (0.0, 0.99), "pooler_dropout": (0.0, 0.99),
    "layer_norm_eps": (1e-15, 1.0), "generator_fraction": (1, 64),
    # task, criterion
    "tokens_per_sample": (3, 10**6), "mask_prob": (0.001, 0.99), "leave_unmasked_prob": SHARE,
    "random_token_prob": SHARE, "mask_multiple_length": (1, 10**4), "mask_stdev": (0.0, 1e4),
    "stop_at_jump": (0.0, 1e6), "discriminator_weight": (0.0, 1e6),
    "pad": UPDATES, "eos": UPDATES, "unk": UPDATES,
}  # fmt: skip
PAIRS = ("adam_betas",)
LISTS = ("lr", "update_freq")  # one number, or one for each epoch or phase
SWITCHES = ("update_epoch_batch_itr",)  # which fairseq takes as text
FILES = ("quantization_config_path", "ema_seed_model")  # which have to be there
TEXTS = (  # further options that take a value
    "data", "checkpoint", "output", "save_dir", "restore_file", "finetune_from_model", "position_file", "user_dir",
    "log_file", "tensorboard_logdir", "wandb_project", "train_subset", "valid_subset", "arch", "position",
)  # fmt: skip


def option(name: str) -> str:
    """ "--batch-size" for "batch_size"."""
    return "--" + name.replace("_", "-")


def valid(name: str) -> str:
    """What an option may be given, in a few words."""
    least, greatest, *none = LIMITS[name]
    numbers = str(least) if least == greatest else " to ".join(
        f"{bound:g}" if isinstance(bound, float) else str(bound) for bound in (least, greatest)
    )  # fmt: skip
    if name in PAIRS + LISTS:
        return f"{'two numbers' if name in PAIRS else 'numbers'} from {numbers}"
    return numbers + "".join(f", or {value}" for value in none)


def knows(name: str) -> bool:
    """Whether it is one of `LIMITS`, in any spelling: "--batch-size", "batch_size" or "dataset.batch_size"."""
    return _key(name) in LIMITS


def takes_value(option: str) -> bool:
    """Whether an option, which has none behind a "=", surely has the next word as its value."""
    return knows(option) or _key(option) in (*TEXTS, *FILES)


def _key(name):
    return name.rpartition(".")[2].lstrip("-").replace("-", "_")


def check(name: str, value: Any) -> None:
    """Raise ValueError, with what is valid, if an option of `LIMITS` may not be given this number, list of numbers, or
    text of either. name: see `knows`."""
    name = _key(name)
    if name not in LIMITS:
        return
    least, greatest, *none = LIMITS[name]
    whole = isinstance(least, int) and isinstance(greatest, int)
    try:
        numbers, several = value, name in PAIRS + LISTS
        if isinstance(value, str):
            numbers = ast.literal_eval(value.strip()) if several else (int if whole else float)(value)
        numbers = list(numbers) if several and hasattr(numbers, "__iter__") else [numbers]
        if not numbers or name in PAIRS and len(numbers) != 2:
            raise ValueError
        for number in numbers:
            if isinstance(number, bool) or number != (int if whole else float)(number):
                raise ValueError
            tiny = 0 < abs(number) < TINY
            if number not in none and (tiny or not math.isfinite(number) or not least <= number <= greatest):
                raise ValueError
    except (ValueError, TypeError, SyntaxError, OverflowError, RecursionError, MemoryError):
        raise ValueError(f"{option(name)} is {shown(value)}; valid: {valid(name)}") from None


def shown(value: Any) -> str:
    """A value in an error, on one line and cut."""
    text = repr(value) if isinstance(value, str) and not value.isprintable() or value == "" else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def check_all(values: Mapping[str, Any]) -> None:
    """Raise ValueError for the first of a run's options that has no sensible value. values: {name: value}, those that
    the recipe or the user gives; None: not given."""
    values = {name: value for name, value in values.items() if value is not None}
    for name in (name for name in LIMITS if name in values):
        check(name, values[name])
    for name in (name for name in SWITCHES if name in values):
        if str(values[name]).lower() not in ("true", "false"):
            raise ValueError(f"{option(name)} is {shown(values[name])}; valid: True, False")
    for name in (name for name in FILES if name in values):
        if not Path(values[name]).is_file():
            raise ValueError(f"{option(name)} {shown(values[name])}: no such file")
    if "log_file" in values:
        path = Path(values["log_file"]).absolute()
        if path.is_dir() or not path.parent.is_dir():
            raise ValueError(f"--log-file {shown(values['log_file'])}: valid: a file in a folder that exists")
    if not any(float(values.get(name, 0)) > 0 for name in ("max_update", "max_epoch")):
        raise ValueError("--max-update is 0, and so is --max-epoch: training would have no end; valid: at least 1")
    if values.get("lr_scheduler") == "polynomial_decay" and not float(values.get("total_num_update", 1)) > 0:
        raise ValueError("--total-num-update is 0; valid for polynomial_decay: at least 1")
    shares = [float(values.get(name, 0)) for name in ("leave_unmasked_prob", "random_token_prob")]
    if sum(shares) > 1:
        raise ValueError(f"--leave-unmasked-prob {shares[0]:g} and --random-token-prob {shares[1]:g}: sum above 1")


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
