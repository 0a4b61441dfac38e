"""Figures in the README and in pages: what each says of the results, in Markdown.

A figure is a function of the results that gives its paragraphs, lists, tables and commands: see
`measured`.
"""

from collections.abc import Callable, Sequence

from markdown_tables import number, table
from read_results import (
    Read,
    acceptance_length,
    batches,
    listed,
    median,
    ms_of,
    percent,
    ratio_of,
    shapes,
)

from emsjax.benchmarks.rates import Rates
from emsjax.benchmarks.shapes import MODELS
from emsjax.benchmarks.step import floor_ms

ROWS = "samples x rows"
SIZES, SHOWN = (1, 8, 24, 64), (1, 4, 8, 16, 24, 32, 64)  # batch sizes
NUMERICS = ("invariant", "fast")
METHODS = {"plain": "plainly", "prompt-lookup": "by n-grams", "draft-model": "with a draft model"}
NO_KERNELS = "T4"
# TB/s and TFLOP/s in 16 bits of NVIDIA's data sheets.
RATES = {NO_KERNELS: (0.32, 65), "A100 80GB": (2.04, 312), "H100 SXM": (3.35, 989)}


def speed(read: Read) -> list[str]:
    results = read["ems-sd"]
    settings, entries = results["settings"], results["entries"]
    lengths = [acceptance_length(of) for of in entries]
    rows = []
    for entry in entries:
        if entry["batch"] not in SHOWN:
            continue
        of = {name: method["tokens_per_s"] for name, method in entry["methods"].items()}
        ratios = [number(one["speed_up"]) for name, one in of.items() if name != "greedy"]
        rows.append([entry["batch"], f"{of['greedy']['median']:,.0f}", *ratios])
    return [
        f"Tokens per second relative to plain decoding: the shape of OPT-6.7B in "
        f"{settings['dtype']}, scripted drafts (mean acceptance length {min(lengths)} to "
        f"{max(lengths)}), greedy, {settings['max_new_tokens']} new tokens, prefill excluded, "
        f"medians of {settings['repeats']} runs ({read.where()}). All methods run the same "
        'kernels; "padded" pads both the rows and the KV cache.',
        table(["batch", "plain", "padded", "padded rows", "padded cache", "EMS-SD"], rows),
        read.command(),
    ]


def narrow(read: Read) -> list[str]:
    heads = {"step-int8": "int8, int8 cache", "step-fp8": "fp8, fp8 cache", "step-int4": "int4"}
    wide, *others = (shapes(read[name]) for name in ("step", *heads))
    read.check_one_gpu()
    rows = []
    for shape, of in wide.items():
        best = [other[shape]["best_ms"] for other in others]
        beside = [f"{ms:.2f} ({ms / of['best_ms']:.2f})" for ms in best]
        rows.append([shape, number(of["best_ms"]), *beside])
    one = others[0]["1 x 1"]
    share = lambda begin: percent(ms_of(one["profile"]["top"], begin) / one["best_ms"])
    return [
        "The least milliseconds of a step of OPT-6.7B's shape at 900 tokens of context, and in "
        f"brackets the ratio to bfloat16 ({read.where()}):",
        table([ROWS, "bfloat16", *heads.values()], rows),
        read.command(),
        f"Half the bytes do not take half the time. Of the int8 step at 1 x 1, products with "
        f"narrow weights take {share('narrow_linear')}, attention {share('ragged_attention')}, "
        f"norms {share('add_layer_norm')}, launches that round rows {share('round_rows')}, and "
        f"the head in bfloat16 {share('gemm_fusion')}. int4 is for few rows: with 192 its "
        "arithmetic costs more than the bytes that it saves.",
    ]


def narrow_decoding(read: Read) -> list[str]:
    wide, narrow = (batches(read[name]) for name in ("ems-sd", "ems-sd-int8"))
    read.check_one_gpu()
    rows = [
        [n, f"{median(wide[n]):,.0f}", f"{median(of):,.0f}", number(median(of) / median(wide[n]))]
        for n, of in narrow.items()
    ]
    return [
        "EMS-SD of OPT-6.7B's shape with drafts like prompt lookup's, weights and cache in int8 "
        f"beside bfloat16, in tokens/s ({read.where()}):",
        table(["batch", "bfloat16", "int8", "ratio"], rows),
        read.command(),
    ]


def self_drafting(read: Read) -> list[str]:
    drafting = batches(read["self-draft"])
    gains = [f"{of['tokens_per_s']['speed_up']:.2f} at batch {n}" for n, of in drafting.items()]
    return [
        "A bfloat16 model of OPT-6.7B's shape that drafts for itself in int4 decodes as many times "
        f"as fast as plainly: {listed(gains)}, where its draft tokens are accepted as often as the "
        f"embedded target's ({read.where()}).",
        read.command(),
    ]


def devices(read: Read) -> list[str]:
    one, two = (shapes(read[f"step-opt-13b{of}"]) for of in ("", "-two-devices"))
    rows = [
        [shape, *(number(of[shape]["best_ms"]) for of in (one, two)), ratio_of(two, one, shape)]
        for shape in one
    ]
    whole, split = (batches(read[f"ems-sd-opt-13b{of}"])[24] for of in ("", "-two-devices"))
    profile = two["1 x 1"]["profile"]
    # Of both devices together.
    taken = {name: of["ms"] / 2 for name, of in profile["classes"].items()}
    kernels = sum(taken.values())
    return [
        f"The least milliseconds of a step of OPT-13b's shape at contexts of 900 tokens, in "
        f"bfloat16 ({read.where('one and two')}):",
        table([ROWS, "one", "two", "ratio"], rows),
        f"EMS-SD at batch 24, with drafts like prompt lookup's, decodes {median(whole):,.0f} "
        f"tokens/s on one and {median(split):,.0f} on two, {median(split) / median(whole):.2f} "
        f"times as many; while all samples are live {median(whole, 'live_tokens_per_s'):,.0f} and "
        f"{median(split, 'live_tokens_per_s'):,.0f}. At 1 x 1 kernels take {kernels:.1f} ms of "
        f"each device's step: products {taken['gemm']:.1f}, attention {taken['attention']:.1f}, "
        f"norms with the sums over devices {taken['norm']:.1f}, all others "
        f"{taken['commit'] + taken['copy'] + taken['rest']:.1f}.",
        read.command(),
    ]


def large(read: Read) -> list[str]:
    names = {
        "step-opt-66b": ("OPT-66b, bfloat16", 1),
        "step-opt-66b-int8": ("OPT-66b, int8 weights and cache", 1),
        "step-opt-66b-two-devices": ("OPT-66b, bfloat16", 2),
        "step-llama-3.1-70b-two-devices": ("Llama 3.1 70B, bfloat16", 2),
    }
    columns = list(shapes(read["step-opt-66b-two-devices"]))
    rows = []
    for name, (title, count) in names.items():
        of = shapes(read[name])
        cells = [
            f"{of[shape]['best_ms']:.1f} ({of[shape]['best_ratio']['reference']:.2f})"
            if shape in of
            else None
            for shape in columns
        ]
        rows.append([title, count, *cells])
    return [
        "The least milliseconds of a step of larger shapes, and in brackets the ratio to the "
        f"floor ({read.where('one and two')}):",
        table(["shape", "devices", *columns], rows),
        read.command(),
    ]


def groups(read: Read) -> list[str]:
    results = read["groups-opt-13b-two-devices"]
    rows = [
        [f"{of['groups']} x {of['size']}", of["slots"], f"{median(of):,.0f}"]
        for of in results["entries"]
    ]
    settings = results["settings"]
    return [
        f"{settings['prompts']} prompts of OPT-13b's shape with {settings['batch_size']} slots "
        f"altogether, prefill included ({read.where('two')}):",
        table(["groups x devices", "slots of each", "tokens/s"], rows),
        read.command(),
    ]


def invariant(read: Read) -> list[str]:
    fast, same = (batches(read[f"ems-sd-qwen3-8b{of}"]) for of in ("", "-invariant"))
    rows = [
        [
            n,
            f"{median(fast[n]):,.0f}",
            f"{median(of):,.0f}",
            percent(1 - median(of) / median(fast[n]), 1),
            percent(of["prefill_s"] / fast[n]["prefill_s"] - 1),
        ]
        for n, of in same.items()
    ]
    return [
        "Whole runs of EMS-SD with Qwen3-8B's shape and drafts like prompt lookup's, in bfloat16 "
        f"and tokens/s ({read.where()}):",
        table(["batch", "fast", "invariant", "cost", "cost of prefill"], rows),
        read.command(),
    ]


def found(read: Read) -> list[str]:
    entries = read["divergences"]["entries"]
    same, fast = ([of for of in entries if of["numerics"] == name] for name in NUMERICS)
    count = lambda of: sum(len(one["divergences"]) for one in of)
    return [
        "Random weights are the hardest case, as their tokens are often nearly tied. With "
        f"OPT-1.3b's shape ({read.where()}), sequences were decoded by prompt lookup, with and "
        "without refilled slots, by a draft model, and by a replay of plain decoding's own tokens "
        f"with wrong ones among them. With invariant numerics {count(same)} of "
        f"{sum(of['batch'] for of in same):,} sequences, {sum(of['tokens'] for of in same):,} "
        f"tokens, differ from plain decoding. With fast ones {count(fast)} of "
        f"{sum(of['batch'] for of in fast):,} do at some token, each at a near-tie.",
        read.command(),
    ]


def rows_apart(read: Read) -> list[str]:
    rows = read["invariance"]["entries"]
    names = listed([of["model"] for of in rows])
    return [
        "One sequence was computed in calls of different numbers of rows, in calls after some "
        "cached tokens and in random batches, with one layer and the head of the shapes "
        f"{names} ({read.where()}). Of {sum(of['rows'] for of in rows):,} rows "
        f"{sum(of['differing_rows'] for of in rows)} had other keys, values, hidden states, "
        "logits or log-probabilities.",
        read.command(),
    ]


def margins(read: Read) -> list[str]:
    entries = read["divergences"]["entries"]
    largest = max(of["share"] for entry in entries for of in entry["divergences"])
    return [
        f"With OPT-1.3b's shape and random weights ({read.where()}) the float32 margins of "
        f"near-ties were at most {largest:.2f} of the limit of a near-tie.",
    ]


def profile(read: Read) -> list[str]:
    seconds = read["profile"]["seconds"]
    return [
        "This reads the models' configurations, not their weights, and decodes with random "
        f"weights; with these two models it took {seconds:.0f} s ({read.where()})."
    ]


def floors(read: Read) -> list[str]:
    names = ("step", "step-llama-3.1-8b", "step-qwen3-8b", "step-opt-13b")
    columns = list(shapes(read["step-opt-13b"]))
    rows = []
    for name in names:
        of = shapes(read[name])
        ratios = [number(of[shape]["best_ratio"]["reference"]) for shape in columns]
        rows.append([read[name]["settings"]["model"], *ratios])
    return [
        f"Steps in bfloat16 as multiples of their floors, by {ROWS} ({read.where()}):",
        table(["shape", *columns], rows),
    ]


def summary(read: Read) -> list[str]:
    """One item on each result of which a sentence can tell the essence."""
    padded, ems = (batches(read["ems-sd"], method) for method in ("vanilla", "ems"))
    qwen = batches(read["ems-sd-qwen3-8b"])
    gain = lambda of, which: listed([f"{of[n][which]['speed_up']:.1f}" for n in SIZES])
    sizes = f"at batch {listed([str(n) for n in SIZES])}"
    over = listed([number(median(ems[n]) / median(padded[n])) for n in SIZES])
    refill, drafting = read["refill"], read["drafting"]["entries"]
    added: dict[str, list[float]] = {}
    for of in drafting:
        added.setdefault(of["source"], []).append(of["ratio"] - 1)
    costs = [
        f"`{name}` {percent(min(of), 1)} to {percent(max(of), 1)}" for name, of in added.items()
    ]
    alone, distilled = read["training"]["entries"]
    cold, warm = (read["first-call"][name]["calls_s"][0] for name in ("cold", "warm"))
    runs, again = read["manifest"]["runs"], shapes(read["step-again"])
    if runs["step"]["gpus"] == runs["step-again"]["gpus"]:
        raise ValueError("the steps were measured again on the same GPU")
    apart = [
        abs(again[shape]["best_ms"] / of["best_ms"] - 1)
        for shape, of in shapes(read["step"]).items()
    ]
    items = [
        f"*EMS-SD.* With OPT-6.7B's shape EMS-SD decodes {sizes} {gain(ems, 'tokens_per_s')} times "
        f"as many tokens per second as plain decoding, and {over} times as many as padding; while "
        f"all samples are live {gain(ems, 'live_tokens_per_s')} times as many as plain decoding.",
        f"*Qwen3-8B.* With this shape it is {gain(qwen, 'tokens_per_s')} times plain decoding's "
        f"speed {sizes}, and {gain(qwen, 'live_tokens_per_s')} times while all samples are live. "
        "Plain steps read fewer keys and values than OPT-6.7B's, so EMS-SD saves less of them.",
        f"*Slots that refill.* They are {refill['speedup']:.2f} times as fast as batches that end "
        f"with their last sequence. Prefill takes {percent(refill['prompt_share'])} of the time of "
        "these batches, and no order of steps reduces it.",
        f"*Drafting.* With Qwen3-8B's shape drafters add to a step: {'; '.join(costs)}.",
        f"*Training.* A draft model of OPT-125m's shape trains at {alone['tokens_per_s']:,.0f} "
        f"tokens/s, {alone['tflop_per_s']:.0f} TFLOP/s, {percent(alone['share'])} of a large "
        "bfloat16 product's rate. With the distribution of a target of OPT-1.3b's shape, which "
        f"reads the same tokens, it trains at {distilled['tokens_per_s']:,.0f} tokens/s.",
        f"*The first call.* With OPT-6.7B's shape it takes {cold:.0f} s, and {warm:.0f} s with a "
        "compilation cache that an earlier process filled.",
        "*Two GPUs.* The steps of OPT-6.7B's shape, measured again on another GPU of this kind, "
        f"differ by at most {percent(max(apart), 1)}. Compare only figures of one call.",
    ]
    return [f"All on {read.where()}.", *(f"- {item}" for item in items)]


def beside(read: Read) -> list[str]:
    gains: dict[str, list[str]] = {}
    for entry in read["peers"]["entries"]:
        speed: dict[str, dict[str, float]] = {}
        for of in entry["runs"]:
            speed.setdefault(of["method"], {})[of["library"]] = of["tokens_per_s"]
        for name, of in speed.items():
            if "transformers" in of:
                gain = of["emsjax"] / of["transformers"]
                gains.setdefault(name, []).append(f"{gain:.1f} times at batch {entry['batch']}")
    parts = [f"{METHODS[name]} {' and '.join(of)}" for name, of in gains.items()]
    return [
        "With OPT-6.7B's shape this library decodes as many times as fast as transformers "
        f"({read.where()}): {'; '.join(parts)}.",
        read.command(),
    ]


def expected(read: Read) -> list[str]:
    sizes = {"1 x 1": (1, 1), "8 x 8": (8, 8)}
    ratios = {shape: shapes(read["step"])[shape]["best_ratio"]["reference"] for shape in sizes}
    rows = []
    for name, (read_rate, matmul_rate) in RATES.items():
        rates = Rates(read_rate * 1e12, matmul_rate * 1e12)
        least = {
            shape: floor_ms(MODELS["opt-6.7b"], *of, 900, rates) for shape, of in sizes.items()
        }
        rows.append(
            [name, read_rate, matmul_rate]
            + [
                f"{ms:.1f}" + (f" ({ms * ratios[shape]:.1f})" if name != NO_KERNELS else "")
                for shape, ms in least.items()
            ]
        )
    head = ["GPU", "TB/s", "TFLOP/s", *(f"{shape}, ms" for shape in sizes)]
    return [
        "What to expect elsewhere: floors of a step of OPT-6.7B's shape in 16 bits at the rates of "
        "data sheets, and in brackets the time of a step that comes as near to its floor as on "
        f"{read.where()}. None of these was measured. The kernels do not run on a T4, where XLA "
        "computes all of it.",
        table(head, rows),
    ]


FIGURES: dict[str, Callable[[Read], Sequence[str]]] = {
    make.__name__.replace("_", "-"): make
    for make in (
        *(speed, narrow, narrow_decoding, self_drafting, devices, large, groups, invariant),
        *(found, rows_apart, margins, profile, floors, summary, beside, expected),
    )
}
