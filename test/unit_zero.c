// Units of the flat buffers, their buckets, and which rank owns what of them: for every shape, number of ranks and
// bucket.
#include "kernels/device.cuh" // floatX, which model/parameters.cuh is made for
#include "test/testing.h"

#include "zero/gradients.cuh" // under test
#include <string.h>

static struct model_shape shape_of(int L, int C, int V, bool llama) {
    struct model_shape s;
    memset(&s, 0, sizeof s);
    s.layer.C = C;
    s.layer.H = 2;
    s.layer.G = llama ? 1 : 2;
    s.layer.D = C / 2;
    s.layer.F = llama ? 3 * C + 8 : 4 * C;
    s.layer.T = 16;
    s.layer.x = 4;
    s.layer.gated = llama;
    s.activation = llama ? ACTIVATION_SWIGLU : ACTIVATION_GELU;
    s.normalization = llama ? NORMALIZATION_RMSNORM : NORMALIZATION_LAYERNORM;
    s.L = L;
    s.V = V;
    s.Vp = (V + VOCABULARY_MULTIPLE - 1) / VOCABULARY_MULTIPLE * VOCABULARY_MULTIPLE;
    s.P = llama ? 0 : 16;
    s.layer.norm_before = true;
    s.attention_proj_bias = s.mlp_bias = s.tied = !llama;
    s.qkv_bias = true;
    return s;
}
static const int rank_counts[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 64, 1000};
enum { RANK_COUNTS = sizeof rank_counts / sizeof *rank_counts, BUCKETS = 4 };
static const int64_t bucket_sizes[BUCKETS] = {1048, 20000, 1 << 20,
                                              (int64_t)1 << 36}; // bytes; --bucket-mib 0.001 is the least

typedef void check(const struct parameters *table, int ranks, int64_t bucket_bytes);
static void for_many(check *each) {
    for (int llama = 0; llama < 2; llama++)
        for (int layers = 1; layers <= 5; layers += 2)
            for (int size = 0; size < 2; size++) {
                const struct model_shape s = shape_of(layers, size ? 80 : 6, size ? 300 : 97, llama != 0);
                for (int r = 0; r < RANK_COUNTS; r++) {
                    struct parameters table = parameters_create(&s, rank_counts[r], NULL);
                    for (int b = 0; b < BUCKETS; b++)
                        each(&table, rank_counts[r], bucket_sizes[b]);
                    parameters_free(&table);
                }
            }
}

// ---- units ----

// Checks that units follow one another from 0 to the end, that each is a multiple of as many aligned parts as there are
// ranks, and that each tensor lies in its own unit.
static void check_units(const struct parameters *t, int ranks, int64_t bucket_bytes) {
    assert_int_equal(t->num_units, t->L + 2);
    assert_int_equal(t->trained.unit_begin[0], 0);
    assert_int_equal(t->trained.unit_begin[t->num_units], t->trained.flat);
    for (int u = 0; u < t->num_units; u++) {
        assert_true(t->trained.unit_begin[u] < t->trained.unit_begin[u + 1]); // even a tied head has its norm
        assert_int_equal(t->trained.unit_begin[u + 1] % ((int64_t)ranks * TENSOR_ALIGNMENT), 0);
    }
    int64_t end = 0;
    for (int i = 0; i < t->num_tensors; i++) {
        const struct tensor *tensor = &t->tensors[i];
        const int unit = unit_of(t, tensor);
        assert_int_equal(unit, tensor->layer >= 0                                                 ? t->L - tensor->layer
                               : tensor->parameter == PARAM_WTE || tensor->parameter == PARAM_WPE ? t->L + 1
                                                                                                  : 0);
        assert_true(tensor->offset >= t->trained.unit_begin[unit] &&
                    tensor->offset + tensor->count <= t->trained.unit_begin[unit + 1]);
        assert_true(tensor->offset >= end);
        assert_int_equal(tensor->offset % TENSOR_ALIGNMENT, 0);
        end = tensor->offset + tensor->count;
        assert_ptr_equal(parameters_find(t, tensor->layer, tensor->parameter), tensor);
    }
}
static void test_units(void **state) { for_many(check_units); }

// Checks that only the units' padding depends on the number of ranks, and neither the order nor the tensors do.
static void test_tensors_are_the_same(void **state) {
    const struct model_shape s = shape_of(3, 80, 300, true);
    struct parameters one = parameters_create(&s, 1, NULL), many = parameters_create(&s, 9, NULL);
    assert_int_equal(one.num_tensors, many.num_tensors);
    assert_int_equal(one.visible, many.visible);
    assert_true(many.trained.flat >= one.trained.flat &&
                many.trained.flat < one.trained.flat + 5 * 9 * TENSOR_ALIGNMENT);
    for (int i = 0; i < one.num_tensors; i++) {
        assert_string_equal(one.tensors[i].name, many.tensors[i].name);
        assert_int_equal(one.tensors[i].count, many.tensors[i].count);
    }
    parameters_free(&one);
    parameters_free(&many);
}

// ---- buckets ----

// Checks that buckets tile each unit, in order; that their parts are equal and aligned; and that none is larger than a
// bucket, but for the parts' alignment.
static void check_buckets(const struct parameters *t, int ranks, int64_t bucket_bytes) {
    const int64_t multiple = (int64_t)ranks * TENSOR_ALIGNMENT, most = bucket_bytes / 4;
    struct shards s = shards_create(&t->trained, t->num_units, ranks - 1, ranks, 3, bucket_bytes);
    assert_int_equal(s.flat, t->trained.flat);
    assert_int_equal(s.units, t->num_units);
    assert_int_equal(s.first[0], 0);
    assert_int_equal(s.first[s.units], s.count);
    int64_t at = 0, largest = 0;
    for (int u = 0; u < s.units; u++)
        for (int i = s.first[u]; i < s.first[u + 1]; i++) {
            const struct bucket *p = &s.buckets[i];
            assert_int_equal(p->begin, at);
            at += ranks * p->shard;
            largest = p->shard > largest ? p->shard : largest;
            assert_int_equal(p->unit, u);
            assert_true(p->begin >= t->trained.unit_begin[u] && at <= t->trained.unit_begin[u + 1]);
            assert_true(p->shard > 0);
            assert_int_equal(p->shard % TENSOR_ALIGNMENT, 0);
            assert_true(ranks * p->shard < most + multiple);
        }
    assert_int_equal(at, t->trained.flat);
    assert_int_equal(largest, s.largest_shard);
    if (bucket_bytes > 4 * t->trained.flat)
        assert_int_equal(s.count, s.units);
    shards_free(&s);
}
static void test_buckets(void **state) { for_many(check_buckets); }

// Checks that all ranks and all stages cut alike, or one's shard would meet another one's.
static void test_all_cut_alike(void **state) {
    const struct model_shape shape = shape_of(3, 80, 300, false);
    struct parameters table = parameters_create(&shape, 5, NULL);
    struct shards first = shards_create(&table.trained, table.num_units, 0, 5, 0, 20000);
    assert_true(first.count > first.units);
    for (int rank = 0; rank < 5; rank++)
        for (int stage = 0; stage < 4; stage++) {
            struct shards s = shards_create(&table.trained, table.num_units, rank, 5, stage, 20000);
            assert_int_equal(s.rank, rank);
            assert_int_equal(s.count, first.count);
            for (int i = 0; i < s.count; i++) {
                assert_int_equal(s.buckets[i].begin, first.buckets[i].begin);
                assert_int_equal(s.buckets[i].shard, first.buckets[i].shard);
                assert_int_equal(s.buckets[i].unit, first.buckets[i].unit);
            }
            assert_int_equal(shards_optimizer(&s), stage >= 1);
            assert_int_equal(shards_gradients(&s), stage >= 2);
            assert_int_equal(shards_parameters(&s), stage >= 3);
            shards_free(&s);
        }
    shards_free(&first);
    parameters_free(&table);
    // One rank holds everything, in every stage.
    struct parameters alone = parameters_create(&shape, 1, NULL);
    struct shards s = shards_create(&alone.trained, alone.num_units, 0, 1, 3, 20000);
    assert_false(shards_optimizer(&s) || shards_gradients(&s) || shards_parameters(&s));
    assert_int_equal(shards_elements(&s, false), alone.trained.flat);
    shards_free(&s);
    parameters_free(&alone);
}

// ---- what a rank holds ----

// Checks that a rank's own parts lie in a sharded buffer in order, without gaps, and fill it; a whole buffer has
// everything at its place.
static void check_places(const struct parameters *t, int ranks, int64_t bucket_bytes) {
    for (int rank = 0; rank<ranks; rank += ranks> 9 ? ranks / 3 : 1) {
        struct shards s = shards_create(&t->trained, t->num_units, rank, ranks, 3, bucket_bytes);
        int64_t place = 0;
        for (int i = 0; i < s.count; i++) {
            const struct bucket *p = &s.buckets[i];
            const int64_t own = shards_own_begin(&s, p);
            assert_int_equal(own, p->begin + rank * p->shard);
            assert_int_equal(shards_place(&s, p, own, true), place);
            assert_int_equal(shards_place(&s, p, own + p->shard - 1, true), place + p->shard - 1);
            assert_int_equal(shards_place(&s, p, own + 7, false), own + 7);
            place += p->shard;
        }
        assert_int_equal(place, shards_elements(&s, true));
        assert_int_equal(place, t->trained.flat / ranks);
        assert_int_equal(shards_elements(&s, false), t->trained.flat);
        shards_free(&s);
    }
}
static void test_places(void **state) { for_many(check_places); }

// Checks, element by element, that a range yields exactly the own elements, each once and with its place.
static void expect_ranges(const struct shards *s, const int64_t *place_of, int64_t begin, int64_t end) {
    int64_t at = begin, n, place, expected = begin;
    while ((n = shards_next(s, true, &at, end, &place)) > 0) {
        for (; expected < at; expected++)
            assert_true(place_of[expected] < 0);
        for (int64_t i = 0; i < n; i++)
            if (place_of[at + i] != place + i)
                fail_msg("rank %d of %d: element %lld", s->rank, s->ranks, (long long)(at + i));
        at += n;
        expected = at;
    }
    assert_true(expected <= end);
    for (; expected < end; expected++)
        assert_true(place_of[expected] < 0);
}
static void check_next(const struct parameters *t, int ranks, int64_t bucket_bytes) {
    if (ranks == 1 || ranks > 9 || t->trained.flat > 60000)
        return;
    int64_t *place_of = (int64_t *)test_alloc((size_t)t->trained.flat * sizeof *place_of), n, place;
    uint64_t random = (uint64_t)(ranks + bucket_bytes);
    for (int rank = 0; rank < ranks; rank++) {
        struct shards s = shards_create(&t->trained, t->num_units, rank, ranks, 3, bucket_bytes);
        int64_t next = 0; // the own elements, in order
        for (int i = 0; i < s.count; i++)
            for (int64_t k = 0; k < ranks * s.buckets[i].shard; k++)
                place_of[s.buckets[i].begin + k] = k / s.buckets[i].shard == rank ? next++ : -1;
        expect_ranges(&s, place_of, 0, t->trained.flat);
        for (int i = 0; i < t->num_tensors; i++)
            expect_ranges(&s, place_of, t->tensors[i].offset, t->tensors[i].offset + t->tensors[i].count);
        for (int i = 0; i < 20; i++) {
            const int64_t begin = (int64_t)(test_random(&random) % (uint64_t)t->trained.flat);
            expect_ranges(&s, place_of, begin,
                          begin + (int64_t)(test_random(&random) % (uint64_t)(t->trained.flat - begin)));
        }
        int64_t at = 5;
        assert_int_equal(shards_next(&s, true, &at, 5, &place), 0);
        assert_int_equal(shards_next(&s, false, &at, 5, &place), 0);
        for (at = 5; (n = shards_next(&s, false, &at, 1000, &place)) > 0; at += n) {
            assert_int_equal(n, 995); // a whole buffer has all of it
            assert_int_equal(place, 5);
        }
        assert_int_equal(at, 1000);
        shards_free(&s);
    }
    free(place_of);
}
static void test_next(void **state) { for_many(check_next); }

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_units),   cmocka_unit_test(test_tensors_are_the_same),
        cmocka_unit_test(test_buckets), cmocka_unit_test(test_all_cut_alike),
        cmocka_unit_test(test_places),  cmocka_unit_test(test_next),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
