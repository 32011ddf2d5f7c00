"""From a command of `tupe` to training by the second engine, in this process or under torchrun.

    python -m tupe.train.launch --command "tupe pretrain ..." --plan JSON

is what torchrun starts for every GPU.
"""

import json
import logging
import math
import os
import shlex
import sys
import warnings
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import click
import yaml

from ..checkpoints.trained import check_dictionary, read_model
from ..common import console
from ..common.active import refuse
from ..common.options import Command, split_files
from ..common.recipes import ARCH, Settings
from ..config import APART, FINETUNE, PLACES, PRETRAIN
from ..data.batches import Batches
from ..data.blocks import Blocks, fingerprint_of
from ..data.glue import TASKS, check_glue, glue_name
from ..data.splits import Split, files_of, folders_of, prefixes_of, read_symbols
from ..model_config import ModelConfig
from ..positions import load_scheme_file
from ..run.folder import fingerprint
from ..run.progress import Progress
from ..run.record import Record
from ..run.stop import stoppable
from ..run.torchrun import check_environment, gpus_to_use, run_torchrun, words_of_nodes
from .saved import TrainRun, newest, newest_whole, publish
from .settle import Settled, settle
from .trackers import check_trackers

logger = logging.getLogger("tupe.train")

SECONDS_WITHOUT_PROGRESS = 600  # after which processes of several nodes end: one of the nodes may be gone (as for NCCL)
DEFAULTS = {"engine": "fairseq", **{place: known.default for place, known in PLACES.items()}}


def launch(
    settings: Settings, data: Path, *, gpus: int | None = None, nodes: int = 1, node_rank: int = 0,
    master_addr: str = "localhost", master_port: int = 29500, dry_run: bool = False,
    micro_batch_size: int | None = None, yes: bool = False,
) -> None:  # fmt: skip
    """As `tupe.plugin.launch.launch`, through this engine."""
    gpus = gpus_to_use(gpus, nodes, node_rank, dry_run)
    processes = max(gpus, 1) * nodes
    load_encodings(settings["position_file"])
    settled = settle(settings, processes, micro_batch_size, gpus)
    if dry_run:
        print(yaml.safe_dump({**settled.values, ARCH: settled.architecture}, sort_keys=True), end="")
        return
    if settled.ddp_backend == "fully_sharded" and processes == 1:
        raise ValueError("--ddp-backend fully_sharded needs several processes: --gpus or --nodes")
    check_trackers(settled)
    about = new_record(settled, data, processes)
    # a folder of another run is refused before anything is started
    TrainRun(about, Path(settled.save_dir).resolve(), False).read(DEFAULTS)
    plan = {"data": str(data), "processes": processes, "gpus": gpus, "yes": yes}
    if processes == 1:
        train(settled, about, **plan)
        return
    plan |= {"settled": asdict(settled), "about": asdict(about)}
    torchrun = [*words_of_nodes(gpus, nodes, node_rank, master_addr, master_port), "-m", __name__]
    run_torchrun([*torchrun, "--command", shlex.join(sys.argv), "--plan", json.dumps(plan, allow_nan=False)])


def load_encodings(files: str) -> None:
    """Register the encodings of --position-file."""
    for file in split_files(files):
        load_scheme_file(file)


# ----------------------------------------------------------------------------------------------------------- the record


def new_record(settled: Settled, data: Path | str, processes: int) -> Record:
    """The record of a run before it begins. data: as `folders_of` reads it. Raises ValueError for a split that is not
    there, or not whole."""
    symbols, is_pretraining = read_symbols(folders_of(data)[0]), settled.command == PRETRAIN
    same = {"optimizer._name", "criterion._name", "optimization.lr"}  # the first two: by any name, the same numbers
    same |= set() if is_pretraining else {"lr_scheduler._name"}
    if not (is_pretraining and settled.max_valid_steps):
        same.add("dataset.batch_size_valid")
    changed = settled.changed.items()
    config = {place: value for place, value in changed if PLACES[place].record != APART and place not in same}
    config["dataset.batch_size"] = settled.batch_size
    config["optimization.update_freq"] = [steps * processes for steps in settled.update_freq]
    if own := split_files(settled.position_file):
        config["model.position_file"] = fingerprint(own)
    of_data = of_text(settled, data, symbols) if is_pretraining else of_glue(settled, Path(data))
    return Record(
        architecture=settled.architecture, variant=settled.variant, seed=settled.seed, lr=settled.lr[0],
        data_folder=":".join(os.path.abspath(folder) for folder in folders_of(data)),
        dictionary=fingerprint_of(symbols), config={"engine": "torch", **config}, **of_data,
    )  # fmt: skip


def of_text(settled: Settled, data: Path | str, symbols: list[str]) -> dict[str, Any]:
    """What the record of a pre-training says of its data."""
    splits, first = settled.valid_subset.split(","), folders_of(data)[0]
    if settled.disable_validation:  # what the folder holds is the same run
        splits = [name for name in splits if (first / f"{name}.idx").is_file()]
    names = [settled.train_subset, *splits]
    prefixes = [prefix for name in names for prefix in prefixes_of(data, name)]
    for prefix in prefixes:
        Split(prefix, len(symbols))  # raises ValueError for one that is not whole
    start = start_of(settled, first) if settled.finetune_from_model else {}
    return {
        "task": "masked_lm", "splits": splits,
        "budget": {name: getattr(settled, name) for name in ("max_epoch", "max_update") if getattr(settled, name) > 0},
        "data": fingerprint(files_of(prefixes)), **start,
    }  # fmt: skip


def of_glue(settled: Settled, data: Path) -> dict[str, Any]:
    """What the record of a fine-tuning says of its data, and of its model. Raises ValueError for what is not there."""
    name, splits = glue_name(settled.glue_task, data), settled.valid_subset.split(",")
    used = (settled.train_subset, *splits)
    for split in used:
        check_glue(data / name, split, labelled=True)
    files = [path for split in used for path in sorted(Path(data, name).glob(f"*/{split}.*"))]
    return {
        "task": name, "budget": {"max_epoch": settled.max_epoch}, "splits": splits,
        "metrics": list(TASKS[name].metrics), "data": fingerprint(files), "layout": TASKS[name].plain(),
        **start_of(settled, data),
    }  # fmt: skip


def start_of(settled: Settled, data: Path) -> dict[str, Any]:
    """What the record says of the model to start from. Raises ValueError if the data has another dictionary."""
    trained = read_model(settled.finetune_from_model, mmap=True)
    check_dictionary(trained.weights, data / "dict.txt")
    return trained.origin()


# ------------------------------------------------------------------------------------------------------------- training


def train(settled: Settled, about: Record, data: str, processes: int, gpus: int, yes: bool = False) -> None:
    """Train in this process, as one of several if torchrun started it. yes: however long it takes on a CPU.

    Raises ValueError for a mistake of the user, BlockingIOError if another process trains in the folder, OSError if the
    disk is full or read-only, and SystemExit with `record.STOPPED` if a signal stopped it. Any other error is a
    `Refusal`, see `active.refuse`.
    """
    from .finetune import Finetuning  # only here: these import transformers, which takes seconds
    from .loop import join
    from .pretrain import Pretraining

    check_environment(processes)
    folder, symbols = Path(settled.save_dir).resolve(), read_symbols(folders_of(data)[0])
    try:
        with stoppable():
            updates = length_of(settled, data, symbols, processes)
            place = join(gpus, settled.cpu, processes)
            on_cpu = place.device.type == "cpu"
            run = TrainRun(about, folder, place.rank == 0)
            run.begin(DEFAULTS, on_cpu)
            place.wait()  # the first has tidied up the folder
            start, _ = newest(folder)
            finished = run.earlier and run.earlier.state == "finished"
            if finished and (start >= updates or run.earlier.budget == about.budget):  # even if only the model is left
                logger.warning(f"{folder} holds the finished run already: nothing to train")
                run.unlock()
                return
            try:
                if finished and not start:
                    raise ValueError(
                        f"{folder} holds a finished run, but no checkpoint-N to go on from; choose another folder"
                    )
                if start > updates:
                    raise ValueError(f"{folder} has {start} updates; valid: at least {start}, or another folder")
                start, checkpoint = newest_whole(folder)
            except ValueError:
                run.unlock()
                raise
            run.go_on(start)
            timeout = SECONDS_WITHOUT_PROGRESS if processes > max(gpus, 1) else 0
            run.progress = Progress(updates, on_cpu, run.writes, yes, timeout, note=run.note_stall)
            about.versions |= {name: metadata.version(name) for name in ("transformers", "safetensors")}
            with run.recorded():
                if start < updates:  # else it was killed after its last checkpoint
                    kind = Finetuning if settled.command == FINETUNE else Pretraining
                    kind(settled, data, symbols, run, place, updates, start).train(checkpoint)
                if run.writes and settled.command == PRETRAIN:
                    publish(newest(folder)[1], folder)
    except Exception as error:
        refuse(error)
        raise


def length_of(settled: Settled, data: str, symbols: list[str], processes: int) -> int | float:
    """The number of updates of a run."""
    updates: int | float = settled.max_update or math.inf
    if settled.max_epoch:
        if settled.command == PRETRAIN:
            count = len(Blocks(prefixes_of(data, settled.train_subset), settled.tokens_per_sample, symbols))
        else:
            count = len(Split(Path(data, glue_name(settled.glue_task, data), "input0", settled.train_subset)))
        steps = settled.update_freq[0]
        batches = Batches(count, settled.seed, settled.batch_size, 0, steps, processes=processes)
        updates = min(updates, settled.max_epoch * batches.updates_per_epoch)
    return updates


@click.command(cls=Command, context_settings={"help_option_names": []})
@click.option("--command", required=True)
@click.option("--plan", required=True)
def main(command, plan):
    warnings.simplefilter("ignore", FutureWarning)  # of libraries about each other
    sys.argv = shlex.split(command)  # the record of the run has the command that was typed, not torchrun's
    plan = json.loads(plan)
    load_encodings(plan["settled"]["position_file"])
    settled = Settled(**plan.pop("settled"))
    settled.model = ModelConfig(**settled.model)
    with console.logged():
        train(settled, Record(**plan.pop("about")), **plan)


if __name__ == "__main__":
    main()
