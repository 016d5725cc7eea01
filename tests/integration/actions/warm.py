"""Makes the subjects of the actions once; each process that is forked from this one has them."""

from __future__ import annotations

from tests.integration.actions.subjects import make_subject

SUBJECTS = {
    is_language_model: make_subject(deepspeed=False, language_model=is_language_model)
    for is_language_model in (False, True)
}
"""By whether it is a language model; their copies are made in the caller's thread, so they fork."""
