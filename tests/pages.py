"""The commands that the pages show."""

import re
import shlex

from helpers import PLUGIN

from lab.__main__ import main as laboratory
from tupe import cli

COMMANDS = {"tupe": cli.main, "python -m lab": laboratory}
NAMES = {program: {*group.list_commands(None)} for program, group in COMMANDS.items()}
ROOT = PLUGIN.parent
DOCS = sorted(path for folder in ("", "dev", "appendix") for path in (ROOT / "docs" / folder).glob("*.md"))
TOUR = ROOT / "docs" / "tour.ipynb"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
PROGRAM = re.compile(
    r"(?:^|[|;&(]|\bdo )\s*(?:\w+=\S+ +)*(tupe|python -m lab|bash|sbatch|fairseq-train|fairseq-hydra-train) "
    r"""((?:'[^']*'|"[^"]*"|[^|;&)'"])*)"""
)


def code_of(page):
    """Blocks of code, fenced or indented, and code within sentences; a continued line is one line."""
    text = re.sub(r"\\\n\s*", "", page.read_text())
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    indented = re.findall(r"^ {4,}(\S.*)$", prose, re.MULTILINE)
    inline = [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]
    return [*"".join(blocks).splitlines(), *indented, *inline]


def before(words):
    """How many words stand before a command's name: options of `tupe` itself."""
    return 2 * words.count("--position-file")


def commands_of(page):
    """[(program, words)] of what a page shows; a script that hands its options to `tupe` is that command. Options of
    `tupe` itself stand before the command's name."""
    for line in code_of(page):
        line = re.sub(r"\s#.*", "", line).replace("[", "").replace("]", "")  # optional words must parse too
        for program, words in PROGRAM.findall(line):
            words = shlex.split(words)
            script = words[0].removeprefix("scripts/") if program in ("bash", "sbatch") else ""
            if script in ("pretrain.sh", "pretrain.sbatch") and words[1:]:
                yield "tupe", [script.partition(".")[0], *words[1:]]
            elif script == "glue_sweep.sh" and words[1:]:
                yield "tupe", ["sweep", *words[1:]]
            elif script == "jobs.sbatch" and words[1:]:
                ours = words[1] == "lab"
                yield ("python -m lab", words[2:]) if ours else ("tupe", words[1:])
            elif program.startswith("fairseq-") or {*words[before(words) :][:1]} & NAMES.get(program, set()):
                yield program, words
