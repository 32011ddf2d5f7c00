"""What a GPU would refuse, wait for or compute slowly, found without one: training steps on fake CUDA tensors."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(torch.backends.cuda.is_built() or not shutil.which("g++"), reason="a build for CPUs")


MUTANTS = {  # of fake_cuda.py: what shows them
    "on the host": "at tupe/schemes_",
    "a wait": "_local_scalar_dense.default at",
    "a copy": "every layer copies it",
    "no gradient": "has no gradient: DDP refuses it",
}


@pytest.mark.parametrize("cases, least", [("some", 45), pytest.param("every", 200, marks=pytest.mark.thorough)])
def test_every_scheme_trains_without_a_wait_or_a_copy(cases, least, tmp_path):
    """And mistakes that a GPU would show are found. One test, so that one worker computes it."""
    library, root = tmp_path / "fake_cuda.so", Path(torch.__file__).parent
    flags = ["-std=c++20", "-O0", "-shared", "-fPIC", f"-I{root}/include", f"-L{root}/lib", f"-Wl,-rpath,{root}/lib"]
    subprocess.run(["g++", *flags, HERE / "fake_cuda.cpp", "-o", library, "-lc10", "-ltorch_cpu"], check=True)
    run = [sys.executable, "-W", "ignore", HERE / "fake_cuda.py", library, cases]
    found, mutants, sizes, long = json.loads(subprocess.run(run, check=True, stdout=subprocess.PIPE, text=True).stdout)
    assert len(found) > least
    assert {case: faults for case, faults in found.items() if faults} == {}
    for mutant, message in MUTANTS.items():
        assert any(message in fault for fault in mutants[mutant]), mutants[mutant]
    for step, (counted, tensors) in sizes.items():
        assert tensors - 100 <= counted < 1.03 * tensors, (step, counted, tensors)  # kernels keep seeds, of 8 bytes
    for position, length, padding, (forward, backward, largest) in long:
        # All three layers if there is padding, else the two with a window; no tensor has an element for each pair.
        spans = 0 if position == "t5" else 3 if padding else 2 if "window" in position else 0
        assert forward == backward == spans, (position, length, padding)
        assert (largest < 200) == (position != "t5"), (position, length, padding)
