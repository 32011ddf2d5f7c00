"""A model option is one line of `ModelConfig`: added there, fairseq, fine-tuning, converter and export know it."""

import functools
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from helpers import PLUGIN, build_from, configuration, fork, new_checkpoint

pytest.importorskip("fairseq")  # of the process, too

LINES = """    colour: str = option("red", "a new option", choices=("red", "blue"), hugging_face="color")
    shade: float = option(0.5, "another one", free=True)
"""


def use(folder):
    """What a user does with the new options, in a process that imports fairseq, and the copy of this package."""
    sys.path.insert(0, str(folder))
    from fairseq import options
    from fairseq.data import Dictionary
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    import tupe.plugin
    from tupe.checkpoints import export
    from tupe.checkpoints.trained import read_model
    from tupe.plugin import pretrained
    from tupe.plugin.model import core_config

    assert Path(tupe.plugin.__file__).is_relative_to(folder)
    parser = options.get_training_parser()
    words = [".", "--arch=tupe_r_tiny", "--task=masked_lm", "--batch-size=1", "--colour=blue", "--shade=0.25"]
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, words)).model
    core = core_config(cfg)
    assert (core.colour, core.shade) == ("blue", 0.25)
    assert pretrained.structure({"colour": "blue", "shade": 0.25, "dropout": 0.1}) == {"colour": "blue"}

    dictionary = Dictionary()
    for word in "abcdef":
        dictionary.add_symbol(word)
    dictionary.save(str(folder / "dict.txt"))
    dictionary.add_symbol("<mask>")
    config = configuration("tupe_r_tiny", {"max_positions": 16, "colour": "blue", "shade": 0.25})
    model = build_from(config, dictionary)
    torch.save(new_checkpoint(config, model.state_dict()), folder / "checkpoint.pt")
    export.export(folder / "checkpoint.pt", folder / "exported")
    written = json.loads((folder / "exported" / "config.json").read_text())
    assert (written["color"], written["shade"]) == ("blue", 0.25)
    for form in ("checkpoint.pt", "exported"):
        back = read_model(folder / form).config
        assert (back.colour, back.shade) == ("blue", 0.25)


@pytest.mark.thorough
def test_a_new_option_is_one_line(tmp_path):
    pytest.importorskip("safetensors")
    shutil.copytree(PLUGIN, tmp_path / "tupe", ignore=shutil.ignore_patterns("__pycache__", "configs"))
    options = tmp_path / "tupe" / "model_config.py"
    head, line, tail = options.read_text().partition("    layer_norm_eps: float")
    assert line
    options.write_text(head + LINES + line + tail)
    process = fork(functools.partial(use, tmp_path), "use", anew=True)
    process.join()
    assert process.exitcode == 0
