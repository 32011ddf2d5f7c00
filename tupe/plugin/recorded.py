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
from fairseq.dataclass import FairseqDataclass
from fairseq.distributed import utils as distributed_utils
from fairseq.logging.meters import AverageMeter, MetersDict
from fairseq.models import BaseFairseqModel
from omegaconf import II, DictConfig

from ..checkpoints.gate import read_checkpoint
from ..common.active import Run, device
from ..common.safe_load import num_updates
from ..data.blocks import fingerprint_of
from ..data.splits import folders_of
from ..run.folder import fingerprint, remove_partial
from ..run.progress import Progress
from ..run.record import Record
from .model import load_scheme_files
from .pretrained import adopt_structure, contradictions, publish_model, variant
from .saving import LAST, resume_from_newest
from .schedule import SCHEDULE, count_updates
from .settings import settings
from .start import Refused, choose_precision, describe, refuse_jobs_in_one_process, split_over_processes

logger = logging.getLogger(__name__)


@dataclass
class RecordedTaskConfig(FairseqDataclass):
    # Taken from another section of the configuration; not an option of its own.
    finetune_from_model: Optional[str] = II("checkpoint.finetune_from_model")  # noqa: UP045  (fairseq reads this spelling)


class RecordedTask:
    """Mixin for fairseq tasks whose training is recorded; it goes before the fairseq class.

    The task's configuration has `data` and the fields of `RecordedTaskConfig`. `metrics` names the scores that are the
    purpose of a task (fine-tuning), of which the first is to be maximised; the purpose of a task without metrics is its
    checkpoint (pre-training), and its loss is to be minimised.
    """

    metrics = ()
    run = None  # while training
    _pretrained = {}  # fields of the record about the checkpoint that training starts from
    _training = False
    layout = None  # of a task with labels of its own

    def record_name(self, config: DictConfig) -> str:
        """What the record calls this task. config: the whole configuration."""
        raise NotImplementedError

    def data_files(self, split: str) -> list[Path]:
        """The files that a split is read from, in a fixed order."""
        raise NotImplementedError

    def build_model(self, cfg: DictConfig, from_checkpoint: bool = False) -> BaseFairseqModel:
        self._training = not from_checkpoint  # from_checkpoint: fairseq loads the model for use, not for training
        if self._training:
            load_scheme_files(cfg)
        if self._training and self.cfg.finetune_from_model:
            data = folders_of(self.cfg.data)[0]
            # Tasks that cut no text into blocks have no such option; they take the checkpoint's length.
            length = getattr(self.cfg, "tokens_per_sample", None)
            cfg, self._pretrained = adopt_structure(cfg, self.cfg.finetune_from_model, data, length)
        return models.build_model(cfg, self, from_checkpoint)

    def build_criterion(self, cfg: DictConfig, **kwargs) -> FairseqCriterion:
        # Training builds its criterion before the schedule, with the whole configuration as its parent: so this is
        # the only moment to tell the schedule how long the run is.
        config = cfg._get_parent()
        if self._training and config is not None:
            refuse_jobs_in_one_process()
            choose_precision(config)
            split_over_processes(config)
            if config.lr_scheduler._name == SCHEDULE and not config.lr_scheduler.total_num_update > 0:
                config.lr_scheduler.total_num_update = count_updates(self, config)
            config.task.data = ":".join(os.path.abspath(folder) for folder in folders_of(config.task.data))
            self.run = begin(self._new_record(config), config)
        return super().build_criterion(cfg, **kwargs)

    def _new_record(self, config):
        splits = config.dataset.valid_subset.split(",")
        files = [path for split in (config.dataset.train_subset, *splits) for path in self.data_files(split)]
        return Record(
            task=self.record_name(config),
            architecture=config.model._name,
            variant=variant(config.model),
            seed=config.common.seed,
            lr=float(config.optimization.lr[0]),
            budget={name: config.optimization[name] for name in BUDGETS if config.optimization[name] > 0},
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


BUDGETS = ("max_epoch", "max_update")


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
        if self.earlier or state is not None:
            updates = num_updates(state) if state is not None else 0
            record.go_on(self.earlier or Record(pretrained=record.pretrained), updates)
            record.scores = [entry for entry in record.scores if entry["num_updates"] <= updates]

    def checkpoint(self) -> dict | None:
        """The folder's last checkpoint; None if there is none, or it is damaged, which `resume_from_newest` deals
        with."""
        try:
            return read_checkpoint(self.folder / LAST, mmap=True, trained=self.config.model._name)
        except ValueError:
            return None

    def is_saved(self) -> bool:
        """Whether the folder's last checkpoint is from the end of the run."""
        state = self.checkpoint()
        return state is not None and self._reached(
            state["extra_state"]["train_iterator"]["epoch"] - 1, num_updates(state)
        )

    def is_scored(self) -> bool:
        """Whether every split has scores from the end of the run."""
        scored = {e["split"] for e in self.record.scores if self._reached(e["epoch"], e["num_updates"])}
        return scored == set(self.record.splits)

    def _reached(self, epochs, updates):
        budget = self.record.budget
        return epochs >= budget.get("max_epoch", float("inf")) or updates >= budget.get("max_update", float("inf"))

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
            publish_model(self.folder, self.config.task.data)
            self.record.end()
        elif self.record.metrics:
            self.record.end("stopped before its last epoch was scored: see its log")

    def resumes(self) -> bool:
        return not self.options.no_save and bool(self.updates or self.earlier)

    def end(self, error: BaseException | None = None, status: int | None = None) -> None:
        if self.writes and self.options.no_save:
            (self.folder / "crash.pt").unlink(missing_ok=True)  # fairseq writes it when a run diverges
        super().end(true_reason(error), status)

    def updates_in_all(self) -> int:
        """Of the whole run; 0 if that is not known."""
        options = self.config.optimization
        if self.config.lr_scheduler._name == SCHEDULE:
            return round(self.config.lr_scheduler.total_num_update)
        return 0 if options.max_epoch > 0 else options.max_update

    def watch(self, yes: bool | None) -> None:
        """Begin to follow the progress. yes: whatever it takes on a CPU; None: not even the time is told."""
        section = self.config.distributed_training
        # fairseq would send itself a signal after that time, which a process that hangs does not handle.
        timeout, section.heartbeat_timeout = section.heartbeat_timeout, -1
        cpu = self.config.common.cpu or not torch.cuda.is_available()
        tells = self.writes and yes is not None
        self.progress = Progress(self.updates_in_all(), cpu, tells, bool(yes), timeout, self.note_stall)


# ------------------------------------------------------------------------------------- the one run of this process

_run = None
_yes = None  # inside of `recorded`: whether the user said --yes


def active() -> FairseqRun | None:
    """The run that this process trains."""
    return None if _run is None or _run.progress.ended.is_set() else _run


def begin(record: Record, config: DictConfig) -> FairseqRun | None:
    """Begin or resume a run, or return None for one that is finished: nothing will be trained then.

    config: the whole configuration. Raises BlockingIOError if another process trains in the folder, and Refused if
    the folder holds another run.
    """
    global _run
    run = FairseqRun(record, config)
    run.lock()  # first: the other process may be about to write its last scores
    try:
        run.read({name: default for name, (_, default) in settings(config).items()})
        if run.writes:
            resume_from_newest(config)
            describe(config)
        if torch.distributed.is_initialized():  # the others look at the folder too
            torch.distributed.barrier()
        run.go_on()
    except ValueError as error:
        run.unlock()
        raise Refused(str(error)) from None
    if run.writes:
        remove_partial(run.folder)
    if run.is_finished():
        config.optimization.max_epoch = -1  # fairseq's loop ends before it begins
        if run.writes:
            publish_model(run.folder, config.task.data)
            logger.warning(f"{run.folder} holds the finished run already: nothing to train")
            if run.earlier and run.earlier.state != "finished":  # it was killed after its last checkpoint
                run.earlier.end()
                run.earlier.save(run.folder)
            run.unlock()
        return None
    if run.writes and not run.earlier:
        record.save(run.folder)
    _run = run
    run.watch(_yes)
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
