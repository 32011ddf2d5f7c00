"""What each position encoding costs relative to `nopos`: parameters, operations per token, time of a training step.

  python scripts/scheme_cost.py                                    base size, L = 128, 512, 1024, every encoding
  python scripts/scheme_cost.py --lengths 512 --position bert_a tupe_a tupe_r --rounds 9 --out target

Step times need a machine that does nothing else. Lengths that OUT.json holds already are not measured again.
"""

import argparse
import json
from pathlib import Path

import torch

from tupe.architectures import SIZES
from tupe.bench import schemes as cost
from tupe.bench import step as bench


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="base", choices=list(SIZES))
    parser.add_argument("--layers", type=int, default=0, help="default: those of the size")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 1024], metavar="L")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a batch; B = tokens / L")
    parser.add_argument("--rounds", type=int, default=5, help="measured steps of each encoding")
    parser.add_argument("--position", nargs="+", metavar="NAME",
                        help="schemes joined by '+', or architectures; default: all")  # fmt: skip
    parser.add_argument("--precision", default="float32", choices=["float32", "bf16"])
    parser.add_argument("--threads", type=int, default=0, help="0: PyTorch's default")
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--out", type=Path, default=Path("scheme_cost"), help="OUT.json and OUT.md are written")
    args = parser.parse_args(arguments)
    if args.threads:
        torch.set_num_threads(args.threads)
    wanted = cost.cases(args.position)
    base = bench.Setting(args.size, args.layers, vocab=args.vocab, precision=args.precision)
    options = {name: getattr(args, name) for name in ("size", "tokens", "rounds", "precision", "vocab")}
    options = {**options, "layers": base.dims()[0], "encodings": len(wanted)}
    result = {"about": bench.environment(), "options": options, "lengths": {}}
    path = args.out.with_suffix(".json")
    if path.exists():
        result["lengths"] = (old := json.loads(path.read_text()))["lengths"]
        if old["options"] != options:
            parser.error(f"{path} holds other measurements ({old['options']}); choose another --out")
        for length, found in result["lengths"].items():
            names = [row["encoding"] for row in found["rows"]]
            if {*names} != {*wanted, cost.CONTROL}:
                parser.error(f"{path} holds other encodings ({', '.join(names)} at L={length}); choose another --out")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for length in args.lengths:
        if str(length) in result["lengths"]:
            continue
        setting = cost.setting_of(base, length, args.tokens)
        try:
            rows = cost.rows(wanted, setting, args.rounds, lambda text: print(text, flush=True))
        except ValueError as error:
            parser.error(str(error))
        products = cost.flops("nopos", "tied", setting)[0]
        result["lengths"][str(length)] = {"batch": setting.batch, "products": products, "rows": rows}
        path.write_text(json.dumps(result, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(cost.markdown(result))
    print(cost.markdown(result))


if __name__ == "__main__":
    main()
