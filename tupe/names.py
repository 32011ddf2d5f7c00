"""The names that people type for models: architectures and schemes of positions. Imports only the standard
library.

NAME is BERT-Base in size; NAME_large, NAME_small, NAME_mini and NAME_tiny are the others.
"""

import difflib
from collections.abc import Iterable

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
# Masked language models of other blocks than BERT's: the options that make the architecture. The block's own options
# are `model_config.BLOCK_DEFAULTS`.
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


def split_size(architecture: str) -> tuple[str, str]:
    """The inverse of `with_size`: "tupe_r_mini" -> ("tupe_r", "mini")."""
    name, _, size = architecture.rpartition("_")
    return (name, size) if size in SIZES and size != "base" else (architecture, "base")


def schemes_in(position: str) -> list[str]:
    """The names of the schemes of a position, without their options."""
    return [text.partition(":")[0] for text in position.split("+")]


def cls_beside(position: str, cls: str = "untied") -> str:
    """How [CLS] is treated where a position is given, but not a treatment of [CLS]. Beside TUPE's untied positions it
    is treated as the architecture or the model does, `cls`; beside any other position it is tied."""
    return cls if "untied" in schemes_in(position) else "tied"


def did_you_mean(word: str, valid: Iterable[str], preferred: Iterable[str] = ()) -> str:
    """ "; did you mean 'x'?", or the valid words if none is similar and they are few. A preferred word that is a letter
    or two away comes before all others. Capitals make no difference."""
    valid = list(valid)
    for words, cutoff in ((preferred, 0.75), (valid, 0.5)):
        spellings = {name.lower(): name for name in words}
        if near := difflib.get_close_matches(word.lower(), spellings, 1, cutoff):
            return f"; did you mean {spellings[near[0]]!r}?"
    return f"; valid: {', '.join(valid)}" if len(valid) <= 30 else ""


def unknown_scheme(name: str, position: str, valid: Iterable[str]) -> str:
    """The error message for a name in a position that is not a scheme's."""
    arch = name.lower().replace("-", "_")
    stem, _ = split_size(arch)
    if stem in {**ARCHITECTURES, **OTHER_BLOCKS, **ELECTRA}:
        scheme, cls = ARCHITECTURES.get(stem, ("", ""))
        instead = f", or --position {scheme}" if scheme else ""
        if scheme and cls == "untied":
            instead += " --cls untied"
        return f"position={position:.100}: {name:.60} is an architecture; give --arch {arch}{instead}"
    valid = sorted(valid)
    near = did_you_mean(name, valid) or f"; valid, joined by '+': {', '.join(valid)}"
    own = "one of your own needs @register(NAME) above its class, and --position-file FILE (in Python: import FILE)"
    return f"unknown position scheme {name!r:.60} in {position!r:.100}{near}; {own}"
