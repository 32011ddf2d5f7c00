"""Position encodings side by side: pre-train each alike, one table. OUT/presets and OUT/positions hold the runs."""

import itertools
import re
import shlex
import statistics
from dataclasses import replace
from pathlib import Path

import click
import yaml

from ..common import options
from ..common.architectures import preset as preset_of
from ..common.architectures import split_size, with_size
from ..common.options import CONFIGS, ListOf, did_you_mean
from ..common.tables import TextTable
from ..data.splits import folders_of, read_symbols
from ..encoder import Encoder, ModelConfig
from ..run import record
from ..run.folder import write_atomically
from . import runner
from .grid import Sweep, options_in
from .scores import interval_of

EXIT = 0.5  # bits below a model without positions: what has left the plateau is lower (docs/concepts.md)
ARCHITECTURE = "bert_a"  # of what is given as a position: nothing but the position differs from BERT


def buildable(position: str) -> str:
    """The canonical name of a position. Raises ValueError for one that BERT cannot be built with."""
    model = ModelConfig(**{**preset_of(ARCHITECTURE), "position": position})
    Encoder.check(model)
    return model.position


def plan_pretraining(
    data: Path, output: Path, presets: list[str], positions: list[str], size: str, recipe: str, common: list[str],
    seeds: list[int] | None = None,
) -> list:  # fmt: skip
    """Sweeps that pre-train every preset, and BERT with every position, alike. seeds: of each; None: the recipe's one.
    Raises ValueError for what is not known."""
    given = options_in(common).keys()
    if "--arch" in given:
        raise ValueError("--arch is set by this command: a --position replaces BERT's, a preset says its architecture")
    if given & {"--disable-validation", "dataset.disable_validation"}:
        raise ValueError("--disable-validation: the table is of validation losses; leave it out")
    valid = sorted(path.stem for path in (CONFIGS / "model").glob("*.yaml"))
    for preset in presets:
        if preset not in valid:
            raise ValueError(f"unknown preset {preset!r}{did_you_mean(preset, valid)}")

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


def losses_table(states: dict[runner.Job, str]) -> TextTable:
    """Final validation losses, means over seeds, the best first, and differences, paired by seed, from the encoding
    that is planned first, of those that have a finished run. A run whose loss is not `EXIT` below that of `nopos` is
    still on the plateau; "?" without `nopos`. states: of all jobs, in the order of the plan."""
    losses, units = {}, set()
    for job, state in states.items():
        values = losses.setdefault(re.sub(r"_seed\d+$", "", str(job)), {})
        if state == "finished":
            run = record.read(job.folder)
            values[run.seed] = run.of_first_split()[-1]["loss"]
            units.add(run.loss_unit)
    losses = {name: values for name, values in losses.items() if values}
    means = {name: statistics.mean(values.values()) for name, values in losses.items()}
    blind = [mean for name, mean in means.items() if Path(name).name == "nopos"]
    first = next(iter(losses), "")
    rows = []
    for name in sorted(means, key=means.__getitem__):
        values = losses[name].values()
        deviation = f"{statistics.stdev(values):.2f}" if len(values) > 1 else "?"
        difference, interval = interval_of(losses[name], losses[first])
        compares = len(units) == 1 and name != first and losses[name].keys() & losses[first].keys()
        minus = [f"{difference:+.2f}", interval] if compares else ["", ""]
        staying = sum(value > blind[0] - EXIT for value in values) if blind and len(units) == 1 else "?"
        rows.append([name, f"{means[name]:.3f}", deviation, *minus, str(len(values)), str(staying)])
    header = [
        "pre-training", f"validation loss, {' or '.join(sorted(units))}", "deviation", f"minus {Path(first).name}",
        "95 % (seeds)", "seeds", "on the plateau",
    ]  # fmt: skip
    return TextTable.plain(header, rows)


@click.command(cls=options.Command, context_settings={"ignore_unknown_options": True})
@options.data("The folder of the pre-training data.")
@options.output("The folder of all runs. An existing one is resumed.", shared=True)
@click.option("--presets", type=ListOf(), help="Files of configs/model.")
@click.option("--position", multiple=True, help="A position encoding by its name, in place of BERT's. Can be repeated.")
@options.size("tiny", help="The size of all models.")
@click.option("--recipe", type=options.OneOf(options.RECIPES), default="pretrain_small", show_default=True,
              help="The recipe (the paper's: pretrain).")  # fmt: skip
@click.option("--pretraining-seeds", type=ListOf(int), help="Seeds of the pre-training (default: the recipe's one).")
@click.option("--dry-run", is_flag=True, help="Print the commands of all jobs, and run none.")
@click.option("--retry-failed", is_flag=True, help="Run failed jobs again, as killed ones always are.")
@options.jobs()
@click.argument("common", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS AND OVERRIDES OF EVERY JOB]...")
def command(data, output, presets, position, size, recipe, pretraining_seeds, dry_run, retry_failed, jobs, common):
    """Pre-train position encodings alike, and write a table of their validation losses: OUTPUT/losses.md and .csv.

    tupe compare --data corpus-bin --output compare --position rope --position t5 --max-update 6000

    The table has the difference of each from the first, with a 95 % interval from three seeds on
    (--pretraining-seeds 1,2,3). With --position nopos, it says which runs are still on the plateau.
    """
    output = output.resolve()
    if not presets and not position:
        raise ValueError("nothing to compare: give --position NAME (as often as you like) or --presets A,B")
    for folder in folders_of(data):
        read_symbols(folder)
    common = [*common, *options.position_file()]
    sweeps = plan_pretraining(data, output, presets or [], list(position), size, recipe, common, pretraining_seeds)
    rows = itertools.zip_longest(*(sweep.jobs for sweep in sweeps))  # first jobs of all sweeps, then second ones
    planned = [replace(job, name=str(job.folder.relative_to(output))) for row in rows for job in row if job]
    if dry_run:
        click.echo("\n".join(shlex.join(map(str, job.command)) for job in planned))
        return
    slots = runner.slots(jobs)
    for sweep in sweeps:
        if not (sweep.output / "sweep.json").exists():
            runner.check(sweep.jobs[0], slots[0])
    for sweep in sweeps:
        sweep.save()
    states = runner.run(planned, slots, retry_failed, title="compare")
    table = losses_table(states)
    write_atomically(output / "losses.md", table.markdown())
    write_atomically(output / "losses.csv", table.csv())
    click.echo(table.markdown())
    runner.exit_if_unfinished(states, "compare")
