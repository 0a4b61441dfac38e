"""The demo pair's corpus: the standard library's sources, split, tokenised and stored.

Whole modules are held out. They are chosen by the hash of their path, so the choice depends only on
the names, sizes and total of the files.
"""

import dataclasses
import hashlib
import json
import lzma
import platform
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from emsjax.embedded import HELD_OUT
from emsjax.records.writing import to_json, to_json_line

END_TOKEN, PAD_TOKEN = "<|endoftext|>", "<|pad|>"
END_ID, PAD_ID = 0, 1
HELD_OUT_FRACTION = 0.05  # share of the bytes
HELD_OUT_SIZES = range(20_000, 200_001)  # sizes in bytes of modules that may be held out
# Generated tables compress far better than code, and lib2to3's data repeats other modules: with
# either, the held-out set would be less representative.
NEVER_HELD_OUT = ("encodings/", "pydoc_data/", "lib2to3/tests/data/")


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Token streams in which every document is followed by the end token.

    Attributes:
        train: the concatenated training documents, uint16.
        held_out: token ids of each held-out module, uint16.
        held_out_bytes: the size of all held-out modules.
        info: the figures that `prepare` measured, for the model card.
    """

    train: np.ndarray  # [n]
    held_out: dict[str, np.ndarray]
    held_out_bytes: int
    info: dict


def read_library(folder: Path | None = None) -> dict[str, str]:
    """Distinct UTF-8 sources below `folder` (the running Python's library), by relative path."""
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    texts, seen = {}, set()
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder).as_posix()
        data = path.read_bytes()
        if "site-packages" in path.parts or not data or data in seen:
            continue
        try:
            texts[name] = data.decode()
        except UnicodeDecodeError:
            continue  # a few tests are about other encodings
        seen.add(data)
    return texts


def choose_held_out(sizes: Mapping[str, int]) -> list[str]:
    """Names of the modules to hold out, 5% of all bytes, from every module's size in bytes."""
    candidates = [
        name
        for name, size in sizes.items()
        if size in HELD_OUT_SIZES and not name.startswith(NEVER_HELD_OUT)
    ]
    candidates.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
    chosen, total = [], 0
    for name in candidates:
        if total >= HELD_OUT_FRACTION * sum(sizes.values()):
            break
        chosen.append(name)
        total += sizes[name]
    return sorted(chosen)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer that round-trips any text and adds no special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_TOKEN, PAD_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_TOKEN,
        eos_token=END_TOKEN,
        pad_token=PAD_TOKEN,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save in Hugging Face's layout, with a class name that all versions of transformers know."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    values = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    values.pop("backend", None)
    path.write_text(to_json(values, indent=2) + "\n")


def xz_bytes(data: bytes) -> int:
    """Size of the output of `xz -9`."""
    return len(lzma.compress(data, preset=9))


def prepare(output: Path, *, vocab_size: int = 4096, library: Path | None = None) -> dict:
    """Write `corpus.npz`, `corpus.json` and `tokenizer/` below `output`."""
    texts = read_library(library)
    names = choose_held_out({name: len(text.encode()) for name, text in texts.items()})
    held_out = {name: texts.pop(name) for name in names}
    tokenizer = train_tokenizer(texts.values(), vocab_size)
    encode = lambda text: np.array(
        [*tokenizer.backend_tokenizer.encode(text).ids, END_ID], np.uint16
    )

    output.mkdir(parents=True, exist_ok=True)
    save_tokenizer(tokenizer, output / "tokenizer")
    train = np.concatenate([encode(text) for text in texts.values()])
    held_out_ids = {name: encode(text) for name, text in held_out.items()}
    np.savez_compressed(output / "corpus.npz", train=train, **held_out_ids)
    info = {
        "python": platform.python_version(),
        "train_files": len(texts),
        "train_bytes": sum(len(text.encode()) for text in texts.values()),
        "train_tokens": len(train),
        "held_out_files": len(held_out),
        "held_out_bytes": sum(len(text.encode()) for text in held_out.values()),
        "held_out_tokens": sum(len(ids) for ids in held_out_ids.values()),
        "held_out": names,
        "xz_bytes_by_file": sum(xz_bytes(text.encode()) for text in held_out.values()),
        "xz_bytes_together": xz_bytes("".join(held_out.values()).encode()),
        "vocab_size": len(tokenizer),
    }
    (output / "corpus.json").write_text(to_json(info, indent=2) + "\n")
    return info


def embedded_held_out(texts: Mapping[str, str]) -> list[str]:
    """Names of the texts on which the embedded target was not trained.

    Raises:
        ValueError: there are none.
    """
    names = [name for name in json.loads(HELD_OUT.read_text()) if name in texts]
    if not names:
        raise ValueError("the library has none of the modules held out from the embedded target")
    return names


def write_texts(output: Path, library: Path | None = None, *, embedded: bool) -> None:
    """Write `train.jsonl` and `held-out.jsonl` below `output`, each with a "text" per line.

    A training text is a whole module. Held-out modules are cut into passages, for more prompts.

    Args:
        embedded: whether they are the embedded target's held-out modules, and not those that
            `prepare` chooses.

    Raises:
        ValueError: there are none of the embedded target's.
    """
    texts = read_library(library)
    sizes = {name: len(text.encode()) for name, text in texts.items()}
    held_out = embedded_held_out(texts) if embedded else choose_held_out(sizes)
    training = [texts[name] for name in sorted(texts.keys() - set(held_out))]
    prompts = [passage for name in sorted(held_out) for passage in passages(texts[name])]
    output.mkdir(parents=True, exist_ok=True)
    for file, lines in (("train", training), ("held-out", prompts)):
        records = [to_json_line({"text": text}) for text in lines]
        (output / f"{file}.jsonl").write_bytes(b"".join(records))


def passages(text: str, characters: int = 8000) -> list[str]:
    """The text in pieces of whole lines, each at least this long unless the text is shorter."""
    pieces = [""]
    for line in text.splitlines(keepends=True):
        if len(pieces[-1]) >= characters:
            pieces.append("")
        pieces[-1] += line
    *whole, last = pieces
    if whole and len(last) < characters:
        return [*whole[:-1], whole[-1] + last]
    return pieces


def load(output: Path) -> Corpus:
    """Load the corpus that `prepare` wrote."""
    info = json.loads((output / "corpus.json").read_text())
    with np.load(output / "corpus.npz") as arrays:
        held_out = {name: arrays[name] for name in info["held_out"]}
        return Corpus(arrays["train"], held_out, info["held_out_bytes"], info)
