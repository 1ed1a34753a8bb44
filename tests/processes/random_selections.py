"""Fifty random selections for real: from nothing to everything, every kept row trained exactly once."""

import numpy as np
from accelerate.utils import gather_object
from cases import Fast, choose_rows, train


class Checked(Fast):
    """Compares, after each round, what the ranks are about to train on."""

    rounds = 0

    def _new_round(self, inputs):
        micro_batches = super()._new_round(inputs)
        sizes = [None if m is None else len(m["completion_ids"]) for m in micro_batches]
        (own, other) = gather_object([sizes])
        assert own == other, f"micro-batches differ between the ranks: {own} and {other}"
        own_rows = [row for m in micro_batches if m is not None for row in trained_rows(m)]
        assert sorted(gather_object(own_rows)) == sorted(self.expected), "a row is lost, doubled or mixed up"
        assert micro_batches[-1] is not None
        type(self).rounds += 1
        return micro_batches

    def _groups(self, rows):
        groups = super()._groups(rows)
        self.rows_of_round = [
            (tuple(map(int, tokens)), float(advantage))
            for group in groups
            for tokens, advantage in zip(group.tokens_G, group.advantages_G, strict=True)
        ]
        return groups


def trained_rows(micro_batch):
    """(completion, advantage) of each row; dummies have no loss tokens."""
    for ids, mask, advantage in zip(
        micro_batch["completion_ids"], micro_batch["completion_mask"], micro_batch["advantages"], strict=True
    ):
        if mask.any():
            yield tuple(ids[mask.bool()].tolist()), round(float(advantage), 4)


def fifty_random_selections(folder) -> None:
    rng = np.random.default_rng(0)
    choices = []

    def pick(advantages_N):
        share = rng.choice([0.0, 0.1, 0.5, 0.9, 1.0])
        choices.append(rng.random(len(advantages_N)) < share)
        return choices[-1]

    random = choose_rows(pick)

    def choose(groups):
        selections = random(groups)
        rows = [
            (tuple(map(int, group.tokens_G[i])), round(float(np.float32(group.advantages_G[i])), 4))
            for group, selection in zip(groups, selections, strict=True)
            for i in np.flatnonzero(selection.keep_G)
        ]
        Checked.expected = rows
        return selections

    from fastrl.config import FastRLConfig

    config = FastRLConfig(pruner="none", budget="fixed", align="dummy")
    settings = {"max_steps": 50, "gradient_accumulation_steps": 2, "num_train_epochs": 25}
    train(folder, Checked, config=config, choose=choose, **settings)
    assert Checked.rounds == 50
    assert min(c.sum() for c in choices) == 0
    assert max(c.mean() for c in choices) == 1
