#!/usr/bin/env bash
# Makes .venv ready: finds a Python, installs what the tests need, the CPU build of torch, then this package.
# usage: scripts/setup.sh [EXTRA ...]      extras of pyproject.toml, default: dev
# PYTHON=/path/to/python     use this interpreter
# TORCH_INDEX=URL            take torch from this wheel index
# What dev needs comes from requirements-dev.txt: pip refuses a file whose checksum is not there. torch itself and other
# extras are pinned without a checksum (constraints.txt).
# The second call returns at once: a stamp in .venv remembers what was installed.
# Libraries of the chat page come from npm. Without npm or a network everything else works.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONHOME PYTHONPATH PYTHONSTARTUP PIP_USER PIP_TARGET PIP_PREFIX PIP_REQUIRE_VIRTUALENV
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

TORCH=$(sed -n 's/^torch==//p' constraints.txt)
VENV_PYTHON=.venv/bin/python
UNFINISHED=.venv/setup-unfinished
EXTRAS=("${@:-dev}")
started=$SECONDS

say() { printf 'setup: %s\n' "$*" >&2; }
die() {
  printf 'error: %s\nhint: %s\n' "$1" "$2" >&2
  exit 2
}

# --- which Python -----------------------------------------------------------------------------------------------

suits() { "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 15))' >/dev/null 2>&1; }
makes_venvs() { "$1" -c 'import ensurepip, venv' >/dev/null 2>&1; }

find_python() {
  local candidate seen="" no_venv=""
  if [[ -n "${PYTHON:-}" ]]; then
    suits "$PYTHON" || die "PYTHON=$PYTHON is not a working Python 3.10-3.14" "name another interpreter, or unset PYTHON"
    makes_venvs "$PYTHON" || die "$PYTHON cannot make virtual environments (venv or ensurepip is missing)" \
      "install them, on Debian and Ubuntu: sudo apt-get install python3-venv"
    command -v "$PYTHON"
    return
  fi
  for candidate in python3 python3.14 python3.13 python3.12 python3.11 python3.10 python; do
    command -v "$candidate" >/dev/null || continue
    if ! suits "$candidate"; then
      seen+="${seen:+, }$candidate ($("$candidate" --version 2>&1 | head -n 1))"
    elif ! makes_venvs "$candidate"; then
      no_venv+="${no_venv:+, }$candidate"
    else
      command -v "$candidate"
      return
    fi
  done
  if [[ -n "$no_venv" ]]; then
    die "$no_venv cannot make virtual environments (venv or ensurepip is missing)" \
      "install them, on Debian and Ubuntu: sudo apt-get install python3-venv"
  fi
  die "no Python 3.10-3.14 found${seen:+; seen: $seen}" \
    "install one, on Debian and Ubuntu: sudo apt-get install python3 python3-venv; or name it: make demo PYTHON=/path/to/python"
}

# --- what is installed already ----------------------------------------------------------------------------------

fingerprint() { # of everything that decides what is in .venv; the folder too, because scripts hold its full path
  { cat pyproject.toml constraints.txt requirements-dev.txt scripts/setup.sh; pwd -P; "$VENV_PYTHON" -c 'import sys; print(sys.version)'; } |
    sha256sum | cut -d ' ' -f 1
}
stamp() { printf '.venv/setup-%s.stamp' "$1"; }
ready() {
  [[ ! -e "$UNFINISHED" && -s "$(stamp "$1")" && -x "$VENV_PYTHON" ]] && [[ "$(<"$(stamp "$1")")" == "$(fingerprint 2>/dev/null)" ]]
}
all_ready() {
  local extra
  for extra in "${EXTRAS[@]}"; do ready "$extra" || return 1; done
}

usable_venv() { # an environment of another Python, moved here, cut short or broken is made anew
  [[ ! -e "$UNFINISHED" ]] && suits "$VENV_PYTHON" || return 1
  [[ ! -e .venv/setup-folder ]] || grep -qxF "$(pwd -P)" .venv/setup-folder || return 1
  [[ -z "${PYTHON:-}" ]] || [[ "$("$VENV_PYTHON" -V)" == "$("$PYTHON" -V)" ]] || return 1
  "$VENV_PYTHON" -m pip --version >/dev/null 2>&1 || "$VENV_PYTHON" -m ensurepip >/dev/null 2>&1
}

make_venv() {
  local python
  python=$(find_python)
  if [[ -e .venv || -L .venv ]]; then
    say "the .venv that is here cannot be used (another Python, moved, cut short or broken); making it anew"
    rm -rf .venv
  fi
  say "making .venv with $("$python" --version 2>&1) ($python)"
  "$python" -m venv .venv
}

pip_install() { # pip rolls back by itself when it fails; only a kill leaves a half-written environment
  # Of 20,000 modules a command imports some 2,000: Python compiles those when they are first imported.
  local status=0
  : >"$UNFINISHED"
  "$VENV_PYTHON" -m pip install --no-compile -c constraints.txt "$@" || status=$?
  ((status >= 128 || status == 2)) || rm -f "$UNFINISHED"
  return "$status"
}

compile_imports() { # also where the environment forbids bytecode files (containers often do): each start would compile anew
  env -u PYTHONDONTWRITEBYTECODE "$VENV_PYTHON" - <<'EOF' || say "some modules could not be compiled ahead; the first start takes longer"
from anabatic.config.loading.command_table import COMMANDS

for command in COMMANDS.values():
    if not command.optional_packages:
        command.import_recipe_function()
import torch.distributed.checkpoint  # noqa: E402 - of checkpoints, after the first import of transformers
EOF
}

# --- what dev needs, by checksum ----------------------------------------------------------------------------------

wants_dev() { [[ " ${EXTRAS[*]} " == *" dev "* ]]; }
install_lock() { # without dependencies: the file names them all, and nothing in it can bring another torch
  pip_install --require-hashes --no-deps -r requirements-dev.txt ||
    die "pip could not install requirements-dev.txt; its last lines say why" \
      "where it says HASHES, the index serves another file than the one that was tested: do not use it; otherwise check the network and the index (pip config list)"
}

# --- torch, before anything that would pull the CUDA build ------------------------------------------------------

has_torch() {
  "$VENV_PYTHON" -c "import sys, importlib.metadata as m; sys.exit(m.version('torch').partition('+')[0] != '$TORCH')" 2>/dev/null
}
answers() { "$VENV_PYTHON" -c 'import sys, urllib.request as u; u.urlopen(sys.argv[1], timeout=10)' "$1" >/dev/null 2>&1; }

install_torch() { # with --no-deps where the lock has brought what torch needs
  local index=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
  if [[ -z "${TORCH_INDEX:-}" ]]; then
    say "looking for torch $TORCH+cpu where pip is configured to look"
    pip_install "$@" "torch==$TORCH+cpu" 2>.venv/setup-torch.log && return
    grep -q "No matching distribution" .venv/setup-torch.log || cat .venv/setup-torch.log >&2
  fi
  say "looking for it in $index"
  if answers "${index%/}/torch/"; then
    pip_install "$@" --extra-index-url "$index" "torch==$TORCH+cpu"
    return
  fi
  say "$index does not answer: taking the default build of torch $TORCH."
  say "it may bring several gigabytes of CUDA libraries; to avoid that, stop here and name a mirror of the CPU wheels:"
  say "    make demo TORCH_INDEX=URL"
  pip_install "torch==$TORCH" # with its libraries
}

# --- libraries of the chat page, which may fail: the page shows plain text then -----------------------------------

LIBRARIES=src/anabatic/infer/web/libraries
libraries_stamp() { { sha256sum <"$LIBRARIES.json" && pwd -P; } 2>/dev/null | cut -d ' ' -f 1 | tr '\n' ' '; }
libraries_tried() { [[ ! -e "$LIBRARIES.json" ]] || [[ "$(cat .venv/setup-libraries.stamp 2>/dev/null)" == "$(libraries_stamp)" ]]; }
fetch_libraries() { # once per table: each try takes a minute where the network is closed
  local message
  libraries_tried && return
  if ! message=$("$VENV_PYTHON" scripts/fetch_web_libraries.py 2>&1); then
    message=${message%%$'\n'*}
    say "the chat page will show text without Markdown, maths and colours (${message#error: }); to try again: $VENV_PYTHON scripts/fetch_web_libraries.py"
  fi
  libraries_stamp >.venv/setup-libraries.stamp
}

# --- the steps --------------------------------------------------------------------------------------------------

everything_ready() { all_ready && libraries_tried; }
everything_ready && exit 0
if command -v flock >/dev/null; then
  exec 9>.venv-lock
  flock -n 9 || { say "another set-up is running here; waiting for it"; flock 9; }
  everything_ready && exit 0
fi
if all_ready; then
  fetch_libraries
  exit 0
fi
trap 'say "interrupted; the same command starts again where it can"; exit 130' INT TERM

usable_venv || make_venv
pwd -P >.venv/setup-folder
say "installing anabatic with: ${EXTRAS[*]}"
if wants_dev; then
  install_lock
  has_torch || install_torch --no-deps
else
  has_torch || install_torch
  pip_install "hatchling>=1.26" "pyyaml>=6"
fi
if [[ "${EXTRAS[*]}" == dev ]]; then
  pip_install --no-deps --no-build-isolation -e .
else
  pip_install --no-build-isolation -e ".[$(IFS=,; printf '%s' "${EXTRAS[*]}")]"
fi
for extra in "${EXTRAS[@]}"; do fingerprint >"$(stamp "$extra")"; done
compile_imports
fetch_libraries
say "ready after $((SECONDS - started)) s; torch $("$VENV_PYTHON" -c 'import importlib.metadata as m; print(m.version("torch"))')"
