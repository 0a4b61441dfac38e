"""What the config.json files of published drafters say.

Formats number the target's layers in two ways. vLLM's speculators have the numbers of `taps`: i is
the hidden state after i layers. SpecForge, DeepSpec and DFlash number the layers themselves from 0
on: i is the hidden state after layer i, which is tap i + 1.
"""

from collections.abc import Mapping
from typing import Any

from emsjax.drafters.block_network import BlockConfig
from emsjax.drafters.eagle3_network import Eagle3Config
from emsjax.drafters.feature_network import LAYER_CONFIGS
from emsjax.models.config import DecoderConfig
from emsjax.models.schema import is_whole, shown

SPECULATORS = "speculators_model_type"
SPECFORGE_EAGLE3 = ("LlamaForCausalLMEagle3", "LlamaForCausalLM")  # the latter is the authors'
DEEPSPEC_EAGLE3 = "Qwen3Eagle3Model"
ZLAB_DFLASH, SPECFORGE_DSPARK, DEEPSPEC_BLOCK = (
    *("DFlashDraftModel", "DSparkDraftModel", "Qwen3DSparkModel"),
)
EAGLE3, BLOCK = "eagle3", "block"  # kinds of drafters
SETTINGS = (  # of `BlockConfig`, by the same names in all formats
    *("block_size", "mask_token_id", "markov_rank", "markov_head_type"),
    *("enable_confidence_head", "confidence_head_with_markov"),
)
MAX_LAYER = 100_000


def kind_of(contents: Mapping[str, Any]) -> str | None:
    """The kind of drafter in a config.json: `EAGLE3` or `BLOCK`; None: another model."""
    kind, architecture = contents.get(SPECULATORS), architecture_of(contents)
    if kind is None and architecture in SPECFORGE_EAGLE3:
        return EAGLE3 if "draft_vocab_size" in contents else None
    if kind == "eagle3" or (kind is None and architecture == DEEPSPEC_EAGLE3):
        return EAGLE3
    blocks = (ZLAB_DFLASH, SPECFORGE_DSPARK, DEEPSPEC_BLOCK)
    if kind in ("dflash", "dspark") or (kind is None and architecture in blocks):
        return BLOCK
    return None


def eagle3_config(contents: Mapping[str, Any], target_layers: int | None) -> Eagle3Config:
    """The config of an EAGLE-3 drafter in a config.json.

    Args:
        contents: the file's object.
        target_layers: number of the target's layers, from which taps follow if the file names
            none; None: unknown.

    Raises:
        ValueError: the format is another one, or a field is missing or wrong.
    """
    kind, architecture = contents.get(SPECULATORS), architecture_of(contents)
    switches = ("fc_norm", "norm_output", "norm_before_fc")
    if kind == "eagle3":
        layers, taps = (
            inner(contents, "transformer_layer_config"),
            contents.get("eagle_aux_hidden_state_layer_ids"),
        )
        taps, switches = layer_ids(taps, 0), (*switches, "norm_before_residual")
    elif kind is None and architecture == DEEPSPEC_EAGLE3:
        layers, taps = contents, layer_ids(contents.get("target_layer_ids"), 1)
    elif kind is None and architecture in SPECFORGE_EAGLE3 and "draft_vocab_size" in contents:
        options = inner(contents, "eagle_config") if contents.get("eagle_config") else {}
        layers, taps = contents, layer_ids(options.get("eagle_aux_hidden_state_layer_ids"), 1)
    else:
        raise unknown(
            contents,
            f"{SPECULATORS} must be eagle3, or architectures [{SPECFORGE_EAGLE3[0]}] (SpecForge) "
            f"or [{DEEPSPEC_EAGLE3}] (DeepSpec)",
        )
    if taps is None:
        taps = usual_taps(contents, target_layers)
    return Eagle3Config(
        layers=layer_config(layers),
        taps=taps,
        draft_vocab_size=contents.get("draft_vocab_size"),
        target_width=contents.get("target_hidden_size"),
        **{name: contents[name] for name in switches if contents.get(name) is not None},
    )


def eagle3_json(config: Eagle3Config, max_draft_tokens: int) -> dict[str, Any]:
    """The inverse of `eagle3_config`, in the format of speculators."""
    return {
        "architectures": ["Eagle3Speculator"],
        SPECULATORS: "eagle3",
        "eagle_aux_hidden_state_layer_ids": list(config.taps),
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
    } | speculators_json("eagle3", config, max_draft_tokens)


def block_config(contents: Mapping[str, Any], target_layers: int | None) -> BlockConfig:
    """The config of a DFlash or DSpark drafter in a config.json; see `eagle3_config`."""
    kind, architecture = contents.get(SPECULATORS), architecture_of(contents)
    settings, layers, offset, names = contents, contents, 1, "target_layer_ids"
    if kind in ("dflash", "dspark"):
        layers, offset, names = (
            inner(contents, "transformer_layer_config"),
            0,
            "aux_hidden_state_layer_ids",
        )
        is_dspark = kind == "dspark"
    elif kind is None and architecture in (ZLAB_DFLASH, SPECFORGE_DSPARK):
        settings = {"block_size": contents.get("block_size"), **inner(contents, "dflash_config")}
        is_dspark = architecture == SPECFORGE_DSPARK
    elif kind is None and architecture == DEEPSPEC_BLOCK:
        is_dspark = True
    else:
        raise unknown(
            contents,
            f"{SPECULATORS} must be dflash or dspark, or architectures [{ZLAB_DFLASH}] (DFlash), "
            f"[{SPECFORGE_DSPARK}] (SpecForge) or [{DEEPSPEC_BLOCK}] (DeepSpec)",
        )
    types = layers.get("layer_types") or []
    if "sliding_attention" in types or settings.get("use_swa") or settings.get("causal"):
        raise ValueError("sliding windows and causal blocks are not supported")
    switches = {"sample_from_anchor": is_dspark}
    if kind == "dspark":  # what its files may leave out
        switches |= dict.fromkeys(("enable_confidence_head", "confidence_head_with_markov"), True)
        switches |= {"markov_rank": 256}
    fields = (*switches, *SETTINGS)
    taps = layer_ids(settings.get(names), offset)
    return BlockConfig(
        layers=layer_config(layers),
        taps=usual_taps(contents, target_layers) if taps is None else taps,
        draft_vocab_size=contents.get("draft_vocab_size"),
        target_width=contents.get("target_hidden_size"),
        **(switches | {one: settings[one] for one in fields if settings.get(one) is not None}),
    )


def block_json(config: BlockConfig) -> dict[str, Any]:
    """The inverse of `block_config`, in the format of speculators."""
    kind = "dspark" if config.markov_rank or config.enable_confidence_head else "dflash"
    return {
        "architectures": ["DSparkSpeculator" if kind == "dspark" else "DFlashSpeculator"],
        SPECULATORS: kind,
        "aux_hidden_state_layer_ids": list(config.taps),
        **{name: getattr(config, name) for name in ("sample_from_anchor", *SETTINGS)},
    } | speculators_json(kind, config, config.drafts)


def speculators_json(algorithm: str, config: Any, max_draft_tokens: int) -> dict[str, Any]:
    """What the configs of all drafters have in the format of speculators."""
    model_type = next(n for n, cls in LAYER_CONFIGS.items() if type(config.layers) is cls)
    proposal = {"proposal_type": "greedy", "speculative_tokens": max_draft_tokens}
    return {
        "transformer_layer_config": config.layers.to_json() | {"model_type": model_type},
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_width,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": None, "architectures": []},
        },
    }


def unknown(contents: Mapping[str, Any], expected: str) -> ValueError:
    """The error for a format that is not read."""
    found = {name: contents.get(name) for name in (SPECULATORS, "architectures", "model_type")}
    found = ", ".join(
        f"{name} {shown(value)}" for name, value in found.items() if value is not None
    )
    return ValueError(f"{expected}; found {found or 'none of these'}")


def architecture_of(contents: Mapping[str, Any]) -> Any:
    """The only entry of `architectures`; None if there is not one."""
    names = contents.get("architectures")
    return names[0] if isinstance(names, list) and len(names) == 1 else None


def inner(contents: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An object within the file's object."""
    value = contents.get(name)
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be an object, not {shown(value)}")
    return value


def layer_ids(value: Any, offset: int) -> tuple[int, ...] | None:
    """Numbers of layers as taps; None stays None."""
    if value is None:
        return None
    ids = value if isinstance(value, list) and value else [None]
    if not all(is_whole(one, -offset, MAX_LAYER) for one in ids):
        raise ValueError(f"the target's layers must be a list of their numbers, not {shown(value)}")
    return tuple(one + offset for one in ids)


def usual_taps(contents: Mapping[str, Any], target_layers: int | None) -> tuple[int, ...]:
    """The taps that EAGLE-3 drafters have whose file names none."""
    layers = contents.get("num_target_layers", target_layers)
    if layers is None:
        raise ValueError("the file does not name the target's layers: give target")
    if not is_whole(layers, 3, MAX_LAYER):
        raise ValueError(f"the target must have 3 layers or more, not {shown(layers)}")
    return 2, layers // 2, layers - 3


def layer_config(contents: Mapping[str, Any]) -> DecoderConfig:
    """The config of the draft layers.

    Raises:
        ValueError: they are of another family, or a field is wrong.
    """
    model_type = contents.get("model_type", "qwen3")
    if not isinstance(model_type, str) or model_type not in LAYER_CONFIGS:
        raise ValueError(
            f"the draft layers' model_type must be {' or '.join(LAYER_CONFIGS)}, "
            f"not {shown(model_type)}"
        )
    return LAYER_CONFIGS[model_type].from_json(contents)
