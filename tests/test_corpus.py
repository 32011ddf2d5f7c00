"""scripts/prepare_corpus.py and tupe.corpus on tiny files."""

import bz2
import json
import re
import runpy
from collections import Counter
from pathlib import Path

import pytest

from tupe import corpus
from tupe.text import TextEncoder

ROOT = Path(__file__).parent.parent
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "prepare_corpus.py"))["main"]
SUBJECTS = ["The old man", "A young woman", "My neighbour's dog", "Every king", "Nobody in town", "The U.S. Senate"]
VERBS = ["saw", "heard of", "didn't like", "bought", "painted", "forgot"]
OBJECTS = ["the river", "a café,", "two ships (in 1990)", "what he'd written", "the “Times”", "http://example.org/x"]


def sentences(start, count):
    return " ".join(
        f"{SUBJECTS[i % 6]} {VERBS[i // 6 % 6]} {OBJECTS[i // 36 % 6]} {'again and ' * (i % 3)}number {i}."
        for i in range(start, start + count)
    )


def text(documents=30):
    return "\n\n".join(sentences(7 * i, 4) + "\n" + sentences(7 * i + 4, 3) for i in range(documents)) + "\n"


def run(*args):
    SCRIPT([str(arg) for arg in args])


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "a.txt").write_text(text(), encoding="utf-8")
    run(folder / "a.txt", "--out", folder / "data", "--vocab-size", 300, "--valid-fraction", 0.1)
    return folder / "data"


def test_fairseq_reads_the_folder(data):
    from fairseq.data import Dictionary, TokenBlockDataset, data_utils

    dictionary = Dictionary.load(str(data / "dict.txt"))
    dictionary.add_symbol("<mask>")
    encoder = TextEncoder(data)
    assert len(dictionary) == len(encoder) == 300
    assert [dictionary[i] for i in range(300)] == encoder.symbols
    for name in ("<url>", "<email>", "<file>"):
        assert encoder.pieces(name) == ["\u2581" + name]
    manifest = json.loads((data / "manifest.json").read_text())
    found = []
    for split in ("train", "valid"):
        dataset = data_utils.load_indexed_dataset(str(data / split), dictionary, "mmap")
        assert manifest[split]["ids"] == sum(dataset.sizes)
        assert manifest[split]["documents"] == sum(dataset.sizes == 1)
        assert len(dataset[len(dataset) - 1]) == 1 and all(line[-1] == dictionary.eos() for line in dataset)
        blocks = TokenBlockDataset(dataset, dataset.sizes, 64, dictionary.pad(), dictionary.eos(), "complete_doc")
        assert len(blocks) >= manifest[split]["documents"]
        found += [encoder.decode(line) for line in dataset if len(line) > 1]
    # every sentence arrives, in the form in which fine-tuning would see it
    wanted = [" ".join(s) for d in range(30) for s in encoder.normaliser.sentences(sentences(7 * d, 7))]
    assert sorted(found) == sorted(wanted) and len(found) == 210


def test_encoder_agrees_with_training(data):
    encoder = TextEncoder(data)
    source = "Nobody in town didn't like the “Times”. The U.S. Senate saw http://example.org/x, 中"
    ids = encoder.encode(source)
    assert encoder.decode(ids) == 'nobody in town didn \'t like the " times " . the u.s. senate saw <url> , <unk>'
    assert [encoder.symbols[i] for i in ids[:-1]] == encoder.pieces(source)[:-1]
    spans = encoder.spans(source)
    assert [span.text for span in spans] == encoder.pieces(source)
    for span in spans:
        piece = span.text.strip("\u2581")
        covered = source[span.start : span.end].lower()
        assert covered == {'"': covered, "'": "'", "<url>": "http://example.org/x", "": "中"}.get(piece, piece)


def test_deterministic_and_independent_of_the_folder(data, tmp_path):
    (tmp_path / "a.txt").write_text(text(), encoding="utf-8")
    run(tmp_path / "a.txt", "--out", tmp_path / "again", "--vocab-size", 300, "--valid-fraction", 0.1)
    for file in data.iterdir():
        if file.name != "manifest.json":  # names the inputs
            assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes(), file.name


def test_same_ids_as_fairseq_preprocess(data, tmp_path):
    from fairseq.data import Dictionary, data_utils
    from fairseq_cli import preprocess

    encoder = TextEncoder(data)
    dictionary = Dictionary.load(str(data / "dict.txt"))
    ours = data_utils.load_indexed_dataset(str(data / "train"), dictionary, "mmap")
    lines = [" ".join(dictionary[int(i)] for i in line[:-1]) for line in ours]
    assert sum(map(len, lines)) > 1000 and encoder.ids["<unk>"] == dictionary.unk()
    (tmp_path / "train.bpe").write_text("\n".join(lines) + "\n", encoding="utf-8")
    options = [
        "--only-source",
        "--srcdict",
        data / "dict.txt",
        "--trainpref",
        tmp_path / "train.bpe",
        "--destdir",
        tmp_path,
    ]
    preprocess.main(preprocess.options.get_preprocessing_parser().parse_args(list(map(str, options))))
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"train.{suffix}").read_bytes() == (data / f"train.{suffix}").read_bytes()


PAGE = "<page><title>{title}</title><ns>{ns}</ns>{redirect}<revision><text>{text}</text></revision></page>"
MARKUP = """{{Infobox|name=Dropped}} '''Anarchism''' is a [[political philosophy|philosophy]] of the
[[state]].&lt;ref&gt;Dropped source.&lt;/ref&gt;
It grew in &lt;math&gt;x^2&lt;/math&gt; Europe &amp;amp; America over many years, see http://a.org/b.

{| class="x"
| Dropped cell
|}
[[File:Dropped.jpg|thumb|Dropped caption]]
== History ==
The [http://b.org long] history of the movement is told in many books &lt;!-- dropped --&gt; by people.
== References ==
* Dropped list of all the books that were read for this article.
"""


def wiki(pages):
    space = 'xmlns="http://www.mediawiki.org/xml/export-0.10/"'
    return f"<mediawiki {space}><siteinfo/>{''.join(pages)}</mediawiki>"


def test_wiki_dump(tmp_path):
    pages = [
        PAGE.format(title="A", ns=0, redirect="", text=MARKUP),
        PAGE.format(title="B", ns=0, redirect='<redirect title="A"/>', text="#REDIRECT [[A]]"),
        PAGE.format(title="Talk:A", ns=1, redirect="", text="Dropped talk page about the article that is above."),
    ]
    for name, write in (("w.xml", lambda b: b), ("w.xml-p1p2.bz2", bz2.compress)):
        (tmp_path / name).write_bytes(write(wiki(pages).encode()))
        stats = Counter()
        (document,) = corpus.read_documents([tmp_path / name], "strict", stats)
        assert corpus.clean_paragraphs(document.paragraphs, stats) == [
            "Anarchism is a philosophy of the state. It grew in Europe & America over many years, see <url> .",
            "The long history of the movement is told in many books by people.",
        ]
        assert stats["dropped: page that redirects"] == stats["dropped: page that is no article"] == 1


def test_steps_count_what_they_drop():
    stats = Counter()
    good = "This is a paragraph of more than eight words in all."
    kept = corpus.clean_paragraphs(
        ["Chapter 1", good, good, "\u200b", "1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 | 9", "x" * 1001, "The end."], stats
    )
    assert kept == [f"Chapter 1 {good} The end."]
    assert stats == {
        "paragraphs": 7,
        "joined: short paragraph": 2,
        "dropped: paragraph repeated in its document": 1,
        "dropped: paragraph without visible text": 1,
        "dropped: paragraph of few letters": 1,
        "dropped: paragraph with a word of more than 1000 characters": 1,
    }


def test_last_paragraph_needs_no_empty_line_and_copies_go(tmp_path):
    body = text(10)
    (tmp_path / "a.txt").write_text(body + "\n" + body.split("\n\n")[0].upper() + "\r\n\r\n" + sentences(900, 5))
    run(tmp_path / "a.txt", "--out", tmp_path / "data", "--vocab-size", 200)
    manifest = json.loads((tmp_path / "data" / "manifest.json").read_text())
    assert manifest["counts"]["dropped: document that is a copy"] == 1
    assert manifest["train"]["documents"] + manifest["valid"]["documents"] == 11


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("empty.txt", b"", "no text left of .*empty.txt"),
        ("blank.txt", b"\n \n\n", "no text left"),
        (
            "b.txt",
            b"fine\nnot \xff fine\n",
            r"b.txt, line 2: byte 0xff at column 5 is not UTF-8.*--errors",
        ),
        ("one.txt", b"Just one document of a few more words than eight.\n", "1 document after cleaning"),
        ("cut.xml.bz2", bz2.compress(wiki([]).encode())[:-9], "cut.xml.bz2, after page None: .*damaged"),
        (
            "cut.xml",
            wiki([PAGE.format(title="T", ns=0, redirect="", text="")]).encode()[:-9],
            "after page 'T'.*damaged",
        ),
        ("bomb.xml", b'<!DOCTYPE b [<!ENTITY a "aa"><!ENTITY b "&a;&a;">]><m>&b;</m>', "EntitiesForbidden"),
        ("x.pdf", b"", "x.pdf: unknown kind of input; valid: .txt"),
    ],
)
def test_bad_input_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SystemExit) as error:
        run(tmp_path / name, "--out", tmp_path / "data", "--vocab-size", 200)
    assert re.search(message, str(error.value)), error.value


def test_undecodable_bytes_can_be_replaced(tmp_path):
    (tmp_path / "a.txt").write_bytes(
        text(10).encode() + b"\nThe last \xff one has a byte that nobody can read today.\n"
    )
    run(tmp_path / "a.txt", "--out", tmp_path / "data", "--vocab-size", 200, "--errors", "replace")
    counts = json.loads((tmp_path / "data" / "manifest.json").read_text())["counts"]
    assert counts["documents kept"] == 11 and counts["lines with bytes replaced by U+FFFD"] == 1


def test_folder_of_another_run_is_safe(tmp_path, data):
    (tmp_path / "a.txt").write_text(text(10))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "precious").write_text("x")
    with pytest.raises(SystemExit, match="data is not empty.*--overwrite"):
        run(tmp_path / "a.txt", "--out", tmp_path / "data", "--vocab-size", 200)
    assert (tmp_path / "data" / "precious").exists()


def test_overwrite(tmp_path):
    (tmp_path / "a.txt").write_text(text(10))
    run(tmp_path / "a.txt", "--out", tmp_path / "data", "--vocab-size", 200)
    run(tmp_path / "a.txt", "--out", tmp_path / "data", "--vocab-size", 210, "--overwrite")
    assert len(TextEncoder(tmp_path / "data")) == 210


def test_vocabulary_that_the_text_cannot_fill(tmp_path):
    (tmp_path / "a.txt").write_text(text(10))
    with pytest.raises(SystemExit, match="cannot make 30000 types from this text"):
        run(tmp_path / "a.txt", "--out", tmp_path / "data", "--vocab-size", 30000)


def test_folder_without_a_vocabulary(tmp_path):
    with pytest.raises(ValueError, match="has no sentencepiece.bpe.model"):
        TextEncoder(tmp_path)
