"""What only a GPU can show, in one command: the most informative part first, each saved as it ends.

B batch, L sequence length.
"""

import tupe.plugin  # noqa: F401  isort: skip  (first: keeps fairseq's import quiet)
import io
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import click
import jinja2
import numpy as np
import torch

from .. import backend_sdpa
from ..common import options
from ..common.blocks import write_split
from ..common.options import Command, ListOf
from ..common.record import STOPPED, command_line, read, write_atomically
from ..common.tables import TextTable
from ..encoder import Encoder
from . import contenders, kernels, memory, report, step
from .contenders import Contender, Setting
from .machine import PRECISIONS, autocast, environment

PARTS = {}  # name -> Part, in order
TOLERANCES = {"fp16": 4e-3, "bf16": 3e-2}  # of attention's relative error; see `tests/test_attention.py`
TARGETS = {"nopos": 0.97, "hf": 1.0}  # tupe_r is at least so many times as fast
PRETRAINING = {  # name of a run -> further words of `tupe pretrain`
    "float32": ["common.fp16=false"], "fp16": [], "bf16": ["--autocast=bf16"], "amp": ["--amp"],
    "fp16_fused": ["criterion._name=masked_lm_chunked", "optimizer._name=adamw_fused"],
}  # fmt: skip
UPDATES = 300


class Trial(NamedTuple):
    folder: Path
    device: str  # "cuda", or "cpu" for a rehearsal at tiny sizes

    def pick(self, full: Any, tiny: Any) -> Any:
        return full if self.device == "cuda" else tiny


class Part(NamedTuple):
    title: str
    seconds: int  # at most
    measure: Callable[[Trial], list]  # -> rows (what, expected, measured); what it prints is shown too


def part(name: str, title: str, seconds: int) -> Callable:
    def add(function: Callable) -> Callable:
        PARTS[name] = Part(title, seconds, function)
        return function

    return add


@part("device", "Device and builds", 30)
def device(trial: Trial) -> list:
    rows = [(name, "", value) for name, value in environment().items() if value is not None]
    if trial.device == "cuda":
        card, builds = torch.cuda.get_device_properties(0), " ".join(torch.cuda.get_arch_list())
        rows.append(("kernels of this PyTorch", f"sm_{card.major}{card.minor}", builds))
        rows.append(("memory, GiB", "", f"{card.total_memory / memory.GIB:.1f}"))
        query = ["nvidia-smi", "--query-gpu=driver_version,power.limit,clocks.max.sm", "--format=csv,noheader"]
        rows.append(("driver, power limit, clock", "", subprocess.run(query, capture_output=True, text=True).stdout))
    return rows


@part("tests", "Tests on the card", 150)
def tests(trial: Trial) -> list:
    root = Path(__file__).parents[2]
    if not (root / "tests").is_dir():
        return [("tests", "all pass", "they are in a clone of the repository")]
    words = trial.pick(["tests/test_attention.py", "-p", "no:cacheprovider", "-k", "cuda"], ["--version"])
    done = subprocess.run([sys.executable, "-m", "pytest", *words], cwd=root, stdout=subprocess.PIPE, text=True)
    print(done.stdout)
    return [("exit status of pytest", 0, done.returncode)]


@part("choice", "Which kernel, and is it right", 60)
def choice(trial: Trial) -> list:
    """The first of PyTorch's kernels that takes a step, and the relative error of attention beside the plain path."""
    rows = []
    for position in ("nopos", "untied+t5", "fire", "t5+window"):
        for length, padded in trial.pick([(512, 0), (509, 1)], [(9, 1)]):
            expected = "FLASH (V100: EFFICIENT)" if position == "nopos" and not padded else "EFFICIENT"
            label = f"{position}, L {length}" + ", padded" * padded
            rows.append((label, expected, kernel_of(trial, position, length, padded)))
    for path, (name, most) in itertools.product(trial.pick(["sdpa", "triton"], ["sdpa"]), TOLERANCES.items()):
        for length in trial.pick([512, 509], [9]):
            error = max(differences(path, length, PRECISIONS[name], trial.device))
            rows.append((f"{path}, {name}, L {length}: error", f"below {most:g}", f"{error:.1e}"))
    return rows


def kernel_of(trial: Trial, position: str, length: int, padded: int) -> str:
    sizes = {"layers": 1, "width": 128, "heads": 2, "ffn": 128, "max_positions": length}
    model = Encoder(100, 1, position=position, attention="sdpa", **sizes).to(trial.device)
    tokens = torch.full((2, length), 5, device=trial.device)
    tokens[0, length - padded :] = 1
    for kernel in backend_sdpa.KERNELS:
        with mock.patch.object(backend_sdpa, "KERNELS", [kernel]), suppress(RuntimeError):
            with autocast(trial.device, "fp16"):
                model(tokens, num_tokens=tokens.numel() - padded)[0].float().sum().backward()
            return kernel.name.removesuffix("_ATTENTION")
    return "none"


def differences(path: str, length: int, dtype: torch.dtype, on: str) -> list[float]:
    """Of the output and the gradients of q, k, v and the bias, relative to the plain path's."""
    results = []
    for name in (path, "plain"):
        case = kernels.attention_case(name, 4, length, dtype, on, 0.0)
        case.forward()
        results.append([case.out, *torch.autograd.grad(case.out, case.inputs, torch.ones_like(case.out))])
    return [float((a - b).norm() / b.norm()) for a, b in zip(*results, strict=True)]


@part("memory", "Memory of a step beside the count", 60)
def memory_of_a_step(trial: Trial) -> list:
    """GiB at the peak of a padded step, beside weights, gradients and the workspace of cuBLAS."""
    rows = []
    arch, shapes = trial.pick(("tupe_r", [(16, 512), (32, 512), (32, 509)]), ("tupe_r_tiny", [(2, 9)]))
    for precision, (batch, length) in itertools.product(TOLERANCES, shapes):
        sizes = memory.step_bytes(arch, batch, length, precision=precision)
        with torch.device(trial.device):
            model, tokens = memory.build(arch, batch, length, 32768, {"attention": "sdpa"})
        tokens[-1, -1] = contenders.PAD
        model.to(PRECISIONS["fp16" if precision == "fp16" else "float32"])
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        torch.ones(64, 64, device=trial.device) @ torch.ones(64, 64, device=trial.device)  # cuBLAS takes its workspace
        reset, before = trial.pick(torch.cuda.reset_peak_memory_stats, lambda: None), torch.cuda.memory_allocated()
        reset()
        memory.masked_loss(model, tokens, precision, padded=True).backward()
        counted, found = sizes["activations"] + sizes["transient"], torch.cuda.max_memory_allocated() - before
        gib = [f"{size / memory.GIB:.2f}" for size in (counted, found)]
        rows.append((f"{arch}, {precision}, B {batch}, L {length}", f"at most {gib[0]}", gib[1]))
    return rows


@part("kernels", "Parts of a step", 90)
def parts_of_a_step(trial: Trial) -> list:
    words = trial.pick("--tokens=16384 --precision=fp16,bf16 --dropout=0.1",
                       "--tokens=16 --precision=bf16 --dropout=0 --lengths=8 --vocab-size=50 --turns=1")  # fmt: skip
    kernels.command.main([f"--device={trial.device}", *words.split()], standalone_mode=False)
    return [("attention, sdpa: times as fast as plain", "above 2", "below")]


def steps(precision: str, length: int, models: str, trial: Trial) -> list:
    output = trial.folder / f"step_{models.partition(',')[0]}_{precision}_{length}"
    words = trial.pick(
        f"--models={models} --tokens=16384 --rounds=5 --lengths={length}",
        "--models=tupe_r,nopos --size=tiny --tokens=16 --rounds=1 --lengths=8 --vocab-size=60",
    )
    words = [*words.split(), f"--precision={precision}", f"--device={trial.device}", f"--output={output}"]
    with redirect_stdout(io.StringIO()):
        step.command.main(words, standalone_mode=False)
    ours, *_ = measured = json.loads(output.with_suffix(".json").read_text())["rows"]
    print(report.contenders(measured, 16).markdown())
    name, times = ours["contender"], ours["times_as_fast"]
    speed = [(f"{name} x {other}", f"at least {least}", f"{times[other]:.3f}")
             for other, least in TARGETS.items() if other in times]  # fmt: skip
    return [*speed, (f"{name}, of the matrix peak", "at least 50 %", f"{ours['share_of_peak']:.0%}")]


STEPS = "tupe_r,tupe_a,bert_a,nopos,fairseq,hf,modernbert"
for length, precision in itertools.product((512, 128), TOLERANCES):
    title = f"A step in {precision}, L {length}"
    part(f"step_{precision}_{length}", title, 90)(partial(steps, precision, length, STEPS))
part("compile", "A compiled step in bf16, L 512", 90)(partial(steps, "bf16", 512, "tupe_r-compile,tupe_r,nopos"))


def pretrain(trial: Trial, name: str, *words: str, on: str = "") -> subprocess.Popen:
    """Start a run of UPDATES updates without dropout, or go on with it."""
    data = trial.folder / "data"
    if not (data / "valid.idx").exists():  # written last
        random = np.random.default_rng(0)
        data.mkdir(exist_ok=True)
        contenders.dictionary(100).save(str(data / "dict.txt"))
        for split, count in (("train", 20_000), ("valid", 200)):  # of two neighbours the second has a greater number
            sentences = (4 + np.cumsum(random.integers(1, 4, size=15)) % 90 for _ in range(count))
            write_split(data / split, ([*sentence, 2] for sentence in sentences), 100)
    sizes = trial.pick("--batch-size=64 --tokens-per-sample=64", "--batch-size=2 --tokens-per-sample=16")
    common = f"--max-update={UPDATES} --total-num-update={UPDATES} --warmup-updates={UPDATES // 10} --lr=[0.001]"
    common += f" --validate-interval-updates={UPDATES // 3} --log-interval=20 --arch=tupe_r_tiny"
    common += " --dropout=0 --attention-dropout=0"
    command = ["pretrain", f"--data={data}", f"--output={trial.folder / name}", *sizes.split(), *common.split()]
    return start([*command, f"--gpus={int((on or trial.device) == 'cuda')}", *words], trial.folder / f"{name}.out")


def start(words: list[str], log: Path, **options) -> subprocess.Popen:
    """`tupe` in a process of its own."""
    with open(log, "ab") as file:
        return subprocess.Popen([sys.executable, "-m", "tupe", *words], stdout=file, stderr=file, **options)


def losses(trial: Trial, name: str) -> str:
    """Of the held-out text, at every validation so far."""
    run = read(trial.folder / name)
    return ", ".join(f"{score['loss']:.4f}" for score in run.scores) if run else ""


@part("pretraining", f"{UPDATES} updates of pre-training: losses beside a CPU's", 360)
def pretraining(trial: Trial) -> list:
    pretrain(trial, "cpu", "common.fp16=false", on="cpu").wait()
    runs = trial.pick(PRETRAINING, {"cpu_bf16": ["--autocast=bf16"]})
    ended = {name: pretrain(trial, name, *words).wait() for name, words in runs.items()}
    expected = f"{losses(trial, 'cpu')}, to 0.02"
    return [(f"{name}, exit status {status}", expected, losses(trial, name)) for name, status in ended.items()]


@part("resume", "USR1 and resume, beside a run that nothing stopped", 180)
def resume(trial: Trial) -> list:
    shutil.rmtree(trial.folder / "stopped", ignore_errors=True)
    process = pretrain(trial, "stopped")
    while process.poll() is None and not losses(trial, "stopped"):
        time.sleep(0.05)
    process.send_signal(signal.SIGUSR1)
    ended = process.wait(), pretrain(trial, "stopped").wait()
    rows = [("exit statuses", (STOPPED, 0), ended)]
    return [*rows, ("losses", losses(trial, trial.pick("fp16", "cpu")), losses(trial, "stopped"))]


def small_step(trial: Trial) -> Contender:
    full, tiny = Setting(batch=16, precision="bf16", device="cuda"), Setting("tiny", length=8, batch=2, vocab=60)
    contender = Contender("tupe_r", trial.pick(full, tiny))
    contender.step(0)
    return contender


@part("waits", "Waits of five steps, as `set_sync_debug_mode` sees them", 60)
def waits(trial: Trial) -> list:
    contender, mode = small_step(trial), trial.pick(torch.cuda.set_sync_debug_mode, lambda mode: None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mode("warn")
        for _ in range(5):
            contender.forward(), contender.backward(), contender.update()
        mode("default")
    lines = Counter(f"{Path(each.filename).name}:{each.lineno}" for each in caught)
    return [("masked tokens, in contenders.py", 5, "below"), *((line, "", count) for line, count in lines.items())]


@part("profile", "Where the time of a step goes", 60)
def profile(trial: Trial) -> list:
    contender = small_step(trial)
    with torch.profiler.profile() as traced:
        contender.step(0)
    traced.export_chrome_trace(str(trial.folder / "profile.json.gz"))
    print(traced.key_averages().table(sort_by=f"self_{trial.device}_time_total", row_limit=20))
    return [("trace", "", "profile.json.gz")]


# ---- the command


def saved(trial: Trial, name: str) -> dict | None:
    """A part's results, None if it has not ended on this device."""
    path = trial.folder / f"{name}.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    return found if found.get("device") == trial.device else None


def run(trial: Trial, name: str) -> None:
    """Measure a part and save it."""
    begin, text = time.monotonic(), io.StringIO()
    with redirect_stdout(text):
        rows = PARTS[name].measure(trial)
    table = TextTable.plain(["", "expected", "measured"], [list(map(str, row)) for row in rows], align="lll").markdown()
    content = {
        "device": trial.device, "date": environment()["date"], "seconds": round(time.monotonic() - begin),
        "table": table, "text": text.getvalue().strip(),
    }  # fmt: skip
    write_atomically(trial.folder / f"{name}.json", json.dumps(content, indent=1, allow_nan=False) + "\n")


def write_page(trial: Trial, reasons: dict[str, str]) -> None:
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    template = jinja2.Environment(loader=loader, trim_blocks=True, lstrip_blocks=True).get_template("gpu.jinja")
    parts = [{"title": p.title, "saved": saved(trial, n), "reason": reasons.get(n)} for n, p in PARTS.items()]
    write_atomically(trial.folder / "gpu.md", template.render(command=command_line(), device=trial.device, parts=parts))


@click.command(cls=Command)
@options.output("The folder of the page gpu.md, of each part's results, and of what they leave.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cuda", show_default=True,
              help="Where to measure; on the CPU it is a rehearsal at tiny sizes.")  # fmt: skip
@click.option(
    "--minutes", default=25.0, show_default=True, help="Parts that might last longer wait for the next start."
)
@click.option("--parts", type=ListOf(list(PARTS)), help="Run only these parts, in this process.")
def command(output, device, minutes, parts):
    """Measure on a GPU what could only be computed without one, and write a page: expected beside measured.

    \b
    tupe bench gpu --output runs/gpu               on an otherwise idle card; again: what is missing
    tupe bench gpu --output try --device cpu       a rehearsal
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: this PyTorch sees no GPU; valid here: cpu")
    trial, begin, reasons = Trial(output.resolve(), device), time.monotonic(), {}
    output.mkdir(parents=True, exist_ok=True)
    for name in parts or PARTS:
        left = 60 * minutes - (time.monotonic() - begin)
        if saved(trial, name):
            continue
        if left < PARTS[name].seconds:
            reasons[name] = f"--minutes {minutes:g} are over"
        elif parts:
            run(trial, name)
        else:  # a fault of CUDA ends all that a process could still measure
            click.echo(f"{PARTS[name].title} ...")
            words = ["bench", "gpu", f"--output={output}", f"--device={device}", f"--parts={name}"]
            process = start(words, output / f"{name}.log", start_new_session=True)
            try:
                status = process.wait(PARTS[name].seconds)
            except BaseException as error:
                os.killpg(process.pid, signal.SIGKILL)  # and what it started
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                status = f"longer than {PARTS[name].seconds} s"
            if status:
                reasons[name] = f"{status}; see {name}.log"
        write_page(trial, reasons)
    click.echo(f"{output / 'gpu.md'}: {sum(saved(trial, n) is not None for n in PARTS)} of {len(PARTS)} parts")
    if reasons:
        raise click.ClickException(f"not measured: {', '.join(reasons)}; started again, the command measures these")
