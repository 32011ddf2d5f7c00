"""A trained model from Python, in the manner of fairseq's RoBERTa hub interface: raw text in, features and predictions
out.

B batch, L sequence length, C model width.
"""

import functools

import torch
from fairseq.models.roberta.hub_interface import RobertaHubInterface
from torch import nn

from ..text import TextEncoder


class TupeHubInterface(RobertaHubInterface):
    """What `TupeModel.from_pretrained` returns, in evaluation mode.

    `predict(head, tokens)`, `register_classification_head(name, num_classes)` and `device` are fairseq's. cfg: the
    checkpoint's configuration; data_dir: the folder with dict.txt and sentencepiece.bpe.model of the pre-training data.
    """

    def __init__(self, cfg, task, model, data_dir):
        nn.Module.__init__(self)  # not RobertaHubInterface's: it would build fairseq's GPT-2 BPE
        self.cfg, self.task, self.model = cfg, task, model
        self.data_dir = data_dir
        self.register_buffer("_float_tensor", torch.zeros(1))  # tells the device
        self.eval()

    @functools.cached_property
    def text(self):
        """The text encoder of the data folder; only what reads or writes text needs one."""
        text = TextEncoder(self.data_dir)
        if text.symbols != self.task.source_dictionary.symbols:
            raise ValueError(f"{self.data_dir}/dict.txt is not the dictionary that the task of this checkpoint loaded")
        return text

    def encode(self, sentence, *more_sentences):
        """Raw text -> ids [L]: `<s> A </s>`, or `<s> A </s> </s> B </s>`; normalised and split as in pre-training."""
        d = self.task.source_dictionary
        ids = [d.bos(), *self.text.encode(sentence), d.eos()]
        for other in more_sentences:
            ids += [d.eos(), *self.text.encode(other), d.eos()]
        return torch.tensor(ids)

    def decode(self, tokens):
        """Ids [L] -> normalised text (lower case, tokens joined by blanks)."""
        return self.text.decode(tokens.tolist())

    def extract_features(self, tokens, return_all_hiddens=False):
        """Ids [L] or [B, L] -> features [B, L, C], or the list of all N + 1 hidden states (the embeddings first).

        Raises ValueError for a sequence longer than the model's positions.
        """
        tokens = tokens.to(self.device)
        tokens = tokens.unsqueeze(0) if tokens.dim() == 1 else tokens
        features, extra = self.model(tokens, features_only=True, return_all_hiddens=return_all_hiddens)
        return extra["inner_states"] if return_all_hiddens else features

    @torch.no_grad()
    def fill_mask(self, masked_input, topk=5):
        """Text with exactly one <mask> -> [(filled text, probability, token)], the best first.

        A filled text is the normalised input; a token that continues a word is joined to it.
        """
        before, *after = masked_input.split("<mask>")
        if len(after) != 1:
            raise ValueError(f"fill_mask needs exactly one <mask>, found {len(after)} in {masked_input!r}")
        d = self.task.source_dictionary
        left = [d.bos(), *self.text.encode(before)]
        ids = [*left, d.index("<mask>"), *self.text.encode(after[0]), d.eos()]
        logits, _ = self.model(torch.tensor([ids], device=self.device))  # [1, L, V]
        best = torch.softmax(logits[0, len(left)].float(), dim=-1).topk(topk)
        filled = []
        for probability, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            text = self.text.decode([*left, token, *ids[len(left) + 1 :]])
            filled.append((text, probability, self.text.decode([token])))
        return filled
