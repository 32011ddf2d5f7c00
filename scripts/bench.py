#!/usr/bin/env python
"""Tokens per second of masked-LM training, side by side: our encoders, fairseq's RoBERTa, Hugging Face's BERT.

python scripts/bench.py                                         # base size, L = 512, float32, all contenders
python scripts/bench.py --lengths 512 128 2048 --layers 4 12 --precision float32 bf16 --project 16

Measured are all lengths at the first number of layers, and all numbers of layers at the first length. Results are
written after each of these settings. Nothing else should run on the machine.
"""

import argparse
import json
import shlex
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from tupe.architectures import SIZES
from tupe.bench import report as bench_report
from tupe.bench import step as bench


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=bench.CONTENDERS, help="default: all but variants of tupe_r")
    parser.add_argument("--size", default="base", choices=list(SIZES))
    parser.add_argument("--lengths", type=int, nargs="+", default=[512], metavar="L")
    parser.add_argument("--layers", type=int, nargs="+", default=[0], metavar="N", help="0: those of the size")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a batch; B = tokens / L")
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--precision", nargs="+", default=["float32"], choices=["float32", "bf16"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=0, help="of each process; 0: PyTorch's default")
    parser.add_argument("--rounds", type=int, default=7, help="measured steps of each")
    parser.add_argument("--warmup", type=int, default=1, help="steps of each before these")
    parser.add_argument("--project", type=int, default=0, metavar="DEVICES", help="days for the paper's pre-training")
    parser.add_argument("--loader", type=int, metavar="WORKERS", help="measure only the data loader")
    parser.add_argument("--out", type=Path, default=Path("bench"), help="OUT.json, OUT.md and OUT.png are written")
    args = parser.parse_args()
    if args.loader is not None:
        with tempfile.TemporaryDirectory() as folder:
            speed = bench.loader_speed(folder, args.loader, args.lengths[0], vocab=args.vocab)
        print(f"{speed:.0f} tokens/s from {args.loader} workers")
        return
    models = args.models or bench.default_models()
    about = {"command": shlex.join(["python", "scripts/bench.py", *sys.argv[1:]]), **bench.environment()}
    base = bench.Setting(args.size, vocab=args.vocab, device=args.device, threads=args.threads)
    args.out.parent.mkdir(parents=True, exist_ok=True)

    def write(rows):
        args.out.with_suffix(".json").write_text(json.dumps({"about": about, "rows": rows}, indent=1))
        args.out.with_suffix(".md").write_text(bench_report.markdown(rows, about, args.project))
        bench_report.picture(rows, args.out.with_suffix(".png"))

    try:
        bench.check_available(models)
        settings = bench.cross(base, args.lengths, args.layers, args.tokens)
        settings = [replace(setting, precision=precision) for precision in args.precision for setting in settings]
        rows = bench.run(models, settings, args.rounds, args.warmup, write)
    except ValueError as error:
        parser.error(str(error))
    print(bench_report.markdown(rows, about, args.project))


if __name__ == "__main__":
    main()
