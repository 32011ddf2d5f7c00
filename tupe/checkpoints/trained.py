"""A trained model in memory, whichever form it has on the disk: a folder of transformers, or a checkpoint of fairseq's,
which is one file. Neither is written to, and neither needs fairseq.

V vocabulary.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..common import record
from ..common.architectures import architecture_of
from ..common.options import shorten_list, split_files
from ..common.safe_load import NOT_OURS, load_safely, num_updates, read_config, tensors_of
from ..data.blocks import BOS, EOS, PAD, hash_of
from ..data.glue import TASKS, Glue, glue_name, own_task
from ..data.splits import read_symbols
from ..encoder import BLOCKS, Encoder, LMHead, ModelConfig, names_in
from ..names import ELECTRA, split_size
from ..positions import canonical, format_value, is_loaded
from ..text import read_dictionary
from .gate import PRETRAINING, RUNNING, read_checkpoint

logger = logging.getLogger(__name__)

NAMES, EXPORTED = names_in("fairseq"), names_in("hugging_face")  # option of `ModelConfig` -> its name there
HEADS, CLASSIFIER = "classification_heads.", "sentence_classification_head"
SETTINGS, FINGERPRINT = "encoder._extra_state", "_extra_state"  # in the weights of fairseq's checkpoints


@dataclass
class Trained:
    """weights: {name: tensor} of "encoder.", "lm_head." and "classification_heads.NAME."; of fairseq's checkpoints also
    the settings and the dictionary's fingerprint, and an ELECTRA's generator. cfg: what such a checkpoint says of its
    model, task and criterion. labels: {head: names of its classes}. layout: of a task with labels of its own. extra:
    what a training noted. path: the file or folder that it was read from."""

    config: ModelConfig
    weights: dict[str, Tensor]
    cfg: dict = field(default_factory=dict)
    updates: int = 0
    labels: dict = field(default_factory=dict)
    layout: dict | None = None
    extra: dict = field(default_factory=dict)
    path: Path | None = None

    @property
    def run(self) -> Path | None:
        """The folder whose record tells of the training."""
        return self.path if self.path is None or self.path.is_dir() else self.path.parent

    @property
    def name(self) -> str:
        """Of the architecture."""
        return self.cfg.get("model", {}).get("_name") or architecture_of(self.config)

    @property
    def task(self) -> dict:
        return self.cfg.get("task", {})

    @property
    def types(self) -> int:
        """V"""
        return len(self.weights["encoder.tokens.weight"])

    def heads(self) -> list[str]:
        return sorted({key.split(".")[1] for key in self.weights if key.startswith(HEADS)})

    def choose_head(self, head: str | None) -> str | None:
        """The classification head of that name, or the only one, None if there is none. Raises ValueError for an
        unknown head, and for None if there are several."""
        heads = self.heads()
        if head is None and len(heads) > 1:
            raise ValueError(f"the checkpoint has the heads {', '.join(heads)}: choose one with --head")
        if head is not None and head not in heads:
            raise ValueError(f"the checkpoint has no head {head!r}; it has: {', '.join(heads) or 'none'}")
        return head or next(iter(heads), None)

    def label_range(self, head: str) -> list | None:
        """`Glue.range` of a classification head; None if it is not known."""
        of_glue = self.task.get("_name") == "glue"
        if of_glue and self.task["classification_head_name"] != head:
            return None
        if head in self.labels and self.layout:
            return own_task(self.layout).range
        return TASKS[glue_name(self.task["glue_task"])].range if of_glue else None

    def label_names(self, head: str, classes: int) -> list[str]:
        """The names of a head's classes in the order of its outputs: its own, or an older checkpoint's task of GLUE."""
        names = self.labels.get(head, ())
        if not names and self.task.get("_name") == "glue" and self.task["classification_head_name"] == head:
            names = TASKS[glue_name(self.task["glue_task"])].names
        return list(names) if len(names) == classes else [f"LABEL_{n}" for n in range(classes)]

    # ------------------------------------------------------------------------------------------------ transformers

    def settings(self, head: str | None = None) -> dict:
        """What config.json says. head: the classification head that becomes the classifier."""
        config = {theirs: getattr(self.config, ours) for ours, theirs in EXPORTED.items()}
        config |= {"model_type": "tupe", "vocab_size": self.types}
        config |= {"bos_token_id": BOS, "pad_token_id": PAD, "eos_token_id": EOS}
        config["dtype"] = "float32"  # also for weights that are stored in half precision
        config["classifier_name"] = head or CLASSIFIER  # fairseq's name of it
        if head is not None:
            classes = len(self.weights[f"{HEADS}{head}.out_proj.weight"])
            names = self.label_names(head, classes)
            config["classifier_inner"] = len(self.weights[f"{HEADS}{head}.dense.weight"])
            config["id2label"] = {str(n): name for n, name in enumerate(names)}
            config["label2id"] = {name: n for n, name in enumerate(names)}
            config["problem_type"] = "single_label_classification" if classes > 1 else "regression"
            config["label_range"] = self.label_range(head) if classes == 1 else None
        config["architectures"] = ["TupeForMaskedLM" if "lm_head.bias" in self.weights else "TupeModel"]
        return config

    def tensors(self, head: str | None = None) -> dict[str, Tensor]:
        """The weights under transformers' names. Of an ELECTRA, only the discriminator's encoder."""
        tensors = {}
        for key, value in self.weights.items():
            if key.endswith(FINGERPRINT) or key.startswith(("generator.", "discriminator.")):
                continue
            if key.startswith("encoder."):
                tensors[f"tupe.{key}"] = value
            elif key.startswith("lm_head."):
                tensors[key] = value
            elif key.startswith(f"{HEADS}{head}."):
                tensors[key.replace(f"{HEADS}{head}.", "classifier.")] = value
            elif not key.startswith(HEADS):
                raise ValueError(f"an export cannot hold {key}")
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
        if lack := sorted(key for key in found.missing_keys if key.startswith("tupe.")):
            raise ValueError(f"{self.path} has no {shorten_list(lack)} of the model that it describes")
        if strange := sorted(key for key in found.unexpected_keys if key.startswith("tupe.")):
            raise ValueError(f"{self.path} has {shorten_list(strange)}, which the model that it describes has not")
        return model.float().eval()

    # ------------------------------------------------------------------------------------------------------ fairseq

    def check(self) -> None:
        """Raise ValueError if the encoder and the language model's head are not what the configuration describes."""
        parts = {"encoder.": Encoder(self.types, PAD, EOS, self.config)}
        parts["lm_head."] = LMHead(self.config.width, self.types, config=self.config)
        wanted = {part + key: x.shape for part, module in parts.items() for key, x in module.state_dict().items()}
        found = {key: x.shape for key, x in self.weights.items() if key.startswith(tuple(parts)) and key != SETTINGS}
        if wrong := sorted(key for key in {*wanted, *found} if wanted.get(key) != found.get(key)):
            raise ValueError(
                f"the tensors are not those of the model that the options describe: {', '.join(wrong[:5])}"
            )

    def state(self, symbols: list[str] | None = None) -> dict:
        """The contents of a checkpoint from which fairseq trains with a new optimizer. symbols: the dictionary's, where
        the weights have no fingerprint of it."""
        weights = dict(self.weights)
        if split_size(self.name)[0] not in ELECTRA:
            add_lm_head(weights, self.config)
            replace(self, weights=weights).check()
        if FINGERPRINT not in weights:
            weights[FINGERPRINT] = fingerprint(symbols or read_symbols(self.task["data"]))
        options = {NAMES[f.name]: getattr(self.config, f.name) for f in fields(ModelConfig)}
        running = {name: kind[0] if isinstance(kind, tuple) else kind() for name, kind in RUNNING.items()}
        task = {"_name": "tupe_masked_lm", "data": ".", "tokens_per_sample": self.config.max_positions}
        cfg = {"criterion": {"_name": "masked_lm"}, "common": {"seed": 1}, **self.cfg, "task": {**task, **self.task}}
        cfg["model"] = {**running, **self.cfg.get("model", {}), **options, "_name": self.name}
        history = {"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}, "num_updates": self.updates}
        begin = {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0, "shuffle": True}, "val_loss": None}
        kept = {"labels": self.labels, "layout": self.layout} if self.labels or self.layout else {}
        return {
            "args": None, "cfg": cfg, "model": weights, "criterion": {}, "optimizer_history": [history],
            "task_state": kept, "extra_state": {**begin, **self.extra}, "last_optimizer_state": None,
        }  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- reading


def read_model(path: str | Path, mmap: bool = False) -> Trained:
    """The model of a checkpoint: of a file of fairseq's, or of a folder of transformers. mmap: see `read_checkpoint`.
    Raises ValueError, with one line, for anything else."""
    return of_folder(path) if Path(path).is_dir() else of_state(read_checkpoint(path, mmap), path)


def of_state(state: dict, path: str | Path) -> Trained:
    """The model in what `read_checkpoint` returned of a file."""
    saved, weights = state["cfg"]["model"], state["model"]
    if "encoder.tokens.weight" not in weights:
        raise ValueError(f"{path} is {NOT_OURS}")
    try:
        spelled(saved["position"], saved["position_file"])
        config = ModelConfig(**{ours: saved[theirs] for ours, theirs in NAMES.items()})
        if SETTINGS in weights:
            check_settings(unpack_settings(weights[SETTINGS]), settings_of(config))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    kept = state.get("task_state") or {}
    return Trained(
        config, weights, state["cfg"], num_updates(state), kept.get("labels") or {}, kept.get("layout"),
        dict(state["extra_state"]), Path(path),
    )  # fmt: skip


def of_folder(folder: str | Path) -> Trained:
    """The model in a folder that transformers reads, and what its run's record says of its training."""
    config_of(folder)
    config, tensors = read_hugging_face(folder)
    trained, here = of_export(config, tensors), Path(folder).resolve()
    about = record.read(here) or record.read(here.parent)  # of a run, or of its checkpoint-N
    own = about.config if about else {}
    known = {key.partition(".")[2]: value for key, value in own.items() if key.startswith("task.")}
    around = [here, here.parent] if here.name.startswith("checkpoint-") else [here]
    places = [place for place in around if (place / "dict.txt").is_file()]
    data = str((places or around)[0])
    kept = {key: value for key, value in known.items() if key in PRETRAINING}
    trained.cfg["task"] = {"_name": "tupe_masked_lm", **kept, "data": data}
    trained.updates, trained.path = record.updates_of(folder), Path(folder)
    if places:
        trained.weights[FINGERPRINT] = fingerprint(read_symbols(data))
    return trained


def of_export(config: dict, tensors: dict[str, Tensor]) -> Trained:
    """The model of a config.json and the tensors beside it."""
    options = ModelConfig(**{ours: config[theirs] for ours, theirs in EXPORTED.items() if theirs in config})
    head, weights = config.get("classifier_name", CLASSIFIER), {}
    for key, value in tensors.items():
        if key.startswith(("token_classifier.", "qa_outputs.")):
            logger.warning(f"leaving out {key}: a checkpoint has no head of tokens or answers; use it in transformers")
        elif key.startswith("classifier."):
            weights[f"{HEADS}{head}.{key.removeprefix('classifier.')}"] = value
        elif key != "decoder.weight":  # in a pickle: the token embeddings again
            weights[key.removeprefix("tupe.")] = value  # saved from TupeModel itself, it has no such beginning
    if "encoder.tokens.weight" not in weights:
        raise ValueError("the folder has no tupe.encoder.tokens.weight: not a model of this project")
    trained = Trained(options, {**weights, SETTINGS: pack_settings(settings_of(options))})
    keep_labels(trained, config, head)
    return trained


def keep_labels(trained: Trained, config: Mapping, head: str) -> None:
    """Keep the names of a head's classes, in the order of its outputs, where config.json has others than LABEL_0, and
    the range of a regression's labels."""
    names = [name for _, name in sorted((config.get("id2label") or {}).items(), key=lambda pair: int(pair[0]))]
    weight = trained.weights.get(f"{HEADS}{head}.out_proj.weight")
    if weight is None or len(names) != len(weight) or all(name.startswith("LABEL_") for name in names):
        return
    trained.labels = {head: names}
    if len(names) == 1 and (known := config.get("label_range")):
        regression = Glue((), names[0], (), ("pearson", "spearman"), bottom=known[0], top=known[1], own=True)
        trained.layout = regression.plain()


def read_hugging_face(folder: str | Path) -> tuple[dict, dict]:
    """(config.json, tensors) of a folder that `save_pretrained` wrote. Raises ValueError for another folder."""
    folder = Path(folder)
    if (folder / "adapter_config.json").is_file():  # transformers would load another model, from anywhere
        raise ValueError(f"{folder} has an adapter; save what merge_and_unload() makes of it")
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json: not a Hugging Face checkpoint")
    config = read_config(folder / "config.json")
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return config, _tensors_in(folder / "model.safetensors")
    if index.is_file():
        try:
            places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = sorted({Path(file).name for file in places.values()})
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} cannot be read: {error}") from None
        return config, {key: value for file in files for key, value in _tensors_in(folder / file).items()}
    if (folder / "pytorch_model.bin").is_file():
        tensors = folder / "pytorch_model.bin"
        return config, tensors_of({"model": load_safely(tensors)}, tensors)
    raise ValueError(f"{folder} has neither model.safetensors nor pytorch_model.bin")


def _tensors_in(file):
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(file.read_bytes())
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from None


def config_of(folder: str | Path) -> dict:
    """config.json of a folder with such a model. Raises ValueError for another folder."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no config.json: not a Hugging Face checkpoint")
    config = read_config(path)
    if (kind := config.get("model_type")) != "tupe":
        raise ValueError(f"{folder}: model_type is {kind!r}, not 'tupe'; `tupe checkpoint convert` reads 'bert' too")
    return config


def updates_of(checkpoint: str | Path) -> int:
    """After how many updates a checkpoint, file or folder, was written."""
    if Path(checkpoint).is_dir():
        config_of(checkpoint)
        return record.updates_of(checkpoint)
    return num_updates(read_checkpoint(checkpoint, mmap=True))


def add_lm_head(weights: dict, config: ModelConfig) -> None:
    """Add an initialised language-model head if there is none. config: what the head needs of it."""
    if "lm_head.bias" not in weights:
        logger.warning("no language-model head found; a new one is initialised")
        fresh = LMHead(config.width, len(weights["encoder.tokens.weight"]), config=config).state_dict()
        weights.update({f"lm_head.{key}": value for key, value in fresh.items()})


# ------------------------------------------------------------------------- what fairseq's checkpoints say of themselves


def fingerprint(symbols: list[str]) -> Tensor:
    """[32] the bytes of a hash over all types of a dictionary in their order."""
    return torch.tensor(list(hash_of(symbols).digest()), dtype=torch.long)


def symbols_of(file: str | Path) -> list[str]:
    """The types of a dict.txt. Raises ValueError if there is none."""
    if not Path(file).is_file():
        raise ValueError(f"dictionary not found: {file}; give the dict.txt that the model was trained with")
    return read_dictionary(Path(file))


def check_dictionary(weights: Mapping[str, Tensor], file: str | Path) -> list[str]:
    """The types of the dict.txt `file`. Raises ValueError unless a model with these weights was trained with it; where
    the weights do not say with which one, unless it is as long."""
    symbols, types = symbols_of(file), len(weights["encoder.tokens.weight"])
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
        missing = ", ".join(file for file in split_files(position_file) if not is_loaded(file))
        if not missing:
            raise
        remedy = "give it with `tupe --position-file FILE COMMAND` or as position_file of from_pretrained"
        reason = f"{missing} was not run: to train, take a task of this plugin; {remedy} to load a checkpoint"
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
    told.pop("stretched_from", None)  # a fact, which contradicts nothing
    if told != own:
        raise ValueError(f"the checkpoint was trained with {describe(saved)}; this model has {describe(own)}")


def pack_settings(settings: dict[str, str]) -> Tensor:
    """As integers, which weights-only loading and averaging accept."""
    return torch.tensor(list(describe(settings).encode()), dtype=torch.long)


def unpack_settings(state: Tensor) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in bytes(state.tolist()).decode().split(" "))


def describe(settings: dict[str, str]) -> str:
    return " ".join(f"{key}={value}" for key, value in settings.items())
