"""The loop of docs/engines.md, as it stands there, in every way that the page names: the same losses."""

import importlib
import json
import os
import re
import sys

import pytest
from helpers import PLUGIN, ended, fork, free_port

PAGE = PLUGIN.parent / "docs" / "engines.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder of the page's script."""
    folder = tmp_path_factory.mktemp("scripts")
    (script,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (folder / "loop.py").write_text(script)
    return folder


def losses(folder, processes, *words):
    """Of the script in so many copies of this process, for each of them."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(processes)}

    def run():
        sys.path.insert(0, str(folder))
        found = importlib.import_module("loop").main(*map(str, words))
        (folder / f"losses{os.environ['RANK']}.json").write_text(json.dumps(found))

    copies = [fork(run, "loop", **place, RANK=str(n), LOCAL_RANK=str(n)) for n in range(processes)]
    assert [ended(copy) for copy in copies] == [0] * processes
    return [json.loads((folder / f"losses{n}.json").read_text()) for n in range(processes)]


@pytest.fixture(scope="module")
def alone(folder, data):
    (found,) = losses(folder, 1, data, 4)
    assert len(found) == 4 and found[-1] < found[0]
    return found


@pytest.mark.parametrize(
    "processes, how",
    [
        (1, "checkpoint"), (2, "ddp"), pytest.param(2, "fsdp", marks=pytest.mark.thorough),
        pytest.param(1, "compile", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_every_way_computes_the_same(processes, how, folder, data, alone):
    for found in losses(folder, processes, data, 4, how):
        assert found == pytest.approx(alone, rel=1e-5)
