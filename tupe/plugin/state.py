"""The settings in a checkpoint's state dict. A model with others refuses it, even where all names and sizes agree."""

from torch import Tensor

from ..checkpoints.trained import describe, pack_settings, settings_of, unpack_settings
from ..encoder import Encoder, Stack


class StackWithSettings(Stack):
    """A stack whose state dict holds its settings too, under `_extra_state`."""

    stretched_from = None  # by `tupe checkpoint stretch`: a fact to keep, which contradicts nothing

    def settings(self) -> dict[str, str]:
        own = {"position": self.positions.name, "heads": str(self.positions.dims.heads)}
        settings = {**settings_of(self.config), **own}
        return settings if self.stretched_from is None else {**settings, "stretched_from": self.stretched_from}

    def get_extra_state(self) -> Tensor:
        return pack_settings(self.settings())

    def set_extra_state(self, state: Tensor) -> None:
        """Raises ValueError for the state of a model with other settings."""
        saved = unpack_settings(state)
        self.stretched_from = saved.get("stretched_from", self.stretched_from)
        own = self.settings()
        if saved != own:
            raise ValueError(f"the checkpoint was trained with {describe(saved)}; this model has {describe(own)}")


class EncoderWithSettings(StackWithSettings, Encoder):
    """The encoder of fairseq's models."""
