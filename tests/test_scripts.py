"""The shell scripts: commands they would run, refusals, and the installations of setup.sh."""

import functools
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress

import numpy as np
import pytest
import scipy.stats
import torch
from click.testing import CliRunner
from helpers import PLUGIN, descendants, has_ended, least_checkpoint, load, wait_until, write_data
from safetensors.torch import load_file

from lab import quickstart
from tupe.cli import main as tupe
from tupe.run.record import STOPPED, Record, read, state_of
from tupe.train.saved import newest

ROOT = PLUGIN.parent
SCRIPTS = ROOT / "scripts"


def bash(script, *arguments, **variables):
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **variables}
    command = ["bash", str(script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=240)


def test_what_the_commands_of_the_pages_write_is_in_no_image():
    ignored = [line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines() if line.startswith("/")]
    assert len(ignored) > 20 and set(ignored) <= set((ROOT / ".dockerignore").read_text().splitlines())


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.s*h*")), ids=lambda path: path.name)
def test_every_script_explains_itself(script):
    done = bash(script, "--help")
    assert done.returncode == 0 and (script.name in done.stdout or "Usage: tupe" in done.stdout), done.stderr


def test_slurm_job_starts_torchrun_once_per_node(tmp_path):
    """With stand-ins for Slurm's own commands (srun runs the task of each of two nodes) and for the interpreter, whose
    words are then run here."""
    pytest.importorskip("fairseq")  # whose command it shows
    srun = '[ "$SRUN_CPUS_PER_TASK" = 40 ] || exit 9; for node in 0 1; do SLURM_NODEID=$node "$@"; done'
    programs = {"srun": srun, "scontrol": "echo first; echo second", "python": 'printf "%q " "$@"; echo'}
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    done = bash(
        SCRIPTS / "pretrain.sbatch", "--data=DATA", f"--output={tmp_path / 'run'}", "--seed=7", "--dry-run",
        "--arch=bert_a_large", PATH=f"{tmp_path}:{os.environ['PATH']}", SLURM_SUBMIT_DIR=str(ROOT),
        SLURM_JOB_NUM_NODES="2", SLURM_JOB_ID="5", SLURM_JOB_NODELIST="x", PYTHON=str(tmp_path / "python"),
        SLURM_CPUS_PER_TASK="40",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    commands = [shlex.split(line) for line in done.stdout.splitlines()]
    for rank, (dash_m, package, *words) in enumerate(commands):
        assert (dash_m, package) == ("-m", "tupe")
        shown = CliRunner().invoke(tupe, words)
        assert shown.exit_code == 0, shown.output
        place = f"--nproc-per-node=8 --nnodes=2 --node-rank={rank} --master-addr=first --master-port=20005"
        wanted = "torchrun --arch=bert_a_large --seed=7 --batch-size=16 --distributed-world-size=16 --fp16"
        assert {*place.split(), *wanted.split()} <= set(shlex.split(shown.stdout))
    assert len(commands) == 2 and not (tmp_path / "run").exists()


@pytest.mark.parametrize(("status", "requeued"), [(85, True), (1, False)])
def test_slurm_job_that_a_signal_stopped_is_queued_again(tmp_path, status, requeued):
    scontrol = f"echo node; [ $1 != requeue ] || echo $2 > {tmp_path}/requeued"
    for name, text in {"srun": f"exit {status}", "scontrol": scontrol}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    done = bash(
        SCRIPTS / "pretrain.sbatch", PATH=f"{tmp_path}:{os.environ['PATH']}", SLURM_SUBMIT_DIR=str(ROOT),
        SLURM_JOB_NUM_NODES="2", SLURM_JOB_ID="5", SLURM_JOB_NODELIST="x",
    )  # fmt: skip
    assert done.returncode == status and (tmp_path / "requeued").exists() == requeued


@pytest.mark.parametrize(
    ("status", "words", "module"), [(138, ["sweep"], "tupe"), (143, ["sweep"], "tupe"), (1, ["lab", "run"], "lab")]
)
def test_many_jobs_are_a_slurm_job_that_is_queued_again_when_its_time_is_up(status, words, module, tmp_path):
    requeue = f'[ $1 != requeue ] || echo "$2" > {tmp_path}/requeued'
    for name, text in {"srun": f'"$@"; exit {status}', "scontrol": requeue, "python": 'printf "<%s>" "$@"'}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    done = bash(
        SCRIPTS / "jobs.sbatch", *words, "--data", "a b", PATH=f"{tmp_path}:{os.environ['PATH']}",
        SLURM_SUBMIT_DIR=str(ROOT), SLURM_JOB_ID="7", SLURM_ARRAY_JOB_ID="5", SLURM_ARRAY_TASK_ID="2",
        PYTHON=str(tmp_path / "python"),
    )  # fmt: skip
    assert done.returncode == status and done.stdout == f"<-m><{module}><{words[-1]}><--data><a b>"
    assert not (tmp_path / "requeued").exists() or (tmp_path / "requeued").read_text() == "5_2\n"
    assert (tmp_path / "requeued").exists() == (status in (138, 143))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fairseq", "torch"])
def test_a_slurm_job_whose_time_is_up_goes_on_exactly_when_it_is_queued_again(engine, data, tmp_path):
    """A real training on two nodes, which are two tasks on this machine. Slurm signals all processes of the tasks."""
    pytest.importorskip(engine)
    srun = 'for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@" & tasks+=($!); done\n'
    srun += "status=0; for task in ${tasks[@]}; do wait $task || status=$?; done; exit $status"
    scontrol = f"echo localhost; [ $1 != requeue ] || echo $2 >> {tmp_path}/requeued"
    for name, text in {"srun": srun, "scontrol": scontrol}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        **os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": sys.executable, "OMP_NUM_THREADS": "1",
        "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "x",
        "SLURM_JOB_ID": str(os.getpid()),
    }  # fmt: skip
    words = [f"--data={data}", "--gpus=0", "--arch=tupe_r_tiny", "--tokens-per-sample=24", "--lr=0.01"]
    words += ["--warmup-updates=2", "--max-update=60", "--batch-size=4", "--update-freq=1", "--log-interval=1"]
    words.append(f"--engine={engine}")

    def job(name):
        return subprocess.Popen(
            ["bash", SCRIPTS / "pretrain.sbatch", *words, f"--output={tmp_path / name}"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
        )  # fmt: skip

    def left(name):
        """(updates, weights) of a run's checkpoint."""
        if engine == "torch":
            updates, checkpoint = newest(tmp_path / name)
            return updates, load_file(checkpoint / "model.safetensors")
        state = load(tmp_path / name / "checkpoint_last.pt")
        return state["optimizer_history"][-1]["num_updates"], state["model"]

    whole = job("whole")
    shown = whole.communicate()[0]
    assert whole.returncode == 0, shown[-3000:]
    first = job("stopped")
    assert any("update 5" in line or "num_updates=5," in line for line in first.stdout)
    script, srun, *tasks = descendants(first.pid)
    for pid in tasks:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    first.communicate()
    assert first.returncode == STOPPED and (tmp_path / "requeued").read_text() == f"{os.getpid()}\n"
    assert 5 <= left("stopped")[0] < 60 and state_of(tmp_path / "stopped") == "open"
    second = job("stopped")
    second.communicate()
    assert second.returncode == 0 and state_of(tmp_path / "stopped") == "finished"
    (updates, one), (_, two) = left("whole"), left("stopped")
    assert updates == 60 and all(torch.equal(one[key], two[key]) for key in one)
    assert read(tmp_path / "whole").scores == read(tmp_path / "stopped").scores


STEP = "{ sleep 600 & echo $! > $STARTED; sleep 600; }"  # with a process of its own
STAND_INS = {  # of the programs that the script runs, by the step to be ended
    "quickstart.sh": {"scripts/setup.sh": STEP},
    "quickstart.sh: table": {
        "scripts/setup.sh": "", "outputs/quickstart/quickstart": "", "outputs/quickstart/raw/reviews/imdb.jsonl": "",
        ".venv/bin/tupe": "", ".venv/bin/python": f"case $* in *'-m lab.quickstart '*) {STEP} ;; esac",
    },
    "test.sh": {"scripts/setup.sh": STEP},
    "test.sh: pytest": {
        "scripts/setup.sh": "", ".venv/bin/lint-imports": "",
        ".venv/bin/python": f"case $* in *'-m pytest '*) {STEP} ;; esac",
    },
    "setup.sh": {"python": f"case $1-$2 in -c-*version_info*) echo 3.11 ;; -m-venv) {STEP} ;; esac"},
    "setup.sh: pip": {
        "python": "echo 3.11",
        ".venv/bin/python": f"case $1-$2$4 in -c-*version_info*) echo 3.11 ;; -m-pipinstall) {STEP} ;; esac",
    },
    "pretrain.sbatch": {"srun": STEP, "scontrol": "echo node"},
    "jobs.sbatch": {"srun": STEP},
}  # fmt: skip


SIGNALS = itertools.cycle([signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])


@pytest.mark.parametrize("name, number", [*zip(STAND_INS, SIGNALS, strict=False)])
def test_a_signal_to_a_script_ends_its_step(name, number, tmp_path):
    shutil.copytree(SCRIPTS, tmp_path / "scripts")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for file, text in STAND_INS[name].items():
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
    started = tmp_path / "started"
    environment = {
        **os.environ, "STARTED": str(started), "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": "python",
        "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": "x",
    }  # fmt: skip
    usual = functools.partial(signal.signal, number, signal.SIG_DFL)  # ignored where the tests run in the background
    process = subprocess.Popen(
        ["bash", tmp_path / "scripts" / name.partition(":")[0]], preexec_fn=usual, env=environment,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    wait_until(lambda: started.exists() and started.read_text())
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    wait_until(lambda: has_ended(int(started.read_text())))
    assert not (tmp_path / ".venv/.ready").exists()
    assert not (tmp_path / "outputs/quickstart/table.md").exists(), "the next call would begin anew"


def test_a_step_that_is_suspended_goes_on(tmp_path):
    """As by `scontrol suspend`: bash's `wait` ends when a job is stopped."""
    step = f"echo $BASHPID > {tmp_path / 'started'}; sleep 0.5; sleep 0.5; exit 7"
    text = f"source {SCRIPTS / 'steps.bash'}\nrun bash -c '{step}' || echo status $?\n"
    process = subprocess.Popen(["bash", "-c", text], stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL)
    wait_until(lambda: (tmp_path / "started").exists() and (tmp_path / "started").read_text())
    group = int((tmp_path / "started").read_text())
    os.killpg(group, signal.SIGSTOP)
    time.sleep(0.3)
    os.killpg(group, signal.SIGCONT)
    assert process.communicate(timeout=60)[0] == "status 7\n"


@pytest.mark.parametrize(("name", "command"), [("pretrain", "pretrain"), ("glue_sweep", "sweep><--report")])
def test_recipes_hand_over_to_the_command(name, command, tmp_path):
    """The process is the interpreter's, so that a signal reaches it; the words arrive as they were."""
    python = tmp_path / "python"
    python.write_text('#!/bin/bash\necho $$; printf "<%s>" "$@"\n')
    python.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(python)}
    process = subprocess.Popen(
        ["bash", SCRIPTS / f"{name}.sh", "--data", "a b", "model.dropout=0"],
        stdout=subprocess.PIPE, text=True, env=environment, cwd=tmp_path,
    )  # fmt: skip
    shown = process.communicate()[0]
    assert shown == f"{process.pid}\n<-m><tupe><{command}><--data><a b><model.dropout=0>"


def test_a_recipe_without_an_environment_says_what_makes_it(tmp_path):
    done = bash(SCRIPTS / "pretrain.sh", "--help", PYTHON=str(tmp_path / "python"))
    wanted = f"pretrain.sh: {tmp_path}/python not found; scripts/setup.sh makes the environment\n"
    assert done.returncode == 2 and done.stderr == wanted


@pytest.fixture
def clone(tmp_path):
    """scripts/ in a folder of its own, beside environments whose interpreters say their names."""
    shutil.copytree(SCRIPTS, tmp_path / "scripts")
    for name in (".venv", "venv", "conda"):
        python = tmp_path / name / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f"#!/bin/bash\necho {name}\n")
        python.chmod(0o755)
    for name, text in {"srun": '"$@"', "scontrol": "echo node"}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    return tmp_path


VENV, CONDA = {"VIRTUAL_ENV": "venv"}, {"CONDA_PREFIX": "conda", "CONDA_DEFAULT_ENV": "mine"}
BASE = {"CONDA_PREFIX": "conda", "CONDA_DEFAULT_ENV": "base"}  # where every shell may begin


@pytest.mark.parametrize(
    ("script", "active", "taken"),
    [
        ("pretrain.sh", {}, ".venv"),
        ("pretrain.sh", VENV, "venv"),
        ("pretrain.sh", CONDA, "conda"),
        ("pretrain.sh", BASE, ".venv"),
        ("pretrain.sh", {**VENV, **BASE}, "venv"),
        ("pretrain.sh", {**VENV, "PYTHON": "conda/bin/python"}, "conda"),
        ("pretrain.sbatch", VENV, "venv"),
        ("jobs.sbatch", VENV, "venv"),
    ],
)
def test_the_active_environment_is_taken_and_named(script, active, taken, clone):
    variables = {name: value if name == "CONDA_DEFAULT_ENV" else f"{clone / value}" for name, value in active.items()}
    environment = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "CONDA_PREFIX")}
    environment |= {
        "PATH": f"{clone}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(clone), "SLURM_JOB_ID": "5",
        "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "x", **variables,
    }  # fmt: skip
    command = ["bash", clone / "scripts" / script, "--data", "x"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=clone.parent)
    assert (done.returncode, done.stdout) == (0, f"{taken}\n"), done.stderr
    assert done.stderr.endswith(f"running {clone / taken}/bin/python\n")


def test_conda_s_base_is_taken_where_there_is_no_other(clone):
    shutil.rmtree(clone / ".venv")
    variables = {"CONDA_PREFIX": str(clone / "conda"), "CONDA_DEFAULT_ENV": "base", "PYTHON": "", "VIRTUAL_ENV": ""}
    assert bash(clone / "scripts" / "pretrain.sh", **variables).stdout == "conda\n"


FAKE_PYTHON = """#!/bin/bash
# A Python that only notes what it is asked to install.
case "$1 $2" in
  "-m venv") mkdir -p "${@: -1}/bin" && cp "$0" "${@: -1}/bin/python" ;;
  "-m pip") echo "${@:3}" >> "$FAKE_LOG" ;;
  "--version ") echo "Python $FAKE_VERSION.0" ;;
  "-c import sys; print"*) echo "$FAKE_VERSION" ;;
esac
"""


def test_setup_installs_once_and_again_when_requirements_change(tmp_path):
    shutil.copytree(SCRIPTS, tmp_path / "scripts")
    for file in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / file, tmp_path)
    (tmp_path / "python").write_text(FAKE_PYTHON)
    (tmp_path / "python").chmod(0o755)

    def setup(*arguments, version="3.11"):
        log = tmp_path / "log"
        log.write_text("")
        script = tmp_path / "scripts/setup.sh"
        settings = {"PYTHON": str(tmp_path / "python"), "FAKE_LOG": str(log), "FAKE_VERSION": version}
        done = bash(script, *arguments, **settings)
        return done, log.read_text()

    done, installed = setup()
    assert done.returncode == 0, done.stderr
    torch_first, everything = installed.index("torch=="), installed.index("-r scripts/requirements.txt")
    assert torch_first < everything < installed.index("--no-deps fairseq-fixed==") < installed.index("-e .")
    done, installed = setup()
    assert done.stdout == "setup: .venv is up to date\n" and not installed
    with (tmp_path / "scripts/requirements.txt").open("a") as file:
        file.write("another==1.0\n")
    assert "-r scripts/requirements.txt" in setup()[1]
    done, installed = setup(version="3.9")  # refused aloud, and not replaced by another interpreter
    assert done.returncode == 2 and "3.9" in done.stderr and "3.11 or 3.12" in done.stderr and not installed
    done, installed = setup("--cuda", "cu126")
    assert "install -q --index-url https://download.pytorch.org/whl/cu126 torch==" in installed, done.stderr
    assert installed.index("uninstall -q -y torch") < installed.index("cu126")  # to pip, any build will do
    assert not setup()[1]  # the build stays what it is
    done, _ = setup("--cuda", "12.6")
    assert done.returncode == 2 and "such as cu126" in done.stderr
    done, _ = setup("--stack", "cuda9")
    assert done.returncode == 2 and "valid: fairseq, train" in done.stderr
    done, installed = setup("--stack", "train", version="3.13")  # the newest of all, without fairseq and a compiler
    assert done.returncode == 0 and "--only-binary :all: " in installed and "-e .[train,dev]" in installed, done.stderr
    assert "fairseq" not in installed and not setup("--stack", "train", version="3.13")[1]


def quickstart_rows(text):
    rows = [row for row in text.splitlines() if re.match(r"\| (model|BERT-A tiny|TUPE-R tiny) \| [\d,u]", row)]
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["--engine", "torch"]])
def test_quickstart_prints_the_digits_of_the_page(words, tmp_path):
    """On another kind of processor the last digits differ. The environment is this one; the text is downloaded."""
    (tmp_path / "scripts").mkdir()
    for name in ("quickstart.sh", "steps.bash"):
        shutil.copy(SCRIPTS / name, tmp_path / "scripts")
    (tmp_path / "scripts" / "setup.sh").write_text("")
    for name in (".venv", ".venv-train"):
        (tmp_path / name).symlink_to(sys.prefix)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "scripts/quickstart.sh", *words], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    here = quickstart_rows((tmp_path / "outputs" / "quickstart" / "table.md").read_text())
    page = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
    printed = quickstart_rows(page)
    if words:  # the page says the losses and orders of that engine in a sentence
        said = re.search(r"losses of ([\d.]+) and ([\d.]+), and ([\d.]+) and ([\d.]+) for the order", page)
        for row, loss, order in zip(printed[1:], said.groups()[:2], said.groups()[2:], strict=True):
            row[3], row[5] = loss, order
    assert len(here) == 3
    for row, expected in zip(here, printed, strict=True):
        assert row[:3] == expected[:3] and row[4] == expected[4]
        if row[1] != "updates":
            assert float(row[3]) == pytest.approx(float(expected[3]), abs=0.3), row
            assert float(row[5]) == pytest.approx(float(expected[5]), abs=5), row


@pytest.mark.parametrize("loss, learned", [(4.2, True), (4.4, False)])
def test_quickstart_table_shows_whether_anything_was_learned(tmp_path, caplog, loss, learned):
    pytest.importorskip("fairseq")
    write_data(tmp_path / "data")
    entropy = quickstart.unigram_entropy(tmp_path / "data")
    counts = np.bincount(np.fromfile(tmp_path / "data" / "train.bin", dtype=np.uint16))
    assert entropy == pytest.approx(scipy.stats.entropy(counts, base=2)) == pytest.approx(4.6, abs=0.01)
    run = {"seed": 1, "lr": 1e-3, "variant": "", "budget": {"max_update": 1234}, "splits": ["valid"]}
    for arch, parameters in {"bert_a": 1_230_000, "tupe_r": 1_340_000}.items():
        folder = tmp_path / "models" / "presets" / f"{arch}_tiny" / arch
        folder.mkdir(parents=True)
        state = {**least_checkpoint(), "model": {"encoder.tokens.weight": torch.zeros(parameters)}}
        torch.save(state, folder / "checkpoint_last.pt")
        entry = {"epoch": 1, "num_updates": 1234, "split": "valid", "best": True}
        Record("masked_lm", f"{arch}_tiny", **run, scores=[{**entry, "loss": loss}]).save(folder)
    (tmp_path / "order").mkdir()
    orders = dict.fromkeys(("bert_a", "tupe_r"), {"order": {"accuracy": 0.625}})
    (tmp_path / "order" / "order.json").write_text(json.dumps(orders))
    caplog.set_level("INFO")
    shown = CliRunner().invoke(quickstart.table, [str(tmp_path)])
    assert not caplog.records  # the table alone, without what fairseq logs of the data
    assert shown.exit_code == (0 if learned else 2), shown.output
    assert ("TUPE-R: validation loss 4.40" in shown.stderr) == (not learned)
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in shown.stdout.splitlines()]
    assert rows[2] == ["BERT-A tiny", "1,234", "1.23 M", f"{loss:.2f}", f"{entropy:.2f}", "62.5"]
    assert rows[3][0] == "TUPE-R tiny" and rows[3][2] == "1.34 M"
