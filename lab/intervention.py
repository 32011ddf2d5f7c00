"""The interventions of the third protocol (docs/third-protocol.md), which move the update at which a model leaves the
plateau: `delayed`, TUPE's positions switched on late; `trained`, BERT's position vectors from a trained model."""

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from tupe.positions import Dims, register
from tupe.schemes_absolute import Absolute
from tupe.schemes_bias import Untied
from tupe.schemes_common import Table, at_least
from tupe.token_positions import TokenPositions

TRAINED = Path(__file__).parents[1] / "models/bert_a_mini/model.safetensors"  # seed 101, after 5,000 updates


@register("delayed")
class Delayed(Untied):
    """`untied` whose logits, [CLS]'s among them, are multiplied by 0 before the update `until`, and by 1 after it.

    fairseq tells every module the number of updates made so far, after each of them and when a run is resumed. Where
    nobody has told: a model that trains is at its first update, any other is one to be evaluated, whose positions are
    on.
    """

    paper, formula = "(control)", "p_i U_Q . p_j U_K / sqrt(2D), from update `until` on"

    def __init__(self, dims: Dims, until: int = 0):
        super().__init__(dims)
        self.until, self.updates = at_least(0, until=until), None

    def set_num_updates(self, updates: int) -> None:
        self.updates = updates

    def switch(self) -> float:
        is_training = self.training or self.updates is not None
        return float(not is_training or (self.updates or 0) >= self.until)

    def bias(self, positions: TokenPositions, scale: float) -> Tensor:
        return self.switch() * super().bias(positions, scale)

    def cls_bias(self, scale: float) -> Tensor:
        return self.switch() * super().cls_bias(scale)


class TrainedTable(Table):
    def reset_parameters(self) -> None:
        with safe_open(TRAINED, "pt") as file, torch.no_grad():
            self.weight.copy_(file.get_tensor("tupe.encoder.positions.absolute.table.weight"))


@register("trained")
class Trained(Absolute):
    """`absolute` whose vectors start as those of the released BERT-A of the size mini; all other weights as usual."""

    paper, formula = "(control)", "w_i + p_i, p_i at first a trained model's"

    def __init__(self, dims: Dims):
        super().__init__(dims)
        self.table = TrainedTable(dims.max_positions, dims.width)
