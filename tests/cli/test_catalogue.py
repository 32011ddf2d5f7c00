"""What the lists show is what the registries hold."""

import re

import pytest
from click.testing import CliRunner
from helpers import CONFIGS
from omegaconf import OmegaConf

from tupe.cli import catalogue
from tupe.common.architectures import ARCHITECTURES, OTHER_BLOCKS
from tupe.positions import overrides
from tupe.schemes import SCHEMES


def rows(command, *words):
    shown = CliRunner().invoke(command, words)
    assert shown.exit_code == 0, shown.output
    table = [line.strip("| ").split(" | ") for line in shown.output.splitlines() if line.startswith("| ")]
    return shown.output, table[2:]


def test_the_table_of_schemes_is_that_of_the_registry():
    _, table = rows(catalogue.list_schemes)
    assert [row[0] for row in table] == [f"`{name}`" for name in SCHEMES]
    for name, row in zip(SCHEMES, table, strict=True):
        assert (row[-3] == "none") == (name == "nopos")
        assert ("gate" in row[-3]) == overrides(SCHEMES[name], "gate")
        assert (row[-2] == "refused") == SCHEMES[name].bounded


def test_a_card_says_what_the_class_says():
    printed, _ = rows(catalogue.list_schemes, "shaw", "rope")
    assert printed == catalogue.card("shaw") + "\n" + catalogue.card("rope")
    assert printed.count("`fraction:1`") == 1 and "- Presets: `shaw`" in printed and "`rope_l2`" in printed
    assert " ".join(SCHEMES["rope"].__doc__.split()) in " ".join(printed.split())
    refused = CliRunner().invoke(catalogue.list_schemes, ["rop"])
    assert refused.exit_code == 2 and "unknown position scheme 'rop' in 'rop'; did you mean 'rope'?" in refused.output


@pytest.mark.parametrize("size, width", [("base", 768), ("tiny", 128)])
def test_models_are_counted(size, width):
    printed, table = rows(catalogue.list_models, f"--size={size}")
    assert [row[0].strip("`").removesuffix("_tiny") for row in table] == [*ARCHITECTURES, *OTHER_BLOCKS]
    numbers = {row[0].strip("`").removesuffix("_tiny"): int(row[4].replace(",", "")) for row in table}
    # TUPE-A: U_Q and U_K with biases, a layer norm on p, and one more row, theta's
    assert numbers["tupe_a"] - numbers["bert_a"] == 2 * (width * width + width) + 2 * width + width
    items = printed[printed.index("\ntupe_r") : printed.index("\ngau")]  # the parameters of positions, one by one
    counted = sum(int(number.replace(",", "")) for number in re.findall(r" = ([\d,]+)$", items, re.MULTILINE))
    assert f"{counted:,}" == next(row[5] for row in table if row[0].startswith("`tupe_r"))


def test_presets_are_the_files():
    _, table = rows(catalogue.list_presets)
    assert [row[0].strip("`") for row in table] == sorted(path.stem for path in (CONFIGS / "model").glob("*.yaml"))
    for row in table:
        preset = OmegaConf.load(CONFIGS / "model" / f"{row[0].strip('`')}.yaml")
        assert preset._name in row[2] and (preset.get("position") or "") in row[2] and len(row[1]) > 5
