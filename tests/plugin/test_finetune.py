"""Fine-tuning: resuming, failures, and which settings are refused. The task is CoLA; any other would do."""

import json

import pytest
import torch
from fairseq.dataclass.configs import FairseqConfig
from fairseq.trainer import Trainer
from helpers import finetune
from omegaconf import OmegaConf

from tupe.common.record import Record, read, state_of
from tupe.data.batches import Epoch
from tupe.data.examples import Examples
from tupe.plugin import glue
from tupe.plugin.finetune import check_end

NO_SAVE = "checkpoint.no_save=true"


def epochs(count):
    return ["glue=cola", f"optimization.max_epoch={count}", "optimization.lr=[0.003]"]


@pytest.mark.parametrize("optimizer", [pytest.param("adam", marks=pytest.mark.thorough), "adamw_fused"])
def test_a_killed_run_resumes_with_the_same_scores(optimizer, learnable, pretrained, tmp_path, monkeypatch):
    options = [*epochs(3), f"optimizer._name={optimizer}"]
    finetune(learnable, pretrained, tmp_path / "whole", *options)
    step = Trainer.train_step

    def killed_in_epoch_2(trainer, samples, **kwargs):
        if trainer.get_num_updates() == 6:
            raise KeyboardInterrupt
        return step(trainer, samples, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Trainer, "train_step", killed_in_epoch_2)
        finetune(learnable, pretrained, tmp_path / "killed", *options)
    killed = read(tmp_path / "killed")
    assert len(killed.scores) == 1 and killed.failure is None and state_of(tmp_path / "killed") == "open"
    finetune(learnable, pretrained, tmp_path / "killed", *options)
    whole, resumed = read(tmp_path / "whole"), read(tmp_path / "killed")
    assert [entry["num_updates"] for entry in whole.scores] == [4, 8, 12] and resumed.scores == whole.scores
    assert resumed.started_at == killed.started_at <= resumed.finished_at and resumed.state == "finished"


def test_the_fused_optimizer_trains_as_adam(learnable, pretrained, tmp_path):
    for name in ("adam", "adamw_fused"):
        finetune(learnable, pretrained, tmp_path / name, *epochs(2), f"optimizer._name={name}")
    for ours, theirs in zip(read(tmp_path / "adamw_fused").scores, read(tmp_path / "adam").scores, strict=True):
        assert ours == {**theirs, "loss": pytest.approx(theirs["loss"], rel=1e-5)}


def test_validation_by_length_changes_no_score(learnable, pretrained, tmp_path, monkeypatch):
    """Examples longest first, against another order."""
    lengths, forward = [], glue.GlueCriterion.forward

    def record(criterion, model, sample, *args):
        if not model.training:
            lengths.extend(sample["net_input"]["src_lengths"].tolist())
        return forward(criterion, model, sample, *args)

    monkeypatch.setattr(glue.GlueCriterion, "forward", record)
    finetune(learnable, pretrained, tmp_path / "sorted", *epochs(1), NO_SAVE)
    assert lengths == sorted(lengths, reverse=True) and len(set(lengths)) > 1
    in_order = lambda examples, size, epoch=1: list(Epoch(len(examples), 1, size, 1))  # noqa: E731
    monkeypatch.setattr(Examples, "longest_first", in_order)
    finetune(learnable, pretrained, tmp_path / "in another order", *epochs(1), NO_SAVE)
    assert lengths[41:] != sorted(lengths[41:], reverse=True)
    (ours,), (other,) = read(tmp_path / "sorted").scores, read(tmp_path / "in another order").scores
    assert ours.pop("loss") == pytest.approx(other.pop("loss"), rel=1e-6) and ours == other


def test_a_run_without_checkpoints_starts_over(learnable, pretrained, tmp_path):
    finetune(learnable, pretrained, tmp_path, *epochs(2), NO_SAVE)
    whole = read(tmp_path)
    first = {**whole.scores[0], "matthews": -1.0}  # a run of which only the first epoch was done, with another score
    Record(**{**vars(whole), "state": "running", "scores": [first]}).save(tmp_path)
    finetune(learnable, pretrained, tmp_path, *epochs(2), NO_SAVE)
    assert read(tmp_path).scores == whole.scores
    # Now it is finished: nothing is trained again, nothing is written.
    before = (tmp_path / "record.json").stat().st_mtime_ns
    finetune(learnable, pretrained, tmp_path, *epochs(2), NO_SAVE)
    assert (tmp_path / "record.json").stat().st_mtime_ns == before


def test_an_unreadable_record_starts_over(learnable, pretrained, tmp_path):
    (tmp_path / "record.json").write_text('{"scores": [')
    finetune(learnable, pretrained, tmp_path, *epochs(1), NO_SAVE)
    assert len(read(tmp_path).scores) == 1


@pytest.mark.parametrize(
    "error",
    [
        torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
    ],
    ids=["GPU", "CPU"],
)
def test_out_of_memory_ends_a_run(error, learnable, pretrained, tmp_path, monkeypatch):
    """fairseq alone would leave the batch out. What the run was is written down all the same, from its start on."""
    forward = glue.GlueCriterion.forward

    def fails_in_training(criterion, model, sample, *args):
        if model.training:
            raise error
        return forward(criterion, model, sample, *args)

    monkeypatch.setattr(glue.GlueCriterion, "forward", fails_in_training)
    with pytest.raises(MemoryError):
        finetune(learnable, pretrained, tmp_path, *epochs(1))
    run = read(tmp_path)
    assert run.state == "failed" and run.failure["reason"].startswith("out of memory: ") and run.failure["status"] == 1
    assert run.scores == [] and run.task == "CoLA" and run.command and run.versions["torch"]


def test_a_run_without_updates_has_diverged(learnable, pretrained, tmp_path, monkeypatch):
    """fairseq skips updates whose fp16 gradients are not finite, for ever: that is no score of a trained model."""
    step = Trainer.train_step

    def overflow(self, *args):
        if self.get_num_updates() < 4:  # those of the first epoch
            return step(self, *args)

    (tmp_path / "crash.pt").touch()  # fairseq's, of a run that diverged
    with monkeypatch.context() as patch, pytest.raises(FloatingPointError, match="4 updates so far"):
        patch.setattr(Trainer, "train_step", overflow)
        finetune(learnable, pretrained, tmp_path, *epochs(3), NO_SAVE)
    run = read(tmp_path)
    assert len(run.scores) == 1 and run.state == "failed" and run.failure["reason"].startswith("diverged: ")
    assert not (tmp_path / "crash.pt").exists()
    finetune(learnable, pretrained, tmp_path, *epochs(3), NO_SAVE)  # started again, it comes to its end
    run = read(tmp_path)
    assert run.state == "finished" and run.failure is None and len(run.scores) == 3


def test_a_run_that_stops_early_is_not_finished(learnable, pretrained, tmp_path):
    """fairseq ends at once where the learning rate is below the smallest: no score is that of a trained model."""
    finetune(learnable, pretrained, tmp_path, *epochs(2), NO_SAVE, "optimization.stop_min_lr=1")
    run = read(tmp_path)
    assert run.state == "failed" and "stopped before its last epoch" in run.failure["reason"]


@pytest.mark.parametrize(
    "override, message",
    [
        ("dataset.validate_interval_updates=2", "validate_interval_updates=2: .* at the end of each epoch"),
        ("checkpoint.save_interval_updates=2", "save_interval_updates=2"),
        ("optimization.max_update=3", "max_update=3: fine-tuning ends with its last epoch"),
        ("optimization.stop_time_hours=1", "stop_time_hours=1"),
        ("checkpoint.patience=1", "patience=1"),
        ("optimization.max_epoch=0", "needs optimization.max_epoch"),
        ("dataset.disable_validation=true", "disable_validation, .*: fine-tuning is scored at the end of each epoch"),
        ("dataset.validate_interval=2", "validate_interval that divides max_epoch"),
        ("dataset.validate_after_updates=2", "validate_after_updates"),
    ],
)
def test_another_end_than_the_last_epoch_is_refused(override, message):
    """Scores within an epoch would make an unfinished last epoch look finished."""
    values = OmegaConf.from_dotlist(["optimization.max_epoch=3", override])
    config = OmegaConf.merge(OmegaConf.structured(FairseqConfig), values)
    with pytest.raises(ValueError, match=message):
        check_end(config)


def test_another_end_is_refused_before_training(learnable, pretrained, tmp_path):
    with pytest.raises(ValueError, match="stop_time_hours=1"):
        finetune(learnable, pretrained, tmp_path, "glue=cola", "optimization.stop_time_hours=1")
    assert not (tmp_path / "record.json").exists()


def test_scores_are_of_whole_splits(learnable, pretrained, tmp_path):
    with pytest.raises(ValueError, match="of 41 'valid' examples were scored"):
        finetune(learnable, pretrained, tmp_path, *epochs(1), NO_SAVE, "dataset.max_valid_steps=1")
    assert json.loads((tmp_path / "record.json").read_text())["state"] == "failed"
