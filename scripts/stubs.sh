#!/usr/bin/env bash
# Generate the gRPC stubs beside the proto. With --check: fail where the committed stubs are stale.
# Uses the oldest grpcio-tools that we support, in a venv of its own: generated code embeds that version.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${DUALFORM_STUBS_VENV:-.venv/stubs}
if [ ! -x "$venv/bin/grpc_tools" ] && ! "$venv/bin/python" -c 'import grpc_tools' 2>/dev/null; then
  python3 -m venv "$venv"
  "$venv/bin/pip" install --quiet --disable-pip-version-check 'grpcio-tools==1.62.3' 'setuptools<80'
fi
out=protos
if [ "${1:-}" = --check ]; then out=$(mktemp -d); trap 'rm -rf "$out"' EXIT; fi
"$venv/bin/python" -W ignore -m grpc_tools.protoc -I protos --python_out="$out" --pyi_out="$out" \
  --grpc_python_out="$out" protos/dualform/v1/attribution.proto
if [ "$out" != protos ]; then
  for f in attribution_pb2.py attribution_pb2.pyi attribution_pb2_grpc.py; do
    diff -q "$out/dualform/v1/$f" "protos/dualform/v1/$f" || { echo "stale stub: run make stubs"; exit 1; }
  done
fi
