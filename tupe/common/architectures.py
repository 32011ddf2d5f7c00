"""The named architectures: what `--arch` and `model._name` know. NAME is BERT-Base in size; NAME_large, NAME_small,
NAME_mini and NAME_tiny are the others."""

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
GAU = {  # masked language models of gated attention units, two for each layer of the size: they cost about the same
    "gau": ("rope", "tied"),
}
SIZES = {  # layers, width, heads, feed-forward width
    "base": (12, 768, 12, 3072),
    "large": (24, 1024, 16, 4096),
    "small": (8, 512, 8, 2048),
    "mini": (4, 256, 4, 1024),
    "tiny": (2, 128, 2, 512),
}


def preset(architecture: str) -> dict:
    """{option of `ModelConfig`: value} that a name stands for. Raises ValueError for an unknown one."""
    (name, size), known = split_size(architecture), {**ARCHITECTURES, **GAU, **ELECTRA}
    if name not in known:
        sizes = ", ".join(f"_{size}" for size in SIZES if size != "base")
        raise ValueError(f"unknown architecture {architecture!r}; valid: {', '.join(known)}, and with {sizes}")
    (position, cls), (layers, width, heads, ffn) = known[name], SIZES[size]
    gated = {"layers": 2 * layers, "layer": "gau", "normaliser": "relu2"} if name in GAU else {"layers": layers}
    return {"position": position, "cls": cls, **gated, "width": width, "heads": heads, "ffn": ffn}


def with_size(name: str, size: str) -> str:
    """("tupe_r", "mini") -> "tupe_r_mini"; base has no suffix."""
    return name if size == "base" else f"{name}_{size}"


def split_size(architecture: str) -> tuple[str, str]:
    """The inverse of `with_size`: "tupe_r_mini" -> ("tupe_r", "mini")."""
    name, _, size = architecture.rpartition("_")
    return (name, size) if size in SIZES and size != "base" else (architecture, "base")
