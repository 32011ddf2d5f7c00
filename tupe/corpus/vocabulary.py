"""The vocabulary of a corpus: SentencePiece of the paper's pipeline, new or another folder's, or a given tokeniser of
the library `tokenizers`. All have fairseq's ids: <s> <pad> </s> <unk>, the tokens, <mask>."""

import io
import itertools
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..common.prepared import text_encoder
from ..data.splits import type_of_ids
from ..normaliser import PLACEHOLDERS, SPACE
from ..run.checksums import check
from ..text import MASK, TextEncoder, load_sentencepiece, load_tokenizer, read_dictionary

SPECIALS = 5  # <s> <pad> </s> <unk> and <mask>, which the fairseq task adds
LONGEST = 100_000  # bytes of a sentence: SentencePiece leaves longer ones out and says nothing
CUTS = r"\S.{0,24998}(?!\S)|\S{24999}"  # what such a sentence is cut into: no sign has more than four bytes
# fairseq's special tokens -> their names in a Hugging Face folder, and what they are usually called.
ROLES = {
    "<s>": ("cls_token", "bos_token", "[CLS]", "<s>", "<cls>"),
    "<pad>": ("pad_token", "[PAD]", "<pad>"),
    "</s>": ("sep_token", "eos_token", "[SEP]", "</s>", "<sep>", "<eos>"),
    "<unk>": ("unk_token", "[UNK]", "<unk>"),
    MASK: ("mask_token", "[MASK]", MASK),
}


# ------------------------------------------------------------------------------------------------------ the paper's


def train_sentencepiece(sentences: Iterable[str], vocab_size: int) -> bytes:
    """Train BPE of SentencePiece on normalised sentences. `vocab_size` includes SPECIALS, so it has vocab_size - 5
    pieces and <unk>. A sentence that is too long is cut between words, of which alone BPE knows. Raises ValueError if
    the text does not allow so many types."""
    import sentencepiece

    model = io.BytesIO()
    cut = ([text] if len(text.encode()) <= LONGEST else re.findall(CUTS, text) for text in sentences)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=itertools.chain.from_iterable(cut),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size - SPECIALS + 1,
            normalization_rule_name="identity",  # the text is normalised already; so pieces keep their offsets
            character_coverage=0.9995,
            bos_id=-1,
            eos_id=-1,
            unk_id=0,
            num_threads=1,
            minloglevel=2,
            user_defined_symbols=[SPACE + name for name in PLACEHOLDERS],
            required_chars="?!",  # rare in an encyclopedia, and every second text of QQP has one
            max_sentence_length=LONGEST,  # also written into the model
        )
    except RuntimeError as error:
        hint = re.search(r"(<=|vs) (\d+)", str(error))  # SentencePiece counts its own types alone
        valid = hint and f"valid: at {'most' if hint[1] == '<=' else 'least'} {int(hint[2]) + SPECIALS - 1}"
        raise ValueError(
            f"SentencePiece cannot make {vocab_size} types from this text: {valid or error}; the same command with "
            "another --vocab-size continues from here"
        ) from error
    return model.getvalue()


class Pieces(NamedTuple):
    """The paper's pieces of data, or of a model, that exist already."""

    model: bytes  # sentencepiece.bpe.model
    dictionary: str  # dict.txt, whose order the new one keeps
    settings: dict[str, Any]  # `language` and `cased`, which the text needs, too


def read_pieces(folder: Path) -> Pieces:
    """The vocabulary of prepared data, or of a model's folder. Raises ValueError for files that are damaged."""
    encoder = text_encoder(folder)
    pieces = {encoder.model.id_to_piece(i) for i in range(len(encoder.model))} - {"<unk>"}
    if pieces != {*encoder.symbols} - {*TextEncoder.SPECIALS, MASK}:
        raise ValueError(f"{folder}: the types of dict.txt are not the pieces of sentencepiece.bpe.model")
    settings = {name: getattr(encoder.normaliser, name) for name in ("language", "cased")}
    model = (folder / "sentencepiece.bpe.model").read_bytes()
    return Pieces(model, (folder / "dict.txt").read_text(encoding="utf-8"), settings)


# -------------------------------------------------------------------------------------------- of the library tokenizers


def given_vocabulary(path: str | Path) -> str | Pieces:
    """What --tokenizer PATH names: the vocabulary of prepared data or of a model, as it is, or `read_tokenizer`."""
    folder, own = Path(path), Path(path, "tokenizer.json")
    if (folder / "dict.txt").is_file():
        if own.is_file():
            check(own)
            content = own.read_text(encoding="utf-8")
            if names_in_dictionary(content) == read_dictionary(folder / "dict.txt"):
                return content
        elif (folder / "sentencepiece.bpe.model").is_file():
            return read_pieces(folder)
    return read_tokenizer(path)


def read_tokenizer(path: str | Path) -> str:
    """A user's tokeniser with our ids: a tokenizer.json, or a Hugging Face folder. Raises ValueError as
    `their_tokenizer` does."""
    return with_our_ids(*their_tokenizer(path))


def their_tokenizer(path: str | Path) -> tuple[str, dict[str, str | None], Path]:
    """(the tokenizer.json as it is, its token for each of ROLES, the file). Raises ValueError for one that is not of
    the library `tokenizers`, or lacks a special token that masked language models need."""
    path, named = Path(path), {}
    file = path / "tokenizer.json" if path.is_dir() else path
    if not path.exists():
        raise ValueError(f"--tokenizer {path}: not found; valid: paper, a tokenizer.json, or its folder")
    if file.is_file():
        check(file)
        content = file.read_text(encoding="utf-8", errors="replace")
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            if (file.parent / name).is_file():
                named.update(json.loads((file.parent / name).read_text(encoding="utf-8")))
    else:  # vocab.txt, merges.txt, sentencepiece.bpe.model: transformers knows how to read each
        try:
            from transformers import AutoTokenizer

            theirs = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
            content, named, file = theirs.backend_tokenizer.to_str(), theirs.special_tokens_map, path
        except Exception as error:
            reason = " ".join(str(error).split())[:100]
            raise ValueError(f"{path} has no tokenizer.json, and transformers makes none of it: {reason}") from None
    types, roles = load_tokenizer(content, file).get_vocab(), {}
    for role, names in ROLES.items():
        own = (named.get(name, name) for name in names)
        own = [token["content"] if isinstance(token, dict) else token for token in own]
        roles[role] = next((token for token in own if token in types), None)
    if missing := [names[0] for role, names in ROLES.items() if roles[role] is None and role != "<unk>"]:
        raise ValueError(f"{file} has no {', '.join(missing)}: masked language models need it: add it, save again")
    if types.keys() <= set(roles.values()):  # what transformers 5 makes of a folder without a tokeniser's files
        raise ValueError(f"{path} has neither tokenizer.json nor a vocabulary that transformers reads")
    return content, roles, file


def with_our_ids(content: str, roles: dict[str, str | None], name: str | Path) -> str:
    """A tokenizer.json with ids of ours: the special tokens, which `roles` maps to the tokeniser's own, at both ends,
    and all others in their order. It frames texts as this project does: `<s> A </s>`, `<s> A </s> </s> B </s>`."""
    from tokenizers import processors

    tokenizer = load_tokenizer(content, name)
    types, data = tokenizer.get_vocab(), json.loads(tokenizer.to_str())  # which has what older files leave out
    if roles["<unk>"] is None:  # bytes are never unknown
        roles, types = {**roles, "<unk>": "<unk>"}, {**types, "<unk>": -1}
    special = list(roles.values())
    if len(set(special)) < len(special):
        raise ValueError(f"{name}: one token has two roles: {', '.join(special)}")
    others = [token for token in sorted(types, key=types.get) if token not in roles.values()]
    order = [*special[:-1], *others, special[-1]]
    ids, model = {token: i for i, token in enumerate(order)}, data["model"]
    if model["type"] == "Unigram":
        scores = dict(model["vocab"])
        model.update(vocab=[[token, scores.get(token, min(scores.values()))] for token in order], unk_id=3)
    else:
        model["vocab"] = ids
    added = {token["content"]: token for token in data["added_tokens"]}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    for token in special:
        added[token] = {"content": token, **plain, **added.get(token, {}), "special": True}
    data["added_tokens"] = sorted(({**token, "id": ids[text]} for text, token in added.items()), key=lambda t: t["id"])
    data.update(padding=None, truncation=None, post_processor=None)
    tokenizer = load_tokenizer(json.dumps(data, allow_nan=False), name)
    begin, end = roles["<s>"], roles["</s>"]
    frame = processors.TemplateProcessing(
        single=[begin, "$A", end], pair=[begin, "$A", end, end, "$B:0", end],
        special_tokens=[(begin, 0), (end, 2)],
    )  # fmt: skip
    of_bytes = '"ByteLevel"' in json.dumps(data["pre_tokenizer"], allow_nan=False)
    if of_bytes:  # else a word's offsets have the blank before it
        frame = processors.Sequence([processors.ByteLevel(trim_offsets=True), frame])
    tokenizer.post_processor = frame
    return tokenizer.to_str(pretty=True)


def names_in_dictionary(tokenizer: str) -> list[str]:
    """The names in dict.txt of a tokeniser's types by id: its own, but for what a line of that file cannot hold and for
    the special tokens."""
    types = load_tokenizer(tokenizer, "tokenizer.json").get_vocab()
    others = sorted(types, key=types.get)[4:-1]
    names = [repr(name) if name in ROLES or re.search("[\r\n]", name) else name for name in others]
    return [*TextEncoder.SPECIALS, *names, MASK]


# ------------------------------------------------------------------------------------------------------------- dict.txt


def write_dictionary(vocabulary: str | Path, counts: np.ndarray, path: str | Path) -> np.ndarray:
    """Write dict.txt in fairseq's format: every piece of the SentencePiece model, the most frequent first or as in the
    dict.txt beside it, or every token of a tokenizer.json, in its order. Returns the table [id there, and one more for
    </s>] -> id in dict.txt."""
    if Path(vocabulary).suffix == ".json":
        names = names_in_dictionary(Path(vocabulary).read_text(encoding="utf-8"))
        order, eos = range(4, len(names) - 1), len(names)
        places = [*range(len(names)), 2]
    else:
        model = load_sentencepiece(vocabulary)
        names, unk, eos = [model.id_to_piece(i) for i in range(len(model))], model.unk_id(), len(model)
        order = sorted((i for i in range(eos) if i != unk), key=lambda i: (-counts[i], i))
        if (known := Path(vocabulary).with_name("dict.txt")).is_file():
            place = {name: at for at, name in enumerate(read_dictionary(known))}
            order.sort(key=lambda i: place[names[i]])
        places = np.zeros(eos + 1, dtype=np.int64)
        places[order] = np.arange(4, 4 + len(order))
        places[unk], places[eos] = 3, 2
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{names[i]} {counts[i]}\n" for i in order)
    return np.array(places, dtype=type_of_ids(len(order) + SPECIALS))
