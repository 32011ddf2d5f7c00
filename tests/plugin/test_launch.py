"""Recipes and named architectures: both launchers read the same values from one place and build the same model."""

import copy
import functools
import itertools
import json
from argparse import Namespace

import pytest
import torch
from helpers import CONFIGS, compose, fairseq_arguments, parsed
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from omegaconf import OmegaConf

from tupe.common import architectures
from tupe.common.architectures import ELECTRA, SIZES, with_size
from tupe.common.recipes import read
from tupe.config import split_batch
from tupe.plugin import electra
from tupe.plugin.launch import training_options, words_of
from tupe.plugin.model import core_config, spell_names
from tupe.plugin.settings import configuration

ARCHITECTURES = {**architectures.ARCHITECTURES, **ELECTRA}
PAPER = {  # the recipe as the paper states it
    "mask_prob": 0.15, "leave_unmasked_prob": 0.1, "random_token_prob": 0.1, "sample_break_mode": "complete",
    "tokens_per_sample": 512, "max_positions": 512, "max_update": 1_000_000, "total_num_update": "1000000",
    "warmup_updates": 10_000, "lr": [1e-4], "adam_betas": "(0.9, 0.999)", "adam_eps": 1e-6, "weight_decay": 0.01,
    "clip_norm": 1.0, "fp16": True,
}  # fmt: skip


def parse(arguments):
    from fairseq import options

    return options.parse_args_and_arch(options.get_training_parser(), arguments)


def recipe(*user_arguments, name="pretrain", overrides=(), processes=1, cuda=True, micro=None):
    words = ["DATA", *user_arguments]
    return fairseq_arguments(name, overrides, words, processes, cuda, micro_batch_size=micro)


@functools.cache
def composed(name, *overrides):
    return compose(name, overrides)


def recipe_with(name, *overrides):
    """A copy of what `compose` returns, which takes a fifth of a second: once for each recipe."""
    return copy.deepcopy(composed(name, *overrides))


def hydra_config(name, overrides, **changes):
    """What fairseq-hydra-train makes of a recipe before it starts to train. changes: {"section.key": value}, like
    overrides, but without composing again."""
    from fairseq.dataclass.configs import FairseqConfig
    from fairseq.dataclass.initialize import add_defaults

    config = recipe_with(name, *overrides)
    OmegaConf.set_struct(config, False)
    for place, value in changes.items():
        OmegaConf.update(config, place, value, merge=False)
    config.common.user_dir = "tupe"  # knows Hydra's working directory, which there is none of here
    config = OmegaConf.merge(OmegaConf.structured(FairseqConfig), config)
    for section in ("optimizer", "lr_scheduler", "criterion", "task", "model"):
        assert "_name" in config[section], f"{name}: nothing chosen for {section}"
    add_defaults(config)
    return config


def test_what_the_tests_keep_of_hydra_changes_nothing(monkeypatch):
    """See conftest.py."""
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    def configurations(lr):
        words = recipe(f"--lr={lr}", overrides=["model=bert_r", "+model.position=rope"])
        return words, convert_namespace_to_omegaconf(parse(words))

    configurations(0.25)
    kept = configurations(0.5)
    monkeypatch.setattr(ConfigLoaderImpl, "load_configuration", ConfigLoaderImpl.load_configuration.__wrapped__)
    assert configurations(0.5) == kept and kept[1].optimization.lr == [0.5] and kept[1].model.position == "rope"


def test_recipe_is_the_papers():
    args = parse(recipe())
    assert {key: getattr(args, key) for key in PAPER} == PAPER
    assert args.batch_size * args.update_freq[0] == 256
    kept = range(0, 1_000_001, args.keep_interval_updates_pattern)
    assert all(updates in kept and updates % args.save_interval_updates == 0 for updates in (100e3, 300e3, 600e3, 1e6))


PINNED = json.loads((CONFIGS.parent / "tests" / "recipes.json").read_text())


def test_every_recipe_is_pinned():
    tasks = {f"finetune glue={path.stem}" for path in (CONFIGS / "glue").glob("*.yaml") if path.stem != "own"}
    assert set(PINNED) == {path.stem for path in CONFIGS.glob("*.yaml")} | tasks


@pytest.mark.parametrize("name", PINNED)
def test_values_of_recipes_are_pinned(name):
    """tests/recipes.json: what every recipe says, and where a GLUE task's file differs from finetune.yaml. A value that
    is meant to change is changed there too."""

    def values(recipe, *overrides):
        config = recipe_with(recipe, *overrides)
        config.common.user_dir = ""  # Hydra's to fill in
        sections = OmegaConf.masked_copy(config, [section for section in config if section != "hydra"])
        sections = OmegaConf.to_container(sections, resolve=True)
        return {f"{section}.{key}": value for section in sections for key, value in sections[section].items()}

    recipe, *overrides = name.split()
    shown = values(recipe, *overrides)
    if overrides:
        whole = values(recipe)
        shown = {key: value for key, value in shown.items() if whole.get(key) != value}
    assert shown.pop("common.user_dir", "") == "" and shown == PINNED[name]


def test_electra_and_large_are_the_papers():
    large, electra_args = (parse(recipe(name=name)) for name in ("pretrain_large", "pretrain_electra"))
    assert {key: getattr(large, key) for key in PAPER} == PAPER and large.arch == "tupe_r_large"
    other = {"leave_unmasked_prob": 0.0, "random_token_prob": 0.0, "lr": [2e-4], "discriminator_weight": 50.0}
    wanted = {**PAPER, **other}
    assert {key: getattr(electra_args, key) for key in wanted} == wanted
    model = electra.ElectraConfig()
    assert (model.generator_fraction, model.dropout, model.attention_dropout) == (3, 0.1, 0.1)
    for args, updates in ((large, 300_000), (electra_args, 600_000)):  # Tables 3 and 4
        assert args.batch_size * args.update_freq[0] == 256
        for kept in (updates, 1_000_000):
            assert kept % args.keep_interval_updates_pattern == 0 and kept % args.save_interval_updates == 0


def test_users_options_win_and_are_followed():
    args = parse(recipe("--max-update=50", "--tokens-per-sample=128", "--arch=tupe_a_mini", "--lr=0.5"))
    assert (args.max_update, args.total_num_update) == (50, "50")
    assert (args.tokens_per_sample, args.max_positions) == (128, 128)
    assert (args.arch, args.lr) == ("tupe_a_mini", [0.5])


def test_precision():
    assert parse(recipe()).fp16
    assert not parse(recipe("--cpu")).fp16
    for name, wanted in {"float32": "", "autocast": "autocast", "bf16": "bf16", "fp16": "fp16"}.items():
        args = parse(recipe(f"--precision={name}"))
        chosen = {"fp16": args.fp16, "bf16": args.bf16, "autocast": args.autocast == "bf16"}
        assert [half for half, is_on in chosen.items() if is_on] == wanted.split()
    for word in ("common.fp16=false", "+model.autocast=bf16"):
        assert not parse(recipe(overrides=[word])).fp16, word
    with pytest.raises(ValueError, match="unknown option --fp16; did you mean '--precision'"):
        recipe("--fp16")
    on_cpu = parse(recipe(cuda=False))
    assert on_cpu.cpu and not on_cpu.fp16


@pytest.mark.parametrize("processes, limit", [(1, 32), (1, 8), (2, 16), (4, 2)])
def test_held_out_text_is_the_same_for_any_batch(processes, limit):
    """`pretrain_small` validates on a number of batches."""
    args = parse(recipe(name="pretrain_small", processes=processes, micro=limit))
    assert args.batch_size * args.update_freq[0] * processes == 32 and args.batch_size <= limit
    assert int(args.batch_size_valid) * processes == 32 and args.max_valid_steps == 30
    args = parse(recipe("--batch-size-valid=5", name="pretrain_small", processes=processes))
    assert int(args.batch_size_valid) == 5
    override = ["dataset.batch_size_valid=5"]
    assert int(parse(recipe(name="pretrain_small", processes=processes, overrides=override)).batch_size_valid) == 5


@pytest.mark.parametrize("processes, limit", [(1, 1), (1, 24), (2, 32), (16, 4), (64, 1000), (256, 24)])
def test_batch_is_kept_on_any_number_of_processes(processes, limit):
    size, steps = split_batch(256, processes, limit)
    assert size * steps * processes == 256 and size <= limit
    assert steps == 1 or 256 % (processes * (steps - 1)) or 256 // (processes * (steps - 1)) > limit  # as few as can be


def test_batch_split_reaches_fairseq():
    args = parse(recipe(processes=16))
    assert (args.batch_size, args.update_freq, args.distributed_world_size) == (16, [1], 16)
    args = parse(recipe(processes=16, micro=8))
    assert (args.batch_size, args.update_freq) == (8, [2])
    args = parse(recipe("--batch-size=5", "--update-freq=3", processes=16))  # both given: fairseq's meaning
    assert (args.batch_size, args.update_freq) == (5, [3])
    with pytest.raises(ValueError, match="256 sequences .* 3 processes.*1, 2, 4"):
        recipe(processes=3)
    for wrong in (0, -1):
        with pytest.raises(ValueError, match=f"--batch-size is {wrong}; valid: 1 to "):
            recipe(f"--batch-size={wrong}")


@pytest.mark.parametrize(
    "name, batch, processes", [("pretrain", 512, 4), ("pretrain_small", 64, 1), ("finetune", 16, 4)]
)
def test_batch_size_is_what_an_update_trains_on(name, batch, processes):
    """Whatever the recipe's own batch, and in steps of at most its sequences."""
    args = parse(recipe(f"--batch-size={batch}", name=name, processes=processes))
    assert args.batch_size * args.update_freq[0] * processes == batch
    assert args.batch_size <= OmegaConf.load(CONFIGS / "shared/scored.yaml").dataset.batch_size == 32


SOME_MODELS = ["bert_a", "gau_l2", "tupe_r_large", "shaw"]
HANDED = [
    (
        "pretrain",
        ["model.dropout=0", "+model.position=rope", "model.cls=tied"],
        ["--lr", "0.5", "--precision=autocast"],
    ),
    ("pretrain", [], ["--optimizer=adamw_fused", "--criterion=masked_lm_chunked", "--lr=[1,2]", "--update-freq=2,1"]),
    ("pretrain", ["ema.store_ema=true", "dataset.max_tokens=1000"], ["--adam-betas=(0.9,0.98)", "--compile=yes"]),
    ("pretrain", ["dataset.grouped_shuffling=true"], ["--save-dir=x y'z"]),
    ("pretrain", ["dataset.data_buffer_size=3", "bpe._name=gpt2"], []),
    *(("pretrain", [f"model={m}"], []) for m in SOME_MODELS),
    ("pretrain_electra", ["model=electra_tupe_r"], []),
]
RECIPES = [(name, name.split()[1:], []) for name in PINNED]
PROCESSES = itertools.cycle([(1, True), (2, False)])  # with or without GPUs


def handed(cases, *marks):
    return [pytest.param(*case, *next(PROCESSES), marks=marks) for case in cases]


@pytest.mark.parametrize(
    ("name", "overrides", "words", "processes", "cuda"),
    [*handed(HANDED), *handed(RECIPES, pytest.mark.thorough)],
)
def test_what_is_handed_to_fairseq_is_what_it_makes_of_the_words(name, overrides, words, processes, cuda):
    """Each value and its type, on one process or on two."""

    def contents(config):
        return json.dumps(OmegaConf.to_container(config), sort_keys=True)

    values = training_options(read(name.split()[0], [*overrides, *words]), "A:B", processes, cuda)
    config = configuration(values)
    assert contents(config) == contents(parsed(words_of(values)))
    assert OmegaConf.is_struct(config)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("optimizer.lr_shrink=1", "optimizer.lr_shrink=1: Key 'lr_shrink' not in 'FairseqAdamConfig'"),
        ("--lr-scheduler=constant_cooldown lr_scheduler.power=2", "Key 'power' not in 'ConstantCooldownConfig'"),
        ("task.nothing=1", "Key 'nothing' not in 'TupeMaskedLMConfig'"), ("commn.seed=1", "did you mean 'common'?"),
        ("dataset.grouped_shuffling=perhaps", "dataset.grouped_shuffling=perhaps: "),
        ("checkpoint.save_interval=often", "checkpoint.save_interval=often: "),
        ("--arch=roberta_base", "--arch: unknown value 'roberta_base'"), ("--optimizer=adm", "did you mean 'adam'?"),
    ],
)  # fmt: skip
def test_what_fairseq_does_not_have_is_one_line(word, said):
    with pytest.raises(ValueError) as refused:
        recipe(overrides=word.split())
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_no_option_stands_twice():
    words = recipe(
        "--arch", "tupe_a_mini", "--max-update=50", "--precision=fp16", "--save-dir=x", "--lr", "1e-4", "--seed=3"
    )
    names = [word.partition("=")[0] for word in words]
    assert len(names) == len(set(names)) and {"--arch", "--max-update", "--save-dir", "--lr", "--fp16"} <= set(names)
    args = parse(words)
    assert (args.arch, args.max_update, args.save_dir, args.lr, args.seed) == ("tupe_a_mini", 50, "x", [1e-4], 3)


def test_a_number_of_steps_is_a_list_of_one():
    assert parse(recipe(overrides=["optimization.update_freq=2"])).batch_size == 32  # of 64


def test_overrides_without_a_value_are_refused():
    with pytest.raises(ValueError, match=r"optimization.lr=\[1e-4: brackets or quotes do not end"):
        recipe(overrides=["optimization.lr=[1e-4"])
    with pytest.raises(ValueError, match="common.fp16 is no; valid: true, false"):
        recipe(overrides=["common.fp16=no"])


def test_unknown_names_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="--arch: unknown value 'tupe_x'; did you mean 'tupe_"):
        recipe("--arch=tupe_x")
    with pytest.raises(ValueError, match="unknown option --warmup-upd; did you mean '--warmup-updates'"):
        read("pretrain", ["--warmup-upd=3"])
    misspelt = (CONFIGS / "pretrain.yaml").read_text().replace("updates_pattern", "updates_patern")
    (tmp_path / "own.yaml").write_text(misspelt)
    for group in ("model", "shared"):
        (tmp_path / group).symlink_to(CONFIGS / group)
    monkeypatch.setattr("tupe.common.recipes.CONFIGS", tmp_path)
    with pytest.raises(ValueError, match="checkpoint.keep_interval_updates_patern=100000: Key .* not in .*; did you"):
        fairseq_arguments("own", [], ["DATA"])


# Every architecture in one size and every size in some architecture.
@pytest.mark.parametrize("arch, size", zip(ARCHITECTURES, itertools.cycle(SIZES), strict=False))
def test_both_launchers_build_the_named_architecture(arch, size):
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    (position, cls), (layers, width, heads, ffn) = ARCHITECTURES[arch], SIZES[size]
    name = with_size(arch, size)
    hydra = hydra_config("pretrain", [f"model={arch}", f"model._name={name}", "task.data=DATA"])
    shell = convert_namespace_to_omegaconf(parse(["DATA", "--task=masked_lm", f"--arch={name}", "--batch-size=1"]))
    models = [OmegaConf.to_container(config, resolve=True, enum_to_str=True)["model"] for config in (hydra, shell)]
    assert models[0] == models[1]
    wanted = {
        "_name": name, "position": position, "encoder_layers": layers, "encoder_embed_dim": width,
        "encoder_attention_heads": heads, "encoder_ffn_embed_dim": ffn,
    }  # fmt: skip
    assert {key: models[0][key] for key in wanted} == wanted
    assert core_config(hydra.model).cls == core_config(shell.model).cls == cls


@pytest.mark.parametrize(
    "words, becomes",
    [
        (["position=rope"], ("bert_a", "rope", "tied")),
        (["position=alibi", "cls=untied"], ("tupe_r", "alibi", "untied")),
        (["position=t5+untied:norm:False"], ("tupe_r", "untied:norm:False+t5", "untied")),
    ],
)
def test_both_launchers_replace_the_architectures_position(words, becomes):
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    hydra = hydra_config("pretrain", ["model=tupe_r", "task.data=DATA", *(f"+model.{word}" for word in words)])
    options = ["DATA", "--task=masked_lm", "--arch=tupe_r", "--batch-size=1", *(f"--{word}" for word in words)]
    for config in (hydra, convert_namespace_to_omegaconf(parse(options))):
        spell_names(config.model)
        assert (config.model._name, config.model.position, str(config.model.cls)) == becomes


@pytest.mark.parametrize("preset, normaliser", [("gau", "relu2"), ("gau_l2", "l2"), ("gau_softmax", "softmax")])
def test_gated_attention_units_are_two_for_each_layer_of_the_size(preset, normaliser):
    """Through Hydra and `tupe pretrain` alike."""
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    hydra = hydra_config("pretrain", [f"model={preset}", "model._name=gau_mini", "task.data=DATA"]).model
    launched = convert_namespace_to_omegaconf(parse(recipe("--arch=gau_mini", overrides=[f"model={preset}"]))).model
    for model in (hydra, launched):
        assert (model.encoder_layers, str(model.block), model.position) == (8, "gau", "rope")
        assert (model.encoder_embed_dim, str(model.normaliser)) == (SIZES["mini"][1], normaliser)


def recipes():
    """Every recipe with every choice of each of its groups (the other groups at their default). Presets of a model that
    are no architecture of their own are tried with one recipe. With architectures that are not their own, recipes
    beside `pretrain` are slow."""
    for path in sorted(CONFIGS.glob("*.yaml")):
        recipe = OmegaConf.load(path)
        yield path.stem, None
        for entry in recipe.defaults:
            for group, default in entry.items() if OmegaConf.is_dict(entry) else ():
                for choice in sorted((CONFIGS / group).glob("*.yaml")):
                    if path.stem == "pretrain" or group != "model":
                        yield path.stem, f"{group}={choice.stem}"
                    elif choice.stem != default and OmegaConf.load(choice)._name == choice.stem:
                        yield pytest.param(path.stem, f"{group}={choice.stem}", marks=pytest.mark.slow)


@pytest.mark.parametrize("name, choice", recipes())
def test_every_yaml_composes_and_builds(name, choice, data):
    from fairseq import optim
    from fairseq.data import Dictionary
    from fairseq.models import MODEL_REGISTRY
    from fairseq.optim import lr_scheduler

    overrides = [choice] if choice else []
    arch = composed(name, *overrides).model._name.replace("_large", "").replace("from_checkpoint", "tupe_r")
    changes = {"model._name": f"{arch}_tiny", "model.dropout": 0.25, "task.data": str(data)}
    config = hydra_config(name, overrides, **changes)
    dictionary = Dictionary.load(str(data / "dict.txt"))
    dictionary.add_symbol("<mask>")
    model = MODEL_REGISTRY[config.model._name].build_model(config.model, Namespace(source_dictionary=dictionary))
    assert config.model.dropout == 0.25 and sum(p.numel() for p in model.parameters()) < 3e6
    model.eval()
    tokens = torch.tensor([[0, 5, 6, 2]])
    assert torch.isfinite(model(tokens, features_only=True)[0]).all()
    optimizer = optim.build_optimizer(config.optimizer, list(model.parameters()))
    config.lr_scheduler.total_num_update = 100  # fine-tuning tasks work it out from their data
    scheduler = lr_scheduler.build_lr_scheduler(config.lr_scheduler, optimizer)
    assert scheduler.step_update(1) > 0


def test_model_group_has_every_architecture():
    assert set(ARCHITECTURES) <= {path.stem for path in (CONFIGS / "model").glob("*.yaml")}
    for path in (CONFIGS / "model").glob("*.yaml"):
        assert path.read_text().startswith("# @package model\n"), path
        known = {path.stem, "bert_a", "gau", "modernbert"}  # the last: of presets, with other options
        assert OmegaConf.load(path)._name in known
