"""The benchmarks on real lengths: what they draw, that contenders compute what they are said to, and the commands."""

import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from fairseq.data import data_utils

from tupe.bench import padding
from tupe.bench.contenders import Setting
from tupe.bench.turns import compared

SIZES = np.array([4, 9, 30])
TINY = Setting("tiny", vocab=60)


def test_texts(learnable):
    pairs = [data_utils.load_indexed_dataset(str(learnable / "MNLI" / f"input{i}" / "train")) for i in (0, 1)]
    expected = [len(a) + len(b) + 2 for a, b in zip(*pairs, strict=True)]  # each ends in </s>; <s> and a second </s>
    texts = padding.texts(learnable, "mnli", "train")
    assert texts.sizes.tolist() == expected
    assert padding.count_pieces(texts) == len({0, 2}.union(*(text.tolist() for part in pairs for text in part)))
    with pytest.raises(ValueError, match="holds no RTE; `tupe prepare glue` writes it"):
        padding.texts(learnable, "RTE", "train")


def test_batches():
    first, second = padding.batches(SIZES, 40, 32, 2, vocab=50, device="cpu", seed=1)
    assert first.tokens.shape != second.tokens.shape or not torch.equal(first.tokens, second.tokens)
    for batch in (first, second):
        assert set(batch.real.sum(1).tolist()) <= set(SIZES) and batch.tokens.size(1) == batch.real.sum(1).max()
        assert torch.equal(batch.tokens.ne(padding.PAD), batch.real) and batch.count == batch.real.sum()
        assert batch.tokens.max() < 40 and (batch.tokens[:, 0] == 0).all()
    (repeated, _) = padding.batches(SIZES, 40, 32, 2, vocab=50, device="cpu", seed=1)
    assert torch.equal(repeated.tokens, first.tokens)


@pytest.mark.parametrize("name", [name for name in padding.CONTENDERS if name != "ours-even"])
def test_contenders_ignore_padding(name):
    if name not in ("ours", "ours-padded", "fairseq"):
        transformers = pytest.importorskip("transformers")
        if name == "modernbert" and not hasattr(transformers, "ModernBertConfig"):
            with pytest.raises(ValueError, match=r"needs transformers 4\.48"):
                padding.build(name, TINY)
            return
    (batch,) = padding.batches(SIZES, 60, 3, 1, vocab=60, device="cpu", seed=2)
    model, logits = padding.build(name, TINY)
    padding.inference_step(model, logits)
    with torch.no_grad():
        whole = logits(batch)
        row = int(batch.real.sum(1).argmin())
        count = int(batch.real[row].sum())
        alone = padding.Batch(batch.tokens[[row], :count], batch.real[[row], :count], count, batch.labels[[row]])
        assert whole.shape == (3, 2)
        torch.testing.assert_close(logits(alone)[0], whole[row], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["ours", "fairseq"])
def test_backward_passes_are_outside_of_autocast(name):
    (batch,) = padding.batches(SIZES, 60, 3, 1, vocab=60, device="cpu", seed=2)
    model, logits = padding.build(name, TINY)
    half = {}

    def noted(batch):
        half["forward"] = torch.is_autocast_enabled("cpu")
        out = logits(batch)
        out.register_hook(lambda grad: half.update(backward=torch.is_autocast_enabled("cpu")))
        return out

    padding.on_batches(padding.training_step(model, noted), [batch], "bf16", "cpu")(0)
    assert half == {"forward": True, "backward": False}


def test_which_of_ours_packs():
    (batch,) = padding.batches(SIZES, 60, 8, 1, vocab=60, device="cpu", seed=2)
    rows = {}
    for name in ("ours", "ours-padded"):
        model, logits = padding.build(name, TINY)
        model.encoder.layers[0].fc1.register_forward_hook(
            lambda module, args, out, name=name: rows.update({name: args[0].shape[:-1].numel()})
        )
        logits(batch)
    assert rows["ours-padded"] == batch.tokens.numel() and batch.count <= rows["ours"] < 1.07 * batch.count


def test_even_texts_are_the_same_tokens():
    (batch,) = padding.batches(SIZES, 60, 8, 1, vocab=60, device="cpu", seed=2)
    texts = padding.even(batch)
    assert texts.count == texts.tokens.numel() and batch.count - 8 < texts.count <= batch.count and texts.real.all()
    assert texts.tokens.flatten().tolist() == batch.tokens[batch.real].tolist()[: texts.count]
    _, logits = padding.build("ours-even", TINY)
    assert logits(batch).shape == (8, 2)


def test_a_table_has_the_first_contenders_speed_over_each():
    batches = list(padding.batches(SIZES, 60, 4, 3, vocab=60, device="cpu", seed=1))
    setting = {"setting": "tiny", "size": "tiny", "task": "CoLA", "batch": 4, "precision": "float32"}
    times = {"ours": [1.0, 2.0, 4.0], "hf": [3.0, 4.0, 40.0]}
    steps = {name: lambda turn, seconds=seconds: [seconds[turn - 1]] for name, seconds in times.items()}
    rows = [{**row, **padding.quantities(row, batches)} for row in compared(steps, 3, setting)]
    ours, hf = rows
    assert ours["texts_per_s"] == 12 / 7 and hf["tokens_per_s"] == sum(batch.count for batch in batches) / 47
    assert ours["padding"] == 1 - sum(batch.count for batch in batches) / sum(b.tokens.numel() for b in batches)
    first, second = padding.table(rows).markdown().splitlines()[2:]
    assert first.endswith("| 1.00 |") and second.endswith("| 3.00 |")  # of 3, 2, 10


@pytest.mark.parametrize("command", [padding.finetune, padding.inference], ids=["finetune", "inference"])
def test_command(command, learnable, tmp_path):
    words = [f"--data={learnable}", "--tasks=CoLA", "--sizes=tiny", "--vocab-size=100", "--turns=1", "--batch=4"]
    words += ["--contenders=ours,fairseq", "--precision=float32,bf16", f"--output={tmp_path}/out"]
    result = CliRunner().invoke(command, words)
    assert result.exit_code == 0, result.output
    content = json.loads((tmp_path / "out.json").read_text())
    assert [(row["contender"], row["precision"]) for row in content["rows"]] == [
        ("ours", "float32"), ("fairseq", "float32"), ("ours", "bf16"), ("fairseq", "bf16"),
    ]  # fmt: skip
    assert (tmp_path / "out.png").stat().st_size > 1000
    assert (tmp_path / "out.md").read_text() in result.output and "| tiny | CoLA | 4 |" in result.output
