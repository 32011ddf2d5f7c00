"""The settings in a checkpoint's state dict. A model with others refuses it, even where all names and sizes agree."""

from torch import Tensor

from ..checkpoints.trained import check_settings, pack_settings, settings_of, unpack_settings
from ..encoder import Encoder, Stack


class StackWithSettings(Stack):
    """A stack whose state dict holds its settings too, under `_extra_state`."""

    def settings(self) -> dict[str, str]:
        own = {"position": self.positions.name, "heads": str(self.positions.dims.heads)}
        return {**settings_of(self.config), **own}

    def get_extra_state(self) -> Tensor:
        return pack_settings(self.settings())

    def set_extra_state(self, state: Tensor) -> None:
        """Raises ValueError for the state of a model with other settings."""
        check_settings(unpack_settings(state), self.settings())


class EncoderWithSettings(StackWithSettings, Encoder):
    """The encoder of fairseq's models."""
