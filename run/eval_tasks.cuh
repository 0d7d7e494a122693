// --eval-tasks: tasks scored by the likelihood of texts, with the arithmetic of lm-evaluation-harness.
#pragma once
#include "formats/eval_items.h"      // struct eval_items
#include "run/report_file.h"         // report_file_open
#include "run/run.cuh"               // struct run
#include "run/score_documents.cuh"   // score_documents
#include "run/scored_text.cuh"       // encode_with_context, encode_without_context
#include "runtime/files/file_read.h" // read_whole
#include "runtime/files/hash.h"      // hash64
#include "runtime/text/json_parse.h" // json_show
#include "runtime/sort.h"            // compare_doubles

struct eval_tasks {
    int files, count, documents_count, names_count;
    char **paths;       // (files)
    const char **names; // (names_count) of the tasks, in byte order; owned by the items
    struct eval_items items;
    int *first_document; // (items + 1) an item has a document for each of its texts
    struct scored_document *documents;
    int32_t **ids; // (documents) their tokens, owned
    bool *cut;     // (documents) whether they lost tokens of their context
};

// ---- texts to documents ----

// Encodes text `i` of an item into *d, whose tokens are part of *ids, which the caller frees. Encodes context and
// continuation as one text, behind the prefix token if the context is empty. Scoring begins after as many tokens as the
// context has by itself, without white space at its end. What exceeds --seq-length inputs is cut off on the left
// (*cut). Ends the program where no token is to be scored, or more than --seq-length.
static void encode_item_text(const struct run *r, const struct eval_item *item, int i, struct scored_document *d,
                             int32_t **ids, bool *cut) {
    const char *context = eval_item_context(item, i);
    const size_t length = eval_length_without_space(context);
    const int64_t T = r->config->model.seq_length;
    char where[PATH_MAX + 64], *whole = NULL;
    snprintf(where, sizeof where, "--eval-tasks: %s:%lld", item->file, (long long)item->line);
    const int bytes = asprintf(&whole, "%s%s%s", context, item->delimiter, eval_item_continuation(item, i));
    if (bytes < 0)
        fail("%s: out of memory", where);
    int64_t total, before = 1;
    if (length > 0)
        free(encode_with_context(r, context, length, &before, where));
    *ids = length > 0 ? encode_with_context(r, whole, (size_t)bytes, &total, where)
                      : encode_without_context(r, whole, (size_t)bytes, &total, where);
    free(whole);
    if (before < 1 || total <= before)
        fail("%s: text %d has no token to score after its context; expected one at least", where, i);
    if (total - before > T)
        fail("%s: text %d has %lld tokens to score; expected at most --seq-length %lld", where, i,
             (long long)(total - before), (long long)T);
    const int64_t kept = total < T + 1 ? total : T + 1;
    *cut = kept < total;
    d->tokens = *ids + (total - kept);
    d->inputs = (int)kept - 1;
    d->first = d->inputs - (int)(total - before);
}

// Encodes items' texts as tasks->documents, for close_tasks. Ends the job if ranks' items differ. All ranks call this.
static void encode_items(struct run *r, struct eval_tasks *tasks) {
    int64_t count = 0;
    uint64_t hash = 0;
    char text[64];
    tasks->first_document = (int *)malloc(((size_t)tasks->items.count + 1) * sizeof *tasks->first_document);
    for (int64_t i = 0; i < tasks->items.count; i++)
        count += tasks->items.all[i].count;
    if (count > INT32_MAX / 2)
        fail("--eval-tasks: %lld texts are too many", (long long)count);
    tasks->documents = (struct scored_document *)calloc((size_t)count + 1, sizeof *tasks->documents);
    tasks->ids = (int32_t **)calloc((size_t)count + 1, sizeof *tasks->ids);
    tasks->cut = (bool *)calloc((size_t)count + 1, sizeof *tasks->cut);
    if (!tasks->first_document || !tasks->documents || !tasks->ids || !tasks->cut)
        fail("out of memory for %lld texts", (long long)count);
    int n = 0;
    for (int64_t i = 0; i < tasks->items.count; i++) {
        tasks->first_document[i] = n;
        for (int k = 0; k < tasks->items.all[i].count; k++, n++) {
            struct scored_document *d = &tasks->documents[n];
            encode_item_text(r, &tasks->items.all[i], k, d, &tasks->ids[n], &tasks->cut[n]);
            hash = hash64(d->tokens, ((size_t)d->inputs + 1) * sizeof *d->tokens, hash);
        }
    }
    tasks->first_document[tasks->items.count] = tasks->documents_count = n;
    snprintf(text, sizeof text, "%d texts, %016llx", n, (unsigned long long)hash);
    if (r->parallel)
        parallel_check_same(r->parallel, text, "tasks");
}

// ---- opening ----

static int compare_names(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}
// Sets tasks->names to the names of the items' tasks, each once and in byte order. close_tasks frees the array.
static void find_names(struct eval_tasks *tasks) {
    const int64_t items = tasks->items.count;
    tasks->names = (const char **)calloc((size_t)items + 1, sizeof *tasks->names);
    if (!tasks->names)
        fail("out of memory");
    for (int64_t i = 0; i < items; i++)
        tasks->names[i] = tasks->items.all[i].task;
    qsort(tasks->names, (size_t)items, sizeof *tasks->names, compare_names);
    for (int64_t i = 0; i < items; i++)
        if (i == 0 || strcmp(tasks->names[i], tasks->names[tasks->names_count - 1]) != 0)
            tasks->names[tasks->names_count++] = tasks->names[i];
}
static int task_of(const struct eval_tasks *tasks, const struct eval_item *item) {
    const char *name = item->task;
    const void *found = bsearch(&name, tasks->names, (size_t)tasks->names_count, sizeof *tasks->names, compare_names);
    return (int)((const char *const *)found - tasks->names);
}
// Ends the program where a task has items with alternatives and items without: no score could be of both.
static void check_kinds(const struct eval_tasks *tasks) {
    const struct eval_item **first =
        (const struct eval_item **)calloc((size_t)tasks->names_count, sizeof(struct eval_item *));
    if (!first)
        fail("out of memory");
    for (int64_t i = 0; i < tasks->items.count; i++) {
        const struct eval_item *item = &tasks->items.all[i], **of_task = &first[task_of(tasks, item)];
        *of_task = *of_task ? *of_task : item;
        if (!item->varied != !(*of_task)->varied)
            fail("--eval-tasks: %s:%lld: this item of the task %s has %s choices, and that of %s:%lld has %s; expected "
                 "one kind, or another \"task\"",
                 item->file, (long long)item->line, json_show(item->task).text, item->varied ? "several" : "no",
                 (*of_task)->file, (long long)(*of_task)->line, item->varied ? "none" : "some");
    }
    free(first);
}

// Ends the program where a file of --eval-tasks is given twice, since its items would count twice.
static void check_task_files(char *const *paths, int count) {
    struct stat one, other;
    for (int i = 0; i < count; i++)
        for (int k = 0; k < i; k++)
            if (stat(paths[i], &one) == 0 && stat(paths[k], &other) == 0 && one.st_dev == other.st_dev &&
                one.st_ino == other.st_ino)
                fail("--eval-tasks: %s is given twice, and its items would count twice; give it once", paths[i]);
}
// Ends the program where --eval-tasks-output would replace one of the files that are scored.
static void check_scores_file(const struct config *c) {
    const char *const lists[] = {c->evaluation.eval_tasks, c->evaluation.perplexity};
    struct stat output, input;
    if (!*c->evaluation.eval_tasks_output || stat(c->evaluation.eval_tasks_output, &output) != 0)
        return;
    for (int k = 0; k < 2; k++) {
        int count;
        char **paths = list_elements(lists[k], &count);
        for (int i = 0; i < count; i++)
            if (stat(paths[i], &input) == 0 && input.st_dev == output.st_dev && input.st_ino == output.st_ino)
                fail("--eval-tasks-output %s is a file that is scored, and would be overwritten; name another file",
                     c->evaluation.eval_tasks_output);
        for (int i = 0; i < count; i++)
            free(paths[i]);
        free(paths);
    }
}

// Reads and encodes the files of --eval-tasks, at least one, into r->tasks, for close_tasks. Opens r->tokenizer, which
// may lie beside the data, so the data must be open. Ends the program where a file is bad. Every rank calls this.
static void open_tasks(struct run *r) {
    enum { MAX_BYTES = 1 << 30 };
    struct eval_tasks *tasks = (struct eval_tasks *)calloc(1, sizeof *tasks);
    struct error_text error;
    if (!tasks)
        fail("out of memory");
    check_scores_file(r->config);
    open_tokenizer(r, "eval-tasks");
    tasks->paths = list_elements(r->config->evaluation.eval_tasks, &tasks->files);
    check_task_files(tasks->paths, tasks->files);
    for (int i = 0; i < tasks->files; i++) {
        unsigned char *data;
        uint64_t bytes;
        const int64_t before = tasks->items.count;
        const char *problem =
            read_whole(&data, &bytes, MAX_BYTES, tasks->paths[i], "a file of tasks, JSON lines", &error);
        if (!problem)
            problem = eval_items_parse(&tasks->items, data, bytes, tasks->paths[i], &error);
        free(data);
        if (problem)
            fail("--eval-tasks: %s", problem);
        if (tasks->items.count == before)
            fail("--eval-tasks: %s: has no items; expected a JSON object a line", tasks->paths[i]);
    }
    find_names(tasks);
    check_kinds(tasks);
    encode_items(r, tasks);
    r->tasks = tasks;
}
static void close_tasks(struct run *r) {
    struct eval_tasks *tasks = r->tasks;
    if (!tasks)
        return;
    for (int i = 0; i < tasks->documents_count; i++)
        free(tasks->ids[i]);
    for (int i = 0; i < tasks->files; i++)
        free(tasks->paths[i]);
    eval_items_free(&tasks->items);
    void *all[] = {tasks->paths, (void *)tasks->names, tasks->first_document, tasks->documents, tasks->ids, tasks->cut,
                   tasks};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
    r->tasks = NULL;
}

// ---- scores ----

// The text of an item that each measure finds the likeliest; of equal texts the first.
struct item_choice {
    int by_sum, by_characters, by_bytes, by_tokens; // 0 of an item without alternatives
};
// Returns which text of item i is the likeliest by each measure. score_documents must have scored the documents.
static struct item_choice choose_text(const struct eval_tasks *tasks, int64_t i) {
    const struct eval_item *item = &tasks->items.all[i];
    const struct scored_document *documents = &tasks->documents[tasks->first_document[i]];
    struct item_choice best = {0, 0, 0, 0};
    double most[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
    int *const chosen[4] = {&best.by_sum, &best.by_characters, &best.by_bytes, &best.by_tokens};
    for (int k = 0; k < item->count; k++) {
        const char *text = eval_item_normalizing_text(item, k);
        const double sum = documents[k].log_likelihood;
        const double values[4] = {sum, sum / (double)eval_characters(text), sum / (double)strlen(text),
                                  sum / (documents[k].inputs - documents[k].first)};
        for (int m = 0; m < 4; m++)
            if (values[m] > most[m]) {
                most[m] = values[m];
                *chosen[m] = k;
            }
    }
    return best;
}
static bool item_is_cut(const struct eval_tasks *tasks, int64_t i) {
    for (int d = tasks->first_document[i]; d < tasks->first_document[i + 1]; d++)
        if (tasks->cut[d])
            return true;
    return false;
}

struct task_scores {
    bool has_choices;   // else `right` counts items whose tokens are all the likeliest
    int64_t items, cut; // cut: items that lost tokens of a context
    int64_t right, right_norm, right_bytes, right_tokens;
    double perplexity; // of an item; where there are no choices
};
static double share(int64_t right, int64_t n) { return (double)right / (double)n; }
// Returns the standard error of a share: the sample's deviation over sqrt(n). NAN where n is 1.
static double share_error(int64_t right, int64_t n) {
    const double p = share(right, n), squares = (double)right * (1 - p) * (1 - p) + (double)(n - right) * p * p;
    return n > 1 ? sqrt(squares / (double)(n - 1)) / sqrt((double)n) : NAN;
}

// Returns the scores of task k. Adds likelihoods in the order of their size, so that the items' order doesn't matter.
static struct task_scores scores_of_task(const struct eval_tasks *tasks, int k) {
    struct task_scores s;
    memset(&s, 0, sizeof s);
    double *sums = (double *)malloc(((size_t)tasks->items.count + 1) * sizeof *sums), total = 0;
    if (!sums)
        fail("out of memory");
    for (int64_t i = 0; i < tasks->items.count; i++) {
        const struct eval_item *item = &tasks->items.all[i];
        const struct scored_document *d = &tasks->documents[tasks->first_document[i]];
        if (task_of(tasks, item) != k)
            continue;
        const struct item_choice choice = choose_text(tasks, i);
        s.has_choices = item->varied != NULL;
        s.cut += item_is_cut(tasks, i);
        s.right += s.has_choices ? choice.by_sum == item->gold : d->greedy;
        s.right_norm += choice.by_characters == item->gold;
        s.right_bytes += choice.by_bytes == item->gold;
        s.right_tokens += choice.by_tokens == item->gold;
        sums[s.items++] = d->log_likelihood;
    }
    qsort(sums, (size_t)s.items, sizeof *sums, compare_doubles);
    for (int64_t i = 0; i < s.items; i++)
        total += sums[i];
    s.perplexity = exp(-total / (double)s.items);
    free(sums);
    return s;
}

// ---- reports ----

// Prints the table of scores, a line a task. Needs no other rank: score_documents has shared the scores.
static void print_scores(struct run *r) {
    const struct eval_tasks *tasks = r->tasks;
    int width = 4;
    for (int k = 0; k < tasks->names_count; k++)
        width = (int)strlen(tasks->names[k]) > width ? (int)strlen(tasks->names[k]) : width;
    log_event(&r->log, "%-*s  %7s  %-15s  %-15s  %-15s  %-9s  %-10s  %s", width, "task", "items", "acc", "acc_norm",
              "acc_bytes", "acc_token", "perplexity", "cut");
    for (int k = 0; k < tasks->names_count; k++) {
        const struct task_scores s = scores_of_task(tasks, k);
        const int64_t rights[4] = {s.right, s.right_norm, s.right_bytes, s.right_tokens};
        char columns[4][32], perplexity[32] = "-";
        for (int m = 0; m < 4; m++) {
            const double error = share_error(rights[m], s.items);
            if (m > 0 && !s.has_choices)
                snprintf(columns[m], sizeof columns[m], "-");
            else if (m == 3 || isnan(error))
                snprintf(columns[m], sizeof columns[m], "%.4f", share(rights[m], s.items));
            else
                snprintf(columns[m], sizeof columns[m], "%.4f +-%.4f", share(rights[m], s.items), error);
        }
        if (!s.has_choices)
            snprintf(perplexity, sizeof perplexity, "%.6g", s.perplexity);
        log_event(&r->log, "%-*s  %7lld  %-15s  %-15s  %-15s  %-9s  %-10s  %lld", width,
                  json_show(tasks->names[k]).text, (long long)s.items, columns[0], columns[1], columns[2], columns[3],
                  perplexity, (long long)s.cut);
    }
}

// Writes a task's scores as members of the JSON object that the caller has begun.
static void write_task_scores(struct json *json, const struct task_scores *s) {
    json_int(json, "items", s->items);
    json_double(json, "acc", share(s->right, s->items));
    json_double(json, "acc_stderr", share_error(s->right, s->items));
    if (s->has_choices) {
        json_double(json, "acc_norm", share(s->right_norm, s->items));
        json_double(json, "acc_norm_stderr", share_error(s->right_norm, s->items));
        json_double(json, "acc_bytes", share(s->right_bytes, s->items));
        json_double(json, "acc_bytes_stderr", share_error(s->right_bytes, s->items));
        json_double(json, "acc_token", share(s->right_tokens, s->items));
    } else {
        json_double(json, "perplexity", s->perplexity);
    }
    json_int(json, "cut", s->cut);
}
static void write_log_scores(struct json *json, const void *context) {
    const struct eval_tasks *tasks = (const struct eval_tasks *)context;
    for (int k = 0; k < tasks->names_count; k++) {
        const struct task_scores s = scores_of_task(tasks, k);
        json_object_begin(json, tasks->names[k]);
        write_task_scores(json, &s);
        json_object_end(json);
    }
}

static void write_item(FILE *out, const struct eval_tasks *tasks, int64_t i) {
    const struct eval_item *item = &tasks->items.all[i];
    const json_t *id = json_object_get(item->root, "id");
    const struct item_choice choice = choose_text(tasks, i);
    struct json json = json_writer(out, false);
    json_object_begin(&json, NULL);
    json_str(&json, "task", item->task);
    if (json_is_string(id))
        json_str(&json, "id", json_string_value(id));
    else
        json_int(&json, "id", id && json_is_integer(id) ? json_integer_value(id) : item->line);
    if (item->varied) {
        json_int(&json, "gold", item->gold);
        json_int(&json, "chosen", choice.by_sum);
        json_int(&json, "chosen_norm", choice.by_characters);
        json_int(&json, "chosen_bytes", choice.by_bytes);
        json_int(&json, "chosen_token", choice.by_tokens);
    }
    json_array_begin(&json, "texts");
    for (int d = tasks->first_document[i]; d < tasks->first_document[i + 1]; d++) {
        const struct scored_document *document = &tasks->documents[d];
        json_object_begin(&json, NULL);
        json_double(&json, "log_likelihood", document->log_likelihood);
        json_int(&json, "tokens", document->inputs - document->first);
        json_bool(&json, "greedy", document->greedy);
        json_bool(&json, "cut", tasks->cut[d]);
        json_object_end(&json);
    }
    json_array_end(&json);
    json_object_end(&json);
}
// Writes, on rank 0, items' and then tasks' scores as JSON lines to --eval-tasks-output, not "", or ends the program.
static void write_scores(const struct run *r) {
    const struct eval_tasks *tasks = r->tasks;
    if (r->config->rank > 0)
        return;
    struct report_file out = report_file_open("--eval-tasks-output", r->config->evaluation.eval_tasks_output);
    for (int64_t i = 0; i < tasks->items.count; i++)
        write_item(out.file, tasks, i);
    for (int k = 0; k < tasks->names_count; k++) {
        const struct task_scores s = scores_of_task(tasks, k);
        struct json json = json_writer(out.file, false);
        json_object_begin(&json, NULL);
        json_str(&json, "task", tasks->names[k]);
        write_task_scores(&json, &s);
        json_object_end(&json);
    }
    report_file_close(&out);
}

// Scores, prints, logs and writes open_tasks' tasks. Returns false if a signal stops it. Every rank calls this.
static bool score_tasks(struct run *r, int step) {
    struct eval_tasks *tasks = r->tasks;
    if (!score_documents(r, tasks->documents, tasks->documents_count))
        return false;
    print_scores(r);
    log_object(&r->log, step, "tasks", write_log_scores, tasks);
    if (*r->config->evaluation.eval_tasks_output)
        write_scores(r);
    return true;
}
