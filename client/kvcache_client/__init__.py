"""Client of the KV-cache service: what an inference worker installs."""

from kvcache_client.admin import AdminClient
from kvcache_client.client import KVCacheClient
from kvcache_client.credentials import Credentials
from kvcache_client.errors import CacheError
from kvcache_client.turn import Turn

__all__ = ["AdminClient", "CacheError", "Credentials", "KVCacheClient", "Turn"]
