#!/usr/bin/env python3
"""Makes the items of --eval-tasks from the files in which tasks are published, with the texts of lm-evaluation-harness.

    scripts/convert_tasks.py hellaswag  hellaswag_val.jsonl                         >hellaswag.jsonl
    scripts/convert_tasks.py arc        ARC-Challenge-Test.jsonl --name arc_challenge >arc_challenge.jsonl
    scripts/convert_tasks.py piqa       valid.jsonl --labels valid-labels.lst       >piqa.jsonl
    scripts/convert_tasks.py mmlu       test/*_test.csv --dev dev --shots 5         >mmlu.jsonl
    scripts/convert_tasks.py openbookqa test.jsonl                                  >openbookqa.jsonl
    scripts/convert_tasks.py boolq      val.jsonl                                   >boolq.jsonl
    scripts/convert_tasks.py winogrande dev.jsonl                                   >winogrande.jsonl
    scripts/convert_tasks.py lambada    lambada_test.jsonl                          >lambada.jsonl

Files are the authors', or the same rows as JSON lines (of ARC and OpenBookQA, as to_json of `datasets` writes them). A
line of LAMBADA is {"text": ...} or, where the file's name ends in neither .json nor .jsonl, a passage. Nothing is
downloaded. Needs only Python's standard library.
"""
import argparse
import csv
import json
import os
import re
import sys

from mistakes import Mistake, run_script


class Bad(Exception):
    """What is wrong with a line, and what was expected."""


def member(row, name, kind=str):
    if name not in row:
        raise Bad("no \"%s\"; expected one" % name)
    if not isinstance(row[name], kind):
        raise Bad("\"%s\" is %s; expected %s" % (name, json.dumps(row[name])[:60], kind.__name__ if kind is not str else "a text"))
    return row[name]


def index_of(value, among, what):
    if value not in among:
        raise Bad("%s is %s; expected one of %s" % (what, json.dumps(value), ", ".join(map(str, among))))
    return list(among).index(value)


def without_brackets(text):
    """Removes WikiHow's marks from a text of HellaSwag; two spaces become one, in one pass."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def hellaswag(row):
    label = row.get("label")
    endings = [without_brackets(ending) for ending in member(row, "endings", list)]
    context = "%s: %s %s" % (member(row, "activity_label"), member(row, "ctx_a"), member(row, "ctx_b").capitalize())
    return {"id": row.get("ind"), "context": without_brackets(context), "choices": endings,
            "gold": index_of(str(label) if label is not None else None, [str(i) for i in range(len(endings))], "label")}


def science(row, stem_of, stem_name):
    """Returns an item of the authors' question.stem and question.choices, or of a flat row, whose question is
    stem_name and whose choices are lists of texts and labels. stem_of makes the context."""
    question = row.get("question")
    if isinstance(question, dict):
        stem, choices = member(question, "stem"), member(question, "choices", list)
        texts, labels = [member(c, "text") for c in choices], [member(c, "label") for c in choices]
    else:
        stem, choices = member(row, stem_name), member(row, "choices", dict)
        texts, labels = member(choices, "text", list), member(choices, "label", list)
    return {"id": row.get("id"), "context": stem_of(stem), "choices": texts,
            "gold": index_of(member(row, "answerKey").lstrip(), labels, "answerKey")}


def arc(row):
    return science(row, "Question: {}\nAnswer:".format, "question")


def openbookqa(row):
    return science(row, str, "question_stem")


def piqa(row, label):
    return {"id": row.get("id"), "context": "Question: %s\nAnswer:" % member(row, "goal"),
            "choices": [member(row, "sol1"), member(row, "sol2")], "gold": index_of(label, ["0", "1"], "the label")}


def boolq(row):
    answer = row.get("answer", row.get("label"))
    if answer not in (False, True):
        raise Bad("neither \"answer\" nor \"label\" is true or false (1 or 0)")
    return {"id": row.get("idx"), "context": "%s\nQuestion: %s?\nAnswer:" % (member(row, "passage"), member(row, "question")),
            "choices": ["no", "yes"], "gold": int(answer)}


def winogrande(row):
    before, blank, after = member(row, "sentence").partition("_")
    if not blank:
        raise Bad("\"sentence\" has no blank; expected a _")
    return {"id": row.get("qID"), "contexts": [before + member(row, "option1"), before + member(row, "option2")],
            "continuation": after.strip(), "gold": index_of(member(row, "answer"), ["1", "2"], "answer")}


def lambada(row):
    context, space, word = member(row, "text").rpartition(" ")
    if not space:
        raise Bad("the text has one word; expected a passage")
    return {"id": row.get("id"), "context": context, "continuation": word}


def mmlu_question(row):
    if len(row) != 6:
        raise Bad("%d columns; expected question, four choices and the answer" % len(row))
    lines = [row[0].strip()] + ["%s. %s" % pair for pair in zip("ABCD", row[1:5])]
    return "\n".join([*lines, "Answer:"]), index_of(row[5], "ABCD", "the answer")


def read_csv(path):
    with open(path, encoding="utf-8", newline="") as f:
        reader = csv.reader(f)
        for row in reader:
            yield reader.line_num, row


def mmlu(path, options):
    """Yields the items of a subject; the shots are the first questions of its dev file."""
    subject = re.sub(r"_(test|val|dev)\.csv$", "", os.path.basename(path))
    prompt = "The following are multiple choice questions (with answers) about %s.\n\n" % subject.replace("_", " ")
    name = options.name or "mmlu_" + subject
    if options.shots:
        dev = os.path.join(options.dev, subject + "_dev.csv")
        shots = located(dev, read_csv(dev), mmlu_question)
        shots = [shot for _, shot in zip(range(options.shots), shots)]
        if len(shots) < options.shots:
            raise Mistake("%s: %d questions; expected --shots %d" % (dev, len(shots), options.shots))
        prompt += "".join("%s %s\n\n" % (text, "ABCD"[gold]) for text, gold in shots)
    for number, (text, gold) in enumerate(located(path, read_csv(path), mmlu_question)):
        yield {"task": name, "id": "%s %d" % (subject, number), "context": prompt + text, "choices": list("ABCD"), "gold": gold}


def located(path, rows, convert):
    """Yields convert(row) of each (line, row); ends the program, with file and line, where convert raises Bad."""
    for line, row in rows:
        try:
            yield convert(row)
        except Bad as bad:
            raise Mistake("%s:%d: %s" % (path, line, bad)) from None


def read_lines(path):
    with open(path, encoding="utf-8", newline="\n") as f:
        for line, text in enumerate(f, 1):
            if text.strip():
                yield line, text.rstrip("\n")


def read_json(path):
    def parse(text):
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise Bad("not JSON: %s; expected an object" % error) from None
        if not isinstance(row, dict):
            raise Bad("not an object; expected one")
        return row

    lines = [line for line, _ in read_lines(path)]
    yield from zip(lines, located(path, read_lines(path), parse))


def read_rows(path, task):
    if task == "lambada" and not path.endswith((".json", ".jsonl")):
        return ((line, {"text": text}) for line, text in read_lines(path))
    return read_json(path)


def convert(path, options):
    name = options.name or options.task
    if options.task == "mmlu":
        yield from mmlu(path, options)
        return
    rows = list(read_rows(path, options.task))
    task = {"hellaswag": hellaswag, "arc": arc, "openbookqa": openbookqa, "boolq": boolq, "winogrande": winogrande,
            "lambada": lambada}.get(options.task)  # fmt: skip
    if options.task == "piqa":
        with open(options.labels, encoding="utf-8") as f:
            labels = f.read().split()
        if len(labels) != len(rows):
            raise Mistake("%s: %d labels; expected %d, one for each line of %s"
                          % (options.labels, len(labels), len(rows), path))
        rows = [(line, (row, label)) for (line, row), label in zip(rows, labels)]

        def task(pair):
            return piqa(*pair)

    for (line, _), item in zip(rows, located(path, rows, task)):
        if item["id"] is None:
            item["id"] = line
        yield {"task": name, **item}


def run(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["hellaswag", "arc", "piqa", "mmlu", "openbookqa", "boolq", "winogrande", "lambada"])
    parser.add_argument("files", nargs="+")
    parser.add_argument("--name", help="the items' \"task\"; default: the task, or mmlu_SUBJECT")
    parser.add_argument("--labels", help="piqa: the file of labels")
    parser.add_argument("--dev", help="mmlu: the folder of SUBJECT_dev.csv")
    parser.add_argument("--shots", type=int, default=0, help="mmlu: answered questions before each (usual: 5)")
    options = parser.parse_args(arguments)
    if options.task == "piqa" and (not options.labels or len(options.files) != 1):
        parser.error("piqa takes one file and its --labels")
    if options.shots and (options.task != "mmlu" or not options.dev):
        parser.error("--shots is of mmlu, and needs --dev: the folder of SUBJECT_dev.csv")
    for path in options.files:
        for item in convert(path, options):
            print(json.dumps(item, ensure_ascii=False))


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8")
    sys.exit(run_script("convert_tasks.py", run, sys.argv[1:]))
