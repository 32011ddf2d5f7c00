#!/usr/bin/env bash
# Creates the virtual environment the other scripts use; does nothing (in well under a second) when it is up to date.
#   bash scripts/setup.sh                  .venv        Python 3.11 or 3.12, current torch, fairseq-fixed (upstream main of 2024)
#   bash scripts/setup.sh --cuda cu126     the same with PyTorch's build for CUDA 12.6, which still has kernels for V100s
#   bash scripts/setup.sh --stack train    .venv-train  Python 3.10 to 3.14, no fairseq and no compiler: the second engine (docs/engines.md)
# PYTHON=/path/to/python3.x chooses the interpreter; an environment of another version is made anew.
# pip's own settings (PIP_INDEX_URL, ...) choose the package index.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/steps.bash

stack=fairseq cuda=
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) sed -n '2,7s/^# \{0,1\}//p' "$0"; exit ;;
    --stack) stack=${2:-}; shift; [ $# -eq 0 ] || shift ;;
    --cuda) cuda=${2:-}; shift; [ $# -eq 0 ] || shift
      [[ $cuda =~ ^(cu[0-9]+|cpu)$ ]] || { echo "setup.sh: --cuda '$cuda'; valid: a build of PyTorch's index, such as cu126" >&2; exit 2; } ;;
    *) echo "setup.sh: unknown argument '$1'; usage: setup.sh [--stack fairseq|train] [--cuda cu126]" >&2; exit 2 ;;
  esac
done

# setuptools < 81 still has pkg_resources, which fairseq's build imports.
case $stack in
  fairseq)
    venv=.venv; versions="3.11 3.12"; requirements=scripts/requirements.txt
    build=("pip<26" "setuptools<81" wheel "cython==3.3.1") ;;
  train)  # the newest of all, as `pip install ".[train]"` takes them
    venv=.venv-train; versions="3.13 3.12 3.14 3.11 3.10"; requirements=pyproject.toml
    build=("pip>=24" "setuptools<81" wheel) ;;
  *) echo "setup.sh: unknown stack '$stack'; valid: fairseq, train" >&2; exit 2 ;;
esac

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2> /dev/null; }
if [ -n "${PYTHON:-}" ]; then
  version=$(version_of "$PYTHON") || { echo "setup.sh: PYTHON=$PYTHON does not run" >&2; exit 2; }
  case " $versions " in
    *" $version "*) versions=$version ;;
    *) echo "setup.sh: PYTHON=$PYTHON is Python $version; the $stack stack needs ${versions// / or }" >&2; exit 2 ;;
  esac
fi
fits() { case " $versions " in *" $(version_of "$venv/bin/python") "*) ;; *) return 1 ;; esac }

# The build of torch is that of the last call that named one. The path is part of the stamp: a copied or moved environment
# points at the old place.
cuda=${cuda:-$(cat "$venv/.cuda" 2> /dev/null || true)}
stamp=$(cat "$requirements" scripts/setup.sh pyproject.toml <(pwd; echo -n "$cuda") | cksum)
up_to_date() { [ "$(cat "$venv/.ready" 2> /dev/null)" = "$stamp" ] && fits && echo "setup: $venv is up to date"; }
if up_to_date; then exit 0; fi

step() { echo "setup: [${SECONDS}s] $*"; }

# A second caller waits for the first instead of writing into the same environment.
exec 9> ".setup-$stack.lock"
if command -v flock > /dev/null && ! flock -n 9; then
  step "waiting for another setup.sh"
  run flock 9
  if up_to_date; then exit 0; fi
fi

find_python() {
  local version candidate candidates
  for version in $versions; do
    candidates=("python$version" python3 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$version".*/bin/python"$version")
    for candidate in "${PYTHON:-${candidates[@]}}"; do
      if [ "$(version_of "$candidate")" = "$version" ] && "$candidate" -c "import venv, ensurepip" 2> /dev/null; then
        echo "$candidate"; return
      fi
    done
  done
  echo "setup.sh: the $stack stack needs Python ${versions// / or } with venv; set PYTHON=/path/to/it" >&2
  return 1
}

if ! fits || ! "$venv/bin/python" -m pip --version > /dev/null 2>&1; then
  python=$(find_python)
  step "creating $venv with $("$python" --version)"
  run "$python" -m venv --clear "$venv"
fi
rm -f "$venv/.ready"
pip() { run "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

step "build tools"
pip install -q -U "${build[@]}"
step "torch (a large download on the first run)"
# pip takes any build of a version for that version.
[ "$(cat "$venv/.cuda" 2> /dev/null)" = "$cuda" ] || pip uninstall -q -y torch
echo "$cuda" > "$venv/.cuda"
if [ $stack = train ]; then
  pip install -q --only-binary :all: ${cuda:+--index-url "https://download.pytorch.org/whl/$cuda"} torch
  step "this project, editable, and what pre-training needs"
  pip install -q --no-build-isolation --only-binary :all: --config-settings editable_mode=compat -e ".[train,dev]"
  run "$venv/bin/python" -c "import torch, transformers; print('setup: torch', torch.__version__, 'transformers', transformers.__version__)"
  echo "$stamp" > "$venv/.ready"
  step "done: $venv"
  exit
fi
pip install -q $(grep -E '^numpy[=<>]' "$requirements")
pip install -q ${cuda:+--index-url "https://download.pytorch.org/whl/$cuda"} $(grep -E '^torch[=<>]' "$requirements")
step "packages of $requirements"
pip install -q -r "$requirements"
step "fairseq (compiled from source without a wheel: about 3 minutes on 2 cores)"
# Never with dependencies: torchaudio is unused, and a CUDA build of it beside a CPU torch breaks imports. An isolated build
# would download a second, larger torch.
pip install -q --no-build-isolation --no-deps fairseq-fixed==0.12.3.1
step "this project, editable"
pip install -q --no-build-isolation --no-deps --config-settings editable_mode=compat -e .
run "$venv/bin/python" -c "import torch, fairseq, hydra; print('setup: torch', torch.__version__, 'fairseq', fairseq.__version__, 'hydra', hydra.__version__)"
echo "$stamp" > "$venv/.ready"
step "done: $venv"
