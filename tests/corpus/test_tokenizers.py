"""Any tokeniser of the library `tokenizers` in place of the paper's pipeline: `tupe prepare corpus --tokenizer`."""

import json

import pytest
from corpus.test_engine import ONE, run, sentences, write_text
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tupe.common.prepared import tokenizer_files
from tupe.corpus.tasks import encoded
from tupe.corpus.vocabulary import read_tokenizer
from tupe.data.splits import Split
from tupe.run.folder import write_together
from tupe.text import TextEncoder

TEXTS = [
    "Nobody in town didn't like the “Times”. The U.S. Senate saw http://example.org/x, 中 and a café.",
    "  two  blanks, a\ttab and CAPITALS ",
    "unbelievable neighbours, [ brackets ] and 12,345.67!",
]
BERT = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]", "mask_token": "[MASK]"}
NOTHING = " \u200b\ufffd"  # to BERT's normaliser
ROBERTA = {"cls_token": "<s>", "sep_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>", "mask_token": "<mask>"}


def theirs(kind, folder, special=None):
    """A tokeniser as others make them, saved by transformers into `folder`: that of BERT, of RoBERTa or of XLM-R."""
    from transformers import PreTrainedTokenizerFast

    special = special or (BERT if kind == "wordpiece" else ROBERTA)
    names = list(special.values())
    options = {"vocab_size": 400, "special_tokens": names, "show_progress": False}
    if kind == "wordpiece":
        made, trainer = Tokenizer(models.WordPiece(unk_token="[UNK]")), trainers.WordPieceTrainer(**options)
        made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    elif kind == "bpe":
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        made, trainer = Tokenizer(models.BPE()), trainers.BpeTrainer(**options, initial_alphabet=alphabet)
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    else:
        made, trainer = Tokenizer(models.Unigram()), trainers.UnigramTrainer(**options, unk_token="<unk>")
        made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.train_from_iterator([sentences(7 * i, 7) for i in range(30)], trainer)
    if "cls_token" in special:
        begin, end = special["cls_token"], special["sep_token"]
        ids = [(token, made.token_to_id(token)) for token in (begin, end)]
        made.post_processor = processors.TemplateProcessing([begin, "$A", end], [begin, "$A", end, "$B", end], ids)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, **special)
    tokenizer.save_pretrained(folder)
    return tokenizer


def test_the_pieces_of_other_data_are_kept(tmp_path):
    """New text for a model that was trained before: the same types with the same ids, in pieces of the same model."""
    run(write_text(tmp_path), "--output", tmp_path / "old", "--vocab-size", 300, "--language=de", *ONE)
    lines = [f"The river Spree forgot two ships {n} times in zoological ways.\n" for n in range(40)]
    (tmp_path / "new.txt").write_text("\n".join(lines))
    words = tmp_path / "new.txt", "--output", tmp_path / "new", "--tokenizer", tmp_path / "old", *ONE
    with pytest.raises(SystemExit, match="its pieces are of text with language de: choose the same"):
        run(*words)
    run(*words, "--language=de")
    old, new = (TextEncoder(tmp_path / name) for name in ("old", "new"))
    assert old.symbols == new.symbols and old.name == new.name == "paper"
    assert old.model.serialized_model_proto() == new.model.serialized_model_proto()
    dictionaries = [(tmp_path / name / "dict.txt").read_text() for name in ("old", "new")]
    assert dictionaries[0] != dictionaries[1]  # counts are those of the new text
    ids = {tuple(sentence.tolist()) for sentence in Split(tmp_path / "new" / "train")}
    assert len(ids) > 30 and ids <= {(2,), *((*old.encode(line), 2) for line in lines)}
    manifest = json.loads((tmp_path / "new" / "manifest.json").read_text())
    assert manifest["vocab_size"] == 300 and manifest["language"] == "de"


def test_the_tokenizer_of_other_data_is_kept(tmp_path):
    """... as it is, whatever its special tokens are called: here one is called as another one often is."""
    made = Tokenizer(
        models.WordLevel({"<start>": 0, "<fill>": 1, "[SEP]": 2, "<what>": 3, "the": 4, "<hole>": 5}, "<what>")
    )
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    roles = dict(zip(("cls_token", "pad_token", "sep_token", "unk_token", "mask_token"),
                     ("<start>", "<fill>", "[SEP]", "<what>", "<hole>"), strict=True))  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(roles))
    for output, given in (("old", tmp_path), ("new", tmp_path / "old")):
        run(write_text(tmp_path), "--output", tmp_path / output, "--tokenizer", given, *ONE)
    same = [(tmp_path / name / "tokenizer.json").read_bytes() for name in ("old", "new")]
    assert same[0] == same[1] and TextEncoder(tmp_path / "old").symbols == TextEncoder(tmp_path / "new").symbols


def test_pieces_that_are_not_those_of_the_dictionary_are_refused(tmp_path):
    """Before hours of work: as folders of XLM-R, or a dictionary that was trimmed."""
    run(write_text(tmp_path), "--output", tmp_path / "old", "--vocab-size", 300, *ONE)
    for name in ("checksums.json", "manifest.json"):
        (tmp_path / "old" / name).unlink()
    lines = (tmp_path / "old" / "dict.txt").read_text().splitlines(keepends=True)
    (tmp_path / "old" / "dict.txt").write_text("".join(lines[:-3]))
    with pytest.raises(SystemExit, match="the types of dict.txt are not the pieces of sentencepiece.bpe.model"):
        run(tmp_path / "a.txt", "--output", tmp_path / "new", "--tokenizer", tmp_path / "old", *ONE)
    for code, name in {"deu": "de", "zh-CN": "zh", "de_AT": "de", "EN": "en"}.items():  # in every mode
        with pytest.raises(SystemExit, match=f"--language {code}: say {name}"):
            run(tmp_path / "a.txt", "--output", tmp_path / "new", f"--language={code}", "--sentences=lines", *ONE)


@pytest.mark.parametrize("kind", ["bpe", "unigram", "wordpiece"])
def test_ids_are_those_of_transformers(tmp_path, kind):
    """A tokeniser of others, through the corpus, for one text and in an export."""
    from transformers import AutoTokenizer

    original = theirs(kind, tmp_path / "theirs")
    run(write_text(tmp_path), "--output", tmp_path / "data", "--tokenizer", tmp_path / "theirs", *ONE)
    encoder, manifest = TextEncoder(tmp_path / "data"), json.loads((tmp_path / "data" / "manifest.json").read_text())
    assert manifest["pipeline"] == encoder.name == "tokenizers"
    assert manifest["vocab_size"] == len(encoder) == len(original)
    vocabulary = original.get_vocab()
    special = [original.cls_token, original.pad_token, original.sep_token, original.unk_token]
    ordinary = sorted({*vocabulary} - {*special, original.mask_token}, key=vocabulary.get)
    ours = {vocabulary[token]: i for i, token in enumerate([*special, *ordinary, original.mask_token])}
    write_together(tmp_path / "export", tokenizer_files(tmp_path / "data", 64))
    (tmp_path / "export" / "config.json").write_text('{"model_type": "bert"}')
    exported = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert (exported.is_fast, exported.model_max_length) == (True, 64)
    assert (exported.cls_token_id, exported.pad_token_id, exported.sep_token_id) == (0, 1, 2)
    assert exported.mask_token_id == len(encoder) - 1 == encoder.ids["<mask>"]
    for text in TEXTS:
        wanted = [ours[i] for i in original.encode(text, add_special_tokens=False)]
        assert len(wanted) > 5 and encoder.encode(text) == wanted
        assert exported(text)["input_ids"] == [0, *wanted, 2]
        assert exported(text, text)["input_ids"] == [0, *wanted, 2, 2, *wanted, 2]
        assert [i for word in encoder.word_ids(text) for i in word] == wanted
    ids = exported(f"the {exported.mask_token} king")["input_ids"]
    assert ids.count(exported.mask_token_id) == 1 and exported.mask_token_id not in encoder.encode("the <mask> king")


@pytest.mark.parametrize("sentences", ["rules", "none"])
def test_white_space_is_for_fine_tuning_what_it_was_for_training(tmp_path, sentences):
    """One blank, where sentences are found by rules."""
    theirs("bpe", tmp_path / "theirs")
    words = ("--tokenizer", tmp_path / "theirs", "--sentences", sentences)
    run(write_text(tmp_path, 20), "--output", tmp_path / "data", *words, *ONE)
    encoder = TextEncoder(tmp_path / "data")
    rows = [((text,), None) for text in (" two\n\nlines\tand  blanks\u00a0", "two lines and blanks")]
    (lines,), (blanks,) = encoded(rows, encoder)
    assert blanks == [*encoder.encode("two lines and blanks"), 2]
    assert (lines == blanks) == (sentences == "rules")


@pytest.mark.parametrize("prefix", [True, False])
def test_a_blank_before_the_first_word_is_said_twice(tmp_path, prefix):
    """Before version 5, transformers puts the value of tokenizer_config.json, or else False, into what it has read of
    tokenizer.json: BabyLM's pipeline of 2025, which takes 4.51, read the first word of every sentence as another."""
    original = theirs("bpe", tmp_path / "theirs")
    original.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    original.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    run(write_text(tmp_path, 20), "--output", tmp_path / "data", "--tokenizer", tmp_path / "tokenizer.json", *ONE)
    files = tokenizer_files(tmp_path / "data", 64)
    assert json.loads(files["tokenizer.json"])["pre_tokenizer"]["add_prefix_space"] is prefix
    assert json.loads(files["tokenizer_config.json"])["add_prefix_space"] is prefix


def test_a_sentence_without_pieces_ends_no_document(tmp_path):
    """BERT's normaliser drops invisible characters; a document of nothing else is dropped, and counted."""
    theirs("wordpiece", tmp_path / "theirs")
    path = write_text(tmp_path, 20)
    lines = [line and f"{line}{NOTHING}" for line in path.read_text().splitlines()]  # at the end of each paragraph
    path.write_text("\n".join([*lines, "", NOTHING * 9]))
    run(path, "--output", tmp_path / "data", "--tokenizer", tmp_path / "theirs", "--valid-fraction", 0.1, *ONE)
    manifest = json.loads((tmp_path / "data" / "manifest.json").read_text())
    counts, ids = manifest["counts"], [Split(tmp_path / "data" / split) for split in ("train", "valid")]
    assert counts["train: documents"] + counts["valid: documents"] == counts["documents kept"] == 20
    assert sum(len(line) == 1 for split in ids for line in split) == 20


def test_a_file_of_an_early_version_of_the_library_is_read(tmp_path):
    """It names no type of the model: those of bert-base-uncased and others are like that."""
    theirs("wordpiece", tmp_path / "theirs")
    file = tmp_path / "theirs" / "tokenizer.json"
    content, wanted = json.loads(file.read_text()), read_tokenizer(tmp_path / "theirs")
    del content["model"]["type"]
    file.write_text(json.dumps(content))
    assert read_tokenizer(tmp_path / "theirs") == wanted


@pytest.mark.parametrize("tokenizer", ["paper", "theirs"])
def test_half_of_a_surrogate_pair_stops_no_tokenizer(tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    theirs("bpe", "theirs")
    with (tmp_path / "a.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": sentences(7 * i, 7) + " cut \ud83d"}) + "\n" for i in range(9))
    run(tmp_path / "a.jsonl", "--output", tmp_path / "data", "--tokenizer", tokenizer, "--vocab-size", 300, *ONE)
    assert (tmp_path / "data" / "manifest.json").is_file()


def test_special_tokens_in_a_text_are_text(tmp_path):
    """Else a web page about transformers would end documents."""
    for kind in ("bpe", "unigram", "wordpiece"):
        theirs(kind, tmp_path / kind / "theirs")
        run(write_text(tmp_path), "--output", tmp_path / kind / "data", "--tokenizer", tmp_path / kind / "theirs", *ONE)
        encoder = TextEncoder(tmp_path / kind / "data")
        for token in (*BERT.values(), *ROBERTA.values()):
            assert not {0, 1, 2, len(encoder) - 1}.intersection(encoder.encode(f"the {token} king"))


@pytest.mark.parametrize(
    "special, missing",
    [({k: v for k, v in BERT.items() if k != "mask_token"}, "mask_token"), ({"unk_token": "[UNK]"}, "cls_token, pad")],
)
def test_a_tokenizer_without_a_special_token_is_refused(tmp_path, special, missing):
    theirs("wordpiece", tmp_path / "theirs", special)
    with pytest.raises(SystemExit, match=rf"tokenizer.json has no {missing}"):
        run(write_text(tmp_path), "--output", tmp_path / "data", "--tokenizer", tmp_path / "theirs", *ONE)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    "choices, message",
    [
        (("--tokenizer", "nowhere"), "--tokenizer nowhere: not found; valid: paper, a tokenizer.json"),
        (("--tokenizer", "a.txt"), "a.txt is (no|not a) tokenizer.json"),
        (("--language", "qq"), "language 'qq': .*import language qq"),
        (("--language", "th"), "language 'th': The Thai tokenizer requires"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(tmp_path, monkeypatch, choices, message):
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path)
    theirs("bpe", tmp_path / "theirs")
    with pytest.raises(SystemExit, match=message) as refusal:
        run("a.txt", "--output", "data", *choices, *ONE)
    assert len([line for line in str(refusal.value).splitlines() if "|" not in line and line.strip()]) == 1
    assert not list(tmp_path.glob("data/*.*"))


def test_a_dictionary_holds_any_token(tmp_path):
    """Line ends, and the names of fairseq's own special tokens."""
    vocabulary = [*BERT.values(), "<s>", "\n", "a", "b", "<mask>"]
    made = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.save(str(tmp_path / "tokenizer.json"))
    from fairseq.data import Dictionary

    from tupe.corpus.vocabulary import write_dictionary

    (tmp_path / "ours.json").write_text(read_tokenizer(tmp_path / "tokenizer.json"))
    write_dictionary(tmp_path / "ours.json", range(20), tmp_path / "dict.txt")
    dictionary = Dictionary.load(str(tmp_path / "dict.txt"))
    assert dictionary.symbols[4:] == ["'<s>'", r"'\n'", "a", "b", "'<mask>'"]


def test_lines_of_code_and_sequences(tmp_path):
    """`--sentences lines` keeps each line as it is, `none` a document as one sequence; nothing is filtered."""
    code = "def f(x):\n    return {\n    }\n\nx = [1, 2, 3]  # 123 + 456\n}\n"
    (tmp_path / "code.txt").write_text(f"{code}\n\n{code[::-1]}")
    lines = [line for line in code.splitlines() if line.strip()]
    theirs("bpe", tmp_path / "theirs")
    for mode, wanted in (("lines", {*lines}), ("none", {" ".join(lines[:3])})):
        choices = ("--tokenizer", tmp_path / "theirs", "--sentences", mode)
        run(tmp_path / "code.txt", "--output", tmp_path / mode, *choices, *ONE)
        encoder = TextEncoder(tmp_path / mode)
        from fairseq.data.data_utils import load_indexed_dataset

        from tupe.plugin.pretrained import load_dictionary

        dictionary, found = load_dictionary(tmp_path / mode / "dict.txt"), []
        for split in ("train", "valid"):
            found += [line[:-1].tolist() for line in load_indexed_dataset(f"{tmp_path}/{mode}/{split}", dictionary)]
        assert all(encoder.encode(line) in found for line in wanted)
        assert json.loads((tmp_path / mode / "manifest.json").read_text())["dropped"] == {}
