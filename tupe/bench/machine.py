"""The machine that a benchmark runs on: what it is, and its memory."""

import ctypes
import os
import platform
import resource
import time

import torch

PRECISIONS = {"float32": torch.float32, "bf16": torch.bfloat16}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


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


def memory_peak(device: str) -> float:
    """Peak memory so far in MiB: allocated on the GPU, or resident in this process."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def memory_available() -> int | None:
    """Free bytes of main memory, or None if the system does not tell."""
    if not os.path.exists("/proc/meminfo"):
        return None
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def release_memory(device: str) -> None:
    """Release memory that is allocated but not in use, which other contenders may need in their turn."""
    if device == "cuda":
        torch.cuda.empty_cache()
    process = ctypes.CDLL(None)
    if hasattr(process, "malloc_trim"):  # glibc
        process.malloc_trim(0)
    if hasattr(process, "MallocExtension_ReleaseFreeMemory"):  # tcmalloc
        process.MallocExtension_ReleaseFreeMemory()
