"""Without vLLM these tests skip themselves; with it, the bridge comes before every other import."""

import importlib.util

if importlib.util.find_spec("vllm") is not None:
    import bridge  # noqa: F401
