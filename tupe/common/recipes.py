"""The recipes of configs/ without Hydra. Needs only PyYAML."""

import re
from typing import Any

import yaml

from .options import CONFIGS, did_you_mean


def compose(recipe: str, groups: dict[str, str] | None = None) -> dict[str, Any]:
    """{"section.key": value} of a file of configs/ and those of its `defaults`, as Hydra puts them together. groups:
    {group: file} instead of the recipe's. Raises ValueError for a file that is not there."""
    own, found = yaml.safe_load((CONFIGS / f"{recipe}.yaml").read_text(encoding="utf-8")), {}
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


def resolved(values: dict[str, Any], key: str, defaults: dict[str, Any] | None = None) -> Any:
    """A value; of `${section.key}`, that of the other setting."""
    value = values[key]
    while isinstance(value, str) and (other := re.fullmatch(r"\$\{(\w+\.\w+)\}", value)):
        value = values.get(other[1], (defaults or {}).get(other[1]))
    return value
