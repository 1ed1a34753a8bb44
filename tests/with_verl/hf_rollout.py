"""Generation by transformers for verl's server protocol: token ids in, token ids and log-probs out. Test support.

What a request samples is a function of (weight version, prompt, how often this version was asked for this prompt): a
run that is resumed, or repeated, samples what the first one did. Every request is computed alone, so that
the rows around it change nothing.
"""

import os
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import ray
import torch
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput


@ray.remote(num_cpus=0, max_concurrency=64)
class Server:
    """One model in a process of its own."""

    def __init__(self, model_path: str, response_length: int) -> None:
        import transformers

        torch.set_num_threads(1)
        config = transformers.AutoConfig.from_pretrained(model_path)
        of_images = hasattr(config, "vision_config")
        auto = transformers.AutoModelForImageTextToText if of_images else transformers.AutoModelForCausalLM
        self.model = auto.from_pretrained(model_path, dtype=torch.float32).eval()
        self.processor = transformers.AutoProcessor.from_pretrained(model_path) if of_images else None
        self.response_length = response_length
        self.version: int | None = None
        self.asleep = False
        self.asked: Counter[tuple[int, ...]] = Counter()

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: list[int],
        sampling_params: dict,
        image_data: Any = None,
        **_: Any,
    ) -> TokenOutput:
        assert not self.asleep, "generate() on a server that sleeps"
        prompt = tuple(prompt_ids)
        seed = zlib.crc32(repr((self.version, prompt, self.asked[prompt])).encode())
        self.asked[prompt] += 1
        tokens, logps = self._sample(prompt_ids, image_data, sampling_params, seed)
        return TokenOutput(
            token_ids=tokens,
            log_probs=logps if sampling_params.get("logprobs") else None,
            stop_reason="completed",
            num_preempted=0,
            extra_fields={"global_steps": self.version},
        )

    @torch.no_grad()
    def _sample(
        self, prompt_ids: list[int], images: Any, params: dict, seed: int
    ) -> tuple[list[int], list[float]]:
        generator = torch.Generator().manual_seed(seed)
        temperature = float(params.get("temperature", 1.0))
        end = self.model.generation_config.eos_token_id
        inputs = self._pixels(images)
        ids, cache = torch.tensor([prompt_ids]), None
        tokens: list[int] = []
        logps: list[float] = []
        for _ in range(int(params.get("max_tokens") or self.response_length)):
            output = self.model(input_ids=ids, past_key_values=cache, use_cache=True, **inputs)
            cache, inputs = output.past_key_values, {}
            logp = torch.log_softmax(output.logits[0, -1] / (temperature or 1.0), -1)
            token = int(
                torch.multinomial(logp.exp(), 1, generator=generator) if temperature else logp.argmax()
            )
            tokens.append(token)
            logps.append(float(logp[token]))
            if token == end:
                break
            ids = torch.tensor([[token]])
        return tokens, logps

    def _pixels(self, images: Any) -> dict[str, Any]:
        if not images:
            return {}
        return dict(self.processor.image_processor(images=images, return_tensors="pt"))

    async def load(self, weights: dict[str, torch.Tensor], version: int | None) -> None:
        own = self.model.state_dict()
        unknown = sorted(set(weights) - set(own))
        tied = {"lm_head.weight"} if self.model.config.get_text_config().tie_word_embeddings else set()
        missing = sorted(set(own) - set(weights) - tied)
        assert not unknown, f"weights that the model does not have: {unknown}"
        assert not missing, f"weights that were not sent: {missing}"
        self.model.load_state_dict(weights, strict=False)
        if version is not None:
            self.version = version
        self.asked.clear()

    async def wake_up(self, tags: list[str] | None = None) -> None:
        self.asleep = False

    async def sleep(self) -> None:
        self.asleep = True

    async def ready(self) -> bool:
        return True

    async def _nothing(self, *_: Any, **__: Any) -> None: ...

    clear_kv_cache = release_kv_cache = resume_kv_cache = _nothing
    abort_all_requests = resume_generation = start_profile = stop_profile = set_global_steps = _nothing


def _name(replica_rank: int) -> str:
    return f"hf_server_{replica_rank}"


class Replica(RolloutReplica):
    """Starts the server of a replica."""

    async def launch_servers(self) -> None:
        self._server_handle = Server.options(name=_name(self.replica_rank)).remote(
            self.model_config["path"], self.config.response_length
        )
        self.servers = [self._server_handle]
        self._server_address = f"hf://{self.replica_rank}"
        await self._server_handle.ready.remote()


class Adapter(BaseRollout):
    """Lives in a training worker: sends its weights, as whole tensors, to the server."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        per_replica = self.config.tensor_model_parallel_size
        rank = int(os.environ["RANK"])
        self.sends = rank % per_replica == 0
        self.replica_rank = rank // per_replica if replica_rank == -1 else replica_rank

    def _server(self) -> Any:
        return ray.get_actor(_name(self.replica_rank))

    async def resume(self, tags: list[str]) -> None:
        await self._server().wake_up.remote(tags)

    async def release(self) -> None:
        await self._server().sleep.remote()

    @torch.no_grad()
    async def update_weights(
        self,
        weights: Iterator[tuple[str, torch.Tensor]] | AsyncIterator,
        global_steps: int | None = None,
        **_: Any,
    ) -> None:
        # Every rank iterates: a whole tensor is gathered from all of them.
        whole = {name: tensor.detach().float().cpu().clone() for name, tensor in weights}
        if self.sends:
            await self._server().load.remote(whole, global_steps)
            await self._server().wake_up.remote()
