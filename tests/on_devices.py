"""Streams, draft models and training on several devices; `test_tensor_parallel.py` runs these tests
in a process that has four.
"""

import json

import jax
import numpy as np
import pytest
from test_distillation import SHALLOW, documents, make, trainer
from toy import ragged_prompts, shallow_model

import emsjax
from emsjax.benchmarks import groups
from emsjax.benchmarks.workloads import ScriptedModels
from emsjax.cli.main import main
from emsjax.distillation import PackedSequences, train
from emsjax.engine.slots import Slots

DEVICES = jax.devices()


def tokens_of(completions) -> dict[int, list[int]]:
    return {one.prompt: one.tokens.tolist() for one in completions}


def test_devices_output_the_same_tokens_together_as_one(monkeypatch):
    """The devices are not the first one, on which the model is, and that of the key."""
    model, prompts, used = shallow_model(), ragged_prompts([5, 9, 20, 3, 14, 1, 2] * 3), set()
    devices, other = DEVICES[1:3], DEVICES[3]
    whole = emsjax.generate(model, prompts, max_new_tokens=9)

    def watched(self, entries, serve=Slots.serve, **options):
        for row in serve(self, entries, **options):
            used.update(device.id for device in self.state.cache.lengths.devices())
            yield row

    monkeypatch.setattr(Slots, "serve", watched)
    completions = emsjax.stream(
        model,
        prompts,
        emsjax.DraftModel(shallow_model(ffn_dim=32), 3),
        max_new_tokens=9,
        batch_size=2,
        key=jax.device_put(jax.random.key(1), other),
        devices=devices,
    )
    rows = zip(whole.tokens, whole.lengths, strict=True)
    assert tokens_of(completions) == dict(enumerate(row[:n].tolist() for row, n in rows))
    assert used == {device.id for device in devices}


def test_devices_of_a_draft_model_are_the_targets():
    first, second = DEVICES[:2]
    model = jax.device_put(shallow_model(), first)
    prompts, options = ragged_prompts([5, 9]), {"max_new_tokens": 3}
    draft_model = shallow_model(ffn_dim=32)
    drafter = emsjax.DraftModel(jax.device_put(draft_model, second), 2)
    for decode in (
        lambda: emsjax.generate(model, prompts, drafter, **options),
        lambda: emsjax.generate(model, prompts, drafter, batch_size=1, **options),
        lambda: emsjax.stream(model, iter(prompts), drafter, batch_size=1, **options),
        lambda: emsjax.init_state(model, drafter, prompts, **options),
        lambda: emsjax.Engine(model, drafter, batch_size=1),
    ):
        with pytest.raises(ValueError, match=f"^drafter is on {second} and model on {first}: "):
            decode()
    plain = emsjax.generate(model, prompts, **options).tokens.tolist()
    on_one = emsjax.stream(model, prompts, drafter, batch_size=1, devices=[second], **options)
    assert tokens_of(on_one) == dict(enumerate(plain))
    for own in (draft_model, jax.device_put(draft_model, first)):
        drafter = emsjax.DraftModel(own, 2)
        assert emsjax.generate(model, prompts, drafter, **options).tokens.tolist() == plain


def test_devices_share_the_sequences_of_training():
    target, packed = make(SHALLOW), PackedSequences(documents(*[30] * 20), 16, 8)
    _, one = train(trainer(target, layers=1, devices=DEVICES[:1]), packed, 3)
    four = trainer(target, layers=1)
    assert four.devices == len(DEVICES) == 4
    _, losses = train(four, packed, 3)
    np.testing.assert_allclose(losses, one, rtol=1e-4)
    shards = four.step(four.initial(), packed[0])[0].params
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(shards))
    six = PackedSequences(documents(*[30] * 20), 16, 6)[0]
    with pytest.raises(ValueError, match="6 sequences cannot be distributed equally over 4 dev"):
        four.step(four.initial(), six)


def test_groups_are_measured_with_as_many_slots_altogether(tmp_path, monkeypatch):
    path, made = tmp_path / "groups.json", []

    def recorded(run, requests, count, devices, make=groups.make_slots):
        made.append((len(devices), count))
        return make(run, requests, count, devices)

    monkeypatch.setattr(groups, "make_slots", recorded)
    sizes = ["--batch-size", "8", "--prompts", "9", "--max-new-tokens", "3", "--repeats", "2"]
    options = ["bench", "groups", "--shape", "tiny", "--sizes", "2", *sizes, "--output", str(path)]
    assert main(options) == 0
    results = json.loads(path.read_bytes())
    (of,) = results["entries"]
    assert made == [(of["groups"], of["slots"])] == [(2, 4)]
    assert of["identical"]
    assert len(of["runs_s"]) == 2
    assert of["tokens_per_s"]["max"] == pytest.approx(9 * 3 / min(of["runs_s"]))
    of["identical"] = False
    path.write_text(json.dumps(results))
    assert main(options) == 1  # the entry is not measured again
    assert len(made) == 1


def test_a_token_that_is_not_the_scripts_is_found():
    bench = groups.Bench(ScriptedModels("tiny", "tiny", prompt_tokens=(3, 5)), 2, 2)
    tokens = np.append(bench.prompts[1], bench.expected[1])
    row = {"tokens": tokens, "lengths": len(tokens), "prompt_lengths": len(bench.prompts[1])}
    assert bench.is_expected(row | {"sequence_ids": 1})
    tokens[-1] += 1
    assert not bench.is_expected(row | {"sequence_ids": 1})


def test_groups_that_are_not_possible_are_named():
    assert groups.sizes_of(8, 64, None) == (1, 2, 4, 8)
    assert groups.sizes_of(8, 2, None) == (4, 8)
    with pytest.raises(ValueError, match="8 devices with 4 slots make groups of 2, 4, 8, not 1, 3"):
        groups.sizes_of(8, 4, (1, 2, 3))
