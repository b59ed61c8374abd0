"""Every kernel of every dtype goes through NVRTC to machine code of every architecture we name, and spills no register."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcache_service.kernels.cuda.launch import KERNELS, KV_TYPES, options, source

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")


def nvrtc() -> Any:
    """NVIDIA's compiler from its wheel; it needs no driver and no device."""
    found = importlib.util.find_spec("nvidia.cuda_nvrtc")
    if found is None:
        pytest.skip("nvidia-cuda-nvrtc-cu12 is not installed")
    (folder,) = found.submodule_search_locations or ()
    return ctypes.CDLL(str(Path(folder) / "lib" / "libnvrtc.so.12"))


def compiled(text: str, flags: tuple[str, ...]) -> tuple[bytes, str]:
    """Machine code and the compiler's log. Raises AssertionError with the log."""
    library, program, size = nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
    assert library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None) == 0
    try:
        passed = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
        status = library.nvrtcCompileProgram(program, len(flags), passed)
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, log)
        assert status == 0, log.value.decode()
        library.nvrtcGetCUBINSize(program, ctypes.byref(size))
        code = ctypes.create_string_buffer(size.value)
        library.nvrtcGetCUBIN(program, code)
        return code.raw, log.value.decode()
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def spills(log: str) -> dict[str, int]:
    """Bytes that each kernel spills, by name."""
    found = re.findall(r"Function properties for (\w+).*?(\d+) bytes spill stores, (\d+) bytes spill loads", log, re.DOTALL)
    return {name: int(stored) + int(loaded) for name, stored, loaded in found}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", KV_TYPES)
@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_compiles_without_spills(name: str, dtype: torch.dtype, architecture: str) -> None:
    code, log = compiled(source(name), (*options(dtype), f"--gpu-architecture={architecture}", "--ptxas-options=-v"))
    assert code.startswith(b"\x7fELF")
    assert spills(log) == dict.fromkeys(KERNELS[name], 0), log


def test_a_spill_is_seen() -> None:
    """Else the test above would prove nothing."""
    text = """extern "C" __global__ __launch_bounds__(1024, 2) void greedy(float *x) {
      float a[96];
      for (int i = 0; i < 96; ++i) a[i] = x[i * 7 + threadIdx.x];
      for (int r = 0; r < 9; ++r) for (int i = 0; i < 96; ++i) a[i] = a[i] * a[(i * 5 + 3) % 96] + x[r];
      for (int i = 0; i < 96; ++i) x[i * 7 + threadIdx.x] = a[i];
    }"""
    _, log = compiled(text, ("--gpu-architecture=sm_90", "--ptxas-options=-v"))
    assert spills(log)["greedy"] > 0, log
