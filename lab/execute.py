"""Trains and evaluates trials of a plan, and keeps of each what is needed to draw conclusions.

OUT/<stage>/<model>/<size>_<updates>_lr<lr>_seed<seed>/ is a run. When it is finished, evaluation.json holds its
evaluation and model.pt its weights in half precision; the checkpoint with the optimizer's state goes.
"""

import io
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tupe.checkpoints.gate import read_checkpoint
from tupe.data.splits import Split
from tupe.evaluate.loading import load_model
from tupe.run import record
from tupe.run.folder import lock, unlock, write_atomically
from tupe.sweep import runner

from . import collect
from .plan import Trial, final_losses

Evaluation = Callable[[Any, Any, Path], dict]  # (model, task, data) -> the content of evaluation.json


def save_half(checkpoint: Path, output: Path) -> None:
    """Write a checkpoint's weights in half precision, without the optimizer's state."""
    state = read_checkpoint(checkpoint)
    half = {name: value.half() if value.is_floating_point() else value for name, value in state["model"].items()}
    content = io.BytesIO()
    torch.save({**state, "model": half, "last_optimizer_state": None}, content)
    write_atomically(output, content.getvalue())


def evaluate_and_prune(data: Path, folder: Path, state: str, evaluate: Evaluation) -> None:
    """Keep the weights of a finished run in half precision and evaluate them; its checkpoints are deleted. Waits for
    another process that does so."""
    checkpoint, weights = folder / "checkpoint_last.pt", folder / "model.pt"
    if state != "finished":
        return
    while not lock(folder):
        time.sleep(1)
    if checkpoint.exists():
        save_half(checkpoint, weights)
        for path in sorted(folder.glob("checkpoint*.pt"), key=checkpoint.__eq__):  # that one last: it brings us here
            path.unlink()
    if not (folder / "evaluation.json").exists():
        content = evaluate(*load_model(weights, data), data)
        write_atomically(folder / "evaluation.json", json.dumps(content, indent=1, allow_nan=False) + "\n")
    unlock(folder)


def check_data(data: Path, output: Path, needed: int) -> None:
    """Note in a folder of runs what data they are trained on: OUT/data.json.

    Raises ValueError if its runs were trained on other data, or if the evaluation needs more held-out text.
    """
    ours, path = collect.fingerprint(data), output / "data.json"
    if path.exists():
        if (theirs := json.loads(path.read_text())["fingerprint"]) != ours:
            raise ValueError(f"{output} has runs on other data ({theirs}) than {data} ({ours}); name another folder")
        return
    tokens = int(Split(data / "valid").sizes.sum())
    if tokens < needed:
        raise ValueError(f"{data}/valid holds {tokens:,} tokens, fewer than the {needed:,} of the evaluation")
    output.mkdir(parents=True, exist_ok=True)
    content = {"data": str(data), "fingerprint": ours}
    write_atomically(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def train(
    data: Path, output: Path, planned: list[Trial], jobs: int | None, further: Sequence[str],
    job: Callable[[Trial, Path, Path, Sequence[str]], runner.Job], evaluate: Evaluation, needed: int,
) -> None:  # fmt: skip
    """Run what is left of the planned trainings of one stage; evaluate each as it ends. That a run diverged is a
    result; one that failed otherwise is tried again. evaluate, needed: how, and held-out tokens it takes. Raises
    ValueError for the reasons of `check_data`."""
    plan = {job(trial, data, output, further): trial for trial in planned}
    if not plan:
        return
    check_data(data, output, needed)
    slots = runner.slots(jobs)
    if further:
        runner.check(next(iter(plan)), slots[0])
    results = final_losses(output)
    for job, trial in plan.items():
        if trial not in results:
            clear_failure(job.folder)
    states = runner.run(
        list(plan), slots, title=planned[0].stage,
        on_done=lambda job, state: evaluate_and_prune(data, job.folder, state, evaluate),
    )  # fmt: skip
    results = final_losses(output)
    states = {job: "finished" if plan[job] in results else state for job, state in states.items()}
    runner.exit_if_unfinished(states, planned[0].stage)


def clear_failure(folder: Path) -> None:
    """Make a failed run an open one, which the next start resumes."""
    if record.state_of(folder) == "failed":
        run = record.read(folder)
        run.finished_at, run.state, run.failure = None, "stopped", None
        run.save(folder)


def train_stage(planned: Callable[[], list[Trial]], train: Callable[[list[Trial]], None]) -> None:
    """Train what is planned, until nothing new is: a best rate at the edge of those that have run asks for another."""
    known = set()
    while new := [trial for trial in planned() if trial not in known]:
        train(new)
        known.update(new)
