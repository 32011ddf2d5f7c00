"""The backends of attention, and the choice of one for a model on a device."""

import importlib
from types import ModuleType
from typing import Any

import torch

from .attention import Backend, Plain
from .backend_cpu import Cpu
from .backend_sdpa import Sdpa
from .positions import Positions
from .tracing import is_traced, is_transformed

try:  # Triton's kernels, which an export leaves out: of an import statement transformers would want the file
    TRITON: ModuleType | None = importlib.import_module(f"{__package__}.backend_triton")
except ModuleNotFoundError:
    TRITON = None
# By the name that the option `attention` knows.
BACKENDS: dict[str, type[Backend]] = {"plain": Plain, "blocked": Cpu, "sdpa": Sdpa}
if TRITON:
    BACKENDS["triton"] = TRITON.Triton


def choose(
    request: str, positions: Positions, normaliser: str, device: torch.device, dtype: torch.dtype, length: int
) -> tuple[Backend, str]:
    """(backend, reason) for a forward pass; request: a name from BACKENDS, or "auto".

    dtype: of the queries. length: of the sequences. Raises ValueError, with the reason, if the requested backend cannot
    compute what the model needs, or none can in this precision.
    """
    if request not in ("auto", *BACKENDS):
        raise ValueError(f"unknown attention backend {request!r}; valid: auto, {', '.join(BACKENDS)}")
    if normaliser == "exp" and dtype == torch.float16:
        raise ValueError("normaliser exp overflows in float16 from logits of 11 on; valid: bfloat16, float32")
    name, reason, faster = request, "as requested", None
    if request == "auto":
        name, reason = {"cpu": "blocked", "cuda": "sdpa"}.get(device.type, "plain"), f"the default on {device.type}"
        if is_transformed():
            name, reason = "plain", "which torch.func can transform"
        elif name == "blocked" and (torch.jit.is_tracing() or is_traced() and not torch.is_grad_enabled()):
            # With gradients compiled code is interrupted for its kernels, which are faster; a trace cannot be.
            name, reason = "sdpa", "which compiled code is not interrupted for"
        elif name == "sdpa" and (faster := faster_triton(positions, normaliser, device, dtype, length)):
            name, reason = "triton", "measured to be the fastest here" + ", by atomic additions" * faster.atomic
    backend = faster or (Plain(normaliser) if name == "plain" else BACKENDS[name]())
    obstacle = backend.refuses(positions, normaliser, device, dtype)
    if obstacle and request != "auto":
        others = [kind for kind in BACKENDS if kind != "triton"]  # which asks the card, and which auto knows
        kinds = [kind for kind in others if not BACKENDS[kind]().refuses(positions, normaliser, device, dtype)]
        raise ValueError(f"attention={request} is not possible: {obstacle}; valid here: auto, {', '.join(kinds)}")
    return (Plain(normaliser), obstacle) if obstacle else (backend, reason)


def faster_triton(
    positions: Positions, normaliser: str, device: torch.device, dtype: torch.dtype, length: int
) -> Any:  # fmt: skip
    """Triton's kernels, if a model with a bias is faster with them: measured on the card, at the first forward pass of
    about this length (the next power of 2, of 64 to 2048)."""
    if TRITON is None or is_traced() or not torch.cuda.is_initialized() or dtype == torch.float32:
        return None
    changes = positions.having["reach"] or positions.having["rotate"]  # the work, or the widths
    if changes or not positions.has_bias() or TRITON.Triton().refuses(positions, normaliser, device, dtype):
        return None
    about = min(max(64, 1 << (length - 1).bit_length()), 2048)
    with torch.cuda.device(device):
        try:
            return TRITON.fastest(
                positions.dims.heads, positions.dims.head_dim, dtype, about, torch.cuda.get_device_name(device)
            )
        except (torch.cuda.OutOfMemoryError, TRITON.Recording):  # to be measured later
            return None
