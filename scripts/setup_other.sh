#!/usr/bin/env bash
# Makes an environment beside .venv with other versions than the pinned ones, to test what pyproject.toml promises.
# usage: scripts/setup_other.sh oldest   .venv-oldest: the lower bound of everything in pyproject.toml
#        scripts/setup_other.sh newest   .venv-newest: the pins, with the newest torch that has a torch_npu
#        scripts/setup_other.sh wheel    .venv-wheel: the wheel of this package and its base dependencies, nothing else
#        scripts/setup_other.sh serve    .venv-serve: that wheel and its extra serve
# PYTHON=/path/to/python     use this interpreter (oldest: a Python 3.10)
# TORCH_INDEX=URL            take torch from this wheel index
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE PYTHONHOME PYTHONPATH PYTHONSTARTUP PIP_USER PIP_TARGET PIP_PREFIX PIP_REQUIRE_VIRTUALENV
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

die() {
  printf 'error: %s\nhint: %s\n' "$1" "$2" >&2
  exit 2
}

kind=${1:-}
case "$kind" in
  oldest) default=python3.10 ;;
  newest | wheel | serve) default=python3 ;;
  *) die "which environment? ${kind:-none was named}" "scripts/setup_other.sh oldest, newest, wheel or serve" ;;
esac
python=${PYTHON:-$default}
folder=.venv-$kind
pins=$folder/pins.txt
"$python" -c 'import ensurepip, venv' >/dev/null 2>&1 ||
  die "$python is not there, or cannot make virtual environments" "name another interpreter: PYTHON=/path/to/python"
[[ "$kind" != oldest ]] || "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 10))' ||
  die "$python is not Python 3.10, the oldest that is supported" "PYTHON=/path/to/python3.10"

[[ -x "$folder/bin/python" ]] || "$python" -m venv "$folder"
"$python" scripts/bounds.py "$kind" >"$pins"
torch=$(sed -n 's/^torch==//p' "$pins")

install() { "$folder/bin/python" -m pip install --no-compile -c "$pins" "$@"; }

# The CPU build where one is to be had, before anything that would bring the build for CUDA.
index=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
if ! "$folder/bin/python" -c "import sys, importlib.metadata as m; sys.exit(m.version('torch').partition('+')[0] != '$torch')" 2>/dev/null; then
  install "torch==$torch+cpu" 2>"$folder/torch.log" ||
    install --extra-index-url "$index" "torch==$torch+cpu" 2>>"$folder/torch.log" ||
    install "torch==$torch"
fi
install "hatchling>=1.26" "pyyaml>=6"
if [[ "$kind" == wheel || "$kind" == serve ]]; then
  [[ "$kind" == wheel ]] || extras='[serve]'
  rm -rf "$folder/dist"
  "$python" scripts/fetch_web_libraries.py
  export ANABATIC_REQUIRE_WEB_LIBRARIES=1
  "$folder/bin/python" -m pip wheel --no-build-isolation --no-deps --wheel-dir "$folder/dist" .
  install --force-reinstall --no-deps "$folder"/dist/*.whl
  install "$(echo "$folder"/dist/*.whl)${extras:-}"
else
  install --no-build-isolation -e ".[vessels,serve,nmea,constrain,dev]"
fi
printf 'setup: %s is ready: torch %s\n' "$folder" "$torch" >&2
