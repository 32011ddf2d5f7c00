"""From the settings of a training by the second engine to its end, in this process; torchrun has started the others, if
there are several."""

import logging
import math
import os
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path

import yaml

from ..checkpoints.trained import check_dictionary, read_model
from ..common.active import device, refuse
from ..common.options import split_files
from ..common.recipes import ARCH, Settings
from ..config import APART, FINETUNE, PLACES, PRETRAIN
from ..data.batches import Batches
from ..data.blocks import Blocks, fingerprint_of
from ..data.glue import TASKS, glue_name
from ..data.splits import Split, files_of, folders_of, prefixes_of, read_symbols, validated
from ..positions import load_scheme_file
from ..run.folder import fingerprint, remove_partial
from ..run.progress import SECONDS_WITHOUT_PROGRESS, Progress
from ..run.record import Record
from ..run.stop import stoppable
from .saved import TrainRun, newest_whole, publish
from .settle import Settled, contradictions, settle

logger = logging.getLogger("tupe.train")

DEFAULTS = {"engine": "fairseq", **{place: known.default for place, known in PLACES.items()}}


def prepare(
    settings: Settings, data: Path, processes: int, gpus: int, dry_run: bool = False,
    micro_batch_size: int | None = None,
) -> tuple[str, Callable[[bool], None]]:  # fmt: skip
    """As `tupe.plugin.launch.prepare`, for this engine: what is shown are the settings, as YAML."""
    for file in split_files(settings["position_file"]):
        load_scheme_file(file)
    settled = settle(settings, processes, micro_batch_size, gpus)
    if settled.ddp_backend == "fully_sharded" and processes == 1:
        raise ValueError("--ddp-backend fully_sharded needs several processes: --gpus or --nodes")
    shown = yaml.safe_dump({**settled.values, ARCH: settled.architecture}, sort_keys=True).rstrip()
    return shown, partial(train, settled, str(data), processes, gpus)


def new_record(settled: Settled, data: str, processes: int) -> Record:
    """The record of a run before it begins. data: as `folders_of` reads it. Raises ValueError for a model to start
    from that has another dictionary."""
    folder, is_pretraining = folders_of(data)[0], settled.command == PRETRAIN
    symbols, splits = read_symbols(folder), validated(settled.valid_subset, settled.train_subset)
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
    if is_pretraining:
        if settled.disable_validation:  # what the folder holds is the same run
            splits = [name for name in splits if (folder / f"{name}.idx").is_file()]
        prefixes = [prefix for name in (settled.train_subset, *splits) for prefix in prefixes_of(data, name)]
        task, metrics, layout, files = "masked_lm", [], None, files_of(prefixes)
    else:
        task, names = glue_name(settled.glue_task, folder), (settled.train_subset, *splits)
        metrics, layout = list(TASKS[task].metrics), TASKS[task].plain()
        files = [path for name in names for path in sorted((folder / task).glob(f"*/{name}.*"))]
    pretrained = {}
    if settled.finetune_from_model:
        trained = read_model(settled.finetune_from_model, mmap=True)
        check_dictionary(trained.weights, folder / "dict.txt")
        pretrained = trained.origin()
    return Record(
        task=task, architecture=settled.architecture, variant=settled.variant, seed=settled.seed, lr=settled.lr[0],
        budget={name: getattr(settled, name) for name in ("max_epoch", "max_update") if getattr(settled, name) > 0},
        splits=splits, data=fingerprint(files), data_folder=":".join(map(os.path.abspath, folders_of(data))),
        dictionary=fingerprint_of(symbols), config={"engine": "torch", **config}, metrics=metrics, layout=layout,
        **pretrained,
    )  # fmt: skip


def train(settled: Settled, data: str, processes: int, gpus: int, yes: bool = False) -> None:
    """Train in this process, as one of several if torchrun started it. yes: however long it takes on a CPU.

    Raises ValueError for a mistake of the user, BlockingIOError if another process trains in the folder, OSError if the
    disk is full or read-only, and SystemExit with `record.STOPPED` if a signal stopped it. Any other error is a
    `Refusal`, see `active.refuse`.
    """
    from .finetune import Finetuning  # only here: these import transformers, which takes seconds
    from .loop import join
    from .pretrain import Pretraining

    folder, symbols = Path(settled.save_dir).resolve(), read_symbols(folders_of(data)[0])
    defaults = DEFAULTS | settled.defaults
    try:
        with stoppable():
            updates = length_of(settled, data, symbols, processes)
            place = join(gpus, settled.cpu, processes)
            about = new_record(settled, data, processes)
            run = TrainRun(about, folder, place.rank == 0)
            run.read(defaults)  # the folder of another run stays as it is
            run.lock()
            run.read(defaults)  # another process may have begun or ended since
            if run.writes:
                remove_partial(folder)
                about.begin(device(place.device.type == "cpu"))
            place.wait()  # the first has tidied up the folder
            start, checkpoint = newest_whole(folder)
            if not place.agrees(start):
                raise ValueError(f"{folder} has other checkpoints on another node; give one that all nodes share")
            finished = run.earlier and run.earlier.state == "finished"
            if finished and (start >= updates or run.earlier.budget == about.budget):  # even if only the model is left
                logger.warning(f"{folder} holds the finished run already: nothing to train")
                run.unlock()
                return
            if finished and not start:
                raise ValueError(
                    f"{folder} holds a finished run, but no checkpoint-N to go on from; choose another folder"
                )
            if start > updates:
                raise ValueError(f"{folder} has {start} updates; valid: at least {start}, or another folder")
            if run.earlier:
                about.go_on(run.earlier, start)
            timeout = SECONDS_WITHOUT_PROGRESS if processes > max(gpus, 1) else 0
            run.progress = Progress(updates, place.device.type == "cpu", run.writes, yes, timeout, run.note_stall)
            about.versions |= {name: metadata.version(name) for name in ("transformers", "safetensors")}
            with run.recorded():
                if checkpoint:
                    check_checkpoint(checkpoint, settled, folders_of(data)[0] / "dict.txt")
                if start < updates:  # else it was killed after its last checkpoint
                    kind = Finetuning if settled.command == FINETUNE else Pretraining
                    kind(settled, data, symbols, run, place, updates, start).train(checkpoint)
                if run.writes and settled.command == PRETRAIN:
                    publish(folder / f"checkpoint-{updates}", folder)  # a later one may be damaged
    except Exception as error:
        refuse(error)


def check_checkpoint(checkpoint: Path, settled: Settled, dictionary: Path) -> None:
    """Raise ValueError for a checkpoint to go on from that is of another model, or has another dictionary: users copy
    them from one run to begin another."""
    trained = read_model(checkpoint, mmap=True)
    if wrong := contradictions(trained.config, settled.model):
        raise ValueError(f"{checkpoint} is of another model: {wrong}")
    check_dictionary(trained.weights, dictionary)


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
