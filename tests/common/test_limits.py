"""What options that train may be given: every number of the parsers has limits, and nonsense starts no training."""

import itertools

import pytest
from click.testing import CliRunner
from fairseq import options
from fairseq.criterions import CRITERION_REGISTRY
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.tasks import TASK_REGISTRY

import tupe.plugin  # noqa: F401
from tupe.cli import main
from tupe.common import limits
from tupe.plugin import launch, worker

BASE = {"task": "tupe_masked_lm", "arch": "tupe_r", "criterion": "masked_lm", "optimizer": "adam"}
BASE["lr-scheduler"] = "polynomial_decay"
# Options with a value that is neither a number nor one of a list.
TEXTS = {
    # names, which may be anything
    "aim_repo", "aim_run_hash", "wandb_project", "checkpoint_suffix", "classification_head_name", "gen_subset",
    "plasma_path", "shorten_data_split_list",
    # files and folders: `limits.FILES` and --log-file, checkpoints that `check_restore` asks for, what is created
    "position_file", "quantization_config_path", "ema_seed_model", "log_file", "restore_file", "continue_once",
    "finetune_from_model", "tensorboard_logdir", "save_dir", "user_dir",
    # what other checks know: splits, encodings, blocks, tasks, a metric
    "train_subset", "valid_subset", "position", "glue_task", "best_checkpoint_metric",
    # Python, which fairseq reads when it begins; nothing of the recipes
    "optimizer_overrides",
    # of distributed training: PyTorch's
    "distributed_backend", "distributed_init_method", "slowmo_base_algorithm", "pipeline_balance", "pipeline_devices",
    "pipeline_encoder_balance", "pipeline_encoder_devices", "pipeline_decoder_balance", "pipeline_decoder_devices",
}  # fmt: skip


def words_of(**parts):
    return ["DATA", *(f"--{name.replace('_', '-')}={value}" for name, value in {**BASE, **parts}.items())]


def parsers():
    """The parts that have options of their own: the optimizers and schedules that recipes name, our tasks, criterions
    and models."""
    yield {}
    for kind, registry in {"task": TASK_REGISTRY, "criterion": CRITERION_REGISTRY}.items():
        yield from ({kind: name} for name, part in registry.items() if part.__module__.startswith("tupe."))
    yield from ({"optimizer": name} for name in ("adam", "adamw_fused"))
    yield from ({"lr_scheduler": name} for name in ("polynomial_decay", "polynomial_decay_ratio", "constant_cooldown"))
    yield from ({"arch": arch} for arch in ("electra_tupe_r", "from_checkpoint") if arch in ARCH_MODEL_REGISTRY)


def with_values():
    """{option that takes a value: (its action, the words that make it one)}."""
    found = {}
    for parts in parsers():
        parser, words = options.get_training_parser(), words_of(**parts)
        options.parse_args_and_arch(parser, words, parse_known=True)
        for action in parser._actions:
            if action.nargs != 0 and action.option_strings:
                found.setdefault(action.dest, (action, words))
    return found


OPTIONS = with_values()
NUMBERS = [name for name in OPTIONS if name in limits.LIMITS]


def test_every_option_with_a_value_is_a_number_with_limits_a_choice_or_a_known_text():
    left = {name for name, (action, _) in OPTIONS.items() if action.choices is None} - set(limits.LIMITS)
    assert left == TEXTS | set(limits.SWITCHES)
    assert not [name for name, (action, _) in OPTIONS.items() if action.type in (int, float) and name in left]
    assert set(limits.LIMITS) == set(NUMBERS)


@pytest.mark.parametrize("name", NUMBERS)
def test_limits_are_valid_and_what_is_beyond_them_is_not(name):
    def refused(value):
        text = f"({value}, {value})" if name in limits.PAIRS else f"{value}"
        words = [word for word in OPTIONS[name][1] if not word.startswith(option)]
        try:
            launch.parse([*words, f"{option}={text}"])
        except ValueError as error:
            assert str(error).startswith(f"{option} is ") and str(error).endswith(f"; valid: {limits.valid(name)}")
            return True
        return False

    option = "--" + name.replace("_", "-")
    least, greatest, *none = limits.LIMITS[name]
    assert not any(map(refused, {least, greatest, *none}))
    below, above = least - (abs(least) or 1) - 1, greatest + abs(greatest) + 1
    assert all(map(refused, {below, above} - {*none}))
    action = OPTIONS[name][0]
    if isinstance(action.default, (int, float)):
        limits.check(name, action.default)


NONSENSE = ["", "abc", "nan", "inf", "1e999", "-1e30", "1e-320", "9" * 400, "[", "None", "1 1", "{}", "\n", "(" * 300]


def fuzz(names, words):
    for name, word in zip(names, words, strict=True):
        option = "--" + name.replace("_", "-")
        with pytest.raises(ValueError) as caught:
            launch.parse([*(w for w in OPTIONS[name][1] if not w.startswith(f"{option}=")), f"{option}={word}"])
        message = str(caught.value)
        assert message.startswith(option) and "\n" not in message and len(message) < 300, message
        assert "lambda" not in message


def test_nonsense_for_a_number_is_one_line():
    fuzz(NUMBERS, itertools.islice(itertools.cycle(NONSENSE), len(NUMBERS)))
    fuzz(["lr"] * len(NONSENSE), NONSENSE)


@pytest.mark.slow
@pytest.mark.parametrize("word", NONSENSE)
def test_any_nonsense_for_any_number_is_one_line(word):
    fuzz(NUMBERS, [word] * len(NUMBERS))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seed=-1"], "--seed is -1; valid: 0 to 4294967295"),
        (["--seed", "5000000000"], "--seed is 5000000000; valid: 0 to 4294967295"),
        (["--batch-size=0"], "--batch-size is 0; valid: 1 to 1000000000"),
        (["--update-freq=0"], "--update-freq is 0; valid: numbers from 1 to 1000000"),
        (["--num-workers=-1"], "--num-workers is -1; valid: 0 to 1024"),
        (["--lr=abc"], "--lr is abc; valid: numbers from 0 to 100"),
        (["--max-update=0"], "--max-update is 0, and so is --max-epoch: training would have no end; valid: at least 1"),
        (["--keep-interval-updates-pattern=0"], "--keep-interval-updates-pattern is 0; valid: 1 to 1000000000, or -1"),
        (["--valid-subset=dev"], "has no split 'dev'; valid: train, valid"),
        (["--log-file=/none/x"], "--log-file /none/x: valid: a file in a folder that exists"),
        (["--ema-seed-model=/none.pt"], "--ema-seed-model /none.pt: no such file"),
        (["--position=rope", "--cls=untied"], "cls=untied with position=rope"),
        (["--update-epoch-batch-itr=perhaps"], "--update-epoch-batch-itr is perhaps; valid: True, False"),
        (["--random-token-prob=0.9", "--leave-unmasked-prob=0.2"], "--leave-unmasked-prob 0.2 and"),
        (["--adam-betas=0.9"], "--adam-betas is 0.9; valid: two numbers from 0 to 0.999999"),
        (["optimization.lr=[abc]"], "--lr is [abc]; valid: numbers from 0 to 100"),
        (["optimization.max_update=many"], "--max-update is many; valid: 1 to 1000000000, or 0"),
        (["dataset.batch_size=null"], "--batch-size is None; valid: 1 to 1000000000"),
        (["common.seed=-3"], "--seed is -3; valid: 0 to 4294967295"),
        (["--bf16"], "--bf16 is for TPUs in fairseq; valid here: --autocast bf16"),
        (["model.cls=sometimes"], "--cls: unknown value 'sometimes'"),
        (["--position=t5:multiplier:1e-300"], "multiplier must be a number"),
        (["--encoder-embed-dim=130", "--encoder-attention-heads=2", "--preset=rope"], "need an even width, not 65"),
        (["--encoder-embed-dim=130", "--encoder-attention-heads=3"], "width 130 is not a multiple of the number of he"),
    ],
)  # fmt: skip
def test_a_value_without_meaning_is_refused_before_anything_is_written(words, message, data, tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "train", lambda config: pytest.fail(str(config)))
    monkeypatch.chdir(tmp_path)
    words = ["pretrain", f"--data={data}", "--output=run", "--gpus=0", "--allocator=none", *words]
    done = CliRunner().invoke(main, words, prog_name="tupe")
    assert done.exit_code == 2 and done.stderr.startswith("tupe pretrain: ") and done.stderr.count("\n") == 1, done
    assert message in done.stderr and not list(tmp_path.iterdir())


@pytest.mark.parametrize("grid", ["seed=1,-1", "lr=1e-3,abc", "dataset.batch_size=8,0", "common.seed=1,5000000000"])
def test_every_number_of_a_grid_is_checked_before_the_first_job(grid, data, tmp_path):
    words = ["sweep", "--recipe=pretrain_small", f"--data={data}", f"--output={tmp_path / 'x'}", f"--grid={grid}"]
    done = CliRunner().invoke(main, words, prog_name="tupe")
    assert done.exit_code == 2 and "; valid: " in done.stderr and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
