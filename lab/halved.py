"""A control of the second protocol: `absolute+halved` is BERT-A whose word logits are divided by sqrt(2D), as TUPE's
are, while it has no second term."""

from tupe.positions import PositionScheme, register


@register("halved")
class Halved(PositionScheme):
    """Adds nothing; only the scale of the logits knows of it."""

    paper, formula = "(control)", "q . k / sqrt(2D)"
    extra_terms = 1
