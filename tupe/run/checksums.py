"""Checksums of the files in a folder: written with them, compared by whoever reads them. Standard library alone.

FOLDER/checksums.json has of each file its size, its SHA-256 and the fingerprint of some of its blocks, and says what
made the folder. A reader compares the size and those blocks each time, which is all of a file of up to 16 MB; and all
of a larger one once on each machine. Files from elsewhere have none, but for torch's, which are zip archives.
"""

import hashlib
import json
import logging
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from .. import __version__
from .folder import SAMPLE, SAMPLES, damage_in, fingerprint, write_atomically, write_together

NAME = "checksums.json"
CHANGING = (NAME, "lock", "record.json", "train.log")  # what a run still writes
LEVELS = 3  # a file's checksum is in its folder or at most two above: TASK/input0/train.bin
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "tupe", "checked")

logger = logging.getLogger(__name__)
_checked: dict[Path, tuple] = {}  # file -> what `_identity` said when this process compared it
_told: set[Path] = set()  # folders of whose files it was said that they have no checksums


# ---------------------------------------------------------------------------------------------------- JSON that says so


def signed(content: dict) -> str:
    """A dict as JSON with a checksum of its own."""
    return json.dumps({**content, "checksum": _digest(content)}, indent=1, allow_nan=False) + "\n"


def read_signed(path: str | Path) -> dict:
    """What `signed` wrote into a file, or any JSON object without a checksum. Raises ValueError, naming it, for
    anything else, FileNotFoundError if it is not there."""
    path = Path(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged (it holds no JSON object)")
    told = content.pop("checksum", None)
    if told is not None and told != _digest(content):
        raise ValueError(f"{path} is damaged: it is not what was written, by its own checksum")
    return content


def _digest(content):
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


# -------------------------------------------------------------------------------------------------------------- writing


def about(path: Path) -> dict:
    """What is noted of a file."""
    return {"size": path.stat().st_size, "sha256": sha256(path), "sample": fingerprint([path])}


def sha256(path: Path, progress: Callable[[int], Any] = lambda count: None) -> str:
    """progress: called with numbers of bytes as they are read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
            progress(len(block))
    return digest.hexdigest()


def seal(
    folder: str | Path, names: Iterable[str], command: str = "", known: dict[str, dict] | None = None,
    read: Iterable[str | Path] = (), alone: bool = False,
) -> None:  # fmt: skip
    """Note the checksums of files in a folder, beside those of others that are there. names: relative to it; command:
    what made them; known: {name: what `about` said of the same content}, also of files that come after it; read: files
    and folders that they were made from, whose names and fingerprints are noted; alone: forget the others."""
    folder, known = Path(folder), known or {}
    files = {name: known.get(name) or about(folder / name) for name in sorted(names)}
    old = read_signed(folder / NAME)["files"] if (folder / NAME).exists() and not alone else {}
    files = {name: entry for name, entry in {**old, **files}.items() if name in files or (folder / name).is_file()}
    made = {"version": __version__, "command": command, "read": {Path(path).name: _of(Path(path)) for path in read}}
    write_atomically(folder / NAME, signed({**made, "files": files}))


def _of(path):
    """The fingerprint of a file, or of what a folder holds itself but for what a run still writes."""
    if path.is_file():
        return fingerprint([path])
    return fingerprint(file for file in sorted(path.iterdir()) if file.is_file() and file.name not in CHANGING)


def write_sealed(
    folder: str | Path, files: dict[str, str | bytes], command: str = "", read: Iterable[str | Path] = ()
) -> None:
    """`write_together`, and the checksums of what was written; see `seal`."""
    write_together(folder, files)
    seal(folder, files, command, read=read)


def seal_all(folder: str | Path, command: str = "", read: Iterable[str | Path] = (), alone: bool = False) -> None:
    """`seal` all that is in a folder and below, but for what a run still writes, such as fairseq's checkpoints, which
    are archives with checksums in them, and folders with checksums of their own."""
    folder = Path(folder)
    own = {path.parent for path in folder.rglob(NAME)} - {folder}
    files = (path for path in folder.rglob("*") if path.is_file() and path.name not in CHANGING)
    files = (path for path in files if not path.match("checkpoint*.pt"))
    files = (path for path in files if not own.intersection(path.parents))
    seal(folder, [str(path.relative_to(folder)) for path in files], command, read=read, alone=alone)


def accept_all(folder: Path, command: str) -> None:
    """Note the files of a folder and of those below as they are now, records among them."""
    for path in [*folder.rglob(NAME)] or [folder / NAME]:
        seal_all(path.parent, command, alone=True)
    for path in folder.rglob("record.json"):
        with suppress(ValueError):  # what is no JSON stays damaged
            content = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(content, dict) and content.pop("checksum", None):
                write_atomically(path, signed(content))


# -------------------------------------------------------------------------------------------------------------- reading


def check(path: str | Path) -> None:
    """Raise ValueError, naming it, for a file that is not what was written. One that is missing is its reader's."""
    path = Path(path)
    if not path.is_file():
        return
    path = path.resolve()
    identity = _identity(path)
    if _checked.get(path) == identity:
        return
    home, entry = find(path)
    if entry is not None:
        wrong, large = _differs(path, entry), entry["size"] > SAMPLES * SAMPLE
        if large and not wrong and not _is_noted(identity, entry["sha256"]):
            logger.info(f"comparing {path} ({entry['size'] / 1e9:.1f} GB) with its checksum, once on this machine")
            wrong = _differs(path, entry, sha256)
            if not wrong:
                _note(identity, entry["sha256"])
        if wrong:
            raise ValueError(
                f"{path} is damaged: {wrong} is not what {home / NAME} says; restore the file or make it again (if the "
                f"change is yours: tupe verify --accept {home})"
            )
    elif path.suffix == ".pt" and _is_archive(path):
        if not _is_noted(identity, "zip"):
            if damage := damage_in(path):
                raise ValueError(f"{path} is damaged: {damage}; take another checkpoint")
            _note(identity, "zip")
    elif home is None and not any(folder in (path.parent, *path.parents) for folder in _told):
        _told.add(path.parent)
        logger.info(f"{path.parent} has no {NAME}: nothing tells whether its files are whole")
    _checked[path] = identity


def _is_archive(path):
    """Whether a file of torch's is an archive, or was before it was cut: then it begins as one, or is empty. Older ones
    are pickles without a checksum."""
    with path.open("rb") as file:
        return file.read(2) in (b"PK", b"") or zipfile.is_zipfile(path)


def find(path: Path) -> tuple[Path | None, dict | None]:
    """(the folder whose checksums.json is about a file, what it says of it); (None, None) without one."""
    for folder in list(path.parents)[:LEVELS]:
        if (folder / NAME).is_file():
            return folder, _entries(folder).get(str(path.relative_to(folder)))
    return None, None


def _entries(folder: Path) -> dict[str, dict]:
    return read_signed(folder / NAME).get("files", {})


def _differs(path, entry, digest=None):
    """In what a file differs from its entry; "" for nothing. digest: of all of it; None: at a look."""
    if (size := path.stat().st_size) != entry["size"]:
        return f"its size ({size:,} bytes, {entry['size']:,} were written)"
    same = digest(path) == entry["sha256"] if digest else fingerprint([path]) == entry["sample"]
    return "" if same else "its content"


def _identity(path):
    stat = path.stat()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def _is_noted(identity, content):
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return True  # the first process of the machine compares
    return (CACHE / _key(identity, content)).exists()


def _note(identity, content):
    if not CACHE.is_absolute():  # of a user without a home, whose "~" stays as it is
        return
    with suppress(OSError):
        CACHE.mkdir(parents=True, exist_ok=True)
        (CACHE / _key(identity, content)).touch()


def _key(identity, content):
    return hashlib.sha256(repr((identity, content)).encode()).hexdigest()[:24]


# --------------------------------------------------------------------------------------------------------------- verify


def files_of(folder: Path) -> Iterator[tuple[Path, dict | None]]:
    """(file, what its folder's checksums.json says of it) of all files below a folder that have a checksum, also of
    those that are missing; None: the file has its own."""
    told = set()
    for path in sorted(folder.rglob(NAME)):
        for name, entry in _entries(path.parent).items():
            told.add(path.parent / name)
            yield path.parent / name, entry
    for path in sorted([*folder.rglob("*.pt"), *folder.rglob("record.json")]):
        if path not in told:
            yield path, None


def damage(path: Path, entry: dict | None, progress: Callable[[int], Any] = lambda count: None) -> str | None:
    """What is wrong with a file, all of which is read; None if it is whole."""
    if not path.is_file():
        return "missing"
    if entry is None:
        if path.suffix == ".pt":
            return damage_in(path) if _is_archive(path) else None
        try:
            read_signed(path)
        except ValueError as error:
            return str(error).partition(": ")[2] or str(error)
        return None
    wrong = _differs(path, entry, lambda file: sha256(file, progress))
    return f"{wrong} is not what was written" if wrong else None


def damaged(folder: Path) -> str | None:
    """The first file of a folder that is not what was written, and why; None if all are. All of them are read."""
    try:
        found = ((path, damage(path, entry)) for path, entry in files_of(folder))
        return next((f"{path.name}: {wrong}" for path, wrong in found if wrong), None)
    except ValueError as error:
        return str(error)
