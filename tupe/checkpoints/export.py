"""A model -> a folder that the transformers library loads without fairseq, the one form in which models are written.
With the model's code, which is the files of this package's root, it is loaded without this package too."""

import importlib.util
import json
import logging
import os
import shlex
import tempfile
from collections.abc import Mapping
from pathlib import Path

import click

from ..common import options as choices
from ..common.options import Command, shorten_list
from ..common.prepared import tokenizer_files
from ..data.splits import folders_of
from ..positions import bounded_schemes
from ..run import checksums, record
from ..run.checksums import write_sealed
from .trained import MASKING, Trained, read_model

logger = logging.getLogger(__name__)

ROOT = Path(__file__).parents[1]
# Files of the package's root that are not the model.
NOT_EXPORTED = {"__init__", "__main__", "hf", "config", "own_attention", "backend_triton", "triton_attention"}
UPDATES = "training.json"  # the number of updates, blocks and masks, for `record.training_of`
TOKENISER = {"tokenization_tupe", "text", "normaliser"}  # ours; others need none of our code


def export(
    checkpoint: str | Path | Trained, output: str | Path, data: str | Path | None = None, code: bool = True,
    onnx: bool = False,
) -> None:  # fmt: skip
    """Write config.json, model.safetensors, the tokeniser's files, a model card and the code into the folder `output`.

    checkpoint: a file of fairseq's, a folder of transformers, or a model. data: folder with dict.txt and the model of
    the pieces, without which no tokeniser is exported (default: see `Trained.text`). code: without it, the folder is
    loaded where this package is installed (`import tupe.hf`). onnx: write model.onnx too, see `onnx_file`. Raises
    ValueError for a checkpoint that cannot be exported, another model's dictionary, or a folder that has a model
    already, or one of the files with another content.
    """
    trained = checkpoint if isinstance(checkpoint, Trained) else read_model(checkpoint)
    head, data = trained.only_head(), trained.text(data)
    if (Path(output) / "config.json").exists():
        raise ValueError(f"{output} has a config.json already; choose another folder or remove it")
    text = tokenizer_files(data, trained.config.max_positions, code)
    files = {"README.md": model_card(trained, data, head, code), **files_of(trained, text, head, code)}
    if onnx:
        files["model.onnx"] = onnx_file(json.loads(files["config.json"]), trained.tensors(head), head is not None)
    code_files = modelling_code(trained.config.position, text) if code else {}
    read = [path for path in (trained.path, data) if path is not None and path.exists()]
    write_sealed(output, {**code_files, **files}, without_folders(record.command_line()), read)


def files_of(trained: Trained, text: Mapping, head: str | None = None, code: bool = False) -> dict[str, str | bytes]:
    """{name: content} of a model's folder, of which config.json is the last. Raises ValueError for weights that are NaN
    or infinite."""
    from safetensors.torch import save

    weights, config = trained.tensors(head), trained.settings(head)
    if wrong := [key for key, value in weights.items() if value.is_floating_point() and not value.isfinite().all()]:
        raise ValueError(f"weights are NaN or infinite, in {shorten_list(wrong)}: did the training diverge?")
    if code:
        from ..configuration_tupe import AUTO_MAP

        lacks = [] if config["architectures"] == ["TupeForMaskedLM"] else ["AutoModelForMaskedLM"]
        config["auto_map"] = {auto: name for auto, name in AUTO_MAP.items() if auto not in lacks}
    tensors = save({key: value.contiguous() for key, value in weights.items()}, {"format": "pt"})
    files = {**text, "model.safetensors": tensors}
    masking = {name: trained.task[name] for name in MASKING if name in trained.task}
    if trained.updates or masking:
        files[UPDATES] = json.dumps({"updates": trained.updates, **masking})
    return {**files, "config.json": json.dumps(config, indent=2, allow_nan=False) + "\n"}


def publish(run: Path, data: str) -> None:
    """Write the model of a finished run of fairseq's into its folder, under the names that the second engine gives it:
    the best of a fine-tuning, the last of a pre-training. data: as `folders_of` reads it. Where it is already, or there
    is no checkpoint, nothing is written; nor, with a warning, of a model that is not of this package."""
    found = [path for name in ("best", "last") if (path := run / f"checkpoint_{name}.pt").is_file()]
    if not found:
        return
    try:
        best = (record.read(run) or record.Record()).metrics
        trained = read_model(found[0 if best else -1], mmap=True)
        if (run / "config.json").is_file() and record.updates_of(run) == trained.updates:
            return
        for name in (checksums.NAME, "config.json", UPDATES, "model.safetensors"):  # of a run that has become longer
            (run / name).unlink(missing_ok=True)
        text = tokenizer_files(folders_of(data)[0], trained.config.max_positions, code=False)
        write_sealed(run, files_of(trained, text, trained.only_head()))
    except (ValueError, OSError) as error:  # the run is finished all the same
        logger.warning(f"{run} gets no config.json and model.safetensors: {error}")


def onnx_file(config: dict, weights: dict, classifies: bool) -> bytes:
    """The classifier, or else the first of the architectures, as ONNX, for any batch and any length up to
    max_position_embeddings. Raises ValueError where a package is missing, and where onnxruntime's results differ from
    PyTorch's."""
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"--onnx needs {', '.join(missing)}: pip install {' '.join(missing)}")
    import onnxruntime
    import torch

    from .. import modeling_tupe
    from ..configuration_tupe import TupeConfig

    kind, output = "TupeForSequenceClassification" if classifies else config["architectures"][0], "logits"
    if kind == "TupeModel":
        weights, output = {key.removeprefix("tupe."): x for key, x in weights.items()}, "last_hidden_state"
    model = getattr(modeling_tupe, kind)(TupeConfig(**config, return_dict=False)).eval()
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
            output_names=[output], verbose=False,
        )  # fmt: skip
        program.save(f"{folder}/model.onnx", external_data=False)
        session = onnxruntime.InferenceSession(f"{folder}/model.onnx", providers=["CPUExecutionProvider"])
        for batch, length in ((1, min(5, longest)), (3, longest)):
            ids, mask = example(batch, length)
            expected = model(ids, mask)[0]
            got = session.run(None, {names[0]: ids.numpy(), names[1]: mask.numpy()})[0]
            difference = (torch.from_numpy(got) - expected).abs()
            difference = difference[mask.bool()].max() if got.ndim == 3 else difference.max()  # or of a sequence
            if difference > 1e-3 * max(1, expected.abs().max()):
                raise ValueError(f"onnxruntime and PyTorch differ by {difference:.2g} in a batch of {batch} x {length}")
        return Path(folder, "model.onnx").read_bytes()


CARD = """---
{head_lines}library_name: transformers
tags: [tupe, position-encoding]
---

# {name}

A text encoder with the position encoding `{position}` ([CLS] {cls}), exported from the project tupe. Load it with
`{load}`, or with another of the classes in `config.json`.

| | |
|---|---|
{rows}
Limits: it fills masks or computes features of a text; it does not generate text. It may repeat errors and prejudices of
its training text. It was not tested{tested}.

Licence: {licence} the weights may be used for also depends on the text of their training.
"""


def model_card(trained: Trained, data: Path, head: str | None = None, code: bool = True) -> str:
    """The text of README.md: settings, data and scores, as far as checkpoint, record and manifest know them. code:
    whether the folder has the model's."""
    model, updates = trained.config, trained.updates
    sizes = f"{model.layers} layers, {model.width} wide, {model.heads} heads, {model.max_positions} positions"
    parameters = sum(value.numel() for value in trained.tensors(head).values() if value.is_floating_point())
    facts = {"size": f"{sizes}, {parameters:,} parameters"}
    if label_range := trained.ranges.get(head):
        facts["answers"] = "numbers from {:g} to {:g}, as the labels of the fine-tuning".format(*label_range)
    elif head:
        facts["labels"] = ", ".join(f"{name} ({n})" for n, name in enumerate(trained.label_names(head)))
    if updates:
        mean = f", mean of {trained.averaged} checkpoints" if trained.averaged else ""
        facts["updates"] = f"{updates:,}{mean}"
    facts["longest input"] = f"{model.max_positions} tokens in training" + (
        "" if bounded_schemes(model.position) else "; the positions compute any length"
    )
    manifest = data / "manifest.json"
    content = json.loads(manifest.read_text(encoding="utf-8")) if manifest.is_file() else {}
    if counts := content.get("counts"):  # an export's manifest has none
        lower = ", lower-cased" * (content.get("cased", False) is False and content.get("pipeline") != "tokenizers")
        facts["data"] = (
            f"{counts['documents kept']:,} documents, {counts['tokens']:,} words and signs{lower}; "
            f"{content['vocab_size']:,} types"
        )
    known = record.read(trained.run) if trained.run else None
    here = []  # scores of this checkpoint, not of another one of its run
    if known and updates and not trained.averaged:
        here = [entry for entry in known.of_first_split() if entry["num_updates"] == updates]
        what = f"{known.metric} on {known.task}" if known.metrics else f"loss in {known.loss_unit}"
        facts |= {f"{what}, validation": f"{entry[known.metric]:.4g}" for entry in here}
    if known and updates:  # else the weights were changed since, and these are of the model before
        facts |= {name.replace("_", " "): f"{value:,}" for name, value in known.budget.items() if value}
        facts["command"] = f"`{without_folders(known.command)}`"
        facts["versions"] = ", ".join(f"{name} {version}" for name, version in known.versions.items())
    rows = "".join(f"| {name} | {value} |\n" for name, value in facts.items())
    head_lines = "license: mit\n" if code else ""
    if content:  # else the text is not known
        language = content.get("language", "en")
        head_lines = f"language: {'multilingual' if language == 'xx' else language}\n{head_lines}"
    licence = "the code in this folder is MIT. What" if code else "what"
    load = f"{'' if code else 'import tupe.hf; '}AutoModel.from_pretrained(FOLDER{', trust_remote_code=True' * code})"
    return CARD.format(
        head_lines=head_lines, licence=licence, name=trained.architecture, position=model.position, cls=model.cls,
        rows=rows, load=load, tested=" beyond the scores above" if here else "",
    )  # fmt: skip


def without_folders(command: str) -> str:
    """A command line with only the last part of every absolute path: the rest is the machine's, and may name a
    person."""

    def shortened(word):
        option, equals, value = word.rpartition("=")
        parts = [Path(part).name if part.startswith(("/", "~")) else part for part in value.split(os.pathsep)]
        return f"{option}{equals}{os.pathsep.join(parts)}"

    return shlex.join(map(shortened, shlex.split(command)))


def modelling_code(position: str, text: Mapping) -> dict[str, str | bytes]:
    """The files of the model, as they are, and a user's encodings: {name: content}. text: the tokeniser's files. Raises
    ValueError for encodings whose code cannot move."""
    from ..configuration_tupe import own_code

    ours = "TupeTokenizer" in text.get("tokenizer_config.json", "")
    left_out = NOT_EXPORTED if ours else NOT_EXPORTED | TOKENISER
    code = {file.name: file.read_bytes() for file in ROOT.glob("*.py") if file.stem not in left_out}
    return {**code, **own_code(position)}


text_option = choices.data(
    "The folder of dict.txt and the pieces (default: the model's, or its training's).", required=False
)


@click.command(cls=Command)
@choices.checkpoint("The checkpoint to export.")
@choices.output("The folder to write.")
@text_option
@click.option("--code/--no-code", default=True, show_default=True, help="Copy the model's code into the folder.")
@click.option("--onnx", is_flag=True, help="Write model.onnx too, and check it with onnxruntime (needs tupe[onnx]).")
def command(checkpoint, output, data, code, onnx):
    """Write a folder that the transformers library loads without fairseq; with the code in it, also without this
    project.

    \b
    tupe checkpoint export --checkpoint checkpoint_last.pt --output OUT
    python -c "from transformers import AutoModel; AutoModel.from_pretrained('OUT', trust_remote_code=True)"

    \b
    tupe checkpoint export --checkpoint checkpoint_last.pt --output OUT --no-code
    python -c "import tupe.hf; from transformers import AutoModel; AutoModel.from_pretrained('OUT')"
    """
    export(checkpoint, output, data, code, onnx)
    click.echo(f"wrote {output}")
