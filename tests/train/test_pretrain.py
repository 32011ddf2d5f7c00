"""`tupe pretrain --engine torch`: the numbers of the first engine, resuming, signals, several processes."""

import copy
import importlib.util
import json
import math
import os
import random
import shutil
import signal
from unittest import mock

import helpers
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from helpers import (
    descendants,
    ended,
    file_system,
    fork_tupe,
    free_port,
    has_ended,
    load,
    pretrain_arguments,
    train,
    unsealed,
    wait_until,
    write_data,
)
from safetensors.torch import load_file

import tupe.hf  # noqa: F401
from tupe.cli import main
from tupe.common.options import Refusal
from tupe.common.recipes import read as read_recipe
from tupe.evaluate.loading import load_model
from tupe.modeling_tupe import TupeForMaskedLM
from tupe.positions import SCHEMES, load_scheme_file
from tupe.run import progress
from tupe.run.folder import locked
from tupe.run.record import BUSY, DIVERGED, REFUSED, STOPPED, read, state_of, updates_of
from tupe.train import launch, pretrain
from tupe.train.loop import HalfCopy
from tupe.train.pretrain import Pretraining
from tupe.train.saved import STATE, checkpoints, keep, newest
from tupe.train.settle import settle

TINY = ["--arch=tupe_r_tiny", "--tokens-per-sample=24", "--lr=0.01", "--warmup-updates=2", "--log-interval=1"]
TINY += ["--batch-size=4", "--max-update=14", "--gpus=0", "--allocator=none", "--num-workers=0"]
NO_DROPOUT = ["--dropout=0", "--attention-dropout=0"]


def begin(data, folder, *words, **options):
    where = [f"--data={data}", f"--output={folder}"]
    return fork_tupe("pretrain", "--engine=torch", *where, *TINY, *words, **options)


def refused(data, folder, *words):
    """The one line of a command that is refused."""
    command = ["pretrain", "--engine=torch", f"--data={data}", f"--output={folder}", *TINY, *map(str, words)]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == REFUSED, result.output
    assert len(result.output.splitlines()) == 1
    return result.output


def weights(folder):
    return {name.removeprefix("tupe."): value for name, value in load_file(folder / "model.safetensors").items()}


def logged(folder):
    """[(loss in bits, gradient norm)] of every update."""
    history = json.loads((newest(folder)[1] / STATE).read_text())["log"]
    return [(entry["loss"], entry["grad_norm"]) for entry in history if entry["kind"] == "train"]


def same(one, two):
    """Whether two runs are equal to the bit, in weights, losses and scores."""
    a, b = weights(one), weights(two)
    return all(torch.equal(a[k], b[k]) for k in a | b) and logged(one) == logged(two) and (
        read(one).scores == read(two).scores
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """Folder of an undisturbed run of 14 updates, with dropout: two epochs and a bit."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert ended(begin(data, folder, "--save-interval-updates=3")) == 0
    return folder


# ------------------------------------------------------------------------------------------------- the same numbers


@pytest.mark.parametrize(
    "arch, more",
    [
        ("tupe_r_tiny", ["--max-update=12", "--update-freq=3"]),  # with dropout; updates that are filled up
        pytest.param("tupe_r_tiny", [*NO_DROPOUT, "--max-update=100"], marks=pytest.mark.thorough),
        pytest.param("bert_a_tiny", [*NO_DROPOUT, "--max-update=100"], marks=pytest.mark.thorough),
        pytest.param("modernbert_tiny", [*NO_DROPOUT, "--max-update=30"], marks=pytest.mark.thorough),
    ],
)  # fmt: skip
def test_both_engines_compute_the_same(arch, more, data, tmp_path):
    """Same data, recipe and seed: the same losses, gradients and weights to rounding, update by update."""
    words = [f"--arch={arch}", "--seed=5", "--total-num-update=100", "--lr=0.001", *more]
    theirs = train(pretrain_arguments(data, tmp_path / "fairseq", "--num-workers=0", *words, arch=arch))
    assert ended(begin(data, tmp_path / "here", *words)) == 0
    ours = logged(tmp_path / "here")
    assert len(ours) == len(theirs) >= 12
    expected = [(loss / math.log(2), norm) for loss, norm in theirs]
    np.testing.assert_allclose(ours, expected, rtol=2e-4)
    model, own = load(tmp_path / "fairseq" / "checkpoint_last.pt")["model"], weights(tmp_path / "here")
    assert own.keys() == {key for key in model if not key.endswith("_extra_state")}
    apart = {key: float((own[key] - model[key]).abs().max()) for key in own}
    assert {key: value for key, value in apart.items() if value > 2e-5} == {}
    one, two = (read(tmp_path / folder) for folder in ("fairseq", "here"))
    scores = [[(s["epoch"], s["num_updates"], s["split"]) for s in run.scores] for run in (one, two)]
    assert scores[0] == scores[1]
    losses = [[score["loss"] for score in run.scores] for run in (one, two)]
    np.testing.assert_allclose(*losses, rtol=0, atol=1e-3)
    names = ("task", "architecture", "variant", "seed", "lr", "budget", "splits", "data", "dictionary")
    assert {name: getattr(one, name) for name in names} == {name: getattr(two, name) for name in names}


@pytest.mark.parametrize("word, near", [("--precision=autocast", 1e-2), ("--checkpoint-activations", 1e-5)])
def test_other_ways_have_the_same_losses(word, near, data, whole, tmp_path):
    """And validations between checkpoints."""
    often = ["--save-interval-updates=3", "--validate-interval-updates=2"]
    assert ended(begin(data, tmp_path, *often, word)) == 0
    assert [loss for loss, _ in logged(tmp_path)] == pytest.approx([loss for loss, _ in logged(whole)], rel=near)
    assert {2, 4, 6, 8, 10, 12, 14} <= {entry["num_updates"] for entry in read(tmp_path).scores}


def test_half_precision_trains_float32_copies_and_resumes_exactly_on_both_engines(data, tmp_path, whole):
    """... a checkpoint has them; the losses are those of float32 to bfloat16's rounding, and not to the bit."""
    float32 = [loss for loss, _ in logged(whole)]
    engines = ("torch", "fairseq") if importlib.util.find_spec("fairseq") else ("torch",)
    for engine in engines:
        one, two = tmp_path / engine / "one", tmp_path / engine / "two"
        words = [*TINY, f"--data={data}", f"--engine={engine}", "--precision=bf16", "--save-interval-updates=3"]
        for folder, updates in ((one, 14), (two, 9), (two, 14)):
            command = ["pretrain", *words, f"--output={folder}", f"--max-update={updates}", "--total-num-update=14"]
            assert ended(fork_tupe(*command)) == 0
        assert read(one).scores == read(two).scores and read(one).config["common.bf16"]
        state = [load(folder / "checkpoint_last.pt")["model"] if engine == "fairseq" else weights(folder)
                 for folder in (one, two)]  # fmt: skip
        assert all(torch.equal(state[0][key], state[1][key]) for key in state[0])
        assert any((value != value.bfloat16()).any() for value in state[0].values()) == (engine == "torch")
        if engine == "torch":
            assert same(one, two)
            losses = [loss for loss, _ in logged(one)]
            assert losses == pytest.approx(float32, rel=5e-3) and losses != float32
    losses = [read(tmp_path / engine / "one").scores[-1]["loss"] for engine in engines]
    assert losses[0] == pytest.approx(losses[-1], rel=0.01)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_copy_trains_as_rounded_float32_weights(dtype):
    """Oracle: AdamW's float32 weights, whose gradients are taken at their rounded values."""
    torch.manual_seed(1)
    computing = torch.nn.Linear(5, 3)
    oracle = copy.deepcopy(computing)
    half = HalfCopy(computing, dtype)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-4) for m in (half.trained, oracle))
    for seed in range(5):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed)).to(dtype)
        computing.zero_grad()
        computing(x).square().sum().backward()
        half.take_gradients()
        ours.step()
        half.give_weights()
        rounded = {name: p.detach().to(dtype).requires_grad_() for name, p in oracle.named_parameters()}
        torch.func.functional_call(oracle, rounded, x).square().sum().backward()
        for name, p in oracle.named_parameters():
            p.grad = rounded[name].grad.float()
        theirs.step()
    for p, q, r in zip(half.trained.parameters(), oracle.parameters(), computing.parameters(), strict=True):
        assert torch.equal(p, q) and torch.equal(r, p.to(dtype)) and r.dtype == dtype


# ----------------------------------------------------------------------------------------------------------- resuming


def test_what_a_run_leaves_behind(whole, data):
    names = {path.name for path in whole.iterdir()}
    weights = {"checkpoint-14", "checksums.json", "config.json", "dict.txt", "model.safetensors", STATE}
    assert updates_of(whole) == 14
    assert names == weights | {"lock", "record.json", "train.log"}
    record = read(whole)
    assert record.state == "finished" and record.config["engine"] == "torch" and record.scores[0]["best"]
    assert {"transformers", "safetensors"} <= record.versions.keys()
    assert (whole / "dict.txt").read_bytes() == (data / "dict.txt").read_bytes()


def test_the_model_is_evaluated_on_its_own_data(whole, data):
    """Its record says where that is; where it is gone, the folder itself has the dictionary."""
    assert load_model(whole)[1].data == data
    assert load_model(newest(whole)[1])[1].data == data


def test_the_model_loads_in_transformers(whole):
    from transformers import AutoModelForMaskedLM

    model = AutoModelForMaskedLM.from_pretrained(whole)
    assert type(model).__module__ == "tupe.modeling_tupe"
    own, theirs = weights(whole), model.state_dict()
    theirs.pop("decoder.weight")  # the token embeddings
    assert all(torch.equal(value, own[name.removeprefix("tupe.")]) for name, value in theirs.items())


@pytest.mark.parametrize(
    ("update", "passes"),
    [(6, 2), pytest.param(6, 4, marks=pytest.mark.thorough), pytest.param(7, 1, marks=pytest.mark.thorough)],
)  # fmt: skip
def test_a_signal_stops_before_the_next_pass_and_the_run_resumes_exactly(update, passes, data, tmp_path, monkeypatch):
    """In the middle of an update of four passes; in its last one, after which it is whole; where a checkpoint of the
    last whole one is there already. No pass begins after the signal."""
    losses_of, words = pretrain.Pretraining.losses_of, ["--save-interval-updates=3", "--micro-batch-size=1"]
    words.append("--log-interval=4")  # the next line also has what was before the stop
    done = update if passes == 4 else update - 1

    def count(self, *args, **kwargs):
        if self.model.training:
            with (tmp_path / "passes").open("a") as file:
                file.write(f"{self.done + 1}\n")
            begun = (tmp_path / "passes").read_text().split()
            if begun[-1] == str(update) and begun.count(begun[-1]) == passes:
                os.kill(os.getpid(), signal.SIGTERM)
        return losses_of(self, *args, **kwargs)

    folder, whole = tmp_path / "run", tmp_path / "whole"
    with monkeypatch.context() as patch:
        patch.setattr(pretrain.Pretraining, "losses_of", count)
        assert ended(begin(data, folder, *words)) == STOPPED
    assert len((tmp_path / "passes").read_text().split()) == 4 * (update - 1) + passes
    assert newest(folder)[0] == done and state_of(folder) == "open"
    assert read(folder).failure["status"] == STOPPED and not (folder / "model.safetensors").exists()
    assert [ended(begin(data, path, *words)) for path in (folder, whole)] == [0, 0]
    assert same(folder, whole)


def test_a_cpu_asks_before_it_begins_what_takes_long(data, tmp_path, monkeypatch):
    """It has one pass behind it then, and no run has begun. A resumed run has been asked."""
    monkeypatch.setattr(progress, "LONG", 0)
    log, words = tmp_path / "log", ["--micro-batch-size=2", "--disable-validation"]
    assert ended(begin(data, tmp_path / "run", *words, log=log)) == REFUSED
    said = log.read_text().splitlines()
    assert "after the first pass of 2: " in said[-2] and "14 updates would take about" in said[-1]
    assert said[-1].endswith(", or add --yes") and not newest(tmp_path / "run")[0]
    assert read(tmp_path / "run").failure["status"] == REFUSED
    assert ended(begin(data, tmp_path / "run", "--arch=bert_a_tiny", "--yes", *words, log=log)) == 0
    assert "after 5 updates: " in log.read_text()
    assert ended(begin(data, tmp_path / "run", "--arch=bert_a_tiny", "--max-update=15", *words)) == 0


def killed_and_resumed(data, folder, kills, updates, words):
    """Kill a run at random moments, and let it end. Returns at how many updates it was."""
    chance, found = random.Random(kills), []
    while True:
        process = begin(data, folder, *words, log=folder.parent / "log")
        if len(found) < kills:  # after updates that it has not done yet, or while it begins
            after = chance.randrange(updates)
            wait_until(lambda p=process, n=after: p.exitcode is not None or newest(folder)[0] >= n, seconds=240)
            process.join(chance.uniform(0, 0.3 if found else 0))
        else:
            process.join()
        if process.exitcode is not None:
            assert process.exitcode == 0, (folder.parent / "log").read_text()
            return found
        tree = descendants(process.pid)
        for pid in tree:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda tree=tree: all(has_ended(pid) for pid in tree))
        process.join()
        found.append(newest(folder)[0])


@pytest.mark.parametrize(
    "kills, updates",
    [pytest.param(20, 400, marks=pytest.mark.slow), pytest.param(2, 60, marks=pytest.mark.thorough)],
)
def test_a_killed_run_resumes_exactly(kills, updates, data, tmp_path):
    words = [f"--max-update={updates}", "--save-interval-updates=2", "--num-workers=2", "--keep-interval-updates=1"]
    whole, folder = tmp_path / "whole", tmp_path / "killed" / "run"
    assert ended(begin(data, whole, *words)) == 0
    folder.parent.mkdir()
    found = killed_and_resumed(data, folder, kills, updates * 2 // 3, words)
    assert found and same(folder, whole), found
    assert len(checkpoints(folder)) == 1 and not list(folder.glob("*.partial"))


def test_half_a_checkpoint_is_none(data, whole, tmp_path):
    """Killed while it wrote one, or while it deleted one."""
    folder = tmp_path / "run"
    assert ended(begin(data, folder, "--save-interval-updates=3", "--max-update=6", "--total-num-update=14")) == 0
    (folder / "checkpoint-9.partial").mkdir()
    (folder / "checkpoint-9.partial" / STATE).write_text("{")
    (folder / "checkpoint-12").mkdir()
    assert newest(folder)[0] == 6
    assert ended(begin(data, folder, "--save-interval-updates=3")) == 0
    a, b = weights(folder), weights(whole)
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_a_damaged_checkpoint_is_left_out_and_the_one_before_taken(data, whole, tmp_path):
    folder, words = tmp_path / "run", ["--save-interval-updates=3", "--keep-interval-updates=2"]
    assert ended(begin(data, folder, "--max-update=9", "--total-num-update=14", *words)) == 0
    for name in ("model.safetensors", "optimizer.pt"):
        path = newest(folder)[1]
        content = (path / name).read_bytes()[:-1000]
        (path / name).unlink()  # the model has a second name
        (path / name).write_bytes(content)
        assert ended(begin(data, folder, *words, log=tmp_path / "log")) == 0
        assert f"{path} is damaged ({name}: " in (tmp_path / "log").read_text()
        a, b = weights(folder), weights(whole)
        assert all(torch.equal(a[key], b[key]) for key in a)
        record = read(folder)
        record.state, record.finished_at = "running", None
        record.save(folder)
    for path in checkpoints(folder).values():
        (path / "optimizer.pt").unlink()
    assert ended(begin(data, folder, *words, log=tmp_path / "log")) == REFUSED
    assert "and no other there is whole" in (tmp_path / "log").read_text().splitlines()[-1]
    assert newest(folder)[0] == 14


def test_a_checkpoint_of_another_run_is_no_beginning(data, whole, tmp_path):
    """Users copy one to begin a shorter run, and may forget an option, or have prepared the text anew."""
    for name, words in (("alibi", ["--position=alibi"]), ("text", [])):
        shutil.copytree(whole / "checkpoint-14", tmp_path / name / "checkpoint-14")
        shutil.copytree(data, tmp_path / f"{name}-data")
        if name == "text":
            lines = (data / "dict.txt").read_text().splitlines(keepends=True)
            (tmp_path / f"{name}-data" / "dict.txt").write_text("".join([*lines[1:], lines[0]]))
            (tmp_path / f"{name}-data" / "checksums.json").unlink(missing_ok=True)
        longer = ["--max-update=16", *words]
        log = tmp_path / "log"
        assert ended(begin(tmp_path / f"{name}-data", tmp_path / name, *longer, log=log)) == REFUSED
        said = {"alibi": "checkpoint-14 is of another model: ", "text": "has as many types as the model's dictionary"}[
            name
        ]
        assert said in log.read_text().splitlines()[-1]


def test_without_an_interval_every_epoch_is_saved(data, tmp_path, monkeypatch):
    """As fairseq saves its checkpoint_last.pt: a run without one would be lost whole."""
    saved, save = [], Pretraining.save
    monkeypatch.setattr(Pretraining, "save", lambda loop: saved.append(loop.done) or save(loop))
    words = ["--arch=bert_a_tiny", "--tokens-per-sample=24", "--max-update=14", "--batch-size=4", "--num-workers=0",
             "--warmup-updates=2", "--cpu", "--save-interval-updates=0"]  # fmt: skip
    recipe = settle(read_recipe("pretrain_small", words, fixed={"checkpoint.save_dir": tmp_path / "run"}), gpus=0)
    launch.train(recipe, str(data), 1, 0, True)
    assert saved == [9, 14] and [*checkpoints(tmp_path / "run")] == [14]


def test_checkpoints_after_a_damaged_one_are_kept(tmp_path):
    """The damaged one has more updates than those of the run that goes on from before it."""

    def there():
        return [*checkpoints(tmp_path)]

    for updates in (3, 6, 9, 20):
        (tmp_path / f"checkpoint-{updates}").mkdir()
        (tmp_path / f"checkpoint-{updates}" / STATE).write_text("{}")
    keep(tmp_path, 9, 2, -1)
    assert there() == [6, 9, 20]
    keep(tmp_path, 9, 1, 6)
    assert there() == [6, 9, 20]
    keep(tmp_path, 20, 1, -1)
    assert there() == [20]


class Poison:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_nothing_of_a_checkpoint_is_run(data, tmp_path):
    folder = tmp_path / "run"
    assert ended(begin(data, folder, "--max-update=2")) == 0
    path = newest(folder)[1]
    unsealed(path)
    torch.save(Poison(tmp_path / "ran"), path / "optimizer.pt")
    assert ended(begin(data, folder, "--max-update=3", log=tmp_path / "log")) == REFUSED
    assert "optimizer.pt refused: " in (tmp_path / "log").read_text().splitlines()[-1]
    assert not (tmp_path / "ran").exists()


def test_a_prolonged_run_has_the_rate_of_its_new_schedule_at_once(data, tmp_path):
    for updates in (4, 8):
        assert ended(begin(data, tmp_path, f"--max-update={updates}")) == 0
    history = json.loads((newest(tmp_path)[1] / STATE).read_text())["log"]
    rates = [entry["learning_rate"] for entry in history if entry["kind"] == "train"]
    assert rates[4:] == pytest.approx([0.01 * (8 - n) / 6 for n in range(4, 8)])


CONSTANT = ["--lr-scheduler=constant_cooldown", "--warmup-updates=1", "--cooldown-updates=2"]


def test_a_branch_is_the_shorter_run(data, tmp_path):
    """A copy of the long run, with its checkpoint of the update at which the shorter one's cool-down begins."""
    long, short, branch = (tmp_path / name for name in ("long", "short", "branch"))
    keeping = ["--save-interval-updates=3", "--keep-interval-updates=-1"]
    assert ended(begin(data, long, *CONSTANT, "--max-update=8", *keeping)) == 0
    assert ended(begin(data, short, *CONSTANT, "--max-update=5")) == 0
    shutil.copytree(long / "checkpoint-3", branch / "checkpoint-3")
    assert ended(begin(data, branch, *CONSTANT, "--max-update=5")) == 0
    assert same(branch, short) and not same(branch, long)


def test_a_copy_of_a_checkpoint_under_another_name_is_none(tmp_path):
    for name in ("checkpoint-2", "checkpoint-2-backup", "checkpoint-best"):
        (tmp_path / name).mkdir()
        (tmp_path / name / STATE).touch()
    assert checkpoints(tmp_path) == {2: tmp_path / "checkpoint-2"}


def test_a_run_that_was_killed_after_its_last_checkpoint_is_finished(data, whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "run")
    record = read(folder)
    record.state, record.finished_at = "running", None
    record.save(folder)
    (folder / "model.safetensors").unlink()
    assert ended(begin(data, folder, "--save-interval-updates=3")) == 0
    assert same(folder, whole) and read(folder).state == "finished"


# ----------------------------------------------------------------------------------------------- one folder, one run


def test_a_folder_belongs_to_one_run(data, whole, tmp_path):
    before = (whole / "record.json").read_text()
    other = write_data(tmp_path / "other", seed=7)
    assert "holds another run (lr 0.01 there, 0.02 here)" in refused(data, whole, "--lr=0.02")
    assert "data " in refused(other, whole) and "seed 1 there, 2 here" in refused(data, whole, "--seed=2")
    assert (whole / "record.json").read_text() == before


def test_a_folder_belongs_to_one_engine(data, whole, tmp_path):
    pytest.importorskip("fairseq")
    command = [word for word in TINY if word != "--allocator=none"]
    theirs = CliRunner().invoke(main, ["pretrain", f"--data={data}", f"--output={whole}", "--allocator=none", *command])
    assert theirs.exit_code == REFUSED and "engine torch there" in theirs.output
    train(pretrain_arguments(data, tmp_path / "run", "--num-workers=0", "--max-update=2"))
    assert "engine fairseq there, torch here" in refused(data, tmp_path / "run", "--max-update=2")


def test_a_finished_run_is_left_alone_and_a_busy_folder_has_its_status(data, whole):
    before = (whole / "record.json").read_text()
    assert ended(begin(data, whole, "--save-interval-updates=3")) == 0
    with locked(whole / "lock"):
        assert ended(begin(data, whole, "--save-interval-updates=3")) == BUSY
    assert (whole / "record.json").read_text() == before


@pytest.mark.thorough
def test_a_folder_that_is_deleted_under_a_run_is_no_finished_one(data, tmp_path):
    process = begin(data, tmp_path / "run", "--max-update=2000")
    wait_until((tmp_path / "run" / "record.json").exists)  # which comes with the first update
    shutil.rmtree(tmp_path / "run")
    assert ended(process) == 1 and not (tmp_path / "run").exists()


def test_a_finished_run_is_left_alone_without_its_checkpoints(data, whole, tmp_path):
    """Who has the model may delete the checkpoints, which are three times as large."""
    folder = shutil.copytree(whole, tmp_path / "run")
    for checkpoint in folder.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    before = [(folder / name).read_bytes() for name in ("record.json", "model.safetensors")]
    assert ended(begin(data, folder, "--save-interval-updates=3")) == 0
    assert ended(begin(data, folder, "--save-interval-updates=3", "--max-update=20")) == REFUSED
    assert [(folder / name).read_bytes() for name in ("record.json", "model.safetensors")] == before


def test_a_loss_that_is_not_finite_ends_the_run(data, tmp_path, monkeypatch):
    monkeypatch.setattr(pretrain.ForPretraining, "forward", lambda self, input_ids, **rest: self.lm_head.bias.sum() / 0)
    assert ended(begin(data, tmp_path)) == DIVERGED
    assert read(tmp_path).failure["reason"].startswith("diverged") and not checkpoints(tmp_path)


def test_no_model_is_saved_after_a_loss_that_is_not_finite(data, tmp_path, monkeypatch):
    """It would take the place of the last good one."""
    losses = pretrain.Pretraining.losses_of

    def losses_of(self, *args):
        total, predictions = losses(self, *args)
        return total * (math.nan if self.done == 7 and self.model.training else 1), predictions

    monkeypatch.setattr(pretrain.Pretraining, "losses_of", losses_of)
    words = ["--log-interval=100", "--save-interval-updates=3", "--keep-interval-updates=1"]
    assert ended(begin(data, tmp_path, *words)) == DIVERGED
    assert list(checkpoints(tmp_path)) == [6] and "update 9" in read(tmp_path).failure["reason"]


def test_a_full_disk_stops_the_run_and_harms_no_checkpoint(data, whole, tmp_path, monkeypatch):
    save = pretrain.Pretraining.save
    with file_system(tmp_path / "disk", 40) as disk:

        def full(self, *args, **kwargs):
            if self.done == 9:
                (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free - 2**20))
            return save(self, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(pretrain.Pretraining, "save", full)
            log = tmp_path / "log"
            assert ended(begin(data, disk / "run", "--save-interval-updates=3", log=log)) == REFUSED
        last = log.read_text().splitlines()[-1]
        assert last.endswith("checkpoint-9 cannot be written: the disk is full")
        assert newest(disk / "run")[0] == 6 and state_of(disk / "run") == "failed"
        (disk / "filler").unlink()
        assert ended(begin(data, disk / "run", "--save-interval-updates=3")) == 0
        assert same(disk / "run", whole)


def test_tensorboard_and_wandb_get_what_is_logged(data, tmp_path, monkeypatch):
    """The latter is a stand-in for the package."""
    pytest.importorskip("tensorboardX")
    (tmp_path / "wandb.py").write_text(
        "import json, os\n"
        "def write(kind, content):\n"
        "    with open(os.environ['WANDB_LOG'], 'a') as file:\n"
        "        file.write(json.dumps([kind, content]) + '\\n')\n"
        "def init(**options): write('init', options)\n"
        "def log(content, step): write('log', content | {'step': step})\n"
        "def finish(): write('finish', None)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    log, printed = tmp_path / "log", tmp_path / "printed"
    words = ["--wandb-project=own", f"--tensorboard-logdir={tmp_path / 'board'}", "--max-update=3"]
    assert ended(begin(data, tmp_path / "run", *words, WANDB_LOG=str(log), log=printed)) == 0, printed.read_text()
    written = b"".join(path.read_bytes() for path in (tmp_path / "board").rglob("events*"))
    assert b"train/loss" in written and b"eval/valid_loss" in written
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    begun = lines[0][1]
    assert (lines[0][0], begun["project"], begun["name"], begun["resume"]) == ("init", "own", "run", "allow")
    assert begun["config"]["seed"] == 1 and begun["config"]["architecture"] == "tupe_r_tiny"
    assert lines[-1] == ["finish", None]
    told = [(content["step"], content["train/loss"]) for _, content in lines[1:-1] if "train/loss" in content]
    assert told == [(update, loss) for update, (loss, _) in enumerate(logged(tmp_path / "run"), 1)]
    assert any("eval/valid_loss" in content for _, content in lines[1:-1])
    log.unlink()
    longer = [*words[:2], "--max-update=4"]  # the same run goes on
    assert ended(begin(data, tmp_path / "run", *longer, WANDB_LOG=str(log), log=printed)) == 0, printed.read_text()
    assert json.loads(log.read_text().splitlines()[0])[1]["id"] == begun["id"]


# ------------------------------------------------------------------------------------------------- several processes


def begin_two(data, folder, *words):
    own = [word for word in (*TINY, *words) if word[:5] not in ("--gpu", "--all")]
    return helpers.begin_two(folder, own, data)


@pytest.mark.thorough
def test_two_processes_equal_one_with_twice_the_steps(data, tmp_path, monkeypatch):
    words = ["--dropout=0", "--attention-dropout=0", "--max-update=12"]
    two = begin_two(data, tmp_path / "two", *words, "--batch-size=2", "--update-freq=2")
    assert [ended(process) for process in two] == [0, 0]
    assert ended(begin(data, tmp_path / "one", *words, "--batch-size=2", "--update-freq=4")) == 0
    np.testing.assert_allclose(logged(tmp_path / "two"), logged(tmp_path / "one"), rtol=1e-4)
    a, b = weights(tmp_path / "two"), weights(tmp_path / "one")
    assert all(torch.allclose(a[key], b[key], atol=1e-4) for key in a)
    pairs = zip(read(tmp_path / "two").scores, read(tmp_path / "one").scores, strict=True)
    assert all(abs(x["loss"] - y["loss"]) < 1e-4 for x, y in pairs)
    differences = read(tmp_path / "two").differences(read(tmp_path / "one"))
    assert not differences, "one may go on with the other's run"


@pytest.mark.thorough
def test_a_run_goes_on_with_other_processes_and_batches(data, tmp_path):
    """The same losses, whatever divides an update: the blocks and masks are the same."""
    words, whole, parts = [*NO_DROPOUT, "--total-num-update=14"], tmp_path / "whole", tmp_path / "parts"
    assert ended(begin(data, whole, *words)) == 0
    assert ended(begin(data, parts, *words, "--max-update=5", "--micro-batch-size=1")) == 0
    two = begin_two(data, parts, *words, "--max-update=9", "--batch-size=2", "--update-freq=1")
    assert [ended(process) for process in two] == [0, 0]
    assert ended(begin(data, parts, *words, "--micro-batch-size=2")) == 0
    assert len(logged(parts)) == 14
    np.testing.assert_allclose(*([loss for loss, _ in logged(folder)] for folder in (parts, whole)), rtol=1e-5)


def test_several_folders_are_trained_on(data, tmp_path):
    """By both engines alike, in every epoch."""
    pytest.importorskip("fairseq")
    other, words = write_data(tmp_path / "other", lines=30), [*NO_DROPOUT, "--max-update=8", "--total-num-update=8"]
    shutil.copy(data / "dict.txt", other)
    both = f"{data}:{other}"
    assert ended(begin(both, tmp_path / "here", *words)) == 0
    theirs = train(pretrain_arguments(both, tmp_path / "fairseq", "--num-workers=0", *words))
    ours = [loss * math.log(2) for loss, _ in logged(tmp_path / "here")]
    np.testing.assert_allclose(ours, [loss for loss, _ in theirs], rtol=1e-4)
    assert read(tmp_path / "here").data == read(tmp_path / "fairseq").data != ""


def test_a_split_of_several_folders_has_a_name_by_which_all_of_it_is_found(data, tmp_path):
    message = "--train-subset wiki: in several folders of data, its name has to begin with 'train'"
    assert message in refused(f"{data}:{data}", tmp_path / "run", "--train-subset=wiki")


@pytest.mark.thorough
def test_a_signal_to_one_process_stops_both_at_one_update(data, tmp_path, monkeypatch):
    """In the second of four passes: the update is dropped, unless the other process is in its last pass already."""
    losses, words, passes = pretrain.Pretraining.losses_of, ["--batch-size=1", "--update-freq=4"], []

    def losses_of(self, *args):
        if self.done == 2 and self.place.rank == 1 and self.model.training:
            passes.append(self.done)
            if len(passes) == 2:
                os.kill(os.getpid(), signal.SIGUSR1)
        return losses(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(pretrain.Pretraining, "losses_of", losses_of)
        two = begin_two(data, tmp_path / "two", *words)
        assert [ended(process) for process in two] == [STOPPED, STOPPED]
    assert newest(tmp_path / "two")[0] in (2, 3)
    assert [ended(process) for process in begin_two(data, tmp_path / "two", *words)] == [0, 0]
    assert [ended(process) for process in begin_two(data, tmp_path / "whole", *words)] == [0, 0]
    assert same(tmp_path / "two", tmp_path / "whole")


@pytest.mark.thorough
def test_a_model_of_which_each_process_holds_a_part_is_the_same(data, tmp_path):
    """FSDP2. Losses, gradients and weights are those of two processes with all of the model; it goes on as it was, and
    with all of the model in each process; the checkpoint loads in one."""
    words = ["--dropout=0", "--attention-dropout=0", "--batch-size=2", "--update-freq=2", "--total-num-update=6"]
    sharded = ["--ddp-backend=fully_sharded", *words]
    parts = [sharded, "--max-update=2"], [sharded, "--max-update=4"], [words]
    for folder, more in (("whole", words), *(("sharded", [*options, *length]) for options, *length in parts)):
        two = begin_two(data, tmp_path / folder, "--max-update=6", *more)
        assert [ended(process) for process in two] == [0, 0]
    np.testing.assert_allclose(logged(tmp_path / "sharded"), logged(tmp_path / "whole"), rtol=1e-4)
    a, b = weights(tmp_path / "sharded"), weights(tmp_path / "whole")
    assert a.keys() == b.keys() and all(torch.allclose(a[key], b[key], atol=1e-5) for key in a)
    TupeForMaskedLM.from_pretrained(tmp_path / "sharded")


@pytest.mark.slow
def test_two_nodes_under_torchrun_stop_on_a_signal_to_one_and_resume(data, tmp_path):
    """As Slurm does it: a command on each node, USR1 to torchrun, the same commands again."""

    def nodes(folder, *words):
        more = ["--nodes=2", "--batch-size=2", "--max-update=60", f"--master-port={free_port()}", *words]
        logs = [tmp_path / f"log{rank}" for rank in range(2)]
        for log in logs:
            log.touch()
        return [begin(data, folder, *more, f"--node-rank={rank}", log=logs[rank]) for rank in range(2)]

    first = nodes(tmp_path / "two")
    wait_until(lambda: "update 5/60" in (tmp_path / "log0").read_text(), 120)
    os.kill(first[1].pid, signal.SIGUSR1)
    assert [ended(process) for process in first] == [STOPPED, STOPPED]
    assert 5 <= newest(tmp_path / "two")[0] < 60 and state_of(tmp_path / "two") == "open"
    for folder in ("two", "whole"):
        assert [ended(process) for process in nodes(tmp_path / folder)] == [0, 0]
    assert same(tmp_path / "two", tmp_path / "whole")


def test_a_model_without_a_head_gets_a_new_one_with_a_word(data, tmp_path, caplog):
    sizes = ["--arch=bert_a_tiny", "--max-positions=24", "--tokens-per-sample=24"]
    settled = settle(read_recipe("pretrain", sizes))
    (small := pretrain.new_model(settled.model, 40, 1)).tupe.save_pretrained(tmp_path / "trunk")
    started = pretrain.new_model(settled.model, 40, 2, start=str(tmp_path / "trunk"))
    assert "has no language-model head; a new one is initialised" in caplog.text
    here, there = started.tupe.state_dict(), small.tupe.state_dict()
    assert all(torch.equal(here[name], there[name]) for name in there)


# ------------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    "words, message",
    [
        (["optimization.stop_time_hours=2"], "optimization.stop_time_hours is not known to --engine torch"),
        (["--arch=electra_tupe_r_tiny"], "is an ELECTRA; give --recipe pretrain_electra"),
        (["--arch=electra_tupe_r_tiny", "--criterion=electra"], "an ELECTRA needs --engine fairseq"),
        (["--optimizer=sgd"], "--optimizer sgd: valid with --engine torch: adam, adamw_fused"),
        (["--ddp-backend=slowmo"], "valid with --engine torch: pytorch_ddp, fully_sharded"),
        (["--precision=fp16"], "fp16 needs a GPU"),
        (["--lr=[0.1,0.2]"], "one number for each epoch is for --engine fairseq"),
        (["--position=rope", "--cls=untied"], "cls=untied with position=rope"),  # as with fairseq, before a run begins
        (["--position=t5:buckets:3", "--dry-run"], "buckets"),
        (["--preset=rope"], "model=rope is bert_a, not tupe_r_tiny"),
        (["--max-positions=8"], "sequences of 24 tokens: the model has 8 positions"),
        (["--gpus=9"], "--gpus 9: this machine has"),
        (["--ddp-backend=fully_sharded"], "--ddp-backend fully_sharded needs"),
        (["--tensorboard-logdir", "--seed=9"], "--tensorboard-logdir: expected one argument"),
        (["--valid-subset="], "--valid-subset is ''; valid: a text"),
        (["--cooldown-updates=3"], "--cooldown-updates: valid with --lr-scheduler constant_cooldown"),
        (["--task=masked_lm"], "--task masked_lm: valid with --engine torch: tupe_masked_lm"),
        (["--max-update=0", "--max-epoch=2"], "polynomial_decay needs the length of the run: give --max-update"),
        ([*CONSTANT, "--cooldown-updates=14"], "1 updates of warm-up and 14 of cool-down: valid: at most 14 in all"),
    ],
)  # fmt: skip
def test_what_it_does_not_have_is_refused_by_name(words, message, data, tmp_path):
    assert message in refused(data, tmp_path / "run", *words)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "name",
    ["checkpoint-5/trainer_state.json", "config.json", "own.safetensors", "checkpoint_last.pt"],
)  # fmt: skip
def test_a_folder_of_another_program_is_left_alone(name, data, tmp_path):
    """One without a record: a model, or checkpoints of anybody's Trainer, which this one would go on from."""
    file, own = tmp_path / "run" / name, tmp_path / "run" / "notes" / "notes.txt"
    for path in (file, own):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    assert f"{name.partition('/')[0]} is of no run known here" in refused(data, tmp_path / "run")
    assert file.read_text() == own.read_text() == "{}" and len(list((tmp_path / "run").rglob("*.*"))) == 2


def test_fewer_updates_than_a_stopped_run_has_are_refused(data, whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    record = read(run)
    record.state = "stopped"
    record.save(run)
    assert "has 14 updates; valid: at least 14, or another folder" in refused(data, run, "--max-update=9")


def test_other_processes_in_the_environment_are_refused(data, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "WORLD_SIZE=2, --gpus and --nodes make 1: unset it" in refused(data, tmp_path / "run")


def settled(recipe, *words):
    return settle(read_recipe(recipe, words))


@pytest.mark.parametrize(
    ("words", "processes"),
    [
        ([], 2), (["dataset.batch_size=12"], 4), (["--batch-size=12"], 4), (["--update-freq=2", "--batch-size=6"], 2),
        (["--batch-size-valid=10", "--batch-size=48"], 1),
    ],
)  # fmt: skip
@pytest.mark.parametrize("recipe", ["pretrain", "pretrain_small"])
def test_batches_mean_the_same_to_both_engines(recipe, words, processes, data):
    """Of an update, and of the held-out text that is scored."""
    launch = pytest.importorskip("tupe.plugin.launch")
    settings = read_recipe(recipe, [*words, "dataset.max_valid_steps=5"])
    theirs = launch.training_options(settings, data, processes, dry_run=True)
    ours = settle(settings, processes).values
    for place in ("dataset.batch_size", "optimization.update_freq"):
        assert ours[place] == theirs[place]
    held_out = theirs.get("dataset.batch_size_valid") or theirs["dataset.batch_size"]
    assert ours["dataset.batch_size_valid"] * ours["dataset.max_valid_steps"] == held_out * processes * 5


@pytest.mark.parametrize(
    "overrides, options, model",
    [
        ([], ["--position=rope"], ("bert_a", "rope", "tied", "position rope")),
        (["model.position=alibi"], ["--arch=tupe_a_mini"], ("bert_a_mini", "alibi", "tied", "position alibi")),
        ([], ["--position=absolute+t5"], ("bert_r", "absolute+t5", "tied", "")),
        ([], ["--position=alibi", "--cls=untied"], ("tupe_r", "alibi", "untied", "position alibi")),
        (["model=clipped"], ["--position=untied"], ("bert_a", "untied", "untied", "cls untied, position untied")),
    ],
)
def test_a_position_replaces_the_architectures_alike_in_both_engines(overrides, options, model, data):
    pytest.importorskip("fairseq")
    from tupe.plugin import launch
    from tupe.plugin.model import spell_names
    from tupe.plugin.pretrained import variant
    from tupe.plugin.settings import configuration

    values = launch.training_options(read_recipe("pretrain", [*overrides, *options]), data, dry_run=True)
    theirs = configuration(values).model
    spell_names(theirs)
    assert (theirs._name, theirs.position, str(theirs.cls), variant(theirs)) == model
    ours = settled("pretrain", *overrides, *options)
    assert (ours.architecture, ours.model.position, ours.model.cls, ours.variant) == model
    assert ours.values["model.cls"] == ours.model.cls and ("model.cls" in ours.changed) == ("cls" in model[3])


def test_a_recipe_is_followed_where_it_names_another_value():
    recipe = settled("pretrain_small", "--max-update=12", "--tokens-per-sample=64", "optimization.update_freq=[2.0]")
    assert (recipe.total_num_update, recipe.model.max_positions, recipe.update_freq) == (12, 64, [2])


@pytest.mark.parametrize("places", ["random", "shifted"])
def test_places_need_shorter_blocks(places):
    with pytest.raises(ValueError, match=f"places={places} draws among max_positions=128: blocks have to be shorter"):
        settled("pretrain_small", f"--places={places}")
    assert settled("pretrain_small", f"--places={places}", "--tokens-per-sample=64", "--max-positions=128")


def test_a_model_that_trains_further_keeps_its_positions(whole):
    words = (f"--finetune-from-model={whole}", "--tokens-per-sample=20")
    assert settled("pretrain_further", *words)
    with pytest.raises(ValueError, match="--max-positions: a model that trains further keeps its own"):
        settled("pretrain_further", *words, "--max-positions=64")


NO_GRADIENT = """
import torch
from tupe.positions import PositionScheme, register

@register("no_gradient")
class NoGradient(PositionScheme):
    "The gradient of sqrt at 0 is not finite."
    paper, formula = "", ""

    def __init__(self, dims):
        super().__init__(dims)
        self.slope = torch.nn.Parameter(torch.ones(dims.heads))

    def bias(self, positions, scale):
        return positions.spread(-(self.slope[:, None] * positions.offsets).square().sqrt())
"""


def test_fp16_whose_gradients_stay_infinite_diverges(data, tmp_path):
    """The loss stays finite, because no update is made."""
    with mock.patch.dict(SCHEMES):  # which it leaves as they were
        (tmp_path / "scheme.py").write_text(NO_GRADIENT)
        load_scheme_file(str(tmp_path / "scheme.py"))
        fixed = {"checkpoint.save_dir": tmp_path / "run"}
        words = ["--arch=bert_a_tiny", "--position=no_gradient", "--max-update=40", "--batch-size=2", "--num-workers=0",
                 "--log-interval=40", "--warmup-updates=2", "--tokens-per-sample=20", "--cpu"]  # fmt: skip
        recipe = settle(read_recipe("pretrain_small", words, fixed=fixed), gpus=0)
        recipe.fp16 = True
        with pytest.raises(Refusal, match="the gradients of fp16 are not finite at update 40") as refusal:
            launch.train(recipe, str(data), 1, 0, True)
        assert refusal.value.exit_code == DIVERGED and state_of(tmp_path / "run") == "failed"


def test_what_makes_no_difference_makes_no_other_run(data, whole):
    for words in (["--disable-validation"], ["--batch-size-valid=2"], ["--adam-betas=(0.9,0.999)"]):
        assert ended(begin(data, whole, "--save-interval-updates=3", *words)) == 0


def test_held_out_text_in_which_nothing_is_masked_is_refused(tmp_path):
    data = write_data(tmp_path / "data", valid_lines=1)
    assert "'valid' has too little text: none of its tokens" in refused(data, tmp_path / "run", "--mask-prob=0.001")
