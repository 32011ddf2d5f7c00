"""What the second engine asks of the folder that a fine-tuning starts from."""

from pathlib import Path

from ..common import record
from ..common.safe_load import read_config
from ..data.splits import read_symbols


def check_vocabulary(checkpoint: str, data: Path) -> None:
    """Raise ValueError unless the data of a task was prepared with the model's dictionary."""
    ours, theirs = map(read_symbols, (data, checkpoint))
    if (types := read_config(Path(checkpoint, "config.json"))["vocab_size"]) != len(theirs):
        raise ValueError(f"{checkpoint}/dict.txt makes {len(theirs)} types, the model has {types}: another model's")
    if ours != theirs:
        raise ValueError(f"{data} was prepared with another vocabulary than {checkpoint}: their dict.txt differ")


def of_checkpoint(folder: str) -> dict:
    """What a run's record says of the folder that it starts from."""
    weights = [path for path in sorted(Path(folder).iterdir()) if path.suffix in (".safetensors", ".bin")]
    if not weights:
        raise ValueError(f"{folder} holds no model: it has no model.safetensors")
    return {
        "pretrained": str(Path(folder).resolve()), "pretrained_updates": record.updates_of(folder),
        "pretrained_weights": record.fingerprint(weights),
    }  # fmt: skip
