"""Every reader of files and strings, on damaged and made-up input: it returns, or raises ValueError with one short
line, in bounded time and memory.

Each input is made from a valid one by edits (cut out a piece, put in a word of the format or any byte), or of words of
the format alone. In every run QUICK inputs per reader; SLOW with `-m slow`.
"""

import io
import resource
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from helpers import HEADERS, ROWS, least_checkpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tupe import positions
from tupe.checkpoints.gate import read_checkpoint
from tupe.corpus.readers import Input, paragraphs, read
from tupe.corpus.records import Reading
from tupe.corpus.stats import Stats
from tupe.corpus.tasks import read_split
from tupe.evaluate.minimal_pairs import read_paradigms
from tupe.plugin.pretrained import load_dictionary
from tupe.positions import canonical
from tupe.run import folder as files
from tupe.run import record

QUICK, SLOW = 40, 10_000  # inputs per reader
SECONDS = 60  # for an input, before it counts as a hang
MEMORY = 2 * 2**30  # bytes that reading may add to this process
PAIRS = '{"sentence_good": "a b", "sentence_bad": "b a", "UID": "x", "linguistics_term": "y"}\n' * 2


def documents(kind):
    """Reads a file of the corpus as both strictnesses do, and takes the text of its documents apart."""

    def read_file(path):
        for errors in ("strict", "replace"):
            source = Input(str(path), kind, path.stat().st_size, 0)
            try:
                for document in read(source, Reading(errors), Stats()):
                    paragraphs(document)
            except ValueError:
                if errors == "replace":
                    raise

    return read_file


def minimal_checkpoint():
    file = io.BytesIO()
    torch.save(least_checkpoint(), file)
    return file.getvalue()


def read_any_checkpoint(path):
    files.damage_in(path)  # never raises
    for mmap in (False, True):
        read_checkpoint(path, mmap)


def read_record(path):
    record.read(path.parent)
    record.state_of(path.parent)


@dataclass
class Reader:
    """function: of a path. name: of the file. seeds: valid inputs. words: of the format."""

    function: object
    name: str
    seeds: list
    words: list


JSON = [
    '"', "{", "}", "[", "]", ":", ",", "null", "1e999", "NaN", "-1", "9" * 5000, "true", "\\ud800", "\\u0000",
    "[" * 2000, '{"a":' * 900,
]  # fmt: skip
WIKI = (
    '<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/"><page><title>T</title><ns>0</ns><revision><text>'
    "'''A''' {{b|c=d}} [[e|f]] &lt;ref&gt;x&lt;/ref&gt;\n{| class=x\n| y\n|}\n</text></revision></page></mediawiki>"
)
TEI = (
    '<TEI xmlns="http://www.tei-c.org/ns/1.0"><teiHeader><title>T</title></teiHeader><text><body><p>A <note>b</note>'
    '<lb break="no"/>c</p><lg><l>d</l></lg></body></text></TEI>'
)
XML = [
    "<p>", "</p>", "<!DOCTYPE x [<!ENTITY a 'b'>]>", "&a;", "&#0;", "<page>", "</page>", "]]>", "<text>" * 300, "<!--",
    "xmlns='y'", "<p><hi>" * 2000,
]  # fmt: skip
MARKUP = [
    "{{", "}}", "[[", "]]", "'''", "{|", "|}", "&lt;ref&gt;", "&lt;nowiki&gt;", "{{{", "==", "{{a|" * 60, "[[b|" * 60, "http://[",
]  # fmt: skip
READERS = {
    "GLUE": Reader(
        lambda path: read_split("STS-B", "train", path), "train.tsv",
        ["\n".join([HEADERS["STS-B"], *ROWS["STS-B"]]) + "\n"],
        ["\t", "\n", "\r", '"', "0", "nan", "5.001", "label", "-1", "x" * 5000],
    ),
    "jsonl": Reader(documents("jsonl"), "a.jsonl", ['{"text": "A b.", "url": "http://a.b/c"}\n' * 2], JSON),
    "MediaWiki": Reader(documents("xml"), "a.xml", [WIKI], XML + MARKUP),
    "TEI": Reader(documents("xml"), "a.xml", [TEI], XML),
    "dict.txt": Reader(
        lambda path: load_dictionary(path), "dict.txt", ["the 10\na 5\n\u2581b 3\n"],
        ["\n", " ", "#fairseq:overwrite", "the 1", "-1", "1e5", "<mask> 1", "\u2028"],
    ),
    "checkpoint": Reader(
        read_any_checkpoint, "checkpoint.pt", [minimal_checkpoint()],
        ["PK\x03\x04", "PK\x05\x06", "data.pkl", "ctorch\n", "cos\nsystem\n", "."],
    ),
    "minimal pairs": Reader(read_paradigms, "x.jsonl", [PAIRS], JSON),
    "record": Reader(
        read_record, "record.json", ['{"task": "RTE", "scores": [], "state": "failed", "failure": null}'], JSON
    ),
    "schemes": Reader(
        lambda path: canonical(path.read_bytes().decode("utf-8", "replace")), "scheme",
        ["untied+t5", "rope:base:160000:fraction:0.5+t5:layer"],
        ["+", ":", "layer", "True", "1e999", "nan", "-1", "t5", "rope", "9" * 5000, "\n"],
    ),
}  # fmt: skip


def edited(script, seeds, words):
    """A seed, or nothing, after the edits of a script. script: bytes that Hypothesis draws, of which the first chooses
    the seed, and every five after it are an edit: place (two bytes), bytes to cut out there, word or byte to put in.
    """
    content = [*seeds, b""][script[0] % (len(seeds) + 1)] if script else b""
    for n in range(1, len(script) - 4, 5):
        place = (script[n] << 8 | script[n + 1]) % (len(content) + 1)
        new = [b"", script[n + 4 : n + 5], *words][script[n + 3] % (len(words) + 2)]
        content = content[:place] + new + content[place + script[n + 2] % 32 :]
    return content


@pytest.fixture
def bounded():
    """Memory and time of every input are limited."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, hard))
    previous = signal.signal(signal.SIGALRM, hang)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def hang(number, frame):
    raise AssertionError(f"no end after {SECONDS} s")


def check(reader, path, content):
    """Read one input."""
    path.write_bytes(content)
    signal.alarm(SECONDS)
    try:
        reader.function(path)
    except ValueError as error:
        message = str(error)
        assert "\n" not in message and len(message) < 1000 + len(str(path)), message
    finally:
        signal.alarm(0)


def fuzz(reader, folder, examples):
    """Returns the number of inputs that were read."""
    path, count, words = folder / reader.name, 0, [word.encode() for word in reader.words]
    seeds = [seed.encode() if isinstance(seed, str) else seed for seed in reader.seeds]

    @settings(
        max_examples=examples, deadline=None, derandomize=examples == QUICK, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.binary(max_size=40))
    def read_one(script):
        nonlocal count
        count += 1
        check(reader, path, edited(script, seeds, words))

    read_one()
    return count


@pytest.mark.parametrize("name", READERS)
def test_readers(name, tmp_path, bounded, monkeypatch):
    monkeypatch.setattr(positions, "_loaded_files", set())  # files of other tests, which messages name
    reader = READERS[name]
    for seed in reader.seeds:
        (tmp_path / reader.name).write_bytes(seed.encode() if isinstance(seed, str) else seed)
        reader.function(tmp_path / reader.name)  # the seeds are valid
    for content in FOUND.get(name, []):
        check(reader, tmp_path / reader.name, content)
    fuzz(reader, tmp_path, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_readers_at_length(name, tmp_path, bounded, monkeypatch):
    monkeypatch.setattr(positions, "_loaded_files", set())
    assert fuzz(READERS[name], tmp_path, SLOW) >= SLOW


# What this found, and what it raised.
FOUND = {
    "dict.txt": [b"\xff 1\n", b"a 1\na 2\n", b"a\n", b"a x\n", b"a 1 " + b"x" * 5000],  # Exception, RuntimeError
    # Two lines of torch's message.
    "checkpoint": [edited(bytes([0, 58, 175, 0, 5, 0]), [minimal_checkpoint()], [b"", b"", b"", b"ctorch\n"])],
    "minimal pairs": [b"[" * 2000],  # RecursionError
    "record": [b"[" * 2000],  # RecursionError
    # All of it in the message; a line break of a value there.
    "schemes": [b"9" * 5000, b"t5:" + b"9" * 5000, b"rope:base:" + b"9" * 5000, b"rope:base:\n+t5"],
}
