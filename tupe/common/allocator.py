"""The library that main memory is taken from, chosen before torch is loaded."""

import os
import re
import subprocess
import sys
from pathlib import Path

import click


def use_allocator(library: str | None) -> None:
    """Take main memory from this library: start the process again with LD_PRELOAD.

    glibc returns a step's memory to the system, which clears every page anew for the next one; what that costs on a CPU
    is in docs/benchmarks.md. library: path, "none", or None for tcmalloc on machines that have it and no GPU. Where
    there is an LD_PRELOAD already, only a library that is named is added. A process that has loaded torch stays as it
    is.
    """
    if (is_default := library is None) and not Path("/dev/nvidiactl").exists():
        library = tcmalloc()
    others = os.environ.get("LD_PRELOAD", "")
    if library in (None, "none") or (others and is_default) or "torch" in sys.modules:
        return
    if not Path(library).exists():
        raise ValueError(f"--allocator {library}: no such library")
    if library in re.split("[ :]", others):
        return
    click.echo(f"memory from {library}", err=True)
    os.execve(sys.executable, sys.orig_argv, {**os.environ, "LD_PRELOAD": f"{library}:{others}".rstrip(":")})


def tcmalloc() -> str | None:
    """Path of the library, None if it is not installed."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/sbin", "/usr/sbin"])
    try:
        known = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, env={"PATH": path}).stdout
    except FileNotFoundError:
        return None
    return next(reversed(re.findall(r"libtcmalloc(?:_minimal)?\.so.* => (\S+)", known)), None)
