"""A prompt once per group on two ranks; the workers assert."""

import pytest
from launch import run

pytestmark = [pytest.mark.trl, pytest.mark.timeout(400)]


@pytest.mark.parametrize("script", ["shared_prefill.py", "shared_prefix.py"])
def test_ranks_share_prompts_and_decide_together(tmp_path, script):
    run(script, str(tmp_path / "done"), num_processes=2, log=tmp_path / "log", limit_s=300)
    assert (tmp_path / "done").read_text(encoding="utf-8") == "done"
