"""Collect fine-tuning runs into one page beside the published numbers: OUTPUT/index.html, report.md and runs.csv.

python scripts/collect.py runs/glue_tupe_r runs/glue_bert_a --output report/
"""

import argparse
import logging

from tupe.experiments.report import write_report
from tupe.experiments.results import collect, pretraining, properties


def main():
    logging.basicConfig(level="WARNING", force=True)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="folders of runs or sweeps; everything below them is looked through")
    parser.add_argument("--output", required=True, help="folder to write")
    parser.add_argument("--properties", action="store_true", help="probe the pre-trained checkpoints too")
    parser.add_argument("--pretraining", action="store_true", help="show their masked-LM losses and unigram entropy")
    parser.add_argument("--data", help="for these two: folder of the pre-training data (default: the checkpoint's own)")
    args = parser.parse_args()
    try:
        found = collect(args.runs)
        models = sorted({key[0] for key in found.runs})
        probed = properties(models, args.data) if args.properties else None
        pretrained = pretraining(models, args.data) if args.pretraining else None
        print(f"collect: {len(found.runs)} runs, page {write_report(found, args.output, probed, pretrained)}")
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
