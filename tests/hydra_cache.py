"""Hydra, quicker: what it parses and composes for every training is kept. Importing this module changes it."""

import copy
import functools
import importlib.util
from pathlib import Path

from helpers import CONFIGS
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser

# Whenever Hydra composes, it copies the store (one object per process), with fairseq's hundreds of schemas in it.
ConfigStore.__deepcopy__ = lambda store, memo: store

# For every training, fairseq lets Hydra parse a hundred values and put twenty files together, which takes longer than
# the training of a test. Here each value is parsed once, and what was put together is copied when the same files are
# asked for; Hydra's own function sets the values in the copy.
parse = functools.cache(functools.partial(OverridesParser.parse_rule, OverridesParser.create()))
OverridesParser.parse_rule = lambda self, text, rule: parse(text, rule)
KEPT = [str(CONFIGS), str(Path(importlib.util.find_spec("fairseq").origin).with_name("config"))]
COMPOSED = {}


def load_configuration(self, config_name, overrides, run_mode, **options):
    files = [word for word in overrides if "." not in word.partition("=")[0]]  # model=rope, not model.dropout=0
    folder = next(source.path for source in self.config_search_path.get_path() if source.provider == "main")
    if folder not in KEPT or any(word.startswith("hydra.") for word in overrides):
        return load_configuration.__wrapped__(self, config_name, overrides, run_mode, **options)
    schemas = {group: tuple(names) for group, names in ConfigStore.instance().repo.items() if isinstance(names, dict)}
    key = str((folder, config_name, files, run_mode, options, schemas))
    if key not in COMPOSED:
        COMPOSED[key] = load_configuration.__wrapped__(self, config_name, files, run_mode, **options)
    config = copy.deepcopy(COMPOSED[key])
    values = OverridesParser.create().parse_overrides([word for word in overrides if word not in files])
    ConfigLoaderImpl._apply_overrides_to_config(values, config)
    return config


ConfigLoaderImpl.load_configuration = functools.wraps(ConfigLoaderImpl.load_configuration)(load_configuration)
