"""How different two rollouts are: the Jaccard distance of their sets of token n-grams (paper, Eq. 7)."""

from collections.abc import Sequence

import numpy as np

_LARGEST_TABLE = 1 << 22
"""Values that span more than this are numbered by sorting: a table would not fit a processor's cache."""


def ngram_set(tokens_T: Sequence[int], n: int = 1) -> frozenset[tuple[int, ...]]:
    """Return N(o), the set of token n-grams of a response.

    A response shorter than n counts as one n-gram, so that two equal short answers are equal; an
    empty response has the empty set.
    """
    tokens = tuple(int(t) for t in tokens_T)
    if len(tokens) < n:
        return frozenset([tokens]) if tokens else frozenset()
    return frozenset(tokens[i : i + n] for i in range(len(tokens) - n + 1))


def jaccard_distance(a: frozenset, b: frozenset) -> float:
    """Return theta = 1 - |a & b| / |a | b|, in [0, 1]; 0 for two empty sets (Eq. 7)."""
    union = len(a | b)
    return 1.0 - len(a & b) / union if union else 0.0


def jaccard_distances(tokens_G: Sequence[Sequence[int]], n: int = 1) -> np.ndarray:
    """Return the (G, G) matrix of `jaccard_distance(ngram_set(i, n), ngram_set(j, n))`.

    Exact, and linear in the number of tokens: n-grams are numbered, and one product of a 0/1 matrix
    counts what each two sets share.
    """
    num_rollouts = len(tokens_G)
    gram, row = _numbered_ngrams(tokens_G, n)
    member = np.zeros((len(gram), num_rollouts), dtype=np.float32)
    member[gram, row] = 1.0
    shared_GG = (member.T @ member).astype(np.float64)
    size_G = shared_GG.diagonal()
    union_GG = size_G[:, None] + size_G[None, :] - shared_GG
    union_GG[union_GG == 0] = np.inf  # two empty sets are equal
    return np.where(np.isinf(union_GG), 0.0, 1.0 - shared_GG / union_GG)


def _numbered_ngrams(tokens_G: Sequence[Sequence[int]], n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (number, rollout) of each n-gram of a group: equal numbers for equal n-grams only."""
    rows = [np.asarray(tokens, dtype=np.int64) for tokens in tokens_G]
    if n == 1:
        return _numbered(np.concatenate(rows)), np.repeat(np.arange(len(rows)), [len(r) for r in rows])
    # A response shorter than n is filled up with -1, which is no token: one n-gram of its own kind.
    rows = [np.pad(r, (0, n - len(r)), constant_values=-1) if 0 < len(r) < n else r for r in rows]
    windows = [
        np.lib.stride_tricks.sliding_window_view(r, n) if len(r) else np.zeros((0, n), int) for r in rows
    ]
    columns = np.concatenate(windows).T
    gram = np.zeros(columns.shape[1], dtype=np.int64)
    for column in columns:  # (number of the first k tokens, next token) -> number of the first k + 1
        gram = _numbered(gram * len(gram) + _numbered(column))
    return gram, np.repeat(np.arange(len(rows)), [len(w) for w in windows])


def _numbered(values: np.ndarray) -> np.ndarray:
    """Replace values by numbers below len(values): equal numbers for equal values only."""
    if not len(values):
        return values
    offset = values.min()
    span = int(values.max() - offset) + 1
    if span > _LARGEST_TABLE:
        return np.unique(values, return_inverse=True)[1]
    # Each value gets the position where it stands last. Only what was written is read.
    last = np.empty(span, dtype=np.int64)
    last[values - offset] = np.arange(len(values))
    return last[values - offset]


def mean_similarity(distance_GG: np.ndarray, classes: Sequence[Sequence[int]]) -> float:
    """Return the mean of 1 - theta over all pairs inside the classes; NaN where no class has two members."""
    pairs = [1.0 - distance_GG[np.ix_(c, c)][np.triu_indices(len(c), 1)] for c in classes if len(c) > 1]
    return float(np.concatenate(pairs).mean()) if pairs else float("nan")
