"""Masked-LM pre-training, from scratch and from a checkpoint: fairseq's own batches, segments, and the length of the
run."""

import hashlib
import math

import numpy as np
import pytest
import torch
from helpers import (
    PLUGIN,
    WORDS,
    build,
    fairseq_arguments,
    load,
    pretrain_arguments,
    split_documents,
    train,
    write_data,
)
from omegaconf import OmegaConf

from tupe.data.splits import write_split
from tupe.encoder import second_segment
from tupe.plugin.masked_lm import TupeMaskedLMConfig, TupeMaskedLMTask
from tupe.plugin.schedule import count_updates
from tupe.run.record import read

EOS = 2


def transcripts(folder, lines=30, valid_lines=10, words=100):
    """Data in which no sentence fits into a block of 24 tokens."""
    write_data(folder)
    rng = np.random.default_rng(0)
    for split, count in (("train", lines), ("valid", valid_lines)):
        texts = [[*rng.integers(4, 4 + WORDS, words), EOS] for _ in range(count)]
        write_split(folder / split, [ids for text in texts for ids in (text, [EOS])], 4 + WORDS)
    return folder


def test_text_without_full_stops_is_trained_on(tmp_path):
    """All of it."""
    data, seen = transcripts(tmp_path / "data"), []
    options = ["--max-epoch=1", "--max-update=1000", "--num-workers=0", "--no-save"]
    train(pretrain_arguments(data, tmp_path / "run", *options), on_step=lambda batches: seen.extend(batches))
    restored = [torch.where(b["target"].ne(1), b["target"], b["net_input"]["src_tokens"]) for b in seen]
    tokens = sum(int((ids > EOS).sum()) for ids in restored)
    assert tokens == 30 * 100 and all((ids > EOS).any(1).all() for ids in restored)


def test_whatever_its_name_a_split_to_train_on_is_masked_anew(tmp_path):
    data, seen = write_data(tmp_path / "data", valid_lines=40), []
    words = [
        "--train-subset=valid",
        "--valid-subset=train",
        "--max-epoch=2",
        "--max-update=1000",
        "--num-workers=0",
        "--no-save",
    ]
    train(pretrain_arguments(data, tmp_path / "run", *words), on_step=lambda batches: seen.extend(batches))
    first, second = (
        [batch["target"].tolist() for batch in half] for half in (seen[: len(seen) // 2], seen[len(seen) // 2 :])
    )
    assert len(first) == len(second) > 1 and first != second


@pytest.mark.parametrize("criterion", ["masked_lm", "masked_lm_chunked"])
def test_a_batch_without_a_masked_token_adds_nothing(criterion, tmp_path):
    data = write_data(tmp_path / "data", valid_lines=200)
    words = [f"--criterion={criterion}", "--mask-prob=0.01", "--batch-size=1", "--update-freq=2", "--num-workers=0"]
    losses = train(pretrain_arguments(data, tmp_path / "run", *words, "--batch-size-valid=32"))
    missing = [math.isnan(loss) for loss, _ in losses]
    assert len(losses) == 14 and 3 < sum(missing) < 14 and all(math.isfinite(norm) for _, norm in losses)
    assert [norm == 0 for _, norm in losses] == missing
    run = read(tmp_path / "run")
    assert run.state == "finished" and math.isfinite(run.scores[-1]["loss"])
    model = load(tmp_path / "run" / "checkpoint_last.pt")["model"]
    assert all(value.isfinite().all() for value in model.values() if value.is_floating_point())


def test_held_out_text_in_which_nothing_is_masked_is_refused(tmp_path):
    data = write_data(tmp_path / "data", valid_lines=1)
    with pytest.raises(ValueError, match="'valid' has too little text: none of its tokens is masked"):
        train(pretrain_arguments(data, tmp_path / "run", "--mask-prob=0.001"))


def test_segments_begin_at_the_double_separator():
    tokens = torch.tensor([[0, 5, 2, 6, 2, 2, 7, 2, 2, 1], [0, 5, 6, 7, 2, 1, 1, 1, 1, 1]])
    assert second_segment(tokens, 2).tolist() == [[0] * 5 + [1] * 5, [0] * 10]


def test_segments_reach_the_features():
    model = build("tupe_a_tiny", segments="learned").eval()
    one = torch.tensor([[0, 5, 2, 2, 6, 2]])
    with torch.no_grad():
        model.encoder.segments.weight[1] = model.encoder.segments.weight[0]
        before = model.encoder.embed(one)
        model.encoder.segments.weight[1] += 1 + torch.arange(128)  # not a constant: a layer norm follows
        changed = (model.encoder.embed(one) - before).abs().amax(-1)[0]
        assert (changed > 1e-3).tolist() == [False] * 3 + [True] * 3


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """(data, checkpoint with segment embeddings after 2 updates)."""
    folder = tmp_path_factory.mktemp("continued")
    data = write_data(folder / "data")
    split_documents(data)
    train(pretrain_arguments(data, folder / "start", "--segments=learned", "--max-update=2", "--num-workers=0"))
    return data, folder / "start" / "checkpoint_last.pt"


def arguments(data, checkpoint, save_dir, *more, user_dir=PLUGIN, overrides=()):
    words = [f"--save-dir={save_dir}", f"--finetune-from-model={checkpoint}", f"--user-dir={user_dir}"]
    words += ["--tokens-per-sample=24", "--max-epoch=2", "--lr=[0.001]", "--num-workers=0", "--log-interval=1"]
    overrides = ["dataset.batch_size=4", "optimization.update_freq=[1]", *overrides]
    return fairseq_arguments("pretrain_further", overrides, [str(data), *words, *more], cuda=False)


def rows(batch):
    return batch["net_input"]["src_tokens"].numpy()


@pytest.mark.thorough
def test_from_scratch_it_is_fairseqs_masked_lm(start, tmp_path):
    """The same blocks and masks in the first epoch, in another order."""
    data, _ = start
    seen = {"masked_lm": [], "tupe_masked_lm": []}
    for task, found in seen.items():
        words = [f"--task={task}", "--max-epoch=1", "--max-update=99"]
        train(
            pretrain_arguments(data, tmp_path / task, *words),
            on_step=lambda batches, found=found: found.extend(bytes(row[row != 1]) for b in batches for row in rows(b)),
        )
    stock, ours = seen.values()
    assert sorted(stock) == sorted(ours) and stock != ours
    assert not (tmp_path / "masked_lm" / "record.json").exists()


def test_from_a_checkpoint_it_runs_for_epochs(start, tmp_path):
    data, checkpoint = start
    losses = train(arguments(data, checkpoint, tmp_path))
    state, run = load(tmp_path / "checkpoint_last.pt"), read(tmp_path)
    assert state["cfg"]["lr_scheduler"]["total_num_update"] == len(losses) > 2
    assert state["cfg"]["model"]["_name"] == "tupe_r_tiny"
    assert (run.state, run.budget, run.pretrained_updates) == ("finished", {"max_epoch": 2}, 2)
    assert run.pretrained == str(checkpoint) and run.variant == "segments learned" and len(run.scores) == 2


def test_the_time_of_the_pretraining_does_not_count(start, tmp_path):
    """fairseq's limit is on a whole history; a run that starts from a checkpoint begins its own."""
    data, checkpoint = start
    state, old = load(checkpoint), tmp_path / "old.pt"
    torch.save(state | {"extra_state": state["extra_state"] | {"previous_training_time": 1e6}}, old)
    assert len(train(arguments(data, old, tmp_path / "run", "--stop-time-hours=2"))) > 2
    assert read(tmp_path / "run").state == "finished"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--arch=tupe_r_tiny"], "segments=learned in the checkpoint, none here"),
        (["--arch=tupe_r_tiny", "--segments=learned", "--position=t5"], "position=untied.t5 in the checkpoint"),
        (["--tokens-per-sample=25"], "25 tokens: untied of the checkpoint .* has vectors for 24; .*stretch"),
    ],
)
def test_contradictions_are_refused(start, tmp_path, more, message):
    with pytest.raises(ValueError, match=message):
        train(arguments(*start, tmp_path, *more))


def test_held_out_masks_and_order_are_the_same_for_every_seed(start):
    """A part of the blocks is a sample of all lengths: blocks are not in the order of their length."""

    def batches(split, seed):
        config = TupeMaskedLMConfig(data=str(start[0]), seed=seed, tokens_per_sample=24, finetune_from_model=None)
        task = TupeMaskedLMTask.setup_task(OmegaConf.structured(config))
        task.load_dataset(split)
        data = task.dataset(split)
        order = [item for batch in data.batches(8, 1) for item in batch]
        lengths = [int(data.items.blocks.sizes[i]) for _, i in order]
        return data.collater([data[item] for item in order])["target"].tolist(), lengths

    (targets, lengths), train = batches("valid", 1), batches("train", 1)
    assert (targets, lengths) == batches("valid", 2) and targets != train[0]
    assert batches("train", 2)[0] != train[0]
    assert lengths != sorted(lengths)


def test_an_epoch_is_all_of_several_folders(start, tmp_path):
    def count(data, epochs, most=0):
        config = TupeMaskedLMConfig(data=str(data), seed=1, tokens_per_sample=24, finetune_from_model=None)
        dataset = {"train_subset": "train", "max_tokens": None, "batch_size": 4}
        whole = {
            "dataset": dataset,
            "optimization": {"max_epoch": epochs, "max_update": most, "update_freq": [1]},
            "distributed_training": {"distributed_world_size": 1},
        }  # fmt: skip
        return count_updates(TupeMaskedLMTask.setup_task(OmegaConf.structured(config)), OmegaConf.create(whole))

    one, other = start[0], write_data(tmp_path / "other", lines=20)
    assert count(one, 1) != count(other, 1)
    assert count(f"{one}:{other}", 3) == 3 * count(f"{one}:{other}", 1)
    assert [count(one, 0), count(one, 0, 7), count(one, 1, 2)] == [0, 7, 2]
    assert count(one, 1) < count(f"{one}:{other}", 1) <= count(one, 1) + count(other, 1)


def test_models_of_one_seed_train_on_the_same_batches(start, tmp_path):
    """Order and masks: by the hash of what every update sees."""

    def seen(arch, seed):
        digests = []
        short = [f"--seed={seed}", "--max-update=4", "--no-save", "--disable-validation", "--num-workers=0"]
        words = pretrain_arguments(start[0], tmp_path / f"{arch}{seed}", *short, arch=arch)
        train(words, on_step=lambda samples: digests.append(hashlib.sha256(repr(samples).encode()).hexdigest()))
        return digests

    one = seen("bert_a_tiny", 1)
    assert len(set(one)) == 4
    assert seen("tupe_r_tiny", 1) == one and seen("bert_a_tiny", 2) != one
