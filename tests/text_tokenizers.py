"""Small tokenizers of the kinds that models have, made without any file."""

import json
from unittest import mock

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer, UnigramTrainer, WordPieceTrainer
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

TEXTS = [
    "def f(x):\n    return x  # naïve",
    "for i in range(3): print('hello, world')",
    "aab aaab aabaab abab",
    "日本語のテキスト, 日本",
    "smile 🙂 and 👍🏽",
    "x = 1; y = 2.5e-3\n\n\tend.",
]
ALPHABET = pre_tokenizers.ByteLevel.alphabet()


def finished(backend, **options):
    """The tokenizer with a special token, and added tokens that are text."""
    backend.add_special_tokens(["<end>", AddedToken("<odd>", special=True, normalized=True)])
    backend.add_tokens([AddedToken("<tool>", special=False), AddedToken("日 é", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", **options)


def byte_level():
    """Of GPT-2's kind."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=330, special_tokens=["<s>"], initial_alphabet=ALPHABET, show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    return finished(backend)


def byte_fallback(strip=True):
    """Of Llama 2's kind, or Gemma's, which does not strip the first space."""
    trainer = BpeTrainer(
        vocab_size=330,
        special_tokens=["<s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        limit_alphabet=36,  # other characters are written as bytes
        show_progress=False,
    )
    backend = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=False))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")][not strip :]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * strip)
    backend.train_from_iterator(TEXTS, trainer)
    # Training makes byte tokens special, which they are not in models.
    model = json.loads(backend.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    plain = Tokenizer(models.BPE(vocab=model["vocab"], merges=merges, byte_fallback=True))
    plain.normalizer, plain.decoder = backend.normalizer, backend.decoder
    plain.add_special_tokens(["<s>"])
    return finished(plain)


def gemma():
    return byte_fallback(strip=False)


def metaspace():
    """Of T5's kind: its decoder has no steps that treat tokens one by one."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.train_from_iterator(
        TEXTS,
        UnigramTrainer(
            vocab_size=120, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
        ),
    )
    return finished(backend, unk_token="<unk>")


def word_piece():
    """Of BERT's kind."""
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = WordPieceTrainer(vocab_size=150, special_tokens=["[UNK]"], show_progress=False)
    backend.train_from_iterator(TEXTS, trainer)
    return finished(backend, unk_token="[UNK]")


class SlowBytes(PreTrainedTokenizer):
    """A slow tokenizer, whose tokens are bytes in the alphabet of byte-level BPE."""

    def __init__(self):
        self.names = {name: token for token, name in enumerate(sorted(ALPHABET))}
        super().__init__(eos_token="<end>")

    @property
    def vocab_size(self):
        return 256

    def get_vocab(self):
        return self.names | self.added_tokens_encoder

    def _tokenize(self, text):
        return [bytes_to_unicode()[byte] for byte in text.encode()]

    def _convert_token_to_id(self, token):
        return self.names[token]

    def _convert_id_to_token(self, index):
        return sorted(ALPHABET)[index]

    def convert_tokens_to_string(self, tokens):
        codes = {character: byte for byte, character in bytes_to_unicode().items()}
        return bytes(codes[name] for name in "".join(tokens)).decode("utf-8", "replace")


def read_lists(module):
    """A context in which `token_bytes` of a list, as this module calls it, is the list."""
    real = module.token_bytes
    made_up = lambda one, size: one[:size] if isinstance(one, list) else real(one, size)
    return mock.patch.object(module, "token_bytes", made_up)


KINDS = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "gemma": gemma,
    "metaspace": metaspace,
    "word_piece": word_piece,
    "slow_bytes": SlowBytes,
}
