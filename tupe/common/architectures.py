"""The named architectures: what `--arch` and `model._name` know. A name of `OTHER_BLOCKS` has the sizes of its authors,
where they have such."""

from dataclasses import asdict

from ..model_config import FREE, ModelConfig
from ..names import ARCHITECTURES, ELECTRA, OTHER_BLOCKS, SIZES, cls_beside, did_you_mean, split_size

OWN_SIZES = {  # of their authors
    "modernbert": (22, 768, 12, 1152),
    "modernbert_large": (28, 1024, 16, 2624),
    "neobert": (28, 768, 12, 2048),
    "ltg_bert_small": (12, 384, 6, 1024),
}


def preset(architecture: str) -> dict:
    """{option of `ModelConfig`: value} that a name stands for. [CLS] is "auto" where it is untied, so that another
    position may replace the name's. Raises ValueError for an unknown one."""
    (name, size), known = split_size(architecture), {**ARCHITECTURES, **OTHER_BLOCKS, **ELECTRA}
    if name not in known:
        sizes = ", ".join(f"_{size}" for size in SIZES if size != "base")
        near = did_you_mean(architecture, names()) or f"; valid: {', '.join(known)}, and with {sizes}"
        raise ValueError(f"unknown architecture {architecture!r}{near}")
    layers, width, heads, ffn = OWN_SIZES.get(architecture, SIZES[size])
    if name not in OTHER_BLOCKS:
        position, cls = known[name]
        own = {"position": position, "cls": "auto" if cls == "untied" else cls}
    else:
        own = {"cls": "tied", **OTHER_BLOCKS[name]}
        layers *= 2 if name == "gau" else 1
        if own["block"] == "modern" and architecture not in OWN_SIZES:
            ffn = 8 * round(ffn / 12)  # two thirds: a GLU has three matrices in place of two
    return {**own, "layers": layers, "width": width, "heads": heads, "ffn": ffn}


def named(architecture: str, position: str, cls: str) -> str:
    """The name of an architecture whose position was replaced. One with [CLS] untied that is tied beside the new
    position is that architecture no more: "tupe_r" with ALiBi is "bert_a" with ALiBi, which differs in nothing else."""
    name, size = split_size(architecture)
    family = next((table for table in (ARCHITECTURES, ELECTRA) if name in table), {})
    if name not in family or (family[name][1], cls, cls_beside(position)) != ("untied", "tied", "tied"):
        return architecture
    of_position = {position: other for other, (position, cls) in family.items() if cls == "tied"}
    return with_size(of_position.get(position, next(iter(family))), size)


def names() -> list[str]:
    """All architectures in all sizes."""
    return [with_size(name, size) for name in (*ARCHITECTURES, *OTHER_BLOCKS, *ELECTRA) for size in SIZES]


def with_size(name: str, size: str) -> str:
    """("tupe_r", "mini") -> "tupe_r_mini"; base has no suffix."""
    return name if size == "base" else f"{name}_{size}"


def plain_options(architecture: str) -> dict:
    """{option of `ModelConfig`: value} of an architecture as its name says."""
    return vars(ModelConfig(**preset(architecture)))


def architecture_of(model: ModelConfig) -> str:
    """The name of the architecture that differs from a model in the fewest options that define it, of its very size or
    else base."""

    def differing(name):
        other, sizes = plain_options(name), {"layers", "width", "heads", "ffn"}
        wrong = {option for option, value in asdict(model).items() if option not in FREE and value != other[option]}
        return len(wrong - sizes), bool(wrong & sizes)

    return min((with_size(name, size) for name in (*ARCHITECTURES, *OTHER_BLOCKS) for size in SIZES), key=differing)
