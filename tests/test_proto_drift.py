"""Checked-in generated code is what the .proto gives."""

from __future__ import annotations

from pathlib import Path

import pytest
from grpc_tools import protoc

PROTO = Path(__file__).parents[1] / "proto"
GENERATED = ("kvcache_pb2.py", "kvcache_pb2.pyi", "kvcache_pb2_grpc.py")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_generated_code_is_current(tmp_path: Path) -> None:
    out = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    assert protoc.main(["protoc", f"-I{PROTO}", *out, str(PROTO / "kvcache_proto/v1/kvcache.proto")]) == 0
    for name in GENERATED:
        assert (tmp_path / "kvcache_proto/v1" / name).read_text() == (PROTO / "kvcache_proto/v1" / name).read_text(), name
