"""Quick and quiet trainers for all tests of this folder."""

import pytest
from small_machine import small_machine


@pytest.fixture(scope="session", autouse=True)
def _small_machine():
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
