"""GLUE's official files, and preparing them."""

import os
import shutil

import numpy as np
import pytest
from click.testing import CliRunner
from fairseq.data import Dictionary, data_utils
from fairseq.tasks.sentence_prediction import SentencePredictionConfig, SentencePredictionTask
from helpers import HEADERS, ROWS, official_folder, prepare_glue, write_lines

from tupe.common.prepared import tasks_in
from tupe.corpus import tasks
from tupe.corpus.tasks import glue_command, read_split
from tupe.data.glue import TASKS, check_glue
from tupe.text import TextEncoder

# ---------------------------------------------------------------------------------------------------- official files


@pytest.mark.parametrize("name", list(HEADERS))
def test_official_layout(name, tmp_path):
    folder = official_folder(tmp_path)
    rows, dropped = read_split(name, "train", folder / name / "train.tsv")
    assert not dropped and len(rows) == 2
    assert all(len(texts) == len(TASKS[name].text) for texts, _ in rows)
    expected = {
        "CoLA": [(("The cat sat .",), "1"), (("Cat the sat .",), "0")],
        "SST-2": [(("the cat sang ",), "1"), (("dogs ",), "0")],
        "MRPC": [(('The "cat" sat', '"The cat sang .'), "1"), (("Dogs ran .", "Birds sang ."), "0")],
        "STS-B": [(("A cat sat .", "A cat ran ."), 1.0), (("Dogs ran .", "Birds sang ."), 0.76)],
        "QQP": [(("Why did the cat sing ?", "What did dogs do ?"), "0"), (("Why ?", "How ?"), "1")],
        "QNLI": [
            (("Who sang ?", "The birds sang ."), "entailment"),
            (("Who ran ?", "The cat sat ."), "not_entailment"),
        ],
        "RTE": [(("The cat sat .", "A cat ran ."), "not_entailment"), (("Dogs ran .", "Dogs ran ."), "entailment")],
        "WNLI": [(("The cat sat .", "A cat ran ."), "1"), (("Dogs ran .", "Dogs sang ."), "0")],
    }
    assert rows == expected[name]


def test_mnli_layouts_and_rows_without_gold_label(tmp_path):
    folder = official_folder(tmp_path) / "MNLI"
    assert read_split("MNLI", "train", folder / "train.tsv")[0][1] == (("The cat sat .", "Dogs ran ."), "entailment")
    rows, dropped = read_split("MNLI", "valid", folder / "dev_matched.tsv")
    assert rows == [(("The cat sat .", "Dogs ran ."), "contradiction")] and dropped == {"no label": 1}
    assert read_split("MNLI", "test", folder / "test_matched.tsv")[0] == [(("The cat sat .", "Dogs ran ."), None)]


def test_malformed_qqp_rows_are_dropped_and_counted(tmp_path):
    write_lines(
        tmp_path / "train.tsv", [HEADERS["QQP"], *ROWS["QQP"], "7\t8\t9\tbroken", "stray end\t0", "1\t2\t3\ta\tb\tn/a"]
    )
    rows, dropped = read_split("QQP", "train", tmp_path / "train.tsv")
    assert len(rows) == 2 and dropped == {"no 'question1'": 1, "no 'question2'": 1, "no label": 1}
    write_lines(tmp_path / "test.tsv", ["id\tquestion1\tquestion2", "0\ta\tb", "1\tbroken", "2\tc\td"])
    with pytest.raises(ValueError, match=r"test.tsv, line 3"):  # else the next prediction would have its number
        read_split("QQP", "test", tmp_path / "test.tsv")


def test_only_line_feeds_end_a_row(tmp_path):
    write_lines(tmp_path / "train.tsv", ["gj04\t1\t\tA\u2028cat\x0bsat\x85.\r"])
    assert read_split("CoLA", "train", tmp_path / "train.tsv")[0] == [(("A\u2028cat\x0bsat\x85.",), "1")]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("RTE", b"index\tsentence1\tlabel\n0\ta\tentailment\n", "no column 'sentence2'; it has index, sent"),
        ("RTE", b"index\tsentence1\tsentence2\tlabel\n0\ta\tentailment\n", "line 2: no 'label'"),
        ("RTE", b"index\tsentence1\tsentence2\tlabel\n0\ta\tb\tmaybe\n", "line 2: unknown label 'maybe'; valid: "),
        ("CoLA", b"gj04\t1\t\tfine .\ngj04\t2\t\tA cat .\n", "line 2: unknown label '2'; valid: 0, 1"),
        ("CoLA", b"gj04\t1\t\tfine .\ngj04\t1\t\tA \xff cat .\n", "line 2: byte 0xff is not UTF-8"),
        ("CoLA", b"gj04\t1\tfine .\n", "line 1: no 'sentence'"),
        ("RTE", b"index\tsentence1\tsentence2\tlabel\tlabel\n0\ta\tb\tc\td\n", "more than one column 'label'"),
        ("RTE", b"\t".join(b"%d" % n for n in range(100_000)), "(100000 in all)"),
        ("CoLA", b"gj04\t" + b"1" * 100_000 + b"\t\tfine .\n", "line 1: unknown label '1111"),
        ("CoLA", b"", "has no row"),
        ("CoLA", b"gj04\t-\t\tfine .\n", "no row has a label"),
        ("SST-2", b"", "it is empty"),
        ("STS-B", (HEADERS["STS-B"] + "\n" + ROWS["STS-B"][0][:-5] + "5.2\n").encode(), "line 2: unknown score '5.2'"),
        ("STS-B", (HEADERS["STS-B"] + "\n" + ROWS["STS-B"][0][:-5] + "1_0\n").encode(), "line 2: unknown score '1_0'"),
    ],
)  # fmt: skip
def test_bad_files_are_refused_with_file_and_line(name, content, message, tmp_path):
    (tmp_path / "train.tsv").write_bytes(content)
    with pytest.raises(ValueError) as error:
        read_split(name, "train", tmp_path / "train.tsv")
    assert str(tmp_path / "train.tsv") in str(error.value) and message in str(error.value)
    assert len(str(error.value)) < 500 and "\n" not in str(error.value)


# --------------------------------------------------------------------------------------------------------- preparing


@pytest.fixture(scope="module")
def prepared(vocabulary, tmp_path_factory):
    folder = tmp_path_factory.mktemp("glue")
    prepare_glue(official_folder(folder / "official"), f"{vocabulary}:{vocabulary}", folder / "bin")
    return folder / "bin"


def test_every_task_is_prepared(prepared, vocabulary):
    folder = prepared
    assert tasks_in(folder) == sorted(TASKS)
    splits = {path.stem for path in (folder / "MNLI" / "input0").glob("*.idx")}
    assert splits == {"train", "valid", "valid1", "test", "ax"}
    assert (folder / "dict.txt").read_bytes() == (vocabulary / "dict.txt").read_bytes()
    encoder = TextEncoder(vocabulary)
    dictionary = Dictionary.load(str(folder / "RTE" / "input1" / "dict.txt"))
    items = data_utils.load_indexed_dataset(str(folder / "RTE" / "input1" / "train"), dictionary)
    assert items[0].tolist() == [*encoder.encode("A cat ran ."), dictionary.eos()]
    assert (folder / "STS-B" / "label" / "train.label").read_text() == "1.0\n0.76\n"


@pytest.mark.parametrize("name", ["QNLI", "STS-B"])
def test_fairseqs_own_task_reads_the_data_alike(prepared, name):
    """Same tokens and targets as `sentence_prediction` with init token 0 and separator 2."""
    folder = prepared
    regression = not TASKS[name].labels
    stock = SentencePredictionTask.setup_task(
        SentencePredictionConfig(
            data=str(folder / name), num_classes=TASKS[name].outputs, init_token=0, separator_token=2, seed=1,
            regression_target=regression,
        )
    )  # fmt: skip
    stock.load_dataset("train")
    mine = glue_task(folder, name)
    mine.load_dataset("train")
    ours = mine.dataset("train")
    for i in range(2):
        theirs, batch = stock.dataset("train")[i], ours.collater([ours[i]])
        assert theirs["net_input.src_tokens"].tolist() == batch["net_input"]["src_tokens"][0].tolist()
        assert float(np.ravel(theirs["target"])[0]) == pytest.approx(float(batch["target"][0]), rel=1e-6)


def glue_task(folder, name, max_positions=64):
    from tupe.plugin.classification import GlueConfig, GlueTask

    cfg = GlueConfig(
        data=str(folder), glue_task=name, seed=1, finetune_from_model=None, classification_head_name="head"
    )
    task = GlueTask.setup_task(cfg)
    task._max_positions = max_positions
    return task


def test_a_split_without_labels_is_none_to_train_on(prepared):
    for folder in (prepared / "CoLA", prepared / "MNLI"):
        check_glue(folder, "test")
        with pytest.raises(ValueError, match="the split 'test' has no labels"):
            check_glue(folder, "test", labelled=True)
        check_glue(folder, "valid", labelled=True)


def test_an_output_in_the_way_is_refused(vocabulary, tmp_path, capsys):
    official = official_folder(tmp_path / "official")
    prepare_glue(official, vocabulary, tmp_path / "bin", ["cola"])
    with pytest.raises(ValueError, match="CoLA exists already; remove it"):
        prepare_glue(official, vocabulary, tmp_path / "bin", ["CoLA", "RTE"])
    assert not (tmp_path / "bin" / "RTE").exists()
    capsys.readouterr()
    prepare_glue(official, vocabulary, tmp_path / "bin")  # all that are not there
    said = capsys.readouterr().out
    assert "RTE train: 2 rows" in said and "MNLI valid: 1 rows" in said and "1 dropped (no label)" in said
    assert said.startswith("prepared already: CoLA\n") and "CoLA train" not in said
    prepare_glue(official, vocabulary, tmp_path / "bin")
    assert capsys.readouterr().out.count("\n") == 1
    shutil.rmtree(tmp_path / "bin" / "RTE")
    other = tmp_path / "other"
    other.mkdir()
    for name in ("sentencepiece.bpe.model", "dict.txt"):
        (other / name).write_bytes((vocabulary / name).read_bytes())
    with (other / "dict.txt").open("a") as file:
        file.write("more 1\n")
    with pytest.raises(ValueError, match=r"bin was prepared with another vocabulary \(dict.txt differs from that of"):
        prepare_glue(official, other, tmp_path / "bin", ["RTE"])


def test_the_official_files_are_never_replaced(vocabulary, tmp_path):
    official = official_folder(tmp_path / "official")
    content = (official / "RTE" / "train.tsv").read_bytes()
    with pytest.raises(ValueError, match="CoLA exists already; remove it, or choose another output folder"):
        prepare_glue(official, vocabulary, official, ["CoLA"])
    assert (official / "RTE" / "train.tsv").read_bytes() == content and not (official / "dict.txt").exists()


def test_missing_inputs_are_refused(vocabulary, tmp_path):
    with pytest.raises(ValueError, match="has none of the folders CoLA"):
        prepare_glue(tmp_path, vocabulary, tmp_path / "bin")
    write_lines(tmp_path / "CoLA" / "train.tsv", ROWS["CoLA"])
    with pytest.raises(ValueError, match=r"dev\.tsv is missing"):
        prepare_glue(tmp_path, vocabulary, tmp_path / "bin")
    with pytest.raises(ValueError, match="has no folder RTE"):
        prepare_glue(tmp_path, vocabulary, tmp_path / "bin", ["rte"])
    assert not (tmp_path / "bin" / "CoLA").exists()


def test_all_files_are_checked_before_anything_is_written(vocabulary, tmp_path):
    official = official_folder(tmp_path / "official")
    write_lines(official / "RTE" / "dev.tsv", [HEADERS["RTE"], "0\ta\tb\tmaybe"])
    arguments = ["--glue", official, "--data", vocabulary, "--output", tmp_path / "bin", "--tasks", "cola,rte"]
    result = CliRunner().invoke(glue_command, [*map(str, arguments)])
    assert result.exit_code == 2 and "unknown label 'maybe'" in result.stderr
    assert not result.stdout and not (tmp_path / "bin").exists()


def test_splits_are_reported_and_nothing_of_a_killed_process_stays(vocabulary, tmp_path):
    official = official_folder(tmp_path / "official")
    (tmp_path / "bin" / f".MRPC.{'0' * 32}.partial" / "input0").mkdir(parents=True)
    arguments = ["--glue", official, "--data", vocabulary, "--output", tmp_path / "bin", "--tasks=cola"]
    result = CliRunner().invoke(glue_command, list(map(str, arguments)))
    assert result.stdout.splitlines()[-1].startswith("CoLA test: 1 rows, 5 tokens")
    assert [path.name for path in (tmp_path / "bin").iterdir() if path.is_dir()] == ["CoLA"]


def die(texts):
    os._exit(1)


def test_all_cores_encode_the_same(vocabulary, monkeypatch):
    encoder, rows = TextEncoder(vocabulary), [((f"the {number} of", "and"), None) for number in range(600)]
    alone = tasks.encoded(rows, encoder)
    monkeypatch.setattr(tasks, "MANY", 600)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    assert tasks.encoded(rows, encoder) == alone and len(alone) == 600
    eos = encoder.ids["</s>"]
    assert alone[7] == [[*encoder.encode("the 7 of"), eos], [*encoder.encode("and"), eos]]
    monkeypatch.setattr(tasks, "_encode", die)
    with pytest.raises(ValueError, match="a process that encodes text died"):
        tasks.encoded(rows, encoder)
