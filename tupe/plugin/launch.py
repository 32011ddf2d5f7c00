"""A recipe of configs/ and the user's options -> the configuration of fairseq -> training, in this process or under
torchrun. The commands are in `tupe/cli/train.py`."""

import argparse
import logging
import os
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import fields as fields_of
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from fairseq import options
from fairseq.dataclass.configs import FairseqConfig
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY
from fairseq.registry import REGISTRIES
from fairseq.tasks import TASK_DATACLASS_REGISTRY
from omegaconf import DictConfig, OmegaConf

from ..common import limits
from ..common.architectures import ELECTRA, split_size
from ..common.limits import option, split_batch
from ..common.options import did_you_mean, split_files
from ..common.prepared import check_name, tasks_in
from ..common.recipes import check_preset, compose, value_of
from ..common.torchrun import gpus_to_use, run_torchrun, words_of_nodes
from ..data.glue import check_glue, glue_name
from ..data.splits import check_split, parts_of, read_symbols
from ..encoder import Encoder
from ..names import cls_beside
from ..positions import load_scheme_file
from . import worker
from .model import TupeConfig, core_config
from .saving import check_asserts, check_restore

logger = logging.getLogger("tupe.launch")

NEEDED = ("dataset.batch_size", "optimization.update_freq")  # of a recipe
SECONDS_WITHOUT_PROGRESS = 600  # after which processes of several nodes end: one of the nodes may be gone (as for NCCL)


def launch(
    recipe: str, overrides: list, arguments: list, *, gpus: int | None = None, nodes: int = 1, node_rank: int = 0,
    master_addr: str = "localhost", master_port: int = 29500, dry_run: bool = False, own_options: tuple = (),
    micro_batch_size: int | None = None, yes: bool = False,
) -> None:  # fmt: skip
    """Train as the recipe says; see `training_options` for the first three.

    gpus: GPUs of this node to use; None for all that are visible, 0 for the CPU (one process per node, which speak
    gloo). micro_batch_size: most sequences of a process in one step. yes: however long it takes on a CPU. dry_run: only
    print the command of fairseq-train that does the same. own_options: names of options that are valid beside
    fairseq-train's, for errors that suggest the nearest name.
    Raises ValueError for bad options, and SystemExit with the status of the first process that failed.
    """
    check_asserts()
    gpus = gpus_to_use(gpus, nodes, node_rank, dry_run)
    if not dry_run:
        for folder in [arguments[0]] if os.path.isdir(arguments[0]) else arguments[0].split(":"):
            check_name(folder)
            read_symbols(folder)
    processes = max(gpus, 1) * nodes
    values, actions = training_options(
        recipe, overrides, arguments, processes, gpus > 0, dry_run, own_options, micro_batch_size
    )
    values = {"user_dir": str(Path(__file__).parents[1]), **values}
    if nodes > 1:
        values.setdefault("heartbeat_timeout", SECONDS_WITHOUT_PROGRESS)
    words = words_of(values, actions)
    torchrun_arguments = words_of_nodes(gpus, nodes, node_rank, master_addr, master_port)
    torchrun_arguments += ["-m", worker.__name__, "--command", shlex.join(sys.argv), *["--yes"] * yes]
    program = ["fairseq-train"] if processes == 1 else ["torchrun", *torchrun_arguments]
    command = shlex.join([*program, *words])
    if dry_run:
        print(command)
        return
    logger.info(command)
    config = configuration(values)
    if processes == 1:
        worker.train(worker.parsed(words) if config is None else config, yes)
    else:
        run_torchrun([*torchrun_arguments, *(words if config is None else ["--config", worker.to_text(config)])])


# ------------------------------------------------------------------------------------------------ options of a recipe


def training_options(
    recipe: str,
    overrides: Iterable[str],
    user_arguments: list[str],
    processes: int = 1,
    cuda: bool = True,
    dry_run: bool = False,
    own_options: Sequence[str] = (),
    micro_batch_size: int | None = None,
) -> tuple[dict, dict]:
    """({name: value} of the options of fairseq-train that make it follow the recipe on `processes` processes, {name:
    action} of its parser).

    recipe, overrides: as for `fairseq-hydra-train --config-dir configs --config-name recipe overrides...`; no
    override needs a leading `+`. user_arguments: more arguments of fairseq-train, the data folder first. They win
    over the recipe, and values of the recipe that refer to another value follow it. Two things are adjusted. The
    batch, the user's --batch-size or the recipe's batch_size times update_freq, is split over the processes, in steps
    of at most micro_batch_size or the recipe's batch_size (`split_batch`); but if the user gives --update-freq, both
    numbers are per process, as fairseq's. Half precision is turned off on the CPU or if another precision is given.
    Raises ValueError for an unknown name, a value without meaning or that belongs to no option, an impossible split,
    and, but for a dry_run, a checkpoint that is missing.
    """
    for word in user_arguments:
        if "${" in word:
            raise ValueError(f"{word}: Hydra takes '${{' as the name of another setting; choose another path")
    config = compose_recipe(recipe, overrides)
    raw = OmegaConf.to_container(config, resolve=False)
    places_of = {}  # destination in fairseq's parser -> its keys in the configuration
    for section, fields in raw.items():
        for key, value in fields.items():
            if value != "???" and key not in ("data", "user_dir"):  # these come from the launcher
                name = key if key != "_name" else "arch" if section == "model" else section
                places_of.setdefault(name, []).append(f"{section}.{key}")

    parts = [(name, places[0]) for name, places in places_of.items() if places[0].endswith("._name")]
    chosen = [f"{option(name)}={OmegaConf.select(config, place)}" for name, place in parts]
    parser, given = parse([*chosen, *user_arguments], own_options)
    actions = {action.dest: action for action in parser._actions}
    for name, places in places_of.items():
        for place in places if name in given else ():
            OmegaConf.update(config, place, given[name], merge=False)
    pairs = [word.lstrip("+").partition("=")[::2] for word in overrides]
    for name in (choice for group, choice in pairs if group == "model"):
        check_preset(name, given.get("arch") or raw["model"]["_name"])
    typed = {*given, *(key.removeprefix("model.") for key, _ in pairs)}
    if "position" in typed and "cls" not in typed and "cls" in config.model:  # the preset's
        config.model.cls = cls_beside(config.model.position, config.model.cls)
    values = {}
    for name, places in places_of.items():
        candidates = [OmegaConf.select(config, place) for place in places]
        if name not in actions:
            near = did_you_mean(name, actions)
            raise ValueError(f"{recipe}: {places[0]} is no option of fairseq-train {' '.join(chosen)}{near}")
        if any(value != candidates[0] for value in candidates):
            same = " and ".join(places)
            raise ValueError(f"{recipe}: {same} share the option {option(name)} but differ: {candidates}")
        values[name] = candidates[0]

    named = {**given, **values}  # by the user or the recipe
    limits.check_all(named)
    if tpu := [name for name in ("tpu", "bf16", "memory_efficient_bf16") if named.get(name)]:
        raise ValueError(f"{option(tpu[0])} is for TPUs in fairseq; valid here: --autocast bf16")
    arch = named["arch"]
    if named.get("criterion") == "electra" and _is_ours(arch) and split_size(arch)[0] not in ELECTRA:
        raise ValueError(f"--arch {arch} is no ELECTRA; valid with --criterion electra: {', '.join(ELECTRA)}")
    if named.get("write_checkpoints_asynchronously"):
        raise ValueError("--write-checkpoints-asynchronously: here a checkpoint is whole before training goes on")
    if "update_freq" not in given:
        size, steps = raw["dataset"]["batch_size"], raw["optimization"]["update_freq"]
        steps = steps if isinstance(steps, list) else [steps]
        limits.check("batch_size", size)
        limits.check("update_freq", steps)
        if len(steps) != 1:
            raise ValueError(f"optimization.update_freq={steps}: one number for each epoch is given as --update-freq")
        if values.get("max_valid_steps") and "batch_size_valid" not in named and size % processes == 0:
            values["batch_size_valid"] = size // processes  # held-out losses are of the same text on any machine
        batch = given.get("batch_size", int(size) * int(steps[0]))
        values["batch_size"], steps = split_batch(batch, processes, micro_batch_size or size)
        values["update_freq"] = [steps]
    elif micro_batch_size:
        raise ValueError("--micro-batch-size, --update-freq: give one; beside --update-freq, --batch-size is per step")
    values["distributed_world_size"] = processes  # else fairseq would use every GPU it sees
    if not cuda:
        values["cpu"] = True
        if processes > 1:
            backends = {"distributed_backend": "gloo", "ddp_backend": "legacy_ddp"}
            values.update({name: value for name, value in backends.items() if name not in named})
    so_far = {**values, **given}
    if so_far.get("cpu") or so_far.get("amp") or str(so_far.get("autocast")) == "bf16":
        if given.get("fp16"):
            raise ValueError(limits.NO_GPU if so_far.get("cpu") else "--fp16 beside --amp or --autocast: give one")
        values["fp16"] = False
    if so_far.get("memory_efficient_fp16"):
        values["fp16"] = True
    chosen = {**given, **values}  # the recipe's values already include the user's
    if not dry_run:
        check_restore(chosen)
    if Path(folder := given["data"].split(":")[0], "dict.txt").is_file():
        check_splits(chosen, folder)
    chosen = {name: converted(parser, actions[name], value) for name, value in chosen.items()}
    check_model(chosen)
    return chosen, actions


def configuration(values: dict) -> DictConfig | None:
    """The configuration that fairseq makes of these options (a test compares them), which takes it half a second, for
    Hydra parses every value. None for parts that it can only make of words: other models, and parts without a
    dataclass."""
    parts = {"task": (values["task"], TASK_DATACLASS_REGISTRY), "model": (values["arch"], MODEL_DATACLASS_REGISTRY)}
    for name, known in REGISTRIES.items():
        parts[name] = values.get(name, known["default"]), known["dataclass_registry"]
    if not _is_ours(values["arch"]):
        return None
    config = OmegaConf.create({"_name": None})
    for name, section in FairseqConfig.__dataclass_fields__.items():
        if name in parts:
            chosen, known = parts[name]
            if chosen is not None and chosen not in known:
                return None
            config[name] = None if chosen is None else _filled(known[chosen], {**values, "_name": chosen})
        elif name != "_name":
            config[name] = _filled(section.type, values)
    config = OmegaConf.create(OmegaConf.to_container(config, resolve=True, enum_to_str=True))
    OmegaConf.set_struct(config, True)
    return config


def _filled(dataclass, values):
    """A section with the values of its fields; those not given are the default."""
    section = OmegaConf.structured(dataclass)
    for field in fields_of(dataclass):
        if field.name in values:
            section[field.name] = values[field.name]
    return section


def check_model(values: dict) -> None:
    """Raise ValueError for a model that cannot be built: its encoding, its sizes. values: the run's options."""
    kind = MODEL_DATACLASS_REGISTRY.get(values["arch"])
    if kind is None or not issubclass(kind, TupeConfig):
        return
    for file in split_files(values.get("position_file") or ""):
        load_scheme_file(file)
    config = core_config(kind(**{f.name: values[f.name] for f in fields_of(kind) if f.name in values}))
    try:
        with torch.device("meta"):  # takes no memory
            Encoder(8, 1, 2, **vars(replace(config, layers=1)))
    except (RuntimeError, NotImplementedError) as error:  # a scheme that looks at its numbers
        logger.debug(error)


def check_splits(values: dict, folder: str) -> None:
    """Raise ValueError if a split that a run reads is not in a folder of data, or not whole. values: of all options."""
    names = [values.get("train_subset", "train")]
    names += [] if values.get("disable_validation") else values.get("valid_subset", "valid").split(",")
    root = Path(folder, glue_name(values["glue_task"], folder), "input0") if values["task"] == "glue" else Path(folder)
    if values["task"] == "glue" and not root.is_dir():
        raise ValueError(f"{folder} has no {root.parent.name}; prepared there: {', '.join(tasks_in(folder)) or 'none'}")
    known = sorted(path.stem for path in root.glob("*.idx"))
    for name in names:
        if name not in known and not (root / name).is_file():  # of fairseq's --dataset-impl raw
            raise ValueError(f"{folder} has no split {name!r}; valid: {', '.join(known) or 'none is prepared there'}")
        if values["task"] == "glue":
            check_glue(root.parent, name, labelled=True)
        else:
            for part in (part for path in values["data"].split(":") for part in parts_of(f"{path}/{name}")):
                check_split(part, len(read_symbols(folder)))


def compose_recipe(recipe: str, overrides: Iterable[str]) -> OmegaConf:
    """The recipe with its overrides. A value that it does not name needs no leading `+` here; `~section.key` takes one
    out. Raises ValueError for an unknown name, and for what is no value."""
    words = [(word, word.lstrip("+~").partition("=")[0].partition(".")) for word in overrides]
    if wrong := [word for word, (_, dot, _) in words if not dot and "=" not in word]:
        raise ValueError(f"{wrong[0]}: valid: ~SECTION.KEY")
    groups = dict(word.lstrip("+").split("=", 1) for word, (_, dot, _) in words if not dot)
    config = OmegaConf.create({})
    for place, value in compose(recipe, groups).items():
        OmegaConf.update(config, place, value, merge=False)
    for word, (section, dot, key) in words:
        if dot and section not in FairseqConfig.__dataclass_fields__:
            near = did_you_mean(section, FairseqConfig.__dataclass_fields__)
            raise ValueError(f"{word}: no section {section!r}{near}")
        if word.startswith("~"):
            known = config.get(section, {})
            if key not in known or f"{section}.{key}" in NEEDED or key == "_name":
                near = did_you_mean(key, [name for name in known if f"{section}.{name}" not in NEEDED])
                raise ValueError(f"{word}: {recipe} has none to take out{near}")
            del known[key]
        elif dot:
            OmegaConf.update(config, f"{section}.{key}", value_of(word), merge=False)
    return config


def parse(words: list, own_options: Sequence[str] = ()) -> tuple:
    """(fairseq-train's parser, {destination: value} of the arguments `words`).

    Raises ValueError with one line for bad arguments, for which fairseq-train would print three screens.
    """
    parser, given = options.get_training_parser(), {}
    parser.exit_on_error = False

    def convert(action, text, original=parser._get_value):
        if text != action.default:
            limits.check(action.dest, text)
        return original(action, text)

    def note(action, texts, original=parser._get_values):  # of what was given; defaults do not pass here
        given[action.dest] = None
        return original(action, texts)

    parser._get_value, parser._get_values = convert, note
    try:
        args, unknown = options.parse_args_and_arch(parser, words, parse_known=True)
    except argparse.ArgumentError as error:
        raise ValueError(_explain(error, parser)) from None
    valid = [*own_options, *(name for name in parser._option_string_actions if name.startswith("--"))]
    for word in unknown:
        name = word.partition("=")[0]
        if word.startswith("-"):
            raise ValueError(f"unknown option {name}{did_you_mean(name, valid, own_options)}")
    if unknown:
        raise ValueError(f"unexpected argument {unknown[0]!r}")
    return parser, {name: getattr(args, name) for name in given}


def converted(parser: argparse.ArgumentParser, action: argparse.Action, value: Any) -> Any:
    """A value as the parser makes it of its text. Raises ValueError for none of its option's choices."""
    if action.nargs == 0:
        if value not in (True, False, None):
            raise ValueError(f"{option(action.dest)} is {value!r}; valid: true, false")
        return bool(value)
    try:
        return parser._get_values(action, [f"{value}"])
    except argparse.ArgumentError as error:
        raise ValueError(_explain(error, parser)) from None


def _explain(error, parser):
    """An error of argparse in one line, which suggests only this project's architectures."""
    name = error.argument_name.split("/")[0]
    if " value: " in error.message:  # a text that is no number
        destination, wrong = parser._option_string_actions[name].dest, error.message.partition(" value: ")[2]
        if destination in limits.LIMITS:
            return f"{name} is {wrong.strip(chr(39))}; valid: {limits.valid(destination)}"
    choices = parser._option_string_actions[name].choices if name in parser._option_string_actions else None
    wrong = re.search(r"invalid choice: '(.*?)'", error.message)
    if not choices or not wrong:
        return f"{name}: {error.message}"
    if name == "--arch":
        choices = filter(_is_ours, choices)
    return f"{name}: unknown value {wrong[1]!r}{did_you_mean(wrong[1], choices)}"


def _is_ours(arch):
    return ARCH_MODEL_REGISTRY[arch].__module__.startswith("tupe.")


def words_of(values: dict, actions: dict) -> list[str]:
    """Options as arguments of a command line, the data first: "--lr=[0.1]"; a switch as "--fp16" or nothing."""
    words = [values["data"]]
    for name, value in values.items():
        if actions[name].nargs != 0 and name != "data":
            words.append(f"{option(name)}={value}")
        elif name != "data" and value != bool(actions[name].default):
            words.append(option(name))
    return words
