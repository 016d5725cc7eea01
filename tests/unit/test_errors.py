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


def no_room() -> PlanInfeasibleError:
    """Return an error that has frames and a context."""
    try:
        try:
            raise KeyError("inner")
        except KeyError:
            raise PlanInfeasibleError("No room.", 5)  # noqa: B904
    except PlanInfeasibleError as error:
        return error


def test_an_error_without_its_frames_says_the_same() -> None:
    bare = no_room().bare()
    assert bare.__traceback__ is None and bare.__context__ is None
    assert (str(bare), bare.min_budget_bytes) == ("No room.", 5)


def test_a_step_speaks_for_itself() -> None:
    step = no_room().of_one_step()
    assert step.__traceback__ is None and step.__context__ is None
    assert str(step) == "No room. Other steps of the call may need more."
    assert step.min_budget_bytes == 5
