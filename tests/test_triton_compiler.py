"""That Triton's compiler makes the kernels for two cards, on a machine without one.

A file of its own, because the interpreter of `test_triton.py` and a compiler of today are not on the same stack.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
ROOT = Path(__file__).parents[1]
COMPILE = """
import inspect, sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tupe import triton_attention
from tupe.backend_sdpa import aligned

card, dtype, length, width = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
padded = length % 64 > 0
q = torch.empty(1, 12, length, width, dtype={"bf16": torch.bfloat16, "fp16": torch.float16}[dtype])
bias = aligned(torch.empty(12, length, length, dtype=q.dtype), triton_attention.WIDEST_TILE)[..., :length]
kinds = dict.fromkeys(["Q", "K", "V", "GRAD", "BIAS", "OUT", "DQ", "DK", "DV"], "*" + dtype)
kinds |= dict.fromkeys(["LSE", "DELTA", "DBIAS"], "*fp32") | {"MASK": "*i8", "SEED": "*i64", "KEPT": "*i32"}
kinds |= dict.fromkeys(["scale", "gain"], "fp32")
for name, atomic in [*((name, False) for name in triton_attention.TILES), ("backward_kv", True)]:
    kernel = getattr(triton_attention, "_" + name)
    _, chosen = triton_attention.launch(name, q, q, bias, q if padded else None, q)
    chosen["ATOMIC"] = atomic
    options = {each: chosen.pop(each) for each in ("num_warps", "num_stages")}
    names = inspect.signature(kernel.fn).parameters
    kind = {each: "constexpr" if each in chosen else kinds.get(each, "i32") for each in names}
    values = {each: chosen[each] for each in names if each in chosen} | {"bias_j": 1}
    kind["bias_j"] = "constexpr"
    numbers = [each for each in names if kind[each] == "i32" and each[-2:] in ("_b", "_h", "_i", "_0")]
    of_16 = [each for each in names if kind[each][0] == "*"] + numbers
    marks = {(list(names).index(each),): [["tt.divisibility", 16]] for each in of_16}  # as the numbers are at run time
    made = triton.compile(ASTSource(kernel, kind, values, marks), target=GPUTarget("cuda", card, 32), options=options)
    adds = "relaxed.add" in made.asm["ptx"]
    print(name, "mma" in made.asm["ptx"] and "ld.global.b16" not in made.asm["ptx"] and adds == atomic)
"""


@pytest.mark.thorough
@pytest.mark.parametrize(("card", "dtype"), [(80, "bf16"), (90, "bf16"), (80, "fp16")])  # A100, H100
@pytest.mark.parametrize(("length", "width"), [(512, 64), (509, 64), (509, 128)])
def test_kernels_compile_for_a_card(card, dtype, length, width, tmp_path):
    """With products on tensor cores, and no number loaded alone. Of 509 tokens some are padding."""
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 4):
        pytest.skip("older compilers look for a card")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILE, str(card), dtype, str(length), str(width)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split()[1::2] == ["True"] * 5, done.stderr
