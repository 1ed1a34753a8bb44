"""Rows of every dtype and shape arrive as they were sent. Run by the worker, on two processes."""

import torch
import torch.distributed

from fastrl.integrations._trl_transport import exchange


def row(rank: int, number: int, *, image: bool) -> dict[str, torch.Tensor]:
    """A row that only (rank, number) has; some fields are missing where there is no image."""
    generator = torch.Generator().manual_seed(100 * rank + number)
    length = 1 + number % 4
    fields = {
        "prompt_ids": torch.randint(0, 99, (length + 2,), generator=generator),
        "completion_ids": torch.randint(0, 99, (length,), generator=generator),
        "completion_mask": torch.ones(length, dtype=torch.int32),
        "sampling_per_token_logps": torch.randn(length, generator=generator, dtype=torch.float64),
    }
    if image:
        fields["pixel_values"] = torch.randn(1 + number % 2, 3, 5, 7, generator=generator).bfloat16()
        fields["image_grid_thw"] = torch.randint(0, 9, (number % 2, 3), generator=generator)  # may be empty
        fields["num_images"] = torch.tensor(number)
    return fields


def rows_arrive_as_they_were_sent() -> None:
    rank = torch.distributed.get_rank()
    for sent_by_rank in ((0, 0), (3, 0), (0, 1), (5, 4)):
        own = [row(rank, k, image=k % 2 == rank) for k in range(sent_by_rank[rank])]
        outgoing = [own if target != rank else [] for target in range(2)]
        num_incoming = [sent_by_rank[1 - rank] if source != rank else 0 for source in range(2)]
        received = exchange(outgoing, num_incoming, torch.device("cpu"))
        assert received[rank] == []
        expected = [row(1 - rank, k, image=k % 2 == 1 - rank) for k in range(sent_by_rank[1 - rank])]
        assert len(received[1 - rank]) == len(expected)
        for found, sent in zip(received[1 - rank], expected, strict=True):
            assert found.keys() == sent.keys()
            for name, value in sent.items():
                assert found[name].dtype == value.dtype, name
                assert found[name].shape == value.shape, name
                assert torch.equal(found[name], value), name
