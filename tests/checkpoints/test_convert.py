"""Converters and checkpoint files: the released code's checkpoints both ways, BERT, averaging, stripping, merging, and
files that must be refused."""

import argparse
import json
import math
import os
import pickle
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from fairseq.data import Dictionary
from helpers import our_checkpoint

from tupe.checkpoints import convert
from tupe.checkpoints import files as checkpoints
from tupe.checkpoints.export import export
from tupe.checkpoints.gate import read_checkpoint
from tupe.checkpoints.trained import read_model
from tupe.cli import main
from tupe.common.architectures import SIZES, architecture_of, with_size
from tupe.common.safe_load import OLD_METERS, load_safely
from tupe.encoder import ModelConfig
from tupe.modeling_tupe import TupeForSequenceClassification
from tupe.plugin.model import TupeModel
from tupe.text import TextEncoder

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = np.load(ROOT / "tests" / "tupe_reference.npz")
POSITION = {"tupe_a": "untied", "tupe_r": "untied+t5"}
PAD = 1


def write_dictionary(path, types):
    """dict.txt for a model of `types` types, special tokens and <mask> included."""
    dictionary = Dictionary()
    for word in range(types - 5):
        dictionary.add_symbol(f"w{word}", types - word)
    dictionary.save(str(path))
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
    """(folder of the converted checkpoint, the released state)"""
    state = released(which)
    # the file format of torch < 1.6, as fairseq 0.9 wrote it
    path = save(state, tmp_path / "released.pt", _use_new_zipfile_serialization=False)
    dictionary = write_dictionary(tmp_path / "dict.txt", len(state["model"]["decoder.lm_head.bias"]))
    folder = tmp_path / "out"
    convert.convert(path, "tupe", dictionary, folder)
    return folder, state


def equal(ours, theirs):
    np.testing.assert_allclose(ours.detach().numpy(), theirs, rtol=1e-5, atol=1e-5)


def test_released_checkpoint_gives_the_released_numbers(which, converted):
    folder, _ = converted
    model = TupeModel.from_pretrained(folder, "checkpoint.pt")
    assert model.cfg.position == POSITION[which] and str(model.cfg.cls) == "untied"
    for case in range(5):
        expected = {
            name: REFERENCE[f"{which}/case{case}/{name}"] for name in ("tokens", "features", "logits", "cls_logits")
        }
        tokens = torch.from_numpy(expected["tokens"])
        real = tokens.ne(PAD)
        equal(model(tokens, features_only=True)[0][real], expected["features"][real.numpy()])
        equal(model(tokens)[0][real], expected["logits"][real.numpy()])
        equal(model(tokens, classification_head_name="sentence_classification_head")[0], expected["cls_logits"])


def test_back_to_the_released_code_is_the_identity(which, converted, tmp_path):
    folder, state = converted
    back = convert.to_released(read_model(folder / "checkpoint.pt"))
    assert back["model"].keys() == state["model"].keys()
    for key, value in state["model"].items():
        assert torch.equal(back["model"][key], value), key
    assert all(
        vars(back["args"])[key] == value for key, value in vars(state["args"]).items() if key not in ("data", "lr")
    )
    # and forth again
    torch.save(back, tmp_path / "back.pt")
    round_trip = torch.load(convert.convert(tmp_path / "back.pt", "tupe", folder / "dict.txt", tmp_path / "again"))
    first = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert round_trip["cfg"] == first["cfg"]
    assert all(torch.equal(round_trip["model"][key], value) for key, value in first["model"].items())


def test_training_restores_a_converted_checkpoint(converted, tmp_path):
    from helpers import PLUGIN, train

    folder, state = converted
    data = tmp_path / "data"
    data.mkdir()
    (data / "dict.txt").write_bytes((folder / "dict.txt").read_bytes())
    from fairseq.data import indexed_dataset

    for split in ("train", "valid"):
        builder = indexed_dataset.make_builder(str(data / f"{split}.bin"), "mmap", vocab_size=61)
        for start in range(8):
            builder.add_item(torch.tensor([*range(4 + start, 20 + start), 2]))
        builder.finalize(str(data / f"{split}.idx"))
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)["cfg"]["model"]
    shape = [f"--{key.replace('_', '-')}={saved[key]}" for key in ("position", "encoder_layers", "encoder_embed_dim",
             "encoder_ffn_embed_dim", "encoder_attention_heads", "max_positions")]  # fmt: skip
    losses = train([
        str(data), f"--user-dir={PLUGIN}", f"--save-dir={tmp_path / 'run'}", f"--restore-file={folder}/checkpoint.pt",
        f"--arch={saved['_name']}", *shape, "--task=masked_lm", "--criterion=masked_lm", "--optimizer=adam", "--cpu",
        "--lr=1e-9", "--max-update=2", "--batch-size=4", "--tokens-per-sample=20", "--lr-scheduler=fixed",
        "--num-workers=0",
    ])  # fmt: skip
    assert len(losses) == 2
    trained = torch.load(tmp_path / "run" / "checkpoint_last.pt", weights_only=True)["model"]
    table = state["model"]["decoder.sentence_encoder.pos.weight"]
    torch.testing.assert_close(trained["encoder.positions.untied.table.weight"], table, rtol=0, atol=1e-6)


def test_variants_of_the_released_code(which):
    state = released(which)["model"]
    weights, options = convert.weights_from_released(state)
    body = convert.BODY
    variant = {k: v.half() for k, v in state.items() if "pos_q_linear" not in k and "pos_k_linear" not in k}
    for kind in ("weight", "bias"):  # fused position projections, indices as a parameter, heads without dense, fp16
        both = [state[f"{body}pos_{part}_linear.{kind}"].half() for part in "qk"]
        variant[f"{body}pos_proj.{kind}"] = torch.cat(both)
        del variant[f"classification_heads.sentence_classification_head.dense.{kind}"]
    variant[body + "rp_bucket"] = torch.zeros(40, 40, dtype=torch.long)
    got, got_options = convert.weights_from_released(variant)
    assert got_options == options
    assert got.keys() == {key for key in weights if not key.startswith("classification_heads")}
    for key, value in got.items():
        assert value.dtype == torch.float32 and torch.equal(value, weights[key].half().float()), key


def test_what_cannot_be_converted_is_said(which, tmp_path):
    state = released(which)
    vocabulary = len(state["model"]["decoder.lm_head.bias"])
    path, short = save(state, tmp_path / "r.pt"), write_dictionary(tmp_path / "short.txt", vocabulary - 1)
    with pytest.raises(ValueError, match=f"{vocabulary} token vectors, the dictionary {vocabulary - 1} types"):
        convert.convert(path, "tupe", short, tmp_path / "out")
    with pytest.raises(ValueError, match="dictionary not found"):
        convert.convert(path, "tupe", tmp_path / "none.txt", tmp_path / "out")
    state["model"]["decoder.extra"] = torch.ones(1)
    with pytest.raises(ValueError, match="without a counterpart: decoder.extra"):
        convert.from_released(save(state, tmp_path / "x.pt"))
    state["args"] = None
    del state["model"]["decoder.extra"]
    if which == "tupe_a":  # nothing tells the heads
        with pytest.raises(ValueError, match="--heads"):
            convert.from_released(save(state, tmp_path / "a.pt"))
    made = convert.from_released(save(state, tmp_path / "a.pt"), heads=4)
    assert made.config.heads == 4
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


READERS = {  # everything that reads a checkpoint; fairseq's own reading when training: tests/cli/test_train.py
    "to_released": lambda path: convert.to_released(read_model(path)),
    "export": lambda path: export(path, path.parent / "out"),
    "bert": lambda path: convert.read_hugging_face(path.parent),
    "average": lambda path: checkpoints.average([path, path]),
    "newest": lambda path: checkpoints.newest(path.parent, 1),
    "merge": lambda path: checkpoints.merge_shards([path]),
    "fine-tuning": read_checkpoint,
    "from_pretrained": lambda path: TupeModel.from_pretrained(path.parent, path.name),
}


# Every command that reads one, with its arguments.
COMMANDS = {
    "checkpoint average": ["{path}", "{path}", "--output={folder}/out"],
    "checkpoint strip": ["{path}", "--output={folder}/out"],
    "checkpoint merge": ["{path}", "--output={folder}/out"],
    "checkpoint convert": ["--from={path}", "--to=released", "--output={folder}/out"],
    "checkpoint export": ["--checkpoint={path}", "--output={folder}/out"],
    "checkpoint swap": ["--checkpoint={path}", "--position=t5", "--output={folder}/out"],
    "probe properties": ["{path}"],
    "plot positions": ["--checkpoint={path}", "--output={folder}/out"],
    "predict": ["CoLA={path}", "--data={folder}", "--output={folder}/out"],
}


def malicious_checkpoint(folder):
    """A checkpoint of ours that makes the folder `pwned` when all of it is unpickled."""
    path = our_checkpoint(folder / "checkpoint_last.pt", 1.0, 1)
    state = torch.load(path, weights_only=True)
    torch.save({**state, "x": Malicious(folder / "pwned")}, path)
    return path


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_refuses_a_malicious_pickle(name, tmp_path):
    path = malicious_checkpoint(tmp_path)
    (tmp_path / "CoLA" / "input0").mkdir(parents=True)
    (tmp_path / "CoLA" / "input0" / "test.idx").touch()
    for message in ("refused: not a checkpoint, or it contains", "not found"):
        arguments = [word.format(path=path, folder=tmp_path) for word in COMMANDS[name]]
        result = CliRunner().invoke(main, [*name.split(), *arguments])
        assert result.exit_code == 2 and re.search(message, result.output)
        assert not (tmp_path / "pwned").exists() and not (tmp_path / "out").exists()
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("name", READERS)
def test_every_reader_refuses_a_malicious_pickle(name, tmp_path):
    path = malicious_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(path.read_bytes())
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises((ValueError, pickle.UnpicklingError), match="refused|Weights only"):
        READERS[name](path)
    assert not (tmp_path / "pwned").exists()


def test_files_that_are_no_checkpoints_of_ours_are_refused(tmp_path):
    ours = our_checkpoint(tmp_path / "ours.pt", 1.0, 1)
    state = torch.load(ours, weights_only=True)
    save(released("tupe_a"), tmp_path / "released.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "text.pt").write_text("text")
    (tmp_path / "half.pt").write_bytes(ours.read_bytes()[:9000])
    torch.save([state], tmp_path / "list.pt")
    messages = {
        "released.pt": r"no checkpoint of this project.*tupe checkpoint convert",
        "list.pt": "no checkpoint of this project",
        "text.pt": "is refused|cannot be read",
        "half.pt": "is refused|cannot be read",
        "": "cannot be read",  # the folder
        "none.pt": "checkpoint not found",
    }
    for name, message in messages.items():
        with pytest.raises(ValueError, match=message):
            read_checkpoint(tmp_path / name)
    torch.save(state, ours, _use_new_zipfile_serialization=False)  # one of ours in the old format is as good as any
    assert read_checkpoint(ours)["cfg"]["model"] == state["cfg"]["model"]


def test_stand_ins_for_old_meters_do_not_stay(tmp_path):
    before = list(torch.serialization.get_safe_globals())
    path = save(released("tupe_a"), tmp_path / "r.pt")
    load_safely(path)
    assert set(torch.serialization.get_safe_globals()) == set(before)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(path, weights_only=True)


def test_command(converted, tmp_path):
    folder, state = converted

    def run(output):
        words = ["--from", folder / "checkpoint.pt", "--to", "released", "--output", tmp_path / output]
        result = CliRunner().invoke(convert.command, list(map(str, words)))
        return result.exit_code, result.output

    assert run("back")[0] == 0
    back = torch.load(tmp_path / "back" / "checkpoint.pt", weights_only=False)
    assert torch.equal(back["model"]["decoder.lm_head.bias"], state["model"]["decoder.lm_head.bias"])
    status, printed = run("back")
    assert status == 2 and "exists already" in printed
    lines = (folder / "dict.txt").read_text().splitlines()
    (folder / "dict.txt").write_text("\n".join([lines[1], lines[0], *lines[2:]]) + "\n")
    status, printed = run("again")
    assert status == 2 and "other ones or in another order" in printed
    (folder / "dict.txt").unlink()  # as in the folder of a run
    status, printed = run("again")
    assert status == 2 and "dictionary not found" in printed
    with pytest.raises(ValueError, match="--heads .* released"):
        convert.convert(folder / "checkpoint.pt", "released", None, tmp_path / "again", heads=4)
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
        num_labels=2 if "Question" in kind else 3,
    )  # fmt: skip
    bert = getattr(transformers, kind)(config).eval()
    with torch.no_grad():  # biases and norms start at 0 and 1: mistakes in them would not show
        for p in bert.parameters():
            p.add_(torch.randn(p.shape) * 0.1)
    bert.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(tokens) + "\n", encoding="utf-8")
    return bert, tokens


@pytest.mark.parametrize("kind", ["BertForPreTraining", "BertForSequenceClassification"])
def test_bert_has_equal_hidden_states(tmp_path, kind):
    bert, tokens = small_bert(tmp_path, kind)
    trained, symbols, _ = convert.from_bert(tmp_path)
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
    if kind == "BertForPreTraining":
        order, *_ = convert.bert_tokens(tmp_path, 20)
        torch.testing.assert_close(out.logits[real], theirs.prediction_logits[real][:, order], rtol=1e-4, atol=1e-4)
    else:
        head = trained.model(TupeForSequenceClassification, "sentence_classification_head")
        torch.testing.assert_close(head(ours).logits, theirs.logits, rtol=1e-5, atol=1e-5)


def test_the_correlations_of_any_bert_can_be_drawn(tmp_path):
    """The commands of docs/checkpoints.md: convert, make data with BERT's own tokeniser, draw."""
    _, tokens = small_bert(tmp_path / "bert")
    (tmp_path / "text").mkdir()
    for name in "ab":
        lines = [f"{' '.join(tokens[i : i + 6])} {name}.\n" for i in range(6, 24)]
        (tmp_path / "text" / f"{name}.txt").write_text("".join(lines))
    for command in (
        ["checkpoint", "convert", f"--from={tmp_path}/bert", f"--output={tmp_path}/ours"],
        ["prepare", "corpus", f"{tmp_path}/text", f"--tokenizer={tmp_path}/bert", f"--output={tmp_path}/data",
         "--valid-fraction=0.5", "--jobs=1"],
        ["plot", "correlations", f"--checkpoint={tmp_path}/ours/checkpoint.pt", f"--data={tmp_path}/data",
         f"--output={tmp_path}/figure2"],
    ):  # fmt: skip
        result = CliRunner().invoke(main, command)
        assert result.exit_code == 0, result.output
    assert (tmp_path / "figure2.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_refused(tmp_path, value):
    """As a diverged training leaves them: in all ways in and out."""
    from safetensors.torch import load_file, save_file

    small_bert(tmp_path / "bert")
    convert.convert(tmp_path / "bert", "tupe", None, tmp_path / "ours")
    weights = load_file(tmp_path / "bert" / "model.safetensors")
    weights["bert.encoder.layer.1.output.dense.bias"][3] = value
    save_file(weights, tmp_path / "bert" / "model.safetensors", {"format": "pt"})
    state = torch.load(tmp_path / "ours" / "checkpoint.pt", weights_only=True)
    state["model"]["encoder.layers.1.fc2.bias"][3] = value
    save(state, tmp_path / "ours" / "checkpoint.pt")
    wrong = released("tupe_a")
    wrong["model"]["decoder.lm_head.bias"][3] = value
    dictionary = write_dictionary(tmp_path / "dict.txt", len(wrong["model"]["decoder.lm_head.bias"]))
    for name, attempt in {
        "encoder.layers.1.fc2.bias": lambda: convert.convert(tmp_path / "bert", "tupe", None, tmp_path / "out"),
        "tupe.encoder.layers.1.fc2.bias": lambda: export(tmp_path / "ours" / "checkpoint.pt", tmp_path / "out"),
        "lm_head.bias": lambda: convert.convert(
            save(wrong, tmp_path / "r.pt"), "tupe", dictionary, tmp_path / "out", heads=4
        ),
    }.items():
        with pytest.raises(ValueError, match=f"NaN or infinite, in {name}: "):
            attempt()
        assert not (tmp_path / "out").exists()


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
    assert tokens[-1] in convert.from_bert(tmp_path)[1]


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
    convert.convert(tmp_path / "bert", "tupe", None, tmp_path / "ours")
    assert "leaving out 2 vectors that belong to no token" in caplog.text
    encoder, weights = TextEncoder(tmp_path / "ours"), load_safely(tmp_path / "ours" / "checkpoint.pt")["model"]
    table, old = weights["encoder.tokens.weight"], bert.get_input_embeddings().weight
    for number, token in enumerate(("covid", "vaccine")):
        assert encoder.pieces(f"t3 {token} t5") == ["t3", token, "t5"]
        assert torch.equal(table[encoder.ids[token]], old[len(tokens) + number])


@pytest.mark.usefixtures("own_module_cache")
@pytest.mark.parametrize("kind, cased, vocab", [
    ("BertForMaskedLM", False, False), ("BertForMaskedLM", True, True),
])  # fmt: skip
def test_a_bert_with_its_own_tokeniser_there_and_back(kind, cased, vocab, tmp_path):
    """From text to logits, with vocab.txt or with the tokenizer.json that transformers 5 writes in its place."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    from tupe import modeling_tupe
    from tupe.checkpoints.export import export

    bert, tokens = small_bert(tmp_path / "bert", kind)
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
    convert.convert(tmp_path / "bert", "tupe", None, tmp_path / "ours")
    export(tmp_path / "ours" / "checkpoint.pt", tmp_path / "out", tmp_path / "ours")
    ours = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "out")
    model = getattr(modeling_tupe, kind.replace("Bert", "Tupe")).from_pretrained(tmp_path / "out").eval()
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
            transformers.pipeline("fill-mask", str(tmp_path / "out"), trust_remote_code=True),
            transformers.pipeline("fill-mask", model=bert, tokenizer=theirs),
        )
    ]  # fmt: skip
    assert guesses[0] == guesses[1]
    pair = ours.convert_ids_to_tokens(ours("t1", "t2")["input_ids"])
    assert pair == ["[CLS]", "t1", "[SEP]", "t2", "[SEP]"]
    convert.convert(tmp_path / "out", "tupe", None, tmp_path / "back")
    assert (tmp_path / "back/tokenizer.json").read_bytes() == (tmp_path / "ours/tokenizer.json").read_bytes()


@pytest.mark.parametrize("frame", ["none", "bert", "sequence"])
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
    convert.convert(tmp_path / "bert", "tupe", None, tmp_path / "ours")
    ours = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "ours")
    assert ours("t1", "t2")["input_ids"] == [0, ours.vocab["t1"], 2, ours.vocab["t2"], 2]
    assert ours.cls_token == "[CLS]" and ours.mask_token_id == len(tokens) - 1


@pytest.mark.parametrize("kind, left_out", [("TokenClassification", "classifier"), ("QuestionAnswering", "head of")])
def test_other_kinds_of_bert(kind, left_out, tmp_path, caplog):
    """... give their encoder; what a checkpoint has no head for is left out, and the log says so."""
    small_bert(tmp_path / "bert", f"BertFor{kind}")
    trained, *_ = convert.from_bert(tmp_path / "bert")
    assert f"leaving out the {left_out}" in caplog.text
    assert {key.partition(".")[0] for key in trained.weights} == {"encoder", "lm_head"}


@pytest.mark.parametrize(
    "lost, message",
    [
        ("embeddings.token_type_embeddings.weight", r"has no embeddings\.token_type_embeddings\.weight"),
        ("encoder.layer.1.attention.self.key.bias", r"has no encoder\.layer\.1\.attention\.self\.key\.bias"),
        ("encoder.layer.0.output.dense.weight", r"(?s)not those of the model .*encoder\.layers\.0\.fc2\.weight"),
    ],
)
def test_a_bert_that_lacks_something_is_refused(tmp_path, lost, message):
    from safetensors.torch import load_file, save_file

    small_bert(tmp_path, "BertModel")
    weights = load_file(tmp_path / "model.safetensors")
    del weights[lost]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=message):
        convert.from_bert(tmp_path)


@pytest.mark.parametrize("name", ["decoder.weight", "decoder.bias"])
def test_a_bert_whose_lm_head_is_not_tied_is_refused(name, tmp_path):
    from safetensors.torch import load_file, save_file

    small_bert(tmp_path, "BertForMaskedLM")
    weights = load_file(tmp_path / "model.safetensors")
    of = {"decoder.weight": "bert.embeddings.word_embeddings.weight", "decoder.bias": "cls.predictions.bias"}[name]
    for factor in (1, 2):
        weights[f"cls.predictions.{name}"] = factor * weights[of] + (factor == 2)
        save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
        if factor == 1:
            convert.from_bert(tmp_path)
    with pytest.raises(ValueError, match=f"{name} is not .*: here they are one"):
        convert.from_bert(tmp_path)


def test_a_bert_whose_configuration_lacks_something_is_refused(tmp_path):
    small_bert(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["layer_norm_eps"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"config\.json has no layer_norm_eps"):
        convert.from_bert(tmp_path)


@pytest.mark.parametrize("name", ["checkpoint.pt", "dict.txt"])
def test_nothing_is_overwritten(tmp_path, name):
    small_bert(tmp_path / "bert")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("theirs 1\n")
    with pytest.raises(ValueError, match=f"{name} exists already"):
        convert.convert(tmp_path / "bert", "tupe", None, tmp_path / "out")
    assert [path.read_text() for path in (tmp_path / "out").iterdir()] == ["theirs 1\n"]


def test_an_adapter_must_be_merged_first(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"has an adapter; save what merge_and_unload\(\) makes of it"):
        convert.read_hugging_face(tmp_path)


def test_options_that_a_bert_does_not_need_are_refused(tmp_path):
    small_bert(tmp_path)
    for option, value in {"dictionary_file": "dict.txt", "heads": 4}.items():
        options = {"dictionary_file": None, "output": tmp_path / "out", option: value}
        with pytest.raises(ValueError, match=f"--{option[:4]}.* cannot be given for a BERT"):
            convert.convert(tmp_path, "tupe", **options)
    assert not (tmp_path / "out").exists()
