"""LMCache 0.5.6 over its gRPC server; run by ../side_by_side.py with LMCache's own Python. Arguments: URL, rounds, sizes.

A store is PrepareStore and CommitStore, a retrieve is Lookup, QueryPrefetchStatus, PrepareRetrieve and CommitRetrieve: the
server hands out only what a lookup has locked.
"""

import contextlib
import itertools
import os
import sys
import time

import timing
import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey, RegisterEngineDrivenContextPayload
from lmcache.v1.multiprocess.transfer_context.base import EngineDrivenContextMetadata, create_engine_driven_context
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

WAIT, LAYERS = 60.0, 4
_numbers = itertools.count()


class Client:
    """One engine with a channel of its own; its KV has one chunk of tokens."""

    def __init__(self, url: str, size: int) -> None:
        self._client = RequestClientFactory.create(url)
        self._chunk = self._client.get_chunk_size().result(timeout=WAIT)
        self._shape = torch.Size([2, LAYERS, self._chunk, size // (4 * LAYERS * self._chunk)])
        self._instance = next(_numbers)
        self._model = f"noise-{size}-{self._instance}"
        payload = RegisterEngineDrivenContextPayload(
            instance_id=self._instance,
            model_name=self._model,
            world_size=1,
            block_size=self._chunk,
            num_layers=LAYERS,
            hidden_dim_size=self._shape[-1],
            dtype_str="bfloat16",
            use_mla=False,
            num_physical_slots=self._chunk,
        )
        reply = self._client.register_kv_cache_engine_driven_context(payload).result(timeout=WAIT)
        layout = EngineDrivenContextMetadata(MemoryLayoutDesc(shapes=[self._shape], dtypes=[torch.bfloat16]), self._chunk, False)
        self._context = create_engine_driven_context(
            layout, self._client, WAIT, shm_name=reply.shm_name, pool_size=reply.pool_size
        )
        self._shared = bool(reply.shm_name)
        self._number = 0
        self._kv = torch.empty(0)

    def put(self) -> float:
        self._number += 1
        self._kv = torch.frombuffer(bytearray(os.urandom(2 * self._shape.numel())), dtype=torch.bfloat16).view(self._shape)
        key = self._key("w", 0)
        begun = time.perf_counter()
        slots = self._context.prepare_store(key, self._instance)  # None: the bytes travel in the messages
        if slots is not None:
            slots[0][0].copy_(self._kv)
        assert self._context.commit_store(key, self._instance, [self._kv])
        spent = time.perf_counter() - begun
        self._client.end_session(key.request_id).result(timeout=WAIT)
        return spent

    def get(self) -> float:
        lookup, key = self._key("r", None), self._key("r", 0)
        begun = time.perf_counter()
        self._client.lookup(lookup, 1).result(timeout=WAIT)
        while self._client.query_prefetch_status(lookup.request_id).result(timeout=WAIT) is None:
            pass
        found = self._context.prepare_retrieve(key, self._instance)
        copy = found[0].clone() if self._shared else found[0]
        self._context.commit_retrieve(key, self._instance)
        spent = time.perf_counter() - begun
        self._client.end_session(key.request_id).result(timeout=WAIT)
        assert torch.equal(copy.view(torch.int16), self._kv.view(torch.int16))
        return spent

    def close(self) -> None:
        self._context.close()
        self._client.unregister_kv_cache_engine_driven_context(self._instance).result(timeout=WAIT)
        self._client.close()

    def _key(self, kind: str, worker: int | None) -> IPCCacheServerKey:
        return IPCCacheServerKey(
            model_name=self._model,
            world_size=1,
            worker_id=worker,
            token_ids=(self._number,) * self._chunk,
            start=0,
            end=self._chunk,
            request_id=f"{kind}-{self._model}-{self._number}",
            num_kv_readers=1,
        )


def main(url: str, rounds: str, *sizes: str) -> None:
    timing.main(lambda size: contextlib.closing(Client(url, size)), rounds, *sizes)


if __name__ == "__main__":
    main(*sys.argv[1:])
