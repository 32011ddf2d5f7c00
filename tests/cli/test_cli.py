"""The command `tupe`: quick, complete, and short when something is wrong."""

import re
import subprocess
import sys
from importlib.util import find_spec

import click
import pytest
from click.testing import CliRunner
from helpers import PLUGIN, ended, fork, print_into

from tupe.cli import COMMANDS, GROUPS, main
from tupe.cli.train import rows
from tupe.common.options import Command, ListOf, did_you_mean
from tupe.run.record import BUSY


def tupe(*words):
    return CliRunner().invoke(main, list(words), prog_name="tupe")


def test_help_names_every_command_without_torch():
    code = "import sys, tupe.cli\ntry: tupe.cli.main(['--help'])\nfinally: print(sorted(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PLUGIN.parent).stdout
    page, modules = shown.split("['", 1)
    for words, (_, what) in COMMANDS.items():
        assert page.count(f"\n  {words} ") == 1 and f" {what}\n" in page, words
    for heavy in ("torch", "numpy", "fairseq", "hydra", "tupe.cli.train", "tupe.plugin"):
        assert f"'{heavy}'" not in modules


def test_commands_are_shown_in_groups():
    assert list(GROUPS) == ["Data", "Train", "Evaluate", "Checkpoints", "Look"]
    assert sorted(COMMANDS) == sorted(words for group in GROUPS.values() for words in group)
    page = tupe("--help").output
    for title, group in GROUPS.items():
        shown = page.partition(f"\n{title}:\n")[2].partition("\n\n")[0]
        assert re.findall("^  (.+?)  ", shown, re.MULTILINE) == list(group)
    assert re.findall("^(.+):$", tupe("prepare", "--help").output, re.MULTILINE) == ["Options", "Data"]


def test_help_of_training_has_the_values_of_its_recipe():
    shown = dict(rows("pretrain"))
    assert shown["--lr X"] == "The highest learning rate.  [0.0001]"
    assert shown["--batch-size N"] == "Sequences per update, over all GPUs.  [256]"
    assert shown["--tokens-per-sample N"].endswith("[512]") and shown["--seed N"].endswith("  [1]")
    # of the recipe's architecture, TUPE-R
    assert shown["--position WORD"].endswith("[untied+t5]") and shown["--encoder-layers N"].endswith("[12]")
    assert not [option for option in shown if option.startswith("--arch")]  # which is the command's


@pytest.mark.parametrize("words", ["", "checkpoint", "list", "prepare", *COMMANDS])
def test_every_command_explains_itself(words):
    shown = tupe(*words.split(), "--help")
    if not find_spec("fairseq") and "needs fairseq, which is not installed" in shown.output:
        pytest.skip("needs fairseq")
    assert shown.exit_code == 0, shown.output
    assert shown.output.startswith(f"Usage: tupe {words}".strip())


@pytest.mark.parametrize(
    ("words", "near"),
    [("pretain", "pretrain"), ("checkpoint avrage", "average"), ("list models --sise tiny", "--size")],
)
def test_wrong_words_name_the_nearest(words, near):
    shown = tupe(*words.split())
    assert shown.exit_code == 2 and near in shown.stderr and len(shown.stderr.splitlines()) <= 5


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError, 2), (FileNotFoundError, 2), (BlockingIOError, BUSY), (RuntimeError, 1)]
)
def test_exit_status_says_whose_error_it_is(error, status):
    @click.command(cls=Command)
    def fail():
        raise error("so it is")

    shown = CliRunner().invoke(fail, prog_name="fail")
    assert shown.exit_code == status
    assert (shown.stderr == "fail: so it is\n") == (status != 1)


def test_lists():
    @click.command()
    @click.option("--numbers", type=ListOf(float), default="1,2")
    @click.option("--words", type=ListOf(["one", "two"]))
    def show(numbers, words):
        print(numbers, words)

    assert CliRunner().invoke(show).output == "[1.0, 2.0] None\n"
    assert CliRunner().invoke(show, ["--numbers=3,4e-1", "--words", "two,one"]).output == "[3.0, 0.4] ['two', 'one']\n"
    for wrong in ("--numbers=a", "--numbers=,", "--words=three"):
        assert CliRunner().invoke(show, [wrong]).exit_code == 2


def test_nearest():
    assert "'seed'" in did_you_mean("sede", ["seed", "lr"])
    assert did_you_mean("xyz", ["seed", "lr"]) == "; valid: seed, lr"
    assert did_you_mean("xyz", map(str, range(100))) == ""
    assert "'bos'" in did_you_mean("jbos", ["bos", "lr"])
    assert "'jobs'" in did_you_mean("jbos", ["bos", "lr"], preferred=["jobs"])
    assert "'dropout'" in did_you_mean("dropuot", ["dropout", "lr"], preferred=["output"])


@pytest.mark.thorough
def test_what_libraries_log_for_themselves_is_not_shown(pretrained, vocabulary, tmp_path):
    """A module of fairseq's sets the root logger to DEBUG, and Hydra then tells of every configuration. Two commands
    in one process, of which the second looks at a checkpoint of fairseq's."""
    commands = [
        ["checkpoint", "export", f"--checkpoint={PLUGIN.parent}/models/bert_a_mini", "--no-code"],
        ["checkpoint", "export", f"--checkpoint={pretrained}", f"--data={vocabulary}", f"--output={tmp_path / 'y'}"],
    ]
    commands[0].append(f"--output={tmp_path / 'x'}")
    code = f"from tupe.cli import main\nfor words in {commands}:\n"
    code += "    main(words, prog_name='tupe', standalone_mode=False)\n    print('done')"

    def run():
        print_into(tmp_path / "said")
        exec(code, {})

    assert ended(fork(run, "tupe", anew=True)) == 0
    said = (tmp_path / "said").read_text()
    assert said.startswith(f"wrote {tmp_path}/x\ndone\n"), said[:500]
    assert not re.search("DEBUG|INFO", said), said[:500]


def test_a_closed_pipe_ends_quietly():
    command = f"{sys.executable} -m tupe --help | head -n 1"
    shown = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=PLUGIN.parent)
    assert shown.stdout.startswith("Usage: tupe") and not shown.stderr
