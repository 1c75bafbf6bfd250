"""Writes protos/*_pb2.py, *_pb2.pyi and *_pb2_grpc.py from protos/*.proto.

    python tools/generate_protos.py

Generated code refuses a protobuf or grpcio older than its generator, so the
oldest supported generator is used, in a throw-away environment, whatever is
installed here: its code runs with protobuf 6 and 7.
"""

import pathlib
import shutil
import subprocess
import sys
import tempfile
import venv

GENERATOR = "grpcio-tools==1.72.1"  # protoc 30.0: code for protobuf >= 6.30
PACKAGE = "tpuspec/protos"
PROTOS = pathlib.Path(__file__).resolve().parent.parent / "protos"


def generate(python: pathlib.Path, output: pathlib.Path) -> None:
    """Compiles under the virtual path of the installed package.

    Otherwise the generated modules would import each other by top-level names.
    """
    sources = [f"{PACKAGE}/{path.name}" for path in sorted(PROTOS.glob("*.proto"))]
    subprocess.run(
        [python, "-m", "grpc_tools.protoc", f"-I{PACKAGE}={PROTOS}", f"--python_out={output}",
         f"--pyi_out={output}", f"--grpc_python_out={output}", *sources], check=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        environment = pathlib.Path(scratch, "environment")
        venv.create(environment, with_pip=True)
        python = environment / "bin" / "python"
        subprocess.run([python, "-m", "pip", "install", "--quiet", GENERATOR], check=True)
        output = pathlib.Path(scratch, "output")
        output.mkdir()
        generate(python, output)
        for path in sorted((output / PACKAGE).iterdir()):
            shutil.copyfile(path, PROTOS / path.name)
            print(f"protos/{path.name}", file=sys.stderr)


if __name__ == "__main__":
    main()
