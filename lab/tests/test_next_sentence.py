"""The next-sentence objective, and training further at one length after another."""

import math
import os
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from fairseq import checkpoint_utils, tasks, utils
from helpers import PLUGIN, fairseq_arguments, load, pretrain_arguments, split_documents, train, write_data
from omegaconf import OmegaConf

from lab import further
from tupe.checkpoints.change import swap_command
from tupe.checkpoints.export import export
from tupe.checkpoints.trained import read_model
from tupe.encoder import second_segment
from tupe.run import record

ROOT = PLUGIN.parent
FOLDER = ROOT / "lab" / "next_sentence"
utils.import_user_module(Namespace(user_dir=str(FOLDER)))
from next_sentence import HEAD, MaskedLMNextSentence, SentencePairs  # noqa: E402

EOS = 2


def sentences(*documents):
    """Ids of sentences, each with a separator at its end; a document ends with an empty sentence."""
    return [np.array([*ids, EOS]) for document in documents for ids in [*document, []]]


# Word ids tell where they come from: document * 100 + sentence * 10 + place.
DOCUMENTS = [[[100 * d + 10 * s + p for p in range(3)] for s in range(6)] for d in range(1, 4)]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """(data, checkpoint with segment embeddings after 2 updates)."""
    folder = tmp_path_factory.mktemp("further")
    data = write_data(folder / "data")
    split_documents(data)
    train(pretrain_arguments(data, folder / "start", "--segments=learned", "--max-update=2", "--num-workers=0"))
    return data, folder / "start" / "checkpoint_last.pt"


def arguments(data, checkpoint, save_dir, *more):
    words = [f"--save-dir={save_dir}", f"--finetune-from-model={checkpoint}", f"common.user_dir={FOLDER}"]
    words += ["--tokens-per-sample=24", "--max-epoch=2", "--lr=[0.001]", "--num-workers=0", "--log-interval=1"]
    overrides = ["dataset.batch_size=4", "optimization.update_freq=[1]", *further.NEXT_SENTENCE[1:]]
    return fairseq_arguments("pretrain_further", overrides, [str(data), *words, *more], cuda=False)


def rows(batch):
    return batch["net_input"]["src_tokens"].numpy()


def test_pairs_are_neighbours_or_from_another_document():
    pairs = SentencePairs(sentences(*DOCUMENTS), length=16, seed=1)
    assert len(pairs) == 6  # four sentences of three words fit beside four special tokens; then two
    labels = []
    for epoch in range(40):
        for index in range(len(pairs)):
            a, b, label = pairs[epoch, index]
            assert len(a) and len(b) and len(a) + len(b) + 4 <= 16
            assert a[0] % 10 == 0 and EOS not in a and EOS not in b  # whole sentences, no separators
            if label == 0:
                assert b[0] == a[-1] + 8  # 110 follows 102: the next sentence of the same document
            else:
                assert b[0] // 100 != a[-1] // 100 and b[0] % 10 == 0
            labels.append(label)
    assert 0.35 < np.mean(labels) < 0.65
    assert {len(pairs[epoch, 0][0]) for epoch in range(40)} == {3, 6, 9}
    other = SentencePairs(sentences(*DOCUMENTS), 16, seed=2)
    assert any(len(pairs[e, 0][0]) != len(other[e, 0][0]) for e in range(9))


def test_the_length_of_a_pair_does_not_tell_its_label():
    """... by the best threshold, in either direction; and both kinds end with whole sentences."""
    rng = np.random.default_rng(0)
    documents = [[[5] * (n - 1) + [6] for n in rng.integers(3, 20, rng.integers(10, 60))] for _ in range(30)]
    pairs = SentencePairs(sentences(*documents), length=64, seed=1)
    drawn = [pairs[epoch, index] for epoch in range(8) for index in range(len(pairs))]
    sizes, labels = np.array([len(a) + len(b) for a, b, _ in drawn]), np.array([label for _, _, label in drawn])
    right = [np.mean((sizes >= threshold) == labels) for threshold in range(64)]
    assert len(drawn) > 1000 and max(right) < 0.6 and min(right) > 0.4
    assert np.mean([b[-1] == 6 for _, b, label in drawn if label]) > 0.95


def test_sentences_that_fit_nowhere_are_left_out():
    long = [[7] * 50, [8], [9]]
    pairs = SentencePairs(sentences(long, *DOCUMENTS), 16, seed=1)
    assert all(7 not in pairs.words(range(first, first + count)) for _, first, count in pairs.pieces)
    with pytest.raises(ValueError, match="two documents"):
        SentencePairs(sentences(DOCUMENTS[0]), 16, seed=1)


def test_next_sentences_through_fairseq_train(start, tmp_path):
    data, checkpoint = start
    batches = []
    losses = train(arguments(data, checkpoint, tmp_path), on_step=batches.extend)
    state = load(tmp_path / "checkpoint_last.pt")
    assert state["optimizer_history"][-1]["num_updates"] == len(losses) == len(batches)
    assert state["cfg"]["lr_scheduler"]["total_num_update"] == len(losses)  # decays to 0 at the end of the second epoch
    assert state["cfg"]["model"]["max_positions"] == 24  # the checkpoint's
    assert f"classification_heads.{HEAD}.dense.weight" in state["model"]
    labels = torch.cat([batch["next_sentence"] for batch in batches])
    assert set(labels.tolist()) == {0, 1}
    for batch in batches:
        tokens, target = batch["net_input"]["src_tokens"], batch["target"]
        assert tokens.shape == target.shape
        assert (tokens[:, 0] == 0).all()
        special = tokens.eq(0) | tokens.eq(1) | tokens.eq(2)
        assert not (special & target.ne(1)).any()  # separators are never to be predicted ...
        assert (second_segment(tokens, 2).amax(1) == 1).all()  # ... nor masked: every row has its two segments
        assert (tokens.eq(2).sum(1) == 3).all()
        unmasked = target.ne(1) & tokens.eq(target)
        assert target.ne(1).any() and unmasked.sum() < target.ne(1).sum()


def test_pairs_and_masks_change_with_the_epoch(start, tmp_path):
    """With a data worker, too."""
    data, checkpoint = start
    seen = []
    train(arguments(data, checkpoint, tmp_path, "--num-workers=1"), on_step=seen.extend)
    by_epoch = np.array_split(np.arange(len(seen)), 2)
    first, second = ({row.tobytes() for i in part for row in rows(seen[i])} for part in by_epoch)
    assert len(first & second) < len(first) / 4


def test_the_split_that_is_trained_on_may_have_any_name(start, tmp_path):
    """It is the one whose pairs, masks and order change with the epoch and the seed."""
    data, checkpoint = start
    for name in ("train.bin", "train.idx"):
        (data / name.replace("train", "wiki")).write_bytes((data / name).read_bytes())
    seen = {}
    for subset in ("train", "wiki"):
        words, seen[subset] = arguments(data, checkpoint, tmp_path / subset, f"--train-subset={subset}"), []
        train(words, on_step=seen[subset].extend)
    assert [rows(a).tolist() for a in seen["train"]] == [rows(a).tolist() for a in seen["wiki"]]


def test_loss_is_the_mean_of_words_plus_the_mean_of_pairs(start):
    data, checkpoint = start
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(checkpoint)])
    model.register_classification_head(HEAD, num_classes=2)
    model.eval()
    cfg = {**OmegaConf.to_container(task.cfg, resolve=False), "_name": "next_sentence"}
    cfg.update(finetune_from_model=None, seed=1, tokens_per_sample=24)
    task = tasks.setup_task(OmegaConf.create(cfg))
    task.load_dataset("train")
    dataset = task.dataset("train")
    sample = dataset.collater([dataset[1, i] for i in range(4)])
    criterion = MaskedLMNextSentence(OmegaConf.create({"tpu": False}), task)
    loss, size, log = criterion(model, sample)
    logits, _ = model(sample["net_input"]["src_tokens"])
    classes, _ = model(sample["net_input"]["src_tokens"], classification_head_name=HEAD)
    words = F.cross_entropy(logits.flatten(0, 1), sample["target"].flatten(), ignore_index=1)
    pairs = F.cross_entropy(classes, sample["next_sentence"])
    assert (loss / size).item() == pytest.approx((words + pairs).item(), rel=1e-5)
    assert log["loss"].item() == pytest.approx(words.item() * size, rel=1e-5)
    assert log["correct"] == (classes.argmax(1) == sample["next_sentence"]).sum()
    assert math.isfinite(log["nsp"])


def test_next_sentences_need_segments(start, tmp_path):
    data, _ = start
    with pytest.raises(ValueError, match="segment embeddings"):
        train(arguments(data, "", tmp_path, "--arch=tupe_r_tiny"))


def test_another_criterion_is_refused(start, tmp_path):
    with pytest.raises(ValueError, match="does not go with criterion masked_lm"):
        train(arguments(*start, tmp_path, "--criterion=masked_lm"))


def test_lengths_follow_each_other(start, tmp_path):
    def printed(*words):
        common = [f"--data={start[0]}", f"--checkpoint={start[1]}", f"--output={tmp_path / 'run'}", "--dry-run"]
        return CliRunner().invoke(further.command, [*common, *words]).output

    assert "for each length" in printed("--lengths=16,20", "--epochs=3")
    one, two = printed("--lengths=16,20", "--epochs=3,1", "--next-sentence", "--lr=1e-3").splitlines()
    begin = f"--finetune-from-model={tmp_path}/run/with_segments --tokens-per-sample=16 --max-epoch=3"
    assert begin in one and "--lr=1e-3" in one and not (tmp_path / "run").exists()
    assert f"--finetune-from-model={tmp_path}/run/length16/checkpoint_last.pt --tokens-per-sample=20" in two
    assert f"common.user_dir={FOLDER} task._name=next_sentence" in two


def test_a_folder_that_was_made_of_another_checkpoint_is_no_beginning(start, tmp_path):
    trained, output = read_model(start[1]), tmp_path / "with_segments"
    for _ in range(2):
        assert further.with_segments(start[1], output) == output
    other = {**trained.weights, "encoder.tokens.weight": trained.weights["encoder.tokens.weight"] + 1}
    export(replace(trained, weights=other), tmp_path / "other", code=False)
    with pytest.raises(ValueError, match="with_segments was made of another checkpoint"):
        further.with_segments(tmp_path / "other", output)


def test_training_goes_on_in_two_phases_with_next_sentences(start, tmp_path):
    data, checkpoint = start
    words = ["--position=t5", "--cls=tied", f"--output={tmp_path}/swapped"]
    assert CliRunner().invoke(swap_command, [f"--checkpoint={checkpoint}", *words]).exit_code == 0
    command = [sys.executable, "-m", "lab", "continue", f"--data={data}", f"--checkpoint={tmp_path}/swapped"]
    command += [f"--output={tmp_path}/run", "--epochs=2,1", "--lengths=20,24", "--next-sentence", "--gpus=0"]
    command += ["--allocator=none", "--batch-size=4", "--update-freq=1", "--num-workers=0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "nsp_accuracy" in done.stdout + done.stderr
    for phase, epochs, length in [("length20", 2, 20), ("length24", 1, 24)]:
        state = load(tmp_path / "run" / phase / "checkpoint_last.pt")
        assert state["cfg"]["optimization"]["max_epoch"] == epochs
        assert state["cfg"]["task"]["tokens_per_sample"] == length
        assert state["cfg"]["model"]["position"] == "t5"
        assert f"classification_heads.{HEAD}.dense.weight" in state["model"]
        assert state["cfg"]["lr_scheduler"]["total_num_update"] == state["optimizer_history"][-1]["num_updates"]
    first = load(tmp_path / "run/length20/checkpoint_last.pt")["cfg"]["checkpoint"]["finetune_from_model"]
    second = load(tmp_path / "run/length24/checkpoint_last.pt")["cfg"]["checkpoint"]["finetune_from_model"]
    assert first.endswith("swapped") and second.endswith("length20/checkpoint_last.pt")


def test_one_command_from_length_to_length(start, tmp_path):
    """The first length is the checkpoint's, for the second it needs more vectors."""
    words = [f"--data={start[0]}", f"--checkpoint={start[1]}", f"--output={tmp_path}", "--stretch", "--lengths=24,40"]
    words += ["--epochs=1,2", "--gpus=0", "--allocator=none", "--num-workers=0", "--update-freq=[1]"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "lab", "continue", *words], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert not (tmp_path / "length24/stretched").exists()
    for length in (24, 40):
        state, run = load(tmp_path / f"length{length}/checkpoint_last.pt"), record.read(tmp_path / f"length{length}")
        assert run.state == "finished" and state["cfg"]["task"]["tokens_per_sample"] == length
        assert len(state["model"]["encoder.positions.untied.table.weight"]) == length + 1
    assert run.pretrained == str(tmp_path / "length40/stretched")
