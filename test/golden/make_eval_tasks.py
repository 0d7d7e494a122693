#!/usr/bin/env python3
"""Writes eval_tasks.json: the results of lm-evaluation-harness for the tasks of test/eval_data.py with the models of
test/eval_model.py.

    python3 test/golden/make_eval_tasks.py [folder]     needs lm_eval, torch and transformers; README.md has the
    versions

The tasks' own definitions are used, with local files in place of their data sets. For each task the file has: a hash of
the texts that are scored, their log-likelihoods, whether all tokens were the likeliest ones, and the task's scores.
"""
import hashlib
import json
import sys
import tempfile
from pathlib import Path

import lm_eval
import torch
import yaml
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import eval_data
import eval_model

DEFINITIONS = Path(lm_eval.__file__).parent / "tasks"
FILES = {"hellaswag": "hellaswag/hellaswag.yaml", "arc": "arc/arc_easy.yaml", "openbookqa": "openbookqa/openbookqa.yaml",
         "piqa": "piqa/piqa.yaml", "boolq": "super_glue/boolq/default.yaml", "winogrande": "winogrande/default.yaml",
         "lambada": "lambada/lambada_openai.yaml", "mmlu": "mmlu/default/mmlu_abstract_algebra.yaml"}  # fmt: skip
METRICS = [dict(metric=name, aggregation="mean", higher_is_better=True) for name in ("acc", "acc_norm", "acc_bytes")]


def flat(row, stem):
    question = row["question"]
    return {stem: question["stem"], "answerKey": row["answerKey"],
            "choices": {"text": [c["text"] for c in question["choices"]], "label": [c["label"] for c in question["choices"]]}}


def mmlu(row):
    return {"question": row[0], "choices": row[1:5], "answer": "ABCD".index(row[5]), "subject": eval_data.SUBJECT}


# Rows in the forms of Hugging Face's data sets.
ROWS = {"arc": lambda row: flat(row, "question"), "openbookqa": lambda row: flat(row, "question_stem"), "mmlu": mmlu, "mmlu_dev": mmlu,
        "hellaswag": lambda row: dict(row, label=str(row["label"])),
        "boolq": lambda row: {"question": row["question"], "passage": row["passage"], "label": int(row["answer"])}}  # fmt: skip


def write_task(folder, name, definition):
    def rows(name):
        path = folder / (name + ".jsonl")
        path.write_text(eval_data.lines(map(ROWS.get(name, dict), eval_data.make(name))), encoding="utf-8")
        return str(path)

    data = {split: rows(name) for split in ("train", "validation", "test")}
    if name == "mmlu":
        data["dev"] = rows("mmlu_dev")
    definition.update(task="ours_" + name, dataset_path="json", dataset_name=None, dataset_kwargs={"data_files": data})
    definition.pop("tag", None)
    if name != "lambada":
        definition["metric_list"] = METRICS
    (folder / (name + ".yaml")).write_text(yaml.safe_dump(definition), encoding="utf-8")


def greedy_items(model):
    """Makes items with continuations that the model itself chooses, and with one of these that ends in another
    token."""
    tokenizer = model.tokenizer
    items = []
    for word in eval_data.WORDS[:24]:
        context = "The " + word
        ids = tokenizer(context, return_tensors="pt").input_ids
        made = model.model.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0)[0, ids.shape[1]:].tolist()
        text = tokenizer.decode(made)
        if tokenizer(context + text).input_ids == ids[0].tolist() + made:
            items += [{"context": context, "continuation": text, "delimiter": ""},
                      {"context": context, "continuation": text + "x", "delimiter": ""}]
    return items[:12]


def perplexity(model, length, stride):
    """Returns the mean loss of a text by sliding windows, and the number of scored tokens (docs/source/en/perplexity.md
    of transformers, except for its mean of means)."""
    ids = model.tokenizer(eval_data.text(), return_tensors="pt").input_ids
    total, count, before = 0.0, 0, 0
    for begin in range(0, ids.shape[1], stride):
        window = ids[:, begin : begin + length]
        end = begin + window.shape[1]
        first = max(before - begin, 1)
        if first < window.shape[1]:
            with torch.no_grad():
                logits = model.model(window).logits.double()
            scores = torch.log_softmax(logits[0, first - 1 : -1], -1).gather(1, window[0, first:, None])
            total, count = total - float(scores.sum()), count + scores.shape[0]
        before = end
        if end == ids.shape[1]:
            break
    return [total / count, count]


def texts_hash(pairs):
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()


def score(model, folder):
    manager = TaskManager(include_path=str(folder))
    golden = {}
    for name in [*FILES, "edges"]:
        results = lm_eval.simple_evaluate(model=model, tasks=["ours_" + name], num_fewshot=eval_data.SHOTS if name == "mmlu" else 0,
                                          task_manager=manager, bootstrap_iters=2, log_samples=True)
        samples = sorted(results["samples"]["ours_" + name], key=lambda s: s["doc_id"])
        pairs = [[[a["arg_0"], a["arg_1"]] for a in s["arguments"].values()] if isinstance(s["arguments"], dict) else
                 [list(a) for a in s["arguments"]] for s in samples]  # fmt: skip
        answers = [[(r[0] if isinstance(r[0], (tuple, list)) else r) for r in s["resps"]] for s in samples]
        scores = {key.split(",")[0]: value for key, value in results["results"]["ours_" + name].items() if isinstance(value, float)}
        golden[name] = {"texts": texts_hash(pairs), "log_likelihoods": [[float(a[0]) for a in answer] for answer in answers],
                        "greedy": [[str(a[1]) == "True" for a in answer] for answer in answers],
                        "right": [[s.get(m) for m in ("acc", "acc_norm", "acc_bytes")] for s in samples], "scores": scores}  # fmt: skip
    items = greedy_items(model)
    instances = [lm_eval.api.instance.Instance("loglikelihood", {}, (i["context"], i["continuation"]), 0) for i in items]
    golden["greedy"] = {"items": items, "answers": [[float(a), bool(b)] for a, b in model.loglikelihood(instances, disable_tqdm=True)]}
    golden["perplexity"] = {str(stride): perplexity(model, 90, stride) for stride in (90, 45, 1)}
    return golden


def main():
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    torch.set_num_threads(1)
    golden = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for task, path in FILES.items():
            write_task(folder, task, {"include": str(DEFINITIONS / path)})
        write_task(folder, "edges", {"output_type": "multiple_choice", "test_split": "test", "doc_to_text": "context",
                                     "doc_to_choice": "choices", "doc_to_target": "gold"})  # fmt: skip
        for model in eval_model.MODELS:
            eval_model.write_model(name + "/" + model, model)
            golden[model] = score(HFLM(pretrained=name + "/" + model, device="cpu", dtype="float32", batch_size=1), folder)
    (out / "eval_tasks.json").write_text(json.dumps(golden, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
