"""A gRPC handler for every method of a service, made from its descriptor; frames pass by protobuf."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass
from kvcache_proto.v1 import codec

from kvcache_service.rpc.door import Door

_KINDS: dict[tuple[bool, bool], Callable[..., grpc.RpcMethodHandler[Any, Any]]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def handler(service: ServiceDescriptor, servicer: object, door: Door) -> grpc.GenericRpcHandler[Any, Any]:
    """servicer: has a coroutine or an asynchronous generator of the name of every method; it gets the caller besides."""
    methods = {}
    for method in service.methods:
        kind = GetMessageClass(method.input_type)
        framed = "frame" in method.input_type.fields_by_name
        admitted = door.stream if method.server_streaming else door.unary
        methods[method.name] = _KINDS[method.client_streaming, method.server_streaming](
            admitted(method.full_name, getattr(servicer, method.name)),
            request_deserializer=codec.deserializer(kind) if framed else kind.FromString,
            response_serializer=codec.serialize,
        )
    return grpc.method_handlers_generic_handler(service.full_name, methods)
