"""Modules that stand in for vLLM and SGLang, with those of their arguments that matter.

Unknown arguments are errors, as in the real ones. They write what they are given to `given.jsonl`
beside them. New tokens are those of `text.json` from the prompt's end on, as scripted models have
them. `behaviour.json` says what they do otherwise.
"""

import json
from pathlib import Path

COMMON = """
import json, os
from pathlib import Path

import results

HERE = Path(__file__).parents[1]
TEXT = json.loads((HERE / "text.json").read_text())
BEHAVIOUR = json.loads((HERE / "behaviour.json").read_text()).get(NAME, {})

assert results.IS_ANOTHER  # not the library's module of that name

def tell(what, **given):
    with (HERE / "given.jsonl").open("a") as file:
        file.write(json.dumps({"engine": NAME, "what": what, "pid": os.getpid(), **given}) + "\\n")

def generate(prompt, count):
    found = TEXT[len(prompt):][: count - BEHAVIOUR.get("too_few", 0)]
    return [token + BEHAVIOUR.get("off_by", 0) for token in found]
"""
VLLM = (
    """
NAME = "vllm"
__version__ = "0.20.0"
"""
    + COMMON
    + """
import dataclasses
from types import SimpleNamespace

SPECULATION = {"method", "model", "num_speculative_tokens"}
SPECULATION |= {"prompt_lookup_max", "prompt_lookup_min"}

@dataclasses.dataclass
class SamplingParams:
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int | None = 16
    ignore_eos: bool = False
    detokenize: bool = True

class LLM:
    def __init__(self, model, *, tokenizer=None, skip_tokenizer_init=False, dtype="auto",
                 max_model_len=None, max_num_seqs=None, enable_prefix_caching=None,
                 speculative_config=None, tensor_parallel_size=1):
        given = speculative_config or {}
        if set(given) - SPECULATION:
            raise ValueError(f"unexpected keys {set(given) - SPECULATION}")
        if given.get("method") == BEHAVIOUR.get("fails_with", "none"):
            raise RuntimeError("no such method\\n")
        tell("made", model=model, dtype=dtype, skip_tokenizer_init=skip_tokenizer_init,
             max_model_len=max_model_len, max_num_seqs=max_num_seqs,
             enable_prefix_caching=enable_prefix_caching, speculative_config=speculative_config)
        config = SimpleNamespace(dtype=f"torch.{BEHAVIOUR.get('dtype', dtype)}")
        self.llm_engine = SimpleNamespace(vllm_config=SimpleNamespace(model_config=config))
        self.has_tokenizer = not skip_tokenizer_init

    def generate(self, prompts, sampling_params=None, *, use_tqdm=True, lora_request=None):
        if sampling_params.detokenize and not self.has_tokenizer:
            raise ValueError("no tokenizer")
        tell("generate", prompts=prompts, **dataclasses.asdict(sampling_params))
        found = []
        for prompt in prompts:
            (ids,) = prompt.values()
            ids = ids[BEHAVIOUR.get("cut", 0):]
            tokens = generate(prompt["prompt_token_ids"], sampling_params.max_tokens)
            outputs = [SimpleNamespace(token_ids=tuple(tokens), text="")]
            found.append(SimpleNamespace(prompt_token_ids=ids, outputs=outputs, finished=True))
        return found
"""
)
SGLANG = (
    """
NAME = "sglang"
__version__ = "0.5.10"
"""
    + COMMON
    + """
import dataclasses

SAMPLING = {"temperature", "top_p", "top_k", "max_new_tokens", "ignore_eos", "stop_token_ids"}

@dataclasses.dataclass
class ServerArgs:
    model_path: str
    dtype: str = "auto"
    skip_tokenizer_init: bool = False
    context_length: int | None = None
    max_running_requests: int | None = None
    disable_radix_cache: bool = False
    log_level: str = "info"
    speculative_algorithm: str | None = None
    speculative_draft_model_path: str | None = None
    speculative_num_steps: int | None = None
    speculative_eagle_topk: int | None = None
    speculative_num_draft_tokens: int | None = None

class Engine:
    def __init__(self, **kwargs):
        kwargs.setdefault("log_level", "error")
        self.server_args = ServerArgs(**kwargs)
        tell("made", **kwargs)
        if "dtype" in BEHAVIOUR:
            self.server_args.dtype = BEHAVIOUR["dtype"]

    def flush_cache(self):
        tell("flush")

    def generate(self, prompt=None, sampling_params=None, input_ids=None, return_logprob=False,
                 stream=False):
        if set(sampling_params) - SAMPLING:
            raise ValueError(f"unexpected keys {set(sampling_params) - SAMPLING}")
        tell("generate", prompts=input_ids, **sampling_params)
        found = []
        for ids in input_ids:
            tokens = generate(ids, sampling_params["max_new_tokens"])
            read = len(ids) - BEHAVIOUR.get("cut", 0)
            info = {"prompt_tokens": read, "completion_tokens": len(tokens)}
            found.append({"output_ids": tokens, "meta_info": info})
        return found
"""
)
TORCH = """
class cuda:
    is_available = staticmethod(lambda: DEVICE is not None)
    get_device_name = staticmethod(lambda place: DEVICE)
"""


def write(folder: Path, text, **behaviour) -> tuple[Path, Path]:
    """Writes the modules; returns the folder with both engines, and that with a torch for them."""
    engines, torch = folder / "engines", folder / "torch"
    for name, source in {"vllm": VLLM, "sglang": SGLANG}.items():
        (engines / name).mkdir(parents=True)
        (engines / name / "__init__.py").write_text(source)
    (engines / "results.py").write_text("IS_ANOTHER = True\n")
    torch.mkdir()
    (torch / "torch.py").write_text(f"DEVICE = {behaviour.pop('device', None)!r}\n{TORCH}")
    (engines / "text.json").write_text(json.dumps(list(map(int, text))))
    (engines / "behaviour.json").write_text(json.dumps(behaviour))
    return engines, torch


def given(engines: Path) -> list[dict]:
    """What the engines were given, in order."""
    path = engines / "given.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
