"""Rows between ranks: as bytes of tensors in two collectives, never as pickled objects."""

import math
from collections.abc import Sequence

import torch
import torch.distributed

from fastrl.integrations._trl_rows import ROW_FIELDS, Row

_DTYPES = (
    torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32, torch.bfloat16, torch.float16, torch.float64,
)  # fmt: skip
_MAX_DIMS = 6
_HEADER = 2 + _MAX_DIMS  # dtype (-1 = the row lacks the field), number of dimensions, sizes


def exchange(
    outgoing: Sequence[Sequence[Row]], num_incoming: Sequence[int], device: torch.device
) -> list[list[Row]]:
    """Send rows to other ranks and receive theirs. Every rank must call it at the same time.

    Args:
        outgoing: For each rank, the rows that go there.
        num_incoming: For each rank, how many come from there: all ranks know the plan.
        device: Where the process group moves tensors.

    Returns:
        For each rank, the rows that came from there, in the order of sending.
    """
    headers = [_header(row) for rows in outgoing for row in rows]
    width = len(ROW_FIELDS) * _HEADER
    sent = torch.tensor(headers, dtype=torch.int64, device=device).reshape(len(headers), width)
    received = _all_to_all(sent, [len(rows) for rows in outgoing], num_incoming, (width,))
    headers_of = [chunk.tolist() for chunk in received.cpu().split(list(num_incoming))]
    payloads = [_bytes(rows, device) for rows in outgoing]
    sizes = [sum(map(_num_bytes, headers)) for headers in headers_of]
    payload = _all_to_all(torch.cat(payloads), [len(part) for part in payloads], sizes, ())
    return [_read(part, headers) for part, headers in zip(payload.split(sizes), headers_of, strict=True)]


def _all_to_all(
    sent: torch.Tensor, num_sent: Sequence[int], num_received: Sequence[int], shape: tuple[int, ...]
) -> torch.Tensor:
    received = sent.new_empty((sum(num_received), *shape))
    torch.distributed.all_to_all_single(received, sent.contiguous(), list(num_received), list(num_sent))
    return received


def _header(row: Row) -> list[int]:
    numbers = []
    for name in ROW_FIELDS:
        value = row.get(name)
        if value is None:
            numbers += [-1] + [0] * (_HEADER - 1)
        else:
            assert value.ndim <= _MAX_DIMS
            numbers += [_DTYPES.index(value.dtype), value.ndim, *value.shape, *[0] * (_MAX_DIMS - value.ndim)]
    return numbers


def _fields(header: Sequence[int]) -> list[tuple[str, torch.dtype, list[int]]]:
    """The fields that a row has: name, dtype, shape."""
    found = []
    for k, name in enumerate(ROW_FIELDS):
        dtype, ndim, *sizes = header[k * _HEADER : (k + 1) * _HEADER]
        if dtype >= 0:
            found.append((name, _DTYPES[dtype], sizes[:ndim]))
    return found


def _num_bytes(header: Sequence[int]) -> int:
    return sum(math.prod(shape) * dtype.itemsize for _, dtype, shape in _fields(header))


def _bytes(rows: Sequence[Row], device: torch.device) -> torch.Tensor:
    parts = [
        row[name].reshape(-1).contiguous().view(torch.uint8)
        for row in rows
        for name in ROW_FIELDS
        if name in row
    ]
    return torch.cat([torch.empty(0, dtype=torch.uint8, device=device), *(part.to(device) for part in parts)])


def _read(payload: torch.Tensor, headers: Sequence[Sequence[int]]) -> list[Row]:
    rows, at = [], 0
    for header in headers:
        row: Row = {}
        for name, dtype, shape in _fields(header):
            end = at + math.prod(shape) * dtype.itemsize
            # A copy, because a view as a wider type needs an aligned start.
            row[name] = payload[at:end].clone().view(dtype).reshape(shape)
            at = end
        rows.append(row)
    return rows
