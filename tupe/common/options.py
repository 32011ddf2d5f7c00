"""What the commands of `tupe` have in common: names of options, lists, and errors that fit on a screen. Needs only
click.

A module that offers a command defines it with `@click.command(cls=Command)`;
`tupe/cli/__init__.py` names it in its table.
"""

import logging
import os
import re
import reprlib
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any

import click

from ..names import SIZES, did_you_mean
from ..run.folder import FULL, owned
from ..run.record import BUSY, REFUSED
from ..run.stop import handled

CONFIGS = Path(__file__).parents[1] / "configs"  # the recipes, from a checkout as from an installed wheel
RECIPES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))


class NamedPath(click.Path):
    """A path that is not empty, as that of a variable which is not set: it would be this folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("is empty", param, ctx)
        return super().convert(value, param, ctx)


FOLDER = NamedPath(path_type=Path, file_okay=False)
FILE = NamedPath(path_type=Path, dir_okay=False)


class Command(click.Command):
    """A command whose ValueErrors and OSErrors are the user's: one line, exit status 2. BlockingIOError says that
    another process writes its --output: exit status `record.BUSY`."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.params.append(own_files(hidden=True))  # behind the command's name, as before it

    def begin(self, ctx: click.Context) -> None:
        """What comes before the command's own function, and whose errors are the command's: the files of
        `tupe --position-file FILE ... COMMAND` are run."""
        run_own_files()

    def writing(self, ctx: click.Context) -> AbstractContextManager[None]:
        """Inside, no other command writes the same --output."""
        paths = [ctx.params[each.name] for each in self.params if each.name == "output"]
        shared = any(isinstance(each, SharedOutput) for each in self.params)
        return owned(paths[0]) if any(paths) and not shared else nullcontext()

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with ended_by_signals(), self.writing(ctx):
                self.begin(ctx)
                return super().invoke(ctx)
        except BrokenPipeError:  # `tupe list models | head`: click ends quietly
            raise
        except KeyboardInterrupt:  # click would end with status 1
            raise Refusal(f"{ctx.command_path}: interrupted", 128 + signal.SIGINT) from None
        except BlockingIOError as error:
            raise Refusal(f"{ctx.command_path}: {error}", BUSY) from error
        except ModuleNotFoundError as error:
            if error.name is None:  # ours, which says what to install
                raise Refusal(f"{ctx.command_path}: {error}") from error
            if package_of(error) in ("tupe", "lab"):
                raise
            raise needs(ctx.command_path, error, [option.name for option in self.params]) from error
        except (ValueError, OSError) as error:
            full = isinstance(error, OSError) and error.errno in FULL
            what = f"{error.filename or 'a file'} cannot be written: the disk is full" if full else str(error)
            raise Refusal(f"{ctx.command_path}: {' '.join(what.splitlines())}") from error


def package_of(error: ModuleNotFoundError) -> str:
    """What has to be installed; what comes with fairseq is fairseq."""
    name = (error.name or "").partition(".")[0]
    return "fairseq" if name in ("fairseq_cli", "hydra", "omegaconf") else name


def needs(command: str, error: ModuleNotFoundError, options: Sequence[str] = ()) -> click.ClickException:
    """What a command says without a package; options: its own."""
    package = package_of(error)
    other = "; --engine torch does without" if "engine" in options and package == "fairseq" else ""
    what = f"`{command}` needs {package}, which is not installed; scripts/setup.sh installs all{other}"
    return click.ClickException(what)


def _exit(number, frame):
    raise SystemExit(128 + number)


def ended_by_signals() -> AbstractContextManager[None]:
    """Inside, SIGTERM, SIGHUP and SIGUSR1 raise SystemExit, as SIGINT raises KeyboardInterrupt: what was begun is
    cleaned up. Signals that are ignored (nohup) or have a handler stay as they are."""
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    return handled([number for number in numbers if signal.getsignal(number) is signal.SIG_DFL], _exit)


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Imports inside leave the root logger as it was: a module on fairseq's main branch sets it to DEBUG."""
    level, handlers = logging.root.level, list(logging.root.handlers)
    try:
        yield
    finally:
        logging.root.setLevel(level)
        logging.root.handlers[:] = handlers


class QuietCommand(Command):
    """A command whose output is its result. Libraries' logs are cut down to warnings: fairseq opens the log for all."""

    def invoke(self, ctx: click.Context) -> Any:
        logging.getLogger().setLevel(logging.WARNING)
        return super().invoke(ctx)


def own_options() -> list[str]:
    """The names of the running command's options that its help shows."""
    parameters = click.get_current_context().command.params
    return [name for option in parameters if not getattr(option, "hidden", True) for name in option.opts]


def split_files(files: str) -> list[str]:
    """The files of a --position-file (or the folders of --data), joined as in $PATH. One whose own name has the
    separator stands alone."""
    if not files:
        return []
    return [files] if Path(files).exists() else files.split(os.pathsep)


def _keep_files(ctx, param, values):
    for file in (file for files in values for file in split_files(files)):
        if not Path(file).is_file():
            raise click.BadParameter(f"file not found: {file}", ctx, param)
        ctx.meta.setdefault(__name__, []).append(str(Path(file).resolve()))  # all contexts of a command line share it


def own_files(**options) -> click.Option:
    return click.Option(["--position-file"], multiple=True, expose_value=False, callback=_keep_files, **options)


def run_own_files() -> None:
    """Register the encodings of the files that the running command line names."""
    for file in click.get_current_context().meta.get(__name__, ()):
        from ..positions import load_scheme_file  # needs torch, which `tupe --help` does without

        load_scheme_file(file)


def position_file() -> list[str]:
    """What `tupe --position-file FILE ... COMMAND` gives to training: ["--position-file=FILE:..."], or []. One word: of
    an option that is repeated, fairseq and sweeps take the last."""
    files = click.get_current_context().meta.get(__name__)
    return [f"--position-file={os.pathsep.join(files)}"] if files else []


class Refusal(click.ClickException):
    """Printed as it stands, without a traceback; `exit_code` is the exit status."""

    def __init__(self, message: str, exit_code: int = REFUSED):
        super().__init__(message)
        self.exit_code = exit_code

    def show(self, file: IO | None = None) -> None:
        click.echo(self.message, err=True, file=file)


class OneOf(click.Choice):
    """One of some words; instead of any other, the nearest is suggested."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in self.choices:
            self.fail(f"{value!r} is not known{did_you_mean(value, self.choices)}", param, ctx)
        return super().convert(value, param, ctx)


class ListOf(click.ParamType):
    """Values separated by commas: `--seeds 1,2,3`. kind: a type of Python's or of click's, or a list of the valid
    words."""

    def __init__(self, kind: Any = str):
        self.kind = OneOf(kind) if isinstance(kind, list) else click.types.convert_type(kind)
        self.name = f"{'a,b' if isinstance(kind, list) else self.kind.name},..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list:
        words = [word for word in value.split(",") if word] if isinstance(value, str) else list(value)
        if not words:
            self.fail("is an empty list", param, ctx)
        return [self.kind(word, param, ctx) for word in words]


_cutter = reprlib.Repr()
_cutter.maxstring = _cutter.maxother = _cutter.maxlong = 60


def shorten(value: Any) -> str:
    """A value as errors show it: its repr, the middle left out where that is long."""
    return _cutter.repr(value)


def shorten_list(words: Iterable[str]) -> str:
    """ "a, b, c" in an error: the first of many, and each of them cut."""
    words = list(words)
    shown = [word if len(word) <= 30 else word[:27] + "..." for word in words[:10]]
    return ", ".join(shown) + f", ... ({len(words)} in all)" * (len(words) > len(shown))


def task_key(name: str) -> str:
    """A task's name as it is compared: "STS-B", "sts_b" and "stsb" are one."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


class SharedOutput(click.Option):
    """The folder of runs, each of which has a lock of its own: several commands may train in it."""


def output(help: str, shared: bool = False, **options) -> Callable:
    """shared: see `SharedOutput`; any other --output belongs to one command at a time."""
    kind = SharedOutput if shared else click.Option
    return click.option("--output", cls=kind, required=True, type=FOLDER, help=help, **options)


def data(help: str = "The folder of prepared data, with dict.txt.", required: bool = True) -> Callable:
    return click.option("--data", type=FOLDER, help=help, required=required)


def checkpoint(help: str = "The pre-trained checkpoint.") -> Callable:
    return click.option("--checkpoint", type=click.Path(path_type=Path, exists=True), required=True, help=help)


def size(default: str = "base", help: str = "The size of the models.") -> Callable:
    return click.option("--size", type=click.Choice(list(SIZES)), default=default, show_default=True, help=help)


def seed(default: int = 1, help: str = "The seed of everything random.") -> Callable:
    return click.option("--seed", type=int, default=default, show_default=True, help=help)


def jobs(help: str = "Processes at a time (default: one per GPU, or one on a CPU), at most one per GPU.") -> Callable:
    return click.option("--jobs", type=click.IntRange(1), help=help)
