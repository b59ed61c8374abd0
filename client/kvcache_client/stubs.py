"""The generated stubs, with frames that pass by protobuf."""

from __future__ import annotations

import grpc
from kvcache_proto.v1 import codec, kvcache_pb2_grpc
from kvcache_proto.v1 import kvcache_pb2 as pb


class KVCacheStub(kvcache_pb2_grpc.KVCacheStub):
    """Put also takes bytes that codec.encode made."""

    def __init__(self, channel: grpc.Channel) -> None:
        super().__init__(channel)
        self.Put = channel.stream_unary(
            "/kvcache.v1.KVCache/Put",
            request_serializer=codec.serialize,
            response_deserializer=pb.PutReply.FromString,
        )


class TurnsStub(kvcache_pb2_grpc.TurnsStub):
    """FetchTurn yields codec.Frame and, at its end, a FetchTurnReply; Observe also takes bytes that codec.encode made."""

    def __init__(self, channel: grpc.Channel) -> None:
        super().__init__(channel)
        self.FetchTurn = channel.unary_stream(
            "/kvcache.v1.Turns/FetchTurn",
            request_serializer=pb.FetchTurnRequest.SerializeToString,
            response_deserializer=codec.deserializer(pb.FetchTurnReply),
        )
        self.Observe = channel.stream_unary(
            "/kvcache.v1.Turns/Observe",
            request_serializer=codec.serialize,
            response_deserializer=pb.ObserveReply.FromString,
        )
