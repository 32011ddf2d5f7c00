"""The exported tokeniser of the paper's pipeline: where pieces and words stand in a text, what tools make of it."""

import copy
import math
import pickle

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from test_normaliser import MANY, WORDS

from tupe.text import PaperText
from tupe.tokenization_tupe import TupeTokenizer, _slices

FOLDER = "models/tupe_r_mini"
TEXT = "Nobody in town didn't like the “Times”. Mr. Smith’s café — http://example.org/x, ½ and 中 <mask>'s dog. <s>"
CONTEXT = "The river runs through the old town. It was painted by Henri Matisse in 1905, again and again, they say."
GIVEN = [word for word in WORDS if word.isprintable()]


@pytest.fixture(scope="module")
def tokenizer(request):
    return TupeTokenizer(request.config.rootpath / FOLDER / "dict.txt")


def test_every_piece_knows_its_place(tokenizer, request):
    paper = PaperText(request.config.rootpath / FOLDER)
    encoding = tokenizer(TEXT, return_offsets_mapping=True)
    assert isinstance(tokenizer, transformers.PreTrainedTokenizerFast) and tokenizer.is_fast
    words = paper.word_spans(TEXT, ["<mask>"])
    spans = [span for word in words for span in word]
    assert encoding["input_ids"] == [0, *(paper.ids.get(span.text, 3) for span in spans), 2]
    assert encoding["offset_mapping"] == [(0, 0), *((span.start, span.end) for span in spans), (0, 0)]
    assert encoding.word_ids() == [None, *(n for n, word in enumerate(words) for _ in word), None]
    here = TEXT.index("café")
    pieces = {encoding.char_to_token(place) for place in range(here, here + 4)}
    assert "".join(TEXT[slice(*encoding.token_to_chars(i))] for i in sorted(pieces)) == "café"
    start = TEXT.index("http")
    assert encoding.char_to_token(start) == encoding.char_to_token(start + 10)  # one piece, <url>
    assert encoding.tokens()[encoding.char_to_token(TEXT.index("<mask>"))] == "<mask>"


class Counted(str):
    """A text of the library, which for a slice counts its characters from the start."""

    steps = 0

    def __getitem__(self, item):
        Counted.steps += len(self)
        return Counted(super().__getitem__(item))


def test_the_words_of_a_long_text_are_cut_in_little_more_than_linear_time():
    text = Counted("ab c " * 2000)
    borders = [(at, at + size) for start in range(0, len(text), 5) for at, size in ((start, 2), (start + 3, 1))]
    borders[7:8] = [borders[7]] * 3  # words made of one character share its place
    cuts = _slices(text, borders)
    assert cuts == [str(text)[start:end] for start, end in borders]
    assert Counted.steps < 4 * len(text) * math.log2(len(borders))  # one by one: 2,000 times the length


@pytest.mark.parametrize("text", ["the man <mask> .", "<mask>", "<mask>'s <mask>, <mask>"])
def test_a_mask_is_where_it_stands(text, tokenizer):
    encoding = tokenizer(text, return_offsets_mapping=True)
    spans = [text[slice(*span)] for span in encoding["offset_mapping"]]
    masks = [span for span, index in zip(spans, encoding["input_ids"], strict=True) if index == tokenizer.mask_token_id]
    assert masks == ["<mask>"] * text.count("<mask>") and encoding.char_to_token(text.index("<mask>")) is not None


def test_windows_with_stride_hold_the_whole_text(tokenizer):
    """As `run_qa` makes them: the question, and overlapping windows of the paragraph."""
    question, limit, stride = "Who painted the river?", 24, 5
    windows = tokenizer(
        question, CONTEXT, max_length=limit, stride=stride, truncation="only_second", return_overflowing_tokens=True,
        return_offsets_mapping=True, padding="max_length",
    )  # fmt: skip
    assert windows["overflow_to_sample_mapping"] == [0] * len(windows["input_ids"]) and len(windows["input_ids"]) > 2
    head = [0, *tokenizer.text.encode(question), 2, 2]
    answer, seen = (CONTEXT.index("Henri"), CONTEXT.index("Matisse") + 7), set()
    for n, ids in enumerate(windows["input_ids"]):
        assert len(ids) == limit and ids[: len(head)] == head
        inside = [i for i, part in enumerate(windows.sequence_ids(n)) if part == 1]
        offsets = [windows["offset_mapping"][n][i] for i in inside]
        seen |= set(offsets)
        covered = [(a, b) for a, b in offsets if a >= answer[0] and b <= answer[1]]
        if offsets[0][0] <= answer[0] and offsets[-1][1] >= answer[1]:
            assert CONTEXT[covered[0][0] : covered[-1][1]] == "Henri Matisse"
    assert sorted(seen) == sorted({(s.start, s.end) for word in tokenizer.text.word_spans(CONTEXT) for s in word})


def test_given_words_keep_their_numbers(tokenizer):
    """As `run_ner` aligns labels: the words of a text are cut as in the text, "Mr." before a name as one token."""
    text = "EU rejects Mr. Müller 's German-style call – at 5 p.m. in No. 10 , he said . They sang ."
    words = text.split()
    rows = tokenizer([words, words[:3]], is_split_into_words=True, return_offsets_mapping=True)
    for row, some in enumerate((words, words[:3])):
        ids, numbers = rows["input_ids"][row], rows.word_ids(row)
        assert ids == tokenizer(" ".join(some))["input_ids"]
        assert [*dict.fromkeys(numbers[1:-1])] == [*range(len(some))] and numbers[0] is numbers[-1] is None
        for number, (start, end) in zip(numbers[1:-1], rows["offset_mapping"][row][1:-1], strict=True):
            assert 0 <= start < end <= len(some[number])
    assert rows["input_ids"][1] != rows["input_ids"][0][: len(rows["input_ids"][1])]  # its "Mr." ends a sentence
    pair = tokenizer(words, words[:3], is_split_into_words=True)["input_ids"]
    assert pair == tokenizer(text, " ".join(words[:3]))["input_ids"]


@MANY
@given(words=st.lists(st.sampled_from(GIVEN), min_size=1))
def test_given_words_are_cut_as_in_their_text(words, tokenizer):
    expected = tokenizer(" ".join(words))["input_ids"]
    assert tokenizer(words, is_split_into_words=True)["input_ids"] == expected
    assert tokenizer.encode(words, is_split_into_words=True) == expected
    pieces = tokenizer.tokenize(words, is_split_into_words=True)
    assert tokenizer.convert_tokens_to_ids(pieces) == expected[1:-1]


def test_whole_words_are_masked(tokenizer):
    if "whole_word_mask" not in transformers.DataCollatorForLanguageModeling.__dataclass_fields__:
        pytest.skip("the collator of this transformers finds words by BERT's ##")
    collator = transformers.DataCollatorForLanguageModeling(
        tokenizer, mlm_probability=0.3, whole_word_mask=True, seed=1
    )
    rows = [tokenizer(CONTEXT, return_offsets_mapping=True) for _ in range(8)]
    words = rows[0].word_ids()
    batch = collator([dict(row) for row in rows])
    many = 0
    for labels in batch["labels"].tolist():
        hit = {word for word, label in zip(words, labels, strict=True) if label != -100}
        assert None not in hit
        for word in hit:
            pieces = [label != -100 for w, label in zip(words, labels, strict=True) if w == word]
            assert all(pieces)
            many += len(pieces) > 1
    assert many > 3


def test_copies_and_added_tokens(tokenizer, tmp_path):
    for other in (copy.deepcopy(tokenizer), pickle.loads(pickle.dumps(tokenizer))):
        assert other(TEXT)["input_ids"] == tokenizer(TEXT)["input_ids"]
    other.add_tokens(["zzyzx"])
    ids = other("a zzyzx town")["input_ids"]
    assert ids.count(len(other) - 1) == 1 and other.decode(ids, skip_special_tokens=True) == "a zzyzx town"
    assert len(tokenizer) == len(other) - 1
    other.save_pretrained(tmp_path)
    assert not (tmp_path / "tokenizer.json").exists()  # it would be taken for a tokeniser of the other kind
    assert PaperText(tmp_path).encode(TEXT) == tokenizer.text.encode(TEXT)
    moved = TupeTokenizer.from_pretrained(tmp_path)
    tmp_path.rename(tmp_path.with_suffix(".moved"))
    with pytest.raises(FileNotFoundError, match="dict.txt"):
        moved.save_pretrained(tmp_path)


@pytest.mark.parametrize("way", ["add_tokens", "add_special_tokens", "from_pretrained"])
def test_special_tokens_that_are_added_are_whole(way, tokenizer, request, tmp_path):
    """... before they are saved as afterwards, wherever transformers keeps them."""
    other, folder = copy.deepcopy(tokenizer), request.config.rootpath / FOLDER
    if way == "add_tokens":
        other.add_tokens(["<ent>"], special_tokens=True)
    elif way == "add_special_tokens":
        other.add_special_tokens({"additional_special_tokens": ["<ent>"]})
    else:
        other = TupeTokenizer.from_pretrained(folder, additional_special_tokens=["<ent>"])
    text = "The <ent> man met<ent>, <mask>."
    other.save_pretrained(tmp_path)
    again = TupeTokenizer.from_pretrained(tmp_path)
    for each in (other, again, copy.deepcopy(other), pickle.loads(pickle.dumps(other))):
        encoding = each(text, return_offsets_mapping=True)
        assert encoding["input_ids"].count(len(tokenizer)) == 2 and each.unk_token_id not in encoding["input_ids"]
        spans = [text[slice(*span)] for span in encoding["offset_mapping"]]
        assert spans.count("<ent>") == 2 and spans.count("<mask>") == 1
        assert each.decode(encoding["input_ids"], skip_special_tokens=False).count("<ent>") == 2


def test_a_pipeline_s_words_are_no_unknown_pieces(tokenizer):
    """`aggregation_strategy="first"` decodes the pieces of each word, and then the words."""
    pieces = tokenizer.tokenize("she didn't look out")
    words = [tokenizer.convert_tokens_to_string([piece]) for piece in pieces]
    assert tokenizer.convert_tokens_to_string(["Matisse", "Café"]) == "Matisse Café"
    assert "<unk>" not in tokenizer.convert_tokens_to_string(words)
    assert tokenizer.convert_tokens_to_string(["<unk>", *pieces[:1]]) == "<unk> she"
