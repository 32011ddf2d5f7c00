"""Fast checks of training commands, before torch and fairseq are imported, which takes seconds. The engines check all
of it again, and more, in the same words."""

import functools
import importlib.util
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..common import limits, record
from ..common.architectures import names
from ..common.options import CONFIGS, OVERRIDE, did_you_mean, task_key
from ..common.prepared import check_name
from ..common.recipes import compose, resolved
from ..names import schemes_in, unknown_scheme

PACKAGE = CONFIGS.parent
OURS = [*names(), "from_checkpoint"]
# What a command gives to the engine itself: a key of the recipe -> the command's own option.
SET = {"save_dir": "--output", "data": "--data"}
SET_BY = {
    "finetune": {"finetune_from_model": "--checkpoint", "glue_task": "--task", "glue": "--task"},
}
OPTIONS = (
    "dataclass",
    "optim",
    "scoring",
    "tasks",
    "criterions",
    "options.py",
)  # of fairseq: where the options of our runs are


def check(command: str, values: dict[str, Any], own: list[str], has_own_schemes: bool) -> None:
    """Raise ValueError for a mistake in what a command that trains was given, BlockingIOError if another process trains
    in its folder. values: of the command's own options; own: the names of these; has_own_schemes: whether a file of
    position encodings is given."""
    words, engine, dry_run = values["words"], values.get("engine", "fairseq"), values["dry_run"]
    recipe = values.get("recipe") or "finetune"
    options = dict(options_in(words))
    overrides = dict(overrides_in(words))
    for name in (*options, *overrides):
        if of := {**SET, **SET_BY.get(command, {})}.get(name.rpartition(".")[2]):
            raise ValueError(f"{name if '.' in name else limits.option(name)}: give {of} instead")
    if "common.user_dir" in overrides:
        raise ValueError("common.user_dir: give --user-dir instead")
    if values.get("preset") is not None:
        overrides = {"model": values["preset"], **overrides}
    for group, choice in overrides.items():
        choices = sorted(path.stem for path in CONFIGS.joinpath(group).glob("*.yaml"))
        if choices and choice not in choices:
            raise ValueError(f"{group}={choice} not found{did_you_mean(choice, choices)}")
    if engine == "fairseq" and "user_dir" not in options:
        check_names(recipe, options, overrides, [*own, *values["outer_options"]])
    for name, value in [*options.items(), *overrides.items()]:
        if value and "$" not in value and value != "null":
            limits.check(name, value)
    named = (values.get("arch"), options.get("arch"), overrides.get("model._name"))
    arch = next((name for name in named if name is not None), None)
    unknown = arch is not None and arch not in OURS
    if unknown and (engine != "fairseq" or "user_dir" not in options and not is_of_fairseq(arch)):
        raise ValueError(f"--arch: unknown value {arch!r}{did_you_mean(arch, OURS)}")
    position = position_in(words)
    if position and not has_own_schemes and not options.keys() & {"position_file", "user_dir"}:
        check_schemes(position)
    if not dry_run:
        if checkpoint := values.get("checkpoint"):
            check_checkpoint(checkpoint)
        check_data(command, values, {*options, *(name.rpartition(".")[2] for name in overrides)})
        if command == "pretrain":
            check_folder(values["output"], recipe, arch, options, overrides)


def check_with_torch(values: dict[str, Any]) -> None:
    """Raise ValueError for what needs torch to see, but no engine: an option of a position encoding that it does not
    have, and half precision without a GPU. values: of the command's own options."""
    words = values["words"]
    position, asks = position_in(words), "fp16" in dict(options_in(words)) and not values["dry_run"]
    if position and ":" in position:
        from .. import schemes  # noqa: F401  (registers them)
        from ..positions import parse

        parse(position)
    if asks:
        import torch

        if values["gpus"] == 0 or not torch.cuda.is_available():
            raise ValueError(limits.NO_GPU)


def position_in(words: Iterable[str]) -> str | None:
    """The position encoding that the words name, if they name one."""
    return dict(options_in(words)).get("position") or dict(overrides_in(words)).get("model.position")


def sort_words(words: Iterable[str]) -> tuple[list[str], list[str]]:
    """(values of the recipe, section.key=value; the other words). What follows an option that takes a value is one."""
    overrides, others, option = [], [], ""
    for word in words:
        is_value = option.startswith("--") and "=" not in option and limits.takes_value(option)
        (overrides if OVERRIDE.match(word) and not is_value else others).append(word)
        option = "" if is_value else word
    return overrides, others


def overrides_in(words: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(key, value) of the words that are values of the recipe."""
    for word in sort_words(words)[0]:
        if not word.startswith("~"):
            key, _, value = word.lstrip("+").partition("=")
            yield key, value


def options_in(words: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(name as in Python, value, "" where none is known) of the words that are options. Which take none, only the
    engines know: the next word is taken as the value of those that surely have one."""
    words = sort_words(words)[1]
    for word, following in zip(words, [*words[1:], "--"], strict=False):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            if not equals and limits.takes_value(name):
                value = "" if following.startswith("--") else following
            yield name, value


# ------------------------------------------------------------------------------------- what fairseq knows, by its files


def fairseq() -> Path | None:
    """The folder of fairseq, which is not imported; None if it is not installed."""
    found = importlib.util.find_spec("fairseq")
    return Path(found.origin).parent if found and found.origin else None


def check_names(recipe: str, options: dict, overrides: dict, own: list[str]) -> None:
    """Raise ValueError for an option, a section or a key that no file of fairseq or of the plugin names."""
    if fairseq() is None:
        return
    text = (fairseq() / "dataclass" / "configs.py").read_text(encoding="utf-8")
    sections = re.findall(r"^    (\w+): ", text.partition("\nclass FairseqConfig(")[2], re.MULTILINE)
    for name in options:
        if name not in known_options() and name not in known_options(everywhere=True):
            word, valid = limits.option(name), [*own, *map(limits.option, sorted(known_options()))]
            raise ValueError(f"unknown option {word}{did_you_mean(word, valid, own)}")
    for key, value in overrides.items():
        section, dot, name = key.partition(".")
        if not dot:
            continue
        if section not in sections:
            raise ValueError(f"{key}={value}: no section {section!r}{did_you_mean(section, sections)}")
        if name != "_name" and name not in known_options() and name not in known_options(everywhere=True):
            near = did_you_mean(name, sorted(known_options()))
            raise ValueError(f"{recipe}: {key} is no option of fairseq-train{near}")


@functools.cache
def known_options(everywhere: bool = False) -> set[str]:
    """The options that the files of fairseq and of the plugin name, and fields that look like one. everywhere: in all
    of fairseq's files, which takes longer."""
    roots = [fairseq()] if everywhere else [fairseq() / name for name in OPTIONS]
    roots += [PACKAGE / "plugin", PACKAGE / "encoder.py"]  # the latter has the options of models
    names = {"help"}
    for path in (path for root in roots for path in ([root] if root.suffix else root.rglob("*.py"))):
        text = path.read_text(encoding="utf-8", errors="replace")
        names.update(re.findall(r"^    (\w+): ", text, re.MULTILINE))
        names.update(re.findall(r'fairseq="(\w+)"', text))
        names.update(name.replace("-", "_") for name in re.findall(r"""["']--([\w-]+)["']""", text))
    return names


def is_of_fairseq(arch: str) -> bool:
    """Whether a file of fairseq names an architecture so."""
    root = fairseq()
    name = re.compile(rf"""register_model(_architecture)?\([^)]*["']{re.escape(arch)}["']""")
    return root is not None and any(name.search(path.read_text(errors="replace")) for path in root.rglob("*.py"))


# -------------------------------------------------------------------------------------------------- what is on the disk


def check_schemes(position: str) -> None:
    """Raise ValueError for a position encoding that no file of the package registers. Options of encodings are for
    `positions.parse`, which needs torch."""
    registered = re.compile(r'^@register\("(\w+)"\)', re.MULTILINE)
    known = [name for path in sorted(PACKAGE.glob("schemes*.py")) for name in registered.findall(path.read_text())]
    for name in schemes_in(position):
        if name not in known:
            raise ValueError(unknown_scheme(name, position, known, "one of your own also needs --position-file FILE"))


def check_data(command: str, values: dict, named: set) -> None:
    """Raise ValueError for a folder that holds no prepared data, or not the kind that the command needs. named: the
    further options and values of the recipe that are given, without sections."""
    given = str(values["data"])
    folders = [Path(given)] if Path(given).is_dir() else [Path(part) for part in given.split(":")]
    for folder in folders:
        check_name(folder)
        if not folder.is_dir():
            raise ValueError(f"data folder not found: {folder}")
        if not (folder / "dict.txt").is_file():
            what = "; `tupe prepare corpus` makes one of raw text" if command != "finetune" else ""
            raise ValueError(f"{folder} is not a folder of prepared data: it has no dict.txt{what}")
    if command == "finetune":
        task, found = task_key(values["task"]), {path.parent.name for path in folders[0].glob("[!.]*/input0")}
        if (CONFIGS / "glue" / f"{task}.yaml").is_file() and task not in map(task_key, found):
            there = ", ".join(sorted(found)) or "none"
            raise ValueError(f"{folders[0]} has no {values['task']}; prepared there: {there}")
    elif not named & {"train_subset", "valid_subset", "dataset_impl", "disable_validation"}:
        for name in ("train", "valid"):
            if not any((folders[0] / file).is_file() for file in (f"{name}.idx", name)):
                there = ", ".join(sorted(path.stem for path in folders[0].glob("*.idx"))) or "none is prepared there"
                raise ValueError(f"{folders[0]} has no split {name!r}; valid: {there}")


def check_checkpoint(path: Path) -> None:
    """Raise ValueError for a file that torch cannot have written: a zip archive or a pickle."""
    if path.is_file():
        with path.open("rb") as file:
            head = file.read(2)
        if head != b"PK" and head[:1] != b"\x80":
            raise ValueError(f"{path} is no checkpoint: torch did not write it, or it is cut off")


def check_folder(folder: Path, recipe: str, arch: str | None, options: dict, overrides: dict) -> None:
    """Raise ValueError if a folder holds a pre-training of another model, seed or learning rate, BlockingIOError if
    another process trains in it."""
    if record.is_locked(folder):
        raise BlockingIOError(f"another process is training in {folder}")
    try:
        earlier = record.read(folder)
    except ValueError:  # which the engines deal with
        return
    if earlier is None or not earlier.started_at or "$" in json.dumps(overrides, allow_nan=False):
        return
    groups = {group: choice for group, choice in overrides.items() if "." not in group}
    values = {**compose(recipe, groups), **{key: value for key, value in overrides.items() if "." in key}}
    replaced = "position" in options or "model.position" in overrides  # which may be that of another architecture
    here = {
        "architecture": None if replaced else arch or values["model._name"],
        "seed": int(options.get("seed") or resolved(values, "common.seed")),
        "lr": _first_number(options.get("lr") or resolved(values, "optimization.lr")),
    }
    pairs = {name: (getattr(earlier, name), value) for name, value in here.items() if value is not None}
    if differing := {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}:
        raise ValueError(record.another(folder, differing))


def _first_number(lr):
    """The learning rate of a run that has one."""
    numbers = re.findall(r"[-+.\deE]+", str(lr))
    return float(numbers[0]) if len(numbers) == 1 else None
