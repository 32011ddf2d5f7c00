"""Forward and backward passes on fake CUDA tensors: shapes, dtypes, strides and devices as on a GPU, without data and
without a GPU. `test_gpu.py` runs this file, with fake_cuda.cpp compiled to argv[1], in a process of its own.

Prints a JSON object of {case: [what a GPU would refuse, wait for or compute slowly]}, one of {mutant: [the same of
one case with this mistake]}, one of {step: [bytes that `python -m lab bench memory` counts, bytes of the tensors]}, and
a list of (position, length, tokens of padding, what `flash` returns).
"""

import ctypes
import itertools
import json
import os
import sys
import traceback

LIBRARY, EVERY = sys.argv[1], sys.argv[2] == "every"
ctypes.CDLL(LIBRARY)  # before torch
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import yaml  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from helpers import line_of  # noqa: E402  isort: skip

from tupe import attention, backend_sdpa, encoder, packing, token_positions, windows  # noqa: E402
from tupe.common.architectures import OTHER_BLOCKS, preset  # noqa: E402
from tupe.common.options import CONFIGS  # noqa: E402
from tupe.encoder import Encoder, LMHead  # noqa: E402
from tupe.positions import CLS, SCHEMES  # noqa: E402

torch.cuda.amp.common.amp_definitely_not_available = lambda: False  # else autocast("cuda") switches itself off
torch.cuda.is_bf16_supported = lambda *options: True
torch.cuda.get_device_capability = lambda device: (9, 0)
aten = torch.ops.aten
WAITS = {
    aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default, aten.masked_select.default,
}  # fmt: skip
BY_INDEX = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}


class Transfers(TorchDispatchMode):
    """Notes what waits for the GPU (`item`, `bool`, `nonzero`, a mask as an index) and what mixes or copies between
    devices."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), options=None):
        options = options or {}
        tensors = [x for x in tree_leaves((args, options)) if isinstance(x, Tensor)]
        target = str(options.get("device", "")) if function is aten._to_copy.default else ""
        if any(x.is_cuda for x in tensors):
            by_mask = function in BY_INDEX and any(i is not None and i.dtype == torch.bool for i in args[1])
            mixed = any(x.device.type == "cpu" and x.dim() for x in tensors)
            if function in WAITS or by_mask or mixed or target == "cpu":
                self.found.append(f"{function} at {line_of(traceback.extract_stack())}")
        elif target.startswith("cuda"):
            self.found.append(f"a copy to the GPU at {line_of(traceback.extract_stack())}")
        return function(*args, **options)


class Kernels:
    """In place of `F.scaled_dot_product_attention`: what CUDA's kernels take (sdp_utils.cpp, preprocess_mask)."""

    def __init__(self):
        self.found = []

    def __call__(self, q, k, v, attn_mask=None, dropout_p=0.0, scale=None):
        if torch.is_autocast_enabled("cuda"):
            q, k, v = (x.to(torch.get_autocast_dtype("cuda")) for x in (q, k, v))
        if len({x.dtype for x in (q, k, v, q if attn_mask is None else attn_mask)}) > 1:
            self.found.append(f"bias and queries in {attn_mask.dtype}, {q.dtype}, {k.dtype}, {v.dtype}")
        if any(x.stride(-1) != 1 or x.size(-1) % 8 or x.storage_offset() % 8 for x in (q, k, v)):
            self.found.append("q, k or v: only the kernel that holds all weights takes them")
        if attn_mask is None and q.size(-1) == v.size(-1):  # others, as PoPE's, are not flash attention's
            return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, False, False, scale=scale)[0]
        if attn_mask is None:
            return aten._scaled_dot_product_efficient_attention(q, k, v, None, True, dropout_p, False, scale=scale)[0]
        *others, last = attn_mask.stride()
        if last != 1:
            self.found.append(
                f"a bias with strides {attn_mask.stride()}: only the kernel that holds all weights takes it"
            )
        elif any(stride % 8 for stride in others):
            self.found.append(f"a bias with strides {attn_mask.stride()}: every layer copies it")
        bias = attn_mask.contiguous().expand(*q.shape[:3], k.size(2))
        return aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, dropout_p, False, scale=scale)[0]


def to_fake_gpu(modules, mode, dtype):
    """Replace all parameters and buffers by fake ones on the GPU; tied ones stay tied. dtype: None, to keep theirs."""
    fakes = {}
    for module in (m for root in modules for m in root.modules()):
        for table in (module._parameters, module._buffers):
            for name, x in table.items():
                if x is not None and id(x) not in fakes:
                    fake = mode.from_tensor(x.detach())
                    with mode:
                        fake = fake.to("cuda", dtype if x.is_floating_point() else x.dtype)
                    fakes[id(x)] = nn.Parameter(fake) if isinstance(x, nn.Parameter) else fake
                if x is not None:
                    table[name] = fakes[id(x)]


def faults(options, precision="fp16", length=40, padded=True):
    """Of a training step of a model with one layer, with EVERY two; all tokens beside 3 sequences' padding are counted
    beforehand."""
    torch.manual_seed(0)
    sizes = {"layers": 1 + EVERY, "width": 64, "heads": 4, "ffn": 128, "max_positions": 80}
    model, head, mode = Encoder(100, 1, **{**sizes, **options}).train(), LMHead(64, 100), FakeTensorMode()
    to_fake_gpu([model, head], mode, torch.float16 if precision == "fp16" else None)
    transfers, kernels, original = Transfers(), Kernels(), F.scaled_dot_product_attention
    F.scaled_dot_product_attention = kernels  # no mode of functions reaches autograd's thread, which recomputes layers
    try:
        with mode, transfers:
            tokens, read = torch.full((3, length), 5, device="cuda"), torch.arange(7, device="cuda")
            count = 2 * length if padded else 3 * length
            with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
                x, _ = model(tokens, num_tokens=count, output_indices=read)
                loss = head(x, model.tokens.weight, torch.zeros(7, dtype=torch.long, device="cuda"))
            loss.backward()
        idle = [f"{name} has no gradient: DDP refuses it" for name, p in model.named_parameters() if p.grad is None]
        return sorted({*transfers.found, *kernels.found, *idle})
    except Exception as error:
        return [f"{type(error).__name__}: {str(error)[:200]} at {line_of(traceback.extract_tb(error.__traceback__))}"]
    finally:
        F.scaled_dot_product_attention = original


class Flash(TorchDispatchMode):
    """Counts the calls of flash attention, forward and backward, and notes the largest tensor."""

    def __init__(self):
        super().__init__()
        self.calls, self.largest = {"forward": 0, "backward": 0}, 0

    def __torch_dispatch__(self, function, types, args=(), options=None):
        out = function(*args, **(options or {}))
        for which in self.calls:
            self.calls[which] += function is getattr(aten, f"_flash_attention_{which}").default
        self.largest = max([self.largest, *(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor))])
        return out


def flash(position, length, padded):
    """[calls of flash attention on spans, forward and backward, elements of the largest tensor per token] of a training
    step of three layers."""
    sizes = {"layers": 3, "width": 64, "heads": 4, "ffn": 128, "max_positions": length}
    model, mode, counted = Encoder(100, 1, position=position, **sizes).train(), FakeTensorMode(), Flash()
    to_fake_gpu([model], mode, torch.float16)
    original, F.scaled_dot_product_attention = F.scaled_dot_product_attention, Kernels()
    with mode, counted:
        tokens = torch.full((2, length), 5, device="cuda")
        model(tokens, num_tokens=tokens.numel() - padded)[0].sum().backward()
    F.scaled_dot_product_attention = original
    return [*counted.calls.values(), counted.largest / tokens.numel()]


def takes(position, cls):
    try:
        return bool(Encoder(9, 1, layers=1, width=8, heads=2, ffn=8, position=position, cls=cls))
    except ValueError:  # that is refused
        return False


def cases():
    """(name, options, precision, length, padded): every scheme, [CLS] treatment, precision, with and without padding;
    every preset; then the rest of the options, with one scheme each. Without EVERY, one case of each scheme, in
    turns, and neither presets nor sizes."""
    sums = [
        "untied+t5",
        "absolute+t5",
        "shaw+shaw_values",
        "t5+window",
        "fire+window",
        "untied+t5:layer",
        "rope:yarn:4",
    ]
    settings = [("fp16", 37, True), ("fp16", 40, False), ("bf16", 40, True)]
    for turn, position in enumerate([*SCHEMES, *sums]):
        treatments = [cls for cls in CLS if takes(position, cls)]
        pairs = [(cls, setting) for cls in treatments for setting in settings[: 1 if cls == "zero" else None]]
        for cls, setting in pairs if EVERY else [pairs[turn % len(pairs)]]:
            yield " ".join(map(str, (position, cls, *setting))), {"position": position, "cls": cls}, *setting
    for path in sorted(CONFIGS.joinpath("model").glob("*.yaml")) if EVERY else ():
        values = yaml.safe_load(path.read_text())
        options = {**preset(values["_name"]), **values}
        options = {name: options[name] for name in ("position", "cls", "normaliser", "layer") if name in options}
        if options["position"] in SCHEMES and options.keys() == {"position", "cls"}:
            continue  # as above
        precision = "bf16" if options.get("normaliser") == "exp" else "fp16"
        yield f"preset {path.stem}", options, precision, 40, True
    tupe_r = {"position": "untied+t5", "cls": "untied"}
    for places in ("random", "shifted"):
        yield f"places {places}", {**tupe_r, "places": places}, "fp16", 40, True
    yield "checkpointed", {**tupe_r, "checkpoint_activations": True}, "fp16", 40, True
    for normaliser in attention.NORMALISERS:
        precision = "bf16" if normaliser == "exp" else "fp16"
        yield f"normaliser {normaliser}", {"position": "rope", "normaliser": normaliser}, precision, 40, True
    for cls in CLS[:2]:
        for length in (40, 37):
            yield f"chunks {cls} {length}", {"position": "t5+window:size:8", "cls": cls}, "fp16", length, True
    yield "window of the plain backend", {"position": "shaw+window:size:8", "cls": "untied"}, "fp16", 40, True
    yield "gau", {"position": "rope", "block": "gau", "normaliser": "relu2"}, "fp16", 40, True
    for name in OTHER_BLOCKS.keys() - {"gau"}:
        options = {**preset(f"{name}_tiny"), "width": 64, "heads": 4, "ffn": 128}
        yield name, options, "fp16", 40, True


def offsets_on_the_host(self):
    return torch.arange(1 - self.span, self.span)


def of_counted(cls, mask, count, on_the_right):
    return cls(mask) if int(mask.sum()) < mask.numel() else packing.NO_PADDING


MUTANTS = {  # mistakes that a GPU would show: where, which attribute, what it becomes, and a scheme that has it
    "on the host": (token_positions.TokenPositions, "offsets", property(offsets_on_the_host), "t5"),
    "a wait": (packing.Packing, "of", classmethod(of_counted), "rope"),
    "a copy": (backend_sdpa, "aligned", lambda x: x, "t5"),
    "no gradient": (encoder.Positions, "embed", lambda self, positions: None, "absolute"),
}


def faults_of(owner, attribute, mistake, position):
    original = owner.__dict__[attribute]
    setattr(owner, attribute, mistake)
    found = faults({"position": position}, length=37)
    setattr(owner, attribute, original)
    return found


def step_bytes(arch, precision, padded, checkpointed):
    """(counted, of the tensors) bytes at the peak of a step beside weights and gradients, with the usual criterion."""
    from lab.bench import contenders, machine, memory  # with fairseq, which takes seconds

    batch, length, vocabulary = 8, 64, 1000
    options = {"encoder_layers": 3, "checkpoint_activations": bool(checkpointed)}
    counted = memory.step_bytes(arch, batch, length, vocabulary, precision, padded, **options)
    model, mode = contenders.build_ours(arch, length, vocabulary, **options).train(), FakeTensorMode()
    to_fake_gpu([model], mode, memory.WEIGHTS[precision])
    original, F.scaled_dot_product_attention = F.scaled_dot_product_attention, Kernels()
    with mode:
        tokens = torch.full((batch, length), 4, device="cuda")
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        own = [x for p in model.parameters() for x in (p, p.grad)]
        with machine.Level([*own, *model.buffers(), tokens]) as level:
            memory.masked_loss(model, tokens, precision, padded).backward()
    F.scaled_dot_product_attention = original
    return counted["activations"] + counted["transient"], level.peak


def steps():
    for arch in ("tupe_r_tiny", "bert_a_tiny"):
        for precision in ("fp16", "bf16", "autocast"):
            yield from [(arch, precision, padded, 0) for padded in (0, 1)]
        yield from [(arch, "float32", 1, 0), (arch, "fp16", 1, 1)]


if __name__ == "__main__":
    sizes = {" ".join(map(str, step)): step_bytes(*step) for step in steps() if EVERY}
    windows.CHUNK = 8  # so that windows pay in short sequences
    found = {name: faults(*case) for name, *case in cases()}
    positions, lengths = ("rope", "rope+window", "t5"), (2048, 8192)
    long = [(*case, flash(*case)) for case in itertools.product(positions, lengths, (0, 1000))]
    print(json.dumps([found, {name: faults_of(*mutant) for name, mutant in MUTANTS.items()}, sizes, long]), flush=True)
    os._exit(0)  # autograd's thread of a device that is none would abort the process
