"""Every option of a model, in one list, with its valid values. To read the list takes neither torch nor numpy, so that
commands can refuse a mistake at once; to make a `ModelConfig` takes both. A test compares the choices with what the
model has."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from .names import cls_beside

BLOCK_DEFAULTS = {  # what a block is made of where an option is auto
    "transformer": {
        "norm_order": "post", "norm": "layer", "activation": "gelu", "linear_bias": "yes", "embed_norm": "yes",
        "inner_norms": "no",
    },
    "modern": {
        "norm_order": "pre", "norm": "layer_no_bias", "activation": "geglu", "linear_bias": "no", "embed_norm": "yes",
        "inner_norms": "no",
    },
}  # fmt: skip
BLOCK_DEFAULTS["gau"] = BLOCK_DEFAULTS["transformer"]


def option(
    default: Any,
    help: str,
    least: float | None = None,
    greatest: float | None = None,
    *,
    choices: Iterable[str] | None = None,
    free: bool = False,
    fairseq: str | None = None,
    hugging_face: str | None = None,
) -> Any:
    """A field of `ModelConfig`. least, greatest: the range of a number; choices: the valid values. free: fine-tuning
    may change it, because it does not define the function that was pre-trained. fairseq, hugging_face: its name there,
    if it differs; hugging_face="": the export has no such option."""
    metadata = {
        "help": help, "least": least, "greatest": greatest, "choices": choices and tuple(choices), "free": free,
        "fairseq": fairseq, "hugging_face": hugging_face,
    }  # fmt: skip
    return field(default=default, metadata=metadata)


@dataclass
class ModelConfig:
    """Every option of a model. fairseq's options, what fine-tuning may change, the converters and the export's
    config.json all follow from this list. Raises ValueError for an unknown choice, a number out of its range, and a
    value of another type."""

    position: str = option("absolute", "position schemes joined by '+'; see `tupe list schemes`")
    cls: str = option(
        "tied", "untied: logits from and to [CLS] are learned and do not depend on positions; zero: they are 0; auto: "
        "untied beside the scheme `untied`, else tied", choices=("auto", "tied", "untied", "zero"),
        hugging_face="cls_position",
    )  # fmt: skip
    normaliser: str = option(
        "softmax", "how logits become attention weights", choices=("softmax", "l2", "exp", "relu2", "swish_l2")
    )
    block: str = option(
        "transformer", "what a layer is. transformer: BERT's; modern: ModernBERT's, with a norm before attention and "
        "feed-forward block, GeGLU, no biases; gau: gated attention units (usually with the normaliser relu2)",
        choices=("transformer", "gau", "modern"),
    )  # fmt: skip
    # Words, not bools: see `plugin.model.fairseq_fields`.
    norm_order: str = option(
        "auto", "norms behind residual sums (post), or before what is added, and one behind the last layer (pre); "
        "auto, here and below: as in the block's paper", choices=("auto", "post", "pre"),
    )  # fmt: skip
    norm: str = option(
        "auto", "layer; layer_no_bias: without bias; layer_plain: with neither gain nor bias; rms: RMSNorm",
        choices=("auto", "layer", "layer_no_bias", "layer_plain", "rms"),
    )  # fmt: skip
    activation: str = option(
        "auto", "activation of the feed-forward block; with a GLU, --encoder-ffn-embed-dim is the width behind it",
        choices=("auto", "gelu", "geglu", "geglu_tanh", "swiglu"),
    )  # fmt: skip
    linear_bias: str = option(
        "auto", "whether linear layers have biases; attention: only attention's and the LM head's have",
        choices=("auto", "yes", "no", "attention"),
    )  # fmt: skip
    embed_norm: str = option("auto", "whether the embeddings are normalised", choices=("auto", "yes", "no"))
    inner_norms: str = option(
        "auto", "further norms behind attention and before the last matrix of the feed-forward block, as LTG-BERT's",
        choices=("auto", "yes", "no"),
    )  # fmt: skip
    segments: str = option(
        "none", "learned: a vector for each segment of a pair is added to its tokens", choices=("none", "learned")
    )
    layers: int = option(12, "number of layers", 1, 1000, fairseq="encoder_layers", hugging_face="num_hidden_layers")
    width: int = option(768, "model width", 1, 2**17, fairseq="encoder_embed_dim", hugging_face="hidden_size")
    ffn: int = option(
        3072, "width inside the feed-forward block", 1, 2**20, fairseq="encoder_ffn_embed_dim",
        hugging_face="intermediate_size",
    )  # fmt: skip
    heads: int = option(
        12, "attention heads", 1, 4096, fairseq="encoder_attention_heads", hugging_face="num_attention_heads"
    )
    # Free, because fine-tuning takes it from the checkpoint and ignores its recipe.
    max_positions: int = option(
        512, "longest sequence in training, [CLS] included", 1, 10**6, free=True, hugging_face="max_position_embeddings"
    )
    places: str = option(
        "consecutive", "which of the max_positions positions a block takes in training; random: a sorted subset; "
        "shifted: consecutive from a random one on; for these two a block must be shorter",
        choices=("consecutive", "random", "shifted"), free=True, hugging_face="",
    )  # fmt: skip
    dropout: float = option(
        0.1, "dropout after embeddings, attention and feed-forward", 0.0, 0.99, free=True,
        hugging_face="hidden_dropout_prob",
    )  # fmt: skip
    attention_dropout: float = option(
        0.1, "dropout of attention probabilities", 0.0, 0.99, free=True, hugging_face="attention_probs_dropout_prob"
    )
    activation_dropout: float = option(0.0, "dropout after the activation", 0.0, 0.99, free=True)
    pooler_dropout: float = option(
        0.1, "dropout inside classification heads", 0.0, 0.99, free=True, hugging_face="classifier_dropout"
    )
    layer_norm_eps: float = option(1e-5, "epsilon of every norm (Google's BERT: 1e-12)", 1e-15, 1.0)
    attention: str = option(
        "auto", "how attention is computed; auto: the fastest way here, which is logged",
        choices=("auto", "plain", "blocked", "sdpa", "triton"),
        free=True, hugging_face="",
    )  # fmt: skip
    checkpoint_activations: bool = option(
        False, "save memory: compute the inside of layers again in the backward pass", free=True, hugging_face=""
    )

    def __post_init__(self) -> None:
        from .positions import canonical  # needs torch

        if isinstance(self.position, str):
            self.position = canonical(self.position)
            self.cls = cls_beside(self.position) if self.cls == "auto" else self.cls
        for f in fields(self):
            value, choices = getattr(self, f.name), f.metadata["choices"]
            if choices and value not in choices:
                raise ValueError(f"unknown {f.name} {value!r}; valid: {', '.join(choices)}")
            kind: Any = f.type  # no string: annotations here are evaluated
            if not isinstance(value, (int, float) if kind is float else kind):
                raise ValueError(f"{f.name}={value!r}; valid: {kind.__name__}")
            least, greatest = f.metadata["least"], f.metadata["greatest"]
            if least is not None and not least <= value <= greatest:
                raise ValueError(f"{f.name}={value}; valid: {least:g} to {greatest:g}")

    def resolve(self, name: str) -> str:
        """The value of a block's option; where it is auto, the value of the block's paper."""
        word = getattr(self, name)
        return BLOCK_DEFAULTS[self.block][name] if word == "auto" else word

    def unlike_bert(self) -> dict[str, str]:
        """The options of the block that differ from BERT's."""
        berts = BLOCK_DEFAULTS["transformer"]
        return {name: self.resolve(name) for name, word in berts.items() if self.resolve(name) != word}


def check_blocks(length: int, positions: int, places: str) -> None:
    """Raise ValueError if a model with so many positions cannot be trained on blocks of so many tokens."""
    if length > positions:
        raise ValueError(f"sequences of {length} tokens: the model has {positions} positions")
    if length == positions and places != "consecutive":
        raise ValueError(f"places={places} draws among max_positions={positions}: blocks have to be shorter")


def names_in(host: str) -> dict[str, str]:
    """{option of `ModelConfig`: its name in the host}; host: "fairseq" or "hugging_face"."""
    names = {f.name: f.metadata[host] for f in fields(ModelConfig)}
    return {ours: ours if theirs is None else theirs for ours, theirs in names.items() if theirs != ""}


FREE = {f.name for f in fields(ModelConfig) if f.metadata["free"]}  # what fine-tuning may change
