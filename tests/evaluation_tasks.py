"""Tasks of the lm-evaluation-harness whose data are local files."""

import json
from collections.abc import Sequence
from pathlib import Path

from emsjax.embedded import PROMPTS

TEXTS = [entry["prompt"] for entry in json.loads(PROMPTS.read_text())]
CHOICES = """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: label
target_delimiter: ""
metric_list:
  - metric: acc
  - metric: acc_norm
"""
ROLLING = """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: word_perplexity
  - metric: bits_per_byte
"""
GENERATION = """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs:
  until: ["\\n\\n", "return"]
  max_gen_toks: 24
  do_sample: false
metric_list:
  - metric: exact_match
"""
TASKS = {"local_choices": CHOICES, "local_rolling": ROLLING, "local_generation": GENERATION}


def documents(texts: Sequence[str] = TEXTS) -> dict[str, list[dict]]:
    """The documents of each task, made from texts of several lines."""
    split = [text.rsplit("\n", 1) for text in texts if text.count("\n") > 1]
    ends = [f"\n{end}" for _, end in split]
    choices = []
    for i, (start, _) in enumerate(split):
        others = [ends[i], ends[i - 1], f"{ends[i - 2]} # no", " "]
        choices.append({"question": start, "choices": others, "label": 0})
    return {
        "local_choices": choices,
        # The last one has more tokens than the model has positions for.
        "local_rolling": [{"text": text} for text in (*texts, "\n".join(texts))],
        "local_generation": [{"question": text, "answer": ""} for text in texts],
    }


def write_tasks(folder: Path, texts: Sequence[str] = TEXTS) -> None:
    """Writes the tasks and their data to a folder for `--include-path`."""
    for name, own in documents(texts).items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(document) + "\n" for document in own))
        files = json.dumps({"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")})
        head = f"task: {name}\ndataset_path: json\ndataset_kwargs: {files}\ntest_split: test"
        (folder / f"{name}.yaml").write_text(head + TASKS[name])
