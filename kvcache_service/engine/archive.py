"""What a service has learned, as records that another one takes in: one for every template, one for every sample.

A record is a safetensors file: tensors, and a description in JSON beside them. Keys of blobs stand in it without the tag of their
group, so that another tenant may take it in. Nothing of a record is trusted: what does not fit the model and the templates that
are registered here is refused before anything has changed, since kernels read without looking at bounds.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from kvcache_service.catalog.keys import Group, PoolKey
from kvcache_service.catalog.store import Catalog, Commit, Insert
from kvcache_service.engine.memory import Memory
from kvcache_service.engine.pools import Pools
from kvcache_service.engine.records import Base, FixedBase, Offsets, Place, Slot
from kvcache_service.engine.trust import Trust
from kvcache_service.errors import invalid
from kvcache_service.geometry import Geometry
from kvcache_service.kernels import codec, cpu
from kvcache_service.predictor import RidgeStatistics, RunningMean
from kvcache_service.prompt import Fixed, Placeholder, Template

_DESCRIPTION = "record"  # the tensor that holds the description, bytes of JSON

Count = Annotated[int, Field(ge=0, le=1 << 31)]
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Name = Annotated[str, Field(max_length=256)]
_KEY = re.compile(r"^:(exact|base|pool|fixed):")
Key = Annotated[str, Field(pattern=_KEY, max_length=1024)]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class _Base(_Record):
    origin: Name
    start: Count
    covered: Count
    taint: Count
    key: Key
    produced: Name


class _Offsets(_Record):
    base: Key
    placeholder: Key
    following: Key | None
    fixed: Key | None
    start: Count
    length: Count


class _Anchor(_Record):
    """slots: offsets by slot name, template:ordinal."""

    placeholder: Name
    origin: Name
    length: Count
    slots: dict[str, _Offsets]


class _Sample(_Record):
    """Tensors: blobs by key."""

    kind: Literal["sample"] = "sample"
    model_id: Hash
    sample: Hash
    bases: list[_Base]
    anchors: list[_Anchor]


class _Predictor(_Record):
    """Tensors: predictor.N.NAME, N its place in the list."""

    ordinal: Count
    placeholder: Name
    origin: Name
    norms: Annotated[list[float], Field(max_length=64)]


class _FixedBase(_Record):
    """Tensor: fixed.ORDINAL."""

    ordinal: Count
    start: Count
    key: Key


class _Template(_Record):
    """means: ordinals; tensors mean.ORDINAL.NAME."""

    kind: Literal["template"] = "template"
    model_id: Hash
    template_id: Hash
    predictors: list[_Predictor]
    means: list[Count]
    fixed: list[_FixedBase]
    quality: str


_RECORD: TypeAdapter[_Sample | _Template] = TypeAdapter(Annotated[_Sample | _Template, Field(discriminator="kind")])


@dataclass(frozen=True)
class Record:
    """name: a file name. read: gives its bytes; b"" where all that it was about is gone."""

    name: str
    read: Callable[[], bytes]


class Archive:
    """Thread-safe. lock: the engine's, which guards `memory`; learning: held while predictors and anchors are added."""

    def __init__(
        self,
        memory: Memory,
        catalog: Catalog,
        trust: Trust,
        pools: Pools,
        lock: threading.RLock,
        learning: threading.Lock,
        *,
        geometry: Callable[[str, str], Geometry],
        template: Callable[[str, str], Template],
        templates: Callable[[Group], Sequence[Template]],
    ) -> None:
        """geometry, template: of a tenant, by id; they raise UNKNOWN_MODEL and UNKNOWN_TEMPLATE. templates: of a group."""
        self._memory = memory
        self._catalog = catalog
        self._trust = trust
        self._pools = pools
        self._lock = lock
        self._learning = learning
        self._geometry = geometry
        self._template = template
        self._templates = templates

    # Out

    def records(self, tenant: str, model_id: str) -> list[Record]:
        """Of every model whose id begins so: templates, then samples, oldest first. Each is read when its turn comes."""
        out = []
        for group in self._pools.chosen(tenant, model_id):
            model = group.model_id[:12]
            for template in self._templates(group):
                read = lambda group=group, template=template: self._template_bytes(group, template)  # noqa: E731
                out.append(Record(f"{model}/template-{template.template_id}.safetensors", read))
            with self._lock:
                samples = [sample for sample, _ in self._memory.known_bases(group)]
                ages = {a.sample: a.sequence for _, a in reversed(self._catalog.held(group))}
            for sample in sorted(dict.fromkeys(samples), key=lambda s: ages.get(s, 0)):
                read = lambda group=group, sample=sample: self._sample_bytes(group, sample)  # noqa: E731
                out.append(Record(f"{model}/sample-{sample}.safetensors", read))
        return out

    def _template_bytes(self, group: Group, template: Template) -> bytes:
        memory, tensors = self._memory, dict[str, Tensor]()
        with self._learning, self._lock:
            slots = sorted(s for s in memory.statistics if s.pool.group == group and s.template_id == template.template_id)
            places = [Place(group, template.template_id, ordinal) for ordinal in range(len(template.segments))]
            means = {p.ordinal: memory.fixed[p] for p in places if p in memory.fixed}
            fixed = {p.ordinal: memory.fixed_bases[p] for p in places if p in memory.fixed_bases}
            for number, slot in enumerate(slots):
                tensors |= {f"predictor.{number}.{name}": t for name, t in memory.statistics[slot].state().items()}
            for ordinal, mean in means.items():
                tensors |= {f"mean.{ordinal}.{name}": t for name, t in mean.state().items()}
            tensors |= {f"fixed.{ordinal}": base.kv for ordinal, base in fixed.items()}
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
            predictors = [
                _Predictor(ordinal=s.ordinal, placeholder=s.pool.placeholder, origin=s.pool.origin, norms=memory.norms(s))
                for s in slots
            ]
        described = _Template(
            model_id=group.model_id,
            template_id=template.template_id,
            predictors=predictors,
            means=sorted(means),
            fixed=[_FixedBase(ordinal=o, start=b.start, key=b.key.removeprefix(group.tag)) for o, b in fixed.items()],
            quality=self._trust.dump(group.tenant, template),
        )
        return _packed(described, tensors)

    def _sample_bytes(self, group: Group, sample: str) -> bytes:
        with self._lock:
            bases = self._memory.bases(group, sample)
            pooled = [(pool, anchor) for pool, anchor in self._catalog.held(group) if anchor.sample == sample]
            offsets = {pool: dict(self._memory.anchors.get((pool, sample), {})) for pool, _ in pooled}
        keys = {b.key for b in bases} | {key for slots in offsets.values() for held in slots.values() for key in held.keys}
        blobs = {key: blob for key in sorted(keys) if (blob := self._memory.copy(key)) is not None}
        if not any(base.key in blobs for base in bases):
            return b""
        described = _Sample(
            model_id=group.model_id,
            sample=sample,
            bases=[_Base(**_bare(group, base)) for base in bases if base.key in blobs],
            anchors=[
                _Anchor(
                    placeholder=pool.placeholder,
                    origin=pool.origin,
                    length=anchor.length,
                    slots={n: _Offsets(**_bare(group, o)) for n, o in offsets[pool].items() if blobs.keys() >= {*o.keys}},
                )
                for pool, anchor in pooled
            ],
        )
        return _packed(described, {key.removeprefix(group.tag): blob for key, blob in blobs.items()})

    # In

    def take(self, tenant: str, record: bytes) -> Counter[str]:
        """Take a record in: counts of `samples`, `predictors` and `calibrations` that were new.

        Raises INVALID for what does not fit, UNKNOWN_MODEL and UNKNOWN_TEMPLATE for what nobody has registered here, QUOTA and
        CATALOG; nothing of the record counts then. Slots of templates that are not registered are left out of samples.
        """
        try:
            tensors = load(record)
            described = _RECORD.validate_json(tensors.pop(_DESCRIPTION).numpy().tobytes())
            geometry = self._geometry(tenant, described.model_id)
            group = Group(tenant, described.model_id)
            if isinstance(described, _Template):
                taken = self._take_template(group, geometry, described, tensors)
            else:
                taken = self._take_sample(group, geometry, described, tensors)
        except (SafetensorError, ValidationError, ValueError, LookupError, TypeError) as error:
            raise invalid("frame", f"no record that fits: {error}", "send what Export gave, for the same templates") from error
        return +taken

    def _take_template(
        self, group: Group, geometry: Geometry, described: _Template, tensors: Mapping[str, Tensor]
    ) -> Counter[str]:
        template = self._template(group.tenant, described.template_id)
        predictors = dict(_predictors(group, geometry, template, described, tensors))
        means = {ordinal: _mean(geometry, template, ordinal, _part(tensors, f"mean.{ordinal}.")) for ordinal in described.means}
        fixed = [(f, _plain(tensors[f"fixed.{f.ordinal}"], geometry, template, f.ordinal)) for f in described.fixed]
        taken = Counter(calibrations=int(self._trust.adopt(group.tenant, template, described.quality)))
        with self._learning, self._lock:
            for slot, (statistics, norms) in predictors.items():
                taken["predictors"] += self._memory.adopt_predictor(slot, statistics, norms)
            for ordinal, mean in means.items():
                self._memory.adopt_mean(Place(group, template.template_id, ordinal), mean)
            for base, kv in fixed:
                place = Place(group, template.template_id, base.ordinal)
                self._memory.add_fixed_base(place, FixedBase(kv, base.start, group.tag + base.key))
        return taken

    def _take_sample(self, group: Group, geometry: Geometry, described: _Sample, tensors: Mapping[str, Tensor]) -> Counter[str]:
        with self._lock:
            if self._memory.bases(group, described.sample):
                return Counter()
        offsets: dict[Insert, tuple[Slot, Offsets]] = {}
        for anchor in described.anchors:
            pool = PoolKey(group, anchor.placeholder, anchor.origin)
            for template, slot, held in self._slots(pool, anchor):
                _check_offsets(geometry, template, slot, held, tensors)
                offsets[Insert(pool, described.sample, anchor.length, slot.name)] = slot, Offsets(**_tagged(group, held))
        bases = [Base(**_tagged(group, base)) for base in described.bases]
        for base in described.bases:
            _finite(tensors[base.key], geometry, base.covered)
        for key in {b.key for b in bases} | {key for _, held in offsets.values() for key in held.keys}:
            self._keep(key, tensors[key.removeprefix(group.tag)])
        with self._learning:
            accepted: Sequence[Insert] = ()
            if offsets:
                accepted = self._catalog.commit(Commit(group, f"admin-{secrets.token_hex(16)}", inserts=list(offsets))).accepted
            with self._lock:
                for insert in accepted:
                    slot, kept = offsets[insert]
                    self._memory.name_anchor(slot, insert.sample, kept)
                for known in bases:
                    self._memory.add_base(group, described.sample, known)
        return Counter(samples=1)

    def _keep(self, key: str, blob: Tensor) -> None:
        """Raises ValueError where other bytes lie under the key already: what a key names never changes."""
        known = self._memory.copy(key)
        if known is None:
            self._memory.keep(key, blob)
        elif known.dtype != blob.dtype or not torch.equal(known.view(torch.uint8), blob.view(torch.uint8)):
            raise ValueError(f"{key} names other KV here")

    def _slots(self, pool: PoolKey, anchor: _Anchor) -> Iterator[tuple[Template, Slot, _Offsets]]:
        """The anchor's slots of templates that are registered here."""
        known = {template.template_id: template for template in self._templates(pool.group)}
        for name, held in anchor.slots.items():
            template_id, _, ordinal = name.partition(":")
            if template_id in known:
                slot = Slot(pool, template_id, int(ordinal))
                _require_placeholder(known[template_id], slot.ordinal, pool.placeholder)
                yield known[template_id], slot, held


def _packed(described: BaseModel, tensors: Mapping[str, Tensor]) -> bytes:
    text = bytearray(described.model_dump_json().encode())
    return save({**tensors, _DESCRIPTION: torch.frombuffer(text, dtype=torch.uint8)})


def _bare(group: Group, known: Base | Offsets) -> dict[str, Any]:
    """The fields, with keys that belong to no group."""
    return {n: v.removeprefix(group.tag) if isinstance(v, str) else v for n, v in vars(known).items()}


def _tagged(group: Group, described: _Base | _Offsets) -> dict[str, Any]:
    """The fields, with keys of the group."""
    return {n: group.tag + v if isinstance(v, str) and _KEY.match(v) else v for n, v in dict(described).items()}


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _finite(blob: Tensor, geometry: Geometry, tokens: int) -> Tensor:
    """The blob. Raises ValueError where it is not finite KV of so many tokens."""
    if codec.tokens(blob, geometry) != tokens:
        raise ValueError(f"{list(blob.shape)} {blob.dtype} is no KV of {tokens} tokens of this model")
    if not cpu.finite(cpu.decoded(codec.opened(blob, geometry))):
        raise ValueError("the KV holds NaN or Inf")
    return blob


def _require_placeholder(template: Template, ordinal: int, name: str) -> None:
    segment = template.segments[ordinal] if ordinal >= 0 else None
    if not isinstance(segment, Placeholder) or segment.name != name:
        raise ValueError(f"segment {ordinal} of template {template.template_id[:12]} is not {name!r}")


def _fixed_tokens(template: Template, ordinal: int) -> int:
    segment = template.segments[ordinal]
    if not isinstance(segment, Fixed):
        raise ValueError(f"segment {ordinal} of template {template.template_id[:12]} is a placeholder")
    return len(segment.token_ids)


def _predictors(
    group: Group, geometry: Geometry, template: Template, described: _Template, tensors: Mapping[str, Tensor]
) -> Iterator[tuple[Slot, tuple[RidgeStatistics, list[float]]]]:
    layout = RidgeStatistics.layout(geometry.layers, geometry.kv_heads, geometry.head_dim)
    for number, found in enumerate(described.predictors):
        _require_placeholder(template, found.ordinal, found.placeholder)
        state = _part(tensors, f"predictor.{number}.")
        if {name: (tuple(t.shape), t.dtype) for name, t in state.items()} != layout:
            raise ValueError(f"predictor {number} is not of this model's layout")
        if not all(bool(t.isfinite().all()) for t in state.values()) or int(state["samples"]) < 1:
            raise ValueError(f"predictor {number} holds NaN or Inf, or has no sample")
        pool = PoolKey(group, found.placeholder, found.origin)
        yield Slot(pool, template.template_id, found.ordinal), (RidgeStatistics.restored(state), found.norms)


def _mean(geometry: Geometry, template: Template, ordinal: int, state: Mapping[str, Tensor]) -> RunningMean:
    mean = RunningMean.restored(state)
    if mean.samples < 1:
        raise ValueError(f"mean {ordinal} has no sample")
    _plain(mean.mean(), geometry, template, ordinal)
    return mean


def _plain(kv: Tensor, geometry: Geometry, template: Template, ordinal: int) -> Tensor:
    """The KV of a fixed segment, which is never coded. Raises ValueError where it is not."""
    if kv.dtype != geometry.dtype:
        raise ValueError(f"segment {ordinal} is {kv.dtype}, the model {geometry.dtype}")
    return _finite(kv, geometry, _fixed_tokens(template, ordinal))


def _check_offsets(geometry: Geometry, template: Template, slot: Slot, held: _Offsets, tensors: Mapping[str, Tensor]) -> None:
    """Raises ValueError or KeyError for offsets that kernels could not read."""
    base = codec.tokens(tensors[held.base], geometry)
    if base is None or base < held.length:
        raise ValueError(f"{held.base} is no base of {held.length} tokens")
    _finite(tensors[held.base], geometry, base)
    _finite(tensors[held.placeholder], geometry, held.length)
    if held.following is not None:
        _finite(tensors[held.following], geometry, _fixed_tokens(template, slot.ordinal + 1))
