// The data loader. In each epoch the order of samples is a permutation of all windows, whatever the batch, the ranks
// and the timing. Malformed files are errors that say what to do.
#include "dataloader.h"   // under test
#include "test/fails.h"   // assert_fails
#include "test/testing.h" // cmocka, test_random
#include <stdbool.h>      // bool
#include <sys/stat.h>     // mkdir

// ---------------------------------------------------------------------------------------------------------------------
// Files to test with, in a folder of the test's own

static char folder[TEST_PATH];

static int folder_create(void **state) { return mkdtemp(test_template(folder, "unit_dataloader")) ? 0 : -1; }
static int folder_remove(void **state) {
    char command[300];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    return system(command);
}

// Returns the path of `name` in the folder, which is valid until the eighth call after this one.
static const char *in_folder(const char *name) {
    static char paths[8][512];
    static int next;
    char *path = paths[next++ % 8];
    snprintf(path, 512, "%s/%s", folder, name);
    return path;
}
static void file_write(const char *name, const void *bytes, size_t count) {
    FILE *file = fopen(in_folder(name), "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, count, file), count);
    assert_int_equal(fclose(file), 0);
}

// Bytes that grow as they are written.
struct bytes {
    unsigned char data[1 << 16];
    size_t count;
};
static void put(struct bytes *bytes, const void *value, size_t count) {
    assert_true(bytes->count + count <= sizeof bytes->data);
    memcpy(bytes->data + bytes->count, value, count);
    bytes->count += count;
}
static void put_u8(struct bytes *bytes, uint8_t value) { put(bytes, &value, 1); }
static void put_u32(struct bytes *bytes, uint32_t value) { put(bytes, &value, 4); }
static void put_u64(struct bytes *bytes, uint64_t value) { put(bytes, &value, 8); }

// Appends tokens first, first+1, ...: each value says where it came from.
static void put_tokens(struct bytes *bytes, int width, uint64_t first, int count) {
    for (int i = 0; i < count; i++) {
        const uint64_t token = first + (uint64_t)i;
        put(bytes, &token, (size_t)width);
    }
}
static struct bytes shard_bytes(int width, uint64_t first, int count) {
    struct bytes bytes;
    bytes.count = 0;
    put_u32(&bytes, width == 2 ? 20240520 : 20240801);
    put_u32(&bytes, width == 2 ? 1 : 7);
    put_u32(&bytes, (uint32_t)count);
    while (bytes.count < 1024)
        put_u8(&bytes, 0);
    put_tokens(&bytes, width, first, count);
    return bytes;
}
static void shard_write(const char *name, int width, uint64_t first, int count) {
    const struct bytes bytes = shard_bytes(width, first, count);
    file_write(name, bytes.data, bytes.count);
}

enum {
    MEGATRON_U8 = 1,
    MEGATRON_I8,
    MEGATRON_I16,
    MEGATRON_I32,
    MEGATRON_I64,
    MEGATRON_F64,
    MEGATRON_F32,
    MEGATRON_U16
};
static const int megatron_width[] = {0, 1, 1, 2, 4, 8, 8, 4, 2};

// Returns an index of `count` sequences of 3, 0, 4, 3, 0, 4, ... tokens, two of them a document.
static struct bytes index_bytes(int dtype, int count, bool modes) {
    struct bytes bytes;
    int lengths[4096], sequences = 0, rest = count;
    for (; rest > 0; sequences++) {
        const int wanted = sequences % 3 == 0 ? 3 : sequences % 3 == 1 ? 0 : 4;
        lengths[sequences] = wanted < rest ? wanted : rest;
        rest -= lengths[sequences];
    }
    bytes.count = 0;
    put(&bytes, "MMIDIDX\0", 9);
    put_u64(&bytes, 1);
    put_u8(&bytes, (uint8_t)dtype);
    put_u64(&bytes, (uint64_t)sequences);
    put_u64(&bytes, (uint64_t)(sequences + 1) / 2 + 1);
    for (int i = 0; i < sequences; i++)
        put_u32(&bytes, (uint32_t)lengths[i]);
    uint64_t pointer = 0;
    for (int i = 0; i < sequences; i++) {
        put_u64(&bytes, pointer);
        pointer += (uint64_t)(lengths[i] * megatron_width[dtype]);
    }
    for (int i = 0; i < (sequences + 1) / 2; i++)
        put_u64(&bytes, (uint64_t)(2 * i));
    put_u64(&bytes, (uint64_t)sequences);
    for (int i = 0; i < (modes ? sequences : 0); i++)
        put_u8(&bytes, 0);
    return bytes;
}
static void megatron_write(const char *name, int dtype, uint64_t first, int count) {
    char path[64];
    struct bytes tokens;
    tokens.count = 0;
    put_tokens(&tokens, megatron_width[dtype], first, count);
    snprintf(path, sizeof path, "%s.bin", name);
    file_write(path, tokens.data, tokens.count);
    const struct bytes index = index_bytes(dtype, count, false);
    snprintf(path, sizeof path, "%s.idx", name);
    file_write(path, index.data, index.count);
}

// ---------------------------------------------------------------------------------------------------------------------
// Order: five shards whose tokens number their windows. T = 7, and window w of all windows begins with token 7 * w.

enum { T = 7, WINDOWS = 13 + 1 + 40 + 2 + 25, VOCAB = 100000 };

static int order_setup(void **state) {
    static const int windows[] = {13, 1, 40, 2, 25}, tail[] = {0, 6, 3, 1, 5};
    int first = 0;
    for (int i = 0; i < 5; i++) {
        char name[32];
        snprintf(name, sizeof name, "order_%d.bin", i);
        shard_write(name, 2, (uint64_t)(T * first), T * windows[i] + 1 + tail[i]);
        first += windows[i];
    }
    return 0;
}
static struct dataloader *order_open(uint64_t seed, bool shuffle, int rank, int ranks, int B, int batches_ahead) {
    return dataloader_open(in_folder("order_*.bin"), T, seed, shuffle, VOCAB, rank, ranks, B, batches_ahead,
                           "--train-data");
}

// Takes B samples, and checks every token. window (B): the samples' numbers.
static void windows_read(struct dataloader *loader, int *window, int B) {
    int32_t inputs[64 * T], targets[64 * T];
    assert_true(B <= 64);
    dataloader_read(loader, inputs, targets, B);
    for (int b = 0; b < B; b++) {
        assert_int_equal(inputs[b * T] % T, 0);
        window[b] = inputs[b * T] / T;
        for (int t = 0; t < T; t++) {
            assert_int_equal(inputs[b * T + t], inputs[b * T] + t);
            assert_int_equal(targets[b * T + t], inputs[b * T] + t + 1);
        }
    }
}
// Takes the first n samples of one process, one at a time. window (n): their numbers.
static void sequence_read(int *window, int n, uint64_t seed, bool shuffle) {
    struct dataloader *loader = order_open(seed, shuffle, 0, 1, 1, 0);
    for (int i = 0; i < n; i++)
        windows_read(loader, window + i, 1);
    dataloader_close(loader);
}

static void test_each_window_once_per_epoch(void **state) {
    int window[5 * WINDOWS];
    sequence_read(window, 5 * WINDOWS, 42, true);
    for (int epoch = 0; epoch < 5; epoch++) {
        int seen[WINDOWS] = {0};
        for (int i = 0; i < WINDOWS; i++)
            seen[window[epoch * WINDOWS + i]]++;
        for (int i = 0; i < WINDOWS; i++)
            assert_int_equal(seen[i], 1);
    }
}

static void test_shards_and_windows_are_shuffled(void **state) {
    static const int shard_begin[] = {0, 13, 14, 54, 56, WINDOWS};
    int window[3 * WINDOWS], other[WINDOWS], again[WINDOWS], first_shard[64], firsts = 0;
    sequence_read(window, 3 * WINDOWS, 42, true);
    sequence_read(again, WINDOWS, 42, true);
    sequence_read(other, WINDOWS, 43, true);
    assert_memory_equal(window, again, sizeof again);                // a seed always gives one order
    assert_memory_not_equal(window, other, sizeof other);            // another seed
    assert_memory_not_equal(window, window + WINDOWS, sizeof other); // another epoch
    assert_memory_not_equal(window + WINDOWS, window + 2 * WINDOWS, sizeof other);
    for (uint64_t seed = 0; seed < 64; seed++) {
        int shard[WINDOWS], changes = 0, ascending = 0;
        sequence_read(other, WINDOWS, seed, true);
        for (int i = 0; i < WINDOWS; i++)
            for (shard[i] = 0; other[i] >= shard_begin[shard[i] + 1];)
                shard[i]++;
        for (int i = 1; i < WINDOWS; i++) {
            changes += shard[i] != shard[i - 1];
            ascending += other[i] == other[i - 1] + 1;
        }
        assert_int_equal(changes, 4); // shard after shard
        assert_true(ascending < 20);  // of 76 neighbors about one ascends by chance; in file order all do
        first_shard[seed] = shard[0];
    }
    for (int shard = 0; shard < 5; shard++) {
        bool found = false;
        for (int i = 0; i < 64; i++)
            found = found || first_shard[i] == shard;
        firsts += found;
    }
    assert_int_equal(firsts, 5); // under some seed each shard comes first
}

// Checks that a shard's windows have another order in each epoch, and another one than the windows of a shard of equal
// size.
static void test_windows_are_shuffled_anew(void **state) {
    int window[3 * WINDOWS], order[3][40], count[3] = {0};
    sequence_read(window, 3 * WINDOWS, 42, true);
    for (int i = 0; i < 3 * WINDOWS; i++)
        if (window[i] >= 14 && window[i] < 54) // a window of the third shard
            order[i / WINDOWS][count[i / WINDOWS]++] = window[i];
    assert_memory_not_equal(order[0], order[1], sizeof order[0]);
    assert_memory_not_equal(order[0], order[2], sizeof order[0]);
    assert_memory_not_equal(order[1], order[2], sizeof order[0]);

    shard_write("twin_a.bin", 2, 0, 40 * T + 1);
    shard_write("twin_b.bin", 2, 40 * T, 40 * T + 1);
    struct dataloader *loader = dataloader_open(in_folder("twin_*.bin"), T, 1, true, VOCAB, 0, 1, 1, 0, "--train-data");
    int same = 0;
    for (int i = 0; i < 80; i++)
        windows_read(loader, window + i, 1);
    for (int i = 0; i < 40; i++)
        same += window[i] % 40 == window[40 + i] % 40;
    assert_in_range(same, 0, 10); // about one by chance
    dataloader_close(loader);
}

static void test_without_shuffling_file_order(void **state) {
    int window[2 * WINDOWS];
    sequence_read(window, 2 * WINDOWS, 42, false);
    for (int i = 0; i < 2 * WINDOWS; i++)
        assert_int_equal(window[i], i % WINDOWS);
}

static void test_order_is_independent_of_batch_and_read_ahead(void **state) {
    int expected[4 * WINDOWS], window[64];
    sequence_read(expected, 4 * WINDOWS, 7, true);
    for (int batches_ahead = 0; batches_ahead < 4; batches_ahead++)
        for (int B = 1; B < 64; B += B < 4 ? 1 : 13) {
            struct dataloader *loader = order_open(7, true, 0, 1, B, batches_ahead);
            for (int i = 0; i + B <= 4 * WINDOWS; i += B) {
                assert_int_equal(dataloader_position(loader), i);
                assert_int_equal((int)dataloader_epochs(loader, 0, loader->position), i / WINDOWS);
                windows_read(loader, window, B);
                assert_memory_equal(window, expected + i, (size_t)B * sizeof *window);
            }
            dataloader_close(loader);
        }
}

static void test_batch_may_change_and_seek_equals_reading_on(void **state) {
    int expected[6 * WINDOWS], window[64];
    uint64_t random = 1;
    sequence_read(expected, 6 * WINDOWS, 7, true);
    for (int batches_ahead = 0; batches_ahead < 3; batches_ahead++) {
        struct dataloader *loader = order_open(7, true, 0, 1, 4, batches_ahead);
        for (int i = 0; i < 500; i++) {
            const int B = 1 + (int)(test_random(&random) % 9);
            if (i % 3 == 0 || dataloader_position(loader) > 5 * WINDOWS)
                dataloader_seek(loader, test_random(&random) % (5 * WINDOWS));
            const uint64_t position = dataloader_position(loader);
            windows_read(loader, window, B);
            assert_memory_equal(window, expected + position, (size_t)B * sizeof *window);
            assert_int_equal(dataloader_position(loader), position + (uint64_t)B);
        }
        dataloader_close(loader);
    }
}

static void test_ranks_share_the_order_of_one(void **state) {
    int expected[2 * WINDOWS], window[64];
    sequence_read(expected, 2 * WINDOWS, 7, true);
    for (int ranks = 1; ranks <= 4; ranks++)
        for (int B = 1; B <= 3; B++)
            for (int rank = 0; rank < ranks; rank++) {
                struct dataloader *loader = order_open(7, true, rank, ranks, B, rank % 3);
                for (int i = 0; i + B * ranks <= 2 * WINDOWS; i += B * ranks) {
                    assert_int_equal(dataloader_position(loader), i);
                    windows_read(loader, window, B);
                    assert_memory_equal(window, expected + i + rank * B, (size_t)B * sizeof *window);
                }
                dataloader_close(loader);
            }
}

// Checks that the batch may change from one read to the next, as long as it changes on every rank.
static void test_batch_may_change_on_ranks(void **state) {
    int expected[4 * WINDOWS], window[64];
    sequence_read(expected, 4 * WINDOWS, 7, true);
    for (int batches_ahead = 0; batches_ahead < 3; batches_ahead++)
        for (int rank = 0; rank < 3; rank++) {
            struct dataloader *loader = order_open(7, true, rank, 3, 2, batches_ahead);
            for (int i = 0, B = 2, step = 0; i + 3 * B <= 4 * WINDOWS; step++) {
                windows_read(loader, window, B);
                assert_memory_equal(window, expected + i + rank * B, (size_t)B * sizeof *window);
                i += 3 * B;
                B = 1 + step / 2 % 5;
            }
            dataloader_close(loader);
        }
}

// Checks that over keys every permutation of n is about equally frequent: chi-square below about its 1 - 1e-6 quantile.
static void test_permutation_is_uniform(void **state) {
    static const double bound[] = {0, 0, 24, 35, 65}; // for 1, 5 and 23 degrees of freedom
    for (int n = 2; n <= 4; n++) {
        enum { KEYS = 100000 };
        int counts[256] = {0}, factorial = n == 2 ? 2 : n == 3 ? 6 : 24;
        for (int key = 0; key < KEYS; key++) {
            int code = 0;
            for (int i = 0; i < n; i++)
                code = 4 * code + (int)order_permute((uint64_t)i, (uint64_t)n, order_key(1, (uint64_t)key, 0));
            counts[code]++;
        }
        double chi_square = 0;
        int different = 0;
        for (int code = 0; code < 256; code++) {
            const double expected = (double)KEYS / factorial;
            different += counts[code] > 0;
            if (counts[code] > 0)
                chi_square += (counts[code] - expected) * (counts[code] - expected) / expected;
        }
        assert_int_equal(different, factorial);
        if (chi_square > bound[n])
            fail_msg("permutations of %d: chi-square %.1f", n, chi_square);
    }
}
// Checks that in a larger domain each index's place is uniform over keys, and that each n has a permutation.
static void test_permutation_at_many_sizes(void **state) {
    enum { SIZE = 50, KEYS = 20000 };
    static int counts[SIZE][SIZE];
    for (int key = 0; key < KEYS; key++)
        for (int i = 0; i < SIZE; i++)
            counts[i][order_permute((uint64_t)i, SIZE, order_key(2, (uint64_t)key, 3))]++;
    for (int i = 0; i < SIZE; i++)
        for (int j = 0; j < SIZE; j++) // six standard deviations of a Poisson count of mean 400
            assert_in_range(counts[i][j], KEYS / SIZE - 120, KEYS / SIZE + 120);
    for (int n = 1; n < 300; n++) {
        bool seen[300] = {false};
        for (int i = 0; i < n; i++) {
            const uint64_t image = order_permute((uint64_t)i, (uint64_t)n, 99);
            assert_true(image < (uint64_t)n && !seen[image]);
            seen[image] = true;
        }
    }
    for (uint64_t n = (uint64_t)1 << 20; n < (uint64_t)1 << 60; n = n * 3 + 1) // large domains end too, and stay inside
        for (uint64_t i = 0; i < 50; i++)
            assert_true(order_permute(n - 1 - i, n, n) < n);
}
// Checks that the order is as it always was: a run's result depends on it, so it must not change between machines or
// versions. The numbers come from the definition, written a second time in Python.
static void test_order_is_what_it_was(void **state) {
    static const int expected[] = {55, 54, 68, 67, 62, 57, 65, 78, 70, 77, 72, 58, 60, 63, 69, 56,
                                   71, 75, 66, 73, 79, 59, 61, 76, 80, 64, 74, 14, 19, 33, 45, 51};
    enum { COUNT = sizeof expected / sizeof *expected };
    int window[COUNT];
    sequence_read(window, COUNT, 42, true);
    for (int i = 0; i < COUNT; i++)
        assert_int_equal(window[i], expected[i]);
}

// ---------------------------------------------------------------------------------------------------------------------
// Formats

static void test_every_format_and_type_reads_the_same(void **state) {
    static const struct {
        const char *pattern;
        const char *format;
    } cases[] = {{"same_a.bin", "llm.c shards"},       {"same_b.bin", "llm.c shards"},
                 {"same_c*", "Megatron .bin/.idx"},    {"same_d.idx", "Megatron .bin/.idx"},
                 {"same_e.bin", "Megatron .bin/.idx"}, {"same_f.idx", "Megatron .bin/.idx"},
                 {"same_g.bin", "Megatron .bin/.idx"}, {"same_h.bin", "Megatron .bin/.idx"}};
    shard_write("same_a.bin", 2, 3, 100);
    shard_write("same_b.bin", 4, 3, 100);
    megatron_write("same_c", MEGATRON_U8, 3, 100);
    megatron_write("same_d", MEGATRON_I8, 3, 100);
    megatron_write("same_e", MEGATRON_I16, 3, 100);
    megatron_write("same_f", MEGATRON_I32, 3, 100);
    megatron_write("same_g", MEGATRON_I64, 3, 100);
    megatron_write("same_h", MEGATRON_U16, 3, 100);
    for (int i = 0; i < 8; i++) {
        int32_t inputs[10], targets[10];
        char pattern[600];
        snprintf(pattern, sizeof pattern, "%s", in_folder(cases[i].pattern));
        if (i == 6) // named twice, as .bin and as .idx: still one dataset
            snprintf(pattern, sizeof pattern, "%s/same_g.{idx,bin},%s/same_g.bin", folder, folder);
        struct dataloader *loader = dataloader_open(pattern, 10, 1, false, 103, 0, 1, 1, i % 2, "--val-data");
        assert_string_equal(dataloader_format_name(loader), cases[i].format);
        assert_int_equal(dataloader_num_files(loader), 1);
        assert_int_equal(dataloader_total_tokens(loader), 100);
        assert_int_equal(dataloader_samples_per_epoch(loader), 9);
        for (int sample = 0; sample < 9; sample++) {
            dataloader_read(loader, inputs, targets, 1);
            for (int t = 0; t < 10; t++) {
                assert_int_equal(inputs[t], 3 + 10 * sample + t);
                assert_int_equal(targets[t], 4 + 10 * sample + t);
            }
        }
        dataloader_close(loader);
    }
}

// Parses a copy that has exactly these bytes, so that the sanitizer sees a read beyond them.
static const char *parse_shard(const unsigned char *data, size_t count, uint64_t file_bytes, struct error_text *error) {
    struct token_file file;
    unsigned char *copy = (unsigned char *)malloc(count ? count : 1);
    memcpy(copy, data, count);
    const char *problem = llmc_shard_parse(&file, copy, count, file_bytes, "tiny.bin", error);
    free(copy);
    return problem;
}
static const char *parse_index(const unsigned char *data, size_t count, uint64_t bin_bytes, struct error_text *error) {
    struct token_file file;
    unsigned char *copy = (unsigned char *)malloc(count ? count : 1);
    memcpy(copy, data, count);
    const char *problem = megatron_index_parse(&file, copy, count, bin_bytes, "tiny.idx", error);
    free(copy);
    return problem;
}

static void test_truncation_at_every_byte(void **state) {
    struct error_text error;
    for (int width = 2; width <= 4; width += 2) {
        const struct bytes shard = shard_bytes(width, 0, 9);
        assert_null(parse_shard(shard.data, shard.count, shard.count, &error));
        for (size_t count = 0; count < shard.count; count++) {
            error.text[0] = '\0';
            assert_non_null(parse_shard(shard.data, count, count, &error));
            assert_non_null(strstr(error.text, "tiny.bin: "));
        }
    }
    for (int modes = 0; modes < 2; modes++) {
        const struct bytes index = index_bytes(MEGATRON_U16, 20, modes);
        const size_t without_modes = index_bytes(MEGATRON_U16, 20, false).count;
        assert_null(parse_index(index.data, index.count, 40, &error));
        for (size_t count = 0; count < index.count; count++) {
            error.text[0] = '\0';
            if (count == without_modes) // the modes are optional, so this is complete
                continue;
            assert_non_null(parse_index(index.data, count, 40, &error));
            assert_non_null(strstr(error.text, "tiny.idx: "));
        }
    }
}

// Checks an index with any byte set to any of a few values: the parser returns, reads nothing outside (the sanitizer's
// build sees that), and what it accepts describes tokens that are there.
static void test_damaged_bytes(void **state) {
    static const unsigned char values[] = {0, 1, 2, 0x7f, 0x80, 0xff};
    struct error_text error;
    struct bytes index = index_bytes(MEGATRON_I32, 20, true), shard = shard_bytes(2, 0, 9);
    for (size_t place = 0; place < index.count; place++)
        for (size_t v = 0; v < sizeof values; v++) {
            const unsigned char before = index.data[place];
            struct token_file file;
            index.data[place] = values[v];
            if (!megatron_index_parse(&file, index.data, index.count, 80, "tiny.idx", &error))
                assert_int_equal(file.tokens * token_type_bytes(file.type), 80);
            parse_index(index.data, index.count, 80, &error);
            index.data[place] = before;
        }
    for (size_t place = 0; place < 12; place++)
        for (size_t v = 0; v < sizeof values; v++) {
            const unsigned char before = shard.data[place];
            shard.data[place] = values[v];
            assert_true(values[v] == before || parse_shard(shard.data, shard.count, shard.count, &error));
            shard.data[place] = before;
        }
}

static void test_each_damage_is_named(void **state) {
    struct error_text error;
    struct bytes shard = shard_bytes(2, 0, 9), index = index_bytes(MEGATRON_I32, 20, false), damaged;
    assert_error(parse_shard(shard.data, 0, 0, &error), "is empty");
    assert_error(parse_shard(shard.data, 500, 500, &error), "header of 1024 bytes");
    assert_error(parse_shard(shard.data, shard.count, shard.count - 1, &error),
                 "is 1041 bytes long; expected 1042 for the 9 uint16");
    assert_error(parse_shard(shard.data, shard.count, shard.count + 1, &error), "is 1043 bytes long; expected 1042");
    const uint32_t changes[][3] = {{0, 20240522, 0}, {0, 1234, 0}, {4, 2, 0}, {8, 0, 0}};
    const char *const words[] = {"evaluation file", "begins with 1234; expected", "version 2; expected 1",
                                 "expected 1024 for the 0"};
    for (int i = 0; i < 4; i++) {
        damaged = shard;
        memcpy(damaged.data + changes[i][0], &changes[i][1], 4);
        assert_error(parse_shard(damaged.data, damaged.count, damaged.count, &error), words[i]);
    }
    shard = shard_bytes(2, 0, 0);
    assert_error(parse_shard(shard.data, shard.count, shard.count, &error), "holds no tokens");

    assert_error(parse_index(index.data, index.count, 84, &error), "describes 80 bytes of tokens, but the .bin has 84");
    assert_error(parse_index(index.data, index.count, 76, &error), "which has only 76");
    const uint64_t ends = 34 + 12 * 9; // where the document index of 9 sequences begins
    const struct {
        size_t place;
        int64_t value;
        size_t width;
        const char *words;
    } index_changes[] = {{0, 'X', 1, "MMIDIDX"},
                         {9, 2, 8, "version 2; expected 1"},
                         {17, 6, 1, "dtype code 6"},
                         {17, 0, 1, "dtype code 0"},
                         {18, -1, 8, "doesn't fit"},
                         {18, (int64_t)1 << 60, 8, "doesn't fit"},
                         {26, (int64_t)1 << 61, 8, "doesn't fit"},
                         {26, 0, 8, "doesn't fit"},
                         {18, 9 + ((int64_t)1 << 62), 8, "doesn't fit"}, // 12 times it is 12 * 9 modulo 2^64
                         {26, 6 + ((int64_t)1 << 61), 8, "doesn't fit"},
                         {34, -3, 4, "negative length -3"},
                         {34 + 4 * 9 + 8, 4, 8, "sequence 1 begins at byte 4 of the .bin; expected 12"},
                         {ends, 1, 8, "entry 0 of the document index is 1"},
                         {ends + 8, -2, 8, "entry 1 of the document index is -2"},
                         {ends + 16, 1, 8, "entry 2 of the document index is 1"},
                         {ends + 8 * 5, 8, 8, "entry 5 of the document index is 8"}};
    assert_int_equal(load_u64(index.data + 18), 9);
    assert_int_equal(load_u64(index.data + 26), 6);
    for (size_t i = 0; i < sizeof index_changes / sizeof *index_changes; i++) {
        damaged = index;
        memcpy(damaged.data + index_changes[i].place, &index_changes[i].value, index_changes[i].width);
        assert_error(parse_index(damaged.data, damaged.count, 80, &error), index_changes[i].words);
    }
    index = index_bytes(MEGATRON_I32, 0, false);
    assert_error(parse_index(index.data, index.count, 0, &error), "holds no tokens");
}

// ---------------------------------------------------------------------------------------------------------------------
// What a user sees

struct mistake {
    const char *pattern; // in the folder, or an absolute path
    int T, vocab_size, batches_ahead, samples, B;
};
static void make_mistake(void *argument) {
    const struct mistake *mistake = (const struct mistake *)argument;
    char pattern[600];
    snprintf(pattern, sizeof pattern, "%s",
             mistake->pattern[0] == '/' ? mistake->pattern : in_folder(mistake->pattern));
    struct dataloader *loader = dataloader_open(pattern, mistake->T, 1, false, mistake->vocab_size, 0, 1, mistake->B,
                                                mistake->batches_ahead, "--train-data");
    int32_t inputs[64], targets[64];
    for (int i = 0; i < mistake->samples; i += mistake->B) {
        usleep(mistake->B > 1 ? 2000 : 0); // so that the ring is mostly full
        dataloader_read(loader, inputs, targets, mistake->B);
    }
}
static void assert_mistake(const char *pattern, int length, int vocab_size, int samples, const char *words) {
    for (int batches_ahead = 0; batches_ahead < 3; batches_ahead++) {
        struct mistake mistake = {pattern, length, vocab_size, batches_ahead, samples, 1};
        assert_fails(make_mistake, &mistake, words);
        mistake.B = samples > 0 ? samples : 1; // all in one batch
        assert_fails(make_mistake, &mistake, words);
    }
}

static void test_mistakes_end_with_a_message(void **state) {
    struct bytes bytes = shard_bytes(2, 0, 50);
    file_write("cut.bin", bytes.data, bytes.count - 1);
    file_write("empty.bin", "", 0);
    bytes.data[0]++;
    file_write("magic.bin", bytes.data, bytes.count);
    shard_write("none.bin", 2, 0, 0);
    shard_write("small.bin", 2, 0, 8);
    shard_write("mixed_a.bin", 2, 0, 20);
    shard_write("mixed_b.bin", 4, 0, 20);
    megatron_write("mixed_c", MEGATRON_U16, 0, 20);
    megatron_write("orphan", MEGATRON_U16, 0, 20);
    assert_int_equal(unlink(in_folder("orphan.bin")), 0);
    megatron_write("bare", MEGATRON_U16, 0, 20);
    assert_int_equal(unlink(in_folder("bare.idx")), 0);
    mkdir(in_folder("subfolder"), 0700);
    assert_int_equal(mkfifo(in_folder("pipe"), 0600), 0);

    assert_mistake("nothing_*.bin", 8, 100, 0, "--train-data|no file matches|nothing_*.bin|prepare_data.py");
    assert_mistake("/a,,b", 8, 100, 0, "--train-data|/a");
    assert_mistake("small.bin,", 8, 100, 0, "empty pattern");
    assert_mistake("subfolder", 8, 100, 0, "is a folder|/*.bin");
    assert_mistake("pipe", 8, 100, 0, "not a regular file");
    assert_mistake("cut.bin", 8, 100, 0, "cut.bin: is 1123 bytes long; expected 1124 for the 50 uint16|cut off");
    assert_mistake("empty.bin", 8, 100, 0, "empty.bin: is empty");
    assert_mistake("magic.bin", 8, 100, 0, "magic.bin: begins with 20240521; expected|20240520");
    assert_mistake("none.bin", 8, 100, 0, "none.bin: holds no tokens");
    assert_mistake("small.bin", 8, 100, 0, "small.bin: holds 8 tokens; expected at least 9|--seq-length 8");
    assert_mistake("mixed_[ab].bin", 8, 100, 0, "mixed formats|mixed_a.bin|uint16|mixed_b.bin|uint32");
    assert_mistake("mixed_[ac].bin", 8, 100, 0, "mixed formats|mixed_a.bin|llm.c|mixed_c.bin|Megatron");
    assert_mistake("orphan.idx", 8, 100, 0, "orphan.bin: can't be opened");
    assert_mistake("bare.bin", 8, 100, 0, "bare.bin: begins with|.idx");
    assert_mistake("small.bin", 0, 100, 0, "--seq-length is 0");
    assert_mistake("small.bin", 4, 0, 0, "--vocab-size is 0");
}

static void test_tokens_outside_the_vocabulary(void **state) {
    struct bytes bytes = shard_bytes(4, 0, 50);
    const uint32_t large = 4000000000u;
    memcpy(bytes.data + 1024 + 4 * 33, &large, 4);
    file_write("outside.bin", bytes.data, bytes.count);
    megatron_write("negative", MEGATRON_I64, (uint64_t)-20, 50);
    megatron_write("negative_8", MEGATRON_I8, (uint64_t)-20, 50);
    megatron_write("negative_16", MEGATRON_I16, (uint64_t)-20, 50);
    megatron_write("negative_32", MEGATRON_I32, (uint64_t)-20, 50);
    megatron_write("wide", MEGATRON_I64, ((uint64_t)1 << 32) - 20, 50); // in range if it were cut to 32 bits
    shard_write("edge.bin", 2, 0, 50);
    struct bytes known = shard_bytes(2, 0, 50);
    known.data[128] = 50; // tokens of its tokenizer
    file_write("known.bin", known.data, known.count);

    // Token 33 is in the window that begins at 24 and is no window's first token; with 8 a window it is the fifth
    // sample's.
    assert_mistake("outside.bin", 8, 100, 5,
                   "outside.bin: token 33 of the file is 4000000000, outside the vocabulary of 100|--vocab-size");
    assert_mistake("negative.bin", 8, 100, 1, "negative.bin: token 0 of the file is -20, outside");
    assert_mistake("negative_8.bin", 8, 300, 1, "negative_8.bin: token 0 of the file is -20, outside");
    assert_mistake("negative_16.bin", 8, 70000, 1, "negative_16.bin: token 0 of the file is -20, outside");
    assert_mistake("negative_32.bin", 8, 100, 1, "negative_32.bin: token 0 of the file is -20, outside");
    assert_mistake("wide.bin", 8, 100, 1, "wide.bin: token 0 of the file is 4294967276, outside");
    assert_mistake("edge.bin", 8, 48, 6, "outside the vocabulary of 48; set --vocab-size to that of");
    assert_mistake("known.bin", 8, 48, 6,
                   "token 48 of the file is 48, outside the vocabulary of 48; set --vocab-size to 50, that of");
    struct mistake unharmed[] = {{"outside.bin", 8, 100, 2, 4, 1},
                                 {"outside.bin", 8, 100, 2, 4, 4},
                                 {"edge.bin", 8, 49, 0, 6, 1},
                                 {"edge.bin", 8, 49, 2, 6, 3}};
    for (int i = 0; i < 4; i++) { // an unused token, though read ahead, stops nothing
        char message[1024];
        assert_int_equal(run_in_child(make_mistake, &unharmed[i], message, sizeof message), 0);
    }
}

static void read_file_that_shrinks(void *argument) {
    struct dataloader *loader = dataloader_open(in_folder("shrinks.bin"), 8, 1, false, 100, 0, 1, 1, 0, "--train-data");
    int32_t inputs[8], targets[8];
    dataloader_read(loader, inputs, targets, 1);
    if (truncate(in_folder("shrinks.bin"), 1024 + 20) == 0)
        dataloader_read(loader, inputs, targets, 1);
}
static void test_file_that_shrinks_during_the_run(void **state) {
    shard_write("shrinks.bin", 2, 0, 50);
    assert_fails(read_file_that_shrinks, NULL, "shrinks.bin: ends at byte 1044|don't change it");
}

// Reads two epochs of two shards, of which the first is written anew after the loader has opened it: with tokens from
// *other on; NULL: with the same ones.
static void read_a_shard_written_anew(void *other) {
    struct dataloader *loader = dataloader_open(in_folder("anew_?.bin"), 8, 1, true, 100, 0, 1, 1, 0, "--train-data");
    int32_t inputs[8], targets[8];
    if (other)
        shard_write("anew_a.bin", 2, *(int *)other, 49);
    for (uint64_t i = 0; i < 2 * dataloader_samples_per_epoch(loader); i++)
        dataloader_read(loader, inputs, targets, 1);
    dataloader_close(loader);
}
static void test_a_shard_that_is_written_anew_is_said_once(void **state) {
    char message[1024];
    int first = 10;
    shard_write("anew_a.bin", 2, 0, 50);
    shard_write("anew_b.bin", 2, 0, 50);
    assert_int_equal(run_in_child(read_a_shard_written_anew, NULL, message, sizeof message), 0);
    assert_string_equal(message, "");
    assert_int_equal(run_in_child(read_a_shard_written_anew, &first, message, sizeof message), 0);
    const char *const said = strstr(message, "anew_a.bin was written anew while the run reads it");
    assert_non_null(said);
    assert_null(strstr(strchr(said, '\n'), "written anew")); // said only once
}

// Reads far beyond 2 GiB or 4 GiB in a sparse file, which takes no disk: only its far end holds tokens.
static void far_end_read(int width, int64_t tokens) {
    struct bytes far;
    far.count = 0;
    const int length = 64;
    const int64_t last_window = (tokens - 1) / length - 1;
    put_tokens(&far, width, 500, length + 1);
    struct bytes header = shard_bytes(width, 0, 0);
    const uint32_t count = (uint32_t)tokens;
    memcpy(header.data + 8, &count, 4);
    file_write("far.bin", header.data, header.count);
    assert_int_equal(truncate(in_folder("far.bin"), 1024 + tokens * width), 0);
    const int fd = open(in_folder("far.bin"), O_WRONLY);
    assert_int_equal(pwrite(fd, far.data, far.count, 1024 + last_window * length * width), far.count);
    close(fd);

    struct dataloader *loader =
        dataloader_open(in_folder("far.bin"), length, 1, false, 1000, 0, 1, 2, 1, "--train-data");
    assert_int_equal(dataloader_total_tokens(loader), tokens);
    assert_int_equal(dataloader_samples_per_epoch(loader), last_window + 1);
    int32_t inputs[2 * 64], targets[2 * 64];
    dataloader_seek(loader, (uint64_t)last_window - 1);
    dataloader_read(loader, inputs, targets, 2);
    for (int t = 0; t < length; t++) {
        assert_int_equal(inputs[t], 0);
        assert_int_equal(inputs[length + t], 500 + t);
        assert_int_equal(targets[length + t], 501 + t);
    }
    dataloader_read(loader, inputs, targets, 1); // and begins again with the first window
    assert_int_equal(inputs[0], 0);
    assert_int_equal((int)dataloader_epochs(loader, 0, loader->position), 1);
    dataloader_close(loader);
    unlink(in_folder("far.bin"));
}
static void test_shards_above_2_and_4_GiB(void **state) {
    far_end_read(2, 1200000013);  // 2.4 GB
    far_end_read(4, 1200000013);  // 4.8 GB
    far_end_read(2, 3000000001u); // more tokens than an int32 counts
}

// Returns the number of this process's resident pages, which must be the same after 64 MB as after 1 MB: nothing that
// is read stays.
static long resident_pages(void) {
    long size = 0, resident = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    assert_non_null(file);
    assert_int_equal(fscanf(file, "%ld %ld", &size, &resident), 2);
    fclose(file);
    return resident;
}
static void test_resident_memory_is_flat(void **state) {
    struct bytes header = shard_bytes(2, 0, 0);
    const uint32_t count = 32 << 20;
    memcpy(header.data + 8, &count, 4);
    file_write("flat.bin", header.data, header.count);
    assert_int_equal(truncate(in_folder("flat.bin"), 1024 + (off_t)count * 2), 0);
    enum { LENGTH = 1024, BATCH = 16 };
    int32_t *inputs = (int32_t *)test_alloc(BATCH * LENGTH * sizeof *inputs),
            *targets = (int32_t *)test_alloc(BATCH * LENGTH * sizeof *targets);
    struct dataloader *loader =
        dataloader_open(in_folder("flat.bin"), LENGTH, 1, true, 10, 0, 1, BATCH, 2, "--train-data");
    for (int i = 0; i < 32; i++)
        dataloader_read(loader, inputs, targets, BATCH);
    const long before = resident_pages();
    while ((int)dataloader_epochs(loader, 0, loader->position) == 0)
        dataloader_read(loader, inputs, targets, BATCH);
    assert_true(resident_pages() - before < (UNDER_ADDRESS_SANITIZER ? 2048 : 64)); // 8 MiB, or 256 KiB, of the 64 MB
    dataloader_close(loader);
    free(inputs);
    free(targets);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_each_window_once_per_epoch, order_setup),
        cmocka_unit_test(test_shards_and_windows_are_shuffled),
        cmocka_unit_test(test_windows_are_shuffled_anew),
        cmocka_unit_test(test_without_shuffling_file_order),
        cmocka_unit_test(test_order_is_independent_of_batch_and_read_ahead),
        cmocka_unit_test(test_batch_may_change_and_seek_equals_reading_on),
        cmocka_unit_test(test_ranks_share_the_order_of_one),
        cmocka_unit_test(test_batch_may_change_on_ranks),
        cmocka_unit_test(test_permutation_is_uniform),
        cmocka_unit_test(test_permutation_at_many_sizes),
        cmocka_unit_test(test_order_is_what_it_was),
        cmocka_unit_test(test_every_format_and_type_reads_the_same),
        cmocka_unit_test(test_truncation_at_every_byte),
        cmocka_unit_test(test_damaged_bytes),
        cmocka_unit_test(test_each_damage_is_named),
        cmocka_unit_test(test_mistakes_end_with_a_message),
        cmocka_unit_test(test_tokens_outside_the_vocabulary),
        cmocka_unit_test(test_file_that_shrinks_during_the_run),
        cmocka_unit_test(test_a_shard_that_is_written_anew_is_said_once),
        cmocka_unit_test(test_shards_above_2_and_4_GiB),
        cmocka_unit_test(test_resident_memory_is_flat),
    };
    return cmocka_run_group_tests(tests, folder_create, folder_remove);
}
