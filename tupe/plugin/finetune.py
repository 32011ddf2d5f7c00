"""What GLUE and SQuAD share: a task that starts from a pre-trained checkpoint and records its scores, and the
learning-rate schedule that is given as a ratio of the run."""

import atexit
import fcntl
import json
import logging
import math
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional

import torch
from fairseq import models
from fairseq.data import Dictionary
from fairseq.distributed import utils as distributed_utils
from fairseq.logging import metrics
from fairseq.optim.lr_scheduler import register_lr_scheduler
from fairseq.optim.lr_scheduler.polynomial_decay_schedule import (
    PolynomialDecayLRSchedule,
    PolynomialDecayLRScheduleConfig,
)
from fairseq.tasks import FairseqDataclass, FairseqTask
from omegaconf import II

from .pretrained import adopt_structure

logger = logging.getLogger(__name__)

SCHEDULE = "polynomial_decay_ratio"


@dataclass
class PolynomialDecayRatioConfig(PolynomialDecayLRScheduleConfig):
    warmup_ratio: float = field(default=0.06, metadata={"help": "share of all updates with a growing learning rate"})
    total_num_update: float = field(
        default=0, metadata={"help": "number of updates; 0: the tasks glue and squad work it out from max_epoch"}
    )


@register_lr_scheduler(SCHEDULE, dataclass=PolynomialDecayRatioConfig)
class PolynomialDecayRatio(PolynomialDecayLRSchedule):
    """Linear warm-up over `warmup_ratio` of the updates, then polynomial (by default linear) decay to the end value.

    fairseq's own schedule wants both as numbers of updates, which differ from dataset to dataset.
    """

    def __init__(self, cfg, optimizer):
        if not cfg.total_num_update > 0:
            raise ValueError(f"{SCHEDULE} needs total_num_update, or one of the tasks that work it out: glue, squad")
        if not 0 <= cfg.warmup_ratio < 1:
            raise ValueError(f"warmup_ratio must be in [0, 1), got {cfg.warmup_ratio}")
        if cfg.warmup_updates:
            raise ValueError(f"{SCHEDULE} takes warmup_ratio, not warmup_updates")
        cfg.warmup_updates = round(cfg.warmup_ratio * cfg.total_num_update)
        super().__init__(cfg, optimizer)


@dataclass
class FinetuneConfig(FairseqDataclass):
    # Filled in from other sections of the configuration, not options of their own.
    finetune_from_model: Optional[str] = II("checkpoint.finetune_from_model")  # noqa: UP045  (omegaconf 2.0)
    save_dir: str = II("checkpoint.save_dir")
    seed: int = II("common.seed")


class FinetuneTask(FairseqTask):
    """Base of tasks that fine-tune a checkpoint.

    It reads the dictionary in `cfg.data`, keeps the checkpoint's structure (a setting that contradicts it is an error,
    its `max_positions` is adopted), works out the length of the run for the schedule above, and writes `scores.json`
    into the save folder: what is run and how, from the start on, and one record per epoch and split, with unrounded
    scores. `metrics` names the scores, the
    first is the one to maximise; a subclass defines `describe()` (what was fine-tuned), `evaluate(split) -> {metric:
    float}` over `predictions`, and `write_predictions(split, stem)`.
    """

    metrics = ()

    def __init__(self, cfg, dictionary):
        super().__init__(cfg)
        self.dictionary = dictionary
        self.predictions = {}  # split -> {example id: what the model said}, of the current validation
        self._scores = {}
        self._updates = {}  # split -> updates before its last validation
        self._pretrained, self._run, self._facts, self._records, self._is_best = None, None, None, [], False

    @classmethod
    def setup_task(cls, cfg, **kwargs):
        path = Path(cfg.data) / "dict.txt"
        if not path.exists():
            raise ValueError(f"there is no {path}: data must be a prepared folder, with the pre-training dictionary")
        dictionary = Dictionary.load(str(path))
        dictionary.add_symbol("<mask>")
        return cls(cfg, dictionary)

    @property
    def source_dictionary(self):
        return self.dictionary

    target_dictionary = source_dictionary

    def build_model(self, cfg, from_checkpoint=False):
        if self.cfg.finetune_from_model and not from_checkpoint:
            self._pretrained = adopt_structure(cfg, self.cfg.finetune_from_model, self.cfg.data)
        self._max_positions = cfg.max_positions
        return models.build_model(cfg, self, from_checkpoint)

    def max_positions(self):
        """Longest input, special tokens included; that of the model."""
        return self._max_positions

    def build_criterion(self, cfg, **kwargs):
        # Training builds its criterion before the schedule, with the whole configuration as parent: the only moment to
        # tell the schedule how long the run is.
        if self._pretrained is not None:
            self._begin_run(cfg._get_parent())
        return super().build_criterion(cfg, **kwargs)

    def train_step(self, *args, **kwargs):
        try:
            return super().train_step(*args, **kwargs)
        except RuntimeError as error:
            # fairseq would leave the batch out and go on, and the score would be of less training than it says.
            if "out of memory" in str(error):
                raise MemoryError(f"out of memory: {error}") from error
            raise

    def _begin_run(self, root):
        for section, key in ((root.dataset, "validate_interval_updates"), (root.checkpoint, "save_interval_updates")):
            if section[key] > 0:
                raise ValueError(f"{key}={section[key]}: fine-tuning is scored at the end of each epoch; leave it at 0")
        if not root.optimization.max_epoch > 0:
            raise ValueError("fine-tuning needs optimization.max_epoch: a run is finished when that epoch is scored")
        for section, key in (
            (root.optimization, "max_update"), (root.optimization, "stop_time_hours"), (root.checkpoint, "patience"),
        ):  # fmt: skip
            if section[key] > 0:
                raise ValueError(f"{key}={section[key]}: fine-tuning ends with its last epoch; set max_epoch instead")
        if root.lr_scheduler._name == SCHEDULE and not root.lr_scheduler.total_num_update > 0:
            root.lr_scheduler.total_num_update = self._count_updates(root)
        self._run = {
            **self.describe(),
            "architecture": root.model._name,
            **self._pretrained,
            "seed": root.common.seed,
            "lr": float(root.optimization.lr[0]),
            "max_epoch": root.optimization.max_epoch,
            "splits": root.dataset.valid_subset.split(","),
        }
        if distributed_utils.get_global_rank() != 0:
            return
        if not lock_folder(self.cfg.save_dir):
            raise BlockingIOError(f"another process is training in {self.cfg.save_dir}")
        try:
            result = read_result(self.cfg.save_dir)
        except ValueError as error:  # cut off by a power failure, for example
            logger.warning(f"{error}: the run starts over")
            result = None
        differ = {key for key in self._run if result and result.get(key) != self._run[key]}
        if differ:
            said = "; ".join(f"{key} {result.get(key)} there, {self._run[key]} here" for key in sorted(differ))
            raise ValueError(f"{self.cfg.save_dir} holds another run ({said}); choose another folder or remove it")
        if is_finished(result):
            logger.warning(f"{self.cfg.save_dir} holds the finished run already: nothing to train")
            root.optimization.max_epoch = -1  # fairseq's loop ends before it begins
        else:
            folder = Path(self.cfg.save_dir).resolve()
            (folder / "failed.json").unlink(missing_ok=True)
            atexit.register(end_of_process, folder, root.checkpoint.no_save, time.time())
        self._facts = run_facts()
        if not result:
            self._write_result()

    def _count_updates(self, root):
        """Updates of the whole run, counted on fairseq's own batches."""
        data, epochs = root.dataset, root.optimization.max_epoch
        self.load_dataset(data.train_subset)
        batches = self.get_batch_iterator(
            self.dataset(data.train_subset),
            max_tokens=data.max_tokens,
            max_sentences=data.batch_size,
            max_positions=self.max_positions(),
            ignore_invalid_inputs=True,
            required_batch_size_multiple=data.required_batch_size_multiple,
            seed=root.common.seed,
            num_shards=root.distributed_training.distributed_world_size,
            disable_iterator_cache=True,
        )
        freq = root.optimization.update_freq
        return sum(math.ceil(len(batches) / freq[min(epoch, len(freq) - 1)]) for epoch in range(epochs))

    def begin_valid_epoch(self, epoch, model):
        self._epoch = epoch
        for seen in self.predictions.values():
            seen.clear()

    @staticmethod
    def logging_outputs_can_be_summed(criterion):
        return criterion.training  # validation outputs hold lists of predictions

    def reduce_metrics(self, logging_outputs, criterion):
        """Gather the predictions of a validation batch: {"split", "id": [...], "prediction": [...]} of each process."""
        super().reduce_metrics(logging_outputs, criterion)
        outputs = [output for output in logging_outputs if "prediction" in output]
        for output in outputs:
            self._split = output["split"]
            seen = self.predictions.setdefault(self._split, {})
            seen.update(zip(output["id"], output["prediction"], strict=True))
            self._scores.pop(self._split, None)
        if outputs:
            split = self._split
            for name in self.metrics:
                metrics.log_derived(name, lambda meters, name=name: self.scores(split)[name])
            metrics.log_derived("score", lambda meters: self.scores(split)[self.metrics[0]])

    def complete(self, split):
        return len(self.predictions[split]) == len(self.dataset(split))

    def scores(self, split):
        """{metric: value} over the whole split; NaN as long as predictions are missing."""
        if not self.complete(split):
            return dict.fromkeys(self.metrics, math.nan)
        if split not in self._scores:
            self._scores[split] = self.evaluate(split)
        return self._scores[split]

    def post_validate(self, model, stats, agg):
        """Called by fairseq after each validation split: keep its scores and predictions."""
        split = self._split
        if not self.complete(split):
            seen, total = len(self.predictions[split]), len(self.dataset(split))
            raise ValueError(f"only {seen} of {total} {split!r} examples were scored; leave max_valid_steps unset")
        # In fp16 fairseq skips every update whose gradients are not finite, and so never ends a run that has diverged.
        if not math.isfinite(stats["loss"]) or stats["num_updates"] == self._updates.get(split, 0):
            raise FloatingPointError(f"diverged: loss {stats['loss']:g}, {stats['num_updates']} updates so far")
        self._updates[split] = stats["num_updates"]
        if distributed_utils.get_global_rank() != 0 or self._run is None:
            return
        folder, updates = Path(self.cfg.save_dir), stats["num_updates"]
        scores = {name: stats[name] for name in self.metrics}
        if not self._records:  # a resumed run keeps the records so far; later ones are of a run that was started over
            earlier = read_result(folder) or {"records": []}
            self._records = [record for record in earlier["records"] if record["num_updates"] < updates]
        if not any(record["num_updates"] == updates for record in self._records):
            # As in fairseq, the first split alone decides which validation is best, and the later of equals wins.
            earlier = [record[self.metrics[0]] for record in self._records if record["split"] == split]
            self._is_best = not earlier or scores[self.metrics[0]] >= max(earlier)
        record = {"epoch": self._epoch, "num_updates": updates, "split": split, "loss": float(stats["loss"]), **scores}
        self._records.append({**record, "best": self._is_best})
        (folder / "predictions").mkdir(parents=True, exist_ok=True)
        for tag in ["last"] + ["best"] * self._is_best:
            self.write_predictions(split, folder / "predictions" / f"{split}_{tag}")
        self._write_result()

    def _write_result(self):
        content = {**self._run, "metrics": list(self.metrics), **self._facts}
        content["finished_at"] = time.strftime("%Y-%m-%d %H:%M:%S%z")
        content["records"] = self._records
        write_atomically(Path(self.cfg.save_dir) / "scores.json", json.dumps(content, indent=1) + "\n")


# --------------------------------------------------------------------------------------------------- folders of runs


def read_result(folder):
    """What `scores.json` of a run's folder says, or None if there is none. Raises ValueError if it is not readable."""
    path = Path(folder) / "scores.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path} is not readable ({error})") from None


def is_finished(result):
    """Whether a result holds the last epoch's scores of every split."""
    last = {record["split"] for record in result["records"] if record["epoch"] == result["max_epoch"]} if result else ()
    return bool(result) and last == set(result["splits"])


def end_of_process(folder, no_save, started):
    """Leave failed.json in the folder of a run that did not come to its end, whatever started it. A process that was
    killed does not get here, and an interrupted one is not a failure: those runs go on when they are started again."""
    from ..experiments.runner import record_failure

    error = getattr(sys, "last_value", None)
    if no_save:
        (folder / "crash.pt").unlink(missing_ok=True)  # fairseq's, of a run that diverged: as large as the model
    if folder.is_dir() and not is_finished(read_result(folder)) and not isinstance(error, KeyboardInterrupt):
        said = f"{type(error).__name__}: {error}" if error else "it ended before its last epoch: see its log"
        record_failure(folder, 1, said, time.time() - started)


def lock_folder(folder):
    """Make `folder` this process's own until the process ends. Returns False if it is another's."""
    path = (Path(folder) / "lock").resolve()
    if path not in _locks:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return False
        _locks[path] = file  # open, and so locked
    return True


_locks = {}


# ---------------------------------------------------------------------------------------------------- facts of a run


def run_facts():
    """What is needed to repeat a run: command line, versions, commit, machine."""
    import fairseq

    from .. import __version__

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    return {
        "command": sys.argv,
        "versions": {
            "tupe": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "fairseq": fairseq.__version__,
        },
        "commit": git_commit(),
        "device": device,
    }


def git_commit():
    """Commit of this source tree, marked if files differ from it; None outside of a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


def write_atomically(path, text):
    """Readers see the old file or the new one, never half of it."""
    temporary = Path(f"{path}.{os.getpid()}.partial")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
