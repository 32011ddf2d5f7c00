"""What evaluations ask of a model, its dictionary and its held-out text, for a folder that transformers reads. Models,
dictionaries and tasks of fairseq answer to the same names.

B batch, L sequence length, V vocabulary.
"""

from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from ..common import record
from ..common.safe_load import from_folder
from ..data.blocks import BOS, EOS, PAD, Blocks
from ..data.masks import IGNORED, MaskedBlocks, pad
from ..data.splits import HELD_OUT_SEED, prefixes_of, read_symbols
from ..text import TextEncoder
from ..training.recipe import PRETRAINING


class Dictionary:
    """The types of dict.txt with the special ones."""

    nspecial, unk_word = len(TextEncoder.SPECIALS), "<unk>"

    def __init__(self, folder: Path):
        self.symbols = read_symbols(folder)

    def __len__(self):
        return len(self.symbols)

    def __getitem__(self, i):
        return self.symbols[i]

    def index(self, symbol: str) -> int:
        return self.symbols.index(symbol)

    def bos(self) -> int:
        return BOS

    def pad(self) -> int:
        return PAD

    def eos(self) -> int:
        return EOS


class Model(nn.Module):
    """Encoder and head of a `TupeForMaskedLM`."""

    def __init__(self, model: nn.Module, dictionary: Dictionary):
        super().__init__()
        self.without_head = ""  # its folder, if that has no head of a masked language model
        self.encoder, self.lm_head, self.dictionary = model.tupe.encoder, model.lm_head, dictionary
        self.longest = model.config.max_position_embeddings

    @classmethod
    def load(cls, folder: str | Path, data: Path) -> "Model":
        """data: folder of its dict.txt. Raises ValueError for that of another model."""
        from transformers.utils.logging import disable_progress_bar  # takes as long as torch: not before it is needed

        from ..modeling_tupe import TupeForMaskedLM

        disable_progress_bar()
        loaded, found = from_folder(TupeForMaskedLM, folder, output_loading_info=True)
        dictionary, own = Dictionary(data), Path(folder, "dict.txt")
        if len(dictionary) != (types := loaded.config.vocab_size):
            raise ValueError(
                f"{data}/dict.txt makes {len(dictionary)} types, the model has {types}: another model's dictionary; "
                "take the dict.txt of its own pre-training data"
            )
        if own.exists() and Dictionary(Path(folder)).symbols != dictionary.symbols:
            raise ValueError(f"{data}/dict.txt has other types than {own}: another model's dictionary")
        model = cls(loaded, dictionary).float().eval()
        if any(name.startswith("lm_head.") for name in found["missing_keys"]):
            model.without_head = str(folder)
        return model

    def forward(
        self, src_tokens: Tensor, masked_tokens: tuple[Tensor, Tensor] | None = None, num_tokens: int | None = None
    ) -> tuple:
        """src_tokens [B, L] -> (logits [B, L, V], or [n, V] at masked_tokens, a pair of rows and columns [n]; None)."""
        indices = None if masked_tokens is None else masked_tokens[0] * src_tokens.size(1) + masked_tokens[1]
        if self.without_head:
            raise ValueError(f"{self.without_head} has no head of a masked language model: it predicts no words")
        x, _ = self.encoder(src_tokens, False, num_tokens, indices)
        return self.lm_head(x, self.encoder.tokens.weight), None

    def max_positions(self) -> int:
        return self.longest


class HeldOut:
    """Held-out text in blocks with the masks of pre-training, as far as a folder says what those were. longest: the
    longest block, whatever it says."""

    def __init__(self, folder: str | Path, data: Path, longest: int):
        folder = Path(folder).resolve()
        about = record.read(folder) or record.read(folder.parent)  # of a run, or of its checkpoint-N
        own = about.config if about else {}
        known = {name: value for name, value in PRETRAINING.options.items() if name.startswith("task.")}
        settings = {name.partition(".")[2]: own.get(name, value) for name, value in known.items()}
        settings["tokens_per_sample"] = min(settings["tokens_per_sample"], longest)  # of an export nothing is known
        fixed = {"sample_break_mode": "complete", "long_sentences": "cut"}
        unused = {"mask_whole_words": False, "mask_multiple_length": 1}
        self.cfg = SimpleNamespace(data=str(data), **settings, **fixed, **unused)
        self.source_dictionary, self.splits = Dictionary(data), {}

    def load_dataset(self, split: str) -> None:
        cfg, symbols = self.cfg, self.source_dictionary.symbols
        masks = {name: getattr(cfg, name) for name in ("mask_prob", "leave_unmasked_prob", "random_token_prob")}
        blocks = Blocks(prefixes_of(cfg.data, split), cfg.tokens_per_sample, symbols)
        self.splits[split] = HeldOutBlocks(blocks, symbols, HELD_OUT_SEED, **masks)

    def dataset(self, split: str) -> "HeldOutBlocks":
        return self.splits[split]


class HeldOutBlocks(MaskedBlocks):
    def __getitem__(self, i: int) -> tuple:
        return super().__getitem__((0, i))  # as fairseq masks where nothing is trained

    def collater(self, items: list) -> dict:
        ids, targets = (torch.from_numpy(part) for part in pad(items))
        return {"net_input": {"src_tokens": ids}, "target": targets.masked_fill(targets == IGNORED, PAD)}
