"""The settings in a checkpoint's state dict. A model with others refuses it, even where all names and sizes agree."""

import torch
from torch import Tensor

from ..encoder import Encoder, Stack
from ..positions import format_value


def pack_settings(settings: dict[str, str]) -> Tensor:
    """As integers, which weights-only loading and checkpoint averaging accept."""
    return torch.tensor(list(describe(settings).encode()), dtype=torch.long)


def unpack_settings(state: Tensor) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in bytes(state.tolist()).decode().split(" "))


def describe(settings: dict[str, str]) -> str:
    return " ".join(f"{key}={value}" for key, value in settings.items())


class StackWithSettings(Stack):
    """A stack whose state dict holds its settings too, under `_extra_state`."""

    stretched_from = None  # by `tupe checkpoint stretch`: a fact to keep, which contradicts nothing

    def settings(self) -> dict[str, str]:
        config = self.config
        settings = {
            "position": self.positions.name, "cls": config.cls, "block": config.block, "normaliser": config.normaliser,
            "heads": str(self.positions.dims.heads), "layer_norm_eps": format_value(float(config.layer_norm_eps)),
        }  # fmt: skip
        settings |= config.unlike_bert()
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
