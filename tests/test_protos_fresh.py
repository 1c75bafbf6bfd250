"""The committed generated code says what the .proto says.

Compared by meaning: generators of different versions write different bytes.
"""

import importlib
import pathlib
import re
import subprocess
import sys

import pytest
from google.protobuf import descriptor_pb2

PROTOS = pathlib.Path(__file__).resolve().parent.parent / "protos"


@pytest.fixture(scope="module", params=sorted(path.stem for path in PROTOS.glob("*.proto")))
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def compiled(name, tmp_path_factory) -> descriptor_pb2.FileDescriptorProto:
    """The .proto as the installed protoc reads it."""
    pytest.importorskip("grpc_tools")
    output = tmp_path_factory.mktemp("protos") / "set"
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", f"-Itpuspec/protos={PROTOS}",
         f"--descriptor_set_out={output}", f"tpuspec/protos/{name}.proto"], check=True)
    files = descriptor_pb2.FileDescriptorSet.FromString(output.read_bytes())
    return files.file[0]


def without_json_names(message: descriptor_pb2.DescriptorProto) -> None:
    """Generated code leaves them out: they follow from the names."""
    for field in message.field:
        field.ClearField("json_name")
    for nested in message.nested_type:
        without_json_names(nested)


def test_generated_messages_are_those_of_the_proto(name, compiled):
    committed = descriptor_pb2.FileDescriptorProto.FromString(
        importlib.import_module(f"tpuspec.protos.{name}_pb2").DESCRIPTOR.serialized_pb)
    for file in (compiled, committed):
        for message in file.message_type:
            without_json_names(message)
    assert committed == compiled, "run python tools/generate_protos.py"


class Recorder:
    """A channel that notes which methods a stub asks for."""

    def __init__(self):
        self.methods: dict[str, tuple[bool, bool]] = {}

    def __getattr__(self, kind):
        def method(path, **_):
            self.methods[path] = (kind.startswith("stream"), kind.endswith("stream"))

        return method


def test_generated_stub_has_the_methods_of_the_proto(name, compiled):
    channel = Recorder()
    service, = compiled.service
    generated = importlib.import_module(f"tpuspec.protos.{name}_pb2_grpc")
    getattr(generated, f"{service.name}Stub")(channel)
    assert channel.methods == {
        f"/{compiled.package}.{service.name}/{method.name}":
            (method.client_streaming, method.server_streaming) for method in service.method}


def test_generated_types_name_every_message_field_and_value(name, compiled):
    types = (PROTOS / f"{name}_pb2.pyi").read_text()
    names = {message.name for message in compiled.message_type}
    names |= {field.name for message in compiled.message_type for field in message.field}
    names |= {value.name for enum in compiled.enum_type for value in enum.value}
    missing = {name for name in names if not re.search(rf"\b{name}\b", types)}
    assert not missing, "run python tools/generate_protos.py"
