"""Swapping the position encoding of a trained model: what stays, what is new, and that training continues from it."""

import pytest
import torch
from click.testing import CliRunner
from helpers import PLUGIN, load, pretrain_arguments, train, write_data

from tupe.checkpoints.stretch import stretch
from tupe.checkpoints.swap import command, swap_position
from tupe.checkpoints.trained import read_model
from tupe.evaluate.loading import load_model

ROOT = PLUGIN.parent


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(data, checkpoint of bert_r_tiny after 2 updates)."""
    folder = tmp_path_factory.mktemp("swap")
    data = write_data(folder / "data")
    train(pretrain_arguments(data, folder / "run", "--max-update=2", "--num-workers=0", arch="bert_r_tiny"))
    return data, folder / "run" / "checkpoint_last.pt"


def run(*words):
    result = CliRunner().invoke(command, words)
    assert result.exit_code == 0, result.output


def others(model):
    return {k: v for k, v in model.items() if not k.startswith("encoder.positions.") and k != "encoder._extra_state"}


@pytest.mark.parametrize(
    ("position", "cls"),
    [("untied+t5", "untied"), ("rope", None), ("deberta", "tied"), ("nopos", None), ("t5:layer", None)],
)
def test_everything_else_stays(trained, tmp_path, position, cls):
    path = tmp_path / "swapped.pt"
    words = [f"--checkpoint={trained[1]}", f"--position={position}", f"--output={path}"]
    run(*words, *([f"--cls={cls}"] if cls else []))
    old, new = load(trained[1]), load(path)
    assert new["cfg"]["model"]["position"] == position and new["cfg"]["model"]["cls"] == (cls or "tied")
    assert others(new["model"]).keys() == others(old["model"]).keys()
    assert all(torch.equal(value, new["model"][key]) for key, value in others(old["model"]).items())
    assert new["last_optimizer_state"] is None and old["last_optimizer_state"] is not None
    model, _ = load_model(path)
    assert model.config.position == position
    tokens = torch.tensor([[0, 5, 6, 7, 2]])
    assert torch.isfinite(model(tokens).logits).all()


@pytest.mark.parametrize(
    ("position", "cls", "becomes"),
    [("alibi", None, ("bert_a_tiny", "tied")), ("rope", None, ("bert_a_tiny", "tied")),
     ("untied+clipped", None, ("tupe_r_tiny", "untied")), ("alibi", "untied", ("tupe_r_tiny", "untied"))],
)  # fmt: skip
def test_a_new_encoding_replaces_the_treatment_of_cls_too(trained, position, cls, becomes):
    tupe_r = swap_position(read_model(trained[1]), "untied+t5", "untied")
    tupe_r.cfg["model"]["_name"] = "tupe_r_tiny"
    swapped = swap_position(tupe_r, position, cls)
    assert (swapped.name, swapped.config.cls) == becomes


def test_parameters_of_the_new_encoding_are_fresh(trained):
    model = read_model(trained[1])
    swapped = {seed: swap_position(model, "absolute+t5", seed=seed).weights for seed in (1, 2)}
    for key, value in model.weights.items():
        if key.startswith("encoder.positions."):
            assert not torch.equal(swapped[1][key], value) and not torch.equal(swapped[1][key], swapped[2][key])
            assert swapped[1][key].std() == pytest.approx(0.02, rel=0.3)
    same_seed = swap_position(model, "absolute+t5", seed=1).weights
    assert all(torch.equal(same_seed[key], value) for key, value in swapped[1].items())


def test_parameters_of_the_same_name_and_shape_stay_if_asked(trained, tmp_path):
    path, table = tmp_path / "swapped.pt", "encoder.positions.t5.table.weight"
    run(f"--checkpoint={trained[1]}", "--position=rope:yarn:4+t5", "--keep", f"--output={path}")
    old, new = load(trained[1])["model"], load(path)["model"]
    assert torch.equal(old[table], new[table])
    path.unlink()
    run(f"--checkpoint={trained[1]}", "--position=t5:buckets:16", "--keep", f"--output={path}")  # another shape
    assert load(path)["model"][table].shape != old[table].shape


def test_classification_heads_stay(trained):
    model, key = read_model(trained[1]), "classification_heads.topic.out_proj.weight"
    model.weights |= {key: torch.ones(3, 128), "classification_heads.topic.dense.weight": torch.ones(128, 128)}
    model.labels = {"topic": ["a", "b", "c"]}
    for other in (swap_position(model, "alibi"), stretch(model, 100)):
        assert torch.equal(other.weights[key], model.weights[key])
        assert other.state()["task_state"] == {"labels": {"topic": ["a", "b", "c"]}, "layout": None}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--position=nowhere"], "unknown position scheme 'nowhere'"),
        (["--position=rope", "--cls=untied"], "it has no term to drop"),
        (["--position=t5", "--data=/nowhere"], "dict.txt not found in /nowhere"),
    ],
)
def test_what_cannot_be_swapped_is_said(trained, tmp_path, words, message):
    result = CliRunner().invoke(command, [f"--checkpoint={trained[1]}", f"--output={tmp_path}/x.pt", *words])
    assert result.exit_code == 2 and message in result.output and not list(tmp_path.iterdir())


def test_wrong_dictionary_and_other_models_are_refused(trained, tmp_path):
    (tmp_path / "dict.txt").write_text("a 1\n")
    words = [f"--checkpoint={trained[1]}", "--position=t5", f"--data={tmp_path}", f"--output={tmp_path}/x.pt"]
    assert "dict.txt makes 6 types, the model has" in CliRunner().invoke(command, words).output
    model = read_model(trained[1])
    model.cfg["model"]["_name"] = "electra_r_tiny"
    with pytest.raises(ValueError, match="not in electra_r_tiny"):
        swap_position(model, "t5")
