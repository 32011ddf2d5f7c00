"""The named architectures: what `--arch` and `model._name` know. NAME is BERT-Base in size; NAME_large, NAME_small,
NAME_mini and NAME_tiny are the others. A name of `OTHER_BLOCKS` has the sizes of its authors, where they have such."""

ARCHITECTURES = {  # masked language models -> (position, cls), see `tupe.positions.Positions`
    "bert_a": ("absolute", "tied"),
    "bert_r": ("absolute+t5", "tied"),
    "bert_a_d": ("absolute_d", "tied"),
    "tupe_a_tie_cls": ("untied", "tied"),
    "tupe_a": ("untied", "untied"),
    "tupe_r": ("untied+t5", "untied"),
}
ELECTRA = {  # replaced-token detection
    "electra_a": ("absolute", "tied"),
    "electra_r": ("absolute+t5", "tied"),
    "electra_tupe_a": ("untied", "untied"),
    "electra_tupe_r": ("untied+t5", "untied"),
}
# Masked language models of other blocks than BERT's: the options that make the architecture, see `encoder.PARTS`.
OTHER_BLOCKS = {
    "gau": {"position": "rope", "block": "gau", "normaliser": "relu2"},  # two for each layer of the size: cost as much
    "modernbert": {"position": "rope:base:160000:local_base:10000+window", "block": "modern"},
    "neobert": {"position": "rope", "block": "modern", "norm": "rms", "activation": "swiglu", "embed_norm": "no"},
    "ltg_bert": {
        "position": "deberta_v2:buckets:32", "block": "modern", "norm": "layer_plain", "activation": "geglu_tanh",
        "linear_bias": "attention", "inner_norms": "yes", "layer_norm_eps": 1e-7,
    },
}  # fmt: skip
SIZES = {  # layers, width, heads, feed-forward width
    "base": (12, 768, 12, 3072),
    "large": (24, 1024, 16, 4096),
    "small": (8, 512, 8, 2048),
    "mini": (4, 256, 4, 1024),
    "tiny": (2, 128, 2, 512),
}
OWN_SIZES = {  # of their authors
    "modernbert": (22, 768, 12, 1152),
    "modernbert_large": (28, 1024, 16, 2624),
    "neobert": (28, 768, 12, 2048),
    "ltg_bert_small": (12, 384, 6, 1024),
}


def preset(architecture: str) -> dict:
    """{option of `ModelConfig`: value} that a name stands for. Raises ValueError for an unknown one."""
    (name, size), known = split_size(architecture), {**ARCHITECTURES, **OTHER_BLOCKS, **ELECTRA}
    if name not in known:
        sizes = ", ".join(f"_{size}" for size in SIZES if size != "base")
        raise ValueError(f"unknown architecture {architecture!r}; valid: {', '.join(known)}, and with {sizes}")
    layers, width, heads, ffn = OWN_SIZES.get(architecture, SIZES[size])
    if name not in OTHER_BLOCKS:
        own = dict(zip(("position", "cls"), known[name], strict=True))
    else:
        own = {"cls": "tied", **OTHER_BLOCKS[name]}
        layers *= 2 if name == "gau" else 1
        if own["block"] == "modern" and architecture not in OWN_SIZES:
            ffn = 8 * round(ffn / 12)  # two thirds: a GLU has three matrices in place of two
    return {**own, "layers": layers, "width": width, "heads": heads, "ffn": ffn}


def with_size(name: str, size: str) -> str:
    """("tupe_r", "mini") -> "tupe_r_mini"; base has no suffix."""
    return name if size == "base" else f"{name}_{size}"


def split_size(architecture: str) -> tuple[str, str]:
    """The inverse of `with_size`: "tupe_r_mini" -> ("tupe_r", "mini")."""
    name, _, size = architecture.rpartition("_")
    return (name, size) if size in SIZES and size != "base" else (architecture, "base")
