import re
import string
import unicodedata

import pytest
import spacy
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sacremoses import MosesTokenizer

from tupe.normaliser import CACHED_LENGTH, Aligned, Normaliser, Raw, Span, _nfkc, clean, is_blank, tokenise

NORMALISER = Normaliser()
NLP = spacy.blank("en")
NLP.add_pipe("sentencizer")
MOSES = MosesTokenizer("en")
WORDS = """
Mr. Mrs. U.S. etc. e.g. i.e. pp. No. 5 3.5 3.5. 5,300 it's don't O'Neill dogs' 'hello' (a.) yes! wow!!! what?!
end.Start foo_bar.jpg http://a.b/c?d=e www.x.org, me@x.org. a--b --- '' ... .. word... The the . ? ! , ; : - '
( ) a,b ,5 5, 1' '1 _ @ # & $5 % a/b A. B. b. 10a.m. Nr. Art. rev. vs. v. Co. Inc. x.y.z. .x x.. ..x ` ``
<url> <email> <file> <unk> " "quoted." ’s “x” ´ ´´ — – … naïve e\u0301t soft\xadhyphen 中文。 日本語、 שלום 👩\u200d👧
İstanbul ΑΣ ΣΑΣ ﬁne ½ ² ™ ‹a› ▁ J\u030c \u200b \ufeff \x00 \x07
"""
WORDS = [*WORDS.split(), "a\xa0b", "\t", "\r\n", "\u2028"]
TEXTS = st.one_of(
    st.text(), st.lists(st.sampled_from(WORDS)).map(" ".join), st.lists(st.sampled_from(WORDS)).map("".join)
)
MANY = settings(max_examples=100, deadline=None, derandomize=True)  # the same examples each time


def spans_of(normaliser, text):
    aligned = normaliser.aligned(normaliser.align(text))
    return [Span(token, spans[0][0], spans[-1][1]) for token, spans in aligned]


@pytest.mark.parametrize(
    "text, sentences",
    [
        ("Mr. Smith’s “dog” doesn't bark. It’s old!", ["mr. smith 's \" dog \" doesn 't bark .", "it 's old !"]),
        (
            "See http://a.b/c?d=e. Mail me@x.org, or open my_file.jpg.",
            ["see <url> .", "mail <email> , or open <file> ."],
        ),
        ("the \xa0caf\u0065\u0301 — so\xadft", ["the café - soft"]),
        ("A\x00B \u200bC\ufeff", ["ab c"]),
        ("ﬁne ½", ["fine 1 ⁄ 2"]),
        (
            "He left.Then it rained, e.g. a lot etc. and so on.",
            ["he left .", "then it rained , e.g. a lot etc. and so on ."],
        ),
        ("well--no", ["well - no"]),
        ("", []),
        (" \u200b\n", []),
    ],
)
def test_examples(text, sentences):
    assert [" ".join(tokens) for tokens in NORMALISER.sentences(text)] == sentences


LANGUAGES = {  # a text, and its sentences in lower case
    "fr": ("L’eau n'est pas chère, M. Dupont. Il part.", ["l' eau n' est pas chère , m. dupont .", "il part ."]),
    "de": ("Dr. Müller kam z.B. am 5. Mai. Gut!", ["dr. müller kam z.b. am 5. mai .", "gut !"]),
    "fi": ("Hän tuli klo 5, esim. tänne. Niin.", ["hän tuli klo 5 , esim. tänne .", "niin ."]),
    "ru": ("Г-н Иванов, т.е. он, пришёл. Да.", ["г-н иванов , т.е. он , пришёл .", "да ."]),
    "hi": ("वह गया। क्या वह आया?", ["वह गया ।", "क्या वह आया ?"]),
    "he": ("הוא אמר. היא הלכה?", ["הוא אמר .", "היא הלכה ?"]),
}


@pytest.mark.parametrize("language", LANGUAGES)
def test_other_languages_and_capitals(language):
    text, wanted = LANGUAGES[language]
    assert [" ".join(tokens) for tokens in Normaliser(language=language).sentences(text)] == wanted
    cased = Normaliser(language=language, cased=True)
    kept = [" ".join(tokens) for tokens in cased.sentences(text)]
    assert [sentence.lower() for sentence in kept] == wanted and (kept != wanted) == (text != text.lower())
    assert cased.normalise(" ".join(kept)) == " ".join(kept)
    for span in spans_of(cased, text):
        assert text[span.start : span.end].replace("’", "'") == span.text


def test_sentences_of_a_script_without_case_end_without_a_blank():
    text = "法律面前人人平等。他们有理性和良心！是吗？2020年如此。他说：“是的。”3.5万人。"
    wanted = ["法律面前人人平等。", "他们有理性和良心！", "是吗？", "2020年如此。", "他说：“是的。”", "3.5万人。"]
    assert [" ".join(words) for words in Raw("zh").sentences(text)] == wanted
    found = [" ".join(tokens) for tokens in Normaliser("zh").sentences(text)]
    assert found[:2] == ["法律面前人人平等 .", "他们有理性和良心 !"] and len(found) == 5
    whole = ["Of 3.5 m.p.h. and e.g.this", "(Inc.の)", "我……我不知道。", "圆周率是３．１４。", "1.苹果"]
    for one, language in [*((one, "zh") for one in whole), *((one, "en") for one in [*whole, "U.S.に行く"])]:
        assert len(Raw(language).sentences(one)) == len(Normaliser(language).sentences(one)) == 1, one
    assert len(Raw("zh").sentences("他来了．我走了．")) == 2


def test_a_word_that_moses_writes_otherwise_stays_whole():
    """ "DOTMULTI" is its own name of a run of full stops."""
    assert tokenise(["see", "(DOTMULTI)", "there"]) == [("see",), ("(DOTMULTI)",), ("there",)]


def test_a_language_that_is_not_there():
    with pytest.raises(ValueError, match="language 'qq': .*import language qq"):
        Normaliser(language="qq")
    with pytest.raises(ValueError, match="language 'th': .*; or give --sentences lines or none"):
        Normaliser(language="th")  # for xx a sentence of Thai is one word
    with pytest.raises(ValueError, match="language 'ko': .*; or give xx, or --sentences lines or none"):
        Normaliser(language="ko")
    assert Normaliser(language="th", sentences="none").tokens("ab. C") == ["ab.", "c"]


@pytest.mark.parametrize("mode, line", [("rules", "a b c"), ("lines", "  a b c"), ("none", "  a b c")])
def test_text_for_a_tokeniser_is_one_line(mode, line):
    """As a corpus, which is read line by line; where white space may matter, a line keeps what it begins with."""
    assert Raw(sentences=mode).clean("  a \n\nb\nc\n") == line


@pytest.mark.parametrize("text", ["", " \t\u2028", "\u200b", " \ufeff\u00ad ", "\x00\x07"])
def test_what_cannot_be_seen_is_blank(text):
    assert is_blank(text) and not is_blank(text + "a") and not is_blank("\u200bé") and not is_blank("。")


@MANY
@given(TEXTS)
@example("Mr.`")
@example("0@0.0.@0.0")
@example("0A.\u05b0")
def test_idempotent(text):
    assert clean(clean(text)) == clean(text)
    once = NORMALISER.normalise(text)
    assert NORMALISER.normalise(once) == once


@MANY
@given(TEXTS)
def test_spans_lead_back_to_the_source(text):
    spans = spans_of(NORMALISER, text)
    assert [span.text for span in spans] == NORMALISER.tokens(text)  # the same with and without alignment
    at = 0
    for span in spans:
        assert 0 <= span.start < span.end <= len(text)
        assert span.start >= at  # in order; tokens made from one character ("½") share it
        at = span.start
        source = text[span.start : span.end]
        if source.isascii() and source.isalnum():
            assert span.text == source.lower() or span.text in source.lower()


def test_spans_of_words_are_the_words():
    text = "The “Café-au-lait” costs\u00a05,300 — or, doesn’t it? See http://a.b/c, Jo\u00adhn."
    got = {span.text: text[span.start : span.end] for span in spans_of(NORMALISER, text)}
    assert got["café-au-lait"] == "Café-au-lait" and got["5,300"] == "5,300" and got["-"] == "—" and got["'t"] == "’t"
    assert got["<url>"] == "http://a.b/c" and got["john"] == "Jo\u00adhn"


@pytest.mark.parametrize(
    "text, token, source",
    [
        ("Open data.csv now", "<file>", "data.csv"),  # placeholders as long as what they stand for, with their blanks
        ("Mail ab@cd.org now", "<email>", "ab@cd.org"),
        ("See www.a.b now", "<url>", "www.a.b"),
        ("One---two", "-", "---"),
    ],
)
def test_a_placeholder_covers_all_that_it_stands_for(text, token, source):
    (span,) = (span for span in spans_of(NORMALISER, text) if span.text == token)
    assert text[span.start : span.end] == source


@pytest.mark.parametrize("sparse", [pytest.param(1, marks=pytest.mark.slow), 9])
@pytest.mark.thorough
def test_every_character_alone(sparse):
    """All of Unicode (one in fifty of what is many and alike; sparse: then one in so many of the letters without case
    and the symbols): folding and lower-casing are stable, blanks part words, the invisible goes, and nothing visible
    gets lost."""
    alike = ("CJK UNIFIED IDEOGRAPH", "HANGUL SYLLABLE", "TANGUT IDEOGRAPH")
    for code in range(0x110000):
        char, category = chr(code), unicodedata.category(chr(code))
        many = category in ("Cn", "Co", "Cs") or unicodedata.name(char, "").startswith(alike)
        if code % ((50 if many else 1) * (sparse if many or category in ("Lo", "So") else 1)):
            continue
        source = f"x{char}x"
        once = NORMALISER.normalise(source)
        assert once == source or NORMALISER.normalise(once) == once, hex(code)
        if char.isspace():
            assert once == "x x", hex(code)
        elif category in ("Cc", "Cf", "Co", "Cs") or unicodedata.name(char, "").startswith("VARIATION SELECTOR"):
            assert once == "xx", hex(code)
        else:
            left = unicodedata.normalize("NFD", once.replace(" ", ""))
            assert left[0] == left[-1] == "x" and len(left) > 2, hex(code)


def moses_and_spacy(text):
    """The same steps with the libraries called on whole sentences and whole paragraphs."""
    return [MOSES.tokenize(f"X {s.text.lower()} X", escape=False)[1:-1] for s in NLP(clean(text)).sents]


def test_same_output_as_the_libraries():
    """Words are tokenised one by one and remembered; that must not show. (Apostrophes inside names, and full stops
    before a lower-case letter, are cut differently on purpose.)"""
    text = (
        "Mr. Jones (b. 1950), of Washington D.C., paid $5,300.50 for it's worth; didn't he? “Yes,” she said. He's 3.5 "
        "m tall! In 1990's U.S. dollars... it was 10% more: a/b, x-y & z_w. The Ph.D. ended at 5 p.m. Then (finally.) "
        "They left.Now? OK."
    )
    assert NORMALISER.sentences(text) == moses_and_spacy(text)


# Without what is cut differently on purpose, or is a placeholder. Capitals: no word starts with a lower-case letter.
PLAIN = [w for w in WORDS if w.isascii() and w.isprintable() and not re.search(r"['`<]|//|@|www|jpg|--", w)]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from([w[:1].upper() + w[1:] for w in PLAIN if not w[0].isdigit()]), min_size=1))
def test_same_output_as_the_libraries_on_any_order_of_words(words):
    text = " ".join(words)
    assert NORMALISER.sentences(text) == [tokens for tokens in moses_and_spacy(text) if tokens]


HOSTILE = [*string.punctuation, *"a中€é", "a-", "a.", "'a", "1,", ".)", "http://", "a@", "a@b.c_@", "x\u0301", "a_.jpg"]


@pytest.mark.thorough
@pytest.mark.parametrize("part", [*HOSTILE, pytest.param("", id="marks in the wrong order")])
def test_long_and_hostile_texts_take_linear_time(part):
    """Seconds each; where the time grew with the square of the length, minutes or hours."""
    size = 100_000
    text = part * (size // len(part)) if part else "x" + "\u0301" * (size // 2) + "\u0323" * (size // 2)
    assert NORMALISER.normalise(text) and spans_of(NORMALISER, text)


def spied_on(splitter, monkeypatch):
    """The lengths of the words that spaCy's tokeniser sees from now on, as they come."""
    lengths, tokenizer = [], splitter.tokenizer

    def tokenise(text):
        lengths.extend(map(len, text.split()))
        return tokenizer(text)

    monkeypatch.setattr(splitter, "tokenizer", tokenise)
    return lengths


@pytest.mark.parametrize("part", ["$", '"', "!", "_", ".)", "a.B", "€"])
def test_spacy_sees_no_long_words(part, monkeypatch):
    """For one of n signs it takes n * n steps; this text took it most of a minute."""
    text = part * (16_000 // len(part))
    lengths = spied_on(NORMALISER.split, monkeypatch)
    tokens = NORMALISER.tokens(text)
    assert "".join(tokens) == text.lower() and sum(lengths) == len(text) and max(lengths) <= CACHED_LENGTH


@MANY
@given(st.lists(st.sampled_from(WORDS), min_size=20).map("".join))
def test_long_words_keep_every_sign(text):
    spans = spans_of(NORMALISER, text)
    assert [span.text for span in spans] == NORMALISER.tokens(text)
    assert "".join(NORMALISER.tokens(text)) == re.sub(r"\s", "", Aligned(text).clean().lower().text)


@MANY
@given(st.text("e\u0301\u0323\u0344\u0327\u0903\u1160\u11a8\uff9e\u0315가", min_size=CACHED_LENGTH + 1))
def test_many_marks_are_put_in_unicodes_order(marks):
    assert _nfkc(marks) == unicodedata.normalize("NFKC", marks)


def test_format_characters_controls_and_marks_are_in_three_planes():
    """`tupe.normaliser` looks for them nowhere else."""
    kinds = {code: unicodedata.category(chr(code)) for code in range(0x110000)}
    planes = {code >> 16 for code, kind in kinds.items() if kind in ("Cf", "Cc", "Mn", "Mc", "Me")}
    assert planes <= {0, 1, 14}
