"""Models split over four devices; `test_tensor_parallel.py` runs these tests in a process that
has as many.
"""

import functools
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden import tiny_families
from golden.tiny_families import VARIANTS
from jsonl import RECORDS, assert_error, command, read_lines, write_records
from kernel_cases import cuda_without_a_gpu
from test_families import LOOKUP, assert_close, golden
from test_parity import packed_logits
from toy import POSITIONS, VOCAB, ragged_prompts, shallow_model
from transformers import AutoTokenizer

import emsjax
import pallas_kernels
from emsjax.benchmarks.runs import random_model
from emsjax.benchmarks.scripted import script, scripted_model
from emsjax.cli.main import main
from emsjax.decode.cache import KVCache
from emsjax.decode.pack import pack
from emsjax.decode.step import decode_loop
from emsjax.engine.memory import MemoryPlan
from emsjax.models.decoder import Decoder
from emsjax.models.llama import LlamaConfig
from emsjax.models.numbers import NumberFormats
from emsjax.models.splitting import Placement
from emsjax.policies import profiles as stored
from emsjax.tensor_parallel import TensorParallel
from emsjax.testing import assert_invariant, assert_lossless
from pallas_kernels.common import implementations, inboxes

FIRST = jax.devices()[:1]
LENGTHS = [9, 2, 21, 1, 14]
SAMPLED = {"sampling": emsjax.Sampling(0.8, 30), "key": jax.random.key(2)}
REFILLED = {"batch_size": 2}
TWO, FOUR = (jax.make_mesh((n,), ("tp",), devices=jax.devices()[:n]) for n in (2, 4))


@functools.cache
def whole() -> Decoder:
    """A model with fewer heads of keys and values than there are devices, and an odd vocabulary."""
    return grouped_model(head_dim=8, intermediate_size=48)


def grouped_model(**sizes) -> Decoder:
    return Decoder(llama_config(**sizes), rngs=nnx.Rngs(3), dtype=jnp.float32)


def llama_config(**sizes) -> LlamaConfig:
    fixed = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": POSITIONS,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
        "eos_token_id": None,
    }
    return LlamaConfig(**fixed | sizes)


@functools.cache
def split() -> Decoder:
    return whole().split(FOUR)


def draft_model() -> Decoder:
    return shallow_model(ffn_dim=32)


DRAFTERS = {
    "plain": lambda: (None, None),
    "lookup": lambda: (LOOKUP(), emsjax.BassHeuristic()),
    "suffix": lambda: (emsjax.SuffixDrafter(4, branches=2), None),  # trees
    "replicated": lambda: (emsjax.DraftModel(whole().replicate(FOUR), 3), None),
    "split": lambda: (emsjax.DraftModel(split(), 4), emsjax.BatchSizeTable({1: 4, 3: 2})),
}


# --- tokens


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_every_family(variant, tmp_path):
    """Every order of norms and sums, layout of stored columns, and number of K/V heads."""
    config = VARIANTS[variant]
    tiny_families.write_checkpoint(tmp_path, config, tiny_families.tensors(config))
    model = emsjax.from_pretrained(tmp_path, mesh=TWO)
    assert model.is_split
    logits = packed_logits(model, tiny_families.prompts())
    assert_close(logits, golden()[f"{variant}.logits"])


@pytest.mark.parametrize(
    ("drafter", "options"),
    [
        ("plain", REFILLED),
        ("suffix", {}),
        ("replicated", REFILLED),
        ("split", {}),
        ("lookup", SAMPLED),
        ("split", SAMPLED | REFILLED),
    ],
    ids=["plain", "suffix", "replicated", "split", "lookup-sampled", "split-sampled"],
)
def test_tokens_equal_those_of_one_device(drafter, options):
    """At once, or in slots that are refilled; others are compared below, in both ways. Tokens that
    the draft model draws are others than those of plain decoding.
    """
    prompts, options = ragged_prompts(LENGTHS), {"max_new_tokens": 16, **options}
    drafter, policy = DRAFTERS[drafter]()
    out = emsjax.generate(split(), prompts, drafter, policy, **options)
    if drafter is None or not options.get("sampling") or drafter.free:
        options.pop("batch_size", None)
        expected = emsjax.generate(whole(), prompts, **options)
        np.testing.assert_array_equal(out.tokens, expected.tokens)
        np.testing.assert_allclose(out.logprobs, expected.logprobs, rtol=0, atol=1e-4)
    assert drafter is None or out.stats.num_drafted.sum() > 0
    assert not isinstance(drafter, emsjax.DraftModel) or out.stats.num_accepted.sum() > 0


def test_tokens_of_several_sequences_of_a_prompt_and_of_narrow_caches():
    prompts = ragged_prompts(LENGTHS[:2])
    options = {"max_new_tokens": 12, "num_sequences": 3, "kv_dtype": "int8", **SAMPLED}
    expected = emsjax.generate(whole(), prompts, **options)
    out = emsjax.generate(split(), prompts, LOOKUP(), batch_size=4, **options)
    np.testing.assert_array_equal(out.tokens, expected.tokens)


def test_tokens_of_the_padded_method_and_within_a_mesh_of_the_user():
    prompts = ragged_prompts(LENGTHS)
    expected = emsjax.generate(whole(), prompts, max_new_tokens=8)
    out = emsjax.vanilla.generate(split(), prompts, LOOKUP(), max_new_tokens=8)
    np.testing.assert_array_equal(out.tokens, expected.tokens)
    with jax.set_mesh(FOUR):  # its axis is explicit: without care, operations tell of their layout
        out = emsjax.generate(split(), prompts, LOOKUP(), max_new_tokens=8)
    np.testing.assert_array_equal(out.tokens, expected.tokens)


def test_tokens_are_lossless_and_scored_alike():
    prompts = ragged_prompts(LENGTHS)
    assert_lossless(split(), LOOKUP(), prompts, max_new_tokens=8)
    continuations = ragged_prompts([4] * len(prompts), seed=1)
    found, expected = (emsjax.score(model, prompts, continuations) for model in (split(), whole()))
    for one, other in zip(found.logprobs, expected.logprobs, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-4)


def test_tokens_have_bits_that_do_not_depend_on_the_batch():
    """Sums over the devices are added in the devices' order, whatever their size."""
    assert_invariant(split(), ragged_prompts([9, 2]), LOOKUP(), max_new_tokens=8)


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_tokens_of_narrow_weights(format, tmp_path):
    """The parts have the values and scales of the whole, in every way to make them."""
    model = grouped_model(head_dim=128, intermediate_size=512)
    narrow, prompts = model.quantize(format), ragged_prompts(LENGTHS)
    expected = emsjax.generate(narrow, prompts, max_new_tokens=8)
    model.save_pretrained(tmp_path / "wide")
    narrow.save_pretrained(tmp_path / "narrow")
    found = {
        "split": narrow.split(FOUR),
        "quantised": model.split(FOUR).quantize(format),
        "rounded": emsjax.from_pretrained(tmp_path / "wide", quantize=format, mesh=FOUR),
        "read": emsjax.from_pretrained(tmp_path / "narrow", mesh=FOUR),
    }
    first = found["split"]
    out = emsjax.generate(first, prompts, emsjax.SelfDraft(first, 3), max_new_tokens=8)
    np.testing.assert_array_equal(out.tokens, expected.tokens)
    for other in found.values():
        same(first, other)


# --- files and memory


def same(one, other) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.sharding == b.sharding
        np.testing.assert_array_equal(a, b)


def test_memory_of_a_device_is_its_part(tmp_path, monkeypatch):
    """No device gets more than a part of what is split, and of the cache, at any time."""
    move = KVCache.on

    def check_traced(cache, parallel):
        assert all(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(cache.layers))
        return move(cache, parallel)

    monkeypatch.setattr(KVCache, "on", check_traced)
    whole().save_pretrained(tmp_path)
    model = emsjax.from_pretrained(tmp_path, mesh=FOUR)
    same(model, split())
    for array in jax.tree.leaves(model):
        sizes = {shard.data.nbytes for shard in array.addressable_shards}
        assert sizes == {array.nbytes if array.ndim == 1 else array.nbytes // 4}
    state = emsjax.init_state(model, None, ragged_prompts(LENGTHS), max_new_tokens=4)
    for array in jax.tree.leaves((state.cache.layers, model.init_cache(2, 8).layers)):
        assert array.shape[2] == 4  # one head for each device
        assert {shard.data.shape[2] for shard in array.addressable_shards} == {1}


def test_memory_is_planned_for_each_device():
    model = grouped_model(head_dim=8, intermediate_size=48)
    sizes = {"slots": 8, "prompt_slots": 8, "max_len": 64, "max_draft_tokens": 3}
    one, two = (MemoryPlan.for_run(m, **sizes) for m in (model, model.split(TWO)))
    assert two.caches == one.caches / 2
    assert two.attention == one.attention / 2
    assert one.weights / 2 < two.weights < one.weights  # norms are on both
    state_bytes = lambda model: emsjax.DraftModel(model, 1).state_bytes(64)
    cache = state_bytes(model) - emsjax.DraftModel(model, 1).probs_bytes
    assert state_bytes(model.split(TWO)) == state_bytes(model) - cache // 2
    assert one.prefill_chunk / 2 < two.prefill_chunk < one.prefill_chunk


def test_memory_of_a_saved_model_is_the_wholes(tmp_path):
    split().save_pretrained(tmp_path)
    again = emsjax.from_pretrained(tmp_path)
    assert jax.tree.structure(again) == jax.tree.structure(whole())
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(whole()), strict=True):
        np.testing.assert_array_equal(a, b)


# --- the run


def test_groups_of_devices_share_a_queue():
    groups = [jax.make_mesh((2,), ("tp",), devices=jax.devices()[i : i + 2]) for i in (0, 2)]
    prompts = ragged_prompts(LENGTHS * 3)
    expected = emsjax.generate(whole(), prompts, max_new_tokens=6)
    options = {"batch_size": 2, "max_new_tokens": 6, "devices": groups}
    model, draft = whole().split(groups[1]), emsjax.DraftModel(draft_model(), 2)
    for drafter, target in ((draft, whole()), (draft, model), (emsjax.SelfDraft(whole()), whole())):
        done = list(emsjax.stream(target, prompts, drafter, **options))
        found = {c.prompt: c.tokens for c in done}
        for prompt, tokens in found.items():
            np.testing.assert_array_equal(tokens, expected.tokens[prompt])
        assert len(found) == len(prompts)
        if drafter is not draft:  # it reads the target's own keys and values, and is always right
            assert all(c.num_accepted == c.num_drafted for c in done)


def test_groups_compile_no_more_than_one_device(caplog):
    """What a call returns goes into the next one as it is."""
    counts = []
    for model in (whole(), split()):
        decode_loop.clear_cache()
        with caplog.at_level(logging.WARNING), jax.log_compiles():
            for lengths in (LENGTHS, LENGTHS[::-1]):
                prompts = ragged_prompts(lengths)
                emsjax.generate(model, prompts, LOOKUP(), max_new_tokens=20)
                list(emsjax.stream(model, prompts, batch_size=2, max_new_tokens=9))
        counts.append(sum("Compiling jit(decode_loop)" in text for text in caplog.messages))
        caplog.clear()
    assert counts == [2, 2]


def test_groups_exchange_two_sums_per_layer_and_no_cache(unchecked_annotations):
    state = emsjax.init_state(split(), None, ragged_prompts(LENGTHS), max_new_tokens=4)
    step = jax.jit(lambda model, state: emsjax.step(model, None, state)[0])
    text = step.lower(split(), state).compile().as_text()
    sums = re.findall(r"= (\S+) all-reduce(?:-start)?\(", text)
    gathered = re.findall(r"= (\S+) all-gather(?:-start)?\(", text)
    assert len(gathered) == 1  # the logits
    assert len(sums) == 2 + 1  # two for each layer, and one for embeddings
    assert all(re.match(r"f32\[\d+,32\]", one) for one in sums)
    assert re.match(rf"f32\[\d+,{-(-VOCAB // 4) * 4}\]", gathered[0])
    assert not re.findall(r"= \S+ (?:all-to-all|collective-permute|reduce-scatter)", text)


def test_groups_add_parts_in_their_order_in_invariant_numerics(unchecked_annotations):
    with pallas_kernels.numerics("invariant"):
        state = emsjax.init_state(split(), None, ragged_prompts(LENGTHS), max_new_tokens=4)
        step = jax.jit(lambda model, state: emsjax.step(model, None, state)[0])
        text = step.lower(split(), state).compile().as_text()
    assert (
        len(re.findall(r" all-reduce(?:-start)?\(", text)) == 1
    )  # of embeddings: one term is not 0
    assert len(re.findall(r" all-gather(?:-start)?\(", text)) == 2 + 1


def test_groups_on_the_command_line(tiny_model, paths):
    write_records(paths.input)
    drafter = ["--drafter", "model", "--draft-model", str(tiny_model)]
    assert main(command(tiny_model, paths, "--tensor-parallel", "2", *drafter)) == 0
    found = {line["id"]: line["tokens"] for line in read_lines(paths.output)}
    expected = emsjax.from_pretrained(tiny_model, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    prompts = [tokenizer(record["prompt"]).input_ids for record in RECORDS]
    out = emsjax.generate(expected, prompts, max_new_tokens=6)
    wanted = [tokens[:n].tolist() for tokens, n in zip(out.tokens, out.lengths, strict=True)]
    assert [found[record["id"]] for record in RECORDS] == wanted


def test_groups_must_divide_the_devices(tiny_model, paths, capsys):
    write_records(paths.input)
    code = main(command(tiny_model, paths, "--tensor-parallel", "3"))
    assert_error(capsys, code, "tensor_parallel must divide the number of devices, 4, not 3")


def test_groups_of_random_models():
    """Made layer by layer, they are the whole models that are split afterwards."""
    numbers = NumberFormats(jnp.float32, tensor_parallel=4)
    config = whole().config
    measured = stored.subject(config, None, numbers)
    assert measured["dtype"] == "float32, on 4 devices"
    assert NumberFormats.of(split()) == numbers
    text = script(config, 40, seed=0)
    model = scripted_model(config, text, numbers=numbers)
    same(model, scripted_model(config, text, numbers=NumberFormats(jnp.float32)).split(FOUR))
    draft = random_model(config, numbers.of_draft_model)
    assert not draft.is_split
    drafter = emsjax.DraftModel(draft, 2)
    out = emsjax.generate(model, [text[:5], text[:9]], drafter, max_new_tokens=20)
    np.testing.assert_array_equal(out.tokens, [text[5:25], text[9:29]])


@pytest.mark.parametrize("numerics", ["fast", "invariant"])
def test_groups_run_the_kernels_of_a_gpu(numerics, monkeypatch, unchecked_annotations):
    """They lower within the mesh: products with more than 128 rows, as Mosaic kernels in invariant
    numerics.
    """
    monkeypatch.setattr(implementations, "_compute_capability", lambda: 9.0)
    sizes = {"vocab_size": 1000, "hidden_size": 1024, "intermediate_size": 2048, "head_dim": 128}
    make = lambda: Decoder(llama_config(**sizes), rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    model = nnx.eval_shape(make)
    place = Placement(model.architecture, TensorParallel.over(TWO))
    place.set_structure(model)
    if jax.__version_info__ >= (0, 11):
        device = jax.sharding.AbstractDevice("NVIDIA H200", None, platform="gpu")
        kinds = (jax.sharding.AxisType.Auto,)
        mesh = jax.sharding.AbstractMesh((2,), ("tp",), kinds, abstract_device=device)
        model.parallel = TensorParallel(mesh)
    call = lambda model, ids, rows: model.logits(model(ids, rows, model.init_cache(48, 64)).hidden)
    counts = jnp.full(48, 4, jnp.int32)
    rows = pack(0 * counts, counts, 192)
    with cuda_without_a_gpu(), pallas_kernels.numerics(numerics):
        lowered = jax.jit(call).trace(model, jnp.zeros(192, jnp.int32), rows)
        text = lowered.lower(lowering_platforms=("cuda",)).as_text()
    assert "triton" in text
    is_new = jax.__version_info__ >= (0, 11)
    assert ("mosaic_gpu" in text) == (is_new and numerics == "invariant")


@pytest.mark.parametrize("numerics", ["fast", "invariant"])
def test_devices_that_reach_each_other_exchange_their_rows(numerics, monkeypatch):
    monkeypatch.setattr(implementations, "_compute_capability", lambda: 9.0)
    monkeypatch.setattr(inboxes, "reach_each_other", lambda devices: True)
    sizes = {"vocab_size": 100, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    model = Decoder(llama_config(**sizes), rngs=nnx.Rngs(0), dtype=jnp.bfloat16).split(TWO)
    rows = pack(jnp.zeros(2, jnp.int32), jnp.full(2, 4), 8)
    call = lambda ids: model(ids, rows, model.init_cache(2, 64)).hidden
    with pallas_kernels.numerics(numerics):
        traced = str(jax.make_jaxpr(call)(jnp.zeros(8, jnp.int32)))
    assert ("sum_add_rms_norm" in traced) == (numerics == "fast")


# --- errors


def test_errors_name_what_divides():
    with pytest.raises(ValueError, match="must have 1, 2, 4 of them"):
        whole().split(jax.make_mesh((3,), ("tp",), devices=jax.devices()[:3]))
    with pytest.raises(ValueError, match='must have one axis, "tp"'):
        whole().split(jax.make_mesh((2,), ("x",), devices=jax.devices()[:2]))
    with pytest.raises(ValueError, match="mesh must be such as"):
        TensorParallel.over(2)
    with pytest.raises(ValueError, match="split over 4 devices already"):
        split().split(TWO)
    with pytest.raises(ValueError, match="need a multiple of 128"):
        whole().quantize("int4").split(TWO)


def test_errors_name_a_drafter_on_other_devices():
    prompts = ragged_prompts(LENGTHS)
    with pytest.raises(ValueError, match="replicate"):
        emsjax.generate(split(), prompts, emsjax.DraftModel(draft_model(), 3), max_new_tokens=3)
    on_two = emsjax.DraftModel(draft_model().replicate(TWO), 3)
    with pytest.raises(ValueError, match="put both on the same"):
        emsjax.generate(split(), prompts, on_two, max_new_tokens=3)
    with pytest.raises(ValueError, match="must be split as the target is"):
        emsjax.generate(split(), prompts, emsjax.SelfDraft(whole()), max_new_tokens=3)
    with pytest.raises(ValueError, match="devices must be meshes, as the model is on one"):
        emsjax.stream(split(), prompts, batch_size=2, max_new_tokens=3, devices=FIRST)
    with pytest.raises(ValueError, match="split the original"):
        whole().replicate(FOUR).split(FOUR)
    with pytest.raises(ValueError, match="devices must be different"):
        emsjax.stream(whole(), prompts, batch_size=2, max_new_tokens=3, devices=[TWO, *FIRST])
