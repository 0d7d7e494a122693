// Mixtures of sets of shards: their texts, their order, and the samples that a data loader takes of them. Tokens number
// their set and place, so that each sample says where it came from.
#include "dataloader.h"   // under test
#include "test/fails.h"   // assert_fails
#include "test/testing.h" // cmocka, test_random

static char folder[TEST_PATH];

static void shard_write(const char *name, int first, int count) {
    char path[TEST_PATH + 64];
    int32_t header[256] = {20240520, 1, count};
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(header, 4, 256, file), 256);
    for (int i = 0; i < count; i++) {
        const uint16_t token = (uint16_t)(first + i);
        assert_int_equal(fwrite(&token, 2, 1, file), 1);
    }
    assert_int_equal(fclose(file), 0);
}

// Three sets of 31, 5 and 12 windows; a set's tokens begin at a multiple of SET, a shard's at a multiple of T of these.
enum { T = 5, SET = 1000, SETS = 3, VOCAB = 3 * SET };
static int folder_create(void **state) {
    if (!mkdtemp(test_template(folder, "unit_mixture")))
        return -1;
    shard_write("web_0.bin", 0, 20 * T + 1);
    shard_write("web_1.bin", 20 * T, 11 * T + 1);
    shard_write("code.bin", SET, 5 * T + 1);
    shard_write("math.bin", 2 * SET, 12 * T + 1);
    return 0;
}
static int folder_remove(void **state) {
    char command[300];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    return system(command);
}

// ---- texts ----

static void parse_text(void *text) {
    struct mixture mixture;
    mixture_parse(&mixture, (const char *)text, "--train-data");
}

static void a_text_gives_weights_and_names(void **state) {
    static const struct {
        const char *text;
        int count;
        uint64_t weights[4];
        const char *names[4];
    } cases[] = {
        {"a.bin", 1, {1}, {"a"}},
        {"data/my set_*.bin", 1, {1}, {"my set"}},
        {"7", 1, {1}, {"7"}},
        {"3 a.bin", 1, {1}, {"a"}},
        {"0.7 data/web_*.bin 0.3 data/code_*.bin", 2, {7, 3}, {"web", "code"}},
        {" 2\ta.bin  1\nb.bin ", 2, {2, 1}, {"a", "b"}},
        {"0.693584 slim_*.bin 0.306416 star_*.bin", 2, {43349, 19151}, {"slim", "star"}},
        {"0.1 a 0.2 b 0.7 c", 3, {1, 2, 7}, {"a", "b", "c"}},
        {"1e-3 a 1e3 b", 2, {1, 1000000}, {"a", "b"}},
        {"0.25 a 0 b", 2, {1, 0}, {"a", "b"}},
        {"1e-30 a 1 b", 2, {1, 1000000000}, {"a", "b"}},
        {"0.3333333333333333 a 0.6666666666666667 b", 2, {333333333, 666666667}, {"a", "b"}},
        {"1e300 a 1e300 b", 2, {1, 1}, {"a", "b"}},
        {"1 web/train_*.bin 1 code/train_*.bin 1 x.bin", 3, {1, 1, 1}, {"web/train", "code/train", "x"}},
        {"1 /web/*.bin 1 /code/*.idx", 2, {1, 1}, {"web", "code"}},
        {"1 a.bin 2 a.bin", 2, {1, 2}, {"a.bin (1)", "a.bin (2)"}},
        {"1 *.bin 2 /*.bin", 2, {1, 2}, {"*.bin", "/*.bin"}},
        {"1 data/web/*.bin 1 old/web_*.bin", 2, {1, 1}, {"data/web", "old/web"}},
        {"1 x/d/*.bin 1 d.bin", 2, {1, 1}, {"x/d", "d.bin"}},
        {"1 my\\ set/a.bin 1 b", 2, {1, 1}, {"a", "b"}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct mixture mixture;
        mixture_parse(&mixture, cases[i].text, "--train-data");
        assert_int_equal(mixture.count, cases[i].count);
        for (int p = 0; p < mixture.count; p++)
            if (mixture.parts[p].weight != cases[i].weights[p] || strcmp(mixture.parts[p].name, cases[i].names[p]) != 0)
                fail_msg("'%s': %llu of '%s', expected %llu of '%s'", cases[i].text,
                         (unsigned long long)mixture.parts[p].weight, mixture.parts[p].name,
                         (unsigned long long)cases[i].weights[p], cases[i].names[p]);
        mixture_close(&mixture);
    }
}

static void names_of_long_patterns_differ(void **state) {
    char text[2048], folders[300];
    struct mixture mixture;
    memset(folders, 'f', sizeof folders);
    folders[sizeof folders - 1] = '\0';
    snprintf(text, sizeof text, "1 %s/a 1 %s/b 1 %sa 1 %sb", folders, folders, folders, folders);
    mixture_parse(&mixture, text, "--train-data");
    for (int i = 0; i < mixture.count; i++)
        for (int k = 0; k < i; k++)
            assert_string_not_equal(mixture.parts[i].name, mixture.parts[k].name);
    mixture_close(&mixture);
}

static void a_wrong_text_ends_with_a_message(void **state) {
    static const struct {
        const char *text, *words;
    } cases[] = {
        {"1 a 2", "--train-data: '1 a 2': expected a weight before each pattern|found '2' and nothing behind it"},
        {"1 a b c", "but found 'b'"},
        {"-1 a 2 b", "the weight of a is -1; expected 0 or more"},
        {"1 a nan b", "the weight of b is nan"},
        {"inf a 1 b", "the weight of a is inf"},
        {"0 a 0 b", "the weights' sum is 0"},
        {"1e308 a 1e308 b", "the weights' sum is inf"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_fails(parse_text, (void *)cases[i].text, cases[i].words);
    char many[1024] = "";
    for (int i = 0; i <= MIXTURE_PARTS; i++)
        strcat(many, "1 a ");
    assert_fails(parse_text, many, "mixes more than 64 sets");
}

// ---- the order ----

// Checks the first n samples of a mixture against the definition: the next sample is of the set with the lowest
// (2 taken + 1) / weight.
static void order_check(const uint64_t *weights, int parts, uint64_t n) {
    struct mixture_part all[MIXTURE_PARTS];
    const struct mixture mixture = {all, parts, 1000};
    uint64_t taken[MIXTURE_PARTS] = {0}, sum = 0;
    memset(all, 0, sizeof all);
    for (int i = 0; i < parts; i++) {
        all[i].weight = weights[i];
        all[i].before = 7 * (uint64_t)i;
        sum += weights[i];
    }
    for (uint64_t sample = 0; sample < n; sample++) {
        int next = -1;
        for (int i = 0; i < parts; i++)
            if (weights[i] > 0 && (next < 0 || (2 * taken[i] + 1) * weights[next] < (2 * taken[next] + 1) * weights[i]))
                next = i;
        const struct mixture_place place = mixture_place(&mixture, 1000 + sample);
        assert_int_equal(place.part, next);
        assert_int_equal(place.sample, taken[next] + 7 * (uint64_t)next);
        for (int i = 0; i < parts; i++) {
            assert_int_equal(mixture_taken(&mixture, i, 1000 + sample), taken[i] + 7 * (uint64_t)i);
            const double wanted = (double)weights[i] / (double)sum * (double)sample;
            assert_true(fabs((double)taken[i] - wanted) < 2);
        }
        taken[next]++;
    }
}
static void the_order_is_that_of_the_definition(void **state) {
    uint64_t random = 1, weights[MIXTURE_PARTS];
    order_check((const uint64_t[]){7, 3}, 2, 100);
    order_check((const uint64_t[]){1, 1, 1}, 3, 30);
    order_check((const uint64_t[]){0, 5, 2}, 3, 40);
    order_check((const uint64_t[]){1, 1000000000}, 2, 500);
    for (int k = 0; k < 60; k++) {
        const int parts = k < 55 ? 2 + (int)(test_random(&random) % 7) : MIXTURE_PARTS;
        for (int i = 0; i < parts; i++)
            weights[i] = 1 + test_random(&random) % (k % 3 ? 12 : 10000000);
        order_check(weights, parts, 300);
    }
}
// Checks far samples of large weights: the products fit into 64 bits, and as many samples as the weights' sum have each
// set as often as its weight.
static void the_order_repeats_after_the_sum_of_weights(void **state) {
    struct mixture_part all[3] = {{NULL, NULL, 536870911, 0}, {NULL, NULL, 1, 0}, {NULL, NULL, 1073741823, 0}};
    const struct mixture mixture = {all, 3, 0};
    const uint64_t sum = 536870911ull + 1 + 1073741823, far = sum * 1000000000;
    uint64_t random = 2;
    for (int i = 0; i < 3; i++)
        assert_int_equal(mixture_taken(&mixture, i, far), all[i].weight * 1000000000);
    for (int k = 0; k < 2000; k++) {
        const uint64_t sample = test_random(&random) % sum;
        const struct mixture_place near = mixture_place(&mixture, sample),
                                   later = mixture_place(&mixture, far + sample);
        assert_int_equal(near.part, later.part);
        assert_int_equal(later.sample, near.sample + all[near.part].weight * 1000000000);
        assert_int_equal(mixture_taken(&mixture, near.part, sample + 1), near.sample + 1);
    }
}

// ---- the loader ----

static struct dataloader *loader_open(const char *weights, bool shuffle, int rank, int ranks, int B, int ahead) {
    char text[4 * TEST_PATH], web[32], code[32], math[32];
    if (sscanf(weights, "%31s %31s %31s", web, code, math) == 3)
        snprintf(text, sizeof text, "%s %s/web_*.bin %s %s/code.bin %s %s/math.bin", web, folder, code, folder, math,
                 folder);
    else
        snprintf(text, sizeof text, "%s/%s", folder, weights);
    return dataloader_open(text, T, 9, shuffle, VOCAB, rank, ranks, B, ahead, "--train-data");
}
// first (B): the first token of each sample.
static void samples_read(struct dataloader *loader, int *first, int B) {
    int32_t inputs[16 * T], targets[16 * T];
    dataloader_read(loader, inputs, targets, B);
    for (int b = 0; b < B; b++) {
        first[b] = inputs[b * T];
        for (int t = 0; t < T; t++)
            assert_int_equal(targets[b * T + t], first[b] + t + 1);
    }
}

enum { LENGTH = 240 }; // samples of a test; a multiple of 2 ranks x 3
static void sequence_read(int *first, const char *weights) {
    struct dataloader *loader = loader_open(weights, true, 0, 1, 1, 0);
    for (int i = 0; i < LENGTH; i++)
        samples_read(loader, first + i, 1);
    dataloader_close(loader);
}

static void each_set_has_the_order_that_it_has_by_itself(void **state) {
    static const char *const sets[SETS] = {"web_*.bin", "code.bin", "math.bin"};
    int mixed[LENGTH], own[SETS][LENGTH], taken[SETS] = {0};
    sequence_read(mixed, "0.6 0.25 0.15");
    for (int i = 0; i < SETS; i++)
        sequence_read(own[i], sets[i]);
    for (int i = 0; i < LENGTH; i++) {
        const int set = mixed[i] / SET;
        assert_int_equal(mixed[i], own[set][taken[set]++]);
    }
    assert_int_equal(taken[0], 144);
    assert_int_equal(taken[1], 60);
    assert_int_equal(taken[2], 36);
    struct dataloader *loader = loader_open("0.6 0.25 0.15", true, 0, 1, 1, 0);
    assert_true(fabs(dataloader_epochs(loader, 0, LENGTH) - 144 / 31.0) < 1e-12);
    assert_true(fabs(dataloader_epochs(loader, 1, LENGTH) - 12) < 1e-12);
    assert_true(fabs(dataloader_epochs(loader, 2, LENGTH) - 3) < 1e-12);
    assert_int_equal(dataloader_samples_per_epoch(loader), 48);
    for (int set = 0; set < SETS; set++) { // each part apart, as a validation reads
        dataloader_take_part(loader, set);
        for (int i = 0; i < 40; i++) {
            int first;
            samples_read(loader, &first, 1);
            assert_int_equal(first, own[set][i]);
        }
    }
    dataloader_close(loader);
}

static void ranks_batches_and_reading_ahead_change_nothing(void **state) {
    int expected[LENGTH], first[16];
    sequence_read(expected, "0.6 0.25 0.15");
    for (int ranks = 1; ranks <= 2; ranks++)
        for (int rank = 0; rank < ranks; rank++)
            for (int ahead = 0; ahead < 3; ahead++) {
                struct dataloader *loader = loader_open("0.6 0.25 0.15", true, rank, ranks, 3, ahead);
                for (int at = 0; at < LENGTH; at += 3 * ranks) {
                    if (at == 120)
                        dataloader_seek(loader, 0), dataloader_seek(loader, 120);
                    samples_read(loader, first, 3);
                    for (int b = 0; b < 3; b++)
                        assert_int_equal(first[b], expected[at + 3 * rank + b]);
                }
                dataloader_close(loader);
            }
}

// Checks that a mixture that begins within a run goes on with each set where the run left it, and that a set which grew
// gets its new shard from its own next epoch on.
static void another_mixture_goes_on_with_each_set(void **state) {
    int before[LENGTH], own[SETS][LENGTH], taken[SETS] = {0}, first;
    static const char *const sets[SETS] = {"web_*.bin", "code.bin", "math.bin"};
    const struct data_change web = {0, 2, 0, 0}, one = {0, 1, 0, 0}, fewer = {0, 1, 0, 0};
    sequence_read(before, "0.6 0.25 0.15");
    for (int i = 0; i < SETS; i++)
        sequence_read(own[i], sets[i]);
    for (int i = 0; i < 50; i++)
        taken[before[i] / SET]++;
    struct part_start starts[SETS] = {{(uint64_t)taken[0], &web, 1}, {(uint64_t)taken[1], &one, 1}, {0, &one, 1}};
    taken[2] = 0;
    for (int ahead = 0; ahead < 2; ahead++) {
        struct dataloader *loader = loader_open("1 2 3", true, 0, 1, 1, ahead);
        int now[SETS] = {taken[0], taken[1], taken[2]};
        dataloader_resume(loader, 50, starts, 50);
        for (int i = 0; i < 120; i++) {
            samples_read(loader, &first, 1);
            assert_int_equal(first, own[first / SET][now[first / SET]++]);
        }
        assert_int_equal(now[0] - taken[0], 20);
        assert_int_equal(now[1] - taken[1], 40);
        dataloader_close(loader);
    }
    starts[0].before = 0;
    starts[0].changes = &fewer; // the second web shard is new
    struct dataloader *loader = loader_open("1 2 3", true, 0, 1, 1, 0);
    dataloader_resume(loader, 0, starts, 30); // 5 samples of web are taken, of an epoch of 20
    for (int i = 0, web_samples = 5; i < 6 * 60; i++) {
        samples_read(loader, &first, 1);
        if (first < SET)
            assert_true(web_samples++ >= 20 || first < 20 * T);
    }
    assert_true(fabs(dataloader_epochs(loader, 0, loader->position) - (1 + 45 / 31.0)) < 1e-12);
    dataloader_close(loader);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_text_gives_weights_and_names),
        cmocka_unit_test(names_of_long_patterns_differ),
        cmocka_unit_test(a_wrong_text_ends_with_a_message),
        cmocka_unit_test(the_order_is_that_of_the_definition),
        cmocka_unit_test(the_order_repeats_after_the_sum_of_weights),
        cmocka_unit_test(each_set_has_the_order_that_it_has_by_itself),
        cmocka_unit_test(ranks_batches_and_reading_ahead_change_nothing),
        cmocka_unit_test(another_mixture_goes_on_with_each_set),
    };
    return cmocka_run_group_tests(tests, folder_create, folder_remove);
}
