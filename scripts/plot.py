"""Figures from trained checkpoints and logs. Each command writes OUT.png and OUT.svg.

plot.py correlations CHECKPOINT --out OUT         word-word, word-position, ... of an absolute model's first layer
plot.py positions CHECKPOINT --out OUT            positional logits per head (TUPE), each with its pattern
plot.py loss LABEL=LOG [LABEL=LOG ...] --out OUT  validation loss by updates, from logs of fairseq-train
plot.py t5 CHECKPOINT --out OUT                   T5's bias by offset
plot.py attention LABEL=CHECKPOINT [...] --out OUT   first-layer attention under identical-word probing
plot.py tsne CHECKPOINT --out OUT                 absolute position vectors in two dimensions
plot.py phi CHECKPOINT --out OUT                  sum of cos(omega m), before and after learning the frequencies
"""

import argparse
import logging
from pathlib import Path

from tupe.evaluation import figures, probes


def one(args):
    if len(args.sources) != 1:
        raise ValueError(f"{args.figure} takes one checkpoint, not {len(args.sources)}")
    return probes.load_model(args.sources[0], args.data)


def correlations(args):
    model, task = one(args)
    tokens = probes.text_block(task, args.length or model.max_positions())
    return figures.correlations(probes.four_correlations(model, tokens), args.title)


def positions(args):
    return figures.positional(probes.positional_logits(one(args)[0], args.length), args.title)


def loss(args):
    logs = probes.labelled(args.sources).items()
    curves = {label: probes.validation_losses(Path(path).read_text()) for label, path in logs}
    empty = [label for label, (updates, _) in curves.items() if not updates]
    if empty:
        raise ValueError(f"no validation losses in {', '.join(empty)}; is it the output of fairseq-train?")
    return figures.losses(curves, args.title)


def t5(args):
    return figures.t5(*probes.t5_bias(one(args)[0]), args.title)


def attention(args):
    models = {label: probes.load_model(path, args.data)[0] for label, path in probes.labelled(args.sources).items()}
    found = {k: probes.identical_word_attention(m, args.words, args.length) for k, m in models.items()}
    return figures.attention(found, args.title)


def tsne(args):
    return figures.tsne(probes.position_vectors(one(args)[0]), args.title)


def phi(args):
    return figures.phi(*probes.phi(one(args)[0]), args.title)


FIGURES = [correlations, positions, loss, t5, attention, tsne, phi]


def main(arguments=None):
    logging.basicConfig(level="WARNING", force=True)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", choices=[function.__name__ for function in FIGURES])
    parser.add_argument("sources", nargs="+", help="checkpoints or logs, as above")
    parser.add_argument("--out", required=True, help="file to write, without suffix")
    parser.add_argument("--title", default="")
    parser.add_argument("--data", help="folder with dict.txt (default: the training data's)")
    parser.add_argument("--length", type=int, help="sequence length (default: the model's longest)")
    parser.add_argument("--words", type=int, default=300, help="words of identical-word probing")
    args = parser.parse_args(arguments)
    draw = {function.__name__: function for function in FIGURES}[args.figure]
    try:
        figure = draw(args)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    figures.save(figure, args.out)
    print(f"{args.out}.png {args.out}.svg")


if __name__ == "__main__":
    main()
