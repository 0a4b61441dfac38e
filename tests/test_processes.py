"""Two processes that decode as one."""

import json
import socket
import subprocess
import sys

import jax
from test_tensor_parallel import settings
from toy import ragged_prompts, shallow_model

import emsjax

TWO_PROCESSES = """
import json
import sys

import jax
import numpy as np
import pytest

place, port = map(int, sys.argv[1:3])
jax.distributed.initialize(f"127.0.0.1:{port}", 2, place)
from toy import ragged_prompts, shallow_model

import emsjax

model, prompts = shallow_model(), ragged_prompts([9, 2, 14])
mesh = jax.make_mesh((4,), ("tp",))
split = model.split(mesh)
assert not split.layers[0].qkv_proj.kernel[...].is_fully_addressable
drafter = emsjax.DraftModel(model.replicate(mesh), 2)
sampled = {"sampling": emsjax.Sampling(0.8), "key": jax.random.key(1)}
lookup = emsjax.PromptLookup(1, 3, search_generated=True)
runs = (lookup, sampled), (drafter, {"batch_size": 2})
for (drafter, options), expected in zip(runs, json.loads(sys.argv[3]), strict=True):
    out = emsjax.generate(split, prompts, drafter, max_new_tokens=9, **options)
    np.testing.assert_array_equal(out.tokens, expected)
with pytest.raises(ValueError, match="time_budget_s must be None"):
    emsjax.generate(split, prompts, max_new_tokens=9, time_budget_s=60)
with pytest.raises(ValueError, match="cannot be saved"):
    split.save_pretrained("never")
with pytest.raises(ValueError, match="cannot be quantised"):
    split.quantize("int8")
with pytest.raises(ValueError, match="devices must be those of this process"):
    emsjax.stream(model, prompts, batch_size=2, max_new_tokens=9, devices=[mesh])
"""


def test_two_processes_decode_as_one():
    model, prompts = shallow_model(), ragged_prompts([9, 2, 14])
    sampled = {"sampling": emsjax.Sampling(0.8), "key": jax.random.key(1)}
    outputs = [
        emsjax.generate(model, prompts, max_new_tokens=9, **options) for options in (sampled, {})
    ]
    expected = json.dumps([out.tokens.tolist() for out in outputs])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", TWO_PROCESSES]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [
        subprocess.Popen([*command, str(place), str(port), expected], env=settings(2), **pipes)
        for place in (0, 1)
    ]
    try:
        outputs = [process.communicate(timeout=600)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs[0][-3000:]
