"""`masked_lm_chunked` against fairseq's `masked_lm`, and the model options that only change how fast numbers come."""

from types import SimpleNamespace

import pytest
import torch
from fairseq.criterions import CRITERION_REGISTRY
from fairseq.criterions.masked_lm import MaskedLmLoss
from fairseq.data import Dictionary
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY
from helpers import Waits

from tupe.data.glue import TASKS
from tupe.plugin.classification import GlueCriterion
from tupe.plugin.masked_lm import ChunkedMaskedLmLoss

DICTIONARY = Dictionary()
for i in range(50):
    DICTIONARY.add_symbol(f"w{i}")
TASK = SimpleNamespace(source_dictionary=DICTIONARY, target_dictionary=DICTIONARY)


def model(**options):
    torch.manual_seed(0)
    settings = {"max_positions": 16, "dropout": 0.0, "attention_dropout": 0.0, **options}
    config = MODEL_DATACLASS_REGISTRY["tupe_r_tiny"](**settings)
    return ARCH_MODEL_REGISTRY["tupe_r_tiny"].build_model(config, TASK)


def sample(masked, padding=0):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(4, len(DICTIONARY), (3, 16), generator=generator)
    tokens[0, 16 - padding :] = DICTIONARY.pad()
    target = torch.full_like(tokens, DICTIONARY.pad())
    places = torch.rand(tokens.shape, generator=generator) < masked
    target[places & tokens.ne(DICTIONARY.pad())] = 7
    return {
        "net_input": {"src_tokens": tokens, "src_lengths": torch.full((3,), 16)},
        "target": target,
        "ntokens": int(tokens.ne(DICTIONARY.pad()).sum()),
        "nsentences": 3,
    }


def run(name, batch, **options):
    net = model(**options)
    criterion = CRITERION_REGISTRY[name](SimpleNamespace(tpu=False), TASK)
    loss, size, log = criterion(net, batch)
    loss.backward()
    return loss.detach(), size, log, {k: p.grad for k, p in net.named_parameters()}


@pytest.mark.parametrize(
    "masked, padding, options",
    [(0.3, 5, {}), (1.0, 0, {}), (0.0, 0, {}), (0.3, 5, {"checkpoint_activations": True})],
    ids=str,
)
def test_same_numbers_as_masked_lm(masked, padding, options):
    batch = sample(masked, padding)
    assert issubclass(CRITERION_REGISTRY["masked_lm_chunked"], MaskedLmLoss)
    loss, size, log, gradients = run("masked_lm_chunked", batch, **options)
    expected, expected_size, expected_log, expected_gradients = run("masked_lm", batch, attention="plain")
    torch.testing.assert_close(loss, expected)
    assert size == expected_size and log.keys() == expected_log.keys()
    assert masked == 0 or expected > 0
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.thorough
def test_compiled_layers_have_the_same_losses_and_few_graphs(monkeypatch):
    """Graphs are made for the first layers, the last one, and head with loss, of each length in steps of 64, with and
    without padding; the last layer computes what is read alone, as without compilation."""
    whole = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **o: whole(module, backend="eager", **o))
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    options = {"encoder_layers": 4, "max_positions": 160, "attention": "sdpa"}
    compiled, plain = model(compile="yes", **options), model(**options)
    assert compiled.state_dict().keys() == plain.state_dict().keys()
    graphs = []
    for length, masked in [(48, 20), (64, 9), (33, 2), (100, 50), (128, 60), (130, 40), (160, 0), (70, 7), (64, 64)]:
        generator = torch.Generator().manual_seed(length)
        batch = sample(0.0)
        tokens = torch.randint(4, len(DICTIONARY), (3, length), generator=generator)
        target = torch.full_like(tokens, DICTIONARY.pad())
        target[1:, :masked] = 7
        batch |= {"net_input": {"src_tokens": tokens}, "target": target, "ntokens": tokens.numel()}
        losses = [ChunkedMaskedLmLoss(SimpleNamespace(tpu=False), TASK)(net, batch) for net in (compiled, plain)]
        torch.testing.assert_close(losses[0][0], losses[1][0])
        assert losses[0][1] == losses[1][1] == 2 * masked
        [loss.backward() for loss, _, _ in losses]
        graphs.append(counters["stats"]["unique_graphs"])
    for (name, p), q in zip(compiled.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    # Padded to 64, and 64 itself; 64 again; padded to 128, and 128 itself; padded to the model's 160, and these.
    # Without outputs to predict, the last layer and the head are compiled once more.
    assert graphs[:5] == [3, 5, 5, 7, 9] and graphs[-1] == graphs[-2] == graphs[-3]
    assert not counters["graph_break"]


def gradients_of_one_process(rank, folder, options):
    """With PyTorch's DDP, as recipes have it on GPUs, and two steps in an update, the first without communication."""
    torch.set_num_threads(1)
    # A file outlives the process that ends first, which a server in it does not.
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    net = model(**options)
    ddp = torch.nn.parallel.DistributedDataParallel(net)
    criterion = ChunkedMaskedLmLoss(SimpleNamespace(tpu=False), TASK)
    with ddp.no_sync():
        criterion(ddp, sample(0.3, padding=rank))[0].backward()
    criterion(ddp, sample(0.5, padding=3 + rank))[0].backward()
    torch.save({name: p.grad for name, p in net.named_parameters()}, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.thorough
def test_two_processes_under_pytorchs_ddp(tmp_path):
    options = {"attention": "sdpa", "checkpoint_activations": True}
    # Not copies of this process, whose compiler has threads: one of them may hold what a copy waits for.
    way = {"nprocs": 2, "start_method": "forkserver"}
    torch.multiprocessing.start_processes(gradients_of_one_process, (tmp_path, options), **way)
    net, criterion = model(**options), ChunkedMaskedLmLoss(SimpleNamespace(tpu=False), TASK)
    for batch in [sample(0.3, padding) for padding in (0, 1)] + [sample(0.5, padding) for padding in (3, 4)]:
        criterion(net, batch)[0].backward()
    for rank in (0, 1):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        for name, p in net.named_parameters():
            torch.testing.assert_close(2 * found[name], p.grad, rtol=1e-4, atol=1e-5 * float(p.grad.abs().max()))


def test_a_step_waits_once():
    """Forward and backward on a GPU's path wait for one number: how many tokens are masked."""
    net, batch = model(attention="sdpa"), sample(0.3, 5)
    criterion = ChunkedMaskedLmLoss(type("cfg", (), {"tpu": False})(), TASK)
    with Waits() as waits:
        criterion(net, batch)[0].backward()
    assert waits.operations == ["aten.nonzero.default"]


def test_fine_tuning_waits_for_nothing():
    net, batch = model(attention="sdpa"), sample(0.3, 5)
    net.register_classification_head("head", num_classes=2)
    with Waits() as waits:
        glue = GlueCriterion(SimpleNamespace(glue=TASKS["MRPC"], cfg=SimpleNamespace(classification_head_name="head")))
        glue(net, {**batch, "target": torch.ones(3, dtype=torch.long)})[0].backward()
    assert waits.operations == []
