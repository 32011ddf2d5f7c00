"""The checkpoint that a run starts from: its structure is kept, its dictionary checked."""

import pytest
import torch
from fairseq import checkpoint_utils, models
from helpers import PLUGIN, fairseq_arguments, finetune, load, train

from tupe.plugin.electra import ElectraConfig
from tupe.plugin.model import TUNABLE
from tupe.plugin.pretrained import FromCheckpointConfig, structure, variant


def test_every_model_option_is_either_structure_or_free():
    """A new option fails here until somebody has decided: may fine-tuning change it?"""
    fields = {key for key in ElectraConfig.__dataclass_fields__ if not key.startswith("_")}
    assert set(structure(dict.fromkeys(fields))) == fields - set(TUNABLE) == {
        "position", "cls", "normaliser", "block", "layer_norm_eps", "encoder_layers", "encoder_embed_dim",
        "encoder_ffn_embed_dim", "encoder_attention_heads", "generator_fraction", "segments",
        "norm_order", "norm", "activation", "linear_bias", "embed_norm", "inner_norms",
    }  # fmt: skip
    assert set(TUNABLE) <= fields
    free = {key for key in FromCheckpointConfig.__dataclass_fields__ if not key.startswith("_")}
    assert free == set(TUNABLE) - {"max_positions"}


def test_a_variant_is_what_differs_from_its_architecture():
    config = vars(models.MODEL_DATACLASS_REGISTRY["tupe_r"]()) | {"_name": "tupe_r", "cls": "zero"}
    assert variant(config) == "cls zero"
    assert variant({**config, "position": "t5"}) == "cls zero, position t5"


@pytest.mark.parametrize("launcher", ["options", "recipe"])
def test_the_structure_is_the_checkpoints(launcher, learnable, pretrained, tmp_path):
    """Named nowhere (by fairseq-train's options, or by the recipe as Hydra composes it), it is that of the checkpoint;
    dropout is chosen anew. The new checkpoint names the real architecture, and serves without the old one."""
    if launcher == "options":
        words = [str(learnable), f"--user-dir={PLUGIN}", f"--finetune-from-model={pretrained}", "--max-epoch=1"]
        words += [f"--save-dir={tmp_path}", "--num-workers=0", "--dropout=0.2"]
        train(fairseq_arguments("finetune", ["glue=cola"], words, cuda=False))
    else:
        finetune(learnable, pretrained, tmp_path, "glue=cola", "optimization.max_epoch=1", "model.dropout=0.2")
    before, after = (load(path)["cfg"]["model"] for path in (pretrained, tmp_path / "checkpoint_last.pt"))
    assert after["_name"] == before["_name"] == "tupe_r_tiny" and after["encoder_embed_dim"] == 32
    assert structure(after) == structure(before) and after["max_positions"] == before["max_positions"] == 20
    assert after["dropout"] == 0.2
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(tmp_path / "checkpoint_last.pt")])
    head = "sentence_classification_head"
    assert model(torch.tensor([[0, 5, 6, 2]]), classification_head_name=head)[0].shape == (1, 2)


@pytest.mark.parametrize(
    "override, message",
    [
        (["model._name=tupe_a_tiny"], r"position=untied\+t5 in the checkpoint, untied here"),
        (["model._name=tupe_r_tiny", "model.cls=tied"], "cls=untied in the checkpoint, tied here"),
        (["model._name=tupe_r_mini"], "encoder_layers=2 in the checkpoint, 4 here"),
    ],
)
def test_a_contradicting_model_is_refused(override, message, learnable, pretrained, tmp_path):
    with pytest.raises(ValueError, match=message):
        finetune(learnable, pretrained, tmp_path, "glue=cola", *override)


def test_without_a_checkpoint_there_is_no_structure(learnable, tmp_path):
    with pytest.raises(ValueError, match="checkpoint not found"):
        finetune(learnable, tmp_path / "none.pt", tmp_path, "glue=cola")
    with pytest.raises(ValueError, match="needs --finetune-from-model"):
        finetune(learnable, "", tmp_path, "glue=cola")


def test_weights_of_another_model_are_refused(learnable, pretrained, tmp_path):
    state = torch.load(pretrained, weights_only=True)
    for wrong in ({"model": {"encoder.sentence_encoder.x": torch.zeros(1)}}, {"cfg": {"model": {"_name": "roberta"}}}):
        torch.save({**state, **wrong}, tmp_path / "foreign.pt")
        with pytest.raises(ValueError, match=r"foreign.pt is no checkpoint of this project"):
            finetune(learnable, tmp_path / "foreign.pt", tmp_path / "run")


@pytest.mark.parametrize("change", ["longer", "swapped"])
def test_another_dictionary_is_refused(change, learnable, pretrained, tmp_path):
    """Longer by a word, and of the same length with two words swapped."""
    lines = (learnable / "dict.txt").read_text().splitlines()
    lines = [*lines, "more 1"] if change == "longer" else [lines[1], lines[0], *lines[2:]]
    (tmp_path / "CoLA").symlink_to(learnable / "CoLA")
    (tmp_path / "dict.txt").write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match="makes .* types" if change == "longer" else "other ones"):
        finetune(tmp_path, pretrained, tmp_path / "run", "glue=cola")
