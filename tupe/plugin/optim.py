"""AdamW in one fused kernel (`torch.optim`, on GPU and CPU) as a fairseq optimizer, with the numbers of fairseq's
`adam`; and for every optimizer, no weight decay of the parameters that position schemes name."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import islice
from unittest import mock

import torch
from fairseq.optim import AMPOptimizer, FairseqOptimizer, FP16Optimizer, register_optimizer
from fairseq.optim.adam import FairseqAdamConfig
from fairseq.trainer import Trainer
from omegaconf import DictConfig
from torch import nn

from ..common.adamw import AdamW
from ..positions import undecayed_names
from .start import choose_precision


@dataclass
class FusedAdamWConfig(FairseqAdamConfig):
    """The options of `adam`. use_old_adam and fp16_adam_stats choose between its implementations and must be off
    here."""


@register_optimizer("adamw_fused", dataclass=FusedAdamWConfig)
class FusedAdamW(FairseqOptimizer):
    """`--optimizer adamw_fused`: the same numbers and the same state as `--optimizer adam`.

    With --fp16 or --amp it also continues a run of `adam`, and the other way round. In float32 (also under
    --autocast bf16) fairseq refuses that, because a checkpoint then names the class of the optimizer itself, not of a
    wrapper around it; --reset-optimizer would lose the moments.

    Raises ValueError for options of `adam` that have no meaning here.
    """

    def __init__(self, cfg: FusedAdamWConfig, params: Iterable):
        super().__init__(cfg)
        for name in ("use_old_adam", "fp16_adam_stats"):
            if getattr(cfg, name):
                raise ValueError(f"--{name.replace('_', '-')} is an option of --optimizer adam, not of adamw_fused")
        self._optimizer = AdamW(params, **self.optimizer_config)

    @property
    def optimizer_config(self) -> dict:
        """The options of the new optimizer. A resumed run has those of its checkpoint, where --optimizer-overrides does
        not name others."""
        lr, betas = self.cfg.lr, self.cfg.adam_betas
        if isinstance(betas, str):  # "(0.9, 0.999)", as on the command line
            betas = betas.strip("()[] ").split(",")
        return {
            "lr": lr[0] if isinstance(lr, Collection) else lr,
            "betas": tuple(float(beta) for beta in betas),
            "eps": self.cfg.adam_eps,
            "weight_decay": self.cfg.weight_decay,
        }

    def multiply_grads(self, c: float | torch.Tensor) -> None:
        """Left to the next step's kernel, as is the factor of `clip_grad_norm`: each would be a pass of its own over
        all gradients. c: in float64 where processes have summed the sample size."""
        self._optimizer.divisor = (self._optimizer.divisor / c).float()

    def clip_grad_norm(self, max_norm: float, aggregate_norm_fn: Callable | None = None) -> torch.Tensor:
        """As fairseq's, whose norm is a kernel for each parameter without apex: here one for all of them."""
        gradients = [parameter.grad for parameter in self.params if parameter.grad is not None]
        norms = torch._foreach_norm(gradients, 2, torch.float32) if gradients else [torch.zeros(1)]
        norm = torch.stack(norms).norm()
        norm = (norm if aggregate_norm_fn is None else aggregate_norm_fn(norm)) / self._optimizer.divisor
        if max_norm > 0:
            self.multiply_grads((max_norm / (norm + 1e-6)).clamp(max=1))
        return norm


def amp_step(optimizer: AMPOptimizer) -> None:
    """fairseq's `AMPOptimizer.step`, but the scaler gets the optimizer whose gradients `clip_grad_norm` has unscaled.
    fairseq gives it the one around it, and gradients are divided by the scale twice."""
    optimizer.scaler.step(optimizer.optimizer)
    optimizer.scaler.update()


def clip_grad_norm(params: Iterable, *args, original: Callable, **kwargs) -> torch.Tensor:
    """fairseq's collects the norms on a GPU wherever there is one, and then cannot scale the gradients of a CPU."""
    params = [params] if torch.is_tensor(params) else list(params)
    if any(getattr(p, "grad", None) is not None and p.grad.is_cuda for p in params):
        return original(params, *args, **kwargs)
    with mock.patch.object(torch.cuda, "is_available", return_value=False):
        return original(params, *args, **kwargs)


def load_state_dict(
    self: FairseqOptimizer,
    state_dict: dict,
    optimizer_overrides: dict | None = None,
    *,
    original: Callable,
) -> None:
    """As `FairseqOptimizer.load_state_dict`, whose overrides would give marked parameters the weight decay of all."""
    original(self, regrouped(state_dict, self), optimizer_overrides)
    for group in self.param_groups:
        if all(map(is_undecayed, group["params"])):
            group["weight_decay"] = 0.0


def regrouped(state_dict: dict, optimizer: FairseqOptimizer) -> dict:
    """The state in the groups of the optimizer: it has one group, if it was saved before a scheme marked parameters."""
    saved, groups = state_dict["param_groups"], optimizer.param_groups
    number = {id(parameter): i for i, parameter in enumerate(getattr(optimizer, "in_order", ()))}
    if len(saved) == len(groups) or [group["params"] for group in saved] != [list(range(len(number)))]:
        return state_dict
    order = [number[id(parameter)] for group in groups for parameter in group["params"]]
    state = {new: state_dict["state"][old] for new, old in enumerate(order) if old in state_dict["state"]}
    new = iter(range(len(order)))
    return {
        "state": state,
        "param_groups": [{**saved[0], "params": list(islice(new, len(group["params"])))} for group in groups],
    }


MARK = "optim_overrides"  # fairseq's own, which its copies in float32 keep


def mark_undecayed(model: nn.Module) -> None:
    """Mark the parameters of `undecayed_names`: fairseq gives its optimizers parameters without names."""
    for name in undecayed_names(model):
        setattr(model.get_parameter(name), MARK, {"optimizer": {"weight_decay_scale": 0.0}})


def is_undecayed(parameter: torch.Tensor) -> bool:
    return getattr(parameter, MARK, {}).get("optimizer", {}).get("weight_decay_scale") == 0


def build_optimizer_of_trainer(trainer: Trainer, *, original: Callable) -> None:
    """The one place where a model and its optimizer meet, just before the optimizer is built."""
    mark_undecayed(trainer.model)
    original(trainer)


def build_optimizer(cfg: DictConfig, params: Iterable, *args, original: Callable, **options) -> FairseqOptimizer:
    """fairseq's function of this name, for every optimizer but `composite`, which reads the mark itself: marked
    parameters form a second group, without weight decay. A model without any has one group, and states as ever.

    It is the one place where all parameters pass before the optimizer's state is loaded, whatever the optimizer, the
    task and the launcher: fairseq's trainer and its optimizers for mixed precision look it up when they call it."""
    params = list(params)
    optimizer = original(cfg, params, *args, **options)
    if cfg._name != "composite":
        first = optimizer.optimizer.param_groups[0]
        optimizer.in_order = first["params"]
        first["params"] = [parameter for parameter in optimizer.in_order if not is_undecayed(parameter)]
        if undecayed := [parameter for parameter in optimizer.in_order if is_undecayed(parameter)]:
            optimizer.optimizer.add_param_group({"params": undecayed, "weight_decay": 0.0})
    return optimizer


def build_fp16_optimizer(
    cls: type, cfg: DictConfig, params: Iterable, *, original: Callable, **options
) -> FP16Optimizer:
    """As `FP16Optimizer.build_optimizer`, whose one vector of all parameters could have one weight decay only."""
    choose_precision(cfg)  # for fairseq's own tasks; too late to change it
    params = list(params)
    if any(map(is_undecayed, params)):
        cfg.common.fp16_no_flatten_grads = True
    return original(cls, cfg, params, **options)
