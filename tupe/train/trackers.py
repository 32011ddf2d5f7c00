"""Programs that show a training: TensorBoard, Weights & Biases."""

import importlib.util
from collections.abc import Callable

from .saved import TrainRun
from .settle import Settled


def trackers(
    recipe: Settled, run: TrainRun
) -> list[tuple[Callable[[dict[str, float], int], object], Callable[[], object]]]:
    """(to be called with what is logged after an update, to be called at the end) of each program that a run reports
    to."""
    found: list = []
    if recipe.tensorboard_logdir:
        from tensorboardX import SummaryWriter

        writer = SummaryWriter(recipe.tensorboard_logdir, flush_secs=10)
        found.append(
            (lambda values, update: [writer.add_scalar(*pair, update) for pair in values.items()], writer.close)
        )
    if recipe.wandb_project:
        import wandb  # type: ignore[import-not-found]

        wandb.init(project=recipe.wandb_project, dir=str(run.folder), config=run.record.config)
        found.append((lambda values, update: wandb.log(values, step=update), wandb.finish))
    return found


def check_trackers(recipe: Settled) -> None:
    """Raise ValueError for a program to report to that is not installed."""
    for option, name in (("wandb_project", "wandb"), ("tensorboard_logdir", "tensorboardX")):
        if getattr(recipe, option) and importlib.util.find_spec(name) is None:
            raise ValueError(f"--{option.replace('_', '-')} needs {name}: pip install {name}")
