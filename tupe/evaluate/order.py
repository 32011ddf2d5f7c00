"""What a masked language model knows about the order of words, without training it further.

Order sensitivity: of a held-out sentence and the same sentence with two adjacent words swapped, how often and by how
much is the first more likely? (Pseudo-log-likelihoods, see `tupe.evaluate.likelihood`.)
Losses: cross-entropy of masked tokens by their position.

B batch, L sequence length.
"""

from dataclasses import dataclass

import click
import numpy as np
from tqdm import tqdm

from ..common.options import QuietCommand, output, seed
from ..common.prepared import text_encoder
from ..common.tables import TextTable
from ..data.blocks import PAD
from ..data.loader import pad
from ..data.masks import IGNORED
from ..text import TextEncoder
from .likelihood import Sentence, pseudo_log_likelihoods
from .loading import HeldOut, Model, losses_at, models, warn_if_unlike, write_results
from .minimal_pairs import credit

WORDS = (6, 30)  # fewest and most words of a sentence whose order is tested


# ---------------------------------------------------------------------------------------------------- order sensitivity


def held_out_sentences(text: HeldOut, encoder: TextEncoder, count: int, longest: int, seed: int = 1) -> list[Sentence]:
    """`count` sentences of the validation text as words (pieces, in a language without blanks), drawn without
    replacement; the same ones for every model of one data folder, but for those of more than `longest` pieces. Raises
    ValueError if there are fewer."""
    sentences, chosen = text.split(), []
    for index in np.random.default_rng(seed).permutation(len(sentences)):
        pieces = sentences[index][:-1].tolist()  # without </s>
        if len(pieces) > longest:
            continue
        words = encoder.group_words(pieces)
        known = not any(encoder.ids["<unk>"] in word for word in words)
        if WORDS[0] <= len(words) <= WORDS[1] and known and to_swap(words):
            chosen.append(words)
            if len(chosen) == count:
                return chosen
    remedy = f"valid here: --sentences {len(chosen)} or fewer"
    if not chosen:
        remedy = "a language without blanks between words has to be named when the data are prepared: --language"
    which = f"of {WORDS[0]} to {WORDS[1]} words and at most {longest} pieces"
    what = f"{text.data}/valid has {len(chosen)} sentences {which}, not {count}"
    raise ValueError(f"{what}; {remedy}")


def to_swap(words: Sentence) -> list[int]:
    """Numbers of the words that a different one follows; never the last one, which is mostly a full stop."""
    return [i for i in range(len(words) - 2) if words[i] != words[i + 1]]


def swap_adjacent(words: Sentence, rng: np.random.Generator) -> Sentence:
    """The sentence with two adjacent, different words exchanged, one of `to_swap`."""
    i = int(rng.choice(to_swap(words)))
    return [*words[:i], words[i + 1], words[i], *words[i + 2 :]]


def order_sensitivity(model: Model, sentences: list[Sentence], seed: int = 1) -> np.ndarray:
    """[sentences]: log-likelihood of the original minus that of the swapped sentence, in nats."""
    swapped = [swap_adjacent(words, np.random.default_rng([seed, i])) for i, words in enumerate(sentences)]
    scores = pseudo_log_likelihoods(model, [*sentences, *swapped])
    original, other = scores[: len(sentences)], scores[len(sentences) :]
    return np.array([a.word - b.word for a, b in zip(original, other, strict=True)])


# --------------------------------------------------------------------------------------------------------------- losses


@dataclass
class TokenLosses:
    """Cross-entropies (nats) of masked tokens in held-out blocks."""

    loss: np.ndarray  # [n]
    position: np.ndarray  # [n], 0 is [CLS], which masked_lm masks like any other token
    block: np.ndarray  # [n] number of its block

    def standard_error(self, resamples: int = 1000, seed: int = 1) -> float | None:
        """Of the mean, by the bootstrap over blocks: tokens of one block share their context. None if there is one."""
        sums, counts = self.by_block()
        if len(sums) == 1:
            return None
        drawn = np.random.default_rng(seed).integers(len(sums), size=(resamples, len(sums)))
        return float((sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)).std(ddof=1))

    def by_block(self) -> tuple[np.ndarray, np.ndarray]:
        """(sum of the losses, number of masked tokens) of each block."""
        return np.bincount(self.block, self.loss), np.bincount(self.block)

    def by_position(self, longest: int) -> dict[str, tuple[float, int]]:
        """{"8-15": (mean loss, tokens)} of the tokens at these positions, from powers of 2 on."""
        edges, found = [0, *(2**k for k in range(20) if 2**k < longest), longest], {}
        for low, high in zip(edges, edges[1:], strict=False):
            chosen = (self.position >= low) & (self.position < high)
            if chosen.any():
                name = str(low) if high == low + 1 else f"{low}-{high - 1}"
                found[name] = float(self.loss[chosen].mean()), int(chosen.sum())
        return found


def token_losses(model: Model, text: HeldOut, tokens: int, split: str = "valid", batch: int = 32) -> TokenLosses:
    """Losses of the masked tokens in the first blocks of a split that hold at least `tokens` tokens, with the split's
    own masks, which are the same for every seed and model of the same `MASKING`. Raises ValueError if the
    split holds fewer."""
    data, found, seen = text.blocks(split), [], 0
    if (there := data.blocks.sizes.sum()) < tokens:
        raise ValueError(f"{split} holds {there} tokens, fewer than {tokens}; valid here: --tokens {there} or fewer")
    for begin in tqdm(range(0, len(data), batch), unit="batch", disable=None, leave=False):
        items = [data[0, i] for i in range(begin, min(begin + batch, len(data)))]
        ids, target = pad(items)
        rows, columns = indices = target.ne(IGNORED).nonzero(as_tuple=True)
        loss = losses_at(model, ids, indices, target[indices])
        found.append([array.numpy() for array in (loss, columns, begin + rows)])
        seen += int(ids.ne(PAD).sum())
        if seen >= tokens:
            break
    return TokenLosses(*(np.concatenate(arrays) for arrays in zip(*found, strict=True)))


# -------------------------------------------------------------------------------------------------------------- command


@click.command(cls=QuietCommand)
@models
@click.option("--sentences", type=click.IntRange(2), default=2000, show_default=True,
              help="Held-out sentences; lower it for small data.")  # fmt: skip
@click.option("--tokens", type=click.IntRange(1), default=400_000, show_default=True,
              help="Held-out tokens that the loss is measured on; lower it for small data.")  # fmt: skip
@output("The folder of the results: order.json and .md.")
@seed(help="The seed of the choice of sentences and swaps.")
def command(models, sentences, tokens, output, seed):
    """Order sensitivity, and losses by position.

    The defaults need 400,000 held-out tokens. For small data: --sentences 200 --tokens 10000, or what the error says.
    """
    contents, rows, first = {}, [], None
    for label, model, text in models:
        first = first or text
        warn_if_unlike(label, text, first)
        content = contents[label] = evaluate(model, text, text_encoder(text.data), sentences, tokens, seed)
        order, loss = content["order"], content["loss"]
        error = "" if loss["error"] is None else f" ± {loss['error']:.4f}"
        rows.append([
            label, f"{100 * order['accuracy']:.2f} ± {100 * order['accuracy_error']:.2f}",
            f"{order['margin']:.3f} ± {order['margin_error']:.3f}", f"{loss['mean']:.4f}{error}",
        ])  # fmt: skip
    header = ["model", "prefers the original, %", "by (nats)", "loss (nats)"]
    write_results(output, "order", contents, TextTable.plain(header, rows).markdown())


def evaluate(model: Model, text: HeldOut, encoder: TextEncoder, sentences: int, tokens: int, seed: int = 1) -> dict:
    """Everything above as plain numbers. Errors are standard errors: of the order measures over sentences, of the loss
    over blocks."""
    chosen = held_out_sentences(text, encoder, sentences, model.config.max_position_embeddings - 2, seed)
    losses = token_losses(model, text, tokens)
    margins = order_sensitivity(model, chosen, seed)
    won, root = credit(margins), np.sqrt(len(margins))
    sums, counts = losses.by_block()
    return {
        "order": {
            "sentences": len(margins), "accuracy": float(won.mean()), "accuracy_error": float(won.std(ddof=1) / root),
            "margin": float(margins.mean()), "margin_error": float(margins.std(ddof=1) / root),
        },
        "loss": {
            "tokens": len(losses.loss), "mean": float(losses.loss.mean()), "error": losses.standard_error(),
            "by_position": losses.by_position(model.config.max_position_embeddings),
            # a line each, not a line per block
            "blocks": {"nats": " ".join(f"{value:.3f}" for value in sums), "tokens": " ".join(map(str, counts))},
        },
    }  # fmt: skip
