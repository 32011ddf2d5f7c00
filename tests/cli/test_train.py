"""The commands that train, up to the trainer: what they hand to it, what they refuse, and where memory comes from."""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from helpers import PLUGIN

from tupe.cli import main, train

pytest.importorskip("fairseq", reason="the commands here are fairseq's")
ROOT = PLUGIN.parent


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """Whatever this machine has."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def dry_run(command, *words):
    """The words that the command would start, or the error, of a dry run on the CPU."""
    shown = CliRunner().invoke(main, [command, *map(str, words), "--dry-run"], prog_name="tupe")
    assert shown.exit_code in (0, 2), shown.output
    if shown.exit_code == 2:
        assert len(shown.stderr.splitlines()) <= 5 and "Traceback" not in shown.stderr
        return shown.stderr
    return shlex.split(shown.output)


def pretrain(folder, *words):
    return dry_run("pretrain", "--data=DATA", f"--output={folder / 'run'}", *words)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ["--arch=tupe_r"]),
        (["--recipe=pretrain_large"], ["--arch=tupe_r_large"]),
        (["--recipe", "pretrain_electra"], ["--arch=electra_tupe_r", "--batch-size=16"]),
        (["--preset", "shaw"], ["--arch=bert_a", "--position=shaw+shaw_values"]),
        (["--preset=shaw", "--arch=bert_a_mini"], ["--arch=bert_a_mini", "--position=shaw+shaw_values"]),
        (["model.position=rope", "--arch=bert_a", "--lr", "0.5"], ["--position=rope", "--lr=[0.5]"]),
        (["--max-update=50", "common.seed=7"], ["--max-update=50", "--total-num-update=50", "--seed=7"]),
        (["+model.dropout=0"], ["--dropout=0.0", "--cpu"]),
    ],
)
def test_recipe_options_and_overrides_reach_the_trainer(words, expected, tmp_path):
    command = pretrain(tmp_path, *words)
    assert command[0] == "fairseq-train" and set(expected) <= set(command)
    assert not [word for word in command if word.startswith("--cls")]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words", [["pretrain", "--data=DATA", "--dry-run"], ["sweep", "--recipe=pretrain", "--grid=seed=1", "--dry-run"]]
)
def test_files_of_schemes_are_handed_to_the_training(words, tmp_path):
    files = [str(tmp_path / f"own{number}.py") for number in range(3)]
    for file in files:
        Path(file).write_text("")
    given = [f"--position-file={file}" for file in files]
    words = [*given[:2], *words, f"--output={tmp_path / 'run'}", given[2]]  # the last one behind the command's name
    shown = CliRunner().invoke(main, words, prog_name="tupe")
    assert shown.exit_code == 0, shown.output
    assert f"--position-file={':'.join(files)}" in shlex.split(shown.output), shown.output
    assert "no-such" in CliRunner().invoke(main, ["--position-file=no-such", "list", "models"]).stderr


def test_a_file_of_schemes_that_fails_is_one_line(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("import torch\nclass Own(:\n")
    refused = CliRunner().invoke(main, [f"--position-file={file}", "list", "models"], prog_name="tupe")
    assert refused.exit_code == 2 and refused.output == f"tupe list models: {file}:2: SyntaxError: invalid syntax\n"


@pytest.mark.parametrize(
    "words, wanted",
    [
        (["--tensorboard-logdir", "runs/lr=1e-4"], "--tensorboard-logdir=runs/lr=1e-4"),
        (["--lr", "1e-3", "model.dropout=0.3"], "--dropout=0.3"),
    ],
)
def test_the_value_of_an_option_is_no_value_of_the_recipe(words, wanted, tmp_path):
    assert wanted in pretrain(tmp_path, *words)


@pytest.mark.parametrize(
    "command, words, message",
    [
        ("pretrain", ["--save-dir=other"], "checkpoint.save_dir: the command has an option of its own"),
        ("pretrain", ["checkpoint.save_dir=other"], "checkpoint.save_dir: the command has an option of its own"),
        ("pretrain", ["task.data=other"], "task.data: the command has"),
        ("pretrain", ["--recipe=pretrain_electra", "--arch=tupe_r"], "--arch tupe_r is no ELECTRA; valid with"),
        ("finetune", ["--task=CoLA", "--finetune-from-model=x"], "checkpoint.finetune_from_model: the command has"),
        ("finetune", ["--task=CoLA", "glue=mnli"], "glue=mnli: glue=cola is given already"),
        ("pretrain", ["--preset="], "model= not found"),
    ],
)
def test_what_a_command_sets_itself_is_refused(command, words, message, tmp_path):
    (tmp_path / "model.pt").write_bytes(b"PK")
    start = [f"--checkpoint={tmp_path / 'model.pt'}"] * (command != "pretrain")
    where = [f"--data={tmp_path}", f"--output={tmp_path / 'run'}", *start, "--dry-run"]
    result = CliRunner().invoke(main, [command, *where, *words])
    assert result.exit_code == 2 and message in result.output, result.output


def test_an_empty_path_is_not_this_folder(tmp_path):
    result = CliRunner().invoke(main, ["pretrain", f"--data={tmp_path}", "--output=", "--dry-run"])
    assert result.exit_code == 2 and "'--output': is empty" in result.output


def test_several_gpus_are_torchrun_s(tmp_path):
    command = pretrain(tmp_path, "--gpus=8", "--nodes=2", "--node-rank=1", "--master-addr=first", "--arch=bert_a_large")
    assert command[0] == "torchrun"
    wanted = "--nproc-per-node=8 --nnodes=2 --node-rank=1 --master-addr=first --batch-size=16 --fp16"
    assert {*wanted.split(), "--distributed-world-size=16", "--arch=bert_a_large", "--no-python"} <= set(command)
    assert "--cpu" not in command


def test_a_cpu_is_one_process_however_many_gpus_there_are(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    for words in (["--cpu"], ["--gpus=0"]):
        command = pretrain(tmp_path, *words)
        assert command[0] != "torchrun" and {"--cpu", "--distributed-world-size=1"} <= set(command)


def test_two_trainings_on_one_machine_have_a_port_each(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr("tupe.run.torchrun.run_torchrun", started.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    (tmp_path / "data").mkdir()
    monkeypatch.setattr(train, "check_data", lambda *args: None)
    words = ["pretrain", "--arch=bert_a_tiny", f"--data={tmp_path / 'data'}", "--allocator=none"]
    for more in ([], [], ["--master-port=2345"], ["--nodes=2"]):
        result = CliRunner().invoke(main, [*words, f"--output={tmp_path / 'run'}", *more])
        assert result.exit_code == 0, result.output
    ports = [next(word for word in where if "port" in word) for where in started]
    assert len(set(ports)) == 4 and ports[2:] == ["--master-port=2345", "--master-port=29500"]


def test_nodes_without_gpus_have_a_process_each_which_speak_gloo(tmp_path):
    command = pretrain(tmp_path, "--gpus=0", "--nodes=2", "--node-rank=1")
    wanted = "--nproc-per-node=1 --nnodes=2 --cpu --distributed-backend=gloo --ddp-backend=legacy_ddp"
    wanted += " --heartbeat-timeout=600"
    assert command[0] == "torchrun" and {*wanted.split(), "--distributed-world-size=2"} <= set(command)
    assert "--fp16" not in command
    assert "--ddp-backend=slowmo" in pretrain(tmp_path, "--gpus=0", "--nodes=2", "--ddp-backend=slowmo")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--optimizer=adm"], "'adam"),
        (["--recipe=finetune"], "pretrain_large"),
        (["--preset=gau", "--arch=bert_a_mini"], "model=gau is gau, not bert_a_mini"),
        (["--preset=tupe_r_large", "--arch=tupe_r_mini"], "model=tupe_r_large is tupe_r_large"),
        (["+seed=3"], "seed=3: valid: SECTION.KEY=VALUE, model=NAME"),
        (["comon.fp16=false"], "'common'"),
        (["common.fp61=false"], "'fp16'"),
        (["model._name=tupe_x"], "'tupe_"),
        (["DATA", "OUT"], "'DATA'"),
        (["--gpus=3"], "cannot be split evenly over 3"),
        (["--max-update=0", "--max-epoch=1"], "polynomial_decay needs the length of the run: give --max-update"),
        (["--precision=fp16"], "fp16 needs a GPU; valid here: --precision float32, autocast or bf16"),
        (["--nodes=2", "--node-rank=2"], "--node-rank 2: valid with --nodes 2: 0 to 1"),
        (["--micro-batch-size=4", "--update-freq=1"], "--micro-batch-size, --update-freq: give one"),
        (["--micro-batch-size=4", "optimization.update_freq=[8]"], "--micro-batch-size, --update-freq: give one"),
        (["--batch-size=64", "optimization.update_freq=[8]"], "give --update-freq instead, both are of a step then"),
        (["--arch=electra_a_tiny"], "is an ELECTRA; give --recipe pretrain_electra"),
    ],
)
def test_mistakes_are_refused_with_the_nearest_name(words, message, tmp_path):
    error = pretrain(tmp_path, *words)
    assert isinstance(error, str) and message in error
    assert "roberta" not in error and not list(tmp_path.iterdir())


def test_a_run_that_ends_before_its_rate_stops_rising_is_told_so(vocabulary, tmp_path, monkeypatch, caplog):
    nothing = SimpleNamespace(prepare=lambda *args: ("", lambda yes: None))
    monkeypatch.setattr(train, "import_module", lambda *args: nothing)
    for updates in (5000, 10000):
        words = ["pretrain", f"--data={vocabulary}", f"--output={tmp_path / 'run'}", "--gpus=0", "--allocator=none"]
        result = CliRunner().invoke(main, [*words, f"--max-update={updates}"])
        assert result.exit_code == 0, result.output
    said = [record.message for record in caplog.records if "rises for" in record.message]
    assert said == ["the learning rate rises for 10,000 updates, the run ends at 5,000: give fewer --warmup-updates"]


def test_finetuning_takes_its_model_from_the_checkpoint(pretrained, tmp_path):
    common = ["--data=DATA", f"--checkpoint={pretrained}", f"--output={tmp_path / 'run'}"]
    command = dry_run("finetune", "--task=sts_b", *common, "--lr=2e-5")
    assert {"--glue-task=STS-B", "--lr=[2e-05]", f"--finetune-from-model={pretrained}"} <= set(command)
    said = dry_run("finetune", "--task=RTEE", *common)
    assert "'rte'" in said and said.endswith("data folder not found: DATA\n")
    assert "Path 'none.pt' does not exist" in dry_run("finetune", "--task=RTE", *common, "--checkpoint=none.pt")
    assert "--arch=from_checkpoint" in command and not any("position" in word for word in command)


def test_a_checkpoint_is_trained_further(pretrained, tmp_path):
    words = ["--data=DATA", f"--finetune-from-model={pretrained}", f"--output={tmp_path / 'run'}"]
    command = dry_run("pretrain", "--recipe=pretrain_further", *words, "--tokens-per-sample=16", "--max-epoch=3")
    assert {"--tokens-per-sample=16", "--max-epoch=3", "--arch=from_checkpoint"} <= set(command)


def test_memory_allocator_is_preloaded(tmp_path):
    library = next(Path("/").glob("lib*/**/libm.so.6"), None) or pytest.skip("no library to preload is known here")
    show = "import os, sys; from tupe.cli import train; train.tcmalloc = lambda: sys.argv[1]; "
    show += "train.use_allocator(); print(os.environ.get('LD_PRELOAD'))"

    def preloaded(before="", **variables):
        environment = {**{k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}, **variables}
        command = [sys.executable, "-c", before + show, str(library)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    on_gpu = Path("/dev/nvidiactl").exists()
    assert preloaded() == ("None" if on_gpu else str(library))
    assert preloaded("import torch; ") == "None"
    other = str(library.with_name("libc.so.6"))
    assert preloaded(LD_PRELOAD=other) == other  # someone else's stays
