"""What users of transformers and of the libraries around it do with an export: a folder with the model's code, in
which neither this package nor fairseq is needed. Each test runs where its library is; docs/libraries.md has results."""

import copy
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import module_cache

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # some ask the hub about any folder, and wait for it
transformers = pytest.importorskip("transformers")
ROOT = Path(__file__).resolve().parents[1]
IS_5 = int(transformers.__version__.partition(".")[0]) >= 5
HEADS = ["MaskedLM", "SequenceClassification", "QuestionAnswering", "TokenClassification", "MultipleChoice"]
NOT_CODE = {"__init__", "__main__", "hf", "config", "own_attention", "backend_triton", "triton_attention"}
REVIEWS = ["a good film .", "a bad film that nobody liked .", "she looked out of the window .", "they sang ."]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """models/tupe_r_mini as `tupe checkpoint export` writes it, with code; transformers' cache goes with the tests."""
    place = tmp_path_factory.mktemp("library") / "tupe_with_code"
    shutil.copytree(ROOT / "models" / "tupe_r_mini", place)
    for file in (ROOT / "tupe").glob("*.py"):
        if file.stem not in NOT_CODE:
            shutil.copy(file, place)
    maps = {"config.json": {"AutoConfig": "configuration_tupe.TupeConfig", "AutoModel": "modeling_tupe.TupeModel"}}
    maps["config.json"] |= {f"AutoModelFor{head}": f"modeling_tupe.TupeFor{head}" for head in HEADS}
    maps["tokenizer_config.json"] = {"AutoTokenizer": ["tokenization_tupe.TupeTokenizer", None]}
    for name, auto_map in maps.items():
        content = json.loads((place / name).read_text())
        (place / name).write_text(json.dumps({**content, "auto_map": auto_map}))
    with module_cache(tmp_path_factory.mktemp("modules")):
        yield str(place)


def load(auto, folder, **options):
    return getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True, **options)


@pytest.fixture(scope="module")
def tokenizer(folder):
    for name in ("sentencepiece", "sacremoses", "spacy"):
        pytest.importorskip(name)
    return load("AutoTokenizer", folder)


@pytest.fixture
def model(folder):
    return load("AutoModelForMaskedLM", folder).eval()


def logits(model, *inputs, **options):
    with torch.no_grad():
        return model(*inputs, **options)[0]


# --------------------------------------------------------------------------------------------------------- transformers


def test_auto_classes(folder, tokenizer):
    text = tokenizer(REVIEWS, padding=True, return_tensors="pt")
    for auto in ("AutoModel", *(f"AutoModelFor{head}" for head in HEADS[:-1])):
        assert len(logits(load(auto, folder), **text)) == len(REVIEWS)
    choices = {name: value[None] for name, value in text.items()}
    assert logits(load("AutoModelForMultipleChoice", folder), **choices).shape == (1, len(REVIEWS))
    assert load("AutoConfig", folder).model_type == "tupe"


def test_pipelines(folder, tokenizer):
    fill = transformers.pipeline("fill-mask", folder, trust_remote_code=True)
    assert "window" in [guess["token_str"] for guess in fill("she looked out of the <mask> .")]
    assert fill("she <mask> out .", targets=["\u2581looked"])[0]["token_str"].endswith("looked")
    assert len(fill(["a <mask> film .", "they <mask> ."])) == 2 and len(fill("a <mask> of the <mask> .")) == 2
    long = fill("she <mask> out . " * 100, tokenizer_kwargs={"truncation": True})
    assert len(long) > 1
    kinds = {"text-classification": "label", "token-classification": "entity"}
    for kind, key in kinds.items():
        results = transformers.pipeline(kind, folder, trust_remote_code=True)(REVIEWS)
        assert len(results) == len(REVIEWS)
        assert key in (results[0][0] if isinstance(results[0], list) else results[0])
    if not IS_5:  # which has no such pipeline
        answer = transformers.pipeline("question-answering", folder, trust_remote_code=True)(
            question="who looked ?", context=f"{REVIEWS[2]} " * 40
        )
        assert answer["answer"] == (f"{REVIEWS[2]} " * 40)[answer["start"] : answer["end"]].strip()
    for way in ("simple", "first"):  # by word
        groups = transformers.pipeline("ner", folder, trust_remote_code=True, aggregation_strategy=way)(REVIEWS[2])
        assert groups[0]["start"] == 0 and "<unk>" not in " ".join(group["word"] for group in groups)
    features = transformers.pipeline("feature-extraction", folder, trust_remote_code=True)(REVIEWS[0])
    assert len(features[0][0]) == 256
    names = {"entailment": 0, "neutral": 1, "contradiction": 2}
    labels = {"label2id": names, "id2label": {index: name for name, index in names.items()}}
    entailment = load("AutoModelForSequenceClassification", folder, **labels)
    zero = transformers.pipeline("zero-shot-classification", model=entailment, tokenizer=tokenizer)
    assert len(zero(REVIEWS[0], candidate_labels=["film", "music"])["scores"]) == 2


def test_attention_implementations(folder, model, tokenizer):
    text = tokenizer(REVIEWS, padding=True, return_tensors="pt")
    real, expected = text["attention_mask"] == 1, logits(model, **text)
    for kind in ("sdpa", "eager"):
        other = load("AutoModelForMaskedLM", folder, attn_implementation=kind).eval()
        torch.testing.assert_close(logits(other, **text)[real], expected[real], rtol=1e-4, atol=1e-4)
    with pytest.raises((ValueError, ImportError), match="(?i)flash"):
        load("AutoModelForMaskedLM", folder, attn_implementation="flash_attention_2")
    out = load("AutoModel", folder, output_attentions=True, attn_implementation="eager")(**text)
    torch.testing.assert_close(out.attentions[0].sum(-1)[0], torch.ones(4, text["input_ids"].size(1)))


def test_gradient_checkpointing(folder):
    ids, losses = torch.randint(3, 8000, (2, 20)), []
    for on in (False, True):
        model = load("AutoModelForMaskedLM", folder).train()
        if on:
            model.gradient_checkpointing_enable()
        loss = model(ids, labels=ids).loss
        loss.backward()
        losses.append((loss.item(), sum(p.grad.norm() ** 2 for p in model.parameters()).item()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_saved_folders_hold_all_code(folder, model, tokenizer, tmp_path):
    """Through two generations, and in shards; with an embedding that has grown."""
    ids, code = torch.tensor([[0, 5, 6, 7, 2]]), sorted(path.name for path in Path(folder).glob("*.py"))
    tokenizer = copy.deepcopy(tokenizer)  # other tests have the vocabulary as it was
    tokenizer.add_tokens(["tupe-grown"])
    model.resize_token_embeddings(len(tokenizer))
    expected, parent = logits(model, ids), model
    for name in ("first_child", "second_child"):
        parent.save_pretrained(tmp_path / name, max_shard_size="4MB")
        tokenizer.save_pretrained(tmp_path / name)
        assert [path.name for path in sorted((tmp_path / name).glob("*.py"))] == code
        parent, tokenizer = load("AutoModelForMaskedLM", tmp_path / name).eval(), load("AutoTokenizer", tmp_path / name)
        assert torch.equal(logits(parent, ids), expected)
        assert tokenizer("a tupe-grown film")["input_ids"].count(8192) == 1


def test_precisions_and_places(folder, model):
    ids = torch.randint(3, 8000, (2, 20))
    expected, name = logits(model, ids), "dtype" if IS_5 else "torch_dtype"
    for dtype, tolerance in ((torch.float16, 0.1), (torch.bfloat16, 0.6), (torch.float64, 1e-3)):
        other = load("AutoModelForMaskedLM", folder, **{name: dtype}).eval()
        torch.testing.assert_close(logits(other, ids).float(), expected, atol=tolerance, rtol=0)
    for options in ({"device_map": "cpu"}, {"device_map": "auto"}, {"low_cpu_mem_usage": True}):
        assert torch.equal(logits(load("AutoModelForMaskedLM", folder, **options).eval(), ids), expected)


@pytest.mark.parametrize("position", ["nopos", "shaw+t5:layer", "deberta", "fope", "rope:learned:True+window:size:8"])
def test_another_position_in_the_configuration(position, folder, tmp_path):
    """Made, saved and loaded by the code in the folder: without parameters, with several modules, with buffers."""
    ids = torch.randint(3, 40, (2, 20))
    small = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = load("AutoConfig", folder, position=position, cls_position="tied", **small)
    model = transformers.AutoModelForMaskedLM.from_config(config, trust_remote_code=True).eval()
    model.save_pretrained(tmp_path)
    again = load("AutoModelForMaskedLM", tmp_path).eval()
    assert again.config.position == model.config.position
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    assert torch.equal(logits(again, ids), logits(model, ids))


@pytest.mark.thorough
def test_trainer(folder, tokenizer, tmp_path, monkeypatch):
    """The collator's masks, accumulation, a checkpoint that loads from its own folder, and training on from it."""
    pytest.importorskip("accelerate")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")  # else bf16=True stays on, in other processes too
    collate = transformers.DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3)
    rows = [tokenizer(text) for text in REVIEWS * 4]

    def trainer(steps):
        arguments = transformers.TrainingArguments(
            str(tmp_path / "trainer_run"), max_steps=steps, save_steps=4, logging_steps=1, report_to=[], use_cpu=True,
            per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=1e-3, bf16=True,
            label_smoothing_factor=0.1, seed=1,
        )  # fmt: skip
        model = load("AutoModelForMaskedLM", folder)
        return transformers.Trainer(model, arguments, train_dataset=rows, data_collator=collate)

    whole = trainer(8)
    whole.train()
    losses = [entry["loss"] for entry in whole.state.log_history if "loss" in entry]
    assert len(losses) == 8 and sum(losses[-3:]) < sum(losses[:3])
    saved = load("AutoModelForMaskedLM", tmp_path / "trainer_run" / "checkpoint-8")
    assert torch.equal(saved.lm_head.bias, whole.model.lm_head.bias)
    parted = trainer(8)
    parted.train(resume_from_checkpoint=str(tmp_path / "trainer_run" / "checkpoint-4"))
    assert parted.state.global_step == 8


# ------------------------------------------------------------------------------------------------------- its neighbours


@pytest.mark.parametrize("how", ["call", "map"])
def test_accelerate_offloads_to_a_disk(how, folder, model, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    ids = torch.randint(3, 8000, (2, 20))
    expected = logits(model, ids)
    if how == "call":
        accelerate.disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    else:
        parts = dict.fromkeys(["tupe.encoder.positions", "tupe.encoder.embed_norm", "tupe.encoder.layers"], "disk")
        places = {"tupe.encoder.tokens": "cpu", "decoder": "cpu", "lm_head": "disk", **parts}  # 4: no tied weight
        model = load("AutoModelForMaskedLM", folder, device_map=places, offload_folder=str(tmp_path)).eval()
    torch.testing.assert_close(logits(model, ids), expected)


def test_peft_saves_and_loads(folder, tmp_path):
    peft = pytest.importorskip("peft")
    options = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["qkv", "out", "q", "k"], init_lora_weights=False)
    adapted = peft.get_peft_model(load("AutoModelForSequenceClassification", folder), options).eval()
    ids = torch.tensor([[0, 5, 6, 7, 2]])
    adapted.save_pretrained(tmp_path / "adapter")
    again = peft.AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "adapter", trust_remote_code=True)
    torch.testing.assert_close(logits(again.eval(), ids), logits(adapted, ids))


def test_sentence_transformers(folder, tokenizer, tmp_path):
    """An encoder is loaded, trained, saved and loaded; pairs are scored."""
    library, datasets = pytest.importorskip("sentence_transformers"), pytest.importorskip("datasets")
    encoder = library.SentenceTransformer(folder, trust_remote_code=True, device="cpu")
    assert encoder.encode(REVIEWS).shape == (4, 256)
    pairs = datasets.Dataset.from_dict({"anchor": REVIEWS, "positive": REVIEWS[::-1]})
    arguments = library.SentenceTransformerTrainingArguments(
        str(tmp_path / "st_run"), max_steps=3, per_device_train_batch_size=2, report_to=[], use_cpu=True
    )
    loss = importlib.import_module("sentence_transformers.losses").MultipleNegativesRankingLoss(encoder)
    library.SentenceTransformerTrainer(encoder, arguments, train_dataset=pairs, loss=loss).train()
    encoder.save(str(tmp_path / "st_saved"))
    again = library.SentenceTransformer(str(tmp_path / "st_saved"), trust_remote_code=True, device="cpu")
    torch.testing.assert_close(torch.tensor(again.encode(REVIEWS)), torch.tensor(encoder.encode(REVIEWS)))
    scores = library.CrossEncoder(folder, num_labels=1, trust_remote_code=True, device="cpu").predict([REVIEWS[:2]])
    assert scores.shape == (1,)


# ----------------------------------------------------------------------------------------------------- the pages' code


CHECKS = {
    "transformers": "assert len(best) == 5 and terms.shape == (4, 64, 64)",
    "bertviz": "assert '<script' in page.data.lower()",
    "minicons": """
model = AutoModelForMaskedLM.from_pretrained("models/tupe_r_mini").eval()
ids = tokenizer(sentence)["input_ids"]
rows = torch.tensor([[*ids[:i], tokenizer.mask_token_id, *ids[i + 1:]] for i in range(1, len(ids) - 1)])
with torch.no_grad():
    of_pieces = model(rows).logits.log_softmax(-1)[range(len(rows)), range(1, len(ids) - 1), ids[1:-1]]
assert abs(score - of_pieces.sum().item()) < 1e-3, (score, of_pieces.sum())
""",
}


@pytest.mark.parametrize("library", CHECKS)
@pytest.mark.thorough
def test_the_page_s_code(library, tmp_path):
    """That of docs/hugging-face.md, but for what is another library's, and of README.md; where `tupe.hf` is."""
    for name in ("accelerate", "sentencepiece", "sacremoses", "spacy", library):
        pytest.importorskip(name)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/hugging-face.md").read_text(), re.DOTALL)
    blocks = [code for code in blocks if not any(other in code for other in {*CHECKS} - {library, "transformers"})]
    assert library == "transformers" or any(library in code for code in blocks)
    if library == "transformers":
        blocks.insert(0, re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL).group(1))
    (tmp_path / "models").symlink_to(ROOT / "models")
    (tmp_path / "script.py").write_text("\n".join([*blocks, CHECKS[library]]))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
