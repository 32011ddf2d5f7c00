"""Stands in for the command `tupe` where processes are tested: `stand_in.py COMMAND --output=FOLDER ...` keeps a record
as a run does, without training. FOLDER/behave.py, if there is one, is run in the middle of it; a file FOLDER/busy makes
it end as a process does that finds its folder locked. Its checkpoints are copies of DATA/checkpoint.pt, if there
is one."""

import os
import shutil
import sys
import time
from pathlib import Path

from tupe.run import record
from tupe.run.folder import lock, write_atomically  # noqa: F401  (the latter for what tests have it run)

words = dict(word.removeprefix("--").partition("=")[::2] for word in sys.argv[2:])
folder = Path(words["output"])
if "dry-run" in words:
    sys.exit("no such option --arhc" if "arhc" in words else 0)
if (folder / "busy").exists() or not lock(folder):
    sys.exit(record.BUSY)
if record.read(folder) and record.read(folder).state == "finished":  # another process was quicker
    sys.exit()
with (folder / "starts").open("a") as starts:
    print(os.getpid(), file=starts)
metrics = ["accuracy"] if sys.argv[1] == "finetune" else []
run = record.Record(task=words.get("task", "masked_lm"), seed=int(words.get("seed", 1)), metrics=metrics)
run.splits, run.started_at = ["valid"], record.now()
run.architecture, run.pretrained, run.pretrained_updates = "bert_a", words.get("checkpoint"), 7
behave = folder / "behave.py"
if "seconds" in words:
    time.sleep(float(words["seconds"]))
if behave.exists():
    exec(behave.read_text())
run.save(folder)
if "no-save" not in words:
    model = Path(words.get("data", ""), "checkpoint.pt")
    for name in ("best", "last"):
        path = folder / f"checkpoint_{name}.pt"
        shutil.copyfile(model, path) if model.exists() else path.write_text(folder.name)
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text(folder.name)
run.scores = [{"epoch": 1, "num_updates": 9, "split": "valid", "accuracy": 50.0 + run.seed, "loss": 5.0, "best": True}]
run.end()
run.save(folder)
