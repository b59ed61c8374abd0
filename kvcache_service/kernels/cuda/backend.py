"""CUDA backend: host KV is copied to the device once, assembled there and copied into the turn's buffer, band by band.

    upload    ▇▇▇▇                      bases, offsets and maps that are not on the device yet
    compute       ▇▇▇ ▇▇▇ ▇▇▇ ▇▇▇       a band of layers into one of two scratch blocks
    download          ▇▇▇ ▇▇▇ ▇▇▇ ▇▇▇   the band before into the buffer

Only the calling worker thread waits, and nothing is in flight when a call returns: a buffer may serve the next turn at once.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvcache_service.geometry import Rope
from kvcache_service.kernels import cpu
from kvcache_service.kernels.backend import Backend, Blend, Job, Linear, Write
from kvcache_service.kernels.codec import KV, Codec, Coded
from kvcache_service.kernels.cuda.launch import CODES, DeviceKV, DeviceMap, DeviceRotation, Kernels, Target, packed
from kvcache_service.kernels.cuda.resident import Resident
from kvcache_service.kernels.cuda.runtime import Event, Memory, Runtime, Stream

_BAND_BYTES = 4 << 20  # long enough to fill the bus, short enough that copy and kernel overlap from the start
_ALIGN = 256


@dataclass(frozen=True)
class _Lane:
    """The streams of one call."""

    upload: Stream
    compute: Stream
    download: Stream

    def drain(self) -> None:
        for stream in (self.upload, self.compute, self.download):
            stream.synchronize()


@dataclass(frozen=True)
class _Loaded:
    """A job whose inputs lie on the device. held: their memory."""

    out: Tensor
    terms: int
    inputs: Sequence[DeviceKV]
    rotation: DeviceRotation
    map: DeviceMap | None
    held: Sequence[Memory]


class CudaBackend(Backend):
    """budget: device bytes, all in."""

    def __init__(self, runtime: Runtime, device: str, budget: int) -> None:
        self.device = device
        self._runtime = runtime
        self.resident = Resident(runtime, budget)
        self._lock = threading.Lock()
        self._kernels: dict[torch.dtype, Kernels] = {}
        self._lanes: queue.SimpleQueue[_Lane] = queue.SimpleQueue()
        self._pinned: set[int] = set()
        self._pageable = 0

    def prepare(self, dtype: torch.dtype, rope: Rope, head_dim: int, codec: Codec | None) -> None:
        super().prepare(dtype, rope, head_dim, codec)  # what is learned is decoded and checked on the CPU
        self._compiled(dtype)

    def writer(self, jobs: Sequence[Job]) -> Write:
        loaded: list[_Loaded] = []

        def write(layers: range, size: int) -> None:
            with self._lane() as lane:
                if not loaded:
                    loaded.extend(self._load(lane, job) for job in jobs)
                self._write(lane, loaded, layers)

        return write

    def canonicalise(self, out: Sequence[Tensor], kv: Tensor, first: int, starts: Sequence[int], to: cpu.Rotations) -> None:
        jobs = []
        for target, start in zip(out, starts, strict=True):
            end = start + target.shape[2]
            jobs.append(Job(target, kv[:, :, start - first : end - first], to.out_of_place(start, end)))
        with self._lane() as lane:
            self._write(lane, [self._load(lane, job, keep=False) for job in jobs], range(len(kv)))

    def distances(self, base: KV, candidates: Sequence[KV]) -> Tensor:
        found = torch.empty(len(candidates))
        if not found.numel():
            return found
        kernels = self._compiled(base.dtype)
        with self._lane() as lane:
            inputs = [self._kv(lane, kv) for kv in (base, *candidates)]
            terms, block = self._words(lane, packed([(kv, 1.0) for kv in inputs]))
            sums = self.resident.take(kernels.distance_bytes(len(candidates)))
            lane.compute.wait(lane.upload.record())
            kernels.distances(lane.compute, sums.address, terms, inputs)
            lane.compute.copy(found.data_ptr(), found.nbytes, sums.address, found.nbytes, found.nbytes, 1)
            lane.compute.synchronize()
            del block
        return (found / base.shape.numel()).sqrt()

    def pin(self, memory: Tensor) -> None:
        if self._runtime.pin(memory.data_ptr(), memory.nbytes):
            with self._lock:
                self._pinned.add(memory.data_ptr())
        else:
            with self._lock:
                self._pageable += memory.nbytes

    def unpin(self, memory: Tensor) -> None:
        with self._lock:
            pinned = memory.data_ptr() in self._pinned
            self._pinned.discard(memory.data_ptr())
            self._pageable -= 0 if pinned else memory.nbytes
        if pinned:
            self._runtime.unpin(memory.data_ptr())

    def gauges(self) -> dict[str, float]:
        return {
            "kvcache_device_used_bytes": self.resident.used_bytes,
            "kvcache_device_budget_bytes": self.resident.budget,
            "kvcache_device_evictions": self.resident.evictions,
            "kvcache_pageable_bytes": self._pageable,
        }

    # Inside

    def _compiled(self, dtype: torch.dtype) -> Kernels:
        with self._lock:
            if dtype not in self._kernels:
                self._kernels[dtype] = Kernels(self._runtime, dtype)
            return self._kernels[dtype]

    @contextlib.contextmanager
    def _lane(self) -> Iterator[_Lane]:
        """Streams of one's own, idle before and after."""
        try:
            lane = self._lanes.get_nowait()
        except queue.Empty:
            lane = _Lane(self._runtime.stream(), self._runtime.stream(), self._runtime.stream())
        try:
            yield lane
        finally:
            lane.drain()
            self._lanes.put(lane)

    def _write(self, lane: _Lane, jobs: Sequence[_Loaded], layers: range) -> None:
        layer_bytes = sum(_aligned(job.out[0].nbytes) for job in jobs)
        if not layer_bytes or not layers:
            return
        step = max(1, min(len(layers), _BAND_BYTES // layer_bytes))
        scratch = [self.resident.take(step * layer_bytes) for _ in range(min(2, -(-len(layers) // step)))]
        copied: list[Event] = []
        lane.compute.wait(lane.upload.record())
        for turn, first in enumerate(range(layers.start, layers.stop, step)):
            band = range(first, min(first + step, layers.stop))
            if turn >= len(scratch):
                lane.compute.wait(copied[turn - len(scratch)])
            places = self._compute(lane, jobs, band, scratch[turn % len(scratch)].address)
            lane.download.wait(lane.compute.record())
            for job, place in zip(jobs, places, strict=True):
                _download(lane.download, job.out[band.start : band.stop], place)
            copied.append(lane.download.record())
        lane.download.synchronize()

    def _compute(self, lane: _Lane, jobs: Sequence[_Loaded], band: range, address: int) -> list[int]:
        """Enqueue the band of every job; returns where each will lie, contiguous."""
        places = []
        for job in jobs:
            kernels, plane = self._compiled(job.out.dtype), job.out[0, 0].numel()
            corrected = band if job.map is None else range(max(1, band.start), band.stop)
            base_only = range(band.start, band.stop - len(corrected)) if job.map is not None else band
            if base_only:
                inputs = job.inputs if job.map is None else job.inputs[:1]
                kernels.combine(lane.compute, Target(address, 2 * plane, plane), job.terms, inputs, base_only, job.rotation)
            if job.map is not None and corrected:
                at = address + (corrected.start - band.start) * 2 * plane * job.out.itemsize
                target = Target(at, 2 * plane, plane)
                kernels.linear(lane.compute, target, job.terms, job.inputs[0], job.map, corrected, job.rotation)
            places.append(address)
            address += _aligned(job.out[0].nbytes) * len(band)
        return places

    def _load(self, lane: _Lane, job: Job, *, keep: bool = True) -> _Loaded:
        inputs, weights = [self._kv(lane, job.base, keep=keep)], [1.0]
        map, held = None, []
        match job.correction:
            case Blend(offsets, factors):
                inputs += [self._kv(lane, offset) for offset in offsets]
                weights += factors
            case Linear(weight, bias, lead):
                full = weight.dtype != torch.float16
                terms = [term.contiguous().to(torch.float32 if full else torch.float16) for term in (weight, bias, lead)]
                held = [self._raw(lane, term) for term in terms]
                map = DeviceMap(held[0].address, held[1].address, held[2].address, lead.shape[2], full)
        words, block = self._words(lane, packed(list(zip(inputs, weights, strict=True))))
        cos, sin = (self._words(lane, np.ascontiguousarray(side)) for side in job.rotation[:2])
        rotation = DeviceRotation(cos[0], sin[0], job.rotation.cos.shape[1], job.rotation.interleaved)
        return _Loaded(job.out, words, inputs, rotation, map, [*held, block, cos[1], sin[1]])

    def _kv(self, lane: _Lane, kv: KV, *, keep: bool = True) -> DeviceKV:
        """KV on the device; keep: leave it there for later turns."""
        layers, _, tokens, heads, dim = kv.shape
        if not isinstance(kv, Coded):
            memory = self._raw(lane, kv, keep=keep)
            return DeviceKV(memory.address, 0, 0, 0, layers, tokens, heads, dim, memory)
        parts = (kv.key_scales.contiguous(), kv.value_scales.contiguous(), kv.codes.contiguous())
        starts = [0, *np.cumsum([_aligned(part.nbytes) for part in parts]).tolist()]

        def upload(memory: Memory) -> None:
            for part, start in zip(parts, starts, strict=False):
                lane.upload.copy(memory.address + start, part.nbytes, part.data_ptr(), part.nbytes, part.nbytes, 1)

        memory = self._copied(lane, kv.blob, starts[-1], upload)
        keys, values, numbers, _ = (memory.address + start for start in starts)
        return DeviceKV(numbers, keys, values, CODES[kv.codes.dtype], layers, tokens, heads, dim, memory)

    def _raw(self, lane: _Lane, tensor: Tensor, *, keep: bool = True) -> Memory:
        def upload(memory: Memory) -> None:
            if tensor.is_contiguous():
                if tensor.nbytes:
                    lane.upload.copy(memory.address, tensor.nbytes, tensor.data_ptr(), tensor.nbytes, tensor.nbytes, 1)
                return
            width = tensor[0, 0].nbytes
            for layer, planes in enumerate(tensor):  # columns of a buffer
                start, pitch = planes.data_ptr(), tensor.stride(1) * tensor.itemsize
                lane.upload.copy(memory.address + 2 * layer * width, width, start, pitch, width, 2)

        return self._copied(lane, tensor if keep and tensor.is_contiguous() else None, tensor.nbytes, upload)

    def _copied(self, lane: _Lane, host: Tensor | None, size: int, upload: Callable[[Memory], None]) -> Memory:
        """A copy that stays where there is a host tensor to know it by."""

        def complete(memory: Memory) -> None:
            upload(memory)
            lane.upload.synchronize()

        if host is not None:
            return self.resident.copy(host, size, complete)
        memory = self.resident.take(size)
        complete(memory)
        return memory

    def _words(self, lane: _Lane, words: np.ndarray[Any, Any]) -> tuple[int, Memory]:
        memory = self.resident.take(max(1, words.nbytes))
        if words.nbytes:
            lane.upload.copy(memory.address, words.nbytes, words.ctypes.data, words.nbytes, words.nbytes, 1)
        lane.upload.synchronize()
        return memory.address, memory


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _download(stream: Stream, out: Tensor, source: int) -> None:
    """A contiguous band into the columns of a buffer."""
    width = out[0, 0].nbytes
    if out.stride(0) == 2 * out.stride(1):
        stream.copy(out.data_ptr(), out.stride(1) * out.itemsize, source, width, width, 2 * len(out))
        return
    for layer, planes in enumerate(out):
        stream.copy(planes.data_ptr(), out.stride(1) * out.itemsize, source + 2 * layer * width, width, width, 2)
