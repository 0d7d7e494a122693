// The choice of cuBLASLt's algorithms (kernels/matmul/tuning.cuh), on the stand-in for cuBLASLt: every algorithm
// computes the right result, the fastest is chosen, and an earlier choice is taken where it can be.
#define DEVICE_MEMORY_MANAGED       // so that the host can read the results
#include "kernels/matmul/matmul.cu" // under test
#include "test/fails.h"             // assert_fails
#include "test/testing.h"           // cmocka, random data, comparison

enum { M = 96, N = 40, K = 64 };

struct fixture {
    struct device dev;
    floatX *in, *weight, *bias, *dout, *out, *din, *dpre; // all in `memory`; dpre: din through GELU's derivative
    float *dweight, *dbias;
    void *workspace, *memory;
    size_t memory_bytes;
};

static struct fixture fixture_make(void) {
    struct fixture f;
    memset(&f, 0, sizeof f);
    f.dev.threads = 2;
    device_open(&f.dev, 0, true);
    f.dev.matmul = matmul_create(&f.dev);
    f.memory_bytes = 1 << 20;
    f.memory = device_allocate(f.memory_bytes);
    f.in = (floatX *)f.memory;
    f.weight = f.in + M * K;
    f.dout = f.weight + N * K;
    f.out = f.dout + M * N;
    f.din = f.out + M * N;
    f.dpre = f.din + M * K;
    f.bias = f.dpre + M * K;
    f.dweight = (float *)device_allocate(N * K * sizeof *f.dweight);
    f.dbias = (float *)device_allocate(N * sizeof *f.dbias);
    f.workspace = device_allocate(matmul_workspace_bytes(M, N, K, &f.dev));
    struct matmul_noise noise = matmul_noise_open(f.memory, f.memory_bytes, &f.dev);
    matmul_noise_close(&noise, &f.dev);
    return f;
}
static void fixture_free(struct fixture *f) {
    device_free(f->memory, 0);
    device_free(f->dweight, 0);
    device_free(f->dbias, 0);
    device_free(f->workspace, 0);
    matmul_destroy(f->dev.matmul);
    device_close(&f->dev);
}
static void list(struct fixture *f, bool add) {
    matmul_list_begin(f->dev.matmul);
    matmul_forward(f->out, f->in, f->weight, f->bias, M, N, K, f->workspace, &f->dev);
    matmul_backward_input(f->din, f->dout, f->weight, M, N, K, f->workspace, &f->dev);
    matmul_backward_weight(f->dweight, f->dbias, f->dout, f->in, M, N, K, add, f->workspace, &f->dev);
    assert_false(matmul_backward_input_gelu(f->dpre, f->dout, f->weight, f->in, true, M, N, K, f->workspace, &f->dev));
    matmul_forward(f->out, f->in, f->weight, f->bias, M, N, K, f->workspace, &f->dev); // a second time
    matmul_list_end(f->dev.matmul);
    assert_int_equal(f->dev.matmul->product_count, 4);
}
static void tune(struct fixture *f) {
    struct matmul_noise noise = matmul_noise_open(f->memory, f->memory_bytes, &f->dev);
    for (int i = 0; i < f->dev.matmul->product_count; i++)
        assert_true(matmul_tune(f->dev.matmul, &f->dev.matmul->products[i], &noise, &f->dev));
    matmul_noise_close(&noise, &f->dev);
    assert_int_equal(f->dev.matmul->choice_count, f->dev.matmul->product_count);
}

static double element(const floatX *x, int64_t i) { return to_float(x[i]); }
static double gelu_derivative_of(double x) {
    const double c = sqrt(2 / M_PI), t = tanh(c * (x + 0.044715 * x * x * x));
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c * (1 + 3 * 0.044715 * x * x);
}
// Checks a product against double. dweight and dbias must exceed it by to_add. applies_gelu: as gemm_applies_gelu.
static void assert_right(const struct gemm *gemm, const float *dbias, double to_add, bool applies_gelu) {
    const struct gemm_operand *a = &gemm->a, *b = &gemm->b;
    for (int64_t i = 0; i < gemm->rows; i++)
        for (int64_t j = 0; j < gemm->cols; j++) {
            double sum = gemm->bias ? element(gemm->bias, j) : 0, magnitude = fabs(sum) + fabs(to_add);
            for (int64_t k = 0; k < gemm->depth; k++) {
                const double product = element(a->data, a->transposed ? k * a->ld + i : i * a->ld + k) *
                                       element(b->data, b->transposed ? j * b->ld + k : k * b->ld + j);
                sum += product;
                magnitude += fabs(product);
            }
            const int64_t at = i * gemm->cols + j;
            if (applies_gelu)
                sum *= gelu_derivative_of(element(gemm->gelu, at));
            if (gemm->sum)
                assert_near(gemm->sum[at], sum + to_add, 1e-5 * magnitude, at);
            else
                assert_near(element(gemm->out, at), sum, 1e-2 * magnitude, at);
        }
    for (int64_t i = 0; dbias && i < gemm->rows; i++) {
        double sum = to_add, magnitude = fabs(to_add);
        for (int64_t k = 0; k < gemm->depth; k++) {
            sum += element(a->data, k * a->ld + i);
            magnitude += fabs(element(a->data, k * a->ld + i));
        }
        assert_near(dbias[i], sum, 1e-5 * magnitude, i);
    }
}

static void every_algorithm_is_right(void **state) {
    struct fixture f = fixture_make();
    for (int add = 0; add < 2; add++) {
        list(&f, add);
        for (int i = 0; i < f.dev.matmul->product_count; i++) {
            const struct matmul_product *product = &f.dev.matmul->products[i];
            struct matmul_candidates candidates;
            candidates.count = 0;
            matmul_add_candidates(&candidates, product, false, f.dev.matmul);
            assert_int_equal(candidates.count, MATMUL_CANDIDATES);
            const bool may_fuse = matmul_may_fuse(product);
            assert_int_equal(may_fuse, product->dbias || product->gemm.gelu);
            if (may_fuse)
                matmul_add_candidates(&candidates, product, true, f.dev.matmul);
            assert_int_equal(candidates.count, may_fuse ? 2 * MATMUL_CANDIDATES : MATMUL_CANDIDATES);
            float first[N * K];
            int other_bits = 0;
            for (int c = 0; c < candidates.count; c++) {
                for (int k = 0; k < N * K; k++)
                    f.dweight[k] = add ? 2 : NAN;
                for (int k = 0; k < N; k++)
                    f.dbias[k] = add ? 2 : NAN;
                assert_int_equal(
                    matmul_enqueue(&candidates.of[c].plan, &product->gemm, product->dbias, product->workspace, &f.dev),
                    CUBLAS_STATUS_SUCCESS);
                device_synchronize(&f.dev);
                assert_right(&product->gemm, product->dbias, add ? 2 : 0, matmul_fuses_dgelu(&candidates.of[c].plan));
                if (c == 0)
                    memcpy(first, f.dweight, sizeof first);
                other_bits += memcmp(first, f.dweight, sizeof first) != 0;
            }
            assert_true(product->gemm.sum ? other_bits > 0 : other_bits == 0); // only dweight's bits
        }
    }
    fixture_free(&f);
}

static void the_fastest_is_chosen(void **state) {
    static const struct {
        const char *times, *bgrad_times, *dgelu_times;
        // the candidate of plain products, of products with a bias gradient, and of products through GELU
        int plain, with_bias, with_gelu;
    } cases[] = {{"9,8,7,3,5,6,4,8", "20", "30", 3, 3, 3},
                 {"10,9.9,12", "9.9", "9.9", 0, 0, 0},
                 {"10,9.7,12", "15", "12,9.9,9.1", 1, 1, MATMUL_CANDIDATES + 2},
                 {"10,9,9,9", "12,8,12", "9", 1, MATMUL_CANDIDATES + 1, 1},
                 {NULL, NULL, NULL, 0, 0, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct fixture f = fixture_make();
        if (cases[i].times) {
            setenv("EMU_CUBLASLT_TIMES", cases[i].times, 1);
            setenv("EMU_CUBLASLT_BGRAD_TIMES", cases[i].bgrad_times, 1);
            setenv("EMU_CUBLASLT_DGELU_TIMES", cases[i].dgelu_times, 1);
        }
        list(&f, true);
        tune(&f);
        unsetenv("EMU_CUBLASLT_TIMES");
        unsetenv("EMU_CUBLASLT_BGRAD_TIMES");
        unsetenv("EMU_CUBLASLT_DGELU_TIMES");
        for (int k = 0; k < f.dev.matmul->choice_count; k++) {
            const struct matmul_choice *choice = &f.dev.matmul->choices[k];
            const int expected = choice->key.has_dbias ? cases[i].with_bias
                                 : choice->key.gelu    ? cases[i].with_gelu
                                                       : cases[i].plain;
            assert_int_equal(choice->candidate, expected);
            assert_int_equal(choice->fused, expected >= MATMUL_CANDIDATES);
        }
        const bool applies =
            matmul_backward_input_gelu(f.dpre, f.dout, f.weight, f.in, true, M, N, K, f.workspace, &f.dev);
        assert_int_equal(applies, cases[i].with_gelu >= MATMUL_CANDIDATES);
        struct gemm through_gelu = gemm_backward_input(f.dpre, K, f.dout, N, f.weight, M, N, K, false);
        through_gelu.gelu = f.in;
        device_synchronize(&f.dev);
        assert_right(&through_gelu, NULL, 0, applies);
        // Later calls take the choice, whether the weight's gradient is overwritten or added to.
        for (int add = 0; add < 2; add++) {
            const struct gemm gemm = gemm_backward_weight(f.dweight, f.dout, N, f.in, K, M, N, K, add);
            const struct matmul_plan *plan = matmul_plan_for(&gemm, f.dbias, f.dev.matmul);
            const struct matmul_choice *choice = matmul_choice_of(f.dev.matmul, &plan->key);
            assert_non_null(choice);
            assert_memory_equal(&plan->algorithm, &choice->algorithm, sizeof plan->algorithm);
            matmul_backward_weight(f.dweight, f.dbias, f.dout, f.in, M, N, K, add, f.workspace, &f.dev);
            device_synchronize(&f.dev);
            if (!add)
                assert_right(&gemm, f.dbias, 0, false);
        }
        fixture_free(&f);
    }
}

static void epilogues_that_err_are_not_taken(void **state) {
    struct fixture f = fixture_make();
    setenv("EMU_CUBLASLT_BGRAD_TIMES", "1", 1);
    setenv("EMU_CUBLASLT_DGELU_TIMES", "1", 1);
    setenv("EMU_CUBLASLT_LOOSE", "1", 1);
    list(&f, false);
    tune(&f);
    for (int i = 0; i < f.dev.matmul->choice_count; i++)
        assert_false(f.dev.matmul->choices[i].fused);
    unsetenv("EMU_CUBLASLT_BGRAD_TIMES");
    unsetenv("EMU_CUBLASLT_DGELU_TIMES");
    unsetenv("EMU_CUBLASLT_LOOSE");
    fixture_free(&f);
}

// Checks that the fastest of the right algorithms is chosen where the fastest of all, or the first, varies, errs or
// does not run.
static void algorithms_that_vary_or_do_not_run_are_not_taken(void **state) {
    static const struct {
        const char *variable, *rank;
        int chosen;
    } cases[] = {{"EMU_CUBLASLT_VARIES", "2", 4}, {"EMU_CUBLASLT_REFUSES", "2", 4}, {"EMU_CUBLASLT_WRONG", "2", 4},
                 {"EMU_CUBLASLT_WRONG", "0", 2},  {"EMU_CUBLASLT_VARIES", "0", 2},  {"EMU_CUBLASLT_REFUSES", "0", 2},
                 {"EMU_CUBLASLT_REFUSES", "7", 2}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct fixture f = fixture_make();
        setenv("EMU_CUBLASLT_TIMES", "9,8,3,8,5,8", 1);
        setenv(cases[i].variable, cases[i].rank, 1);
        list(&f, false);
        tune(&f);
        unsetenv("EMU_CUBLASLT_TIMES");
        unsetenv(cases[i].variable);
        for (int k = 0; k < f.dev.matmul->choice_count; k++) {
            const struct matmul_choice *choice = &f.dev.matmul->choices[k];
            assert_int_equal(choice->candidate, cases[i].chosen);
            assert_true(isfinite(choice->first_us) && isfinite(choice->us));
        }
        fixture_free(&f);
    }
}

// Returns how many listed products the library's third algorithms multiply wrongly.
static int prove_all(struct fixture *f) {
    int wrong = 0;
    struct matmul_noise noise = matmul_noise_open(f->memory, f->memory_bytes, &f->dev);
    setenv("EMU_CUBLASLT_WRONG", "2", 1);
    for (int i = 0; i < f->dev.matmul->product_count; i++)
        wrong += !matmul_prove(f->dev.matmul, &f->dev.matmul->products[i], &noise, &f->dev);
    matmul_noise_close(&noise, &f->dev);
    unsetenv("EMU_CUBLASLT_WRONG");
    return wrong;
}
// Checks products with an epilogue that sums the bias gradient: the sums are right where the product is wrong.
static void products_beside_right_sums_are_proven(void **state) {
    for (int wrong = 0; wrong < 2; wrong++) {
        struct fixture f = fixture_make();
        setenv("EMU_CUBLASLT_BGRAD_TIMES", "9,8,1,7", 1);
        if (wrong)
            setenv("EMU_CUBLASLT_WRONG", "2", 1);
        list(&f, false);
        tune(&f);
        unsetenv("EMU_CUBLASLT_BGRAD_TIMES");
        unsetenv("EMU_CUBLASLT_WRONG");
        for (int k = 0; k < f.dev.matmul->choice_count; k++)
            if (f.dev.matmul->choices[k].key.has_dbias)
                assert_int_equal(f.dev.matmul->choices[k].candidate, MATMUL_CANDIDATES + (wrong ? 3 : 2));
        assert_int_equal(f.dev.matmul->wrong > 0, wrong);
        if (!wrong) { // until wrong choices give way to the first
            assert_true(prove_all(&f) > 0);
            for (int i = 0; i < f.dev.matmul->product_count; i++)
                assert_true(matmul_drop_choice(f.dev.matmul, &f.dev.matmul->products[i]));
            assert_int_equal(f.dev.matmul->choice_count, f.dev.matmul->product_count);
            assert_int_equal(prove_all(&f), 0);
        }
        fixture_free(&f);
    }
}

// Checks that the heuristics' first algorithm is kept where all results are 0, which are the same bits even by an
// algorithm that varies. So a run that goes on has the same algorithm.
static void results_that_tell_nothing_leave_the_first(void **state) {
    for (int zeros = 0; zeros < 2; zeros++) {
        struct fixture f = fixture_make();
        setenv("EMU_CUBLASLT_TIMES", "9,8,3,8", 1);
        list(&f, false);
        device_zero(f.memory, f.memory_bytes, &f.dev);
        struct matmul_noise noise = matmul_noise_open(f.memory, zeros ? 0 : f.memory_bytes, &f.dev);
        for (int i = 0; i < f.dev.matmul->product_count; i++)
            assert_true(matmul_tune(f.dev.matmul, &f.dev.matmul->products[i], &noise, &f.dev));
        matmul_noise_close(&noise, &f.dev);
        unsetenv("EMU_CUBLASLT_TIMES");
        for (int i = 0; i < f.dev.matmul->choice_count; i++) {
            const struct matmul_choice *choice = &f.dev.matmul->choices[i];
            assert_int_equal(choice->candidate, zeros ? 0 : 2);
            assert_int_equal(choice->first_us == 0 && choice->us == 0, zeros);
        }
        fixture_free(&f);
    }
}

static void a_choice_is_taken_where_it_can_be(void **state) {
    struct fixture f = fixture_make();
    setenv("EMU_CUBLASLT_BGRAD_TIMES", "1", 1);
    setenv("EMU_CUBLASLT_DGELU_TIMES", "1", 1);
    list(&f, true);
    tune(&f);
    unsetenv("EMU_CUBLASLT_BGRAD_TIMES");
    unsetenv("EMU_CUBLASLT_DGELU_TIMES");
    struct matmul_library *library = f.dev.matmul, *other = matmul_create(&f.dev);
    f.dev.matmul = other;
    list(&f, true);
    for (int i = 0; i < library->choice_count; i++) {
        struct matmul_choice choice = library->choices[i];
        assert_int_equal(choice.fused, choice.key.has_dbias || choice.key.gelu);
        choice.key.rows++; // a product that this run does not have
        assert_false(matmul_take_choice(other, &choice));
        choice = library->choices[i];
        choice.algorithm.data[0] ^= 1; // not an algorithm
        assert_false(matmul_take_choice(other, &choice));
        choice = library->choices[i];
        choice.fused = !choice.fused; // for another operation
        assert_false(matmul_take_choice(other, &choice));
        choice = library->choices[(i + 1) % library->choice_count]; // another product's algorithm
        choice.key = library->choices[i].key;
        choice.fused = library->choices[i].fused;
        assert_false(matmul_take_choice(other, &choice));
        assert_true(matmul_take_choice(other, &library->choices[i]));
        assert_false(matmul_take_choice(other, &library->choices[i])); // a second time
    }
    assert_int_equal(other->choice_count, library->choice_count);
    matmul_destroy(library);
    fixture_free(&f);
}

// Checks that noise, as operands of each type, is finite, has both signs, and is too small to overflow a product.
static void noise_is_finite(void **state) {
    int negative = 0;
    for (uint64_t i = 0; i < 100000; i++) {
        const uint32_t word = matmul_noise_word(i), codes = matmul_noise_codes(i);
        float x;
        memcpy(&x, &word, sizeof x);
        assert_true(fabsf(x) >= 0.125f && fabsf(x) <= 2);
        negative += x < 0;
        for (int half = 0; half < 2; half++) {
            const bf16 y = {(uint16_t)(word >> 16 * half)};
            assert_true(fabsf(bf16_to_float(y)) >= 0.125f && fabsf(bf16_to_float(y)) <= 2);
        }
        for (int byte = 0; byte < 4; byte++) {
            for (int format = 0; format < 2; format++) {
                const float code = fp8_decode((fp8)(codes >> 8 * byte), format ? FP8_E5M2 : FP8_E4M3);
                assert_true(fabsf(code) >= 0.5f && fabsf(code) <= 2 && code * 2 == floorf(code * 2));
            }
        }
    }
    assert_true(negative > 45000 && negative < 55000);
}

// Checks that a list that is full says so.
// Checks that FP8 sums of 13 bits over the whole depth, as Hopper's tensor cores have, are right, unless a fault is
// planted.
static void sums_of_13_bits_are_right(void **state) {
    enum { ROWS = 16, COLS = 16, DEPTH = 8192 };
    setenv("EMU_CAPABILITY", "9.0", 1);
    for (int wrong = 0; wrong < 2; wrong++) {
        struct fixture f = fixture_make();
        const struct fp8_matrix a = {(fp8 *)f.memory, f.dweight, FP8_E4M3, FP8_PER_TENSOR};
        const struct fp8_matrix b = {a.codes + ROWS * DEPTH, f.dweight, FP8_E4M3, FP8_PER_TENSOR};
        *f.dweight = 1; // the inverse scale
        matmul_list_begin(f.dev.matmul);
        matmul_fp8((floatX *)(f.dweight + 64), a, b, NULL, ROWS, COLS, DEPTH, true, f.workspace, &f.dev);
        matmul_list_end(f.dev.matmul);
        setenv("EMU_CUBLASLT_TRUNCATE", "1", 1);
        setenv("EMU_CUBLASLT_TIMES", "1,9,9,9", 1);
        if (wrong)
            setenv("EMU_CUBLASLT_WRONG", "0", 1);
        tune(&f);
        unsetenv("EMU_CUBLASLT_WRONG");
        unsetenv("EMU_CUBLASLT_TIMES");
        unsetenv("EMU_CUBLASLT_TRUNCATE");
        assert_int_equal(f.dev.matmul->wrong, wrong);
        fixture_free(&f);
    }
    unsetenv("EMU_CAPABILITY");
}

static void a_list_overflows(void **state) {
    struct fixture f = fixture_make();
    struct matmul_library *library = f.dev.matmul;
    for (int more = 0; more < 2; more++) {
        matmul_list_begin(library);
        for (int rows = 1; rows <= MATMUL_PLANS + more; rows++)
            matmul_forward(f.out, f.in, f.weight, f.bias, rows, N, K, f.workspace, &f.dev);
        matmul_list_end(library);
        assert_int_equal(library->product_count, MATMUL_PLANS);
        assert_int_equal(library->list_overflowed, more);
    }
    list(&f, false);
    assert_false(library->list_overflowed);
    fixture_free(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_algorithm_is_right),
        cmocka_unit_test(the_fastest_is_chosen),
        cmocka_unit_test(epilogues_that_err_are_not_taken),
        cmocka_unit_test(algorithms_that_vary_or_do_not_run_are_not_taken),
        cmocka_unit_test(products_beside_right_sums_are_proven),
        cmocka_unit_test(results_that_tell_nothing_leave_the_first),
        cmocka_unit_test(a_choice_is_taken_where_it_can_be),
        cmocka_unit_test(noise_is_finite),
        cmocka_unit_test(sums_of_13_bits_are_right),
        cmocka_unit_test(a_list_overflows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
