"""Which position encodings and normalisers can number n equal tokens (Su's probe), or solve URPE's two tasks.

  python scripts/position_probe.py --out probe.jsonl                       every scheme and normaliser, 3 seeds
  python scripts/position_probe.py --structure                             the same question without training, seconds
  python scripts/position_probe.py --task even --position urpe t5 --out even.jsonl

Finished runs of the same options are read from --out and not repeated. Prints a Markdown table.
"""

import argparse

import torch

from tupe.attention import NORMALISERS
from tupe.encoder import LAYERS
from tupe.evaluation.synthetic import (
    DEFAULTS,
    KEYS,
    TASKS,
    deviations,
    options_of,
    read_results,
    structure,
    sweep,
    table,
    table_of,
    verdict,
)
from tupe.schemes import SCHEMES

COMBINED = ["untied+t5", "shaw+shaw_values", "t5+urpe"]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=list(TASKS), default="equal")
    parser.add_argument("--position", nargs="+", default=[*SCHEMES, *COMBINED], help="default: all, and a few sums")
    parser.add_argument("--normaliser", nargs="+", default=list(NORMALISERS), choices=list(NORMALISERS))
    parser.add_argument("--special", nargs="+", choices=["without", "with"], default=["without", "with"],
                        help="[CLS] and [SEP] around the sequence")  # fmt: skip
    parser.add_argument("--layer", choices=list(LAYERS), default="transformer")
    parser.add_argument("--layers", type=int, default=DEFAULTS["layers"])
    parser.add_argument("-n", type=int, default=DEFAULTS["n"], help="length of the sequence")
    parser.add_argument("--seeds", type=int, default=3, help="seeds 1 .. this")
    parser.add_argument("--steps", type=int, default=DEFAULTS["steps"])
    parser.add_argument("--lr", type=float, default=DEFAULTS["lr"])
    parser.add_argument("--threads", type=int, default=1, help="the models are so small that more hardly help")
    parser.add_argument("--structure", action="store_true", help="do not train; float64 and random weights")
    parser.add_argument("--out", help="file of finished runs, JSON lines")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    specials = [name == "with" for name in args.special]

    if args.structure:
        found = {
            (position, normaliser, special): structure(
                position, args.n, special=special, normaliser=normaliser, layer=args.layer, layers=args.layers
            )
            for position in args.position for normaliser in args.normaliser for special in specials
        }  # fmt: skip
        print(table_of({cell: verdict(*numbers) for cell, numbers in found.items()}))
        for kind in ("fail", "half", "pass"):
            some = [numbers for numbers in found.values() if verdict(*numbers) == kind]
            if some:
                ranges = (f"{min(values):.1e} to {max(values):.1e}" for values in zip(*some, strict=True))
                print(f"{kind}: spread {next(ranges)}, asymmetry {next(ranges)}")
        return
    if args.out is None:
        parser.error("--out FILE is needed to keep the runs")
    options = {**DEFAULTS, "n": args.n, "layers": args.layers, "steps": args.steps, "lr": args.lr}
    seeds = range(1, args.seeds + 1)
    wanted = (args.task, args.position, args.normaliser, specials, seeds, args.layer)
    try:
        for run in sweep(args.out, *wanted, **options):
            print(*(run[key] for key in KEYS), f"accuracy {run['accuracy']:.3f} after {run['steps']} steps", flush=True)
    except ValueError as error:
        parser.error(str(error))
    runs = [run for run in read_results(args.out) if selected(run, *wanted) and options_of(run) == options]
    print(table(runs))
    if args.task == "equal":
        others = deviations(runs, n=args.n, layers=args.layers)
        print(f"\n{len(runs) - len(others)} of {len(runs)} runs end as the structure says:")
        print("fail (accuracy below 0.2), pass (from 0.99), half (between)." + " The others:" * bool(others))
        for run, expected in others:
            print(*(run[key] for key in KEYS[2:]), f"accuracy {run['accuracy']:.3f}, structure says {expected}")


def selected(run, task, positions, normalisers, specials, seeds, layer):
    return (
        run["task"] == task and run["layer"] == layer and run["position"] in positions
        and run["normaliser"] in normalisers and run["special"] in specials and run["seed"] in seeds
    )  # fmt: skip


if __name__ == "__main__":
    main()
