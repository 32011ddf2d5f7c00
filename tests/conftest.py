"""Fixtures that several test files use. Fixtures import fairseq themselves, because that takes seconds."""

import gc
import sys

import numpy as np
import pytest
from helpers import ENGLISH_WORDS, HEADERS, MNLI, make_vocabulary, mnli_row, train_recipe, write_lines
from hydra.core.config_store import ConfigStore

# Whenever Hydra composes, it copies the store (one object per process), with fairseq's hundreds of schemas in it.
ConfigStore.__deepcopy__ = lambda store, memo: store


def pytest_collection_finish():
    """What the imports have made stays: the garbage collector need not look at millions of objects again and again."""
    gc.freeze()


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
    from tupe.plugin.glue import TASKS
    from tupe.plugin.glue_data import prepare

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
    list(prepare(folder / "official", vocabulary, folder / "bin"))
    return folder / "bin"


@pytest.fixture(scope="module")
def own_module_cache(tmp_path_factory):
    """transformers copies an export's code into a cache and imports it from there: here one that goes away with the
    tests of a file."""
    from transformers import dynamic_module_utils

    cache = str(tmp_path_factory.mktemp("modules"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", cache)
        patch.setattr(sys, "path", [*sys.path])
        yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        del sys.modules[name]  # it would be looked for in the cache that is gone
