"""Weights from other code: the released TUPE code, and Hugging Face's BERT and RoBERTa.

Conversion renames tensors; comments explain the exceptions. Before a converted model is written, it is built from its
tensors.
"""

import argparse
import logging
import re
import tempfile
from pathlib import Path

import click
import torch

from ..common import options
from ..common.options import FILE, Command, shorten_list
from ..common.safe_load import load_safely, tensors_of
from ..corpus.vocabulary import names_in_dictionary, their_tokenizer, with_our_ids
from ..encoder import ModelConfig
from ..text import MASK, TextEncoder, load_tokenizer
from .export import export
from .trained import EXPORTED, NAMES, Trained, check_dictionary, read_hugging_face

logger = logging.getLogger(__name__)


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
    """Model state of the released code -> (our weights, the options of `ModelConfig` that follow from the tensors).

    TUPE-R differs from TUPE-A by its table of relative biases. TUPE-A's tensors do not show the number of heads.
    Raises ValueError for a model that is not a TUPE, or has tensors without a counterpart.
    """
    state = {key: value.float() for key, value in state.items() if value.is_floating_point()}  # not `rp_bucket`
    table = state.get(BODY + "pos.weight")
    if table is None:
        raise ValueError(f"this is not a checkpoint of the released TUPE code: it has no {BODY}pos.weight")
    tokens = state[BODY + "embed_tokens.weight"]
    if not torch.equal(state.pop("decoder.lm_head.weight", tokens), tokens):
        raise ValueError("decoder.lm_head.weight is not the token embedding: untied outputs are not supported")
    weights = {rename(key, RELEASED): value for key, value in state.items()}
    relative = weights.get("encoder.positions.t5.table.weight")
    layers = {int(match.group(1)) for key in weights if (match := re.match(r"encoder\.layers\.(\d+)\.", key))}
    options = {
        "position": "untied" if relative is None else "untied+t5",
        "cls": "untied",
        "layers": len(layers),
        "width": table.size(1),
        "ffn": weights["encoder.layers.0.fc1.weight"].size(0),
        "max_positions": len(table) - 1,
    }
    if relative is not None:
        options["heads"] = relative.size(1)
    return weights, options


RECORDED = ("heads", "dropout", "attention_dropout", "activation_dropout", "pooler_dropout")  # in `args` alone


def from_released(path: str | Path) -> Trained:
    """A checkpoint file of the released code -> our model. Raises ValueError for a file or a model that cannot be
    converted."""
    state = load_safely(path)
    tensors = tensors_of(state, path)
    try:
        weights, options = weights_from_released(tensors)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    args = vars(state["args"]) if isinstance(state.get("args"), argparse.Namespace) else {}
    recorded = {name: args[NAMES[name]] for name in RECORDED if args.get(NAMES[name]) is not None}
    if "heads" not in (options := {**recorded, **options}):
        raise ValueError(f"{path} does not give the number of attention heads")
    if args.get("activation_fn", "gelu") != "gelu" or args.get("encoder_normalize_before"):
        raise ValueError(f"{path}: only post-layer-norm models with GELU are supported")
    return Trained(ModelConfig(**options), weights, path=Path(path))


# ------------------------------------------------------------------------------------------------------ Hugging Face


BERT = [  # (a part of a name in BERT or RoBERTa, the same part in ours), each after those above it
    ("bert.", ""),
    ("roberta.", ""),
    (".LayerNorm.gamma", ".LayerNorm.weight"),
    (".LayerNorm.beta", ".LayerNorm.bias"),
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
    ("cls.predictions.", "lm_head."),
    ("lm_head.layer_norm.", "lm_head.norm."),
]
LEFT_OUT = ("pooler.", "classifier.", "qa_outputs.", "cls.seq_relationship.")  # heads; fine-tuning makes new ones
BERT_ALWAYS = {"hidden_act": "gelu", "position_embedding_type": "absolute"}
PLACES = "encoder.positions.absolute.table.weight"
KINDS = ("bert", "roberta", "xlm-roberta")  # model_type
BERT_OPTIONS = {  # name in config.json, which is also that of our export -> our option
    EXPORTED[option]: option
    for option in ("layers", "width", "ffn", "heads", "dropout", "attention_dropout", "layer_norm_eps")
}


def bert_tokens(folder: str | Path, kind: str = "bert") -> tuple[torch.Tensor, dict[str, str]]:
    """The ids of a BERT's folder in the order of our dictionary, and {name: content} of that dictionary and of the
    tokeniser with our ids. Both texts of a pair are of the one segment that the model has; a RoBERTa frames them as
    this project does. Raises ValueError for a folder without a tokeniser of the library `tokenizers`, and for ids with
    gaps."""
    from tokenizers import processors

    content, roles, file = their_tokenizer(folder)
    theirs, tokenizer = (load_tokenizer(text, file) for text in (content, with_our_ids(content, roles, file)))
    ids, begin, end = theirs.get_vocab(), roles["<s>"], roles["</s>"]
    if roles["<unk>"] is None or sorted(ids.values()) != list(range(len(ids))):
        raise ValueError(f"{file} is not a BERT's or RoBERTa's: it must have an unknown token, and ids without gaps")
    if kind == "bert":
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[begin, "$A", end], pair=[begin, "$A", end, "$B:0", end], special_tokens=[(begin, 0), (end, 2)]
        )
    ours, types = tokenizer.to_str(), tokenizer.get_vocab()
    symbols = [name for name in names_in_dictionary(ours)[len(TextEncoder.SPECIALS) :] if name != MASK]
    order = torch.tensor([ids[token] for token in sorted(types, key=types.get)])
    return order, {"dict.txt": "".join(f"{name} 1\n" for name in symbols), "tokenizer.json": ours}


def from_bert(folder: str | Path) -> tuple[Trained, dict[str, str]]:
    """A Hugging Face BERT or RoBERTa -> (a `bert_a` model, {name: content} of its dictionary and tokeniser).

    The vector of token type 0 is added to the positions; a RoBERTa's first is row 2 of its table. Token ids change to
    fairseq's order: see `bert_tokens`. Heads of sequences, tokens and answers are left out. Raises ValueError for a
    model with anything else.
    """
    config, state = read_hugging_face(folder)
    if config.get("model_type") == "tupe":
        raise ValueError(f"{folder} is a model of this project already: every command takes it as it is")
    if (kind := config.get("model_type", "bert")) not in KINDS:
        raise ValueError(f"{folder}: model_type is {kind!r}; valid: {', '.join(KINDS)}")
    for key, value in BERT_ALWAYS.items():
        if config.get(key, value) != value:
            raise ValueError(f"{folder}: {key} is {config[key]!r}, only {value!r} can be converted")
    order, text = bert_tokens(folder, kind)
    weights = {rename(key, BERT): value.float() for key, value in state.items() if value.is_floating_point()}
    if heads := {key for key in weights if key.startswith(LEFT_OUT)}:
        logger.warning(f"{folder}: leaving out {shorten_list(sorted(heads))}")
        weights = {key: value for key, value in weights.items() if key not in heads}
    for decoder, tied in (("weight", "encoder.tokens.weight"), ("bias", "lm_head.bias")):
        own = weights.pop(f"lm_head.decoder.{decoder}", None)
        if own is not None and (tied not in weights or not torch.equal(own, weights[tied])):
            raise ValueError(f"{folder}: decoder.{decoder} is not {tied}: here they are one")
    try:
        for layer in range(config["num_hidden_layers"]):
            for kind_of in ("weight", "bias"):
                name = f"encoder.layers.{layer}.attention"
                parts = [weights.pop(f"{name}.self.{part}.{kind_of}") for part in ("query", "key", "value")]
                weights[f"{name}.qkv.{kind_of}"] = torch.cat(parts)
        first = 0 if kind == "bert" else config.get("pad_token_id", 1) + 1  # rows before it are of padding
        places = weights[PLACES][first:] + weights.pop("embeddings.token_type_embeddings.weight")[0]
        rows, tokens = len(weights["encoder.tokens.weight"]), len(order)
    except KeyError as error:
        raise ValueError(f"{folder}: the model has no {error.args[0]}") from None
    if rows < tokens:
        raise ValueError(f"{folder}: the vocabulary has {tokens} tokens, the model {rows}")
    if rows > tokens:
        logger.warning(f"{folder}: leaving out {rows - tokens} vectors that belong to no token")
    for key in {"encoder.tokens.weight", "lm_head.bias"} & weights.keys():
        weights[key] = weights[key][order]
    weights[PLACES] = places
    config = {"layer_norm_eps": 1e-12, **config}  # Google's own files do not say it
    options = {ours: config[key] for key, ours in BERT_OPTIONS.items()}
    return Trained(ModelConfig(**options, max_positions=len(places)), weights, path=Path(folder)), text


# ------------------------------------------------------------------------------------------------------ one entry point


def convert(source: str | Path, dictionary: str | Path | None, output: str | Path) -> Path:
    """Convert a checkpoint as `tupe checkpoint convert` does; returns the folder written.

    dictionary: None for the dict.txt beside the checkpoint. Raises ValueError for one of a model that has its own.
    """
    source, output = Path(source), Path(output)
    if source.is_dir():
        if dictionary:
            raise ValueError("--dict is only for a checkpoint of the released code: leave it out")
        trained, text = from_bert(source)
    else:
        trained = from_released(source)
        file = Path(dictionary or source.parent / "dict.txt")
        check_dictionary(trained.weights, file)
        text = {"dict.txt": file.read_text(encoding="utf-8")}
    trained.model()  # raises ValueError unless the tensors are all that it describes
    with tempfile.TemporaryDirectory() as data:
        for name, content in text.items():
            Path(data, name).write_text(content, encoding="utf-8")
        export(trained, output, data, code=False)
    return output


@click.command(cls=Command)
@click.option(
    "--from", "source", type=click.Path(), required=True, help="The checkpoint, or the folder of a Hugging Face model."
)
@click.option("--dict", "dictionary", type=FILE, help="The model's dict.txt (default: the one beside it).")
@options.output("The folder to write.")
def command(source, dictionary, output):
    """Convert checkpoints of other code to this project's form, a folder that every command and transformers read. The
    contents of --from tell its kind. Conversion runs no code from the input.

    \b
    tupe checkpoint convert --from released.pt --dict dict.txt --output DIR     the released TUPE code
    tupe checkpoint convert --from FOLDER --output DIR                          a Hugging Face BERT or RoBERTa
    """
    click.echo(f"wrote {convert(source, dictionary, output)}")
