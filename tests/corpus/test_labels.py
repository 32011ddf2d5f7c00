"""`tupe prepare labels`: a table of one's own becomes a task as GLUE's are, for both engines, reports and exports."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from corpus.test_records import write_records as write
from helpers import ENGLISH_WORDS, ended, fork_tupe, table

from tupe.cli import main
from tupe.data import glue
from tupe.data.glue import TASKS, check_glue, read_targets
from tupe.data.splits import Split
from tupe.run.record import read

CLASSES = ("none", "one", "two or more")  # of the cats
LABELS = list(CLASSES)


@pytest.fixture(autouse=True)
def own_tasks(monkeypatch):
    """No test knows another's tasks."""
    monkeypatch.setattr(glue, "TASKS", TASKS)
    known = dict(TASKS)
    yield
    TASKS.clear()
    TASKS.update(known)


def cats(count=60, seed=1):
    """[{"question", "text", "cats"}]."""
    rng, rows = np.random.default_rng(seed), []
    for _ in range(count):
        both = rng.integers(2, size=2)
        first, second = (" ".join(rng.choice(ENGLISH_WORDS[2:], 5)) + " the cat" * int(cat) for cat in both)
        rows.append({"question": first, "text": second, "cats": CLASSES[both.sum()]})
    return rows


def run(*words):
    return CliRunner().invoke(main, [*map(str, words)])


def prepare(file, data, output, *words, text="question,text", label="cats"):
    where = [file, "--data", data, "--output", output, "--text", text, "--label", label]
    return run("prepare", "labels", *where, *words)


def ids_of(folder, split, name):
    return [item.tolist() for item in Split(folder / name / split)]


# ---------------------------------------------------------------------------------------------------------- preparing


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "parquet"])
def test_every_kind_of_table_gives_the_same_data(kind, vocabulary, tmp_path):
    file = write(tmp_path / f"cats.{kind}", cats())
    done = prepare(file, vocabulary, tmp_path / "bin", "--test", write(tmp_path / "t.jsonl", cats(9, seed=2)))
    assert done.exit_code == 0, done.output
    assert "cats: 3 classes, in this order: none (" in done.output and "cats valid: 6 rows" in done.output
    task = glue.task_of(tmp_path / "bin" / "cats")
    assert (task.text, task.labels, task.metrics) == (("question", "text"), CLASSES, ("accuracy", "macro_f1"))
    for split in ("train", "valid", "test"):
        check_glue(tmp_path / "bin" / "cats", split)
    held = read_targets(tmp_path / "bin" / "cats", "valid")
    assert len(held) == 6 and set(held) == {0, 1, 2}
    assert len(read_targets(tmp_path / "bin" / "cats", "train")) == 54
    other = tmp_path / "other"
    assert prepare(write(tmp_path / "same.csv", cats()), vocabulary, other, "--name=cats").exit_code == 0
    for folder in ("input0", "input1", "label"):
        assert ids_of(tmp_path / "bin/cats", "train", folder) == ids_of(other / "cats", "train", folder)


def test_held_out_rows_have_all_classes_in_their_shares(vocabulary, tmp_path):
    rows = [{"a": f"{word} mat", "y": label} for label, n in (("x", 40), ("y", 20), ("z", 2)) for word in ["cat"] * n]
    for folder in (tmp_path / "bin", tmp_path / "again"):
        done = prepare(write(tmp_path / "t.csv", rows), vocabulary, folder, text="a", label="y")
        assert done.exit_code == 0, done.output
        targets = [read_targets(folder / "t", split) for split in ("train", "valid")]
        assert [[side.count(i) for i in range(3)] for side in targets] == [[36, 18, 1], [4, 2, 1]]
        assert not (folder / "t/input1").exists() and not [*folder.glob(".*")]


def test_data_for_pretraining_are_no_task(vocabulary, tmp_path):
    """They have a manifest, too: neither are they replaced by one, nor do they stand in the way of one."""
    file = write(tmp_path / "cats.csv", cats())
    shutil.copytree(vocabulary, tmp_path / "bin" / "cats")
    (tmp_path / "bin" / "cats" / "manifest.json").write_text("{}")
    done = prepare(file, tmp_path / "bin" / "cats", tmp_path / "bin")
    assert done.exit_code == 2 and "cats exists already; remove it, or choose another output folder" in done.output
    assert prepare(file, tmp_path / "bin" / "cats", tmp_path / "bin", "--name=others").exit_code == 0


def test_a_folder_of_a_task_that_has_another_name_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cola: neither the name of a task of GLUE nor one with labels of its own"):
        glue.task_of(tmp_path / "cola")


def test_whole_numbers_are_classes_in_the_order_of_numbers(vocabulary, tmp_path):
    file = write(tmp_path / "w.jsonl", [{"a": "cat", "y": 8 + n % 3} for n in range(30)])
    done = prepare(file, vocabulary, tmp_path / "bin", text="a", label="y")
    assert "3 classes, in this order: 8 (33.3% of training), 9 (" in done.output


GOOD = "a,y\n" + "cat,yes\nmat,no\n" * 4
BAD = {  # content of the table -> (words, what the error says)
    GOOD + "cat\n": ((), "t.csv, line 10: no 'y' (the fields there: a: choose with --label)"),
    GOOD + "cat,\n": ((), "t.csv, line 10: no label in 'y'"),
    GOOD + "cat,dog,no\n": ((), "t.csv, line 10: more fields than columns (no)"),
    GOOD + '"cat,no\nmat,yes\n': ((), "t.csv, line 10: unexpected end of data"),
    GOOD.replace("y\n", "z\n", 1): ((), "t.csv has no column 'y'; it has a, z: choose with --label"),
    GOOD: (("--text", "b"), "t.csv has no column 'b'; it has a, y: choose with --text"),
    GOOD + "dog,yes\n": (("--valid", "v.csv"), "v.csv, line 3: unknown label 'maybe'; valid: no, yes"),
    "a,y\n" + "".join(f"cat,{n}\n" for n in range(50)): (
        (),
        "'y' has 50 different values in 50 rows, such as 0",
    ),
    GOOD + "cat,NaN\n": ((), "t.csv, line 10: no label in 'y'"),
    GOOD + "u,yes\n": (("--test", "w.csv"), "w.csv, line 2: no label in 'y'"),
    "a,y,y\ncat,yes,no\n": ((), "t.csv has more than one column 'y': rename one"),
    "a,y\n" + "cat,1\n" * 9: ((), "'y' is '1' in all 9 rows: nothing to learn"),
    "a,y\n" + "".join(f"cat,id{n}\n" for n in range(50)): ((), "'y' has 50 different values in 50 rows"),
    "a,y\n": ((), "t.csv has no row"),
    "a,y\ncat,yes\nmat,no\n": ((), "t.csv has 2 rows, too few to hold some out; give --valid"),
    GOOD + "q,yes\n": (("--name", "rte"), "'rte' would be taken for the task RTE"),
    GOOD + "r,yes\n": (("--name", "a b"), "a task cannot be called 'a b'"),
    GOOD + "s,yes\n": (("--label", "a"), "give one or two columns of text and another one"),
}


@pytest.mark.parametrize("content", BAD)
def test_bad_input_is_one_line_with_its_place_and_writes_nothing(content, vocabulary, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words, message = BAD[content]
    Path("t.csv").write_text(content)
    Path("v.csv").write_text("a,y\ncat,yes\ndog,maybe\n")
    Path("w.csv").write_text("a,y\ncat,\ndog,yes\n")
    done = run("prepare", "labels", "t.csv", "--data", vocabulary, "--output=bin", "--text=a", "--label=y", *words)
    assert done.exit_code == 2 and message in done.output and done.output.strip().count("\n") == 0, done.output
    assert not Path("bin").exists()


ROWS = "".join(json.dumps({"a": "cat", "y": n % 2}) + "\n" for n in range(6))
ODD = {
    "t.csv": (
        GOOD.encode() + "caf\xe9,yes\n".encode("latin-1"),
        "line 10: byte 0xe9 is not UTF-8: convert",
    ),
    "t.jsonl": ((ROWS + '{"a": 1, "y": 0}').encode(), "line 7: 'a' is not text: 1"),
    "u.jsonl": ((ROWS + '{"a": "mat", "y": [0, 1]}').encode(), "line 7: the label [0, 1] is not a word or a number"),
    "v.jsonl": ((ROWS + "{").encode(), "line 7: not a JSON object"),
    "w.tsv": (b"a\ty\n" + b'"cat\tyes\nmat\tno\n' * 4, "read such marks as text with --unquoted"),
    "x.txt": (b"", "x.txt: not a file with fields; valid: .csv"),
}


@pytest.mark.parametrize("name", ODD)
def test_other_encodings_values_and_kinds(name, vocabulary, tmp_path):
    content, message = ODD[name]
    (tmp_path / name).write_bytes(content)
    done = prepare(tmp_path / name, vocabulary, tmp_path / "bin", text="a", label="y")
    assert done.exit_code == 2 and message in done.output and not (tmp_path / "bin").exists()
    if name == "w.tsv":
        done = prepare(tmp_path / name, vocabulary, tmp_path / "bin", "--unquoted", text="a", label="y")
        assert done.exit_code == 0 and "w valid: 2 rows" in done.output


def test_rows_to_predict_keep_their_numbers(vocabulary, tmp_path):
    """An empty text is a row, as pandas and csv.DictReader have it; a blank line is none."""
    file = write(tmp_path / "cats.csv", cats())
    for content, text, count in (("text,cats\ngood film\n,\n\nbad film,\n", "text", 3), ('text\n"a"\n""\n', "text", 2)):
        (tmp_path / "t.csv").write_text(content)
        done = prepare(file, vocabulary, tmp_path / f"bin{count}", "--test", tmp_path / "t.csv", text=text)
        assert done.exit_code == 0 and f"cats test: {count} rows" in done.output
        assert ids_of(tmp_path / f"bin{count}" / "cats", "test", "input0")[1] == [2]
    more = write(tmp_path / "more.csv", cats())
    with more.open("a") as table:
        table.write(",,\n,,\n")  # as spreadsheets end a table
    done = prepare(more, vocabulary, tmp_path / "more", "--test", more)
    assert done.exit_code == 0 and "more test: 60 rows" in done.output


# ----------------------------------------------------------------------------------------------- trained and exported

TINY = ["--gpus=0", "--allocator=none", "--num-workers=0", "--batch-size=12", "--lr=0.01", "--max-epoch=3"]


@pytest.fixture(scope="module")
def prepared(vocabulary, tmp_path_factory):
    """Two tasks; "cats" has a test set with labels, "bare" one without."""
    folder = tmp_path_factory.mktemp("own")
    file, test = write(folder / "cats.csv", cats(90)), write(folder / "test.csv", cats(12, seed=2))
    bare = write(folder / "bare.jsonl", [{key: row[key] for key in ("question", "text")} for row in cats(12, seed=2)])
    for words in (["--test", test], ["--name=bare", "--test", bare]):
        assert prepare(file, vocabulary, folder / "bin", *words).exit_code == 0
    return folder / "bin"


@pytest.fixture(scope="module")
def tuned(prepared, small, tmp_path_factory):
    """{engine: folder of the run}."""
    pytest.importorskip("fairseq")
    folder = tmp_path_factory.mktemp("tuned")
    runs = {engine: folder / engine for engine in ("fairseq", "torch")}
    for engine, output in runs.items():
        where = [f"--data={prepared}", f"--checkpoint={small}", f"--output={output}", "--task=cats"]
        started = fork_tupe("finetune", f"--engine={engine}", *where, *TINY, log=folder / "log")
        assert ended(started) == 0, (folder / "log").read_text()[-3000:]
    return runs


@pytest.mark.thorough
def test_both_engines_fine_tune_and_the_record_says_the_labels(tuned):
    for folder in tuned.values():
        record, rows = read(folder), table(folder / "predictions" / "valid_last.tsv")
        assert record.state == "finished" and record.metrics == ["accuracy", "macro_f1"]
        assert record.layout["labels"] == LABELS
        right = sum(row[1] == row[2] for row in rows)
        assert record.scores[-1]["accuracy"] == pytest.approx(100 * right / len(rows))


def checkpoint_of(folder):
    return next(iter(sorted(folder.glob("checkpoint_last.pt")) or sorted(folder.glob("checkpoint-*"))[-1:]))


@pytest.mark.thorough
def test_label_names_travel_into_exports_and_back(tuned, prepared, tmp_path):
    transformers = pytest.importorskip("transformers")
    words = ["--data", prepared, "--output", tmp_path / "hf", "--no-code"]
    done = run("checkpoint", "export", "--checkpoint", tuned["fairseq"] / "checkpoint_last.pt", *words)
    assert done.exit_code == 0, done.output
    names = LABELS
    for folder in (tmp_path / "hf", checkpoint_of(tuned["torch"])):
        config = json.loads((folder / "config.json").read_text())
        assert [config["id2label"][str(n)] for n in range(3)] == names
        assert [*config["label2id"]] == names or config["label2id"]["none"] == 0
    from tupe.modeling_tupe import TupeForSequenceClassification
    from tupe.tokenization_tupe import TupeTokenizer

    model = TupeForSequenceClassification.from_pretrained(tmp_path / "hf").eval()
    tokenizer = TupeTokenizer.from_pretrained(tmp_path / "hf")
    pipe = transformers.pipeline("text-classification", model=model, tokenizer=tokenizer)
    stored = table(tuned["fairseq"] / "predictions" / "valid_last.tsv")
    ids = [Split(prepared / "cats" / f"input{i}" / "valid") for i in (0, 1)]
    texts = [tuple(tokenizer.decode(part[n][:-1].tolist()) for part in ids) for n in range(len(stored))]
    found = [pipe({"text": a, "text_pair": b}) for a, b in texts]
    found = [(each[0] if isinstance(each, list) else each)["label"] for each in found]
    assert found == [row[1] for row in stored]
    assert run("checkpoint", "export", "--checkpoint", tmp_path / "hf", "--output", tmp_path / "again").exit_code == 0
    assert json.loads((tmp_path / "again/config.json").read_text())["id2label"] == {str(n): names[n] for n in range(3)}


@pytest.mark.thorough
def test_a_checkpoint_needs_no_data_to_know_its_labels(tuned, vocabulary, prepared):
    from tupe.checkpoints.trained import read_model

    trained = read_model(tuned["fairseq"] / "checkpoint_last.pt")
    assert trained.label_names(trained.only_head()) == LABELS


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ["fairseq", "torch"])
def test_predict_writes_labels(engine, tuned, prepared, tmp_path):
    done = run("predict", f"cats={checkpoint_of(tuned[engine])}", "--data", prepared, "--output", tmp_path)
    assert done.exit_code == 0, done.output
    pairs = zip(table(tmp_path / "cats.tsv"), cats(12, seed=2), strict=True)
    right = sum(row[1] == each["cats"] for row, each in pairs)
    assert f"12 predictions, accuracy {100 * right / 12:.2f}, macro_f1 " in done.output
    wrong = run("predict", f"bare={checkpoint_of(tuned[engine])}", "--data", prepared, "--output", tmp_path)
    assert "was not fine-tuned on bare, but on cats" in wrong.output


@pytest.mark.parametrize("engine", ["fairseq", "torch"])
@pytest.mark.thorough
def test_other_labels_are_refused(engine, tuned, prepared, vocabulary, tmp_path):
    """The head's outputs would stand for others."""
    rows = [{**row, "cats": row["cats"].replace("two or more", "many")} for row in cats()]
    file = write(tmp_path / "cats.csv", rows)
    assert prepare(file, vocabulary, tmp_path / "bin", "--test", file).exit_code == 0
    checkpoint = checkpoint_of(tuned[engine])
    done = run("predict", f"cats={checkpoint}", "--data", tmp_path / "bin", "--output", tmp_path / "out")
    assert done.exit_code == 2 and "cats: the labels are none, one, two or more in " in done.output
    assert not (tmp_path / "out").exists()


@pytest.mark.thorough
def test_report_and_sweep_take_them_as_any_other(tuned, prepared, small, tmp_path):
    folder = next(iter(tuned.values())).parent
    done = run("report", folder, "--output", tmp_path / "report")
    assert done.exit_code == 0, done.output
    text = "".join(path.read_text() for path in (tmp_path / "report").glob("*.md"))
    assert "cats accuracy" in text and "cats macro_f1" in text
    words = ["--data", prepared, "--checkpoint", small, "--output", tmp_path / "sweep"]
    done = run("sweep", *words, "--gpus=0", "--dry-run", "--grid", "lr=1e-3")
    assert done.exit_code == 0 and done.output.count("--task=cats") == done.output.count("--task=bare") == 5
    wrong = run("finetune", "--task=catz", *words, "--gpus=0", "--dry-run")
    assert "unknown task 'catz'; did you mean 'cats'?" in wrong.output
