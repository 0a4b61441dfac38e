"""`Completer`: an actor of Ray Data that completes the rows of a dataset."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import jax

from emsjax.checks import check_at_least, check_seed
from emsjax.configured import own_settings
from emsjax.decode.base import Drafter, DraftLength, Model
from emsjax.engine.adapt import make_run
from emsjax.models.pretrained import from_pretrained
from emsjax.ray.background import Ask, Background
from emsjax.ray.rows import KEY_COLUMNS, PROMPT_COLUMNS, asks_of, refused, with_completions
from emsjax.sampling import LogitsProcessor, Sampling
from emsjax.tensor_parallel import first_mesh, places
from emsjax.terminal.models import load_tokenizer


class Completer:
    """Completes prompts in an actor of Ray Data, which loads the model once and keeps its slots.

    It is the class for `ray.data.Dataset.map_batches`, which makes one in each actor::

        dataset.map_batches(
            emsjax.ray.Completer,
            fn_constructor_kwargs={"model": "Qwen/Qwen3-0.6B", "batch_size": 64, "max_len": 2048},
            batch_size=64,
            compute=ray.data.ActorPoolStrategy(size=8, max_concurrent_calls_per_actor=3),
            num_gpus=1,
        )

    **Rows in.** A row has a `prompt` (text), `messages` (a chat, for the tokenizer's chat template)
    or `tokens` (token ids). It may have its own `max_new_tokens`. When tokens are sampled it also
    needs an `index` or an `id`. Integers may arrive as floats, with NaN for null, as they do in
    batches of numpy whose columns have nulls; from 2**53 on, such a row is refused.

    **Rows out.** Each row's columns are kept, except that `tokens` becomes `prompt_tokens`. These
    are added: `tokens`, `text`, `finish_reason`, `logprobs` (one per token), `num_steps`,
    `num_drafted` and `num_accepted`, as in `emsjax.Completion`; `error`, which is null unless the
    row was malformed, and its `finish_reason` then is "refused"; and `sequence` if there are
    several for each row, which then follow each other.

    **Keys.** A row's tokens do not depend on its batch, its actor or the number of actors. The
    random keys of a row are folded from its `index`, an integer, so that its tokens are those of
    prompt `index` of `emsjax.generate` with `key=jax.random.key(seed)`. Without an index, they are
    folded from a digest of its `id`, a string or an integer.

    **Slots.** The call is a coroutine, so Ray Data hands over several batches at a time: up to four
    of a block, and as many blocks as `max_concurrent_calls_per_actor` says. All of their prompts
    wait in one queue for the same slots, in a thread that lives as long as the actor. So a slot
    that becomes free takes a prompt of the next batch at once, and no batch waits for the longest
    sequence of another. Slots run empty only if fewer prompts are under way than there are slots.

    If an actor or its host dies, Ray Data starts another and gives it the lost batches again.

    Args:
        model: a folder or an id on the Hugging Face hub.
        drafter: the source of draft tokens, or a function that takes the loaded model and returns
            one. The function runs in the actor, so a draft model is loaded there.
        draft_length, max_new_tokens, sampling, num_sequences: as for `emsjax.generate`.
        dtype, quantize, revision: as for `emsjax.from_pretrained`.
        tensor_parallel: number of the actor's devices over which the model is split, which divides
            the number of all of them, `num_gpus`.
        batch_size: slots per device of the actor.
        max_len: tokens of the longest prompt and its continuation together, which set the size
            of the caches; None: as many as the model has positions for.
        seed: of the random keys.
        processors: as for `emsjax.generate`, or a function that takes the tokenizer and returns
            them.
        asked: `attention_implementation`, `eos_token_ids`, `stop`, `include_stop`, `numerics` and
            `kv_dtype` of `emsjax.stream`.

    Raises:
        ValueError: as `emsjax.stream` and `emsjax.from_pretrained`, or `tensor_parallel` is not an
            integer of at least 1 that divides the number of the actor's devices.
        ImportError: the extra `ray` is not installed.
    """

    def __init__(
        self,
        model: str,
        drafter: Drafter | Callable[[Model], Drafter] | None = None,
        draft_length: DraftLength | None = None,
        *,
        batch_size: int,
        max_len: int | None = None,
        max_new_tokens: int = 128,
        sampling: Sampling | None = None,
        num_sequences: int = 1,
        seed: int = 0,
        dtype: Any = None,
        quantize: str | None = None,
        tensor_parallel: int = 1,
        revision: str | None = None,
        processors: Sequence[LogitsProcessor] | Callable = (),
        **asked: Any,
    ):
        tensor_parallel = check_at_least("tensor_parallel", tensor_parallel, 1)
        self.tokenizer = load_tokenizer(model, revision)
        mesh = first_mesh(tensor_parallel)
        options = {"dtype": dtype, "revision": revision, "quantize": quantize, "mesh": mesh}
        loaded = from_pretrained(model, **options)
        if callable(drafter) and not hasattr(drafter, "propose"):
            drafter = drafter(loaded)
        if callable(processors):
            processors = processors(self.tokenizer)
        self.num_sequences = num_sequences
        with own_settings(asked.pop("numerics", None)):
            run = make_run(
                loaded,
                drafter,
                draft_length,
                processors=processors,
                attention_implementation=asked.pop("attention_implementation", None),
                kv_dtype=asked.pop("kv_dtype", None),
            )
            self.slots = Background(
                run,
                num_sequences,
                batch_size=batch_size,
                max_len=max_len,
                devices=places(tensor_parallel),
                max_new_tokens=max_new_tokens,
                sampling=sampling,
                key=jax.random.key(check_seed("seed", seed)),
                tokenizer=self.tokenizer,
                **asked,
            )
        drawn = Sampling() if sampling is None else sampling
        self.draws = drawn.expand(1, loaded.config.vocab_size).in_use() is not None

    async def __call__(self, batch: Any) -> Any:
        """Completes a batch: a pyarrow table with a row per sequence, in the order of its rows.

        Args:
            batch: in any of Ray Data's batch formats.

        Raises:
            ValueError: no column holds prompts, or tokens are sampled and rows have no number.
        """
        from ray.data.block import BlockAccessor

        table = BlockAccessor.for_block(BlockAccessor.batch_to_block(batch)).to_arrow()
        columns = set(table.column_names)
        if not columns & set(PROMPT_COLUMNS):
            raise ValueError(
                f"no column holds prompts: one of {', '.join(PROMPT_COLUMNS)} must be among "
                f"{', '.join(table.column_names)}"
            )
        if self.draws and not columns & set(KEY_COLUMNS):
            raise ValueError(
                'sampled tokens need a column "index" or "id" from which each row\'s random keys '
                "are made"
            )
        asks = asks_of(table.to_pylist(), self.tokenizer, drawn=self.draws)
        valid = [ask for ask in asks if isinstance(ask, Ask)]
        found = iter(await asyncio.wrap_future(self.slots.submit(valid)))
        rows = [
            next(found) if isinstance(ask, Ask) else refused(ask, self.num_sequences)
            for ask in asks
        ]
        return with_completions(table, rows, self.num_sequences)
