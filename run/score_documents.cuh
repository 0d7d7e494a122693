// Computes the likelihoods of documents, sequences of tokens of which the last are scored. Documents are packed whole
// into rows of --seq-length, don't see each other, and begin at position 0. Rows follow only from lengths and tokens,
// so that neither documents' order nor the number of ranks changes a bit of a score. Equal documents are scored once.
#pragma once
#include "run/ranks.cuh" // grant_request
#include "run/run.cuh"   // struct run

struct scored_document {
    const int32_t *tokens; // (inputs + 1)
    int inputs;            // at most --seq-length
    int first;             // tokens[first + 1] is the first that is scored; below inputs
    double log_likelihood; // of the scored tokens, summed in double from the first to the last
    bool greedy;           // each scored token is the likeliest
};

struct document_place {
    struct scored_document *document;
    int same; // the place, in the sorted order, of the first document equal to it
    int row, column;
};

// Compares two documents: longer ones come first, then tokens decide, then where scoring begins. Returns 0 if equal.
static int compare_documents(const struct scored_document *a, const struct scored_document *b) {
    if (a->inputs != b->inputs)
        return a->inputs > b->inputs ? -1 : 1;
    for (int i = 0; i <= a->inputs; i++)
        if (a->tokens[i] != b->tokens[i])
            return a->tokens[i] < b->tokens[i] ? -1 : 1;
    return (a->first > b->first) - (a->first < b->first);
}
// Compares two places by their documents, as compare_documents does, for qsort. a and b each point to a place.
static int compare_places(const void *a, const void *b) {
    return compare_documents(((const struct document_place *)a)->document,
                             ((const struct document_place *)b)->document);
}

// Packs documents, sorted by compare_places, into rows of T by best fit: each into the fullest row with room, of
// several the last one filled. Sets each place; of equal documents only the first has a row. Returns how many rows.
static int pack_documents(struct document_place *places, int count, int T) {
    int *newest = (int *)malloc(((size_t)T + 1) * sizeof *newest);   // by the room that is left: a row; -1: none
    int *below = (int *)malloc(((size_t)count + 1) * sizeof *below); // (rows) the next row with the same room
    int rows = 0;
    if (!newest || !below)
        fail("out of memory for %d rows", count);
    for (int room = 0; room <= T; room++)
        newest[room] = -1;
    for (int i = 0; i < count; i++) {
        struct document_place *p = &places[i];
        p->same = i > 0 && compare_places(&places[i - 1], p) == 0 ? places[i - 1].same : i;
        if (p->same != i)
            continue;
        int room = p->document->inputs;
        while (room < T && newest[room] < 0)
            room++;
        p->row = newest[room];
        if (p->row < 0)
            p->row = rows++;
        else
            newest[room] = below[p->row];
        p->column = T - room;
        room -= p->document->inputs;
        below[p->row] = newest[room];
        newest[room] = p->row;
    }
    free(newest);
    free(below);
    return rows;
}

// Compares two places by row and column, for qsort. a and b each point to a pointer to one.
static int compare_rows(const void *a, const void *b) {
    const struct document_place *p = *(const struct document_place *const *)a,
                                *q = *(const struct document_place *const *)b;
    return p->row != q->row ? (p->row < q->row ? -1 : 1) : (p->column > q->column) - (p->column < q->column);
}

// A batch in host memory, and the results for its targets; each (B, T).
struct score_batch {
    int32_t *inputs, *targets, *document_starts, *largest;
    float *losses;
};
static struct score_batch score_batch_create(const struct config *c) {
    const size_t N = (size_t)c->training.micro_batch_size * (size_t)c->model.seq_length;
    struct score_batch b;
    b.inputs = (int32_t *)calloc(4 * N, sizeof *b.inputs);
    b.losses = (float *)calloc(N, sizeof *b.losses);
    if (!b.inputs || !b.losses)
        fail("out of memory for a batch of %d sequences of %d tokens", c->training.micro_batch_size,
             c->model.seq_length);
    b.targets = b.inputs + N;
    b.document_starts = b.inputs + 2 * N;
    b.largest = b.inputs + 3 * N;
    return b;
}
static void score_batch_free(struct score_batch *b) {
    free(b->inputs);
    free(b->losses);
}

// Fills the batch, rows from `first` on, with documents (n), in order. A row's rest is a document without targets.
static void fill_batch(struct score_batch *b, const struct config *c, struct document_place *const *documents, int n,
                       int first) {
    const int T = c->model.seq_length;
    for (int row = 0; row < c->training.micro_batch_size; row++) {
        int end = 0;
        for (int i = 0; i < n; i++)
            if (documents[i]->row == first + row)
                end = documents[i]->column + documents[i]->document->inputs;
        for (int t = 0; t < T; t++) {
            const int64_t at = (int64_t)row * T + t;
            b->inputs[at] = 0;
            b->targets[at] = -1;
            b->document_starts[at] = end;
        }
    }
    for (int i = 0; i < n; i++) {
        const struct document_place *p = documents[i];
        const struct scored_document *d = p->document;
        for (int t = 0; t < d->inputs; t++) {
            const int64_t at = (int64_t)(p->row - first) * T + p->column + t;
            b->inputs[at] = d->tokens[t];
            b->targets[at] = t >= d->first ? d->tokens[t + 1] : -1;
            b->document_starts[at] = p->column;
        }
    }
}

struct document_score {
    double log_likelihood;
    int32_t greedy, stop; // stop: stop_asked_here of the rank, in its first score of an exchange
};
// Returns a document's scores in a batch that gpt_score has computed. first: the batch's first row; T: a row's length.
static struct document_score score_of(const struct score_batch *b, const struct document_place *p, int first, int T) {
    struct document_score score = {0, 1, 0};
    for (int t = p->document->first; t < p->document->inputs; t++) {
        const int64_t at = (int64_t)(p->row - first) * T + p->column + t;
        score.log_likelihood -= (double)b->losses[at];
        score.greedy &= b->largest[at] != 0;
    }
    return score;
}

// The documents in batches: batch b has documents [batch_first[b], batch_first[b + 1]).
struct score_schedule {
    struct document_place **documents; // ordered by row and column
    int *batch_first;                  // (batches + 1)
    int batches, most;                 // most: documents of the largest batch, at least 1
};
// Divides packed places (count), in `rows` rows, into batches of B rows. The caller frees s.documents, s.batch_first.
static struct score_schedule schedule_documents(struct document_place *places, int count, int rows, int B) {
    struct score_schedule s;
    int n = 0, batch = 0;
    s.batches = (rows + B - 1) / B;
    s.most = 1;
    s.documents = (struct document_place **)malloc(((size_t)count + 1) * sizeof(struct document_place *));
    s.batch_first = (int *)malloc(((size_t)s.batches + 1) * sizeof *s.batch_first);
    if (!s.documents || !s.batch_first)
        fail("out of memory for %d documents", count);
    for (int i = 0; i < count; i++)
        if (places[i].same == i)
            s.documents[n++] = &places[i];
    qsort(s.documents, (size_t)n, sizeof *s.documents, compare_rows);
    for (int i = 0; i < n; i++)
        while (batch <= s.documents[i]->row / B)
            s.batch_first[batch++] = i;
    s.batch_first[s.batches] = n;
    for (batch = 0; batch < s.batches; batch++) {
        const int documents = s.batch_first[batch + 1] - s.batch_first[batch];
        s.most = documents > s.most ? documents : s.most;
    }
    return s;
}

// Scores batch number `batch` on this rank, while rank k scores `batch - rank + k`, if it exists. Gathers all ranks'
// scores into all (ranks, s->most). Returns the largest stop_asked_here of any rank, or 0. Every rank calls this.
static int score_batches(struct run *r, struct score_batch *b, const struct score_schedule *s, int batch,
                         struct document_score *all) {
    const struct config *c = r->config;
    const int first_row = batch * c->training.micro_batch_size;
    const int first = batch < s->batches ? s->batch_first[batch] : 0;
    const int n = batch < s->batches ? s->batch_first[batch + 1] - first : 0;
    struct document_score *mine = all + (size_t)c->rank * (size_t)s->most;
    const struct token_scores scores = {b->losses, b->largest};
    struct batch inputs = batch_of(b->inputs, b->targets);
    inputs.document_starts = b->document_starts;
    fill_batch(b, c, s->documents + first, n, first_row);
    long_wait_begin(r->device_watch);
    gpt_score(r->model, inputs, scores);
    long_wait_end(r->device_watch);
    memset(mine, 0, (size_t)s->most * sizeof *mine);
    for (int i = 0; i < n; i++)
        mine[i] = score_of(b, s->documents[first + i], first_row, c->model.seq_length);
    mine[0].stop = stop_asked_here(r);
    if (r->parallel)
        control_all_gather(r->parallel->control, all, mine, (size_t)s->most * sizeof *mine, "scores of documents",
                           false);
    int stop = 0;
    for (int k = 0; k < c->ranks; k++)
        stop = all[(size_t)k * (size_t)s->most].stop > stop ? all[(size_t)k * (size_t)s->most].stop : stop;
    return stop;
}

// Scores documents (count), each of at least one input. All ranks call this with equal documents, and then have all
// scores. Returns false, with r->stopped set, if a signal stopped it. Ends the program if a score is not finite.
static bool score_documents(struct run *r, struct scored_document *documents, int count) {
    const struct config *c = r->config;
    struct document_place *places = (struct document_place *)calloc((size_t)count + 1, sizeof *places);
    if (!places)
        fail("out of memory for %d documents", count);
    for (int i = 0; i < count; i++)
        places[i].document = &documents[i];
    qsort(places, (size_t)count, sizeof *places, compare_places);
    const int rows = pack_documents(places, count, c->model.seq_length);
    struct score_schedule s = schedule_documents(places, count, rows, c->training.micro_batch_size);
    struct score_batch b = score_batch_create(c);
    struct document_score *all = (struct document_score *)calloc((size_t)c->ranks * (size_t)s.most, sizeof *all);
    if (!all)
        fail("out of memory for scores");
    int stop = stop_asked_of_any(r);
    for (int batch = 0; batch < s.batches && !stop; batch += c->ranks) {
        stop = score_batches(r, &b, &s, batch + c->rank, all);
        for (int k = 0; k < c->ranks && batch + k < s.batches; k++)
            for (int i = s.batch_first[batch + k]; i < s.batch_first[batch + k + 1]; i++) {
                const struct document_score *score =
                    &all[(size_t)k * (size_t)s.most + (size_t)(i - s.batch_first[batch + k])];
                s.documents[i]->document->log_likelihood = score->log_likelihood;
                s.documents[i]->document->greedy = score->greedy != 0;
            }
        stop = batch + c->ranks < s.batches ? stop : 0; // after the last batch the scores are complete
    }
    for (int i = 0; i < count && !stop; i++) {
        const struct scored_document *same = places[places[i].same].document;
        places[i].document->log_likelihood = same->log_likelihood;
        places[i].document->greedy = same->greedy;
        if (!isfinite(same->log_likelihood))
            fail("a text's score is %g: the model's weights or activations are out of the range of %s",
                 same->log_likelihood, sizeof(floatX) == 2 ? "bf16" : "fp32");
    }
    free(all);
    score_batch_free(&b);
    free(s.documents);
    free(s.batch_first);
    free(places);
    if (stop)
        grant_request(r, stop % STOP_SIGNALS * REQUEST_SIGNAL, stop / STOP_SIGNALS);
    return !stop;
}
