// Fills the tables first_key and last_query of struct attention_shape: which keys a query sees, and which queries see a
// key, where tokens don't see other documents, or a window limits how far back they see.
// Let document(t) be the row at which t's document begins and W the window: a query at t sees the keys
// max(document(t), t - W + 1) to t, and a key at t is seen by the queries up to min(end of t's document, t + W - 1).
#pragma once
#include "kernels/device.cuh" // LAUNCH, struct device

// Fills tables in device memory: the first key that query t sees, the last query that sees key t. On a GPU enqueues it.
static void attention_spans(int32_t *first_key,             // (B, T)
                            int32_t *last_query,            // (B, T)
                            const int32_t *document_starts, // (B, T) the t at which a token's document begins; NULL: 0
                            int window,                     // keys that a query sees, its own included; 0: all
                            int B, int T, struct device *dev);

// Returns the first key, 0 to t, that query t sees. sequence: b T, the row of the sequence's first token. Along T
// document_starts (B, T) never falls; NULL: all 0. window: keys that a query sees, its own included; 0: all.
HOST_DEVICE int32_t attention_first_key(const int32_t *document_starts, int window, int64_t sequence, int t) {
    const int document = document_starts ? document_starts[sequence + t] : 0;
    return window > 0 && t - window + 1 > document ? t - window + 1 : document;
}
// Returns the last query, t to T - 1, that sees key t. The parameters are attention_first_key's.
HOST_DEVICE int32_t attention_last_query(const int32_t *document_starts, int window, int64_t sequence, int t, int T) {
    int low = t, high = T; // query `low` sees key t; query `high` does not, or is the end
    while (high - low > 1) {
        const int middle = low + (high - low) / 2;
        if (attention_first_key(document_starts, window, sequence, middle) <= t)
            low = middle;
        else
            high = middle;
    }
    return low;
}

#ifdef TARGET_CUDA
enum { SPANS_THREADS = 256 };
static __global__ void attention_spans_kernel(int32_t *first_key, int32_t *last_query, const int32_t *document_starts,
                                              int window, int64_t rows, int T) {
    const int64_t row = (int64_t)blockIdx.x * SPANS_THREADS + threadIdx.x;
    if (row >= rows)
        return;
    const int t = (int)(row % T);
    first_key[row] = attention_first_key(document_starts, window, row - t, t);
    last_query[row] = attention_last_query(document_starts, window, row - t, t, T);
}
static void attention_spans(int32_t *first_key, int32_t *last_query, const int32_t *document_starts, int window, int B,
                            int T, struct device *dev) {
    const int64_t rows = (int64_t)B * T;
    LAUNCH(dev, attention_spans_kernel, blocks_for(rows, SPANS_THREADS), SPANS_THREADS, 0, first_key, last_query,
           document_starts, window, rows, T);
}
#else
static void attention_spans(int32_t *first_key, int32_t *last_query, const int32_t *document_starts, int window, int B,
                            int T, struct device *dev) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < (int64_t)B * T; row++) {
        const int t = (int)(row % T);
        first_key[row] = attention_first_key(document_starts, window, row - t, t);
        last_query[row] = attention_last_query(document_starts, window, row - t, t, T);
    }
}
#endif
