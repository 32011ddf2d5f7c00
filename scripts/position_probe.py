"""Which position encodings and normalisers can number n equal tokens (Su's probe), or solve URPE's two tasks.

  python scripts/position_probe.py --out probe.jsonl                       every scheme and normaliser, 3 seeds
  python scripts/position_probe.py --structure                             the same question without training, seconds
  python scripts/position_probe.py --task even --position urpe t5 --out even.jsonl

Finished runs are read from --out and not repeated. Prints a Markdown table.
"""

import argparse

import torch

from tupe.attention import NORMALISERS
from tupe.encoder import LAYERS
from tupe.positions import SCHEMES
from tupe.synthetic import KEYS, TASKS, deviations, read_results, structure, sweep, table, table_of, verdict

COMBINED = ["untied+t5", "shaw+shaw_values", "t5+urpe"]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=list(TASKS), default="equal")
    parser.add_argument("--position", nargs="+", default=[*SCHEMES, *COMBINED], help="default: all, and a few sums")
    parser.add_argument("--normaliser", nargs="+", default=list(NORMALISERS), choices=list(NORMALISERS))
    parser.add_argument("--special", nargs="+", choices=["without", "with"], default=["without", "with"],
                        help="[CLS] and [SEP] around the sequence")  # fmt: skip
    parser.add_argument("--layer", choices=list(LAYERS), default="transformer")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("-n", type=int, default=64, help="length of the sequence")
    parser.add_argument("--seeds", type=int, default=3, help="seeds 1 .. this")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--lr", type=float, default=1e-3)
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
    options = {"n": args.n, "layers": args.layers, "layer": args.layer, "steps": args.steps, "lr": args.lr}
    seeds = range(1, args.seeds + 1)
    for run in sweep(args.out, args.task, args.position, args.normaliser, specials, seeds, **options):
        print(*(run[key] for key in KEYS), f"accuracy {run['accuracy']:.3f} after {run['steps']} steps", flush=True)
    wanted = (args.task, args.layer, args.position, args.normaliser, specials)
    runs = [run for run in read_results(args.out) if selected(run, *wanted)]
    print(table(runs))
    if args.task == "equal":
        others = deviations(runs, n=args.n, layers=args.layers)
        print(f"\n{len(runs) - len(others)} of {len(runs)} runs end as the structure says:")
        print("fail (accuracy below 0.2), pass (from 0.99), half (between)." + " The others:" * bool(others))
        for run, expected in others:
            print(*(run[key] for key in KEYS[2:]), f"accuracy {run['accuracy']:.3f}, structure says {expected}")


def selected(run, task, layer, positions, normalisers, specials):
    return (
        run["task"] == task and run["layer"] == layer and run["position"] in positions
        and run["normaliser"] in normalisers and run["special"] in specials
    )  # fmt: skip


if __name__ == "__main__":
    main()
