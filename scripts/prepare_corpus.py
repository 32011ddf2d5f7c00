"""Raw text in, fairseq data directory out: python scripts/prepare_corpus.py INPUT [INPUT ...] --out DATA

INPUT: .txt (one paragraph per line, an empty line between documents), .jsonl with a "text" field, wikiextractor's
wiki_00, MediaWiki dumps (.xml), each also as .gz, .bz2, .xz or .zst; a folder (its .txt files are books: one document
each); a glob in quotes; - for text on standard input. DATA gets sentencepiece.bpe.model, dict.txt, train and valid in
fairseq's mmap format, manifest.json (what each step dropped and why, with examples), report.md and report.png.

Killed or failed, the same command goes on where it stopped (with -, it starts again: the text may be another); the
result is the same, also with other --workers.
"""

import argparse
import json
import sys

from tupe.corpus.engine import ENGINES, prepare


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("inputs", nargs="+", metavar="INPUT")
    add("--out", required=True, metavar="DATA")
    add(
        "--vocab-size",
        type=int,
        default=32768,
        help="types, counting <s> <pad> </s> <unk> <mask> (default: %(default)s)",
    )
    add("--valid-fraction", type=float, default=0.005, help="share of the text held out (default: %(default)s)")
    add("--near-duplicates", type=float, default=0, metavar="JACCARD", help="drop near copies (MinHash), e.g. 0.8")
    add(
        "--keep-words",
        type=float,
        default=0,
        metavar="SHARE",
        help="rarer words become <unk>; 0.21 in the released TUPE",
    )
    add("--spacy-model", help="an installed spaCy model for sentences (default: spaCy's rules)")
    add(
        "--errors",
        choices=["strict", "replace"],
        default="strict",
        help="refuse bad bytes and damaged files, or count them",
    )
    add("--sample-mb", type=float, default=200, help="text that trains SentencePiece (default: %(default)s)")
    add("--seed", type=int, default=1, help="of that sample")
    add("--shard-mb", type=float, default=16, help="raw text per task (default: %(default)s)")
    add("--workers", type=int, help="processes on this machine (default: all cores)")
    add(
        "--engine",
        choices=ENGINES,
        default="local",
        help="where the tasks run; dask: on a cluster with this file system",
    )
    add("--scheduler", metavar="ADDRESS", help="of the Dask cluster, e.g. tcp://10.0.0.1:8786")
    add("--keep-work", action="store_true", help="keep the intermediate files in DATA/work")
    add("--overwrite", action="store_true", help="replace the data of another run in DATA")
    args = parser.parse_args(argv)
    try:
        manifest = prepare(**vars(args), say=lambda text: print(f"prepare_corpus: {text}", file=sys.stderr, flush=True))
    except (ValueError, OSError) as error:
        sys.exit(f"prepare_corpus: error: {error}")
    print(json.dumps(manifest["counts"], indent=2))


if __name__ == "__main__":
    main()
