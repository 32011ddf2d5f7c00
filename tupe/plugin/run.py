"""The life of a run inside fairseq, whichever command started it. When training builds the criterion, the folder is
locked and the record begins; every validation adds scores; at the end the record gets the outcome.
"""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Optional

import torch
from fairseq import checkpoint_utils, models
from fairseq.criterions import FairseqCriterion
from fairseq.dataclass import FairseqDataclass
from fairseq.distributed import utils as distributed_utils
from fairseq.logging.meters import AverageMeter, MetersDict
from fairseq.models import BaseFairseqModel
from omegaconf import II, DictConfig

from .. import record as records
from ..record import Record
from ..safe_load import num_updates, read_checkpoint
from . import watch
from .model import run_position_file
from .pretrained import adopt_structure, variant
from .saving import remove_partial, resume_from_newest
from .schedule import SCHEDULE, count_updates
from .start import choose_precision, describe

logger = logging.getLogger(__name__)


@dataclass
class RecordedTaskConfig(FairseqDataclass):
    stop_at_jump: float = field(
        default=0.0,
        metadata={"help": "end the run if its loss is this far above its lowest mean in 100 updates (bits or nats)"},
    )
    # Taken from another section of the configuration; not an option of its own.
    finetune_from_model: Optional[str] = II("checkpoint.finetune_from_model")  # noqa: UP045  (omegaconf 2.0)


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

    def record_name(self, config: DictConfig) -> str:
        """What the record calls this task. config: the whole configuration."""
        raise NotImplementedError

    def build_model(self, cfg: DictConfig, from_checkpoint: bool = False) -> BaseFairseqModel:
        self._training = not from_checkpoint  # from_checkpoint: fairseq loads the model for use, not for training
        if self._training:
            run_position_file(cfg)
        if self._training and self.cfg.finetune_from_model:
            data = self.cfg.data.split(":")[0]
            # Tasks that cut no text into blocks have no such option; they take the checkpoint's length.
            length = getattr(self.cfg, "tokens_per_sample", None)
            cfg, self._pretrained = adopt_structure(cfg, self.cfg.finetune_from_model, data, length)
        return models.build_model(cfg, self, from_checkpoint)

    def build_criterion(self, cfg: DictConfig, **kwargs) -> FairseqCriterion:
        # Training builds its criterion before the schedule, with the whole configuration as its parent: so this is
        # the only moment to tell the schedule how long the run is.
        config = cfg._get_parent()
        if self._training and config is not None:
            choose_precision(config)
            if config.lr_scheduler._name == SCHEDULE and not config.lr_scheduler.total_num_update > 0:
                config.lr_scheduler.total_num_update = count_updates(self, config)
            config.task.data = ":".join(os.path.abspath(folder) for folder in config.task.data.split(":"))
            if not self.metrics:
                check_last_checkpoint(config)
            self.run = begin(self._new_record(config), config)
        return super().build_criterion(cfg, **kwargs)

    def _new_record(self, config):
        return Record(
            task=self.record_name(config),
            architecture=config.model._name,
            variant=variant(config.model),
            seed=config.common.seed,
            lr=float(config.optimization.lr[0]),
            length={name: config.optimization[name] for name in LENGTHS if config.optimization[name] > 0},
            splits=config.dataset.valid_subset.split(","),
            metrics=list(self.metrics),
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
        best = self.run.add_scores(self._epoch, stats["num_updates"], split, scores)
        if self.run.writes:
            self.keep_predictions(split, best)
            self.run.record.save(self.run.folder)

    def keep_predictions(self, split: str, best: bool) -> None:
        """Write the model's predictions for a split. best: this validation is the best so far."""


LENGTHS = ("max_epoch", "max_update")


def check_last_checkpoint(config: DictConfig) -> None:
    """Raise ValueError for settings of a pre-training that would end without a checkpoint of its end, and so never be
    finished. config: the whole configuration."""
    epochs, every = config.optimization.max_epoch, config.checkpoint.save_interval
    if config.checkpoint.patience > 0:
        raise ValueError("patience: a run is as long as max_update or max_epoch says; leave it out")
    if epochs > 0 and not config.optimization.max_update > 0 and epochs % every:
        raise ValueError(f"save_interval={every}: the last of {epochs} epochs would not be saved; valid: a divisor")


class Run:
    """A run that this process trains. record: what is known before training; config: the whole configuration."""

    def __init__(self, record: Record, config: DictConfig):
        self.record, self.config = record, config
        self.folder = Path(config.checkpoint.save_dir).resolve()
        self.writes = distributed_utils.get_global_rank() == 0  # one process writes the record and holds the lock
        self._resumed = True  # until this process has scores of its own

    def add_scores(self, epoch: int, updates: int, split: str, scores: dict) -> bool:
        """Add the scores of a validation to the record. Returns whether that validation is the best so far."""
        entries = self.record.scores
        if self._resumed:  # later scores are from before the run was started over
            entries[:] = [entry for entry in entries if entry["num_updates"] < updates]
            self._resumed = False
        same = [entry for entry in entries if entry["num_updates"] == updates]
        if same:  # as in fairseq, the first split alone decides ...
            best = same[0]["best"]
        else:  # ... and the later of equals wins
            name, sign = (self.record.metrics[0], 1) if self.record.metrics else ("loss", -1)
            earlier = [sign * entry[name] for entry in entries if entry["split"] == split]
            best = not earlier or sign * scores[name] >= max(earlier)
        entries.append({"epoch": epoch, "num_updates": updates, "split": split, **scores, "best": best})
        return best

    def is_scored(self) -> bool:
        """Whether every split has scores from the end of the run."""
        scored = {e["split"] for e in self.record.scores if self._reached(e["epoch"], e["num_updates"])}
        return scored == set(self.record.splits)

    def is_saved(self) -> bool:
        """Whether the folder's last checkpoint is from the end of the run."""
        options = self.config.checkpoint
        shard = "-shard0" if self.config.distributed_training.use_sharded_state else ""
        path = self.folder / f"checkpoint_last{options.checkpoint_suffix}{shard}.pt"
        try:
            state = read_checkpoint(path, mmap=True)
        except ValueError:  # there is none, or it is damaged, which the launcher deals with
            return False
        return self._reached(state["extra_state"]["train_iterator"]["epoch"] - 1, num_updates(state))

    def is_finished(self, earlier: Record | None) -> bool:
        """Whether nothing is left to train. earlier: the record in the folder."""
        options = self.config.checkpoint
        if self.record.metrics or options.no_save or options.no_last_checkpoints:
            return earlier is not None and earlier.state == "finished" and earlier.length == self.record.length
        return options.restore_file == "checkpoint_last.pt" and not options.reset_optimizer and self.is_saved()

    def is_complete(self) -> bool:
        """Whether the run has its result: the last scores, or the last checkpoint."""
        options = self.config.checkpoint
        if self.record.metrics or options.no_save or options.no_last_checkpoints:
            return self.is_scored()
        return self.is_saved()

    def _reached(self, epochs, updates):
        length = self.record.length
        return epochs >= length.get("max_epoch", float("inf")) or updates >= length.get("max_update", float("inf"))

    def watch(self) -> watch.Watch:
        """What this run is to be watched for."""
        options = self.config.optimization
        updates = options.max_update
        if self.config.lr_scheduler._name == SCHEDULE:
            updates = self.config.lr_scheduler.total_num_update
        elif options.max_epoch > 0:
            updates = 0
        # fairseq would send itself a signal after that time, which a process that hangs does not handle.
        section = self.config.distributed_training
        timeout, section.heartbeat_timeout = section.heartbeat_timeout, -1
        return watch.Watch(timeout, self.config.task.stop_at_jump, updates, self.note_stall)

    def note_stall(self, reason: str) -> None:
        if self.writes:
            self.record.end(reason, records.STALLED)
            self.record.save(self.folder)

    def end(self, error: BaseException | None, status: int = 1) -> None:
        """Complete the record. error: what ended the process, if anything did. status: exit status of a failure."""
        watch.end()
        if not self.writes:
            return
        if self.config.checkpoint.no_save:
            (self.folder / "crash.pt").unlink(missing_ok=True)  # fairseq writes it when a run diverges
        if error is None and self.is_complete():
            self.record.end()
        elif error is None and self.record.metrics:
            self.record.end("stopped before its last epoch was scored: see its log")
        elif isinstance(error, Exception):
            self.record.end(reason(error), status)
        elif isinstance(error, SystemExit) and error.code == records.STOPPED:
            self.record.failure = {"reason": "stopped by a signal", "status": records.STOPPED}
        # Else it was interrupted or reached a time limit: it stays open, and continues when it is started again.
        if self.folder.is_dir():
            try:
                self.record.save(self.folder)
            except OSError as full:  # which may be what ended the process
                logger.error(f"{self.folder / records.NAME} cannot be written: {full}")
        records.unlock(self.folder)


# ------------------------------------------------------------------------------------- the one run of this process

_run = None


def begin(record: Record, config: DictConfig) -> Run | None:
    """Begin or resume a run, or return None for one that is finished: nothing will be trained then.

    config: the whole configuration. Raises BlockingIOError if another process trains in the folder, and ValueError if
    the folder holds another run.
    """
    global _run
    end()  # the previous run, in a process that trains several
    forget_earlier_scores()
    run = Run(record, config)
    if run.writes and not records.lock(run.folder):  # first: the other process may be about to write its last scores
        raise BlockingIOError(f"another process is training in {run.folder}")
    if run.writes:
        resume_from_newest(config)
        describe(config)
    if torch.distributed.is_initialized():  # the others look at the folder too
        torch.distributed.barrier()
    try:
        earlier = records.read(run.folder)
    except ValueError as error:  # truncated by a power failure, for example
        logger.warning(f"{error}: the run starts over")
        earlier = None
    if earlier and earlier.started_at:
        differences = record.differences(earlier)
        if differences:
            records.unlock(run.folder)
            words = [f"{name} {_said(old)} there, {_said(new)} here" for name, (new, old) in differences.items()]
            text = "; ".join(words)
            raise ValueError(f"{run.folder} holds another run ({text}); choose another folder or remove it")
        record.scores, record.started_at = earlier.scores, earlier.started_at
    if run.writes:
        remove_partial(run.folder)
    if run.is_finished(earlier):
        logger.warning(f"{run.folder} holds the finished run already: nothing to train")
        config.optimization.max_epoch = -1  # fairseq's loop ends before it begins
        if run.writes:
            if earlier and earlier.state != "finished":  # it was killed after its last checkpoint
                earlier.end()
                earlier.save(run.folder)
            records.unlock(run.folder)
        return None
    gpu = torch.cuda.is_available()
    threads = torch.get_num_threads()
    record.begin(torch.cuda.get_device_name() if gpu else f"CPU, {threads} thread{'s' * (threads != 1)}")
    if run.writes:
        record.save(run.folder)
    _run = run
    watch.begin(run.watch())
    return run


def _said(value):
    return "none" if value in ("", None) else value


def end(error: BaseException | None = None, status: int = 1) -> None:
    """End this process's run, if there is one; see `Run.end`."""
    global _run
    if _run is not None:
        run, _run = _run, None
        run.end(error, status)


@contextmanager
def recorded() -> Iterator[None]:
    """Complete the record as soon as fairseq's training ends, for processes that continue afterwards or turn errors
    into messages."""
    try:
        yield
    except BaseException as error:
        end(error, records.DIVERGED if isinstance(error, FloatingPointError) else 1)
        raise
    end()


def _end_of_process():
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)  # in a process that fairseq spawned, and in others
    if isinstance(error, SystemExit) and error.__context__ is not None:
        error = error.__context__
    end(error)


# Not atexit, which processes started by multiprocessing do not run.
Finalize(None, _end_of_process, exitpriority=0)


def forget_earlier_scores() -> None:
    """Delete the best score, which fairseq keeps as an attribute of functions: the next run in this process would
    compare its scores with it."""
    vars(checkpoint_utils.save_checkpoint).pop("best", None)
    if "fairseq_cli.train" in sys.modules:
        vars(sys.modules["fairseq_cli.train"].should_stop_early).clear()


# ------------------------------------------------------------------------------------------------------------ failures


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that a GPU or the machine ran out of memory."""
    return isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


def reason(error: Exception) -> str:
    """Why a run failed, in one line of at most 200 characters."""
    kind = type(error).__name__
    if is_out_of_memory(error):
        kind = "out of memory"
    elif isinstance(error, FloatingPointError):
        kind = records.DIVERGENCE
    return f"{kind}: {' '.join(str(error).split())}"[:200]
