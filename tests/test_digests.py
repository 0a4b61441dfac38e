"""Sets of digests behave like sets of the keys."""

from hypothesis import given
from hypothesis import strategies as st

from emsjax.records import digests
from emsjax.records.digests import SIZE, Digests, digest

KEYS = st.one_of(st.integers(), st.text(max_size=3), st.tuples(st.text(max_size=2), st.integers(0)))


@given(added=st.lists(KEYS), asked=st.lists(KEYS))
def test_a_set_contains_exactly_the_added_keys(added, asked):
    found = Digests()
    for key in added:
        found.add(key)
    again = found.freeze()
    assert again == {digest(key) for key in added if added.count(key) > 1}
    assert len(found) == len(added)
    for key in (*added, *asked):
        assert (key in found) == (key in added)


def test_a_digest_may_end_in_zeros(monkeypatch):
    made = {"a": b"x" * 15 + b"\0", "b": b"x" * 14 + b"\0" * 2, "c": b"\0" * SIZE, "d": b"y" * SIZE}
    monkeypatch.setattr(digests, "digest", made.__getitem__)
    found = Digests()
    for key in "acc":
        found.add(key)
    assert found.freeze() == {made["c"]}
    assert [key in found for key in "abcd"] == [True, False, True, False]
