"""The tables of docs/cluster.md: what pruning gains on 1 to 128 ranks, by simulation from published stage times.

python benchmarks/cluster.py
"""

from dataclasses import replace

from fastrl.bench.cluster import Cluster, compare
from fastrl.bench.stage_model import PUBLISHED

RANKS = (1, 2, 4, 8, 16, 32, 64, 128)
MEASURED = Cluster(num_ranks=4)
KEPT, SAMPLED = 0.38, 0.91
"""Of the published run on Geo3K: what its stage times imply (docs/simulate.md)."""


def main() -> None:
    grpo = PUBLISHED["Geo3K", "GRPO"]
    print("Published against predicted, 4 ranks\n\n| | published | predicted |\n|---|---|---|")
    for data, kept, sampled in (("Geo3K", 0.379, 0.91), ("GeoQA", 0.418, 0.76)):
        stages, fast = PUBLISHED[data, "GRPO"], PUBLISHED[data, "FastRL"]
        at = compare(Cluster(), stages, measured=MEASURED, kept_share=kept, rollout_share=sampled)
        print(
            f"| {data}: seconds of a step | {fast.total:.0f} | {at['seconds']:.0f} |\n"
            f"| {data}: speed-up | {stages.total / fast.total:.2f} | {at['speedup']:.2f} |"
        )
    print("\nRanks, 38 % kept, 91 % sampled\n")
    print(
        "| ranks | rows per rank and update | filling | waiting | speed-up | at 70 % fixed | `updates: rows` |"
    )
    print("|---|---|---|---|---|---|---|")
    for ranks in RANKS:
        cluster = Cluster(num_ranks=ranks)
        at, floor, rows = (
            compare(c, grpo, measured=MEASURED, kept_share=KEPT, rollout_share=SAMPLED)
            for c in (cluster, replace(cluster, generation_floor=0.7), replace(cluster, updates="rows"))
        )
        print(
            f"| {ranks} | {at['rows_per_rank']:.0f} | {at['padding_share']:.1%} | {at['waiting_share']:.1%} | "
            f"{at['speedup']:.2f} | {floor['speedup']:.2f} | {rows['speedup']:.2f} ({rows['num_updates']:.0f} steps) |"
        )
    print("\nThe same with 64 prompts per rank: the batch grows with the cluster\n")
    print("| ranks | prompts | filling | waiting | speed-up |\n|---|---|---|---|---|")
    for ranks in RANKS:
        cluster = Cluster(num_ranks=ranks, num_prompts=64 * ranks)
        at = compare(cluster, grpo, measured=MEASURED, kept_share=KEPT, rollout_share=SAMPLED)
        print(
            f"| {ranks} | {cluster.num_prompts} | {at['padding_share']:.1%} | {at['waiting_share']:.1%} | "
            f"{at['speedup']:.2f} |"
        )
    print("\nShare kept, on 8 and on 128 ranks, all rollouts sampled\n")
    print(
        "| kept | speed-up, 8 | filling | speed-up, 128 | filling | 128, `align: top_up` |\n|---|---|---|---|---|---|"
    )
    for kept in (0.02, 0.05, 0.1, 0.2, 0.38, 0.6, 0.8, 0.95):
        eight, many, top_up = (
            compare(c, grpo, measured=MEASURED, kept_share=kept)
            for c in (Cluster(num_ranks=8), Cluster(num_ranks=128), Cluster(num_ranks=128, align="top_up"))
        )
        print(
            f"| {kept:.0%} | {eight['speedup']:.2f} | {eight['padding_share']:.1%} | {many['speedup']:.2f} | "
            f"{many['padding_share']:.1%} | {top_up['speedup']:.2f} |"
        )
    print("\nOptimizer steps per step, 128 ranks, 38 % kept\n")
    print("| steps | rows per rank and update | filling | waiting | speed-up |\n|---|---|---|---|---|")
    for updates in (1, 2, 4, 8, 16):
        at = compare(Cluster(num_ranks=128, num_updates=updates), grpo, measured=MEASURED, kept_share=KEPT)
        print(
            f"| {updates} | {at['rows_per_rank']:.0f} | {at['padding_share']:.1%} | {at['waiting_share']:.1%} | "
            f"{at['speedup']:.2f} |"
        )


if __name__ == "__main__":
    main()
