"""The loops of docs/engines.md, as they stand there, in every way that the page names: the same losses."""

import importlib
import json
import re
import sys

import pytest
from helpers import PLUGIN, ended, fork, free_port

PAGE = PLUGIN.parent / "docs" / "engines.md"
NAMES = ("loop", "with_accelerate")
UPDATES = "4"


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """Folder of the page's scripts."""
    pytest.importorskip("accelerate")
    folder = tmp_path_factory.mktemp("scripts")
    for name, block in zip(NAMES, re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL), strict=True):
        (folder / f"{name}.py").write_text(block)
    return folder


def losses(scripts, name, processes, *words):
    """Of a script in so many copies of this process, for each of them."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    place |= {"WORLD_SIZE": str(processes), "ACCELERATE_USE_CPU": "true"} if processes > 1 else {}

    def run():
        import os

        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)  # of a training that this process has done before
        sys.path.insert(0, str(scripts))
        sys.dont_write_bytecode = True  # which would be taken for a script that is rewritten within the second
        module = importlib.import_module(name)
        found = module.main(*map(str, words))
        (scripts / f"losses{os.environ.get('RANK', 0)}.json").write_text(json.dumps(found))

    copies = [
        fork(run, name, **place, **({"RANK": str(n), "LOCAL_RANK": str(n)} if processes > 1 else {}))
        for n in range(processes)
    ]
    assert [ended(copy) for copy in copies] == [0] * processes
    return [json.loads((scripts / f"losses{n}.json").read_text()) for n in range(processes)]


@pytest.fixture(scope="module")
def alone(scripts, data):
    (found,) = losses(scripts, "loop", 1, data, UPDATES)
    assert len(found) == int(UPDATES) and found[-1] < found[0]
    return found


fsdp = pytest.param(2, "fsdp", marks=pytest.mark.thorough)
compiled = pytest.param(1, "compile", marks=pytest.mark.slow)


@pytest.mark.parametrize("processes, how", [(1, "checkpoint"), (2, "ddp"), (4, "ddp"), fsdp, compiled])
def test_every_way_computes_the_same(processes, how, scripts, data, alone):
    for found in losses(scripts, "loop", processes, data, UPDATES, how):
        assert found == pytest.approx(alone, rel=1e-5)


def test_with_accelerate(scripts, data):
    """Two processes begin with the loss of one that takes the same two batches in turn."""
    text = (scripts / "loop.py").read_text()
    (scripts / "loop.py").write_text(text.replace("BATCH, STEPS = 128, 4, 8", "BATCH, STEPS = 128, 4, 2"))
    try:
        (one,) = losses(scripts, "loop", 1, data, 1)
        two = losses(scripts, "with_accelerate", 2, data, UPDATES)
    finally:
        (scripts / "loop.py").write_text(text)
    assert two[0] == pytest.approx(two[1]) and two[0][-1] < two[0][0] == pytest.approx(one[0], rel=1e-5)
    (alone,) = losses(scripts, "with_accelerate", 1, data, UPDATES)
    assert alone[-1] < alone[0]
