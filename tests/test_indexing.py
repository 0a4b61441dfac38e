"""Gathers that promise to stay inside give what plain ones give."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.indexing import take, take_in_rows

X = np.arange(24).reshape(4, 6)
ROWS = np.array([[3, 0, 1], [2, 2, 0]])


@pytest.mark.parametrize(
    "index", [(2,), (ROWS,), (ROWS, ROWS + 2), (ROWS[:, :1], ROWS[0])], ids=str
)
def test_entries_are_those_of_a_plain_index(index):
    for call in (take, jax.jit(take)):
        np.testing.assert_array_equal(call(X, *index), X[index])


def test_random_keys_are_taken_like_numbers():
    keys = jax.random.split(jax.random.key(0), 4)
    assert (take(keys, ROWS) == keys[jnp.asarray(ROWS)]).all()


def test_each_row_has_its_own_places():
    places = np.array([[0, 5], [1, 1], [5, 0], [2, 3]])
    np.testing.assert_array_equal(take_in_rows(X, places), np.take_along_axis(X, places, axis=1))


def test_nothing_is_compared_with_the_ends_of_an_axis():
    compares = lambda f, *args: "stablehlo.compare" in jax.jit(f).lower(*args).as_text()
    assert compares(lambda x, i: x[i], X, ROWS)
    assert not compares(take, X, ROWS)
    assert not compares(take, X, 2)
    assert compares(lambda x, i: jnp.take_along_axis(x, i, axis=1), X[:2], ROWS)
    assert not compares(take_in_rows, X[:2], ROWS)
