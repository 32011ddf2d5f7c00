"""The life of a run inside fairseq, whichever command started it. When training builds the criterion, the folder is
locked and the record begins; every validation adds scores; at the end the record gets the outcome.
"""

import logging
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Optional

import torch
from fairseq import models
from fairseq.criterions import FairseqCriterion
from fairseq.data.iterators import EpochBatchIterator
from fairseq.dataclass import FairseqDataclass
from fairseq.dataclass.configs import FairseqConfig
from fairseq.distributed import utils as distributed_utils
from fairseq.logging.meters import AverageMeter, MetersDict
from fairseq.models import BaseFairseqModel
from hydra._internal.utils import get_args
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import II, DictConfig

from .. import config as schema
from ..checkpoints.export import publish
from ..checkpoints.gate import read_checkpoint
from ..common.active import Run, device
from ..common.safe_load import num_updates
from ..data.blocks import fingerprint_of
from ..data.splits import folders_of, validated
from ..run.folder import fingerprint, remove_partial
from ..run.progress import Progress
from ..run.record import Record
from .model import load_scheme_files
from .ordered import Items, OrderedIterator
from .pretrained import adopt_structure, contradictions, variant
from .saving import LAST, Refused, resume_from_newest
from .schedule import SCHEDULE, count_updates
from .settings import settings

logger = logging.getLogger("tupe.launch")
SIZE, STEPS = "dataset.batch_size", "optimization.update_freq"


@dataclass
class RecordedTaskConfig(FairseqDataclass):
    # Taken from another section of the configuration; not an option of its own.
    finetune_from_model: Optional[str] = II("checkpoint.finetune_from_model")  # noqa: UP045  (fairseq reads this spelling)


class RecordedTask:
    """Mixin for fairseq tasks whose training is recorded, and whose data sets are `Items`; it goes before the fairseq
    class.

    The task's configuration has `data` and the fields of `RecordedTaskConfig`. `metrics` names the scores that are the
    purpose of a task (fine-tuning), of which the first is to be maximised; the purpose of a task without metrics is its
    checkpoint (pre-training), and its loss is to be minimised. A task has `record_name(config)`, what the record calls
    it, and `data_files(split)`, the files that a split is read from, in a fixed order.
    """

    metrics = ()
    run = None  # while training
    _pretrained = {}  # fields of the record about the checkpoint that training starts from
    _electra = ""  # see `Trained`
    _training = False
    layout = None  # of a task with labels of its own
    train_subset = "train"  # the split that is shuffled, and masked anew in each epoch

    def build_model(self, cfg: DictConfig, from_checkpoint: bool = False) -> BaseFairseqModel:
        self._training = not from_checkpoint  # from_checkpoint: fairseq loads the model for use, not for training
        if self._training:
            if not hasattr(cfg, "position_file"):
                task = self.cfg._name
                raise Refused(f"--arch: {task} trains models of this package, as tupe_r; --task masked_lm any other")
            load_scheme_files(cfg)
        if self._training and self.cfg.finetune_from_model:
            data = folders_of(self.cfg.data)[0]
            # Tasks that cut no text into blocks have no such option; they take the checkpoint's length.
            length = getattr(self.cfg, "tokens_per_sample", None)
            cfg, trained = adopt_structure(cfg, self.cfg.finetune_from_model, data, length)
            self._pretrained, self._electra = trained.origin(), trained.electra
        return models.build_model(cfg, self, from_checkpoint)

    def build_criterion(self, cfg: DictConfig, **kwargs) -> FairseqCriterion:
        # Training builds its criterion before the schedule, with the whole configuration as its parent: so this is
        # the only moment to tell the schedule how long the run is.
        config = cfg._get_parent()
        if self._training and config is not None:
            self.train_subset = config.dataset.train_subset
            refuse_jobs_in_one_process()
            refuse_settings(config, bool(self.metrics))
            choose_precision(config)
            split_over_processes(config)
            updates = count_updates(self, config)
            if config.lr_scheduler._name == SCHEDULE and not config.lr_scheduler.total_num_update > 0:
                config.lr_scheduler.total_num_update = updates
            config.task.data = ":".join(os.path.abspath(folder) for folder in folders_of(config.task.data))
            self.run = begin(self._new_record(config), config, updates)
        return super().build_criterion(cfg, **kwargs)

    def _new_record(self, config):
        data, length = config.dataset, config.optimization
        splits = validated(data.valid_subset, data.train_subset)
        if data.disable_validation:  # what the folder holds is the same run
            splits = [split for split in splits if all(path.is_file() for path in self.data_files(split))]
        files = [path for split in (config.dataset.train_subset, *splits) for path in self.data_files(split)]
        return Record(
            task=self.record_name(config),
            architecture=(self.metrics and self._electra) or config.model._name,
            variant=variant(config.model),
            seed=config.common.seed,
            lr=float(config.optimization.lr[0]),
            budget={name: length[name] for name in ("max_epoch", "max_update") if length[name] > 0},
            splits=splits,
            data=fingerprint(files),
            data_folder=config.task.data,
            dictionary=fingerprint_of(self.source_dictionary.symbols),
            config={name: value for name, (value, default) in settings(config).items() if value != default},
            metrics=list(self.metrics),
            layout=self.layout,
            **self._pretrained,
        )

    def begin_valid_epoch(self, epoch: int, model: BaseFairseqModel) -> None:
        super().begin_valid_epoch(epoch, model)
        self._epoch, self._validated = epoch, 0

    def post_validate(self, model: BaseFairseqModel, stats: dict, agg: MetersDict) -> None:
        """Called by fairseq after the validation of each split."""
        if self.run is None:
            return
        split = self.run.record.splits[self._validated]
        self._validated += 1
        # fairseq rounds what it prints; the meters are exact. wpb and bsz are batch sizes.
        means = {name: float(meter.avg) for name, meter in agg.items() if isinstance(meter, AverageMeter)}
        scores = {name: value for name, value in means.items() if name not in ("wpb", "bsz")}
        scores.update({name: stats[name] for name in self.metrics})
        if infinite := [name for name, value in scores.items() if not math.isfinite(value)]:
            raise FloatingPointError(f"{infinite[0]} of {split!r} is {scores[infinite[0]]}")
        best = self.run.record.add_scores(self._epoch, stats["num_updates"], split, scores)
        if self.run.writes:
            self.keep_predictions(split, best)
            self.run.record.save(self.run.folder)

    def keep_predictions(self, split: str, best: bool) -> None:
        """Write the model's predictions for a split. best: this validation is the best so far."""

    # ---- the order of data ----

    def has_sharded_data(self, split: str) -> bool:
        """Several folders are one after the other, in every epoch; fairseq reads one of them in each."""
        return False

    def get_batch_iterator(
        self, dataset: Items, max_tokens: int | None = None, max_sentences: int | None = None,
        num_shards: int = 1, shard_id: int = 0, num_workers: int = 0, epoch: int = 1, data_buffer_size: int = 0,
        disable_iterator_cache: bool = False, skip_remainder_batch: bool = False, **options,
    ) -> EpochBatchIterator:  # fmt: skip
        """What else fairseq's own would take decides how batches are cut and shuffled."""
        size = dataset.batch_size(max_sentences, max_tokens)
        known = self.dataset_to_epoch_iter
        if dataset not in known or disable_iterator_cache:
            iterator = OrderedIterator(
                dataset, size, num_shards=num_shards, shard_id=shard_id, num_workers=num_workers, epoch=epoch,
                buffer_size=data_buffer_size, skip_remainder_batch=skip_remainder_batch, reuse_dataloader=True,
            )  # fmt: skip
            if disable_iterator_cache:
                return iterator
            known[dataset] = iterator
        return known[dataset]


class FairseqRun(Run):
    """A run that fairseq trains in this process. config: the whole configuration."""

    def __init__(self, record: Record, config: DictConfig):
        is_first = distributed_utils.get_global_rank() == 0
        super().__init__(record, Path(config.checkpoint.save_dir), is_first)
        self.config, self.options = config, config.checkpoint

    def go_on(self) -> None:
        """Take over what the run has done so far, if it goes on. Raises ValueError if it begins with a checkpoint of
        another model."""
        record, state = self.record, self.checkpoint()
        if state is None and (start := self.options.continue_once):
            saved = read_checkpoint(start, mmap=True, trained=self.config.model._name)["cfg"]["model"]
            if wrong := contradictions(saved, self.config.model):
                raise ValueError(f"{start} is of another model: {'; '.join(wrong)}")
        record.begin(device(self.config.common.cpu))
        if self.earlier:
            record.go_on(self.earlier, 0 if state is None else num_updates(state))

    def checkpoint(self) -> dict | None:
        """The folder's last checkpoint; None if there is none, or it is damaged, which `resume_from_newest` deals
        with."""
        try:
            return read_checkpoint(self.folder / LAST, mmap=True, trained=self.config.model._name)
        except ValueError:
            return None

    def saved(self) -> tuple[int, int]:
        """(epochs, updates) of the folder's last checkpoint; zeros without one."""
        state = self.checkpoint()
        return (state["extra_state"]["train_iterator"]["epoch"] - 1, num_updates(state)) if state else (0, 0)

    def is_saved(self) -> bool:
        """Whether the folder's last checkpoint is from the end of the run."""
        return reaches(self.record.budget, *self.saved())

    def has_ended(self) -> bool:
        """Whether what the folder holds has come to the end that it was begun with, though a kill may have come before
        its record said so."""
        return self.earlier is not None and (
            self.earlier.state == "finished" or reaches(self.earlier.budget, *self.saved())
        )

    def check_length(self) -> None:
        """Raise ValueError if the folder holds a run that goes on beyond the end of this one."""
        if self.earlier and not self.has_ended() and not self.options.reset_optimizer:
            for name, count in zip(("max_epoch", "max_update"), self.saved(), strict=True):
                if count > self.record.budget.get(name, float("inf")):
                    has, flag = f"{count} {name.partition('_')[2]}s", f"--{name.replace('_', '-')}"
                    raise ValueError(f"{self.folder} has {has}; {flag}: valid: at least {count}, or another folder")

    def is_scored(self) -> bool:
        """Whether every split has scores from the end of the run."""
        budget = self.record.budget
        scored = {e["split"] for e in self.record.scores if reaches(budget, e["epoch"], e["num_updates"])}
        return scored == set(self.record.splits)

    @property
    def ends_with_scores(self) -> bool:
        """Whether its result is the last scores, not the last checkpoint."""
        return bool(self.record.metrics or self.options.no_save)

    def is_finished(self) -> bool:
        """Whether nothing is left to train."""
        if self.ends_with_scores:
            earlier = self.earlier
            return earlier is not None and earlier.state == "finished" and earlier.budget == self.record.budget
        return not self.options.reset_optimizer and self.is_saved()

    def conclude(self) -> None:
        if self.is_scored() if self.ends_with_scores else self.is_saved():
            publish(self.folder, self.config.task.data)
            self.record.end()
        elif self.record.metrics and not self.config.optimization.stop_time_hours > 0:
            self.record.end("stopped before its last epoch was scored: see its log")

    def resumes(self) -> bool:
        return not self.options.no_save and bool(self.updates or self.earlier)

    def end(self, error: BaseException | None = None, status: int | None = None) -> None:
        if self.writes and self.options.no_save:
            (self.folder / "crash.pt").unlink(missing_ok=True)  # fairseq writes it when a run diverges
        super().end(true_reason(error), status)

    def watch(self, updates: int, yes: bool | None) -> None:
        """Begin to follow the progress. updates: of the run, 0 if that is not known; yes: whatever it takes on a CPU;
        None: not even the time is told."""
        config, section = self.config, self.config.distributed_training
        # fairseq would send itself a signal after that time, which a process that hangs does not handle.
        timeout, section.heartbeat_timeout = section.heartbeat_timeout, -1
        cpu, tells = config.common.cpu or not torch.cuda.is_available(), self.writes and yes is not None
        self.progress = Progress(updates, cpu, tells, bool(yes), timeout, self.note_stall)


def reaches(budget: dict, epochs: int, updates: int) -> bool:
    return epochs >= budget.get("max_epoch", float("inf")) or updates >= budget.get("max_update", float("inf"))


# ------------------------------------------------------------------------------------- the one run of this process

_run = None
_yes = None  # inside of `recorded`: whether the user said --yes


def active() -> FairseqRun | None:
    """The run that this process trains."""
    return None if _run is None or _run.progress.ended.is_set() else _run


def begin(record: Record, config: DictConfig, updates: int) -> FairseqRun | None:
    """Begin or resume a run, or return None for one that is finished: nothing will be trained then.

    config: the whole configuration; updates: of the run, 0 if that is not known. Raises BlockingIOError if another
    process trains in the folder, and Refused if the folder holds another run, or more than this one would be.
    """
    global _run
    run = FairseqRun(record, config)
    defaults = {name: default for name, (_, default) in settings(config).items()}
    try:
        run.read(defaults)  # the folder of another run stays as it is
        run.lock()
        run.read(defaults)  # the other process may have written its last scores
        if run.writes:
            resume_from_newest(config)
            remove_partial(run.folder)
        if torch.distributed.is_initialized():  # the others look at the folder too
            torch.distributed.barrier()
        run.check_length()
        run.go_on()
    except ValueError as error:
        raise Refused(str(error)) from None
    if run.is_finished():
        config.optimization.max_epoch = -1  # fairseq's loop ends before it begins
        if run.writes:
            publish(run.folder, config.task.data)
            logger.warning(f"{run.folder} holds the finished run already: nothing to train")
            if run.earlier and run.earlier.state != "finished":  # it was killed then, or is to end here
                ended = run.earlier if run.has_ended() else run.record
                ended.end()
                ended.save(run.folder)
        return None
    _run = run
    run.watch(updates, _yes)
    return run


def end(error: BaseException | None = None, status: int | None = None) -> None:
    """End this process's run, if there is one; see `Run.end`."""
    if run := active():
        run.end(error, status)


@contextmanager
def recorded(yes: bool = False) -> Iterator[None]:
    """Complete the record as soon as fairseq's training ends, for processes that continue afterwards or turn errors
    into messages. yes: see `Progress`."""
    global _yes
    _yes = yes
    try:
        yield
    except BaseException as error:
        end(error)
        raise
    finally:
        _yes = None
    end()


def _end_of_process():
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)  # in a process that fairseq spawned, and in others
    if isinstance(error, SystemExit) and error.__context__ is not None:
        error = error.__context__
    end(error, 1)


# Not atexit, which processes started by multiprocessing do not run.
Finalize(None, _end_of_process, exitpriority=0)


def true_reason(error: BaseException | None) -> BaseException | None:
    """The error behind fairseq's "please ensure that the architectures match", which it says of any in loading."""
    return error.__context__ if type(error) is Exception and error.__context__ is not None else error


# ---------------------------------------------------------------------- what a run is told before it begins


def refuse_settings(config: DictConfig | FairseqConfig, keeps_best: bool) -> None:
    """Raise Refused for settings of fairseq that do not work here. config: the whole configuration; keeps_best: the
    result of the run is its best epoch."""
    saving = config.checkpoint
    if config.ema.store_ema:
        raise Refused("ema.store_ema: fairseq cannot average this model; valid: tupe checkpoint average, afterwards")
    if saving.no_last_checkpoints and not saving.no_save:
        raise Refused("checkpoint.no_last_checkpoints: a run is finished, and goes on, by its last one; leave it out")
    if saving.save_interval > 1 and not saving.no_save and (keeps_best or config.optimization.max_epoch > 0):
        raise Refused("checkpoint.save_interval: fairseq would not save the last epoch, nor the best; leave it out")
    if saving.patience > 0:
        raise Refused(
            "checkpoint.patience: a run is as long as it is told, and keeps its best checkpoint; leave it out"
        )


def choose_precision(config: DictConfig | FairseqConfig) -> None:
    """Under Hydra, train in float32 without a GPU: its recipes, the same on all machines, say fp16. Raises Refused for
    fp16 without a GPU where the user says so and for fairseq's amp, ValueError for a model that fp16 cannot train.
    config: the whole configuration."""
    common = config.common
    if common.amp:
        raise Refused("common.amp: fairseq divides clipped gradients twice; valid: --fp16, --bf16 or --autocast bf16")
    on_gpu = torch.cuda.is_available() and not common.cpu
    if common.fp16 and on_gpu and getattr(config.model, "normaliser", "") == "exp":
        raise ValueError("normaliser exp overflows in fp16; valid: --precision bf16, autocast or float32")
    if not common.fp16 or on_gpu:
        return
    if not HydraConfig.initialized():
        raise Refused(schema.NO_GPU)
    logger.warning("no GPU: common.fp16=false common.cpu=true")
    common.fp16, common.cpu = False, True


def refuse_jobs_in_one_process() -> None:
    """Raise Refused under `fairseq-hydra-train -m` without a launcher of processes. fairseq keeps the best score of a
    job for the next one, and Hydra completes a preset with the schema that the first job has registered."""
    hydra = HydraConfig.get() if HydraConfig.initialized() else None
    if hydra and hydra.mode == RunMode.MULTIRUN and hydra.launcher["_target_"].endswith(".BasicLauncher"):
        raise Refused("fairseq-hydra-train -m: jobs need processes of their own: `tupe sweep`, or hydra/launcher=slurm")


def split_over_processes(config: DictConfig) -> None:
    """Under Hydra, train with all processes together on the batch of a recipe, which is written for one process, split
    as `tupe` splits it. Both numbers, typed beside the recipe, are of a process, as fairseq's. config: the whole
    configuration.

    Raises Refused if there is no such split; if only one of the two numbers is typed; and for processes of torchrun
    that would train one by one.
    """
    data, processes = config.dataset, config.distributed_training.distributed_world_size
    if processes == 1 < (others := int(os.environ.get("WORLD_SIZE", "1"))):  # at which fairseq then does not look
        names = "--distributed-world-size, or distributed_training.distributed_world_size of Hydra"
        raise Refused(f"each of torchrun's {others} processes would train on its own: {names}, is 1; give {others}")
    if processes == 1 or not (HydraConfig.initialized() or "job_logging_cfg" in config):  # the latter: spawned by it
        return
    words = HydraConfig.get().overrides.task if HydraConfig.initialized() else get_args().overrides
    typed = {word.lstrip("+").partition("=")[0] for word in words}
    sizes = typed & {SIZE, "dataset.max_tokens"}
    if sizes and STEPS in typed:
        return
    both = f"type {SIZE}=N and {STEPS}=[M], which are of a process"
    if sizes or STEPS in typed:
        raise Refused(
            f"{' '.join(sizes) or STEPS} is typed, and the rest of the recipe's batch is for one process: {both}"
        )
    size, steps = data.batch_size, config.optimization.update_freq[0]
    try:
        data.batch_size, steps = schema.split_batch(size * steps, processes, size, both)
    except ValueError as error:
        raise Refused(str(error)) from None
    config.optimization.update_freq = [steps]
    if "dataset.batch_size_valid" not in typed:
        held_out = schema.split_held_out(size, processes, data.max_valid_steps)
        data.batch_size_valid = held_out or data.batch_size
    logger.warning(f"the recipe's batch on {processes} processes: {SIZE}={data.batch_size} {STEPS}=[{steps}]")
