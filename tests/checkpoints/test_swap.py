"""Swapping the position encoding of a trained model: what stays, what is new, and that training continues from it."""

import pytest
import torch
from click.testing import CliRunner
from helpers import load, pretrain_arguments, train, write_data

from tupe.checkpoints.change import stretch, swap_command, swap_position
from tupe.checkpoints.trained import read_model


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(data, folder of a run of bert_r_tiny after 2 updates)."""
    folder = tmp_path_factory.mktemp("swap")
    data = write_data(folder / "data")
    train(pretrain_arguments(data, folder / "run", "--max-update=2", "--num-workers=0", arch="bert_r_tiny"))
    return data, folder / "run"


def run(*words):
    result = CliRunner().invoke(swap_command, words)
    assert result.exit_code == 0, result.output


def others(trained):
    return {k: v for k, v in trained.weights.items() if not k.startswith("encoder.positions.")}


@pytest.mark.parametrize(
    ("position", "cls"),
    [("untied+t5", "untied"), ("rope", None), ("deberta", "tied"), ("nopos", None), ("t5:layer", None)],
)
def test_everything_else_stays(trained, tmp_path, position, cls):
    words = [f"--checkpoint={trained[1]}", f"--position={position}", f"--output={tmp_path / 'swapped'}"]
    run(*words, *([f"--cls={cls}"] if cls else []))
    old, new = read_model(trained[1]), read_model(tmp_path / "swapped")
    assert (new.config.position, new.config.cls, new.updates) == (position, cls or "tied", 0)
    assert others(new).keys() == others(old).keys()
    assert all(torch.equal(value, new.weights[key]) for key, value in others(old).items())
    assert torch.isfinite(new.model()(torch.tensor([[0, 5, 6, 7, 2]])).logits).all()


def test_training_continues_from_it(trained, tmp_path):
    run(f"--checkpoint={trained[1]}", "--position=alibi", f"--output={tmp_path / 'swapped'}")
    more = ["--max-update=1", "--num-workers=0", f"--finetune-from-model={tmp_path / 'swapped'}", "--position=alibi"]
    (losses,) = train(pretrain_arguments(trained[0], tmp_path / "run", *more, arch="bert_a_tiny"))
    assert losses[0] > 0 and load(tmp_path / "run" / "checkpoint_last.pt")["cfg"]["model"]["position"] == "alibi"


@pytest.mark.parametrize(
    ("position", "cls", "becomes"),
    [("alibi", None, ("bert_a_tiny", "tied")), ("untied+clipped", None, ("tupe_a_tiny", "untied")),
     ("alibi", "untied", ("tupe_a_tiny", "untied"))],
)  # fmt: skip
def test_a_new_encoding_replaces_the_treatment_of_cls_too(trained, position, cls, becomes):
    tupe_r = swap_position(read_model(trained[1]), "untied+t5", "untied")
    assert tupe_r.architecture == "tupe_r_tiny"
    swapped = swap_position(tupe_r, position, cls)
    assert (swapped.architecture, swapped.config.cls) == becomes


def test_parameters_of_the_new_encoding_are_fresh(trained):
    model = read_model(trained[1])
    swapped = {seed: swap_position(model, "absolute+t5", seed=seed).weights for seed in (1, 2)}
    for key, value in model.weights.items():
        if key.startswith("encoder.positions."):
            assert not torch.equal(swapped[1][key], value) and not torch.equal(swapped[1][key], swapped[2][key])
            assert swapped[1][key].std() == pytest.approx(0.02, rel=0.3)
    same_seed = swap_position(model, "absolute+t5", seed=1).weights
    assert all(torch.equal(same_seed[key], value) for key, value in swapped[1].items())


def test_parameters_of_the_same_name_and_shape_stay_if_asked(trained):
    model, table = read_model(trained[1]), "encoder.positions.t5.table.weight"
    assert torch.equal(swap_position(model, "rope:yarn:4+t5", keep=True).weights[table], model.weights[table])
    other = swap_position(model, "t5:buckets:16", keep=True).weights[table]
    assert other.shape != model.weights[table].shape


def test_classification_heads_stay(trained):
    model, key = read_model(trained[1]), "classification_heads.topic.out_proj.weight"
    model.weights |= {key: torch.ones(3, 128), "classification_heads.topic.dense.weight": torch.ones(128, 128)}
    model.labels = {"topic": ["a", "b", "c"]}
    for other in (swap_position(model, "alibi"), stretch(model, 100)):
        assert torch.equal(other.weights[key], model.weights[key])
        assert other.settings("topic")["id2label"] == {"0": "a", "1": "b", "2": "c"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--position=nowhere"], "unknown position scheme 'nowhere'"),
        (["--position=rope", "--cls=untied"], "it has no term to drop"),
    ],
)
def test_what_cannot_be_swapped_is_said(trained, tmp_path, words, message):
    result = CliRunner().invoke(swap_command, [f"--checkpoint={trained[1]}", f"--output={tmp_path}/x", *words])
    assert result.exit_code == 2 and message in result.output and not list(tmp_path.iterdir())
