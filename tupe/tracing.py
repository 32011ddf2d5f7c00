"""Whether the model's code is being traced. Traced code must not depend on values, or on the length."""

import logging

import torch

logger = logging.getLogger(__name__)


def is_traced() -> bool:
    """Whether this runs in torch.compile, torch.export, torch.jit.trace (and so torch.onnx.export) or torch.func."""
    # The calls inside `is_transformed` and `torch.jit.is_tracing`, because every linear layer asks.
    return torch.compiler.is_compiling() or torch._C._is_tracing() or torch._C._are_functorch_transforms_active()


def is_transformed() -> bool:
    """Whether this runs in torch.func's `grad`, `vmap`, `jvp` and the like. They cannot take our autograd functions."""
    return torch._C._are_functorch_transforms_active()


def is_exported() -> bool:
    """Whether code is traced for another engine, which has to be right at every length."""
    return torch.jit.is_tracing() or getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)()


def allow_graphs(most: int) -> None:
    """torch.compile may make so many graphs of a function: PyTorch's own limit is 8."""
    limits = torch._dynamo.config
    limits.recompile_limit = max(most, limits.recompile_limit)


def can_compile(device: torch.device) -> bool:
    """Whether compiled code runs on a GPU, tried on a small function: it takes Triton, a C compiler and Python's
    headers. Says why not."""
    if device.type != "cuda":
        return False
    try:
        torch.compile(torch.sin)(torch.zeros(1, device=device))
    except Exception as error:  # of Dynamo, inductor, Triton, or of what they call
        reason = str(error).strip().splitlines() or [""]
        logger.warning(f"layers are not compiled, which would be faster: {type(error).__name__}: {reason[0]}")
        return False
    return True
