"""The model "emsjax" of the lm-evaluation-harness.

Texts become tokens as in the harness's own backend for transformers, "hf", so that both have the
same results.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from tqdm import tqdm

from emsjax.checks import check_at_least, check_choice
from emsjax.decode.base import Drafter, Model
from emsjax.drafters import DraftModel, PromptLookup
from emsjax.drafters.folders import feature_drafter
from emsjax.evaluation.options import GenerationOptions, cut_before, read_options
from emsjax.generation import generate
from emsjax.models.pretrained import from_pretrained
from emsjax.scoring import score
from emsjax.terminal.models import load_tokenizer

try:
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "lm_eval":
        raise
    raise ImportError(
        "evaluations need the lm-evaluation-harness: pip install 'emsjax[eval]'"
    ) from error
from jinja2 import TemplateError  # the harness needs it too

AT_ONCE = 64  # sequences that are generated at a time by default
PORTION = 512  # contexts between two updates of the progress bar
MAX_NEW_TOKENS = 256  # of a task that sets no limit, as in the backend "hf"
DRAFTERS = ("none", "prompt-lookup", "model")


@register_model("emsjax")
class EmsjaxLM(TemplateLM):
    """A model for the lm-evaluation-harness, which scores and generates without padding.

    Args:
        model: the model.
        tokenizer: its tokenizer, of transformers.
        drafter: the source of draft tokens for generation; None: plain decoding. Greedy answers
            are the same for any drafter.
        batch_size: sequences that are scored or generated at a time; None: up to 64.
        max_length: tokens of a context and its continuation that the model reads; longer ones lose
            their beginning. None: as many as the model has positions for.
        add_bos_token: whether texts get the tokenizer's special tokens; None: as the tokenizer is
            configured.
        prefix_token_id: the token before a text without context; None: the tokenizer's start
            token, or its end token if there is none.
        numerics: as for `emsjax.generate`.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Any,
        drafter: Drafter | None = None,
        *,
        batch_size: int | None = None,
        max_length: int | None = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        numerics: str | None = None,
    ):
        super().__init__()
        limit = model.config.max_position_embeddings
        self.model, self.tokenizer, self.drafter = model, tokenizer, drafter
        self.batch_size = batch_size and check_at_least("batch_size", batch_size, 1)
        self.max_length = check_at_least("max_length", max_length or limit, 1, limit)
        self.add_bos_token, self._prefix_token_id = add_bos_token, prefix_token_id
        self.numerics = numerics
        self._num_calls = 0  # of sampled generation, each of which draws from other keys

    @classmethod
    def create_from_arg_string(
        cls, arg_string: str, additional_config: Mapping[str, Any] | None = None
    ) -> "EmsjaxLM":
        """Loads a model from the harness's `model_args`, such as "pretrained=gpt2,batch_size=8".

        The names are those of `create_from_arg_obj`.
        """
        return cls.create_from_arg_obj(
            utils.simple_parse_args_string(arg_string), additional_config
        )

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None
    ) -> "EmsjaxLM":
        """Loads a model from the harness's `model_args`.

        Args:
            arg_dict: `pretrained` (a folder, or an id on the Hugging Face hub), and optionally
                `revision`, `dtype`, `drafter` (none, prompt-lookup or model), `draft_model`,
                `max_draft_tokens`, and the other arguments of the class.
            additional_config: the same, from other options of the harness; None is left out.

        Raises:
            ValueError: an argument is missing, unknown or wrong, or the model cannot be loaded.
        """
        more = {name: x for name, x in (additional_config or {}).items() if x is not None}
        given = {**arg_dict, **more}
        if "pretrained" not in given:
            raise ValueError("model_args must name a model, as in pretrained=FOLDER")
        path, revision = given.pop("pretrained"), given.pop("revision", None)
        dtype = given.pop("dtype", None)
        dtype = None if dtype == "auto" else dtype
        drafting = {
            name: given.pop(name)
            for name in ("drafter", "draft_model", "max_draft_tokens")
            if name in given
        }
        if given.get("batch_size") == "auto":
            del given["batch_size"]
        own = ("batch_size", "max_length", "add_bos_token", "prefix_token_id", "numerics")
        if unknown := sorted(given.keys() - set(own)):
            raise ValueError(f"model_args: {', '.join(unknown)} is no argument of the model emsjax")
        given = {name: int(x) if name == "batch_size" else x for name, x in given.items()}
        model = from_pretrained(path, dtype=dtype, revision=revision)
        drafter = _load_drafter(model, **drafting)
        return cls(model, load_tokenizer(path, revision), drafter, **given)

    @property
    def eot_token_id(self) -> int:
        """The tokenizer's end token."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context."""
        if self._prefix_token_id is not None:
            return self._prefix_token_id
        start = self.tokenizer.bos_token_id
        return self.eot_token_id if start is None else start

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's name, by which the harness distinguishes its caches."""
        return self.tokenizer.name_or_path.replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Returns a text's tokens; a text that starts with the prefix token gets no second one."""
        if add_special_tokens is None:
            prefix = self.tokenizer.decode(self.prefix_token_id)
            add_special_tokens = False if string.startswith(prefix) else self.add_bos_token
        special = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return self.tokenizer.encode(string, **special)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Returns a conversation as text; templates that refuse system messages get none."""
        options = {
            "tokenize": False,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": not add_generation_prompt,
        }
        try:
            return self.tokenizer.apply_chat_template(chat_history, **options)
        except TemplateError:
            others = [message for message in chat_history if message["role"] != "system"]
            return self.tokenizer.apply_chat_template(others, **options)

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """Scores continuations: log-probability, and whether greedy decoding would emit them.

        Args:
            requests: the key in the harness's cache or None, context and continuation of each.
        """
        pairs = [self._fitting(context, tokens) for _, context, tokens in requests]
        places: dict[tuple[int, ...], list[int]] = {}  # requests by context
        for place, (context, _) in enumerate(pairs):
            places.setdefault(tuple(context), []).append(place)
        longest = lambda context: len(context) + max(len(pairs[i][1]) for i in places[context])
        answers: list[Any] = [None] * len(requests)
        bar = tqdm(total=len(requests), disable=disable_tqdm, desc="Scoring continuations")
        with bar:
            for contexts in _portions(sorted(places, key=longest, reverse=True)):
                own = [places[context] for context in contexts]
                continuations = [[pairs[place][1] for place in group] for group in own]
                options = {"batch_size": self.batch_size, "numerics": self.numerics}
                out = score(self.model, _unpadded(contexts), continuations, **options)
                scored = [place for group in own for place in group]
                for place, total, greedy in zip(scored, out.totals, out.is_greedy, strict=True):
                    answers[place] = (float(total), bool(greedy))
                    if (key := requests[place][0]) is not None:
                        self.cache_hook.add_partial("loglikelihood", key, answers[place])
                bar.update(len(scored))
        return answers

    def _fitting(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """Cuts the beginning of a context that is too long together with its continuation.

        Raises:
            ValueError: the continuation is empty or too long by itself.
        """
        count = len(continuation)
        if not 0 < count <= self.max_length:
            raise ValueError(
                f"a continuation has {count} tokens: it must have 1 to {self.max_length}, the "
                "model's max_length"
            )
        return context[-(self.max_length + 1 - count) :], continuation

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-probabilities of whole texts, in windows of the model's maximum length."""
        windows, owners = [], []
        for i, request in enumerate(requests):
            rolling = utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for window in map(utils.make_disjoint_window, rolling):
                windows.append((None, *window))
                owners.append(i)
        totals = [0.0] * len(requests)
        scored = self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm)
        for i, (total, _) in zip(owners, scored, strict=True):
            totals[i] += total
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Generates answers that end before the first of the request's `until`.

        Raises:
            ValueError: a request has an option that is not supported, or leaves no room for its
                context.
        """
        groups: dict[GenerationOptions, list[int]] = {}
        for place, request in enumerate(requests):
            options = read_options(request.args[1], MAX_NEW_TOKENS)
            groups.setdefault(options, []).append(place)
        answers: list[Any] = [None] * len(requests)
        bar = tqdm(total=len(requests), disable=disable_tqdm, desc="Generating answers")
        with bar:
            for options, members in groups.items():
                prompts = {
                    place: self._prompt(requests[place].args[0], options) for place in members
                }
                longest_first = sorted(members, key=lambda place: -len(prompts[place]))
                for portion in _portions(longest_first):
                    texts = self._generate([prompts[place] for place in portion], options)
                    for place, text in zip(portion, texts, strict=True):
                        answers[place] = text
                        self.cache_hook.add_partial("generate_until", requests[place].args, text)
                    bar.update(len(portion))
        return answers

    def _prompt(self, context: str, options: GenerationOptions) -> list[int]:
        """Returns a context's last tokens that leave room for the answer."""
        room = self.max_length - options.max_new_tokens
        if room < 1:
            raise ValueError(
                f"max_gen_toks {options.max_new_tokens} leaves no room for a context: it must be "
                f"below {self.max_length}, the model's max_length"
            )
        return self.tok_encode(context)[-room:] or [self.prefix_token_id]

    def _generate(self, prompts: Sequence[list[int]], options: GenerationOptions) -> list[str]:
        """Generates one answer per prompt, and cuts it before the first of `options.until`."""
        key = None
        if options.temperature > 0:
            key = jax.random.fold_in(jax.random.key(0, impl="threefry2x32"), self._num_calls)
            self._num_calls += 1
        out = generate(
            self.model,
            _unpadded(prompts),
            self.drafter,
            max_new_tokens=options.max_new_tokens,
            sampling=options.sampling,
            stop=self._stops(options.until) or None,
            tokenizer=self.tokenizer,
            batch_size=self.batch_size or AT_ONCE,
            eos_token_ids=self._end_token_ids(options.until),
            key=key,
            numerics=self.numerics,
        )
        tokens = [row[:length] for row, length in zip(out.tokens, out.lengths, strict=True)]
        texts = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return [cut_before(text, options.until) for text in texts]

    def _stops(self, until: Iterable[str]) -> list[str]:
        """The texts that end an answer and are no special tokens."""
        return [text for text in until if text and text not in self.tokenizer.all_special_tokens]

    def _end_token_ids(self, until: Iterable[str]) -> set[int]:
        """The model's end tokens, and special tokens that end an answer."""
        special = zip(
            self.tokenizer.all_special_tokens, self.tokenizer.all_special_ids, strict=True
        )
        ends = {*self.model.config.eos_token_ids, *(id for text, id in special if text in until)}
        return ends if self.eot_token_id is None else ends | {self.eot_token_id}


def _load_drafter(
    model: Model,
    *,
    drafter: str | None = None,
    draft_model: str | None = None,
    max_draft_tokens: int | None = None,
) -> Drafter | None:
    """Loads the drafter that `model_args` name.

    Raises:
        ValueError: it is unknown, its draft model is missing, or an argument is for another one.
    """
    drafter = check_choice("drafter", drafter or ("model" if draft_model else "none"), DRAFTERS)
    limit = {} if max_draft_tokens is None else {"max_draft_tokens": max_draft_tokens}
    if (drafter == "model") != (draft_model is not None):
        raise ValueError("drafter=model needs a draft_model, and no other drafter has one")
    if drafter == "model" and (kind := feature_drafter(draft_model)) is not None:
        return kind.from_pretrained(draft_model, model, **limit)
    if drafter == "model":
        return DraftModel(from_pretrained(draft_model, dtype=model.dtype), **limit)
    if drafter == "prompt-lookup":
        return PromptLookup(**limit)
    if limit:
        raise ValueError("max_draft_tokens needs a drafter: drafter=prompt-lookup or draft_model")
    return None


def _portions(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for first in range(0, len(items), PORTION):
        yield items[first : first + PORTION]


def _unpadded(prompts: Sequence[Sequence[int]]) -> dict[str, list[list[int]]]:
    """Prompts that may begin or end with the padding token, which tasks may use as text."""
    mask = [[1] * len(prompt) for prompt in prompts]
    return {"input_ids": [list(prompt) for prompt in prompts], "attention_mask": mask}
