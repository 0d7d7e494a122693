// kernels/embedding.cuh against sums in double: tokens that repeat, positions that restart with documents, a factor,
// dropout. Its backward against finite differences of these sums.
//
// Tolerances. fp32: an addition and two products, and in backward some tens of additions at one place: 1e-6. bf16:
// forward rounds the result once, and a tenth more; backward sums in fp32.
#include "kernels/embedding.cuh"
#include "test/testing.h"
#include <omp.h> // omp_set_num_threads

#define TOLERANCE (sizeof(floatX) == 2 ? 1.1 * FLOATX_ROUNDING : 1e-6)
static const double FP32_SUMS = 1e-6;
static struct device device = {2, NULL};
enum { V = 11, MAX_T = 48 };

// Documents begin at each multiple of `document`, less the sequence's number; 0: there are no documents.
struct shape {
    int B, T, start, C, document;
    float scale;
};
static const struct shape shapes[] = {
    {1, 1, 0, 1, 0, 1}, {1, 1, 39, 63, 0, 12}, {2, 5, 3, 64, 0, 1}, {3, 7, 0, 65, 2, 1}, {2, 40, 0, 200, 9, 0.3f}};
enum { SHAPES = sizeof shapes / sizeof *shapes };

static int document_start(int document, int b, int t) {
    return document && t >= document - b ? (t + b) / document * document - b : 0;
}
// Returns the row (B, T) at which each token's document begins, which the caller frees; NULL where there are no
// documents.
static int32_t *document_starts(int document, int B, int T) {
    int32_t *starts = document ? (int32_t *)test_alloc(sizeof *starts * (size_t)(B * T)) : NULL;
    for (int row = 0; row < B * T && starts; row++)
        starts[row] = document_start(document, row / T, row % T);
    return starts;
}

static void test_case_shape(uint64_t seed, int B, int T, int C, int with_position, struct dropout dropout) {
    test_case(seed, "V %d, B %d, T %d, C %d, %s, dropout %g", V, B, T, C,
              with_position ? "learned positions" : "no positions", (double)dropout.p);
}

static void reference(double *out, const int32_t *tokens, const double *wte, const double *wpe, struct shape s,
                      struct dropout dropout) {
    for (int b = 0; b < s.B; b++)
        for (int t = 0; t < s.T; t++)
            for (int c = 0; c < s.C; c++) {
                const int64_t i = ((int64_t)b * s.T + t) * s.C + c;
                const int position = test_start(s.start, b) + t - document_start(s.document, b, t);
                out[i] = dropout_scale(dropout, (uint64_t)i) * s.scale *
                         (wte[tokens[b * s.T + t] * s.C + c] + (wpe != NULL ? wpe[position * s.C + c] : 0));
            }
}
static struct dropout test_dropout(int on) {
    const struct dropout d = {on ? 0.4f : 0, 1, 2, 3, DROPOUT_EMBEDDING};
    return d;
}
static int32_t *test_tokens(int64_t n, uint64_t *random) {
    int32_t *tokens = (int32_t *)test_alloc((size_t)n * sizeof *tokens);
    for (int64_t i = 0; i < n; i++)
        tokens[i] = (int32_t)(test_random(random) % V);
    return tokens;
}

static void forward(void **state) {
    for (int k = 0; k < SHAPES; k++)
        for (int variant = 0; variant < 4; variant++) {
            const struct shape s = shapes[k];
            const int with_position = variant & 1;
            const int64_t n = (int64_t)s.B * s.T * s.C;
            uint64_t random = (uint64_t)n;
            test_case_shape(random, s.B, s.T, s.C, with_position, test_dropout(variant >> 1));
            double *wte_exact, *wpe_exact, *expected = test_doubles(n);
            floatX *wte = test_floats(&wte_exact, V * s.C, 1, &random);
            floatX *out = (floatX *)test_alloc((size_t)n * sizeof *out);
            floatX *wpe = test_floats(&wpe_exact, MAX_T * s.C, 1, &random);
            int32_t *tokens = test_tokens(s.B * s.T, &random), *starts = test_starts(s.B, s.start);
            int32_t *documents = document_starts(s.document, s.B, s.T);
            const struct token_positions positions = {starts, documents};
            reference(expected, tokens, wte_exact, with_position ? wpe_exact : NULL, s, test_dropout(variant >> 1));
            embedding_forward(out, tokens, wte, with_position ? wpe : NULL, positions, s.B, s.T, s.C, s.scale,
                              test_dropout(variant >> 1), &device);
            double *result = to_doubles(out, n);
            assert_close(result, expected, n, TOLERANCE);
            void *all[] = {wte_exact, wpe_exact, expected, wte, out, wpe, tokens, starts, documents, result};
            for (size_t i = 0; i < sizeof all / sizeof *all; i++)
                free(all[i]);
        }
}

// Fills a table's gradient (n) with what it holds before: sums of earlier micro-steps or, where these are overwritten,
// NaN.
static void table_begin(float *sums, double *expected, int64_t n, bool add) {
    for (int64_t i = 0; i < n; i++) {
        expected[i] = add ? 0.25 * (double)(i % 3) : 0;
        sums[i] = add ? (float)expected[i] : NAN;
    }
}

// Computes d/dw of sum(dout * out) by differences of the reference, which is linear in the weights.
static void differences(double *dweights, double *weights, int64_t count, const double *dout, const int32_t *tokens,
                        const double *wte, const double *wpe, struct shape s, struct dropout dropout) {
    const int64_t n = (int64_t)s.B * s.T * s.C;
    double *out = test_doubles(n);
    for (int64_t j = 0; j < count; j++) {
        const double before = weights[j];
        for (int sign = -1; sign <= 1; sign += 2) {
            weights[j] = before + sign * 0.5;
            reference(out, tokens, wte, wpe, s, dropout);
            for (int64_t i = 0; i < n; i++)
                dweights[j] += sign * dout[i] * out[i];
        }
        weights[j] = before;
    }
    free(out);
}

static void backward(void **state) {
    const struct shape backward_shapes[] = {{1, 1, 0, 1, 0, 1},  {3, 5, 0, 17, 0, 0.22f}, {4, 9, 0, 66, 0, 1},
                                            {2, 3, 0, 72, 1, 1}, {3, 11, 0, 20, 4, 12},   {3, 4, 2, 9, 0, 1}};
    for (int k = 0; k < 6; k++)
        for (int variant = 0; variant < 4; variant++) {
            const struct shape s = backward_shapes[k];
            const int with_position = variant & 1, P = s.T + (s.start ? s.start + s.B : 0);
            const struct dropout dropout = test_dropout(variant >> 1);
            const int64_t n = (int64_t)s.B * s.T * s.C;
            uint64_t random = (uint64_t)(n + variant);
            test_case_shape(random, s.B, s.T, s.C, with_position, dropout);
            double *dout_exact, *wte = test_doubles(V * s.C), *wpe = test_doubles(P * s.C);
            double *dwte_expected = test_doubles(V * s.C), *dwpe_expected = test_doubles(P * s.C);
            floatX *dout = test_floats(&dout_exact, n, 1, &random);
            float *dwte = (float *)test_alloc((size_t)(V * s.C) * sizeof *dwte);
            float *dwpe = (float *)test_alloc((size_t)(P * s.C) * sizeof *dwpe);
            int32_t *tokens = test_tokens(s.B * s.T, &random);
            const struct table_gradient dwte_of = {dwte, V, k % 2 == 0},
                                        dwpe_of = {with_position ? dwpe : NULL, P, k % 3 > 0};
            table_begin(dwte, dwte_expected, V * s.C, dwte_of.add);
            table_begin(dwpe, dwpe_expected, P * s.C, dwpe_of.add);
            void *workspace = test_alloc(embedding_backward_workspace_bytes(s.B, s.T, &device));
            int32_t *starts = test_starts(s.B, s.start), *documents = document_starts(s.document, s.B, s.T);
            const struct token_positions positions = {starts, documents};
            embedding_backward(dwte_of, dwpe_of, dout, tokens, positions, s.B, s.T, s.C, s.scale, dropout, workspace,
                               &device);
            free(workspace);
            differences(dwte_expected, wte, V * s.C, dout_exact, tokens, wte, wpe, s, dropout);
            if (!with_position && !dwpe_of.add)
                memset(dwpe, 0, sizeof *dwpe * (size_t)(P * s.C));
            if (with_position)
                differences(dwpe_expected, wpe, P * s.C, dout_exact, tokens, wte, wpe, s, dropout);
            double *dwte_result = floats_to_doubles(dwte, V * s.C), *dwpe_result = floats_to_doubles(dwpe, P * s.C);
            assert_close(dwte_result, dwte_expected, V * s.C, FP32_SUMS);
            assert_close(dwpe_result, dwpe_expected, P * s.C, FP32_SUMS);
            void *all[] = {dout_exact, wte,    wpe,         dwte_expected, dwpe_expected, dout,     dwte,
                           dwpe,       tokens, dwte_result, dwpe_result,   starts,        documents};
            for (size_t i = 0; i < sizeof all / sizeof *all; i++)
                free(all[i]);
        }
}

// Checks rows enough for several tiles of a sort, half of them of one token. That token's sum has thousands of terms of
// one size, whose roundings walk randomly over sqrt(5000) 2^-24 = 4e-6.
static void many_rows_of_a_token(void **state) {
    const int shapes[][3] = {{1, 64, 8}, {1, 65, 8}, {1, 320, 8}, {3, 700, 33}, {2, 4800, 24}}; // B, T, C
    for (int k = 0; k < 5; k++)
        for (int variant = 0; variant < 4; variant++) {
            const int B = shapes[k][0], T = shapes[k][1], C = shapes[k][2];
            const int document = variant == 1 ? 67 : variant == 3 ? 1 : 0; // in the last variant each row is a document
            const struct dropout dropout = test_dropout(variant == 1);
            uint64_t random = (uint64_t)k;
            test_case_shape(random, B, T, C, true, dropout);
            double *dout_exact, *expected = test_doubles(V * C), *expected_positions = test_doubles(T * C);
            floatX *dout = test_floats(&dout_exact, (int64_t)B * T * C, 1, &random);
            int32_t *tokens = test_tokens(B * T, &random), *documents = document_starts(document, B, T);
            const struct token_positions positions = {NULL, documents};
            float *dwte = (float *)test_alloc(sizeof *dwte * (size_t)(V * C));
            float *dwpe = (float *)test_alloc(sizeof *dwpe * (size_t)(T * C));
            const size_t workspace_bytes = embedding_backward_workspace_bytes(B, T, &device);
            char *workspace = (char *)test_alloc(workspace_bytes + 1);
            memset(workspace, 0xff, workspace_bytes + 1);
            table_begin(dwte, expected, V * C, false);
            table_begin(dwpe, expected_positions, T * C, false);
            const struct table_gradient dwte_of = {dwte, V, false}, dwpe_of = {dwpe, T, false};
            for (int row = 0; row < B * T; row++) {
                // tokens of 62, 63, ... 66 rows, about the number from which the sum is computed in another way
                if (T == 320)
                    tokens[row] = (row >= 62) + (row >= 125) + (row >= 189) + (row >= 254);
                else if (variant == 2 || row % 2 == 0)
                    tokens[row] = V - 2; // of all rows, or of half of them
                for (int c = 0; c < C; c++) {
                    const double d =
                        dropout_scale(dropout, (uint64_t)row * (uint64_t)C + (uint64_t)c) * dout_exact[row * C + c];
                    expected[tokens[row] * C + c] += d;
                    expected_positions[(row % T - document_start(document, row / T, row % T)) * C + c] += d;
                }
            }
            embedding_backward(dwte_of, dwpe_of, dout, tokens, positions, B, T, C, 1, dropout, workspace, &device);
            assert_int_equal((unsigned char)workspace[workspace_bytes], 0xff);
            double *result = floats_to_doubles(dwte, V * C), *dwpe_result = floats_to_doubles(dwpe, T * C);
            assert_close(result, expected, V * C, 4e-6);
            assert_close(dwpe_result, expected_positions, T * C, document ? 4e-6 : FP32_SUMS);
            void *all[] = {dout_exact, expected, expected_positions, dout,     tokens, dwte, dwpe,
                           workspace,  result,   dwpe_result,        documents};
            for (size_t i = 0; i < sizeof all / sizeof *all; i++)
                free(all[i]);
        }
}

static void same_bits_for_any_threads(void **state) {
    enum { B = 3, T = 140, C = 330 };
    uint64_t random = 1;
    test_case_shape(random, B, T, C, true, test_dropout(1));
    double *dout_exact;
    floatX *dout = test_floats(&dout_exact, B * T * C, 1, &random);
    int32_t *tokens = test_tokens(B * T, &random);
    void *workspace = test_alloc(embedding_backward_workspace_bytes(B, T, &device));
    int32_t *documents = document_starts(31, B, T);
    const struct token_positions positions = {NULL, documents};
    float *dwte[2], *dwpe[2];
    const int threads = omp_get_max_threads();
    for (int row = 0; row < B * T; row += 3)
        tokens[row] = 5;
    for (int i = 0; i < 2; i++) {
        dwte[i] = (float *)test_alloc(sizeof(float) * V * C);
        dwpe[i] = (float *)test_alloc(sizeof(float) * T * C);
        const struct table_gradient dwte_of = {dwte[i], V, false}, dwpe_of = {dwpe[i], T, false};
        omp_set_num_threads(i == 0 ? 1 : 5);
        embedding_backward(dwte_of, dwpe_of, dout, tokens, positions, B, T, C, 0.7f, test_dropout(1), workspace,
                           &device);
    }
    omp_set_num_threads(threads);
    assert_memory_equal(dwte[0], dwte[1], sizeof(float) * V * C);
    assert_memory_equal(dwpe[0], dwpe[1], sizeof(float) * T * C);
    void *all[] = {dout, dout_exact, tokens, workspace, dwte[0], dwte[1], dwpe[0], dwpe[1], documents};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(forward),
        cmocka_unit_test(backward),
        cmocka_unit_test(many_rows_of_a_token),
        cmocka_unit_test(same_bits_for_any_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
