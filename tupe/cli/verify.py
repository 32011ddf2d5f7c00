"""The command `tupe verify`: are the files of a folder those that were written?"""

import click
from tqdm import tqdm

from ..common.options import FOLDER, Command
from ..run.checksums import NAME, accept_all, damage, files_of


@click.command(cls=Command)
@click.argument("folders", nargs=-1, required=True, type=FOLDER, metavar="FOLDER...")
@click.option("--accept", is_flag=True, help="Record the files as they are now, if the changes are yours.")
def command(folders, accept):
    """Compare every file of folders with the checksum that was written with it; all of each file is read.

    tupe verify data runs/tupe_r
    """
    wrong = 0
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{folder}: no such folder")
        if accept:
            accept_all(folder, "tupe verify --accept")
        files = list(files_of(folder))
        if not files:
            raise ValueError(f"{folder} has no {NAME}, and no file with a checksum of its own")
        total = sum(path.stat().st_size for path, _ in files if path.is_file())
        with tqdm(total=total, desc=str(folder), unit="B", unit_scale=True, disable=None, leave=False) as bar:
            found = [(path, damage(path, entry, bar.update)) for path, entry in files]
        damaged = [f"{path}: {why}" for path, why in found if why]
        wrong += len(damaged)
        for line in damaged:
            click.echo(line, err=True)
        click.echo(f"{folder}: {len(files) - len(damaged)} of {len(files)} files are as they were written")
    if wrong:
        raise ValueError(f"{wrong} damaged file{'s' if wrong > 1 else ''}: restore, or make again")
