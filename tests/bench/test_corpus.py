"""`tupe bench corpus` from end to end on a little text. No claims about time."""

from click.testing import CliRunner

from tupe.bench.corpus import command


def test_command(tmp_path):
    lines = [f"The old man number {i} bought a {i % 7} dollar ship, and {i * i} sails for it." for i in range(400)]
    (tmp_path / "a.txt").write_text("\n\n".join(" ".join(lines[i : i + 4]) for i in range(0, 400, 4)))
    result = CliRunner().invoke(command, [str(tmp_path / "a.txt"), "--mb=0.02", "--times=3", "--vocab-size=200"])
    assert result.exit_code == 0, result.output
    for step in ("clean, filter, join", "sentences and tokens", "MinHash"):
        (row,) = (line for line in result.output.splitlines() if line.startswith(f"| {step}"))
        assert float(row.split("|")[2]) > 0
    assert result.output.count(" MB, 2 processes |") == 2 and "hours on 32 cores" in result.output
