"""Replayed passes compute what the passes do; here without a card, whose graphs are played by the passes themselves."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from tupe import tracing
from tupe.common.recipes import read
from tupe.data.splits import read_symbols
from tupe.encoder import Stack
from tupe.packing import NO_PADDING, Packing
from tupe.schemes import SCHEMES
from tupe.train import graphs, pretrain
from tupe.train.loop import Place
from tupe.train.saved import newest
from tupe.train.settle import settle


class Played:
    """In place of a CUDA graph: reads the tensors of its recording, and writes its result where that lay."""

    def __init__(self, function, recorded):
        for _ in range(3):
            function()
        self.function, self.result, self.memory = function, function(), object()
        recorded.append(self)

    def replay(self):
        self.result.copy_(self.function())

    def pool(self):
        return self.memory


@pytest.fixture
def recorded(monkeypatch):
    """The graphs that were recorded, in order, and the memory that each was given."""
    made, memories = [], []

    def capture(function, memory=None):
        memories.append(memory)
        graph = Played(function, made)
        return graph, graph.result

    monkeypatch.setattr(graphs, "capture", capture)
    whole = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **o: whole(module, backend="eager", **o))
    torch._dynamo.reset()

    def as_on_a_gpu(self, tokens, num_tokens):
        return NO_PADDING if num_tokens == tokens.numel() else Packing(tokens.ne(self.pad))

    monkeypatch.setattr(Stack, "packing", as_on_a_gpu)  # a CPU counts the tokens
    return SimpleNamespace(graphs=made, memories=memories)


def losses(data, folder, *words, updates=8, checkpoint=(0, None)):
    """[(loss, gradient norm)] of every update, by the loop in this process; the loop. checkpoint: (updates, folder) of
    one to go on from."""
    words = ["--arch=tupe_r_tiny", "--tokens-per-sample=24", "--lr=0.01", "--warmup-updates=2", "--log-interval=1",
             "--batch-size=4", "--max-update=8", "--num-workers=0", "--attention=sdpa", *words]  # fmt: skip
    recipe = settle(read("pretrain", words), gpus=1)
    run = SimpleNamespace(writes=False, reach=id, progress=SimpleNamespace(**dict.fromkeys(
        ("begin", "passed", "move", "spoke"), lambda *args: None), time_left=id))  # fmt: skip
    symbols = read_symbols(data)
    loop = pretrain.Pretraining(recipe, str(data), symbols, run, Place(torch.device("cpu")), updates, checkpoint[0])
    loop.due = lambda: (True, False, False)
    loop.train(checkpoint[1])
    return [(entry["loss"], entry["grad_norm"]) for entry in loop.log], loop


@pytest.mark.thorough
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_training_by_graphs_is_training(precision, data, tmp_path, recorded):
    """Losses, gradients and weights of updates of two batches, each in its shape; a shape is recorded once."""
    words = [f"--precision={precision}", "--update-freq=2", "--dropout=0", "--attention-dropout=0"]
    plain, loop = losses(data, tmp_path, "--compile=no", *words)
    ours, graphed = losses(data, tmp_path, "--compile=graphs", *words)
    near, apart = (1e-5, 1e-4) if precision == "float32" else (2e-2, 2e-2)
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(plain), rtol=near, atol=0)
    for (name, p), q in zip(graphed.model.named_parameters(), loop.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=apart, msg=lambda m, n=name: f"{n}: {m}")
    shapes = list(graphed.graphs.recorded)
    assert len(recorded.graphs) == len(shapes) == 3  # full batches, the last one of an epoch, one that fills an update
    assert recorded.memories == [None] + [recorded.graphs[0].memory] * (len(shapes) - 1)


def test_an_encoding_that_changes_with_the_updates_is_refused(data, tmp_path, monkeypatch, recorded):
    monkeypatch.setattr(SCHEMES["untied"], "set_num_updates", lambda self, updates: None, raising=False)
    with pytest.raises(ValueError, match="--compile graphs: Untied changes with the updates"):
        losses(data, tmp_path, "--compile=graphs")


def test_a_run_by_graphs_goes_on(data, tmp_path, recorded):
    """From a checkpoint, with the optimizer's state: gradients that are there before it is loaded would hide it."""
    words = ["--precision=float32", "--dropout=0", "--attention-dropout=0"]
    _, plain = losses(data, tmp_path, "--compile=no", *words, updates=4)
    plain.run.writes, plain.run.folder, plain.keeps = True, tmp_path, (1, -1)
    plain.save()
    whole, _ = losses(data, tmp_path, "--compile=no", *words)
    resumed, _ = losses(data, tmp_path, "--compile=graphs", *words, checkpoint=newest(tmp_path))
    torch.testing.assert_close(torch.tensor(resumed), torch.tensor(whole), rtol=1e-4, atol=0)


def test_draws_of_a_recording_do_not_count(recorded):
    """A run draws as if nothing had been recorded; and gradients are those of the replays alone."""
    model = torch.nn.Linear(3, 1)

    def passes(inputs, count):
        total = (model(inputs["x"]) * torch.rand(())).sum()
        (total / count).backward()
        return total.detach()

    torch.manual_seed(1)
    expected = [passes({"x": torch.full((2, 3), float(n))}, torch.tensor(2.0)) for n in range(3)]
    gradient = model.weight.grad.clone()
    replayed, x = graphs.Graphs(passes, model), torch.empty(2, 3)
    torch.manual_seed(1)
    for n, loss in enumerate(expected):
        x.fill_(n)  # a batch may be overwritten
        torch.testing.assert_close(replayed({"x": x}, torch.tensor(2.0)), loss)
    torch.testing.assert_close(model.weight.grad, gradient)
    assert len(recorded.graphs) == 1


def test_a_graph_is_recorded_after_a_warm_up(monkeypatch):
    calls = []

    @contextlib.contextmanager
    def recording(graph, pool, capture_error_mode):  # a data loader's thread may pin memory meanwhile
        assert capture_error_mode == "thread_local"
        calls.append("begin")
        yield
        calls.append("end")

    class Graph:
        def replay(self):
            calls.append("replay")

    class Stream:
        def wait_stream(self, other):
            pass

    for name, value in {"Stream": Stream, "CUDAGraph": Graph, "graph": recording, "current_stream": Stream,
                        "stream": lambda stream: contextlib.nullcontext()}.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    graph, result = graphs.capture(lambda: calls.append("call") or len(calls))
    graph.replay()
    assert calls == ["call"] * 3 + ["begin", "call", "end", "replay"] and result == 5


@pytest.mark.parametrize("processes, gpus, words", [(2, 2, ()), (1, 0, ()), (1, 1, ("--cpu",))])
def test_graphs_need_one_gpu(processes, gpus, words):
    with pytest.raises(ValueError, match="--compile graphs is for one GPU; valid here: auto, yes, no"):
        settle(read("pretrain", ["--compile=graphs", *words]), processes, gpus=gpus)


def test_what_auto_compiles(monkeypatch, caplog):
    """Masked LMs, where compiled code runs."""
    assert not tracing.can_compile(torch.device("cpu"))

    def broken(function):
        raise RuntimeError("no C compiler\nand more")

    monkeypatch.setattr(torch, "compile", broken)
    assert not tracing.can_compile(torch.device("cuda"))
    assert "layers are not compiled, which would be faster: RuntimeError: no C compiler" in caplog.text
