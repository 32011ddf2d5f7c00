"""The machine that a benchmark runs on: what it is, and its memory."""

import os
import platform
import time
import weakref
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PRECISIONS = {"float32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def autocast(device: str, precision: str) -> torch.autocast:
    """A name from PRECISIONS as a context: half precision with float32 weights."""
    dtype = PRECISIONS[precision]
    return torch.autocast(device, None if dtype == torch.float32 else dtype, enabled=dtype != torch.float32)


def environment() -> dict:
    """The machine and software that the measurements depend on."""
    cpu = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as lines:
            cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), cpu)
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "cpu": cpu, "cores": os.cpu_count(), "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__, "python": platform.python_version(),
        "preloaded": os.environ.get("LD_PRELOAD") or None, "load_average": os.getloadavg()[0],
    }  # fmt: skip


def facts(about: dict) -> str:
    """The same on one line."""
    return ", ".join(f"{key} {value}" for key, value in about.items() if value is not None)


class Level(TorchDispatchMode):
    """The bytes of the tensors that operations have returned and that are still there, and their highest sum. own:
    tensors whose bytes, and those of their views, do not count."""

    counts = True

    def __init__(self, own: Iterable[Tensor] = ()):
        super().__init__()
        self.level = self.peak = 0
        self.known = {tensor.untyped_storage()._cdata for tensor in own}

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # so that compiled code runs within it

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if not (self.counts and isinstance(tensor, Tensor)):
                continue
            if (storage := tensor.untyped_storage())._cdata not in self.known:
                self.known.add(storage._cdata)
                self.level += storage.nbytes()
                self.peak = max(self.peak, self.level)
                weakref.finalize(storage, self.remove, storage._cdata, storage.nbytes())
        return result

    def remove(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.level -= size
