"""Weights from and to other code: the released TUPE code, Hugging Face's BERT and ModernBERT, and our own export.

Conversion renames tensors; comments explain the exceptions. Before a converted model is written, it is built and loads
the tensors strictly.
"""

import argparse
import functools
import io
import json
import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import click
import torch
from fairseq import models
from fairseq.data import Dictionary
from fairseq.tasks.masked_lm import MaskedLMTask
from omegaconf import OmegaConf
from torch import nn

from ..common import options
from ..common.options import FILE, Command
from ..common.record import write_together
from ..common.safe_load import load_safely, read_config, tensors_of
from ..corpus.vocabulary import ROLES, names_in_dictionary, their_tokenizer, with_our_ids
from ..data.glue import Glue
from ..encoder import PARTS, LMHead, ModelConfig, names_in
from ..plugin.gate import read_checkpoint
from ..plugin.model import NAMES
from ..plugin.pretrained import check_dictionary, load_dictionary
from ..positions import canonical, parse, same_position
from ..text import MASK, TextEncoder, load_tokenizer
from ..training.recipe import architecture_of
from .export import check_finite, weights_from_export
from .files import configuration, new_checkpoint, save_atomically

logger = logging.getLogger(__name__)


# ------------------------------------------------------------------------------------------------- what all ways share


def core_options(options: Mapping) -> ModelConfig:
    """Of model options under fairseq's names; those that are not given are the default."""
    return ModelConfig(**{ours: options[theirs] for ours, theirs in NAMES.items() if theirs in options})


def build_checkpoint(weights: dict, options: dict, dictionary: Dictionary) -> dict:
    """A checkpoint of this project. weights: model state without settings and fingerprints; options: of the model.
    Raises ValueError for weights that do not fit."""
    rows = len(weights["encoder.tokens.weight"])
    if rows != len(dictionary):
        raise ValueError(
            f"the checkpoint has {rows} token vectors, the dictionary {len(dictionary)} types ({MASK} and the four "
            "special tokens included); give the dict.txt that the model was trained with"
        )
    cfg = configuration(architecture_of(core_options(options)), options)
    model = build_model(cfg, dictionary)
    settings = {key: value for key, value in model.state_dict().items() if key.endswith("_extra_state")}
    try:
        tensors = {**settings, **weights}
        model.load_state_dict(tensors, strict=True, model_cfg=model.cfg)  # type: ignore[call-arg]  # fairseq's
    except RuntimeError as error:  # tensors that are missing, unknown or of other sizes
        raise ValueError(f"the tensors are not those of the model that the options describe: {error}") from error
    return new_checkpoint(cfg, model.state_dict())


def build_model(cfg: dict, dictionary: Dictionary) -> nn.Module:
    """The model that a checkpoint's configuration describes; loading weights into it creates their classification
    heads."""
    model_cfg = OmegaConf.create({**cfg["model"], "load_checkpoint_heads": True})
    return models.build_model(model_cfg, MaskedLMTask(OmegaConf.create(cfg["task"]), dictionary))


def write(checkpoint: dict, files: dict[str, bytes], output: str | Path) -> Path:
    """Write checkpoint.pt and other files, {name: contents}, to the folder `output`; returns the checkpoint's path.

    Raises ValueError, before it writes anything, if the folder has a checkpoint, or these files with other contents,
    and for weights that are not finite.
    """
    check_finite(checkpoint["model"])
    write_together(output, {**files, "checkpoint.pt": functools.partial(save_atomically, checkpoint)})
    return Path(output) / "checkpoint.pt"


def floats(weights: dict) -> dict:
    """The weights in float32, whatever their precision in the file."""
    return {key: value.float() if value.is_floating_point() else value for key, value in weights.items()}


# ----------------------------------------------------------------------------------------------- the released TUPE code

BODY = "decoder.sentence_encoder."
RELEASED = [  # (a part of a name in the released code, the same part in ours)
    (BODY + "embed_tokens.", "encoder.tokens."),
    (BODY + "emb_layer_norm.", "encoder.embed_norm."),
    (BODY + "pos.", "encoder.positions.untied.table."),
    (BODY + "pos_ln.", "encoder.positions.untied.norm."),
    (BODY + "pos_q_linear.", "encoder.positions.untied.q."),
    (BODY + "pos_k_linear.", "encoder.positions.untied.k."),
    (BODY + "relative_attention_bias.", "encoder.positions.t5.table."),
    (BODY + "layers.", "encoder.layers."),
    (".self_attn.in_proj_", ".attention.qkv."),
    (".self_attn.out_proj.", ".attention.out."),
    (".self_attn_layer_norm.", ".attention_norm."),
    (".final_layer_norm.", ".ffn_norm."),
    ("decoder.lm_head.layer_norm.", "lm_head.norm."),
    ("decoder.lm_head.", "lm_head."),
]


def rename(name: str, table: list) -> str:
    """Replace parts of a name: those with a leading dot anywhere, the others at its start."""
    for old, new in table:
        if old.startswith("."):
            name = name.replace(old, new)
        elif name.startswith(old):
            name = new + name.removeprefix(old)
    return name


def weights_from_released(state: dict) -> tuple[dict, dict]:
    """Model state of the released code -> (our weights, the model options that follow from the tensors).

    TUPE-R differs from TUPE-A by its table of relative biases. TUPE-A's tensors do not show the number of heads.
    Raises ValueError for a model that is not a TUPE, or has tensors without a counterpart.
    """
    state = floats(dict(state))
    table = state.get(BODY + "pos.weight")
    if table is None:
        raise ValueError(f"this is not a checkpoint of the released TUPE code: it has no {BODY}pos.weight")
    state.pop(BODY + "rp_bucket", None)  # indices, which this project computes
    for kind in ("weight", "bias"):  # some versions have one tensor for both projections
        if BODY + f"pos_proj.{kind}" in state:
            parts = state.pop(BODY + f"pos_proj.{kind}").chunk(2)
            state[BODY + f"pos_q_linear.{kind}"], state[BODY + f"pos_k_linear.{kind}"] = parts
    if not torch.equal(
        state.pop("decoder.lm_head.weight", state[BODY + "embed_tokens.weight"]), state[BODY + "embed_tokens.weight"]
    ):
        raise ValueError("decoder.lm_head.weight is not the token embedding: untied outputs are not supported")
    for head in {key.split(".")[1] for key in state if key.startswith("classification_heads.")}:
        if f"classification_heads.{head}.dense.weight" not in state:
            logger.warning(f"leaving out the head {head!r}: it has no dense layer, and heads here have one")
            state = {key: value for key, value in state.items() if not key.startswith(f"classification_heads.{head}.")}
    weights = {rename(key, RELEASED): value for key, value in state.items()}
    unknown = sorted(key for key in weights if not key.startswith(("encoder.", "lm_head.", "classification_heads.")))
    if unknown:
        raise ValueError(f"tensors without a counterpart: {', '.join(unknown)}")
    relative = weights.get("encoder.positions.t5.table.weight")
    layers = {int(match.group(1)) for key in weights if (match := re.match(r"encoder\.layers\.(\d+)\.", key))}
    options = {
        "position": "untied" if relative is None else "untied+t5",
        "cls": "untied",
        NAMES["layers"]: len(layers),
        NAMES["width"]: table.size(1),
        NAMES["ffn"]: weights["encoder.layers.0.fc1.weight"].size(0),
        "max_positions": len(table) - 1,
    }
    if relative is not None:
        options[NAMES["heads"]] = relative.size(1)
    return weights, options


def weights_to_released(weights: dict) -> dict:
    """Our model state -> that of the released code. Raises ValueError if the tensors are not those of TUPE-A or -R."""
    table = [(ours, theirs) for theirs, ours in RELEASED]
    state = {rename(key, table): value for key, value in weights.items() if not key.endswith("_extra_state")}
    if unknown := sorted(key for key in state if not key.startswith(("decoder.", "classification_heads."))):
        raise ValueError(f"the released code has no counterpart of: {', '.join(unknown[:5])}")
    state["decoder.lm_head.weight"] = state[BODY + "embed_tokens.weight"]
    return state


RELEASED_OPTIONS = [  # under fairseq's names
    NAMES[option]
    for option in (
        "layers", "width", "ffn", "heads", "max_positions", "dropout", "attention_dropout", "activation_dropout",
        "pooler_dropout",
    )
]  # fmt: skip


def from_released(path: str | Path, dictionary_file: str | Path, heads: int | None = None) -> dict:
    """A checkpoint file of the released code -> one of ours. heads: number of heads, if the file does not give it.

    Raises ValueError for a file or a model that cannot be converted.
    """
    state = load_safely(path)
    tensors = tensors_of(state, path)
    try:
        weights, options = weights_from_released(tensors)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    args = vars(state["args"]) if isinstance(state.get("args"), argparse.Namespace) else {}
    recorded = {key: args[key] for key in RELEASED_OPTIONS if args.get(key) is not None}
    contradictions = [key for key in recorded if key in options and recorded[key] != options[key]]
    if contradictions:
        raise ValueError(f"{path}: options and tensors contradict each other in {', '.join(contradictions)}")
    options = {**recorded, **options}
    options.setdefault(NAMES["heads"], heads)
    if options[NAMES["heads"]] is None:
        raise ValueError(f"{path} does not give the number of attention heads; use --heads")
    if args.get("activation_fn", "gelu") != "gelu" or args.get("encoder_normalize_before"):
        raise ValueError(f"{path}: only post-layer-norm models with GELU are supported")
    return build_checkpoint(weights, options, load_dictionary(dictionary_file))


def to_released(path: str | Path, dictionary_file: str | Path) -> dict:
    """Our checkpoint -> one that the released code reads (its options as an `argparse.Namespace`).

    The released code has only TUPE-A and TUPE-R with untied [CLS], Transformer layers and softmax. Raises ValueError
    for other models, and for another model's dictionary.
    """
    checkpoint = read_checkpoint(path)
    model = checkpoint["cfg"]["model"]
    possible = {"cls": "untied", "block": "transformer", "normaliser": "softmax", "layer_norm_eps": 1e-5}
    parts = [name for name in PARTS["transformer"] if model.get(name, "auto") != "auto"]
    kind = {key: model[key] for key in ("position", *possible, *parts)}
    relative = same_position(kind["position"], "untied+t5")
    if {**kind, "position": ""} != {**possible, "position": ""} or not (relative or kind["position"] == "untied"):
        raise ValueError(f"the released code has TUPE-A and TUPE-R only, not {kind}")
    if model["_name"].startswith("electra"):
        raise ValueError("the released code has no ELECTRA")
    check_dictionary(checkpoint, dictionary_file)
    options = {key: model[key] for key in RELEASED_OPTIONS}
    size = "large" if options[NAMES["layers"]] == 24 else "base"
    tokens = checkpoint["cfg"]["task"].get("tokens_per_sample", options["max_positions"])
    args = argparse.Namespace(
        **options, arch=f"bert_{size}", task="masked_lm", criterion="masked_lm", data=".", tokens_per_sample=tokens,
        activation_fn="gelu", encoder_normalize_before=False, embedding_normalize=True,
        rel_pos=relative, mask_prob=0.15, leave_unmasked_prob=0.1, random_token_prob=0.1,
        mask_whole_words=False, sample_break_mode="complete", seed=checkpoint["cfg"]["common"]["seed"],
    )  # fmt: skip
    history = {"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}, "num_updates": 0}
    return {
        "args": args,
        "model": weights_to_released(checkpoint["model"]),
        "optimizer_history": [history],
        "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0}, "val_loss": None},
        "last_optimizer_state": None,
    }


# ------------------------------------------------------------------------------------------------------ Hugging Face


def read_hugging_face(folder: str | Path) -> tuple[dict, dict]:
    """(config.json, tensors) of a folder that `save_pretrained` wrote. Raises ValueError for another folder."""
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        what = "no config.json: not a Hugging Face checkpoint"
        if (folder / "adapter_config.json").is_file():
            what = "only an adapter: save what merge_and_unload() makes of it"
        raise ValueError(f"{folder} has {what}")
    config = read_config(folder / "config.json")
    if (tensors := folder / "model.safetensors").is_file():
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            return config, load(tensors.read_bytes())
        except SafetensorError as error:
            raise ValueError(f"{tensors} cannot be read: {error}") from None
    if (folder / "pytorch_model.bin").is_file():
        tensors = folder / "pytorch_model.bin"
        return config, tensors_of({"model": load_safely(tensors)}, tensors)
    raise ValueError(f"{folder} has neither model.safetensors nor pytorch_model.bin (shards: save them as one)")


def from_export(config: dict, weights: dict, dictionary_file: str | Path) -> dict:
    """An export of `tupe checkpoint export`, or what transformers saved of it -> our checkpoint; a missing LM head is
    initialised."""
    weights, options = weights_from_export(config, floats(weights))
    add_lm_head(weights, core_options(options))
    checkpoint = build_checkpoint(weights, options, load_dictionary(dictionary_file))
    keep_labels(checkpoint, config, config.get("classifier_name", "sentence_classification_head"))
    return checkpoint


def keep_labels(checkpoint: dict, config: dict, head: str) -> None:
    """Keep the names of a head's classes, in the order of its outputs, where config.json has others than LABEL_0, and
    the range of a regression's labels."""
    names = [name for _, name in sorted((config.get("id2label") or {}).items(), key=lambda pair: int(pair[0]))]
    weight = checkpoint["model"].get(f"classification_heads.{head}.out_proj.weight")
    if weight is not None and len(names) == len(weight) and not all(name.startswith("LABEL_") for name in names):
        checkpoint["task_state"] = {"labels": {head: names}}
        if len(names) == 1 and (known := config.get("label_range")):
            regression = Glue((), names[0], (), ("pearson", "spearman"), bottom=known[0], top=known[1], own=True)
            checkpoint["task_state"]["layout"] = regression.plain()


def add_lm_head(weights: dict, config: ModelConfig) -> None:
    """Add an initialised language-model head if there is none. config: what the head needs of it."""
    if "lm_head.bias" not in weights:
        logger.warning("no language-model head found; a new one is initialised")
        fresh = LMHead(config.width, len(weights["encoder.tokens.weight"]), config=config).state_dict()
        weights.update({f"lm_head.{key}": value for key, value in fresh.items()})


BERT = [  # (a part of a name in BERT, the same part in ours)
    ("embeddings.word_embeddings.", "encoder.tokens."),
    ("embeddings.position_embeddings.", "encoder.positions.absolute.table."),
    ("embeddings.LayerNorm.", "encoder.embed_norm."),
    ("encoder.layer.", "encoder.layers."),
    (".attention.output.dense.", ".attention.out."),
    (".attention.output.LayerNorm.", ".attention_norm."),
    (".intermediate.dense.", ".fc1."),
    (".output.dense.", ".fc2."),
    (".output.LayerNorm.", ".ffn_norm."),
    ("cls.predictions.transform.dense.", "lm_head.dense."),
    ("cls.predictions.transform.LayerNorm.", "lm_head.norm."),
    ("cls.predictions.bias", "lm_head.bias"),
]
BERT_ALWAYS = {"model_type": "bert", "hidden_act": "gelu", "position_embedding_type": "absolute"}
BERT_OPTIONS = {  # name in config.json, which is also that of our export -> our option
    names_in("hugging_face")[option]: NAMES[option]
    for option in ("layers", "width", "ffn", "heads", "max_positions", "dropout", "attention_dropout", "layer_norm_eps")
}


def bert_tokens(folder: str | Path, longest: int) -> tuple[torch.Tensor, Dictionary, dict[str, bytes]]:
    """Of a BERT's folder: its ids in the order of our dictionary, the dictionary, and {name: contents} of its tokeniser
    with our ids. Both texts of a pair are of the one segment that the model has. longest: tokens of a text. Raises
    ValueError for a folder without a tokeniser of the library `tokenizers`, and for ids with gaps."""
    from tokenizers import processors

    content, roles, file = their_tokenizer(folder)
    theirs, tokenizer = (load_tokenizer(text, file) for text in (content, with_our_ids(content, roles, file)))
    ids, begin, end = theirs.get_vocab(), roles["<s>"], roles["</s>"]
    if roles["<unk>"] is None or sorted(ids.values()) != list(range(len(ids))):
        raise ValueError(f"{file} is not a BERT's: it must have an unknown token, and ids without gaps")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[begin, "$A", end], pair=[begin, "$A", end, "$B:0", end], special_tokens=[(begin, 0), (end, 2)]
    )
    ours, dictionary, types = tokenizer.to_str(), Dictionary(), tokenizer.get_vocab()
    for name in names_in_dictionary(ours)[dictionary.nspecial :]:
        dictionary.add_symbol(name)
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": ["input_ids", "attention_mask"]}
    names |= {**{ROLES[role][0]: token for role, token in roles.items()}, "model_max_length": longest}
    files = {"tokenizer.json": ours, "tokenizer_config.json": json.dumps(names, allow_nan=False)}
    order = torch.tensor([ids[token] for token in sorted(types, key=types.get)])
    return order, dictionary, {name: text.encode() for name, text in files.items()}


def tokenizer_settings(file: Path) -> bytes:
    """What `bert_tokens` writes as tokenizer_config.json, of a file that may hold code and templates of others."""
    try:
        found = dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from None
    known = {"tokenizer_class", "model_input_names", "model_max_length", *(names[0] for names in ROLES.values())}
    return json.dumps({name: value for name, value in found.items() if name in known}, allow_nan=False).encode()


def read_known(folder: str | Path, always: dict, needed: Iterable[str]) -> tuple[dict, dict]:
    """`read_hugging_face`, of a model whose settings are those of `always`, or not named, and which names all `needed`.
    Raises ValueError for another one."""
    config, state = read_hugging_face(folder)
    for key, value in always.items():
        if config.get(key, value) != value:
            raise ValueError(f"{folder}: {key} is {config[key]!r}, only {value!r} can be converted")
    if missing := [key for key in needed if key not in config]:
        raise ValueError(f"{folder}: config.json has no {', '.join(missing)}")
    return config, state


def renamed(folder: str | Path, state: dict, names: list[tuple[str, str]], order: torch.Tensor) -> dict:
    """A BERT's tensors under our names, with token rows in our order. Raises ValueError for one that has no counterpart
    here, and for a model with fewer vectors of tokens than its vocabulary has; of more, says so."""
    if unknown := sorted(key for key in state if rename(key, names) == key or key.startswith("classifier")):
        raise ValueError(f"{folder}: tensors without a counterpart: {', '.join(unknown[:5])}")
    weights = {rename(key, names): value for key, value in state.items()}
    rows, tokens = len(weights["encoder.tokens.weight"]), len(order)
    if rows < tokens:
        raise ValueError(f"{folder}: the vocabulary has {tokens} tokens, the model {rows}")
    if rows > tokens:
        logger.warning(f"{folder}: leaving out {rows - tokens} vectors that belong to no token")
    by_token = {"encoder.tokens.weight", "lm_head.bias"} & weights.keys()
    return {**weights, **{key: weights[key][order] for key in by_token}}


def from_bert(folder: str | Path) -> tuple[dict, Dictionary, dict[str, bytes]]:
    """A Hugging Face BERT -> (a `bert_a` checkpoint, its dictionary, {name: contents} of its tokeniser).

    The vector of token type 0 is added to the positions. Token ids change to fairseq's order: see `bert_tokens`.
    BERT's next-sentence head is left out, and with a warning the heads of tokens and of answers. A classifier with a
    pooler becomes the head sentence_classification_head. Raises ValueError for a model with anything else.
    """
    config, state = read_known(folder, BERT_ALWAYS, BERT_OPTIONS)
    order, dictionary, tokenizer = bert_tokens(folder, config["max_position_embeddings"])
    state = {key.removeprefix("bert."): value.float() for key, value in state.items() if value.is_floating_point()}
    state = {
        key.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias"): value
        for key, value in state.items()
    }
    tables = [f"embeddings.{kind}_embeddings.weight" for kind in ("word", "position", "token_type")]
    projections = {  # ours -> BERT's three
        f"encoder.layers.{layer}.attention.qkv.{kind}": [
            f"encoder.layer.{layer}.attention.self.{part}.{kind}" for part in ("query", "key", "value")
        ]
        for layer in range(config["num_hidden_layers"])
        for kind in ("weight", "bias")
    }
    if missing := [key for keys in (tables, *projections.values()) for key in keys if key not in state]:
        raise ValueError(f"{folder}: the model has no {', '.join(missing[:5])}")
    weights = {ours: torch.cat([state.pop(key) for key in theirs]) for ours, theirs in projections.items()}
    token_types = state.pop("embeddings.token_type_embeddings.weight")
    pooler = {kind: state.pop(f"pooler.dense.{kind}", None) for kind in ("weight", "bias")}
    if "classifier.weight" in state and pooler["weight"] is None:
        logger.warning("leaving out the classifier: it has no pooler, so it classifies tokens, not sequences")
    if "qa_outputs.weight" in state:
        logger.warning("leaving out the head of answers")
    for kind in ("weight", "bias"):
        classifier = state.pop(f"classifier.{kind}", None)
        if classifier is not None and pooler[kind] is not None:
            weights[f"classification_heads.sentence_classification_head.dense.{kind}"] = pooler[kind]
            weights[f"classification_heads.sentence_classification_head.out_proj.{kind}"] = classifier
        state.pop(f"qa_outputs.{kind}", None)
        state.pop(f"cls.seq_relationship.{kind}", None)
        decoder = state.pop(f"cls.predictions.decoder.{kind}", None)
        tied = {"weight": "embeddings.word_embeddings.weight", "bias": "cls.predictions.bias"}[kind]
        if decoder is not None and (tied not in state or not torch.equal(decoder, state[tied])):
            raise ValueError(f"{folder}: cls.predictions.decoder.{kind} is not {tied}: here they are one")
    weights.update(renamed(folder, state, BERT, order))
    weights["encoder.positions.absolute.table.weight"] = (
        weights["encoder.positions.absolute.table.weight"] + token_types[0]
    )
    add_lm_head(weights, ModelConfig(width=config["hidden_size"]))
    options = {"position": "absolute", "cls": "tied", **{ours: config[key] for key, ours in BERT_OPTIONS.items()}}
    checkpoint = build_checkpoint(weights, options, dictionary)
    keep_labels(checkpoint, config, "sentence_classification_head")
    return checkpoint, dictionary, tokenizer


MODERNBERT = [  # (a part of a name in ModernBERT, the same part in ours)
    ("embeddings.tok_embeddings.", "encoder.tokens."),
    ("embeddings.norm.", "encoder.embed_norm."),
    ("layers.", "encoder.layers."),
    (".attn_norm.", ".attention_norm."),
    (".attn.Wqkv.", ".attention.qkv."),
    (".attn.Wo.", ".attention.out."),
    (".mlp_norm.", ".ffn_norm."),
    (".mlp.Wi.", ".fc1."),
    (".mlp.Wo.", ".fc2."),
    ("final_norm.", "encoder.final_norm."),
    ("decoder.bias", "lm_head.bias"),
    ("head.", "lm_head."),
]
MODERNBERT_OPTIONS = {  # name in its config.json -> our option
    "num_hidden_layers": "layers", "hidden_size": "width", "intermediate_size": "ffn", "num_attention_heads": "heads",
    "max_position_embeddings": "max_positions", "norm_eps": "layer_norm_eps", "embedding_dropout": "dropout",
    "attention_dropout": "attention_dropout", "mlp_dropout": "activation_dropout",
}  # fmt: skip
MODERNBERT_ALWAYS = {
    "model_type": "modernbert", "hidden_activation": "gelu", "classifier_activation": "gelu", "norm_bias": False,
    "attention_bias": False, "mlp_bias": False, "classifier_bias": False, "decoder_bias": True,
}  # fmt: skip


def rotated_columns(qkv: torch.Tensor, heads: int, back: bool = False) -> torch.Tensor:
    """W_Q, W_K, W_V [3C, C] of a ModernBERT, which rotates columns m and m + D/2 of a head together, in the order of
    ours, which are 2m and 2m + 1; or back."""
    rows = qkv.unflatten(0, (3, heads, *((-1, 2) if back else (2, -1)))).transpose(2, 3)  # [3, H, D/2, 2, C]
    return torch.cat([rows[:2].flatten(0, 3), qkv[2 * len(qkv) // 3 :]])


def from_modernbert(folder: str | Path) -> tuple[dict, Dictionary, dict[str, bytes]]:
    """A Hugging Face ModernBERT -> (a `modernbert` checkpoint, and the same). Token ids change to fairseq's order: see
    `bert_tokens`. Raises ValueError for a model with other parts than the released ones, or another head than
    the language model's."""
    config, state = read_known(folder, MODERNBERT_ALWAYS, (*MODERNBERT_OPTIONS, "local_attention", "vocab_size"))
    order, dictionary, tokenizer = bert_tokens(folder, config["max_position_embeddings"])
    state = {key.removeprefix("model."): value for key, value in floats(state).items()}
    if (table := state.get("embeddings.tok_embeddings.weight")) is None:
        raise ValueError(f"{folder}: the model has no embeddings.tok_embeddings.weight")
    if not torch.equal(state.pop("decoder.weight", table), table):
        raise ValueError(f"{folder}: decoder.weight is not embeddings.tok_embeddings.weight: here they are one")
    weights = renamed(folder, state, MODERNBERT, order)
    options = {NAMES[ours]: config[theirs] for theirs, ours in MODERNBERT_OPTIONS.items()}
    rotations = config.get("rope_parameters") or {}
    bases = [
        config.get(older, rotations.get(kind, {}).get("rope_theta"))
        for older, kind in (("global_rope_theta", "full_attention"), ("local_rope_theta", "sliding_attention"))
    ]
    if None in bases:
        raise ValueError(f"{folder}: config.json has no rope_parameters of both kinds of layers")
    scalings = [config.get("rope_scaling"), rotations, *rotations.values()]
    types = {of.get("rope_type", of.get("type", "default")) for of in scalings if isinstance(of, dict)}
    if scaled := types - {"default"}:
        raise ValueError(f"{folder}: rotations of the kind {', '.join(map(repr, scaled))}; only 'default' is converted")
    if not config.get("layer_types") and not config.get("global_attn_every_n_layers"):
        raise ValueError(f"{folder}: config.json has no layer_types")
    kinds = config.get("layer_types") or [
        "sliding_attention" if i % config["global_attn_every_n_layers"] else "full_attention"
        for i in range(config["num_hidden_layers"])
    ]
    every = config.get("global_attn_every_n_layers") or (*kinds[1:], "full_attention").index("full_attention") + 1
    if kinds != ["sliding_attention" if i % every else "full_attention" for i in range(len(kinds))] or every == 1:
        raise ValueError(f"{folder}: only models where every n-th layer is global, the first one too, can be converted")
    for key in [key for key in weights if key.endswith("qkv.weight")]:
        weights[key] = rotated_columns(weights[key], config["num_attention_heads"])
    parts = [f"rope:base:{bases[0]}:local_base:{bases[1]}:every:{every}", f"window:size:{config['local_attention']}"]
    options |= {"position": canonical("+".join(parts) + f":every:{every}"), "cls": "tied", "block": "modern"}
    add_lm_head(weights, ModelConfig(block="modern", width=config["hidden_size"]))
    return build_checkpoint(weights, options, dictionary), dictionary, tokenizer


def to_modernbert(path: str | Path, dictionary_file: str | Path) -> dict[str, bytes]:
    """Our checkpoint -> {name: contents} of the files of transformers' ModernBertForMaskedLM, with our order of tokens.
    Raises ValueError for a model that is none, and for another model's dictionary."""
    from safetensors.torch import save

    checkpoint = read_checkpoint(path)
    check_dictionary(checkpoint, dictionary_file)
    saved = checkpoint["cfg"]["model"]
    model = core_options(saved)
    schemes = {part.name: part.options for part in parse(model.position)}
    rope = {"base": 10000.0, "local_base": 0.0, "every": 3, **schemes.get("rope", {})}
    window = {"size": 128, "every": 3, **schemes.get("window", {})}
    wrong = [f"position {model.position}"] * (
        schemes.keys() != {"rope", "window"} or rope.keys() != {"base", "local_base", "every"}
        or rope["every"] != window["every"] or not window["every"] or window["size"] % 2 > 0
    )  # fmt: skip
    options = vars(model)
    wanted = {"cls": "tied", "normaliser": "softmax", "segments": "none"}
    wrong += [f"{key} {options[key]}" for key, value in wanted.items() if options[key] != value]
    wrong += [f"{part} {model.part(part)}" for part, word in PARTS["modern"].items() if model.part(part) != word]
    if wrong or model.block == "gau" or saved["_name"].startswith("electra"):
        raise ValueError(f"{path} is no ModernBERT: {', '.join(wrong) or saved['_name']}")
    check_finite(checkpoint["model"])
    state, table = {}, [(ours, theirs) for theirs, ours in MODERNBERT]
    for key, value in floats(checkpoint["model"]).items():
        if key.startswith(("encoder.", "lm_head.")) and not key.endswith("_extra_state"):
            value = rotated_columns(value, model.heads, back=True) if key.endswith("qkv.weight") else value
            theirs = rename(key, table)
            state[theirs if theirs.startswith(("head.", "decoder.")) else f"model.{theirs}"] = value.contiguous()
    layers = ["sliding_attention" if i % window["every"] else "full_attention" for i in range(model.layers)]
    bases = {"full_attention": rope["base"], "sliding_attention": rope["local_base"] or rope["base"]}
    config = {
        **MODERNBERT_ALWAYS, **{theirs: options[ours] for theirs, ours in MODERNBERT_OPTIONS.items()},
        "architectures": ["ModernBertForMaskedLM"], "local_attention": window["size"], "layer_types": layers,
        "global_attn_every_n_layers": window["every"], "global_rope_theta": bases["full_attention"],
        "local_rope_theta": bases["sliding_attention"], "tie_word_embeddings": True,
        "rope_parameters": {kind: {"rope_theta": base, "rope_type": "default"} for kind, base in bases.items()},
        "vocab_size": len(state["model.embeddings.tok_embeddings.weight"]), "bos_token_id": 0, "cls_token_id": 0,
        "pad_token_id": 1, "eos_token_id": 2, "sep_token_id": 2,
    }  # fmt: skip
    text = json.dumps(config, indent=2, allow_nan=False) + "\n"
    return {"config.json": text.encode(), "model.safetensors": save(state, {"format": "pt"})}


# ------------------------------------------------------------------------------------------------------ one entry point


def convert(
    source: str | Path,
    target: str,
    dictionary_file: str | Path | None,
    output: str | Path,
    heads: int | None = None,
) -> Path:
    """Convert a checkpoint as `tupe checkpoint convert` does; returns the path of the checkpoint written.

    dictionary_file: None for the dict.txt beside a checkpoint or in an export. Raises ValueError for an option that
    does not apply to this source and target.
    """
    source, given = Path(source), {"--dict": dictionary_file, "--heads": heads}
    file = Path(dictionary_file or (source if source.is_dir() else source.parent) / "dict.txt")

    def refuse(kind, *names):
        if wrong := [name for name in names if given[name] is not None]:
            raise ValueError(f"{' and '.join(wrong)} cannot be given for {kind}: leave it out")

    if target == "released":
        refuse("a checkpoint for the released code", "--heads")
        return write(to_released(source, file), {"dict.txt": file.read_bytes()}, output)
    if target == "modernbert":
        refuse("a checkpoint for transformers", "--heads")
        files = {**to_modernbert(source, file), "dict.txt": file.read_bytes()}
        if (tokenizer := file.parent / "tokenizer.json").is_file():
            files |= {tokenizer.name: tokenizer.read_bytes()}
        if (settings := file.parent / "tokenizer_config.json").is_file():
            files |= {settings.name: tokenizer_settings(settings)}
        if (Path(output) / "config.json").exists():
            raise ValueError(f"{output} has a config.json already; choose another folder or remove it")
        write_together(Path(output), files)
        return Path(output)
    if not source.is_dir():
        return write(from_released(source, file, heads), {"dict.txt": file.read_bytes()}, output)
    config, weights = read_hugging_face(source)
    if config.get("model_type") == "tupe":
        refuse("an export, which has its own", "--heads")
        checkpoint = from_export(config, weights, file)
        others = [source / name for name in TextEncoder.FILES if name != "dict.txt" and (source / name).is_file()]
        return write(checkpoint, {"dict.txt": file.read_bytes(), **{o.name: o.read_bytes() for o in others}}, output)
    if config.get("model_type") in ("bert", "modernbert"):
        refuse("a BERT, whose folder has its own", "--dict", "--heads")
        modern = config["model_type"] == "modernbert"
        checkpoint, symbols, tokenizer = (from_modernbert if modern else from_bert)(source)
        symbols.symbols.remove(MASK)  # whoever reads the file adds it again
        text = io.StringIO()
        symbols.save(text)
        return write(checkpoint, {"dict.txt": text.getvalue().encode(), **tokenizer}, output)
    raise ValueError(f"{source}: model_type is {config.get('model_type')!r}; valid: 'bert', 'modernbert', 'tupe'")


@click.command(cls=Command)
@click.option(
    "--from", "source", type=click.Path(), required=True, help="The checkpoint, or the folder of a Hugging Face model."
)
@click.option("--to", "target", type=click.Choice(["tupe", "released", "modernbert"]), default="tupe",
              show_default=True, help="What to write: a checkpoint of this project, or of another.")  # fmt: skip
@click.option("--dict", "dictionary", type=FILE, help="The model's dict.txt (default: the one beside it).")
@click.option(
    "--heads", type=click.IntRange(1), help="The number of attention heads, if the checkpoint does not say it."
)
@options.output("The folder to write: checkpoint.pt, dict.txt and the tokeniser.")
def command(source, target, dictionary, heads, output):
    """Convert checkpoints of other code to this project's, and back. The contents of --from tell its kind.

    \b
    tupe checkpoint convert --from released.pt --dict dict.txt --output DIR     the released TUPE code
    tupe checkpoint convert --from checkpoint_best.pt --to released --dict DATA/dict.txt --output DIR
    tupe checkpoint convert --from BERT_FOLDER --output DIR                     a Hugging Face BERT or ModernBERT
    tupe checkpoint convert --from checkpoint_best.pt --to modernbert --dict DATA/dict.txt --output DIR
    tupe checkpoint convert --from EXPORT_FOLDER --output DIR                   what `tupe checkpoint export` wrote

    Use the checkpoint with TupeModel.from_pretrained(DIR, "checkpoint.pt"), `tupe finetune --checkpoint` or
    --restore-file. Conversion runs no code from the input.
    """
    click.echo(f"wrote {convert(source, target, dictionary, output, heads)}")
