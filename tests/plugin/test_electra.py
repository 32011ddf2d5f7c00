"""ELECTRA: what is tied, what is sampled, where gradients go; resuming; and that it learns on real text."""

import copy
import math
import pickle
import re
from pydoc_data.topics import topics  # Python's reference manual: real English that every Python carries

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.models import MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY
from helpers import PLUGIN, Waits, fairseq_arguments, finetune, load, never_pack, train

from tupe.common.recipes import read as read_recipe
from tupe.data.splits import write_split
from tupe.names import cls_beside
from tupe.plugin.electra import ElectraConfig, ElectraCriterion, ElectraModel, sample_gumbel
from tupe.run.record import read
from tupe.schemes import SCHEMES
from tupe.train.finetune import new_model
from tupe.train.settle import settle

V, PAD, MASK = 30, 1, 29


def dictionary():
    words = Dictionary()
    for word in range(V - 5):
        words.add_symbol(f"w{word}")
    assert words.add_symbol("<mask>") == MASK
    return words


class Task:
    """As much of a task as model and criterion look at."""

    source_dictionary = target_dictionary = dictionary()


def build(position="untied+t5", cls="untied", pretraining=True, **options):
    sizes = {"encoder_layers": 2, "encoder_embed_dim": 48, "encoder_ffn_embed_dim": 96, "encoder_attention_heads": 6}
    config = ElectraConfig(position=position, cls=cls, max_positions=16, **sizes, **options)
    torch.manual_seed(0)
    return ElectraModel(config, Task.source_dictionary, pretraining)


def batch():
    """A batch of task masked_lm, the second sentence padded."""
    torch.manual_seed(1)
    original = torch.randint(4, MASK, (2, 10))
    original[:, 0], original[1, 7:] = 0, PAD
    masked = torch.zeros(2, 10, dtype=torch.bool)
    masked[0, [2, 5, 6]] = masked[1, 3] = True
    tokens, target = original.masked_fill(masked, MASK), original.masked_fill(~masked, PAD)
    return {"net_input": {"src_tokens": tokens, "src_lengths": None}, "target": target, "ntokens": 17, "nsentences": 2}


def criterion():
    return ElectraCriterion(Task, 50.0)


@pytest.mark.parametrize("position", [*SCHEMES, "untied+t5", "untied+t5:layer", "untied:layer+t5"])
def test_every_scheme_trains_both_networks(position):
    model = build(position, cls_beside(position))
    loss, size, logs = criterion()(model, batch())
    loss.backward()
    assert size == 4 and logs["num_tokens"] == 17 and torch.isfinite(loss)
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    own = [p for name, p in model.named_parameters() if name.startswith("generator.")]
    assert all(torch.isfinite(p.grad).all() for p in own) and any(p.grad.any() for p in own)


@pytest.mark.parametrize(
    "arch, width, heads", [("electra_a", 256, 4), ("electra_tupe_r", 256, 4), ("electra_tupe_r_tiny", 64, 1)]
)
def test_named_architectures_have_a_generator_of_a_third(arch, width, heads):
    config = MODEL_DATACLASS_REGISTRY[arch]()
    with torch.device("meta"):
        model = MODEL_REGISTRY[arch](config, Task.source_dictionary, True)
    assert model.generator.project.weight.shape == (width, config.encoder_embed_dim)
    assert model.generator.layers[0].attention.heads == heads
    assert pickle.loads(pickle.dumps(type(model))) is MODEL_REGISTRY[arch]


def test_fused_attention_equals_the_plain_one():
    """Loss and gradients of both networks, as a GPU computes them."""
    results, arch = [], "electra_tupe_r_tiny"
    for attention in ("sdpa", "plain"):
        config = MODEL_DATACLASS_REGISTRY[arch](attention=attention, dropout=0.0, attention_dropout=0.0)
        torch.manual_seed(0)
        model = MODEL_REGISTRY[arch](config, Task.source_dictionary, True)
        torch.manual_seed(1)  # the same tokens are sampled
        loss, _, logs = criterion()(model, batch())
        loss.backward()
        assert model.encoder.backends == model.generator.backends == [attention]
        results.append((loss, logs, {name: p.grad for name, p in model.named_parameters()}))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)


def test_a_step_waits_once():
    """The one thing the host must know is where tokens are masked."""
    sample = batch()
    model, step = build(attention="sdpa", dropout=0.0, attention_dropout=0.0), criterion()
    with Waits() as waits:
        step(model, sample)[0].backward()
    assert waits.operations == ["aten.nonzero.default"]


@pytest.mark.parametrize("arch", ["electra_a", "electra_tupe_r"])
def test_parameter_count_is_the_papers(arch):
    """Table 4: 120M, with a vocabulary of 32,768."""
    words = dictionary()
    for word in range(32768 - len(words)):
        words.add_symbol(f"more{word}")
    with torch.device("meta"):
        model = MODEL_REGISTRY[arch](MODEL_DATACLASS_REGISTRY[arch](), words, True)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(120e6, rel=0.03)


def test_token_and_position_tables_are_tied():
    for position, cls, table in [("untied+t5", "untied", "untied"), ("absolute+t5", "tied", "absolute")]:
        model = build(position, cls)
        before = model.generator.project.weight.clone()
        assert model.generator.positions[table].table.weight is model.encoder.positions[table].table.weight
        assert model.generator.positions["t5"].table.weight is not model.encoder.positions["t5"].table.weight
        names = dict(model.named_parameters())  # each tied tensor once: an optimiser steps it once
        assert not any(name.startswith("generator.") and ".table." in name and table in name for name in names)
        assert [name for name in names if len(names[name]) == V and names[name].dim() == 2] == ["encoder.tokens.weight"]
        loaded = build(position, cls)
        for p in loaded.parameters():
            torch.nn.init.zeros_(p)
        loaded.load_state_dict(model.state_dict())
        assert loaded.generator.positions[table].table.weight is loaded.encoder.positions[table].table.weight
        torch.testing.assert_close(loaded.generator.project.weight, before, rtol=0, atol=0)


def test_a_sample_equal_to_the_original_counts_as_original():
    model, sample = build().eval(), batch()
    masked = sample["target"].ne(PAD)
    original = torch.where(masked, sample["target"], sample["net_input"]["src_tokens"])
    right = torch.full((4, V), -1e4).scatter_(1, sample["target"][masked][:, None], 1e4)
    assert torch.equal(model.corrupt(original, masked, right), original)
    wrong = torch.full((4, V), -1e4)
    wrong[torch.arange(4), (sample["target"][masked] + 1) % MASK] = 1e4
    assert torch.equal(model.corrupt(original, masked, wrong).ne(original), masked)
    # and through the whole model: a replaced token is a masked one that was drawn differently, nothing else
    _, extra = model(**sample["net_input"], masked_tokens=masked, original=original)
    assert torch.equal(extra["replaced"], extra["corrupted"].ne(original))
    assert not extra["replaced"][~masked].any()


def test_token_wise_work_without_padding(monkeypatch):
    """The losses and all gradients are those of the padded computation."""
    model, sample = build(dropout=0.0, attention_dropout=0.0), batch()
    assert len(model.encoder.packing(sample["net_input"]["src_tokens"]).indices) == 17

    def outcome():
        model.zero_grad()
        torch.manual_seed(3)  # of the generator's samples
        loss, _, logs = criterion()(model, sample)
        loss.backward()
        return logs, {name: p.grad.clone() for name, p in model.named_parameters()}

    ours = outcome()
    never_pack(monkeypatch)
    torch.testing.assert_close(ours, outcome(), rtol=1e-5, atol=1e-6)


def test_padding_is_never_sampled():
    model, sample = build(), batch()
    masked = sample["target"].ne(PAD)
    tempting = torch.full((4, V), -1e4)
    tempting[:, PAD] = 1e4
    assert not model.corrupt(sample["target"], masked, tempting)[masked].eq(PAD).any()


def test_sampling_follows_the_distribution():
    torch.manual_seed(0)
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    drawn = sample_gumbel((probs.log() + 3).expand(40000, 4))
    share = torch.bincount(drawn, minlength=4) / 40000
    torch.testing.assert_close(share, probs, rtol=0, atol=0.01)  # 4 standard deviations


def test_the_generator_gets_no_gradient_from_the_discriminator():
    model, sample = build().eval(), batch()  # no dropout; both networks read the tied tables, so look at what is own
    masked = sample["target"].ne(PAD)
    original = torch.where(masked, sample["target"], sample["net_input"]["src_tokens"])
    (lm_logits, logits), _ = model(**sample["net_input"], masked_tokens=masked, original=original)
    logits.sum().backward(retain_graph=True)
    own = {name: p for name, p in model.named_parameters() if name.startswith("generator.")}
    assert own and all(p.grad is None for p in own.values())
    assert model.discriminator.out.weight.grad.any()
    lm_logits.square().sum().backward()
    assert all(p.grad is not None for p in own.values())


def test_the_loss_is_what_the_paper_says():
    model, sample = build().eval(), batch()
    torch.manual_seed(3)
    loss, size, logs = criterion()(model, sample)
    masked = sample["target"].ne(PAD)
    original = torch.where(masked, sample["target"], sample["net_input"]["src_tokens"])
    torch.manual_seed(3)
    (lm_logits, logits), extra = model(**sample["net_input"], masked_tokens=masked, original=original)
    lm = -lm_logits.log_softmax(1)[torch.arange(4), original[masked]].mean()
    p = torch.sigmoid(logits)
    each = -torch.where(extra["replaced"], p, 1 - p).log()
    detection = each[original.ne(PAD)].mean()  # all real tokens, masked or not
    torch.testing.assert_close(loss / size, lm + 50 * detection)
    assert logs["n_replaced"] == extra["replaced"].sum()


def test_special_tokens_are_never_masked_nor_replaced():
    """Wherever the task masks them, with <mask> or another token in their place."""
    model, sample = build(), batch()
    tokens, target = sample["net_input"]["src_tokens"], sample["target"]
    target[0, 0], tokens[0, 0] = 0, MASK  # <s>
    target[0, 9], tokens[0, 9] = 2, 7  # </s>
    target[1, 0] = 0  # chosen, but left as it is
    reads = []
    forward = model.forward
    model.forward = lambda **inputs: reads.append(inputs) or forward(**inputs)
    _, size, _ = criterion()(model, sample)
    assert size == 4 and reads[0]["src_tokens"][[0, 0, 1], [0, 9, 0]].tolist() == [0, 2, 0]
    assert [places.tolist() for places in reads[0]["masked_tokens"]] == [[0, 0, 0, 1], [2, 5, 6, 3]]
    assert tokens[0, 0] == MASK  # the batch itself stays as it was


def test_fine_tuning_keeps_the_discriminator_alone():
    model = build()
    state = copy.deepcopy(model.state_dict())
    small = build(pretraining=False)
    small.register_classification_head("cola", 2)
    small.load_state_dict(state, strict=True, model_cfg=small.cfg)
    assert {name.split(".")[0] for name, _ in small.named_parameters()} == {"encoder", "classification_heads"}
    tokens = batch()["net_input"]["src_tokens"]
    expected, _ = model.eval()(tokens, features_only=True)
    torch.testing.assert_close(small.eval()(tokens, features_only=True)[0], expected, rtol=0, atol=0)
    assert small(tokens, classification_head_name="cola")[0].shape == (2, 2)


def test_another_criterion_is_refused():
    with pytest.raises(ValueError, match="criterion electra"):
        build()(batch()["net_input"]["src_tokens"], masked_tokens=batch()["target"].ne(PAD))


# ---- through fairseq-train ----


def arguments(data, save_dir, *more):
    overrides = ["model._name=electra_tupe_r_tiny", "dataset.batch_size=4", "optimization.update_freq=[1]"]
    tiny = ["--tokens-per-sample=24", "--lr=[0.001]", "--warmup-updates=2", "--log-interval=1", "--max-update=12"]
    words = [str(data), f"--user-dir={PLUGIN}", f"--save-dir={save_dir}", *tiny, *more]
    return fairseq_arguments("pretrain_electra", overrides, words, cuda=False)


@pytest.mark.thorough
def test_the_discriminator_is_fine_tuned_on_glue(learnable, vocabulary, tmp_path):
    """As any checkpoint is."""
    train(arguments(vocabulary, tmp_path / "electra", "--max-update=2"))
    checkpoint = tmp_path / "electra" / "checkpoint_last.pt"
    finetune(
        learnable, checkpoint, tmp_path / "cola", "glue=cola", "optimization.max_epoch=1", "optimization.lr=[1e-9]"
    )
    run = read(tmp_path / "cola")
    assert run.task == "CoLA" and run.architecture == "electra_tupe_r_tiny" and run.pretrained_updates == 2
    for start in (checkpoint, tmp_path / "electra"):  # the file, and what the finished run published beside it
        assert settle(read_recipe("finetune", [], fixed={
            "checkpoint.finetune_from_model": start, "task.glue_task": "CoLA",
        })).architecture == "electra_tupe_r_tiny"  # fmt: skip
    finetune(learnable, tmp_path / "electra", tmp_path / "folder", "glue=cola", "optimization.max_epoch=1")
    assert read(tmp_path / "folder").architecture == "electra_tupe_r_tiny"
    with pytest.raises(ValueError, match="is an ELECTRA, no masked language model; valid: the folder"):
        settle(read_recipe("pretrain_further", [f"--finetune-from-model={checkpoint}"]))
    before, after = (load(path)["model"] for path in (checkpoint, tmp_path / "cola" / "checkpoint_last.pt"))
    kept = {key for key in before if not key.startswith(("generator.", "discriminator."))}
    heads = {key for key in after if key.startswith("classification_heads.sentence_classification_head.")}
    assert len(heads) == 4 and after.keys() == kept | heads
    recipe = settle(read_recipe("finetune", [], fixed={
        "checkpoint.finetune_from_model": checkpoint, "task.glue_task": "CoLA",
    }))  # fmt: skip
    theirs = {key.rpartition("head.")[2]: after[key] for key in heads}
    torch.testing.assert_close(theirs, dict(new_model(recipe, "CoLA").classifier.state_dict()), rtol=0, atol=1e-6)
    for key in kept:  # with next to no learning rate it still is the discriminator
        torch.testing.assert_close(after[key], before[key], rtol=0, atol=1e-6)


def write_manual(folder):
    """Python's reference manual, letter by letter, as a data folder; every tenth topic is held out."""
    folder.mkdir()
    letters = "_abcdefghijklmnopqrstuvwxyz"
    (folder / "dict.txt").write_text("".join(f"{letter} 1\n" for letter in letters))
    texts = [re.sub(r"[^a-z]+", "_", topics[name].lower()) for name in sorted(topics)]
    items = [[*(4 + letters.index(letter) for letter in text), 2] for text in texts]
    write_split(folder / "valid", items[::10], 4 + len(letters))
    write_split(folder / "train", [item for number, item in enumerate(items) if number % 10], 4 + len(letters))
    return folder


@pytest.mark.slow
def test_the_discriminator_learns_on_real_text(tmp_path):
    """On held-out text its loss is below the entropy of the share of tokens that are replaced, which is the loss of the
    best constant probability. That share is a ninth: a probability is rarely above a half, so accuracies say little.
    """
    data = write_manual(tmp_path / "data")
    short = ["--tokens-per-sample=12", "dataset.batch_size=64", "--dropout=0"]
    rate = ["--lr=[0.0005]", "--warmup-updates=50", "--total-num-update=1500"]
    every = ["--max-update=800", "--validate-interval-updates=800", "--validate-interval=1000"]
    train(arguments(data, tmp_path / "run", *short, *rate, *every, "--attention-dropout=0", "--max-valid-steps=40"))
    (scores,) = read(tmp_path / "run").scores
    share = scores["replaced"]
    entropy = -share * math.log2(share) - (1 - share) * math.log2(1 - share)
    assert 0.05 < share < 0.15 and scores["disc_loss"] < 0.97 * entropy
