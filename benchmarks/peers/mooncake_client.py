"""Mooncake Store over TCP; run by ../side_by_side.py with Mooncake's own Python. Arguments: master, rounds, sizes.

put_from and get_into: to and from memory that was registered once, as an engine does. This process gives no memory to the
pool, so that all bytes cross the socket.
"""

import contextlib
import ctypes
import itertools
import os
import sys
import time

import timing
from mooncake.store import MooncakeDistributedStore

_LOCAL_BUFFER = 256 << 20
_keys = itertools.count()


class Client:
    def __init__(self, store: MooncakeDistributedStore, size: int) -> None:
        self._store = store
        self._size = size
        self._source, self._target = (ctypes.create_string_buffer(size) for _ in range(2))
        for buffer in (self._source, self._target):
            assert store.register_buffer(ctypes.addressof(buffer), size) == 0
        self._key = ""

    def put(self) -> float:
        self._store.remove(self._key, force=True)
        self._key = f"kv-{os.getpid()}-{next(_keys)}"
        ctypes.memmove(self._source, os.urandom(self._size), self._size)
        begun = time.perf_counter()
        assert self._store.put_from(self._key, ctypes.addressof(self._source), self._size) == 0
        return time.perf_counter() - begun

    def get(self) -> float:
        begun = time.perf_counter()
        assert self._store.get_into(self._key, ctypes.addressof(self._target), self._size) == self._size
        spent = time.perf_counter() - begun
        assert self._target.raw == self._source.raw
        return spent

    def close(self) -> None:
        self._store.remove(self._key, force=True)
        for buffer in (self._source, self._target):
            self._store.unregister_buffer(ctypes.addressof(buffer))


def main(master: str, rounds: str, *sizes: str) -> None:
    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, _LOCAL_BUFFER, "tcp", "", master) == 0

    timing.main(lambda size: contextlib.closing(Client(store, size)), rounds, *sizes)
    store.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
