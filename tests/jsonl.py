"""Files and commands for tests of `emsjax generate`."""

import itertools
import json
from types import SimpleNamespace

import jax
import numpy as np
from flax import nnx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

import emsjax
from emsjax import Completion, streaming
from emsjax.models.numbers import NumberFormats
from emsjax.policies import profiles as profile_store
from emsjax.policies.costs import FORMAT
from emsjax.terminal.models import load_config

END, POSITIONS = 2, 64
TEXTS = ["def f(x):\n    return x", "for i in range(3):", "a", "print('hello, world')", "x = 1"]
RECORDS = [{"id": f"r{i}" if i % 2 else i, "prompt": TEXTS[i % 5] * (i % 3 + 1)} for i in range(11)]


def save_random_model(folder, seed, **overrides):
    sizes = {
        "vocab_size": 300,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "ffn_dim": 32,
        "max_position_embeddings": POSITIONS,
        "num_attention_heads": 2,
        "init_std": 0.3,
    }
    config = emsjax.OPTConfig(**(sizes | overrides))
    emsjax.OPT(config, rngs=nnx.Rngs(seed), dtype="float32").save_pretrained(folder)


def save_tiny_model(folder):
    """Save a random model of 64 positions and a byte-level tokenizer with a start token."""
    save_random_model(folder, 0)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "<pad>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(TEXTS, trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single="</s> $A", special_tokens=[("</s>", END)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="</s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(folder)


def profile_of(model, draft_model=None, dtype="float32", row_ms=None, draft_ms=0.0, quantize=None):
    """A plausible profile of these folders' models. By default drafting pays off."""
    configs = [
        None if folder is None else load_config(folder, None) for folder in (model, draft_model)
    ]
    row_ms = {1: 1.0, 1000: 1.1} if row_ms is None else row_ms
    return {
        "format": FORMAT,
        "subject": profile_store.subject(*configs, NumberFormats(dtype, quantize)),
        "costs": {"row_ms": row_ms, "token_ms": 0.0, "reread": 0.0, "draft_ms": {1: draft_ms}},
    }


class InterruptedStream:
    """`stream_numbered`, interrupted after the given number of completions. Records policies."""

    def __init__(self, completions):
        self.completions, self.stream, self.policies = completions, streaming.stream_numbered, []

    def __call__(self, run, prompts, **options):
        self.policies.append(run.policy)
        completions = self.stream(run, prompts, **options)
        yield from itertools.islice(completions, self.completions)
        if self.completions is not None:
            raise KeyboardInterrupt


class FakeStream:
    """Replaces decoding. Tokens depend only on a sequence's prompt and key; calls are recorded."""

    def __init__(self, interrupt_after=None):
        self.calls = []
        self.interrupt_after = interrupt_after

    def __call__(
        self,
        run,
        prompts,
        *,
        max_new_tokens,
        num_sequences,
        key,
        **options,
    ):
        call = SimpleNamespace(drafter=run.drafter, draft_length=run.policy, key=key, **options)
        call.processors = run.processors
        call.num_sequences, call.prompts, call.completions = num_sequences, {}, []
        self.calls.append(call)
        for place, prompt in prompts:
            if not prompt:
                yield from (streaming.refusal(place, n, "empty") for n in range(num_sequences))
                continue
            call.prompts[place] = prompt
            for sequence in range(num_sequences):
                if len(call.completions) == self.interrupt_after:
                    raise KeyboardInterrupt
                bits = jax.random.key_data(
                    jax.random.fold_in(key, place * num_sequences + sequence)
                )
                draw = np.random.default_rng([*prompt, *np.asarray(bits).tolist()])
                length = draw.integers(1, max_new_tokens + 1)
                tokens = draw.integers(3, 300, length).astype(np.int32)
                tokens[-1] = END
                logprobs = -draw.exponential(size=length).astype(np.float32)
                call.completions.append(
                    Completion(place, sequence, tokens, logprobs, "eos", num_steps=length)
                )
                yield call.completions[-1]


def write_records(path, records=RECORDS):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def command(model, paths, *options):
    fixed = ["--input", paths.input, "--output", paths.output, "--dtype", "float32"]
    # Without a drafter, unless the options name one: it compiles faster than the default.
    sizes = ["--batch-size", "3", "--max-new-tokens", "6", "--drafter", "none"]
    return [str(a) for a in ["generate", "--model", model, *fixed, *sizes, *options]]


def assert_error(capsys, code, *parts):
    """Check that the exit code is 2 and that stderr has one line."""
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert captured.err.startswith("emsjax: error: ")
    assert captured.err.count("\n") == 1
    for part in parts:
        assert part in captured.err
