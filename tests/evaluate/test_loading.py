"""Models as users name them, and the text they are shown."""

import math
import shutil

import pytest
import torch
from click.testing import CliRunner

from tupe.checkpoints.export import export
from tupe.cli import main
from tupe.data.splits import read_symbols
from tupe.evaluate.likelihood import pseudo_log_likelihoods
from tupe.evaluate.loading import HeldOut, labelled, load_model, warn_if_unlike


def test_labels(tmp_path, monkeypatch):
    """Folders of Hydra's sweeps have "=" and "," in their names; labels may have "=" too."""
    monkeypatch.chdir(tmp_path)
    hydra = "o/lr=1,seed=2/checkpoint_last.pt"
    (tmp_path / hydra).parent.mkdir(parents=True)
    for name in ("a.pt", "a=b.pt", "=.pt", hydra):
        (tmp_path / name).touch()
    for source, label, path in (
        ("x=a.pt", "x", "a.pt"), ("a.pt", "a.pt", "a.pt"), ("a=b.pt", "a=b.pt", "a=b.pt"), ("x=a=b.pt", "x", "a=b.pt"),
        (hydra, hydra, hydra), (f"x={hydra}", "x", hydra), (f"lr=1={hydra}", "lr=1", hydra), ("=.pt", "=.pt", "=.pt"),
        (f"x={tmp_path}/{hydra}", "x", f"{tmp_path}/{hydra}"),
    ):  # fmt: skip
        assert labelled([source]) == {label: path}
    with pytest.raises(ValueError, match="x stands for both a.pt and a=b.pt"):
        labelled(["x=a.pt", "x=a=b.pt"])
    for missing in ("x=b.pt", "b.pt", "o/lr=1,seed=3/checkpoint_last.pt", "=a.pt", "x=", ""):
        with pytest.raises(ValueError, match=f"^{missing} not found"):
            labelled([missing])


def test_models_are_arguments_or_follow_an_option(pretrained, vocabulary, nopos, tmp_path):
    """All commands of evaluation take them so, one beside the other."""
    words, results = ["extrapolate", f"--data={vocabulary}", "--lengths=8", "--windows=2"], []
    for sources in ([f"a={pretrained}", f"b={nopos}"], [f"--checkpoint=b={nopos}", f"a={pretrained}"]):
        result = CliRunner().invoke(main, [*words, *sources, f"--output={tmp_path}/x"])
        assert result.exit_code == 0, result.output
        results.append((tmp_path / "x" / "extrapolation.json").read_text())
    assert results[0] == results[1]
    none = CliRunner().invoke(main, [*words, f"--output={tmp_path}/y"])
    assert none.exit_code == 2 and "no model is named; give one or more as [LABEL=]CHECKPOINT" in none.output


def test_an_export_is_scored_in_blocks_of_its_training(pretrained, vocabulary, tmp_path):
    export(pretrained, tmp_path / "out", vocabulary, code=False)
    (_, of_run), (_, of_export) = load_model(pretrained), load_model(tmp_path / "out")
    assert of_export.masking == of_run.masking and of_run.masking["tokens_per_sample"] == 20
    with pytest.raises(ValueError, match=r"out has no held-out text .*; name the folder that has it with --data"):
        of_export.split()


def test_models_whose_losses_differ_for_another_reason_are_named(tmp_path, capsys):
    first = HeldOut(tmp_path / "a", ["<s>", "a"], {"mask_prob": 0.15})
    other = HeldOut(tmp_path / "b", ["<s>", "b"], {"mask_prob": 0.3})
    warn_if_unlike("x", first, first, first.masking)
    assert not capsys.readouterr().err
    warn_if_unlike("x", other, first, first.masking)
    texts = f"the text of {tmp_path}/b, not of {tmp_path}/a: --data takes one for all"
    reasons = f"(mask_prob 0.3, not 0.15; another vocabulary; {texts})\n"
    assert capsys.readouterr().err == f"x: its loss is not comparable with that of the first model {reasons}"


def test_a_folder_is_scored_with_its_own_dictionary_and_its_own_head(vocabulary, tmp_path):
    pytest.importorskip("transformers")
    from tupe.configuration_tupe import TupeConfig
    from tupe.modeling_tupe import TupeForMaskedLM, TupeForSequenceClassification

    types = len(read_symbols(vocabulary))
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = TupeConfig(**sizes, vocab_size=types, max_position_embeddings=24)
    for name, kind in (("words", TupeForMaskedLM), ("classes", TupeForSequenceClassification)):
        kind(config).save_pretrained(tmp_path / name)
        shutil.copy(vocabulary / "dict.txt", tmp_path / name)
    model, _ = load_model(tmp_path / "words", vocabulary)
    (score,) = pseudo_log_likelihoods(model, [[[7], [8, 9]]])
    assert score.word < 0
    with torch.no_grad():
        model.lm_head.bias.fill_(math.nan)
    with pytest.raises(ValueError, match="scores are not finite"):
        list(pseudo_log_likelihoods(model, [[[7]]]))
    model, _ = load_model(tmp_path / "classes", vocabulary)
    assert model.tupe.encoder(torch.tensor([[0, 7, 2]]))[0].isfinite().all()  # for probes
    with pytest.raises(ValueError, match="classes has no head of a masked language model"):
        list(pseudo_log_likelihoods(model, [[[7]]]))
    other = tmp_path / "other"
    other.mkdir()
    first, *rest = (vocabulary / "dict.txt").read_text().splitlines()
    (other / "dict.txt").write_text("\n".join([*rest, first]) + "\n")
    with pytest.raises(ValueError, match=r"other/dict\.txt has as many types as the model's .*, but other ones"):
        load_model(tmp_path / "words", other)
