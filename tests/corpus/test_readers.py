import bz2
import errno
import gzip
import json
import lzma
import os

import pytest
import zstandard

from tupe.corpus import readers as documents
from tupe.corpus.readers import Document, find_inputs, paragraphs
from tupe.corpus.records import Reading
from tupe.corpus.stats import Stats


def read_all(*paths, errors="strict"):
    stats = Stats()
    inputs, _ = find_inputs(paths)
    return [document for source in inputs for document in documents.read(source, Reading(errors), stats)], stats


def texts(*paths, **options):
    return [document.text for document in read_all(*paths, **options)[0]]


PAGE = "<page><title>{title}</title><ns>{ns}</ns>{redirect}<revision><text>{text}</text></revision></page>"
MARKUP = """{{Infobox|name=Dropped}} '''Anarchism''' is a [[political philosophy|philosophy]] of the [[state]].
It grew in &lt;math&gt;x^2&lt;/math&gt; Europe &amp;amp; America.&lt;ref&gt;Dropped.&lt;/ref&gt; See http://a.org/b.

{| class="x"
| Dropped cell
|}
[[File:Dropped.jpg|thumb|Dropped caption]]
== History of it ==
The [http://b.org long] history &lt;!-- dropped --&gt; is told.
* One ''item''
== References ==
* Dropped list
=== Dropped part ===
Dropped
== After ==
Kept.
"""


def wiki(*pages):
    return (
        f'<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/"><siteinfo/>{"".join(pages)}</mediawiki>'.encode()
    )


def page(title="A", ns=0, redirect="", text="Some text."):
    return PAGE.format(title=title, ns=ns, redirect=redirect, text=text)


COMPRESS = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}
LINES = "First line.\r\nSecond line.\n\n\r\nAnother document.\n \nThe last one, é, no line end".encode()
DOCUMENTS = ["First line.\nSecond line.", "Another document.", "The last one, \u00e9, no line end"]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_plain_text_in_every_compression(tmp_path, suffix):
    """In two frames, as of cat."""
    compress, half = COMPRESS[suffix], LINES.index(b"Another")
    (tmp_path / f"a.txt{suffix}").write_bytes(compress(LINES[:half]) + compress(LINES[half:]))
    assert texts(tmp_path / f"a.txt{suffix}") == DOCUMENTS


def test_a_dump_names_files_and_categories_in_its_language(tmp_path):
    names = '<namespace key="6">Datei</namespace><namespace key="14">Kategorie</namespace><namespace key="0" />'
    text = "Ein Haus. [[datei:Haus.jpg|mini|hochkant=1.2|Ein Bild]] Das [[Kategorie-Problem]].\n[[ Kategorie :Physik]]"
    dump = wiki(page(text=text)).replace(
        b"<siteinfo/>", f"<siteinfo><namespaces>{names}</namespaces></siteinfo>".encode()
    )
    (tmp_path / "a.xml").write_bytes(dump)
    (document,), _ = read_all(tmp_path / "a.xml")
    assert " ".join(" ".join(paragraphs(document)).split()) == "Ein Haus. Das Kategorie-Problem."


def test_a_line_of_invisible_characters_is_empty(tmp_path):
    """For lines and books."""
    lines = ["one", "\u200b", "two", " \ufeff\u00ad", "\u200bthree"]
    (tmp_path / "a.txt").write_text("\n".join(lines), encoding="utf-8")
    assert texts(tmp_path / "a.txt") == ["one", "two", "\u200bthree"]
    assert texts(tmp_path) == ["one\ntwo\n\u200bthree"]  # three paragraphs


def _flip(content, at):
    return content[:at] + bytes([content[at] ^ 255]) + content[at + 1 :]


@pytest.mark.parametrize("suffix", [s for s in COMPRESS if s])
@pytest.mark.parametrize("damage", ["no stream at all", "middle", "last byte", "cut"])
def test_a_damaged_stream_behind_a_whole_one(damage, suffix, tmp_path):
    """The rest of a file is never lost without a word. Behind a stream of .xz Python looks for no damage."""
    compress = COMPRESS[suffix]
    if suffix == ".zst":  # the others have checksums always
        compress = zstandard.ZstdCompressor(write_checksum=True).compress
    documents = [*DOCUMENTS, *(" ".join([str(number)] * 2500) for number in range(300))]  # the last MB may be lost
    text = "\n\n".join(documents).encode()
    whole, more = b"" if suffix == ".xz" else compress(text), compress(b"\n\nmore\n\nand more")
    bad = {
        "no stream at all": b"no stream at all", "middle": _flip(more, len(more) // 2),
        "last byte": _flip(more, len(more) - 1), "cut": more[:-1],
    }  # fmt: skip
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(whole + bad[damage])
    with pytest.raises(ValueError, match=rf"a.txt\{suffix}: cannot be read after .*--errors replace") as caught:
        read_all(path)
    assert "\n" not in str(caught.value)
    kept, stats = read_all(path, errors="replace")
    assert len(kept) >= (150 if whole else 0)
    assert [d.text for d in kept] == [*(documents if whole else []), "more"][: len(kept)]
    assert stats.dropped["file: damaged, read up to there"] == 1


@pytest.mark.parametrize("name", [f"a.txt{suffix}" for suffix in COMPRESS] + ["a.parquet", "a.xml"])
def test_a_file_that_cannot_be_opened_is_no_damaged_one(name, tmp_path):
    """The mount of another node, for example: what is left out would depend on the machine."""
    (tmp_path / name).write_bytes(b"")
    (source,), _ = find_inputs([tmp_path / name])
    (tmp_path / name).unlink()
    with pytest.raises(FileNotFoundError):
        list(documents.read(source, Reading("replace"), Stats()))


def test_an_empty_name_is_not_this_folder(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("not asked for")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="an INPUT is empty"):
        find_inputs([""])


@pytest.mark.parametrize(
    "markup, text",
    [
        ("{2}The Times{3}s page", "The Times's page"),
        ("{3}Apple{4}s shop", "Apple's shop"),
        ("{3}Aardvark{3}s dig", "Aardvarks dig"),
        ("{4}s-Hertogenbosch{3}", "'s-Hertogenbosch"),
        ("{5}Both{5} of l'eau", "Both of l'eau"),
        ("{6}six{6}", "'six'"),
        ("{2}as l{3}eau, a {3}b{3}", "as l'eau, a b"),  # behind a word of one letter, not the others
        ("{2}one\n{3}two", "one\ntwo"),  # each line is its own
    ],
)
def test_apostrophes_are_told_from_marks_of_italics_and_bold(markup, text):
    """By MediaWiki's rule for an odd number of both. {n}: n apostrophes."""
    markup = markup.format(*("'" * n for n in range(7)))
    assert "\n".join(paragraphs(Document("place", "source", True, markup))) == text


def test_a_folder_holds_books(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("TITLE\n\n\nA paragraph that\nwas wrapped.\n\nThe next one.\n")
    (tmp_path / "sub" / "b.txt").write_text("No empty lines:\na paragraph a line.\n")  # the same name elsewhere
    (tmp_path / "readme.html").write_text("not text")
    assert texts(tmp_path) == [
        "TITLE\nA paragraph that was wrapped.\nThe next one.",
        "No empty lines:\na paragraph a line.",
    ]
    inputs, skipped = find_inputs([tmp_path, tmp_path / "b.txt", f"{tmp_path}/**/*.txt"])
    assert [source.kind for source in inputs] == ["book", "book"]
    assert sorted(skipped) == sorted(
        map(str, [tmp_path / "readme.html", *[tmp_path / "b.txt"] * 2, tmp_path / "sub/b.txt"])
    )


def test_a_folder_may_hold_a_sentence_a_line(tmp_path):
    """With --sentences lines, no line end only wraps the text, and indentation is text."""
    (tmp_path / "a.txt").write_text("One\n    two\n\nthree\n")
    (source,), _ = find_inputs([tmp_path])
    reading = Reading(wrap=None)
    (document,) = documents.read(source, reading, Stats())
    assert document.text == "One\n    two\n\nthree"


def test_a_line_end_is_no_blank_where_words_have_none(tmp_path):
    (tmp_path / "a.txt").write_text("人人生而自由，在尊严和权\n利上一律平等。\n\n第二段。\n")
    (tmp_path / "b.xml").write_text("<TEI><body><p>人人生而自由，\n   在尊严和权<lb/>利上一律平等。</p></body></TEI>")
    (tmp_path / "c.txt").write_text("本文使用 deep\nlearning 的方法。\n\n二。\n")
    wanted_of = {
        "a.txt": "人人生而自由，在尊严和权利上一律平等。\n第二段。",
        "b.xml": "人人生而自由，在尊严和权利上一律平等。",
        "c.txt": "本文使用 deep learning 的方法。\n二。",
    }
    for name, wanted in wanted_of.items():
        (source,), _ = find_inputs([f"{tmp_path}/{name}"])
        reader = documents.READERS["xml" if name == "b.xml" else "book"]
        with open(source.path, "rb") as stream:
            (document,) = reader(documents.File(source.path, stream, Reading(wrap=""), Stats()))
        assert document.text == wanted


def test_a_link_to_a_folder_above_is_walked_once(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_text("text")
    for name in ("up", "up2"):
        (tmp_path / "sub" / name).symlink_to("..", target_is_directory=True)
    inputs, skipped = find_inputs([tmp_path])
    assert [source.path for source in inputs] == [str(tmp_path / "sub" / "a.txt")] and not skipped


def test_hidden_files_and_the_output_are_no_inputs(tmp_path):
    for name in ("a.txt", ".a.txt", ".git/b.txt", "out/work/c.txt", "out/dict.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    for inputs in ([tmp_path], [f"{tmp_path}/**/*.txt"]):
        read_documents, skipped = find_inputs(inputs, tmp_path / "out")
        assert [source.path for source in read_documents] == [str(tmp_path / "a.txt")] and not skipped


def test_links_to_folders_are_followed(tmp_path, monkeypatch):
    """Each file once. A folder that cannot be read is named."""
    for name in ("in/b/1.txt", "in/2.txt", "else/3.txt", "else/sub/4.txt", "else/.git/5.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    links = {"in/a": "b", "in/more": "../else", "in/.c": "b"}
    for name, target in links.items():
        (tmp_path / name).symlink_to(target)
    inputs, skipped = find_inputs([tmp_path / "in"])
    found = [source.path.removeprefix(f"{tmp_path}/in/") for source in inputs]
    assert found == ["2.txt", "a/1.txt", "more/3.txt", "more/sub/4.txt"]
    assert not skipped
    scan = os.scandir

    def closed(path):
        if str(path).endswith("more/sub"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", closed)
    with pytest.raises(ValueError, match="in/more/sub: cannot be read: Permission denied"):
        find_inputs([tmp_path / "in"])


def test_glob_is_sorted_and_each_file_is_read_once(tmp_path):
    for name in "cab":
        (tmp_path / f"{name}.txt").write_text(name)
    assert texts(tmp_path / "b.txt", f"{tmp_path}/*.txt") == ["b", "a", "c"]


def test_json_lines(tmp_path):
    rows = [
        {"id": 1, "url": "https://en.wikipedia.org/wiki?curid=1", "title": "A", "text": "A\n\nFirst\nSecond"},
        {"text": "\ud800 half a character"},
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    read_documents, _ = read_all(path)
    assert [d.text for d in read_documents] == [row["text"] for row in rows]
    assert [d.source for d in read_documents] == [str(path)] * 2


def test_a_byte_order_mark_is_no_text(tmp_path):
    contents = {"a.jsonl": '{"text": "One."}\n{"text": "Two."}\n', "b.csv": "text\nOne.\nTwo.\n",
                "c.txt": "One.\n\nTwo.\n"}  # fmt: skip
    for name, content in contents.items():
        (tmp_path / name).write_text(content, encoding="utf-8-sig")
        assert texts(tmp_path / name) == ["One.", "Two."], name


def test_links_to_other_languages_and_magic_words_are_no_text():
    markup = "__NOTOC__ A [[cat]], in German [[:de:Katze]].\n[[de:Katze]] [[zh-min-nan:Niau]] [[C: a language]]"
    assert paragraphs(Document("x", "x", True, markup)) == [" A cat, in German :de:Katze.", "  C: a language"]


def test_json_line_that_is_none(tmp_path):
    for bad in ('{"text": 3}', "[]", '{"no": "text"}', "[" * 100_000):
        (tmp_path / "a.jsonl").write_text('{"text": "good"}\n' + bad + "\n")
        with pytest.raises(ValueError, match="a.jsonl, line 2: ('text' is not text|not a JSON object|no 'text') "):
            read_all(tmp_path / "a.jsonl")
        read_documents, stats = read_all(tmp_path / "a.jsonl", errors="replace")
        assert [d.text for d in read_documents] == ["good"] and len(stats.dropped) == 1


@pytest.mark.parametrize("name", ["w.xml", "enwiki-pages-articles1.xml-p1p41242.bz2"])
def test_wiki_dump(tmp_path, name):
    dump = wiki(
        page(text=MARKUP),
        page("B", redirect='<redirect title="A"/>', text="#REDIRECT [[A]]"),
        page("Talk:A", ns=1),
    )
    suffix = "." + name.rsplit(".", 1)[1]
    (tmp_path / name).write_bytes(COMPRESS.get(suffix, bytes)(dump))
    (document,), stats = read_all(tmp_path / name)
    assert document.place.endswith(f"{name}: A") and document.wiki
    assert [line.strip() for line in paragraphs(document) if line.strip()] == [
        "Anarchism is a philosophy of the state.",
        "It grew in  Europe & America. See http://a.org/b.",
        "The long history  is told.",
        "One item",
        "Kept.",
    ]
    assert stats.dropped == {"document: a page that redirects, or is no article": 2}


def test_nested_and_broken_markup_survives():
    for markup in (
        "{{" * 2000 + "text",
        "[[" * 500 + "x" + "]]" * 500,
        "<ref>",
        "<div>" * 3000 + "x",
    ):
        try:
            assert isinstance(paragraphs(Document("s", "d", True, markup)), list)
        except ValueError as error:  # refused with a reason, which the pipeline counts
            assert str(error).startswith("s: ")  # the page


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("b.txt", b"fine\nnot \xff fine\n", "b.txt, line 2: byte 0xff is not UTF-8.*--errors replace"),
        ("cut.xml", wiki(page("Title"))[:-9], "cut.xml: cannot be read after .*: Title: "),
        ("bomb.xml", b'<!DOCTYPE b [<!ENTITY a "aa"><!ENTITY b "&a;&a;">]><m>&b;</m>', "refused, .* entities"),
        ("x.pdf", b"", "x.pdf: unknown kind of input; valid: .txt"),
    ],
)
def test_bad_input_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_all(tmp_path / name, errors="replace" if name == "bomb.xml" else "strict")
    with pytest.raises(ValueError, match="nothing.txt: no such file or folder"):
        find_inputs([tmp_path / "nothing.txt"])


def test_a_document_type_alone_is_no_bomb(tmp_path):
    body = "<TEI><body><p>Text{}</p></body></TEI>"
    (tmp_path / "a.xml").write_text('<!DOCTYPE TEI SYSTEM "tei_all.dtd">' + body.format("."))
    assert [document.text for document in read_all(tmp_path / "a.xml")[0]] == ["Text."]
    (tmp_path / "a.xml").write_text('<!DOCTYPE TEI SYSTEM "tei_all.dtd">' + body.format("&nbsp;."))
    with pytest.raises(ValueError, match="a.xml: cannot be read after the start: .*undefined entity"):
        read_all(tmp_path / "a.xml")


def test_undecodable_bytes_can_be_replaced(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"a \xff b\n\nc\xe2\x82")
    read_documents, stats = read_all(tmp_path / "a.txt", errors="replace")
    assert [d.text for d in read_documents] == ["a \ufffd b", "c\ufffd"]
    assert stats.dropped == {"line: bytes replaced by U+FFFD": 2}


def test_a_document_that_is_too_long_is_dropped_whatever_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "MAX_DOCUMENT", 1000)
    long = "word " * 300
    (tmp_path / "a.txt").write_text(f"good\n\nstart\n{long}\nend\n\n" + "line\n" * 300 + "\ngood, too\n")
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"text": "good"}) + "\n" + json.dumps({"text": long}) + '\n{"text": "3"}\n'
    )
    (tmp_path / "a.xml").write_bytes(wiki(page(text="good"), page("Long", text=long)))
    (tmp_path / "a.csv").write_text(f"text,id\ngood,1\n{long},2\n3,3\n")
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "long.txt").write_text(long)
    (tmp_path / "books" / "short.txt").write_text("good")
    for name, kept, lost in (
        ("a.txt", ["good", "good, too"], 2),
        ("a.jsonl", ["good", "3"], 1),
        ("a.xml", ["good"], 1),
        ("a.csv", ["good", "3"], 1),
        ("books", ["good"], 1),
    ):
        read_documents, stats = read_all(tmp_path / name)
        assert [d.text for d in read_documents] == kept
        assert stats.dropped["document: longer than 1000 characters"] == lost
        assert stats.counts["documents read"] == len(kept) + lost


TEI = """<TEI xmlns="http://www.tei-c.org/ns/1.0"><teiHeader><fileDesc><titleStmt><title>A  Novel</title></titleStmt>
</fileDesc></teiHeader><text><front><p>Dropped preface</p></front><body><div type="chapter"><head>Dropped head</head>
<p>It was a <hi rend="i">dark</hi> and
   stormy<note>dropped note</note> night<lb/>in Lon
   <lb break="no"/> don
<choice><sic>teh</sic><corr>the</corr></choice> city.
<!-- dropped --></p><lg><l>A line,</l><l>another.</l></lg></div></body><back><p>Dropped end</p></back></text></TEI>"""


@pytest.mark.parametrize("copies", [1, 2])
def test_tei(copies, tmp_path):
    corpus = TEI if copies == 1 else f"<teiCorpus>{TEI * copies}</teiCorpus>"
    (tmp_path / "novel.xml").write_text(corpus)
    (place, source, wiki, text), *others = read_all(tmp_path / "novel.xml")[0]
    assert (place, source, wiki) == (f"{tmp_path}/novel.xml: A Novel", f"{tmp_path}/novel.xml", False)
    assert text.split("\n") == ["It was a dark and stormy night in London the city.", "A line,", "another."]
    assert [other.text for other in others] == [text] * (copies - 1)


@pytest.mark.parametrize(
    "body, expected",
    [
        ("<p>One.</p><floatingText><body><p>A letter.</p></body></floatingText><p>Two.</p>", "One.|A letter.|Two."),
        ("<p>He said: <l>roses</l> and went on.</p>", "roses|He said: and went on."),
        ("<p>I know <sic>wich</sic> way, <orig>Sir</orig>.</p>", "I know wich way, Sir."),
        ("<p><choice>\n<abbr>Mr</abbr>\n<expan>Mister</expan>\n</choice> A.</p>", "Mister A."),
        ("<p>a <app><rdg>fou</rdg><lem>foo</lem></app> <app><rdg>bar</rdg><rdg>baz</rdg></app></p>", "a foo bar"),
        ("<p>One.</p><note><p>Dropped.</p></note><figure><p>Dropped.</p></figure><p>Two.</p>", "One.|Two."),
    ],
)
def test_tei_within_tei(body, expected, tmp_path):
    (tmp_path / "novel.xml").write_text(f"<TEI><text><body>{body}</body></text></TEI>")
    ((*_, text),) = read_all(tmp_path / "novel.xml")[0]
    assert text.split("\n") == expected.split("|")


def test_xml_of_another_kind_is_refused(tmp_path):
    (tmp_path / "page.xml").write_text("<html><p>text</p></html>")
    with pytest.raises(ValueError, match="<html>.*mediawiki"):
        read_all(tmp_path / "page.xml")
