"""One prefill per prompt on two ranks; the worker asserts."""

import pytest
from launch import run

pytestmark = [pytest.mark.trl, pytest.mark.timeout(400)]


def test_ranks_share_prompts_and_decide_together(tmp_path):
    run("shared_prefill.py", str(tmp_path / "done"), num_processes=2, log=tmp_path / "log", limit_s=300)
    assert (tmp_path / "done").read_text(encoding="utf-8") == "done"
