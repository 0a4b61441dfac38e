"""`emsjax distil`: train a draft model for a target."""

import argparse
import hashlib
import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from emsjax import distillation, plotting
from emsjax.distillation.finite import check_finite
from emsjax.distillation.losses import check_losses
from emsjax.distillation.model_card import gains, model_card
from emsjax.distillation.pruning import PROJECTED, num_parameters, pruned_config
from emsjax.distillation.sequences import MIN_TOKENS
from emsjax.distillation.texts import hold_out, read_texts, tokenize
from emsjax.drafters.folders import check_is_no_drafter
from emsjax.models.config import DecoderConfig
from emsjax.models.decoder import Decoder
from emsjax.models.families import family_of
from emsjax.models.pretrained import from_pretrained
from emsjax.records.reading import in_one_line
from emsjax.records.writing import to_json, write_atomically
from emsjax.terminal.models import load_config, load_tokenizer
from emsjax.terminal.options import flag
from emsjax.terminal.reporting import line, make_console, progress
from emsjax.terminal.surroundings import surroundings

RECORD = "distillation.json"  # settings of the run, and when it is done its results
GENERATIONS, CHECKPOINTS, FIGURE = "generations.json", "checkpoints", "distillation.png"
Documents = list[np.ndarray]


def distil(options: argparse.Namespace, command: str) -> int:
    """Train a draft model, or resume its training, and print the speed-up.

    Raises:
        ValueError: bad texts, sizes, losses or models, or an output folder with other content.
            Nothing has been written then.
    """
    check_losses(options.losses)
    if options.dtype is None:  # never float16, in which gradients may vanish
        options.dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    files = [path for path in (options.data, options.held_out_data) if path is not None]
    if len(files) == 2 and files[0].resolve() == files[1].resolve():
        raise ValueError("--held-out-data is --data: its texts would be trained on")
    texts = {path: read_texts(path, options.text_template) for path in files}
    config = load_config(options.target, options.revision)
    draft_config = check_draft(options, config)
    held_out, training = prepare(options, texts, config, draft_config)
    record = open_output(options)
    say = progress()
    if "results" in record:
        clean_up(options.output)
        say(f"{options.output} is finished")
    else:
        record |= {"command": command, **surroundings(None)}
        record["results"] = run(options, draft_config, held_out, training, say)
        finish(options.output, record, say)
    console = make_console()
    line(console, "| held-out texts | plain | before | after |")
    for row in gains(record["results"]):
        line(console, row)
    return 0


def check_draft(options: argparse.Namespace, config: DecoderConfig) -> DecoderConfig:
    """The draft model's architecture.

    Args:
        config: the target's architecture.

    Raises:
        ValueError: sizes that do not suit the target, another vocabulary, or a draft model that
            is not smaller than the target.
    """
    if options.draft_model is None:
        if options.layers is None or options.width is None:
            raise ValueError("--layers and --width are needed, or --draft-model")
        if options.draft_revision is not None:
            raise ValueError("--draft-revision needs --draft-model")
        options.embeddings = options.embeddings or PROJECTED
        try:
            return pruned_config(config, options.layers, options.width, options.embeddings)
        except ValueError as error:
            raise ValueError(f"--{error}") from error
    for name in ("layers", "width", "embeddings"):
        if getattr(options, name) is not None:
            raise ValueError(f"--{name}: --draft-model has its own")
    if options.start == "random":
        raise ValueError("--start random: training starts with --draft-model")
    check_is_no_drafter(options.draft_model, options.draft_revision)
    draft = load_config(options.draft_model, options.draft_revision)
    for name in ("vocab_size", "max_position_embeddings"):
        sizes = [getattr(one, name) for one in (draft, config)]
        if sizes[0] != sizes[1]:
            raise ValueError(f"--draft-model has {name} {sizes[0]}, --target {sizes[1]}")
    sizes = [size_of(one) for one in (draft, config)]
    if sizes[0] >= sizes[1]:
        raise ValueError(
            f"--draft-model must be smaller than --target, and they have {sizes[0]:,} and "
            f"{sizes[1]:,} parameters"
        )
    return draft


def size_of(config: DecoderConfig) -> int:
    """Number of parameters of a model with this architecture."""
    return num_parameters(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))


def prepare(
    options: argparse.Namespace,
    texts: Mapping[Path, list[str]],
    config: DecoderConfig,
    draft_config: DecoderConfig,
) -> tuple[Documents, Documents]:
    """The held-out documents and those to train on, from the texts of each file.

    Raises:
        ValueError: too few texts or tokens, another vocabulary, lengths beyond the models'
            positions, invalid rates, or a batch that cannot be divided among the devices.
    """
    positions = min(config.max_position_embeddings, draft_config.max_position_embeddings)
    for name, least in (("sequence_length", MIN_TOKENS), ("max_new_tokens", 1)):
        value, most = getattr(options, name), positions - (name == "max_new_tokens")
        if not least <= value <= most:
            raise ValueError(f"{flag(name)} must be in {least}..{most}, not {value}")
    if options.draft_tokens >= options.max_new_tokens:
        raise ValueError(
            f"--draft-tokens must be below --max-new-tokens {options.max_new_tokens}, not "
            f"{options.draft_tokens}"
        )
    for name, zero in (("learning_rate", False), ("weight_decay", True), ("temperature", True)):
        value = getattr(options, name)
        if not (math.isfinite(value) and (value > 0 or (zero and value == 0))):
            least = ">= 0" if zero else "> 0"
            raise ValueError(f"{flag(name)} must be finite and {least}, not {value}")
    devices = len(jax.local_devices())
    if options.batch_size % devices:
        raise ValueError(
            f"--batch-size must be a multiple of {devices}, the number of local devices, "
            f"not {options.batch_size}"
        )
    tokenizer = load_tokenizer(options.target, options.revision)
    ends = config.eos_token_ids
    sizes = {"vocab_size": config.vocab_size, "end_token_ids": ends}
    documents = {path: tokenize(tokenizer, of, str(path), **sizes) for path, of in texts.items()}
    if options.held_out_data is None:
        held_out, training = hold_out(documents[options.data], options.held_out, options.seed)
    else:
        held_out = documents[options.held_out_data][: options.held_out]
        training = documents[options.data]
        if len(held_out) < options.held_out:
            raise ValueError(
                f"{options.held_out_data} has {len(held_out)} texts, and --held-out asks for "
                f"{options.held_out}"
            )
    distillation.PackedSequences(training, options.sequence_length, options.batch_size)
    return held_out, training


def open_output(options: argparse.Namespace) -> dict[str, Any]:
    """The record in the output folder of a run with these options; a new folder gets a new one.

    Raises:
        ValueError: the folder has other content, or a run with other options.
    """
    left_out = {"command", "data", "held_out_data", "output", "checkpoint_every"}
    settings = {name: value for name, value in vars(options).items() if name not in left_out}
    for name in ("data", "held_out_data"):
        path = getattr(options, name)
        digest = None if path is None else hashlib.sha256(path.read_bytes()).hexdigest()
        settings[name + "_sha256"] = digest
    settings = json.loads(to_json(settings))
    folder, path = options.output, options.output / RECORD
    if path.exists():
        with in_one_line(f"--output: {path} does not belong to a run"):
            record = json.loads(path.read_bytes())
            before = {**record["settings"]}
        changes = [
            f"{name} was {before.get(name)!r}, is now {value!r}"
            for name, value in settings.items()
            if before.get(name) != value
        ]
        if changes:
            raise ValueError(f"--output: {folder} is from another run: {'; '.join(changes)}")
        return record
    unfinished = {RECORD + ".tmp"}  # left by a run that was killed as it began
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output: {folder} is not a folder")
    folder.mkdir(parents=True, exist_ok=True)
    if {path.name for path in folder.iterdir()} - unfinished:
        raise ValueError(f"--output: {folder} holds something else")
    write_atomically(path, to_json({"settings": settings}, indent=1))
    return {"settings": settings}


def run(
    options: argparse.Namespace,
    draft_config: DecoderConfig,
    held_out: Documents,
    training: Documents,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Train, evaluate and save.

    Raises:
        NonFiniteError: a loss, or anything that follows from it, is not finite. The newest
            checkpoint is from before that step, and no draft model has been written.
    """
    load = from_pretrained
    target = load(options.target, dtype=options.dtype, revision=options.revision)
    if options.draft_model is not None:
        start = load(options.draft_model, dtype="float32", revision=options.draft_revision)
    elif options.start == "random":
        start = Decoder(draft_config, rngs=nnx.Rngs(options.seed), dtype="float32")
    else:
        sizes = (options.layers, options.width, options.embeddings)
        start = distillation.prune(target, *sizes, documents=training)
    training = training + generations(options, target, training, say)
    model, losses = train(options, start, target, training, say)
    model, start = (one.astype(options.dtype) for one in (model, start))
    check_finite(f"the trained parameters in {options.dtype}", nnx.state(model))
    results = {
        "losses": losses.tolist(),
        "parameters": {"target": num_parameters(target), "draft": num_parameters(model)},
        "config": model.config.to_json(),
        "architecture": {
            "family": family_of(model.config).model_type,
            "layers": len(model.architecture.layers),
            "width": model.architecture.width,
        },
    }
    room = target.config.max_position_embeddings - options.max_new_tokens
    prompts = [document[: min(room, max(1, len(document) // 2))] for document in held_out]
    for name, draft_model in (("plain", None), ("before", start), ("after", model)):
        say(f"decoding {len(prompts)} held-out texts, {name}")
        results[name] = distillation.evaluate(
            target,
            draft_model,
            prompts,
            draft_tokens=options.draft_tokens,
            new_tokens=options.max_new_tokens,
        )
    model.save_pretrained(options.output)  # only a draft model whose figures are known
    return results


def generations(
    options: argparse.Namespace, target: Decoder, training: Documents, say
) -> Documents:
    """The target's continuations, read from the output folder if it has them."""
    path = options.output / GENERATIONS
    if not options.generations:
        return []
    if not path.exists():
        say(f"decoding {options.generations} continuations of the texts")
        new = distillation.continuations(
            target,
            training,
            options.generations,
            new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            seed=options.seed,
        )
        write_atomically(path, to_json([ids.tolist() for ids in new]))
    with in_one_line(f"--output: {path} cannot be read"):
        return [np.array(ids, np.int32) for ids in json.loads(path.read_bytes())]


def train(options: argparse.Namespace, start, target, training: Documents, say):
    """The trained model and its losses; training resumes at the newest checkpoint."""
    optimizer = distillation.make_optimizer(
        options.steps,
        options.learning_rate,
        warm_up=options.warm_up_steps,
        weight_decay=options.weight_decay,
    )
    trainer = distillation.Trainer(
        start, optimizer, options.losses, target=target, dtype=options.dtype
    )
    sequences = distillation.PackedSequences(
        training, options.sequence_length, options.batch_size, options.seed
    )
    checkpoints = distillation.Checkpoints(options.output / CHECKPOINTS)
    try:
        return distillation.train(
            trainer,
            sequences,
            options.steps,
            checkpoints=checkpoints,
            every=options.checkpoint_every,
            say=say,
        )
    except distillation.NonFiniteError as error:
        step = checkpoints.manager.latest_step()
        kept = "no checkpoint yet" if step is None else f"the checkpoint of step {step} is kept"
        advice = "try a lower --learning-rate with another --output"
        raise distillation.NonFiniteError(f"{error}; {kept}; {advice}") from error
    finally:
        checkpoints.close()


def finish(folder: Path, record: dict[str, Any], say: Callable[[str], None]) -> None:
    """Write everything that needs the results; the record is last, as it marks the run as done."""
    settings = record["settings"]
    load_tokenizer(settings["target"], settings["revision"]).save_pretrained(folder)
    (folder / "README.md").write_text(model_card(record))
    try:
        plotting.distillation_figure(record["results"]).savefig(folder / FIGURE)
    except ImportError as error:
        say(f"no figure: {error}")
    write_atomically(folder / RECORD, to_json(record, indent=1))
    clean_up(folder)


def clean_up(folder: Path) -> None:
    """Remove the files that only an unfinished run needs."""
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    (folder / GENERATIONS).unlink(missing_ok=True)
