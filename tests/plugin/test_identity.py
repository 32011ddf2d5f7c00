"""A folder holds one run: what tells two runs apart, what may change when one is resumed, and that a start which is
refused, or fails at once, leaves the record as it is."""

import shutil

import pytest
import torch
from click.testing import CliRunner
from fairseq.trainer import Trainer
from fairseq_cli.train import cli_main
from helpers import (
    finetune,
    fork,
    load,
    parsed,
    pretrain_arguments,
    train,
    train_recipe,
    unsealed,
    write_data,
)

from tupe.cli.train import pretrain
from tupe.plugin import launch
from tupe.plugin.settings import settings
from tupe.run import record
from tupe.run.folder import fingerprint, is_locked
from tupe.run.record import read
from tupe.schemes import SCHEMES

OPTIONS = ["--num-workers=0", "--max-update=4", "--total-num-update=4"]
LONGER = ["--num-workers=0", "--max-update=5", "--total-num-update=5"]


@pytest.fixture(scope="module")
def four(data, tmp_path_factory):
    """The folder of a run of 4 updates."""
    folder = tmp_path_factory.mktemp("four")
    train(pretrain_arguments(data, folder, *OPTIONS))
    return folder


@pytest.fixture
def begun(four, tmp_path):
    """A copy of it."""
    return shutil.copytree(four, tmp_path / "run", ignore=shutil.ignore_patterns("lock"))


def test_a_run_with_another_position_is_called_what_it_is(data, tmp_path):
    """ALiBi in TUPE-R is BERT with ALiBi: in the record, in the checkpoint, and when it is resumed."""
    train(pretrain_arguments(data, tmp_path, *OPTIONS, "--position=alibi"))
    run, model = read(tmp_path), load(tmp_path / "checkpoint_last.pt")["cfg"]["model"]
    assert (run.architecture, run.variant) == ("bert_a_tiny", "position alibi")
    assert (model["_name"], model["position"], model["cls"]) == ("bert_a_tiny", "alibi", "tied")
    assert "model.cls" not in run.config
    train(pretrain_arguments(data, tmp_path, *LONGER, "--position=alibi"))
    train(pretrain_arguments(data, tmp_path, *LONGER, "--position=alibi", arch="bert_a_tiny"))  # the same run
    assert read(tmp_path).budget == {"max_update": 5}
    with pytest.raises(ValueError, match="architecture bert_a_tiny there, tupe_r_tiny here"):
        train(pretrain_arguments(data, tmp_path, *LONGER, "--position=alibi", "--cls=untied"))


def other_text(data, folder):
    """Data with the same dictionary."""
    write_data(folder, seed=1)
    assert (folder / "dict.txt").read_bytes() == (data / "dict.txt").read_bytes()
    return folder


OTHERS = [  # what is set, several at a time, and what is said of each
    {
        "--dropout=0": "model.dropout 0.1 there, 0.0 here",
        "--weight-decay=0.3": "optimizer.weight_decay 0.01 there, 0.3 here",
        "--mask-prob=0.5": "task.mask_prob 0.15 there, 0.5 here",
        "--update-freq=2": "optimization.update_freq [1] there, [2] here",
        "--batch-size=2": "dataset.batch_size 4 there, 2 here",
        "--warmup-updates=3": "lr_scheduler.warmup_updates 2 there, 3 here",
        "--clip-norm=0": "optimization.clip_norm 1.0 there, 0.0 here",
        "--lr=[0.01,0.02]": "optimization.lr",
        "--adam-betas=(0.9, 0.98)": "optimizer.adam_betas [0.9, 0.999] there, [0.9, 0.98] here",
        "--precision=autocast": "model.autocast none there, bf16 here",
    },
    {
        "--optimizer=adamw_fused": "optimizer._name adam there, adamw_fused here",
        "--position=t5": "model.position the architecture's there, t5 here",
    },
    {
        "--criterion=masked_lm_chunked": "criterion._name masked_lm there, masked_lm_chunked here",
        "--seed=3": "seed 1 there, 3 here",
        "--tokens-per-sample=16": "model.max_positions 24 there, 16 here; task.tokens_per_sample 24 there, 16 here",
        "--max-valid-steps=1": "dataset.max_valid_steps none there, 1 here",
        "--reset-optimizer": "checkpoint.reset_optimizer False there, True here",
    },
]


@pytest.mark.parametrize("others", OTHERS, ids=lambda others: " ".join(others))
def test_another_setting_is_another_run(others, data, begun):
    before = record.contents(begun)
    with pytest.raises(ValueError, match="holds another run") as refused:
        train(pretrain_arguments(data, begun, *LONGER, *others))
    assert [said for said in others.values() if said not in str(refused.value)] == []
    assert "\n" not in str(refused.value) and refused.value.code == str(refused.value)
    assert record.contents(begun) == before and not is_locked(begun)


def test_other_data_is_another_run(data, begun, tmp_path):
    """Of the same dictionary; and data that was moved is the same."""
    other, moved = other_text(data, tmp_path / "other"), shutil.copytree(data, tmp_path / "moved")
    before = record.contents(begun)
    for folders in (other, f"{data}:{other}", f"{other}:{data}"):
        with pytest.raises(ValueError, match=r"holds another run \(data \w{12} there, \w{12} here\)"):
            train(pretrain_arguments(folders, begun, *LONGER))
    tokens = (data / "valid.bin").read_bytes()
    (moved / "valid.bin").write_bytes(tokens[4:8] + tokens[:4] + tokens[8:])  # what it is scored on counts, too
    with pytest.raises(ValueError, match="holds another run"):
        train(pretrain_arguments(moved, begun, *LONGER))
    assert record.contents(begun) == before
    shutil.copy(data / "valid.bin", moved / "valid.bin")
    assert len(train(pretrain_arguments(moved, begun, *LONGER))) == 1


def swapped_dictionary(data, folder):
    """The same data with two types of the dictionary exchanged."""
    shutil.copytree(data, folder)
    first, second, *rest = (folder / "dict.txt").read_text().splitlines(keepends=True)
    (folder / "dict.txt").write_text("".join([second, first, *rest]))
    return folder


def test_another_dictionary_is_another_run(data, begun, tmp_path):
    other = swapped_dictionary(data, tmp_path / "data")
    with pytest.raises(ValueError, match=r"holds another run \(dictionary \w{12} there, \w{12} here\)"):
        train(pretrain_arguments(other, begun, *LONGER))


def test_a_checkpoint_of_another_model_is_refused_with_the_reason(data, begun, tmp_path):
    """In place of fairseq's "please ensure that the architectures match"."""
    words = [*LONGER, f"--continue-once={begun}/checkpoint_last.pt"]
    swapped = swapped_dictionary(data, tmp_path / "data")
    layers = "is of another model: encoder_layers=2 in the checkpoint, 1 here"
    cases = [(swapped, [], "the dictionary is not the checkpoint's"), (data, ["--encoder-layers=1"], layers)]
    for text, more, reason in cases:
        with pytest.raises(ValueError, match=reason):
            launch.train(parsed(pretrain_arguments(text, tmp_path / "new", *words, *more)))
    assert not list((tmp_path / "new").glob("*.pt"))


def test_what_may_change_is_noted(data, begun):
    first = read(begun)
    words = ["--max-update=5", "--total-num-update=5", "--num-workers=1", "--save-interval-updates=1"]
    words += ["--validate-interval-updates=1", "--update-epoch-batch-itr=True"]
    assert len(train(pretrain_arguments(data, begun, *words))) == 1
    run = read(begun)
    (change,) = run.changes
    assert change.pop("command", 1) and change == {
        "num_updates": 4, "budget": [{"max_update": 4}, {"max_update": 5}], "dataset.num_workers": [0, None],
        "checkpoint.save_interval_updates": [10000, 1], "dataset.validate_interval_updates": [10000, 1],
        "dataset.update_epoch_batch_itr": [None, True],
    }  # fmt: skip
    assert run.started_at == first.started_at and run.config["model.max_positions"] == 24 and run.state == "finished"


@pytest.mark.parametrize("error", [ValueError("the disk is on fire"), MemoryError(), SystemExit(record.STOPPED)])
def test_a_start_that_fails_at_once_changes_nothing(error, data, begun, monkeypatch):
    def fail(*args):
        raise error

    before = record.contents(begun)
    monkeypatch.setattr(Trainer, "train_step", fail)
    with pytest.raises(type(error)):
        train(pretrain_arguments(data, begun, *LONGER))
    assert record.contents(begun) == before and not is_locked(begun)


def test_a_run_that_made_no_update_binds_nobody(data, tmp_path, monkeypatch):
    def fail(*args):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", fail)
        with pytest.raises(MemoryError):
            train(pretrain_arguments(data, tmp_path, *OPTIONS))
    assert read(tmp_path).state == "failed" and not read(tmp_path).started_at
    assert len(train(pretrain_arguments(data, tmp_path, *OPTIONS, "--batch-size=2"))) == 4
    assert read(tmp_path).state == "finished" and not read(tmp_path).changes


def test_both_doors_refuse(data, four, begun):
    before = record.contents(begun)
    process = fork(cli_main, "fairseq-train", *pretrain_arguments(data, begun, *LONGER, "--dropout=0"))
    process.join()
    assert process.exitcode == 1
    words = [f"--data={data}", f"--output={begun}", "--gpus=0", "--arch=tupe_r_tiny", "--tokens-per-sample=24"]
    words += ["--lr=[0.01]", "--warmup-updates=2", "--batch-size=4", "--update-freq=1", "--num-workers=0"]
    refused = CliRunner().invoke(pretrain, [*words, "--max-update=5", "--dropout=0"])
    assert refused.exit_code == 2
    assert "holds another run (model.dropout 0.1 there, 0.0 here)" in refused.output.splitlines()[-1]
    assert record.contents(begun) == before
    resumed = CliRunner().invoke(pretrain, [*words, "--max-update=5", "--log-interval=1"])
    assert resumed.exit_code == 0 and read(begun).budget == {"max_update": 5}, resumed.output


def test_the_default_is_a_setting_like_any_other(data, tmp_path):
    """However it is typed: what is compared and reported is the configuration."""
    found = []
    for words in ([], ["--dropout=0.1", "--adam-betas=(0.9,0.999)", "--mask-prob=0.15"]):
        folder = tmp_path / str(len(found))
        train(pretrain_arguments(data, folder, *OPTIONS, *words))
        found.append(read(folder).config)
    assert found[0] == found[1]
    words = ["model._name=tupe_r_tiny", f"task.data={data}", "task.tokens_per_sample=24", "dataset.batch_size=4"]
    words += ["optimization.update_freq=[1]", "optimization.lr=[0.01]", "lr_scheduler.warmup_updates=2"]
    train_recipe("pretrain", *words, "optimization.max_update=4", f"checkpoint.save_dir={tmp_path}/hydra")
    assert {name: pair for name, pair in read(tmp_path / "hydra").config.items() if not record.may_change(name)} == {
        name: pair for name, pair in found[0].items() if not record.may_change(name)
    }


def test_several_files_of_encodings(data, tmp_path, request):
    """Joined as in $PATH; the names of both are known before anything starts."""
    text = "from tupe.positions import PositionScheme, register\n\n\n@register('own_{0}')\nclass Own(PositionScheme):\n"
    files = [tmp_path / "own_a.py", tmp_path / "own_b.py"]
    for file in files:
        file.write_text(text.format(file.stem[-1]) + "    extra_terms = 1\n")
    request.addfinalizer(lambda: [SCHEMES.pop(f"own_{name}", None) for name in "ab"])
    words = ["--position=absolute+own_a+own_b", f"--position-file={files[0]}:{files[1]}"]
    train(pretrain_arguments(data, tmp_path / "run", *OPTIONS, *words, arch="bert_a_tiny"))
    assert read(tmp_path / "run").config["model.position_file"] == fingerprint(files)
    files[1].write_text("# other\n" + files[1].read_text())
    with pytest.raises(ValueError, match=r"model.position_file \w{12} there, \w{12} here"):
        train(pretrain_arguments(data, tmp_path / "run", *LONGER, *words, arch="bert_a_tiny"))


def test_batches_are_counted_over_all_processes(data, tmp_path, monkeypatch):
    """Another number of processes with as many batches in an update is the same run."""
    from fairseq.distributed import utils

    train(pretrain_arguments(data, tmp_path, *OPTIONS, "--update-freq=4", "--max-valid-steps=4"))
    config, seen = read(tmp_path).config, []
    monkeypatch.setattr("tupe.plugin.recorded.begin", lambda record, config, updates: seen.append(settings(config)))
    monkeypatch.setattr(utils, "get_global_world_size", lambda: 2)
    words = ["--update-freq=2", "--max-valid-steps=4", "--batch-size-valid=2", "--no-save", "--max-update=1"]
    train(pretrain_arguments(data, tmp_path / "x", *OPTIONS, *words))
    other = {name: value for name, (value, default) in seen[0].items() if value != default}
    differ = {name for name in {**other, **config} if other.get(name) != config.get(name)}
    assert {name for name in differ if not record.may_change(name)} == {"lr_scheduler.total_num_update"}
    assert "distributed_training.distributed_world_size" in differ and config["optimization.update_freq"] == [4]


def test_a_run_in_other_batches_is_the_same_run(data, begun):
    """With as many sequences in an update, as on another number of processes."""
    train(pretrain_arguments(data, begun, *LONGER, "--batch-size=2", "--update-freq=2"))
    assert read(begun).changes[-1]["dataset.batch_size"] == [4, 2] and read(begun).state == "finished"
    with pytest.raises(ValueError, match=r"holds another run \(optimization.update_freq"):
        train(pretrain_arguments(data, begun, *LONGER, "--batch-size=2", "--update-freq=1"))


EPOCH = ["glue=cola", "optimization.lr=[1e-3]", "dataset.num_workers=0"]


def test_fine_tuning_is_compared_too(learnable, pretrained, tmp_path):
    """Its settings, its own data in the folder, and the weights that it starts from."""
    data, start = (
        unsealed(shutil.copytree(learnable, tmp_path / "data")),
        shutil.copy(pretrained, tmp_path / "start.pt"),
    )
    words = [*EPOCH, "optimization.max_epoch=1"]
    folder = tmp_path / "run"
    finetune(data, start, folder, *words)
    before = record.contents(folder)
    assert read(folder).pretrained_weights and "model.encoder_layers" not in read(folder).config
    finetune(data, start, folder, *words)
    (data / "MNLI" / "input0" / "train.bin").write_bytes(b"another task")
    finetune(data, start, folder, *words)
    for more in ("+model.dropout=0.3", "dataset.batch_size=6"):
        with pytest.raises(ValueError, match="holds another run"):
            finetune(data, start, folder, *words, more)
    labels = data / "CoLA" / "label" / "valid.bin"
    kept = labels.read_bytes()
    labels.write_bytes(kept[::-1])
    with pytest.raises(ValueError, match=r"holds another run \(data "):
        finetune(data, start, folder, *words)
    labels.write_bytes(kept)
    state = load(start)
    state["model"]["encoder.tokens.weight"] += 1
    torch.save(state, start)
    with pytest.raises(ValueError, match=r"holds another run \(pretrained_weights "):
        finetune(data, start, folder, *words)
    assert record.contents(folder) == before


def test_a_stopped_run_says_so_last(data, tmp_path, monkeypatch, caplog):
    step = Trainer.train_step

    def interrupted(trainer, *args):
        if trainer.get_num_updates() == 2:
            raise KeyboardInterrupt
        return step(trainer, *args)

    monkeypatch.setattr(Trainer, "train_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(pretrain_arguments(data, tmp_path, *OPTIONS))
    assert caplog.messages[-1] == "stopped after update 2; the same command resumes"
    assert read(tmp_path).state == "stopped" and record.state_of(tmp_path) == "open"
