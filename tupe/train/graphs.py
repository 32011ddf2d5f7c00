"""A training pass as a CUDA graph: the host launches one graph in place of some hundred kernels."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Passes = Callable[[dict[str, Any], Tensor], Tensor]


class Graphs:
    """`passes`, the forward and backward pass of a batch, recorded once for each of its shapes and then replayed.

    passes: (inputs, count [] by which the loss is divided) -> [], the sum of losses. It adds to the gradients of the
    model, which stay where they are from now on: `zero_grad(set_to_none=False)` clears them. It does not wait for the
    GPU. What it draws, a replay draws from the same generator.
    """

    def __init__(self, passes: Passes, model: nn.Module):
        self.passes, self.parameters = passes, list(model.parameters())
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        self.recorded: dict[tuple, tuple[dict[str, Any], torch.cuda.CUDAGraph, Tensor]] = {}

    def __call__(self, inputs: dict[str, Any], count: Tensor) -> Tensor:
        inputs = {**inputs, "count": count}
        shapes = tuple(value.shape if torch.is_tensor(value) else value for value in inputs.values())
        if shapes not in self.recorded:
            self.recorded[shapes] = self.record(inputs)
        own, graph, total = self.recorded[shapes]
        for name, value in inputs.items():
            if torch.is_tensor(value):
                own[name].copy_(value)
        graph.replay()
        return total.clone()

    def record(self, inputs: dict[str, Any]) -> tuple[dict[str, Any], torch.cuda.CUDAGraph, Tensor]:
        """(the inputs that a graph reads, the graph, the sum of the losses that it writes)."""
        own = {name: value.clone() if torch.is_tensor(value) else value for name, value in inputs.items()}
        batch = {name: value for name, value in own.items() if name != "count"}
        gradients = [parameter.grad for parameter in self.parameters]
        before = [gradient.clone() for gradient in gradients]
        memory = next((graph.pool() for _, graph, _ in self.recorded.values()), None)  # one graph runs at a time
        with torch.random.fork_rng([own["count"].device] if own["count"].is_cuda else []):
            graph, total = capture(lambda: self.passes(batch, own["count"]), memory)
        torch._foreach_copy_(gradients, before)  # the passes ran, and added to them
        return own, graph, total


def capture(function: Callable[[], Any], memory: Any = None) -> tuple[torch.cuda.CUDAGraph, Any]:
    """(a CUDA graph of the function, the result that each replay writes anew). The function runs three times before, so
    that nothing is compiled, measured or allocated for the first time in the recording. memory: of another graph, to be
    shared with it."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    # a thread of the data loader may call CUDA meanwhile, to pin memory
    with torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):
        result = function()
    return graph, result
