"""An engine for specdec_bench, the benchmark in NVIDIA/Model-Optimizer, `examples/specdec_bench`.

Its runner awaits one coroutine per request. Requests that are awaited at the same time share the
slots of `emsjax.ray.background`, which decode in a thread. Each step of the loop hands over what
every sequence has gained in it, so that times and numbers of tokens are those of steps. The device
therefore waits for the host after each step, as it does not in `emsjax.generate`.

That package is not needed here. The interface is that of version 0.46.
"""

import asyncio
import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from emsjax.benchmarks.subjects import load
from emsjax.configured import own_settings
from emsjax.device import dtype_name
from emsjax.drafters import DraftModel, PromptLookup
from emsjax.drafters.feature_formats import BLOCK, EAGLE3
from emsjax.drafters.folders import KINDS, feature_drafter
from emsjax.engine.adapt import make_run
from emsjax.models.numbers import NumberFormats
from emsjax.ray.background import Ask, Background
from emsjax.sampling import Sampling

# What the draft model's folder holds, by algorithm; None: a model. The others need no folder.
FOLDERS = {"DRAFT_TARGET": None, "EAGLE3": KINDS[EAGLE3][0], "DFLASH": KINDS[BLOCK][0]}
ALGORITHMS = ("NONE", "NGRAM", *FOLDERS)
ENGINE_ARGS = {
    "dtype": None,
    "quantize": None,
    "kv_dtype": None,
    "numerics": None,
    "max_seq_len": None,
    "max_matching_ngram_size": 2,
    "speculative_num_draft_tokens": None,
}
OF_OTHER_ENGINES = ("moe_expert_parallel_size", "tokenizer_path", "trust_remote_code")
SAMPLING = ("temperature", "top_k", "top_p", "min_p")
NO_END = -1  # the `end_id` of requests that go on to their full length


class SpecDecEngine:
    """This library as an engine of specdec_bench.

    Args:
        model_dir: a folder or an id on the Hugging Face hub.
        max_concurrent_requests: number of slots.
        sampling_kwargs: `temperature` (1 if it is missing, as in the other engines; 0: greedy),
            `top_k`, `top_p` and `min_p`.
        speculative_algorithm: "NGRAM": prompt lookup; "DRAFT_TARGET": a draft model; "EAGLE3";
            "DFLASH": also DSpark; "NONE" or None: plain decoding.
        draft_model_dir: the folder or id of what drafts.
        speculative_num_steps: most draft tokens of a sequence and step.
        tensor_parallel_size: number of devices over which the model is split.
        engine_args: `dtype`, `quantize`, `kv_dtype` and `numerics` as for `emsjax.Engine`;
            `max_seq_len`, tokens of the longest prompt and its continuation together (None: as many
            as the model has positions for); `max_matching_ngram_size`, tokens that a prompt lookup
            matches (2); `speculative_num_draft_tokens`, the block of "DFLASH", which has one token
            more than are drafted. What only other engines need is ignored.

    Raises:
        ValueError: an unknown algorithm or argument, or a folder that does not hold what the
            algorithm needs; also as `emsjax.from_pretrained`.
    """

    def __init__(
        self,
        model_dir: str,
        max_concurrent_requests: int,
        sampling_kwargs: Mapping[str, Any],
        speculative_algorithm: str | None = None,
        draft_model_dir: str | None = None,
        speculative_num_steps: int = 3,
        tensor_parallel_size: int = 1,
        **engine_args: Any,
    ):
        algorithm = speculative_algorithm or "NONE"
        if algorithm not in ALGORITHMS:
            known = ", ".join(ALGORITHMS)
            raise ValueError(f"speculative_algorithm must be one of {known}, not {algorithm!r}")
        check_known("engine_args", engine_args, (*ENGINE_ARGS, *OF_OTHER_ENGINES))
        check_known("sampling_kwargs", sampling_kwargs, SAMPLING)
        asked = {name: engine_args.get(name, default) for name, default in ENGINE_ARGS.items()}
        block, tokens = asked["speculative_num_draft_tokens"], speculative_num_steps
        if algorithm == "DFLASH" and block is not None:
            tokens = block - 1
        self.config = {
            **asked,
            "model": str(model_dir),
            "max_concurrent_requests": max_concurrent_requests,
            "sampling": {"temperature": 1.0, **sampling_kwargs},
            "algorithm": algorithm,
            "draft_model": None if draft_model_dir is None else str(draft_model_dir),
            "draft_tokens": 0 if algorithm == "NONE" else tokens,
            "tensor_parallel": tensor_parallel_size,
        }
        numbers = NumberFormats(
            dtype_name(asked["dtype"]), asked["quantize"], asked["kv_dtype"], tensor_parallel_size
        )
        check_folder(algorithm, draft_model_dir)
        self.model = load(numbers, model_dir, None)
        self.drafter = self.drafter_of(numbers, tokens)
        self.numbers = itertools.count()
        self.slots: Background | None = None
        self.end_id: int | None = None

    def drafter_of(self, numbers: NumberFormats, tokens: int) -> Any | None:
        """The drafter of so many tokens; None: plain decoding."""
        algorithm, folder = self.config["algorithm"], self.config["draft_model"]
        if algorithm == "NONE":
            return None
        if algorithm == "NGRAM":
            match = self.config["max_matching_ngram_size"]
            return PromptLookup(match, tokens, search_generated=True)
        if (kind := FOLDERS[algorithm]) is not None:
            return kind.from_pretrained(folder, self.model, max_draft_tokens=tokens)
        return DraftModel(load(numbers.of_draft_model, folder, None), tokens)

    def begin(self, prompt_ids: Sequence[int], end_id: int | None) -> Background:
        """The slots, which the first request makes and compiles; its end token is that of all.

        Raises:
            ValueError: the end token is another one; also as `emsjax.stream`.
        """
        end_id = NO_END if end_id is None else end_id
        if self.slots is None:
            with own_settings(self.config["numerics"]):
                run = make_run(self.model, self.drafter)
                self.slots = Background(
                    run,
                    batch_size=self.config["max_concurrent_requests"],
                    max_len=self.config["max_seq_len"],
                    sampling=Sampling(**self.config["sampling"]),
                    key=jax.random.key(0),
                    eos_token_ids=() if end_id == NO_END else (end_id,),
                    max_new_tokens=1,  # each request has its own
                    piece_steps=1,
                )
            self.end_id = end_id
            self.slots.submit([Ask(prompt_ids[:1], 1)]).result()  # compiles
        if end_id != self.end_id:
            raise ValueError(
                f"end_id must be {self.end_id}, as for the first request, not {end_id}"
            )
        return self.slots

    async def run(
        self,
        prompt_ids: Sequence[int],
        max_length: int,
        end_id: int | None,
        request_id: Any = None,
        turn_id: Any = None,
    ) -> dict[str, Any]:
        """Completes a prompt.

        Args:
            prompt_ids: its token ids.
            max_length: most new tokens.
            end_id: the token that ends it, the same for all requests; -1 or None: there is none.
            request_id, turn_id: are not used.

        Returns:
            `output_ids`: for the one sequence, the lists of tokens that its steps gained, without
            the end token; `chunk_lengths`: their lengths; `token_times`: seconds of
            `time.perf_counter`, at the request and at the end of each of these steps;
            `output_logits`: None.

        Raises:
            ValueError: the prompt is malformed or too long, or its end token is not that of the
                first request.
            FloatingPointError: the model's numbers are not finite.
            Exception: what ended the slots' thread; RuntimeError for later requests.
        """
        slots = self.begin(prompt_ids, end_id)
        chunks: list[list[int]] = []
        times = [time.perf_counter()]

        def keep(piece) -> None:
            times.append(time.perf_counter())
            chunks.append(piece.tokens.tolist())

        ask = Ask(prompt_ids, max_length, key_number=next(self.numbers), on_piece=keep)
        ((done,),) = await asyncio.wrap_future(slots.submit([ask]))
        if done.error is not None:
            raise ValueError(done.error)
        if done.finish_reason == "error":
            raise FloatingPointError("the model's numbers are not finite")
        if done.finish_reason == "eos":
            chunks[-1].pop()
            if not chunks[-1]:
                del chunks[-1], times[-1]
        return {
            "output_ids": [chunks],
            "chunk_lengths": [list(map(len, chunks))],
            "token_times": times,
            "output_logits": None,
        }

    def get_serving_config(self) -> dict[str, Any]:
        """The settings, as JSON."""
        return self.config

    def stop(self) -> None:
        """Ends the slots' thread, and waits for it."""
        if self.slots is not None:
            self.slots.close()


def check_known(what: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raises a ValueError that names the arguments that are not known."""
    if unknown := [name for name in given if name not in known]:
        raise ValueError(f"{what}: unknown {', '.join(unknown)}; known are {', '.join(known)}")


def check_folder(algorithm: str, folder: str | None) -> None:
    """Raises a ValueError unless the folder of what drafts is that which the algorithm needs."""
    if algorithm not in FOLDERS:
        return
    if folder is None:
        raise ValueError(f"speculative_algorithm {algorithm} needs draft_model_dir")
    if (kind := feature_drafter(folder)) is not FOLDERS[algorithm]:
        found = "a model" if kind is None else f"a drafter of the kind {kind.__name__}"
        raise ValueError(f"draft_model_dir {folder} holds {found}, which is not {algorithm}")
