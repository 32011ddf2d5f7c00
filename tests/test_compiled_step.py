"""What a compiled training step costs on an H100, generated on a machine without one."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(torch.backends.cuda.is_built() or not shutil.which("g++"), reason="a build for CPUs")


@pytest.mark.thorough
@pytest.mark.parametrize("position, padding, kernels, most", [("untied+t5", 0, 450, 26e9), ("rope", 3000, 500, 29e9)])
def test_a_compiled_step_is_few_kernels_and_moves_few_bytes(position, padding, kernels, most, tmp_path):
    """Base size, 32 x 512 tokens, bf16 autocast. What is computed outside of layers, head and loss is not counted. RoPE
    turns queries and keys in every layer, and attends to padded batches without a mask."""
    library, root = tmp_path / "fake_cuda.so", Path(torch.__file__).parent
    flags = ["-std=c++20", "-O0", "-shared", "-fPIC", f"-I{root}/include", f"-L{root}/lib", f"-Wl,-rpath,{root}/lib"]
    subprocess.run(["g++", *flags, HERE / "fake_cuda.cpp", "-o", library, "-lc10", "-ltorch_cpu"], check=True)
    run = [sys.executable, "-W", "ignore", HERE / "fake_card.py", library, position, str(padding)]
    graphs = json.loads(subprocess.run(run, check=True, stdout=subprocess.PIPE, text=True).stdout)
    for phase in ("forward", "backward"):  # the layers whose tokens are all read, the last one, head with loss
        assert sorted(graph["calls"] for graph in graphs if graph["phase"] == phase) == [1, 1, 11]
    assert sum(graph["calls"] * graph["fused"] for graph in graphs) <= kernels
    assert sum(graph["calls"] * graph["bytes"] for graph in graphs) <= most
