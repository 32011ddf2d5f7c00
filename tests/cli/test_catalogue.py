"""What the lists show is what the registries hold."""

from click.testing import CliRunner

from tupe.cli import catalogue
from tupe.common.architectures import ARCHITECTURES, OTHER_BLOCKS
from tupe.schemes import SCHEMES


def rows(command, *words):
    shown = CliRunner().invoke(command, words)
    assert shown.exit_code == 0, shown.output
    return [line.strip("| ").split(" | ") for line in shown.output.splitlines() if line.startswith("| ")][2:]


def test_schemes():
    assert [row[0] for row in rows(catalogue.list_schemes)] == [f"`{name}`" for name in SCHEMES]
    printed = CliRunner().invoke(catalogue.list_schemes, ["shaw", "rope"]).output
    assert printed == catalogue.card("shaw") + "\n" + catalogue.card("rope") and printed.count("`fraction:1`") == 1
    assert " ".join(SCHEMES["rope"].__doc__.split()) in " ".join(printed.split())
    refused = CliRunner().invoke(catalogue.list_schemes, ["rop"])
    assert refused.exit_code == 2 and "unknown position scheme 'rop' in 'rop'; did you mean 'rope'?" in refused.output


def test_models_are_counted():
    table = {row[0].strip("`").removesuffix("_tiny"): row[1:] for row in rows(catalogue.list_models, "--size=tiny")}
    assert [*table] == [*ARCHITECTURES, *OTHER_BLOCKS]
    assert table["bert_a"][:3] == ["2", "128", "2"]
    numbers = {name: int(row[-1].replace(",", "")) for name, row in table.items()}
    # TUPE-A: U_Q and U_K with biases, a layer norm on p, and one more row, theta's
    assert numbers["tupe_a"] - numbers["bert_a"] == 2 * (128 * 128 + 128) + 2 * 128 + 128
