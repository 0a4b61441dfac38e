"""Tables of decoding, for the benchmarks page: speeds, draft lengths, acceptance."""

from markdown_tables import Results, number, numbers_of, table


def draft_length(results: Results) -> list[str]:
    settings, rows = results["settings"], []
    names = {
        "goodput": "`Goodput`",
        "synergy": "`BatchSizeTable`",
        "bass": "`BassHeuristic`",
        "bass, cost-capped": "the same, `CostCapped`",
    }
    for of in results["entries"]:
        whole = of["policies"]["fixed 0"]["tokens_per_s"] is not None
        which = "tokens_per_s" if whole else "live_tokens_per_s"
        plain = of["plain"]["tokens_per_s"]
        speed = {name: one[which] / plain for name, one in of["policies"].items()}
        best = max((name for name in speed if name.startswith("fixed ")), key=speed.get)
        rows.append(
            [
                of["workload"],
                of["batch"],
                f"{of['mean_prompt_tokens']:.0f}",
                of["new_tokens"],
                f"{plain:.0f}",
                f"{speed[best]:.2f} ({best.split()[1]})",
                *(number(speed.get(name)) for name in names),
            ]
        )
    head = ["drafts", "batch", "mean prompt tokens", "new tokens", "plain decoding, tokens/s"]
    return [
        f"Target {settings['shape']}, draft model {settings['draft_shape']}, {settings['dtype']}. "
        "Speeds are relative to plain decoding; the best fixed length is in brackets.",
        table([*head, "best fixed length", *names.values()], rows),
    ]


def ems_sd(results: Results) -> list[str]:
    settings, entries = results["settings"], results["entries"]
    titles = {"tokens_per_s": "Whole run", "live_tokens_per_s": "All samples live"}
    parts = [
        f"{subject(settings)}, drafts `{settings['draft']}`, {settings['max_new_tokens']} new "
        f"tokens. Medians of {settings['repeats']} runs and their range, tokens/s, speed over "
        "plain decoding (`greedy`) in brackets."
    ]
    for which, title in titles.items():
        rows = []
        for entry in entries:
            speeds = {name: of[which] for name, of in entry["methods"].items()}
            over = lambda of: f" ({of['speed_up']:.2f})" if "speed_up" in of else ""
            cells = [
                f"{of['median']:.0f} [{of['min']:.0f}, {of['max']:.0f}]{over(of)}"
                for of in speeds.values()
            ]
            rows.append([entry["batch"], f"{entry['mean_prompt_tokens']:.0f}", *cells])
        parts += [
            f"{title}:",
            table(["batch", "mean prompt tokens", *settings["methods"]], rows),
        ]
    rows = [
        [
            entry["batch"],
            name,
            number(of["mean_acceptance_length"]),
            number(of["padding_ratio"]["inputs"]),
            number(of["padding_ratio"]["kv"]),
            number(of["step_ms"]),
            number(of["of_floor"]),
            number(of["memory_bytes"] and of["memory_bytes"] / 2**30, 1),
            number(of["compile_s"], 0),
        ]
        for entry in entries
        for name, of in entry["methods"].items()
    ]
    head = ["batch", "method", "mean acceptance length", "padding of inputs", "padding of KV"]
    head += ["step ms", "step / floor", "memory GiB", "compilation s"]
    return [*parts, "Padding of the whole run, and steps with all samples live:", table(head, rows)]


def peers(results: Results) -> list[str]:
    settings, rows = results["settings"], []
    libraries = settings["libraries"]
    for entry in results["entries"]:
        speed = {(of["library"], of["method"]): of["tokens_per_s"] for of in entry["runs"]}
        for method in dict.fromkeys(method for _, method in speed):
            cells = [number(speed.get((library, method)), 0) for library in libraries]
            rows.append([entry["batch"], f"{entry['mean_prompt_tokens']:.0f}", method, *cells])
    heads = [f"{library}, tokens/s" for library in libraries]
    return [
        f"{subject(settings)}, {settings['max_new_tokens']} new tokens, medians of "
        f"{settings['repeats']} runs, prefill excluded.",
        table(["batch", "mean prompt tokens", "drafts", *heads], rows),
    ]


def prompts(results: Results) -> list[str]:
    rows = []
    entries = [*results["entries"], *results.get("overall", [])]
    for entry in sorted(entries, key=lambda entry: entry["batch"]):
        for name, of in entry["drafters"].items():
            speed = [number(of["tokens_per_s"], 0), number(of["speed"])]
            rows.append(
                [
                    entry["batch"],
                    entry.get("category", "overall"),
                    entry["prompts"],
                    name,
                    number(of["tokens_per_step"]),
                    f"{of['acceptance_rate']:.1%}",
                    number(of["first_token_ms"], 1),
                    *speed,
                ]
            )
    settings = results["settings"]
    chosen = f"temperature {settings['temperature']:g}" if settings["temperature"] else "greedy"
    what = "Embedded pair" if "shape" in settings else f"`{settings['model']}`"
    if settings.get("draft_model") is not None:
        what += f", draft model `{settings['draft_model']}`"
    head = ["batch", "category", "prompts", "drafts", "tokens/step", "accepted", "first token, ms"]
    return [
        f"{what}, {settings['dtype']}, {chosen}, at most {settings['max_new_tokens']} new tokens "
        f"of each turn, medians of {settings['repeats']} runs, prefill included.",
        table([*head, "tokens/s", "over plain"], rows),
    ]


def subject(settings: Results) -> str:
    """The models of `emsjax bench ems-sd` and `emsjax bench peers`."""
    if "shape" in settings:
        what = f"Shape of {settings['shape']}, random weights, scripted to output a known text"
        what += f", draft model {settings['draft_shape']}"
        if "acceptance" in settings:
            odds = ", ".join(f"{name} {of}" for name, of in settings["acceptance"].items())
            what += f", acceptance: {odds}"
    else:
        what = f"`{settings['model']}`"
        if settings["draft_model"] is not None:
            what += f", draft model `{settings['draft_model']}`"
    return f"{what}, {numbers_of(settings)}"


def drafters(results: Results) -> list[str]:
    settings, rows = results["settings"], []
    if "shape" in settings:
        what = "The embedded pair"
    else:
        what = f"`{settings['model']}`, draft model `{settings['draft_model']}`"
    for entry in results["entries"]:
        for name, of in entry["drafters"].items():
            rows.append(
                [
                    entry["batch"],
                    name,
                    f"{of['tokens_per_s']:.0f}",
                    number(of["of_best"], 3),
                    number(of["tokens_per_step"]),
                    f"{of['acceptance_rate']:.1%}",
                    number(of["step_ms"]),
                ]
            )
    head = ["batch", "drafts", "tokens/s", "of the best source alone", "tokens per step"]
    return [
        f"{what}, {numbers_of(settings)}, {settings['max_new_tokens']} new tokens, a draft model's "
        f"limit {settings['draft_tokens']}; medians of {settings['repeats']} repeats.",
        table([*head, "accepted", "ms of a step"], rows),
    ]


def groups(results: Results) -> list[str]:
    settings = results["settings"]
    rows = [
        [
            f"{of['groups']} x {of['size']}",
            of["slots"],
            *(f"{of['tokens_per_s'][which]:.0f}" for which in ("min", "median", "max")),
        ]
        for of in results["entries"]
    ]
    return [
        f"Shape of {settings['shape']}, scripted, {numbers_of(settings)}; {settings['prompts']} "
        f"prompts, {settings['max_new_tokens']} new tokens each, {settings['batch_size']} slots "
        f"altogether on {settings['devices']} devices, {settings['repeats']} runs.",
        table(["groups x devices", "slots of each", "least", "median", "most tokens/s"], rows),
    ]


def refill(results: Results) -> list[str]:
    settings = results["settings"]
    rows = [
        [
            run["side"],
            number(run["seconds"], 2),
            number(run["tokens_per_s"], 0),
            run["model_calls"],
            f"{run['idle_share']:.1%}" if "idle_share" in run else None,
        ]
        for run in results["runs"]
    ]
    parts = [
        f"Shape of {settings['model']}, scripted, {settings['dtype']}, {settings['prompts']} "
        f"prompts of {settings['shortest']} to {settings['longest']} tokens, "
        f"{settings['max_new_tokens']} new ones each, batch {settings['batch_size']}.",
        table(["", "seconds", "tokens/s", "model calls", "idle slots"], rows),
    ]
    if "speedup" in results:
        ratio = number(results["speedup"], 3)
        parts.append(f"Slots that refill are {ratio} times as fast (best of both).")
    if "prompt_share" in results:
        share = f"{results['prompt_share']:.0%}"
        parts.append(f"The prompts alone, with one new token each, take {share} of static batches.")
    return parts


def divergences(results: Results) -> list[str]:
    rows = []
    for of in results["entries"]:
        shares = [one["share"] for one in of["divergences"]]
        rows.append(
            [
                of["model"],
                of.get("numerics", "fast"),
                of["batch"],
                of["drafter"],
                number(of["mean_acceptance_length"]),
                len(shares),
                number(max(shares, default=None)),
            ]
        )
    settings = results["settings"]
    head = ["model", "numerics", "batch", "drafts", "mean acceptance length"]
    head.append("sequences that differ")
    return [
        f"{settings['dtype']}, {settings['max_new_tokens']} new tokens.",
        table([*head, "largest margin / near-tie margin"], rows),
    ]


def invariance(results: Results) -> list[str]:
    settings, names = results["settings"], ("model", "numerics", "calls", "rows", "differing_rows")
    rows = [
        [f"{of[name]:,}" if name == "rows" else of[name] for name in names]
        for of in results["entries"]
    ]
    return [
        f"{settings['dtype']}, {settings['layers']} layers, {settings['context']} tokens, calls of "
        f"{settings['row_counts']} rows and {settings['batches']} random batches.",
        table(["model", "numerics", "calls", "rows compared", "rows that differ"], rows),
    ]


def quality(results: Results) -> list[str]:
    settings, entries = results["settings"], results["entries"]
    formats = [
        [of["format"], f"{of['bits_per_byte']:.4f}", f"{of['ratio'] - 1:+.2%}"]
        for of in entries
        if "format" in of
    ]
    accepted = [
        [of["drafter"], f"{of['acceptance_rate']:.1%}", number(of["mean_acceptance_length"])]
        for of in entries
        if "drafter" in of
    ]
    return [
        f"{settings['dtype']}, {settings['passages']} passages of at most {settings['tokens']} "
        f"tokens, {settings['bytes']:,} bytes; drafts of {settings['draft_tokens']} tokens.",
        table(["format", "bits per byte", "beside wide numbers"], formats),
        table(["drafts of", "accepted", "mean acceptance length"], accepted),
    ]


def distillation(results: Results) -> list[str]:
    settings, found = results["settings"], results["results"]
    parameters = found["parameters"]
    config = found["config"].get("transformer_layer_config", found["config"])
    layers = config["num_hidden_layers"]
    start = settings["draft_model"] or settings["start"] or "random weights"
    compared = settings.get("compare_with")
    losses = ", ".join(f"{name} {weight:g}" for name, weight in settings["losses"].items())
    continuations = "no continuations by the target"
    if settings["generations"]:
        at = f"at temperature {settings['temperature']:g}"
        continuations = f"{settings['generations']} continuations by the target, {at}"
    rows = []
    for name in ("plain", "before", "after", *(["compared"] if compared else [])):
        of = found[name]
        rate = None if name == "plain" else number(of["acceptance_rate"], 3)
        positions = [number(share, 3) for share in of["by_position"]]
        positions += [None] * (settings["draft_tokens"] - len(positions))
        speed = number(of["tokens_per_s"], 0)
        label = f"compared: `{compared}`" if name == "compared" else name
        rows.append([label, rate, *positions, number(of["mean_acceptance_length"]), speed])
    positions = [f"position {i + 1}" for i in range(settings["draft_tokens"])]
    return [
        f"`--kind {settings.get('kind', 'draft-model')}`: "
        f"{layers} layer{'s' if layers > 1 else ''} of width {config['hidden_size']}, "
        f"{parameters['draft']:,} parameters, for a target of {parameters['target']:,} "
        f"(`{settings['target']}`). Start: {start}. "
        f"{settings['steps']} steps of {settings['batch_size']} x {settings['sequence_length']} "
        f"tokens, {losses}; {continuations}. Evaluated on "
        f"{settings['held_out']} texts, {settings['max_new_tokens']} greedy tokens each.",
        table(["", "acceptance rate", *positions, "mean acceptance length", "tokens/s"], rows),
    ]
