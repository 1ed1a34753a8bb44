"""Ten-item stand-ins for the four out-of-domain sets: pictures of ours in each set's record layout.

They show, without a network, that a model, lmms-eval and our grading work together. Their accuracy means nothing.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from fastrl.data.testbed import Problem, problems

NUM_ITEMS = 10
_LETTERS = "ABCD"


def write_standin(benchmark: str, folder: Path, lmms_tasks: Path) -> str:
    """Write a stand-in's table and its task file, and return the name of the task.

    Args:
        benchmark: mathverse, mathvision, mathvista or wemath.
        folder: To write to; lmms-eval finds the task there (`--include_path`).
        lmms_tasks: The folder `tasks` of the installed lmms-eval, whose own task file is built upon.
    """
    from datasets import Dataset, Features, Image

    record, task_file, split = _LAYOUTS[benchmark]
    rows = [record(index, problem) for index, problem in enumerate(problems("held_out", NUM_ITEMS, seed=1))]
    folder.mkdir(parents=True, exist_ok=True)
    table = folder / f"{benchmark}.parquet"
    pictures = {name: Image() for name, value in rows[0].items() if hasattr(value, "tobytes")}
    plain = Dataset.from_list([{k: v for k, v in row.items() if k not in pictures} for row in rows])
    features = Features({**plain.features, **pictures})
    Dataset.from_list(rows, features=features).to_parquet(table)
    name = f"{benchmark}_standin"
    task = {
        "include": str(lmms_tasks / task_file),
        "task": name,
        "dataset_path": "parquet",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {split: str(table)}},
        "test_split": split,
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")
    return name


def _choices(problem: Problem) -> tuple[list[str], str]:
    """Four values in order, and the letter of the right one."""
    value = int(problem.answer)
    texts = [str(number) for number in sorted({value, value + 5, value + 10, max(1, value - 5), value + 15})][
        :4
    ]
    return texts, _LETTERS[texts.index(problem.answer)]


def _mathverse(index: int, problem: Problem) -> dict[str, Any]:
    texts, letter = _choices(problem)
    listed = "\n".join(f"{_LETTERS[i]}:{text}" for i, text in enumerate(texts))
    is_choice = index % 2 == 0
    question = f"{problem.question}\nChoices:\n{listed}" if is_choice else problem.question
    return {
        "sample_index": str(index),
        "problem_index": str(index),
        "problem_version": "Vision Intensive",
        "question": question,
        "image": problem.image,
        "answer": letter if is_choice else problem.answer,
        "question_type": "multi-choice" if is_choice else "free-form",
        "metadata": {
            "split": "testmini",
            "source": "FastRL",
            "subject": "Plane Geometry",
            "subfield": "Angle",
        },
        "query_wo": f"Answer the question.\nQuestion: {question}",
        "query_cot": f"Reason, then answer the question.\nQuestion: {question}",
        "question_for_eval": question,
    }


def _mathvision(index: int, problem: Problem) -> dict[str, Any]:
    texts, letter = _choices(problem)
    is_choice = index % 2 == 0
    return {
        "id": str(index),
        "question": f"{problem.question}\n<image1>",
        "options": texts if is_choice else [],
        "image": f"images/{index}.jpg",
        "decoded_image": problem.image,
        "answer": letter if is_choice else problem.answer,
        "solution": None,
        "level": 1,
        "subject": "metric geometry - angle",
    }


def _mathvista(index: int, problem: Problem) -> dict[str, Any]:
    texts, letter = _choices(problem)
    is_choice = index % 2 == 0
    return {
        "pid": str(index),
        "question": problem.question,
        "image": f"images/{index}.jpg",
        "decoded_image": problem.image,
        "choices": texts if is_choice else None,
        "unit": None,
        "precision": None if is_choice else 1.0,
        "answer": texts[_LETTERS.index(letter)],
        "question_type": "multi_choice" if is_choice else "free_form",
        "answer_type": "text" if is_choice else "integer",
        "metadata": {
            "category": "math-targeted-vqa", "context": "geometry diagram", "grade": "high school",
            "img_height": problem.image.height, "img_width": problem.image.width, "language": "english",
            "skills": ["geometry reasoning"], "source": "FastRL", "split": "testmini",
            "task": "geometry problem solving",
        },
        "query": problem.question,
    }  # fmt: skip


def _wemath(index: int, problem: Problem) -> dict[str, Any]:
    texts, letter = _choices(problem)
    # Two-step problems: a problem for each step, and the whole.
    key = ("2steps_1", "2steps_2", "2steps_multi")[index % 3]
    return {
        "ID": str(index // 3),
        "split": "testmini",
        "knowledge concept": "Properties of Angles",
        "question": problem.question,
        "option": "; ".join(f"{_LETTERS[i]}. {text}" for i, text in enumerate(texts)),
        "answer": letter,
        "image_path": problem.image,
        "key": key,
        "question number": str(index),
        "knowledge concept description": "",
    }


_LAYOUTS: Mapping[str, tuple[Callable[[int, Problem], dict[str, Any]], str, str]] = {
    "mathverse": (_mathverse, "mathverse/mathverse_testmini.yaml", "testmini"),
    "mathvision": (_mathvision, "mathvision/mathvision_test.yaml", "test"),
    "mathvista": (_mathvista, "mathvista/mathvista_testmini_format.yaml", "testmini"),
    "wemath": (_wemath, "wemath/reasoning/wemath_testmini_thinking.yaml", "testmini"),
}
