"""The interventions of the third protocol move the exit, and change nothing else."""

import runpy
from types import SimpleNamespace

import pytest
import torch
from helpers import pretrain_arguments, train
from safetensors.torch import load_file

from lab.plan import HERE
from tupe import positions
from tupe.common.recipes import read
from tupe.data.splits import read_symbols
from tupe.encoder import Encoder
from tupe.train.loop import Place
from tupe.train.pretrain import Pretraining
from tupe.train.settle import settle

FILE = HERE / "intervention.py"
TOKENS = torch.arange(10, 42).view(2, 16)
TURNED = TOKENS[:, [0, *range(15, 0, -1)]]  # the same words behind [CLS]


@pytest.fixture(scope="module", autouse=True)
def _schemes():
    with pytest.MonkeyPatch.context() as patch:
        known = {name: kind for name, kind in positions.SCHEMES.items() if name not in ("delayed", "trained")}
        patch.setattr(positions, "SCHEMES", known)
        runpy.run_path(str(FILE))
        yield


def encoder(position, cls="tied"):
    torch.manual_seed(1)
    model = Encoder(
        64, 1, position=position, cls=cls, width=256, heads=4, ffn=64, layers=2, max_positions=128, dropout=0,
        attention_dropout=0,
    )  # fmt: skip
    model.reset_parameters()
    return model


def knows_order(model):
    return not torch.allclose(model(TOKENS)[0][:, 0], model(TURNED)[0][:, 0], atol=1e-6)


def test_delayed_positions_are_off_before_the_update_and_tupes_from_then_on():
    delayed, tupe = encoder("delayed:until:3", "untied"), encoder("untied", "untied")
    assert all(torch.equal(a, b) for a, b in zip(delayed.parameters(), tupe.parameters(), strict=True))
    (scheme,) = (module for module in delayed.modules() if hasattr(module, "set_num_updates"))
    assert not knows_order(delayed)  # it trains, at its first update
    for updates in (0, 2):
        scheme.set_num_updates(updates)
        assert not knows_order(delayed)
        delayed.eval()  # a validation on the way
        assert not knows_order(delayed)
        delayed.train()
    scheme.set_num_updates(3)
    assert torch.equal(delayed(TOKENS)[0], tupe(TOKENS)[0])
    evaluated = encoder("delayed:until:3", "untied").eval()  # nobody tells it of updates
    assert torch.equal(evaluated(TOKENS)[0], tupe.eval()(TOKENS)[0])


def test_both_engines_tell_it_of_updates(data, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(positions.SCHEMES["delayed"], "set_num_updates", lambda self, updates: seen.append(updates))
    words = ["--arch=tupe_a_tiny", "--position=delayed:until:2", "--cls=untied", "--tokens-per-sample=24", "--cpu",
             "--max-update=3", "--warmup-updates=1", "--batch-size=4", "--num-workers=0"]  # fmt: skip
    recipe = settle(read("pretrain_small", words, (), {}), gpus=0)
    progress = SimpleNamespace(**dict.fromkeys(("begin", "passed", "move", "spoke"), lambda *args: None), time_left=id)
    run = SimpleNamespace(writes=False, reach=id, progress=progress)
    loop = Pretraining(recipe, str(data), read_symbols(data), run, Place(torch.device("cpu")), 3, 0)
    loop.due = lambda: (False, False, False)
    loop.train(None)
    assert seen == [0, 1, 2]
    pytest.importorskip("fairseq")
    seen.clear()
    train(pretrain_arguments(data, tmp_path, *words, "--num-workers=0", arch="tupe_a_tiny"))
    assert [*dict.fromkeys(seen)][:3] == [0, 1, 2]


def test_trained_vectors_are_the_released_ones_and_all_else_starts_as_berts():
    trained, bert = encoder("trained").state_dict(), encoder("absolute").state_dict()
    released = load_file(FILE.parents[1] / "models/bert_a_mini/model.safetensors")
    vectors = released["tupe.encoder.positions.absolute.table.weight"].float()
    (name,) = (name for name in trained if name.startswith("positions."))
    assert torch.equal(trained.pop(name), vectors)
    (name,) = (name for name in bert if name.startswith("positions."))
    assert bert.pop(name).shape == vectors.shape
    assert trained.keys() == bert.keys() and all(torch.equal(trained[name], bert[name]) for name in bert)
