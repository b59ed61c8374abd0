from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Transport(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRANSPORT_UNSPECIFIED: _ClassVar[Transport]
    TRANSPORT_SHARED_MEMORY: _ClassVar[Transport]
    TRANSPORT_STREAM: _ClassVar[Transport]

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[DType]
    DTYPE_FLOAT32: _ClassVar[DType]
    DTYPE_FLOAT16: _ClassVar[DType]
    DTYPE_BFLOAT16: _ClassVar[DType]

class Pairing(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PAIRING_UNSPECIFIED: _ClassVar[Pairing]
    PAIRING_HALF_SPLIT: _ClassVar[Pairing]
    PAIRING_INTERLEAVED: _ClassVar[Pairing]

class Policy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POLICY_UNSPECIFIED: _ClassVar[Policy]
    POLICY_OFF: _ClassVar[Policy]
    POLICY_PAPER: _ClassVar[Policy]
    POLICY_GUARDED: _ClassVar[Policy]
    POLICY_REPOSITION: _ClassVar[Policy]
    POLICY_EXACT: _ClassVar[Policy]

class Decision(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DECISION_UNSPECIFIED: _ClassVar[Decision]
    DECISION_REUSE: _ClassVar[Decision]
    DECISION_DENSE: _ClassVar[Decision]

class Action(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ACTION_UNSPECIFIED: _ClassVar[Action]
    ACTION_EXACT: _ClassVar[Action]
    ACTION_REUSE: _ClassVar[Action]
    ACTION_DENSE: _ClassVar[Action]

class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REASON_UNSPECIFIED: _ClassVar[Reason]
    REASON_POLICY_OFF: _ClassVar[Reason]
    REASON_ROLE: _ClassVar[Reason]
    REASON_MISS: _ClassVar[Reason]
    REASON_WARMING: _ClassVar[Reason]
    REASON_LENGTH: _ClassVar[Reason]
    REASON_ENTROPY: _ClassVar[Reason]
    REASON_TAINT: _ClassVar[Reason]
    REASON_QUALITY: _ClassVar[Reason]
    REASON_RESIDUAL: _ClassVar[Reason]
    REASON_COST: _ClassVar[Reason]
    REASON_SERVICE: _ClassVar[Reason]
    REASON_UNCALIBRATED: _ClassVar[Reason]
    REASON_NOVELTY: _ClassVar[Reason]

class Verdict(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERDICT_UNSPECIFIED: _ClassVar[Verdict]
    VERDICT_ACCEPTED: _ClassVar[Verdict]
    VERDICT_REJECTED: _ClassVar[Verdict]
    VERDICT_ABORTED: _ClassVar[Verdict]
    VERDICT_AUDITED: _ClassVar[Verdict]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]

class ErrorCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_CODE_UNSPECIFIED: _ClassVar[ErrorCode]
    ERROR_CODE_INVALID: _ClassVar[ErrorCode]
    ERROR_CODE_MISS: _ClassVar[ErrorCode]
    ERROR_CODE_LEASE_EXPIRED: _ClassVar[ErrorCode]
    ERROR_CODE_STALE_BOOT: _ClassVar[ErrorCode]
    ERROR_CODE_FINGERPRINT_MISMATCH: _ClassVar[ErrorCode]
    ERROR_CODE_CHECKSUM: _ClassVar[ErrorCode]
    ERROR_CODE_QUOTA: _ClassVar[ErrorCode]
    ERROR_CODE_BUSY: _ClassVar[ErrorCode]
    ERROR_CODE_UNSUPPORTED_ROPE: _ClassVar[ErrorCode]
    ERROR_CODE_UNSUPPORTED_MODEL: _ClassVar[ErrorCode]
    ERROR_CODE_UNKNOWN_MODEL: _ClassVar[ErrorCode]
    ERROR_CODE_UNKNOWN_TEMPLATE: _ClassVar[ErrorCode]
    ERROR_CODE_UNKNOWN_TURN: _ClassVar[ErrorCode]
    ERROR_CODE_TEMPLATE_MISMATCH: _ClassVar[ErrorCode]
    ERROR_CODE_CONFLICT: _ClassVar[ErrorCode]
    ERROR_CODE_STATE: _ClassVar[ErrorCode]
    ERROR_CODE_CATALOG: _ClassVar[ErrorCode]
    ERROR_CODE_INTERNAL: _ClassVar[ErrorCode]
    ERROR_CODE_UNAUTHENTICATED: _ClassVar[ErrorCode]
    ERROR_CODE_PERMISSION: _ClassVar[ErrorCode]
    ERROR_CODE_DRAINING: _ClassVar[ErrorCode]

class Pin(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PIN_UNSPECIFIED: _ClassVar[Pin]
    PIN_NONE: _ClassVar[Pin]
    PIN_SOFT: _ClassVar[Pin]
    PIN_HARD: _ClassVar[Pin]

class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KIND_UNSPECIFIED: _ClassVar[Kind]
    KIND_PREFIX: _ClassVar[Kind]
    KIND_SAMPLE: _ClassVar[Kind]
    KIND_ANCHOR: _ClassVar[Kind]
TRANSPORT_UNSPECIFIED: Transport
TRANSPORT_SHARED_MEMORY: Transport
TRANSPORT_STREAM: Transport
DTYPE_UNSPECIFIED: DType
DTYPE_FLOAT32: DType
DTYPE_FLOAT16: DType
DTYPE_BFLOAT16: DType
PAIRING_UNSPECIFIED: Pairing
PAIRING_HALF_SPLIT: Pairing
PAIRING_INTERLEAVED: Pairing
POLICY_UNSPECIFIED: Policy
POLICY_OFF: Policy
POLICY_PAPER: Policy
POLICY_GUARDED: Policy
POLICY_REPOSITION: Policy
POLICY_EXACT: Policy
DECISION_UNSPECIFIED: Decision
DECISION_REUSE: Decision
DECISION_DENSE: Decision
ACTION_UNSPECIFIED: Action
ACTION_EXACT: Action
ACTION_REUSE: Action
ACTION_DENSE: Action
REASON_UNSPECIFIED: Reason
REASON_POLICY_OFF: Reason
REASON_ROLE: Reason
REASON_MISS: Reason
REASON_WARMING: Reason
REASON_LENGTH: Reason
REASON_ENTROPY: Reason
REASON_TAINT: Reason
REASON_QUALITY: Reason
REASON_RESIDUAL: Reason
REASON_COST: Reason
REASON_SERVICE: Reason
REASON_UNCALIBRATED: Reason
REASON_NOVELTY: Reason
VERDICT_UNSPECIFIED: Verdict
VERDICT_ACCEPTED: Verdict
VERDICT_REJECTED: Verdict
VERDICT_ABORTED: Verdict
VERDICT_AUDITED: Verdict
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
ERROR_CODE_UNSPECIFIED: ErrorCode
ERROR_CODE_INVALID: ErrorCode
ERROR_CODE_MISS: ErrorCode
ERROR_CODE_LEASE_EXPIRED: ErrorCode
ERROR_CODE_STALE_BOOT: ErrorCode
ERROR_CODE_FINGERPRINT_MISMATCH: ErrorCode
ERROR_CODE_CHECKSUM: ErrorCode
ERROR_CODE_QUOTA: ErrorCode
ERROR_CODE_BUSY: ErrorCode
ERROR_CODE_UNSUPPORTED_ROPE: ErrorCode
ERROR_CODE_UNSUPPORTED_MODEL: ErrorCode
ERROR_CODE_UNKNOWN_MODEL: ErrorCode
ERROR_CODE_UNKNOWN_TEMPLATE: ErrorCode
ERROR_CODE_UNKNOWN_TURN: ErrorCode
ERROR_CODE_TEMPLATE_MISMATCH: ErrorCode
ERROR_CODE_CONFLICT: ErrorCode
ERROR_CODE_STATE: ErrorCode
ERROR_CODE_CATALOG: ErrorCode
ERROR_CODE_INTERNAL: ErrorCode
ERROR_CODE_UNAUTHENTICATED: ErrorCode
ERROR_CODE_PERMISSION: ErrorCode
ERROR_CODE_DRAINING: ErrorCode
PIN_UNSPECIFIED: Pin
PIN_NONE: Pin
PIN_SOFT: Pin
PIN_HARD: Pin
KIND_UNSPECIFIED: Kind
KIND_PREFIX: Kind
KIND_SAMPLE: Kind
KIND_ANCHOR: Kind

class ErrorDetail(_message.Message):
    __slots__ = ("code", "field", "fix", "retry")
    CODE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    FIX_FIELD_NUMBER: _ClassVar[int]
    RETRY_FIELD_NUMBER: _ClassVar[int]
    code: ErrorCode
    field: str
    fix: str
    retry: bool
    def __init__(self, code: _Optional[_Union[ErrorCode, str]] = ..., field: _Optional[str] = ..., fix: _Optional[str] = ..., retry: bool = ...) -> None: ...

class HelloRequest(_message.Message):
    __slots__ = ("protocol_min", "protocol_max", "host_id")
    PROTOCOL_MIN_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MAX_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    protocol_min: int
    protocol_max: int
    host_id: str
    def __init__(self, protocol_min: _Optional[int] = ..., protocol_max: _Optional[int] = ..., host_id: _Optional[str] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("protocol", "boot_id", "version", "device", "transports", "frame_bytes", "session_bytes", "max_prompt_tokens", "shared_memory_dir")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    FRAME_BYTES_FIELD_NUMBER: _ClassVar[int]
    SESSION_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_DIR_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    boot_id: str
    version: str
    device: str
    transports: _containers.RepeatedScalarFieldContainer[Transport]
    frame_bytes: int
    session_bytes: int
    max_prompt_tokens: int
    shared_memory_dir: str
    def __init__(self, protocol: _Optional[int] = ..., boot_id: _Optional[str] = ..., version: _Optional[str] = ..., device: _Optional[str] = ..., transports: _Optional[_Iterable[_Union[Transport, str]]] = ..., frame_bytes: _Optional[int] = ..., session_bytes: _Optional[int] = ..., max_prompt_tokens: _Optional[int] = ..., shared_memory_dir: _Optional[str] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SessionEvent(_message.Message):
    __slots__ = ("session_id", "boot_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    boot_id: str
    def __init__(self, session_id: _Optional[str] = ..., boot_id: _Optional[str] = ...) -> None: ...

class Rope(_message.Message):
    __slots__ = ("type", "inv_freq", "attention_scaling", "pairing", "rotary_dim")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    INV_FREQ_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_SCALING_FIELD_NUMBER: _ClassVar[int]
    PAIRING_FIELD_NUMBER: _ClassVar[int]
    ROTARY_DIM_FIELD_NUMBER: _ClassVar[int]
    type: str
    inv_freq: _containers.RepeatedScalarFieldContainer[float]
    attention_scaling: float
    pairing: Pairing
    rotary_dim: int
    def __init__(self, type: _Optional[str] = ..., inv_freq: _Optional[_Iterable[float]] = ..., attention_scaling: _Optional[float] = ..., pairing: _Optional[_Union[Pairing, str]] = ..., rotary_dim: _Optional[int] = ...) -> None: ...

class RegisterModelRequest(_message.Message):
    __slots__ = ("name", "layers", "kv_heads", "head_dim", "dtype", "rope", "weights_digest", "tokenizer_digest", "vocab_size", "max_positions", "tp_rank", "tp_size", "attention")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    ROPE_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    TP_RANK_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    name: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype: DType
    rope: Rope
    weights_digest: bytes
    tokenizer_digest: bytes
    vocab_size: int
    max_positions: int
    tp_rank: int
    tp_size: int
    attention: str
    def __init__(self, name: _Optional[str] = ..., layers: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., dtype: _Optional[_Union[DType, str]] = ..., rope: _Optional[_Union[Rope, _Mapping]] = ..., weights_digest: _Optional[bytes] = ..., tokenizer_digest: _Optional[bytes] = ..., vocab_size: _Optional[int] = ..., max_positions: _Optional[int] = ..., tp_rank: _Optional[int] = ..., tp_size: _Optional[int] = ..., attention: _Optional[str] = ...) -> None: ...

class RegisterModelReply(_message.Message):
    __slots__ = ("model_id",)
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    def __init__(self, model_id: _Optional[str] = ...) -> None: ...

class Segment(_message.Message):
    __slots__ = ("fixed", "placeholder")
    FIXED_FIELD_NUMBER: _ClassVar[int]
    PLACEHOLDER_FIELD_NUMBER: _ClassVar[int]
    fixed: TokenIds
    placeholder: str
    def __init__(self, fixed: _Optional[_Union[TokenIds, _Mapping]] = ..., placeholder: _Optional[str] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class RegisterTemplateRequest(_message.Message):
    __slots__ = ("model_id", "segments", "decision", "policy", "produces")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    PRODUCES_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    segments: _containers.RepeatedCompositeFieldContainer[Segment]
    decision: Decision
    policy: Policy
    produces: str
    def __init__(self, model_id: _Optional[str] = ..., segments: _Optional[_Iterable[_Union[Segment, _Mapping]]] = ..., decision: _Optional[_Union[Decision, str]] = ..., policy: _Optional[_Union[Policy, str]] = ..., produces: _Optional[str] = ...) -> None: ...

class RegisterTemplateReply(_message.Message):
    __slots__ = ("template_id", "missing")
    TEMPLATE_ID_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    template_id: str
    missing: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, template_id: _Optional[str] = ..., missing: _Optional[_Iterable[int]] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("data", "crc32")
    DATA_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    crc32: int
    def __init__(self, data: _Optional[bytes] = ..., crc32: _Optional[int] = ...) -> None: ...

class PutHeader(_message.Message):
    __slots__ = ("model_id", "token_ids", "dtype", "shape", "pin")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    dtype: DType
    shape: _containers.RepeatedScalarFieldContainer[int]
    pin: Pin
    def __init__(self, model_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., dtype: _Optional[_Union[DType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., pin: _Optional[_Union[Pin, str]] = ...) -> None: ...

class PutRequest(_message.Message):
    __slots__ = ("header", "frame")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    header: PutHeader
    frame: Frame
    def __init__(self, header: _Optional[_Union[PutHeader, _Mapping]] = ..., frame: _Optional[_Union[Frame, _Mapping]] = ...) -> None: ...

class PutReply(_message.Message):
    __slots__ = ("key", "existed")
    KEY_FIELD_NUMBER: _ClassVar[int]
    EXISTED_FIELD_NUMBER: _ClassVar[int]
    key: str
    existed: bool
    def __init__(self, key: _Optional[str] = ..., existed: bool = ...) -> None: ...

class Sample(_message.Message):
    __slots__ = ("placeholder", "token_ids")
    PLACEHOLDER_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    placeholder: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, placeholder: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class OpenTurnRequest(_message.Message):
    __slots__ = ("session_id", "request_id", "template_id", "samples", "reserve_tokens", "transport", "policy", "trial", "fetch")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    RESERVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    TRIAL_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    request_id: str
    template_id: str
    samples: _containers.RepeatedCompositeFieldContainer[Sample]
    reserve_tokens: int
    transport: Transport
    policy: Policy
    trial: Trial
    fetch: bool
    def __init__(self, session_id: _Optional[str] = ..., request_id: _Optional[str] = ..., template_id: _Optional[str] = ..., samples: _Optional[_Iterable[_Union[Sample, _Mapping]]] = ..., reserve_tokens: _Optional[int] = ..., transport: _Optional[_Union[Transport, str]] = ..., policy: _Optional[_Union[Policy, str]] = ..., trial: _Optional[_Union[Trial, _Mapping]] = ..., fetch: bool = ...) -> None: ...

class Trial(_message.Message):
    __slots__ = ("boundary", "trailing", "blending", "ignore_exact")
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    TRAILING_FIELD_NUMBER: _ClassVar[int]
    BLENDING_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EXACT_FIELD_NUMBER: _ClassVar[int]
    boundary: int
    trailing: int
    blending: Blending
    ignore_exact: bool
    def __init__(self, boundary: _Optional[int] = ..., trailing: _Optional[int] = ..., blending: _Optional[_Union[Blending, _Mapping]] = ..., ignore_exact: bool = ...) -> None: ...

class Blending(_message.Message):
    __slots__ = ("gamma", "max_anchors", "reference_weights", "absolute_frame", "no_rotation", "no_placeholder_offsets", "no_following_offsets")
    GAMMA_FIELD_NUMBER: _ClassVar[int]
    MAX_ANCHORS_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    ABSOLUTE_FRAME_FIELD_NUMBER: _ClassVar[int]
    NO_ROTATION_FIELD_NUMBER: _ClassVar[int]
    NO_PLACEHOLDER_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    NO_FOLLOWING_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    gamma: float
    max_anchors: int
    reference_weights: bool
    absolute_frame: bool
    no_rotation: bool
    no_placeholder_offsets: bool
    no_following_offsets: bool
    def __init__(self, gamma: _Optional[float] = ..., max_anchors: _Optional[int] = ..., reference_weights: bool = ..., absolute_frame: bool = ..., no_rotation: bool = ..., no_placeholder_offsets: bool = ..., no_following_offsets: bool = ...) -> None: ...

class SegmentPlan(_message.Message):
    __slots__ = ("start", "tokens", "action", "reason", "fresh", "anchors", "probe", "probed", "corrected", "novelty")
    START_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FRESH_FIELD_NUMBER: _ClassVar[int]
    ANCHORS_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    PROBED_FIELD_NUMBER: _ClassVar[int]
    CORRECTED_FIELD_NUMBER: _ClassVar[int]
    NOVELTY_FIELD_NUMBER: _ClassVar[int]
    start: int
    tokens: int
    action: Action
    reason: Reason
    fresh: _containers.RepeatedScalarFieldContainer[int]
    anchors: int
    probe: int
    probed: _containers.RepeatedScalarFieldContainer[int]
    corrected: bool
    novelty: float
    def __init__(self, start: _Optional[int] = ..., tokens: _Optional[int] = ..., action: _Optional[_Union[Action, str]] = ..., reason: _Optional[_Union[Reason, str]] = ..., fresh: _Optional[_Iterable[int]] = ..., anchors: _Optional[int] = ..., probe: _Optional[int] = ..., probed: _Optional[_Iterable[int]] = ..., corrected: bool = ..., novelty: _Optional[float] = ...) -> None: ...

class OpenTurnReply(_message.Message):
    __slots__ = ("turn_id", "segments", "prompt_tokens", "claimable_prefix", "policy", "buffer_path", "buffer_bytes", "buffer_tokens", "lease_seconds", "predicted_reuse_seconds", "predicted_dense_seconds", "residual_limit", "ratio_limit", "match_seconds", "audit", "fetched")
    TURN_ID_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CLAIMABLE_PREFIX_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    BUFFER_PATH_FIELD_NUMBER: _ClassVar[int]
    BUFFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUFFER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_REUSE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_DENSE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RESIDUAL_LIMIT_FIELD_NUMBER: _ClassVar[int]
    RATIO_LIMIT_FIELD_NUMBER: _ClassVar[int]
    MATCH_SECONDS_FIELD_NUMBER: _ClassVar[int]
    AUDIT_FIELD_NUMBER: _ClassVar[int]
    FETCHED_FIELD_NUMBER: _ClassVar[int]
    turn_id: str
    segments: _containers.RepeatedCompositeFieldContainer[SegmentPlan]
    prompt_tokens: int
    claimable_prefix: int
    policy: Policy
    buffer_path: str
    buffer_bytes: int
    buffer_tokens: int
    lease_seconds: float
    predicted_reuse_seconds: float
    predicted_dense_seconds: float
    residual_limit: float
    ratio_limit: float
    match_seconds: float
    audit: bool
    fetched: FetchSummary
    def __init__(self, turn_id: _Optional[str] = ..., segments: _Optional[_Iterable[_Union[SegmentPlan, _Mapping]]] = ..., prompt_tokens: _Optional[int] = ..., claimable_prefix: _Optional[int] = ..., policy: _Optional[_Union[Policy, str]] = ..., buffer_path: _Optional[str] = ..., buffer_bytes: _Optional[int] = ..., buffer_tokens: _Optional[int] = ..., lease_seconds: _Optional[float] = ..., predicted_reuse_seconds: _Optional[float] = ..., predicted_dense_seconds: _Optional[float] = ..., residual_limit: _Optional[float] = ..., ratio_limit: _Optional[float] = ..., match_seconds: _Optional[float] = ..., audit: bool = ..., fetched: _Optional[_Union[FetchSummary, _Mapping]] = ...) -> None: ...

class FetchTurnRequest(_message.Message):
    __slots__ = ("turn_id",)
    TURN_ID_FIELD_NUMBER: _ClassVar[int]
    turn_id: str
    def __init__(self, turn_id: _Optional[str] = ...) -> None: ...

class FetchTurnReply(_message.Message):
    __slots__ = ("frame", "summary", "layers")
    FRAME_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    frame: Frame
    summary: FetchSummary
    layers: int
    def __init__(self, frame: _Optional[_Union[Frame, _Mapping]] = ..., summary: _Optional[_Union[FetchSummary, _Mapping]] = ..., layers: _Optional[int] = ...) -> None: ...

class FetchSummary(_message.Message):
    __slots__ = ("assembly_seconds", "bytes")
    ASSEMBLY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    assembly_seconds: float
    bytes: int
    def __init__(self, assembly_seconds: _Optional[float] = ..., bytes: _Optional[int] = ...) -> None: ...

class ObserveHeader(_message.Message):
    __slots__ = ("turn_id", "start", "tokens", "dtype")
    TURN_ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    turn_id: str
    start: int
    tokens: int
    dtype: DType
    def __init__(self, turn_id: _Optional[str] = ..., start: _Optional[int] = ..., tokens: _Optional[int] = ..., dtype: _Optional[_Union[DType, str]] = ...) -> None: ...

class ObserveRequest(_message.Message):
    __slots__ = ("header", "frame")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    header: ObserveHeader
    frame: Frame
    def __init__(self, header: _Optional[_Union[ObserveHeader, _Mapping]] = ..., frame: _Optional[_Union[Frame, _Mapping]] = ...) -> None: ...

class ObserveReply(_message.Message):
    __slots__ = ("bytes",)
    BYTES_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    def __init__(self, bytes: _Optional[int] = ...) -> None: ...

class Timing(_message.Message):
    __slots__ = ("ttft_seconds", "first_forward_seconds", "fetch_seconds")
    TTFT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_FORWARD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FETCH_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ttft_seconds: float
    first_forward_seconds: float
    fetch_seconds: float
    def __init__(self, ttft_seconds: _Optional[float] = ..., first_forward_seconds: _Optional[float] = ..., fetch_seconds: _Optional[float] = ...) -> None: ...

class ProbeResidual(_message.Message):
    __slots__ = ("segment", "corrected", "repositioned")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    CORRECTED_FIELD_NUMBER: _ClassVar[int]
    REPOSITIONED_FIELD_NUMBER: _ClassVar[int]
    segment: int
    corrected: float
    repositioned: float
    def __init__(self, segment: _Optional[int] = ..., corrected: _Optional[float] = ..., repositioned: _Optional[float] = ...) -> None: ...

class SettleTurnRequest(_message.Message):
    __slots__ = ("turn_id", "verdict", "reason", "finish_reason", "output_token_ids", "output_kv_tokens", "probes", "timing", "distance", "observe_start", "observe_tokens")
    TURN_ID_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROBES_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    DISTANCE_FIELD_NUMBER: _ClassVar[int]
    OBSERVE_START_FIELD_NUMBER: _ClassVar[int]
    OBSERVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    turn_id: str
    verdict: Verdict
    reason: Reason
    finish_reason: FinishReason
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    output_kv_tokens: int
    probes: _containers.RepeatedCompositeFieldContainer[ProbeResidual]
    timing: Timing
    distance: Distance
    observe_start: int
    observe_tokens: int
    def __init__(self, turn_id: _Optional[str] = ..., verdict: _Optional[_Union[Verdict, str]] = ..., reason: _Optional[_Union[Reason, str]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., output_token_ids: _Optional[_Iterable[int]] = ..., output_kv_tokens: _Optional[int] = ..., probes: _Optional[_Iterable[_Union[ProbeResidual, _Mapping]]] = ..., timing: _Optional[_Union[Timing, _Mapping]] = ..., distance: _Optional[_Union[Distance, _Mapping]] = ..., observe_start: _Optional[int] = ..., observe_tokens: _Optional[int] = ...) -> None: ...

class Distance(_message.Message):
    __slots__ = ("kl", "top1", "tokens")
    KL_FIELD_NUMBER: _ClassVar[int]
    TOP1_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    kl: float
    top1: float
    tokens: int
    def __init__(self, kl: _Optional[float] = ..., top1: _Optional[float] = ..., tokens: _Optional[int] = ...) -> None: ...

class SettleTurnReply(_message.Message):
    __slots__ = ("repeated", "candidates", "accepted", "refused", "committed")
    REPEATED_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    repeated: bool
    candidates: int
    accepted: int
    refused: _containers.RepeatedScalarFieldContainer[str]
    committed: bool
    def __init__(self, repeated: bool = ..., candidates: _Optional[int] = ..., accepted: _Optional[int] = ..., refused: _Optional[_Iterable[str]] = ..., committed: bool = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("turn_id",)
    TURN_ID_FIELD_NUMBER: _ClassVar[int]
    turn_id: str
    def __init__(self, turn_id: _Optional[str] = ...) -> None: ...

class ReleaseReply(_message.Message):
    __slots__ = ("released",)
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    released: bool
    def __init__(self, released: bool = ...) -> None: ...

class EventsRequest(_message.Message):
    __slots__ = ("cursor", "snapshot")
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    cursor: str
    snapshot: bool
    def __init__(self, cursor: _Optional[str] = ..., snapshot: bool = ...) -> None: ...

class EventBatch(_message.Message):
    __slots__ = ("cursor", "lost", "events")
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    cursor: str
    lost: bool
    events: _containers.RepeatedCompositeFieldContainer[Event]
    def __init__(self, cursor: _Optional[str] = ..., lost: bool = ..., events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("removed", "kind", "model_id", "content", "bytes", "start", "tokens", "template_id", "ordinal")
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_ID_FIELD_NUMBER: _ClassVar[int]
    ORDINAL_FIELD_NUMBER: _ClassVar[int]
    removed: bool
    kind: Kind
    model_id: str
    content: bytes
    bytes: int
    start: int
    tokens: int
    template_id: str
    ordinal: int
    def __init__(self, removed: bool = ..., kind: _Optional[_Union[Kind, str]] = ..., model_id: _Optional[str] = ..., content: _Optional[bytes] = ..., bytes: _Optional[int] = ..., start: _Optional[int] = ..., tokens: _Optional[int] = ..., template_id: _Optional[str] = ..., ordinal: _Optional[int] = ...) -> None: ...

class CalibrateRequest(_message.Message):
    __slots__ = ("template_id", "target_kl", "target_top1")
    TEMPLATE_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_KL_FIELD_NUMBER: _ClassVar[int]
    TARGET_TOP1_FIELD_NUMBER: _ClassVar[int]
    template_id: str
    target_kl: float
    target_top1: float
    def __init__(self, template_id: _Optional[str] = ..., target_kl: _Optional[float] = ..., target_top1: _Optional[float] = ...) -> None: ...

class Calibration(_message.Message):
    __slots__ = ("usable", "signal", "residual_limit", "novelty_limit", "reposition", "audits", "kl_p95", "top1", "accepted", "target_kl", "target_top1", "ratio_limit", "auc", "min_samples")
    class AucEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    USABLE_FIELD_NUMBER: _ClassVar[int]
    SIGNAL_FIELD_NUMBER: _ClassVar[int]
    RESIDUAL_LIMIT_FIELD_NUMBER: _ClassVar[int]
    NOVELTY_LIMIT_FIELD_NUMBER: _ClassVar[int]
    REPOSITION_FIELD_NUMBER: _ClassVar[int]
    AUDITS_FIELD_NUMBER: _ClassVar[int]
    KL_P95_FIELD_NUMBER: _ClassVar[int]
    TOP1_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    TARGET_KL_FIELD_NUMBER: _ClassVar[int]
    TARGET_TOP1_FIELD_NUMBER: _ClassVar[int]
    RATIO_LIMIT_FIELD_NUMBER: _ClassVar[int]
    AUC_FIELD_NUMBER: _ClassVar[int]
    MIN_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    usable: bool
    signal: str
    residual_limit: float
    novelty_limit: float
    reposition: bool
    audits: int
    kl_p95: float
    top1: float
    accepted: float
    target_kl: float
    target_top1: float
    ratio_limit: float
    auc: _containers.ScalarMap[str, float]
    min_samples: int
    def __init__(self, usable: bool = ..., signal: _Optional[str] = ..., residual_limit: _Optional[float] = ..., novelty_limit: _Optional[float] = ..., reposition: bool = ..., audits: _Optional[int] = ..., kl_p95: _Optional[float] = ..., top1: _Optional[float] = ..., accepted: _Optional[float] = ..., target_kl: _Optional[float] = ..., target_top1: _Optional[float] = ..., ratio_limit: _Optional[float] = ..., auc: _Optional[_Mapping[str, float]] = ..., min_samples: _Optional[int] = ...) -> None: ...

class CalibrateReply(_message.Message):
    __slots__ = ("calibration",)
    CALIBRATION_FIELD_NUMBER: _ClassVar[int]
    calibration: Calibration
    def __init__(self, calibration: _Optional[_Union[Calibration, _Mapping]] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SlotStatus(_message.Message):
    __slots__ = ("ordinal", "placeholder", "origin", "samples", "error", "bytes", "off", "audits", "kl_mean", "kl_p95", "top1")
    ORDINAL_FIELD_NUMBER: _ClassVar[int]
    PLACEHOLDER_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    OFF_FIELD_NUMBER: _ClassVar[int]
    AUDITS_FIELD_NUMBER: _ClassVar[int]
    KL_MEAN_FIELD_NUMBER: _ClassVar[int]
    KL_P95_FIELD_NUMBER: _ClassVar[int]
    TOP1_FIELD_NUMBER: _ClassVar[int]
    ordinal: int
    placeholder: str
    origin: str
    samples: int
    error: float
    bytes: int
    off: bool
    audits: int
    kl_mean: float
    kl_p95: float
    top1: float
    def __init__(self, ordinal: _Optional[int] = ..., placeholder: _Optional[str] = ..., origin: _Optional[str] = ..., samples: _Optional[int] = ..., error: _Optional[float] = ..., bytes: _Optional[int] = ..., off: bool = ..., audits: _Optional[int] = ..., kl_mean: _Optional[float] = ..., kl_p95: _Optional[float] = ..., top1: _Optional[float] = ...) -> None: ...

class TemplateStatus(_message.Message):
    __slots__ = ("template_id", "model_id", "produces", "decision", "policy", "slots", "calibration", "audits", "segments")
    TEMPLATE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    PRODUCES_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    CALIBRATION_FIELD_NUMBER: _ClassVar[int]
    AUDITS_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    template_id: str
    model_id: str
    produces: str
    decision: Decision
    policy: Policy
    slots: _containers.RepeatedCompositeFieldContainer[SlotStatus]
    calibration: Calibration
    audits: int
    segments: _containers.RepeatedCompositeFieldContainer[SegmentStatus]
    def __init__(self, template_id: _Optional[str] = ..., model_id: _Optional[str] = ..., produces: _Optional[str] = ..., decision: _Optional[_Union[Decision, str]] = ..., policy: _Optional[_Union[Policy, str]] = ..., slots: _Optional[_Iterable[_Union[SlotStatus, _Mapping]]] = ..., calibration: _Optional[_Union[Calibration, _Mapping]] = ..., audits: _Optional[int] = ..., segments: _Optional[_Iterable[_Union[SegmentStatus, _Mapping]]] = ...) -> None: ...

class SegmentStatus(_message.Message):
    __slots__ = ("fixed_tokens", "placeholder")
    FIXED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PLACEHOLDER_FIELD_NUMBER: _ClassVar[int]
    fixed_tokens: int
    placeholder: str
    def __init__(self, fixed_tokens: _Optional[int] = ..., placeholder: _Optional[str] = ...) -> None: ...

class ModelStatus(_message.Message):
    __slots__ = ("model_id", "name", "layers", "kv_heads", "head_dim", "dtype", "token_bytes", "templates", "host_bytes")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    TEMPLATES_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    name: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype: DType
    token_bytes: int
    templates: int
    host_bytes: int
    def __init__(self, model_id: _Optional[str] = ..., name: _Optional[str] = ..., layers: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., dtype: _Optional[_Union[DType, str]] = ..., token_bytes: _Optional[int] = ..., templates: _Optional[int] = ..., host_bytes: _Optional[int] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("boot_id", "uptime_seconds", "templates", "models")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TEMPLATES_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    uptime_seconds: float
    templates: _containers.RepeatedCompositeFieldContainer[TemplateStatus]
    models: _containers.RepeatedCompositeFieldContainer[ModelStatus]
    def __init__(self, boot_id: _Optional[str] = ..., uptime_seconds: _Optional[float] = ..., templates: _Optional[_Iterable[_Union[TemplateStatus, _Mapping]]] = ..., models: _Optional[_Iterable[_Union[ModelStatus, _Mapping]]] = ...) -> None: ...

class AnchorSelection(_message.Message):
    __slots__ = ("model_id", "template_id", "placeholder", "sample")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_ID_FIELD_NUMBER: _ClassVar[int]
    PLACEHOLDER_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    template_id: str
    placeholder: str
    sample: str
    def __init__(self, model_id: _Optional[str] = ..., template_id: _Optional[str] = ..., placeholder: _Optional[str] = ..., sample: _Optional[str] = ...) -> None: ...

class ListAnchorsRequest(_message.Message):
    __slots__ = ("selection",)
    SELECTION_FIELD_NUMBER: _ClassVar[int]
    selection: AnchorSelection
    def __init__(self, selection: _Optional[_Union[AnchorSelection, _Mapping]] = ...) -> None: ...

class PooledSample(_message.Message):
    __slots__ = ("model_id", "placeholder", "origin", "sample", "anchor", "tokens", "sequence", "uses", "slots", "taint", "host_bytes", "pin")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    PLACEHOLDER_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    USES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    TAINT_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    placeholder: str
    origin: str
    sample: str
    anchor: bool
    tokens: int
    sequence: int
    uses: int
    slots: _containers.RepeatedScalarFieldContainer[str]
    taint: int
    host_bytes: int
    pin: Pin
    def __init__(self, model_id: _Optional[str] = ..., placeholder: _Optional[str] = ..., origin: _Optional[str] = ..., sample: _Optional[str] = ..., anchor: bool = ..., tokens: _Optional[int] = ..., sequence: _Optional[int] = ..., uses: _Optional[int] = ..., slots: _Optional[_Iterable[str]] = ..., taint: _Optional[int] = ..., host_bytes: _Optional[int] = ..., pin: _Optional[_Union[Pin, str]] = ...) -> None: ...

class ListAnchorsReply(_message.Message):
    __slots__ = ("samples",)
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    samples: _containers.RepeatedCompositeFieldContainer[PooledSample]
    def __init__(self, samples: _Optional[_Iterable[_Union[PooledSample, _Mapping]]] = ...) -> None: ...

class DeleteAnchorsRequest(_message.Message):
    __slots__ = ("selection",)
    SELECTION_FIELD_NUMBER: _ClassVar[int]
    selection: AnchorSelection
    def __init__(self, selection: _Optional[_Union[AnchorSelection, _Mapping]] = ...) -> None: ...

class DeleteAnchorsReply(_message.Message):
    __slots__ = ("samples", "host_bytes")
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    samples: int
    host_bytes: int
    def __init__(self, samples: _Optional[int] = ..., host_bytes: _Optional[int] = ...) -> None: ...

class PinAnchorsRequest(_message.Message):
    __slots__ = ("selection", "pin")
    SELECTION_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    selection: AnchorSelection
    pin: Pin
    def __init__(self, selection: _Optional[_Union[AnchorSelection, _Mapping]] = ..., pin: _Optional[_Union[Pin, str]] = ...) -> None: ...

class PinAnchorsReply(_message.Message):
    __slots__ = ("samples",)
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    samples: int
    def __init__(self, samples: _Optional[int] = ...) -> None: ...

class ClearRequest(_message.Message):
    __slots__ = ("model_id",)
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    def __init__(self, model_id: _Optional[str] = ...) -> None: ...

class ClearReply(_message.Message):
    __slots__ = ("models", "host_bytes")
    MODELS_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    models: int
    host_bytes: int
    def __init__(self, models: _Optional[int] = ..., host_bytes: _Optional[int] = ...) -> None: ...

class ExportRequest(_message.Message):
    __slots__ = ("model_id",)
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    def __init__(self, model_id: _Optional[str] = ...) -> None: ...

class RecordHeader(_message.Message):
    __slots__ = ("name", "bytes", "records")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    bytes: int
    records: int
    def __init__(self, name: _Optional[str] = ..., bytes: _Optional[int] = ..., records: _Optional[int] = ...) -> None: ...

class ExportReply(_message.Message):
    __slots__ = ("header", "frame")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    header: RecordHeader
    frame: Frame
    def __init__(self, header: _Optional[_Union[RecordHeader, _Mapping]] = ..., frame: _Optional[_Union[Frame, _Mapping]] = ...) -> None: ...

class ImportRequest(_message.Message):
    __slots__ = ("header", "frame")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    header: RecordHeader
    frame: Frame
    def __init__(self, header: _Optional[_Union[RecordHeader, _Mapping]] = ..., frame: _Optional[_Union[Frame, _Mapping]] = ...) -> None: ...

class ImportReply(_message.Message):
    __slots__ = ("samples", "predictors", "calibrations", "known")
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    PREDICTORS_FIELD_NUMBER: _ClassVar[int]
    CALIBRATIONS_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    samples: int
    predictors: int
    calibrations: int
    known: bool
    def __init__(self, samples: _Optional[int] = ..., predictors: _Optional[int] = ..., calibrations: _Optional[int] = ..., known: bool = ...) -> None: ...

class QuotasRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Quota(_message.Message):
    __slots__ = ("name", "used", "limit")
    NAME_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    name: str
    used: int
    limit: int
    def __init__(self, name: _Optional[str] = ..., used: _Optional[int] = ..., limit: _Optional[int] = ...) -> None: ...

class TenantQuotas(_message.Message):
    __slots__ = ("tenant", "quotas")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    QUOTAS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    quotas: _containers.RepeatedCompositeFieldContainer[Quota]
    def __init__(self, tenant: _Optional[str] = ..., quotas: _Optional[_Iterable[_Union[Quota, _Mapping]]] = ...) -> None: ...

class QuotasReply(_message.Message):
    __slots__ = ("tenants",)
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    tenants: _containers.RepeatedCompositeFieldContainer[TenantQuotas]
    def __init__(self, tenants: _Optional[_Iterable[_Union[TenantQuotas, _Mapping]]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("open_turns",)
    OPEN_TURNS_FIELD_NUMBER: _ClassVar[int]
    open_turns: int
    def __init__(self, open_turns: _Optional[int] = ...) -> None: ...
