"""From a command of `tupe` to training by the second engine, in this process or under torchrun.

    python -m tupe.train.launch --command "tupe pretrain ..." --plan JSON

is what torchrun starts for every GPU.
"""

import json
import logging
import math
import shlex
import sys
import warnings
from importlib import metadata
from pathlib import Path

import click
import yaml

from ..checkpoints.trained import check_dictionary, read_model
from ..common import console, pace, record
from ..common.active import refuse
from ..common.options import Command, split_files
from ..common.prepared import check_name
from ..common.recipes import Settings
from ..common.record import Record
from ..common.stop import stoppable
from ..common.torchrun import check_environment, gpus_to_use, run_torchrun, words_of_nodes
from ..config import APART, FINETUNE, PLACES, PRETRAIN
from ..data.batches import Batches
from ..data.blocks import Blocks, fingerprint_of
from ..data.glue import TASKS, check_glue, glue_name
from ..data.splits import Split, check_split, files_of, folders_of, prefixes_of, read_symbols
from ..positions import load_scheme_file
from .run import Run, differences, newest, publish
from .settle import Settled, settle

logger = logging.getLogger("tupe.train")

DEFAULTS = {"engine": "fairseq", **{place: known.default for place, known in PLACES.items()}}


def launch(
    settings: Settings, data: Path, *, gpus: int | None = None, nodes: int = 1, node_rank: int = 0,
    master_addr: str = "localhost", master_port: int = 29500, dry_run: bool = False,
    micro_batch_size: int | None = None, yes: bool = False,
) -> None:  # fmt: skip
    """As `tupe.plugin.launch.launch`, through this engine."""
    gpus = gpus_to_use(gpus, nodes, node_rank, dry_run)
    processes = max(gpus, 1) * nodes
    plan = {"settings": vars(settings), "data": str(data), "processes": processes,
            "micro_batch_size": micro_batch_size, "gpus": gpus}  # fmt: skip
    for file in split_files(settings["position_file"]):
        load_scheme_file(file)
    settled = settle(settings, processes, micro_batch_size, gpus)
    if dry_run:
        print(yaml.safe_dump({**settled.values, "model._name": settled.architecture}, sort_keys=True), end="")
        return
    for path in folders_of(data):
        check_name(path)
    about = new_record(settled, data, read_symbols(folders_of(data)[0]), processes)
    folder = Path(settled["save_dir"]).resolve()
    differences(about, folder, DEFAULTS)  # a folder of another run is refused before anything is started
    plan["yes"] = yes
    if processes == 1:
        train(**plan)
        return
    torchrun = [*words_of_nodes(gpus, nodes, node_rank, master_addr, master_port), "-m", __name__]
    run_torchrun([*torchrun, "--command", shlex.join(sys.argv), "--plan", json.dumps(plan, allow_nan=False)])


def new_record(settled: Settled, data: str, symbols: list[str], processes: int) -> Record:
    """The record of a run before it begins. data: as `folders_of` reads it. Raises ValueError for a split that is not
    there."""
    same = {"optimizer._name", "criterion._name", "optimization.lr"}  # the first two: by any name, the same numbers
    same |= {"lr_scheduler._name"} if settled.command == FINETUNE else set()
    config = {place: value for place, value in settled.changed().items() if PLACES[place].record != APART}
    config = {place: value for place, value in config.items() if place not in same}
    config["dataset.batch_size"] = settled["batch_size"]
    config["optimization.update_freq"] = [steps * processes for steps in settled["update_freq"]]
    if settled.command == FINETUNE or not settled["max_valid_steps"]:
        config.pop("dataset.batch_size_valid", None)  # then it makes no difference
    if own := split_files(settled["position_file"]):
        config["model.position_file"] = record.fingerprint(own)
    about = {
        "architecture": settled.architecture, "variant": settled.variant, "seed": settled["seed"],
        "lr": settled["lr"][0], "dictionary": fingerprint_of(symbols), "config": {"engine": "transformers", **config},
    }  # fmt: skip
    if settled.command == FINETUNE:
        return Record(**about, **of_glue(settled, Path(data)))
    splits, (first, *_) = settled["valid_subset"].split(","), folders_of(data)
    if settled["disable_validation"]:  # what the folder holds is the same run
        splits = [name for name in splits if (first / f"{name}.idx").is_file()]
    names = [settled["train_subset"], *splits]
    prefixes = [prefix for name in names for prefix in prefixes_of(data, name)]
    files = files_of(prefixes)
    if missing := [path for path in files if not path.is_file()]:
        known = ", ".join(sorted(path.stem for path in missing[0].parent.glob("*.idx"))) or "none is prepared there"
        raise ValueError(f"{missing[0].parent} has no split {missing[0].stem!r}; valid: {known}")
    for prefix in prefixes:
        check_split(prefix, len(symbols))
    budget = {name: settled[name] for name in ("max_epoch", "max_update") if settled[name] > 0}
    about |= {"data": record.fingerprint(files), "left_out": dict.fromkeys(names, 0.0)}
    if settled["finetune_from_model"]:
        about |= start_of(settled, first)
    return Record(task="masked_lm", budget=budget, splits=splits, **about)


def of_glue(settled: Settled, data: Path) -> dict:
    """What the record of a fine-tuning says beside that. Raises ValueError for data, or a model, that is not there."""
    name, splits = glue_name(settled["glue_task"], data), settled["valid_subset"].split(",")
    used = (settled["train_subset"], *splits)
    for split in used:
        check_glue(data / name, split, labelled=True)
    files = [path for split in used for path in sorted(Path(data, name).glob(f"*/{split}.*"))]
    return {
        "task": name, "budget": {"max_epoch": settled["max_epoch"]}, "splits": splits,
        "metrics": list(TASKS[name].metrics), "data": record.fingerprint(files), "layout": TASKS[name].plain(),
        **start_of(settled, data),
    }  # fmt: skip


def start_of(settled: Settled, data: Path) -> dict:
    """What the record says of the model to start from. Raises ValueError if the data has another dictionary."""
    trained = read_model(settled["finetune_from_model"], mmap=True)
    check_dictionary(trained.weights, data / "dict.txt")
    return trained.origin()


def train(
    settings: dict, data: str, processes: int, micro_batch_size: int | None, gpus: int, yes: bool = False
) -> None:  # fmt: skip
    """Train in this process, as one of several if torchrun started it. yes: however long it takes on a CPU.

    Raises ValueError for a mistake of the user, BlockingIOError if another process trains in the folder, OSError if the
    disk is full or read-only, and SystemExit with `record.STOPPED` if a signal stopped it. Any other error is a
    `Refusal`, see `active.refuse`.
    """
    from .finetune import Finetuning  # only here: these import transformers, which takes seconds
    from .loop import join
    from .pretrain import Pretraining
    from .trackers import check_trackers

    check_environment(processes)
    settings = Settings(**settings)
    for file in split_files(settings["position_file"]):
        load_scheme_file(file)
    settled = settle(settings, processes, micro_batch_size, gpus)
    folder, symbols = Path(settled["save_dir"]).resolve(), read_symbols(folders_of(data)[0])
    try:
        with stoppable(), pace.told(yes):
            updates = _length(settled, data, symbols, processes)
            check_trackers(settled)
            if settled["ddp_backend"] == "fully_sharded" and processes == 1:
                raise ValueError("--ddp-backend fully_sharded needs several processes: --gpus or --nodes")
            place = join(gpus, settled["cpu"], processes)
            about, on_cpu = new_record(settled, data, symbols, processes), place.device.type == "cpu"
            run = Run(about, folder, place.rank == 0, DEFAULTS, on_cpu)
            place.wait()  # the first has tidied up the folder
            start, checkpoint = newest(folder)
            finished = run.earlier and run.earlier.state == "finished"
            if finished and (start >= updates or run.earlier.budget == about.budget):  # even if only the model is left
                logger.warning(f"{folder} holds the finished run already: nothing to train")
                record.unlock(folder)
                return
            if finished and not checkpoint:
                record.unlock(folder)
                raise ValueError(
                    f"{folder} holds a finished run, but no checkpoint-N to continue it from; choose another folder"
                )
            if start > updates:
                record.unlock(folder)
                raise ValueError(f"{folder} has {start} updates already; valid: at least {start}, or another folder")
            about.versions |= {name: metadata.version(name) for name in ("transformers", "safetensors")}
            with run.recorded():
                if start < updates:  # else it was killed after its last checkpoint
                    kind = Finetuning if settled.command == FINETUNE else Pretraining
                    if run.writes:
                        pace.expect(updates, on_cpu)
                    kind(settled, data, symbols, run, place, updates, start).train(checkpoint)
                if run.writes and settled.command == PRETRAIN:
                    publish(newest(folder)[1], folder)
    except Exception as error:
        refuse(error)
        raise


def _length(settled, data, symbols, processes):
    """The number of updates of a run."""
    epochs, is_pretraining = settled["max_epoch"], settled.command == PRETRAIN
    updates = is_pretraining and settled["max_update"] or math.inf
    if epochs:
        if is_pretraining:
            blocks = Blocks(prefixes_of(data, settled["train_subset"]), settled["tokens_per_sample"], symbols)
            count = len(blocks)
        else:
            count = len(Split(Path(data, glue_name(settled["glue_task"], data), "input0", settled["train_subset"])))
        steps = settled["update_freq"][0]
        batches = Batches(count, settled["seed"], settled["batch_size"], 0, steps, processes=processes)
        updates = min(updates, epochs * batches.updates_per_epoch)
    return updates


@click.command(cls=Command, context_settings={"help_option_names": []})
@click.option("--command", required=True)
@click.option("--plan", required=True)
def main(command, plan):
    warnings.simplefilter("ignore", FutureWarning)  # of libraries about each other
    sys.argv = shlex.split(command)  # the record of the run has the command that was typed, not torchrun's
    with console.logged():
        train(**json.loads(plan))


if __name__ == "__main__":
    main()
