"""The paper's pipeline of `tupe.text` as a fast tokeniser of the transformers library. It needs sacremoses, spacy (the
rules of the text's language, no model), and sentencepiece."""

import bisect
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import PreTokenizedString, Token, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import BatchEncoding, PreTrainedTokenizerBase, PreTrainedTokenizerFast

# From a folder with code, transformers 4 copies only the files that are named here.
from .normaliser import Span
from .text import PaperText


def _slices(part: Any, borders: list[tuple[int, int]], first: int = 0) -> list[Any]:
    """The slices of a text between borders, which count from `first`. The library counts the characters of a text from
    its start for every slice, which takes quadratic time for many words; so the text is halved first, again and
    again."""
    half = len(borders) // 2
    if not half:
        return [part[start - first : end - first] for start, end in borders]
    end, start = borders[half - 1][1], borders[half][0]
    return _slices(part[: end - first], borders[:half], first) + _slices(part[start - first :], borders[half:], start)


# Whether a full stop belongs to its word or ends a sentence depends on what comes next. A given word of a text gets one
# of these endings: nothing, or a blank and a sign like the first one of the next word in its sentence.
NEXT_WORDS = ("", "\x1fa", "\x1f0", "\x1fX")
NEXT_WORD = re.compile("\x1f[a0X]$")


class PaperWords:
    """Called by the library `tokenizers` for the words of a text, and for the text of pieces; `PaperText` does both.
    later: returns the tokens that were added to the vocabulary, with their ids."""

    def __init__(self, text: PaperText, later: Callable[[], dict[str, int]]):
        self.text, self.later = text, later

    def word_spans(self, text: str) -> list[list[Span]]:
        """`PaperText.word_spans` of a text, or of a word of `in_context`, without the word behind it."""
        words = self.text.word_spans(text, ["<mask>", *self.later()])
        end = NEXT_WORD.search(text)
        return words if end is None else [word for word in words if word[0].start < end.start()]

    def in_context(self, words: list[str]) -> list[str]:
        """The words of a text, each with one of NEXT_WORDS, so that the library, which sees one at a time, cuts them as
        in the text."""
        starts = [*itertools.accumulate((len(word) + 1 for word in words), initial=0)]
        in_text: list[list[str]] = [[] for _ in words]
        for span in itertools.chain(*self.word_spans(" ".join(words))):
            in_text[bisect.bisect(starts, span.start) - 1].append(span.text)
        return [
            next((word + after for after in NEXT_WORDS if self.pieces(word + after) == pieces), word)
            for word, pieces in zip(words, in_text, strict=True)
        ]

    def pieces(self, text: str) -> list[str]:
        return [span.text for word in self.word_spans(text) for span in word]

    def pre_tokenize(self, pretok: PreTokenizedString) -> None:
        """Cut a text into words, and these into pieces. A piece's place in its word is counted in bytes."""
        unk, later = self.text.ids["<unk>"], self.later()
        words: list[tuple[list[Span], int]] = []

        def cut(_: int, part: Any) -> list[Any]:
            here = self.word_spans(str(part))
            borders = [(min(s.start for s in word), max(s.end for s in word)) for word in here]
            words.extend((word, start) for word, (start, _) in zip(here, borders, strict=True))
            return _slices(part, borders)

        pretok.split(cut)
        rest = iter(words)

        def pieces(source: str) -> list[Token]:
            word, first = next(rest)
            size = [0, *itertools.accumulate(len(sign.encode("utf-8", "surrogatepass")) for sign in source)]
            ids = ((later.get(s.text, self.text.ids.get(s.text, unk)), s) for s in word)
            return [Token(i, s.text, (size[s.start - first], size[s.end - first])) for i, s in ids]

        pretok.tokenize(pieces)

    def decode_chain(self, tokens: list[str]) -> list[str]:
        """Added tokens, and words that a pipeline of token classification has joined before, are text already."""
        later, ids = self.later(), self.text.ids
        parts: list[str] = []
        for is_piece, group in itertools.groupby(tokens, lambda token: token in ids and token not in later):
            if is_piece:
                parts.append(self.text.decode([ids[token] for token in group]))
            else:
                parts += group
        return [" ".join(filter(None, parts))]


class TupeTokenizer(PreTrainedTokenizerFast):
    """Raw text -> ids, as in training: `<s> A </s>`, or `<s> A </s> </s> B </s>`. `<mask>` and
    tokens added later are special in a text; "<s>" is ordinary text."""

    vocab_files_names = {f"{name.split('.')[0]}_file": name for name in PaperText.FILES}
    model_input_names = ["input_ids", "attention_mask"]
    _auto_class = "AutoTokenizer"  # it is saved with its code

    def __init__(self, dict_file: str | Path, **options: Any):
        for name in self.vocab_files_names:
            options.pop(name, None)
        self.text = PaperText(Path(dict_file).parent)
        special = {
            "bos_token": "<s>", "cls_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "sep_token": "</s>",
            "unk_token": "<unk>", "mask_token": "<mask>",
        }  # fmt: skip
        backend = Tokenizer(models.WordLevel(self.text.ids, unk_token="<unk>"))
        backend.post_processor = processors.TemplateProcessing(
            ["<s>", "$A", "</s>"], ["<s>", "$A", "</s>", "</s>", "$B:0", "</s>"], [("<s>", 0), ("</s>", 2)]
        )
        options = {**special, **options, "split_special_tokens": True}  # in a text, they are left to `PaperWords`
        super().__init__(tokenizer_object=backend, **options)
        self._hook()

    def _hook(self) -> None:
        """Functions of Python: they cannot be copied with the backend."""
        self.words = PaperWords(self.text, self.later_tokens)
        self._tokenizer.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(self.words)
        self._tokenizer.decoder = decoders.Decoder.custom(self.words)

    def __call__(
        self, text: Any = None, text_pair: Any = None, *args: Any, is_split_into_words: bool = False, **options: Any
    ) -> BatchEncoding:
        """Encode texts, as every tokeniser does. With is_split_into_words, words are cut as in the text that they make
        when they are joined by blanks."""
        if is_split_into_words:
            text, text_pair = self._in_context(text), self._in_context(text_pair)
        return super().__call__(text, text_pair, *args, is_split_into_words=is_split_into_words, **options)

    def encode(
        self, text: Any, text_pair: Any = None, *args: Any, is_split_into_words: bool = False, **options: Any
    ) -> list[int]:
        """The ids that a call of the tokeniser gives."""
        if is_split_into_words:
            text, text_pair = self._in_context(text), self._in_context(text_pair)
        return super().encode(text, text_pair, *args, is_split_into_words=is_split_into_words, **options)

    def tokenize(
        self, text: Any, pair: Any = None, *args: Any, is_split_into_words: bool = False, **options: Any
    ) -> list[str]:
        """The pieces that a call of the tokeniser gives."""
        if is_split_into_words:
            text, pair = self._in_context(text), self._in_context(pair)
        return super().tokenize(text, pair, *args, is_split_into_words=is_split_into_words, **options)

    def _in_context(self, words: Any) -> Any:
        """`PaperWords.in_context` for the words of a text, or of several."""
        if not words:
            return words
        is_text = isinstance(words[0], str)
        return self.words.in_context(words) if is_text else [self._in_context(each) for each in words]

    def __getstate__(self) -> dict[str, Any]:
        self._tokenizer.pre_tokenizer = self._tokenizer.decoder = None
        try:
            return {**self.__dict__, "_tokenizer": self._tokenizer.to_str()}
        finally:
            self._hook()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _tokenizer=Tokenizer.from_str(state["_tokenizer"]))
        self._hook()

    def later_tokens(self) -> dict[str, int]:
        """Tokens that were added to the vocabulary, with their ids."""
        return {token: index for token, index in self.added_tokens_encoder.items() if index >= len(self.text)}

    def get_special_tokens_mask(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None, already_has_special_tokens: bool = False
    ) -> list[int]:
        if already_has_special_tokens:
            special = {self.bos_token_id, self.pad_token_id, self.eos_token_id}
            return [int(index in special) for index in token_ids_0]
        mask = [1, *[0] * len(token_ids_0), 1]
        return mask if token_ids_1 is None else [*mask, 1, *[0] * len(token_ids_1), 1]

    def _save_pretrained(
        self, save_directory: str | Path, file_names: tuple[str, ...], legacy_format: bool | None = None,
        filename_prefix: str | None = None,
    ) -> tuple[str, ...]:  # fmt: skip
        return PreTrainedTokenizerBase._save_pretrained(self, save_directory, file_names, None, filename_prefix)

    def save_vocabulary(self, save_directory: str | Path, filename_prefix: str | None = None) -> tuple[str, ...]:
        prefix = f"{filename_prefix}-" if filename_prefix else ""
        return tuple(map(str, self.text.save(save_directory, prefix)))
