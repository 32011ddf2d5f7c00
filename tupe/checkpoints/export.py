"""Checkpoint -> folder that the transformers library loads without fairseq, and back. With the model's code, which is
the files of this package's root, it is loaded without this package too."""

import importlib.util
import json
import logging
import os
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

from ..common import options as choices
from ..common import record
from ..common.options import FOLDER, Command, shorten_list
from ..common.prepared import tokenizer_files
from ..common.safe_load import num_updates
from ..data.glue import TASKS, glue_name, range_of
from ..encoder import names_in
from ..positions import parse
from ..schemes import SCHEMES

logger = logging.getLogger(__name__)
SCHEMES_MODULE = f"{__name__.partition('.')[0]}.schemes"  # `_bias` and so on: the families
ROOT = Path(__file__).parents[1]
NOT_EXPORTED = {"__init__", "__main__", "hf"}  # of the package's root: all else there is the model
# model class of the export -> its auto class in transformers
AUTO = {
    "TupeModel": "AutoModel",
    "TupeForMaskedLM": "AutoModelForMaskedLM",
    "TupeForSequenceClassification": "AutoModelForSequenceClassification",
    "TupeForQuestionAnswering": "AutoModelForQuestionAnswering",
    "TupeForTokenClassification": "AutoModelForTokenClassification",
    "TupeForMultipleChoice": "AutoModelForMultipleChoice",
}
# fairseq's name of an option -> its name in config.json; values are the same
OPTIONS = {names_in("fairseq")[option]: theirs for option, theirs in names_in("hugging_face").items()}
HEAD = "classification_heads."


def export(
    checkpoint_file: str | Path, output: str | Path, data: str | Path | None = None, head: str | None = None,
    code: bool = True, onnx: bool = False,
) -> None:  # fmt: skip
    """Write config.json, model.safetensors, the tokeniser's files, a model card and the code into the folder `output`.

    data: folder with dict.txt and the model of the pieces, without which no tokeniser is exported (default:
    the folder of the checkpoint). head: the classification head that becomes the classifier, if there are several.
    code: without it, the folder is loaded where this package is installed (`import tupe.hf`). onnx: write model.onnx
    too, see `onnx_file`.
    Raises ValueError for a checkpoint that cannot be exported, another model's dictionary, or a folder that has a
    model already, or one of the files with another content.
    """
    from safetensors.torch import save

    from ..plugin.gate import read_checkpoint  # only here: they import fairseq
    from ..plugin.pretrained import check_dictionary

    output, data = Path(output), Path(data or Path(checkpoint_file).parent)
    if Path(checkpoint_file).is_dir():
        raise ValueError(f"{checkpoint_file} is a Hugging Face folder already")
    state = read_checkpoint(checkpoint_file)
    model = state["cfg"]["model"]
    refuse_own_schemes(model["position"])
    head = choose_head(state["model"], head)
    weights = hugging_face_weights(state["model"], head)
    check_finite(weights)
    if (output / "config.json").exists():
        raise ValueError(f"{output} has a config.json already; choose another folder or remove it")
    if output.resolve() == data.resolve():
        raise ValueError(f"--data and --output are both {output}; choose another folder to write")
    if not (data / "dict.txt").is_file():
        raise ValueError(f"{data} has no dict.txt; give the folder of the pre-training data with --data")
    check_dictionary(state, data / "dict.txt")
    config = {theirs: model[ours] for ours, theirs in OPTIONS.items() if ours in model}
    config.update(model_type="tupe", vocab_size=len(weights["tupe.encoder.tokens.weight"]))
    config.update(bos_token_id=0, pad_token_id=1, eos_token_id=2)
    config["dtype"] = "float32"  # also for weights that are stored in half precision
    config["classifier_name"] = head or "sentence_classification_head"  # fairseq's name of it
    if head is not None:
        classes = len(weights["classifier.out_proj.weight"])
        config["classifier_inner"] = len(weights["classifier.dense.weight"])
        names = label_names(state, head, classes)
        config["id2label"] = {str(n): name for n, name in enumerate(names)}
        config["label2id"] = {name: n for n, name in enumerate(names)}
        config["problem_type"] = "single_label_classification" if classes > 1 else "regression"
        config["label_range"] = range_of(state, head) if classes == 1 else None
    has_lm = "lm_head.bias" in weights
    classes = {name: auto for name, auto in AUTO.items() if has_lm or name != "TupeForMaskedLM"}
    config["architectures"] = ["TupeForMaskedLM" if has_lm else "TupeModel"]
    if code:
        config["auto_map"] = {auto: f"modeling_tupe.{name}" for name, auto in classes.items()}
        config["auto_map"]["AutoConfig"] = "configuration_tupe.TupeConfig"
    card = model_card(state, Path(checkpoint_file).parent, data, code, config.get("label_range"))
    tensors = save({key: value.contiguous() for key, value in weights.items()}, {"format": "pt"})
    files = {**tokenizer_files(data, config["max_position_embeddings"], code), "model.safetensors": tensors}
    files |= {"README.md": card, "config.json": json.dumps(config, indent=2, allow_nan=False) + "\n"}
    if onnx:
        files["model.onnx"] = onnx_file(config, weights)
    record.write_together(output, {**(modelling_code() if code else {}), **files})


def onnx_file(config: dict, weights: dict) -> bytes:
    """The first of the architectures as ONNX, for any batch and any length up to max_position_embeddings. Raises
    ValueError where a package is missing, and where onnxruntime's results differ from PyTorch's."""
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"--onnx needs {', '.join(missing)}: pip install {' '.join(missing)}")
    import onnxruntime
    import torch

    from .. import modeling_tupe
    from ..configuration_tupe import TupeConfig

    model = getattr(modeling_tupe, config["architectures"][0])(TupeConfig(**config, return_dict=False)).eval()
    if (lack := model.load_state_dict(weights, strict=False).missing_keys) not in ([], ["decoder.weight"]):  # tied
        raise ValueError(f"the checkpoint has no {shorten_list(lack)}")
    longest, names = config["max_position_embeddings"], ["input_ids", "attention_mask"]

    def example(batch, length):
        ids = torch.randint(3, config["vocab_size"], (batch, length))
        ids[:, 0], ids[1:, length // 2 :] = config["bos_token_id"], config["pad_token_id"]
        return ids, (ids != config["pad_token_id"]).long()

    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        size = {0: torch.export.Dim("batch", min=1), 1: torch.export.Dim("length", min=3, max=longest)}
        program = torch.onnx.export(
            model, example(2, min(8, longest)), dynamo=True, dynamic_shapes=(size, size), input_names=names,
            output_names=["logits"], verbose=False,
        )  # fmt: skip
        program.save(f"{folder}/model.onnx", external_data=False)
        session = onnxruntime.InferenceSession(f"{folder}/model.onnx", providers=["CPUExecutionProvider"])
        for batch, length in ((1, min(5, longest)), (3, longest)):
            ids, mask = example(batch, length)
            expected = model(ids, mask)[0]
            got = session.run(None, {names[0]: ids.numpy(), names[1]: mask.numpy()})[0]
            difference = (torch.from_numpy(got) - expected)[mask.bool()].abs().max()
            if difference > 1e-3 * max(1, expected.abs().max()):
                raise ValueError(f"onnxruntime and PyTorch differ by {difference:.2g} in a batch of {batch} x {length}")
        return Path(folder, "model.onnx").read_bytes()


CARD = """---
language: {language}
license: mit
library_name: transformers
tags: [tupe, position-encoding]
---

# {name}

A text encoder with the position encoding `{position}` ([CLS] {cls}), exported from the project tupe. Load it with
`{load}`, or with another of the classes in `config.json`.

| | |
|---|---|
{rows}
Licence: the code in this folder is MIT. What the weights may be used for also depends on the text of their training.
"""


def model_card(state: dict, run: Path, data: Path, code: bool = True, label_range: list | None = None) -> str:
    """The text of README.md: settings, data and scores, as far as checkpoint, record and manifest know them. code:
    whether the folder has the model's; label_range: of a regression."""
    model, extra = state["cfg"]["model"], state.get("extra_state") or {}
    sizes = ", ".join(
        f"{model[name]} {what}" for name, what in (
            ("encoder_layers", "layers"), ("encoder_embed_dim", "wide"), ("encoder_attention_heads", "heads"),
            ("max_positions", "positions"),
        )
    )  # fmt: skip
    parameters = sum(value.numel() for value in state["model"].values() if value.is_floating_point())
    facts = {"size": f"{sizes}, {parameters:,} parameters"}
    if label_range:
        facts["answers"] = "numbers from {:g} to {:g}, as the labels of the fine-tuning".format(*label_range)
    updates = num_updates(state)
    if updates:
        facts["updates"] = f"{updates:,}"
    manifest, content = data / "manifest.json", {}
    if manifest.is_file():
        content = json.loads(manifest.read_text(encoding="utf-8"))
        lower = ", lower-cased" * (content.get("cased", False) is False and content.get("pipeline") != "tokenizers")
        if counts := content.get("counts"):  # an export's manifest has none
            facts["data"] = (
                f"{counts['documents kept']:,} documents, {counts['tokens']:,} words and signs{lower}; "
                f"{content['vocab_size']:,} types"
            )
    averaged = extra.get("averaged")
    if averaged:
        facts["updates"] = f"{updates:,}, mean of {averaged} checkpoints"
    known = record.read(run)
    here = [
        entry for entry in (known.scores if known else ())  # of this checkpoint, not of another one of its run
        if not averaged and updates and entry["num_updates"] == updates and entry["split"] == known.splits[0]
    ]  # fmt: skip
    if here:
        what = f"{known.metric} on {known.task}" if known.metrics else f"loss in {known.loss_unit}"
        facts[f"{what}, validation"] = f"{here[-1][known.metric]:.4g}"
    elif updates and extra.get("val_loss") is not None:
        facts["loss, validation"] = f"{extra['val_loss']:.4g}"
    if known:
        facts["command"] = f"`{without_folders(known.command)}`"
        facts["versions"] = ", ".join(f"{name} {version}" for name, version in known.versions.items())
    rows = "".join(f"| {name} | {value} |\n" for name, value in facts.items())
    language = {"xx": "multilingual"}.get(name := content.get("language", "en"), name)
    load = f"{'' if code else 'import tupe.hf; '}AutoModel.from_pretrained(FOLDER{', trust_remote_code=True' * code})"
    return CARD.format(
        language=language, name=model["_name"], position=model["position"], cls=model["cls"], rows=rows, load=load
    )  # fmt: skip


def without_folders(command: str) -> str:
    """A command line with only the last part of every absolute path: the rest is the machine's, and may name a
    person."""

    def shortened(word):
        option, equals, value = word.rpartition("=")
        parts = [Path(part).name if part.startswith(("/", "~")) else part for part in value.split(os.pathsep)]
        return f"{option}{equals}{os.pathsep.join(parts)}"

    return shlex.join(map(shortened, shlex.split(command)))


def refuse_own_schemes(position: str) -> None:
    """Raise ValueError for a scheme from a user's file: it may import anything, but an export must only need
    transformers and torch."""
    modules = {part.name: SCHEMES[part.name].__module__ for part in parse(position)}
    if own := [name for name, module in modules.items() if not module.startswith(f"{SCHEMES_MODULE}_")]:
        raise ValueError(f"{', '.join(own)} is not in this package's schemes_*.py: its code cannot be exported")


def choose_head(model: dict, head: str | None) -> str | None:
    """The classification head to export, None if there is none. Raises ValueError for an unknown head, and for None if
    there are several."""
    heads = sorted({key.split(".")[1] for key in model if key.startswith(HEAD)})
    if head is None and len(heads) > 1:
        raise ValueError(f"the checkpoint has the heads {', '.join(heads)}: choose one with --head")
    if head is not None and head not in heads:
        raise ValueError(f"the checkpoint has no head {head!r}; it has: {', '.join(heads) or 'none'}")
    return head or next(iter(heads), None)


def label_names(state: dict, head: str, classes: int) -> Sequence[str]:
    """The names of a head's classes in the order of its outputs: those that the checkpoint has of it, or an
    older one's task of GLUE."""
    task, names = state["cfg"]["task"], (state.get("task_state") or {}).get("labels", {}).get(head, ())
    if not names and task["_name"] == "glue" and task["classification_head_name"] == head:
        names = TASKS[glue_name(task["glue_task"])].names
    return names if len(names) == classes else [f"LABEL_{n}" for n in range(classes)]


def hugging_face_weights(model: dict, head: str | None) -> dict:
    """Our model state -> that of the export, with the head of this name. Of an ELECTRA, only the discriminator's
    encoder."""
    weights = {}
    for key, value in model.items():
        if key.endswith("_extra_state") or key.startswith(("generator.", "discriminator.")):
            continue
        if key.startswith("encoder."):
            weights[f"tupe.{key}"] = value
        elif key.startswith("lm_head."):
            weights[key] = value
        elif key.startswith(f"{HEAD}{head}."):
            weights[key.replace(f"{HEAD}{head}.", "classifier.")] = value
        elif not key.startswith(HEAD):
            raise ValueError(f"an export cannot hold {key}")
    return weights


def check_finite(weights: dict) -> None:
    """Raise ValueError for weights that are NaN or infinite."""
    wrong = [key for key, value in weights.items() if value.is_floating_point() and not value.isfinite().all()]
    if wrong:
        raise ValueError(f"weights are NaN or infinite, in {shorten_list(wrong)}: did the training diverge?")


def modelling_code() -> dict[str, bytes]:
    """The files of the model, as they are: {name: content}."""
    return {file.name: file.read_bytes() for file in ROOT.glob("*.py") if file.stem not in NOT_EXPORTED}


def weights_from_export(config: dict, weights: dict) -> tuple[dict, dict]:
    """config.json and tensors of an export, or of what transformers saved of it -> (our weights, model options)."""
    options = {ours: config[theirs] for ours, theirs in OPTIONS.items() if theirs in config}
    ours = {}
    for key, value in weights.items():
        if key.startswith(("token_classifier.", "qa_outputs.")):
            logger.warning(f"leaving out {key}: a checkpoint has no head of tokens or answers; use it in transformers")
        elif key == "decoder.weight":  # in a pickle: the token embeddings again
            continue
        elif key.startswith("classifier."):
            ours[f"{HEAD}{config['classifier_name']}.{key.removeprefix('classifier.')}"] = value
        elif key.startswith("encoder."):  # saved from TupeModel itself
            ours[key] = value
        else:
            ours[key.removeprefix("tupe.")] = value
    return ours, options


@click.command(cls=Command)
@choices.checkpoint("The checkpoint to export.")
@choices.output("The folder to write.")
@click.option("--data", type=FOLDER, help="The folder of dict.txt and the pieces (default: the checkpoint's).")
@click.option("--head", help="The classification head to export, if there are several.")
@click.option("--code/--no-code", default=True, show_default=True, help="Copy the model's code into the folder.")
@click.option("--onnx", is_flag=True, help="Write model.onnx too, and check it with onnxruntime (needs tupe[onnx]).")
def command(checkpoint, output, data, head, code, onnx):
    """Write a folder that the transformers library loads without fairseq; with the code in it, also without this
    project.

    \b
    tupe checkpoint export --checkpoint checkpoint_last.pt --output OUT
    python -c "from transformers import AutoModel; AutoModel.from_pretrained('OUT', trust_remote_code=True)"

    \b
    tupe checkpoint export --checkpoint checkpoint_last.pt --output OUT --no-code
    python -c "import tupe.hf; from transformers import AutoModel; AutoModel.from_pretrained('OUT')"

    Back: tupe checkpoint convert --from OUT --output DIR
    """
    export(checkpoint, output, data, head, code, onnx)
    click.echo(f"wrote {output}")
