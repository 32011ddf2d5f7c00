"""AdamW in one fused kernel (`torch.optim`, on GPU and CPU) with the numbers of fairseq's `adam`, which both engines
train with. Needs only torch."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` that adds epsilon where fairseq's `adam` does: to the root of the second moment, before the
    bias correction.

        fairseq:  p -= lr m sqrt(1 - beta2^t) / (1 - beta1^t) / (sqrt(v) + eps)
        PyTorch:  p -= lr m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps')

    They are equal for eps' = eps / sqrt(1 - beta2^t), so `step` sets this epsilon for each t. (All parameters share t;
    one that gets its first gradient later than others has their epsilon.)

    divisor: a scalar by which the next `step` divides the gradients while it reads them. (The kernel takes it as
    `grad_scale`, which belongs to PyTorch's `GradScaler` where there is one, and which some of its versions overwrite.)
    """

    supports_flat_params = True  # fairseq's fp16 optimizer passes one vector of all parameters

    def __init__(self, params: Iterable, **options):
        super().__init__(params, fused=True, **options)
        self.updates, self.divisor = 0, torch.ones(())

    def __setstate__(self, state: dict) -> None:
        """Called by copy and pickle."""
        super().__setstate__(state)
        self.divisor = torch.ones(())
        self.updates = int(max((float(of["step"]) for of in self.state.values() if "step" in of), default=0))

    def step(self, closure: Callable | None = None) -> Any:
        # With --amp, the scaler has the kernel leave out a step whose gradients are not finite, be it the first one.
        left_out = getattr(self, "found_inf", None)
        self.updates += left_out is None or not left_out
        eps = [group["eps"] for group in self.param_groups]
        for group in self.param_groups:
            group["eps"] /= math.sqrt(1 - group["betas"][1] ** max(1, self.updates))
        of_scaler = {name: value for name, value in vars(self).items() if name == "grad_scale"}  # or none
        scale = of_scaler.get("grad_scale")
        self.grad_scale = self.divisor if scale is None else scale * self.divisor
        try:
            return super().step(closure)
        finally:
            del self.grad_scale
            vars(self).update(of_scaler, divisor=torch.ones(()))
            for group, value in zip(self.param_groups, eps, strict=True):
                group["eps"] = value

    def load_state_dict(self, state_dict: dict) -> None:
        """Load a state of this class or of fairseq's `adam`, which has the same moments, and steps as plain numbers."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            group["fused"], group["foreach"] = True, None
        for parameter, state in self.state.items():
            state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=parameter.device)
