import re
from pathlib import Path

import pytest
from hypothesis import example, given
from test_normaliser import MANY, NORMALISER, TEXTS, spans_of

from tupe.text import TextEncoder, read_dictionary

ENCODER = TextEncoder(Path(__file__).resolve().parent.parent / "models" / "tupe_r_mini")


def pieces_of(text):
    return [span.text for word in ENCODER.word_spans(text, ["<mask>"]) for span in word]


@pytest.mark.parametrize(
    "text",
    [
        "Mr. Smith went home .",
        "He left. She went to St. Petersburg (in May), did she? Then, e.g. the U.S. Senate said: “No, never!”",
        "See www.x.org/a or a_file.pdf: five pages long; John's dog (Rex) won’t.",
    ],
)
def test_around_a_mask_the_text_is_what_it_is_around_a_word(text):
    spans = spans_of(NORMALISER, text)
    words = [match for match in re.finditer(r"[A-Za-z]+", text) if (match[0].lower(), *match.span()) in spans]
    assert len(words) >= 3
    for word in words:
        masked = f"{text[: word.start()]}<mask>{text[word.end() :]}"
        pieces = [["<mask>"] if s.start == word.start() else ENCODER.token_pieces([s.text]) for s in spans]
        assert pieces_of(masked) == sum(pieces, []), masked
    assert pieces_of("a <mask> b") != ENCODER.pieces("a <mask> b")  # without that it is text


def test_a_dictionary_with_a_mask_of_its_own(tmp_path):
    """Its <mask> is the one: the model has no other."""
    for count, text in ((7, "a 2\nb 1\n"), (7, "<mask> 0\na 2\nb 1\n")):
        (tmp_path / "dict.txt").write_text(text)
        assert len(read_dictionary(tmp_path / "dict.txt")) == count
    assert read_dictionary(tmp_path / "dict.txt")[4] == "<mask>"
    (tmp_path / "dict.txt").write_text("a 2\n\nb 1\n")
    with pytest.raises(ValueError, match="is not a dictionary: '' is not a symbol and its count"):
        read_dictionary(tmp_path / "dict.txt")


@MANY
@given(TEXTS, TEXTS)
@example("http://x.org/", ".pdf")
@example("Zq Zqq", "@x.org")
@example("zq", "q" * 1_000)
def test_a_mask_is_never_lost(before, after):
    text = before.replace("<mask>", "") + "<mask>" + after.replace("<mask>", "")
    assert pieces_of(text).count("<mask>") == 1
