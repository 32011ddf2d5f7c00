#!/usr/bin/env python
"""Tokens per second of masked-LM training, side by side: our encoders, fairseq's RoBERTa, Hugging Face's BERT.

python scripts/bench.py                                         # base size, L = 512, float32, all contenders
python scripts/bench.py --lengths 128 512 2048 --tokens 2048 --layers 4 12 --precision float32 bf16 --project 16
"""

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from tupe import bench
from tupe.model import SIZES


def main():
    sizes = {suffix.lstrip("_") or "base": suffix for suffix in SIZES}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=bench.DEFAULT, choices=bench.CONTENDERS)
    parser.add_argument("--size", default="base", choices=sizes)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512], metavar="L")
    parser.add_argument("--layers", type=int, nargs="+", default=[0], metavar="N", help="0: those of the size")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a batch; B = tokens / L")
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--precision", nargs="+", default=["float32"], choices=["float32", "bf16"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=0, help="of each process; 0: PyTorch's default")
    parser.add_argument("--rounds", type=int, default=7, help="measured steps of each")
    parser.add_argument("--project", type=int, default=0, metavar="DEVICES", help="days for the paper's pre-training")
    parser.add_argument("--loader", type=int, metavar="WORKERS", help="measure only the data loader")
    parser.add_argument("--out", type=Path, default=Path("bench"), help="OUT.json, OUT.md and OUT.png are written")
    args = parser.parse_args()
    if args.loader is not None:
        with tempfile.TemporaryDirectory() as folder:
            print(f"{bench.loader_speed(folder, args.loader):.0f} tokens/s from {args.loader} workers")
        return
    about, rows = bench.environment(), []
    base = bench.Setting(sizes[args.size], vocab=args.vocab, device=args.device, threads=args.threads)
    for precision in args.precision:
        for layers in args.layers:
            for length in args.lengths:
                batch = max(1, args.tokens // length)
                setting = replace(base, precision=precision, layers=layers, length=length, batch=batch)
                rows += bench.summary(bench.measure(args.models, setting, args.rounds), args.models, setting)
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.with_suffix(".json").write_text(json.dumps({"about": about, "rows": rows}, indent=1))
                args.out.with_suffix(".md").write_text(bench.markdown(rows, about, args.project))
    bench.picture(rows, args.out.with_suffix(".png"))
    print(bench.markdown(rows, about, args.project))


if __name__ == "__main__":
    main()
