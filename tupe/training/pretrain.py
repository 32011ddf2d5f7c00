"""Training through transformers' Trainer, with the numbers of the first engine: what both kinds share, and masked-LM
pre-training.

Ours: data, the normalisation of the loss, optimizer, schedule, when to validate and save, and the run's folder. The
loop, devices, mixed precision, DDP, FSDP, DeepSpeed and reports are those of Trainer and accelerate.
"""

import functools
import importlib.util
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed import is_torchelastic_launched
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.utils.logging import disable_progress_bar

from .. import hf  # noqa: F401  (what is written here is read through the Auto classes)
from ..common import pace, stop
from ..common.adamw import AdamW
from ..common.prepared import tokenizer_files
from ..common.record import STOPPED, write_atomically
from ..configuration_tupe import NAMES, TupeConfig
from ..data.batches import Batches, held_out
from ..data.blocks import Blocks
from ..data.loader import collate, loader
from ..data.masks import IGNORED, UNMASKED, MaskedBlocks
from ..data.splits import HELD_OUT_SEED, folders_of, prefixes_of
from ..encoder import BLOCKS, Encoder, LMHead, ModelConfig
from ..modeling_tupe import TupeForMaskedLM, TupePreTrainedModel
from .recipe import FINETUNING, Recipe, adam_betas
from .run import PARTIAL, Run, keep, publish, put_in_place, seal

logger = logging.getLogger("tupe.training")
WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


class ForPretraining(TupeForMaskedLM):
    """The sum of the losses of masked tokens only, without the logits of all at once: input_ids [B, L],
    output_indices [n] of masked tokens in the flattened batch, labels [n]; see `data.collate`."""

    _auto_class = None

    def forward(
        self, input_ids: Tensor, output_indices: Tensor, labels: Tensor, num_tokens: int | None = None
    ) -> Tensor:  # fmt: skip
        encoder = self.tupe.encoder
        x, _ = encoder(input_ids, False, num_tokens, output_indices)
        return self.lm_head.loss(x, encoder.tokens.weight, labels)


ForPretraining.__name__ = TupeForMaskedLM.__name__  # what config.json calls it


def new_model(config: ModelConfig, types: int, seed: int, compiles: bool = False) -> ForPretraining:
    """A model with the weights that the first engine gives it for this seed."""
    torch.manual_seed(seed)
    encoder, head = Encoder(types, 1, 2, config), LMHead(config.width, types, config=config)
    options = {theirs: getattr(config, ours) for ours, theirs in NAMES.items()}
    model = ForPretraining(TupeConfig(vocab_size=types, architectures=["TupeForMaskedLM"], **options))
    model.tupe.encoder.load_state_dict(encoder.state_dict())
    model.lm_head.load_state_dict(head.state_dict())
    encoder = model.tupe.encoder
    encoder.config.places, encoder.attention_backend = config.places, config.attention
    encoder.checkpoint_activations = config.checkpoint_activations
    if compiles:
        encoder.compile()
    return model


def arguments(recipe: Recipe, folder: Path, updates: int, gpus: int) -> TrainingArguments:
    """Trainer's. When it logs, validates and saves is up to `Course`."""
    reports = {"tensorboard": recipe["tensorboard_logdir"], "wandb": recipe["wandb_project"]}
    if reports["wandb"]:
        if importlib.util.find_spec("wandb") is None:
            raise ValueError("--wandb-project needs wandb: pip install wandb")
        os.environ["WANDB_PROJECT"] = reports["wandb"]
    if reports["tensorboard"]:
        os.environ["TENSORBOARD_LOGGING_DIR"] = reports["tensorboard"]
    sharded, deepspeed = (recipe["ddp_backend"] == name for name in ("fully_sharded", "deepspeed"))
    if sharded and transformers.__version__ < "5":
        raise ValueError("--ddp-backend fully_sharded needs transformers 5")
    if sharded and not is_torchelastic_launched():
        raise ValueError("--ddp-backend fully_sharded needs several processes: --gpus or --nodes")
    if deepspeed and not (gpus and is_torchelastic_launched()):
        raise ValueError("--ddp-backend deepspeed needs several GPUs")
    os.environ["ACCELERATE_USE_DEEPSPEED"] = str(deepspeed).lower()
    os.environ["ACCELERATE_MIXED_PRECISION"] = "no"  # which Trainer would take before the recipe's
    parts = {"version": 2, "transformer_layer_cls_to_wrap": [BLOCKS[recipe.model.block].__name__]}
    args = TrainingArguments(
        **({"fsdp": True, "fsdp_config": parts} if sharded else {}),
        output_dir=str(folder), max_steps=updates, per_device_train_batch_size=recipe["batch_size"],
        gradient_accumulation_steps=recipe["update_freq"][0], learning_rate=recipe["lr"][0],
        max_grad_norm=recipe["clip_norm"], seed=recipe["seed"], bf16=recipe["autocast"] == "bf16",
        fp16=recipe["fp16"] or recipe["amp"], use_cpu=not gpus or recipe["cpu"],
        ddp_backend="gloo" if is_torchelastic_launched() and not gpus else None, ddp_find_unused_parameters=False,
        ddp_broadcast_buffers=False,
        dataloader_num_workers=recipe["num_workers"], report_to=[name for name, value in reports.items() if value],
        logging_strategy="no", save_strategy="no", eval_strategy="no", logging_nan_inf_filter=False,
        ignore_data_skip=True, remove_unused_columns=False, disable_tqdm=True, log_level="error",
        average_tokens_across_devices=False,
    )  # fmt: skip
    if reports["tensorboard"]:  # of transformers 4
        args.logging_dir = reports["tensorboard"]
    if deepspeed:  # the rest of its configuration is accelerate's; these are the recipe's
        theirs = args.deepspeed_plugin.deepspeed_config
        theirs["train_micro_batch_size_per_gpu"] = recipe["batch_size"]
        theirs["gradient_accumulation_steps"] = recipe["update_freq"][0]
        theirs["gradient_clipping"] = recipe["clip_norm"]
        theirs["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True  # else no model is saved
    disable_progress_bar()
    args._n_gpu = min(args.n_gpu, 1)  # further GPUs are for further processes
    return args


def decay(recipe: Recipe, updates: int) -> Any:
    """Number of updates -> factor of the learning rate: fairseq's polynomial decay, or the constant rate and cool-down
    of `plugin.schedule.ConstantCooldown`. updates: of the whole run."""
    if recipe.kind is FINETUNING:
        (lr,), warmup, total = recipe["lr"], round(recipe["warmup_ratio"] * updates), updates
    else:
        (lr,), warmup, total = recipe["lr"], recipe["warmup_updates"], recipe["total_num_update"]
        if recipe["lr_scheduler"] == "constant_cooldown":
            return functools.partial(constant, warmup=warmup, cooldown=recipe["cooldown_updates"], total=total)
    end, power = recipe["end_learning_rate"], recipe["power"]

    def factor(updates):
        if not lr:
            return 0.0
        if warmup > 0 and updates <= warmup:
            return updates / warmup  # 0 in the first update, as fairseq
        if updates >= total:
            return end / lr
        return ((lr - end) * (1 - (updates - warmup) / (total - warmup)) ** power + end) / lr

    return factor


def constant(updates: int, warmup: int, cooldown: int, total: int) -> float:
    """The factor after so many updates: it rises, is 1, and falls to 0 in the last `cooldown` of all `total`."""
    if updates < warmup:
        return max(updates, 1) / warmup
    return max(total - updates, 0) / cooldown if total - updates < cooldown else 1.0


class Course(TrainerCallback):
    """Decides after each update whether to log, validate, save or stop."""

    def __init__(self, trainer: "Training"):
        self.trainer, self.began = trainer, None

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs
    ) -> None:  # fmt: skip
        self.began = self.began or (time.monotonic(), state.global_step)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs
    ) -> TrainerControl:  # fmt: skip
        recipe, updates, last = self.trainer.recipe, state.global_step, state.global_step >= state.max_steps
        self.trainer.run.reach(updates)
        control.should_log = last or stop.is_at(updates, recipe["log_interval"])
        due = last or stop.is_at(updates, self.trainer.batches.updates_per_epoch)
        if recipe.kind is FINETUNING:
            control.should_evaluate, control.should_save = due, due and not recipe["no_save"]
        else:
            due |= stop.is_at(updates, recipe["validate_interval_updates"])
            control.should_evaluate = due and not recipe["disable_validation"]
            control.should_save = last or stop.is_at(updates, recipe["save_interval_updates"])
        control.should_training_stop = last
        return control

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict, **kwargs
    ) -> None:  # fmt: skip
        if "loss" in logs and state.is_world_process_zero:
            pace.spoke()
            now, first = self.began
            speed = (state.global_step - first) / max(time.monotonic() - now, 1e-9)
            left = round((state.max_steps - state.global_step) / max(speed, 1e-9))
            logger.info(
                f"update {state.global_step}/{state.max_steps}: loss {logs['loss']:.3f}, gradient norm "
                f"{logs.get('grad_norm') or 0:.3f}, lr {logs['learning_rate']:.4g}, {speed:.2f} updates/s, "
                f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"
            )


class Training(Trainer):
    """transformers' Trainer on prepared data. model: the sum of the losses of its inputs, or that and predictions;
    dataset, splits: to train on and {name: to validate on}; data, longest: whose tokeniser the model gets, for inputs
    of how many tokens; updates: of the whole run; start: from where it goes on. unit: of the losses, in nats."""

    unit = math.log(2)

    def __init__(
        self, model: nn.Module, dataset: Any, splits: dict[str, Any], collate: Callable, recipe: Recipe,
        data: str, longest: int, run: Run, args: TrainingArguments, updates: int, start: int,
    ):  # fmt: skip
        super().__init__(model=model, args=args)
        self.remove_callback(PrinterCallback)
        self.remove_callback(ProgressCallback)
        self.add_callback(Course(self))
        self.recipe, self.run = recipe, run
        self.dataset, self.splits, self.collate = dataset, splits, collate
        self.files = tokenizer_files(folders_of(data)[0], longest, code=False) if run.writes else {}
        self.batches = Batches(
            len(dataset), recipe["seed"], recipe["batch_size"], updates, recipe["update_freq"][0], args.process_index,
            args.world_size, start,
        )  # fmt: skip
        self.sums, self.saves, self.saved = torch.zeros(2, dtype=torch.float64), False, None
        self.passes_left = 0  # of the update that is computed
        names = ("keep_interval_updates", "keep_interval_updates_pattern")
        self.kept = (1, -1) if recipe.kind is FINETUNING else [recipe[name] for name in names]
        self.is_best = False  # of the checkpoint to write: whether the run's folder gets its model at once

    # ------------------------------------------------------------------------------------------------ of an update

    def get_train_dataloader(self) -> Any:
        return loader(self.dataset, self.batches, self.args.dataloader_num_workers, self.collate)

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, *args) -> tuple:
        """The batches of an update, and the number of what is predicted in them, of all processes."""
        samples = [sample for _, sample in zip(range(num_batches), epoch_iterator, strict=False)]
        if not samples:
            return [], None
        stop.begin(self.state.global_step)
        pace.begin(self.state.global_step, len(samples))
        self.passes_left = len(samples)
        count = self._summed(torch.tensor(sum(len(s["labels"]) for s in samples), device=self.args.device))
        torch.manual_seed(self.recipe["seed"] + self.state.global_step)  # of dropout: a resumed run draws the same
        return samples, count.clamp(min=1)

    def _summed(self, values):
        """A tensor, summed in place over all processes."""
        if self.args.world_size > 1:
            torch.distributed.all_reduce(values)
        return values

    def training_step(self, model: nn.Module, inputs: dict, num_items_in_batch: Tensor | None = None) -> Tensor:
        """The gradients of an update are those of the mean over what it predicts, of all steps and processes. A signal
        stops training before any of them."""
        is_spread = self.recipe["ddp_backend"] != "pytorch_ddp"  # whose every pass needs all processes
        if not stop.goes_on(is_spread or self.passes_left == 1):
            self.stop()
        self.passes_left -= 1
        model.train()
        total, _ = self.losses_of(model, inputs)
        loss = total / num_items_in_batch * self.args.world_size  # DDP takes the mean over processes
        self.accelerator.backward(loss * self.accelerator.gradient_accumulation_steps)  # by which it divides
        self.sums = self.sums.to(total.device)
        self.sums += torch.stack([total.detach().double(), total.new_tensor(len(inputs["labels"])).double()])
        pace.passed()
        return loss.detach()

    def stop(self) -> None:
        """End training at the last whole update, whose checkpoint a resumed run goes on from. Raises SystemExit."""
        updates, recipe = self.state.global_step, self.recipe
        saves = recipe.kind is not FINETUNING or not recipe["no_save"]
        if saves and self.saved != updates and not stop.is_at_start(updates):
            self._save_checkpoint(self.model, None)
        self.accelerator.wait_for_everyone()  # the first to exit would have torchrun end the one that still saves
        raise SystemExit(STOPPED)

    def losses_of(self, model: nn.Module, inputs: dict) -> tuple[Tensor, Tensor | None]:
        """(sum of the losses, predictions) of a batch."""
        with self.compute_loss_context_manager():
            out = model(**self._prepare_inputs({name: value for name, value in inputs.items() if name != "rows"}))
        return out if isinstance(out, tuple) else (out, None)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            groups = TupePreTrainedModel.parameter_groups(model or self.model, self.recipe["weight_decay"])
            betas = adam_betas(self.recipe["adam_betas"])
            self.optimizer = AdamW(groups, lr=self.recipe["lr"][0], betas=betas, eps=self.recipe["adam_eps"])
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LambdaLR:
        if self.lr_scheduler is None:
            self.lr_scheduler = LambdaLR(optimizer or self.optimizer, decay(self.recipe, self.args.max_steps))
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Of tensors and plain data alone; transformers 4 would run a file's code. The rate is that of this run's
        schedule, which may be longer than the checkpoint's."""
        before = os.environ.get(WEIGHTS_ONLY)
        if not self.is_deepspeed_enabled:  # whose files hold objects
            os.environ[WEIGHTS_ONLY] = "1"
        try:
            super()._load_optimizer_and_scheduler(checkpoint)
        finally:
            os.environ.pop(WEIGHTS_ONLY, None)
            os.environ.update({WEIGHTS_ONLY: before} if before is not None else {})
        if checkpoint and not self.is_deepspeed_enabled:
            factor = decay(self.recipe, self.args.max_steps)(self.lr_scheduler.last_epoch)
            rates = [base * factor for base in self.lr_scheduler.base_lrs]
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            self.lr_scheduler._last_lr = rates

    def check_finite(self) -> None:
        """Raise FloatingPointError for a loss, or weights, that are not: what was saved before is better."""
        parts = [self.sums, *(parameter.detach() for parameter in self.model.parameters())]
        wrong = [not torch.isfinite(part.to_local() if hasattr(part, "to_local") else part).all() for part in parts]
        if self._summed(torch.tensor(sum(wrong), device=self.args.device)):  # each process may hold a part of them
            raise FloatingPointError(f"the loss or the weights are not finite at update {self.state.global_step}")

    def log(self, logs: dict, *args) -> None:
        if "loss" in logs:  # the mean, unrounded
            total, count = self._summed(self.sums).tolist()
            self.sums = torch.zeros_like(self.sums)
            logs["loss"] = total / max(count, 1) / self.unit
            if not math.isfinite(logs["loss"]):
                raise FloatingPointError(f"the loss is {logs['loss']} at update {self.state.global_step}")
        self.state.epoch = self.epoch()
        super().log(logs, *args)

    def epoch(self) -> int:
        """Epoch of the last update, from 1."""
        return self.batches.epoch_of(max(self.state.global_step - 1, 0))

    # --------------------------------------------------------------------------------------------------- validation

    def evaluate(self, *args, **kwargs) -> dict[str, float]:
        metrics = {}
        for split, dataset in self.splits.items():
            scores = self.scores_of(split, dataset)
            metrics |= {f"eval_{split}_{name}": value for name, value in scores.items()}
            if self.args.process_index == 0:
                said = ", ".join(f"{name} {value:.3f}" for name, value in scores.items())
                logger.info(f"update {self.state.global_step}: {said} on {split!r}")
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def scores_of(self, split: str, dataset: Any) -> dict[str, float]:
        """Of a split, which the run's record gets too."""
        raise NotImplementedError

    @torch.no_grad()
    def measure(self, dataset: Any, batches: list) -> tuple[float, dict]:
        """(mean loss, {row: prediction}) of batches, which the processes share."""
        self.model_wrapped.eval()
        rank, processes, found = self.args.process_index, self.args.world_size, {}
        batches = batches + [[(UNMASKED, i) for _, i in batches[0]]] * (-len(batches) % processes)
        sums = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        for batch in loader(dataset, batches[rank::processes], collate=self.collate):
            loss, predictions = self.losses_of(self.model_wrapped, batch)
            sums += torch.stack([loss.double(), loss.new_tensor(len(batch["labels"])).double()])
            if predictions is not None:
                found.update(zip(batch["rows"], predictions.tolist(), strict=False))
        if processes > 1:
            parts = [None] * processes
            torch.distributed.all_gather_object(parts, found)
            found = {row: value for part in parts for row, value in part.items()}
        total, count = self._summed(sums).tolist()
        if not count:
            raise ValueError("no validated token was masked: raise max_valid_steps, or hold out more text")
        if not math.isfinite(total):
            raise FloatingPointError(f"the loss on held-out data is {total} at update {self.state.global_step}")
        return total / count / self.unit, found

    # ------------------------------------------------------------------------------------------------------- saving

    def _get_output_dir(self, trial: Any) -> str:
        return str(self.run.folder / PARTIAL if self.saves else self.run.folder)

    def _save_checkpoint(self, model: nn.Module, trial: Any, **kwargs) -> None:
        """As Trainer's, but a checkpoint is there whole or not at all."""
        self.check_finite()
        path = self.run.folder / f"checkpoint-{self.state.global_step}"
        partial = self.run.folder / PARTIAL / path.name
        if self.run.writes:
            shutil.rmtree(path, ignore_errors=True)  # of a run that started over
        self.saves = True
        try:
            super()._save_checkpoint(model, trial, **kwargs)
            self.accelerator.wait_for_everyone()
            if self.run.writes:
                for name, content in self.files.items():
                    write_atomically(partial / name, content)
                if self.is_best:
                    publish(partial, self.run.folder)
                seal(partial)
                put_in_place(partial, path)
                keep(self.run.folder, *self.kept)
            self.saved = self.state.global_step
        except Exception as error:  # of torch and safetensors, where a disk is full, of many kinds
            if "No space left" not in str(error) and shutil.disk_usage(self.run.folder).free > 2**20:
                raise
            shutil.rmtree(partial, ignore_errors=True)
            unchanged = "existing checkpoints are unchanged"
            raise ValueError(f"{path} cannot be written: the disk is full; {unchanged}") from error
        finally:
            self.saves = self.is_best = False
        self.accelerator.wait_for_everyone()

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Without the second name of a tied weight, which FSDP adds."""
        for name in state_dict and getattr(self.model, "_tied_weights_keys", None) or ():
            state_dict.pop(name, None)
        super()._save(output_dir, state_dict=state_dict)

    def _save_rng_state(self, output_dir: str) -> None:
        """There is none: random numbers follow from the seed and the update."""

    def _load_rng_state(self, checkpoint: str) -> None:
        pass


class Pretraining(Training):
    def __init__(
        self, recipe: Recipe, data: str, symbols: list[str], run: Run, args: TrainingArguments, updates: int,
        start: int,
    ):  # fmt: skip
        masks = {name: recipe[name] for name in ("mask_prob", "leave_unmasked_prob", "random_token_prob")}
        length, seed, longest = recipe["tokens_per_sample"], recipe["seed"], recipe["max_positions"]

        def masked_blocks(split, seed):
            return MaskedBlocks(Blocks(prefixes_of(data, split), length, symbols), symbols, seed, **masks)

        masked = masked_blocks(recipe["train_subset"], seed)
        names = [] if recipe["disable_validation"] else recipe["valid_subset"].split(",")
        splits = {name: masked_blocks(name, HELD_OUT_SEED) for name in names}
        for split, part in {recipe["train_subset"]: masked, **splits}.items():
            if not any((part[1, i][1] != IGNORED).any() for i in range(len(part))):  # as a rule, the first one has some
                raise ValueError(f"{data}: {split!r} has too little text: none of its tokens is masked")
        model = new_model(recipe.model, len(symbols), seed, recipe["compile"])
        super().__init__(model, masked, splits, collate, recipe, data, longest, run, args, updates, start)

    def scores_of(self, split: str, dataset: MaskedBlocks) -> dict:
        size, most = self.recipe["batch_size_valid"], self.recipe["max_valid_steps"]
        loss, _ = self.measure(dataset, held_out(len(dataset), size)[: most or None])
        self.run.add_scores(self.epoch(), self.state.global_step, split, {"loss": loss})
        return {"loss": loss}
