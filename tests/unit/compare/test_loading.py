"""The packed form that every arm of a comparison gets."""

from __future__ import annotations

import pytest

from ds_finepage.compare.loading import form_of
from ds_finepage.packing.form import PackedForm


@pytest.mark.parametrize("is_fused", [None, False, True])
def test_arms_fuse_products_as_the_ds_config_says(is_fused: bool | None) -> None:
    section = {"weights": "int4", "weights_group": 32}
    if is_fused is not None:
        section["fused_unpacking"] = is_fused
    found = form_of({"finepage": section})
    assert found == PackedForm(4, 32)
    assert found is not None and found.fused is bool(is_fused)


def test_without_packed_weights_there_is_no_form() -> None:
    assert form_of({}) is None
    assert form_of({"finepage": {"fused_unpacking": True}}) is None
