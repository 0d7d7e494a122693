"""Made-up tasks in the forms in which real ones are published, for test_eval_tasks.py and golden/make_eval_tasks.py.
Needs only Python's standard library."""
import csv
import io
import json
import random

WORDS = ("the of to in is cat dog house water people über Ω été naïve große 日本 3 12 2024 don't it's small write made Zażółć "
         "you what from word said each which do their time if will way about many then them would like").split()  # fmt: skip
ITEMS = 8


def words(generator, least, most):
    return " ".join(generator.choice(WORDS) for _ in range(generator.randint(least, most)))


def sentence(generator, least=3, most=9):
    return words(generator, least, most).capitalize() + generator.choice([".", "!", "", " .", "…"])


def hellaswag(g):
    for i in range(ITEMS):
        yield {"ind": i, "activity_label": words(g, 1, 3), "ctx_a": "[header] How to %s [title] %s" % (words(g, 1, 3), sentence(g)),
               "ctx_b": g.choice(["", "she AND " + words(g, 1, 3)]), "ctx": "not used",
               "endings": [g.choice([" ", ""]) + sentence(g) + g.choice(["", " [step]  x", "  "]) for _ in range(4)],
               "label": g.randrange(4)}  # fmt: skip


def science(g, count=4):
    for i in range(ITEMS):
        labels = g.choice(["ABCDE", "12345"])[:count]
        yield {"id": "Q_%d" % i, "question": {"stem": sentence(g), "choices": [{"text": words(g, 1, 5), "label": x} for x in labels]},
               "answerKey": g.choice(labels)}  # fmt: skip


def piqa(g):
    for _ in range(ITEMS):
        yield {"goal": sentence(g), "sol1": sentence(g), "sol2": sentence(g), "label": g.randrange(2)}


def boolq(g):
    for i in range(ITEMS):
        yield {"question": words(g, 3, 6), "title": "not used", "answer": g.random() < 0.5, "passage": sentence(g, 10, 60)}


def winogrande(g):
    for i in range(ITEMS):
        yield {"qID": "q%d" % i, "sentence": "%s because the _ %s" % (words(g, 3, 6), sentence(g)), "option1": words(g, 1, 2),
               "option2": words(g, 1, 2), "answer": g.choice("12")}  # fmt: skip


def lambada(g):
    for _ in range(ITEMS):
        yield {"text": words(g, 8, 20)}


def mmlu(g):
    for _ in range(ITEMS):
        yield [" %s\n%s " % (sentence(g), words(g, 1, 4)), *[words(g, 1, 3) for _ in range(4)], g.choice("ABCD")]


# Returns edge cases: borders of context and choice; white space of every kind there; no context; ties; a text that
# begins with the beginning of text; and contexts that are too long, of which the choices see only the end.
def edges(g):
    contexts = ["The cat", "The cat ", "The cat  ", "The cat\n", "The cat\t\n ", "The\u00a0", "The cat\u3000 ", "The cat\x1d", "", "Ω", "é ",
                "don'", "1", "12 ", "<|endoftext|>The cat", "<|begin_of_text|>The cat", words(g, 90, 120), words(g, 90, 120) + " "]  # fmt: skip
    for i, context in enumerate(contexts):
        same = words(g, 1, 2)
        choices = [words(g, 1, 4), same, " " + words(g, 1, 2), same, g.choice(["s", "日", "\u0301", "."])]
        yield {"id": i, "context": context, "choices": choices, "gold": g.randrange(5)}


def lines(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def make(name):
    """Makes the rows of a task, the same rows at each call."""
    tasks = {"hellaswag": hellaswag, "arc": science, "openbookqa": science, "piqa": piqa, "boolq": boolq, "winogrande": winogrande,
             "lambada": lambada, "mmlu": mmlu, "mmlu_dev": mmlu, "edges": edges}  # fmt: skip
    return list(tasks[name](random.Random("eval " + name)))


def text():
    """Makes a text of some windows."""
    return "the " + words(random.Random("eval text"), 90, 90)


SUBJECT, SHOTS = "abstract_algebra", 2


def write(folder):
    """Writes files as the tasks' authors publish them. Returns the arguments of convert_tasks.py by task."""
    files = {}

    def put(file, text):
        with open("%s/%s" % (folder, file), "w", encoding="utf-8", newline="") as f:
            f.write(text)
        return "%s/%s" % (folder, file)

    for name in ("hellaswag", "arc", "openbookqa", "boolq", "winogrande", "lambada"):
        files[name] = [name, put(name + ".jsonl", lines(make(name)))]
    rows = make("piqa")
    files["piqa"] = ["piqa", put("piqa.jsonl", lines({k: v for k, v in row.items() if k != "label"} for row in rows)),
                     "--labels", put("piqa.lst", "".join("%d\n" % row["label"] for row in rows))]  # fmt: skip
    for name, file in (("mmlu", "test"), ("mmlu_dev", "dev")):
        text = io.StringIO()
        csv.writer(text).writerows(make(name))
        files[name] = ["mmlu", put("%s_%s.csv" % (SUBJECT, file), text.getvalue()), "--dev", folder, "--shots", str(SHOTS)]
    del files["mmlu_dev"]
    return files
