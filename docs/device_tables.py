"""Tables of steps and kernels on a device, for the benchmarks page."""

import statistics
from typing import Any

from markdown_tables import Results, number, numbers_of, table


def step(results: Results) -> list[str]:
    settings, rates = results["settings"], results["rates"]["reference"]
    rows = [
        [
            f"{of['batch']} x {of['rows_per_sample']}",
            number(of["best_ms"]),
            number(of["median_ms"]),
            span(of),
            number(of["floor_ms"]["reference"]),
            number(of["best_ratio"]["reference"]),
        ]
        for of in results["shapes"]
    ]
    head = ["samples x rows of each", "best ms", "median ms"]
    return [
        f"Shape of {settings['model']}, random weights, {numbers_of(settings)}, mean context "
        f"{settings['context']} tokens, attention `{settings['attention']}`, "
        f"{settings['repetitions']} repetitions. Floor: {rates['read_tb_per_s']:g} TB/s, "
        f"{rates['matmul_tflop_per_s']:g} TFLOP/s.",
        table([*head, "range of ms", "floor ms", "best / floor"], rows),
    ]


def span(of: Results) -> str:
    """The least and the most of the differences whose median is the time of a step."""
    (fewer, short), (more, long) = ((int(n), ms) for n, ms in of["runs_ms"].items())
    each = [(b - a) / (more - fewer) for a, b in zip(short, long, strict=True)]
    return f"{min(each):.2f} to {max(each):.2f}"


def drafting(results: Results) -> list[str]:
    settings, rows = results["settings"], []
    for of in results["entries"]:
        (_, given), (_, drafted) = of["times"].items()
        rows.append(
            [
                f"`{of['source']}`",
                f"{of['batch']} x {of['rows_per_sample']}",
                number(given["best_ms"], 3),
                number(drafted["best_ms"], 3),
                f"{of['ratio'] - 1:+.1%}",
            ]
        )
    narrow = settings.get("draft_quantize")
    of_drafters = f"; drafters' weights in {narrow}" if narrow else ""
    return [
        f"Shape of {settings['model']}, random weights, {numbers_of(settings)}; draft model of "
        f"{settings['draft_model']}'s shape{of_drafters}; mean context {settings['context']} "
        f"tokens, {settings['repetitions']} repetitions.",
        table(["source", "samples x rows of each", "without, ms", "with, ms", "adds"], rows),
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
