"""What the launcher needs of a device, and CuPy's answer. Tests bring another one, which runs the same source on the CPU."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np


class DeviceFull(Exception):
    """The device has no memory left for what was asked."""


class Memory(Protocol):
    """Device memory; free again when the last reference to this object has gone."""

    address: int
    size: int


class Event(Protocol):
    def synchronize(self) -> None: ...


class Stream(Protocol):
    """Work in order. Nothing here waits but `synchronize`; whatever is passed must live until the stream has done it."""

    def copy(self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int) -> None:
        """`rows` rows of `width` bytes, whose starts lie a pitch apart; to, from or within the device."""

    def launch(self, kernel: Any, grid: tuple[int, int], block: int, arguments: tuple[int, ...]) -> None:
        """arguments: 64-bit words, as all parameters of our kernels are."""

    def record(self) -> Event: ...

    def wait(self, event: Event) -> None:
        """What follows on this stream comes after the event."""

    def synchronize(self) -> None: ...


class Runtime(Protocol):
    """Thread-safe. One device."""

    name: str

    def free_bytes(self) -> int: ...

    def allocate(self, size: int) -> Memory:
        """Raises DeviceFull."""

    def stream(self) -> Stream: ...

    def compile(self, source: str, options: tuple[str, ...], names: tuple[str, ...]) -> dict[str, Any]:
        """The kernels of these names."""

    def pin(self, address: int, size: int) -> bool:
        """Make host memory quick to copy from; False where the system refuses."""

    def unpin(self, address: int) -> None: ...


class CupyRuntime:
    """One CUDA device through CuPy. Raises RuntimeError, with the fix, where CuPy or the device is missing."""

    def __init__(self, index: int) -> None:
        try:
            import cupy
        except ImportError as error:
            raise RuntimeError("device is cuda, but CuPy is not installed; pip install 'kvcache-service[gpu]'") from error
        self._cupy, self._index = cupy, index
        try:
            self.name = cupy.cuda.runtime.getDeviceProperties(index)["name"].decode()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise RuntimeError(f"no CUDA device {index}: {error}; see nvidia-smi, or set KVCACHE_DEVICE=cpu") from error

    def free_bytes(self) -> int:
        with self._cupy.cuda.Device(self._index):
            free, _total = self._cupy.cuda.runtime.memGetInfo()
            return int(free)

    def allocate(self, size: int) -> Memory:
        with self._cupy.cuda.Device(self._index):
            try:
                return _CupyMemory(self._cupy.cuda.alloc(max(1, size)), size)
            except self._cupy.cuda.memory.OutOfMemoryError as error:
                raise DeviceFull(str(error)) from error

    def stream(self) -> Stream:
        return _CupyStream(self._cupy, self._index)

    def compile(self, source: str, options: tuple[str, ...], names: tuple[str, ...]) -> dict[str, Any]:
        with self._cupy.cuda.Device(self._index):
            module = self._cupy.RawModule(code=source, options=options, backend="nvrtc")
            return {name: module.get_function(name) for name in names}

    def pin(self, address: int, size: int) -> bool:
        try:
            self._cupy.cuda.runtime.hostRegister(address, size, 1)  # portable: for every context
        except self._cupy.cuda.runtime.CUDARuntimeError:
            return False
        return True

    def unpin(self, address: int) -> None:
        self._cupy.cuda.runtime.hostUnregister(address)


class _CupyMemory:
    def __init__(self, pointer: Any, size: int) -> None:
        self._pointer, self.address, self.size = pointer, int(pointer.ptr), size


class _CupyStream:
    def __init__(self, cupy: Any, index: int) -> None:
        self._cupy, self._device = cupy, cupy.cuda.Device(index)
        with self._device:
            self._stream = cupy.cuda.Stream(non_blocking=True)

    def copy(self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int) -> None:
        runtime = self._cupy.cuda.runtime
        with self._device:
            runtime.memcpy2DAsync(
                target, target_pitch, source, source_pitch, width, rows, runtime.memcpyDefault, self._stream.ptr
            )

    def launch(self, kernel: Any, grid: tuple[int, int], block: int, arguments: tuple[int, ...]) -> None:
        with self._device, self._stream:
            kernel((*grid, 1), (block, 1, 1), tuple(map(np.int64, arguments)))

    def record(self) -> Event:
        with self._device:
            return self._stream.record(self._cupy.cuda.Event(disable_timing=True))

    def wait(self, event: Event) -> None:
        with self._device:
            self._stream.wait_event(event)

    def synchronize(self) -> None:
        with self._device:
            self._stream.synchronize()
