"""The steps of tupe.corpus one by one."""

import numpy as np
import sentencepiece

from tupe.corpus import steps as corpus
from tupe.corpus import vocabulary
from tupe.corpus.readers import Document
from tupe.corpus.stats import Stats
from tupe.normaliser import Normaliser, Raw


def test_paragraphs_are_cleaned_joined_and_dropped_with_a_reason():
    stats = Stats()
    good = "This is a paragraph of more than eight words in all."
    junk = "1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 | 9"
    texts = ["Chapter 1", good, good, "\u200b", junk, "x" * 1001, "The end."]
    kept = corpus.clean_paragraphs(texts, stats, Normaliser())
    assert kept == [f"Chapter 1 {good} The end."]
    assert stats.dropped == {
        "paragraph: repeated in its document": 1,
        "paragraph: few letters": 1,
        "paragraph: a word of more than 1000 characters": 1,
    }
    assert stats.examples["paragraph: few letters"] == junk


def test_documents_with_nothing_left():
    stats, normaliser = Stats(), Normaliser()
    for text in ("Only four words here", "12 34 56", "{{" * 9):
        assert corpus.normalise_document(Document("s", "d", False, text), normaliser, stats) is None
    assert sum(n for reason, n in stats.dropped.items() if reason.startswith("document")) == 3


def test_stats_add_up_in_order(tmp_path):
    shards = [tmp_path / str(i) for i in range(30)]
    for i, folder in enumerate(shards):
        shard = Stats()
        shard.count("n", i)
        shard.drop("document", "why", f"example {i}")
        shard.keep("source 0", "train", 7)
        folder.mkdir()
        shard.save(folder)
    total = Stats.load(shards)
    assert total.counts["n"] == sum(range(30)) and total.dropped == {"document: why": 30}
    assert total.examples == {"document: why": "example 0"}
    assert total.sources == {"source 0": {"train: documents": 30, "train: ids": 210}}


ALIKE = ("He paid 1.5 euros, not 2.", "he paid 1.5 euros (not 2)", "“He paid 1.5 euros -- not 2!”")
UNLIKE = (
    "He paid 15 euros, not 2.", "He paid 1 5 euros, not 2.", "He paid -1.5 euros, not 2.", "He paid 1.5 euros < 2.",
    "He paid 1.5 euros > 2.", "He paid 1.5 % euros, not 2.", "He paid 1:5 euros, not 2.", "He paid $1.5 euros, not 2.",
)  # fmt: skip


def test_copies_of_prose_differ_in_punctuation_alone(tmp_path):
    """And in case, unless the text is cased. The order of documents does not depend on all that."""

    def hashes(text, **options):
        normaliser = Normaliser(**options)
        return corpus.hashes_of([normaliser.clean(text)], normaliser)

    for options in ({}, {"cased": True}):
        order, shared = hashes(ALIKE[0], **options)
        for text in ALIKE[1:]:
            assert (hashes(text, **options)[1] == shared) == (text[0] != "h" or not options), text
            assert hashes(text, **options)[0] == order
        assert len({hashes(text, **options)[1] for text in UNLIKE} | {shared}) == len(UNLIKE) + 1
    assert hashes("CAT tax US")[1] == hashes("cat TAX us")[1]
    assert hashes("CAT tax US", cased=True)[1] != hashes("cat TAX us", cased=True)[1]


def test_code_that_differs_in_a_sign_is_no_copy():
    hashes = set()
    for normaliser in (Raw(sentences="lines"), Normaliser(cased=True, sentences="none")):
        for text in ("return a + b", "return a - b", "return a[b]"):
            hashes.update(corpus.normalise_document(Document("s", "d", False, text), normaliser, Stats())[0])
    assert len(hashes) == 3


def test_vowels_that_are_marks_count_as_letters():
    words = "മനുഷ്യരെല്ലാവരും തുല്യാവകാശങ്ങളോടും അന്തസ്സോടും സ്വാതന്ത്ര്യത്തോടുംകൂടി ജനിച്ചിട്ടുള്ളവരാണ് അന്യോന്യം"
    malayalam = f"{words} {words}"
    assert sum(sign.isalpha() or sign == " " for sign in malayalam) < 0.6 * len(malayalam)
    for normaliser in (Normaliser(language="ml"), Raw(language="ml")):
        stats = Stats()
        assert corpus.clean_paragraphs([malayalam], stats, normaliser) and not stats.dropped


def digests(count):
    return np.array([bytes([(37 * i) % 256]) * 16 for i in range(count)], dtype=object)


def test_held_out_documents_depend_on_their_text_alone():
    names, sizes = digests(100), np.full(100, 10)
    chosen = corpus.choose_valid(names, sizes, np.zeros(100), 0.1)
    assert chosen.sum() == 10
    order = np.random.RandomState(0).permutation(100)
    assert set(names[chosen]) == set(names[order][corpus.choose_valid(names[order], sizes, np.zeros(100), 0.1)])
    sizes[np.argsort(names)[0]] = 10_000  # too big to be held out
    assert not corpus.choose_valid(names, sizes, np.zeros(100), 0.01)[np.argsort(names)[0]]
    assert corpus.choose_valid(digests(2), np.array([5, 5]), np.zeros(2), 0.5).sum() == 1
    assert corpus.choose_valid(digests(2), np.array([500, 5]), np.zeros(2), 0.0).tolist() == [False, True]


def test_sources_of_one_document_count_as_one_source():
    """As where the shell has made hundreds of files of a glob."""
    sources = np.array([*range(50), *[50] * 50])
    chosen = corpus.choose_valid(digests(100), np.full(100, 10), sources, 0.1)
    assert (chosen[:50].sum(), chosen[50:].sum()) == (5, 5)
    alone = corpus.choose_valid(digests(3), np.array([10, 10, 10]), np.array([1, 1, 2]), 0.1)
    assert (alone[:2].sum(), alone[2]) == (1, False)


def test_the_sample_is_bounded():
    assert corpus.choose_sample(digests(200), np.full(200, 50), 1000).sum() == 20


def test_a_vocabulary_has_the_signs_that_an_encyclopedia_hardly_uses():
    model = vocabulary.train_sentencepiece(["the cat sat on the mat and the dog ran"] * 50, 40)
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
    assert pieces.unk_id() not in pieces.encode("?!")


def test_a_sentence_of_any_length_trains_the_vocabulary():
    """Cut between words, so that the pieces are those of the same text in short sentences."""
    words, other = "abc bca cab acb bac cba", "xyz zyx yéx xzy zxy éxz"
    short = [" ".join([words] * 50), *[" ".join([other] * 600)] * 10]
    long = [short[0], " ".join([other] * 6000)]
    assert len(long[1].encode()) > vocabulary.LONGEST > max(map(len, short))
    models = [vocabulary.train_sentencepiece(lines, 30) for lines in (short, long)]
    models = [sentencepiece.SentencePieceProcessor(model_proto=content) for content in models]
    pieces = [[(model.id_to_piece(i), model.get_score(i)) for i in range(len(model))] for model in models]
    assert pieces[0] == pieces[1] and any("xyz" in piece for piece, _ in pieces[1])
    run = "\u4e2d\u6587" * 40_000  # without a blank
    model = sentencepiece.SentencePieceProcessor(model_proto=vocabulary.train_sentencepiece([short[0], run], 24))
    assert model.unk_id() not in model.encode("\u4e2d\u6587")
