"""The library that main memory is taken from, chosen before torch is loaded."""

import os
import re
import subprocess
import sys
from pathlib import Path

import click


def use_allocator() -> None:
    """Take main memory from tcmalloc on machines that have it and no GPU: start the process again with LD_PRELOAD.

    glibc returns a step's memory to the system, which clears every page anew for the next one; what that costs on a CPU
    is in docs/benchmarks.md. Where LD_PRELOAD is set already, if to nothing, and in a process that has loaded torch,
    all stays as it is.
    """
    if "LD_PRELOAD" in os.environ or "torch" in sys.modules or Path("/dev/nvidiactl").exists():
        return
    if library := tcmalloc():
        click.echo(f"memory from {library}", err=True)
        os.execve(sys.executable, sys.orig_argv, {**os.environ, "LD_PRELOAD": library})


def tcmalloc() -> str | None:
    """Path of the library, None if it is not installed."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/sbin", "/usr/sbin"])
    try:
        known = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, env={"PATH": path}).stdout
    except FileNotFoundError:
        return None
    return next(reversed(re.findall(r"libtcmalloc(?:_minimal)?\.so.* => (\S+)", known)), None)
