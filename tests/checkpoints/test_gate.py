"""The gate for checkpoints from outside: a folder of hostile files, and what innocent ones of others are told.

Every file of `HOSTILE` makes the folder PWNED if anything of it runs; `test_behind_the_gate_they_would_run` shows for
one of them that fairseq would run it.
"""

import argparse
import collections
import json
import os
import re
import shutil
import subprocess
import sys
from enum import Enum
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from fairseq import checkpoint_utils, models, options, registry, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from helpers import PLUGIN, configuration, new_checkpoint, our_checkpoint
from omegaconf import OmegaConf

from tupe.checkpoints.convert import from_released
from tupe.checkpoints.export import export
from tupe.checkpoints.gate import ADMITTED, COMMON, admit, read_checkpoint
from tupe.checkpoints.trained import read_model
from tupe.cli import main
from tupe.evaluate.loading import load_model


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A checkpoint of ours with its dictionary."""
    path = our_checkpoint(tmp_path_factory.mktemp("good") / "good.pt", 1.0, 3)
    (path.parent / "dict.txt").write_text("".join(f"w{i} 1\n" for i in range(7)))
    return path


@pytest.fixture
def state(good):
    state = torch.load(good, weights_only=True)
    state["cfg"]["task"]["data"] = str(good.parent)
    return state


def code(folder):
    """What makes the folder PWNED when it is evaluated, and is a list of layers for wav2vec2."""
    return f"[(__import__('os').makedirs({str(folder / 'PWNED')!r}, exist_ok=True) or 8, 2, 2)]"


class Pickled:
    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder / "PWNED"),)


def endless():
    endless = []
    endless.append(endless)
    return endless


# What a file has in place of something good: place, value of a payload and a folder, what the line says.
HOSTILE = {
    "model": ("cfg.model", lambda code, _: {"_name": "wav2vec2", "conv_feature_layers": code}, "model is 'wav2vec2'"),
    "renamed": ("cfg.model._name", lambda code, _: "wav2vec2", "its model is 'wav2vec2'"),
    "task": ("cfg.task", lambda code, _: {"_name": "audio_finetuning", "data": code}, "its task is 'audio_finetuning'"),
    "criterion": ("cfg.criterion", lambda code, _: {"_name": "ctc", "wer_args": code}, "its criterion is 'ctc'"),
    "no name": ("cfg.model._name", lambda code, _: ["tupe_r"], "no checkpoint of this project"),
    "stand-in": ("cfg.model._name", lambda code, _: "from_checkpoint", "no checkpoint of this project"),
    "code for a number": ("cfg.model.encoder_layers", lambda code, _: code, "encoder_layers is .*valid: int"),
    "bool for a number": ("cfg.model.encoder_layers", lambda code, _: True, "encoder_layers is True; valid: int"),
    "list for a word": ("cfg.model.position", lambda code, _: [code], "position is .*valid: str"),
    "word for a switch": ("cfg.model.compile", lambda code, _: code, "compile is .*valid: auto, yes, no"),
    "choice": ("cfg.model.cls", lambda code, _: code, "cls is .*valid: auto, tied, untied"),
    "lookup": ("cfg.task.data", lambda code, _: "${oc.env:HOME}", "data is .*valid: str"),
    "half": ("cfg.common.fp16", lambda code, _: code, "common.fp16 is .*valid: bool"),
    "seed": ("cfg.common.seed", lambda code, _: code, "common.seed is .*valid: int"),
    "section": ("cfg.common", lambda code, _: [code], "cfg.common is a list"),
    "configuration": ("cfg", lambda code, _: [code], "no checkpoint of this project"),
    "omegaconf": ("cfg.model", lambda code, _: OmegaConf.create({"_name": "tupe_r"}), "contains objects other than"),
    "namespace": ("cfg.model", lambda code, _: argparse.Namespace(arch="wav2vec2", x=code), "its model is 'wav2vec2'"),
    "old": ("cfg", lambda code, _: None, "no checkpoint of this project"),
    "weights": ("model", lambda code, _: {"encoder.tokens.weight": code}, "its model holds a str"),
    "arrays": ("model", lambda code, _: {"encoder.tokens.weight": np.float64(1)}, "its model holds a float64"),
    "no weights": ("model", lambda code, _: code, "has no model"),
    "history": ("optimizer_history", lambda code, _: {"num_updates": 3}, "optimizer_history is of type dict"),
    "updates": ("optimizer_history", lambda code, _: [{"num_updates": code}], "number of updates is"),
    "progress": ("extra_state.train_iterator", lambda code, _: code, "extra_state.train_iterator is not"),
    "meters": ("extra_state.metrics", lambda code, _: {"train": [(0, "loss", "OrderedDict", {})]}, "metrics is not"),
    "labels": ("task_state", lambda code, _: {"labels": {"head": code}}, "task_state.labels is not"),
    "itself": ("extra_state.x", lambda code, _: endless(), "extra_state contains itself"),
    "keys": ("last_optimizer_state", lambda code, _: {(1, code): 2}, "key of type tuple"),
    "set": ("extra_state.x", lambda code, _: {code}, "extra_state.x holds an object of type set|refused: not a checkp"),
    "dtype": ("extra_state.best", lambda code, _: np.dtype("float64"), "extra_state.best holds an object of type"),
    "pickle": ("extra_state.x", lambda code, folder: Pickled(folder), "refused: not a checkpoint"),
}  # fmt: skip


def put(state, place, value):
    """A copy of a checkpoint with a value at a place, "cfg.model.position"."""
    name, _, rest = place.partition(".")
    return {**state, name: put(state.get(name) or {}, rest, value) if rest else value}


def write(state, name, folder):
    place, value, said = HOSTILE[name]
    path = folder / f"{name.replace(' ', '_')}.pt"
    torch.save(put(state, place, value(code(folder), folder)), path)
    return path, said


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_in_one_line(name, state, tmp_path):
    path, said = write(state, name, tmp_path)
    fairseqs = checkpoint_utils.load_checkpoint_to_cpu, checkpoint_utils.load_model_ensemble_and_task
    for read in (read_checkpoint, read_model, *fairseqs):
        with pytest.raises(ValueError) as error:
            read([str(path)] if read is fairseqs[1] else str(path))
        assert re.search(said, str(error.value)) and str(path) in str(error.value) and "\n" not in str(error.value)
    assert len(str(error.value)) < 300 + len(str(path)) and not (tmp_path / "PWNED").exists()


def test_behind_the_gate_they_would_run(tmp_path):
    small = dict.fromkeys(["encoder_layers", "encoder_attention_heads", "conv_pos", "conv_pos_groups"], 1)
    small |= dict.fromkeys(["encoder_embed_dim", "encoder_ffn_embed_dim"], 8)
    models.build_model(OmegaConf.create({**HOSTILE["model"][1](code(tmp_path), tmp_path), **small}), None)
    assert (tmp_path / "PWNED").exists()


def registries(part):
    """{name: class}, {name: dataclass} of fairseq."""
    if part == "model":
        return models.MODEL_REGISTRY, models.MODEL_DATACLASS_REGISTRY
    if part == "task":
        return tasks.TASK_REGISTRY, tasks.TASK_DATACLASS_REGISTRY
    return registry.REGISTRIES[part]["registry"], registry.REGISTRIES[part]["dataclass_registry"]


def kind_of(field):
    """A field's type, or its choices, as the gate has them."""
    kind = next((each for each in get_args(field.type) if each is not type(None)), field.type)
    return tuple(choice.value for choice in kind) if issubclass(kind, Enum) else kind


@pytest.mark.parametrize("part", ADMITTED)
def test_the_options_are_those_of_fairseq(part):
    """Of every part that passes: the same names, and the same types. And every part of ours passes."""
    kinds, dataclasses = registries(part)
    for name, known in ADMITTED[part].items():
        fields = [f for f in dataclasses[name].__dataclass_fields__.values() if f.name != "_name"]
        earlier = {"classification_head_name": str} if (part, name) == ("criterion", "glue") else {}  # now the task's
        assert {f.name: kind_of(f) for f in fields} | earlier == known, name
    ours = {name for name, kind in kinds.items() if any(base.__module__.startswith("tupe.") for base in kind.__mro__)}
    assert ours - {*ADMITTED[part]} <= {"from_checkpoint"}


def test_parts_that_stand_on_ours_pass_when_they_are_added(state, monkeypatch):
    with pytest.raises(ValueError, match="its task is 'mine'"):
        admit(put(state, "cfg.task._name", "mine"), "x.pt")
    monkeypatch.setitem(ADMITTED["task"], "mine", {"data": str, "more": ("a", "b")})
    assert admit(put(state, "cfg.task._name", "mine"), "x.pt")["cfg"]["task"].keys() == {"_name", "data"}
    with pytest.raises(ValueError, match="cfg.task.more is 'c'; valid: a, b"):
        admit(put(state, "cfg.task", {"_name": "mine", "more": "c"}), "x.pt")


@pytest.mark.parametrize("part", ADMITTED)
def test_none_of_fairseqs_own_parts_passes(part, state, tmp_path):
    """Whichever is registered, with code in each of its options."""
    kinds, dataclasses = registries(part)
    names = [name for name in kinds if name not in ADMITTED[part]]
    assert len(names) > 20
    for name in names:
        kind = dataclasses.get(name)
        fields = kind.__dataclass_fields__ if kind else ("data",)
        section = {**dict.fromkeys(fields, code(tmp_path)), "_name": name, "position": "t5", "max_positions": 6}
        with pytest.raises(ValueError, match=f"its {part} is '{name}'"):
            admit(put(state, f"cfg.{part}", section), "x.pt")
    assert not (tmp_path / "PWNED").exists()


def test_every_option_of_ours_has_its_type(state, tmp_path):
    """Of all that a checkpoint configures, code is only taken where words are, which nothing evaluates."""
    taken = []
    for section, values in state["cfg"].items():
        for name in values if isinstance(values, dict) else ():
            if section not in (*ADMITTED, "common") or (section == "common" and name not in COMMON):
                assert code(tmp_path) not in repr(admit(put(state, f"cfg.{section}.{name}", code(tmp_path)), "x.pt"))
            elif name != "_name":
                try:
                    value = admit(put(state, f"cfg.{section}.{name}", code(tmp_path)), "x.pt")["cfg"][section][name]
                except ValueError as error:
                    assert f"cfg.{section}.{name} is " in str(error)
                else:
                    assert value == code(tmp_path)
                    taken.append(f"{section}.{name}")
    assert {*taken} == {
        "task.data",
        "task.finetune_from_model",
        "model.position",
        "model.position_file",
    }
    assert not (tmp_path / "PWNED").exists()


def test_what_is_read_holds_nothing_else(state, tmp_path):
    extra = {"x": code(tmp_path), "args": argparse.Namespace(arch="wav2vec2", conv_feature_layers=code(tmp_path))}
    cfg = {**state["cfg"], "hydra": code(tmp_path), "bpe": {"_name": "gpt2", "x": code(tmp_path)}}
    cfg["optimizer"] = {"_name": "composite", "groups": code(tmp_path)}
    cfg["model"] = {**cfg["model"], "w2v_args": code(tmp_path), "conv_feature_layers": code(tmp_path)}
    state["extra_state"]["best"] = np.float64(0.5)
    state["model"] = collections.OrderedDict(state["model"])
    torch.save({**state, **extra, "cfg": cfg}, tmp_path / "x.pt")
    admitted, trained = read_checkpoint(tmp_path / "x.pt"), read_model(tmp_path / "x.pt")
    assert code(tmp_path) not in repr(admitted) and code(tmp_path) not in repr(trained)
    assert admitted["args"] is None and admitted["cfg"].keys() == {*ADMITTED, "common"}
    assert admitted["cfg"]["model"] == state["cfg"]["model"]
    assert type(admitted["extra_state"]["best"]) is float


def test_files_that_are_no_checkpoints_of_ours_are_refused(good, state, tmp_path):
    (tmp_path / "text.pt").write_text("text")
    (tmp_path / "half.pt").write_bytes(good.read_bytes()[:9000])
    torch.save([state], tmp_path / "list.pt")
    torch.save({"args": argparse.Namespace(arch="bert_base"), "model": state["model"]}, tmp_path / "released.pt")
    messages = {
        "released.pt": r"no checkpoint of this project.*tupe checkpoint convert",
        "list.pt": "no checkpoint of this project",
        "text.pt": "is refused|cannot be read",
        "half.pt": "is damaged",
        "": "cannot be read",  # the folder
        "none.pt": "checkpoint not found",
    }
    for name, message in messages.items():
        with pytest.raises(ValueError, match=message):
            read_checkpoint(tmp_path / name)
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)  # as good as any
    assert read_checkpoint(tmp_path / "old.pt")["cfg"]["model"] == state["cfg"]["model"]


def test_files_that_a_configuration_names_are_not_run(state, tmp_path):
    (tmp_path / "evil.py").write_text(f"import os; os.mkdir({str(tmp_path / 'PWNED')!r})")
    state["cfg"]["common"]["user_dir"] = str(tmp_path / "evil.py")
    state["cfg"]["model"]["position_file"] = str(tmp_path / "evil.py")
    torch.save(state, tmp_path / "x.pt")
    model, _ = load_model(tmp_path / "x.pt")
    assert model.config.position == "untied+t5" and not (tmp_path / "PWNED").exists()


def test_good_ones_pass_as_they_are(good, pretrained):
    for path in (good, pretrained):
        before, after = torch.load(path, weights_only=True), read_checkpoint(path)
        assert {part: before["cfg"][part] for part in ADMITTED} == {part: after["cfg"][part] for part in ADMITTED}
        assert after["cfg"]["common"].items() <= before["cfg"]["common"].items() and len(after["cfg"]["common"]) == 6
        for name in before.keys() - {"cfg"}:  # tensors compare as their text
            assert json.dumps(after[name], default=str) == json.dumps(before[name], default=str)
    (model,), cfg, _ = checkpoint_utils.load_model_ensemble_and_task([str(pretrained)])
    assert model.encoder.positions.name == "untied+t5" and cfg.model._name == "tupe_r_tiny"


def test_fairseqs_own_parts_of_our_recipes_pass(good, state, tmp_path):
    sizes = {name: value for name, value in state["cfg"]["model"].items() if name.startswith("encoder_")}
    for task in ("masked_lm", "sentence_prediction"):
        more = {"tokens_per_sample": 6} if task == "masked_lm" else {"num_classes": 2}
        cfg = configuration("tupe_r", {"max_positions": 6, **sizes}, task, task)
        cfg["task"].update(data=str(good.parent), **more)
        torch.save({**state, "cfg": cfg}, tmp_path / "x.pt")
        assert {part: cfg[part] for part in ADMITTED}.items() <= read_checkpoint(tmp_path / "x.pt")["cfg"].items()


# -------------------------------------------------------------------------------------------------- innocent foreigners


@pytest.fixture(scope="module")
def roberta(good):
    """The checkpoint of a small RoBERTa of fairseq."""
    words = [str(good.parent), "--task=masked_lm", "--criterion=masked_lm", "--arch=roberta_base", "--optimizer=adam"]
    words += ["--encoder-layers=1", "--encoder-embed-dim=8", "--encoder-ffn-embed-dim=8", "--encoder-attention-heads=2"]
    words += ["--max-positions=6", "--tokens-per-sample=6"]
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), words))
    model = tasks.setup_task(cfg.task).build_model(cfg.model)
    plain = OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)
    torch.save(new_checkpoint(plain, model.state_dict()), good.parent / "roberta.pt")
    return good.parent / "roberta.pt"


def test_another_model_of_fairseq_is_named_in_one_line(roberta):
    fairseqs = checkpoint_utils.load_model_ensemble_and_task
    for read in (read_checkpoint, load_model, lambda path: fairseqs([str(path)])):
        with pytest.raises(
            ValueError, match="^[^\n]*roberta.pt is no checkpoint of this project: its model is 'roberta"
        ):
            read(roberta)
    with pytest.raises(ValueError, match="not a checkpoint of the released TUPE code"):
        from_released(roberta)


def test_a_run_of_another_model_goes_on_from_its_own(roberta):
    """Whoever trains fairseq's models with this plugin: the run's own configuration builds them."""
    state = read_checkpoint(roberta, trained="roberta_base")
    assert state["cfg"]["model"] == {"_name": "roberta_base"} and state["cfg"]["task"]["_name"] == "masked_lm"
    with pytest.raises(ValueError, match="its model is 'roberta_base'"):
        read_checkpoint(roberta, trained="tupe_r")


def fairseq(program, *words):
    """One of fairseq's own programs."""
    path = f"import sys; sys.path.insert(0, {str(PLUGIN.parent)!r})"
    text = f"{path}; from fairseq_cli import {program}; {program}.cli_main()"
    words = [sys.executable, "-c", text, *words, f"--user-dir={PLUGIN}", "--cpu"]
    return subprocess.run(words, capture_output=True, text=True)


@pytest.mark.thorough
def test_fairseqs_own_programs_say_one_line(roberta, good, tmp_path):
    """And what trains through them is not started: no checkpoint. One of ours is read as ever."""
    shutil.copytree(good.parent, tmp_path / "data")
    write_splits(tmp_path / "data")
    model = ["--task=tupe_masked_lm", "--arch=tupe_r_tiny", "--criterion=masked_lm", "--optimizer=adam", "--lr=0.1"]
    model += ["--batch-size=2", "--max-update=1", "--tokens-per-sample=6", f"--save-dir={tmp_path / 'run'}"]
    validate = ["--task=masked_lm", "--max-sentences=2"]
    for done in (
        fairseq("validate", tmp_path / "data", f"--path={roberta}", *validate),
        fairseq("train", tmp_path / "data", f"--continue-once={roberta}", *model),
    ):
        assert done.returncode != 0 and "Traceback" not in done.stderr, done.stderr
        assert "roberta.pt is no checkpoint of this project: its model is 'roberta_base'" in done.stdout + done.stderr
    assert not [*(tmp_path / "run").glob("*.pt")]
    done = fairseq("validate", tmp_path / "data", f"--path={good}", *validate)
    assert done.returncode == 0, done.stderr


def write_splits(folder):
    from fairseq.data import Dictionary, indexed_dataset

    dictionary = Dictionary.load(str(folder / "dict.txt"))
    for split in ("train", "valid"):
        builder = indexed_dataset.make_builder(f"{folder}/{split}.bin", "mmap", vocab_size=len(dictionary))
        for _ in range(8):
            builder.add_item(dictionary.encode_line("w1 w2 w3", add_if_not_exist=False))
        builder.finalize(f"{folder}/{split}.idx")


# ------------------------------------------------------------------------------------------------------------- folders


HOSTILE_FOLDERS = {  # what is written into a folder of ours: config.json's settings, or files -> what the line says
    "auto_map": ({"auto_map": {"AutoModelForMaskedLM": "evil.E", "AutoConfig": "evil.E"}}, None),
    "kernel": ({"attn_implementation": "kernels/evil", "_attn_implementation": "kernels/evil"}, None),
    "numbers": ({"quantization_config": {"quant_method": "evil"}, "dtype": "evil"}, None),
    "code for a number": ({"num_hidden_layers": "CODE"}, "layers=.*valid"),
    "list for a word": ({"position": ["CODE"]}, "position=.*valid: str"),
    "code for a word": ({"position": "CODE"}, "unknown position"),
    "epsilon": ({"layer_norm_eps": "CODE"}, "layer_norm_eps=.*valid: float"),
    "vocabulary": ({"vocab_size": "CODE"}, "vocab_size is .*valid: int"),
    "labels": ({"id2label": ["CODE"]}, "id2label is .*valid: dict"),
    "numbered": ({"id2label": {"CODE": "a"}}, "id2label is .*valid: {number: name}"),
    "list": ([], "holds no JSON object"),
    "templates": ({"tokenizer_config.json": {
        "auto_map": {"AutoTokenizer": ["evil.E", "evil.E"]},
        "chat_template": "{{ cycler.__init__.__globals__.os.mkdir('PWNED') }}",
    }}, None),
    "adapter": ({"adapter_config.json": {"base_model_name_or_path": "evil"}}, "has an adapter"),
    "pickle": ({"pytorch_model.bin": None}, "cannot be read|refused"),
    "cut": ({"model.safetensors": b"x"}, "model.safetensors cannot be read"),
    "file of fairseq": ({"as_fairseq.pt": None}, None),
}  # fmt: skip


def write_folder(source, name, folder):
    """A copy of a model's folder with the hostile files of that name, and what a line says of it."""
    files, said = HOSTILE_FOLDERS[name]
    copy = shutil.copytree(source, folder / name.replace(" ", "_"))
    (copy / "evil.py").write_text(f"import os; os.makedirs({str(folder / 'PWNED')!r}, exist_ok=True)\nclass E: pass\n")
    if not any("." in key for key in files):
        config = json.loads((copy / "config.json").read_text())
        text = json.dumps({**config, **files} if isinstance(files, dict) else files)
        (copy / "config.json").write_text(text.replace("CODE", code(folder)))
        return copy, said
    for file, content in files.items():
        if isinstance(content, bytes):
            (copy / file).write_bytes(content)
        elif content is not None:
            (copy / file).write_text(json.dumps(content))
        else:
            torch.save({"cfg": Pickled(folder), "x": Pickled(folder)}, copy / file)
    if "pytorch_model.bin" in files:
        (copy / "model.safetensors").unlink()
    return copy, said


@pytest.fixture(scope="module")
def exported(good, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "model"
    export(good, folder, code=False)
    (folder / "checksums.json").unlink()  # a stranger's has none, or one that fits
    return folder


@pytest.mark.parametrize("name", HOSTILE_FOLDERS)
def test_hostile_folders(name, exported, tmp_path):
    """Either they are read without what is not the model, or refused in one line."""
    folder, said = write_folder(exported, name, tmp_path)
    for read in (load_model, checkpoint_utils.load_checkpoint_to_cpu):
        if said is None:
            read(str(folder))
            continue
        with pytest.raises(ValueError, match=said) as error:
            read(str(folder))
        assert "\n" not in str(error.value)
    assert not (tmp_path / "PWNED").exists() and not Path("PWNED").exists()


# --------------------------------------------------------------------------------------------------------- all commands

FILES = (
    "model",
    "task",
    "criterion",
    "code for a number",
    "half",
    "omegaconf",
    "namespace",
    "old",
    "weights",
    "pickle",
)
COMMANDS = {  # every command that reads a checkpoint -> its words
    "finetune": "--task=CoLA --data={glue} --checkpoint={path} --output={out} --gpus=0 --allocator=none --max-epoch=1 "
    "--num-workers=0",
    "finetune --engine torch": "--task=CoLA --data={glue} --checkpoint={path} --output={out} --gpus=0 "
    "--allocator=none --max-epoch=1 --num-workers=0",
    "pretrain": "--data={data} --output={out} checkpoint.continue_once={path} --gpus=0 --allocator=none "
    "--arch=tupe_r_tiny "
    "--tokens-per-sample=20 --max-update=1 --num-workers=0",
    "pretrain --recipe pretrain_further": "--data={data} --output={out} --finetune-from-model={path} --gpus=0 "
    "--allocator=none --tokens-per-sample=20 --max-epoch=1 --num-workers=0",
    "predict": "CoLA={path} --data={glue} --output={out}",
    "minimal-pairs": "{path} --pairs={pairs} --data={data} --output={out}",
    "order": "{path} --data={data} --output={out}",
    "extrapolate": "{path} --data={data} --output={out}",
    "checkpoint average": "{path} {path} --output={out}",
    "checkpoint convert": "--from={path} --dict={data}/dict.txt --output={out}",
    "checkpoint export": "--checkpoint={path} --data={data} --output={out}",
    "checkpoint stretch": "--checkpoint={path} --length=40 --output={out}",
    "checkpoint swap": "--checkpoint={path} --position=t5 --data={data} --output={out}",
}


def run(command, **places):
    words = command.split()
    return CliRunner().invoke(main, [*words, *(word.format(**places) for word in COMMANDS[command].split())])


@pytest.fixture(scope="module")
def places(vocabulary, learnable, tmp_path_factory):
    pairs = tmp_path_factory.mktemp("pairs")
    line = {"sentence_good": "a b", "sentence_bad": "b a", "UID": "x", "linguistics_term": "y"}
    (pairs / "x.jsonl").write_text(json.dumps(line) + "\n")
    glue = shutil.copytree(learnable, pairs / "glue")
    for file in glue.glob("*/input*/valid.*"):  # what is predicted
        shutil.copy(file, file.with_stem("test"))
    return {"data": vocabulary, "glue": glue, "pairs": pairs / "x.jsonl"}


@pytest.mark.thorough
@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_runs_what_a_file_holds(command, places, pretrained, roberta, tmp_path):
    """Nor passes it on, nor prints more than a line about it; nor about another model of fairseq."""
    state = torch.load(pretrained, weights_only=True)
    state["cfg"]["task"]["data"] = str(places["data"])
    for path in [*(write(state, name, tmp_path)[0] for name in FILES), roberta]:
        done = run(command, path=path, out=tmp_path / "out", **places)
        assert done.exit_code not in (0, None) and "Traceback" not in done.output, (path, done.output)
        assert str(path) in done.output and len(done.output.splitlines()) < 6, (path, done.output)
        assert not (tmp_path / "PWNED").exists() and not [*tmp_path.glob("out/**/*.pt")]
        assert not (tmp_path / "out").is_file()
        shutil.rmtree(tmp_path / "out", ignore_errors=True)


@pytest.mark.thorough
@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_runs_what_a_folder_holds(command, places, small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in HOSTILE_FOLDERS:
        folder, _ = write_folder(small, name, tmp_path)
        before = sorted(folder.iterdir())
        done = run(command, path=folder, out=tmp_path / "out", **places)
        assert "Traceback" not in done.output and not (tmp_path / "PWNED").exists(), (name, done.output)
        assert done.exit_code == 0 or len(done.output.splitlines()) < 6, (name, done.output)
        assert sorted(folder.iterdir()) == before
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        (tmp_path / "out").unlink(missing_ok=True)


def test_nothing_else_reads_them():
    """One place unpickles; what it reads goes through the gate, or is the state of an optimizer, or of the released
    code and of transformers, of which the conversion takes tensors and numbers alone."""
    loading, room = "common/safe_load.py", "checkpoints/"
    readers = {loading, "train/loop.py", *(f"{room}{name}.py" for name in ("gate", "convert", "trained"))}
    users = {"torch.load(": {loading}, "load_safely(": readers}
    for call, files in users.items():
        found = {str(path.relative_to(PLUGIN)) for path in PLUGIN.rglob("*.py") if call in path.read_text()}
        assert found == files
