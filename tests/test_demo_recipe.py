"""The recipe of the embedded pair: its data, its loss, and that training learns."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from emsjax.demo import corpus, recipe

LENGTHS = [1, 7, 8, 9, 12, 13, 40]


@pytest.fixture
def mixed_dtypes(strict_dtypes):
    """jax.nn.dot_product_attention itself promotes bfloat16 scores."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def library(tmp_path):
    """A small library folder, with a copy and a file that is not UTF-8."""
    folder = tmp_path / "library"
    (folder / "site-packages").mkdir(parents=True)
    for index in range(60):
        lines = (f"def f{index}_{line}(x):\n    return x + {line}\n" for line in range(700))
        (folder / f"module_{index}.py").write_text("".join(lines))
    (folder / "a_copy.py").write_bytes((folder / "module_0.py").read_bytes())
    (folder / "latin.py").write_bytes(b"# \xff\n")
    (folder / "site-packages" / "foreign.py").write_text("x = 1\n")
    return folder


def test_held_out_text_is_in_no_training_document(library, tmp_path):
    texts = corpus.read_library(library)
    assert len(texts) == 60
    assert len(set(texts.values())) == 60

    info = corpus.prepare(tmp_path / "out", vocab_size=300, library=library)
    data = corpus.load(tmp_path / "out")
    total = info["train_bytes"] + info["held_out_bytes"]
    assert info["held_out_files"] + info["train_files"] == 60
    assert 0.05 <= info["held_out_bytes"] / total < 0.07
    documents = {
        document.tobytes() for document in np.split(data.train, np.flatnonzero(data.train == 0) + 1)
    }
    assert len(documents) == info["train_files"] + 1  # and nothing after the last end token
    assert not documents & {ids.tobytes() for ids in data.held_out.values()}


def test_held_out_choice_does_not_depend_on_the_order_of_files():
    sizes = {f"package/module_{index}.py": 30_000 + index for index in range(50)}
    sizes["encodings/table.py"] = 30_000
    chosen = corpus.choose_held_out(sizes)
    assert chosen == corpus.choose_held_out(dict(reversed(sizes.items())))
    assert "encodings/table.py" not in chosen


def test_tokenizer_round_trips_any_text():
    tokenizer = corpus.train_tokenizer(["def f(x):\n    return x\n"] * 3, 280)
    text = "\tclass Ä:  # 漢字\n\n    x = [1 , 2]\r\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_training_windows_cover_the_stream_once_per_epoch():
    batches = recipe.training_windows(np.arange(1000, dtype=np.uint16), window=8, batch=4)
    epoch = np.concatenate(list(itertools.islice(batches, 31)))  # 124 or 123 windows, whole batches
    assert (np.diff(epoch, axis=1) == 1).all()
    starts = epoch[:120, 0]
    assert len(set(starts)) == 120
    assert len(set(starts % 8)) == 1


@pytest.mark.parametrize("length", LENGTHS)
def test_every_token_counts_once_in_evaluation(length):
    ids = np.arange(100, 100 + length)
    windows, counted = recipe.evaluation_windows(ids, window=8, stride=4)
    assert windows[:, 1:][counted].tolist() == ids.tolist()
    assert windows[0, 0] == corpus.END_ID
    assert (counted[1:, :4] == 0).all()


def test_distillation_loss_is_least_at_the_target_and_grows_away_from_it(monkeypatch):
    monkeypatch.setattr(recipe, "CROSS_ENTROPY_WEIGHT", 0.0)
    target, other = jax.random.normal(jax.random.key(0), (2, 2, 3, 5))
    labels = jnp.zeros((2, 3), jnp.int32)
    loss = lambda logits: float(recipe.distillation_loss(logits, labels, target))
    assert loss(target + 3.0) == pytest.approx(0.0, abs=1e-6)
    assert 0 < loss(0.5 * (target + other)) < loss(other)
    probs = jax.nn.softmax(target)
    forward = (probs * (jnp.log(probs) - jax.nn.log_softmax(other))).sum(-1).mean()
    assert loss(other) == pytest.approx(float(forward), rel=1e-5)


@pytest.mark.usefixtures("mixed_dtypes")
def test_logits_do_not_see_later_tokens():
    model = recipe.build("draft", vocab_size=64, window=16)
    tokens = jnp.arange(32, dtype=jnp.int32).reshape(2, 16)
    changed = tokens.at[0, 9].set(50)
    before, after = recipe.forward(model, tokens), recipe.forward(model, changed)
    same = (before == after).all(axis=-1)
    assert same[1].all()
    assert same[0, :9].all()
    assert not same[0, 9:].any()


@pytest.mark.usefixtures("mixed_dtypes")
def test_three_steps_of_training_lower_the_loss():
    model = recipe.build("draft", vocab_size=64, window=16)
    batch = jnp.asarray(next(recipe.training_windows(np.arange(400) % 50, window=16, batch=4)))
    trained, losses = recipe.train(model, itertools.repeat(batch), optax.adam(1e-2), 3)
    assert (np.diff(losses) < 0).all()
    after = recipe.cross_entropy(recipe.forward(trained, batch[:, :-1]), batch[:, 1:])
    assert after < losses[-1]
