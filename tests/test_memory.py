"""The memory plan equals what is allocated, and runs that do not fit are rejected early."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from toy import ragged_prompts, tiny_model

import emsjax
from emsjax import device
from emsjax.decode.pack import pack
from emsjax.decode.row_counts import chunk_rows, row_buckets
from emsjax.device import available_bytes
from emsjax.engine import memory
from emsjax.engine.memory import MemoryPlan
from emsjax.models import checkpoint


def abstract(config, dtype=jnp.float16) -> emsjax.OPT:
    return nnx.eval_shape(lambda: emsjax.OPT(config, rngs=nnx.Rngs(0), dtype=dtype))


def test_planned_bytes_equal_those_of_caches_and_weights():
    model = tiny_model()
    leaves = jax.tree.leaves(model.init_cache(3, 64).layers)
    sizes = {"slots": 3, "prompt_slots": 3, "max_len": 64, "max_draft_tokens": 7}
    plan = MemoryPlan.for_run(model, **sizes)
    assert plan.caches == sum(x.nbytes for x in leaves)
    assert plan.weights == sum(x.nbytes for x in jax.tree.leaves(model))


def test_a_layers_rows_are_counted_until_they_are_committed():
    model, slots, max_len, k = tiny_model(), 3, 64, 7
    sizes = {"slots": slots, "prompt_slots": slots, "max_len": max_len, "max_draft_tokens": k}
    deeper = abstract(dataclasses.replace(model.config, num_hidden_layers=3), jnp.float32)
    plan, more = (MemoryPlan.for_run(one, **sizes) for one in (model, deeper))

    def bytes_of_layer(num_rows):
        rows = pack(jnp.zeros(slots, jnp.int32), jnp.zeros(slots, jnp.int32), num_rows)
        ids, cache = jnp.zeros(num_rows, jnp.int32), model.init_cache(slots, max_len)
        fresh = jax.eval_shape(lambda: model(ids, rows, cache).fresh)
        return sum(x.size * x.dtype.itemsize for x in fresh) // len(fresh)

    assert deeper.config.num_hidden_layers == model.config.num_hidden_layers + 1
    chunk = chunk_rows(slots, max_len)
    assert more.prefill_chunk - plan.prefill_chunk == bytes_of_layer(chunk)
    most = row_buckets(slots, k + 1)[-1]
    assert more.logits - plan.logits == bytes_of_layer(most)


def test_a_run_that_does_not_fit_names_the_sum_and_the_largest_batch(monkeypatch):
    model, prompts = tiny_model(), ragged_prompts([5] * 60)
    sizes = {"max_len": 64, "max_draft_tokens": 0}
    four = MemoryPlan.for_run(model, slots=4, prompt_slots=4, refilled=True, **sizes)
    monkeypatch.setattr(memory, "available_bytes", lambda _: four.total - four.weights)
    with monkeypatch.context() as patch:
        patch.setattr("emsjax.engine.slots.begin_group", None)  # nothing may be allocated
        with pytest.raises(ValueError, match=r"KV caches .* largest batch_size that fits is 4"):
            emsjax.generate(model, prompts, max_new_tokens=4)
        with pytest.raises(ValueError, match="largest batch_size that fits is 4"):
            emsjax.init_state(model, None, prompts, max_new_tokens=4)
    emsjax.generate(model, prompts, max_new_tokens=4, batch_size=4)
    monkeypatch.setattr(memory, "available_bytes", lambda _: 10)
    with pytest.raises(ValueError, match="not even batch_size 1 fits"):
        emsjax.generate(model, prompts, max_new_tokens=4)


def test_opt_6_7b_has_the_published_number_of_parameters():
    config = emsjax.OPTConfig(
        hidden_size=4096, num_hidden_layers=32, ffn_dim=16384, num_attention_heads=32
    )
    assert device.tree_bytes(abstract(config)) == 2 * 6_658_473_984


def test_weights_that_do_not_fit_are_not_loaded(monkeypatch, tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    needed = device.tree_bytes(model)
    monkeypatch.setattr(checkpoint, "available_bytes", lambda _: needed)
    emsjax.OPT.from_pretrained(tmp_path, dtype=jnp.float32)
    monkeypatch.setattr(checkpoint, "available_bytes", lambda _: needed - 1)
    with pytest.raises(ValueError, match=r"weights need .* in float32"):
        emsjax.OPT.from_pretrained(tmp_path, dtype=jnp.float32)


def test_available_memory_is_what_the_accelerator_reports_less_a_reserve(monkeypatch):
    stats = {"bytes_limit": 1000, "bytes_in_use": 300}
    gpu = SimpleNamespace(platform="gpu", memory_stats=lambda: stats)
    monkeypatch.setattr(jax, "local_devices", lambda backend: [gpu])
    assert available_bytes() == available_bytes(gpu) == 680
    stats.clear()
    assert available_bytes() is None


def test_available_memory_is_read_from_the_models_device(monkeypatch):
    model, asked = tiny_model(), []
    monkeypatch.setattr(memory, "available_bytes", asked.append)
    emsjax.generate(model, ragged_prompts([5]), max_new_tokens=2)
    assert asked == jax.local_devices()[:1]


def test_the_default_device_may_be_a_platform_name():
    with jax.default_device("cpu"):
        assert available_bytes() > 0


@pytest.mark.parametrize("largest", [0, 1, 6, 99])
def test_the_largest_batch_that_fits_is_found(largest, monkeypatch):
    model, sizes = tiny_model(), {"max_len": 64, "max_draft_tokens": 3}
    plan = MemoryPlan.for_run(
        model, slots=largest + 1, prompt_slots=largest + 1, refilled=True, **sizes
    )
    monkeypatch.setattr(memory, "available_bytes", lambda _: plan.total - plan.weights - 1)
    found = f"that fits is {largest}$" if largest else "not even batch_size 1 fits"
    with pytest.raises(ValueError, match=found):
        memory.check_fits(model, slots=100, prompt_slots=100, refilled=True, **sizes)
