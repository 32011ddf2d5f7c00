"""What a run's record says of the model that a fine-tuning starts from."""

from pathlib import Path

from ..checkpoints.trained import updates_of
from ..common import record


def of_checkpoint(checkpoint: str) -> dict:
    """What a run's record says of the file or folder that it starts from."""
    path = Path(checkpoint)
    weights = [path]
    if path.is_dir():
        weights = [file for file in sorted(path.iterdir()) if file.suffix in (".safetensors", ".bin")]
    return {
        "pretrained": str(path.resolve()), "pretrained_updates": updates_of(path),
        "pretrained_weights": record.fingerprint(weights),
    }  # fmt: skip
