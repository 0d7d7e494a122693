// The judge of attention at a run's start (run/check_attention.cuh): it takes right results, and finds each fault that
// is planted in right results. What is timed at a start (run/time_attention.cuh): it hides what the run hides.
#include "run/check_attention.cuh"   // under test
#include "kernels/matmul/matmul.cuh" // matmul_create
#include "run/time_attention.cuh"    // under test
#include "test/testing.h"            // cmocka

enum { MULTIPROCESSORS = 3, LAST_TOKENS = 6 };

struct fixture {
    struct device dev;
    struct attention_check check;
    struct attention_judge judge;
    struct attention_results right;
};
static struct fixture fixture_make_dropping(bool hides_keys, float dropout) {
    struct fixture f;
    memset(&f, 0, sizeof f);
    f.dev.threads = 1;
    device_open(&f.dev, 0, true);
    f.dev.matmul = matmul_create(&f.dev);
    f.check.backend = ATTENTION_FLASH;
    f.check.simpler = ATTENTION_UNFUSED;
    f.check.shape.num_heads = 2;
    f.check.shape.num_query_groups = 1;
    f.check.shape.head_dim = 32;
    f.check.shape.scale = 0.2f;
    f.check.hides_keys = hides_keys;
    f.check.dropout = dropout;
    f.check.rotary = f.check.biases = f.check.amax = true;
    f.judge = judge_open(&f.check, MULTIPROCESSORS, &f.dev);
    f.right = judge_run(&f.judge, f.check.backend, &f.check);
    return f;
}
static struct fixture fixture_make(bool hides_keys) { return fixture_make_dropping(hides_keys, 0); }
static void fixture_free(struct fixture *f) {
    results_free(&f->right);
    judge_close(&f->judge);
    matmul_destroy(f->dev.matmul);
    device_close(&f->dev);
}
static floatX *row_of(struct fixture *f, enum judge_kind kind, int64_t row, int h) {
    return (floatX *)judge_row(&f->judge, &f->right, kind, row, h);
}
// Returns what judge_by_host says of the results; "RIGHT": it finds nothing.
static const char *by_host(struct fixture *f) {
    static char reason[256];
    double largest = 0;
    reason[0] = '\0';
    judge_by_host(reason, sizeof reason, &f->judge, &f->right, &largest);
    return *reason ? reason : "RIGHT";
}
// Returns what judge_by_simpler says of the results beside `copy`, a copy of them; "RIGHT": it finds nothing.
static const char *beside(struct fixture *f, const struct attention_results *copy) {
    static char reason[256];
    double largest = 0;
    reason[0] = '\0';
    judge_by_simpler(reason, sizeof reason, &f->judge, &f->right, copy, "the copy", &largest);
    return *reason ? reason : "RIGHT";
}
static struct attention_results copy_of(const struct fixture *f) {
    struct attention_results copy = f->right;
    copy.partial = NULL;
    copy.out = (floatX *)judge_memory(f->judge.out_bytes);
    copy.dqkv = (floatX *)judge_memory(f->judge.qkv_bytes);
    memcpy(copy.out, f->right.out, f->judge.out_bytes);
    memcpy(copy.dqkv, f->right.dqkv, f->judge.qkv_bytes);
    return copy;
}

static void what_is_right_is_taken(void **state) {
    for (int hides = 0; hides < 2; hides++) {
        struct fixture f = fixture_make_dropping(hides, hides ? 0.25f : 0);
        for (int stage = JUDGE_BY_ITSELF; stage <= JUDGE_BY_SIMPLER; stage++) {
            char reason[256];
            double largest = 0;
            check_attention(reason, sizeof reason, &f.check, (enum judge_stage)stage, MULTIPROCESSORS, &largest,
                            &f.dev);
            assert_string_equal(reason, "");
            assert_true(largest > 0 && largest < judge_allowed_distance(&f.judge) / 2);
        }
        fixture_free(&f);
    }
}
// Checks that results with another dropout mask than the step's are found.
static void another_mask_is_found(void **state) {
    struct fixture f = fixture_make_dropping(false, 0.25f);
    f.judge.dropout.step = 1;
    assert_non_null(strstr(by_host(&f), "its output is wrong: head "));
    fixture_free(&f);
}
// Checks that wrong gradients of the last tokens are found. Few queries see these tokens, and their gradients are a
// fortieth of the others.
static void short_rows_are_judged(void **state) {
    for (int kind = JUDGE_DK; kind <= JUDGE_DV; kind++) {
        struct fixture f = fixture_make(false);
        struct attention_results copy = copy_of(&f);
        for (int t = f.judge.shape.T - LAST_TOKENS; t < f.judge.shape.T; t++)
            memset(row_of(&f, (enum judge_kind)kind, t, 0), 0, sizeof(floatX) * (size_t)f.judge.shape.head_dim);
        assert_non_null(strstr(by_host(&f), kind == JUDGE_DK ? "its dK is wrong: head 0 of token"
                                                             : "its dV is wrong: head 0 of token"));
        assert_non_null(strstr(beside(&f, &copy), kind == JUDGE_DK ? "its dK is wrong" : "its dV is wrong"));
        results_free(&copy);
        fixture_free(&f);
    }
}
// Checks that one element that is NaN or infinite is found in a row that the host does not compute.
static void what_is_not_finite_is_found(void **state) {
    for (int i = 0; i < 2; i++) {
        struct fixture f = fixture_make(false);
        row_of(&f, JUDGE_DQ, 200, 1)[3] = to_floatX(i == 0 ? INFINITY : NAN);
        assert_string_equal(by_host(&f), "its dQ is wrong: it is not finite");
        fixture_free(&f);
    }
}
// Checks that a huge element hides no error in another row.
static void a_huge_element_hides_nothing(void **state) {
    struct fixture f = fixture_make(false);
    row_of(&f, JUDGE_OUT, 200, 1)[3] = to_floatX(1e20f);
    memset(row_of(&f, JUDGE_OUT, 1, 1), 0, sizeof(floatX) * (size_t)f.judge.shape.head_dim);
    memset(row_of(&f, JUDGE_OUT, f.judge.shape.T + 1, 0), 0, sizeof(floatX) * (size_t)f.judge.shape.head_dim);
    assert_non_null(strstr(by_host(&f), "its output is wrong: head "));
    fixture_free(&f);
}
// Checks that small errors in every row are found, such as a mask makes that is off by one key.
static void small_errors_of_all_rows_are_found(void **state) {
    struct fixture f = fixture_make(false);
    struct attention_results copy = copy_of(&f);
    for (int64_t i = 0; i < f.judge.rows * f.judge.out_row; i++)
        f.right.out[i] = to_floatX(to_float(f.right.out[i]) * 1.05f);
    assert_string_equal(by_host(&f), "RIGHT");
    assert_non_null(strstr(beside(&f, &copy), "its output is wrong: all rows together are 0.0"));
    results_free(&copy);
    fixture_free(&f);
}
static void ignore_backend(enum attention_backend backend) {}
// Checks the masks of layers with and without a window, with and without documents: the pairs of tokens that the tables
// leave visible are those that the number of flops counts, within a fifth, which diagonals are.
static void what_is_timed_hides_what_the_run_hides(void **state) {
    enum { B = 2, T = 150 };
    const int windows[] = {0, 20, T};
    struct fixture f = fixture_make(false);
    for (int i = 0; i < 12; i++) {
        struct attention_timing timing;
        memset(&timing, 0, sizeof timing);
        timing.shape = f.check.shape;
        timing.shape.B = B;
        timing.shape.T = T;
        timing.rotary = timing.out_amax = timing.gradient_amax = timing.biases = true;
        timing.window = windows[i % 3];
        timing.documents = i / 3 % 2;
        timing.layers[MASK_PLAIN] = i / 6;
        timing.layers[MASK_WINDOWED] = timing.window > 0 || i / 6 == 0;
        timing.candidates[ATTENTION_FLASH] = true;
        struct timed_attention a = timed_open(&timing, &f.dev);
        double pairs = 0;
        for (int mask = 0; mask < TIMED_MASKS; mask++) {
            int32_t first[B * T] = {0};
            assert_int_equal(a.tables[2 * mask] != NULL,
                             timing.layers[mask] > 0 &&
                                 (timing.documents || (mask == MASK_WINDOWED && timing.window == windows[1])));
            if (a.tables[2 * mask])
                device_download(first, a.tables[2 * mask], sizeof first, &f.dev);
            for (int j = 0; j < B * T && timing.layers[mask] > 0; j++)
                pairs += j % T + 1 - first[j];
        }
        const double counted = timed_flops(&timing) / (14 * timing.shape.num_heads * timing.shape.head_dim);
        assert_true(counted > 0.8 * pairs && counted < 1.05 * pairs);
        timed_close(&a);
        if (timing.documents && timing.window == windows[1] && timing.layers[MASK_PLAIN] > 0) {
            time_attention(&timing, SIZE_MAX, ignore_backend, &f.dev);
            assert_true(timing.seconds[ATTENTION_FLASH] > 0 && timing.shape.B == B);
        }
    }
    fixture_free(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_right_is_taken),
        cmocka_unit_test(another_mask_is_found),
        cmocka_unit_test(short_rows_are_judged),
        cmocka_unit_test(what_is_not_finite_is_found),
        cmocka_unit_test(a_huge_element_hides_nothing),
        cmocka_unit_test(small_errors_of_all_rows_are_found),
        cmocka_unit_test(what_is_timed_hides_what_the_run_hides),
    };
    setenv("EMU_CAPABILITY", "8.0", 1);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
