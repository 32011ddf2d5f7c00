"""The configuration of an encoder in the transformers library."""

import ast
import inspect
import re
import sys
from dataclasses import fields
from typing import Any

from transformers import PretrainedConfig

# From a folder with code, transformers 4 copies only the files that are named here: so all of the model's are.
from .attention import Backend  # noqa: F401
from .backend_cpu import Cpu  # noqa: F401
from .backend_sdpa import Sdpa  # noqa: F401
from .backends import BACKENDS  # noqa: F401
from .cpu import Linear  # noqa: F401
from .encoder import Encoder  # noqa: F401
from .losses import lm_loss  # noqa: F401
from .model_config import ModelConfig, names_in
from .names import cls_beside
from .own_schemes import FILES  # noqa: F401
from .packing import Packing  # noqa: F401
from .positions import FAMILIES, parse
from .schemes import SCHEMES
from .schemes_absolute import Absolute  # noqa: F401
from .schemes_bias import T5  # noqa: F401
from .schemes_common import Table  # noqa: F401
from .schemes_content import Shaw  # noqa: F401
from .schemes_rotation import Rope  # noqa: F401
from .token_positions import TokenPositions  # noqa: F401
from .tracing import is_traced  # noqa: F401
from .windows import Chunks  # noqa: F401

NAMES = names_in("hugging_face")  # our option -> its name in config.json
# model class -> its auto class in transformers
AUTO = {
    "TupeModel": "AutoModel",
    "TupeForMaskedLM": "AutoModelForMaskedLM",
    "TupeForSequenceClassification": "AutoModelForSequenceClassification",
    "TupeForQuestionAnswering": "AutoModelForQuestionAnswering",
    "TupeForTokenClassification": "AutoModelForTokenClassification",
    "TupeForMultipleChoice": "AutoModelForMultipleChoice",
}
AUTO_MAP = {"AutoConfig": "configuration_tupe.TupeConfig"} | {
    auto: f"modeling_tupe.{name}" for name, auto in AUTO.items()
}


def own_code(position: str) -> dict[str, str]:
    """{file: code} of the user's encodings in `position`, for a folder that is loaded without this package: the files
    that define them, as one, which imports its neighbours. Nothing where there are none, or where they come from such a
    folder. Raises ValueError for code that cannot move, or files that define a name differently."""
    modules = {SCHEMES[part.name].__module__: part.name for part in parse(position)}
    own = {module: name for module, name in modules.items() if module.rpartition(".")[2] not in (*FAMILIES, OWN)}
    codes, files, future = [], [], False
    definitions: dict[str, tuple[str, str]] = {}  # name -> file, definition
    for module, name in own.items():
        if module == "__main__":
            raise ValueError(
                f"the encoding {name} is in the script itself; put it into a file of its own, and import it"
            )
        try:
            file, code = str(inspect.getsourcefile(sys.modules[module])), inspect.getsource(sys.modules[module])
        except (KeyError, OSError, TypeError):
            raise ValueError(
                f"the encoding {name} is not in a file: its code cannot be saved; write it to one"
            ) from None
        code = re.sub(r"^(\s*from )tupe(\.\w+ import )", r"\1\2", code, flags=re.MULTILINE)
        if line := re.search(rf"^\s*(?:import|from)\s+(?:tupe\b|\.(?:{NOT_BESIDE}) ).*", code, re.MULTILINE):
            raise ValueError(
                f"{file}: {line[0].strip().replace(' .', ' tupe.')!r} cannot be saved; put the encoding into a file of "
                "its own, with imports such as `from tupe.positions import register`"
            )
        code, found = re.subn(r"^from __future__ import annotations\b.*\n", "", code, flags=re.MULTILINE)
        future = future or found > 0
        files.append(file.replace("\\", "/").rpartition("/")[2])
        for defined, what in definitions_in(code).items():
            other, before = definitions.setdefault(defined, (file, what))
            if before != what:
                raise ValueError(f"{other} and {file} define {defined} differently, and are saved as one; rename it")
        codes.append(f"# A user's own code, not the project's: {files[-1]}\n{code.rstrip()}\n")
    if future:  # which has to come first
        codes.insert(0, "from __future__ import annotations\n")
    return {f"{OWN}.py": "\n\n".join([*codes, f"FILES = {files}\n"])} if own else {}


OWN = "own_schemes"  # the module for it
# What stands in no export, or imports the file with the encodings itself.
NOT_BESIDE = "hf|config|own_attention|own_schemes|configuration_tupe|modeling_tupe|tokenization_tupe"


def definitions_in(code: str) -> dict[str, str]:
    """{name: its definition} of the functions, classes and variables of a module."""
    found = {}
    for node in ast.parse(code).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = ast.dump(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            names = (part for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store))
            found |= {name.id: ast.dump(node) for name in names}
    return found


class TupeConfig(PretrainedConfig):
    """The options of `ModelConfig` in model_config.py, some of them under the names that transformers gives them
    (`hidden_size`, `num_hidden_layers`, ...).

    classifier_inner: width inside the classification head, None for the model's. classifier_name: name of the
    classification head in a fairseq checkpoint. label_range: [least, greatest] label of a regression with one output:
    the head's outputs 0 and 1 stand for these two, and the model answers in units of the labels. None: it returns the
    head's outputs.
    """

    model_type = "tupe"
    _auto_class = "AutoConfig"  # it is saved with its code

    def __init__(
        self,
        vocab_size: int = 32768,
        classifier_inner: int | None = None,
        classifier_name: str = "sentence_classification_head",
        label_range: list[float] | None = None,
        bos_token_id: int = 0,
        pad_token_id: int = 1,
        eos_token_id: int = 2,
        **options: Any,
    ):
        for option in fields(ModelConfig):
            name = NAMES.get(option.name)
            if name != option.name and option.name in options:  # transformers would keep it beside the default
                raise ValueError(f"TupeConfig has no {option.name}; valid: {name or 'the option of the encoder'}")
            if name:
                setattr(self, name, options.pop(name, option.default))
        if self.cls_position == "auto":
            self.cls_position: str = cls_beside(self.position)
        self.vocab_size = vocab_size
        self.classifier_inner = classifier_inner or self.hidden_size
        self.classifier_name = classifier_name
        self.label_range = label_range
        options.setdefault("tie_word_embeddings", True)  # transformers 5 has no default
        options.setdefault("tokenizer_class", "TupeTokenizer")  # else `pipeline` of transformers 4 loads no tokeniser
        super().__init__(bos_token_id=bos_token_id, pad_token_id=pad_token_id, eos_token_id=eos_token_id, **options)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> "TupeConfig":
        """Read a config.json; `from_pretrained(FOLDER, position="alibi")` replaces its position, see `cls_beside`."""
        if "position" in kwargs:
            kwargs = {"cls_position": cls_beside(kwargs["position"], config_dict.get("cls_position", "tied")), **kwargs}
        return super().from_dict(config_dict, **kwargs)

    def model_options(self) -> dict[str, Any]:
        """{option of `ModelConfig`: value}"""
        return {ours: getattr(self, theirs) for ours, theirs in NAMES.items()}
