"""`import tupe.hf`: transformers' Auto classes, in a process of their own, since they never forget a registration."""

import json
import linecache

import pytest
import torch
from test_house import BLOCK, OPTIONAL, ROOT, run

from tupe.configuration_tupe import AUTO

transformers = pytest.importorskip("transformers")
ASK = """
import json, sys, torch, transformers
import tupe.hf
out = {}
for folder in sys.argv[1:]:
    fill = transformers.pipeline("fill-mask", folder)
    out[folder] = [type(fill.model).__module__, type(fill.tokenizer).__module__, fill("a <mask> .")[0]["token_str"]]
config = transformers.AutoConfig.from_pretrained(folder)
for auto in %s:
    model = getattr(transformers, auto).from_config(config)
    out[auto] = type(model).__name__
print(json.dumps(out))
"""


@pytest.mark.thorough
def test_folders_need_no_code_where_the_package_is_installed():
    folders = sorted(str(path) for path in (ROOT / "models").glob("*"))
    out = json.loads(run(ASK % list(AUTO.values()), *folders).splitlines()[-1])
    assert len(folders) == 2
    for folder in folders:
        model, tokenizer, word = out[folder]
        assert (model, tokenizer) == ("tupe.modeling_tupe", "tupe.tokenization_tupe") and word
    assert {auto: out[auto] for auto in AUTO.values()} == {auto: name for name, auto in AUTO.items()}


SCHEME = """
from tupe.positions import PositionScheme, register

@register("bare_slope")
class BareSlope(PositionScheme):
    formula, paper = "-|i - j| / 8", "none"

    def bias(self, positions, scale):
        return positions.spread(-positions.offsets.abs().float().expand(2, -1) / 8)
"""
BARE = """
import json, sys, torch, transformers
assert not [name for name in sys.modules if name.partition(".")[0] == "tupe" and sys.modules[name]]
for auto in ["AutoModel", "AutoModelForMaskedLM", "AutoModelForQuestionAnswering", "AutoModelForMultipleChoice",
             "AutoModelForTokenClassification", "AutoModelForSequenceClassification"]:
    model = getattr(transformers, auto).from_pretrained(
        "saved", trust_remote_code=True, ignore_mismatched_sizes=True
    ).eval()
tokenizer = transformers.AutoTokenizer.from_pretrained("saved", trust_remote_code=True)
model.save_pretrained("again")  # from there, too, it can be handed on
model = transformers.AutoModelForSequenceClassification.from_pretrained("again", trust_remote_code=True).eval()
with torch.no_grad():
    print(json.dumps([model.config.id2label["1"] if "1" in model.config.id2label else model.config.id2label[1],
                      model(**tokenizer("a b b", return_tensors="pt")).logits.tolist()]))
"""


def save_tokenizer(folder):
    from tokenizers import Tokenizer, models, pre_tokenizers

    inner = Tokenizer(
        models.WordLevel({"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "a": 4, "b": 5}, unk_token="<unk>")
    )
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>").save_pretrained(folder)


def test_two_files_of_encodings_do_not_share_a_name(tmp_path):
    """They are saved as one file, where the second definition would count for both."""
    from tupe.configuration_tupe import own_code
    from tupe.positions import SCHEMES, load_scheme_file

    for name in ("one", "two"):
        code = SCHEME.replace("bare_slope", f"slope_{name}").replace("BareSlope", f"Slope{name}")
        (tmp_path / f"{name}.py").write_text(code + f"\nSAME = 1\ndef of_{name}(): return {name!r}\n")
        load_scheme_file(tmp_path / f"{name}.py")
    try:
        assert "def of_two" in own_code("slope_one+slope_two")["own_schemes.py"]
        (tmp_path / "two.py").write_text((tmp_path / "two.py").read_text() + "\ndef of_one(): return 2\n")
        linecache.checkcache()
        with pytest.raises(ValueError, match=r"one\.py and .*two\.py define of_one differently"):
            own_code("slope_one+slope_two")
    finally:
        del SCHEMES["slope_one"], SCHEMES["slope_two"]


@pytest.mark.parametrize(
    "line, message",
    [
        ("from tupe.hf import TupeConfig", "'from tupe.hf import TupeConfig' cannot be saved; put the encoding into"),
        ("from tupe.modeling_tupe import TupeModel", "cannot be saved; put the encoding into a file of its own"),
        ("import tupe.hf", "'import tupe.hf' cannot be saved"),
    ],
)
def test_code_that_cannot_move_does_not_end_a_training(line, message, tmp_path, caplog):
    """Trainer saves for the first time after hundreds of updates: the weights are written all the same."""
    from tupe.configuration_tupe import own_code
    from tupe.modeling_tupe import TupeConfig, TupeModel
    from tupe.positions import SCHEMES, load_scheme_file

    (tmp_path / "mine.py").write_text(f"{line}\n{SCHEME}")
    load_scheme_file(tmp_path / "mine.py")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    try:
        with pytest.raises(ValueError, match=message):
            own_code("bare_slope")
        model = TupeModel(TupeConfig(30, position="bare_slope", **sizes))
        model.save_pretrained(tmp_path / "saved")
        assert message in caplog.text and (tmp_path / "saved" / "model.safetensors").exists()
        assert torch.equal(*(m.encoder.tokens.weight for m in (model, TupeModel.from_pretrained(tmp_path / "saved"))))
    finally:
        del SCHEMES["bare_slope"]


def test_a_file_of_encodings_may_postpone_annotations(tmp_path):
    """Its line has to be the first of the file that several are saved as."""
    from tupe.configuration_tupe import own_code
    from tupe.positions import SCHEMES, load_scheme_file

    for name in ("one", "two"):
        code = SCHEME.replace("bare_slope", f"slope_{name}").replace("BareSlope", f"Slope{name}")
        (tmp_path / f"{name}.py").write_text("from __future__ import annotations\n" * (name == "two") + code)
        load_scheme_file(tmp_path / f"{name}.py")
    try:
        code = own_code("slope_one+slope_two")["own_schemes.py"]
    finally:
        del SCHEMES["slope_one"], SCHEMES["slope_two"]
    compile(code, "own_schemes.py", "exec")
    assert code.startswith("from __future__ import annotations\n")


@pytest.mark.thorough
def test_a_saved_model_loads_where_this_package_is_not(tmp_path, monkeypatch):
    """... with all its classes, a user's encoding, the labels' names and its tokeniser."""
    from tupe.hf import TupeConfig, TupeForSequenceClassification
    from tupe.positions import SCHEMES, load_scheme_file

    (tmp_path / "mine.py").write_text(SCHEME)
    load_scheme_file(tmp_path / "mine.py")
    try:
        config = TupeConfig(
            30, position="bare_slope+t5", hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=16, id2label={0: "bad", 1: "good"},
        )  # fmt: skip
        model = TupeForSequenceClassification(config).eval()
        model.save_pretrained(tmp_path / "saved")
    finally:
        del SCHEMES["bare_slope"]
    save_tokenizer(tmp_path / "saved")
    assert "mine.py" in (tmp_path / "saved/own_schemes.py").read_text()
    assert not (tmp_path / "saved/tokenization_tupe.py").exists()
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "cache"))
    name, logits = json.loads(run(BLOCK.format(names=["tupe", *OPTIONAL]) + BARE, cwd=tmp_path).splitlines()[-1])
    assert name == "good"
    with torch.no_grad():
        torch.testing.assert_close(torch.tensor(logits), model(torch.tensor([[4, 5, 5]])).logits)


def test_a_folder_is_pushed_with_the_code_of_its_encoding(tmp_path, monkeypatch):
    """With push_to_hub=True, transformers uploads it inside of `save_pretrained`."""
    from transformers.utils.hub import PushToHubMixin

    from tupe.hf import TupeConfig, TupeModel
    from tupe.positions import SCHEMES, load_scheme_file

    pushed = []

    def upload(self, folder, *_, **__):
        pushed.append((folder / "own_schemes.py").read_text())

    monkeypatch.setattr(PushToHubMixin, "_upload_modified_files", upload)
    (tmp_path / "mine.py").write_text(SCHEME)
    load_scheme_file(tmp_path / "mine.py")
    try:
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        TupeModel(TupeConfig(30, position="bare_slope", **sizes))._upload_modified_files(tmp_path)
    finally:
        del SCHEMES["bare_slope"]
    assert "mine.py" in pushed[0]


OTHERS = """
import json, sys, torch, transformers
assert not [name for name in sys.modules if name.partition(".")[0] == "tupe" and sys.modules[name]]
model = getattr(transformers, sys.argv[1]).from_pretrained("saved", trust_remote_code=True).eval()
with torch.no_grad():
    print(json.dumps(model(torch.tensor([[0, 4, 5, 2]]))[0].tolist()))
"""


@pytest.mark.thorough
@pytest.mark.parametrize("library", ["peft", "sentence_transformers"])
def test_what_another_library_saves_loads_there_too(library, tmp_path, monkeypatch):
    """A merged adapter, and an encoder of sentences."""
    from tupe.hf import TupeConfig, TupeForSequenceClassification, TupeModel

    package = pytest.importorskip(library)
    config = TupeConfig(
        30, position="untied+t5", cls_position="untied", hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16,
    )  # fmt: skip
    if library == "peft":
        auto, plain = "AutoModelForSequenceClassification", TupeForSequenceClassification(config)
        adapted = package.get_peft_model(
            plain, package.LoraConfig(target_modules=["qkv", "out", "q"], init_lora_weights=False)
        )
        model = adapted.merge_and_unload().eval()
        model.save_pretrained(tmp_path / "saved")
    else:
        auto, model = "AutoModel", TupeModel(config).eval()
        model.save_pretrained(tmp_path / "own")
        save_tokenizer(tmp_path / "own")
        modules = [package.models.Transformer(str(tmp_path / "own")), package.models.Pooling(16)]
        package.SentenceTransformer(modules=modules, device="cpu").save(str(tmp_path / "saved"))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "cache"))
    out = json.loads(run(BLOCK.format(names=["tupe", *OPTIONAL]) + OTHERS, auto, cwd=tmp_path).splitlines()[-1])
    with torch.no_grad():
        torch.testing.assert_close(torch.tensor(out), model(torch.tensor([[0, 4, 5, 2]]))[0])
