"""The tokeniser of `tupe.text` as one of the transformers library. It needs sacremoses, spacy (its English rules, no
model), and sentencepiece or subword-nmt."""

import itertools
from pathlib import Path

from transformers import PreTrainedTokenizer

from .text import PaperText


class TupeTokenizer(PreTrainedTokenizer):
    """Raw text -> ids, as in training: `<s> A </s>`, or `<s> A </s> </s> B </s>`. `<mask>` is the mask token."""

    vocab_files_names = {f"{name.split('.')[0]}_file": name for name in PaperText.FILES}
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, dict_file: str | Path, **options):
        for name in self.vocab_files_names:
            options.pop(name, None)
        self.text = PaperText(Path(dict_file).parent)
        special = {
            "bos": "<s>",
            "cls": "<s>",
            "pad": "<pad>",
            "eos": "</s>",
            "sep": "</s>",
            "unk": "<unk>",
            "mask": "<mask>",
        }
        super().__init__(**{**{f"{kind}_token": token for kind, token in special.items()}, **options})

    @property
    def vocab_size(self) -> int:
        return len(self.text)

    def get_vocab(self) -> dict[str, int]:
        return {**self.text.ids, **self.added_tokens_encoder}

    def tokenize(self, text: str, **unused) -> list[str]:
        """Pieces of a text. Only <mask> and tokens added later are special in it; "<s>" is ordinary text."""
        return self.text.pieces(text, ["<mask>", *self.later_tokens()])

    def later_tokens(self) -> list[str]:
        """Tokens that were added to the vocabulary."""
        return [token for token, index in self.added_tokens_encoder.items() if index >= len(self.text)]

    def _tokenize(self, text):
        return self.text.pieces(text)

    def _convert_token_to_id(self, token):
        return self.text.ids.get(token, self.text.ids["<unk>"])

    def _convert_id_to_token(self, index):
        return self.text.symbols[index] if 0 <= index < len(self.text) else self.unk_token

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        later, parts = set(self.later_tokens()), []
        for is_later, group in itertools.groupby(tokens, later.__contains__):
            group = list(group)
            parts += group if is_later else [self.text.decode(map(self._convert_token_to_id, group))]
        return " ".join(filter(None, parts))

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        ids = [self.bos_token_id, *token_ids_0, self.eos_token_id]
        return ids if token_ids_1 is None else [*ids, self.eos_token_id, *token_ids_1, self.eos_token_id]

    def get_special_tokens_mask(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None, already_has_special_tokens: bool = False
    ) -> list[int]:
        if already_has_special_tokens:
            special = {self.bos_token_id, self.pad_token_id, self.eos_token_id}
            return [int(index in special) for index in token_ids_0]
        mask = [1, *[0] * len(token_ids_0), 1]
        return mask if token_ids_1 is None else [*mask, 1, *[0] * len(token_ids_1), 1]

    def create_token_type_ids_from_sequences(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        return [0] * len(self.build_inputs_with_special_tokens(token_ids_0, token_ids_1))

    def save_vocabulary(self, save_directory: str | Path, filename_prefix: str | None = None) -> tuple[str, ...]:
        prefix = f"{filename_prefix}-" if filename_prefix else ""
        return tuple(map(str, self.text.save(save_directory, prefix)))
