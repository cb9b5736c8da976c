"""The committed generated code is that of the committed .proto files."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import resources
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import Default
from grpc_tools import protoc

PROTO = Path(__file__).parent.parent / "proto"
FILES = sorted(path.relative_to(PROTO).as_posix() for path in PROTO.glob("tokenweir/*/*.proto"))
INTERNAL = ("server/wire/work.proto", "server/gateway/views.proto")  # no part of the client
BUF = Path(sys.executable).with_name("buf")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, FileDescriptorProto]:
    out = tmp_path_factory.mktemp("proto") / "descriptors.binpb"
    well_known = resources.files("grpc_tools") / "_proto"
    arguments = [
        f"--proto_path={PROTO}",
        f"--proto_path={PROTO.parent}",
        f"--proto_path={well_known}",
        f"--descriptor_set_out={out}",
    ]
    assert protoc.main(["protoc", *arguments, *FILES, *INTERNAL]) == 0
    return {file.name: file for file in FileDescriptorSet.FromString(out.read_bytes()).file}


@pytest.mark.parametrize("name", [*FILES, *INTERNAL])
def test_generated_code_describes_what_the_proto_file_says(
    name: str, compiled: dict[str, FileDescriptorProto]
) -> None:
    module = importlib.import_module(_module_name(name))
    generated = FileDescriptorProto()
    module.DESCRIPTOR.CopyToProto(generated)

    assert generated == _without_json_names(compiled[name]), "run proto/generate.sh"


def test_there_is_generated_code_for_every_proto_file_and_no_other() -> None:
    python = PROTO / "python"
    generated = {path.relative_to(python) for path in python.glob("tokenweir/*/*_pb2.py")}

    assert generated == {Path(name.removesuffix(".proto") + "_pb2.py") for name in FILES}


@pytest.mark.parametrize(
    "answer",
    ["GenerateResponse", "ScoreResponse", "ClassifyResponse", "LabelResponse", "EmbedResponse"],
)
def test_every_answer_of_a_model_says_whose_it_is_and_what_it_took(
    answer: str, compiled: dict[str, FileDescriptorProto]
) -> None:
    messages = {m.name: m for file in compiled.values() for m in file.message_type}

    fields = {field.name for field in messages[answer].field}
    assert {"request_id", "usage", "timing", "provenance"} <= fields


def test_lower_bounds_of_the_project_are_those_of_the_generated_code() -> None:
    project = tomllib.loads((PROTO.parent / "pyproject.toml").read_text())["project"]
    source = (PROTO / "python/tokenweir/v1/generation_service_pb2_grpc.py").read_text()
    (grpcio,) = re.findall(r"GRPC_GENERATED_VERSION = '(.*)'", source)

    lower = [dependency.partition(",")[0] for dependency in project["dependencies"]]
    assert f"grpcio>={grpcio}" in lower


@pytest.mark.parametrize(
    ("view", "message"),
    [
        ("SchedulingHead", "Scheduling"),
        ("GenerateHead", "GenerateRequest"),
        ("StreamHead", "GenerateStreamRequest"),
        ("ScoreHead", "ScoreRequest"),
        *(("PredictHead", f"{name}Request") for name in ("Classify", "Label", "Embed")),
        ("GeneratePrompts", "GenerateRequest"),
        ("StreamPrompts", "GenerateStreamRequest"),
        ("ScorePrompts", "ScoreRequest"),
        ("Prompt", "Input"),
        ("Chat", "Chat"),
        ("ChatMessage", "ChatMessage"),
        ("TokenIds", "TokenIds"),
        ("StreamView", "GenerateStreamResponse"),
        ("RunView", "GenerateStreamResponse"),
        ("Delta", "GenerateStreamResponse.Delta"),
        ("DeltaRun", "GenerateStreamResponse.Delta"),
    ],
)
def test_views_of_the_gateway_have_the_numbers_of_the_protocol(view: str, message: str) -> None:
    views, found = importlib.import_module("server.gateway.views_pb2"), Default()
    whole = found.FindMessageTypeByName(f"tokenweir.v1.{message}").fields_by_name

    fields = getattr(views, view).DESCRIPTOR.fields
    assert {one.name: one.number for one in fields} == {
        one.name: whole[one.name].number for one in fields
    }


def _module_name(proto_file: str) -> str:
    return proto_file.removesuffix(".proto").replace("/", ".") + "_pb2"


def _without_json_names(file: FileDescriptorProto) -> FileDescriptorProto:
    # Only the descriptor set carries them; they follow from the names of the fields.
    def clear(message: object) -> None:
        for field in message.field:
            field.ClearField("json_name")
        for nested in message.nested_type:
            clear(nested)

    for message in file.message_type:
        clear(message)
    return file


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ("", ""),
        ("  repeated string features = 5;", 'field "5" with name "features"'),
        ("  rpc GetLoad(GetLoadRequest) returns (GetLoadResponse);", 'RPC "GetLoad"'),
    ],
)
def test_a_change_that_breaks_clients_of_a_release_fails_lint(
    changed: str, problem: str, tmp_path: Path
) -> None:
    (_, command) = re.findall(r"\$\(BIN\)/buf (.*?)(?: &&|$)", _recipe("lint"), re.M)
    shutil.copytree(PROTO, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("python"))
    admin = tmp_path / "tokenweir/v1/admin_service.proto"
    text = admin.read_text()
    assert changed in text
    admin.write_text(text.replace(changed, "") if changed else text)

    done = subprocess.run([BUF, *command.split()], cwd=tmp_path, capture_output=True, text=True)

    assert problem in done.stdout
    assert (done.returncode == 0) is not bool(problem), done.stdout + done.stderr


def _recipe(target: str) -> str:
    makefile = (PROTO.parent / "Makefile").read_text()
    return makefile.partition(f"\n{target}:")[2].partition("\n\n")[0]
