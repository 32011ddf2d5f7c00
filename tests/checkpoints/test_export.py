"""The Hugging Face export: same logits and same ids, for every scheme, in this process; and in an environment of its
own without fairseq and without this package (slow)."""

import copy
import functools
import json
import pickle
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from helpers import build_from, configuration, never_pack, new_checkpoint
from test_house import BLOCK, run

from tupe.attention import NORMALISERS
from tupe.checkpoints import export as exports
from tupe.checkpoints.export import command, export, model_card
from tupe.checkpoints.trained import read_model
from tupe.common.architectures import ARCHITECTURES, ELECTRA
from tupe.common.prepared import tokenizer_files
from tupe.data.splits import read_symbols
from tupe.encoder import BLOCKS
from tupe.modeling_tupe import TupeForSequenceClassification
from tupe.plugin.pretrained import load_dictionary
from tupe.positions import CLS, Dims, bounded_schemes, check_combination, overrides, parse
from tupe.run.folder import write_together
from tupe.run.record import Record
from tupe.schemes import SCHEMES
from tupe.text import TextEncoder

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("own_module_cache")
ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = 1e-4
SENTENCES = [
    "The cat sat on the mat; it didn't move.",
    "Visit https://example.com/a?b=1 or write to me@example.org!",
    "Naïve “quotes” — and   spaces, e.g. U.S. 3.14% of it.",
    "",
    "Two <mask> sentences. The second one, too: <s> is text, <unk> is not.",
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Pieces and dictionary, as `tupe prepare corpus` leaves them."""
    import sentencepiece

    folder = tmp_path_factory.mktemp("data")
    text = " ".join(SENTENCES * 3).lower().replace("<mask>", "").replace("<s>", "").replace("<unk>", "")
    (folder / "text").write_text(text.replace(".", " .\n"), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"), model_prefix=str(folder / "sentencepiece.bpe"), vocab_size=70, model_type="bpe",
        bos_id=-1, eos_id=-1, pad_id=-1, minloglevel=2,
    )  # fmt: skip
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "sentencepiece.bpe.model"))
    pieces = [model.id_to_piece(i) for i in range(len(model)) if model.id_to_piece(i) != "<unk>"]
    (folder / "dict.txt").write_text("".join(f"{piece} 1\n" for piece in pieces), encoding="utf-8")
    return folder


@functools.cache
def configuration_of(arch, criterion):
    return configuration(arch, {"max_positions": 40}, criterion=criterion)


def write_checkpoint(path, data, heads=(), arch="tupe_r", **options):
    """A tiny model whose every parameter matters, as a checkpoint; returns the model."""
    sizes = {"encoder_layers": 2, "encoder_embed_dim": 32, "encoder_ffn_embed_dim": 48, "encoder_attention_heads": 4}
    criterion = "electra" if arch.startswith("electra") else "masked_lm"
    cfg = copy.deepcopy(configuration_of(arch, criterion))
    cfg["model"].update({"max_positions": 40, **sizes, **options})
    torch.manual_seed(0)
    model = build_from(cfg, load_dictionary(data / "dict.txt"))
    for name, classes in heads:
        model.register_classification_head(name, classes, 24)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape) * 0.1)
    torch.save(new_checkpoint(cfg, model.state_dict()), path)
    return model.eval()


def write_scheme(path, data, position):
    """A checkpoint with these positions and, where that has a meaning, untied [CLS]; returns the model."""
    try:
        return write_checkpoint(path, data, position=position, cls="untied")
    except ValueError as error:  # no position term in attention that [CLS] could be untied from
        assert "cls=untied" in str(error)
        return write_checkpoint(path, data, position=position, cls="tied")


def batch(model):
    """Ids [3, 12] with padding, and where they are real."""
    torch.manual_seed(1)
    tokens = torch.randint(4, len(model.dictionary), (3, 12))
    tokens[:, 0], tokens[1, 9:], tokens[2, 4:] = 0, 1, 1
    tokens[0, 5:7] = 2  # </s> </s>
    return tokens, tokens.ne(1)


def load(auto, folder, **options):
    return getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True, **options).eval()


def same(ours, theirs, real=None):
    real = torch.ones(ours.shape[:1], dtype=torch.bool) if real is None else real
    difference = (ours[real] - theirs[real]).abs().max().item()
    assert difference < TOLERANCE and ours[real].abs().max() > 0.1, difference
    return difference


def can_be_per_layer(name):
    """It acts in the layers, and has parameters, but not its own in every layer already."""
    scheme = SCHEMES[name]
    has_parameters = any(True for _ in scheme(Dims(8, 16, 2, 2, 8, 8)).parameters())
    return has_parameters and not scheme.own_projections and not overrides(scheme, "embed", "rotate")


PER_LAYER = [name for name in SCHEMES if can_be_per_layer(name)]


# Which together fill in every hook of a scheme. The export has the same file of schemes: the others are slow.
SOME = ["nopos", "absolute", "untied+t5:layer", "deberta", "rope_values", "shaw_values", "urpe", "window:size:4"]
SOME += ["pope:layer"]  # which makes q and k wider
SOME += ["+".join(f"{name}:layer" for name in PER_LAYER)]


@pytest.mark.parametrize(
    "position", [*SOME, *(pytest.param(name, marks=pytest.mark.slow) for name in SCHEMES if name not in SOME)]
)
def test_every_scheme_has_the_same_logits(position, data, tmp_path):
    model = write_scheme(tmp_path / "c.pt", data, position)
    out = tmp_path / re.sub(r"\W", "_", f"out_{position}")[:60]  # transformers makes a module of this name
    export(tmp_path / "c.pt", out, data)
    tokens, real = batch(model)
    theirs = load("AutoModelForMaskedLM", out)
    with torch.no_grad():
        logits, _ = model(tokens)
        _, hiddens = model.encoder(tokens, return_all_hiddens=True)
        for kind in ("sdpa", "eager"):
            theirs.config._attn_implementation = kind
            got = theirs(tokens, output_hidden_states=True)
            same(got.logits, logits, real)
            same(got.hidden_states[1], hiddens[1], real)
        if not bounded_schemes(position):  # longer than in training
            longer = tokens.repeat(1, 1 + model.cfg.max_positions // tokens.size(1))
            same(theirs(longer).logits, model(longer)[0], longer.ne(1))
    back, saved = read_model(out).weights, read_model(tmp_path / "c.pt").weights
    assert back.keys() == saved.keys() and all(torch.equal(back[key], value) for key, value in saved.items())


def test_cls_zero_has_the_same_logits(data, tmp_path):
    model = write_checkpoint(tmp_path / "c.pt", data, cls="zero")
    export(tmp_path / "c.pt", tmp_path / "out_zero", data)
    tokens, real = batch(model)
    theirs = load("AutoModelForMaskedLM", tmp_path / "out_zero")
    assert theirs.config.cls_position == "zero"
    with torch.no_grad():
        same(theirs(tokens, attention_mask=real.long()).logits, model(tokens)[0], real)


@pytest.mark.parametrize(
    "block, normaliser",
    [
        pytest.param(block, normaliser, marks=[] if block == "gau" or normaliser == "softmax" else pytest.mark.slow)
        for block in BLOCKS
        for normaliser in NORMALISERS
    ],
)
def test_every_block_and_normaliser_has_the_same_logits(block, normaliser, data, tmp_path):
    options = {"block": block, "normaliser": normaliser, "segments": "learned", "layer_norm_eps": 1e-3}
    model = write_checkpoint(tmp_path / "c.pt", data, position="absolute+t5", cls="untied", **options)
    export(tmp_path / "c.pt", tmp_path / f"out_{block}_{normaliser}", data)
    tokens, real = batch(model)
    theirs = load("AutoModelForMaskedLM", tmp_path / f"out_{block}_{normaliser}")
    with torch.no_grad():
        same(theirs(tokens, attention_mask=real.long()).logits, model(tokens)[0], real)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture_comes_back_by_its_name(arch, data, tmp_path):
    model = write_checkpoint(tmp_path / "c.pt", data, arch=arch)
    out = tmp_path / f"out_{arch}"
    export(tmp_path / "c.pt", out, data)
    tokens, real = batch(model)
    with torch.no_grad():
        same(load("AutoModelForMaskedLM", out)(tokens).logits, model(tokens)[0], real)
    back = read_model(out)
    assert back.architecture == arch and back.config.cls == str(model.cfg.cls)


@pytest.fixture(scope="module")
def exported(data, tmp_path_factory):
    """(model, checkpoint, export) of a TUPE-R with a classification head, through the command line"""
    folder = tmp_path_factory.mktemp("exported")
    model = write_checkpoint(folder / "checkpoint.pt", data, heads=[("rte", 3)])
    words = [f"--checkpoint={folder}/checkpoint.pt", f"--output={folder}/out_exported", f"--data={data}"]
    result = CliRunner().invoke(command, words)
    assert result.exit_code == 0, result.output
    return model, folder / "checkpoint.pt", folder / "out_exported"


def test_of_the_manifest_the_text_encoder_s_part_travels(vocabulary, tmp_path):
    """The rest lists every file that the data was made of."""
    data, out = shutil.copytree(vocabulary, tmp_path / "data"), tmp_path / "out"
    manifest = {"settings": {"inputs": [["books/1.txt", "text", 1, 1]] * 99}, "language": "de"}
    (data / "manifest.json").write_text(json.dumps(manifest))
    write_together(out, tokenizer_files(data, 16))
    assert json.loads((out / "manifest.json").read_text()) == {"language": "de"}
    assert (out / "sentencepiece.bpe.model").read_bytes() == (data / "sentencepiece.bpe.model").read_bytes()


def test_the_model_card_has_settings_data_scores_and_licence(exported, tmp_path):
    model, checkpoint, out = exported
    card = (out / "README.md").read_text()
    parameters = sum(p.numel() for p in model.parameters())
    assert card.startswith("---\nlicense: mit\nlibrary_name: ")
    assert "\nLicence: the code in this folder is MIT. What the weights" in card
    assert "`untied+t5`" in card and f"{parameters:,} parameters" in card
    manifest = {"counts": {"documents kept": 1234, "tokens": 56789}, "vocab_size": 70}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    scores = [{"split": "valid", "num_updates": n, "pearson": value} for n, value in ((5, 81.25), (9, 80))]
    Record(
        "STS-B", splits=["valid"], metrics=["pearson"], scores=scores, command="tupe finetune", budget={"max_epoch": 3}
    ).save(tmp_path)
    trained = replace(read_model(checkpoint), updates=5, path=tmp_path)
    card = model_card(trained, tmp_path)
    assert "`AutoModel.from_pretrained(FOLDER, trust_remote_code=True)`" in card
    without = model_card(trained, tmp_path, code=False)
    assert "`import tupe.hf; AutoModel.from_pretrained(FOLDER)`" in without and "MIT" not in without
    assert without.startswith("---\nlanguage: en\nlibrary_name: ") and "\nLicence: what the weights" in without
    assert "1,234 documents, 56,789 words" in card and "| pearson on STS-B, validation | 81.25 |" in card
    assert "| longest input | 40 tokens in training |" in card and "| max epoch | 3 |" in card
    assert "| labels | LABEL_0 (0), LABEL_1 (1)" in model_card(trained, tmp_path, "rte")
    for updates in (0, 7):  # stretched, averaged; from another folder
        card = model_card(replace(trained, updates=updates), tmp_path)
        assert "validation |" not in card and "It was not tested.\n" in card
        assert ("| max epoch | 3 |" in card) == (updates > 0)  # those of the model before


def test_a_card_names_no_folder_of_the_machine(exported, tmp_path):
    command = (
        "tupe pretrain --data /home/me/data --output='/srv/my x/run' task.data=/a/b:/c/d lr=1/2 "
        "model.position=t5+rope:base:1"
    )
    Record("x", command=command).save(tmp_path)
    card = model_card(replace(read_model(exported[1]), path=tmp_path, updates=5), tmp_path)
    expected = "`tupe pretrain --data data --output=run task.data=b:d lr=1/2 model.position=t5+rope:base:1`"
    assert expected in card


@pytest.mark.thorough
def test_onnx_is_written_and_checked(exported, data, tmp_path):
    for name in ("onnx", "onnxscript"):
        pytest.importorskip(name)
    runtime = pytest.importorskip("onnxruntime")
    model, checkpoint, _ = exported
    export(checkpoint, tmp_path / "out", data, onnx=True)
    session = runtime.InferenceSession(str(tmp_path / "out/model.onnx"))
    tokens, real = batch(model)
    got = session.run(None, {"input_ids": tokens.numpy(), "attention_mask": real.long().numpy()})[0]
    with torch.no_grad():  # the classifier, as there is one
        expected, _ = model(tokens, features_only=True, classification_head_name="rte")
    torch.testing.assert_close(torch.from_numpy(got), expected, rtol=1e-4, atol=1e-4)


def test_onnx_without_its_packages_is_refused_in_a_line(exported, data, tmp_path, monkeypatch):
    find = exports.importlib.util.find_spec
    monkeypatch.setattr(exports.importlib.util, "find_spec", lambda name: None if "onnx" in name else find(name))
    with pytest.raises(ValueError, match="--onnx needs onnx, onnxscript, onnxruntime: pip install onnx onnxscript"):
        export(exported[1], tmp_path / "out", data, onnx=True)
    assert not (tmp_path / "out").exists()


def test_all_auto_classes(exported):
    model, _, out = exported
    tokens, real = batch(model)
    rubbish = torch.where(real, tokens, torch.full_like(tokens, 7))  # what the attention mask hides must not matter
    with torch.no_grad():
        features = model(tokens, features_only=True)[0]
        for inputs in ({"input_ids": tokens}, {"input_ids": rubbish, "attention_mask": real.long()}):
            same(load("AutoModel", out)(**inputs).last_hidden_state, features, real)
            same(load("AutoModelForMaskedLM", out)(**inputs).logits, model(tokens)[0], real)
            classes = model(tokens, classification_head_name="rte")[0]
            same(load("AutoModelForSequenceClassification", out)(**inputs).logits, classes)
            answer = load("AutoModelForQuestionAnswering", out)(**inputs)
            assert answer.start_logits.shape == answer.end_logits.shape == (3, 12)
        classifier = load("AutoModelForSequenceClassification", out)
        assert classifier.config.num_labels == 3
        assert classifier.accepts_loss_kwargs is False  # Trainer has to divide the loss when it accumulates gradients
        fresh = load("AutoModelForSequenceClassification", out, num_labels=5, ignore_mismatched_sizes=True)
        assert fresh(tokens).logits.shape == (3, 5)


def test_a_new_model_starts_like_the_encoder(exported):
    """transformers initialises a second time, by modules: the smaller values of l2 must survive that."""
    changes = {"position": "rope", "cls_position": "tied", "normaliser": "l2", "hidden_size": 96}
    config = transformers.AutoConfig.from_pretrained(exported[2], trust_remote_code=True, **changes)
    torch.manual_seed(0)
    model = transformers.AutoModelForMaskedLM.from_config(config, trust_remote_code=True)
    attention = model.tupe.encoder.layers[0].attention
    shrunk = 0.02 * config.max_position_embeddings**-0.25
    stds = [weight.std().item() for weight in (*attention.qkv.weight.chunk(3), attention.out.weight)]
    assert stds == pytest.approx([0.02, 0.02, shrunk, shrunk], rel=0.05)


def test_added_tokens(exported, tmp_path):
    """A larger table has a larger bias of the head, also after saving and loading; the old logits stay."""
    model, ids = load("AutoModelForMaskedLM", exported[2]), torch.tensor([[0, 5, 6, 2]])
    with torch.no_grad():
        before = model(ids).logits
        size = before.size(2)
        model.resize_token_embeddings(size + 3)
        model.save_pretrained(tmp_path / "larger")
        for larger in (model, load("AutoModelForMaskedLM", tmp_path / "larger")):
            logits = larger(ids).logits
            assert logits.shape == (1, 4, size + 3) and torch.equal(logits[..., :size], before)
        model.resize_token_embeddings(size)
        assert torch.equal(model(ids).logits, before)


def test_tokens_that_were_added(vocabulary, tmp_path):
    """The longest that fits, back and forth, in another process too; ids that mean nothing are <unk>."""
    text = tokenizer_files(vocabulary, 64)
    write_together(tmp_path, {**text, **exports.modelling_code("t5", text)})
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=True)
    tokenizer.add_tokens(["new", "newer"])
    ids = tokenizer("the newer mat new <mask>")["input_ids"]
    assert [tokenizer.convert_tokens_to_ids(token) in ids for token in ("newer", "new")] == [True, True]
    assert tokenizer.decode(ids, skip_special_tokens=True).split()[1] == "newer"
    copied = pickle.loads(pickle.dumps(tokenizer))
    assert copied("the newer mat")["input_ids"] == tokenizer("the newer mat")["input_ids"]


@pytest.mark.parametrize("options", [{"position_ids": torch.arange(4)[None]}, {"atention_mask": torch.ones(1, 4)}])
def test_inputs_that_do_not_exist_are_refused(options, exported):
    model, ids = load("AutoModelForMaskedLM", exported[2]), torch.tensor([[0, 5, 6, 2]])
    with pytest.raises(ValueError, match=f"{next(iter(options))}: this model has no such input; valid: input_ids"):
        model(ids, **options)
    model(ids, position_ids=None, use_cache=False)


def test_padding_anywhere(exported, monkeypatch):
    """Masks with holes: real tokens get what our model gets that computes on padding too."""
    model, _, out = exported
    tokens, _ = batch(model)
    mask = tokens.ne(1).long()
    mask[0, 1:3] = mask[1, 4] = mask[2, -3:] = 0
    theirs = load("AutoModelForMaskedLM", out)
    ids = tokens.masked_fill(mask == 0, 1)
    assert theirs.tupe.encoder.packing(ids).indices is not None
    never_pack(monkeypatch)
    same(theirs(tokens, attention_mask=mask).logits, model(ids)[0], ids.ne(1))


def outputs(model, ids, mask=None):
    """[{output: value}] of each text, of its real tokens alone where there is a value for each token."""
    real, name = ids != 1 if mask is None else mask != 0, type(model).__name__
    answers = ids.eq(3).byte().argmax(1)
    options = {
        "TupeForMaskedLM": {"labels": ids.masked_fill(~real, -100)},
        "TupeForSequenceClassification": {"labels": torch.tensor([0, 1, 1, 0])},
        "TupeForQuestionAnswering": {"start_positions": answers, "end_positions": answers},
    }.get(name, {})
    found = model(ids, attention_mask=mask, output_hidden_states=True, **options)
    values = {key: x for key, x in found.items() if key not in ("loss", "hidden_states")}
    values |= {f"hidden {i}": x for i, x in enumerate(found.hidden_states)}
    texts = [
        {key: x[row][real[row]] if x.shape[:2] == ids.shape else x[row] for key, x in values.items()}
        for row in range(len(ids))
    ]
    return texts, found.get("loss", torch.zeros(()))


HEADS = ["TupeModel", "TupeForMaskedLM", "TupeForSequenceClassification", "TupeForQuestionAnswering"]


SUMS = ["untied+t5", "rope+window:size:4", "shaw+shaw_values"]


@pytest.mark.parametrize("cls", [pytest.param(cls, marks=[] if cls == "tied" else pytest.mark.thorough) for cls in CLS])
@pytest.mark.parametrize("position", [*SCHEMES, *SUMS])
def test_positions_are_counted_from_the_first_real_token(position, cls, exported):
    """Padding on the left, on both sides and on the right give the same, on both attention paths, and so do masks that
    say where it is; in every head, which do not know the scheme that they are tried with."""
    try:
        check_combination(position, parse(position), cls)
    except ValueError:
        pytest.skip("no such combination")
    config = transformers.AutoConfig.from_pretrained(exported[2], trust_remote_code=True)
    auto = transformers.AutoModel.from_config(config, trust_remote_code=True)  # which imports the code
    config.position, config.cls_position = position, cls
    texts = [[0, 5, 3, 9, 2], [0, 6, 7, 2, 2, 3, 8, 2], [0, 2, 3], [0, 4, 5, 6, 3, 7, 2, 2, 9, 2]]
    both = [(0, 5), (2, 0), (3, 4), (0, 0)]  # columns of padding on the left and on the right

    def padded(sides):
        return torch.tensor([[1] * left + text + [1] * right for text, (left, right) in zip(texts, sides, strict=True)])

    right, left = (padded([sides(sum(pair)) for pair in both]) for sides in (lambda n: (0, n), lambda n: (n, 0)))
    for name in HEADS if position in SUMS else HEADS[:1]:
        torch.manual_seed(0)
        model = getattr(sys.modules[type(auto).__module__], name)(config).eval()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.3 * torch.randn_like(p))
        for attention in ("sdpa", "eager"):
            model.config._attn_implementation = attention
            expected, mixed = outputs(model, right), padded(both)
            hidden = mixed.masked_fill(mixed == 1, 9), (mixed != 1).long()
            for batch in [(left,), (mixed,), hidden] if name == "TupeModel" else [hidden]:
                torch.testing.assert_close(outputs(model, *batch), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("position", ["kerple+urpe", "alibi:learned:True"])
def test_parameters_without_weight_decay_travel(position, data, tmp_path):
    """Through loading, which replaces parameters, to Trainer, which gets the optimizer that the page shows."""
    write_checkpoint(tmp_path / "checkpoint.pt", data, position=position, cls="tied")
    export(tmp_path / "checkpoint.pt", tmp_path / "out", data)
    model = load("AutoModelForSequenceClassification", tmp_path / "out").train()
    ends = ("log_factor", "inner", "urpe.table", "log_slopes")
    marked = {name for name, _ in model.named_parameters() if name.endswith(ends)}
    groups = model.parameter_groups(1.0)
    assert {name for name, p in model.named_parameters() if any(p is q for q in groups[1]["params"])} == marked != set()
    pytest.importorskip("accelerate")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    examples = [{"input_ids": [0, 5, 6, 2], "label": 1}] * 2
    arguments = transformers.TrainingArguments(str(tmp_path / "run"), max_steps=2, report_to=[], use_cpu=True)
    optimizer = torch.optim.SGD(model.parameter_groups(1.0), lr=0.1)
    for p in model.parameters():
        p.register_hook(torch.zeros_like)  # what changes then is changed by weight decay
    transformers.Trainer(model, arguments, train_dataset=examples, optimizers=(optimizer, None)).train()
    same = {name for name, p in model.named_parameters() if torch.equal(p, before[name])}
    assert marked <= same and len(same) < len(before) and same - marked <= {n for n in before if not before[n].any()}


def test_a_hole_in_a_mask_keeps_its_positions(exported):
    """Also behind padding on the left; and a text of nothing but padding makes no trouble."""
    _, _, out = exported
    model, ids = load("AutoModelForMaskedLM", out), torch.tensor([[0, 5, 6, 7, 8, 2, 1, 1], [1] * 8])
    mask = torch.tensor([[1, 1, 0, 0, 1, 1, 0, 0], [0] * 8])
    expected = model(ids, attention_mask=mask).logits[0, [0, 1, 4, 5]]
    shifted = model(ids.roll(2, 1), attention_mask=mask.roll(2, 1)).logits[0, [2, 3, 6, 7]]
    torch.testing.assert_close(shifted, expected)
    assert (model(torch.tensor([[0, 5, 8, 2]])).logits[0] - expected).abs().max() > 0.01


@pytest.mark.thorough
def test_padding_on_the_left_in_compiled_code(exported):
    model = load("AutoModelForSequenceClassification", exported[2])
    ids = torch.tensor([[1, 1, 0, 5, 6, 2], [0, 5, 6, 7, 8, 2]])
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(ids).logits, model(ids).logits)


def test_no_labels(exported):
    """A batch without a label has the loss 0, and gradients of 0."""
    _, _, out = exported
    ids = torch.tensor([[0, 5, 6, 2]])
    for auto, labels in [
        ("AutoModelForMaskedLM", {"labels": torch.full_like(ids, -100)}),
        ("AutoModelForSequenceClassification", {"labels": torch.tensor([-100])}),
        ("AutoModelForQuestionAnswering", dict.fromkeys(["start_positions", "end_positions"], torch.tensor([9]))),
    ]:
        model = load(auto, out)
        loss = model(ids, **labels).loss
        loss.backward()
        assert loss == 0 and all(p.grad is None or not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize(
    "position",
    ["untied+t5", "urpe", "kerple", "fire", "alibi:learned:True", "transformer_xl", "rope:yarn:4", "nonparametric"],
)
def test_what_the_files_lack_starts_as_in_a_new_model(position, exported, monkeypatch, tmp_path):
    """transformers allocates it: here with a value that no parameter has."""
    _, _, out = exported
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *args, **options: empty_like(*args, **options).fill_(77))
    load("AutoModel", out).save_pretrained(tmp_path)  # without an LM head, and without another position's parameters
    options = {} if position == "untied+t5" else {"position": position, "cls_position": "tied"}
    model = load("AutoModelForMaskedLM", tmp_path, **options)
    values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert not [name for name, value in values.items() if (value == 77).any()]
    if "yarn" in position:
        assert model.tupe.encoder.positions["rope"].trained == model.config.max_position_embeddings
    assert model.lm_head.norm.weight.eq(1).all()


def test_a_new_classifier_starts_as_in_fairseq(exported):
    classifier = load("AutoModelForSequenceClassification", exported[2], num_labels=5, ignore_mismatched_sizes=True)
    new = load("AutoModelForQuestionAnswering", exported[2]).qa_outputs
    for linear in (classifier.classifier.out_proj, new):
        bound = linear.in_features**-0.5
        assert 0.8 * bound < linear.weight.abs().max() <= bound and linear.bias.abs().max() > 0


def test_losses_are_those_of_transformers(exported):
    """Of bert, with the same logits: which loss follows from the labels."""
    model, _, out = exported
    tokens, mask = batch(model)
    ours = load("AutoModelForSequenceClassification", out)
    logits = ours(tokens, attention_mask=mask).logits
    for labels in (torch.tensor([2, 0, 1]), torch.tensor([[2], [0], [1]]), torch.eye(3)):
        config = transformers.BertConfig(num_labels=3, hidden_size=4, num_attention_heads=1, intermediate_size=4)
        bert = transformers.BertForSequenceClassification(config).eval()
        bert.classifier.forward = lambda x: logits
        expected = bert(tokens, labels=labels).loss
        ours.config.problem_type = None  # as of a model that has seen no labels yet
        torch.testing.assert_close(ours(tokens, attention_mask=mask, labels=labels).loss, expected)
    answers = load("AutoModelForQuestionAnswering", out)
    inside, beyond = torch.tensor([1, 2, 3]), torch.tensor([1, 2, 40])  # the last one was cut off
    loss = answers(tokens[:2], mask[:2], start_positions=inside[:2], end_positions=inside[:2]).loss
    cut = answers(tokens, mask, start_positions=beyond, end_positions=beyond[:, None]).loss
    torch.testing.assert_close(cut, loss)
    assert isinstance(answers(tokens, mask, return_dict=False), tuple)
    answers.config.return_dict = False
    assert isinstance(answers(tokens, mask), tuple)


def test_an_export_is_data_enough_for_another_one(exported, data, tmp_path):
    _, path, _ = exported
    theirs = shutil.copytree(data, tmp_path / "data")
    counts, types = {"documents kept": 1, "tokens": 2}, len(read_symbols(data))
    (theirs / "manifest.json").write_text(json.dumps({"counts": counts, "vocab_size": types, "spacy_model": None}))
    export(path, tmp_path / "out_first", theirs)
    export(path, tmp_path / "out_second", tmp_path / "out_first")
    assert "2 words and signs" in (tmp_path / "out_first" / "README.md").read_text()


def test_heads_travel(exported, data, tmp_path, caplog):
    """A classification head, with its name; transformers' head of answers has no counterpart."""
    _, path, out = exported
    saved, back = read_model(path), read_model(out)
    assert TextEncoder(out).encode("The cat") == TextEncoder(data).encode("The cat")  # the pieces travel too
    assert back.weights.keys() == saved.weights.keys() and back.heads() == ["rte"]
    assert all(torch.equal(back.weights[key], value) for key, value in saved.weights.items())
    load("AutoModelForQuestionAnswering", out).save_pretrained(tmp_path / "out_answers")
    answers = read_model(tmp_path / "out_answers")
    assert "leaving out qa_outputs.weight" in caplog.text
    assert {key.partition(".")[0] for key in answers.weights} == {"encoder"}
    export(out, tmp_path / "out_again", code=False)
    assert (tmp_path / "out_again/model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()


def test_segments(exported, data, tmp_path):
    """Told by `</s> </s>`; token_type_ids that say anything else are refused, because they would have no effect."""
    model = write_checkpoint(tmp_path / "c.pt", data, segments="learned")
    export(tmp_path / "c.pt", tmp_path / "out_segments", data)
    theirs, without = load("AutoModel", tmp_path / "out_segments"), load("AutoModel", exported[2])
    tokens = torch.tensor([[0, 5, 6, 2, 2, 7, 8, 2, 1], [0, 5, 6, 7, 8, 9, 10, 11, 2]])
    second, real = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 0], [0] * 9]), tokens.ne(1)
    with torch.no_grad():
        features = model(tokens, features_only=True)[0]
        for ids in (None, second, torch.zeros_like(second)):
            same(theirs(tokens, token_type_ids=ids).last_hidden_state, features, real)
        model.encoder.segments.weight[1].neg_()  # they do have an effect
        changed = (model(tokens, features_only=True)[0] - features).abs().amax(2)
        assert changed[0, 0] > 1e-3 and changed[1].max() == 0
        with pytest.raises(ValueError, match="no effect: segments begin"):
            theirs(tokens, token_type_ids=1 - second)
        with pytest.raises(ValueError, match="do not exist in this model"):
            without(tokens, token_type_ids=second)
        without(tokens, token_type_ids=torch.zeros_like(second))


def test_same_ids_for_the_same_text(exported, data):
    model, _, out = exported
    tokenizer = transformers.AutoTokenizer.from_pretrained(out, trust_remote_code=True)
    encoder = TextEncoder(data)
    first = encoder.encode(SENTENCES[0])
    for text in SENTENCES[:4]:
        ids = encoder.encode(text)
        assert tokenizer(text)["input_ids"] == [0, *ids, 2]
        assert tokenizer(text, SENTENCES[0])["input_ids"] == [0, *ids, 2, 2, *first, 2]
    ids = tokenizer(SENTENCES[4])["input_ids"]
    pieces = [encoder.ids.get(span.text, 3) for word in encoder.word_spans(SENTENCES[4], ["<mask>"]) for span in word]
    assert ids == [0, *pieces, 2] and tokenizer.mask_token_id in ids
    ids, unmasked = (tokenizer(f"Mr. {word} went home .")["input_ids"] for word in ("<mask>", "Smith"))
    place, smith = ids.index(tokenizer.mask_token_id), tokenizer("Smith")["input_ids"][1:-1]
    assert unmasked == [*ids[:place], *smith, *ids[place + 1 :]]
    assert tokenizer.mask_token_id == len(model.dictionary) - 1 == tokenizer.vocab_size - 1
    assert len(tokenizer) == tokenizer.vocab_size and tokenizer.model_max_length == 40
    padded = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    assert torch.equal(padded["input_ids"].ne(1), padded["attention_mask"].bool())
    short = tokenizer(SENTENCES[0], SENTENCES[1], truncation=True, max_length=20)["input_ids"]
    assert len(short) == 20 and short[0] == 0 and short[-1] == 2 and short.count(2) == 3
    assert tokenizer.decode([0, *first, 2], skip_special_tokens=True) == encoder.decode(first)


def test_saving_from_transformers_and_back(exported, tmp_path):
    model, checkpoint, out = exported
    theirs = load("AutoModelForSequenceClassification", out)
    with torch.no_grad():
        theirs.tupe.encoder.layers[0].fc1.bias.add_(1)  # "trained"
    tokens, _ = batch(model)
    theirs.save_pretrained(tmp_path / "saved_again")
    tokenizer = transformers.AutoTokenizer.from_pretrained(out, trust_remote_code=True)
    tokenizer.save_pretrained(tmp_path / "saved_again")
    reloaded = load("AutoModelForSequenceClassification", tmp_path / "saved_again")
    with torch.no_grad():
        assert torch.equal(reloaded(tokens).logits, theirs(tokens).logits)
    head = read_model(tmp_path / "saved_again").model(TupeForSequenceClassification, "rte")
    with torch.no_grad():
        same(head(tokens).logits, theirs(tokens).logits)


def test_fill_mask(exported):
    model, _, out = exported
    tokenizer = transformers.AutoTokenizer.from_pretrained(out, trust_remote_code=True)
    masked = load("AutoModelForMaskedLM", out)
    guesses = transformers.pipeline("fill-mask", model=masked, tokenizer=tokenizer)("The <mask> sat on the mat.")
    ids = tokenizer("The <mask> sat on the mat.", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        probabilities = torch.softmax(model(ids)[0][0, ids[0].tolist().index(tokenizer.mask_token_id)], dim=-1)
    assert [guess["token"] for guess in guesses] == probabilities.topk(5).indices.tolist()
    np.testing.assert_allclose([guess["score"] for guess in guesses], probabilities.topk(5).values, rtol=1e-4)


@pytest.mark.parametrize("arch", ELECTRA)
def test_electra_exports_its_discriminator(arch, data, tmp_path):
    model = write_checkpoint(tmp_path / "c.pt", data, heads=[("rte", 3)], arch=arch)
    out = tmp_path / f"out_{arch}"
    export(tmp_path / "c.pt", out, data)
    tokens, real = batch(model)
    with torch.no_grad():
        theirs = load("AutoModel", out)(tokens).last_hidden_state
        same(theirs, model(tokens, features_only=True)[0], real)
        classes = load("AutoModelForSequenceClassification", out)(tokens).logits
        same(classes, model(tokens, classification_head_name="rte")[0])
        back = read_model(out).model(TupeForSequenceClassification, "rte")  # an encoder, no ELECTRA any more
        same(back(tokens).logits, classes)
    assert "AutoModelForMaskedLM" not in json.loads((out / "config.json").read_text())["auto_map"]


def test_what_cannot_be_exported_is_said(exported, data, tmp_path):
    _, checkpoint, out = exported
    with pytest.raises(ValueError, match=r"config\.json already"):
        export(checkpoint, out, data)
    (tmp_path / "clone").mkdir()
    (tmp_path / "clone" / "README.md").write_text("theirs")
    with pytest.raises(ValueError, match=r"README\.md exists already in .*clone; choose"):
        export(checkpoint, tmp_path / "clone", data)
    assert [path.read_text() for path in (tmp_path / "clone").iterdir()] == ["theirs"]
    lines = (data / "dict.txt").read_text().splitlines()
    (tmp_path / "dict.txt").write_text("\n".join([lines[1], lines[0], *lines[2:]]) + "\n")
    with pytest.raises(ValueError, match="other ones or in another order"):
        export(checkpoint, tmp_path / "y", tmp_path)
    assert not (tmp_path / "y").exists()
    write_checkpoint(tmp_path / "two.pt", data, heads=[("a", 2), ("b", 3)])
    with pytest.raises(ValueError, match="heads a, b; valid: one"):
        export(tmp_path / "two.pt", tmp_path / "z", data)


@pytest.mark.thorough
def test_an_export_has_the_code_as_it_is_and_runs_where_this_package_is_not(exported, tmp_path):
    model, _, folder = exported
    for file in folder.glob("*.py"):
        assert file.read_bytes() == (ROOT / "tupe" / file.name).read_bytes()
    tokens, real = batch(model)
    torch.save({"tokens": tokens, "mask": real.long()}, tmp_path / "given.pt")
    script = """
import os, sys
os.environ["HF_MODULES_CACHE"] = "cache"
import torch, transformers
given = torch.load("given.pt", weights_only=True)
lm = transformers.AutoModelForMaskedLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
with torch.no_grad():
    torch.save({"logits": lm(given["tokens"], attention_mask=given["mask"]).logits}, "found.pt")
"""
    run(BLOCK.format(names=["tupe", "fairseq"]) + script, folder, cwd=tmp_path)
    with torch.no_grad():
        same(torch.load(tmp_path / "found.pt", weights_only=True)["logits"], model(tokens)[0], real)


def test_without_code_there_is_none(exported, data, tmp_path):
    export(exported[1], tmp_path / "out", data, code=False)
    assert not list((tmp_path / "out").glob("*.py"))
    assert not any("auto_map" in path.read_text() for path in (tmp_path / "out").glob("*.json"))
    assert (tmp_path / "out/model.safetensors").read_bytes() == (exported[2] / "model.safetensors").read_bytes()
