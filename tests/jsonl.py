"""Files and commands to test `emsjax generate` with."""

import json
from types import SimpleNamespace

import jax
import numpy as np
from flax import nnx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

import emsjax
from emsjax import profile_store
from emsjax.batch_drafting import read_config
from emsjax.output import PaddingRatio
from emsjax.step_costs import FORMAT

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
    """A random model of 64 positions, a byte-level tokenizer with a start token."""
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


def profile_of(model, draft_model=None, dtype="float32", row_ms=None, draft_ms=0.0):
    """What `emsjax profile` could have measured for these folders: by default drafts pay."""
    configs = [
        None if folder is None else read_config(folder, None) for folder in (model, draft_model)
    ]
    row_ms = {1: 1.0, 1000: 1.1} if row_ms is None else row_ms
    return {
        "format": FORMAT,
        "subject": profile_store.subject(*configs, dtype),
        "costs": {"row_ms": row_ms, "token_ms": 0.0, "reread": 0.0, "draft_ms": {1: draft_ms}},
    }


class InterruptedGenerate:
    """`emsjax.generate` for as many calls as given; remembers their policies."""

    def __init__(self, calls, generate=emsjax.generate):
        self.calls, self.generate, self.policies = calls, generate, []

    def __call__(self, *args, **options):
        if len(self.policies) == self.calls:
            raise KeyboardInterrupt
        self.policies.append(options["draft_length"])
        return self.generate(*args, **options)


class FakeGenerate:
    """Tokens that depend on a sequence's prompt and key alone; remembers its calls."""

    def __init__(self, interrupt_at=None):
        self.calls = []
        self.interrupt_at = interrupt_at

    def __call__(self, model, prompts, *, max_new_tokens, num_sequences, key, **options):
        if len(self.calls) == self.interrupt_at:
            raise KeyboardInterrupt
        count = len(prompts) * num_sequences
        assert key.shape == (count,)
        tokens = np.ones((count, max_new_tokens), np.int32)
        logprobs = np.zeros((count, max_new_tokens), np.float32)
        lengths = np.zeros(count, np.int32)
        for row, bits in enumerate(jax.random.key_data(key)):
            prompt = prompts[row // num_sequences]
            draw = np.random.default_rng([*prompt.tolist(), *np.asarray(bits).tolist()])
            lengths[row] = draw.integers(1, max_new_tokens + 1)
            tokens[row, : lengths[row]] = draw.integers(3, 300, lengths[row])
            tokens[row, lengths[row] - 1] = END
            logprobs[row, : lengths[row]] = -draw.exponential(size=lengths[row])
        none = np.zeros(count, np.int32)
        stats = emsjax.Stats(
            num_steps=lengths,
            num_drafted=none,
            num_accepted=none,
            num_emitted=lengths,
            accepted_histogram=lengths[:, None],
            finish_seconds=lengths.astype(np.float32),
            model_calls=1,
            padding_ratio=PaddingRatio(0.0, 0.0),
        )
        out = emsjax.GenerateOutput(
            tokens, lengths, logprobs, ["eos"] * count, stats, num_sequences
        )
        self.calls.append(SimpleNamespace(prompts=prompts, key=key, out=out, **options))
        return out


def write_records(path, records=RECORDS):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def command(model, paths, *options):
    fixed = ["--input", paths.input, "--output", paths.output, "--dtype", "float32"]
    sizes = ["--batch-size", "3", "--max-new-tokens", "6"]
    return [str(a) for a in ["generate", "--model", model, *fixed, *sizes, *options]]


def assert_error(capsys, code, *parts):
    """One line on stderr, exit code 2."""
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert captured.err.startswith("emsjax: error: ")
    assert captured.err.count("\n") == 1
    for part in parts:
        assert part in captured.err
