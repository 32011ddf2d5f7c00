"""Raw text in, fairseq data directory out: python scripts/prepare_corpus.py INPUT [INPUT ...] --out DATA

Inputs: .txt (one paragraph per line, an empty line between documents) and MediaWiki dumps (.xml, .xml.bz2). DATA gets
sentencepiece.bpe.model, dict.txt, train and valid in fairseq's mmap format, and manifest.json, which counts what each
step dropped and why.
"""

import argparse
import json
import sys

from tupe.corpus import prepare


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="+", metavar="INPUT")
    parser.add_argument("--out", required=True, metavar="DATA")
    parser.add_argument(
        "--vocab-size",
        type=int,
        default=32768,
        help="types, counting <s> <pad> </s> <unk> <mask> (default: %(default)s)",
    )
    parser.add_argument(
        "--valid-fraction", type=float, default=0.005, help="share of the documents held out (default: %(default)s)"
    )
    parser.add_argument(
        "--errors",
        choices=["strict", "replace"],
        default="strict",
        help="bytes that are not UTF-8: refuse, or read as U+FFFD",
    )
    parser.add_argument(
        "--spacy-model", help="an installed spaCy model for sentences (default: spaCy's rules, which need no download)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace what is in DATA")
    args = parser.parse_args(argv)
    try:
        manifest = prepare(**vars(args), progress=lambda text: print(f"prepare_corpus: {text}", flush=True))
    except (ValueError, OSError) as error:
        sys.exit(f"prepare_corpus: error: {error}")
    print(json.dumps(manifest, indent=2))


if __name__ == "__main__":
    main()
