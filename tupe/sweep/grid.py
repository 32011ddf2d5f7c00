"""A sweep: one recipe with every combination of some values, each in a folder of its own.

The folder is a sweep's only memory. OUT/sweep.json says what belongs to it, and the records of the runs say what is
done; so a sweep can be killed, started again, extended, and started twice at the same time.
"""

import itertools
import json
import os
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import click

from .. import config
from ..common import options
from ..common.options import split_files, task_key
from ..common.prepared import tasks_in
from ..run.folder import locked, write_atomically
from ..run.record import another
from . import runner
from .collection import collect
from .report import write_report
from .runner import Job

PAPER = {"lr": ["2e-05", "3e-05", "4e-05", "5e-05"], "seed": ["1", "2", "3", "4", "5"]}  # its search, for every task
# Made absolute: a sweep goes on from another working directory.
FILES = ("--data", "--checkpoint", "--finetune-from-model", "--position-file", "--tensorboard-logdir")


@dataclass(frozen=True)
class Sweep:
    """recipe: name of a file in configs/, such as finetune. grid: {option of its command, or Hydra override with a dot:
    values}, all as text. common: {option or override: value} of every job, see `options_in`."""

    recipe: str
    output: Path
    grid: dict
    common: dict

    @classmethod
    def plan(cls, recipe: str, output: Path, grid: dict, common: Iterable[str] = ()) -> "Sweep":
        """A sweep from a user's options. grid: {name: list of values}, common: words of a command line.

        Fine-tuning defaults to the paper's search on every prepared task. Raises ValueError for a task without
        data and for options that the sweep decides itself.
        """
        common = options_in(common)
        grid = {_option(name): [_canonical(value) for value in values] for name, values in grid.items()}
        grid |= {name: [_absolute(name, value) for value in grid[name]] for name in FILES if name in grid}
        if recipe == "finetune":
            grid = _with_paper_search(grid, common)
        if not grid:
            raise ValueError("no --grid: give at least one, such as --grid seed=1,2,3")
        in_grid = [option_of(name) for name in grid]
        for name in (*common, *grid):
            if option_of(name) in ("--output", "--save-dir") or (name in common and option_of(name) in in_grid):
                raise ValueError(f"{name} is set by the sweep; remove it from the options of every job")
        if len(set(in_grid)) < len(in_grid):
            raise ValueError(f"--grid {', '.join(grid)}: give each option once")
        for name, values in grid.items():
            for value in values:
                config.check(name, value)
        names = sorted(grid, key=lambda name: (name != "--task", name == "--seed", name))
        grid = {name: grid[name] for name in names}  # folders have the same names whatever the order of the options
        sweep = cls(recipe, Path(output).resolve(), grid, common)
        sweep._refuse_shared_folders()
        return sweep

    @classmethod
    def read(cls, folder: Path) -> "Sweep | None":
        """The sweep that a folder holds, None if it holds none. Raises ValueError for a damaged sweep.json."""
        path = Path(folder) / "sweep.json"
        try:
            return cls(output=Path(folder), **json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} does not describe a sweep ({error})") from None

    def _refuse_shared_folders(self):
        folders = [job.folder for job in self.jobs]
        if len(set(folders)) < len(folders):
            raise ValueError(
                f"two jobs would share a folder of {self.output}, named by the last two parts of a path; give every "
                "value of the grid once, and files in folders of other names"
            )

    @property
    def jobs(self) -> list:
        """All jobs, seed by seed: a sweep that is cut short has fewer seeds, not fewer tasks."""
        names = sorted(self.grid, key="--seed".__ne__)  # stable
        combinations = itertools.product(*(self.grid[name] for name in names))
        return [self._job(dict(zip(names, values, strict=True))) for values in combinations]

    @property
    def samples(self) -> list:
        """The fewest jobs that together have every value of the grid which only their command can check: `plan` knows
        numbers, and tasks with their data."""
        known = [name for name in self.grid if config.is_number(name) or name == "--task" and "--data" in self.common]
        values = {name: values[:1] if name in known else values for name, values in self.grid.items()}
        count = max(map(len, values.values()))
        return [self._job({name: some[n % len(some)] for name, some in values.items()}) for n in range(count)]

    def _job(self, values):
        values = {name: values[name] for name in self.grid}
        labels = [_label(name, value) for name, value in values.items() if name != "--task"]
        folder = self.output / values.get("--task", "") / ("_".join(labels) or "run")
        command = self.recipe.split("_")[0]
        words = {**values, "--output": folder, **self.common}
        for name, logs in self.common.items():
            if option_of(name) == "--tensorboard-logdir":  # else all jobs would be one curve
                words[name] = Path(logs) / folder.relative_to(self.output)
        if command != self.recipe:
            words["--recipe"] = self.recipe
        if command == "finetune":  # its scores are what counts
            words["--no-save"] = None
        return Job(str(folder.relative_to(self.output)), folder, runner.tupe(command, words))

    def save(self) -> None:
        """Write sweep.json, together with what it says already.

        Raises ValueError if that is the sweep of another recipe, other options or other names in the grid.
        """
        self.output.mkdir(parents=True, exist_ok=True)
        with locked(self.output / "sweep.lock"):
            grid, earlier = self.grid, Sweep.read(self.output)
            if earlier:
                self._refuse_another(earlier)
                grid = {name: list(dict.fromkeys(earlier.grid[name] + grid[name])) for name in earlier.grid}
                replace(self, grid=grid)._refuse_shared_folders()
            content = {"recipe": self.recipe, "grid": grid, "common": self.common}
            write_atomically(self.output / "sweep.json", json.dumps(content, indent=1, allow_nan=False) + "\n")

    def _refuse_another(self, earlier):
        def settings(sweep):
            switched = {name: "given" if value is None else value for name, value in sweep.common.items()}
            return {"recipe": sweep.recipe, "grid over": " ".join(sweep.grid), **switched}

        there, here = settings(earlier), settings(self)
        pairs = {name: (there.get(name), here.get(name)) for name in {**there, **here}}
        if different := {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}:
            raise ValueError(another(self.output, different))


# ---------------------------------------------------------------------------------------------------- words and values


def options_in(words: Iterable[str]) -> dict:
    """Words of a command line -> {"--name": value, "section.key": value}; a switch has the value None. Raises
    ValueError for a file that is not named."""
    pairs = dict(config.split_words(words))
    if nameless := [name for name in FILES if name in pairs and not pairs[name]]:
        raise ValueError(f"{nameless[0]} needs a path behind it")
    return {name: _absolute(name, value) if name in FILES else value for name, value in pairs.items()}


def _absolute(name, value):
    paths = split_files(value) if name in ("--data", "--position-file") else [value]
    return os.pathsep.join(str(Path(path).resolve()) for path in paths)


def parse_grid(texts: Iterable[str]) -> dict:
    """["lr=2e-5,3e-5", "seed=1,2"] -> {"lr": ["2e-5", "3e-5"], "seed": ["1", "2"]}; commas in brackets do not split."""
    grid = {}
    for text in texts:
        name, _, values = text.partition("=")
        values = [value for value in re.split(r",(?![^\[(]*[\])])", values) if value]
        if not name or not values or name in grid:
            raise ValueError(f"--grid {text}: give each name once, with its values: --grid lr=2e-5,3e-5")
        grid[name] = values
    return grid


def _option(name):
    """A name of the grid as it stands on a command line: "max_epoch" -> "--max-epoch", "model.dropout" as it is."""
    return name if "." in name else config.flag(name.lstrip("-"))


def option_of(name: str) -> str:
    """The option that a name stands for: "--lr" also for the override "optimization.lr"."""
    return config.flag(name.rpartition(".")[2]) if "." in name else name


def _canonical(value):
    """One spelling for one value: "2e-5" and "0.00002" -> "2e-05"."""
    value = str(value)
    for number in (int, float):
        try:
            return str(number(value))
        except ValueError:
            continue
    return value


def _label(name, value):
    """What a value contributes to a folder's name: "lr2e-05" for a number, a word itself, the end of a path."""
    is_word = re.match(r"[A-Za-z/]", value) and value not in ("True", "False", "true", "false", "nan", "inf")
    short = "" if is_word else name.lstrip("-").rpartition(".")[2]
    return short + re.sub(r"[^\w.+:=-]+", "-", "-".join(part for part in Path(value).parts[-2:] if part != "/"))


def _prepared(folder, tasks):
    """These tasks, in any spelling ("cola"), as a folder of data calls them; all that it has if tasks is None. Raises
    ValueError for a folder without data and for a task that it does not have."""
    prepared = tasks_in(folder)
    if not prepared:
        raise ValueError(f"{folder} holds no prepared task; `tupe prepare glue` makes one")
    spellings = {task_key(name): name for name in prepared}
    if missing := [task for task in tasks or () if task_key(task) not in spellings]:
        raise ValueError(f"{folder} holds no data for {', '.join(missing)}; prepared: {', '.join(prepared)}")
    return [spellings[task_key(task)] for task in tasks or prepared]


def _with_paper_search(grid, common):
    if "--data" in common and "--task" not in common:
        data = common["--data"]
        grid = {**grid, "--task": _prepared(data, grid.get("--task"))}
    given = {option_of(name) for name in (*grid, *common)}
    return {**{f"--{name}": values for name, values in PAPER.items() if f"--{name}" not in given}, **grid}


# -------------------------------------------------------------------------------------------------------- the command


@click.command(cls=options.Command, context_settings={"ignore_unknown_options": True})
@click.option("--recipe", type=options.OneOf(options.RECIPES), default="finetune", show_default=True,
              help="The recipe: a file of configs/.")  # fmt: skip
@options.output("The folder of the sweep. An existing one is resumed, and a wider grid extends it.", shared=True)
@click.option(
    "--grid", multiple=True, metavar="NAME=A,B,...",
    help="An option (task, lr, seed, preset, max-epoch ...) or a value of the recipe (model.dropout), and what it "
    "takes. Can be repeated. Fine-tuning's defaults: all prepared tasks, the paper's lr 2e-5 to 5e-5, and its "
    "seeds 1 to 5.",
)  # fmt: skip
@click.option("--retry-failed", is_flag=True, help="Run failed jobs again, as killed ones always are.")
@options.jobs()
@click.option("--report", is_flag=True, help="Write OUTPUT/report at the end.")
@click.option("--dry-run", is_flag=True, help="Print the commands of all jobs, and run none.")
@click.argument("common", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS AND OVERRIDES OF EVERY JOB]...")
def command(recipe, output, grid, retry_failed, jobs, report, dry_run, common):
    """Run a recipe with every combination of the values of --grid, each in a process of its own.

    tupe sweep --recipe finetune --data glue-bin --checkpoint checkpoint_last.pt --output sweep --grid task=CoLA,RTE
    """
    if report and recipe != config.FINETUNE:
        raise ValueError(f"--report is of fine-tunings, and --recipe {recipe} pre-trains; leave it out")
    sweep = Sweep.plan(recipe, output, parse_grid(grid), [*common, *options.position_file()])
    if dry_run:
        click.echo("\n".join(shlex.join(map(str, job.command)) for job in sweep.jobs))
        return
    slots = runner.slots(jobs)
    known = earlier.grid if (earlier := Sweep.read(sweep.output)) else {}
    if any(set(values) - set(known.get(name, ())) for name, values in sweep.grid.items()):
        for job in sweep.samples:
            runner.check(job, slots[0])
    sweep.save()
    states = runner.run(sweep.jobs, slots, retry_failed)
    if report and {"finished", "failed"}.intersection(states.values()):
        write_report(collect([sweep.output]), sweep.output / "report")
    runner.exit_if_unfinished(states, "sweep")
