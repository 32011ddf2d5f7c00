"""The package as a whole: what importing it brings in, and what an installed one holds."""

import ast
import email
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import yaml
from helpers import CONFIGS, PLUGIN, write_data

import tupe
from tupe.checkpoints.export import NOT_EXPORTED

ROOT = CONFIGS.parent
TRAIN = """
import torch
from tupe.encoder import Encoder, LMHead
from tupe.positions import SCHEMES, Positions

torch.manual_seed(0)
sizes = {"layers": 1, "width": 16, "ffn": 32, "heads": 2, "max_positions": 8}
encoder, head = Encoder(20, 1, position="untied+t5", cls="untied", **sizes), LMHead(16, 20)
optimizer = torch.optim.Adam([*encoder.parameters(), *head.parameters()], 0.01)
tokens = torch.randint(4, 20, (4, 8))
losses = []
for _ in range(3):
    losses.append(head(encoder(tokens)[0].view(-1, 16), encoder.tokens.weight, tokens.view(-1)) / 32)
    losses[-1].backward()
    optimizer.step()
    optimizer.zero_grad()
assert losses[2] < losses[0] and "untied" in SCHEMES and isinstance(encoder.positions, Positions)
"""
OPTIONAL = ["fairseq", "omegaconf", "hydra", "sacremoses", "spacy", "sentencepiece", "click", "scipy", "sklearn"]
BLOCK = "import sys\nsys.modules.update(dict.fromkeys({names}))\n"  # importing any of these fails


def run(script, *arguments, python=sys.executable, cwd=ROOT):
    """Output of a script in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(cwd), "OMP_NUM_THREADS": "1"}
    command = [str(python), "-c", script, *map(str, arguments)]
    done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.thorough
def test_the_core_trains_where_there_is_torch_and_numpy_alone():
    run(BLOCK.format(names=OPTIONAL) + TRAIN)


def test_importing_the_package_is_quick():
    loaded = run("import sys, tupe; print(*sys.modules)").split()
    assert not {"torch", "numpy", "fairseq", "click"} & set(loaded)


def test_text_names_all_packages_that_it_lacks():
    script = "from tupe.normaliser import Normaliser as N\ntry: N().normalise('a b')\nexcept ImportError as e: print(e)"
    (line,) = run(BLOCK.format(names=["sentencepiece", "spacy"]) + script).splitlines()
    assert line == "text needs sentencepiece, spacy: pip install sentencepiece spacy"


def test_a_command_names_the_package_that_it_lacks(tmp_path):
    """What comes with fairseq is fairseq."""
    words = ["pretrain", f"--data={write_data(tmp_path / 'data')}", f"--output={tmp_path}/run", "--allocator=none"]
    script = "from click.testing import CliRunner\nfrom tupe.cli import main\n"
    script += f"result = CliRunner().invoke(main, {words})\nprint(result.exit_code, result.output.strip())"
    said = run(BLOCK.format(names=["fairseq", "fairseq_cli", "hydra", "omegaconf"]) + script)
    there = "which is not installed; scripts/setup.sh installs all; --engine torch does without"
    assert said == f"1 Error: `tupe pretrain` needs fairseq, {there}\n"


@pytest.mark.parametrize(("lacking", "said"), [
    ("transformers", "`tupe minimal-pairs` needs transformers, which is not installed; scripts/setup.sh installs all"),
    ("sentencepiece", "tupe minimal-pairs: text needs sentencepiece: pip install sentencepiece"),
])  # fmt: skip
def test_a_package_that_is_missing_later_is_named_in_one_line(lacking, said, tmp_path):
    (tmp_path / "pairs.jsonl").write_text('{"sentence_good": "a b c", "sentence_bad": "c b a"}\n')
    words = ["minimal-pairs", str(ROOT / "models" / "tupe_r_mini"), f"--pairs={tmp_path}/pairs.jsonl"]
    words.append(f"--output={tmp_path}/out")
    script = "from click.testing import CliRunner\nfrom tupe.cli import main\n"
    script += f"result = CliRunner().invoke(main, {words})\nprint(result.exit_code, result.output.strip())"
    assert said in run(BLOCK.format(names=[lacking]) + script)


def distributions(*names):
    """These and all that they need, as installed here."""
    names, closure = list(names), {}
    while names:
        try:
            distribution = importlib.metadata.distribution(names.pop())
        except importlib.metadata.PackageNotFoundError:  # a requirement of another platform
            continue
        if distribution.name not in closure:
            closure[distribution.name] = distribution
            requirements = [r for r in distribution.requires or [] if "extra ==" not in r]
            names += [re.match(r"[\w.-]+", requirement).group() for requirement in requirements]
    return closure.values()


@pytest.mark.slow
def test_a_fresh_environment(tmp_path):
    """`pip install .` beside torch and numpy; linked from here, since a download of torch takes minutes."""
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv/bin/python"
    site = Path(run("import sysconfig; print(sysconfig.get_path('purelib'))", python=python, cwd=tmp_path).strip())
    for distribution in distributions("torch", "numpy", "click", "safetensors", "setuptools", "wheel"):
        for name in {file.parts[0] for file in distribution.files if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / name).exists():
                (site / name).symlink_to(distribution.locate_file(name))
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):
        (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "source" / name, follow_symlinks=False)
    pip = [sys.executable, "-m", "pip", "--python", python]
    install = [*pip, "install", "-q", "--no-index", "--no-build-isolation", tmp_path / "source"]
    subprocess.run(list(map(str, install)), check=True)
    empty = tmp_path / "empty"
    empty.mkdir()
    run(TRAIN, python=python, cwd=empty)
    folder = Path(run("import tupe; print(tupe.__path__[0])", python=python, cwd=empty).strip())
    assert folder.is_relative_to(tmp_path / "venv")
    for file in tracked.split("\0"):
        if file.startswith(("tupe/", "configs/")) and file != "tupe/configs":
            assert (folder / file.removeprefix("tupe/")).is_file(), file
    command = [str(python.parent / "tupe"), "--help"]
    assert "pretrain" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_classes_for_transformers_name_every_file_of_the_model():
    """transformers 4 copies no others from a folder with code."""

    def named(module):
        tree = ast.parse((PLUGIN / f"{module}.py").read_text(encoding="utf-8"))
        return {node.module for node in tree.body if isinstance(node, ast.ImportFrom) and node.level == 1}

    model = {file.stem for file in PLUGIN.glob("*.py")} - NOT_EXPORTED
    classes, text = {"configuration_tupe", "modeling_tupe", "tokenization_tupe"}, {"text", "normaliser"}
    assert named("configuration_tupe") == model - classes - text
    assert named("tokenization_tupe") == text


def test_version_and_newest_changes_agree():
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)[1]
    assert newest == tupe.__version__


@pytest.mark.thorough
def test_the_wheel_is_fit_for_an_index(tmp_path):
    """Its metadata name authors and licence as CITATION.cff does, and no link of README.md is relative."""
    left_out = shutil.ignore_patterns(".*", "*.egg-info", "outputs", "__pycache__", "build")
    copy = shutil.copytree(ROOT, tmp_path / "copy", symlinks=True, ignore=left_out)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, copy]
    address = "https://example.org/tupe"
    done = subprocess.run(list(map(str, command)), env={**os.environ, "TUPE_REPOSITORY": address}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    (wheel,) = tmp_path.glob("tupe-*.whl")
    assert wheel.name == f"tupe-{tupe.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
        assert not any(name.startswith(("lab/", "tests/")) for name in archive.namelist())
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert metadata["Author"] == citation["authors"][0]["name"] and citation["license"] in str(metadata.items())
    text = metadata.get_payload()
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert links and [link for link in links if not link.startswith(("https://", "#"))] == []
    assert f"]({address}/blob/v{tupe.__version__}/docs/start.md)" in text
