"""The one list of what a training can be told: each option is in the help, in the record and in both engines; what is
not valid is refused in one line."""

import pytest
from click.testing import CliRunner
from fairseq import options

import tupe.plugin  # noqa: F401
from tupe.cli import main
from tupe.cli.train import SET_BY_COMMAND
from tupe.common.recipes import read
from tupe.config import APART, CHANGES, FINETUNE, OPTIONS, PAIR, PRETRAIN, may_change
from tupe.plugin import launch
from tupe.plugin.launch import training_options, words_of
from tupe.plugin.settings import configuration, settings
from tupe.train.settle import settle

NUMBERS = [option for option in OPTIONS.values() if option.range]
TRAININGS = [  # which together have every option
    ("pretrain", []), ("finetune", []), ("pretrain_further", []), ("pretrain", ["--lr-scheduler=constant_cooldown"]),
]  # fmt: skip


@pytest.fixture(scope="module")
def configurations():
    """What fairseq makes of each of these trainings."""
    return [configuration(training_options(read(*each), "DATA", dry_run=True)) for each in TRAININGS]


@pytest.fixture(scope="module")
def recorded(configurations):
    """What fairseq's side would record of them."""
    return {place for config in configurations for place in settings(config)}


@pytest.fixture(scope="module")
def pages():
    return {name: CliRunner().invoke(main, [name, "--help"]).output for name in (PRETRAIN, FINETUNE)}


@pytest.fixture(scope="module")
def settled(pretrained):
    """The places that the second engine has for each command."""
    start = {"checkpoint.finetune_from_model": pretrained, "task.glue_task": "CoLA"}
    return {PRETRAIN: settle(read(PRETRAIN, [])).values, FINETUNE: settle(read(FINETUNE, [], fixed=start)).values}


@pytest.mark.parametrize("option", OPTIONS.values(), ids=list(OPTIONS))
def test_an_option_is_in_the_help_in_the_record_and_in_both_engines(option, configurations, recorded, pages, settled):
    for name in option.of:  # or the command's own option
        shown = SET_BY_COMMAND[name].get(option.name, option.flag)
        assert f" {shown} " in pages[name].replace("\n", " \n")
    if option.record != APART and option.place not in ("optimization.lr", "distributed_training.ddp_backend"):
        assert option.place in recorded  # these two: Record.lr; it leaves the numbers as they are
    assert may_change(option.place) == (option.record == CHANGES)
    section, _, key = option.place.partition(".")
    if option.name != "precision":  # which stands for three settings of a recipe
        assert any(config[section] is not None and key in config[section] for config in configurations)
    assert [name for name in (PRETRAIN, FINETUNE) if option.place in settled[name]] == [*option.torch]


def test_a_default_is_fairseqs():
    """A recipe that says nothing of an option means the same to both engines."""
    parser = options.get_training_parser()
    words = words_of(training_options(read("pretrain", []), "DATA", dry_run=True))
    options.parse_args_and_arch(parser, words, parse_known=True)
    theirs = {action.dest: action.default for action in parser._actions if action.default not in (None, "==SUPPRESS==")}
    skipped = {"task", "arch", "batch_size_valid", "finetune_from_model", "criterion", "lr_scheduler", "optimizer"}
    skipped |= {"tokens_per_sample"}  # which every recipe of pre-training says
    skipped |= {name for name, option in OPTIONS.items() if option.place.startswith("model.")}
    for name in sorted(theirs.keys() & OPTIONS.keys() - skipped):
        if not str(theirs[name]).startswith("${"):
            assert OPTIONS[name].convert(theirs[name]) == OPTIONS[name].convert(OPTIONS[name].default), name


def test_a_recipes_schedule_gives_way_to_the_users(pretrained):
    """What the recipe says of its own is left out; a run that decays to its end ends with it, in both engines."""
    further = [
        f"--finetune-from-model={pretrained}",
        "--tokens-per-sample=16",
        "--lr-scheduler=polynomial_decay",
        "--warmup-updates=2",
    ]
    told = read("pretrain_further", [*further, "--max-update=50"])
    assert configuration(training_options(told, "DATA", dry_run=True)).lr_scheduler.total_num_update == 50
    assert settle(told).total_num_update == 50
    with pytest.raises(ValueError, match="needs the length of the run: give --max-update"):
        read("pretrain_further", further)
    by_share = read("pretrain_small", ["--lr-scheduler=polynomial_decay_ratio"])
    assert configuration(training_options(by_share, "DATA", dry_run=True)).lr_scheduler.warmup_ratio == 0.06
    assert settle(by_share).lr_scheduler == "polynomial_decay_ratio"
    with pytest.raises(ValueError, match="--warmup-updates: valid with --lr-scheduler polynomial_decay, constant_coo"):
        settle(read("pretrain_small", ["--lr-scheduler=polynomial_decay_ratio", "--warmup-updates=7"]))
    other = configuration(training_options(read("pretrain_small", ["--lr-scheduler=inverse_sqrt"]), "D", dry_run=True))
    assert other.lr_scheduler.warmup_updates == 500
    for_fairseq = training_options(
        read("pretrain_small", ["--lr-scheduler=tri_stage", "--lr=[1e-3]"]), "D", dry_run=True
    )
    assert not any(place.startswith("lr_scheduler.") and place != "lr_scheduler._name" for place in for_fairseq)


def test_ranges_are_valid_and_what_is_beyond_them_is_not():
    def refused(option, value):
        try:
            option.convert(f"({value}, {value})" if option.kind == PAIR else f"{value}")
        except ValueError as error:
            assert str(error).startswith(f"{option.flag} is ") and str(error).endswith(f"; valid: {option.valid}")
            return True
        return False

    for option in NUMBERS:
        least, greatest = option.range
        assert not any(refused(option, value) for value in (least, greatest)), option.name
        beyond = (least - abs(least) - 2, greatest + abs(greatest) + 1)
        assert all(refused(option, value) for value in beyond if value != option.default), option.name
        option.convert(option.default)


@pytest.mark.parametrize("word", ["", "abc", "nan", "inf", "-1e30", "9" * 400, "[", "None", "1 1", "{}", "\n"])
def test_any_nonsense_for_any_number_is_one_line(word):
    for option in NUMBERS:
        with pytest.raises(ValueError) as caught:
            read("finetune" if PRETRAIN not in option.of else "pretrain", [f"{option.flag}={word}"])
        message = str(caught.value)
        assert message.startswith(option.flag) and "\n" not in message and len(message) < 300, message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seed", "5000000000"], "--seed is 5000000000; valid: 0 to 4294967295"),
        (["--max-update=0"], "--max-update is 0, and so is --max-epoch: training would have no end; valid: at least 1"),
        (["--keep-interval-updates-pattern=0"], "--keep-interval-updates-pattern is 0; valid: 1 to 1000000000, or -1"),
        (["--position=rope", "--cls=untied"], "cls=untied with position=rope"),
        (["dataset.update_epoch_batch_itr=perhaps"], "update_epoch_batch_itr=perhaps: "),
        (["--random-token-prob=0.9", "--leave-unmasked-prob=0.2"], "--leave-unmasked-prob 0.2 and"),
        (["--adam-betas=0.9"], "--adam-betas is 0.9; valid: two numbers from 0 to 0.999999"),
        (["optimization.lr=[abc]"], "--lr is ['abc']; valid: numbers from 0 to 100"),
        (["dataset.batch_size=null"], "--batch-size is None; valid: 1 to 1000000000"),
        (["model.cls=sometimes"], "--cls: unknown value 'sometimes'"),
        (["--encoder-embed-dim=130", "--encoder-attention-heads=2", "--preset=rope"], "need an even width, not 65"),
        (["--encoder-embed-dim=130", "--encoder-attention-heads=3"], "width 130 is not a multiple of the number of he"),
    ],
)  # fmt: skip
def test_a_value_without_meaning_is_refused_before_anything_is_written(words, message, data, tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "train", lambda config: pytest.fail(str(config)))
    monkeypatch.chdir(tmp_path)
    words = ["pretrain", f"--data={data}", "--output=run", "--gpus=0", "--allocator=none", *words]
    done = CliRunner().invoke(main, words, prog_name="tupe")
    assert done.exit_code == 2 and done.stderr.startswith("tupe pretrain: ") and done.stderr.count("\n") == 1, done
    assert message in done.stderr and not list(tmp_path.iterdir())


@pytest.mark.parametrize("grid", ["lr=1e-3,abc", "common.seed=1,5000000000"])
def test_every_number_of_a_grid_is_checked_before_the_first_job(grid, data, tmp_path):
    words = ["sweep", "--recipe=pretrain_small", f"--data={data}", f"--output={tmp_path / 'x'}", f"--grid={grid}"]
    done = CliRunner().invoke(main, words, prog_name="tupe")
    assert done.exit_code == 2 and "; valid: " in done.stderr and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
