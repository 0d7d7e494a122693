// The features that attention may be asked for, and the rows of its backends: all backends refuse a feature that no row
// names. A planted feature stands for the next new one.
#define ATTENTION_PLANTED_FEATURES(FEATURE) FEATURE(PLANTED, "planted slopes")
#define ATTENTION_PLANTED_FIELDS(FIELD) FIELD(const float *, slopes, PLANTED)
#include "attention.cuh"
#include "test/fails.h"
#include "test/testing.h"

static const enum attention_backend BACKENDS[] = {ATTENTION_FLASH, ATTENTION_UNFUSED, ATTENTION_FLASH_SM90,
                                                  ATTENTION_FUSED};
enum { BACKENDS_COUNT = sizeof BACKENDS / sizeof *BACKENDS };

static struct attention_shape plain_shape(void) {
    struct attention_shape shape;
    memset(&shape, 0, sizeof shape);
    shape.B = shape.T = shape.num_heads = shape.num_query_groups = 1;
    shape.head_dim = 64;
    shape.scale = 1;
    return shape;
}

static void every_backend_is_asked(void **state) { assert_int_equal(BACKENDS_COUNT, ATTENTION_BACKENDS_COUNT - 1); }

static void plain_attention_asks_nothing(void **state) {
    assert_int_equal(attention_asked(plain_shape(), 0), 0);
    for (int i = 0; i < BACKENDS_COUNT; i++)
        assert_null(attention_refusal(BACKENDS[i], 0));
}

static void each_field_asks(void **state) {
    static const int32_t keys[1];
    static const float slopes[1];
    const struct attention_shape plain = plain_shape();
    struct attention_shape shape = plain;
    assert_int_equal(attention_asked(plain, 0.1f), FEATURE_DROPOUT);
    shape.full = true;
    assert_int_equal(attention_asked(shape, 0), FEATURE_FULL);
    shape = plain;
    shape.softcap = 0.5f;
    assert_int_equal(attention_asked(shape, 0), FEATURE_SOFTCAP);
    shape = plain;
    shape.first_key = keys;
    assert_int_equal(attention_asked(shape, 0), FEATURE_HIDDEN_KEYS);
    shape = plain;
    shape.last_query = keys;
    assert_int_equal(attention_asked(shape, 0), FEATURE_HIDDEN_KEYS);
    shape.slopes = slopes;
    assert_int_equal(attention_asked(shape, 0), FEATURE_HIDDEN_KEYS | FEATURE_PLANTED);
}

static void known_features_are_provided_by_some(void **state) {
    unsigned provided = 0;
    for (int i = 0; i < BACKENDS_COUNT; i++)
        provided |= attention_row(BACKENDS[i])->provides;
    assert_int_equal(provided, FEATURE_PLANTED - 1);
}

static void forward_of_a_planted_shape(void *argument) {
    static const float slopes[1];
    static struct device dev;
    struct dropout none;
    struct attention_shape shape = plain_shape();
    memset(&none, 0, sizeof none);
    shape.slopes = slopes;
    attention_forward(NULL, NULL, NULL, *(enum attention_backend *)argument, shape, none, NULL, NULL, &dev);
}
static void a_feature_that_no_row_knows_is_refused(void **state) {
    for (int i = 0; i < BACKENDS_COUNT; i++)
        assert_string_equal(attention_refusal(BACKENDS[i], FEATURE_PLANTED), "planted slopes");
    enum attention_backend called[] = {ATTENTION_FLASH, ATTENTION_UNFUSED, ATTENTION_FLASH_SM90}; // fused asks flash
    for (int i = 0; i < 3; i++)
        assert_fails(forward_of_a_planted_shape, &called[i], "has no planted slopes");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_backend_is_asked),
        cmocka_unit_test(plain_attention_asks_nothing),
        cmocka_unit_test(each_field_asks),
        cmocka_unit_test(known_features_are_provided_by_some),
        cmocka_unit_test(a_feature_that_no_row_knows_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
