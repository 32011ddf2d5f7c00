"""Triton's kernels on NVIDIA cards, for a bias that the whole batch shares: see `triton_attention`.

B batch, L sequence length, H heads, D width of a head, E width of a value head.
"""

import functools
import logging
from typing import NamedTuple

import torch
from torch import Tensor

from .attention import Backend, Batch, mask_logits
from .backend_sdpa import Sdpa, aligned
from .positions import Positions
from .token_positions import TokenPositions
from .triton_attention import WIDEST, WIDEST_TILE, attention, interpreted, triton

logger = logging.getLogger(__name__)


class SharedBias(NamedTuple):
    bias: Tensor | None  # [H, L, L] float32, to which the gradient goes
    read: Tensor | None  # the same as the kernels read it, rounded
    mask: Tensor | None  # [B, L], False at padding


class Triton(Backend):
    """atomic: how the gradient of the bias is summed, see `triton_attention`."""

    name = "triton"

    def __init__(self, atomic: bool = False):
        self.atomic = atomic

    def refuses(self, positions: Positions, normaliser: str, device: torch.device, dtype: torch.dtype) -> str | None:
        dims = positions.dims
        if triton is None:
            return "triton is not installed"
        if device.type != "cuda" and not interpreted():
            return f"it is for NVIDIA cards, not for {device.type}"
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):  # the compiler aborts
            return "it is for cards of compute capability 8.0 or later"
        if max(dims.head_dim, dims.value_dim) > WIDEST:
            return f"heads are wider than {WIDEST}"
        return super().refuses(positions, normaliser, device, dtype)

    def prepare(self, bias: Tensor | None, gate: Tensor | None, reach: int | None, batch: Batch) -> SharedBias:
        """A window hides pairs in the bias: all pairs are computed."""
        if reach is not None:
            bias = mask_logits(bias, batch.near(reach)).expand(batch.heads, -1, -1)
        read = None if bias is None else aligned(bias.detach().to(batch.dtype), WIDEST_TILE)[..., : bias.size(-1)]
        return SharedBias(bias, read, batch.packing.mask)

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, content: Tensor | None, prepared: SharedBias, scale: float,
        dropout: float,
    ) -> tuple[Tensor, None]:  # fmt: skip
        if q.size(-1) > WIDEST:
            raise ValueError(f"attention=triton: rotated queries are {q.size(-1)} wide; valid: up to {WIDEST}")
        return attention(q, k, v, prepared.bias, prepared.mask, scale, dropout, prepared.read, self.atomic), None


class Recording(RuntimeError):
    """Nothing can be measured while a CUDA graph is recorded."""


@functools.cache
def fastest(heads: int, head_dim: int, dtype: torch.dtype, length: int, card: str) -> Triton | None:
    """The backend if Triton's kernels take less than nine tenths of the time of PyTorch's on this card, forward and
    backward: measured once per process, on the current card. A tie would be decided by chance, and another way after a
    resume; so atomic additions have to be as much faster again. Draws inside do not change the run's. Kernels that
    cannot be made here, as without a C compiler, do not win. Raises `Recording` instead of measuring in a recording."""
    if torch.cuda.is_current_stream_capturing():
        raise Recording
    with (
        torch.random.fork_rng(["cuda"]),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cuda", enabled=False),
    ):
        found, least = None, seconds_of(Sdpa(), heads, head_dim, dtype, length)
        try:
            for backend in (Triton(), Triton(atomic=True)):
                seconds = seconds_of(backend, heads, head_dim, dtype, length)
                if seconds < 0.9 * least:
                    found, least = backend, seconds
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # of Triton's compiler, or of what it calls
            reason = str(error).strip().splitlines() or [""]
            logger.warning(f"attention backend triton fails here: {type(error).__name__}: {reason[-1]}")
        return found


def seconds_of(backend: Backend, heads: int, head_dim: int, dtype: torch.dtype, length: int) -> float:
    """Seconds that the card needs for the kernels of a forward and backward pass: best mean of 3 runs of 5. It sleeps
    until the host has launched all of a run (for some 30 ms, of which a host needs 10), so launches do not count: in
    compiled layers and graphs they cost next to nothing."""
    sequences = max(1, min(2**14 // length, 2**22 // length**2))  # whose logits take little memory
    shape = sequences, heads, length, head_dim
    q, k, v = (torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for _ in "qkv")
    bias = torch.zeros(heads, length, length, device="cuda", requires_grad=True)
    batch = Batch(TokenPositions(length, "cuda"), dtype, heads)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    seconds = []
    for passes in (1, 5, 5, 5):  # the first compiles
        torch.cuda.synchronize()
        torch.cuda._sleep(50_000_000)  # cycles
        begin.record()
        for _ in range(passes):
            out, _ = backend.mix(q, k, v, None, backend.prepare(bias, None, None, batch), head_dim**-0.5, 0.1)
            out.sum().backward()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1000 / passes)
    return min(seconds[1:])
