"""How alike two rollouts are: Jaccard of n-gram sets (paper, Eq. 7), and cosines of gradient proxies.

For a policy that is a table of n-grams, the score of a rollout is its n-gram counts minus those expected. Counts
minus the group's mean counts estimate that, so their cosine estimates the cosine of two gradients: it can be
negative, counts repetitions, and does not call long and short responses different by their length alone.
"""

from collections.abc import Callable, Sequence

import numpy as np

from fastrl.types import Group, GroupError

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


def jaccard_similarity(group: Group, n: int = 1) -> np.ndarray:
    """Return 1 - theta, (G, G) in [0, 1] (Eq. 7)."""
    return 1.0 - jaccard_distances(group.tokens_G, n)


def centred_cosine(group: Group, n: int = 1) -> np.ndarray:
    """Return the cosines of c_i - mean(c), c_i = n-gram counts of rollout i: (G, G) in [-1, 1].

    Counts are exact: a group's own n-grams are numbered, so nothing is hashed and nothing collides. (Lengths scale
    a rollout's feature, which a cosine does not see.)
    """
    return _centred_cosine(group.tokens_G, n, None)


def surprisal_cosine(group: Group, n: int = 1) -> np.ndarray:
    """Return `centred_cosine` with each n-gram counted -log p of its last token.

    A token that the policy was sure of has nearly no gradient; the norm of its last-layer score grows with 1 - p.

    Raises:
        GroupError: the sampler's log-probs are missing.
    """
    if group.logps_G is None:
        raise GroupError(
            f"prompt {group.prompt_id!r}: similarity: surprisal weighs tokens by the sampler's log-probs; there "
            "are none (logps_G). Use a sampler that returns them (TRL: use_vllm), or similarity: centred."
        )
    surprisals = [np.maximum(0.0, -np.asarray(logps, dtype=np.float64)) for logps in group.logps_G]
    return _centred_cosine(group.tokens_G, n, surprisals)


def sketch_cosine(group: Group, n: int = 1) -> np.ndarray:
    """Return the cosines of the engine's gradient sketches (`Group.sketch_G`); n is not used.

    Raises:
        GroupError: the sketches are missing.
    """
    if group.sketch_G is None:
        raise GroupError(
            f"prompt {group.prompt_id!r}: similarity: gradient compares sketches of rollouts' gradients; there are "
            "none (sketch_G). Use an engine that makes them, or similarity: centred."
        )
    return _cosines(np.asarray(group.sketch_G, dtype=np.float64))


SIMILARITIES: dict[str, Callable[[Group, int], np.ndarray]] = {
    "jaccard": jaccard_similarity,
    "centred": centred_cosine,
    "surprisal": surprisal_cosine,
    "gradient": sketch_cosine,
}
"""Each gives the (G, G) similarities of a group's rollouts for n-grams of n tokens; 1 = alike."""


def _centred_cosine(
    tokens_G: Sequence[Sequence[int]], n: int, weights_G: Sequence[np.ndarray] | None
) -> np.ndarray:
    gram, row = _numbered_ngrams(tokens_G, n)
    num_rollouts = len(tokens_G)
    weights = None
    if weights_G is not None:  # a response shorter than n is one n-gram, whose last token is its own last
        weights = np.concatenate([w[min(n, len(w)) - 1 :] if len(w) else w for w in weights_G])
    cells = np.bincount(gram * num_rollouts + row, weights, minlength=len(gram) * num_rollouts)
    counts = cells.reshape(-1, num_rollouts).T
    return _cosines(counts - counts.mean(axis=0))


def _cosines(features_GD: np.ndarray) -> np.ndarray:
    """Cosines of the rows; 1 between two rows of nothing, 0 between nothing and something."""
    gram_GG = features_GD @ features_GD.T
    norm_G = np.sqrt(np.maximum(gram_GG.diagonal(), 0.0))
    is_zero_G = norm_G <= 1e-9 * max(1.0, float(norm_G.max(initial=0.0)))
    scale_G = np.where(is_zero_G, 1.0, norm_G)
    cosines = np.clip(gram_GG / np.outer(scale_G, scale_G), -1.0, 1.0)
    cosines[is_zero_G] = cosines[:, is_zero_G] = 0.0
    cosines[np.ix_(is_zero_G, is_zero_G)] = 1.0
    np.fill_diagonal(cosines, 1.0)
    return cosines
