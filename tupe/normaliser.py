"""ONE normaliser, sentence splitter and tokeniser for pre-training, GLUE and users.

    text -> clean()     no invisible characters, Unicode NFKC, plain quotes and dashes, <url> <email> <file>, single
    spaces
         -> sentences   spaCy's rules ("sentencizer", no download)
         -> lower case
         -> tokens      Moses' rules (sacremoses); placeholders stay whole

A span (start, end) says that text[start:end], in characters of the text that was passed in, is what a token was made
from. `Normaliser` keeps no hidden state: the same text gives the same result in any process. `normalise` is
idempotent."""

import functools
import importlib.util
import itertools
import re
import unicodedata
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

PLACEHOLDERS = ("<url>", "<email>", "<file>")
UNK = "<unk>"
SPACE = "\u2581"  # SentencePiece's mark for "a word starts here"
# Tokens that are never split: placeholders, and the endings that Moses cuts off "don't" and "it's".
WHOLE = frozenset((*PLACEHOLDERS, UNK, "'s", "'t", "'d", "'m", "'ll", "'re", "'ve"))
LIBRARIES = ("sentencepiece", "sacremoses", "spacy")
CACHE = 2**16  # results cached per function: bounds the memory of a worker, and hits almost always
CACHED_LENGTH = 64  # characters; longer "words" are rare: they are not cached, and spaCy sees them in parts


class Span(NamedTuple):
    text: str
    start: int
    end: int


def library(name: str) -> ModuleType:
    """One of LIBRARIES, imported on first use: together they take seconds to import. If it is missing, so may others
    be: the error names all."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        names = [each for each in LIBRARIES if importlib.util.find_spec(each) is None]
        raise ModuleNotFoundError(f"text needs {', '.join(names)}: pip install {' '.join(names)}") from error


# ----------------------------------------------------------------------------------------------------------- characters

_PUNCTUATION = str.maketrans(
    dict.fromkeys("’‘‚‛′ʼ`´＇", "'")
    | dict.fromkeys("“”„‟«»″‶＂〝〞", '"')
    | dict.fromkeys("‐‑‒–−", "-")
    | dict.fromkeys("—―", "--")
    | {"‴": "'\"", "。": ". ", "、": ", ", "「": '"', "」": '"', "《": '"', "》": '"', SPACE: "_"}
)


def _char_class(keep: Callable[[str, str], bool]) -> str:
    """[...] of the characters for which keep(character, category) holds. Format characters, controls and marks are in
    planes 0, 1 and 14 of Unicode only (tests/test_normaliser.py)."""
    chars = map(chr, (*range(0x20000), *range(0xE0000, 0xF0000)))
    return "[" + "".join(re.escape(c) for c in chars if keep(c, unicodedata.category(c))) + "]"


@functools.cache
def _invisible() -> re.Pattern[str]:
    """Private use, surrogates, format characters (soft hyphen, zero-width joiners, direction marks), controls that are
    not white space, and variation selectors: nobody sees them, but they make equal words differ. Unassigned code points
    stay: they may be new emoji."""
    ranges = "\ue000-\uf8ff\U000f0000-\U0010ffff\ud800-\udfff\ufe00-\ufe0f\U000e0100-\U000e01ef"
    rest = _char_class(lambda c, cat: cat == "Cf" or (cat == "Cc" and not c.isspace()))
    controls = r"[\x00-\x08\x0e-\x1b\x7f]"  # ASCII's, for which the large class is too slow
    return re.compile(rf"{controls}|(?=[^\x00-\x7f]){rest[:-1]}{ranges}]")


@functools.cache
def _clusters() -> re.Pattern[str]:
    """A non-ASCII character with the marks that may combine with it, or marks with the ASCII character they sit on."""
    marks = _char_class(lambda c, cat: cat[0] == "M" or "\u1160" <= c <= "\u11ff" or c in "\uff9e\uff9f")
    combining = f"(?=[^\\x00-\\x7f]){marks}+"  # the look-ahead is quick, the class of all marks slow
    return re.compile(f"[\\x00-\\x7f]{combining}|[^\\x00-\\x7f](?:{combining})?")


def _nfkc(cluster: str) -> str:
    """Unicode's NFKC. Python's own function sorts the marks in quadratic time, unless they are sorted already."""
    if len(cluster) > CACHED_LENGTH:
        signs = "".join(unicodedata.normalize("NFKD", sign) for sign in cluster)
        runs = itertools.groupby(signs, lambda sign: unicodedata.combining(sign) > 0)
        cluster = "".join(sign for _, run in runs for sign in sorted(run, key=unicodedata.combining))
    return unicodedata.normalize("NFKC", cluster)


@functools.lru_cache(CACHE)
def _fold(cluster: str) -> str:
    """NFKC and plain punctuation, until nothing changes. The table comes first, because NFKC turns a lone "´"
    into a space and an accent."""
    while True:
        folded = _nfkc(cluster.translate(_PUNCTUATION))
        if folded == cluster:
            return folded
        cluster = folded


@functools.lru_cache(CACHE)
def _lower(cluster: str) -> str:
    return _fold(cluster.lower())


# --------------------------------------------------------------------------------------------------------- placeholders


@functools.cache
def _moses(language: str = "en") -> Any:
    moses: Any = library("sacremoses").MosesTokenizer

    class Tokenizer(moses):
        """sacremoses' tokeniser with fast tests for letters, which otherwise take most of its time."""

        alpha, lower = frozenset(moses.IsAlpha), frozenset(moses.IsLower)

        def isanyalpha(self, text: str) -> bool:
            return not self.alpha.isdisjoint(text)

        def islower(self, text: str) -> bool:
            return self.lower.issuperset(text)

    return Tokenizer(lang=language)


@functools.cache
def _rules() -> list[tuple[re.Pattern[str], re.Pattern[str], str]]:
    """[(hint, pattern, replacement)]: a pattern is tried only if its hint, which is fast, matches somewhere. "Letter or
    digit" is Moses' definition: so a rule that does not match here cannot match once the tokeniser has inserted its
    spaces."""
    alnum = f"[{_moses().IsAlnum}]"
    link = r"[^\s<>\"]*[^\s<>\".,;:!?')\]}]"
    name = r"[^\s<>()\[\]{}\"'`,;:/\\|=?!@#&%$^*+~]"  # of a file; each run of these is scanned once, in linear time
    extension = (
        r"\.(?:jpe?g|png|gif|svg|bmp|tiff?|pdf|docx?|xlsx?|pptx?|txt|csv|json|xml|html?|php|exe|dll|zip|tar|gz|bz2|mp3|mp4|avi|wav|ogg|ogv"
        rf"|webm)(?!{alnum})"
    )
    rules = (
        ("://", rf"(?:https?|ftp)://{link}", " <url> "),
        (r"www\.", rf"(?<!{alnum})www\.{link}", " <url> "),
        ("@", r"(?<![a-z0-9.+_-])[a-z0-9.+_-]+@[a-z0-9-]+(?:\.[a-z0-9-]+)+", " <email> "),
        (extension, rf"(?<!{name}){name}*{extension}", " <file> "),
        ("--", "-{2,}", " - "),
        ("`", "`", "'"),
        ("''", "'{2,}", '"'),
    )
    return [(re.compile(hint, re.I), re.compile(pattern, re.I), replacement) for hint, pattern, replacement in rules]


# ---------------------------------------------------------------------------------------------- text with its alignment

_BLANKS = re.compile(r"\s{2,}|[^\S ]")
_BLANK_OR_CONTROL = re.compile(r"[\x00-\x1f\x7f]|  ")
_UPPER = re.compile(r"[A-Z]+")
_WORD = re.compile(r"\S+")
_HALVES = re.compile("[\ud800-\udfff]")


class Aligned:
    """A text and, unless `spans` is None, the (start, end) in the source of each of its characters. Every change goes
    through `sub`, so the text is the same with and without alignment."""

    def __init__(self, text: str, spans: list[tuple[int, int]] | None = None):
        self.text, self.spans = text, spans

    def sub(self, pattern: re.Pattern[str], replacement: str | Callable[[str], str], as_one: bool = False) -> None:
        """`replacement`: a string, or a function from the matched string to its replacement. A new character gets the
        span of the whole match; if a function keeps the length, and not as_one, each character keeps its own span."""
        if self.spans is None:
            if isinstance(replacement, str):
                self.text = pattern.sub(replacement, self.text)
            else:
                self.text = pattern.sub(lambda match: replacement(match.group()), self.text)
            return
        text: list[str] = []
        spans: list[tuple[int, int]] = []
        last = 0
        for match in pattern.finditer(self.text):
            start, end = match.span()
            new = replacement(match.group()) if callable(replacement) else replacement
            text += (self.text[last:start], new)
            spans += self.spans[last:start]
            same = callable(replacement) and len(new) == end - start and not as_one
            spans += self.spans[start:end] if same else [(self.spans[start][0], self.spans[end - 1][1])] * len(new)
            last = end
        self.text = "".join((*text, self.text[last:]))
        self.spans = spans + self.spans[last:]

    def cut(self, start: int, end: int) -> "Aligned":
        return Aligned(self.text[start:end], None if self.spans is None else self.spans[start:end])

    def clean(self) -> "Aligned":
        """The text as `clean` below returns it, aligned."""
        ascii_only = self.text.isascii()
        if not ascii_only or _BLANK_OR_CONTROL.search(self.text):
            self.sub(_invisible(), "")
        if not ascii_only:
            self.sub(_clusters(), _fold)
        for hint, pattern, replacement in _rules():
            # repeated, because a replacement can uncover another match: a@b.c.@d.e
            while hint.search(self.text) and pattern.search(self.text):
                self.sub(pattern, replacement)
        if self.spans is None:
            return Aligned(" ".join(self.text.split()))
        self.sub(_BLANKS, " ")
        start, end = int(self.text.startswith(" ")), len(self.text) - int(self.text.endswith(" "))
        return self.cut(start, max(start, end))

    def lower(self) -> "Aligned":
        """Lower case, in place; returns self."""
        if not self.text.isascii():
            self.sub(_clusters(), _lower)
        if self.spans is None and self.text.isascii():
            self.text = self.text.lower()
        else:
            self.sub(_UPPER, str.lower)
        return self


def clean(text: str) -> str:
    """Remove invisible characters, fold Unicode to NFKC and quotes and dashes to ASCII, insert the placeholders, and
    leave single spaces."""
    return Aligned(text).clean().text


def is_blank(text: str) -> bool:
    """Whether nothing of a text can be seen: it holds white space and what `clean` removes, or nothing at all."""
    text = text.lstrip()
    return not text or not ("!" <= text[0] <= "~" or _invisible().sub("", text).strip())  # the first test is quick


# ------------------------------------------------------------------------------------------------- tokens of a sentence


def _context(next_char: str) -> str:
    """The kind of the word after "word.", as Moses distinguishes them: it starts with a lower-case letter ("a"), with a
    digit ("0"), or with anything else, or there is no such word ("X")."""
    if "0" <= next_char <= "9":
        return "0"
    return "a" if next_char and _moses().islower(next_char) else "X"


_ELIDED = re.compile(r"[^\W\d_]{1,7}'")  # "l'" and "dell'" of "l'eau", "dell'acqua", which Moses cuts after the sign
_SIMPLE = re.compile(r"""(["(\[]*)([a-z0-9]+)([,;:!?)"\]]*)""")  # only marks that Moses always splits off


def _split(word: str, context: str, language: str) -> tuple[str, ...]:
    if word in WHOLE or (language in ("fr", "it") and _ELIDED.fullmatch(word)):
        return (word,)
    simple = _SIMPLE.fullmatch(word)
    if simple:
        return (*simple[1], simple[2], *simple[3])
    # Moses looks only at the neighbouring words; "X" and the context stand for them.
    pieces = _moses(language).tokenize(f"X {word} {context}", escape=False)[1:-1]
    if len(pieces) == 1 or "".join(pieces) != word:  # of "DOTMULTI", which is Moses's own name of a run of full stops
        return (word,)
    # "o'neill" -> o 'neill: split until nothing splits any more, so that tokenising tokens changes nothing.
    contexts = [_context(piece[0]) for piece in pieces[1:]] + [context]
    pairs = zip(pieces, contexts, strict=True)
    return tuple(token for piece, after in pairs for token in _split_word(piece, after, language))


_split_cached = functools.lru_cache(CACHE)(_split)


def _split_word(word: str, context: str, language: str) -> tuple[str, ...]:
    return (_split_cached if len(word) <= CACHED_LENGTH else _split)(word, context, language)


def tokenise(words: list[str], language: str = "en") -> list[tuple[str, ...]]:
    """Moses tokens of a sentence, one tuple per word. Words are split one at a time and cached: Moses
    decides by the word and, if it ends in a full stop, by the character after it. The result is the same as for whole
    sentences, several times as fast."""
    out: list[tuple[str, ...]] = []
    for i, word in enumerate(words):
        if word.isascii() and word.isalnum():
            out.append((word,))
        else:
            context = "X"
            if word[-1] == "." and i + 1 < len(words):
                context = _context(words[i + 1][0])
            out.append(_split_word(word, context, language))
    return out


# ------------------------------------------------------------------------------------------------------------ sentences


class _Sentencizer:
    """The sentences of spaCy's rule-based sentencizer on a blank pipeline of a language, much faster. spaCy's tokeniser
    looks at one blank-separated word at a time, so its result for a word is cached as the kinds of its tokens: "E" may
    end a sentence, "P" is other punctuation, "W" anything else. A sentence starts at the first W after an E. The time
    that spaCy takes grows with the square of a word's length, so it sees no more than CACHED_LENGTH characters at once.

    Two rules are added. A full stop within a word ends no sentence before a lower-case letter ("etc. and"). Moses has
    the same rule; without it the lower-case output would be cut at "mr. smith" when it is normalised again. And where
    spaCy cuts words into signs, as in Chinese, the end of a sentence needs no blank behind it."""

    def __init__(self, language: str = "en"):
        spacy = library("spacy")
        try:
            nlp = spacy.blank(language)
        except ImportError as error:
            reason = " ".join(str(error).split())[:120]
            other = "" if language in UNSPACED else "xx, or "  # whose rules count words between blanks
            raise ValueError(f"language {language!r}: {reason}; or give {other}--sentences lines or none") from None
        self.tokenizer = nlp.tokenizer
        self.enders = nlp.add_pipe("sentencizer").punct_chars
        self.kinds = functools.lru_cache(CACHE)(self._kinds)

    def _kinds(self, word: str) -> tuple[tuple[int, str], ...]:
        if word in PLACEHOLDERS:
            return ((0, "W"),)
        parts = range(0, len(word), CACHED_LENGTH)
        tokens = ((part + t.idx, t) for part in parts for t in self.tokenizer(word[part : part + CACHED_LENGTH]))
        return tuple((at, "E" if t.text in self.enders else "P" if t.is_punct else "W") for at, t in tokens)

    def __call__(self, text: str) -> list[int]:
        """Offsets at which the sentences of a cleaned text start."""
        starts, ended, attached, offset = [0], False, False, 0  # attached: the full stop was part of a longer word
        for word in text.split(" "):
            if word.isalnum():
                if ended:
                    if not (attached and word[0].islower()):
                        starts.append(offset)
                    ended = False
            elif word:
                sign = ""  # with which the sentence ended within this word, as in "end.Start"
                for at, kind in (self.kinds if len(word) <= CACHED_LENGTH else self._kinds)(word):
                    if kind == "E":
                        ended, sign, attached = True, word[at], at > 0 and word[-1] == "."
                    elif kind == "W" and ended:
                        if _starts_within(sign, word[at]) if sign else not (attached and at == 0 and word[0].islower()):
                            starts.append(offset + at)
                        ended = False
            offset += len(word) + 1
        return starts


def _starts_within(sign: str, first: str) -> bool:
    """Whether a sentence starts behind a sign without a blank, with a letter `first`. spaCy's rule for "end.Start"
    looks at the case of both sides; the left will be lower case. Abbreviations and numbers have full stops, too."""
    without_case = first.isalpha() and first.lower() == first.upper()
    if sign in ".\uff0e":
        return first.isupper() or sign != "." and without_case
    return not sign.isascii() or first.isupper() or without_case


SENTENCES = ("rules", "lines", "none")  # spaCy's; a line or paragraph is a sentence; a document is
UNSPACED = frozenset(("bo", "ja", "km", "lo", "my", "th", "yue", "zh"))  # languages without blanks between words


def check_language(code: str) -> None:
    """Raise ValueError for another name of a language than spaCy's, and for that of a region: Moses and UNSPACED would
    take "deu" and "zh-CN" for none."""
    base = re.split("[-_]", code)[0].lower()
    name = base if base == "en" else library("spacy").util.find_matching_language(base) or base
    if name != code:
        raise ValueError(f"--language {code}: say {name}")


class Raw:
    """Text as it stands, for a tokeniser that has a normaliser of its own: only sentences are found.

    language: of spaCy's rules. sentences: one of SENTENCES; only "rules" takes the text for prose, in which white space
    does not matter."""

    unit = "characters"  # in which short text is counted

    def __init__(self, language: str = "en", sentences: str = "rules", **unused: Any):
        self.mode = sentences
        self.split: Callable[[str], list[int]] = _Sentencizer(language) if sentences == "rules" else lambda text: [0]

    def clean(self, text: str) -> str:
        """The text without what no tokeniser needs, in one line: a corpus is read line by line, so no model knows
        line breaks. Halves of surrogate pairs, which JSON may have, become U+FFFD."""
        text = text if text.isascii() else _HALVES.sub("\ufffd", text)
        if self.mode == "rules":
            return " ".join(text.split())
        return " ".join(line for line in map(str.rstrip, text.split("\n")) if line)

    def sentences(self, text: str) -> list[list[str]]:
        """The sentences of a paragraph, each cut at blanks; "" gives []."""
        text = self.clean(text)
        starts = self.split(text)
        cuts = (text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True))
        return [cut.rstrip().split(" ") for cut in cuts if not cut.isspace() and cut]


class Normaliser:
    """The paper's text contract up to tokens.

    language: of Moses' and spaCy's rules. cased: capitals stay. sentences: one of SENTENCES.
    """

    def __init__(self, language: str = "en", cased: bool = False, sentences: str = "rules"):
        self.split = Raw(language, sentences).split
        self.language, self.cased, self.mode = language, cased, sentences
        self.unit = "characters" if language in UNSPACED else "words"

    @staticmethod
    def clean(text: str) -> str:
        return clean(text)

    def aligned_sentences(self, aligned: Aligned) -> Iterator[Aligned]:
        """The cleaned sentences of an `Aligned` text, in lower case unless `cased`."""
        aligned = aligned.clean()
        if not aligned.text:
            return
        starts = self.split(aligned.text)
        for start, end in zip(starts, [*starts[1:], len(aligned.text)], strict=True):
            sentence = aligned.cut(start, end)
            yield sentence if self.cased else sentence.lower()

    def sentences(self, text: str) -> list[list[str]]:
        """The tokens of each sentence. Only invisible characters are dropped; "" gives []."""
        aligned = self.aligned_sentences(Aligned(text))
        sentences = (tokenise(sentence.text.split(), self.language) for sentence in aligned)
        return [tokens for words in sentences if (tokens := [token for word in words for token in word])]

    def tokens(self, text: str) -> list[str]:
        """The tokens of all sentences."""
        return [token for sentence in self.sentences(text) for token in sentence]

    def normalise(self, text: str) -> str:
        """The tokens, joined by blanks."""
        return " ".join(self.tokens(text))

    @staticmethod
    def align(text: str) -> Aligned:
        """A text, each character with its own span."""
        return Aligned(text, [(i, i + 1) for i in range(len(text))])

    def aligned(self, text: Aligned) -> list[tuple[str, list[tuple[int, int]]]]:
        """[(token, [(start, end) of each of its characters]), ...] of a text of `align`."""
        out = []
        for sentence in self.aligned_sentences(text):
            assert sentence.spans is not None
            words = list(_WORD.finditer(sentence.text))
            tokens_of = tokenise([word.group() for word in words], self.language)
            for word, tokens in zip(words, tokens_of, strict=True):
                start = word.start()
                for token in tokens:
                    out.append((token, sentence.spans[start : start + len(token)]))
                    start += len(token)
        return out
