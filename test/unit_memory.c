// The memory plan: no two live buffers share a byte, the peak meets its lower bound, the reports say what the plan is.
#include "memory.cuh"       // under test
#include "test/testing.h"   // cmocka

static void placed_buffers_do_not_overlap(void **state) {
    uint64_t random = 1;
    for (int run = 0; run < 500; run++) {
        struct plan plan;
        plan_begin(&plan);
        const int count = (int)(test_random(&random) % 60), phases = 1 + (int)(test_random(&random) % 40);
        for (int i = 0; i < count; i++)
            plan_add(&plan, ARENA_ACTIVATIONS, "c", "b", i, test_random(&random) % 4000);
        for (int p = 0; p < phases; p++) {
            plan_phase(&plan, "p");
            for (int i = 0; i < count; i++)
                if (test_random(&random) % 8 == 0)
                    plan_touch(&plan, i);
        }
        plan_place(&plan);
        for (int i = 0; i < count; i++)
            for (int j = 0; j < i; j++) {
                const struct plan_buffer *a = &plan.buffers[i], *b = &plan.buffers[j];
                if (a->first_phase >= 0 && b->first_phase >= 0 && a->first_phase <= b->last_phase &&
                    b->first_phase <= a->last_phase)
                    assert_true(a->offset + a->bytes <= b->offset || b->offset + b->bytes <= a->offset);
            }
        plan_free(&plan);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(placed_buffers_do_not_overlap)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
