"""Run folders as training leaves them, without training: every number follows from a formula."""

import json

import numpy as np

from lab.plan import Trial
from tupe.run import record

BITS = 1 / np.log(2)


def write_run(output, trial: Trial, loss: float, exit: int = 1000, state="finished", seconds=7, plateau=8):
    """A run on a plateau (bits) until `exit`, from where it falls linearly to `loss` at the end."""
    folder = trial.folder(output)
    folder.mkdir(parents=True)
    every = [*range(50, trial.updates + 1, 50)]
    curve = np.interp(every, [0, exit, trial.updates], [plateau, plateau, loss])
    lines = [
        "2026-01-01 00:00:00 | INFO | train_inner | "
        + json.dumps({"epoch": 1, "loss": f"{bits:.3f}", "num_updates": str(n), "train_wall": str(seconds)})
        for n, bits in zip(every, curve, strict=True)
    ]
    (folder / "train.log").write_text("\n".join(["$ tupe pretrain", *lines]))
    scores = [
        {"epoch": 1, "num_updates": n, "split": "valid", "loss": float(bits), "best": True}
        for n, bits in zip(every, curve, strict=True)
        if n % 500 == 0 or n == trial.updates
    ]
    run = record.Record("masked_lm", trial.model, "", trial.seed, trial.lr, {"max_update": trial.updates}, ["valid"])
    run.scores, run.state, run.device, run.commit = scores, state, "CPU", "abc"
    run.failure = {"reason": "diverged", "status": 1} if state == "failed" else None
    run.save(folder)
    if state != "finished":
        return
    order = {"sentences": 100, "accuracy": 0.6 + 0.01 * trial.seed, "accuracy_error": 0.03, "margin": 1.5,
             "margin_error": 0.1}  # fmt: skip
    layers = 4 if trial.size == "mini" else 2
    ratio = [[1 + 0.1 * layer + 0.05 * head for head in range(layers)] for layer in range(layers)]
    content = {
        "order": order,
        "loss": {
            "tokens": 60000, "mean": loss / BITS, "error": 0.01,
            "by_position": {"0": [2.0, 100], "1": [2.0, 900], "2-3": [1.9, 1000]},
            "blocks": {"nats": " ".join([f"{20 * loss / BITS:.3f}"] * 5), "tokens": " ".join(["20"] * 5)},
        },
        "cls": {"first": 8, "ratio": ratio},
    }  # fmt: skip
    (folder / "evaluation.json").write_text(json.dumps(content))
