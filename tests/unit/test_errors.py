"""Errors say a number once, and the same one everywhere."""

from __future__ import annotations

import ds_finepage
from ds_finepage import errors
from ds_finepage.errors import FinepageError, PlanInfeasibleError


def test_every_error_can_be_imported_from_the_package_itself() -> None:
    names = {n for n, v in vars(errors).items() if isinstance(v, type)} | {"DeviceMemoryError"}
    for name in names:
        assert name in ds_finepage.__all__
        assert issubclass(getattr(ds_finepage, name), FinepageError)


def test_the_need_of_a_call_takes_the_place_of_that_of_a_step() -> None:
    step = PlanInfeasibleError(
        "a task needs much, which makes min_budget_bytes 70; device_budget is 7 bytes. Raise "
        "finepage.device_budget to >= 70 or lower the batch.",
        70,
    )
    whole = step.of_whole_call(90)
    assert (step.min_budget_bytes, whole.min_budget_bytes) == (70, 90)
    assert "which makes min_budget_bytes 90;" in str(whole)
    assert "device_budget to >= 90 or" in str(whole)
    assert "70" not in str(whole)


def test_an_error_without_its_frames_says_the_same() -> None:
    try:
        try:
            raise KeyError("inner")
        except KeyError:
            raise PlanInfeasibleError("no room", 5)  # noqa: B904
    except PlanInfeasibleError as error:
        bare = error.bare()
    assert bare.__traceback__ is None and bare.__context__ is None
    assert (str(bare), bare.min_budget_bytes) == ("no room", 5)
