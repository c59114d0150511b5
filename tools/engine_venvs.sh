#!/usr/bin/env bash
# Makes an environment for each engine that a machine without a GPU can have, once, and prints the variables that name them:
#   eval "$(tools/engine_venvs.sh)"
# A variable that is set already is kept (DYNAMO_LLAMACPP_PYTHON= skips the engine). What cannot be installed is said and skipped.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
make_environment() { # NAME EXTRAS
  local name=$1 extras=$2 variable="DYNAMO_${1^^}_PYTHON" place="$PWD/.engines/$1"
  if [ -n "${!variable+set}" ]; then return; fi
  if [ ! "$place/.done" -nt pyproject.toml ]; then # dependencies may have come since
    echo "installing $name into $place ..." >&2
    python3 -m venv "$place" && "$place/bin/python" -m pip install --disable-pip-version-check --quiet -e ".[$extras]" >&2 &&
      touch "$place/.done" || { echo "skipped: $name could not be installed into $place" >&2; return; }
  fi
  echo "export $variable='$place/bin/python'"
}
make_environment llamacpp llamacpp
make_environment transformers transformers,guided
