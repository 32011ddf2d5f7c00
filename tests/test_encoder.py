"""The encoder against the released implementation's numbers, and against properties every encoder must have."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tupe.encoder import ClassificationHead, Encoder, LMHead

PAD = 1
REFERENCE = np.load(Path(__file__).parent / "tupe_reference.npz")
POSITION = {"tupe_a": "untied", "tupe_r": "untied+t5"}


def to_our_name(name):
    """Key of the released code -> (part, key of ours)."""
    head = "classification_heads.sentence_classification_head."
    if name.startswith(head):
        return "classifier", name[len(head) :]
    if name.startswith("decoder.lm_head."):
        return "lm_head", name[len("decoder.lm_head.") :].replace("layer_norm", "norm")
    name = name[len("decoder.sentence_encoder.") :]
    for theirs, ours in [
        ("embed_tokens.", "tokens."),
        ("emb_layer_norm.", "embed_norm."),
        ("self_attn.in_proj_", "attention.qkv."),
        ("self_attn.out_proj.", "attention.out."),
        ("self_attn_layer_norm.", "attention_norm."),
        ("final_layer_norm.", "ffn_norm."),
        ("relative_attention_bias.", "positions.t5.table."),
        ("pos_q_linear.", "positions.untied.q."),
        ("pos_k_linear.", "positions.untied.k."),
        ("pos_ln.", "positions.untied.norm."),
    ]:
        name = name.replace(theirs, ours)
    return "encoder", "positions.untied.table.weight" if name == "pos.weight" else name


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
    states = {part: {} for part in parts}
    prefix = f"{which}/state/"
    for key in REFERENCE.files:
        if key.startswith(prefix):
            part, name = to_our_name(key[len(prefix) :])
            states[part][name] = torch.from_numpy(REFERENCE[key])
    torch.testing.assert_close(states["lm_head"].pop("weight"), states["encoder"]["tokens.weight"])  # tied
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
        _, name = to_our_name("decoder.sentence_encoder." + key[len("grad/") :])
        close(parameters[name].grad, gradient)
