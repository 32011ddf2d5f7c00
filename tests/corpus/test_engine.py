"""`tupe prepare corpus`, from raw text to data directory: what comes out, restarts after real kills, bad input."""

import concurrent.futures
import contextlib
import gzip
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from helpers import Copy, descendants, fork, fork_tupe, has_ended, prepare_glue, wait_until
from tqdm import tqdm

from tupe.cli import main
from tupe.corpus import engine, vocabulary
from tupe.corpus import steps as corpus
from tupe.corpus.engine import command, prepare
from tupe.corpus.stats import write_report
from tupe.text import TextEncoder

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
    """Raises SystemExit with the message where the command refuses."""
    result = CliRunner().invoke(command, [str(arg) for arg in args], catch_exceptions=False)
    if result.exit_code:
        raise SystemExit(result.output)


ONE = ("--jobs", 1)


def write_text(folder, documents=30):
    (folder / "a.txt").write_text(text(documents), encoding="utf-8")
    return folder / "a.txt"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    write_text(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run("a.txt", "--output", "data", "--vocab-size", 300, "--valid-fraction", 0.1, *ONE)
    return folder / "data"


def same_files(one, two):
    """But for the times of the inputs in the manifest."""
    names = {path.name for path in one.iterdir()}
    assert names == {path.name for path in two.iterdir()}
    for name in names:
        if name == "manifest.json":
            first, second = (json.loads((folder / name).read_text()) for folder in (one, two))
            for manifest in (first, second):
                manifest["settings"].pop("inputs")
            assert first == second
        else:
            assert (one / name).read_bytes() == (two / name).read_bytes(), name
    return True


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
    decoded = []
    for split in ("train", "valid"):
        dataset = data_utils.load_indexed_dataset(str(data / split), dictionary, "mmap")
        assert manifest["counts"][f"{split}: ids"] == sum(dataset.sizes)
        assert manifest["counts"][f"{split}: documents"] == sum(dataset.sizes == 1) > 0
        assert len(dataset[len(dataset) - 1]) == 1 and all(line[-1] == dictionary.eos() for line in dataset)
        blocks = TokenBlockDataset(dataset, dataset.sizes, 64, dictionary.pad(), dictionary.eos(), "complete_doc")
        assert len(blocks) >= manifest["counts"][f"{split}: documents"]
        decoded += [encoder.decode(line) for line in dataset if len(line) > 1]
    # every sentence arrives, in the form in which fine-tuning would see it
    wanted = [" ".join(s) for d in range(30) for s in encoder.normaliser.sentences(sentences(7 * d, 7))]
    assert sorted(decoded) == sorted(wanted) and len(decoded) == 210


def test_same_ids_as_fairseq_preprocess(data, tmp_path):
    from fairseq.data import Dictionary, data_utils
    from fairseq_cli import preprocess

    encoder = TextEncoder(data)
    dictionary = Dictionary.load(str(data / "dict.txt"))
    ours = data_utils.load_indexed_dataset(str(data / "train"), dictionary, "mmap")
    lines = [" ".join(dictionary[int(i)] for i in line[:-1]) for line in ours]
    assert sum(map(len, lines)) > 1000 and encoder.ids["<unk>"] == dictionary.unk()
    (tmp_path / "train.bpe").write_text("\n".join(lines) + "\n", encoding="utf-8")
    options = ["--only-source", "--srcdict", data / "dict.txt", "--trainpref", tmp_path / "train.bpe"]
    words = [*map(str, options), f"--destdir={tmp_path}"]
    preprocess.main(preprocess.options.get_preprocessing_parser().parse_args(words))
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"train.{suffix}").read_bytes() == (data / f"train.{suffix}").read_bytes()


AWKWARD = [
    "See http://example.org/a_(b)?c=d#e, or write to some.one+else@example.co.uk, and open my_file.tar.gz today.",
    "A non-breaking\u00a0space and a soft hy\u00adphen are hard to see in any old text.",
    "The words 中文 and 日本語。 are not written with the letters of the others here.",
    'She laughed 😀👩\u200d👩\u200d👧 and said "hello" to the old man who lived next door.',
    "The word \u200fשלום\u200f is read from right to left, and مرحبا, too, as they all know.",
    "It's Mr. O'Neill's “naïve” café — isn't it, said the 3.5 m tall king of the U.S. Senate?",
]


def test_pretraining_and_glue_see_the_same_ids(tmp_path):
    """Awkward sentences survive both ways into a model, with equal ids, or are refused with a reason."""
    from fairseq.data import Dictionary, data_utils

    filler = text(30).split("\n\n")
    monster = "It has a word of " + "x" * 100_000 + " and more words after it, in the same line of text."
    (tmp_path / "a.txt").write_text("\n\n".join([*AWKWARD, monster, *filler]) + "\n", encoding="utf-8")
    manifest = prepare([tmp_path / "a.txt"], tmp_path / "data", vocab_size=400, workers=1)
    assert manifest["dropped"] == {
        "paragraph: a word of more than 1000 characters": 1,
        "document: no paragraph left": 1,
    }
    dictionary = Dictionary.load(str(tmp_path / "data" / "dict.txt"))
    lines = [
        tuple(line.tolist())
        for split in ("train", "valid")
        for line in data_utils.load_indexed_dataset(str(tmp_path / "data" / split), dictionary, "mmap")
    ]
    folder = tmp_path / "glue" / "CoLA"
    folder.mkdir(parents=True)
    for name in ("train.tsv", "dev.tsv"):
        (folder / name).write_text("".join(f"s\t1\t\t{sentence}\n" for sentence in AWKWARD), encoding="utf-8")
    prepare_glue(tmp_path / "glue", tmp_path / "data", tmp_path / "bin")
    prefix = str(tmp_path / "bin" / "CoLA" / "input0" / "train")
    prepared = data_utils.load_indexed_dataset(prefix, dictionary, "mmap")
    encoder = TextEncoder(tmp_path / "data")
    for i, sentence in enumerate(AWKWARD):
        wanted = encoder.encode(sentence)
        assert (*wanted, dictionary.eos()) in lines, sentence
        assert prepared[i].tolist() == [*wanted, dictionary.eos()]
        assert encoder.decode(wanted) and len(wanted) > 10
    assert encoder.encode("") == [] and len(encoder.encode("x" * 100_000)) > 10_000


# ----------------------------------------------------------------------------------------- restarts and many workers

OPTIONS = {"vocab_size": 300, "valid_fraction": 0.1, "shard_mb": 0.002}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A folder with an input and the data that one process makes of it, in ten shards."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "in").mkdir()
    for i in range(3):
        (folder / "in" / f"{i}.txt").write_text("\n".join(sentences(100 * i, 40).split(". ")) + "\n")
    (folder / "b.txt.gz").write_bytes(gzip.compress(text(40).encode()))
    prepare(inputs_of(folder), folder / "data", workers=1, **OPTIONS)
    return folder


def inputs_of(folder):
    return [folder / "in", folder / "b.txt.gz"]


@pytest.mark.thorough
def test_another_number_of_workers(undisturbed, tmp_path):
    prepare(inputs_of(undisturbed), tmp_path / "data", workers=3, **OPTIONS)
    assert same_files(undisturbed / "data", tmp_path / "data")


def start(*args, **kwargs):
    """prepare(...) in another process, which is a group of its own."""

    def target():
        os.setpgid(0, 0)
        tqdm.set_lock(threading.RLock())  # not the shared one, with which a killed process would block all others
        prepare(*args, **kwargs)

    process = Copy(target=target)
    process.start()
    return process


def finished_tasks(out):
    try:
        return len(list((out / "work").glob("*/[!.]*")))
    except FileNotFoundError:  # a run that ends takes the folder away while it is being listed
        return 0


@pytest.mark.parametrize(
    "workers, most, least",
    [(2, 6, 2), pytest.param(2, 2, 5, marks=pytest.mark.slow), pytest.param(1, 2, 5, marks=pytest.mark.slow)],
)
def test_killed_again_and_again(undisturbed, tmp_path, workers, most, least):
    """kill -9 of the process that was started, whenever 1 to `most` tasks more have been finished; `least` times."""
    out, kills, chance = tmp_path / "data", 0, random.Random(workers)
    for _ in range(100):
        goal = finished_tasks(out) + chance.randint(1, most)
        process = start(inputs_of(undisturbed), out, workers=workers, **OPTIONS)
        while process.is_alive() and finished_tasks(out) < goal:
            time.sleep(0.001)
        before = finished_tasks(out)
        process.kill()
        process.join()
        if process.exitcode == 0:
            break
        kills += 1
        whole = (out / "manifest.json").exists()  # killed while it cleared away the tasks of a finished run
        assert whole or finished_tasks(out) >= before >= goal  # nothing that was finished is lost
    assert process.exitcode == 0 and kills >= least
    assert same_files(undisturbed / "data", out)


def test_killed_while_files_are_put_in_place(undisturbed, tmp_path, monkeypatch):
    """Killed after each of the moves that end a run."""
    out = tmp_path / "data"
    real, left = Path.replace, []

    def killing(path, target):
        if path.suffix != ".partial" and path.parent.name != "work":  # reports are written anew every time
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
            left.pop()
        return real(path, target)

    monkeypatch.setattr(Path, "replace", killing)
    kills = 0
    while kills < 20:
        left.extend([None] * (kills + 1))  # one more file gets its place each time
        process = start(inputs_of(undisturbed), out, workers=1, **OPTIONS)
        process.join()
        left.clear()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL and not (out / "manifest.json").exists()
        kills += 1
    assert kills >= 5 and same_files(undisturbed / "data", out)


TEXT_SHARD = corpus.text_shard


def die_once(folder, path, *args):
    try:
        os.unlink(os.environ["DIE_ONCE"])  # of two workers only one succeeds
    except FileNotFoundError:
        return TEXT_SHARD(folder, path, *args)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_dies(undisturbed, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "text_shard", die_once)
    monkeypatch.setenv("DIE_ONCE", str(tmp_path / "flag"))
    (tmp_path / "flag").touch()
    with pytest.raises(ValueError, match="a worker process of the step 'text' died .* same command continues"):
        prepare(inputs_of(undisturbed), tmp_path / "data", workers=2, **OPTIONS)
    assert len(list((tmp_path / "data" / "work" / "read").iterdir())) >= 2
    prepare(inputs_of(undisturbed), tmp_path / "data", workers=2, **OPTIONS)
    assert same_files(undisturbed / "data", tmp_path / "data")


@pytest.mark.parametrize("number, workers", [(signal.SIGTERM, 2), (signal.SIGINT, 1)])
def test_a_signal_to_all_processes_ends_them_with_one_line(number, workers, undisturbed, tmp_path):
    """As a terminal sends Ctrl-C. What was finished stays: the same command goes on."""
    out, log = tmp_path / "data", tmp_path / "log"
    words = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    process = fork_tupe(
        "prepare", "corpus", *inputs_of(undisturbed), f"--output={out}", f"--jobs={workers}", *words, log=log
    )
    wait_until(lambda: finished_tasks(out) >= 3)
    tree, before = descendants(process.pid), finished_tasks(out)
    os.killpg(process.pid, number)
    process.join()
    assert process.exitcode == 128 + number
    wait_until(lambda: all(has_ended(pid) for pid in tree))
    assert finished_tasks(out) >= before
    said = [line for line in log.read_text().replace("\r", "\n").splitlines() if line.strip() and "|" not in line]
    assert said == [f"prepare corpus: stopped by {signal.Signals(number).name}; the same command continues from here"]
    prepare(inputs_of(undisturbed), out, workers=2, **OPTIONS)
    assert same_files(undisturbed / "data", out)


def test_a_signal_in_the_middle_of_a_fork_is_not_lost(undisturbed, tmp_path):
    """An exception that its handler raised there would be swallowed, and the run would go on to its end."""
    out, words = tmp_path / "data", [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]

    def run():
        sent = []
        os.register_at_fork(after_in_parent=lambda: sent or sent.append(os.kill(os.getpid(), signal.SIGTERM)))
        main(["prepare", "corpus", *map(str, inputs_of(undisturbed)), f"--output={out}", "--jobs=2", *words])

    process = fork(run, "tupe")
    process.join()
    assert process.exitcode == 128 + signal.SIGTERM and not (out / "manifest.json").exists()


def test_an_unfinished_run_goes_on_with_other_inputs_and_options(tmp_path):
    """What was begun in vain is in nobody's way. An error names the place."""
    rows = [{"text": sentences(7 * i, 4)} for i in range(12)]
    (tmp_path / "good.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "bad.jsonl").write_text(json.dumps(rows[0]) + '\n{"body": "without the field"}\n')
    with pytest.raises(ValueError, match="bad.jsonl, line 2: no 'text' .the fields there: body: choose .*; .*--err"):
        prepare([tmp_path / "bad.jsonl"], tmp_path / "data", workers=1)
    with pytest.raises(ValueError, match="cannot make 32768 types from this text: .*another --vocab-size continues"):
        prepare([tmp_path / "good.jsonl"], tmp_path / "data", workers=1)
    texts = {path: path.stat().st_mtime_ns for path in (tmp_path / "data" / "work" / "text").iterdir()}
    with pytest.raises(ValueError, match="cannot make 30000 types"):
        prepare([tmp_path / "good.jsonl"], tmp_path / "data", workers=1, vocab_size=30000)
    assert texts == {path: path.stat().st_mtime_ns for path in texts}  # the same text is not read again
    for name in ("data", "fresh"):
        prepare([tmp_path / "good.jsonl"], tmp_path / name, workers=1, vocab_size=100)
    assert same_files(tmp_path / "data", tmp_path / "fresh")


def test_files_that_a_kill_left_half_moved_belong_to_their_options(tmp_path, monkeypatch):
    inputs, output, move = [write_text(tmp_path)], tmp_path / "data", Path.replace

    def killed(path, target):
        if path.name == "train.bin":
            raise KeyboardInterrupt
        return move(path, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "replace", killed)
        prepare(inputs, output, vocab_size=300, workers=1)
    assert (output / "dict.txt").exists() and not (output / "train.bin").exists()
    for folder in (output, tmp_path / "fresh"):
        prepare(inputs, folder, vocab_size=200, workers=1)
    assert same_files(tmp_path / "fresh", output)


@pytest.mark.slow
def test_dask_cluster_of_two_workers(undisturbed, tmp_path):
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, local_directory=str(tmp_path)
    ) as cluster:
        prepare(inputs_of(undisturbed), tmp_path / "data", scheduler=cluster.scheduler_address, **OPTIONS)
        assert len(cluster.scheduler_info["workers"]) == 2
    assert same_files(undisturbed / "data", tmp_path / "data")


def test_a_worker_of_a_cluster_dies(tmp_path, monkeypatch):
    distributed = pytest.importorskip("distributed")

    class Cluster(contextlib.nullcontext):
        def get_executor(self, **options):
            return self

        def submit(self, *task):
            future = concurrent.futures.Future()
            future.set_exception(distributed.KilledWorker("a task", None, 3))
            return future

    monkeypatch.setattr(distributed, "Client", lambda *_, **options: Cluster(Cluster()))
    with pytest.raises(ValueError, match="a worker process of the step 'read' died .*the same command continues"):
        prepare([write_text(tmp_path)], tmp_path / "data", scheduler="tcp://127.0.0.1:1")


def test_workers_in_another_folder_read_the_same_files(tmp_path, monkeypatch):
    """Names of documents and sources are as the user wrote the paths."""
    elsewhere, here = tmp_path / "elsewhere", tmp_path / "here"
    for folder, count in ((elsewhere, 20), (here, 30)):
        folder.mkdir()
        write_text(folder, count)
    monkeypatch.chdir(here)

    class Cluster:
        def submit(self, function, *arguments):
            future = concurrent.futures.Future()
            with monkeypatch.context() as patch:
                patch.chdir(elsewhere)
                future.set_result(function(*arguments))
            return future

    prepare(["a.txt"], "one", workers=1, vocab_size=300)
    monkeypatch.setattr(engine.processes, "workers", lambda count: contextlib.nullcontext(Cluster()))
    manifest = prepare(["a.txt"], "two", workers=2, vocab_size=300)
    assert same_files(here / "one", here / "two") and list(manifest["sources"]) == ["a.txt"]


@pytest.mark.slow
def test_memory_of_a_worker_does_not_grow_with_the_corpus(tmp_path):
    """The same documents again and again: a worker remembers more and more words, up to tupe.normaliser.CACHE."""
    peaks = []
    body = "\n\n".join(sentences(70 * j, 70) for j in range(100)) + "\n\n"
    for times in (1, 10):
        (tmp_path / f"{times}.txt").write_text(body * times, encoding="utf-8")
        words = [tmp_path / f"{times}.txt", "--output", tmp_path / str(times), "--vocab-size", 300, "--jobs", 2]
        words += ["--shard-mb", 0.2]
        measured = "import resource, sys, tupe.cli; tupe.cli.main(standalone_mode=False); "
        measured += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)"
        command = [sys.executable, "-c", measured, "prepare", "corpus", *words]
        done = subprocess.run([*map(str, command)], check=True, capture_output=True, text=True)
        peaks.append(int(done.stderr.splitlines()[-1]))
    assert peaks[1] < 1.1 * peaks[0], peaks


# ----------------------------------------------------------------------------------------------- options and bad input


def test_the_same_command_again_does_nothing(undisturbed, capsys):
    before = {path: path.stat().st_mtime_ns for path in (undisturbed / "data").iterdir()}
    prepare(inputs_of(undisturbed), undisturbed / "data", **OPTIONS)
    assert before == {path: path.stat().st_mtime_ns for path in (undisturbed / "data").iterdir()}
    assert capsys.readouterr().err == f"prepare corpus: {undisturbed / 'data'} is finished already\n"


def test_folder_of_another_run(undisturbed, tmp_path):
    write_text(tmp_path)
    run(tmp_path / "a.txt", "--output", tmp_path / "data", "--vocab-size", 300, *ONE)
    before = (tmp_path / "data" / "train.bin").read_bytes()
    with pytest.raises(SystemExit, match="data holds data from other inputs or options, .*: choose another folder"):
        run(tmp_path / "a.txt", "--output", tmp_path / "data", "--vocab-size", 310, *ONE)
    assert (tmp_path / "data" / "train.bin").read_bytes() == before


def test_an_empty_folder_whose_parent_is_another_s(tmp_path, monkeypatch):
    """Its lock is in the folder itself."""
    (tmp_path / "mount" / "data").mkdir(parents=True)
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path / "mount")
    output = tmp_path / "mount" / "data"
    run(write_text(tmp_path, 9), "--output", output, "--vocab-size", 150, "--valid-fraction", 0.1, *ONE)
    assert (output / "manifest.json").is_file() and not (output / ".lock").exists()


@pytest.mark.parametrize("precious", ["precious", "manifest.json"])  # GLUE's folders and exports have one, too
def test_folder_of_something_else_is_never_overwritten(precious, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / precious).write_text("{}")
    with pytest.raises(SystemExit, match="data holds .* other files: choose another folder"):
        run(write_text(tmp_path), "--output", tmp_path / "data")
    assert (tmp_path / "data" / precious).exists()


@pytest.mark.parametrize("others", [["work/notes/results.txt"], ["work/text/a.txt", "thesis.tex"]])
def test_a_project_with_a_folder_work_is_never_overwritten(others, tmp_path):
    files = [tmp_path / "data" / name for name in ("report.md", "work/text/.git/HEAD", *others)]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    with pytest.raises(SystemExit, match="data holds .* other files: choose another folder"):
        run(write_text(tmp_path), "--output", tmp_path / "data")
    assert all(file.exists() for file in files)


def test_one_folder_is_prepared_by_one_process(undisturbed, tmp_path):
    process = start(inputs_of(undisturbed), tmp_path / "data", workers=1, **OPTIONS)
    while process.is_alive() and finished_tasks(tmp_path / "data") < 2:
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(BlockingIOError, match="another process is writing .*data"):
            prepare(inputs_of(undisturbed), tmp_path / "data", workers=1, **OPTIONS)
    finally:
        os.kill(process.pid, signal.SIGCONT)
    process.join()
    assert process.exitcode == 0 and same_files(undisturbed / "data", tmp_path / "data")
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_output_within_the_input_folder(tmp_path):
    for i in range(5):
        (tmp_path / f"{i}.txt").write_text(sentences(100 * i, 100))
    for more in ([], []):
        run(tmp_path, "--output", tmp_path / "data", "--vocab-size", 300, *ONE, *more)
        manifest = json.loads((tmp_path / "data" / "manifest.json").read_text())
        assert manifest["counts"]["documents read"] == 5 and not manifest["settings"]["skipped"]


def test_copies_go_and_the_last_paragraph_stays(tmp_path):
    body = text(10)
    documents = body.split("\n\n")
    (tmp_path / "a.txt").write_text(
        body + "\n" + documents[0].upper() + "\r\n\r\n" + sentences(900, 5)  # no line end
    )
    manifest = prepare([tmp_path / "a.txt"], tmp_path / "data", vocab_size=200, workers=1)
    assert manifest["dropped"] == {"document: a copy of an earlier document": 1}
    assert manifest["counts"]["documents read"] == 12 and manifest["counts"]["documents kept"] == 11


def test_the_same_share_of_every_source_is_held_out(tmp_path):
    """Of a small one at least one document, and the composition is printed and written down."""
    (tmp_path / "books").mkdir()
    for name, first, count in (("books/1.txt", 900, 9), ("books/2.txt", 300, 12), ("small.jsonl", 500, 3)):
        texts = [sentences(first + 7 * i, 7) for i in range(count)]
        rows = texts if name.endswith(".txt") else [json.dumps({"text": each}) for each in texts]
        (tmp_path / name).write_text("\n".join(rows))
    inputs = [write_text(tmp_path, 100), tmp_path / "books", tmp_path / "small.jsonl"]
    manifest = prepare(inputs, tmp_path / "data", vocab_size=300, valid_fraction=0.1, workers=1)
    large, *small = (manifest["sources"][str(path)] for path in inputs)
    assert large["valid: ids"] / (large["valid: ids"] + large["train: ids"]) == pytest.approx(0.1, abs=0.02)
    assert [[each["train: documents"], each["valid: documents"]] for each in small] == [[1, 1], [2, 1]]
    assert f"| {inputs[2]} | 2 / 1 |" in (tmp_path / "data" / "report.md").read_text()


@pytest.mark.parametrize("cased", [False, True])
def test_documents_that_differ_in_a_number_or_a_sign_are_no_copies(cased, tmp_path):
    """Those that differ in case are copies where case is dropped."""
    prices = ["1.5", "15", "-15", "<15", ">15", "15 %", "1 5"]
    lines = [f"{shop} wrote that the {price} euros were all that was left." for shop in SUBJECTS for price in prices]
    lines += [line.replace("were", "WERE") for line in lines]
    (tmp_path / "a.txt").write_text("\n\n".join(lines))
    options = {"vocab_size": 100, "workers": 1, "cased": cased}
    manifest = prepare([tmp_path / "a.txt"], tmp_path / "data", **options)
    assert manifest["counts"]["documents kept"] == len(lines) // (1 if cased else 2), manifest["dropped"]


def test_report(data, tmp_path):
    manifest = json.loads((data / "manifest.json").read_text())
    write_report(tmp_path, manifest)
    report = (data / "report.md").read_text()
    assert report == (tmp_path / "report.md").read_text()
    write_report(tmp_path, {**manifest, "dropped": {}, "examples": {}})
    assert (tmp_path / "report.md").read_text().rstrip().endswith("Nothing was dropped.")
    write_report(tmp_path, {**manifest, "dropped": {"document: odd": 2}, "examples": {"document: odd": "?"}})
    assert (tmp_path / "report.md").read_text().rstrip().endswith("| document: odd | 2 | '?' |")
    assert all(f"| {what} |" in report for what in ("documents read | 30", "documents kept | 30", "sentences | 210"))
    words = sum(len(s) for d in range(30) for s in TextEncoder(data).normaliser.sentences(sentences(7 * d, 7)))
    assert f"| tokens | {words:,} |" in report and "| pieces that are `<unk>` | 0 |" in report


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("blank.txt", b"\n \n\n", "no document is left, .* dropped: nothing"),
        (
            "junk.txt",
            b"1 2 3 4 5 6 7\n\n1 2 3\n",
            r"no document is left, .*dropped: .*few letters \(2, the first",
        ),
        (
            "long.txt",
            b"many words " * 1_900_000,
            r"left, .*: longer than 20000000 .*\(1, the first: .*long.txt",
        ),
        (
            "one.txt",
            b"Just one document of a few more words than eight.\n",
            "1 document is left, .*empty l",
        ),
        ("same.txt", b"These are more words than eight, and no fewer.\n\n" * 3, "1 document is left, beside 2 copies"),
        ("x.parquet", b"", "x.parquet: cannot be read after the start"),
        ("x.pdf", b"", "x.pdf: unknown kind of input; valid: .txt"),
    ],
)
def test_bad_input(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SystemExit) as error:
        run(tmp_path / name, "--output", tmp_path / "data", "--vocab-size", 200, *ONE)
    assert re.search(message, str(error.value)), error.value


def test_the_valid_number_of_types_counts_all_of_them():
    lines = ["the cat sat on the mat and dogs ran in parks"] * 5
    for size in (500, 6):
        with pytest.raises(ValueError, match=r"cannot make \d+ types .*: valid: at (most|least) \d+;") as error:
            vocabulary.train_sentencepiece(lines, size)
        found = re.search(r"at (most|least) (\d+)", str(error.value))
        outside = 1 if found[1] == "most" else -1
        vocabulary.train_sentencepiece(lines, int(found[2]))
        with pytest.raises(ValueError, match=f"at {found[1]} {found[2]}"):
            vocabulary.train_sentencepiece(lines, int(found[2]) + outside)
