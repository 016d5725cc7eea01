"""Does once what every action begins with, so that processes forked from this one begin faster."""

from __future__ import annotations

from tests.integration.actions.subjects import Subject, make_subject


def _warm_up() -> None:
    subject: Subject = make_subject(deepspeed=False, language_model=False)
    subject.handle.detach()  # which ends its threads


_warm_up()
