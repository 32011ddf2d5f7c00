"""ONE normaliser, sentence splitter and tokeniser for pre-training, GLUE, SQuAD and the hub interface.

    text -> clean()     no invisible characters, Unicode NFKC, plain quotes and dashes, <url> <email> <file>, single
    spaces
         -> sentences   spaCy's rules ("sentencizer", no download) or a trained spaCy model
         -> lower case
         -> tokens      Moses' rules (sacremoses); placeholders stay whole
         -> pieces      SentencePiece BPE, ids of dict.txt                                                (TextEncoder)

What to call:

    normaliser = Normaliser()                                  or Normaliser("en_core_web_sm")
    normaliser.sentences(text)  -> [[token, ...], ...]
    normaliser.tokens(text)     -> [token, ...]
    normaliser.normalise(text)  -> "tok tok ..."
    normaliser.spans(text)      -> [Span(token, start, end), ...]

    encoder = TextEncoder(data_dir)                            a folder that `tupe prepare corpus` made
    encoder.pieces(text)        -> [piece, ...]                dict.txt's strings; no <s>, </s>: callers add them
    encoder.pieces(text, ["<mask>"])                           <mask> is a piece, and stands where a word would
    encoder.encode(text)        -> [id, ...]                   (likewise)
    encoder.spans(text)         -> [Span(piece, start, end), ...]
    encoder.decode(ids)         -> "tok tok ..."

A span (start, end) says that text[start:end], in characters of the text that was passed in, is what the token or piece
was made from. It keeps no hidden state: the same text gives the same result in any process. `normalise` is idempotent
(with spaCy's rules; a trained model may split its own output differently). A piece that starts a word starts with
"\u2581"."""

import functools
import importlib
import io
import json
import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

PLACEHOLDERS = ("<url>", "<email>", "<file>")
UNK = "<unk>"  # as a token: a rare word that the corpus filter replaced
SPACE = "\u2581"  # SentencePiece's mark for "a word starts here"
# Tokens that are never split: placeholders, and the endings that Moses cuts off "don't" and "it's".
WHOLE = frozenset((*PLACEHOLDERS, UNK, "'s", "'t", "'d", "'m", "'ll", "'re", "'ve"))
CACHE = 2**16  # results cached per function: bounds the memory of a worker, and hits almost always
CACHED_LENGTH = 64  # characters; longer "words" are rare and not cached


class Span(NamedTuple):
    text: str
    start: int
    end: int


def _library(name):
    """A package of the extra `text`, imported on first use: together they take seconds to import."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{name} is not installed; tupe.text needs: pip install 'tupe[text]'") from error


# ----------------------------------------------------------------------------------------------------------- characters

_PUNCTUATION = str.maketrans(
    dict.fromkeys("’‘‚‛′ʼ`´＇", "'")
    | dict.fromkeys("“”„‟«»″‶＂〝〞", '"')
    | dict.fromkeys("‐‑‒–−", "-")
    | dict.fromkeys("—―", "--")
    | {"‴": "'\"", "。": ". ", "、": ", ", "「": '"', "」": '"', "《": '"', "》": '"', SPACE: "_"}
)


def _char_class(keep):
    """[...] of the characters for which keep(character, category) holds. Format characters, controls and marks are in
    planes 0, 1 and 14 of Unicode only (tests/test_text.py)."""
    chars = map(chr, (*range(0x20000), *range(0xE0000, 0xF0000)))
    return "[" + "".join(re.escape(c) for c in chars if keep(c, unicodedata.category(c))) + "]"


@functools.cache
def _invisible():
    """Private use, surrogates, format characters (soft hyphen, zero-width joiners, direction marks), controls that are
    not white space, and variation selectors: nobody sees them, but they make equal words differ. Unassigned code points
    stay: they may be new emoji."""
    ranges = "\ue000-\uf8ff\U000f0000-\U0010ffff\ud800-\udfff\ufe00-\ufe0f\U000e0100-\U000e01ef"
    rest = _char_class(lambda c, cat: cat == "Cf" or (cat == "Cc" and not c.isspace()))
    controls = r"[\x00-\x08\x0e-\x1b\x7f]"  # those of ASCII, for which the large class is too slow
    return re.compile(rf"{controls}|(?=[^\x00-\x7f]){rest[:-1]}{ranges}]")


@functools.cache
def _clusters():
    """A non-ASCII character with the marks that may combine with it, or marks with the ASCII character they sit on."""
    marks = _char_class(lambda c, cat: cat[0] == "M" or "\u1160" <= c <= "\u11ff" or c in "\uff9e\uff9f")
    combining = f"(?=[^\\x00-\\x7f]){marks}+"  # the look-ahead is quick, the class of all marks slow
    return re.compile(f"[\\x00-\\x7f]{combining}|[^\\x00-\\x7f](?:{combining})?")


@functools.lru_cache(CACHE)
def _fold(cluster):
    """NFKC and plain punctuation, until nothing changes. The table comes first, because NFKC turns a lone "´"
    into a space and an accent."""
    while True:
        folded = unicodedata.normalize("NFKC", cluster.translate(_PUNCTUATION))
        if folded == cluster:
            return folded
        cluster = folded


@functools.lru_cache(CACHE)
def _lower(cluster):
    return _fold(cluster.lower())


# --------------------------------------------------------------------------------------------------------- placeholders


@functools.cache
def _moses():
    moses = _library("sacremoses").MosesTokenizer

    class Tokenizer(moses):
        """sacremoses' tokeniser with fast tests for letters, which otherwise take most of its time."""

        alpha, lower = frozenset(moses.IsAlpha), frozenset(moses.IsLower)

        def isanyalpha(self, text):
            return not self.alpha.isdisjoint(text)

        def islower(self, text):
            return self.lower.issuperset(text)

    return Tokenizer(lang="en")


@functools.cache
def _rules():
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


class Aligned:
    """A text and, unless `spans` is None, the (start, end) in the source of each of its characters. Every change goes
    through `sub`, so the text is the same with and without alignment."""

    def __init__(self, text: str, spans: list | None = None):
        self.text, self.spans = text, spans

    def sub(self, pattern: re.Pattern, replacement: str | Callable[[str], str]) -> None:
        """`replacement`: a string, or a function from the matched string to its replacement. A new character gets the
        span of the whole match; if a function keeps the length, each character keeps its own span."""
        if self.spans is None:
            plain = isinstance(replacement, str)
            self.text = pattern.sub(replacement if plain else lambda match: replacement(match.group()), self.text)
            return
        make = replacement if callable(replacement) else lambda _: replacement
        text, spans, last = [], [], 0
        for match in pattern.finditer(self.text):
            start, end = match.span()
            new = make(match.group())
            text += (self.text[last:start], new)
            spans += self.spans[last:start]
            same = callable(replacement) and len(new) == end - start
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


def _context(next_char):
    """What Moses distinguishes in the word after "word.": it starts with a lower-case letter ("a"), with a digit ("0"),
    or with anything else, or there is none ("X")."""
    if "0" <= next_char <= "9":
        return "0"
    return "a" if next_char and _moses().islower(next_char) else "X"


_SIMPLE = re.compile(r"""(["(\[]*)([a-z0-9]+)([,;:!?)"\]]*)""")  # only marks that Moses always splits off


def _split(word, context):
    if word in WHOLE:
        return (word,)
    simple = _SIMPLE.fullmatch(word)
    if simple:
        return (*simple[1], simple[2], *simple[3])
    # Moses looks only at the neighbouring words; "X" and the context stand for them.
    pieces = _moses().tokenize(f"X {word} {context}", escape=False)[1:-1]
    if len(pieces) == 1:
        return (word,)
    if "".join(pieces) != word:
        raise ValueError(f"Moses makes {pieces!r:.100} of {word!r:.60}, which its tokens do not spell")
    # "o'neill" -> o 'neill: split until nothing splits any more, so that tokenising tokens changes nothing.
    contexts = [_context(piece[0]) for piece in pieces[1:]] + [context]
    return tuple(token for piece, after in zip(pieces, contexts, strict=True) for token in _split_word(piece, after))


_split_cached = functools.lru_cache(CACHE)(_split)


CACHES = (_fold, _lower, _split_cached)


def _split_word(word, context):
    return _split_cached(word, context) if len(word) <= CACHED_LENGTH else _split(word, context)


def tokenise(words: list[str]) -> list[tuple[str, ...]]:
    """Moses tokens of a lower-case sentence, one tuple per word. Words are split one at a time and cached: Moses
    decides by the word and, if it ends in a full stop, by the character after it. The result is that of whole
    sentences, several times as fast."""
    out = []
    for i, word in enumerate(words):
        if word.isascii() and word.isalnum():
            out.append((word,))
        else:
            context = "X"
            if word[-1] == "." and i + 1 < len(words):
                context = _context(words[i + 1][0])
            out.append(_split_word(word, context))
    return out


# ------------------------------------------------------------------------------------------------------------ sentences


class _Sentencizer:
    """The sentences of spaCy's rule-based sentencizer on a blank English pipeline, much faster. spaCy's tokeniser looks
    at one blank-separated word at a time, so its result for a word is cached as the kinds of its tokens: "E" may end a
    sentence, "P" is other punctuation, "W" anything else. A sentence starts at the first W after an E.

    One rule is added: a full stop within a word ends no sentence before a lower-case letter ("etc. and"). Moses has
    the same rule; without it the lower-case output would be cut at "mr. smith" when it is normalised again."""

    def __init__(self):
        nlp = _library("spacy").blank("en")
        self.tokenizer = nlp.tokenizer
        self.enders = nlp.add_pipe("sentencizer").punct_chars
        self.kinds = functools.lru_cache(CACHE)(self._kinds)

    def _kinds(self, word):
        if word in PLACEHOLDERS:
            return ((0, "W"),)
        doc = self.tokenizer(word)
        return tuple((t.idx, "E" if t.text in self.enders else "P" if t.is_punct else "W") for t in doc)

    def __call__(self, text):
        """Offsets at which the sentences of a cleaned text start."""
        starts, ended, attached, offset = [0], False, False, 0  # attached: the full stop was part of a longer word
        for word in text.split(" "):
            if word.isalnum():
                if ended:
                    if not (attached and word[0].islower()):
                        starts.append(offset)
                    ended = False
            elif word:
                ended_here = False  # whether the sentence ended within this word, as in "end.Start"
                for at, kind in (self.kinds if len(word) <= CACHED_LENGTH else self._kinds)(word):
                    if kind == "E":
                        ended, ended_here, attached = True, True, at > 0 and word[-1] == "."
                    elif kind == "W" and ended:
                        # spaCy's rule for "end.Start" looks at the case of both sides; the left will be lower case
                        if word[at].isupper() if ended_here else not (attached and at == 0 and word[0].islower()):
                            starts.append(offset + at)
                        ended = False
            offset += len(word) + 1
        return starts


class _TrainedSplitter:
    """The sentences of an installed spaCy model."""

    def __init__(self, model):
        spacy = _library("spacy")
        try:
            nlp = spacy.load(model, exclude=["tagger", "attribute_ruler", "lemmatizer", "ner"])
        except OSError as error:
            raise ValueError(f"spaCy model {model!r} is not installed; without one, spaCy's rules are used") from error
        nlp.max_length = 10**9  # tupe.corpus.readers limits the length; spaCy's own limit is a million characters
        self.nlp = nlp

    def __call__(self, text):
        return [0, *(sentence.start_char for sentence in list(self.nlp(text).sents)[1:])]


class Normaliser:
    """The text contract up to tokens. `spacy_model`: None for the rule-based splitter, or the name of an installed
    spaCy model."""

    def __init__(self, spacy_model: str | None = None):
        self.spacy_model = spacy_model
        self.split = _TrainedSplitter(spacy_model) if spacy_model else _Sentencizer()

    def aligned_sentences(self, aligned: Aligned) -> Iterator[Aligned]:
        """The cleaned, lower-case sentences of an `Aligned` text."""
        aligned = aligned.clean()
        if not aligned.text:
            return
        starts = self.split(aligned.text)
        for start, end in zip(starts, [*starts[1:], len(aligned.text)], strict=True):
            yield aligned.cut(start, end).lower()

    def sentences(self, text: str) -> list[list[str]]:
        """The tokens of each sentence. Only invisible characters are dropped; "" gives []."""
        sentences = (tokenise(sentence.text.split()) for sentence in self.aligned_sentences(Aligned(text)))
        return [tokens for words in sentences if (tokens := [token for word in words for token in word])]

    def tokens(self, text: str) -> list[str]:
        """The tokens of all sentences."""
        return [token for sentence in self.sentences(text) for token in sentence]

    def normalise(self, text: str) -> str:
        """The tokens, joined by blanks."""
        return " ".join(self.tokens(text))

    def spans(self, text: str) -> list[Span]:
        """The tokens of `tokens`, each with the characters text[start:end] that it was made from."""
        return [Span(token, spans[0][0], spans[-1][1]) for token, spans in self.aligned(text)]

    def aligned(self, text: str) -> list[tuple[str, list]]:
        """[(token, [(start, end) of each of its characters]), ...]."""
        out = []
        for sentence in self.aligned_sentences(Aligned(text, [(i, i + 1) for i in range(len(text))])):
            words = list(_WORD.finditer(sentence.text))
            for word, tokens in zip(words, tokenise([word.group() for word in words]), strict=True):
                start = word.start()
                for token in tokens:
                    out.append((token, sentence.spans[start : start + len(token)]))
                    start += len(token)
        return out


# --------------------------------------------------------------------------------------------------------------- pieces

JOINED = "@@"  # subword-nmt's and fastBPE's mark for "the word goes on"


def _bpe_codes(path):
    """A function from a word to its pieces ("hel@@", "lo"), from a file of merge operations by fastBPE (lines such as
    "t h 100") or subword-nmt ("#version: 0.2", then lines such as "t h")."""
    from subword_nmt.apply_bpe import BPE

    lines = path.read_text(encoding="utf-8").splitlines()
    if lines and len(lines[0].split(" ")) == 3:  # fastBPE adds counts; otherwise its codes are those of version 0.2
        lines = ["#version: 0.2", *(line.rsplit(" ", 1)[0] for line in lines)]
    bpe = BPE(io.StringIO("\n".join(lines) + "\n"), separator=JOINED)
    return lambda word: bpe.segment_tokens([word])


def load_sentencepiece(path: Path) -> Any:
    """A model of SentencePiece, which opens files itself only by names in UTF-8. Raises ValueError for another file."""
    content, sentencepiece = Path(path).read_bytes(), _library("sentencepiece")
    try:
        if content:  # nothing would do as a model without pieces
            return sentencepiece.SentencePieceProcessor(model_proto=content)
    except RuntimeError:
        pass
    raise ValueError(f"{path} is no model of SentencePiece, or cut off")


class TextEncoder:
    """Raw text -> the pieces and ids of pre-training, and back, from the files that `tupe prepare corpus` wrote to
    `data_dir`: sentencepiece.bpe.model, dict.txt and, if present, manifest.json (spaCy model) and words.txt (the words
    that the rare-word filter kept). bpe.codes, which the released TUPE has, replaces the SentencePiece model.

    Raises ValueError if a file is missing."""

    FILES = ("dict.txt", "sentencepiece.bpe.model", "bpe.codes", "words.txt", "manifest.json")
    SPECIALS = ("<s>", "<pad>", "</s>", UNK)  # fairseq's first four ids; <mask> comes last, after dict.txt

    def __init__(self, data_dir: str | Path):
        data_dir = Path(data_dir)
        model, codes = data_dir / "sentencepiece.bpe.model", data_dir / "bpe.codes"
        for file in (data_dir / "dict.txt", codes if codes.is_file() else model):
            if not file.is_file():
                raise ValueError(f"{data_dir} has no {file.name}; `tupe prepare corpus` makes such a folder")
        self.codes = codes.is_file()
        if self.codes:
            self._cut = _bpe_codes(codes)
        else:
            self.model = load_sentencepiece(model)
            self._cut = functools.partial(self.model.encode, out_type=str)
        lines = (data_dir / "dict.txt").read_text(encoding="utf-8").split("\n")
        symbols = [*self.SPECIALS, *(line.rsplit(" ", 1)[0] for line in lines if line), "<mask>"]
        self.symbols, self.ids = symbols, {symbol: i for i, symbol in enumerate(symbols)}
        manifest, words = data_dir / "manifest.json", data_dir / "words.txt"
        settings = json.loads(manifest.read_text(encoding="utf-8")) if manifest.is_file() else {}
        self.normaliser = Normaliser(settings.get("spacy_model"))
        self.words = frozenset(words.read_text(encoding="utf-8").split("\n")) if words.is_file() else None
        self._pieces = functools.lru_cache(CACHE)(self._split)
        self.folder = data_dir

    def __reduce__(self):
        """Pickled by its folder: caches cannot be."""
        return type(self), (self.folder,)

    def __len__(self):
        """The number of types, <s> <pad> </s> <unk> and <mask> included: the rows of the model's embedding."""
        return len(self.symbols)

    def _split(self, token):
        if token == UNK or (self.words is not None and token not in self.words):
            return (UNK,)
        return tuple(self._cut(token))

    def token_pieces(self, tokens: list[str]) -> list[str]:
        """The pieces of normalised tokens. A piece that is not in dict.txt (a character too rare for the model) has the
        id of <unk>."""
        return [piece for t in tokens for piece in (self._pieces if len(t) <= CACHED_LENGTH else self._split)(t)]

    def pieces(self, text: str, whole: Collection[str] = ()) -> list[str]:
        """The pieces of raw text, without <s> and </s>. whole: strings, such as "<mask>", that are pieces themselves;
        the text around one becomes what it is around a word with a capital letter, such as a name."""
        pattern = "|".join(map(re.escape, sorted(whole, key=len, reverse=True)))  # of two that fit, the longer one
        marks = dict.fromkeys(re.findall(pattern, text)) if pattern else ()
        if not marks:
            return self.token_pieces(self.normaliser.tokens(text))
        known, stem = clean(text).lower(), "Zq"
        while stem.lower() in known:
            stem += "q"
        words = {mark: f"{stem}{number}z" for number, mark in enumerate(marks)}  # they are nowhere in the text
        back = {word.lower(): mark for mark, word in words.items()}
        # Between blanks, or a link would swallow it; only "'s" and the like is cut off by itself.
        text = re.sub(f"({pattern})(['’](?=\\w))?", lambda found: f" {words[found[1]]}{found[2] or ' '}", text)
        parts = [part for token in self.normaliser.tokens(text) for part in re.split(f"({'|'.join(back)})", token)]
        pieces = ([back[part]] if part in back else self.token_pieces([part]) for part in parts if part)
        return [piece for word in pieces for piece in word]

    def encode(self, text: str, whole: Collection[str] = ()) -> list[int]:
        """The ids of `pieces`."""
        unk = self.ids[UNK]
        return [self.ids.get(piece, unk) for piece in self.pieces(text, whole)]

    def word_ids(self, text: str) -> list[list[int]]:
        """The ids of `encode`, word by word (a punctuation mark is a word)."""
        unk = self.ids[UNK]
        tokens = (self.token_pieces([token]) for token in self.normaliser.tokens(text))
        return [[self.ids.get(piece, unk) for piece in pieces] for pieces in tokens]

    def group_words(self, ids: list[int]) -> list[list[int]]:
        """Ids of running text, grouped into words by the marks in the pieces (a word begins, or goes on)."""
        words, begins = [], True
        for i in ids:
            piece = self.symbols[i]
            if begins if self.codes else piece.startswith(SPACE) or not words:
                words.append([])
            words[-1].append(i)
            begins = not piece.endswith(JOINED)
        return words

    def spans(self, text: str) -> list[Span]:
        """The pieces of `pieces`, each with the characters text[start:end] that it was made from."""
        out = []
        for token, chars in self.normaliser.aligned(text):
            start, pieces = 0, self.token_pieces([token])
            for number, piece in enumerate(pieces, 1):
                mark = JOINED * (number < len(pieces)) if self.codes else SPACE * piece.startswith(SPACE)
                length = len(token) if piece == UNK else len(piece) - len(mark)
                covered = chars[start : start + max(length, 1)]  # a lone "\u2581" gets the next character's span
                out.append(Span(piece, covered[0][0], covered[-1][1]))
                start += length
        return out

    def decode(self, ids: Iterable[int]) -> str:
        """The tokens, joined by blanks, without <s>, <pad> and </s>."""
        pieces = [self.symbols[int(i)] for i in ids]
        if self.codes:
            pieces = [p.removesuffix(JOINED) if p.endswith(JOINED) else p + " " for p in pieces]
            return " ".join(p for p in "".join(pieces).split() if p not in ("<s>", "<pad>", "</s>"))
        text = "".join(f" {p}" if p in (UNK, "<mask>") else p for p in pieces if p not in ("<s>", "<pad>", "</s>"))
        return " ".join(text.replace(SPACE, " ").split())
