"""Prepared text on the disk, in fairseq's mmap format, and the splits that names mean. Needs only numpy."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from ..run.checksums import check
from ..text import read_dictionary

CODES = {4: np.int32, 5: np.int64, 8: np.uint16}  # of the types of ids in an index; fairseq has more, for numbers
HELD_OUT_SEED = 1  # of the masks of every split but `train`, so that all models and seeds predict the same tokens
LOOK = 2**16  # ids in a row that are looked at, in large data of every so many
HEAD = 26  # bytes of an index: magic, version, type of the ids, count; then an int32 and an int64 of each sequence


def read_symbols(folder: str | Path) -> list[str]:
    """The types of the dict.txt in a folder of prepared data with the special ones, in the order of their ids. Raises
    ValueError if there is none, or not the one that the folder's manifest.json describes."""
    if not Path(folder).is_dir():
        raise ValueError(f"data folder not found: {folder}")
    if not Path(folder, "dict.txt").is_file():
        raise ValueError(f"{folder} is not a folder of prepared data: it has no dict.txt")
    check(Path(folder, "dict.txt"))
    return read_dictionary(Path(folder, "dict.txt"))


def _check_length(file, length):
    if (actual := file.stat().st_size) != length:
        raise ValueError(f"{file} has {actual:,} bytes, by its index {length:,}; prepare the data again")


class Split:
    """The sequences of a split, each an array of ids. All of it stays on the disk until it is used: `tokens`, which has
    all ids, and `sizes`, the numbers of ids. types: of the dictionary.

    Raises ValueError, naming the file, if index or data is missing, or is not as long as the index says, and for ids
    that the dictionary does not have. Large data is looked at in some places only.
    """

    def __init__(self, prefix: str | Path, types: int | None = None):
        self.prefix, index, data = prefix, Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
        if not index.is_file():
            raise ValueError(f"{index.parent} has no split {Path(prefix).name!r}")
        if not data.is_file():
            raise ValueError(f"{data} not found; prepare the data again")
        check(index)
        check(data)
        with index.open("rb") as file:
            head = file.read(HEAD)
        code, count = head[17:18], int.from_bytes(head[18:], "little")
        if not head.startswith(b"MMIDIDX\0\0") or not code or code[0] not in CODES:
            raise ValueError(f"{index} is not an index of fairseq's mmap format, or cut off; prepare the data again")
        _check_length(index, HEAD + 12 * count)
        dtype, empty = np.dtype(CODES[code[0]]), np.zeros(0, dtype=np.int32)
        self.sizes = np.memmap(index, np.int32, "r", HEAD, (count,)) if count else empty
        self._bytes = np.memmap(index, np.int64, "r", HEAD + 4 * count, (count,)) if count else empty  # before each one
        end = int(self._bytes[-1]) + int(self.sizes[-1]) * dtype.itemsize if count else 0
        _check_length(data, end)
        self.tokens = np.memmap(data, dtype, "r") if end else empty
        self._data, self._length = data, end
        if types and end:
            step = LOOK * max(len(self.tokens) // (256 * LOOK), 1)
            found = max(self.tokens[at : at + LOOK].max() for at in range(0, len(self.tokens), step))
            if found >= types:
                what = f"{data} has the id {found}, dict.txt only {types} types"
                raise ValueError(f"{what}: it is cut off, or of other data")

    def look(self) -> None:
        """Raise ValueError if the data has been cut or replaced since: reading what is gone would kill the process."""
        if (length := os.stat(self._data).st_size) != self._length:
            what = f"{self._data} has {length:,} bytes, and had {self._length:,} when this began"
            raise ValueError(f"{what}: put the file back, and the same command goes on")

    def __reduce__(self):
        return Split, (self.prefix,)  # a data worker that is not a copy of this process maps the files

    def __len__(self):
        return len(self.sizes)

    def __getitem__(self, i: int) -> np.ndarray:
        if not 0 <= i < len(self):
            raise IndexError(i)
        self.look()
        start = int(self._bytes[i]) // self.tokens.itemsize
        return self.tokens[start : start + int(self.sizes[i])]


def type_of_ids(types: int) -> type:
    """As fairseq chooses it, by the size of the vocabulary."""
    return np.uint16 if types < 65500 else np.int32


def write_index(prefix: str | Path, sizes: Iterable[np.ndarray], dtype: type) -> None:
    """Write the index of a split whose ids are there. sizes: numbers of ids, as int32, in several arrays."""
    sizes, start, code = list(sizes), 0, next(code for code, known in CODES.items() if known == dtype)
    with open(f"{prefix}.idx", "wb") as file:
        file.write(b"MMIDIDX\x00\x00" + np.uint64(1).tobytes() + np.uint8(code).tobytes())
        file.write(np.uint64(sum(map(len, sizes))).tobytes())
        for some in sizes:
            file.write(some)
        for some in sizes:
            ends = start + np.cumsum(some, dtype=np.int64) * np.dtype(dtype).itemsize
            file.write(np.concatenate([[start], ends[:-1]]).astype(np.int64)[: len(some)])
            start = int(ends[-1]) if len(some) else start


def write_split(prefix: str | Path, sequences: Iterable[Sequence[int]], types: int) -> None:
    """Write sequences of ids, each with the `</s>` that closes it. types: size of the vocabulary."""
    dtype, sizes = type_of_ids(types), []
    with open(f"{prefix}.bin", "wb") as file:
        for ids in sequences:
            file.write(np.asarray(ids, dtype))
            sizes.append(len(ids))
    write_index(prefix, [np.array(sizes, np.int32)], dtype)


def folders_of(data: str | Path) -> list[Path]:
    """The folders that "FOLDER" or "FOLDER:FOLDER:..." names."""
    return [Path(data)] if Path(data).is_dir() else [Path(folder) for folder in str(data).split(":")]


def validated(valid_subset: str, train_subset: str) -> list[str]:
    """The splits that "NAME,NAME,..." names, to validate on. Raises ValueError for the one that is trained on: its
    batches are drawn, masked and scored as training needs them."""
    if train_subset in (names := valid_subset.split(",")):
        raise ValueError(f"--valid-subset {valid_subset}: {train_subset} is the split to train on; valid: other splits")
    return names


def prefixes_of(data: str | Path, split: str) -> list[str]:
    """Where a split is: text to train on in every folder of `data`, one after the other; held-out text in the first
    one. Raises ValueError if the folders have other dictionaries, which ids would mix up."""
    first, *others = folders_of(data)
    if not split.startswith("train"):
        return [f"{first}/{split}"]
    for folder in others:
        if read_symbols(folder) != read_symbols(first):
            raise ValueError(f"{folder} was prepared with another vocabulary than {first}: their dict.txt differ")
    return [f"{folder}/{split}" for folder in (first, *others)]


def files_of(prefixes: Iterable[str]) -> list[Path]:
    """The files of some splits, in the order of a run's fingerprint."""
    return [Path(f"{prefix}.{end}") for prefix in prefixes for end in ("bin", "idx")]
