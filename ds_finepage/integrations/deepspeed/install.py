"""Installs the seams without importing the packages that they change.

DeepSpeed and transformers have no entry points. ``import ds_finepage`` is the explicit, documented
act. A seam goes in at once if its module is loaded, else as soon as the module is loaded. So the
order of the imports does not matter, and a program that only plans never loads torch.
"""

from __future__ import annotations

import wrapt

SEAMS = {
    "deepspeed.runtime.engine": f"{__package__}.seam",
    "transformers.modeling_utils": f"{__package__}.loading",
}
"""Module -> the seam that changes it."""


def install() -> None:
    """Install the seams, now or when their modules are loaded; a second call changes nothing."""
    for name, seam in SEAMS.items():
        wrapt.register_post_import_hook(f"{seam}:install", name)  # imports the seam only then
