"""Whether the model's code is read, not run: what depends on values, or on the length, must wait till it runs."""

import torch


def is_traced() -> bool:
    """In torch.compile, torch.export and torch.jit.trace, and so in torch.onnx.export; and in torch.func."""
    # what `is_transformed` and `torch.jit.is_tracing` ask: every linear layer does
    return torch.compiler.is_compiling() or torch._C._is_tracing() or torch._C._are_functorch_transforms_active()


def is_transformed() -> bool:
    """In torch.func's `grad`, `vmap`, `jvp` and the like, which know no `autograd.Function` of ours."""
    return torch._C._are_functorch_transforms_active()


def is_exported() -> bool:
    """As `is_traced`, but only for other engines."""
    return torch.jit.is_tracing() or getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)()
