"""Nothing points up: the layering of docs/architecture.md, read off the imports."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Lowest first. A module may import from its own row's package and from rows before it; siblings of a row stay apart.
LAYERS = [
    {"errors", "logs", "tenants", "tracing"},
    {"geometry", "prompt", "config", "telemetry", "quality"},
    {"matching", "predictor", "kernels", "tiers", "catalog"},
    {"engine"},
    {"rpc"},
    {"__main__"},
    {"evaluation"},
    {"demo", "bench"},
    {"commands"},
    {"cli"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def imports(path: Path) -> set[str]:
    """Absolute module names that a file imports."""
    out = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            out |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            out |= {f"{node.module}.{alias.name}" for alias in node.names}
    return out


def part(module: str) -> str | None:
    """`engine` for kvcache_service.engine.plan; None for foreign modules."""
    pieces = module.split(".")
    return pieces[1] if pieces[0] == "kvcache_service" and len(pieces) > 1 else None


WORKERS = ("evaluation", "demo", "bench")  # they speak the protocol through the client
SERVICE_FILES = sorted(p for p in (ROOT / "kvcache_service").rglob("*.py") if p.name != "__init__.py")
CLIENT_FILES = sorted((ROOT / "client").rglob("*.py"))


@pytest.mark.parametrize("path", SERVICE_FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    own = part(".".join(path.relative_to(ROOT).with_suffix("").parts))
    assert own in RANK, f"{path}: say in which layer it lies"
    for module in imports(path):
        other = part(module)
        if other is None or other == own:
            continue
        assert RANK[other] < RANK[own], f"{path} imports {module}"


@pytest.mark.parametrize("path", SERVICE_FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_only_rpc_sees_messages(path: Path) -> None:
    own = part(".".join(path.relative_to(ROOT).with_suffix("").parts))
    if own not in ("rpc", *WORKERS):
        assert not any(m.startswith("kvcache_proto") for m in imports(path))


@pytest.mark.parametrize("path", CLIENT_FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_client_never_imports_the_service(path: Path) -> None:
    assert not any(m.startswith("kvcache_service") for m in imports(path))


@pytest.mark.parametrize("path", [p for p in CLIENT_FILES if "adapters" not in p.parts], ids=lambda p: p.name)
def test_client_core_needs_grpc_only(path: Path) -> None:
    foreign = {m.split(".")[0] for m in imports(path)} & {"torch", "numpy", "transformers", "redis"}
    assert not foreign


def test_no_package_shadows_proto() -> None:
    assert not (ROOT / "proto" / "__init__.py").exists()
    assert not (ROOT / "client" / "__init__.py").exists()
