"""A trained model in memory, whichever form it has on the disk: a folder of transformers, or a checkpoint of fairseq's,
which is one file. Neither is written to, and neither needs fairseq.

V vocabulary.
"""

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..common.architectures import ELECTRA, architecture_of, split_size
from ..common.options import shorten_list, split_files
from ..common.safe_load import NOT_OURS, load_safely, num_updates, read_config, tensors_of
from ..data.blocks import BOS, EOS, PAD, hash_of
from ..data.glue import TASKS, glue_name, own_task
from ..data.splits import folders_of, read_symbols
from ..encoder import BLOCKS, ModelConfig, names_in
from ..positions import bounded_schemes, canonical, format_value, is_loaded
from ..run import record
from ..run.checksums import check
from ..text import read_dictionary
from .gate import PRETRAINING, RUNNING, read_checkpoint

logger = logging.getLogger(__name__)

# Blocks and masks of a training, here of one that says nothing of them.
MASKING = {"tokens_per_sample": 512, "mask_prob": 0.15, "leave_unmasked_prob": 0.1, "random_token_prob": 0.1}
NAMES, EXPORTED = names_in("fairseq"), names_in("hugging_face")  # option of `ModelConfig` -> its name there
HEADS, CLASSIFIER = "classification_heads.", "sentence_classification_head"
SETTINGS, FINGERPRINT = "encoder._extra_state", "_extra_state"  # in the weights of fairseq's checkpoints


@dataclass
class Trained:
    """weights: {name: tensor} of "encoder.", "lm_head." and "classification_heads.NAME."; `FINGERPRINT` of the
    dictionary, if it is known; of a file of an ELECTRA its generator. task: what is known of its task's settings. name:
    of the architecture, as a file says. more: what a file says of its model beside `config`. labels, ranges: {head:
    names of its classes, [least, greatest] label of a regression}. averaged: of how many models it is the mean. path:
    the file or folder that it was read from. electra: the architecture of the ELECTRA whose discriminator a folder
    holds, which is a BERT in all else."""

    config: ModelConfig
    weights: dict[str, Tensor]
    task: dict = field(default_factory=dict)
    name: str = ""
    more: dict = field(default_factory=dict)
    updates: int = 0
    labels: dict = field(default_factory=dict)
    ranges: dict = field(default_factory=dict)
    problems: dict = field(default_factory=dict)
    averaged: int = 0
    path: Path | None = None
    electra: str = ""

    @property
    def run(self) -> Path | None:
        """The folder whose record tells of the training."""
        return self.path if self.path is None or self.path.is_dir() else self.path.parent

    @property
    def architecture(self) -> str:
        return self.name or architecture_of(self.config)

    @property
    def types(self) -> int:
        """V"""
        return len(self.weights["encoder.tokens.weight"])

    def text(self, data: str | Path | None = None) -> Path:
        """The folder of the model's dict.txt and tokeniser: `data`, or where the model is, or where it was trained.
        Raises ValueError if none is there, or another model's."""
        places = [Path(data)] if data else [self.run, *folders_of(self.task.get("data", "."))]
        place = next((place for place in places if place and (place / "dict.txt").is_file()), None)
        if place is None:
            raise ValueError(f"{places[-1]} has no dict.txt; give the folder of the training data with --data")
        check_dictionary(self.weights, place / "dict.txt")
        return place

    def options(self) -> dict:
        """The structure of the model under fairseq's names, with the architecture's."""
        options = {theirs: getattr(self.config, ours) for ours, theirs in NAMES.items()}
        return {**self.more, **options, "_name": self.architecture}

    def longest(self, length: int) -> int:
        """The most tokens of a sequence where training goes on with `length` of them: the model's own, or more if its
        positions compute any length. Raises ValueError if they do not."""
        limited = bounded_schemes(self.config.position)
        if limited and length > self.config.max_positions:
            raise ValueError(
                f"sequences of {length} tokens: {' and '.join(limited)} of the checkpoint {self.path} has vectors for "
                f"{self.config.max_positions}; `tupe checkpoint stretch` makes more of them"
            )
        return max(length, self.config.max_positions)

    def origin(self) -> dict:
        """What the record of a run says of the model that it starts from. The fingerprint, 12 hexadecimal digits, tells
        weights from others of these shapes by a few of each tensor."""
        digest = hashlib.sha256()
        for name, tensor in sorted({**self.weights, SETTINGS: pack_settings(settings_of(self.config))}.items()):
            some = tensor.flatten()[:: max(tensor.numel() // 16, 1)]
            digest.update(f"{name} {tuple(tensor.shape)} {some.tolist()}".encode())
        return {
            "pretrained": str(self.path.resolve()), "pretrained_updates": self.updates,
            "pretrained_weights": digest.hexdigest()[:12],
        }  # fmt: skip

    def heads(self) -> list[str]:
        return sorted({key.split(".")[1] for key in self.weights if key.startswith(HEADS)})

    def only_head(self) -> str | None:
        """The name of the classification head; None without one. Raises ValueError for several."""
        if len(heads := self.heads()) > 1:
            raise ValueError(f"{self.path} has the heads {', '.join(heads)}; valid: one")
        return next(iter(heads), None)

    def label_names(self, head: str) -> list[str]:
        """The names of a head's classes in the order of its outputs."""
        classes = len(self.weights[f"{HEADS}{head}.out_proj.weight"])
        return list(self.labels.get(head, ())) or [f"LABEL_{n}" for n in range(classes)]

    def settings(self, head: str | None = None) -> dict:
        """What config.json says. head: the classification head that becomes the classifier."""
        config = {theirs: getattr(self.config, ours) for ours, theirs in EXPORTED.items()}
        config |= {"model_type": "tupe", "vocab_size": self.types}
        config |= {"bos_token_id": BOS, "pad_token_id": PAD, "eos_token_id": EOS}
        config["dtype"] = "float32"  # also for weights that are stored in half precision
        config["classifier_name"] = head or CLASSIFIER  # fairseq's name of it
        if head is not None:
            names = self.label_names(head)
            config["classifier_inner"] = len(self.weights[f"{HEADS}{head}.dense.weight"])
            config["id2label"] = {str(n): name for n, name in enumerate(names)}
            config["label2id"] = {name: n for n, name in enumerate(names)}
            kind = "single_label_classification" if len(names) > 1 else "regression"
            config["problem_type"] = self.problems.get(head, kind)
            config["label_range"] = self.ranges.get(head)
        config["architectures"] = ["TupeForMaskedLM" if "lm_head.bias" in self.weights else "TupeModel"]
        return config

    def tensors(self, head: str | None = None) -> dict[str, Tensor]:
        """The weights under transformers' names. An ELECTRA gives its discriminator's encoder alone."""
        tensors = {}
        for key, value in self.weights.items():
            if key.startswith("encoder."):
                tensors[f"tupe.{key}"] = value
            elif key.startswith("lm_head."):
                tensors[key] = value
            elif key.startswith(f"{HEADS}{head}."):
                tensors[key.replace(f"{HEADS}{head}.", "classifier.")] = value
            elif key != FINGERPRINT and not key.startswith((HEADS, "generator.", "discriminator.")):
                raise ValueError(f"a model of transformers cannot hold {key}")
        return tensors

    def model(self, kind: type | None = None, head: str | None = None, **settings: Any) -> Any:
        """A model of transformers in evaluation mode, in float32: a `kind`, by default a `TupeForMaskedLM`. settings:
        what its configuration says otherwise. Its head is new if the weights have none. Raises ValueError for other
        weights."""
        from ..configuration_tupe import TupeConfig
        from ..modeling_tupe import TupeForMaskedLM

        model = (kind or TupeForMaskedLM)(TupeConfig(**{**self.settings(head), **settings}))
        try:
            found = model.load_state_dict(self.tensors(head), strict=False)
        except RuntimeError as error:  # of other sizes
            what = " ".join(str(error).split())[:200]
            raise ValueError(f"{self.path} cannot be loaded: its tensors are not those of its model: {what}") from None
        model.base_model.encoder.config.places = self.config.places  # which transformers' configuration does not name
        parts = ("tupe.", "lm_head.") if kind is None and "lm_head.bias" in self.weights else "tupe."
        if lack := sorted(key for key in found.missing_keys if key.startswith(parts)):
            raise ValueError(f"{self.path} has no {shorten_list(lack)} of the model that it describes")
        if strange := sorted(key for key in found.unexpected_keys if key.startswith(parts)):
            raise ValueError(f"{self.path} has {shorten_list(strange)}, which the model it describes does not have")
        return model.float().eval()


# ------------------------------------------------------------------------------------------------------------- reading


def read_model(path: str | Path, mmap: bool = False) -> Trained:
    """The model of a checkpoint: of a file of fairseq's, or of a folder of transformers. mmap: see `read_checkpoint`.
    Raises ValueError, with one line, for anything else."""
    return of_folder(path) if Path(path).is_dir() else of_state(read_checkpoint(path, mmap), path)


def of_state(state: dict, path: str | Path) -> Trained:
    """The model in what `read_checkpoint` returned of a file."""
    saved, weights, task = state["cfg"]["model"], dict(state["model"]), state["cfg"]["task"]
    if "encoder.tokens.weight" not in weights:
        raise ValueError(f"{path} is {NOT_OURS}")
    try:
        spelled(saved["position"], saved["position_file"])
        config = ModelConfig(**{ours: saved[theirs] for ours, theirs in NAMES.items()})
        if SETTINGS in weights:
            check_settings(unpack_settings(weights.pop(SETTINGS)), settings_of(config))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    kept, ranges = state.get("task_state") or {}, {}
    if task["_name"] == "glue":
        layout = kept.get("layout")
        glue = own_task(layout) if layout else TASKS[glue_name(task["glue_task"])]
        ranges = {task["classification_head_name"]: glue.range}
    known = {*NAMES.values(), *RUNNING, "_name"}
    more = {name: value for name, value in saved.items() if name not in known}
    return Trained(
        config, weights, task, saved["_name"], more, num_updates(state), kept.get("labels") or {}, ranges,
        path=Path(path),
    )  # fmt: skip


def of_folder(folder: str | Path) -> Trained:
    """The model in a folder that transformers reads, and what its run's record says of its training."""
    config, tensors = read_hugging_face(folder)
    if (kind := config.get("model_type")) != "tupe":
        reads = "`tupe checkpoint convert` reads bert, roberta and xlm-roberta"
        raise ValueError(f"{folder}: model_type is {kind!r}, not 'tupe'; {reads}")
    trained, here = of_export(config, tensors), Path(folder).resolve()
    around = [here, here.parent] if here.name.startswith("checkpoint-") else [here]  # a run, or one of its checkpoints
    about = next(filter(None, map(record.read, around)), None)
    own = about.config if about else {}
    if about and split_size(about.architecture)[0] in ELECTRA:
        trained.electra = about.architecture
    places = [place for place in around if (place / "dict.txt").is_file()]
    data = str((places or around)[0])
    if about and about.data_folder and (folders_of(about.data_folder)[0] / "dict.txt").is_file():
        data = about.data_folder
    kept = {name: own[f"task.{name}"] for name in PRETRAINING if f"task.{name}" in own}
    if not about:  # an export
        told = record.training_of(folder).items()
        kept = {name: value for name, value in told if name in MASKING and isinstance(value, int | float)}
    elif not about.metrics and own.get("engine") != "torch":
        kept.setdefault("tokens_per_sample", 1024)  # fairseq's default, which a record leaves out
    trained.task = {"_name": "tupe_masked_lm", **kept, "data": data}
    trained.updates, trained.path = record.updates_of(folder), Path(folder)
    if places:
        trained.weights[FINGERPRINT] = fingerprint(read_symbols(str(places[0])))  # not of data, which may be new
    return trained


def of_export(config: dict, tensors: dict[str, Tensor]) -> Trained:
    """The model of a config.json and the tensors beside it."""
    options = ModelConfig(**{ours: config[theirs] for ours, theirs in EXPORTED.items() if theirs in config})
    head, weights = config.get("classifier_name", CLASSIFIER), {}
    for key, value in tensors.items():
        if key.startswith(("token_classifier.", "qa_outputs.")):
            logger.warning(f"leaving out {key}: only transformers has heads of tokens and answers")
        elif key.startswith("classifier."):
            weights[f"{HEADS}{head}.{key.removeprefix('classifier.')}"] = value
        elif key != "decoder.weight":  # in a pickle: the token embeddings again
            weights[key.removeprefix("tupe.")] = value  # saved from TupeModel itself, it has no such beginning
    if "encoder.tokens.weight" not in weights:
        raise ValueError("the folder has no tupe.encoder.tokens.weight: not a model of this project")
    trained = Trained(options, weights)
    names = [name for _, name in sorted((config.get("id2label") or {}).items(), key=lambda pair: int(pair[0]))]
    if (kind := config.get("problem_type")) and f"{HEADS}{head}.out_proj.weight" in weights:
        trained.problems = {head: kind}
    if len(names) == len(weights.get(f"{HEADS}{head}.out_proj.weight", ())):
        trained.labels, trained.ranges = {head: names}, {head: config.get("label_range")}
    return trained


def read_hugging_face(folder: str | Path) -> tuple[dict, dict]:
    """(config.json, tensors) of a folder that `save_pretrained` wrote. Raises ValueError for another folder."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    folder = Path(folder)
    if (folder / "adapter_config.json").is_file():  # transformers would load another model, from anywhere
        raise ValueError(f"{folder} has an adapter; save what merge_and_unload() makes of it")
    if not (folder / "config.json").is_file():
        saved = [path.parent for path in folder.glob("checkpoint-*/config.json")]
        saved = sorted(saved, key=lambda path: (len(path.name), path.name)) or [folder / "checkpoint_last.pt"]
        what = f"a run that has not ended; give {saved[-1]}" if saved[-1].exists() else "not a Hugging Face checkpoint"
        raise ValueError(f"{folder} has no config.json: {what}")
    config = read_config(folder / "config.json")
    if (tensors := folder / "model.safetensors").is_file():
        check(tensors)
        try:
            return config, load(tensors.read_bytes())
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{tensors} cannot be read: {error}") from None
    if (tensors := folder / "pytorch_model.bin").is_file():
        return config, tensors_of({"model": load_safely(tensors)}, tensors)
    raise ValueError(f"{folder} has neither model.safetensors nor pytorch_model.bin")


# ------------------------------------------------------------------------- what fairseq's checkpoints say of themselves


def fingerprint(symbols: list[str]) -> Tensor:
    """[32] the bytes of a hash over all types of a dictionary in their order."""
    return torch.tensor(list(hash_of(symbols).digest()), dtype=torch.long)


def check_dictionary(weights: Mapping[str, Tensor], file: str | Path) -> list[str]:
    """The types of the dict.txt `file`. Raises ValueError unless a model with these weights was trained with it; where
    the weights do not say with which one, unless it is as long."""
    if not Path(file).is_file():
        raise ValueError(f"dictionary not found: {file}; give the dict.txt that the model was trained with")
    check(file)
    symbols, types = read_dictionary(Path(file)), len(weights["encoder.tokens.weight"])
    if len(symbols) != types:
        raise ValueError(
            f"{file} makes {len(symbols)} types, the model has {types}: another model's dictionary; take the "
            "dict.txt of its own pre-training data"
        )
    own = fingerprint(symbols)
    if not torch.equal(weights.get(FINGERPRINT, own), own):
        raise ValueError(f"{file} has as many types as the model's dictionary, but other ones or in another order")
    return symbols


def spelled(position: str, position_file: str) -> str:
    """`canonical`, whose error tells what to do about schemes of files that were not run."""
    try:
        return canonical(position)
    except ValueError as error:
        missing = [file for file in split_files(position_file) if not is_loaded(file)]
        if not missing:
            raise
        modules = ", ".join(Path(file).stem for file in missing)
        remedy = f"type `tupe --position-file FILE COMMAND`, or in Python `import {modules}`, to load a checkpoint"
        reason = f"{', '.join(missing)} was not run: to train, take a task of this plugin; {remedy}"
        raise ValueError(f"{error} ({reason})") from None


def settings_of(config: ModelConfig) -> dict[str, str]:
    """What a checkpoint of fairseq's says of its model beside its weights."""
    heads = BLOCKS[config.block].dims(config.max_positions, config.width, config.heads, config.layers).heads
    settings = {
        "position": config.position, "cls": config.cls, "block": config.block, "normaliser": config.normaliser,
        "heads": str(heads), "layer_norm_eps": format_value(float(config.layer_norm_eps)),
    }  # fmt: skip
    return settings | config.unlike_bert()


def check_settings(saved: dict[str, str], own: dict[str, str]) -> None:
    """Raise ValueError for the settings of another model."""
    told = {**saved, "position": canonical(saved["position"])}
    if told != own:
        raise ValueError(f"the checkpoint was trained with {describe(saved)}; this model has {describe(own)}")


def pack_settings(settings: dict[str, str]) -> Tensor:
    """As integers, which weights-only loading and averaging accept."""
    return torch.tensor(list(describe(settings).encode()), dtype=torch.long)


def unpack_settings(state: Tensor) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in bytes(state.tolist()).decode().split(" "))


def describe(settings: dict[str, str]) -> str:
    return " ".join(f"{key}={value}" for key, value in settings.items())
