"""Fixtures that several test files use. Fixtures import fairseq themselves, because that takes seconds."""

import gc
import importlib
import importlib.util
import os

import numpy as np
import pytest
import torch
from tqdm import tqdm

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run on the CPU, where Triton is there at all

from helpers import (
    ENGLISH_WORDS,
    HEADERS,
    MNLI,
    ended,
    fork_tupe,
    make_vocabulary,
    mnli_row,
    module_cache,
    prepare_glue,
    train_recipe,
    write_data,
    write_lines,
)

tqdm.monitor_interval = 0  # no monitor thread: tests fork, and a copy has no thread that frees its locks
WITHOUT_FAIRSEQ = not importlib.util.find_spec("fairseq")
if not WITHOUT_FAIRSEQ:
    import hydra_cache  # noqa: F401


# Where there is no fairseq, a test that imports it is left out, and so is a file of tests. What has to work there is
# tested everywhere, with fairseq out of reach, by tests/train/test_commands.py.


def skip_without_fairseq(error):
    """Skip, if it is fairseq, or what comes with it, that could not be imported."""
    name = (getattr(error, "name", None) or "").partition(".")[0]
    if WITHOUT_FAIRSEQ and name in ("fairseq", "fairseq_cli", "hydra", "omegaconf"):
        pytest.skip("needs fairseq, which is not installed", allow_module_level=True)


class Module(pytest.Module):
    def collect(self):
        try:
            return super().collect()
        except self.CollectError as error:
            skip_without_fairseq(error.__cause__)
            raise


def pytest_pycollect_makemodule(module_path, parent):
    return Module.from_parent(parent, path=module_path)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    try:
        return (yield)
    except ModuleNotFoundError as error:
        skip_without_fairseq(error)
        raise


pytest_runtest_call = pytest_runtest_setup


def pytest_addoption(parser):
    parser.addoption("--kills", type=int, default=4, help="of each command, in test_kills.py: kills and full disks")


@pytest.fixture(autouse=True)
def same_random_numbers():
    """In every test, whatever ran before it in the same process."""
    torch.manual_seed(0)
    np.random.seed(0)


def pytest_collection_finish():
    """What the imports have made stays: the garbage collector need not look at millions of objects again and again."""
    gc.freeze()


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Masked-LM data that nobody writes to."""
    return write_data(tmp_path_factory.mktemp("data") / "data")


@pytest.fixture(scope="session")
def vocabulary(tmp_path_factory):
    """A folder like those of `tupe prepare corpus`: pieces, dictionary, and a little masked-LM data."""
    rng = np.random.default_rng(0)
    lines = [" ".join(rng.choice(ENGLISH_WORDS, 8)) + " ." for _ in range(200)]
    lines.append("abcdefghijklmnopqrstuvwxyz ?!\"'0123456789")
    return make_vocabulary(tmp_path_factory.mktemp("vocabulary"), lines, 120)


@pytest.fixture(scope="session")
def pretrained(vocabulary, tmp_path_factory):
    """Checkpoint of a tiny TUPE-R after two updates."""
    folder = tmp_path_factory.mktemp("pretrained")
    train_recipe(
        "pretrain", "model._name=tupe_r_tiny", f"task.data={vocabulary}", "task.tokens_per_sample=20",
        "dataset.batch_size=8", "optimization.max_update=2", "optimization.update_freq=[1]",
        f"checkpoint.save_dir={folder}", "+model.encoder_embed_dim=32", "+model.encoder_ffn_embed_dim=32",
    )  # fmt: skip
    return folder / "checkpoint_last.pt"


@pytest.fixture(scope="session")
def small(vocabulary, tmp_path_factory):
    """Folder of a tiny TUPE-R after four updates through the second engine, with its record."""
    folder = tmp_path_factory.mktemp("small") / "run"
    sizes = ["--arch=tupe_r_tiny", "--encoder-embed-dim=32", "--encoder-ffn-embed-dim=32", "--tokens-per-sample=20"]
    more = ["--max-update=4", "--batch-size=8", "--num-workers=0", "--gpus=0", "--allocator=none"]
    where = [f"--data={vocabulary}", f"--output={folder}"]
    assert ended(fork_tupe("pretrain", "--engine=torch", *where, *sizes, *more)) == 0
    return folder


@pytest.fixture(scope="session")
def nopos(vocabulary, tmp_path_factory):
    """Checkpoint of a tiny model without positions after two updates."""
    folder = tmp_path_factory.mktemp("nopos")
    train_recipe(
        "pretrain", "model._name=bert_a_tiny", "+model.position=nopos", f"task.data={vocabulary}",
        "task.tokens_per_sample=20", "dataset.batch_size=8", "optimization.max_update=2",
        "optimization.update_freq=[1]", f"checkpoint.save_dir={folder}",
    )  # fmt: skip
    return folder / "checkpoint_last.pt"


@pytest.fixture(scope="session")
def learnable(vocabulary, tmp_path_factory):
    """Prepared GLUE tasks that a tiny model learns.

    CoLA: is there a cat? MNLI, STS-B: how many cats are in both sentences? 41 rows each, so that batches are uneven.
    """
    from tupe.data.glue import TASKS

    folder, rng = tmp_path_factory.mktemp("learnable"), np.random.default_rng(1)
    rows = []
    for _ in range(41):
        cats = rng.integers(2, size=2)
        pair = [" ".join(rng.choice(ENGLISH_WORDS[2:], 5)) + (" the cat" if cat else "") for cat in cats]
        rows.append((*pair, int(cats.sum())))
    classes = TASKS["MNLI"].labels
    head = mnli_row("train", "").split("\tThe cat")[0]
    mnli = {
        kind: [MNLI[kind], *(f"{head}\t{a}\t{b}" + "\tneutral" * n + f"\t{classes[y]}" for a, b, y in rows)]
        for kind, n in (("train", 1), ("dev", 5))
    }
    for file in ("train.tsv", "dev.tsv"):
        write_lines(folder / "official" / "CoLA" / file, [f"src\t{min(y, 1)}\t\t{a} {b}" for a, b, y in rows])
        stsb = [f"0\tg\tf\ty\to\ts\ts\t{a}\t{b}\t{2.5 * y:.3f}" for a, b, y in rows]
        write_lines(folder / "official" / "STS-B" / file, [HEADERS["STS-B"], *stsb])
    write_lines(folder / "official" / "MNLI" / "train.tsv", mnli["train"])
    write_lines(folder / "official" / "MNLI" / "dev_matched.tsv", mnli["dev"])
    write_lines(folder / "official" / "MNLI" / "dev_mismatched.tsv", mnli["dev"][:20])
    prepare_glue(folder / "official", vocabulary, folder / "bin")
    return folder / "bin"


@pytest.fixture(scope="module")
def own_module_cache(tmp_path_factory):
    with module_cache(tmp_path_factory.mktemp("modules")):
        yield
