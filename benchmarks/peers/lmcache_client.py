"""Times store and retrieve of LMCache 0.5.6 over its gRPC server; run by ../side_by_side.py with LMCache's own Python.

A store is PrepareStore and CommitStore, a retrieve is Lookup, QueryPrefetchStatus, PrepareRetrieve and CommitRetrieve: the
server hands out only what a lookup has locked. Arguments: URL, rounds, sizes. Prints JSON: size -> [stores, retrieves].
"""

import json
import os
import sys
import time

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey, RegisterEngineDrivenContextPayload
from lmcache.v1.multiprocess.transfer_context.base import EngineDrivenContextMetadata, create_engine_driven_context
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

WAIT, WARMUP, LAYERS = 60.0, 3, 4


def measure(client, chunk: int, size: int, rounds: int, instance: int) -> list[list[float]]:
    model, shape = f"noise-{size}", torch.Size([2, LAYERS, chunk, size // (4 * LAYERS * chunk)])
    payload = RegisterEngineDrivenContextPayload(
        instance_id=instance,
        model_name=model,
        world_size=1,
        block_size=chunk,
        num_layers=LAYERS,
        hidden_dim_size=shape[-1],
        dtype_str="bfloat16",
        use_mla=False,
        num_physical_slots=chunk,
    )
    reply = client.register_kv_cache_engine_driven_context(payload).result(timeout=WAIT)
    layout = EngineDrivenContextMetadata(MemoryLayoutDesc(shapes=[shape], dtypes=[torch.bfloat16]), chunk, False)
    context = create_engine_driven_context(layout, client, WAIT, shm_name=reply.shm_name, pool_size=reply.pool_size)
    times: list[list[float]] = [[], []]
    for number in range(rounds + WARMUP):
        kv = torch.frombuffer(bytearray(os.urandom(size)), dtype=torch.bfloat16).view(shape)

        def key(kind: str, worker: int | None, number: int = number) -> IPCCacheServerKey:
            return IPCCacheServerKey(
                model_name=model,
                world_size=1,
                worker_id=worker,
                token_ids=(number,) * chunk,
                start=0,
                end=chunk,
                request_id=f"{kind}-{size}-{number}",
                num_kv_readers=1,
            )

        begun = time.perf_counter()
        slots = context.prepare_store(key("w", 0), instance)  # None: the bytes travel in the messages
        if slots is not None:
            slots[0][0].copy_(kv)
        assert context.commit_store(key("w", 0), instance, [kv])
        stored = time.perf_counter() - begun
        client.end_session(key("w", 0).request_id).result(timeout=WAIT)
        begun = time.perf_counter()
        client.lookup(key("r", None), 1).result(timeout=WAIT)
        while client.query_prefetch_status(key("r", None).request_id).result(timeout=WAIT) is None:
            pass
        found = context.prepare_retrieve(key("r", 0), instance)
        copy = found[0].clone() if slots is not None else found[0]
        context.commit_retrieve(key("r", 0), instance)
        retrieved = time.perf_counter() - begun
        client.end_session(key("r", 0).request_id).result(timeout=WAIT)
        assert torch.equal(copy.view(torch.int16), kv.view(torch.int16))
        if number >= WARMUP:
            times[0].append(stored)
            times[1].append(retrieved)
    context.close()
    client.unregister_kv_cache_engine_driven_context(instance).result(timeout=WAIT)
    return times


def main(url: str, rounds: str, *sizes: str) -> None:
    client = RequestClientFactory.create(url)
    chunk = client.get_chunk_size().result(timeout=WAIT)
    found = {size: measure(client, chunk, int(size), int(rounds), number) for number, size in enumerate(sizes)}
    client.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
