"""Calibration and the quality book against cases worked out by hand."""

from __future__ import annotations

import math

import pytest

from kvcache_service.quality import Audit, Calibration, QualityBook, Target, auc, calibrate

TARGET = Target(kl=0.05, top1=0.9)
KEY = ("tenant", "template")


def audit(kl: float, residual: float, novelty: float = 1.0, top1: float = 1.0, slots: tuple[int, ...] = (1,)) -> Audit:
    return Audit(kl, top1, {"residual": residual, "novelty": novelty}, slots=slots)


def plain(kl: float) -> Audit:
    return Audit(kl, 1.0, reposition=True)


def test_auc() -> None:
    assert auc([1, 2, 3, 4], [False, False, True, True]) == 1.0
    assert auc([4, 3, 2, 1], [False, False, True, True]) == 0.0
    assert auc([1, 3, 2, 4], [False, False, True, True]) == 0.75
    assert auc([1, 1], [False, True]) == 0.5
    assert math.isnan(auc([1, 2], [False, False]))


def test_good_audits_are_all_accepted_and_the_envelope_ends_where_nothing_was_measured() -> None:
    found = calibrate([audit(0.001 * i, 0.01 * i, novelty=1.0 + 0.1 * i) for i in range(1, 11)], TARGET)
    assert found.usable
    assert found.accepted == 1.0
    assert found.residual_limit == pytest.approx(0.10 + 0.09)
    assert found.novelty_limit == pytest.approx(1.91 + 0.72)  # the tenths: 1.19 and 1.91
    odd = calibrate([audit(0.01, 0.1, novelty=1.0)] * 19 + [audit(0.01, 0.1, novelty=1.7)], TARGET)
    assert odd.novelty_limit == pytest.approx(1.15)
    narrow = calibrate([audit(0.01, 0.1, novelty=1.0)] * 6, TARGET)
    assert narrow.novelty_limit == pytest.approx(1.15)


def test_the_better_signal_gates_and_its_limit_meets_the_target() -> None:
    """Residual tells good from bad perfectly, novelty not at all."""
    good = [audit(0.01, 0.01 * i, novelty=(i * 7) % 5) for i in range(1, 11)]
    bad = [audit(0.5, 0.5 + 0.01 * i, novelty=(i * 7) % 5) for i in range(5)]
    found = calibrate(good + bad, TARGET)
    assert found.signal == "residual"
    assert found.auc["residual"] == 1.0
    assert found.usable
    assert found.accepted == pytest.approx(10 / 15)
    assert 0.10 <= found.residual_limit <= 0.5  # all good ones pass, no bad one does
    assert found.kl_p95 == pytest.approx(0.01)


def test_no_threshold_meets_the_target() -> None:
    found = calibrate([audit(1.0, 0.1)] * 10, TARGET)
    assert not found.usable
    assert found.accepted == 0.0
    assert not calibrate([audit(0.01, 0.1, top1=0.5)] * 10, TARGET).usable


def test_reposition_counts_by_itself() -> None:
    corrected = [audit(0.01, 0.1)] * 6
    assert not calibrate(corrected, TARGET).reposition
    assert not calibrate(corrected + [plain(0.01)] * 5, TARGET).reposition, "too few"
    assert calibrate(corrected + [plain(0.01)] * 6, TARGET).reposition
    assert not calibrate(corrected + [plain(0.2)] * 6, TARGET).reposition


def test_too_few_audits() -> None:
    with pytest.raises(ValueError, match="6 or more"):
        calibrate([audit(0.01, 0.1)] * 5 + [plain(0.01)] * 9, TARGET)


def test_a_calibration_survives_json() -> None:
    found = calibrate([audit(0.01, 0.1)] * 6, TARGET)
    assert Calibration.from_json(found.to_json()) == found
    for damaged in ("", "[]", "{}", '{"target": {"kl": 1}}'):
        with pytest.raises((ValueError, KeyError, TypeError)):
            Calibration.from_json(damaged)


def calibrated_book() -> QualityBook:
    book = QualityBook()
    book.calibrations[KEY] = calibrate([audit(0.01, 0.1)] * 6, TARGET)
    return book


def test_a_slot_leaves_after_two_bad_audits_and_returns_after_eight_good_ones() -> None:
    book = calibrated_book()
    book.add(KEY, audit(0.2, 0.1))
    assert book.off(KEY) == frozenset()
    book.add(KEY, audit(0.2, 0.1))
    assert book.off(KEY) == {1}
    assert book.slot(KEY, 1).off
    assert book.slots_off == 1
    for _ in range(7):
        book.add(KEY, audit(0.01, 0.1))
    assert book.off(KEY) == {1}
    book.add(KEY, audit(0.01, 0.1))
    assert book.off(KEY) == frozenset()


def test_only_the_slots_of_the_turn_are_blamed() -> None:
    book = calibrated_book()
    for _ in range(2):
        book.add(KEY, audit(0.2, 0.1, slots=(3,)))
        book.add(KEY, audit(0.01, 0.1, slots=(1,)))
    assert book.off(KEY) == {3}
    assert book.off(("other", "template")) == frozenset()


def test_a_template_without_calibration_has_no_slots_to_switch() -> None:
    book = QualityBook()
    for _ in range(5):
        book.add(KEY, audit(0.9, 0.1))
    assert book.off(KEY) == frozenset()
    assert len(book.audits(KEY)) == 5


def test_the_window_speaks_of_the_slot() -> None:
    book = calibrated_book()
    for kl in (0.01, 0.03):
        book.add(KEY, audit(kl, 0.1, top1=0.95))
    found = book.slot(KEY, 1)
    assert (found.audits, found.kl_mean, found.top1) == (2, pytest.approx(0.02), pytest.approx(0.95))
    assert book.slot(KEY, 9).audits == 0


def test_predictors_younger_than_any_that_was_judged_are_not_vouched_for() -> None:
    audits = [Audit(0.01, 1.0, {"residual": 0.1}, slots=(1,), samples=n) for n in (31, 14, 12, 40, 22, 18)]
    refused = Audit(9.0, 0.1, {"residual": 5.0}, slots=(1,), samples=2)
    assert calibrate([*audits, refused], TARGET).min_samples == 12
