"""A trained model from Python, with the methods of fairseq's RoBERTa hub interface: raw text in, features and
predictions out.

B batch, L sequence length, C model width.
"""

import functools
from pathlib import Path

import torch
from fairseq.tasks import FairseqTask
from omegaconf import DictConfig
from torch import Tensor, nn

from ..common.glue import range_of
from ..text import TextEncoder


class TupeHubInterface(nn.Module):
    """What `TupeModel.from_pretrained` returns, in evaluation mode.

    cfg: the checkpoint's configuration; data_dir: the folder with dict.txt and sentencepiece.bpe.model of the
    pre-training data. Not a subclass of fairseq's interface, which would build the GPT-2 BPE.
    """

    def __init__(self, cfg: DictConfig, task: FairseqTask, model: nn.Module, data_dir: str | Path):
        super().__init__()
        self.cfg, self.task, self.model, self.data_dir = cfg, task, model, data_dir
        self.eval()

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @functools.cached_property
    def text(self) -> TextEncoder:
        """The text encoder of the data folder; only methods that read or write text need it."""
        text = TextEncoder(self.data_dir)
        if text.symbols != self.task.source_dictionary.symbols:
            raise ValueError(f"{self.data_dir}/dict.txt is not the dictionary that the task of this checkpoint loaded")
        return text

    def encode(self, sentence: str, *more_sentences: str) -> Tensor:
        """Raw text -> ids [L]: `<s> A </s>`, or `<s> A </s> </s> B </s>`; normalised and split as in pre-training."""
        d = self.task.source_dictionary
        ids = [d.bos(), *self.text.encode(sentence), d.eos()]
        for other in more_sentences:
            ids += [d.eos(), *self.text.encode(other), d.eos()]
        return torch.tensor(ids)

    def decode(self, tokens: Tensor) -> str:
        """Ids [L] -> normalised text (lower case, tokens joined by blanks)."""
        return self.text.decode(tokens.tolist())

    def extract_features(self, tokens: Tensor, return_all_hiddens: bool = False) -> Tensor | list[Tensor]:
        """Ids [L] or [B, L] -> features [B, L, C], or the list of all N + 1 hidden states (the embeddings first).

        Raises ValueError for a sequence that is too long for an encoding with a vector for each position.
        """
        tokens = tokens.to(self.device)
        tokens = tokens.unsqueeze(0) if tokens.dim() == 1 else tokens
        features, extra = self.model(tokens, features_only=True, return_all_hiddens=return_all_hiddens)
        return extra["inner_states"] if return_all_hiddens else features

    def register_classification_head(self, name: str, num_classes: int, **options) -> None:
        """Add a head with fresh weights, or replace one."""
        self.model.register_classification_head(name, num_classes=num_classes, **options)
        self.model.to(self.device)

    def predict(self, head: str, tokens: Tensor, return_logits: bool = False) -> Tensor:
        """Ids [L] or [B, L] -> log-probabilities [B, classes] of a classification head, or its logits; of a regression
        the numbers [B, 1], in the units of its labels."""
        tokens = tokens.to(self.device)
        tokens = tokens.unsqueeze(0) if tokens.dim() == 1 else tokens
        logits, _ = self.model(tokens, classification_head_name=head)
        if logits.size(1) == 1:
            least, greatest = range_of({"cfg": self.cfg, "task_state": self.task.state_dict()}, head) or (0, 1)
            return least + logits * (greatest - least)
        return logits if return_logits else torch.log_softmax(logits.float(), dim=-1)

    @torch.no_grad()
    def fill_mask(self, masked_input: str, topk: int = 5) -> list[tuple[str, float, str]]:
        """Text with exactly one <mask> -> [(filled text, probability, token)], the best first.

        A filled text is the normalised input; a token that continues a word is joined to it.
        """
        if (count := masked_input.count("<mask>")) != 1:
            raise ValueError(f"fill_mask needs exactly one <mask>, not {count}: {masked_input!r}")
        d = self.task.source_dictionary
        ids = [d.bos(), *self.text.encode(masked_input, ["<mask>"]), d.eos()]
        place = ids.index(d.index("<mask>"))
        logits, _ = self.model(torch.tensor([ids], device=self.device))  # [1, L, V]
        best = torch.softmax(logits[0, place].float(), dim=-1).topk(topk)
        filled = []
        for probability, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            text = self.text.decode([*ids[:place], token, *ids[place + 1 :]])
            filled.append((text, probability, self.text.decode([token])))
        return filled
