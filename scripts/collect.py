"""Collect fine-tuning runs into one page beside the published numbers: OUTPUT/index.html, report.md and runs.csv.

    python scripts/collect.py runs/glue_tupe_r runs/glue_bert_a --output report/
"""

import argparse
import logging

from tupe.report import collect, write_report


def main():
    logging.basicConfig(level="WARNING", force=True)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="folders of runs or sweeps; everything below them is looked through")
    parser.add_argument("--output", required=True, help="folder to write")
    args = parser.parse_args()
    try:
        found = collect(args.runs)
        print(f"collect: {len(found.runs)} runs, page {write_report(found, args.output)}")
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
