"""The door for users of transformers: `import tupe.hf` makes its Auto classes know this package's, so that
`AutoModel.from_pretrained(FOLDER)` needs no code in the folder, and no `trust_remote_code`."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from .configuration_tupe import TupeConfig
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
AutoModel.register(TupeConfig, TupeModel)
AutoModelForMaskedLM.register(TupeConfig, TupeForMaskedLM)
AutoModelForSequenceClassification.register(TupeConfig, TupeForSequenceClassification)
AutoModelForQuestionAnswering.register(TupeConfig, TupeForQuestionAnswering)
AutoModelForTokenClassification.register(TupeConfig, TupeForTokenClassification)
AutoModelForMultipleChoice.register(TupeConfig, TupeForMultipleChoice)
AutoTokenizer.register(TupeConfig, fast_tokenizer_class=TupeTokenizer)
