"""`tupe finetune --engine torch`: the first engine's numbers, resuming, sweeps."""

import os
import shutil
import signal
from importlib.util import find_spec

import pytest
import torch
from click.testing import CliRunner
from helpers import ended, finetune, fork_tupe, table, unsealed
from safetensors.torch import load_file, save_file

from tupe.cli import main
from tupe.data.examples import Examples, collate
from tupe.modeling_tupe import TupeForSequenceClassification
from tupe.run.checksums import seal_all
from tupe.run.folder import fingerprint
from tupe.run.record import REFUSED, STOPPED, read, updates_of
from tupe.sweep.grid import Sweep
from tupe.train import finetune as tuning
from tupe.train.saved import checkpoints

TINY = ["--gpus=0", "--allocator=none", "--num-workers=0", "--batch-size=12", "--lr=1e-3", "--max-epoch=2"]


def begin(data, checkpoint, folder, *words, task="CoLA", **options):
    where = [f"--data={data}", f"--checkpoint={checkpoint}", f"--output={folder}", f"--task={task}"]
    return fork_tupe("finetune", "--engine=torch", *where, *TINY, *words, **options)


def near(entry):
    """The scores of an epoch, to rounding."""
    return {key: pytest.approx(value, rel=1e-3) if isinstance(value, float) else value for key, value in entry.items()}


@pytest.mark.parametrize(
    "task", [*(pytest.param(name, marks=pytest.mark.thorough) for name in ("CoLA", "MNLI")), "STS-B"]
)
def test_both_engines_compute_the_same(task, small, learnable, tmp_path):
    """The same scores and losses after every epoch, to rounding, and the same predictions; MNLI has two splits."""
    words = ["model.dropout=0", "model.attention_dropout=0", "model.pooler_dropout=0"]
    glue = task.lower().replace("-", "")
    overrides = [f"glue={glue}", "optimization.max_epoch=2", "optimization.lr=[1e-3]", *(f"+{word}" for word in words)]
    finetune(learnable, small, tmp_path / "fairseq", *overrides)
    assert ended(begin(learnable, small, tmp_path / "here", *words, task=task)) == 0
    theirs, ours = (read(tmp_path / folder) for folder in ("fairseq", "here"))
    assert len(ours.scores) == len(theirs.scores) == (4 if task == "MNLI" else 2)
    assert ours.scores == [near(entry) for entry in theirs.scores]
    names = ["task", "architecture", "variant", "seed", "lr", "budget", "splits", "metrics", "data", "dictionary"]
    names += ["pretrained_updates", "state"]
    assert {name: getattr(ours, name) for name in names} == {name: getattr(theirs, name) for name in names}
    for path in (tmp_path / "fairseq" / "predictions").iterdir():
        one, two = table(path), table(tmp_path / "here" / "predictions" / path.name)
        assert [row[::2] for row in one] == [row[::2] for row in two]
        same = [a[1] == b[1] if task != "STS-B" else abs(float(a[1]) - float(b[1])) < 5e-3
                for a, b in zip(one, two, strict=True)]  # fmt: skip
        assert all(same)
    model = TupeForSequenceClassification.from_pretrained(tmp_path / "here").eval()
    if task == "STS-B":  # what transformers makes of the folder is on the scale of the labels, as in the files
        assert model.config.label_range == [0.0, 5.0]
        valid = Examples(learnable / task, "valid", 20)
        here = [model(collate([valid[1, n]])["input_ids"]).logits.item() for n in range(6)]
        best = table(tmp_path / "here" / "predictions" / "valid_best.tsv")
        assert here == pytest.approx([float(row[1]) for row in best[:6]], abs=1e-3)
    else:
        assert model.config.label_range is None


@pytest.fixture(scope="module")
def whole(small, learnable, tmp_path_factory):
    """Folder of a run with dropout that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert ended(begin(learnable, small, folder)) == 0
    return folder


def test_what_comes_out_is_the_best_model(whole, small):
    model = TupeForSequenceClassification.from_pretrained(whole)
    assert model.config.id2label == {0: "0", 1: "1"} and model.config.hidden_dropout_prob == 0.1
    record = read(whole)
    best = max(entry["num_updates"] for entry in record.scores if entry["best"])
    assert updates_of(whole) == best
    assert record.pretrained == str(small) and record.config["engine"] == "torch"
    assert list(checkpoints(whole)) == [record.scores[-1]["num_updates"]]  # of what is left, to resume
    if best in checkpoints(whole):
        own = TupeForSequenceClassification.from_pretrained(checkpoints(whole)[best]).state_dict()
        assert all(torch.equal(value, own[name]) for name, value in model.state_dict().items())


def test_a_worse_epoch_does_not_take_the_place_of_the_best(small, learnable, tmp_path, monkeypatch):
    falling = iter((90.0, 10.0))
    monkeypatch.setattr(tuning, "score", lambda metrics, *_: dict.fromkeys(metrics, next(falling)))
    assert ended(begin(learnable, small, tmp_path)) == 0
    first, last = (entry["num_updates"] for entry in read(tmp_path).scores)
    kept, end = (load_file(path / "model.safetensors") for path in (tmp_path, checkpoints(tmp_path)[last]))
    assert updates_of(tmp_path) == first and any(not torch.equal(kept[name], end[name]) for name in kept)


def test_predictions_for_the_server(whole, small, learnable, tmp_path):
    """Those of its own best epoch, in file order; the number of examples in a batch does not matter."""
    data = shutil.copytree(learnable, tmp_path / "bin")
    for name in ("CoLA", "MNLI"):
        for part in (data / name).glob("input*"):
            for kind in ("bin", "idx"):
                shutil.copy(part / f"valid.{kind}", part / f"test.{kind}")
    words = ["predict", f"CoLA={whole}", f"--data={data}", f"--output={tmp_path / 'out'}", "--batch-size=7"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    lines = (tmp_path / "out" / "CoLA.tsv").read_text().splitlines()
    stored = [row[:2] for row in table(whole / "predictions" / "valid_best.tsv")]
    assert [line.split("\t") for line in lines[1:]] == stored and len(stored) == 41
    for task, folder in (("MNLI", whole), ("CoLA", small)):
        result = CliRunner().invoke(main, ["predict", f"{task}={folder}", *words[2:]])
        assert result.exit_code == REFUSED and f"was not fine-tuned on {task}, but on " in result.output


def test_a_signal_stops_at_a_whole_update_and_the_run_resumes_exactly(small, learnable, whole, tmp_path, monkeypatch):
    from tupe.train import finetune as tuning

    update = tuning.Finetuning.update

    def stopped(self, samples):
        if self.done == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        update(self, samples)

    with monkeypatch.context() as patch:
        patch.setattr(tuning.Finetuning, "update", stopped)
        assert ended(begin(learnable, small, tmp_path)) == STOPPED
    assert list(checkpoints(tmp_path)) == [2] and not (tmp_path / "model.safetensors").exists()
    assert ended(begin(learnable, small, tmp_path)) == 0
    assert read(tmp_path).scores == read(whole).scores
    assert (tmp_path / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def refused(data, checkpoint, folder, *words, engine="torch"):
    """The one line of a command that is refused."""
    where = [f"--data={data}", f"--checkpoint={checkpoint}", f"--output={folder}", "--task=CoLA"]
    result = CliRunner().invoke(main, ["finetune", f"--engine={engine}", *where, *TINY, *words])
    assert result.exit_code == REFUSED and len(result.output.splitlines()) == 1 and not folder.exists()
    return result.output


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--position=rope", "unknown option --position"),
        ("optimization.max_update=3", "optimization.max_update is not known to --engine torch"),
        ("--max-epoch=0", "training would have no end"),
        ("--task=RTE", "has no RTE; prepared there: CoLA"),
    ],
)
def test_what_it_does_not_have_is_refused(word, message, small, learnable, tmp_path):
    assert message in refused(learnable, small, tmp_path / "run", word)


def test_a_model_that_is_not_all_there_is_refused(small, learnable, tmp_path):
    copy = unsealed(shutil.copytree(small, tmp_path / "copy"))
    weights = load_file(copy / "model.safetensors")
    save_file({name: weights[name] for name in weights if ".layers.1." not in name}, copy / "model.safetensors",
              {"format": "pt"})  # fmt: skip
    assert ended(begin(learnable, copy, tmp_path / "run", "--max-epoch=1", log=tmp_path / "log")) == REFUSED
    assert "has no tupe.encoder.layers.1." in (tmp_path / "log").read_text().splitlines()[-1]
    (copy / "model.safetensors").write_bytes((copy / "model.safetensors").read_bytes()[:-100])
    seal_all(copy)
    for engine in ("torch", *["fairseq"] * bool(find_spec("fairseq"))):
        said = refused(learnable, copy, tmp_path / engine, engine=engine)
        assert "model.safetensors cannot be read" in said


def test_another_vocabulary_is_refused(small, learnable, tmp_path):
    longer = unsealed(shutil.copytree(learnable, tmp_path / "longer"))
    (longer / "dict.txt").write_text((small / "dict.txt").read_text() + "further 1\n")
    seal_all(longer)
    assert "longer/dict.txt makes" in refused(longer, small, tmp_path / "run")


def test_a_sweep_leaves_records_and_predictions(small, learnable, tmp_path):
    words = [f"--data={learnable}", f"--checkpoint={small}", "--engine=torch", *TINY[:4], "--max-epoch=1"]
    (job,) = Sweep.plan("finetune", tmp_path, {"task": ["CoLA"], "lr": ["1e-3"], "seed": ["1"]}, words).jobs
    assert ended(fork_tupe(*job.command[3:])) == 0
    assert {path.name for path in job.folder.iterdir()} <= {"record.json", "predictions", "lock", "train.log"}


@pytest.mark.thorough
def test_two_processes_equal_one(small, learnable, tmp_path):
    from helpers import begin_two

    words = ["--lr=1e-3", "--max-epoch=2", "--dropout=0", "--attention-dropout=0", "--pooler-dropout=0"]
    more = [f"--finetune-from-model={small}", "--num-workers=0"]
    plan = {"recipe": "finetune", "overrides": ["glue=cola"], "data": str(learnable)}
    two = begin_two(tmp_path / "two", [*words, *more, "--batch-size=6", "--update-freq=1"], **plan)
    assert [ended(process) for process in two] == [0, 0]
    assert ended(begin(learnable, small, tmp_path / "one", *words, "--batch-size=6", "--update-freq=2")) == 0
    one, both = read(tmp_path / "one"), read(tmp_path / "two")
    assert len(one.scores) == 2 and both.scores == [near(entry) for entry in one.scores]


OWN = """from tupe.positions import PositionScheme, register
@register("own_nothing_at_all")
class Own(PositionScheme):
    paper, formula = "(test)", "0"
"""


def test_a_model_with_an_encoding_of_ones_own(vocabulary, learnable, tmp_path):
    """The file is needed again, and its contents are part of the record."""
    file, model = tmp_path / "own.py", tmp_path / "model"
    file.write_text(OWN)
    own = ["--position-file", file, "pretrain", "--engine=torch", f"--data={vocabulary}", f"--output={model}"]
    sizes = ["--arch=bert_a_tiny", "--position=absolute+own_nothing_at_all", "--tokens-per-sample=24", "--max-update=1"]
    assert ended(fork_tupe(*own, *sizes, "--lr=1e-3", "--gpus=0", "--allocator=none", "--num-workers=0")) == 0
    assert ended(begin(learnable, model, tmp_path / "run", f"--position-file={file}", "--max-epoch=1")) == 0
    assert read(tmp_path / "run").config["model.position_file"] == fingerprint([file])
