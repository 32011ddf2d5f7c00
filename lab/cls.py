"""How much of its attention [CLS] gives to the first positions (section 3.2 of the TUPE paper).

B batch, L sequence length, H heads, N layers.
"""

import click
import numpy as np
import torch
import torch.nn.functional as F

from tupe.attention import Recorder
from tupe.common.options import QuietCommand
from tupe.common.tables import TextTable
from tupe.evaluate.loading import HeldOut, models
from tupe.modeling_tupe import TupeForMaskedLM

from .properties import text_block

FIRST = 8  # positions after [CLS] that the paper's observation is about


@torch.no_grad()
def cls_attention(model: TupeForMaskedLM, tokens: torch.Tensor, first: int = FIRST) -> np.ndarray:
    """[N, H]: attention of [CLS] to the `first` positions after it, over what uniform attention would give them.

    tokens: [B, L] of one length, without padding. 1 means no preference; TUPE's section 3.2 finds more than that in
    models whose [CLS] has a position.
    """
    if not first + 1 < tokens.size(1):
        raise ValueError(f"sequences of {tokens.size(1)} tokens have no {first} positions beside [CLS] and others")
    recorder = Recorder(model.tupe.encoder.normaliser)
    model.tupe.encoder(tokens, backend=recorder)
    shares = [weights[:, :, 0, 1 : first + 1].sum(-1).mean(0) for weights in recorder.weights_of_layers]  # [H] each
    return torch.stack(shares).float().cpu().numpy() * tokens.size(1) / first


def blocks_of_length(text: HeldOut, length: int, count: int, split: str = "valid") -> torch.Tensor:
    """[count, length]: `<s>` and running validation text in each row; fewer rows of a short text, but at least one."""
    tokens = text_block(text, count * (length - 1) + 1, split)
    count = min(count, (len(tokens) - 1) // (length - 1))
    if not count:
        raise ValueError(f"{split} holds {len(tokens)} tokens, fewer than one block of the model, {length}")
    tokens = tokens[: count * (length - 1) + 1]
    return F.pad(tokens[1:].view(count, length - 1), (1, 0), value=int(tokens[0]))


def ratios(model: TupeForMaskedLM, text: HeldOut) -> dict:
    """What an evaluation.json holds of it: of 16 sequences of held-out text."""
    ratio = cls_attention(model, blocks_of_length(text, model.config.max_position_embeddings, 16))
    return {"first": FIRST, "ratio": ratio.tolist()}


@click.command("cls", cls=QuietCommand)
@models
def command(models):
    """Print how much attention [CLS] pays to the first positions, relative to uniform attention: the mean of heads."""
    rows = [[label, f"{np.mean(ratios(model, text)['ratio']):.3f}"] for label, model, text in models]
    click.echo(TextTable.plain(["model", f"[CLS] to first {FIRST} / uniform"], rows).markdown(), nl=False)
