"""What is replaced in fairseq: all of it in one table, and each row does what it says."""

import ast
import inspect
import pkgutil
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from fairseq import utils
from helpers import PLUGIN, ended, fork

from tupe.plugin import launch, patches, steps  # noqa: F401  (the first: `tupe` is about to train)
from tupe.plugin.patches import BY_TUPE, IN_TRAINING, ON_IMPORT, PATCHES


def installed(attribute):
    """Our functions around an attribute, from the outermost."""
    function, found = pkgutil.resolve_name(attribute), []
    while function is not None:
        found.append(getattr(function, "replacement", function))
        function = getattr(function, "__wrapped__", None)
    return found


@pytest.mark.parametrize("attribute", sorted({patch.attribute for patch in PATCHES}))
def test_rows_of_one_attribute_are_wrapped_around_each_other(attribute):
    ours = [patch.replacement for patch in PATCHES if patch.attribute == attribute]
    assert installed(attribute)[: len(ours)] == ours[::-1]


def test_fairseq_train_gets_what_the_table_says():
    """It loads the user-dir, and no launcher."""

    def look():
        from fairseq import utils
        from fairseq_cli import train  # noqa: F401

        utils.import_user_module(Namespace(user_dir=str(PLUGIN)))
        from tupe.plugin import patches as loaded

        found = [patch.replacement in installed(patch.attribute) for patch in loaded.PATCHES]
        assert loaded is not patches and found == [patch.when != BY_TUPE for patch in PATCHES], found

    assert ended(fork(look, "fairseq-train", anew=True)) == 0
    assert {patch.when for patch in PATCHES} == {ON_IMPORT, IN_TRAINING, BY_TUPE}


LIBRARIES = ("fairseq", "fairseq_cli", "torch", "hydra", "omegaconf")


def replaced_in(path):
    """Lines of a file that give an attribute of a library's module, class or function another value."""
    tree = ast.parse(path.read_text())
    theirs = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(alias.asname or alias.name.partition(".")[0], alias.name) for alias in node.names]
            theirs |= {name for name, module in names if module.partition(".")[0] in LIBRARIES}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module.partition(".")[0] in LIBRARIES:
            theirs |= {alias.asname or alias.name for alias in node.names}

    def is_theirs(target):
        while isinstance(target, ast.Attribute):
            target = target.value
        return isinstance(target, ast.Name) and target.id in theirs

    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, (ast.Assign, ast.Delete)) else [getattr(node, "target", None)]
        targets = [part for target in targets for part in getattr(target, "elts", [target])]
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("setattr", "delattr"):
            targets = [ast.Attribute(node.args[0])]
        yield from (node.lineno for part in targets if isinstance(part, ast.Attribute) and is_theirs(part))


@pytest.mark.parametrize(
    "code", ["utils.seed = f", "Trainer.step, x = f, 1", "del m.optim.sgd", "setattr(m, 'x', f)", "Trainer.n += 1"]
)
def test_a_replacement_is_noticed(tmp_path, code):
    imports = "import fairseq.models as m\nfrom fairseq import utils\nfrom fairseq.trainer import Trainer\n"
    (tmp_path / "x.py").write_text(f"{imports}own = utils.find()\nown.x = 1\n{code}\n")
    assert [*replaced_in(tmp_path / "x.py")] == [6]


def test_only_the_table_replaces_anything():
    files = [*PLUGIN.rglob("*.py")]
    assert len(files) > 80 and [(path, line) for path in files for line in replaced_in(path)] == []


@pytest.mark.parametrize("samples, kept", [([1, {}], [1]), ([1, 2], [1, 2]), ([{}, {}], [{}]), ([None], [None])])
def test_empty_batches_are_left_out_unless_there_is_no_other(samples, kept):
    seen = []
    trainer = SimpleNamespace(get_num_updates=lambda: 0, is_fsdp=False)
    steps.train_step(trainer, samples, original=lambda trainer, given, raise_oom: seen.append(list(given)))
    assert seen == [kept]


def test_gradients_of_a_cpu_are_clipped_beside_a_gpu(monkeypatch):
    """fairseq takes their norm to the GPU."""
    parameters = [torch.nn.Parameter(torch.randn(3)) for _ in range(2)]
    for p in parameters:
        p.grad = 5 * torch.randn(3)
    gradients = torch.cat([p.grad for p in parameters])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert utils.clip_grad_norm_(iter(parameters), 1.0).item() == pytest.approx(gradients.norm().item())
    assert torch.cat([p.grad for p in parameters]).norm().item() == pytest.approx(1, abs=1e-4)
    with pytest.raises((RuntimeError, AssertionError), match="accelerator|CUDA|NVIDIA"):
        inspect.unwrap(utils.clip_grad_norm_)(parameters, 1.0)
