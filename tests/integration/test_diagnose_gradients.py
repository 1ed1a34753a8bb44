"""True gradients of single rollouts against autograd of a whole batch, on real models; the figure and the tables."""

import io
import json

import numpy as np
import pytest

pytestmark = pytest.mark.trl
torch = pytest.importorskip("torch")
pytest.importorskip("trl")

from rich.console import Console  # noqa: E402
from trl_support import text_model  # noqa: E402

from fastrl import ConfigError, FastRLConfig, Group, GroupError  # noqa: E402
from fastrl.bench import gradients  # noqa: E402
from fastrl.bench.diagnose import diagnose  # noqa: E402
from fastrl.bench.gradients import Rollout, gram_matrices, rollout_gradients, with_completion  # noqa: E402
from fastrl.report.diagnosis import binned, diagnosis_table, draw_diagnosis  # noqa: E402
from fastrl.similarity import jaccard_distances  # noqa: E402

ADVANTAGES = torch.tensor([1.2, -0.7, 0.4, -0.9])
COMPLETIONS = [[5, 6, 7, 1], [8, 1], [5, 6, 7, 9, 10, 1], [11]]


def text_rollouts(completions=COMPLETIONS) -> list[Rollout]:
    prompt = {"input_ids": torch.tensor([[3, 4, 2]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    return [with_completion(prompt, tokens) for tokens in completions]


@pytest.fixture(scope="module")
def sample():
    return gradients.sample_testbed(4, 4, 1)


def gradient_of_one_batch(model, rollouts, advantages) -> torch.Tensor:
    """The gradient of sum_i A_i mean log p from one padded batch: one forward and one backward pass."""
    length = max(r.inputs["input_ids"].shape[1] for r in rollouts)
    ids, mask, weight = (
        torch.zeros(len(rollouts), length, dtype=d) for d in (torch.long, torch.long, torch.float)
    )
    for row, rollout in enumerate(rollouts):
        num = rollout.inputs["input_ids"].shape[1]
        ids[row, :num] = rollout.inputs["input_ids"][0]
        mask[row, :num] = 1
        weight[row, num - rollout.num_completion : num] = advantages[row] / rollout.num_completion
    others = {
        name: torch.cat([r.inputs[name] for r in rollouts])
        for name in rollouts[0].inputs
        if name not in ("input_ids", "attention_mask")
    }
    model.zero_grad()
    logps = model(input_ids=ids, attention_mask=mask, **others).logits[:, :-1].log_softmax(-1)
    (weight[:, 1:] * logps.gather(-1, ids[:, 1:, None])[..., 0]).sum().backward()
    found = torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()]
    )
    model.zero_grad()
    return found.detach().clone()


def test_gradients_of_rollouts_add_up_to_that_of_the_batch():
    model = text_model()
    rows = rollout_gradients(model, text_rollouts())
    expected = gradient_of_one_batch(model, text_rollouts(), ADVANTAGES)
    assert rows.shape == (4, sum(p.numel() for p in model.parameters()))
    torch.testing.assert_close(ADVANTAGES @ rows, expected, rtol=1e-4, atol=1e-6)
    assert all(p.grad is None for p in model.parameters())  # what a trainer accumulates is left alone


def test_the_same_for_a_vision_language_model_with_its_picture(sample):
    rollouts = sample.rollouts_PG[0]
    assert rollouts[0].inputs["pixel_values"].shape[0] == 1
    rows = rollout_gradients(sample.model, rollouts)
    expected = gradient_of_one_batch(sample.model, rollouts, ADVANTAGES)
    assert expected.norm() > 0.01
    torch.testing.assert_close(ADVANTAGES @ rows, expected, rtol=1e-3, atol=1e-5)
    names = [name for name, p in sample.model.named_parameters() for _ in range(p.numel())]
    in_tower = torch.tensor(["vision_tower" in name for name in names])
    assert rows[:, in_tower].norm() > 0.01  # the gradient reaches the picture


def test_gram_matrices_are_symmetric_positive_and_hold_squared_norms():
    model = text_model()
    (gram,) = gram_matrices(model, [text_rollouts()])
    rows = rollout_gradients(model, text_rollouts()).double()
    assert gram.dtype == np.float64
    assert (gram == gram.T).all()
    assert np.linalg.eigvalsh(gram).min() > -1e-9 * np.trace(gram)
    np.testing.assert_allclose(np.diag(gram), (rows**2).sum(1).numpy(), rtol=1e-12)
    np.testing.assert_allclose(gram, (rows @ rows.T).numpy(), rtol=1e-9, atol=1e-12)


def test_random_coordinates_are_unbiased():
    """The mean over seeds is within four of its own standard errors of the exact matrix, entry by entry."""
    model, rollouts = text_model(), text_rollouts(COMPLETIONS[:3])
    (exact,) = gram_matrices(model, [rollouts])
    num = sum(p.numel() for p in model.parameters()) // 20
    drawn = np.array(
        [gram_matrices(model, [rollouts], num_coordinates=num, seed=s)[0] for s in range(60)]
    )  # fmt: skip
    se = drawn.std(axis=0, ddof=1) / np.sqrt(60)
    assert (se < 0.1 * exact.max()).all()
    assert (np.abs(drawn.mean(axis=0) - exact) < 4 * se).all()
    (all_of_them,) = gram_matrices(model, [rollouts], num_coordinates=10**9)
    np.testing.assert_array_equal(all_of_them, exact)


def test_random_coordinates_bound_the_memory():
    model = text_model()
    num_tensors = len(list(model.parameters()))
    rows = rollout_gradients(model, text_rollouts(), num_coordinates=500)
    assert 500 <= rows.shape[1] <= 500 + num_tensors  # rounded up in every tensor


def test_equal_rollouts_have_equal_gradients_even_with_dropout_and_the_mode_is_restored():
    model = text_model()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.train()
    rows = rollout_gradients(model, text_rollouts([[5, 6, 1], [5, 6, 1]]))
    assert model.training
    assert torch.equal(rows[0], rows[1])
    assert rows[0].norm() > 0


def test_an_empty_response_has_no_gradient():
    rows = rollout_gradients(text_model(), text_rollouts([[], [5, 1]]))
    assert rows[0].norm() == 0
    assert rows[1].norm() > 0


def test_the_last_block_is_that_of_the_language_model(sample):
    text = gradients.choose_parameters(text_model(), "last_block")
    assert set(text) == {n for n, _ in text_model().named_parameters() if ".layers.1." in n}
    vision = gradients.choose_parameters(sample.model, "last_block")
    assert vision
    assert all("language_model.layers.3." in name for name in vision)


def test_lora_parameters_of_a_wrapped_model():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(text_model(), peft.LoraConfig(target_modules=["q_proj"], r=2))
    lora = gradients.choose_parameters(model, "lora")
    assert len(lora) == 4  # A and B in two layers
    assert set(lora) == set(gradients.choose_parameters(model, "all"))  # the rest is frozen
    assert len(gradients.choose_parameters(model, "last_block")) == 2
    # B starts at zero: only B has a gradient at first.
    rows = rollout_gradients(model, text_rollouts(), parameters="lora")
    assert rows.shape == (4, sum(p.numel() for p in lora.values()))
    assert (rows.norm(dim=1) > 0).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"parameters": "last_blok"}, "'last_blok' is not one of all, last_block, lora. Did you mean 'last_block'?"),
        ({"parameters": "lora"}, "parameters: lora picks none of the trainable parameters of Qwen2ForCausalLM"),
        ({"num_coordinates": 0}, "num_coordinates: 0 is below 1"),
    ],
)  # fmt: skip
def test_settings_that_cannot_work_are_errors(settings, message):
    with pytest.raises(ConfigError) as caught:
        rollout_gradients(text_model(), text_rollouts(), **settings)
    assert message in str(caught.value)


@pytest.mark.parametrize(("shape", "num"), [((2, 5), 1), ((5,), 1), ((1, 5), 5), ((1, 5), -1)])
def test_a_rollout_is_one_row_with_a_prompt(shape, num):
    with pytest.raises(GroupError, match="it is one row"):
        Rollout(inputs={"input_ids": torch.ones(shape, dtype=torch.long)}, num_completion=num)


def test_a_completion_extends_what_counts_tokens_and_shares_the_rest():
    picture = torch.rand(1, 3, 4, 4)
    prompt = {
        "input_ids": torch.tensor([[3, 4]]),
        "attention_mask": torch.tensor([[1, 1]]),
        "mm_token_type_ids": torch.tensor([[1, 0]]),
        "pixel_values": picture,
    }
    rollout = with_completion(prompt, [7, 8, 9])
    assert rollout.num_completion == 3
    assert rollout.inputs["input_ids"].tolist() == [[3, 4, 7, 8, 9]]
    assert rollout.inputs["attention_mask"].tolist() == [[1] * 5]
    assert rollout.inputs["mm_token_type_ids"].tolist() == [[1, 0, 0, 0, 0]]
    assert rollout.inputs["pixel_values"] is picture


def test_the_testbed_samples_what_its_model_says(sample):
    end = sample.model.generation_config.eos_token_id
    assert len(sample.groups) == len(sample.rollouts_PG) == 4
    for group, rollouts in zip(sample.groups, sample.rollouts_PG, strict=True):
        assert set(group.rewards_G) <= {0.0, 0.5, 1.0, 1.5}
        for tokens, logps, rollout in zip(group.tokens_G, group.logps_G, rollouts, strict=True):
            assert rollout.inputs["input_ids"][0, -len(tokens) :].tolist() == tokens
            assert end not in tokens[:-1]
            assert tokens[-1] == end or len(tokens) == 24
            # The sampler's log-probabilities are those of a forward pass without a cache.
            with torch.no_grad():
                mean = gradients.mean_logp(sample.model, rollout)
            assert float(mean) == pytest.approx(np.mean(logps), abs=1e-3)
    state = torch.random.get_rng_state()
    again = gradients.sample_testbed(2, 4, 1)
    assert torch.equal(state, torch.random.get_rng_state())
    assert [g.tokens_G for g in again.groups] == [g.tokens_G for g in sample.groups[:2]]


def test_the_long_problems_have_a_model_and_rollouts_of_their_own():
    sample = gradients.sample_testbed(2, 4, 0, problem_set="long")
    lengths = [len(tokens) for group in sample.groups for tokens in group.tokens_G]
    assert min(lengths) > 24, "longer than the short set allows"
    assert sample.model.get_input_embeddings().num_embeddings > 290


def test_from_a_model_to_tables_and_a_figure(sample, tmp_path):
    grams = gram_matrices(sample.model, sample.rollouts_PG, parameters="last_block", num_coordinates=20_000)
    result = diagnose(
        sample.groups,
        grams,
        {"jaccard": lambda group: 1 - jaccard_distances(group.tokens_G)},
        {"mdap": FastRLConfig(), "random": FastRLConfig(pruner="random")},
        num_draws=4,
    )
    assert result["groups"]["signal"] >= 1
    result = json.loads(json.dumps(result, allow_nan=False))
    console = Console(file=io.StringIO(), width=110)
    console.print(diagnosis_table(result))
    text = console.file.getvalue()
    assert f"4 prompts: {result['groups']['signal']} with signal" in text
    assert f"{result['pruners']['mdap']['cosine']['mean']:.2f} ±" in text
    assert "the best constant" in text
    files = draw_diagnosis(result, tmp_path / "diagnosis")
    assert [file.name for file in files] == ["diagnosis.svg", "diagnosis.png"]
    assert files[1].stat().st_size > 20_000
    one_part = {**result, "similarities": {}}
    assert draw_diagnosis(one_part, tmp_path / "pruners")[0].exists()


def test_no_signal_is_a_table_of_dashes_and_an_empty_figure(tmp_path):
    flat = Group(prompt_id="flat", tokens_G=[[1], [2]], rewards_G=np.ones(2))
    result = diagnose([flat], [np.eye(2)], {"none": lambda group: np.eye(2)}, {"mdap": FastRLConfig()})
    console = Console(file=io.StringIO(), width=110)
    console.print(diagnosis_table(result))
    assert "1 prompts: 0 with signal, 1 of zero variance (no gradient to compare" in console.file.getvalue()
    assert "0.0" not in console.file.getvalue()
    assert draw_diagnosis(result, tmp_path / "empty")[1].exists()


def test_bins_hold_as_many_points_each_and_their_standard_error():
    points = np.array([[x, x < 6] for x in range(11)], dtype=float)[::-1]
    x, y, se = binned(points)
    np.testing.assert_allclose(x, [2.5, 8.0])  # 0..5 and 6..10
    np.testing.assert_allclose(y, [1.0, 0.0])
    np.testing.assert_allclose(se, [0.0, 0.0])
    assert len(binned(points[:9])[0]) == 0
    assert binned(np.random.default_rng(0).random((200, 2)))[2] == pytest.approx([0.29 / 5] * 8, rel=0.5)
