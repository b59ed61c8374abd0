"""What admins see and change of a tenant's pools."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from kvcache_service.catalog.keys import Group, PoolKey
from kvcache_service.catalog.store import Anchor, Catalog, Commit
from kvcache_service.engine.memory import Memory
from kvcache_service.engine.records import Base
from kvcache_service.engine.trust import Trust
from kvcache_service.errors import Code, KVCacheError, invalid
from kvcache_service.prompt import Template
from kvcache_service.tiers.host import Pin


@dataclass(frozen=True)
class Selection:
    """Which samples. Ids may be given by their first characters; "": any."""

    model_id: str = ""
    template_id: str = ""  # that produced the sample, or whose slot has offsets of it
    placeholder: str = ""  # the whole name
    sample: str = ""


@dataclass(frozen=True)
class Holding:
    """One sample in one pool. anchor: None where no turn has learned an offset from it; base: None where its KV is gone.

    keys: of all its blobs; nbytes: what they take in host memory.
    """

    pool: PoolKey
    sample: str
    base: Base | None
    anchor: Anchor | None
    keys: tuple[str, ...]
    nbytes: int
    pin: Pin

    @property
    def place(self) -> tuple[PoolKey, int, str]:
        """Where it stands in a listing."""
        return self.pool, self.anchor.sequence if self.anchor else 0, self.sample


class Pools:
    """Thread-safe. lock: the engine's, which guards `memory`; learning: held while predictors and anchors are added.

    groups: of a tenant; templates: registered ones of a group.
    """

    def __init__(
        self,
        memory: Memory,
        catalog: Catalog,
        trust: Trust,
        lock: threading.RLock,
        learning: threading.Lock,
        *,
        groups: Callable[[str], Sequence[Group]],
        templates: Callable[[Group], Sequence[Template]],
    ) -> None:
        self._memory = memory
        self._catalog = catalog
        self._trust = trust
        self._lock = lock
        self._learning = learning
        self._groups = groups
        self._templates = templates

    def select(self, tenant: str, selection: Selection) -> list[Holding]:
        """The samples that are meant, in the order of `place`."""
        groups = self.chosen(tenant, selection.model_id)
        with self._lock:
            held = [holding for group in groups for holding in self._holdings(group)]
        return sorted((holding for holding in held if _meant(holding, selection)), key=lambda holding: holding.place)

    def delete(self, tenant: str, selection: Selection) -> list[Holding]:
        """Forget samples. A base goes with the last of its anchors. Raises INVALID for an empty selection, CATALOG.

        Returns what is gone.
        """
        if selection == Selection():
            raise invalid("selection", "nothing is selected", "name a model, template, placeholder or sample; Clear is for all")
        doomed = self.select(tenant, selection)
        for group in {holding.pool.group for holding in doomed}:
            self._remove_anchors(group, [h for h in doomed if h.pool.group == group])
        with self._lock:
            held = [one for group in {holding.pool.group for holding in doomed} for one in self._catalog.held(group)]
            needed = {(pool.group, pool.origin, anchor.sample) for pool, anchor in held}
            for holding in doomed:
                pool = holding.pool
                if holding.base is not None and (pool.group, pool.origin, holding.sample) not in needed:
                    self._memory.drop_base(pool.group, holding.sample, holding.base)
        return doomed

    def pin(self, tenant: str, selection: Selection, pin: Pin) -> int:
        """Keep the KV of samples so from now on; returns how many. Raises QUOTA where not all fit as hard pins: none is then."""
        tier, before = self._memory.tier, dict[str, Pin]()
        found = [holding for holding in self.select(tenant, selection) if holding.nbytes]
        with self._lock, ExitStack() as undo:
            for key in (key for holding in found for key in holding.keys):
                before.setdefault(key, tier.pinned(key))
                undo.callback(tier.pin, key, before[key])
                tier.pin(key, pin)
            undo.pop_all()
        return len(found)

    def clear(self, tenant: str, model_id: str) -> tuple[int, int]:
        """Forget everything of the models that are meant; returns their number and the host bytes. Raises CATALOG.

        Where the metadata store does not answer, the models before it are cleared and that one is not: call again.
        """
        groups, freed = self.chosen(tenant, model_id), 0
        for group in groups:
            with self._learning:
                self._remove_anchors(group, list(self._holdings(group)))
                self._trust.forget(tenant, self._templates(group))
                with self._lock:
                    freed += self._memory.forget(group)
        return len(groups), freed

    def chosen(self, tenant: str, model_id: str) -> list[Group]:
        """Groups of the tenant whose model id begins so. Raises UNKNOWN_MODEL where one was named and none does."""
        found = [group for group in self._groups(tenant) if group.model_id.startswith(model_id)]
        if model_id and not found:
            raise KVCacheError(Code.UNKNOWN_MODEL, f"model {model_id!r}", field="model_id", fix="`kvcache models` lists them")
        return found

    def _remove_anchors(self, group: Group, holdings: Sequence[Holding]) -> None:
        removes = [(holding.pool, holding.sample) for holding in holdings if holding.anchor is not None]
        if removes:
            self._catalog.commit(Commit(group, f"admin-{secrets.token_hex(16)}", removes=removes))

    def _holdings(self, group: Group) -> Iterator[Holding]:
        """All samples of a group: every anchor, and every base that has none."""
        with self._lock:
            bases = {(sample, base.origin): base for sample, base in self._memory.known_bases(group)}
            anchored = set()
            for pool, anchor in self._catalog.held(group):
                anchored.add((anchor.sample, pool.origin))
                yield self._holding(pool, anchor.sample, bases.get((anchor.sample, pool.origin)), anchor)
            for (sample, origin), base in bases.items():
                if (sample, origin) not in anchored:
                    yield self._holding(PoolKey(group, base.produced, origin), sample, base, None)

    def _holding(self, pool: PoolKey, sample: str, base: Base | None, anchor: Anchor | None) -> Holding:
        offsets = self._memory.anchors.get((pool, sample), {}).values()
        keys = dict.fromkeys(([base.key] if base else []) + [key for held in offsets for key in held.keys])
        tier = self._memory.tier
        pins = {tier.pinned(key) for key in keys if tier.has(key)}
        size = sum(map(tier.size, keys))
        return Holding(pool, sample, base, anchor, tuple(keys), size, min(pins, key=lambda p: p.value, default=Pin.NONE))


def _meant(holding: Holding, selection: Selection) -> bool:
    templates = [holding.pool.origin, *(holding.anchor.slots if holding.anchor else ())]
    return (
        holding.sample.startswith(selection.sample)
        and selection.placeholder in ("", holding.pool.placeholder)
        and any(name.startswith(selection.template_id) for name in templates)
    )
