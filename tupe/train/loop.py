"""The loop of the second engine, in plain PyTorch: from the first update to the last, for pre-training and fine-tuning.

An update is a number of batches in each of several processes. Its gradient is that of the mean loss over all that it
predicts, however it is split. Random numbers follow from the seed and the update, so a checkpoint holds none.

Loss of an update, over its masked tokens or examples i:  1/n sum_i loss_i

A batch comes from the file to its loss through data/blocks.py, masks.py, batches.py (the order) and loader.py,
`Loop.update`, and the model in pretrain.py.
"""

import copy
import hashlib
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ..common import rates
from ..common.adamw import AdamW
from ..common.prepared import tokenizer_files
from ..common.safe_load import load_safely
from ..config import FINETUNE
from ..data.batches import Batches
from ..data.loader import loader
from ..data.masks import UNMASKED
from ..data.splits import folders_of
from ..positions import parameter_groups
from ..run import stop
from ..run.checksums import seal_all
from ..run.folder import PARTIAL, naming, write_atomically
from ..run.record import STOPPED, command_line
from .graphs import Graphs
from .saved import OPTIMIZER, STATE, WEIGHTS, TrainRun, keep, publish, put_in_place
from .settle import Settled

logger = logging.getLogger("tupe.train")
LEAST_SCALE = 1e-4  # of the loss in fp16, as in fairseq; it is halved by each update whose gradients are not finite
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)  # of a model of which each process holds a part


# ----------------------------------------------------------------------------------------------------------- processes


@dataclass(frozen=True)
class Place:
    """Where this process trains. rank: its number among `processes`."""

    device: torch.device
    rank: int = 0
    processes: int = 1

    def summed(self, values: Tensor) -> Tensor:
        """A tensor, summed in place over all processes."""
        if self.processes > 1:
            torch.distributed.all_reduce(values)
        return values

    def agrees(self, number: int) -> bool:
        """Whether all processes have this number."""
        return self.summed(torch.tensor(number, device=self.device)).item() == number * self.processes

    def wait(self) -> None:
        """Wait for all processes."""
        if self.processes > 1:
            torch.distributed.barrier()


def join(gpus: int, cpu: bool, processes: int) -> Place:
    """This process's place; torchrun has started the others, if there are any."""
    on_gpu = gpus > 0 and not cpu
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if processes == 1:
        return Place(device)
    torch.distributed.init_process_group("nccl" if on_gpu else "gloo")
    return Place(device, torch.distributed.get_rank(), processes)


def parallel(model: nn.Module, place: Place, sharded: bool, half: torch.dtype | None) -> nn.Module:
    """The model on its device. With several processes, DDP gives each of them all of it, FSDP2 (sharded) a shard, which
    computes in half precision from float32 weights if `half` is a type."""
    if sharded:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # only here: PyTorch 2.6 or later

        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
        for layer in model.tupe.encoder.layers:
            fully_shard(layer, mp_policy=policy)
        return fully_shard(model, mp_policy=policy)
    if place.processes > 1:
        ids = [place.device] if place.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(model, device_ids=ids, broadcast_buffers=False)
    return model


class HalfCopy:
    """A model whose parameters become half precision, which computes, and float32 copies of them, which are trained:
    updates are smaller than what half precision can add to a weight."""

    def __init__(self, computing: nn.Module, dtype: torch.dtype):
        self.trained = copy.deepcopy(computing)
        for parameter in computing.parameters():
            parameter.data = parameter.data.to(dtype)
        self.pairs = list(zip(self.trained.parameters(), computing.parameters(), strict=True))

    def take_gradients(self) -> None:
        """Copy them from half precision, by a kernel for all of them."""
        pairs = [(weight, half) for weight, half in self.pairs if half.grad is not None]
        for weight, _ in pairs:
            weight.grad = torch.empty_like(weight)
        torch._foreach_copy_([weight.grad for weight, _ in pairs], [half.grad for _, half in pairs])

    @torch.no_grad()
    def give_weights(self) -> None:
        """From the copies back to half precision."""
        torch._foreach_copy_([half for _, half in self.pairs], [weight for weight, _ in self.pairs])


# ------------------------------------------------------------------------------------------------------------ the loop


def rate_of(recipe: Settled, updates: int) -> Callable[[int], float]:
    """Number of updates done -> factor of the learning rate. updates: of the whole run."""
    if recipe.lr_scheduler == "polynomial_decay_ratio":
        return partial(rates.polynomial, warmup=round(recipe.warmup_ratio * updates), total=updates)
    schedule = {"warmup": recipe.warmup_updates, "total": recipe.total_num_update}
    if recipe.lr_scheduler == "constant_cooldown":
        return partial(rates.constant, **schedule, cooldown=recipe.cooldown_updates)
    return partial(rates.polynomial, **schedule)


def trackers(
    recipe: Settled, run: TrainRun
) -> list[tuple[Callable[[dict[str, float], int], object], Callable[[], object]]]:
    """(to be called with what is logged after an update, to be called at the end) of each program that a run reports
    to."""
    found: list = []
    if recipe.tensorboard_logdir:
        from tensorboardX import SummaryWriter

        writer = SummaryWriter(recipe.tensorboard_logdir, flush_secs=10)
        found.append(
            (lambda values, update: [writer.add_scalar(*pair, update) for pair in values.items()], writer.close)
        )
    if recipe.wandb_project:
        import wandb  # type: ignore[import-not-found]

        later = "scores", "changes", "failure", "state", "finished_at"
        config = {name: value for name, value in vars(run.record).items() if name not in later}
        began = run.record.started_at or run.began_at  # of a resumed run, the first start
        known = hashlib.sha256(f"{run.folder} {began}".encode())
        wandb.init(
            project=recipe.wandb_project, dir=str(run.folder), name=run.folder.name, config=config,
            id=known.hexdigest()[:16], resume="allow",
        )  # fmt: skip
        found.append((lambda values, update: wandb.log(values, step=update), wandb.finish))
    return found


class Loop:
    """A model, its data, and the loop. Subclasses build both, and score held-out data.

    recipe: the settings; data, symbols: the folders, and their dictionary. updates: of the whole run; start: from where
    it goes on. The model maps inputs to the sum of their losses, or to that and predictions. unit: of the losses, in
    nats. keeps: (count, pattern), see `saved.keep`.
    """

    unit = math.log(2)
    collate: Callable

    def __init__(
        self, recipe: Settled, data: str, symbols: list[str], run: TrainRun, place: Place, updates: int, start: int
    ):  # fmt: skip
        self.recipe, self.run, self.place = recipe, run, place
        self.updates, self.start, self.done = updates, start, start
        self.model, self.dataset, self.splits = self.build(data, symbols)
        self.files = {}  # of the tokeniser, which every checkpoint gets
        if run.writes:
            self.files = tokenizer_files(folders_of(data)[0], recipe.model.max_positions, code=False)
        self.batches = Batches(
            len(self.dataset), recipe.seed, recipe.batch_size, updates, recipe.update_freq[0], place.rank,
            place.processes, start,
        )  # fmt: skip
        self.sharded = recipe.ddp_backend == "fully_sharded"
        half = torch.float16 if recipe.fp16 else torch.bfloat16 if recipe.bf16 else None
        computing = self.model.to(place.device)
        self.half_copy = HalfCopy(computing, half) if half and not self.sharded else None
        self.model = self.half_copy.trained if self.half_copy else computing
        self.computing, self.wrapped = computing, parallel(computing, place, self.sharded, half)
        groups = parameter_groups(self.model, recipe.weight_decay)
        self.optimizer = AdamW(groups, lr=recipe.lr[0], betas=recipe.adam_betas, eps=recipe.adam_eps)
        self.factor = rate_of(recipe, updates)
        self.autocast = torch.autocast(place.device.type, torch.bfloat16, enabled=recipe.autocast == "bf16")
        self.scaler = torch.amp.GradScaler(place.device.type, enabled=recipe.fp16)
        self.graphs: Graphs | None = None
        self.told = [module for module in computing.modules() if hasattr(module, "set_num_updates")]  # as fairseq's
        self.sums = torch.zeros(2, dtype=torch.float64, device=place.device)  # since logged: losses, and their number
        self.log, self.trackers = [], trackers(recipe, run) if run.writes else []
        self.keeps = (1, -1)
        if recipe.command != FINETUNE and recipe.save_interval_updates:
            self.keeps = recipe.keep_interval_updates, recipe.keep_interval_updates_pattern
        self.saved: int | None = None  # the number of updates at the last checkpoint
        self.is_best, self.began = False, time.monotonic()

    def build(self, data: str, symbols: list[str]) -> tuple[nn.Module, Any, dict[str, Any]]:
        """(model, what it is trained on, {name of a split: what is validated})."""
        raise NotImplementedError

    def train(self, checkpoint: Path | None) -> None:
        """From a checkpoint, or from the start. Raises SystemExit if a signal stops it, FloatingPointError if the loss
        or the weights are not finite, OSError if the disk is full."""
        if checkpoint:
            self.load(checkpoint)
        if self.recipe.compile == "graphs":  # after loading, which finds no gradients then
            if self.told:
                name = type(self.told[0]).__name__
                raise ValueError(
                    f"--compile graphs: {name} changes with the updates, and a graph does not; leave it out"
                )
            self.graphs = Graphs(self.passes, self.computing)
        batches = iter(loader(self.dataset, self.batches, self.recipe.num_workers, self.collate))
        self.began = time.monotonic()
        while self.done < self.updates:
            self.update([next(batches) for _ in range(self.batches.steps)])
            self.run.reach(self.done)
            self.run.progress.move()
            logs, validates, saves = self.due()
            if logs:
                self.note()
            if validates:
                self.validate()
            if saves:
                self.save()
        for _, close in self.trackers:
            close()

    def update(self, samples: list[dict]) -> None:
        """One update of the weights, by the batches of this process. A signal stops training before any of them."""
        stop.begin(self.done)
        self.run.progress.begin(self.done, len(samples))
        torch.manual_seed(self.recipe.seed + self.done)  # of dropout
        count = torch.tensor(sum(len(sample["labels"]) for sample in samples), device=self.place.device)
        count = self.place.summed(count).clamp(min=1)
        self.wrapped.train()
        for module in self.told:
            module.set_num_updates(self.done)
        sums = torch.zeros_like(self.sums)  # of this update, which a signal may drop
        for number, sample in enumerate(samples, 1):
            last = number == len(samples)
            if not stop.goes_on(last or self.sharded):
                self.stop()
            with self.apart(last):
                inputs = self.inputs_of(sample)
                total = (
                    self.graphs(self.computing.padded(**inputs), count) if self.graphs else self.passes(inputs, count)
                )
            sums += torch.stack([total.double(), total.new_tensor(len(sample["labels"])).double()])
            self.run.progress.passed()
        rate = self.recipe.lr[0] * self.factor(self.done)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if self.half_copy:
            self.half_copy.take_gradients()
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip_norm or math.inf)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.half_copy:
            self.half_copy.give_weights()
        self.computing.zero_grad(set_to_none=not self.graphs)  # which add to gradients where they are
        if self.half_copy:
            self.optimizer.zero_grad()
        self.done += 1
        self.sums += sums
        self.norm, self.rate = norm, rate

    def apart(self, last: bool) -> Any:
        """Inside, DDP adds up gradients in each process, and exchanges them in the last pass of an update alone."""
        is_ddp = isinstance(self.wrapped, nn.parallel.DistributedDataParallel)
        return self.wrapped.no_sync() if is_ddp and not last else nullcontext()

    def inputs_of(self, sample: dict) -> dict[str, Any]:
        """The model's arguments for a batch, on its device."""
        return {
            name: value.to(self.place.device, non_blocking=True) if torch.is_tensor(value) else value
            for name, value in sample.items() if name != "rows"
        }  # fmt: skip

    def losses_of(self, inputs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """(sum of the losses, predictions) of a batch."""
        with self.autocast:
            out = self.wrapped(**inputs)
        return out if isinstance(out, tuple) else (out, None)

    def passes(self, inputs: dict[str, Any], count: Tensor) -> Tensor:
        """The sum of a batch's losses. Their gradients, divided by the number of predictions of all processes, are
        added to the model's."""
        total, _ = self.losses_of(inputs)
        loss = total / count * self.place.processes  # the wrappers take the mean over processes
        self.scaler.scale(loss).backward()
        return total.detach()

    def due(self) -> tuple[bool, bool, bool]:
        """Whether to log, validate and save after this update."""
        recipe, done, last = self.recipe, self.done, self.done == self.updates
        ends_epoch = last or stop.is_at(done, self.batches.updates_per_epoch)
        validates = ends_epoch or stop.is_at(done, recipe.validate_interval_updates)
        by_epoch = recipe.command == FINETUNE or not recipe.save_interval_updates
        saves = ends_epoch if by_epoch else last or stop.is_at(done, recipe.save_interval_updates)
        logs = last or stop.is_at(done, recipe.log_interval)
        return logs, validates and not recipe.disable_validation, saves and not recipe.no_save

    def epoch(self) -> int:
        """Epoch of the last update, from 1."""
        return self.batches.epoch_of(max(self.done - 1, 0))

    def stop(self) -> None:
        """End training at the last whole update, whose checkpoint a resumed run goes on from. Raises SystemExit."""
        if not (self.recipe.no_save or self.saved == self.done or stop.is_at_start(self.done)):
            self.save()
        self.place.wait()  # the first to exit would have torchrun end the one that still saves
        raise SystemExit(STOPPED)

    # ---------------------------------------------------------------------------------------------- what a user is told

    def note(self) -> None:
        """Log the updates since the last time: their mean loss, unrounded. Raises FloatingPointError."""
        total, count = self.place.summed(self.sums).tolist()
        self.sums = torch.zeros_like(self.sums)
        loss = total / max(count, 1) / self.unit
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss} at update {self.done}")
        if self.scaler.is_enabled() and self.scaler.get_scale() < LEAST_SCALE:
            raise FloatingPointError(
                f"the gradients of fp16 are not finite at update {self.done}, whatever the scale of the loss; try "
                "--precision autocast"
            )
        norm, values = float(self.norm), {"loss": loss, "learning_rate": self.rate}
        if math.isfinite(norm):  # else fp16 left the update out
            values["grad_norm"] = norm
        self.tell("train", values)
        self.run.progress.spoke()
        speed = (self.done - self.start) / max(time.monotonic() - self.began, 1e-9)
        if self.run.writes:
            logger.info(
                f"update {self.done}/{self.updates}: loss {loss:.3f}, gradient norm {norm:.3f}, lr "
                f"{self.rate:.4g}, {speed:.2f} updates/s, {self.run.progress.time_left(self.done)} left"
            )

    def tell(self, kind: str, values: dict[str, float]) -> None:
        """Add values to the log of the run, and to what other programs show."""
        self.log.append({"update": self.done, "kind": kind, **values})
        for log, _ in self.trackers:
            log({f"{kind}/{name}": value for name, value in values.items()}, self.done)

    # --------------------------------------------------------------------------------------------------- validation

    def validate(self) -> None:
        for split, dataset in self.splits.items():
            scores = self.scores_of(split, dataset)
            self.tell("eval", {f"{split}_{name}": value for name, value in scores.items()})
            if self.run.writes:
                said = ", ".join(f"{name} {value:.3f}" for name, value in scores.items())
                logger.info(f"update {self.done}: {said} on {split!r}")
        self.run.progress.spoke()

    def scores_of(self, split: str, dataset: Any) -> dict[str, float]:
        """Of a split, which the run's record gets too."""
        raise NotImplementedError

    @torch.no_grad()
    def measure(self, dataset: Any, batches: list) -> tuple[float, dict]:
        """(mean loss, {row: prediction}) of batches, which the processes share."""
        self.wrapped.eval()
        rank, processes, found = self.place.rank, self.place.processes, {}
        batches = batches + [[(UNMASKED, i) for _, i in batches[0]]] * (-len(batches) % processes)
        sums = torch.zeros(2, dtype=torch.float64, device=self.place.device)
        for sample in loader(dataset, batches[rank::processes], collate=self.collate):
            loss, predictions = self.losses_of(self.inputs_of(sample))
            self.run.progress.move()
            sums += torch.stack([loss.double(), loss.new_tensor(len(sample["labels"])).double()])
            if predictions is not None:
                found.update(zip(sample["rows"], predictions.tolist(), strict=False))
        if processes > 1:
            parts = [None] * processes
            torch.distributed.all_gather_object(parts, found)
            found = {row: value for part in parts for row, value in part.items()}
        total, count = self.place.summed(sums).tolist()
        if not count:
            raise ValueError("no validated token was masked: raise max_valid_steps, or hold out more text")
        if not math.isfinite(total):
            raise FloatingPointError(f"the loss on held-out data is {total} at update {self.done}")
        return total / count / self.unit, found

    # ----------------------------------------------------------------------------------------- saving and resuming

    def save(self) -> None:
        """Write a checkpoint, which is there whole or not at all: a Hugging Face folder, with the state of training
        beside the model. Raises OSError if the disk is full."""
        self.check_finite()
        weights = get_model_state_dict(self.model, options=WHOLE)
        state = {
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer, options=WHOLE),
            "scaler": self.scaler.state_dict(),
            "sums": self.place.summed(self.sums.clone()),
        }
        if self.run.writes:
            path = self.run.folder / f"checkpoint-{self.done}"
            begun = Path(f"{path}{PARTIAL}")
            try:
                with naming(path):
                    self.write(begun, weights, state)
                    shutil.rmtree(path, ignore_errors=True)  # of a run that started over, or damaged
                    put_in_place(begun, path)
            finally:
                shutil.rmtree(begun, ignore_errors=True)
            keep(self.run.folder, self.done, *self.keeps)
        self.run.progress.move()
        self.saved, self.is_best = self.done, False
        self.place.wait()

    def write(self, folder: Path, weights: dict, state: dict) -> None:
        """Write the files of a checkpoint into a new folder."""
        folder.mkdir()
        tied = set(getattr(self.model, "_tied_weights_keys", None) or ())
        weights = {name: value.contiguous() for name, value in weights.items() if name not in tied}
        # Not by save_pretrained, which would put the model's code beside every checkpoint.
        write_atomically(folder / "config.json", self.model.config.to_json_string())
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
        for name, content in self.files.items():
            write_atomically(folder / name, content)
        torch.save(state, folder / OPTIMIZER)
        write_atomically(folder / STATE, json.dumps({"updates": self.done, "log": self.log}, allow_nan=False))
        seal_all(folder, command_line())
        if self.is_best:
            publish(folder, self.run.folder)

    def load(self, checkpoint: Path) -> None:
        """Go on from a checkpoint: tensors and plain data alone, nothing of a file is run."""
        weights = load_file(checkpoint / WEIGHTS)
        options = StateDictOptions(full_state_dict=True, strict=False)  # a tied weight is there once
        lacking = set_model_state_dict(self.model, weights, options=options)
        assert not lacking.unexpected_keys, lacking
        state = load_safely(checkpoint / OPTIMIZER, mmap=True)
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"], options=WHOLE)
        if self.half_copy:
            self.half_copy.give_weights()
        self.scaler.load_state_dict(state["scaler"])
        if self.place.rank == 0 and "sums" in state:  # not in checkpoints of earlier versions
            self.sums = state["sums"].to(self.sums)
        self.log = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))["log"]
        self.saved = self.done

    def check_finite(self) -> None:
        """Raise FloatingPointError for a loss, or weights, that are not: what was saved before is better."""
        parts = [self.sums, *(parameter.detach() for parameter in self.model.parameters())]
        wrong = [not torch.isfinite(part.to_local() if hasattr(part, "to_local") else part).all() for part in parts]
        if self.place.summed(torch.tensor(sum(wrong), device=self.place.device)):  # each may hold a part of them
            raise FloatingPointError(f"the loss or the weights are not finite at update {self.done}")
