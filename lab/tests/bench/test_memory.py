"""The memory count against a real step on the CPU, and against what the Large recipe promises."""

import functools
import itertools
import shutil

import pytest
import torch
from click.testing import CliRunner
from helpers import CONFIGS, allocations, compose

from lab.bench import memory
from tupe import backend_cpu, cpu
from tupe.encoder import Encoder

GIB = 2**30


def measured_bytes(arch, batch, length, vocabulary, update_freq=1, compiled=False, **options):
    """{"activations": bytes, "peak": bytes} that PyTorch allocates in training on this CPU, beside weights and
    gradients, in single precision: at the end of a forward pass, and at the peak of `update_freq` accumulated steps."""
    model, tokens = memory.build(arch, batch, length, vocabulary, options)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    if compiled:
        model.encoder.attention_backend = "sdpa"
        model.encoder.compile()
        model.lm_head.compile(dynamic=False)
        memory.masked_loss(model, tokens, "float32", padded=False).backward()
    activations, levels = 0, [0]
    for _ in range(update_freq):
        loss, forward = allocations(lambda: memory.masked_loss(model, tokens, "float32", padded=False))
        activations = max(activations, levels[-1] + sum(forward))
        _, backward = allocations(loss.backward)
        levels += itertools.islice(itertools.accumulate([*forward, *backward], initial=levels[-1]), 1, None)
    return {"activations": activations, "peak": max(levels)}


@pytest.mark.parametrize(
    "arch, checkpoint_activations",
    [
        ("bert_a_tiny", True),
        pytest.param("tupe_r_tiny", False, marks=pytest.mark.thorough),
        pytest.param("modernbert_tiny", False, marks=pytest.mark.thorough),
        pytest.param("bert_a_tiny", False, marks=pytest.mark.slow),
        pytest.param("tupe_r_tiny", True, marks=pytest.mark.slow),
    ],
)
def test_the_count_against_the_allocator(arch, checkpoint_activations, monkeypatch):
    """A real step on this CPU: 8 layers, and a vocabulary that weighs as much as in the recipes."""
    monkeypatch.setattr(backend_cpu, "SAVE_WEIGHTS_UP_TO", 0)  # attention keeps no weights, as with long sequences
    monkeypatch.setattr(cpu, "ONEDNN", cpu.HAS_ONEDNN)  # on every CPU the same products
    options = {"encoder_layers": 8, "dropout": 0.0, "attention_dropout": 0.0}
    options["checkpoint_activations"] = checkpoint_activations
    counted = memory.step_bytes(arch, 4, 128, 2000, "float32", padded=False, **options)
    peak = counted["activations"] + counted["transient"]
    one, four = (measured_bytes(arch, 4, 128, 2000, update_freq, **options) for update_freq in (1, 4))
    # A GPU's kernel keeps its output in the last layer, too, where the CPU needs the masked tokens' rows alone.
    assert one["activations"] == pytest.approx(counted["activations"], rel=0.04)
    if arch == "bert_a_tiny":
        assert one["peak"] == pytest.approx(peak, rel=0.1)
    else:  # the CPU sums the bias's gradient over the sequences as it arises, which fused kernels do not
        assert 0.7 * peak < one["peak"] < 1.1 * peak
    assert four["peak"] == pytest.approx(one["peak"], rel=0.02)  # --update-freq takes no more memory
    twice = measured_bytes(arch, 8, 128, 2000, **options)
    assert twice["peak"] > 1.5 * one["peak"]  # ... than larger steps would


@pytest.mark.thorough
@pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a compiler")
def test_the_count_of_a_compiled_step_against_the_allocator():
    """Of the code that inductor makes for this CPU, without a bias, whose gradient PyTorch's fused attention for CPUs
    does not know."""
    step = "bert_a_tiny", 4, 128, 2000
    options = {"encoder_layers": 8, "dropout": 0.0, "attention_dropout": 0.0, "compiled": True}
    counted = memory.step_bytes(*step, "float32", padded=False, **options)
    measured = measured_bytes(*step, **options)
    torch._dynamo.reset()
    peak = counted["activations"] + counted["transient"]
    assert measured["activations"] == pytest.approx(counted["activations"], rel=0.01)
    assert measured["peak"] == pytest.approx(peak, rel=0.01)


@pytest.mark.parametrize("position", ["rope", "t5", "untied", "kerple", "shaw", "t5+window"])
def test_a_forward_pass_against_the_allocator(position, monkeypatch):
    """Exactly what PyTorch allocates for two layers, a block of queries at a time where the encoding allows it."""
    length, heads = 512, 2
    monkeypatch.setattr(backend_cpu, "BLOCKED_BIAS_FROM", length - 1)
    monkeypatch.setattr(backend_cpu, "QUERY_BLOCK_LOGITS", heads * length * 64)  # 64 queries at a time
    sizes = {"layers": 2, "width": 128, "heads": heads, "ffn": 512, "max_positions": length}
    model, tokens = Encoder(32768, 1, position=position, **sizes).eval(), torch.full((1, length), 4)
    with torch.no_grad():
        _, steps = allocations(lambda: model(tokens, num_tokens=length))
    weights = sum(p.nbytes for p in model.parameters())
    peak = weights + max(itertools.accumulate(steps))
    assert memory.forward_bytes(position, length, "tiny") == {"weights": weights, "peak": peak}


def test_growth():
    one, two = (memory.step_bytes("tupe_r_tiny", batch, 64, vocabulary=100) for batch in (4, 8))
    assert one["state"] == two["state"] == 20 * one["parameters"]
    single = memory.step_bytes("tupe_r_tiny", 4, 64, 100, "float32")
    assert single["state"] == 16 * one["parameters"] and single["activations"] > 1.6 * one["activations"]
    weights, autocast = (memory.step_bytes("tupe_r_tiny", 4, 64, 100, precision) for precision in ("bf16", "autocast"))
    assert weights == one  # half-precision weights, whichever half
    assert autocast["state"] == single["state"] and autocast["activations"] > 1.2 * one["activations"]
    assert two["activations"] < 2 * one["activations"] < 2.2 * two["activations"]  # all but the shared bias
    checkpointed = memory.step_bytes("tupe_r_tiny", 8, 64, vocabulary=100, checkpoint_activations=True)
    assert checkpointed["activations"] < two["activations"] / 3 and checkpointed["transient"] > two["transient"]
    padded, even = (memory.step_bytes("tupe_r_tiny", 8, 64, 100, padded=padded) for padded in (True, False))
    assert padded["activations"] - even["activations"] == pytest.approx(2 * 7 * 2 * 64 * 64, rel=0.02)  # the bias
    with pytest.raises(ValueError, match="unknown architecture 'tupe_x'"):
        memory.step_bytes("tupe_x", 1, 64)


@pytest.mark.thorough
def test_command():
    def run(*words):
        result = CliRunner().invoke(memory.command, words)
        return result, [[cell.strip() for cell in line.split("|")[1:-1]] for line in result.output.splitlines()]

    _, rows = run("--arch=tupe_r_tiny", "--length=64", "--cards=0.01,8")
    assert len(rows) == 2 + 21 and {row[-1] for row in rows[2:]} == {"8 GiB"}  # the allowance alone is more than 0.01
    _, rows = run("--positions=rope,t5", "--length=64")
    assert [row[0] for row in rows] == ["encoding", "---", "`rope`", "`t5`"]
    result, _ = run("--arch=tupe_x")
    assert result.exit_code == 2 and "unknown architecture 'tupe_x'" in result.output


@pytest.mark.thorough
def test_the_large_recipe_fits_the_cards_it_names():
    @functools.cache
    def total(batch, **options):
        sizes = memory.step_bytes("tupe_r_large", batch, 512, **options)
        return sum(sizes[part] for part in ("state", "activations", "transient")) / GIB

    recipe = compose("pretrain_large")
    assert recipe.dataset.batch_size * recipe.optimization.update_freq[0] == 256
    text = (CONFIGS / "pretrain_large.yaml").read_text()
    for batch, options in ((recipe.dataset.batch_size, {}), (32, {"checkpoint_activations": True})):
        assert f"{total(batch, **options):.1f} GiB" in text and total(batch, **options) < 16 - 1.5
    assert f"{total(32):.1f} GiB" in text and 16 < total(32) < 32 - 1.5
