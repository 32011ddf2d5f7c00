"""The encoder against the released implementation's numbers, and against properties every encoder must have."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tupe.convert import our_name, weights_from_released
from tupe.encoder import ClassificationHead, Encoder, LMHead

PAD = 1
REFERENCE = np.load(Path(__file__).parent / "tupe_reference.npz")
POSITION = {"tupe_a": "untied", "tupe_r": "untied+t5"}


def released_model(which):
    vocab, layers, width, ffn, heads, max_positions = REFERENCE[f"{which}/dims"].tolist()
    parts = {
        "encoder": Encoder(
            vocab, PAD, layers=layers, width=width, ffn=ffn, heads=heads, max_positions=max_positions,
            position=POSITION[which], cls="untied",
        ),
        "lm_head": LMHead(width, vocab),
        "classifier": ClassificationHead(width, width, 3, 0.1),
    }  # fmt: skip
    prefix = f"{which}/state/"
    state = {k[len(prefix) :]: torch.from_numpy(REFERENCE[k]) for k in REFERENCE.files if k.startswith(prefix)}
    weights, _ = weights_from_released(state)
    states = {part: {} for part in parts}
    for name, value in weights.items():
        part, _, key = name.replace("classification_heads.sentence_classification_head", "classifier").partition(".")
        states[part][key] = value
    states["encoder"]["_extra_state"] = parts["encoder"].get_extra_state()
    for part, module in parts.items():
        module.load_state_dict(states[part])
        module.eval()
    return parts


def close(ours, theirs):
    np.testing.assert_allclose(ours.detach().numpy(), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", range(5))
@pytest.mark.parametrize("which", ["tupe_a", "tupe_r"])
def test_equals_released_implementation(which, case):
    parts = released_model(which)
    tokens = torch.from_numpy(REFERENCE[f"{which}/case{case}/tokens"])
    real = tokens.ne(PAD)
    features, _ = parts["encoder"](tokens)
    logits = parts["lm_head"](features, parts["encoder"].tokens.weight)
    classes = parts["classifier"](features)
    loss = F.cross_entropy(logits[real], tokens[real]) + F.cross_entropy(classes, torch.arange(len(tokens)) % 3)
    loss.backward()

    expected = {k.split("/", 2)[2]: REFERENCE[k] for k in REFERENCE.files if k.startswith(f"{which}/case{case}/")}
    close(features[real], expected.pop("features")[real.numpy()])
    close(logits[real], expected.pop("logits")[real.numpy()])
    close(classes, expected.pop("cls_logits"))
    close(loss, expected.pop("loss"))
    expected.pop("tokens")
    parameters = dict(parts["encoder"].named_parameters())
    assert {k for k in expected if not k.startswith("grad/")} == set() and len(expected) >= 4
    for key, gradient in expected.items():
        name = our_name("decoder.sentence_encoder." + key[len("grad/") :])
        close(parameters[name.removeprefix("encoder.")].grad, gradient)
