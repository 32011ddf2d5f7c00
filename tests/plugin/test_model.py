"""Named architectures, parameter counts, heads in checkpoints, precision, vocabulary checks."""

import pickle
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from fairseq import models as fairseq_models
from fairseq.checkpoint_utils import load_model_ensemble
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY
from fairseq.tasks.masked_lm import MaskedLMTask
from helpers import attention_weights, build, load, make_dictionary, pretrain_arguments, train, write_data
from omegaconf import OmegaConf

from tupe import positions
from tupe.checkpoints.trained import read_model
from tupe.cli import main as tupe
from tupe.common.architectures import ARCHITECTURES, SIZES, with_size
from tupe.encoder import ModelConfig
from tupe.plugin import model as tupe_model
from tupe.plugin.model import core_config, load_scheme_files
from tupe.plugin.pretrained import structure
from tupe.schemes import SCHEMES

PRESETS = [(arch, size) for arch in ARCHITECTURES for size in SIZES]


TOKENS = torch.tensor([[0, 5, 6, 7, 2, 1, 1], [0, 9, 8, 9, 10, 11, 2]])


@pytest.mark.parametrize(("arch", "size"), PRESETS)
def test_preset_and_pickle(arch, size):
    name = with_size(arch, size)
    config = MODEL_DATACLASS_REGISTRY[name]()
    layers, width, heads, ffn = SIZES[size]
    core = core_config(config)
    assert (core.position, core.cls) == ARCHITECTURES[arch]
    assert (config.encoder_layers, config.encoder_embed_dim) == (layers, width)
    assert (config.encoder_attention_heads, config.encoder_ffn_embed_dim) == (heads, ffn)
    assert pickle.loads(pickle.dumps(config)) == config
    assert getattr(tupe_model, name) is ARCH_MODEL_REGISTRY[name]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture_computes_what_it_says(arch):
    model = build(arch + "_tiny").eval()
    position, cls = ARCHITECTURES[arch]
    assert model.encoder.positions.name == position
    assert model.encoder.positions.untie_cls == (cls == "untied")
    logits, _ = model(TOKENS)
    assert logits.shape == (2, 7, 54) and logits.isfinite().all()


def parameters(arch, **options):
    with torch.device("meta"):
        return sum(p.numel() for p in build(arch, **options).parameters())


def test_parameter_counts_of_the_paper():
    """TUPE-A has 2 x 768 x 768 = 1.18 M parameters more than BERT-A, plus what the paper's count leaves out."""
    width, heads = 768, 12
    projections, biases, norm, theta = 2 * width * width, 2 * width, 2 * width, width
    assert projections == 1_179_648
    assert parameters("tupe_a") - parameters("bert_a") == projections + biases + norm + theta
    assert parameters("tupe_a_tie_cls") == parameters("tupe_a") == parameters("bert_a_d")
    assert parameters("tupe_r") - parameters("tupe_a") == 33 * heads
    assert parameters("bert_r") - parameters("bert_a") == 33 * heads


def test_bert_base_has_its_known_size():
    """110 M for BERT-Base with 30,522 types: embeddings, positions, 12 layers, LM head; no pooler, no segments."""
    words = make_dictionary(30522 - 4)
    with torch.device("meta"):
        model = build("bert_a", words)
    layer = 4 * (768 * 768 + 768) + 2 * 768 * 3072 + 3072 + 768 + 4 * 768
    embeddings = (30522 + 512) * 768 + 2 * 768
    head = 768 * 768 + 768 + 2 * 768 + 30522
    assert sum(p.numel() for p in model.parameters()) == 12 * layer + embeddings + head


def test_lm_head_only_on_masked_tokens():
    model = build().eval()
    masked = torch.zeros_like(TOKENS, dtype=torch.bool)
    masked[0, 2] = masked[1, 4] = True
    seen = []
    model.lm_head.dense.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape))
    some, _ = model(TOKENS, masked_tokens=masked)
    everything, _ = model(TOKENS)
    torch.testing.assert_close(some, everything[masked], rtol=1e-5, atol=1e-6)
    assert seen[0] == (2, 128)  # [masked, C]
    features, _ = model(TOKENS, features_only=True)
    assert features.shape == (2, 7, 128)


def test_lm_head_is_tied():
    model = build()
    assert "lm_head.weight" not in model.state_dict()
    model(TOKENS)[0].sum().backward()
    assert model.encoder.tokens.weight.grad[49].abs().sum() > 0  # never in the input, so touched by the output


# ---- heads in checkpoints ----


@pytest.mark.parametrize("mine", [None, 3])
def test_head_that_does_not_fit_is_dropped_with_a_warning(mine, caplog):
    trained, fresh = build(), build()
    trained.register_classification_head("rte", num_classes=2)
    if mine:
        fresh.register_classification_head("rte", num_classes=mine)
        before = fresh.classification_heads["rte"].out_proj.weight.clone()
    fresh.load_state_dict(trained.state_dict())
    assert "dropping the checkpoint's head 'rte'" in caplog.text
    if mine:
        assert torch.equal(before, fresh.classification_heads["rte"].out_proj.weight)


# ---- precision ----


def test_bf16_autocast_is_close_and_keeps_float32_weights():
    """Logits within 2 % of the largest logit; loss within 1 %; softmax rows sum to 1 within bfloat16's step of 2^-8."""
    exact, rounded = build().eval(), build(autocast="bf16").eval()
    a, b = exact(TOKENS)[0], rounded(TOKENS)[0]
    assert b.dtype == torch.bfloat16 and all(p.dtype == torch.float32 for p in rounded.parameters())
    assert (a - b.float()).abs().max() < 0.02 * a.abs().max()
    real = TOKENS.ne(1)
    losses = [torch.nn.functional.cross_entropy(x.float()[real], TOKENS[real]) for x in (a, b)]
    torch.testing.assert_close(losses[1], losses[0], rtol=0.01, atol=0)
    losses[1].backward()
    assert all(p.grad.dtype == torch.float32 for n, p in rounded.named_parameters() if p.grad is not None)
    with torch.autocast("cpu", torch.bfloat16):
        weights = attention_weights(rounded.encoder, TOKENS)[0]
    torch.testing.assert_close(weights.float().sum(-1), torch.ones(2, 2, 7), atol=2**-8, rtol=0)
    rounded.register_classification_head("rte", num_classes=2)
    assert rounded(TOKENS, classification_head_name="rte")[0].dtype == torch.float32  # equal logits would be frequent


def test_autocast_refuses_half_weights():
    with pytest.raises(ValueError, match="do not combine it with --fp16"):
        build(autocast="bf16").half()(TOKENS)


# ---- vocabulary and settings ----


def test_another_dictionary_is_refused():
    for other in (make_dictionary(40), make_dictionary(prefix="x")):
        with pytest.raises(ValueError, match="the dictionary is not the checkpoint's"):
            build(dictionary=other).load_state_dict(build().state_dict())


def test_contradicting_settings_are_refused():
    with pytest.raises(ValueError, match="trained with position=untied\\+t5 cls=untied .*; .* cls=tied"):
        build(cls="tied").load_state_dict(build().state_dict())
    with pytest.raises(ValueError, match="normaliser=softmax .*; this model has .*normaliser=l2"):
        build(normaliser="l2").load_state_dict(build().state_dict())
    with pytest.raises(ValueError, match="heads=2 .*; this model has .*heads=4"):  # of which no tensor's shape knows
        build(position="untied", encoder_attention_heads=4).load_state_dict(build(position="untied").state_dict())


def test_a_model_without_positions_for_its_tokens_is_refused():
    with pytest.raises(ValueError, match="max_positions=0; valid: 1 to 1e"):
        build(max_positions=0)
    with pytest.raises(ValueError, match="max_positions='64'; valid: int"):
        ModelConfig(max_positions="64")  # of a config.json
    task = MaskedLMTask(SimpleNamespace(tokens_per_sample=33, seed=1), make_dictionary())
    for arch in ("tupe_r_tiny", "electra_tupe_r_tiny"):
        config = OmegaConf.structured(MODEL_DATACLASS_REGISTRY[arch](max_positions=32))
        with pytest.raises(ValueError, match="sequences of 33 tokens: the model has 32 positions"):
            ARCH_MODEL_REGISTRY[arch].build_model(config, task)
    task.cfg.tokens_per_sample = 32
    config = OmegaConf.structured(MODEL_DATACLASS_REGISTRY["tupe_r_tiny"](max_positions=32, places="random"))
    with pytest.raises(ValueError, match="places=random draws among max_positions=32"):
        ARCH_MODEL_REGISTRY["tupe_r_tiny"].build_model(config, task)


# ---- names of positions ----


def test_checkpoints_keep_the_canonical_spelling():
    """Both in what the model is built from and in the whole configuration, which fairseq writes into checkpoints."""
    model = OmegaConf.structured(MODEL_DATACLASS_REGISTRY["tupe_r_tiny"](position="t5+untied:std:1:norm:False"))
    root = OmegaConf.create({"model": OmegaConf.to_container(model, enum_to_str=True)})
    root.model._name = "tupe_r_tiny"
    built = fairseq_models.build_model(root.model, SimpleNamespace(source_dictionary=make_dictionary()))
    spelling = "untied:norm:False:std:1+t5"
    assert root.model.position == built.cfg.position == built.encoder.positions.name == spelling
    assert structure({"position": "t5+untied:std:1:norm:False"}) == {"position": spelling}


def test_a_file_that_a_checkpoint_names_is_not_run(tmp_path):
    own = tmp_path / "own.py"
    own.write_text(
        "from tupe.positions import PositionScheme, register\n"
        'register("own_nothing")(type("Own", (PositionScheme,), {}))\n'
    )
    config = MODEL_DATACLASS_REGISTRY["bert_a_tiny"](position="own_nothing", position_file=str(own))
    config = OmegaConf.structured(config)
    task = SimpleNamespace(source_dictionary=make_dictionary())
    with pytest.raises(ValueError, match=r"unknown position scheme 'own_nothing'.*own.py was not run"):
        ARCH_MODEL_REGISTRY["bert_a_tiny"].build_model(config, task)
    try:
        load_scheme_files(config)
        model = ARCH_MODEL_REGISTRY["bert_a_tiny"].build_model(config, task)
        assert model.encoder.positions.name == "own_nothing"
        config.position = "own_nothin"
        with pytest.raises(ValueError, match="'own_nothin'.*did you mean 'own_nothing'"):
            ARCH_MODEL_REGISTRY["bert_a_tiny"].build_model(config, task)
    finally:
        SCHEMES.pop("own_nothing", None)


OWN_SCHEME = """
from tupe.positions import PositionScheme, register

@register("own_shift")
class Shift(PositionScheme):
    def __init__(self, dims, slope: float = 1.0):
        super().__init__(dims)
        self.heads, self.slope = dims.heads, slope

    def bias(self, positions, scale):
        return (self.slope * positions.index.float()).expand(self.heads, positions.length, -1)
"""


def test_schemes_from_files_are_trained_and_asked_for_again(tmp_path):
    """Through fairseq-train; the checkpoint holds schemes and files, and names the files in vain when it is loaded."""
    data, own, second = write_data(tmp_path / "data"), tmp_path / "own.py", tmp_path / "second.py"
    own.write_text(OWN_SCHEME)
    second.write_text(OWN_SCHEME.replace("own_shift", "own_second"))
    position = "own_shift:slope:0.50+absolute+own_second"
    options = [f"--position-file={own}:{second}", f"--position={position}", "--cls=tied", "--max-update=2"]

    def forget():  # as a new process would find it
        return [SCHEMES.pop(name, None) for name in ("own_shift", "own_second")]

    try:
        assert len(train(pretrain_arguments(data, tmp_path / "run", *options))) == 2
        assert all(forget())
        positions._loaded_files.clear()
        saved = load(tmp_path / "run" / "checkpoint_last.pt")["cfg"]["model"]
        assert saved["position"] == "absolute+own_second+own_shift:slope:0.5"
        assert saved["position_file"] == f"{own}:{second}"
        checkpoint, swapped = tmp_path / "run" / "checkpoint_last.pt", tmp_path / "swapped"
        unknown = "unknown position scheme 'own_second'.*own.py, .*second.py was not run.*`import own, second`"
        with pytest.raises(ValueError, match=unknown):
            load_model_ensemble([str(checkpoint)])
        with pytest.raises(ValueError, match="unknown position scheme 'own_second'.*second.py was not run"):
            positions.load_scheme_file(own)
            load_model_ensemble([str(checkpoint)])
        swap = ["checkpoint", "swap", f"--checkpoint={checkpoint}", "--position=own_shift+t5", f"--output={swapped}"]
        forget()
        refused = CliRunner().invoke(tupe, swap)
        assert refused.exit_code == 2 and "--position-file" in refused.stderr
        moved = tmp_path / "moved.py"
        moved.write_text(OWN_SCHEME)
        done = CliRunner().invoke(tupe, [f"--position-file={moved}", f"--position-file={second}", *swap])
        assert done.exit_code == 0 and read_model(swapped).config.position == "t5+own_shift", done.output
        forget()
        copies = tmp_path / "copy.py", tmp_path / "copy2.py"
        for copy, file in zip(copies, (own, second), strict=True):
            copy.write_text(file.read_text())
            positions.load_scheme_file(copy)
        (loaded,), _ = load_model_ensemble([str(checkpoint)])
        assert loaded.encoder.positions.name == saved["position"]
    finally:
        forget()
