"""SQuAD's official files, preparing them, offsets, and windows over long paragraphs."""

import fcntl
import json
import shutil
from collections import Counter

import numpy as np
import pytest
from click.testing import CliRunner
from helpers import official_folder, squad_file

from tupe.common.prepared import tasks_in
from tupe.corpus import glue as glue_data
from tupe.plugin.pretrained import load_dictionary
from tupe.plugin.squad_data import Encoded, Windows, command, prepare, read_squad
from tupe.text import TextEncoder


def windows(squad, vocabulary, limit, stride, max_query, version="1.1"):
    """Windows over the development file of a folder, prepared and read back."""
    list(prepare(squad, vocabulary, squad / "bin"))
    encoded = Encoded.load(squad / "bin", "dev", version)
    return Windows(encoded, load_dictionary(squad / "bin" / "dict.txt"), limit, stride, max_query)


def test_what_is_prepared_is_read_back(vocabulary, tmp_path):
    """By the command, in two processes: the pieces that the text encoder makes of the official text, and offsets."""
    file = squad_file(tmp_path / "squad", count=7)
    squad_file(tmp_path / "squad", version="2.0", count=5, impossible=2)
    arguments = ["--squad", tmp_path / "squad", "--data", vocabulary, "--output", tmp_path / "bin", "--jobs=2"]
    result = CliRunner().invoke(command, [*map(str, arguments)])
    assert result.exit_code == 0, result.output
    assert "dev-v1.1: 7 questions" in result.output and "train-v2.0: 5 questions" in result.output
    encoded, encoder = Encoded.load(tmp_path / "bin", "dev", "1.1"), TextEncoder(vocabulary)
    contexts, questions = read_squad(file)
    assert encoded.contexts == contexts and [q.id for q in encoded.questions] == [q.id for q in questions]
    for n, text in enumerate(contexts):
        spans = encoder.spans(text)
        assert encoded.ids[n] == [encoder.ids.get(span.text, encoder.ids["<unk>"]) for span in spans]
        assert encoded.begins[n].tolist() == [span.start for span in spans]
        assert encoded.ends[n].tolist() == [span.end for span in spans]
    assert encoded.queries == [encoder.encode(question.text) for question in questions]
    assert (tmp_path / "bin" / "dict.txt").read_bytes() == (vocabulary / "dict.txt").read_bytes()
    repeated = CliRunner().invoke(command, [*map(str, arguments)])
    assert repeated.exit_code == 2 and "--overwrite" in repeated.stderr
    with pytest.raises(ValueError, match="dev-v2.0.json not found; `tupe prepare squad` writes it"):
        Encoded.load(tmp_path, "dev", "2.0")


def test_one_folder_has_one_vocabulary(vocabulary, tmp_path):
    """Also where the first task is one of GLUE's, or one of GLUE's follows."""
    glue, other, output = official_folder(tmp_path / "glue"), tmp_path / "other", tmp_path / "bin"
    shutil.copytree(vocabulary, other)
    (other / "words.txt").write_text("cat\n")
    squad_file(tmp_path / "squad", count=3)
    list(glue_data.prepare(glue, vocabulary, output, ["RTE"]))
    with pytest.raises(ValueError, match=r"holds RTE prepared with another vocabulary \(words.txt differ"):
        list(prepare(tmp_path / "squad", other, output))
    assert not (output / "words.txt").exists() and tasks_in(output) == ["RTE"]
    list(prepare(tmp_path / "squad", vocabulary, output))
    assert tasks_in(output) == ["RTE", "SQuAD-1.1"]
    with pytest.raises(ValueError, match="holds SQuAD-1.1 prepared with another vocabulary"):
        list(glue_data.prepare(glue, other, output, ["RTE"], overwrite=True))


def test_the_official_files_are_never_replaced(vocabulary, tmp_path):
    file = squad_file(tmp_path / "squad", count=3)
    content = file.read_bytes()
    for overwrite in (False, True):
        with pytest.raises(ValueError, match="train-v1.1.json is no prepared file: choose another output folder"):
            list(prepare(tmp_path / "squad", vocabulary, tmp_path / "squad", overwrite=overwrite))
    assert file.read_bytes() == content and not (tmp_path / "squad" / "dict.txt").exists()


@pytest.mark.parametrize("file", ["train.idx", "config.json"])
def test_data_for_pretraining_and_models_keep_their_vocabulary(file, vocabulary, tmp_path):
    squad_file(tmp_path / "squad", count=3)
    for name in ("same", "other"):
        (tmp_path / name).mkdir()
        for part in ("dict.txt", "sentencepiece.bpe.model"):
            shutil.copy(vocabulary / part, tmp_path / name)
        (tmp_path / name / file).write_text("{}")
    (tmp_path / "other" / "dict.txt").write_text("cat 1\n")
    list(prepare(tmp_path / "squad", vocabulary, tmp_path / "same"))
    with pytest.raises(ValueError, match=rf"holds {file} prepared with another vocabulary \(dict.txt differ"):
        list(prepare(tmp_path / "squad", vocabulary, tmp_path / "other", overwrite=True))
    assert (tmp_path / "other" / "dict.txt").read_text() == "cat 1\n" and not tasks_in(tmp_path / "other")


def test_no_task_of_an_earlier_vocabulary_stays_after_a_kill(vocabulary, tmp_path):
    """Its ids would be read with the new dictionary: other words, and nothing would tell."""
    glue, other, output = official_folder(tmp_path / "glue"), tmp_path / "other", tmp_path / "bin"
    shutil.copytree(vocabulary, other)
    with (other / "dict.txt").open("a") as file:
        file.write("more 1\n")
    squad_file(tmp_path / "squad", count=3)
    list(glue_data.prepare(glue, vocabulary, output, ["CoLA", "RTE"]))
    killed = glue_data.prepare(glue, other, output, ["CoLA", "RTE"], overwrite=True)
    assert next(killed)[0] == "CoLA"
    killed.close()
    assert tasks_in(output) == ["CoLA"]
    shutil.rmtree(output)
    list(prepare(tmp_path / "squad", vocabulary, output))
    killed = prepare(tmp_path / "squad", other, output, overwrite=True)
    assert next(killed)[0] == "train-v1.1"
    killed.close()
    assert list(output.glob("train-v1.1.*")) and not list(output.glob("dev-v1.1.*"))


def test_a_folder_in_use_is_left_alone(vocabulary, tmp_path):
    squad_file(tmp_path / "squad", count=3)
    (tmp_path / "bin").mkdir()
    with (tmp_path / "bin" / "lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError, match="another process prepares data in"):
            list(prepare(tmp_path / "squad", vocabulary, tmp_path / "bin"))
    assert not tasks_in(tmp_path / "bin")


@pytest.mark.parametrize("limit, stride", [(512, 128), (64, 16), (48, 128)])
def test_windows_cover_and_give_back_the_answers(vocabulary, tmp_path, limit, stride):
    squad_file(tmp_path / "squad")
    data = windows(tmp_path / "squad", vocabulary, limit, stride, max_query=16)
    assert max(data.sizes) <= limit and (limit == 512) == (len(data) == len(data.questions))
    answers, starts = {}, Counter()
    for w in range(len(data)):
        sample = data[w]
        q, first, last = data.windows[w]
        tokens = sample["tokens"].tolist()
        assert len(tokens) == data.num_tokens(w) and tokens[0] == 0 and tokens[-1] == 2
        assert tokens[data.offset(w) - 2 : data.offset(w)] == [2, 2]
        assert tokens[data.offset(w) : -1] == data.ids[data.questions[q].context][first:last]
        assert sample["inside"].sum() == last - first
        starts.update((q, first + int(i) - data.offset(w)) for i in np.flatnonzero(sample["starts"]))
        start, end = sample["target"]
        if start:
            answers[q] = data.answer(w, start, end)
    # Every piece may be the start of an answer in exactly one window; every gold answer comes back from its positions.
    assert len(starts) == sum(len(data.ids[q.context]) for q in data.questions) and set(starts.values()) == {1}
    assert {q: data.questions[q].answers[0][0] for q in answers} == answers
    assert len(answers) == len(data.questions)


def test_answers_come_from_the_original_characters(vocabulary, tmp_path):
    context = "ﬁne “Café”\u00a0de l’Art — see https://a.example/x?y=1, The CAT\u00ad sat."
    (tmp_path / "squad").mkdir()
    for split in ("train", "dev"):
        (tmp_path / "squad" / f"{split}-v1.1.json").write_text(json.dumps(
            {"data": [{"paragraphs": [{"context": context, "qas": [
                {"id": str(i), "question": "cat ?", "answers": [{"text": text, "answer_start": context.index(text)}]}
                for i, text in enumerate(["ﬁne", "Café", "l’Art", "https://a.example/x?y=1", "The CAT"])
            ]}]}]}
        ))  # fmt: skip
    data = windows(tmp_path / "squad", vocabulary, 128, 64, 8)
    for w in range(len(data)):
        gold = data.questions[data.windows[w][0]].answers[0][0]
        assert data.answer(w, *data.target(w)) == gold


def test_answers_that_no_window_holds_are_counted(vocabulary, tmp_path):
    squad_file(tmp_path / "squad")
    data = windows(tmp_path / "squad", vocabulary, 512, 128, 16)
    assert (data.left_out, data.answered) == (0, 50)
    question = data.questions[0]
    question.answers = [(data.contexts[question.context], 0)]  # the whole paragraph
    encoded = Encoded(data.contexts, data.questions, data.ids, data.begins, data.ends, data.queries)
    cut = Windows(encoded, load_dictionary(tmp_path / "squad" / "bin" / "dict.txt"), 48, 128, 16)
    assert (cut.left_out, cut.answered) == (1, 50)
    assert all(cut.target(w) == (0, 0) for w in range(len(cut)) if cut.windows[w][0] == 0)


def test_impossible_questions_point_to_cls(vocabulary, tmp_path):
    squad_file(tmp_path / "squad", "2.0", 4, impossible=2)
    data = windows(tmp_path / "squad", vocabulary, 128, 64, 16, version="2.0")
    assert [data.target(w) == (0, 0) for w in range(4)] == [True, True, False, False]


def with_questions(questions):
    return json.dumps({"data": [{"paragraphs": [{"context": "a cat", "qas": questions}]}]})


def question(text, start):
    return {"id": "q", "question": "?", "answers": [{"text": text, "answer_start": start}]}


def test_a_byte_that_is_not_utf8_is_named_without_the_file(tmp_path):
    (tmp_path / "f.json").write_bytes(b'{"data": "caf\xe9' + b" " * 100_000)
    with pytest.raises(ValueError, match="byte 13 is not UTF-8") as error:
        read_squad(tmp_path / "f.json")
    assert len(str(error.value)) < 300
    with pytest.raises(ValueError, match="is not a file"):
        read_squad(tmp_path)


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "is not a SQuAD file"),
        ('{"data": []}', "has no question"),
        (
            '{"data": [{"paragraphs": [{"context": "a cat", "qas": [{"id": "q7", "question": "?", "answers": '
            '[{"text": "cat", "answer_start": 0}]}]}]}]}',
            "question 'q7': 'cat' is not at 0, but 'a c'",
        ),
        (
            '{"data": [{"paragraphs": [{"context": "a cat", "qas": [{"id": "q8", "question": "?", "answers": []}]}]}]}',
            "question 'q8': no answer, and not marked as impossible",
        ),
        *[
            (
                with_questions([{**question("cat", 2), "is_impossible": flag}]),
                f"'is_impossible' must be true or false, not {flag!r}",
            )
            for flag in ("false", "true", 1, 0, None)
        ],
        (
            with_questions([{**question("cat", 2), "is_impossible": True}]),
            "question 'q': answers, but marked as impossible",
        ),
        (with_questions([question("\u200b", 0)]), "question 'q': an empty answer"),
        ("[" * 100_000, "is not a SQuAD file"),
        ('{"data": [{}]}', "article 0: 'paragraphs' must be a list, not missing"),
        (with_questions([{"question": "?"}]), "paragraph 0, question 0: 'id' must be a text"),
        (with_questions([{"id": "q", "question": "?"}]), "question 'q': 'answers' must be a list, not missing"),
        (with_questions([question("cat", "2")]), "'answer_start' must be a whole number, not '2'"),
        (with_questions([question("cat", True)]), "'answer_start' must be a whole number, not True"),
        (with_questions([question("cat", -3)]), "'cat' is not at -3"),
        (with_questions([question("cat", 2), question("cat", 2)]), "question 'q' is there twice"),
        (with_questions([question("", 2)]), "question 'q': an empty answer"),
        (with_questions([question("a\0", 0)]), "'text' has a NUL character"),
        (with_questions([question("z" * 100_000, 0)]), "zzz.*is not at 0"),
    ],
)
def test_bad_files_are_refused(content, message, tmp_path):
    (tmp_path / "f.json").write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        read_squad(tmp_path / "f.json")
    assert len(str(error.value)) < 500 and "\n" not in str(error.value)
    with pytest.raises(ValueError, match="not found"):
        read_squad(tmp_path / "none.json")


def test_a_byte_order_mark_is_no_damage(tmp_path):
    """Of GLUE's files, too."""
    (tmp_path / "f.json").write_text("\ufeff" + with_questions([question("cat", 2)]))
    assert read_squad(tmp_path / "f.json")[1][0].answers == [("cat", 2)]
