#!/usr/bin/env bash
# Generate the gRPC stubs beside the proto. With --check: fail where the committed stubs are stale.
# Uses the oldest grpcio-tools that we support, in a venv of its own: generated code embeds that version.
# It has wheels for Python 3.10 to 3.12; PYTHON picks another interpreter than python3.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
venv=${DUALFORM_STUBS_VENV:-.venv/stubs}
if ! "$venv/bin/python" -c 'import grpc_tools' 2>/dev/null; then
  "$python" -c 'import sys; sys.exit("grpcio-tools 1.62.3 has no wheel for Python 3.13: set PYTHON=python3.12" if sys.version_info >= (3, 13) else 0)'
  "$python" -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check 'grpcio-tools==1.62.3' 'setuptools<80'
fi
out=protos
if [ "${1:-}" = --check ]; then out=$(mktemp -d); trap 'rm -rf "$out"' EXIT; fi
"$venv/bin/python" -W ignore -m grpc_tools.protoc -I protos --python_out="$out" --pyi_out="$out" \
  --grpc_python_out="$out" protos/dualform/v1/attribution.proto protos/dualform/v1/admin.proto
if [ "$out" != protos ]; then
  for f in {attribution,admin}_{pb2.py,pb2.pyi,pb2_grpc.py}; do
    diff -q "$out/dualform/v1/$f" "protos/dualform/v1/$f" || { echo "stale stub $f: run make stubs" >&2; exit 1; }
  done
fi
