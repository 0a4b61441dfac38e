"""vLLM or SGLang in a process of its own: `python engine_process.py ENGINE METHOD INPUTS OUTPUT`.

`emsjax.benchmarks.engines` starts it, and writes the inputs. It imports nothing of this library, so
only the engine is in the process. The outputs say what the engine was given, by its own account
where it has one, so that they can be refused if that differs. Speculation is set as in
`emsjax.benchmarks.peers`, but for the length of a match in SGLang, whose n-grams have any.

The arguments are those of vLLM and SGLang as of 2026. Caches of prompts are off, because every call
repeats the same prompts.
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Tokens = list[list[int]]


class Generated(NamedTuple):
    """What an engine says of a call.

    Attributes:
        prompts: the prompts that it has read; None: it does not say.
        prompt_lengths: their numbers of tokens.
        tokens: the new tokens.
    """

    prompts: Tokens | None
    prompt_lengths: list[int]
    tokens: Tokens


class Vllm:
    """vLLM.

    Args:
        inputs: see `emsjax.benchmarks.engines.write_inputs`.
        method: "plain", "prompt-lookup" or "draft-model".
    """

    def __init__(self, inputs: Mapping[str, Any], method: str):
        import vllm

        self.version, self.sampling = vllm.__version__, vllm.SamplingParams
        match = inputs["match_length"]
        speculation = {
            "plain": None,
            "prompt-lookup": {
                "method": "ngram",
                "num_speculative_tokens": inputs["lookup_tokens"],
                "prompt_lookup_max": match,
                "prompt_lookup_min": match,
            },
            "draft-model": {
                "method": "draft_model",
                "model": inputs["draft_model"],
                "num_speculative_tokens": inputs["draft_tokens"],
            },
        }
        self.llm = vllm.LLM(
            model=inputs["model"],
            dtype=inputs["dtype"],
            skip_tokenizer_init=True,
            max_model_len=inputs["max_len"],
            max_num_seqs=max(map(len, inputs["batches"])),
            enable_prefix_caching=False,
            speculative_config=speculation[method],
        )
        self.dtype = str(self.llm.llm_engine.vllm_config.model_config.dtype)

    def forget(self) -> None:
        """Nothing is kept between calls."""

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Generated:
        """Decodes so many tokens greedily, whatever they are."""
        sampling = self.sampling(
            temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
        )
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        found = self.llm.generate(asked, sampling, use_tqdm=False)
        read = [list(one.prompt_token_ids) for one in found]
        tokens = [list(one.outputs[0].token_ids) for one in found]
        return Generated(read, list(map(len, read)), tokens)


class Sglang:
    """SGLang; arguments as for `Vllm`. Its numbers of draft tokens count the last emitted one."""

    def __init__(self, inputs: Mapping[str, Any], method: str):
        import sglang

        self.version = sglang.__version__
        speculation = {
            "plain": {},
            "prompt-lookup": {
                "speculative_algorithm": "NGRAM",
                "speculative_num_draft_tokens": inputs["lookup_tokens"] + 1,
            },
            "draft-model": {
                "speculative_algorithm": "STANDALONE",
                "speculative_draft_model_path": inputs["draft_model"],
                "speculative_num_steps": inputs["draft_tokens"],
                "speculative_eagle_topk": 1,
                "speculative_num_draft_tokens": inputs["draft_tokens"] + 1,
            },
        }
        self.engine = sglang.Engine(
            model_path=inputs["model"],
            dtype=inputs["dtype"],
            skip_tokenizer_init=True,
            context_length=inputs["max_len"],
            max_running_requests=max(map(len, inputs["batches"])),
            disable_radix_cache=True,
            **speculation[method],
        )
        self.dtype = str(self.engine.server_args.dtype)

    def forget(self) -> None:
        """Drops the n-grams of earlier calls, which had the same tokens."""
        self.engine.flush_cache()

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Generated:
        """Decodes so many tokens greedily, whatever they are."""
        sampling = {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True}
        found = self.engine.generate(input_ids=list(prompts), sampling_params=sampling)
        lengths = [one["meta_info"]["prompt_tokens"] for one in found]
        return Generated(None, lengths, [list(one["output_ids"]) for one in found])


ENGINES = {"vllm": Vllm, "sglang": Sglang}


def device_name() -> str:
    """The device's name, which is that of JAX's `device_kind`."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"


def measure(engine: Any, prompts: Tokens, new_tokens: int, repeats: int) -> dict[str, Any]:
    """Times calls for one token and for all; the first round, which compiles, does not count.

    Returns:
        `seconds` by number of tokens, and the last call's `Generated`.
    """
    seconds: dict[str, list[float]] = {str(count): [] for count in (1, new_tokens)}
    for repeat in range(repeats + 1):
        for count, times in seconds.items():
            engine.forget()
            start = time.perf_counter()
            found = engine.generate(prompts, int(count))
            if repeat:
                times.append(time.perf_counter() - start)
    return {"seconds": seconds, **found._asdict()}


def main(name: str, method: str, inputs_path: str, output_path: str) -> None:
    """Measures all batches with one method, and writes the outputs as JSON."""
    with open(inputs_path) as file:
        inputs = json.load(file)
    engine = ENGINES[name](inputs, method)
    batches = [
        measure(engine, prompts, inputs["new_tokens"], inputs["repeats"])
        for prompts in inputs["batches"]
    ]
    told = {"version": engine.version, "dtype": engine.dtype.removeprefix("torch.")}
    with open(output_path, "w") as file:
        json.dump({**told, "device": device_name(), "batches": batches}, file, allow_nan=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
