"""Programs that show a training: TensorBoard, Weights & Biases."""

import importlib.util

from .run import TrainRun
from .settle import Settled


class TensorBoard:
    def __init__(self, folder: str):
        from tensorboardX import SummaryWriter

        self.writer = SummaryWriter(folder)

    def log(self, values: dict[str, float], update: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, update)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    def __init__(self, project: str, run: TrainRun):
        import wandb  # type: ignore[import-not-found]

        self.wandb = wandb
        wandb.init(project=project, dir=str(run.folder), config=run.record.config)

    def log(self, values: dict[str, float], update: int) -> None:
        self.wandb.log(values, step=update)

    def close(self) -> None:
        self.wandb.finish()


def trackers(recipe: Settled, run: TrainRun) -> list:
    """The programs that a run reports to. Raises ValueError for one that is not installed."""
    found: list = []
    if folder := recipe["tensorboard_logdir"]:
        found.append(TensorBoard(folder))
    if project := recipe["wandb_project"]:
        found.append(WeightsAndBiases(project, run))
    return found


def check_trackers(recipe: Settled) -> None:
    """Raise ValueError for a program to report to that is not installed."""
    for option, name in (("wandb_project", "wandb"), ("tensorboard_logdir", "tensorboardX")):
        if recipe[option] and importlib.util.find_spec(name) is None:
            raise ValueError(f"--{option.replace('_', '-')} needs {name}: pip install {name}")
