#!/usr/bin/env bash
# Makes an environment for each gateway that `make bench-gateways` measures beside ours, once, and prints the variables that
# name them:
#   eval "$(tools/gateway_venvs.sh)"
# A variable that is set already is kept (DYNAMO_SMG_PYTHON= skips that gateway). What could not be installed is listed on
# standard error, and is not measured.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
make_environment() { # NAME VARIABLE PIP-ARGUMENT... [, PIP-ARGUMENT...]
  local name=$1 variable=$2 place="$PWD/.engines/$1" arguments=()
  shift 2
  [ -z "${!variable+set}" ] || return 0
  if [ ! "$place/.done" -nt tools/gateway_venvs.sh ]; then
    echo "installing $name into $place ..." >&2
    python3 -m venv "$place" || { echo "will not run: $name: no environment could be made in $place" >&2; return; }
    for each in "$@" ,; do
      if [ "$each" != , ]; then arguments+=("$each"); continue; fi
      "$place/bin/python" -m pip install --disable-pip-version-check --quiet "${arguments[@]}" >&2 || {
        echo "will not run: $name: pip install ${arguments[*]} failed" >&2
        return
      }
      arguments=()
    done
    touch "$place/.done"
  fi
  echo "export $variable='$place/bin/python'"
}
# The second package has the interface of the worker that it calls by gRPC.
make_environment smg DYNAMO_SMG_PYTHON smg==1.13.0 smg-grpc-proto==0.4.28
make_environment vllm-router DYNAMO_VLLM_ROUTER_PYTHON vllm-router==0.1.17
# Without its own requirements, which name packages for GPUs and for planning; these are what its frontend and worker import.
make_environment native DYNAMO_NATIVE_PYTHON --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1 , \
  aiohttp certifi 'kubernetes<33' msgspec prometheus-client pyzmq redis tqdm transformers typing-extensions 'zstandard<1' \
  'pydantic<=2.13.5' uvloop
