"""The life of a run inside fairseq, whichever command started it. When training builds the criterion, the folder is
locked and the record begins; every validation adds scores; at the end the record gets the outcome.
"""

import logging
import math
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
from fairseq.tasks import FairseqTask
from omegaconf import II, DictConfig

from ..checkpoints.gate import read_checkpoint
from ..common import pace
from ..common import record as records
from ..common.active import Active, device, status_of
from ..common.record import Record
from ..common.safe_load import num_updates
from ..config import flag
from ..data.blocks import fingerprint_of
from ..data.splits import folders_of
from . import watch
from .model import load_scheme_files
from .pretrained import adopt_structure, check_resumable, publish_model, variant
from .saving import LAST, remove_partial, resume_from_newest
from .schedule import SCHEDULE, count_updates
from .settings import RESTORE, settings
from .start import Refused, choose_precision, describe, split_over_processes

logger = logging.getLogger(__name__)


@dataclass
class RecordedTaskConfig(FairseqDataclass):
    stop_at_jump: float = field(
        default=0.0,
        metadata={"help": "end the run if its loss is this far above its lowest mean in 100 updates (bits or nats)"},
    )
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
            choose_precision(config)
            split_over_processes(config)
            if config.lr_scheduler._name == SCHEDULE and not config.lr_scheduler.total_num_update > 0:
                config.lr_scheduler.total_num_update = count_updates(self, config)
            config.task.data = ":".join(os.path.abspath(folder) for folder in folders_of(config.task.data))
            if not self.metrics:
                check_last_checkpoint(config)
            self.run = begin(self._new_record(config), config, self)
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
            data=records.fingerprint(files),
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
        best = self.run.add_scores(self._epoch, stats["num_updates"], split, scores)
        if self.run.writes:
            self.keep_predictions(split, best)
            self.run.record.save(self.run.folder)

    def keep_predictions(self, split: str, best: bool) -> None:
        """Write the model's predictions for a split. best: this validation is the best so far."""


BUDGETS = ("max_epoch", "max_update")


def check_last_checkpoint(config: DictConfig) -> None:
    """Raise ValueError for settings of a pre-training that would end without a checkpoint of its end, and so never be
    finished. config: the whole configuration."""
    epochs, every = config.optimization.max_epoch, config.checkpoint.save_interval
    if config.checkpoint.patience > 0:
        raise ValueError("patience: a run is as long as max_update or max_epoch says; leave it out")
    if epochs > 0 and not config.optimization.max_update > 0 and epochs % every:
        raise ValueError(f"save_interval={every}: the last of {epochs} epochs would not be saved; valid: a divisor")


class ActiveRun(Active):
    """A run that this process trains. record: what is known before training; config: the whole configuration."""

    def __init__(self, record: Record, config: DictConfig):
        self.record, self.config = record, config
        self.earlier = None
        self.updates, self.began_at = None, records.now()  # updates: after the last one of this process
        self.folder = Path(config.checkpoint.save_dir).resolve()
        self.writes = distributed_utils.get_global_rank() == 0  # one process writes the record and holds the lock
        self._resumed = True  # until this process has scores of its own

    def add_scores(self, epoch: int, updates: int, split: str, scores: dict) -> bool:
        """Add the scores of a validation to the record. Returns whether that validation is the best so far."""
        if self._resumed:  # later scores are from before the run was started over
            self.record.scores[:] = [entry for entry in self.record.scores if entry["num_updates"] < updates]
            self._resumed = False
        return self.record.add_scores(epoch, updates, split, scores)

    def is_scored(self) -> bool:
        """Whether every split has scores from the end of the run."""
        scored = {e["split"] for e in self.record.scores if self._reached(e["epoch"], e["num_updates"])}
        return scored == set(self.record.splits)

    def checkpoint(self, restore_file: str) -> dict | None:
        """The checkpoint of that name; None if there is none in the folder, or it is damaged, which the launcher deals
        with. Raises Refused for one of elsewhere that cannot be gone on from."""
        options, path = self.config.checkpoint, Path(restore_file)
        if restore_file == LAST:
            shard = "-shard0" if self.config.distributed_training.use_sharded_state else ""
            path = self.folder / f"checkpoint_last{options.checkpoint_suffix}{shard}.pt"
        try:
            return read_checkpoint(path, mmap=True, trained=self.config.model._name)
        except ValueError as error:
            if restore_file != LAST:
                raise Refused(f"{flag('restore_file')}: {error}") from None
            return None

    def is_saved(self) -> bool:
        """Whether the folder's last checkpoint is from the end of the run."""
        state = self.checkpoint(LAST)
        return state is not None and self._reached(
            state["extra_state"]["train_iterator"]["epoch"] - 1, num_updates(state)
        )

    def is_finished(self, earlier: Record | None) -> bool:
        """Whether nothing is left to train. earlier: the record in the folder."""
        options = self.config.checkpoint
        if self.record.metrics or options.no_save or options.no_last_checkpoints:
            return earlier is not None and earlier.state == "finished" and earlier.budget == self.record.budget
        return options.restore_file == LAST and not options.reset_optimizer and self.is_saved()

    def is_complete(self) -> bool:
        """Whether the run has its result: the last scores, or the last checkpoint."""
        options = self.config.checkpoint
        if self.record.metrics or options.no_save or options.no_last_checkpoints:
            return self.is_scored()
        return self.is_saved()

    def _reached(self, epochs, updates):
        budget = self.record.budget
        return epochs >= budget.get("max_epoch", float("inf")) or updates >= budget.get("max_update", float("inf"))

    def updates_in_all(self) -> int:
        """Of the whole run; 0 if that is not known."""
        options = self.config.optimization
        if self.config.lr_scheduler._name == SCHEDULE:
            return round(self.config.lr_scheduler.total_num_update)
        return 0 if options.max_epoch > 0 else options.max_update

    def watch(self) -> watch.Watch:
        """What this run is to be watched for."""
        # fairseq would send itself a signal after that time, which a process that hangs does not handle.
        section = self.config.distributed_training
        timeout, section.heartbeat_timeout = section.heartbeat_timeout, -1
        jump, updates = self.config.task.stop_at_jump, self.updates_in_all()
        return watch.Watch(timeout, jump, updates, self.note_stall, self.reach)

    def note_stall(self, reason: str) -> None:
        if self.writes and (self.updates or not self.earlier):
            self.record.end(reason, records.STALLED)
            self.record.save(self.folder)

    def end(self, error: BaseException | None, status: int = 1) -> None:
        """Complete the record. error: what ended the process, if anything did. status: exit status of a failure."""
        watch.end()
        if not self.writes:
            return
        options = self.config.checkpoint
        if options.no_save:
            (self.folder / "crash.pt").unlink(missing_ok=True)  # fairseq writes it when a run diverges
        if error is None and self.is_complete():
            publish_model(self.folder, self.config.task.data)
            self.record.end()
        elif error is None and self.record.metrics:
            self.record.end("stopped before its last epoch was scored: see its log")
        self.close(true_reason(error), status, not options.no_save and bool(self.updates or self.earlier))


# ------------------------------------------------------------------------------------- the one run of this process

_run = None
_last_words = ""  # what the log ends with
_recorded = False  # inside of `recorded`, where errors become messages


def begin(record: Record, config: DictConfig, task: FairseqTask) -> ActiveRun | None:
    """Begin or resume a run, or return None for one that is finished: nothing will be trained then.

    config: the whole configuration. Raises BlockingIOError if another process trains in the folder, and Refused if
    the folder holds another run.
    """
    global _run, _last_words
    end()  # the previous run, in a process that trains several
    forget_earlier_scores()
    run = ActiveRun(record, config)
    if run.writes and not records.lock(run.folder):  # first: the other process may be about to write its last scores
        raise BlockingIOError(f"another process is training in {run.folder}")
    try:
        compare(run)
        if run.writes:
            resume_from_newest(config)
            describe(config)
        if torch.distributed.is_initialized():  # the others look at the folder too
            torch.distributed.barrier()
        if not run.writes and config.checkpoint.no_last_checkpoints:
            resume_from_newest(config)  # which chooses the same file
        resume(run, task)
    except Refused as refusal:
        if run.writes:
            records.unlock(run.folder)
            if not _recorded:
                logger.error(refusal)
        raise
    if run.writes:
        remove_partial(run.folder)
    if run.is_finished(run.earlier):
        config.optimization.max_epoch = -1  # fairseq's loop ends before it begins
        if run.writes:
            publish_model(run.folder, config.task.data)
            _last_words = f"{run.folder} holds the finished run already: nothing to train"
            if run.earlier and run.earlier.state != "finished":  # it was killed after its last checkpoint
                run.earlier.end()
                run.earlier.save(run.folder)
            records.unlock(run.folder)
        return None
    if run.writes and not run.earlier:
        record.save(run.folder)
    _run = run
    watch.begin(run.watch())
    if run.writes:
        pace.expect(run.updates_in_all(), config.common.cpu or not torch.cuda.is_available())
    return run


def compare(run: ActiveRun) -> None:
    """Read the record of a run's folder. Raises Refused if it is another run's. A run that began with a --restore-file
    goes on from a checkpoint of its own."""
    record, options = run.record, run.config.checkpoint
    run.earlier = earlier = records.begun(run.folder)
    goes_on = earlier and RESTORE in (earlier.config or ()) and any(run.folder.glob("checkpoint*.pt"))
    if goes_on:
        record.config.setdefault(RESTORE, earlier.config[RESTORE])
    if earlier and (differences := record.differences(earlier)):
        defaults = {name: default for name, (_, default) in settings(run.config).items()}
        raise Refused(records.another(run.folder, differences, defaults))
    if goes_on and record.config[RESTORE] == str(Path(options.restore_file).resolve()):  # what the start was told
        options.restore_file, options.reset_optimizer, options.reset_lr_scheduler = LAST, False, False
        options.reset_dataloader = options.reset_meters = False


def resume(run: ActiveRun, task: FairseqTask) -> None:
    """Let a run go on from the checkpoint that fairseq will load, if there is one. Raises Refused if that is of another
    model."""
    record, config, earlier = run.record, run.config, run.earlier
    restored = config.checkpoint.restore_file
    state = run.checkpoint(restored)
    own = state is not None and (restored == LAST or Path(restored).resolve().parent == run.folder)
    if state is not None:
        try:
            check_resumable(state, config.model, task.source_dictionary)
        except ValueError as error:
            raise Refused(f"{run.folder if restored == LAST else restored}: {error}") from None
    record.begin(device(config.common.cpu))
    if earlier or own:
        record.go_on(earlier or Record(pretrained=record.pretrained), num_updates(state) if state is not None else 0)


def end(error: BaseException | None = None, status: int = 1) -> None:
    """End this process's run, if there is one; see `ActiveRun.end`."""
    global _run, _last_words
    if _run is not None:
        run, _run = _run, None
        run.end(error, status)
    if _last_words:
        logger.warning(_last_words)
        _last_words = ""


@contextmanager
def recorded() -> Iterator[None]:
    """Complete the record as soon as fairseq's training ends, for processes that continue afterwards or turn errors
    into messages."""
    global _recorded
    _recorded = True
    try:
        yield
    except BaseException as error:
        end(error, status_of(error))
        raise
    finally:
        _recorded = False
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


def true_reason(error: BaseException | None) -> BaseException | None:
    """The error behind fairseq's "please ensure that the architectures match", which it says of any in loading."""
    return error.__context__ if type(error) is Exception and error.__context__ is not None else error
