"""Two tasks of lm-evaluation-harness in a separate process: ``python THIS_FILE MODEL FOLDER WAYS``.

MODEL is a folder of transformers. FOLDER has the tasks; ``write_tasks`` writes them. A way is ``stock``, ``pool`` for
``longspan eval --tasks``, ``accelerated``, or the address of a server. The process writes FOLDER/results.json.
"""

import json
import os
import sys
import warnings
from pathlib import Path

TASKS = ("choices", "text")
LENGTH = 192  # tokens that a model reads in one call
SENTENCES = (
    "The old man looked at the river for a long while, and then he looked at it again",
    "A boat with one lamp came down the river, and the water was as black as ink",
    "He had counted the boats of every night since the war, and this one was the last",
    "Nobody answered when she called, so she walked on along the bank to the mill",
)


def write_tasks(folder):
    """Write a task of multiple choice and one of the perplexity of texts, with their data, into a folder."""
    # Each begins elsewhere: lm-eval's own model mistakes one split of a text for another split of it.
    rows = [
        {"text": one[i : 20 + i], "choices": [one[20 + i :], other[20:], " " + other[:9]], "label": i % 3}
        for i, (one, other) in enumerate(zip(SENTENCES * 3, SENTENCES[1:] + SENTENCES * 3, strict=False))
    ]
    texts = [{"text": ". ".join(SENTENCES[i:] + SENTENCES[:i]) + "."} for i in range(4)]
    about = {
        "choices": {
            "output_type": "multiple_choice",
            "doc_to_text": "{{text}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{label}}",
            "target_delimiter": "",
            "metric_list": [{"metric": name} for name in ("acc", "acc_norm")],
        },
        "text": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
        },
    }
    for name, data in zip(TASKS, (rows, texts), strict=True):
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in data), encoding="utf-8")
        task = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(file)}},
            "test_split": "test",
            **about[name],
        }
        (folder / f"{name}.yaml").write_text(json.dumps(task), encoding="utf-8")  # JSON is YAML


def judge(model, way):
    """The model as lm-eval takes it."""
    if way.startswith("http"):
        from lm_eval.models.openai_completions import LocalCompletionsAPI

        # Prompts of several lengths in one request.
        options = {"tokenizer_backend": "huggingface", "tokenizer": model, "max_length": LENGTH + 1, "batch_size": 3}
        return LocalCompletionsAPI(model=model, base_url=f"{way}/v1/completions", **options)
    if way == "pool":
        from longspan.cli.serve import loaded
        from longspan.serving import Pool
        from longspan.serving.lm_eval import Judge

        found, codec, *_ = loaded(model, "")
        return Judge(Pool(found, slots=5, queue=5, capacity=300), codec)
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from longspan.compat.transformers import LongspanForCausalLM, accelerate

    assert LongspanForCausalLM  # whose import lets AutoModelForCausalLM know it
    found = AutoModelForCausalLM.from_pretrained(model)
    if way == "accelerated":
        accelerate(found)
    return HFLM(found, tokenizer=AutoTokenizer.from_pretrained(model), max_length=LENGTH, batch_size=1)


def main():
    model, folder, ways = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    os.environ |= {"HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    os.environ |= {"OPENAI_API_KEY": "none", "TOKENIZERS_PARALLELISM": "false"}
    warnings.filterwarnings("ignore")
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager, results = TaskManager(include_path=str(folder), include_defaults=False), []
    for way in ways:
        found = lm_eval.simple_evaluate(
            judge(model, way), tasks=list(TASKS), task_manager=manager, bootstrap_iters=0, log_samples=True
        )
        figures = {
            f"{task} {name.partition(',')[0]}": value
            for task, values in found["results"].items()
            for name, value in values.items()
            if isinstance(value, float) and "stderr" not in name
        }
        answers = [[one[0] for one in sample["filtered_resps"]] for sample in found["samples"]["choices"]]
        results.append({"figures": figures, "answers": answers})
    (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main()
