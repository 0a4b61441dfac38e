"""Prompt lookup is compared with a search written with lists."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import NEARLY_GREEDY, compiled_step, tiny_model

import emsjax

WIDTH = 24
ids = st.integers(1, 3)


def expected_copy(context, texts, n, limit):
    """The tokens after the last occurrence of the last n tokens; later texts take precedence."""
    if len(context) < n:
        return []
    suffix = context[-n:]
    for text in reversed(texts):
        for start in range(len(text) - n - 1, -1, -1):
            if text[start : start + n] == suffix:
                return text[start + n : start + n + limit]
    return []


@settings(max_examples=60)
@given(
    prompt=st.lists(ids, min_size=1, max_size=12),
    generated=st.lists(ids, max_size=10),
    reference=st.none() | st.lists(ids, min_size=1, max_size=12),
    search_generated=st.booleans(),
    n=st.integers(1, 3),
    limit=st.integers(0, 5),
)
def test_drafts_copy_the_tokens_after_the_last_occurrence(
    prompt, generated, reference, search_generated, n, limit
):
    context = prompt + generated
    texts = [prompt if reference is None else reference]
    if search_generated:
        texts = [context] if reference is None else [reference, context]
    drafter = emsjax.PromptLookup(
        match_length=n,
        max_draft_tokens=4,
        references=None if reference is None else [reference],
        search_generated=search_generated,
    ).for_prompts(np.array([0]), 1)
    tokens = np.full((1, WIDTH), 1, np.int32)  # tokens beyond the context must not match
    tokens[0, : len(context)] = context
    state = drafter.init(jnp.asarray(tokens), jnp.array([len(prompt)], jnp.int32), WIDTH)
    draft, _ = drafter.propose(
        state,
        jnp.asarray(tokens),
        jnp.array([len(context)], jnp.int32),
        jnp.array([limit], jnp.int32),
        jax.random.split(jax.random.key(0), 1),
        None,
    )
    got = draft.tokens[0, : int(draft.counts[0])].tolist()
    assert got == expected_copy(context, texts, n, min(limit, 4))


def test_a_step_of_several_sequences_per_prompt_needs_references_for_each():
    model, prompts = tiny_model(), [[5, 6, 5], [9]]
    drafter = emsjax.PromptLookup(references=prompts)
    options = {"num_sequences": 2, "max_new_tokens": 4, **NEARLY_GREEDY}
    state = emsjax.init_state(model, drafter, prompts, **options)
    with pytest.raises(ValueError, match="2 references for 4 samples"):
        emsjax.step(model, drafter, state)
    served = drafter.for_prompts(np.arange(4) // 2, 2)
    _, info = compiled_step(model, served, state)
    assert (np.asarray(info.num_emitted) > 0).all()


def test_each_slot_searches_its_own_prompts_reference():
    drafter = emsjax.PromptLookup(references=[[1, 2, 3], [4, 5, 6, 7]])
    served = drafter.for_prompts(np.array([1, 1, 0]), 2)
    assert served.reference_lengths.tolist() == [4, 4, 3]
    assert served.references[0, :4].tolist() == [4, 5, 6, 7]
    assert drafter.references.shape[0] == 2


@pytest.mark.usefixtures("unchecked_annotations")
def test_references_that_are_not_token_ids_are_rejected():
    with pytest.raises(ValueError, match="references must be a list of token-id sequences"):
        emsjax.PromptLookup(references=5)
