"""Whether the model's code is being traced. Traced code must not depend on values, or on the length."""

import torch


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
