"""The door for users of transformers: `import tupe.hf` makes its Auto classes know this package's, so that
`AutoModel.from_pretrained(FOLDER)` needs no code in the folder, and no `trust_remote_code`."""

import transformers
from transformers import AutoConfig, AutoTokenizer

from . import modeling_tupe
from .configuration_tupe import AUTO, TupeConfig
from .modeling_tupe import (
    TupeForMaskedLM,
    TupeForMultipleChoice,
    TupeForQuestionAnswering,
    TupeForSequenceClassification,
    TupeForTokenClassification,
    TupeModel,
)
from .tokenization_tupe import TupeTokenizer

__all__ = [
    "TupeConfig", "TupeForMaskedLM", "TupeForMultipleChoice", "TupeForQuestionAnswering",
    "TupeForSequenceClassification", "TupeForTokenClassification", "TupeModel", "TupeTokenizer",
]  # fmt: skip

AutoConfig.register(TupeConfig.model_type, TupeConfig)
for name, auto in AUTO.items():
    getattr(transformers, auto).register(TupeConfig, getattr(modeling_tupe, name))
AutoTokenizer.register(TupeConfig, fast_tokenizer_class=TupeTokenizer)
