"""A fixture for conftest.py: what a test has attached is detached when it ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ds_finepage.runtime.handle import Handle


@pytest.fixture(autouse=True)
def detached() -> Iterator[None]:
    """Detach at the end; models of fixtures that several tests share stay attached."""
    made: list[Handle] = []
    init, detach = Handle.__init__, Handle.detach

    def noting(handle: Handle, *args: Any, **kwargs: Any) -> None:
        init(handle, *args, **kwargs)
        made.append(handle)

    def forgetting(handle: Handle) -> None:
        detach(handle)
        made[:] = [each for each in made if each is not handle]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Handle, "__init__", noting)
        patch.setattr(Handle, "detach", forgetting)
        yield
    for handle in made:
        handle.detach()
