"""The resolver `${tupe:folder}`: where this package is, for `common.user_dir`, whatever the working directory.

Hydra imports what stands in `hydra_plugins` before it reads a configuration. The package itself is not imported here:
its plugin registers schemas, with which Hydra would read the files of configs/ in another way.
"""

from importlib.util import find_spec

from omegaconf import OmegaConf


def resolve(what):
    if what != "folder":
        raise ValueError(f"${{tupe:{what}}} is not known; valid: ${{tupe:folder}}")
    return str(find_spec("tupe").submodule_search_locations[0])


OmegaConf.register_new_resolver("tupe", resolve, replace=True)
