from __future__ import annotations

import math

import numpy as np
import pytest

from autotune.model.correction import DEPTH, Correction

TREES = [
    ["a", 2.0, ["b", 0.5, 0.1, 0.2], ["a", 3.0, -0.3, ["c", 10, 0.4, 0.5]]],
    ["c", 5, -1.0, ["a", 1.5, 0.25, ["b", 0.5, 0.75, 1.5]]],
    0.125,
]


def walked(tree, values):
    while not isinstance(tree, float):
        name, threshold, below, above = tree
        tree = below if values[name] <= threshold else above
    return tree


def test_it_is_the_sum_of_the_leaves_that_the_values_lead_to():
    random = np.random.default_rng(0)
    columns = {
        "a": random.choice([1.0, 1.5, 2.0, 2.5, 3.0, 4.0], 200),
        "b": random.choice([0.0, 0.5, 1.0], 200),
        "c": random.integers(0, 20, 200),
    }
    factors = Correction(TREES).factors(columns, 200)
    for i in range(200):
        values = {name: column[i] for name, column in columns.items()}
        assert factors[i] == pytest.approx(math.exp(sum(walked(tree, values) for tree in TREES)))


def test_a_value_may_be_shared_by_all():
    factors = Correction(TREES).factors({"a": 1.0, "b": 0.0, "c": 0}, 3)
    assert factors == pytest.approx([math.exp(0.1 - 1.0 + 0.125)] * 3)


def test_no_tree_changes_nothing():
    assert Correction([]).factors({}, 2).tolist() == [1.0, 1.0]
    assert Correction([]).features == ()


def test_it_names_the_features_that_it_needs():
    assert set(Correction(TREES).features) == {"a", "b", "c"}
    with pytest.raises(KeyError):
        Correction(TREES).factors({"a": 1.0, "b": 0.0}, 1)


@pytest.mark.parametrize(
    ("tree", "why"),
    [
        ("a", "tree 0 is neither a number nor"),
        (["a", 1.0, 0.0], "tree 0 is neither a number nor"),
        ([1, 1.0, 0.0, 0.0], "tree 0 is neither a number nor"),
        (["a", None, 0.0, 0.0], "tree 0: the threshold of a is no finite number"),
        (["a", math.nan, 0.0, 0.0], "tree 0: the threshold of a is no finite number"),
        (["a", 1.0, math.inf, 0.0], "tree 0 is neither a number nor"),
        (["a", 1.0, True, 0.0], "tree 0 is neither a number nor"),
    ],
)
def test_what_is_no_tree_is_refused(tree, why):
    with pytest.raises(ValueError, match=why):
        Correction([tree])


def test_a_tree_of_any_depth_ends():
    tree = 0.0
    for _ in range(100):
        tree = ["a", 1.0, tree, 0.0]
    with pytest.raises(ValueError, match="neither a number nor"):
        Correction([tree])


def test_many_trees_with_values_that_some_share_are_followed_alike():
    random = np.random.default_rng(1)
    names = ["shared", "alike", "b", "c"]

    def grown(left):
        if not left or random.random() < 0.1:
            return float(random.normal())
        return [str(random.choice(names)), float(random.uniform(0, 10)), grown(left - 1), grown(left - 1)]

    trees = [grown(6) for _ in range(130)]
    columns = {"shared": 4.0, "alike": np.full(50, 7.0), "b": random.uniform(0, 10, 50)}
    columns["c"] = np.where(columns["b"] > 5, math.inf, 3.0)
    factors = Correction(trees).factors(columns, 50)
    for i in range(50):
        values = {name: np.broadcast_to(column, 50)[i] for name, column in columns.items()}
        assert factors[i] == pytest.approx(math.exp(sum(walked(tree, values) for tree in trees)))
    assert Correction(trees).factors({name: np.zeros(0) for name in names}, 0).tolist() == []


def test_a_tree_may_be_deep_but_not_deeper_than_the_limit():
    tree = 1.0
    for _ in range(DEPTH):
        tree = ["a", 1.0, tree, 0.0]
    assert Correction([tree]).factors({"a": 0.0}, 1) == pytest.approx([math.e])
    with pytest.raises(ValueError, match="tree 1 is neither"):
        Correction([0.0, ["a", 1.0, tree, 0.0]])
