"""Prepared text -> FULL-SENTENCES blocks (Liu et al., 2019), whose borders are found once and then stay on the disk."""

import hashlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..run.folder import locked, remove_partial, written
from ..text import word_marks
from .splits import Split

BOS, PAD, EOS = 0, 1, 2
CHUNK = 2**20  # sentences that are looked at together
SMALL = 2**26  # tokens of a split whose borders are found in a second or two, and kept in memory
KEY = 32  # bytes before the borders in a file


def hash_of(symbols: list[str]) -> Any:
    """SHA-256 of all types of a dictionary in their order, as `hashlib` has it."""
    return hashlib.sha256("\n".join(symbols).encode())


def fingerprint_of(symbols: list[str]) -> str:
    """12 hexadecimal digits of a dictionary, as in the record of a run."""
    return hash_of(symbols).hexdigest()[:12]


class Blocks:
    """Splits as blocks: `<s>` and whole sentences, as many as fit into `length` tokens; each split begins a new one.

    Sentences that do not fit are cut between words, and blocks without text are left out. Item i is block i. prefixes:
    of the splits. Raises ValueError for one that is not there or not whole, or has no block.
    """

    def __init__(self, prefixes: str | Path | list[str], length: int, symbols: list[str]):
        prefixes = prefixes if isinstance(prefixes, list) else [str(prefixes)]
        self._arguments = prefixes, length, symbols
        self.splits = [Split(prefix, len(symbols)) for prefix in prefixes]
        self.borders = [borders_of(split, length - 1, symbols) for split in self.splits]  # [blocks, 2] of each
        self.first = np.cumsum([0, *map(len, self.borders)])  # block of each split
        if not len(self):
            raise ValueError(f"{prefixes[0]} holds no text")

    def __reduce__(self):
        return Blocks, self._arguments  # a data worker that is not a copy of this process maps the files

    def __len__(self):
        return int(self.first[-1])

    def __getitem__(self, i: int) -> np.ndarray:
        if not 0 <= i < len(self):
            raise IndexError(i)
        number = int(np.searchsorted(self.first, i, side="right")) - 1
        self.splits[number].look()
        start, stop = self.borders[number][i - self.first[number]]
        return np.append(BOS, self.splits[number].tokens[start:stop]).astype(np.int64)

    @property
    def sizes(self) -> np.ndarray:
        """[blocks] numbers of tokens, for splits that fit into memory."""
        return np.concatenate([np.diff(borders)[:, 0] + 1 for borders in self.borders])


# -------------------------------------------------------------------------------------------------------------- borders


def find_borders(split: Split, room: int, symbols: list[str]) -> Iterator[np.ndarray]:
    """[blocks, 2]: where the blocks of a split begin and end in its tokens, some at a time, in order. room: most tokens
    of a block. Memory does not grow with the split."""
    rest, offset = np.zeros(0, dtype=np.int64), 0  # sizes of the parts of the block that is open, and its start
    for at in range(0, len(split), CHUNK):
        parts = split.sizes[at : at + CHUNK].astype(np.int64)
        parts = cut_long(parts, lambda i, at=at: split[at + i], room, symbols)
        parts = np.concatenate([rest, parts])
        ends = offset + np.cumsum(parts)
        # If a block begins with this part, the next one begins with that.
        follows = np.searchsorted(ends, ends - parts + room, side="right").tolist()
        first, firsts = 0, []
        while first < len(parts):
            firsts.append(first)
            first = follows[first]
        if at + CHUNK < len(split):  # more sentences may fit into the last one
            first = firsts.pop()
            rest = parts[first:]
            if not firsts:
                continue
        last = np.array([*firsts[1:], first])
        starts, stops = (ends - parts)[firsts], ends[last - 1]
        suspects = np.flatnonzero(stops - starts <= last - firsts)
        empty = [i for i in suspects if (split.tokens[starts[i] : stops[i]] == EOS).all()]
        yield np.delete(np.stack([starts, stops], axis=1), empty, axis=0)
        offset = int(ends[first - 1])


def borders_of(split: Split, room: int, symbols: list[str]) -> np.ndarray:
    """[blocks, 2]: `find_borders` of a whole split. Those of a large one are kept in a file beside it, which the first
    process that needs them writes while the others wait; if the folder cannot be written, each has a temporary file."""
    if len(split.tokens) <= SMALL:
        return np.concatenate([np.zeros((0, 2), dtype=np.int64), *find_borders(split, room, symbols)])
    path = Path(f"{split.prefix}.blocks-{room + 1}")
    about = [Path(f"{split.prefix}.{end}").stat() for end in ("idx", "bin")]
    about = [number for stat in about for number in (stat.st_size, stat.st_mtime_ns)]
    key = hashlib.sha256(f"1 {about} {room} {fingerprint_of(symbols)}".encode()).digest()
    try:
        if not _has(path, key):
            _write_beside(path, key, find_borders(split, room, symbols))
        file = path.open("rb")
    except OSError:
        file = tempfile.TemporaryFile()  # noqa: SIM115  (below; gone with the last process that has it open)
        _write(file, key, find_borders(split, room, symbols))
    with file:
        return np.memmap(file, dtype=np.int64, mode="r", offset=KEY).reshape(-1, 2)


def _has(path, key):
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(KEY) == key


def _write(file, key, borders):
    file.write(key)
    for some in borders:
        file.write(some.tobytes())
    file.flush()


def _write_beside(path, key, borders):
    lock = Path(f"{path}.lock")
    with locked(lock):
        if not _has(path, key):  # else another process has written it meanwhile
            remove_partial(path.parent, path.name)
            with written(path) as partial:
                _write(partial, key, borders)
        lock.unlink(missing_ok=True)


def cut_long(sizes: np.ndarray, ids_of: Callable[[int], np.ndarray], room: int, symbols: list[str]) -> np.ndarray:
    """The sizes of the parts of all sentences: one of more than `room` tokens is cut where the last possible word
    begins, or within a word that is longer than that.

    sizes: of the sentences; ids_of: the ids of one; symbols: the dictionary's, which show where words begin.
    """
    (long,) = np.nonzero(sizes > room)
    if not len(long):
        return sizes
    opens = np.array(word_marks(symbols))
    parts, done = [], 0
    for i in long:
        ids, start = ids_of(i), 0
        begins = opens[ids]
        parts.append(sizes[done:i])
        done, left = i + 1, len(ids)
        while left > room:
            most = max(room - (left == room + 1), 1)  # the separator does not stand alone
            (words,) = np.nonzero(begins[start + 1 : start + most + 1])
            size = 1 + int(words[-1]) if len(words) else most
            parts.append([size])
            start, left = start + size, left - size
        parts.append([left])
    return np.concatenate([*parts, sizes[done:]])
