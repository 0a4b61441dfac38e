"""`stream`: prompts in as they come, completions out as they finish."""

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import numpy as np
from jaxtyping import Float32, Int32

from emsjax.checks import as_token_ids, check_at_least
from emsjax.config import OPTConfig
from emsjax.draft_length import DraftLength
from emsjax.drafting import Drafter
from emsjax.kernels import resolve_kernels
from emsjax.opt import OPT
from emsjax.output import finish_reason
from emsjax.packing import round_up_length
from emsjax.preparation import check_drafter
from emsjax.replicas import rows_of_all
from emsjax.requests import Requests, check_positions, check_requests
from emsjax.sampling import Sampling
from emsjax.slots import Entry, Row, Slots, sequences_of

KEYS_AT_ONCE = 256


@dataclasses.dataclass(frozen=True)
class Completion:
    """One sequence of a prompt; k = max_draft_tokens.

    Attributes:
        prompt: the prompt's place among those that came in, from 0 on.
        sequence: which of the prompt's sequences, from 0 on.
        tokens: emitted tokens, the end token included.
        logprobs: of each, as in `GenerateOutput`.
        finish_reason: "eos" or "length"; "refused" where the prompt cannot be decoded.
        num_steps, num_drafted, num_accepted, accepted_histogram, finish_seconds: as in `Stats`.
        error: why it was refused; None otherwise.
    """

    prompt: int
    sequence: int
    tokens: Int32[np.ndarray, "n"]
    logprobs: Float32[np.ndarray, "n"]
    finish_reason: str
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    accepted_histogram: Int32[np.ndarray, "k1"] | None = None
    finish_seconds: float = 0.0
    error: str | None = None


def stream(
    model: OPT,
    prompts: Iterable[Sequence[int]],
    drafter: Drafter | None = None,
    draft_length: DraftLength | None = None,
    max_new_tokens: int | Sequence[int] = 128,
    sampling: Sampling | None = None,
    num_sequences: int = 1,
    *,
    batch_size: int,
    max_len: int | None = None,
    eos_token_ids: Sequence[int] | None = None,
    key: jax.Array | None = None,
    attention_implementation: str | Callable | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> Iterator[Completion]:
    """Complete any number of prompts, `batch_size` sequences at a time, each as it finishes.

    Tokens are those of `emsjax.generate`, whose arguments these are but for the following. What
    has finished is handed over in small groups, in any order; prompts enter in theirs.

    Args:
        prompts: a sequence, or an iterator, which is read as slots become free. With an iterator
            `max_new_tokens` and what `sampling` holds are one value for all prompts.
        batch_size: slots of each device.
        max_len: of an iterator's prompts: tokens of the longest and its continuation, which set
            the size of the caches; None: as many as the model has positions for.
        devices: each decodes with a replica of the model and takes prompts from the same queue;
            None: where the model is.

    Yields:
        A `Completion` of each sequence. A prompt of an iterator that is malformed or too long
        is `refused`, and the others go on; in a sequence it is an error before any work.

    Raises:
        ValueError: as `emsjax.generate`, before any work; a drafter that holds something for each
            prompt, with an iterator.
        Exception: what the iterator raises, when all prompts before are done; a note tells where.
    """
    batch_size = check_at_least("batch_size", batch_size, 1)
    resolve_kernels(attention_implementation)
    terms = {
        "max_new_tokens": max_new_tokens,
        "sampling": sampling,
        "num_sequences": num_sequences,
        "eos_token_ids": eos_token_ids,
        "key": key,
    }
    lazy = not hasattr(prompts, "__len__")
    # Of an iterator nothing is known yet: one prompt stands for all when the rest is checked.
    requests = check_requests(model.config, [[0]] if lazy else prompts, **terms)
    positions, source = requests.positions, None
    if lazy:
        if getattr(drafter, "references", None) is not None:
            raise ValueError("a drafter with references needs a sequence of prompts, no iterator")
        positions = model.config.max_position_embeddings
        if max_len is not None:
            positions = min(positions, check_at_least("max_len", max_len, 2) - 1)
        requests = dataclasses.replace(requests, max_len=round_up_length(positions + 1))
        source = Source(iter(prompts), model.config, requests, key, positions)
        entries = source.entries()
    else:
        batch_size = min(batch_size, requests.total_sequences)
        entries = sequences_of(requests)
    drafter = check_drafter(model, drafter, draft_length, positions)

    def slots(device: jax.Device | None = None) -> Slots:
        there = lambda tree: tree if device is None else jax.device_put(tree, device)
        with jax.default_device(device):
            return Slots.of(
                there(model),
                there(drafter) if jax.tree.leaves(drafter) != [drafter] else drafter,
                requests,
                draft_length,
                batch_size,
                attention_implementation,
            )

    if devices is None:
        rows = slots().serve(entries)
    else:
        rows = rows_of_all({device: slots(device) for device in devices}, entries)
    return completions(rows, source, requests.num_sequences)


class Source:
    """The sequences of an iterator's prompts, one after the other.

    Attributes:
        refused: those that cannot be decoded, until they are taken.
        error: what the iterator raised.
    """

    def __init__(
        self,
        prompts: Iterator[Sequence[int]],
        config: OPTConfig,
        requests: Requests,
        key: jax.Array | None,
        positions: int,
    ):
        self.prompts, self.config, self.requests = prompts, config, requests
        self.key = jax.random.key(0) if key is None else key
        self.positions = positions
        self.refused: deque[Completion] = deque()
        self.error: BaseException | None = None

    def entries(self) -> Iterator[Entry]:
        new, each = int(self.requests.max_new_tokens[0]), self.requests.num_sequences
        sampling = jax.tree.map(lambda values: values[0], self.requests.sampling)
        keys = self.keys()
        for place, prompt in enumerate(self.read()):
            sequence_keys = [next(keys) for _ in range(each)]
            try:
                ids = as_token_ids(f"prompts[{place}]", prompt, self.config.vocab_size)
                check_positions(self.config, place, ids, new)
                if len(ids) + new - 1 > self.positions:
                    raise ValueError(
                        f"prompts[{place}] has {len(ids)} tokens and max_new_tokens is {new}: "
                        f"together more than max_len {self.positions + 1}"
                    )
            except ValueError as error:
                self.refused.extend(refusal(place, n, str(error)) for n in range(each))
                continue
            for n, sequence_key in enumerate(sequence_keys):
                yield Entry(place * each + n, ids, new, sequence_key, sampling)

    def read(self) -> Iterator[Sequence[int]]:
        for place in range(2**62):
            try:
                prompt = next(self.prompts)
            except StopIteration:
                return
            except Exception as error:
                error.add_note(f"raised by the iterator of prompts in place of prompts[{place}]")
                self.error = error
                return
            yield prompt

    def keys(self) -> Iterator[np.ndarray]:
        """Data of the keys of sequences 0, 1, ..., as `generate` has them."""
        for first in range(0, 2**31, KEYS_AT_ONCE):
            yield from np.asarray(_keys_from(self.key, first))


@jax.jit
def _keys_from(key: jax.Array, first: int) -> jax.Array:
    numbers = first + jax.numpy.arange(KEYS_AT_ONCE)
    return jax.random.key_data(jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, numbers))


def completions(
    rows: Iterator[Row], source: Source | None, num_sequences: int
) -> Iterator[Completion]:
    """What the rows say, and what was refused; at the end what the iterator raised."""
    for row in rows:
        while source is not None and source.refused:
            yield source.refused.popleft()
        yield completion(row, num_sequences)
    if source is not None:
        yield from source.refused
        if source.error is not None:
            raise source.error


def completion(row: Row, num_sequences: int) -> Completion:
    new = slice(int(row["prompt_lengths"]), int(row["lengths"]))
    prompt, sequence = divmod(int(row["sequence_ids"]), num_sequences)
    return Completion(
        prompt,
        sequence,
        row["tokens"][new].copy(),
        row["logprobs"][new].copy(),
        finish_reason(row["ended"], row["active"]),
        num_steps=int(row["num_steps"]),
        num_drafted=int(row["num_drafted"]),
        num_accepted=int(row["num_accepted"]),
        accepted_histogram=row["accepted_histogram"].copy(),
        finish_seconds=float(row["finish_seconds"]),
    )


def refusal(place: int, sequence: int, error: str) -> Completion:
    nothing = np.zeros(0, np.int32)
    return Completion(place, sequence, nothing, nothing.astype(np.float32), "refused", error=error)
