"""Folders and files that a command writes: never half of one, and by one process at a time. Needs only the standard
library."""

import errno
import fcntl
import hashlib
import os
import re
import shutil
import time
import uuid
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

FULL = (errno.ENOSPC, errno.EDQUOT)
DISK = (*FULL, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)  # not a mistake of this program
PARTIAL = ".partial"  # the end of the name of what is being written
# Such names, as `written`, `fill` and the second engine's checkpoints give them: other programs have files that end so.
BEGUN = re.compile(r"(?P<name>.+)\.\d+\.partial|\..+\.[0-9a-f]{32}\.partial|checkpoint-\d+\.partial")


# --------------------------------------------------------------------------------------------------------------- files


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Inside, `path` is written, maybe under another name first: an OSError names it, unless it names another file.
    What numpy, torch and safetensors raise when the disk is full becomes an OSError, too."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        number, file = getattr(error, "errno", None), getattr(error, "filename", None)
        if number is None and shutil.disk_usage(Path(path).parent).free < 2**20:
            number = errno.ENOSPC
        if number is None or file and not str(file).startswith(str(path)):
            raise
        raise OSError(number, os.strerror(number), str(path)) from error


@contextmanager
def written(path: str | Path) -> Iterator[IO[bytes]]:
    """A file to write, which is on the disk and then replaces `path` if nothing fails, and is deleted otherwise.
    Readers see the old file or the new one, also after a power failure. Raises OSError with the file's name."""
    partial = Path(f"{path}.{os.getpid()}{PARTIAL}")
    try:
        with naming(path):
            with partial.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
    finally:
        with suppress(OSError):  # of a read-only disk
            partial.unlink(missing_ok=True)


def remove_partial(folder: Path, name: str = "") -> None:
    """Delete what a process of this package had begun to write in a folder when it was killed. name: of the one file
    whose half is meant."""
    for path in folder.iterdir() if folder.is_dir() else ():
        begun = BEGUN.fullmatch(path.name)
        if begun and name in ("", begun["name"]):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Write a file whole or not at all; see `written`."""
    with written(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def fill(path: Path, function: Callable, *args) -> None:
    """Run function(folder, *args) on a new folder, which becomes `path` only when all is written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = path.parent / f".{path.name}.{uuid.uuid4().hex}{PARTIAL}"
    folder.mkdir()
    try:
        with naming(path):
            function(folder, *args)
        try:
            folder.rename(path)
        except OSError:
            if not path.is_dir():  # else another process has just done the same work, with the same result
                raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_together(folder: str | Path, files: dict[str, str | bytes]) -> None:
    """Write all of these files, {name: content}, into a folder, or none. Files that are there stay: raises ValueError,
    before anything is written, unless they have the same content; and BlockingIOError if another process writes the
    folder."""
    folder, done = Path(folder), []
    files = {name: content.encode() if isinstance(content, str) else content for name, content in files.items()}
    with owned(folder):
        there = [name for name in files if (folder / name).exists()]
        same = [name for name in there if (folder / name).is_file() and (folder / name).read_bytes() == files[name]]
        if other := [name for name in there if name not in same]:
            verb, them = ("exists", "it") if len(other) == 1 else ("exist", "them")
            raise ValueError(f"{', '.join(other)} {verb} already in {folder}; choose another folder or remove {them}")
        is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            for name, content in files.items():
                if name not in there:
                    done.append(folder / name)
                    write_atomically(folder / name, content)
        except BaseException:
            for path in done:
                path.unlink(missing_ok=True)
            if is_new:
                folder.rmdir()
            raise


def files_below(folder: str | Path) -> list[Path]:
    """The files in a folder and below, sorted, without hidden ones; links are followed, each folder once. Raises
    ValueError for a folder that cannot be read."""

    def refuse(error):
        raise ValueError(f"{error.filename}: cannot be read: {error.strerror}")

    found, seen = [], set()
    for place, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        if (real := os.path.realpath(place)) in seen:  # a link to a folder above, or a second one
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(place, name) for name in names if not name.startswith(".")]
    return sorted(path for path in found if path.is_file() or not path.exists())  # links to nothing, too


SAMPLES, SAMPLE = 256, 2**16  # of large files a fingerprint reads so many blocks of so many bytes


def fingerprint(files: Iterable[str | Path]) -> str:
    """What tells files from others in the same order, whatever their names: 12 hexadecimal digits of their sizes and
    contents. It reads `SAMPLES` blocks, evenly spread, of what is larger: a corpus of any size takes a moment."""
    files = list(files)
    digest, samples = hashlib.sha256(), max(SAMPLES // max(len(files), 1), 4)
    for path in files:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"{size} ".encode())
            if size <= samples * SAMPLE:
                digest.update(file.read())
                continue
            for n in range(samples):
                file.seek((size - SAMPLE) * n // (samples - 1))
                digest.update(file.read(SAMPLE))
    return digest.hexdigest()[:12]


def damage_in(path: str | Path) -> str | None:
    """What is wrong with a file of torch's, in a few words; None if it is whole: a zip archive with the right checksum
    of every part. Needs no torch."""
    try:
        with zipfile.ZipFile(path) as archive:
            name = archive.testzip()
            if name is not None:
                return f"wrong checksum of {name!r:.80}"
            return None if any(name.endswith("/data.pkl") for name in archive.namelist()) else "it has no data.pkl"
    except Exception as error:  # a damaged archive fails in many ways
        return str(error).partition("\n")[0][:80] or type(error).__name__


# --------------------------------------------------------------------------------------------------------------- locks

_held = {}  # lock file -> open file: of the folders of runs until the process ends, and of what else a command writes


def _forget():
    """A lock is its process's: workers and data workers, which are copies of it, do not hold it when it is killed."""
    for file in _held.values():
        file.close()
    _held.clear()


os.register_at_fork(after_in_child=_forget)


def _locked(path):
    """The lock file, open and locked; None if another process holds it."""
    while True:
        file = path.open("a")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        with suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(file.fileno())):
                return file
        file.close()  # who held it has just deleted it


def lock(folder: str | Path) -> bool:
    """Make the folder of a run this process's own until `unlock`, or until the process ends. Returns False if it is
    another's."""
    path = (Path(folder) / "lock").resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(20):  # a process that only looks (`is_locked`) holds it for a moment
        if path not in _held and (file := _locked(path)):
            _held[path] = file
        if path in _held:
            return True
        time.sleep(0.01)
    return False


def held() -> list[Path]:
    """The folders of runs that this process has locked, the last first."""
    return [path.parent for path in reversed(_held) if path.name == "lock"]


def unlock(folder: str | Path) -> None:
    if file := _held.pop((Path(folder) / "lock").resolve(), None):
        file.close()


def is_locked(folder: str | Path) -> bool:
    """Whether any process, this one included, holds the lock of a run's folder."""
    path = Path(folder) / "lock"
    if not path.exists():
        return False
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # others may look at the same time
        except BlockingIOError:
            return True
    return False


@contextmanager
def owned(path: str | Path) -> Iterator[None]:
    """Inside, this process alone writes a file or a folder. What a process left half-written there that was killed is
    deleted. Raises BlockingIOError if another process writes it."""
    path = Path(path).resolve()
    lock = path.parent / f".{path.name}.lock"
    if path.is_dir() and not os.access(path.parent, os.W_OK):
        lock = path / ".lock"
    if lock in _held:  # by the command that this is a part of
        yield
        return
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _locked(lock)
    if file is None:
        raise BlockingIOError(f"another process is writing {path}; wait for it, or choose another name")
    _held[lock] = file
    try:
        remove_partial(path.parent, path.name)
        if not is_locked(path):  # else a training writes there, too
            remove_partial(path)
        yield
    finally:
        lock.unlink(missing_ok=True)
        if _held.pop(lock, None):
            file.close()


@contextmanager
def locked(path: str | Path) -> Iterator[None]:
    """Hold a lock file for a moment, waiting for it."""
    with Path(path).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
