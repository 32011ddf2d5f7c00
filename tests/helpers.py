"""Helpers of several test files: tiny data sets and models, and training that returns the exact loss of every update.

Functions import fairseq themselves, because that takes seconds.
"""

import functools
import gc
import importlib
import logging
import math
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch.autograd.profiler_util import MEMORY_EVENT_NAME
from torch.utils._python_dispatch import TorchDispatchMode

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
PLUGIN = CONFIGS.parent / "tupe"
WORDS = 40  # number of types in `write_data`
ENGLISH_WORDS = [
    "the", "cat", "sat", "on", "a", "mat", "and", "dogs", "ran", "in", "parks", "while", "birds", "sang", "of", "old",
    "songs",
]  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- data


def write_data(folder, lines=60, valid_lines=8, seed=0):
    """A data folder for masked_lm: random words in increasing order, so that there is something to learn."""
    from tupe.data.splits import write_split

    folder.mkdir(parents=True)
    (folder / "dict.txt").write_text("".join(f"w{word} {1000 - word}\n" for word in range(WORDS)))
    rng = np.random.default_rng(seed)
    for split, count in [("train", lines), ("valid", valid_lines)]:
        words = [np.cumsum(rng.integers(1, 4, size=rng.integers(5, 14))) % WORDS for _ in range(count)]
        write_split(folder / split, [[*(4 + line), 2] for line in words], 4 + WORDS)
    return folder


def split_documents(data):
    """Rewrite the data with an empty sentence, which separates documents, after every four sentences."""
    from tupe.data.splits import Split, write_split

    for split in ("train", "valid"):
        items = []
        for index, item in enumerate(Split(data / split)):
            items += [item.tolist()] + [[2]] * (index % 4 == 3)
        write_split(data / split, items, 4 + WORDS)


def make_vocabulary(folder, lines, size):
    """Write pieces and dictionary of normalised lines, and the first lines as masked-LM data; returns the folder."""
    import sentencepiece

    from tupe.data.splits import write_split
    from tupe.text import TextEncoder

    (folder / "text").write_text("\n".join(lines))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"), model_prefix=str(folder / "sentencepiece.bpe"), model_type="bpe", vocab_size=size,
        bos_id=-1, eos_id=-1, character_coverage=1.0, minloglevel=2,
    )  # fmt: skip
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "sentencepiece.bpe.model"))
    (folder / "dict.txt").write_text("".join(f"{pieces.id_to_piece(i)} 1\n" for i in range(1, len(pieces))))
    encoder = TextEncoder(folder)
    for split in ("train", "valid"):
        ids = [[*encoder.encode(line), encoder.ids["</s>"]] for line in lines[:64]]
        write_split(folder / split, ids, len(encoder))
    return folder


# ----------------------------------------------------------------------------------------------- official GLUE files

# One row of each official layout: header, then rows.
HEADERS = {
    "CoLA": None,
    "SST-2": "sentence\tlabel",
    "MRPC": "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String",
    "STS-B": "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore",
    "QQP": "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
    "QNLI": "index\tquestion\tsentence\tlabel",
    "RTE": "index\tsentence1\tsentence2\tlabel",
    "WNLI": "index\tsentence1\tsentence2\tlabel",
}
ROWS = {
    "CoLA": ["gj04\t1\t\tThe cat sat .", "gj04\t0\t*\tCat the sat ."],
    "SST-2": ["the cat sang \t1", "dogs \t0"],
    "MRPC": ['1\t11\t12\tThe "cat" sat\t"The cat sang .', "0\t13\t14\tDogs ran .\tBirds sang ."],
    "STS-B": [
        "0\tmain-captions\tMSRvid\t2012test\t0001\tnone\tnone\tA cat sat .\tA cat ran .\t5.000",
        "1\tmain-captions\tMSRvid\t2012test\t0004\tnone\tnone\tDogs ran .\tBirds sang .\t3.800",
    ],
    "QQP": ["1\t2\t3\tWhy did the cat sing ?\tWhat did dogs do ?\t0", "4\t5\t6\tWhy ?\tHow ?\t1"],
    "QNLI": ["0\tWho sang ?\tThe birds sang .\tentailment", "1\tWho ran ?\tThe cat sat .\tnot_entailment"],
    "RTE": ["0\tThe cat sat .\tA cat ran .\tnot_entailment", "1\tDogs ran .\tDogs ran .\tentailment"],
    "WNLI": ["0\tThe cat sat .\tA cat ran .\t1", "1\tDogs ran .\tDogs sang .\t0"],
}
MNLI_COMMON = (
    "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\tsentence2_parse"
)
MNLI = {
    "train": MNLI_COMMON + "\tsentence1\tsentence2\tlabel1\tgold_label",
    "dev": MNLI_COMMON + "\tsentence1\tsentence2\tlabel1\tlabel2\tlabel3\tlabel4\tlabel5\tgold_label",
    "test": MNLI_COMMON + "\tsentence1\tsentence2",
}


def mnli_row(kind, label):
    """A row of an MNLI file; kind: train, dev or test."""
    row = "\t".join(["0", "31", "31n", "fiction", "(a)", "(b)", "(c)", "(d)"]) + "\tThe cat sat .\tDogs ran ."
    return row + {"train": f"\tneutral\t{label}", "dev": "\tneutral" * 5 + f"\t{label}", "test": ""}[kind]


def write_lines(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("".join(f"{line}\n" for line in lines).encode())


def official_folder(folder):
    """Two examples of every task in the layout of the official GLUE files."""
    for name, header in HEADERS.items():
        for file in ("train.tsv", "dev.tsv"):
            write_lines(folder / name / file, [header] * (header is not None) + ROWS[name])
    write_lines(folder / "CoLA" / "test.tsv", ["index\tsentence", "0\tThe cat sang ."])
    write_lines(folder / "SST-2" / "test.tsv", ["index\tsentence", "0\tdogs"])
    train = [mnli_row("train", label) for label in ("neutral", "entailment")]
    matched = [mnli_row("dev", label) for label in ("contradiction", "-")]
    write_lines(folder / "MNLI" / "train.tsv", [MNLI["train"], *train])
    write_lines(folder / "MNLI" / "dev_matched.tsv", [MNLI["dev"], *matched])
    write_lines(folder / "MNLI" / "dev_mismatched.tsv", [MNLI["dev"], mnli_row("dev", "neutral")])
    write_lines(folder / "MNLI" / "test_matched.tsv", [MNLI["test"], mnli_row("test", None)])
    write_lines(folder / "AX" / "AX.tsv", ["index\tsentence1\tsentence2", "0\tThe cat sat .\tDogs ran ."])
    return folder


def prepare_glue(official, data, output, tasks=()):
    from tupe.corpus.tasks import glue_command

    glue_command.callback(Path(official), data, Path(output), tasks)


# ------------------------------------------------------------------------------------------------------------- models


def make_dictionary(types=50, prefix="w"):
    from fairseq.data import Dictionary

    dictionary = Dictionary()
    for i in range(types):
        dictionary.add_symbol(f"{prefix}{i}")
    return dictionary


def build(arch="tupe_r_tiny", dictionary=None, **options):
    """A model built by fairseq, with the same weights in every call."""
    from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY
    from omegaconf import OmegaConf

    import tupe.plugin  # noqa: F401  (registers the architectures)

    config = OmegaConf.structured(MODEL_DATACLASS_REGISTRY[arch](**options))
    torch.manual_seed(0)
    return ARCH_MODEL_REGISTRY[arch](config, dictionary or make_dictionary())


def build_masked_lm(arch="tupe_r_tiny", types=54, **options):
    """A model of transformers, as evaluations take it, in evaluation mode, with the same weights in every call."""
    from tupe.common.architectures import preset
    from tupe.configuration_tupe import NAMES, TupeConfig
    from tupe.encoder import ModelConfig
    from tupe.modeling_tupe import TupeForMaskedLM

    core = ModelConfig(**{**preset(arch), **options})
    config = TupeConfig(vocab_size=types, **{theirs: getattr(core, ours) for ours, theirs in NAMES.items()})
    config.mask_token_id = types - 1
    torch.manual_seed(0)
    return TupeForMaskedLM(config).eval()


# ----------------------------------------------------------------------------------------------------------- training


def fairseq_arguments(recipe, overrides, words, processes=1, cuda=True, micro_batch_size=None):
    """Arguments of fairseq-train that train a recipe: what `--dry-run` shows of a training. words: the data first, then
    options of `tupe pretrain`, or of fairseq-train alone, which are handed on as they are."""
    from tupe.common.recipes import read
    from tupe.config import named, split_words
    from tupe.plugin.launch import training_options, words_of

    data, *words = words
    pairs = split_words(words)
    ours = [(name, value) for name, value in pairs if named(name) or not name.startswith("--")]
    spelled = [[name if value is None else f"{name}={value}" for name, value in each] for each in (pairs, ours)]
    settings = read(recipe, [*overrides, *spelled[1]])
    arguments = words_of(training_options(settings, data, processes, cuda, False, micro_batch_size))
    return [*arguments, *(word for word in spelled[0] if word not in spelled[1])]


def pretrain_arguments(data, save_dir, *more, processes=1, arch="tupe_r_tiny"):
    """What `tupe pretrain` passes to fairseq-train, at a size for tests: 6 updates of 4 short sequences an epoch."""
    tiny = ["--tokens-per-sample=24", "--lr=[0.01]", "--warmup-updates=2", "--log-interval=1", "--max-update=14"]
    tiny += [f"--arch={arch}", "--batch-size=4", "--update-freq=1"]
    words = [str(data), f"--save-dir={save_dir}", *tiny, *more]
    return fairseq_arguments("pretrain", [], words, processes=processes, cuda=False)


def parsed(arguments):
    """The configuration that fairseq-train makes of its arguments."""
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    return convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), arguments))


def train(arguments, on_step=lambda samples: None):
    """Run fairseq-train in this process -> [(loss per token, gradient norm) of every update], unrounded.

    on_step: called with the list of batches of every update.
    """
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from fairseq.trainer import Trainer
    from fairseq_cli import train as cli

    from tupe.plugin.recorded import recorded
    from tupe.plugin.settings import REGISTERED, configuration, dataclasses_of
    from tupe.run.stop import stoppable

    losses, reduce, step = [], Trainer._reduce_and_log_stats, Trainer.train_step

    def record(self, logging_outputs, sample_size, grad_norm=None):
        if grad_norm is not None:
            loss = float(sum(log["loss"] for log in logging_outputs))
            losses.append((loss / float(sample_size) if sample_size else math.nan, float(grad_norm)))
        return reduce(self, logging_outputs, sample_size, grad_norm)

    def train_step(self, samples, raise_oom=False):
        on_step(samples)
        return step(self, samples, raise_oom)

    parsed = options.parse_args_and_arch(options.get_training_parser(), arguments)
    given = {name: value for name, value in vars(parsed).items() if value is not None}
    parts = {f"{name}._name": given.get(name, given["arch"]) for name in REGISTERED if name in given or name == "model"}
    kinds = dataclasses_of(parts)
    if all(kinds[place.partition(".")[0]] for place in parts):  # equal; this takes a sixth of the time
        known = [(section, name) for section, kind in kinds.items() if kind for name in kind.__dataclass_fields__]
        config = configuration({**{f"{s}.{name}": given[name] for s, name in known if name in given}, **parts})
    else:
        config = convert_namespace_to_omegaconf(parsed)
    patches = [
        mock.patch.object(Trainer, "_reduce_and_log_stats", record),
        mock.patch.object(Trainer, "train_step", train_step),
        # Idle data workers check every 5 seconds whether to stop, and the end of a run waits for them.
        mock.patch.object(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.1),
        mock.patch.object(torch.utils.data._utils.worker, "MP_STATUS_CHECK_INTERVAL", 0.1),
    ]
    forget_earlier_scores()
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        stack.enter_context(recorded())
        stack.enter_context(stoppable())
        if config.distributed_training.distributed_world_size > 1:
            from fairseq.distributed import utils as distributed_utils

            distributed_utils.call_main(config, cli.main)
        else:
            cli.main(config)
        if config.dataset.num_workers:  # which end when their loader is collected
            gc.collect()
    return losses


def forget_earlier_scores():
    """Delete the best score, which fairseq keeps as an attribute of functions for the next run of a process."""
    from fairseq import checkpoint_utils
    from fairseq_cli.train import should_stop_early

    vars(checkpoint_utils.save_checkpoint).pop("best", None)
    vars(should_stop_early).clear()


def compose(recipe, overrides=()):
    """What `fairseq-hydra-train --config-dir configs --config-name recipe overrides...` reads from the files, before
    fairseq fills in defaults. Interpolations are not resolved."""
    import hydra
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra

    # Hydra completes a file with the schema registered under the same name, if there is one. fairseq-hydra-train has
    # not imported this package yet when it reads the files; to read the same here, hide its schemas meanwhile.
    store = ConfigStore.instance().repo
    groups = [name for name in store if isinstance(store[name], dict) and name != "hydra"]
    schemas = {name: store.pop(name) for name in [*groups, f"{recipe}.yaml"] if name in store}
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(CONFIGS), version_base="1.1"):
            return hydra.compose(config_name=recipe, overrides=list(overrides))
    finally:
        store.update(schemas)


def train_recipe(config, *overrides):
    """Train a recipe of configs/ in this process as fairseq-hydra-train does. Returns the configuration."""
    from fairseq.dataclass.configs import FairseqConfig
    from fairseq.dataclass.initialize import add_defaults
    from fairseq_cli.train import main
    from omegaconf import OmegaConf

    from tupe.plugin.recorded import recorded

    # no workers: here they would end 5 s late each, when Python collects their loaders
    values = ["common.fp16=false", "common.cpu=true", "dataset.num_workers=0"]
    values += [word.lstrip("+") for word in overrides if "." in word.split("=")[0]]
    recipe = compose(config, [word for word in overrides if "." not in word.split("=")[0]])
    recipe = OmegaConf.to_container(recipe, resolve=False)
    recipe["common"]["user_dir"] = str(PLUGIN)  # Hydra would resolve it
    cfg = OmegaConf.merge(OmegaConf.structured(FairseqConfig), recipe, OmegaConf.from_dotlist(values))
    add_defaults(cfg)
    cfg = OmegaConf.create(OmegaConf.to_container(cfg, resolve=True, enum_to_str=True))
    OmegaConf.set_struct(cfg, True)
    forget_earlier_scores()
    with recorded():
        main(cfg)
    return cfg


def fairseq_task(folder, length=20, split="train", **options):
    """The task of pre-training with a split loaded."""
    from omegaconf import OmegaConf

    from tupe.plugin.masked_lm import TupeMaskedLMConfig, TupeMaskedLMTask

    settings = {"data": str(folder), "tokens_per_sample": length, "seed": 3, "finetune_from_model": None, **options}
    task = TupeMaskedLMTask.setup_task(OmegaConf.merge(OmegaConf.structured(TupeMaskedLMConfig), settings))
    task.load_dataset(split)
    return task


def finetune(data, checkpoint, save_dir, *overrides):
    """Fine-tune on prepared GLUE data, in batches of 12; overrides: those of `train_recipe`, "glue=cola" among them."""
    return train_recipe(
        "finetune", f"task.data={data}", f"checkpoint.finetune_from_model={checkpoint}",
        f"checkpoint.save_dir={save_dir}", "dataset.batch_size=12", *overrides,
    )  # fmt: skip


# Where one run leaves something behind that another one sees.
STATEFUL = ["fairseq", "fairseq_cli", "hydra", "hydra_plugins", "omegaconf", "tupe"]


class Copy(multiprocessing.get_context("fork").Process):
    """A copy of this process. One that hangs is ended and says where it was: its test fails, the others run."""

    def join(self, timeout=None):
        # By default less than scripts/test.sh gives a test.
        super().join(float(os.environ.get("COPY_LIMIT", 240)) if timeout is None else timeout)
        if timeout is None and self.is_alive():
            os.kill(self.pid, signal.SIGABRT)  # pytest has told it to print its stacks then
            super().join()


def fork(main, *argv, anew=False, **environment):
    """A process that calls `main` with what this one has imported, which takes seconds in a new interpreter.

    argv: its sys.argv; anew: it imports `STATEFUL` itself; environment: variables. Returns the `Copy`, which has begun.
    """

    def target():
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
        # The threads of this process are not in the other, which would wait for them; without the variable accelerate
        # asks for some.
        os.environ.update({"OMP_NUM_THREADS": "1"} | environment)
        torch.set_num_threads(1)
        sys.argv = list(map(str, argv))
        for name in [name for name in sys.modules if anew and name.partition(".")[0] in STATEFUL]:
            del sys.modules[name]
        main()

    importlib.import_module("torch._dynamo")  # as every optimizer does, which takes seconds: once for all copies
    process = Copy(target=target)
    process.start()
    return process


def print_into(log):
    """From now on, all that this process prints goes to the end of a file, and what it logs not to pytest."""
    sys.stdout = sys.stderr = open(log, "a", buffering=1)  # noqa: SIM115
    for descriptor in (1, 2):
        os.dup2(sys.stderr.fileno(), descriptor)
    logging.root.handlers.clear()


def fork_tupe(*words, log=os.devnull, **environment):
    """`tupe WORDS` in a copy of this process, which has begun."""
    from tupe.cli import main

    def run():
        os.setsid()
        print_into(log)
        main()

    return fork(run, "tupe", *words, **environment)


def unsealed(folder):
    """A folder whose files a test changes: without the checksums of what was written."""
    for path in folder.rglob("checksums.json"):
        path.unlink()
    return folder


def ended(process):
    process.join()
    return process.exitcode


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def begin_two(folder, words, data, recipe="pretrain", overrides=()):
    """The two processes of a training by the second engine, as torchrun starts them."""
    from tupe.common.recipes import read
    from tupe.train import launch
    from tupe.train.settle import settle

    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    settled = settle(read(recipe, [*overrides, f"--save-dir={folder}", *words]), 2, gpus=0)
    return [
        fork(lambda: launch.train(settled, str(data), 2, 0), "tupe", RANK=str(rank), LOCAL_RANK=str(rank),
             TORCHELASTIC_RUN_ID="none", **place) for rank in range(2)
    ]  # fmt: skip


def descendants(pid):
    """A process and all below it."""
    below = []
    with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            below += (thread / "children").read_text().split()
    return [pid, *(each for child in below for each in descendants(int(child)))]


def has_ended(pid):
    """Whether a process is gone, or waits for its parent to take note."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until(condition, seconds=60):
    """Returns when condition() holds; fails if that takes too long."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def table(path):
    """The rows of a file of tab-separated values, without its header."""
    return [line.split("\t") for line in path.read_text().splitlines()[1:]]


def allocations(function):
    """(result of function(), bytes of each allocation on the CPU during the call, in order; negative for a release)."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = function()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == MEMORY_EVENT_NAME]
    return result, [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]


def never_pack(monkeypatch):
    """Compute on padding too, from now on."""
    from tupe.packing import Packing

    monkeypatch.setattr(Packing, "of", lambda real, *count: Packing(real))


def attention_weights(encoder, tokens):
    """[B, H, L, L] of each layer."""
    from tupe.attention import Recorder

    recorder = Recorder(encoder.normaliser)
    encoder(tokens, backend=recorder)
    return recorder.weights_of_layers


def scramble(module, seed=0):
    """Add noise to every parameter: initial values of 0, 1 or N(0, 0.02) would hide mistakes. Returns the module."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.3)
    return module


def configuration(arch, model_options, task="tupe_masked_lm", criterion="masked_lm"):
    """The configuration, as plain dicts, that fairseq-train would store for `--arch arch` with these model options."""
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from omegaconf import OmegaConf

    from tupe.plugin.model import spell_names

    words = [f"--{key.replace('_', '-')}={value}" for key, value in model_options.items()]
    arguments = [".", f"--arch={arch}", f"--task={task}", f"--criterion={criterion}", "--optimizer=adam", *words]
    if task == "tupe_masked_lm":
        arguments.append(f"--tokens-per-sample={model_options['max_positions']}")
    config = convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), arguments))
    spell_names(config.model)
    return OmegaConf.to_container(config, resolve=True, enum_to_str=True)


def build_from(cfg, dictionary):
    """The model of fairseq that such a configuration describes."""
    from fairseq import models
    from fairseq.tasks.masked_lm import MaskedLMTask
    from omegaconf import OmegaConf

    return models.build_model(OmegaConf.create(cfg["model"]), MaskedLMTask(OmegaConf.create(cfg["task"]), dictionary))


def new_checkpoint(cfg, model):
    """What fairseq would write of a model's state at update 0, without an optimizer's."""
    history = {"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}, "num_updates": 0}
    return {
        "args": None, "cfg": cfg, "model": model, "criterion": {}, "optimizer_history": [history], "task_state": {},
        "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0, "shuffle": True}, "val_loss": None},
        "last_optimizer_state": None,
    }  # fmt: skip


def our_checkpoint(path, value, updates, types=12):
    """Write a tiny checkpoint of ours whose weights are all `value`, with a large optimizer state; returns its path."""
    from fairseq.data import Dictionary

    dictionary = Dictionary()
    for word in range(types - 5):
        dictionary.add_symbol(f"w{word}")
    dictionary.add_symbol("<mask>")
    sizes = {"encoder_layers": 1, "encoder_embed_dim": 8, "encoder_ffn_embed_dim": 8, "encoder_attention_heads": 2}
    cfg = configuration("tupe_r", {"max_positions": 6, **sizes})
    model = build_from(cfg, dictionary)
    for p in model.parameters():
        torch.nn.init.constant_(p, value)
    state = new_checkpoint(cfg, model.state_dict())
    state["optimizer_history"][-1]["num_updates"] = updates
    state["last_optimizer_state"] = {"state": {0: {"exp_avg": torch.randn(20000)}}}
    torch.save(state, path)
    return path


def least_checkpoint(updates=7, arch="tupe_r", data=".", criterion="masked_lm"):
    """No more than what every checkpoint of ours has."""
    model = {"_name": arch, "position": "untied+t5", "max_positions": 9}
    cfg = {"model": model, "task": {"_name": "masked_lm", "data": str(data)}, "criterion": {"_name": criterion}}
    weights = {"a": torch.ones(3), "b": torch.zeros(2, 2)}
    return {"cfg": cfg, "model": weights, "optimizer_history": [{"num_updates": updates}], "extra_state": {}}


def load(path):
    return torch.load(path, map_location="cpu", weights_only=True)


def line_of(frames):
    """The innermost line of the package in a stack, as "tupe/FILE:LINE"; "?" outside of it."""
    ours = [frame for frame in frames if "/tupe/" in frame.filename and "/tests/" not in frame.filename]
    return f"tupe/{ours[-1].filename.rpartition('/tupe/')[2]}:{ours[-1].lineno}" if ours else "?"


class Waits(TorchDispatchMode):
    """Records operations whose result the host needs before it can continue, and their lines: on a GPU it would wait
    there."""

    waiting_operations = (
        "aten._local_scalar_dense", "aten.nonzero", "aten.equal", "aten.masked_select", "aten.unique",
        "aten.lift_fresh",  # a tensor made of Python numbers, such as a list used as an index
    )  # fmt: skip

    def __init__(self):
        super().__init__()
        self.operations, self.lines = [], set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        by_index = str(func).startswith(("aten.index.", "aten.index_put"))
        masks = [i for i in (args[1] if by_index else []) if i is not None]
        if str(func).startswith(self.waiting_operations) or any(i.dtype == torch.bool for i in masks):
            self.operations.append(str(func))
            self.lines.add(line_of(traceback.extract_stack()))
        return func(*args, **(kwargs or {}))


# ----------------------------------------------------------------------------------------------------- folders of runs


def write_run(
    folder, task, lr, seed, score, *, architecture="tupe_r", updates=1_000_000, epochs=2, state="finished", **more
):
    """Write the folder of a fine-tuning run: `score` at its best epoch, the first, and 1 less at later ones.

    more: other fields of the record. An unfinished run has no scores of its last epoch. Returns the record.
    """
    from tupe.data.glue import TASKS
    from tupe.run.record import Record

    splits = [split for split, _ in TASKS[task].files if split.startswith("valid")]
    scores = [
        {"epoch": epoch, "num_updates": 10 * epoch, "split": split, "loss": 0.5, "best": epoch == 1}
        | dict.fromkeys(TASKS[task].metrics, score + n - (epoch > 1))
        for epoch in range(1, epochs + (state == "finished"))
        for n, split in enumerate(splits)
    ]
    values = {
        "task": task, "architecture": architecture, "variant": "", "seed": seed, "lr": lr,
        "budget": {"max_epoch": epochs}, "splits": splits, "pretrained": f"/runs/{architecture}.pt",
        "pretrained_updates": updates, "metrics": list(TASKS[task].metrics), "command": "tupe finetune --a '<b>'",
        "versions": {"torch": "2"}, "commit": "abc", "device": "CPU", "started_at": "yesterday",
        "finished_at": "today", "state": state, "scores": scores,
    }  # fmt: skip
    if state == "failed":
        values["failure"] = {"reason": "diverged", "status": 1}
    record = Record(**{**values, **more})
    folder.mkdir(parents=True)
    record.save(folder)
    return record


def write_runs(folder, tasks, scores, **options):
    """Write the runs of a sweep. scores: {lr: [score of seed 1, 2, ...]}"""
    for task in tasks:
        for lr, values in scores.items():
            for seed, value in enumerate(values, 1):
                write_run(folder / task / f"lr{lr:g}_seed{seed}", task, lr, seed, value, **options)


@contextmanager
def file_system(folder: Path, megabytes: int) -> Iterator[Path]:
    """A new folder that holds no more; skips the test where none may be mounted."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", folder]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no file system may be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@contextmanager
def module_cache(folder):
    """transformers copies an export's code into a cache and imports it from there: here one that goes away."""
    from transformers import dynamic_module_utils

    def forget():  # a package that was imported from another cache would be searched there
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
            del sys.modules[name]
        importlib.invalidate_caches()

    theirs = dynamic_module_utils.HF_MODULES_CACHE
    forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(folder))
        # transformers 4 reads a file once for every path of imports that leads to it.
        once = functools.cache(dynamic_module_utils.get_relative_imports)
        patch.setattr(dynamic_module_utils, "get_relative_imports", once)
        patch.setattr(sys, "path", [folder for folder in sys.path if folder != theirs])
        yield
    forget()
