"""What inductor makes of a training step for an H100, on a machine without one: counted, not run.

`test_compiled_step.py` runs this file, with fake_cuda.cpp compiled to argv[1], in a process of its own. argv[2] is the
position encoding, argv[3] the number of tokens that are padding. Prints, as JSON, how often each graph of Dynamo's ran,
its fused kernels and their bytes.
"""

import contextlib
import ctypes
import json
import os
import sys
from types import SimpleNamespace

ctypes.CDLL(sys.argv[1])  # before torch
import torch  # noqa: E402
import torch._dynamo.device_interface  # noqa: E402
import torch._functorch.aot_autograd  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import torch.utils._triton  # noqa: E402
import triton  # noqa: E402
from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

aten = torch.ops.aten
CARD = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132, total_memory=80 * 2**30, warp_size=32,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
    shared_memory_per_block=49152, shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 * 2**20, gcnArchName="",
)  # fmt: skip


def answering(answer):
    return lambda *args, **options: answer


def pretend() -> None:
    """Make torch, Dynamo, inductor and Triton believe in a card of compute capability 9.0. Triton only compiles."""
    torch.cuda.amp.common.amp_definitely_not_available = answering(False)  # else autocast("cuda") switches itself off
    torch.version.cuda = "12.9"
    torch._C._cuda_getCurrentRawStream = answering(0)
    for name, answer in {
        "is_available": True, "get_device_properties": CARD, "get_device_capability": (9, 0), "current_device": 0,
        "device_count": 1, "synchronize": None, "_lazy_init": None, "is_bf16_supported": True,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8), "set_rng_state": None,
    }.items():  # fmt: skip
        setattr(torch.cuda, name, answering(answer))
    shared = {"max_shared_mem": 232448, "multiprocessor_count": 132}
    driver = {
        "get_current_target": GPUTarget("cuda", 90, 32), "get_current_device": 0, "get_benchmarker": None,
        "get_active_torch_device": torch.device("cuda", 0), "get_device_interface": torch.cuda, "is_active": True,
    }  # fmt: skip
    answers = {name: answering(answer) for name, answer in driver.items()}
    utils = SimpleNamespace(get_device_properties=answering(shared))
    triton.runtime.driver.set_active(SimpleNamespace(utils=utils, **answers))
    torch.utils._triton.has_triton = torch.utils._triton.has_triton_package = answering(True)
    interface = torch._dynamo.device_interface.CudaInterface
    for owner, name, answer in [
        (interface, "is_available", True), (interface, "get_compute_capability", 90), (interface, "device_count", 1),
        (interface, "current_device", 0), (interface, "get_device_properties", CARD),
        (interface, "raise_if_triton_unavailable", None), (interface, "is_triton_capable", True),
        (interface.Worker, "get_device_properties", CARD), (interface.Worker, "current_device", 0),
    ]:  # fmt: skip
        setattr(owner, name, staticmethod(answering(answer)))
    for module in (torch._dynamo.utils, torch._dynamo.convert_frame, torch._functorch.aot_autograd):
        module.preserve_rng_state = contextlib.nullcontext  # they would ask the card


pretend()
import torch._inductor.fx_passes.fuse_attention  # noqa: E402
import torch._inductor.fx_passes.misc_patterns  # noqa: E402
import torch._inductor.fx_passes.pad_mm  # noqa: E402
from torch._dynamo.backends.common import aot_autograd  # noqa: E402
from torch._functorch.aot_autograd import make_boxed_func  # noqa: E402
from torch._functorch.partitioners import min_cut_rematerialization_partition  # noqa: E402
from torch._guards import detect_fake_mode  # noqa: E402
from torch._inductor import config  # noqa: E402
from torch._inductor.compile_fx import (  # noqa: E402
    _recursive_post_grad_passes,
    select_decomp_table,
    view_to_reshape,
)
from torch._inductor.debug import DebugContext  # noqa: E402
from torch._inductor.fx_passes import joint_graph  # noqa: E402
from torch._inductor.graph import GraphLowering  # noqa: E402
from torch._inductor.virtualized import V  # noqa: E402

from tupe.encoder import Encoder, LMHead  # noqa: E402

config.compile_threads, config.joint_graph_constant_folding = 1, False
inductor = torch._inductor.fx_passes  # searches that would run a kernel are left out
inductor.fuse_attention._sfdp_init = inductor.pad_mm._pad_mm_init = answering(None)
inductor.misc_patterns._misc_patterns_init = answering(None)


def attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """In place of `F.scaled_dot_product_attention`: the card's memory-efficient kernel."""
    q, k, v, bias = (x.to(torch.bfloat16) for x in (q, k, v, attn_mask))
    bias = bias.expand(*q.shape[:3], k.size(2))
    return aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, dropout_p, False, scale=scale)[0]


def lowering(phase: str, made: list):
    """A compiler that notes a graph's fused kernels, their bytes and its calls in `made`, and runs it as it is."""

    def compile(graph, inputs):
        with V.set_fake_mode(detect_fake_mode(inputs)):
            view_to_reshape(graph)
            _recursive_post_grad_passes(graph, is_inference=False)
        lowered = GraphLowering(graph, example_inputs=inputs, is_backward=phase == "backward")
        lowered.freeze_runtime_asserts()
        handlers = V.set_debug_handler(DebugContext()), V.set_fake_mode(detect_fake_mode(inputs))
        with handlers[0], handlers[1], V.set_graph_handler(lowered), V.set_extern_kernel_nodes([]):
            lowered.run(*inputs)
            lowered.codegen()
            fused = [node.get_read_write_buffers_sizes() for node in lowered.scheduler.nodes if not node.is_extern()]
        one = {"phase": phase, "fused": len(fused), "bytes": sum(fused), "calls": 0}
        made.append(one)

        def call(*args):
            one["calls"] += 1
            return graph.forward(*args)

        return make_boxed_func(call)

    return compile


def partition(graph, inputs, **options):
    with V.set_fake_mode(detect_fake_mode(inputs)):
        joint_graph.joint_graph_passes(graph)
    return min_cut_rematerialization_partition(graph, inputs, compiler="inductor", **options)


def to_card(model: nn.Module, mode: FakeTensorMode) -> None:
    """Replace all parameters and buffers by fake ones on the card."""
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, x in table.items():
                if x is not None:
                    with mode:
                        fake = mode.from_tensor(x.detach()).to("cuda")
                    table[name] = nn.Parameter(fake) if isinstance(x, nn.Parameter) else fake


def main(position: str, padding: int) -> None:
    """A step of base size on 32 x 512 tokens, in bf16 autocast, of which 2,458 are predicted."""
    batch, length, masked, made = 32, 512, 2458, []
    options = {"position": position, "cls": "auto", "attention": "sdpa", "max_positions": length}
    encoder, head = Encoder(32768, 1, **options).train(), LMHead(768, 32768).train()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    to_card(encoder, mode), to_card(head, mode)
    backend = aot_autograd(
        fw_compiler=lowering("forward", made), bw_compiler=lowering("backward", made), partition_fn=partition,
        decompositions=select_decomp_table,
    )  # fmt: skip
    encoder.compile(backend=backend, fullgraph=True)
    head.compile(backend=backend, fullgraph=True, dynamic=False)
    F.scaled_dot_product_attention = attention
    with mode:
        tokens = torch.full((batch, length), 5, device="cuda")
        indices, targets = (torch.zeros(masked, dtype=torch.long, device="cuda") for _ in range(2))
        with torch.autocast("cuda", torch.bfloat16):
            indices, targets = encoder.pad_outputs(indices, targets)
            x, _ = encoder(tokens, num_tokens=tokens.numel() - padding, output_indices=indices)
            loss = head(x, encoder.tokens.weight, targets)
        loss.backward()
    print(json.dumps(made), flush=True)
    os._exit(0)  # autograd's thread of a device that is none would abort the process


if __name__ == "__main__":
    main(sys.argv[2], int(sys.argv[3]))
