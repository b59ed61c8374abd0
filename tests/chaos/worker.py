"""One client process of the overlap test: eight turns at once. Arguments: service address, process number."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import torch
from kvcache_client import KVCacheClient
from kvcache_client.adapters.transformers import SharedModel

from tests.conftest import ByteTokenizer, tiny_llama

TURNS = 8
SHARED = 2  # of each process's turns: the same question in every process


def main(target: str, number: int) -> None:
    torch.set_num_threads(1)
    with KVCacheClient(target, timeout=60.0) as client:
        shared = SharedModel(tiny_llama(), ByteTokenizer(), client)
        # Both read the question, so that the second has a base to be compared with.
        first = shared.agent("First. {question} Now:", produces="first")
        second = shared.agent("You come second. {question} Now say:", produces="second")
        questions = [f"shared {i}" if i < SHARED else f"question {number} {i}" for i in range(TURNS)]
        with ThreadPoolExecutor(TURNS) as pool:
            for agent in (first, second):
                calls = list(pool.map(lambda q, a=agent: a.begin({"question": q}, max_new_tokens=4), questions))
                for call in calls:  # all eight are open now
                    call.prefill()
                    call.decode()
                list(pool.map(lambda call: call.settle(), calls))
        assert not shared.faults.by_code, shared.faults.by_code
    print("done")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
