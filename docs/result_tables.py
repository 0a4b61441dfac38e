"""Tables of each kind of results in `benchmarks/`, in Markdown, for the benchmarks page."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Results = Mapping[str, Any]


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table; None is an empty cell."""
    cells = [head, ["---:"] * len(head), *rows]
    shown = lambda cell: "" if cell is None else str(cell).replace("|", r"\|")
    return "\n".join("| " + " | ".join(map(shown, row)) + " |" for row in cells)


def number(value: float | None, digits: int = 2) -> str | None:
    return None if value is None else f"{value:.{digits}f}"


def step(results: Results) -> list[str]:
    settings, rates = results["settings"], results["rates"]["reference"]
    rows = [
        [
            f"{of['batch']} x {of['rows_per_sample']}",
            number(of["best_ms"]),
            number(of["median_ms"]),
            number(of["floor_ms"]["reference"]),
            number(of["best_ratio"]["reference"]),
        ]
        for of in results["shapes"]
    ]
    return [
        f"Shape of {settings['model']}, random weights, {settings['dtype']}, mean context "
        f"{settings['context']} tokens, attention `{settings['attention']}`, "
        f"{settings['repetitions']} repetitions. Floor: {rates['read_tb_per_s']:g} TB/s, "
        f"{rates['matmul_tflop_per_s']:g} TFLOP/s.",
        table(["samples x rows of each", "best ms", "median ms", "floor ms", "best / floor"], rows),
    ]


def products(results: Results) -> list[str]:
    entries = results["products"]
    names = list(dict.fromkeys(name for of in entries for name in of["implementations"]))
    rows = [
        [
            f"{of['product']}, {of['inputs']} x {of['outputs']}",
            of["rows"],
            *(number(of["implementations"].get(name, {}).get("median_us"), 1) for name in names),
        ]
        for of in entries
    ]
    return [
        "OPT-6.7B's weights, bfloat16. Median microseconds, launches hidden.",
        table(["product", "rows", *(f"`{name}`" for name in names)], rows),
    ]


def kernels(results: Results) -> list[str]:
    names, settings = list(results["implementations"]), results["settings"]
    median = lambda of: [number(of.get(name, {}).get("median_us"), 1) for name in names]
    groups: dict[tuple[str, str], list[list[Any]]] = {}
    for of in results["decode"]:
        title = (
            f"{of['model']} ({of['heads']} heads of {of['head_dim']}), committed tokens of a "
            f"sample: {of['committed']}"
        )
        row = [of["batch"], of["rows"], *median(of["implementations"])]
        groups.setdefault(title, []).append(row)
    head = [f"{name}, us" for name in names]
    parts = [f"Medians of {settings['repetitions']} repetitions, bfloat16. Attention in decoding:"]
    for title, rows in groups.items():
        parts += [title, table(["batch", "rows of a sample", *head], rows)]
    rows = [
        [of["model"], of["batch"], of["packed_rows"], *median(of["implementations"])]
        for of in results["prefill"]
    ]
    parts += ["Attention in prefill:", table(["model", "batch", "packed rows", *head], rows)]
    written = dict.fromkeys(name for of in results["updates"] for name in of["implementations"])
    rows = [
        [of["batch"], of["rows"]]
        + [number(of["implementations"][name]["median_us"], 1) for name in written]
        for of in results["updates"]
    ]
    layers = ", ".join(str(n) for n in dict.fromkeys(of["layers"] for of in results["updates"]))
    head = ["batch", "packed rows", *(f"{name}, us" for name in written)]
    return [*parts, f"Commit of keys and values to all {layers} layers:", table(head, rows)]


def overheads(results: Results) -> list[str]:
    settings, rows = results["settings"], []
    for of in results["comparisons"]:
        (base, base_ms), (other, other_ms) = (
            (name, number(times["best_ms"])) for name, times in of["times"].items()
        )
        rows.append(
            [
                of["comparison"],
                " x ".join(map(str, of["shape"])),
                f"{base}: {base_ms}",
                f"{other}: {other_ms}",
                number(of["ratio"], 3),
                number(of.get("draft_step_ms")),
            ]
        )
    sampling = settings["sampling"]
    head = ["comparison", "samples x rows of each", "ms", "ms", "ratio", "ms of a draft step"]
    return [
        f"Shape of {settings['model']}, draft model {settings['draft_model']}, random weights, "
        f"{settings['dtype']}, mean context {settings['context']} tokens, best of "
        f"{settings['repetitions']}. Sampling with temperature {sampling['temperature']} and "
        f"top-p {sampling['top_p']}.",
        table(head, rows),
    ]


def profile(results: Results) -> list[str]:
    costs, fit, of = results["costs"], results["fit"], results["subject"]
    describe = lambda shape: (
        "none"
        if shape is None
        else f"{shape['num_hidden_layers']} layers of width {shape['hidden_size']}"
    )
    parts = [
        f"Target: {describe(of['model'])}; draft model: {describe(of['draft_model'])}; "
        f"{of['dtype']}, mean context {results['settings']['context']} tokens. Measured in "
        f"{results['seconds']:.0f} s. The cost model is off by {fit['mean_error']:.1%} on average "
        f"and {fit['max_error']:.1%} at most. A cached token takes {1e6 * costs['token_ms']:.0f} "
        f"ns, and {costs['reread']:.0%} of that again for every 16 rows of its sample after the "
        "first.",
        table(["packed rows", "ms"], [[n, number(ms)] for n, ms in costs["row_ms"].items()]),
    ]
    if of["draft_model"] is not None:
        rows = [[n, number(ms)] for n, ms in costs["draft_ms"].items()]
        parts.append(table(["samples", "ms of a draft step"], rows))
    return parts


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
        "All but plain decoding is speed over that of plain decoding, with the length in brackets.",
        table([*head, "best fixed length", *names.values()], rows),
    ]


def ems_sd(results: Results) -> list[str]:
    settings, entries = results["settings"], results["entries"]
    titles = {"tokens_per_s": "Whole run", "live_tokens_per_s": "All samples live"}
    parts = [
        f"{subject(settings)}, drafts `{settings['draft']}`, {settings['max_new_tokens']} new "
        f"tokens. Medians of {settings['repeats']} runs, tokens/s, speed over plain decoding "
        "(`greedy`) in brackets."
    ]
    for which, title in titles.items():
        rows = []
        for entry in entries:
            speeds = {name: of[which] for name, of in entry["methods"].items()}
            over = lambda of: f" ({of['speed_up']:.2f})" if "speed_up" in of else ""
            cells = [f"{of['median']:.0f}{over(of)}" for of in speeds.values()]
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


def subject(settings: Results) -> str:
    """What `emsjax bench ems-sd` and `emsjax bench peers` decode."""
    if "shape" in settings:
        what = f"Shape of {settings['shape']}, random weights that say a known text"
        what += f", draft model {settings['draft_shape']}"
        if "acceptance" in settings:
            odds = ", ".join(f"{name} {of}" for name, of in settings["acceptance"].items())
            what += f", acceptance: {odds}"
    else:
        what = f"`{settings['model']}`"
        if settings["draft_model"] is not None:
            what += f", draft model `{settings['draft_model']}`"
    return f"{what}, {settings['dtype']}"


def buckets(results: Results) -> list[str]:
    settings, rows = results["settings"], []
    for entry in results["batches"]:
        for of in entry["points"]:
            times = (number(of["times"][side]["best_ms"]) for side in ("bucketed", "exact"))
            rows.append([entry["batch"], of["rows"], f"{of['share']:.0%}", of["bucket"], *times])
    ratios = [[entry["batch"], number(entry["ratio"], 3)] for entry in results["batches"]]
    head = ["batch", "rows", "share of steps", "bucket", "bucketed, ms", "exact, ms"]
    return [
        f"Shape of {settings['model']}, random weights, {settings['dtype']}, mean context "
        f"{settings['context']} tokens, best of {settings['repetitions']}.",
        table(["batch", "bucketed / exact"], ratios),
        table(head, rows),
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


def first_call(results: Results) -> list[str]:
    settings = results["settings"]
    drafts = settings["drafter"]
    if drafts == "model":
        drafts = f"draft model {settings['draft_model']}"
    names = {"cold": "empty", "warm": "as the first process left it"}
    rows = [
        [title, *(number(seconds, 1) for seconds in results[name]["calls_s"])]
        for name, title in names.items()
        if name in results
    ]
    return [
        f"Shape of {settings['model']}, random weights, bfloat16, drafts: {drafts}, batch "
        f"{settings['batch_size']}.",
        table(["compilation cache", "first call, s", "second call, s"], rows),
    ]


def divergences(results: Results) -> list[str]:
    rows = []
    for of in results["entries"]:
        shares = [one["share"] for one in of["divergences"]]
        rows.append(
            [
                of["model"],
                of["batch"],
                of["drafter"],
                number(of["mean_acceptance_length"]),
                len(shares),
                number(max(shares, default=None)),
            ]
        )
    settings = results["settings"]
    head = ["model", "batch", "drafts", "mean acceptance length", "sequences that part"]
    return [
        f"{settings['dtype']}, {settings['max_new_tokens']} new tokens.",
        table([*head, "largest margin, of a near-tie's"], rows),
    ]


def training(results: Results) -> list[str]:
    settings, rows = results["settings"], []
    for of in results["entries"]:
        rows.append(
            [
                ", ".join(f"{name} {weight:g}" for name, weight in of["losses"].items()),
                number(1e3 * statistics.median(of["steps_s"]), 1),
                number(of["tokens_per_s"], 0),
                number(of["tflop_per_s"], 1),
                f"{of['share']:.1%}",
            ]
        )
    head = ["losses", "median step, ms", "tokens/s", "TFLOP/s", "of a large product's"]
    return [
        f"Shape of {settings['model']}, target {settings['target']}, random weights, "
        f"{settings['dtype']}, {settings['batch_size']} sequences of "
        f"{settings['sequence_length']} tokens.",
        table(head, rows),
    ]


def distillation(results: Results) -> list[str]:
    settings, found = results["settings"], results["results"]
    config, parameters = found["config"], found["parameters"]
    losses = ", ".join(f"{name} {weight:g}" for name, weight in settings["losses"].items())
    continuations = "no continuations by the target"
    if settings["generations"]:
        at = f"at temperature {settings['temperature']:g}"
        continuations = f"{settings['generations']} continuations by the target, {at}"
    rows = []
    for name in ("plain", "before", "after"):
        of = found[name]
        rate = None if name == "plain" else number(of["acceptance_rate"], 3)
        positions = [number(share, 3) for share in of["by_position"]]
        positions += [None] * (settings["draft_tokens"] - len(positions))
        speed = number(of["tokens_per_s"], 0)
        rows.append([name, rate, *positions, number(of["mean_acceptance_length"]), speed])
    positions = [f"position {i + 1}" for i in range(settings["draft_tokens"])]
    return [
        f"{config['num_hidden_layers']} layers of width {config['hidden_size']}, "
        f"{parameters['draft']:,} parameters, for a target of {parameters['target']:,} "
        f"(`{settings['target']}`). Start: {settings['draft_model'] or settings['start']}. "
        f"{settings['steps']} steps of {settings['batch_size']} x {settings['sequence_length']} "
        f"tokens, {losses}; {continuations}. Evaluated on "
        f"{settings['held_out']} texts, {settings['max_new_tokens']} greedy tokens each.",
        table(["", "acceptance rate", *positions, "mean acceptance length", "tokens/s"], rows),
    ]
