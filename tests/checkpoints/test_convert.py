"""Converters: the released code's checkpoints both ways, and Hugging Face's BERT."""

import argparse
import json
import math
import os
import pickle
import sys
from pathlib import Path

import fairseq  # noqa: F401  (which would replace the module that `save` makes)
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from tupe.checkpoints import convert
from tupe.checkpoints.change import swap_position
from tupe.checkpoints.trained import read_model
from tupe.cli import main
from tupe.common.architectures import SIZES, architecture_of, with_size
from tupe.common.safe_load import OLD_METERS, load_safely
from tupe.data.splits import read_symbols
from tupe.encoder import ModelConfig
from tupe.modeling_tupe import TupeForMaskedLM, TupeForSequenceClassification
from tupe.text import TextEncoder

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = np.load(ROOT / "tests" / "tupe_reference.npz")
POSITION = {"tupe_a": "untied", "tupe_r": "untied+t5"}
PAD = 1


def write_dictionary(path, types):
    """dict.txt for a model of `types` types, special tokens and <mask> included."""
    path.write_text("".join(f"w{word} {types - word}\n" for word in range(types - 5)))
    return path


def released(which, legacy=True):
    """The checkpoint that the released code would have written for a reference model: args, meters and all."""
    vocab, layers, width, ffn, heads, max_positions = REFERENCE[f"{which}/dims"].tolist()
    prefix = f"{which}/state/"
    args = argparse.Namespace(
        arch="bert_base", encoder_layers=layers, encoder_embed_dim=width, encoder_ffn_embed_dim=ffn, dropout=0.1,
        encoder_attention_heads=heads, attention_dropout=0.1, activation_dropout=0.0, pooler_dropout=0.1, lr=[0.1],
        max_positions=max_positions, activation_fn="gelu", rel_pos=which == "tupe_r", task="masked_lm", data="/a:/b",
    )  # fmt: skip
    meters = {}
    if legacy:
        for number, kind in enumerate(OLD_METERS):
            meters[str(number)] = kind()
            vars(meters[str(number)]).update(sum=1.5, count=3)
    return {
        "args": args,
        "model": {k[len(prefix) :]: torch.from_numpy(REFERENCE[k]) for k in REFERENCE.files if k.startswith(prefix)},
        "optimizer_history": [{"criterion_name": "MaskedLmLoss", "optimizer_name": "FairseqAdam", "num_updates": 7}],
        "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0}, "train_meters": meters},
        "last_optimizer_state": {"state": {0: {"exp_avg": torch.ones(3)}}},
    }


def save(state, path, **options):
    # Pickling needs the old classes to be where fairseq 0.9 had them.
    module = type(sys)("fairseq.meters")
    vars(module).update({kind.__name__: kind for kind in OLD_METERS})
    sys.modules["fairseq.meters"] = module
    try:
        torch.save(state, path, **options)
    finally:
        del sys.modules["fairseq.meters"]
    return path


@pytest.fixture(params=["tupe_a", "tupe_r"])
def which(request):
    return request.param


@pytest.fixture
def converted(which, tmp_path):
    """(folder of the converted model, the released state)"""
    state = released(which)
    # the file format of torch < 1.6, as fairseq 0.9 wrote it
    path = save(state, tmp_path / "released.pt", _use_new_zipfile_serialization=False)
    dictionary = write_dictionary(tmp_path / "dict.txt", len(state["model"]["decoder.lm_head.bias"]))
    return convert.convert(path, dictionary, tmp_path / "out"), state


def equal(ours, theirs):
    np.testing.assert_allclose(ours.detach().numpy(), theirs, rtol=1e-5, atol=1e-5)


def test_released_checkpoint_gives_the_released_numbers(which, converted):
    trained, head = read_model(converted[0]), "sentence_classification_head"
    assert trained.config.position == POSITION[which] and trained.config.cls == "untied"
    model, classifier = trained.model(), trained.model(TupeForSequenceClassification, head)
    for case in range(5):
        expected = {
            name: REFERENCE[f"{which}/case{case}/{name}"] for name in ("tokens", "features", "logits", "cls_logits")
        }
        tokens = torch.from_numpy(expected["tokens"])
        real = tokens.ne(PAD)
        equal(model.tupe(tokens).last_hidden_state[real], expected["features"][real.numpy()])
        equal(model(tokens).logits[real], expected["logits"][real.numpy()])
        equal(classifier(tokens).logits, expected["cls_logits"])


def test_variants_of_the_released_code(which):
    """Half precision, and indices as a parameter."""
    state = released(which)["model"]
    weights, options = convert.weights_from_released(state)
    variant = {name: value.half() for name, value in state.items()}
    variant[convert.BODY + "rp_bucket"] = torch.zeros(40, 40, dtype=torch.long)
    got, got_options = convert.weights_from_released(variant)
    assert got_options == options and got.keys() == weights.keys()
    for key, value in got.items():
        assert value.dtype == torch.float32 and torch.equal(value, weights[key].half().float()), key


def test_what_cannot_be_converted_is_said(which, tmp_path):
    state = released(which)
    vocabulary = len(state["model"]["decoder.lm_head.bias"])
    path, short = save(state, tmp_path / "r.pt"), write_dictionary(tmp_path / "short.txt", vocabulary - 1)
    with pytest.raises(ValueError, match=f"makes {vocabulary - 1} types, the model has {vocabulary}"):
        convert.convert(path, short, tmp_path / "out")
    with pytest.raises(ValueError, match="dictionary not found"):
        convert.convert(path, tmp_path / "none.txt", tmp_path / "out")
    state["model"]["decoder.extra"] = torch.ones(1)
    whole = write_dictionary(tmp_path / "dict.txt", vocabulary)
    with pytest.raises(ValueError, match="cannot hold decoder.extra"):
        convert.convert(save(state, tmp_path / "x.pt"), whole, tmp_path / "out")
    state["args"] = None
    del state["model"]["decoder.extra"]
    if which == "tupe_a":  # nothing tells the heads
        with pytest.raises(ValueError, match="does not give the number of attention heads"):
            convert.from_released(save(state, tmp_path / "a.pt"))
    else:
        assert convert.from_released(save(state, tmp_path / "a.pt")).config.heads == 4
    del state["model"][convert.BODY + "pos.weight"]
    with pytest.raises(ValueError, match="not a checkpoint of the released TUPE code"):
        convert.from_released(save(state, tmp_path / "b.pt"))


class Malicious:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_malicious_pickle_is_refused_and_not_run(tmp_path, zipped, monkeypatch):
    bad, target = tmp_path / "bad.pt", tmp_path / "pwned"
    torch.save({**released("tupe_a", legacy=False), "x": Malicious(target)}, bad, _use_new_zipfile_serialization=zipped)
    with pytest.raises(ValueError, match="refused"):
        load_safely(bad)
    with pytest.raises(ValueError, match="refused"):
        convert.from_released(bad)
    assert not target.exists()
    torch.load(bad, weights_only=False)  # it would have worked
    assert target.exists()


def test_stand_ins_for_old_meters_do_not_stay(tmp_path):
    before = list(torch.serialization.get_safe_globals())
    path = save(released("tupe_a"), tmp_path / "r.pt")
    load_safely(path)
    assert set(torch.serialization.get_safe_globals()) == set(before)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(path, weights_only=True)


def test_what_the_command_refuses(converted, tmp_path):
    folder, _ = converted

    def said(output, *more, source=folder):
        words = ["checkpoint", "convert", f"--from={source}", f"--output={tmp_path / output}", *more]
        result = CliRunner().invoke(main, words)
        assert result.exit_code == 2 and result.output.count("\n") == 1, result.output
        return result.output

    assert "is a model of this project already" in said("again")
    small_bert(tmp_path / "bert")
    assert "--dict is only for" in said("again", f"--dict={folder}/dict.txt", source=tmp_path / "bert")
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    "position, cls, more, expected",
    [
        ("untied+t5", "untied", {}, "tupe_r"), ("absolute_d", "tied", {}, "bert_a_d"), ("rope", "tied", {}, "bert_a"),
        ("rope", "untied", {}, "tupe_a"), ("rope", "tied", {"block": "gau", "normaliser": "relu2"}, "gau"),
    ],
)  # fmt: skip
def test_the_name_says_nothing_that_is_not_so(position, cls, more, expected):
    """A converted model gets the nearest architecture, as if it had been trained by that name with other options."""
    for size, (layers, width, heads, ffn) in SIZES.items():
        options = {"layers": layers * (2 if more else 1), "width": width, "heads": heads, "ffn": ffn}
        options |= {"position": position, "cls": cls, **more}
        assert architecture_of(ModelConfig(**options)) == with_size(expected, size)
        assert architecture_of(ModelConfig(**{**options, "width": 96})) == expected


# ---- BERT ----


def small_bert(folder, kind="BertForPreTraining", eps=1e-3):
    """A randomly initialised BERT of the transformers library, saved with its vocabulary."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    tokens = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"t{i}" for i in range(24))]
    config = transformers.BertConfig(
        vocab_size=len(tokens), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=20, layer_norm_eps=eps, initializer_range=0.2,
    )  # fmt: skip
    bert = getattr(transformers, kind)(config).eval()
    with torch.no_grad():  # biases and norms start at 0 and 1: mistakes in them would not show
        for p in bert.parameters():
            p.add_(torch.randn(p.shape) * 0.1)
    bert.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(tokens) + "\n", encoding="utf-8")
    return bert, tokens


def test_a_bert_may_leave_out_its_epsilon(tmp_path):
    """As Google's own files do."""
    small_bert(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["layer_norm_eps"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert convert.from_bert(tmp_path)[0].config.layer_norm_eps == 1e-12


def test_bert_has_equal_hidden_states(tmp_path):
    bert, tokens = small_bert(tmp_path)
    trained, text = convert.from_bert(tmp_path)
    (tmp_path / "dict.txt").write_text(text["dict.txt"])
    symbols = read_symbols(tmp_path)
    assert trained.config.layer_norm_eps == 1e-3
    model = trained.model()
    words = torch.tensor([[3, 6, 9, 12, 5, 2, 4, 0, 0], [3, 8, 7, 29, 28, 27, 15, 14, 4]])  # BERT's ids, padded
    names = {"[CLS]": "<s>", "[PAD]": "<pad>", "[SEP]": "</s>", "[UNK]": "<unk>", "[MASK]": "<mask>"}
    ours = torch.tensor([[symbols.index(names.get(tokens[i], tokens[i])) for i in row] for row in words.tolist()])
    real = words.ne(0)
    with torch.no_grad():
        theirs = bert(words, attention_mask=real.long(), output_hidden_states=True)
        out = model(ours, output_hidden_states=True)
    assert len(out.hidden_states) == len(theirs.hidden_states) == 3
    for mine, other in zip(out.hidden_states, theirs.hidden_states, strict=True):
        torch.testing.assert_close(mine[real], other[real], rtol=1e-5, atol=1e-5)
    order, _ = convert.bert_tokens(tmp_path)
    torch.testing.assert_close(out.logits[real], theirs.prediction_logits[real][:, order], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("of", ["Roberta", "XLMRoberta"])
def test_a_roberta_comes_with_its_pieces(of, tmp_path):
    """From text to logits, with a tokeniser of bytes; and its encoding can be exchanged."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    inner = tokenizers.ByteLevelBPETokenizer()
    inner.train_from_iterator(["the cat sat on the mat"] * 9, vocab_size=270, special_tokens=special)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner._tokenizer, bos_token="<s>", cls_token="<s>", eos_token="</s>", sep_token="</s>",
        pad_token="<pad>", unk_token="<unk>", mask_token="<mask>",
    )  # fmt: skip
    theirs.backend_tokenizer.post_processor = tokenizers.processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    theirs.save_pretrained(tmp_path / "theirs")
    config = getattr(transformers, f"{of}Config")(
        vocab_size=len(theirs), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=22, type_vocab_size=1, pad_token_id=1, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    roberta = getattr(transformers, f"{of}ForMaskedLM")(config).eval()
    with torch.no_grad():
        for p in roberta.parameters():
            p.add_(torch.randn(p.shape) * 0.1)
    roberta.save_pretrained(tmp_path / "theirs")
    convert.convert(tmp_path / "theirs", None, tmp_path / "ours")
    ours = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "ours")
    model = TupeForMaskedLM.from_pretrained(tmp_path / "ours")
    assert model.config.max_position_embeddings == 20
    texts = ["the cat <mask> \u00e9", "mat"], ["on", "the mat"]
    mine, other = (tokenizer(*texts, padding=True, return_tensors="pt") for tokenizer in (ours, theirs))
    names = [ours.convert_ids_to_tokens(row) for row in mine["input_ids"]]
    assert names == [theirs.convert_ids_to_tokens(row) for row in other["input_ids"]]
    other = {key: value for key, value in other.items() if key != "token_type_ids"}
    with torch.no_grad():
        got, expected = model.eval()(**mine).logits, roberta(**other).logits
    real = mine["attention_mask"] == 1
    order = theirs.convert_tokens_to_ids(ours.convert_ids_to_tokens(range(len(ours))))
    torch.testing.assert_close(got[real], expected[real][:, order], rtol=1e-4, atol=1e-4)
    swapped = swap_position(read_model(tmp_path / "ours"), "rope")
    assert torch.equal(swapped.weights["encoder.tokens.weight"], model.tupe.encoder.tokens.weight)


def test_weights_that_are_not_finite_are_refused(tmp_path):
    """As a diverged training leaves them."""
    small_bert(tmp_path / "bert")
    change(tmp_path / "bert", "bert.encoder.layer.1.output.dense.bias", lambda value: value * math.inf)
    with pytest.raises(ValueError, match=r"NaN or infinite, in tupe.encoder.layers.1.fc2.bias: "):
        convert.convert(tmp_path / "bert", None, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def change(folder, name, changed):
    """Replace a tensor of a folder; by None: leave it out."""
    weights = load_file(folder / "model.safetensors")
    weights[name] = changed(weights.get(name, weights))
    weights = {name: value for name, value in weights.items() if value is not None}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def test_bert_that_cannot_be_converted(tmp_path):
    small_bert(tmp_path)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"gelu"', '"relu"'))
    with pytest.raises(ValueError, match="hidden_act is 'relu'"):
        convert.from_bert(tmp_path)
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "vocab.txt").unlink()
    with pytest.raises(ValueError, match=r"neither tokenizer\.json nor a vocabulary|transformers makes none of it"):
        convert.from_bert(tmp_path)


def test_all_tokens_of_a_vocabulary_are_read(tmp_path):
    _, tokens = small_bert(tmp_path)
    (tmp_path / "vocab.txt").write_text("\n".join(tokens))  # the last line does not end
    assert tokens[-1] in convert.from_bert(tmp_path)[1]["dict.txt"].split()


@pytest.mark.parametrize("file", ["tokenizer.json", "added_tokens.json"])
def test_tokens_that_were_added_to_a_bert_stay(file, tmp_path, caplog):
    """transformers 4 leaves vocab.txt as it was, beside either file."""
    transformers = pytest.importorskip("transformers")
    bert, tokens = small_bert(tmp_path / "bert", "BertForMaskedLM")
    theirs = transformers.BertTokenizerFast(vocab_file=str(tmp_path / "bert" / "vocab.txt")) if (
        transformers.__version__ < "5"
    ) else transformers.BertTokenizerFast(vocab={token: index for index, token in enumerate(tokens)})  # fmt: skip
    theirs.add_tokens(["covid", "vaccine"])
    bert.resize_token_embeddings(len(tokens) + 4)
    bert.save_pretrained(tmp_path / "bert")
    if file == "tokenizer.json":
        theirs.backend_tokenizer.save(str(tmp_path / "bert" / file))
    else:
        (tmp_path / "bert" / file).write_text(json.dumps({"vaccine": len(tokens) + 1, "covid": len(tokens)}))
    convert.convert(tmp_path / "bert", None, tmp_path / "ours")
    assert "leaving out 2 vectors that belong to no token" in caplog.text
    encoder, weights = TextEncoder(tmp_path / "ours"), read_model(tmp_path / "ours").weights
    table, old = weights["encoder.tokens.weight"], bert.get_input_embeddings().weight
    for number, token in enumerate(("covid", "vaccine")):
        assert encoder.pieces(f"t3 {token} t5") == ["t3", token, "t5"]
        assert torch.equal(table[encoder.ids[token]], old[len(tokens) + number])


@pytest.mark.parametrize("cased, vocab", [(False, False), (True, True)])
def test_a_bert_with_its_own_tokeniser(cased, vocab, tmp_path):
    """From text to logits, with vocab.txt or with the tokenizer.json that transformers 5 writes in its place."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    bert, tokens = small_bert(tmp_path / "bert", "BertForMaskedLM")
    ids = {token: index for index, token in enumerate(tokens)}
    inner = tokenizers.implementations.BertWordPieceTokenizer(ids, lowercase=not cased)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner._tokenizer, cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]", unk_token="[UNK]",
        mask_token="[MASK]",
    )  # fmt: skip
    if vocab:
        (tmp_path / "bert" / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": not cased}))
    else:
        (tmp_path / "bert" / "vocab.txt").unlink()
        theirs.save_pretrained(tmp_path / "bert")
    convert.convert(tmp_path / "bert", None, tmp_path / "out")
    ours = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "out")
    model = TupeForMaskedLM.from_pretrained(tmp_path / "out").eval()
    texts = ["t3 t7 [MASK] T9 t\u00e9 \u4e00t4 zebra", "t1"]
    mine, other = (t(texts, padding=True, return_tensors="pt") for t in (ours, theirs))
    other = {key: value for key, value in other.items() if key != "token_type_ids"}
    assert [ours.convert_ids_to_tokens(row) for row in mine["input_ids"]] == [
        theirs.convert_ids_to_tokens(row) for row in other["input_ids"]
    ]
    real = mine["attention_mask"] == 1
    with torch.no_grad():
        got, expected = model(**mine), bert(**other)
    order = [tokens.index(token) for token in ours.convert_ids_to_tokens(range(len(tokens)))]
    torch.testing.assert_close(got.logits[real], expected.logits[real][:, order], rtol=1e-4, atol=1e-4)
    guesses = [
        [guess["token_str"] for guess in pipe("t3 [MASK] t5")] for pipe in (
            transformers.pipeline("fill-mask", model=model, tokenizer=ours),
            transformers.pipeline("fill-mask", model=bert, tokenizer=theirs),
        )
    ]  # fmt: skip
    assert guesses[0] == guesses[1]
    pair = ours.convert_ids_to_tokens(ours("t1", "t2")["input_ids"])
    assert pair == ["[CLS]", "t1", "[SEP]", "t2", "[SEP]"]


@pytest.mark.parametrize("frame", ["none", "sequence"])
def test_a_bert_frames_texts_whatever_its_file_says(frame, tmp_path):
    """... with our ids, also where its tokenizer.json does so in another way, or leaves it to Python."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    _, tokens = small_bert(tmp_path / "bert", "BertForMaskedLM")
    (tmp_path / "bert" / "vocab.txt").unlink()
    ids = {token: index for index, token in enumerate(tokens)}
    theirs = tokenizers.implementations.BertWordPieceTokenizer(ids)._tokenizer  # whose frame is BertProcessing
    if frame == "sequence":
        theirs.post_processor = tokenizers.processors.Sequence([theirs.post_processor])
    content = json.loads(theirs.to_str())
    if frame == "none":
        content["post_processor"] = None
    (tmp_path / "bert" / "tokenizer.json").write_text(json.dumps(content))
    convert.convert(tmp_path / "bert", None, tmp_path / "ours")
    ours = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "ours")
    assert ours("t1", "t2")["input_ids"] == [0, ours.vocab["t1"], 2, ours.vocab["t2"], 2]
    assert ours.cls_token == "[CLS]" and ours.mask_token_id == len(tokens) - 1


@pytest.mark.parametrize(
    "kind, left_out", [("SequenceClassification", "classifier"), ("QuestionAnswering", "qa_outputs")]
)
def test_other_kinds_of_bert(kind, left_out, tmp_path, caplog):
    """... give their encoder; their heads are left out, and the log says so."""
    small_bert(tmp_path / "bert", f"BertFor{kind}")
    trained, _ = convert.from_bert(tmp_path / "bert")
    assert f"leaving out {left_out}.bias, {left_out}.weight" in caplog.text
    assert {key.partition(".")[0] for key in trained.weights} == {"encoder"}


@pytest.mark.parametrize(
    "lost, message",
    [
        ("embeddings.token_type_embeddings.weight", r"has no embeddings\.token_type_embeddings\.weight"),
        ("encoder.layer.1.attention.self.key.bias", r"has no encoder\.layers\.1\.attention\.self\.key\.bias"),
        ("encoder.layer.0.output.dense.weight", r"has no tupe.encoder.layers.0.fc2.w"),
    ],
)
def test_a_bert_that_lacks_something_is_refused(tmp_path, lost, message):
    small_bert(tmp_path / "bert", "BertModel")
    change(tmp_path / "bert", lost, lambda value: None)
    with pytest.raises(ValueError, match=message):
        convert.convert(tmp_path / "bert", None, tmp_path / "out")


@pytest.mark.parametrize("name", ["decoder.weight", "decoder.bias"])
def test_a_bert_whose_lm_head_is_not_tied_is_refused(name, tmp_path):
    small_bert(tmp_path, "BertForMaskedLM")
    of = {"decoder.weight": "bert.embeddings.word_embeddings.weight", "decoder.bias": "cls.predictions.bias"}[name]
    tied = load_file(tmp_path / "model.safetensors")[of]
    change(tmp_path, f"cls.predictions.{name}", lambda _: tied)
    convert.from_bert(tmp_path)
    change(tmp_path, f"cls.predictions.{name}", lambda _: 2 * tied + 1)
    with pytest.raises(ValueError, match=f"{name} is not .*: here they are one"):
        convert.from_bert(tmp_path)
