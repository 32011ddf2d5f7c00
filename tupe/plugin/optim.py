"""AdamW in one fused kernel (`torch.optim`, on GPU and CPU) as a fairseq optimizer, with the numbers of fairseq's
`adam`. For every optimizer: no weight decay of the parameters that position schemes name, and a scale of the loss that
a resumed run goes on with."""

from collections.abc import Callable, Iterable
from itertools import chain
from unittest import mock

import torch
from fairseq.optim import FairseqOptimizer, FP16Optimizer, register_optimizer
from fairseq.optim.adam import FairseqAdam, FairseqAdamConfig
from fairseq.trainer import Trainer

from ..common.adamw import AdamW
from ..positions import undecayed_names


@register_optimizer("adamw_fused", dataclass=FairseqAdamConfig)
class FusedAdamW(FairseqAdam):
    """`--optimizer adamw_fused`: the same numbers and the same state as `--optimizer adam`.

    With --fp16 it also continues a run of `adam`, and the other way round. In float32 (also under
    --autocast bf16) fairseq refuses that, because a checkpoint then names the class of the optimizer itself, not of a
    wrapper around it; --reset-optimizer would lose the moments.
    """

    def __init__(self, cfg: FairseqAdamConfig, params: Iterable):
        FairseqOptimizer.__init__(self, cfg)  # fairseq's `adam` would build its own optimizer
        self._optimizer = AdamW(params, **self.optimizer_config)

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


def clip_grad_norm(params: Iterable, *args, original: Callable, **kwargs) -> torch.Tensor:
    """fairseq's collects the norms on a GPU wherever there is one, and then cannot scale the gradients of a CPU."""
    params = [params] if torch.is_tensor(params) else list(params)
    if any(getattr(p, "grad", None) is not None and p.grad.is_cuda for p in params):
        return original(params, *args, **kwargs)
    with mock.patch.object(torch.cuda, "is_available", return_value=False):
        return original(params, *args, **kwargs)


# ---- parameters without weight decay ----


def build_optimizer(trainer: Trainer, *, original: Callable) -> None:
    """As the trainer's own, which gives optimizers parameters without names: those of `undecayed_names` become a second
    group, whatever the optimizer. A model without any has one group."""
    undecayed = set(undecayed_names(trainer.model))
    if undecayed:  # one vector of all parameters, as fairseq has it in half precision, could have one weight decay only
        trainer.cfg.common.fp16_no_flatten_grads = True
    original(trainer)
    if undecayed:
        named = chain(trainer.model.named_parameters(), trainer.criterion.named_parameters())
        marks = [name in undecayed for name, parameter in named if parameter.requires_grad]
        (group,) = trainer.optimizer.optimizer.param_groups
        marked = list(zip(group["params"], marks, strict=True))
        group["params"] = [parameter for parameter, mark in marked if not mark]
        others = {**group, "params": [parameter for parameter, mark in marked if mark], "weight_decay": 0.0}
        trainer.optimizer.optimizer.add_param_group(others)


# ---- half precision: fairseq's optimizer of float32 copies of the weights ----
# A resumed run takes over the copies, and the counters of the loss's scale, which grows and shrinks at the same updates
# as if it had not stopped.

COUNTERS = ("_iter", "_last_overflow_iter", "_last_rescale_iter", "_overflows_since_rescale")  # of fairseq's scaler


def state_dict(self: FairseqOptimizer, original: Callable) -> dict:
    """The state of an optimizer with its copies, of which fairseq keeps none, and the scaler of its loss, of which it
    keeps the scale alone."""
    state = original(self) | {"float32": [copy.data for copy in copies(self)]}
    if self.scaler is not None:
        state["loss_scaler"] = {name: getattr(self.scaler, name) for name in COUNTERS}
    return state


def load_state_dict(
    self: FairseqOptimizer, state_dict: dict, optimizer_overrides: dict | None = None, *, original: Callable
) -> None:
    """Undoes `state_dict`; a checkpoint without the plugin, or of another precision, has nothing of it."""
    saved = state_dict.get("loss_scaler") or {}
    if self.scaler is not None and saved.keys() == {*COUNTERS}:
        vars(self.scaler).update(saved)
    original(self, state_dict, optimizer_overrides)
    for copy, data in zip(copies(self), state_dict.get("float32") or (), strict=False):
        copy.data.copy_(data)
    self._sync_fp32_params_to_fp16()


def copies(optimizer: FP16Optimizer) -> list[torch.nn.Parameter]:
    """The float32 copies of the weights: one for each, or all of a device in one vector."""
    found = optimizer.fp32_params
    return list(found.values()) if isinstance(found, dict) else list(found)


@torch.no_grad()
def take_gradients(self: FP16Optimizer, *, original: Callable) -> None:
    """As fairseq's, which has a kernel for each weight: one for all of them."""
    pairs = [] if self.has_flat_params else list(zip(self.fp32_params, self.fp16_params, strict=True))
    if not pairs or any(half.grad is None or copy.grad is None for copy, half in pairs):
        return original(self)
    if self._needs_sync:
        torch._foreach_copy_([copy.grad for copy, _ in pairs], [half.grad for _, half in pairs])
    self._needs_sync = False


@torch.no_grad()
def give_weights(self: FP16Optimizer, *, original: Callable) -> None:
    """As fairseq's, which has a kernel for each weight: one for all of them."""
    if self.has_flat_params:
        return original(self)
    torch._foreach_copy_(self.fp16_params, self.fp32_params)
