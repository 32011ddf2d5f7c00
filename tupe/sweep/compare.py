"""Position encodings side by side: pre-train each alike, fine-tune each, one report.

OUT/presets and OUT/positions hold the pre-training runs, OUT/glue/NAME a sweep of fine-tuning for each of them.
Everything is resumed by its records, and what is finished is left alone.
"""

import filecmp
import itertools
import shlex
import statistics
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path

import click
import yaml

from .. import config
from ..common import options
from ..common.architectures import preset as preset_of
from ..common.architectures import split_size, with_size
from ..common.options import CONFIGS, FOLDER, ListOf, did_you_mean
from ..common.tables import TextTable
from ..encoder import ModelConfig
from ..positions import Dims, Positions
from ..run import record
from ..run.folder import write_atomically
from . import runner
from .collection import collect
from .grid import Sweep, check_tasks, option_of, options_in
from .report import write_report

EXIT = 0.5  # bits below a model without positions: what has left the plateau is lower (docs/concepts.md)
ARCHITECTURE = "bert_a"  # of what is given as a position: nothing but the position differs from BERT


def buildable(position: str) -> str:
    """The canonical name of a position. Raises ValueError for one that BERT cannot be built with."""
    model = ModelConfig(**{**preset_of(ARCHITECTURE), "position": position})
    Positions(model.position, Dims(8, 8, 2, 1, 4, 4), model.cls)
    return model.position


def plan_pretraining(
    data: Path, output: Path, presets: list[str], positions: list[str], size: str, recipe: str, common: list[str],
    seeds: list[int] | None = None,
) -> list:  # fmt: skip
    """Sweeps that pre-train every preset, and BERT with every position, alike. seeds: of each; None: the recipe's one.
    Raises ValueError for what is not known."""
    if "--arch" in options_in(common):
        raise ValueError("--arch is set by this command: a --position replaces BERT's, a preset says its architecture")
    valid = sorted(path.stem for path in (CONFIGS / "model").glob("*.yaml"))
    for preset in presets:
        if preset not in valid:
            raise ValueError(f"unknown preset {preset!r}{did_you_mean(preset, valid)}")
    twice = sorted(set(presets) & set(positions))
    if twice:
        raise ValueError(f"{', '.join(twice)}: both a preset and a position; give one of them")

    def plan(kind, architecture, values):
        architecture = with_size(split_size(architecture)[0], size)
        folder, words = output / f"{kind}s" / architecture, [f"--data={data}", f"--arch={architecture}", *common]
        return Sweep.plan(recipe, folder, {kind: values, **({"seed": seeds} if seeds else {})}, words)

    names, by_architecture = [buildable(position) for position in positions], {}
    for preset in presets:
        architecture = yaml.safe_load((CONFIGS / "model" / f"{preset}.yaml").read_text(encoding="utf-8"))["_name"]
        by_architecture.setdefault(architecture, []).append(preset)
    sweeps = [plan("preset", architecture, values) for architecture, values in by_architecture.items()]
    return sweeps + ([plan("position", ARCHITECTURE, names)] if names else [])


def plan_fine_tuning(
    run: Path, output: Path, glue: Path, tasks: list[str], lrs: list[str], seeds: list[int], common: list[str]
) -> Sweep:
    """The sweep that fine-tunes the checkpoint of one pre-training. glue: folder of the tasks' data."""
    last = run / "checkpoint_last.pt"
    words = [f"--data={glue}", f"--checkpoint={last if last.is_file() else run}", *common]
    return Sweep.plan("finetune", output / "glue" / run.name, {"task": tasks, "lr": lrs, "seed": seeds}, words)


def first_fine_tuning(output: Path, glue: Path, tasks: list[str], common: list[str]) -> runner.Job:
    """A fine-tuning whose options can be checked before there is a checkpoint: in a dry run any file is one."""
    words = {"--task": tasks[0], "--data": glue, "--checkpoint": glue / "dict.txt", "--output": output}
    return runner.Job("fine-tuning", output, runner.tupe("finetune", {**words, **options_in(common)}))


def find_tasks(data: Path, glue: Path | None, tasks: list[str] | None) -> list[str]:
    """The tasks to fine-tune on. Raises ValueError unless all data is there, with one vocabulary.

    data: of the pre-training; glue: the folder of the tasks, or None; tasks: those to keep, or None for all.
    """
    for folder in (data, glue) if glue else (data,):
        if not (folder / "dict.txt").exists():
            raise ValueError(f"{folder / 'dict.txt'} not found: {folder} is not a folder of prepared data")
        if not filecmp.cmp(data / "dict.txt", folder / "dict.txt", shallow=False):
            raise ValueError(f"{folder} was prepared with another vocabulary than {data}: their dict.txt differ")
    if tasks and not glue:
        raise ValueError("--tasks needs --glue, a folder of prepared data")
    return check_tasks(glue, tasks) if glue else []


def losses_table(jobs: list[runner.Job]) -> TextTable:
    """Final validation losses, means over seeds, the best first. A run whose loss is not `EXIT` below that of `nopos`
    is still on the plateau; "?" without `nopos`."""
    losses, units = defaultdict(list), set()
    for job in jobs:
        run = record.read(job.folder)
        losses[str(job).removesuffix(f"_seed{run.seed}")].append(run.scores[-1]["loss"])
        units.add(run.loss_unit)
    blind = [statistics.mean(values) for name, values in losses.items() if Path(name).name == "nopos"]
    rows = []
    for name, values in sorted(losses.items(), key=lambda item: statistics.mean(item[1])):
        deviation = f"{statistics.stdev(values):.2f}" if len(values) > 1 else "?"
        staying = sum(value > blind[0] - EXIT for value in values) if blind and len(units) == 1 else "?"
        rows.append([name, f"{statistics.mean(values):.3f}", deviation, str(len(values)), str(staying)])
    header = ["pre-training", f"validation loss, {' or '.join(sorted(units))}", "deviation", "seeds", "on the plateau"]
    return TextTable.plain(header, rows)


def jobs_of(sweeps: list, output: Path) -> dict:
    """{job: its sweep}: first jobs of all sweeps, then second ones, and so on; named by their folders in `output`."""
    rows = itertools.zip_longest(*([(job, sweep) for job in sweep.jobs] for sweep in sweeps))
    pairs = [pair for row in rows for pair in row if pair]
    return {replace(job, name=str(job.folder.relative_to(output))): sweep for job, sweep in pairs}


@click.command(cls=options.Command, context_settings={"ignore_unknown_options": True})
@options.data("The folder of the pre-training data.")
@options.output("The folder of all runs. An existing one is resumed.", shared=True)
@click.option("--presets", type=ListOf(), help="Files of configs/model.")
@click.option("--position", multiple=True, help="A position encoding by its name, in place of BERT's. Can be repeated.")
@options.size("tiny", help="The size of all models.")
@click.option("--recipe", default="pretrain_small", show_default=True,
              help="The recipe of the pre-training (the paper's: pretrain).")  # fmt: skip
@click.option("--pretraining-seeds", type=ListOf(int), help="Seeds of the pre-training (default: the recipe's one).")
@click.option("--glue", type=FOLDER, help="The folder that `tupe prepare glue` wrote. Without it, GLUE is left out.")
@click.option("--tasks", type=ListOf(), help="Tasks of GLUE (default: all that are prepared).")
@click.option("--lrs", type=ListOf(), default="5e-5", show_default=True, help="Learning rates of fine-tuning.")
@click.option("--seeds", type=ListOf(int), default="1,2,3", show_default=True, help="Seeds of fine-tuning.")
@click.option("--finetune-options", default="", help='More options of every fine-tuning, for example "--max-epoch 3".')
@click.option("--dry-run", is_flag=True, help="Print the commands of the pre-trainings, and run none.")
@click.option("--retry-failed", is_flag=True, help="Run failed jobs again, as killed ones always are.")
@options.jobs()
@click.argument("common", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS AND OVERRIDES OF THE PRE-TRAINING]...")
def command(
    data, output, presets, position, size, recipe, pretraining_seeds, glue, tasks, lrs, seeds,
    finetune_options, dry_run, retry_failed, jobs, common,
):  # fmt: skip
    """Pre-train position encodings alike, fine-tune each on GLUE, and write OUTPUT/report.

    tupe compare --data corpus-bin --output compare --glue glue-bin --max-update 6000

    Without --glue it ends with a table of the validation losses, also in OUTPUT/losses.md and .csv. With --position
    nopos among the others, the table says which runs are still on the plateau.
    """
    output = output.resolve()
    if not presets and not position:
        raise ValueError("nothing to compare: give --position NAME (as often as you like) or --presets A,B")
    tasks, common = find_tasks(data, glue, tasks), [*common, *options.position_file()]
    sweeps = plan_pretraining(data, output, presets or [], list(position), size, recipe, common, pretraining_seeds)
    engine = ["--engine=torch"] * (options_in(common).get("--engine") in config.TORCH)
    fine_tuning = [*shlex.split(finetune_options), *engine, *options.position_file()]
    for name in options_in(fine_tuning):
        if option_of(name) in ("--task", "--lr", "--seed", "--data", "--checkpoint", "--output"):
            raise ValueError(f"--finetune-options: {name} is set by this command, see --tasks, --lrs and --seeds")
    new = [sweep for sweep in sweeps if not (sweep.output / "sweep.json").exists()]
    for sweep in new:
        runner.check(sweep.jobs[0])
    for name, values in {"lr": lrs, "seed": seeds}.items():
        for value in values:
            config.check(name, value)
    if new and tasks and not engine:  # a typo in these would show after the pre-training
        runner.check(first_fine_tuning(output, glue, tasks, fine_tuning))
    if dry_run:
        for job in jobs_of(sweeps, output):
            click.echo(shlex.join(map(str, job.command)))
        return
    for sweep in sweeps:
        sweep.save()
    run = partial(runner.run, slots=runner.slots(jobs), retry_failed=retry_failed, title="compare")
    states = run(list(jobs_of(sweeps, output)))

    finished = [job for job, state in states.items() if state == "finished"]
    if not tasks:
        table = losses_table(finished)
        write_atomically(output / "losses.md", table.markdown())
        write_atomically(output / "losses.csv", table.csv())
        click.echo(table.markdown())
    sweeps = [plan_fine_tuning(job.folder, output, glue, tasks, lrs, seeds, fine_tuning) for job in finished if tasks]
    for sweep in sweeps:
        sweep.save()
    if sweeps:
        sweep_of = jobs_of(sweeps, output)
        states |= run(list(sweep_of), on_done=lambda job, state: sweep_of[job].keep_best_checkpoint(job, state))
        write_report(collect([output]), output / "report")
    runner.exit_if_unfinished(states, "compare")
