"""`emsjax bench prompts`: files of the field, turns, figures by category, output and errors."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from jsonl import assert_error

import emsjax
from emsjax import plotting
from emsjax.benchmarks import prompts, prompts_command
from emsjax.benchmarks.questions import Conversations, Questions, chosen
from emsjax.cli.main import main
from emsjax.records.prompts import Limits
from emsjax.terminal.models import load_tokenizer

NEW, POSITIONS = 8, 64
SPEC_BENCH = [
    {"question_id": 81, "category": "writing", "turns": ["x = 1", "def f(x):"]},
    {"question_id": 82, "category": "coding", "turns": ["for i in range(3):"]},
    {"question_id": 83, "category": "coding", "turns": ["a a a a a a"]},
    {"question_id": 84, "category": "writing", "turns": ["print('hello, world')"]},
]
SPEED_BENCH = [
    {"question_id": "0a", "category": "low_entropy", "sub_category": "x", "turns": ["a"]},
    {"question_id": "0b", "category": "mixed", "difficulty": 3, "turns": ["b"], "source": None},
]
DEEP_SPEC = [{"turns": ["a", "b"]}, {"turns": ["c"]}]


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("lines", "field", "categories"),
    [
        (SPEC_BENCH, "category", ["writing", "coding", "coding", "writing"]),
        (SPEED_BENCH, "category", ["low_entropy", "mixed"]),
        (SPEED_BENCH, "difficulty", ["all", "3"]),
        (DEEP_SPEC, "category", ["all", "all"]),
    ],
)
def test_files_of_the_field_are_read(tmp_path, lines, field, categories):
    found = list(Questions(write(tmp_path / "a.jsonl", lines), field))
    assert [list(one.turns) for one in found] == [line["turns"] for line in lines]
    assert [one.category for one in found] == categories


def test_the_first_questions_of_each_category_are_chosen(tmp_path):
    questions = Questions(write(tmp_path / "a.jsonl", SPEC_BENCH), "category")
    assert [one.line for one in chosen(questions, 1)] == [1, 2]
    assert [one.line for one in chosen(questions, None)] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[]", "a record must be a JSON object"),
        ('{"prompt": "a"}', 'missing field "turns"'),
        ('{"turns": []}', 'field "turns" must be a list of texts that is not empty'),
        ('{"turns": "a"}', 'field "turns" must be a list of texts that is not empty'),
        ('{"turns": ["a", 3]}', "turns[1] must be a text that is not empty"),
        ('{"turns": ["\\ud800"]}', "surrogates not allowed"),
        ('{"turns": ["a"], "category": ["b"]}', 'field "category" must be a text or a number'),
    ],
)
def test_a_bad_line_is_named(tmp_path, tiny_model, capsys, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"turns": ["a"]}}\n\n{line}\n')
    assert_error(
        capsys,
        main(["bench", "prompts", "--data", str(path), "--model", str(tiny_model)]),
        f"{path}, line 3: ",
        message,
    )


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<answer>"


@pytest.mark.parametrize(
    ("template", "firsts", "second"),
    [
        (None, ["</s>a", "</s>c"], "</s>a\nANSWER</s>a\nb"),
        (TEMPLATE, ["<user>a<answer>", "<user>c<answer>"], None),
    ],
)
def test_an_answer_stands_between_two_turns(tmp_path, tiny_model, template, firsts, second):
    questions = list(Questions(write(tmp_path / "a.jsonl", DEEP_SPEC), "category"))
    tokenizer = load_tokenizer(str(tiny_model), None, keep="last")
    tokenizer.chat_template = template
    second = second or "<user>a<assistant>ANSWER<user>a<answer><user>b<answer>"
    made = Conversations(tmp_path / "a.jsonl", tokenizer, 60, Limits(5, POSITIONS, 300))
    answer = lambda asked: ["ANSWER" + tokenizer.decode(one) for one in asked]
    found = made.prompts(questions, answer)
    assert [(of.question.line, of.turn) for of in found] == [(1, 0), (1, 1), (2, 0)]
    assert [tokenizer.decode(of.tokens) for of in found] == [firsts[0], second, firsts[1]]
    cut = Conversations(made.path, tokenizer, 4, made.limits).prompts(questions, answer)
    assert [len(of.tokens) for of in cut if of.truncated]
    assert all(len(of.tokens) <= 4 for of in cut)
    with pytest.raises(ValueError, match=r"a\.jsonl: .* records cannot be completed.* line 1"):
        Conversations(made.path, tokenizer, 60, Limits(64, 8, 300)).prompts(questions, answer)


def output(tokens, histogram, drafted):
    histogram, tokens = np.array(histogram), np.array(tokens)
    steps = histogram.sum(axis=1)
    stats = SimpleNamespace(
        num_emitted=np.full(len(tokens), tokens.shape[1]),
        num_steps=steps,
        num_drafted=np.array(drafted),
        num_accepted=histogram @ np.arange(histogram.shape[1]),
        accepted_histogram=histogram,
    )
    return SimpleNamespace(tokens=tokens, lengths=stats.num_emitted, stats=stats)


OUTPUTS = {
    "plain": [output([[5, 6, 7]] * 2, [[3]] * 2, [0, 0])],
    "right": [output([[5, 6, 7]] * 2, [[0, 1, 0], [1, 1, 0]], [2, 9])],
    "wrong": [output([[5, 6, 8]] * 2, [[0, 1, 0], [1, 1, 0]], [2, 9])],
}


class Scripted(prompts.Subject):
    """Decodes nothing: outputs and seconds are given."""

    def decode(self, name, batches):
        assert [len(batch) for batch in batches] == [2]
        return {"plain": 4.0, "right": 2.0, "wrong": 1.0}[name], OUTPUTS[name]

    def first_tokens(self, name, batches):
        return 0.5


def test_other_tokens_are_noticed_and_fillers_do_not_count():
    question = SimpleNamespace(line=1, category="c")
    prompt = SimpleNamespace(question=question, tokens=[1, 2], truncated=False)
    subject = Scripted(None, dict.fromkeys(OUTPUTS), 3)
    entry = prompts.measure(subject, [prompt], 2, 2)
    plain, right, wrong = entry["drafters"].values()
    assert [of["identical"] for of in (plain, right, wrong)] == [True, True, False]
    assert prompts.all_identical({"entries": [entry]}) is False
    assert (right["tokens"], right["emitted"], right["steps"], right["drafted"]) == (6, 3, 1, 2)
    assert (right["accepted_histogram"], right["by_position"]) == ([0, 1, 0], [1, 0])
    assert (right["tokens_per_s"], right["speed"], right["first_token_ms"]) == (3, 2, 500)


def test_drawn_drafts_are_not_compared():
    drawn = SimpleNamespace(drawn_vocab_size=9)
    greedy, sampled = (
        prompts.Subject(None, {"plain": None, "suffix": emsjax.SuffixDrafter(), "m": drawn}, 1, t)
        for t in (0, 0.5)
    )
    compared = [[of.is_comparable(name) for name in of.drafters] for of in (greedy, sampled)]
    assert compared == [[True, True, True], [True, True, False]]
    assert sampled.options(0)["key"] != sampled.options(1)["key"]


@pytest.fixture(scope="module")
def bench(tmp_path_factory, tiny_model):
    """One run of the command, with the calls of `generate` and what it prints."""
    folder, calls = tmp_path_factory.mktemp("prompts"), []
    data = write(folder / "spec.jsonl", SPEC_BENCH)
    found = SimpleNamespace(calls=calls, output=folder / "a.json", plot=folder / "a.png")
    found.options = ["bench", "prompts", "--data", str(data), "--model", str(tiny_model)]
    found.options += ["--drafters", "prompt-lookup,suffix", "--max-new-tokens", str(NEW)]
    found.options += ["--batch-sizes", "2", "--repeats", "1", "--commit", "abc"]
    found.options += ["--output", str(found.output), "--plot", str(found.plot)]

    def spy(model, given, *drafter, **options):
        out = emsjax.generate(model, given, *drafter, **options)
        calls.append((given, out, *drafter))
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompts, "generate", spy)
        found.code = main(found.options)
    found.results = json.loads(found.output.read_bytes())
    return found


def test_categories_have_their_prompts_and_add_up(bench):
    assert bench.code == 0
    assert (bench.results["commit"], bench.results["settings"]["group_by"]) == ("abc", "category")
    entries, (overall,) = bench.results["entries"], bench.results["overall"]
    named = [(of["batch"], of["category"], of["questions"], of["prompts"]) for of in entries]
    assert named == [(2, "writing", 2, 3), (2, "coding", 2, 2)]
    assert (overall["prompts"], overall["questions"], overall["truncated"]) == (5, 4, 0)
    for name, of in overall["drafters"].items():
        each = [entry["drafters"][name] for entry in entries]
        for field in ("tokens", "emitted", "steps", "drafted", "accepted", "batches"):
            assert of[field] == sum(one[field] for one in each)
        seconds = sum(one["seconds"][0] for one in each)
        assert of["tokens_per_s"] == pytest.approx(of["tokens"] / seconds)
        plain = overall["drafters"]["plain"]
        ratio = (of["tokens"] / seconds) / (plain["tokens"] / plain["seconds"][0])
        assert of["speed"] == pytest.approx(ratio)
        first = sum(one["first_token_s"][0] for one in each) / 3  # batches
        assert of["first_token_ms"] == pytest.approx(1e3 * first)
        assert of["identical"] is True


def test_the_second_turn_has_the_first_answer(bench, tiny_model):
    """The prompts are made anew here, without the benchmark's own code."""
    tokenizer = load_tokenizer(str(tiny_model), None)
    (asked, answered), *_ = bench.calls
    first = tokenizer("x = 1").input_ids
    assert asked == [first]
    answer = tokenizer.decode(answered.tokens[0, : answered.lengths[0]], skip_special_tokens=True)
    assert answer
    second = tokenizer(f"x = 1\n{answer}\ndef f(x):").input_ids
    other = tokenizer("print('hello, world')").input_ids
    assert [given for given, *_ in bench.calls[1:3]] == [[first, second], [other, first]]


def test_figures_are_those_of_generates_own_statistics(bench, tiny_model):
    tokenizer = load_tokenizer(str(tiny_model), None)
    model = emsjax.from_pretrained(tiny_model, dtype="float32")
    coding = [tokenizer(line["turns"][0]).input_ids for line in SPEC_BENCH[1:3]]
    drafter = emsjax.PromptLookup(search_generated=True)
    stats = emsjax.generate(model, coding, drafter, max_new_tokens=NEW).stats
    of = bench.results["entries"][1]["drafters"]["prompt-lookup"]
    assert of["tokens_per_step"] == pytest.approx(stats.mean_acceptance_length)
    assert of["tokens_per_step"] > 1
    assert of["acceptance_rate"] == pytest.approx(stats.acceptance_rate)
    histogram = stats.accepted_histogram.sum(axis=0)
    shares = [histogram[i:].sum() / stats.num_steps.sum() for i in range(1, len(histogram))]
    assert of["by_position"] == pytest.approx(shares)
    # All accepted tokens are at some position.
    assert sum(shares) * stats.num_steps.sum() == pytest.approx(stats.num_accepted.sum())


def test_a_finished_run_measures_nothing_and_shows_its_results(bench, monkeypatch, capsys):
    monkeypatch.setattr(prompts, "measure", None)
    assert main(bench.options) == 0
    table = [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert cells[0] == list(prompts_command.COLUMNS)
    assert set("".join(cells[1])) <= set("-:")
    shown = [(row[1], row[2], row[3]) for row in cells[2:]]
    groups = [("writing", "3"), ("coding", "2"), ("overall", "5")]
    names = ("plain", "prompt-lookup", "suffix")
    assert shown == [(*group, name) for group in groups for name in names]
    assert_error(
        capsys, main([*bench.options, "--temperature", "1"]), "holds results with other settings"
    )
    changed = json.loads(bench.output.read_bytes())
    changed["entries"][0]["drafters"]["suffix"]["identical"] = False
    bench.output.write_text(json.dumps(changed))
    assert main(bench.options) == 1
    assert "suffix (OTHER TOKENS)" in capsys.readouterr().out


def test_the_figure_has_bars_for_each_category_and_drafter(bench):
    assert bench.plot.read_bytes().startswith(b"\x89PNG")
    figure = plotting.prompts_figure(bench.results)
    assert [axes.get_ylabel() for axes in figure.axes] == [
        "mean acceptance length",
        "speed over plain decoding",
    ]
    entries = [*bench.results["entries"], *bench.results["overall"]]
    for axes, which in zip(figure.axes, ("tokens_per_step", "speed"), strict=True):
        labels = [label.get_text() for label in axes.get_xticklabels()]
        assert labels == ["writing", "coding", "overall"]
        bars = {of.get_label(): [bar.get_height() for bar in of] for of in axes.containers}
        names = ("prompt-lookup", "suffix")
        assert bars == {
            name: [entry["drafters"][name][which] for entry in entries] for name in names
        }
    with pytest.raises(ValueError, match="no entries"):
        plotting.prompts_figure({"entries": []})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--drafters", "suffix,other"], "--drafters: 'other' is none of prompt-lookup, suffix"),
        (["--drafters", "model"], "--drafters: model needs --draft-model"),
        (["--draft-cost", "1", "--profile", "a"], "--draft-cost and --profile exclude each other"),
        (["--plot", "a.xyz"], "--plot: a.xyz must end in"),
    ],
)
def test_options_that_do_not_go_together(tmp_path, tiny_model, capsys, options, message):
    data = write(tmp_path / "a.jsonl", DEEP_SPEC)
    given = ["bench", "prompts", "--data", str(data), "--model", str(tiny_model), *options]
    assert_error(capsys, main(given), message)
