"""The field's scars: one test per public report of a trainer, a sampler or a reward that went wrong.

The names say which report (project, number, what must hold). Tests of the core need numpy only; those
that need an engine are skipped without TRL.
"""

from importlib.util import find_spec

import pytest


@pytest.fixture(scope="session", autouse=True)
def _small_machine():
    if find_spec("torch") is None:
        yield
        return
    from small_machine import small_machine

    with small_machine():
        yield


@pytest.fixture(autouse=True)
def _row_by_row(request, monkeypatch):
    """Modules that say `ROW_BY_ROW = True` count the rows of forward passes, of which packing leaves fewer."""
    if getattr(request.module, "ROW_BY_ROW", False):
        from fastrl.integrations._trl_prefix import SharedPrefix

        monkeypatch.setattr(
            "fastrl.integrations.trl.SharedPrefix", lambda model, is_on: SharedPrefix(model, is_on=False)
        )
