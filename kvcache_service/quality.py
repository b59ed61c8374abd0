"""What audits say: thresholds fitted to a quality target, and slots that left it. Pure bookkeeping, no tensors."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

SIGNALS = ("residual", "ratio", "novelty", "error", "entropy")
GATES = ("residual", "ratio", "novelty")  # the signals that have a limit; the others compete for information
ENVELOPE = 1.15  # a signal this far beyond all that calibration saw is outside of what it can vouch for; or one more range
MIN_ACCEPTED = 0.2  # a gate that refuses more than four turns of five is no reuse
WINDOW = 10  # audits of a slot that decide
BAD_TO_LEAVE = 2  # audits beyond the target in the window that switch a slot off
GOOD_TO_RETURN = 8  # audits in a row within the target that switch it on again
MIN_AUDITS = 6
_KEPT = 256


@dataclass(frozen=True)
class Target:
    """kl: 95 % quantile over turns of the mean KL to dense, nats; top1: mean agreement of the most likely token."""

    kl: float = 0.05
    top1: float = 0.97


@dataclass(frozen=True)
class Audit:
    """One trial under the guarded policy beside dense.

    signals: what was known before the answer, by name of SIGNALS. reposition: KL and top-1 come from a trial without
    offsets. slots: ordinals of the placeholders that were approximated. samples: the fewest behind any of their predictors.
    """

    kl: float
    top1: float
    signals: Mapping[str, float] = field(default_factory=dict)
    reposition: bool = False
    slots: tuple[int, ...] = ()
    samples: int = 0


@dataclass(frozen=True)
class Calibration:
    """Thresholds of one template on one model. usable: False when no threshold meets the target: reuse stays off.

    min_samples: predictors with fewer were never judged, so they are not vouched for: a restarted service learns first.
    """

    usable: bool
    signal: str
    residual_limit: float
    ratio_limit: float
    novelty_limit: float
    reposition: bool
    audits: int
    kl_p95: float
    top1: float
    accepted: float
    target: Target
    auc: Mapping[str, float]
    min_samples: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Calibration:
        """Raises ValueError, KeyError or TypeError for a record of another layout."""
        fields = json.loads(text)
        return cls(**(fields | {"target": Target(**fields["target"])}))


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie, by linear interpolation."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def auc(scores: Sequence[float], bad: Sequence[bool]) -> float:
    """Probability that a bad turn scores higher than a good one; ties count half. NaN without both kinds."""
    worse, better = [s for s, b in zip(scores, bad, strict=True) if b], [s for s, b in zip(scores, bad, strict=True) if not b]
    if not worse or not better:
        return math.nan
    return sum((w > g) + 0.5 * (w == g) for w in worse for g in better) / (len(worse) * len(better))


def calibrate(audits: Sequence[Audit], target: Target) -> Calibration:
    """Fit the limits. Needs MIN_AUDITS guarded audits; raises ValueError with fewer.

    The signal with the best AUC gates: its limit is the largest value at which the accepted audits meet the target.
    Every gate also ends somewhat beyond what the accepted audits showed, by one more range: there nothing was measured.
    For novelty the range is that between their tenths: one odd sample must not let a foreign domain in, and a sample that
    is refused here wrongly is only moved.
    """
    corrected = [a for a in audits if not a.reposition]
    plain = [a for a in audits if a.reposition]
    if len(corrected) < MIN_AUDITS:
        raise ValueError(f"{len(corrected)} audits; {MIN_AUDITS} or more are needed")
    bad = _bad(corrected, target)
    scores = {name: auc([a.signals.get(name, 0.0) for a in corrected], bad) for name in SIGNALS}
    known = {name: value for name, value in scores.items() if not math.isnan(value)}
    signal = max(GATES, key=lambda name: known.get(name, 0.0))
    ordered = sorted(corrected, key=lambda a: a.signals.get(signal, 0.0))
    count = next((n for n in range(len(ordered), 0, -1) if _meets(ordered[:n], target)), 0)
    accepted = ordered[:count]
    limits = {name: _envelope(name, [a.signals.get(name, 0.0) for a in accepted]) for name in GATES}
    if count < len(ordered):
        limits[signal] = min(limits[signal], ordered[count].signals.get(signal, 0.0))
    return Calibration(
        usable=count >= MIN_ACCEPTED * len(ordered),
        signal=signal,
        residual_limit=limits["residual"],
        ratio_limit=limits["ratio"],
        novelty_limit=limits["novelty"],
        reposition=len(plain) >= MIN_AUDITS and _meets(plain, target),
        audits=len(corrected),
        kl_p95=quantile([a.kl for a in accepted], 0.95) if accepted else math.nan,
        top1=_mean(a.top1 for a in accepted) if accepted else math.nan,
        accepted=count / len(ordered),
        target=target,
        auc={name: round(value, 4) for name, value in known.items()},
        min_samples=min((a.samples for a in accepted), default=0),
    )


def _envelope(signal: str, values: Sequence[float]) -> float:
    if not values:
        return 0.0
    share = 0.9 if signal == "novelty" else 1.0
    low, high = quantile(values, 1.0 - share), quantile(values, share)
    return max(ENVELOPE * high, 2 * high - low)


def _audit(fields: Mapping[str, Any]) -> Audit:
    return Audit(**{**fields, "slots": tuple(fields["slots"])})


def _bad(audits: Sequence[Audit], target: Target) -> list[bool]:
    """Beyond the target; where that hits fewer than two, the worst fifth: signals can be ranked on good data too."""
    beyond = [a.kl > target.kl for a in audits]
    if sum(beyond) >= 2:
        return beyond
    worst = quantile([a.kl for a in audits], 0.8)
    return [a.kl > worst for a in audits]


def _meets(audits: Sequence[Audit], target: Target) -> bool:
    return quantile([a.kl for a in audits], 0.95) <= target.kl and _mean(a.top1 for a in audits) >= target.top1


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


@dataclass(frozen=True)
class SlotQuality:
    """The window of one slot's audits."""

    off: bool
    audits: int
    kl_mean: float
    kl_p95: float
    top1: float


class QualityBook:
    """Audits by template and slot, and which slots are off. Keys are (tenant, template id). Not thread-safe."""

    def __init__(self) -> None:
        self._audits: dict[tuple[str, str], deque[Audit]] = {}
        self._windows: dict[tuple[str, str, int], deque[Audit]] = {}
        self._off: set[tuple[str, str, int]] = set()
        self.calibrations: dict[tuple[str, str], Calibration] = {}

    def audits(self, key: tuple[str, str]) -> list[Audit]:
        return list(self._audits.get(key, ()))

    def usable_audits(self, key: tuple[str, str]) -> int:
        """How many a calibration could use now."""
        return sum(not a.reposition for a in self._audits.get(key, ()))

    def add(self, key: tuple[str, str], audit: Audit) -> None:
        """Take one audit in; slots may change sides."""
        self._audits.setdefault(key, deque(maxlen=_KEPT)).append(audit)
        if audit.reposition:
            return
        calibration = self.calibrations.get(key)
        target = calibration.target if calibration else Target()
        for ordinal in audit.slots:
            slot = (*key, ordinal)
            window = self._windows.setdefault(slot, deque(maxlen=WINDOW))
            window.append(audit)
            good = [a.kl <= target.kl for a in window]
            if slot in self._off:
                if len(good) >= GOOD_TO_RETURN and all(good[-GOOD_TO_RETURN:]):
                    self._off.discard(slot)
            elif calibration is not None and good.count(False) >= BAD_TO_LEAVE:
                self._off.add(slot)

    def dump(self, key: tuple[str, str]) -> str:
        """All that is known of a template, as JSON."""
        windows = {place[2]: list(map(asdict, window)) for place, window in self._windows.items() if place[:2] == key}
        calibration = self.calibrations.get(key)
        return json.dumps(
            {
                "audits": list(map(asdict, self.audits(key))),
                "windows": windows,
                "off": sorted(self.off(key)),
                "calibration": calibration.to_json() if calibration else None,
            }
        )

    def restore(self, key: tuple[str, str], record: str) -> None:
        """Take a dump in; a calibration that is known already stays.

        Raises ValueError, KeyError or TypeError for a record of another layout; nothing has changed then.
        """
        known = json.loads(record)
        audits = [_audit(fields) for fields in known["audits"]]
        windows = {int(ordinal): list(map(_audit, window)) for ordinal, window in known["windows"].items()}
        calibration = Calibration.from_json(known["calibration"]) if known["calibration"] else None
        self._off |= {(*key, int(ordinal)) for ordinal in known["off"]}
        self._audits[key] = deque(audits, maxlen=_KEPT)
        self._windows |= {(*key, ordinal): deque(window, maxlen=WINDOW) for ordinal, window in windows.items()}
        if calibration is not None:
            self.calibrations.setdefault(key, calibration)

    def forget(self, key: tuple[str, str]) -> None:
        """Drop all that is known of a template."""
        self.calibrations.pop(key, None)
        self._audits.pop(key, None)
        self._windows = {place: window for place, window in self._windows.items() if place[:2] != key}
        self._off = {place for place in self._off if place[:2] != key}

    def off(self, key: tuple[str, str]) -> frozenset[int]:
        """Ordinals of the template's slots that are switched to dense."""
        return frozenset(ordinal for tenant, template_id, ordinal in self._off if (tenant, template_id) == key)

    def slot(self, key: tuple[str, str], ordinal: int) -> SlotQuality:
        window = self._windows.get((*key, ordinal))
        if not window:
            return SlotQuality(False, 0, 0.0, 0.0, 1.0)
        kls = [a.kl for a in window]
        return SlotQuality(
            (*key, ordinal) in self._off, len(window), _mean(kls), quantile(kls, 0.95), _mean(a.top1 for a in window)
        )

    def slots(self) -> list[tuple[str, str, int]]:
        """(tenant, template id, ordinal) of every slot that was audited."""
        return list(self._windows)

    @property
    def slots_off(self) -> int:
        return len(self._off)
