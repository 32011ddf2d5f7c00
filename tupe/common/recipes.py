"""The recipes of configs/ and their presets, without Hydra. Needs only PyYAML."""

import re
from contextlib import suppress
from typing import Any

import yaml

from .architectures import SIZES, split_size, with_size
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
            path = CONFIGS / group / f"{(groups or {}).get(group, name)}.yaml"
            if not path.is_file():
                choices = sorted(path.stem for path in path.parent.glob("*.yaml"))
                raise ValueError(f"{group}={path.stem} not found{did_you_mean(path.stem, choices)}")
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
