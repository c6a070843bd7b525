"""gRPC stubs from the .proto files of the tests, compiled when a test first needs them."""

from __future__ import annotations

import functools
import importlib
import sys
import tempfile
from pathlib import Path
from types import ModuleType

from grpc_tools import protoc

DIRECTORY = Path(__file__).parent


@functools.cache
def compile_stubs(name: str) -> tuple[ModuleType, ModuleType]:
    """The message module and the service module of NAME.proto."""
    with tempfile.TemporaryDirectory(prefix="stubs-") as directory:
        status = protoc.main(
            [
                "protoc",
                f"-I{DIRECTORY}",
                f"--python_out={directory}",
                f"--grpc_python_out={directory}",
                str(DIRECTORY / f"{name}.proto"),
            ]
        )
        assert status == 0, f"{name}.proto does not compile"
        sys.path.insert(0, directory)
        try:
            return importlib.import_module(f"{name}_pb2"), importlib.import_module(f"{name}_pb2_grpc")
        finally:
            sys.path.remove(directory)
