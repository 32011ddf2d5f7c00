"""What the lists show is what the registries hold."""

from click.testing import CliRunner

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


def test_models_are_counted():
    _, table = rows(catalogue.list_models, "--size=tiny")
    assert [row[0].strip("`").removesuffix("_tiny") for row in table] == [*ARCHITECTURES, *OTHER_BLOCKS]
    numbers = {row[0].strip("`").removesuffix("_tiny"): int(row[4].replace(",", "")) for row in table}
    # TUPE-A: U_Q and U_K with biases, a layer norm on p, and one more row, theta's
    assert numbers["tupe_a"] - numbers["bert_a"] == 2 * (128 * 128 + 128) + 2 * 128 + 128
