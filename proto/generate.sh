#!/bin/sh
# Writes python/tokenweir/PACKAGE from tokenweir/PACKAGE/*.proto, for our protocol (v1) and that of KServe
# (open_inference), and the same beside ../server/wire/work.proto and ../server/gateway/views.proto, which
# are no part of the client.
# The tools are pinned, in a throw-away environment.
#
# grpcio-tools sets the oldest protobuf and grpcio that users may have (see the lower bounds in
# pyproject.toml): 1.72.1 is the first whose generated code is of protobuf's major version 6, which
# versions 6 and 7 run.
set -eu
cd "$(dirname "$0")"
tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
"${PYTHON:-python3}" -m venv "$tools"
env -u PIP_CONSTRAINT -u PIP_BUILD_CONSTRAINT "$tools/bin/pip" install --quiet --disable-pip-version-check \
    grpcio-tools==1.72.1 protobuf==6.33.6 mypy-protobuf==5.1.0
generate() {
    rm -rf "python/tokenweir/$1"
    mkdir -p "python/tokenweir/$1"
    "$tools/bin/python" -m grpc_tools.protoc --proto_path=. \
        --plugin="$tools/bin/protoc-gen-mypy" --plugin="$tools/bin/protoc-gen-mypy_grpc" \
        --python_out=python --grpc_python_out=python --mypy_out=python --mypy_grpc_out=python \
        "tokenweir/$1"/*.proto
    printf '"""%s, generated from proto/tokenweir/%s by proto/generate.sh."""\n' "$2" "$1" \
        > "python/tokenweir/$1/__init__.py"
}
generate v1 "Version 1 of the protocol"
generate open_inference "The Open Inference Protocol"
cd ..
"$tools/bin/python" -m grpc_tools.protoc --proto_path=. --plugin="$tools/bin/protoc-gen-mypy" \
    --python_out=. --mypy_out=. server/wire/work.proto server/gateway/views.proto
