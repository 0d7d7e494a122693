// The memory plan: no two live buffers share a byte, the peak meets its lower bound, the arenas are as planned.
#include "memory.cuh"                  // under test
#include "test/fails.h"                // assert_fails
#include "test/testing.h"              // cmocka, test_random
#include "test/transformer_schedule.h" // struct schedule
#include <time.h>                      // clock_gettime

// ---------------------------------------------------------------------------------------------------------------------
// Soundness, by a comparison of all pairs

enum { LINE = PLAN_ALIGNMENT };
static size_t whole_lines(size_t bytes) { return (bytes + LINE - 1) / LINE * LINE; }

static bool live_together(const struct plan_buffer *a, const struct plan_buffer *b) {
    if (!plan_arena_is_packed(a->arena))
        return true;
    return a->first_phase >= 0 && b->first_phase >= 0 && a->first_phase <= b->last_phase &&
           b->first_phase <= a->last_phase;
}

// Returns what is wrong with a placed plan; NULL: nothing.
static const char *plan_fault(const struct plan *plan) {
    for (int i = 0; i < plan->count; i++) {
        const struct plan_buffer *a = &plan->buffers[i];
        if (a->offset % LINE != 0)
            return "a buffer is not aligned";
        if (live_together(a, a) && a->offset + a->bytes > plan->arena_bytes[a->arena])
            return "a buffer sticks out of its arena";
        for (int j = 0; j < i; j++) {
            const struct plan_buffer *b = &plan->buffers[j];
            if (a->arena == b->arena && live_together(a, b) && a->bytes > 0 && b->bytes > 0 &&
                a->offset < b->offset + b->bytes && b->offset < a->offset + a->bytes)
                return "two buffers that live together share bytes";
        }
    }
    size_t peak[MEMORY_COUNT] = {0};
    for (int a = 0; a < ARENA_COUNT; a++)
        peak[plan_arena_memory((enum plan_arena)a)] += plan->arena_bytes[a];
    return peak[MEMORY_DEVICE] != plan->peak_bytes || peak[MEMORY_HOST] != plan->host_peak_bytes
               ? "a peak is not the sum of its memory's arenas"
               : NULL;
}
static void assert_sound(const struct plan *plan) {
    const char *fault = plan_fault(plan);
    if (fault)
        fail_msg("%s", fault);
    assert_true(plan->peak_bytes >= plan->lower_bound_bytes && plan->host_peak_bytes >= plan->host_lower_bound_bytes);
}

// Returns the lower bound of a memory by its definition, phase by phase. packed: the memory's arena that is packed.
// *peak_phase: a phase with this bound.
static size_t naive_lower_bound(const struct plan *plan, enum plan_arena packed, int *peak_phase) {
    size_t most = 0, others = 0;
    *peak_phase = -1;
    for (int p = 0; p < plan->phase_count; p++) {
        size_t sum = 0;
        for (int i = 0; i < plan->count; i++) {
            const struct plan_buffer *b = &plan->buffers[i];
            if (b->arena == packed && b->first_phase >= 0 && b->first_phase <= p && p <= b->last_phase)
                sum += whole_lines(b->bytes);
        }
        if (sum > most) {
            most = sum;
            *peak_phase = p;
        }
    }
    for (int i = 0; i < plan->count; i++)
        if (plan->buffers[i].arena != packed && plan_arena_memory(plan->buffers[i].arena) == plan_arena_memory(packed))
            others += whole_lines(plan->buffers[i].bytes);
    return most + others;
}

// Makes buffers of all arenas, touched in random phases: some in one phase, some in many, some never; some are empty.
static void random_plan(struct plan *plan, uint64_t *random, int max_count, int max_phases) {
    plan_begin(plan);
    const int count = (int)(test_random(random) % (uint64_t)(max_count + 1));
    const int phases = 1 + (int)(test_random(random) % (uint64_t)max_phases);
    const int longest = 1 + (int)(test_random(random) % (uint64_t)phases);
    const uint64_t sizes = 1 + test_random(random) % 5000;
    int *first = (int *)test_alloc(sizeof(int) * (size_t)(count + 1));
    int *last = (int *)test_alloc(sizeof(int) * (size_t)(count + 1));
    for (int i = 0; i < count; i++) {
        static const char *const categories[3] = {"some", "others", "yet others"};
        const int any = (int)(test_random(random) % ARENA_COUNT);
        const bool usual = test_random(random) % 8 > 0, host = test_random(random) % 4 == 0;
        const int arena = !usual ? any : host ? ARENA_HOST_ACTIVATIONS : ARENA_ACTIVATIONS;
        const char *category = categories[test_random(random) % 3];
        plan_add(plan, (enum plan_arena)arena, category, "buffer", i % 5 - 1, test_random(random) % sizes);
        first[i] = (int)(test_random(random) % (uint64_t)phases);
        last[i] = first[i] + (int)(test_random(random) % (uint64_t)longest);
        if (test_random(random) % 16 == 0)
            first[i] = phases; // never touched
    }
    for (int p = 0; p < phases; p++) {
        plan_phase(plan, 0, -1, "phase");
        for (int i = 0; i < count; i++)
            if (p == first[i] || p == last[i] || (p > first[i] && p < last[i] && test_random(random) % 4 == 0))
                plan_touch(plan, i);
    }
    free(first);
    free(last);
}

static void no_two_live_buffers_share_a_byte(void **state) {
    uint64_t random = 1;
    for (int run = 0; run < 2000; run++) {
        struct plan plan;
        random_plan(&plan, &random, run % 200 ? 30 : 700, run % 10 ? 40 : 300);
        plan_place(&plan);
        assert_sound(&plan);
        int peak_phase;
        assert_true(plan.host_lower_bound_bytes == naive_lower_bound(&plan, ARENA_HOST_ACTIVATIONS, &peak_phase));
        assert_true(plan.lower_bound_bytes == naive_lower_bound(&plan, ARENA_ACTIVATIONS, &peak_phase));
        assert_int_equal(plan.peak_phase, peak_phase);
        plan_free(&plan);
    }
}

// Checks that the comparison above sees a fault: a live buffer that is moved onto a byte of another one.
static void a_shared_byte_is_seen(void **state) {
    uint64_t random = 2;
    int faults = 0;
    for (int run = 0; run < 300; run++) {
        struct plan plan;
        random_plan(&plan, &random, 40, 20);
        plan_place(&plan);
        for (int i = 0; i + 1 < plan.count; i++) {
            struct plan_buffer *a = &plan.buffers[i], *b = &plan.buffers[i + 1];
            if (a->arena != b->arena || !live_together(a, b) || a->bytes == 0 || b->bytes == 0)
                continue;
            const size_t offset = b->offset;
            b->offset = a->offset + (a->bytes - 1) / LINE * LINE; // a's last line
            assert_non_null(plan_fault(&plan));
            b->offset = offset;
            faults++;
        }
        assert_null(plan_fault(&plan));
        plan_free(&plan);
    }
    assert_true(faults > 100);
}

static void the_same_schedule_has_the_same_plan(void **state) {
    for (int run = 0; run < 10; run++) {
        struct plan plan[2];
        for (int i = 0; i < 2; i++) {
            uint64_t random = 100 + (uint64_t)run;
            random_plan(&plan[i], &random, 200, 100);
            plan_place(&plan[i]);
        }
        plan_place(&plan[0]); // a second time: nothing of the first placing must remain
        for (int i = 0; i < plan[0].count; i++)
            assert_true(plan[0].buffers[i].offset == plan[1].buffers[i].offset);
        plan_free(&plan[0]);
        plan_free(&plan[1]);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Quality and speed

// Returns the CPU time of this process: others may keep the machine busy.
static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

struct quality {
    int plans, above;      // above: how many exceed their bound
    double worst, slowest; // worst: the largest ratio of peak and bound; slowest: seconds
};

static void measure(struct schedule *s, bool all_pairs, struct quality *quality) {
    training_step(s);
    if (s->generated_tokens > 0) {
        evaluation(s);
        generation(s);
    }
    const double begin = seconds();
    plan_place(s->plan);
    const double took = seconds() - begin, ratio = (double)s->plan->peak_bytes / (double)s->plan->lower_bound_bytes;
    if (all_pairs)
        assert_sound(s->plan);
    quality->plans++;
    quality->above += s->plan->peak_bytes > s->plan->lower_bound_bytes;
    quality->worst = ratio > quality->worst ? ratio : quality->worst;
    quality->slowest = took > quality->slowest ? took : quality->slowest;
}

enum { MODELS = 6 };
static void model(struct schedule *s, int which) {
    switch (which) {
    case 0: set_sizes(s, 4096, 1024, 768, 12, 12, 3072, false, false, 50304, 1); break;   // GPT-2 124M
    case 1: set_sizes(s, 4096, 1024, 768, 12, 12, 3072, false, true, 50304, 8); break;    // unfused attention
    case 2: set_sizes(s, 8192, 8192, 4096, 32, 8, 14336, true, false, 128256, 8); break;  // Llama 3 8B
    case 3: set_sizes(s, 512, 512, 256, 8, 2, 768, true, false, 256, 2); break;           // bytes, small
    case 4: set_sizes(s, 65536, 4096, 2048, 32, 1, 8192, false, false, 32000, 16); break; // MQA
    default: set_sizes(s, 1, 1, 896, 14, 2, 4864, true, false, 152064, 1);                // one token
    }
    s->dropout = which == 1 || which == 4;
    s->logits_per_chunk = which == 3 || which == 5;
}

static void transformer_schedules_meet_their_bound(void **state) {
    struct quality quality = {0, 0, 1, 0};
    static const int depths[] = {1, 2, 5, 12, 32, 80};
    for (int i = 0; i < (int)(sizeof depths / sizeof *depths); i++)
        for (int which = depths[i] > 12 ? 1 : 0; which < (depths[i] > 12 ? 4 : MODELS); which++)
            for (int policy = 0; policy < POLICIES; policy++) {
                const int L = depths[i], most = policy >= POLICY_UNIFORM ? L : 1;
                for (int n = 1; n <= most; n = n == 1 ? 2 : n * 3) {
                    struct plan plan;
                    struct schedule s;
                    schedule_begin(&s, &plan, L);
                    model(&s, which);
                    s.generated_tokens = L < 80 ? 2 : 0;
                    set_policy(&s, (enum policy)policy, n);
                    measure(&s, L == 12 && which == 1, &quality);
                    schedule_end(&s);
                }
            }
    print_message("%d plans, %d above their bound, by %.2f %% at most; the slowest took %.0f ms\n", quality.plans,
                  quality.above, 100 * (quality.worst - 1), 1e3 * quality.slowest);
    assert_true(quality.worst <= 1.02);
}

// Checks the same schedules with sizes that no model has, which nothing divides.
static void transformer_schedules_of_random_sizes(void **state) {
    struct quality quality = {0, 0, 1, 0};
    uint64_t random = 7;
    for (int run = 0; run < 100; run++) {
        struct plan plan;
        struct schedule s;
        const int L = 1 + (int)(test_random(&random) % 24);
        schedule_begin(&s, &plan, L);
        for (int row = 0; row < ROWS; row++)
            s.size[row] = 64 * (test_random(&random) % 1000);
        for (int i = 0; i < 8; i++)
            s.workspace[i] = 64 * (test_random(&random) % 1000) * (test_random(&random) % 2);
        s.hidden = s.size[OUT];
        s.logits = 64 * (test_random(&random) % 4000);
        s.kv_cache = 64 * (test_random(&random) % 4000);
        s.head_chunks = 1 + (int)(test_random(&random) % 8);
        s.generated_tokens = (int)(test_random(&random) % 3);
        s.dropout = test_random(&random) % 2;
        s.logits_per_chunk = test_random(&random) % 2;
        set_policy(&s, (enum policy)(test_random(&random) % POLICIES), 1 + (int)(test_random(&random) % (uint64_t)L));
        measure(&s, run % 10 == 0, &quality);
        schedule_end(&s);
    }
    print_message("%d plans, %d above their bound, by %.2f %% at most; the slowest took %.0f ms\n", quality.plans,
                  quality.above, 100 * (quality.worst - 1), 1e3 * quality.slowest);
    assert_true(quality.worst <= 1.02);
}

// Checks a model of 126 layers (405B), and 20,000 buffers in the worst arrangements. The limit is far above what
// placing takes, since a sanitizer may be in the build, and far below what an unbounded search would take.
static void large_plans_are_placed_in_bounded_time(void **state) {
    struct quality quality = {0, 0, 1, 0};
    for (int policy = 0; policy < POLICIES; policy++) {
        struct plan plan;
        struct schedule s;
        schedule_begin(&s, &plan, 126);
        set_sizes(&s, 1 << 20, 131072, 16384, 128, 8, 53248, true, false, 128256, 64);
        s.generated_tokens = 1;
        set_policy(&s, (enum policy)policy, 5);
        plan_add(&plan, ARENA_OPTIMIZER, "optimizer moments", "moments", -1, (size_t)405 * 8000000000);
        measure(&s, false, &quality);
        schedule_end(&s);
    }
    assert_true(quality.worst <= 1.02);
    for (int kind = 0; kind < 4; kind++) {
        enum { BUFFERS = 20000 };
        struct plan plan;
        uint64_t random = 11;
        plan_begin(&plan);
        for (int i = 0; i < BUFFERS; i++)
            plan_add(&plan, ARENA_ACTIVATIONS, "all", "buffer", -1, test_random(&random) % 100000);
        for (int p = 0; p < BUFFERS; p++) {
            plan_phase(&plan, 0, -1, "phase");
            plan_touch(&plan, p); // they all begin one after another or, below, in one phase
            if (kind == 1 && p == BUFFERS / 2)
                for (int i = 0; i < BUFFERS; i++)
                    plan_touch(&plan, i);
            if (kind == 2)
                plan_touch(&plan, (int)(test_random(&random) % BUFFERS));
            if (kind == 3 && p == BUFFERS - 1)
                for (int i = 0; i < BUFFERS; i++)
                    plan_touch(&plan, i);
        }
        const double begin = seconds();
        plan_place(&plan);
        const double took = seconds() - begin;
        quality.slowest = took > quality.slowest ? took : quality.slowest;
        assert_true(plan.peak_bytes >= plan.lower_bound_bytes);
        plan_free(&plan);
    }
    print_message("126 layers: %d of %d plans above their bound, by %.2f %% at most; the slowest of all took %.0f ms\n",
                  quality.above, quality.plans, 100 * (quality.worst - 1), 1e3 * quality.slowest);
    assert_true(quality.slowest < 20);
}

// ---------------------------------------------------------------------------------------------------------------------
// Odd plans

static void empty_plans(void **state) {
    struct plan plan;
    plan_begin(&plan);
    plan_place(&plan); // it has neither buffers nor phases
    assert_true(plan.peak_bytes == 0 && plan.lower_bound_bytes == 0 && plan.peak_phase == -1);
    plan_phase(&plan, 0, -1, "nothing happens");
    const int empty = plan_add(&plan, ARENA_ACTIVATIONS, "some", "empty", -1, 0);
    const int untouched = plan_add(&plan, ARENA_ACTIVATIONS, "some", "untouched", -1, 1000);
    plan_touch(&plan, empty);
    plan_touch(&plan, -1);
    plan_place(&plan);
    assert_true(plan.peak_bytes == 0 && plan.peak_phase == -1);
    const int parameter = plan_add(&plan, ARENA_PARAMETERS, "parameters", "one", -1, 1);
    const int another = plan_add(&plan, ARENA_PARAMETERS, "parameters", "another", -1, LINE + 1);
    plan_place(&plan);
    assert_true(plan.arena_bytes[ARENA_PARAMETERS] == 3 * LINE && plan.peak_bytes == 3 * LINE);
    assert_true(plan.buffers[another].offset == LINE && plan.buffers[parameter].bytes == 1);
    struct arenas arenas;
    arenas_allocate(&arenas, &plan);
    assert_null(plan_pointer(&plan, &arenas, untouched));
    assert_null(plan_pointer(&plan, &arenas, -1));
    assert_null(arenas.base[ARENA_ACTIVATIONS]);
    assert_ptr_equal((char *)plan_pointer(&plan, &arenas, another), arenas.base[ARENA_PARAMETERS] + LINE);
    arenas_free(&arenas);
    plan_free(&plan);
}

// Checks that a buffer which lives before or after a loop is live in all of the loop's phases, and that a buffer which
// lives only in the loop is live where it was touched.
static void loops_keep_what_outlives_a_turn(void **state) {
    enum { BEFORE, INSIDE, LATER, AFTER, THROUGH, BUFFERS };
    static const struct {
        int first, last;
    } touched[BUFFERS] = {{0, 1}, {1, 1}, {2, 3}, {4, 4}, {0, 4}},
      live[BUFFERS] = {{0, 3}, {1, 1}, {1, 4}, {4, 4}, {0, 4}};
    struct plan plan;
    int ids[BUFFERS];
    plan_begin(&plan);
    for (int i = 0; i < BUFFERS; i++)
        ids[i] = plan_add(&plan, ARENA_ACTIVATIONS, "some", "buffer", -1, 64);
    for (int p = 0; p < 5; p++) { // phases 1 to 3 are the loop's
        plan_phase(&plan, 0, -1, "phase");
        for (int i = 0; i < BUFFERS; i++)
            if (p == touched[i].first || p == touched[i].last || (i == LATER && p == 4))
                plan_touch(&plan, ids[i]);
        if (p == 3)
            plan_add_loop(&plan, 1);
    }
    for (int i = 0; i < BUFFERS; i++) {
        assert_int_equal(plan.buffers[ids[i]].first_phase, live[i].first);
        assert_int_equal(plan.buffers[ids[i]].last_phase, live[i].last);
    }
    plan_free(&plan);
}

static void touching_before_the_first_phase_and_long_names(void **state) {
    struct plan plan;
    plan_begin(&plan);
    const char *name = "a name that is longer than any name should be, and so loses its end";
    const int a = plan_add(&plan, ARENA_ACTIVATIONS, name, name, 3, 100);
    const int b = plan_add(&plan, ARENA_ACTIVATIONS, name, name, 3, 100);
    plan_touch(&plan, a);
    plan_phase(&plan, 0, -1, name);
    plan_touch(&plan, b);
    plan_place(&plan);
    assert_int_equal(plan.category_count, 1);
    assert_int_equal(plan.phase_count, 2);
    assert_true(plan.buffers[a].first_phase == 0 && plan.buffers[b].first_phase == 1);
    assert_true(plan.peak_bytes == whole_lines(100) && plan.buffers[a].offset == 0 && plan.buffers[b].offset == 0);
    assert_int_equal(strlen(plan.buffers[a].name), PLAN_NAME_CHARS - 1);
    plan_free(&plan);
}

static void a_buffer_lives_from_its_first_touch_to_its_last(void **state) {
    struct plan plan;
    plan_begin(&plan);
    const int once = plan_add(&plan, ARENA_ACTIVATIONS, "some", "once", -1, LINE);
    const int long_lived = plan_add(&plan, ARENA_ACTIVATIONS, "some", "long-lived", -1, LINE);
    const int later = plan_add(&plan, ARENA_ACTIVATIONS, "some", "later", -1, LINE);
    for (int p = 0; p < 5; p++) {
        assert_int_equal(plan_phase(&plan, 0, -1, "phase"), p);
        if (p == 1)
            plan_touch(&plan, once);
        if (p == 1 || p == 3)
            plan_touch(&plan, long_lived);
        if (p >= 3)
            plan_touch(&plan, later);
    }
    plan_place(&plan);
    assert_true(plan.buffers[once].first_phase == 1 && plan.buffers[once].last_phase == 1);
    assert_true(plan.buffers[long_lived].first_phase == 1 && plan.buffers[long_lived].last_phase == 3);
    assert_true(plan.buffers[later].first_phase == 3 && plan.buffers[later].last_phase == 4);
    assert_true(plan.peak_bytes == 2 * LINE && plan.peak_phase == 1);
    assert_true(plan.buffers[long_lived].offset != plan.buffers[later].offset); // each lives in phase 3
    plan_free(&plan);
}

static void overflowing_plan(void *arenas_too) {
    struct plan plan;
    plan_begin(&plan);
    plan_phase(&plan, 0, -1, "phase");
    for (int i = 0; i < 3; i++)
        plan_touch(&plan, plan_add(&plan, arenas_too ? (enum plan_arena)(ARENA_OPTIMIZER + i % 2) : ARENA_ACTIVATIONS,
                                   "all", "vast", -1, SIZE_MAX / 2));
    plan_place(&plan);
}
static void rounding_overflows(void *unused) {
    struct plan plan;
    plan_begin(&plan);
    plan_add(&plan, ARENA_GRADIENTS, "all", "vast", -1, SIZE_MAX - 1);
    plan_place(&plan);
}
static void sums_that_overflow_are_errors(void **state) {
    assert_fails(overflowing_plan, NULL, "memory plan|2^64|vast|--micro-batch-size");
    assert_fails(overflowing_plan, (void *)"yes", "memory plan|2^64|--micro-batch-size");
    assert_fails(rounding_overflows, NULL, "memory plan|2^64|vast|--micro-batch-size");
}

// ---------------------------------------------------------------------------------------------------------------------
// Arenas

static void arenas_are_what_was_planned(void **state) {
    struct plan plan;
    plan_begin(&plan);
    plan_phase(&plan, 0, -1, "one");
    enum { BUFFERS = 2 * ARENA_COUNT };
    int ids[BUFFERS];
    for (int i = 0; i < BUFFERS; i++) {
        const enum plan_arena arena = (enum plan_arena)(i % ARENA_COUNT);
        ids[i] = plan_add(&plan, arena, "all", "buffer", -1, (size_t)1000003 * (size_t)(i + 1));
        plan_touch(&plan, ids[i]);
    }
    const int untouched = plan_add(&plan, ARENA_ACTIVATIONS, "all", "untouched", -1, 64);
    plan_place(&plan);
    struct arenas arenas;
    const size_t before = memory_resident_bytes();
    arenas_allocate(&arenas, &plan);
    // Every page has been touched. The kernel's count lags by some pages a CPU; an emulated CPU's translated code
    // counts too.
    const size_t grown = memory_resident_bytes() - before;
    const size_t planned = plan.peak_bytes + plan.host_peak_bytes, more = test_slowness() > 1 ? 16 << 20 : 1 << 20;
    assert_true(grown + (1 << 20) > planned && grown < planned + more);
    assert_true(memory_resident_peak_bytes() + (1 << 20) >= planned);
    assert_null(plan_pointer(&plan, &arenas, untouched));
    for (int i = 0; i < BUFFERS; i++) {
        char *at = (char *)plan_pointer(&plan, &arenas, ids[i]);
        assert_true((uintptr_t)at % LINE == 0 && at[0] == 0);
        memset(at, i + 1, plan.buffers[ids[i]].bytes);
    }
    for (int i = 0; i < BUFFERS; i++) {
        const char *at = (const char *)plan_pointer(&plan, &arenas, ids[i]);
        for (size_t j = 0; j < plan.buffers[ids[i]].bytes; j++)
            assert_true(at[j] == i + 1);
    }
    arenas_free(&arenas);
    plan_free(&plan);
    for (size_t bytes = 1; bytes < 9u << 20; bytes = bytes * 2 + 1) { // sizes around a page and a huge page
        char *arena = (char *)device_allocate(bytes);
        arena[0] = arena[bytes - 1] = 1;
        device_free(arena, bytes);
    }
}

// Checks the host's arenas: the resident set grows by what is planned, and by at most 1 % more.
static void host_arenas_take_what_was_planned(void **state) {
    struct plan plan;
    plan_begin(&plan);
    plan_phase(&plan, 0, -1, "one");
    plan_add(&plan, ARENA_HOST_OPTIMIZER, "moments", "moments", -1, (size_t)100 << 20);
    plan_touch(&plan, plan_add(&plan, ARENA_HOST_ACTIVATIONS, "kept", "kept", 0, ((size_t)50 << 20) + 1));
    plan_place(&plan);
    assert_true(plan.peak_bytes == 0 && plan.lower_bound_bytes == 0 && plan.peak_phase == -1);
    assert_true(plan.host_peak_bytes == ((size_t)150 << 20) + LINE &&
                plan.host_peak_bytes == plan.host_lower_bound_bytes);
    struct arenas arenas;
    const size_t before = memory_resident_bytes();
    arenas_allocate(&arenas, &plan);
    const double grown = (double)(memory_resident_bytes() - before), planned = (double)plan.host_peak_bytes;
    assert_true(grown > 0.99 * planned && grown < 1.01 * planned);
    arenas_free(&arenas);
    assert_true(memory_resident_bytes() < before + planned / 100);
    assert_true(host_available_bytes(1) / 3 >= host_available_bytes(4) && host_available_bytes(4) > 0);
    plan_free(&plan);
}

// The number of resident pages among `bytes` from `memory` on, which is the beginning of a page.
static size_t resident_pages(void *memory, size_t bytes) {
    static unsigned char resident[1 << 12];
    const size_t pages = (bytes + (size_t)sysconf(_SC_PAGESIZE) - 1) / (size_t)sysconf(_SC_PAGESIZE);
    size_t sum = 0;
    assert_true(pages <= sizeof resident);
    assert_int_equal(mincore(memory, bytes, resident), 0);
    for (size_t i = 0; i < pages; i++)
        sum += resident[i] & 1;
    return sum;
}
static void pages_are_resident_once_they_are_touched(void **state) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), bytes = 64 * page; // less than a huge page
    char *memory = (char *)device_allocate_untouched(bytes);
    assert_int_equal(resident_pages(memory, bytes), 0);
    device_touch(memory + page - 1, 0);
    assert_int_equal(resident_pages(memory, bytes), 0);
    device_touch(memory + page - 1, 2); // the end of a page and the beginning of the next one
    assert_int_equal(resident_pages(memory, 2 * page), 2);
    assert_int_equal(resident_pages(memory, bytes), 2);
    device_touch(memory + 60 * page, 4 * page);
    assert_int_equal(resident_pages(memory, bytes), 6);
    device_touch(memory, bytes);
    assert_int_equal(resident_pages(memory, bytes), 64);
    device_free(memory, bytes);
}

static void allocate_too_much(void *bytes) { device_allocate(*(const size_t *)bytes); }
static void reserve_too_much(void *bytes) { host_reserve(*(const size_t *)bytes); }
static void an_arena_that_does_not_fit_is_an_error(void **state) {
    size_t bytes = (size_t)1 << 60;
    assert_fails(allocate_too_much, &bytes,
                 "1073741824.00 GiB|Cannot allocate|--micro-batch-size|--recompute-granularity");
    bytes = SIZE_MAX;
    assert_fails(allocate_too_much, &bytes, "17179869184.00 GiB|Cannot allocate memory|--micro-batch-size");
    assert_fails(reserve_too_much, &bytes,
                 "17179869184.00 GiB|the host's memory|Cannot allocate memory|--optimizer-offload-fraction|"
                 "--cpu-offloading-num-layers");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(no_two_live_buffers_share_a_byte),
        cmocka_unit_test(a_shared_byte_is_seen),
        cmocka_unit_test(the_same_schedule_has_the_same_plan),
        cmocka_unit_test(transformer_schedules_meet_their_bound),
        cmocka_unit_test(transformer_schedules_of_random_sizes),
        cmocka_unit_test(large_plans_are_placed_in_bounded_time),
        cmocka_unit_test(empty_plans),
        cmocka_unit_test(a_buffer_lives_from_its_first_touch_to_its_last),
        cmocka_unit_test(loops_keep_what_outlives_a_turn),
        cmocka_unit_test(touching_before_the_first_phase_and_long_names),
        cmocka_unit_test(sums_that_overflow_are_errors),
        cmocka_unit_test(arenas_are_what_was_planned),
        cmocka_unit_test(host_arenas_take_what_was_planned),
        cmocka_unit_test(pages_are_resident_once_they_are_touched),
        cmocka_unit_test(an_arena_that_does_not_fit_is_an_error),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
