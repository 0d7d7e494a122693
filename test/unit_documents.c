// Documents in the data loader. Where each token's document begins, and which targets do not count, agrees with a scan
// of the whole shard, whatever the window, the batch, the ranks and the reading ahead.
#include "dataloader.h"   // under test
#include "test/fails.h"   // assert_fails, assert_error
#include "test/testing.h" // cmocka, test_random
#include <stdbool.h>      // bool

enum { T = 7, DELIMITER = 1, FIRST_VALUE = 10, VOCAB = 60000, TOKENS_MAX = 2000, FILES = 3 };

static char folder[TEST_PATH];
static const char *in_folder(const char *name) { // valid until the eighth call after it
    static char paths[8][TEST_PATH + 64];
    static int next;
    char *path = paths[next++ % 8];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}
static int folder_create(void **state) { return mkdtemp(test_template(folder, "unit_documents")) ? 0 : -1; }
static int folder_remove(void **state) {
    char command[TEST_PATH + 16];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    return system(command);
}

// ---------------------------------------------------------------------------------------------------------------------
// A shard, and what a scan of all of it finds

struct shard {
    int count;
    uint16_t tokens[TOKENS_MAX];
    bool begins[TOKENS_MAX]; // whether a document of the .idx begins at this token
};

static void shard_write(const char *name, const struct shard *shard) {
    const uint32_t header[256] = {20240520, 1, (uint32_t)shard->count};
    FILE *file = fopen(in_folder(name), "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(header, sizeof header, 1, file), 1);
    assert_int_equal(fwrite(shard->tokens, sizeof(uint16_t), (size_t)shard->count, file), shard->count);
    assert_int_equal(fclose(file), 0);
}

// Writes an .idx of these sequences and document entries. width: bytes of a token, 2 or 4.
static void index_write(const char *name, int width, const int *lengths, int sequences, const int *entries, int count) {
    FILE *file = fopen(in_folder(name), "wb");
    const unsigned char code = width == 2 ? 8 : 4;
    const uint64_t numbers[] = {1, (uint64_t)sequences, (uint64_t)count};
    uint64_t pointer = 0;
    assert_non_null(file);
    fwrite("MMIDIDX\0", 1, 9, file);
    fwrite(&numbers[0], 8, 1, file);
    fwrite(&code, 1, 1, file);
    fwrite(&numbers[1], 8, 2, file);
    for (int i = 0; i < sequences; i++)
        fwrite(&lengths[i], 4, 1, file);
    for (int i = 0; i < sequences; i++) {
        fwrite(&pointer, 8, 1, file);
        pointer += (uint64_t)(lengths[i] * width);
    }
    for (int i = 0; i < count; i++) {
        const uint64_t entry = (uint64_t)entries[i];
        fwrite(&entry, 8, 1, file);
    }
    assert_int_equal(fclose(file), 0);
}
static void bin_write(const char *name, const void *tokens, size_t bytes) {
    FILE *file = fopen(in_folder(name), "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(tokens, 1, bytes, file), bytes);
    assert_int_equal(fclose(file), 0);
}

// Writes a shard as NAME.bin and NAME.idx, in random documents of up to three sequences, some of which are empty. Sets
// shard->begins.
static void megatron_write(const char *name, struct shard *shard, uint64_t *random) {
    static int lengths[3 * TOKENS_MAX], entries[3 * TOKENS_MAX];
    char path[64];
    int sequences = 0, documents = 0;
    memset(shard->begins, 0, sizeof shard->begins);
    for (int at = 0; at < shard->count;) {
        entries[documents++] = sequences;
        shard->begins[at] = true;
        for (uint64_t i = test_random(random) % 4; i > 0; i--) { // a document without sequences is empty too
            static const int usual[] = {0, 1, 1, 3, 9, 20};
            const int length = usual[test_random(random) % 6], rest = shard->count - at;
            lengths[sequences] = length < rest ? length : rest;
            at += lengths[sequences++];
        }
    }
    entries[documents++] = sequences; // where the last document ends
    snprintf(path, sizeof path, "%s.bin", name);
    bin_write(path, shard->tokens, (size_t)shard->count * sizeof(uint16_t));
    snprintf(path, sizeof path, "%s.idx", name);
    index_write(path, 2, lengths, sequences, entries, documents);
}

// Whether token i of a shard begins a document; not for the first token.
static bool begins_document(const struct shard *shard, int i, enum document_boundary boundary) {
    switch (boundary) {
    case BOUNDARY_NONE: return false;
    case BOUNDARY_FIRST: return shard->tokens[i] == DELIMITER;
    case BOUNDARY_LAST: return shard->tokens[i - 1] == DELIMITER;
    case BOUNDARY_INDEX: return shard->begins[i];
    case BOUNDARY_BITS: break; // test/test_finetune_data.py tests these
    }
    return false;
}

// Fills the shards with delimiters, one in `rarity`, at each place of a window, and with tokens that are FIRST_VALUE +
// their place among all shards, so that a window's tokens say where it lies. No window has only delimiters.
static void shards_fill(struct shard *shards, int rarity, uint64_t *random) {
    int value = FIRST_VALUE;
    for (int f = 0; f < FILES; f++) {
        static const int windows[FILES] = {90, 1, 47}, tail[FILES] = {0, 6, 3};
        shards[f].count = windows[f] * T + 1 + tail[f];
        for (int i = 0; i < shards[f].count; i++, value++) {
            const bool delimiter = i % T != 3 && test_random(random) % (uint64_t)rarity == 0;
            shards[f].tokens[i] = (uint16_t)(delimiter ? DELIMITER : value);
        }
    }
}

// Finds a window's shard, and its first token there, by its fourth token, which is no delimiter.
static const struct shard *window_find(const struct shard *shards, int32_t fourth, int *first) {
    int place = fourth - FIRST_VALUE - 3, f = 0;
    while (place >= shards[f].count)
        place -= shards[f++].count;
    assert_true(f < FILES && place % T == 0);
    *first = place;
    return &shards[f];
}

// Compares a row of a batch with the scan.
static void row_check(const struct shard *shards, const int32_t *inputs, const int32_t *targets, const int32_t *starts,
                      struct document_rule rule) {
    int first;
    const struct shard *shard = window_find(shards, inputs[3], &first);
    int begin = 0; // of the current document, in the shard
    for (int i = 1; i <= first; i++)
        begin = begins_document(shard, i, rule.boundary) ? i : begin;
    for (int t = 0; t < T; t++) {
        const int i = first + t, next = shard->tokens[i + 1];
        if (t > 0 && begins_document(shard, i, rule.boundary))
            begin = i;
        const bool masked = rule.mask_targets && next != rule.delimiter && begins_document(shard, i + 1, rule.boundary);
        assert_int_equal(inputs[t], shard->tokens[i]);
        assert_int_equal(targets[t], masked ? -1 : next);
        if (starts)
            assert_int_equal(starts[t], begin > first ? begin - first : 0);
    }
}

enum { ROWS = 6 };
static struct shard shards[FILES];
static int32_t inputs[ROWS * T], targets[ROWS * T], starts[ROWS * T];

static void batch_check(struct dataloader *loader, int B, struct document_rule rule, bool with_starts) {
    const struct token_batch batch = {inputs, targets, with_starts ? starts : NULL};
    dataloader_read_batch(loader, batch, B);
    for (int b = 0; b < B; b++)
        row_check(shards, inputs + b * T, targets + b * T, with_starts ? starts + b * T : NULL, rule);
}

// A rule that is tested on shards, or on Megatron's datasets.
struct rule_case {
    struct document_rule rule;
    bool megatron;
};
static const struct rule_case cases[] = {
    {{BOUNDARY_FIRST, DELIMITER, false}, false}, {{BOUNDARY_FIRST, DELIMITER, true}, false},
    {{BOUNDARY_LAST, DELIMITER, false}, false},  {{BOUNDARY_LAST, DELIMITER, true}, false},
    {{BOUNDARY_FIRST, DELIMITER, true}, true},   {{BOUNDARY_LAST, DELIMITER, true}, true},
    {{BOUNDARY_INDEX, DELIMITER, true}, true},   {{BOUNDARY_INDEX, DELIMITER, false}, true},
    {{BOUNDARY_INDEX, -1, true}, true},
};
enum { CASES = sizeof cases / sizeof cases[0] };

static void files_write(bool megatron, int rarity, uint64_t seed) {
    shards_fill(shards, rarity, &seed);
    for (int f = 0; f < FILES; f++) {
        char name[32];
        snprintf(name, sizeof name, megatron ? "index_%d" : "shard_%d.bin", f);
        if (megatron)
            megatron_write(name, &shards[f], &seed);
        else
            shard_write(name, &shards[f]);
    }
}
static struct dataloader *documents_open(const struct rule_case *k, bool shuffle, int rank, int ranks, int B,
                                         int ahead) {
    struct dataloader *loader = dataloader_open(in_folder(k->megatron ? "index_*.bin" : "shard_*.bin"), T, 5, shuffle,
                                                VOCAB, rank, ranks, B, ahead, "--train-data");
    assert_int_equal(dataloader_files_format(loader), k->megatron ? TOKENS_MEGATRON : TOKENS_LLMC);
    dataloader_separate_documents(loader, k->rule);
    return loader;
}

// ---------------------------------------------------------------------------------------------------------------------
// Single windows, readable

// Checks a window of six characters, in which '|' is the delimiter. begins: '^' where the .idx has a document begin;
// documents: where each token's document begins; counted: the targets, '-' where one does not count.
static void window_check(enum document_boundary boundary, const char *text, const char *begins, const char *documents,
                         const char *counted) {
    enum { LENGTH = 5 };
    struct dataloader loader;
    struct token_file file;
    uint64_t places[LENGTH + 3] = {0}; // 100 tokens of the file lie before the window, where a document begins, too
    int32_t tokens[LENGTH + 1], where[LENGTH + 1], in[LENGTH], out[LENGTH], from[LENGTH];
    const struct token_batch batch = {in, out, from};
    memset(&loader, 0, sizeof loader);
    memset(&file, 0, sizeof file);
    loader.T = LENGTH;
    loader.rule.boundary = boundary;
    loader.rule.delimiter = '|';
    loader.rule.mask_targets = true;
    file.documents = places;
    file.num_documents = 1;
    for (int t = 0; t <= LENGTH; t++) {
        tokens[t] = text[t];
        if (begins[0] && begins[t] == '^')
            places[file.num_documents++] = 100 + (uint64_t)t;
    }
    places[file.num_documents++] = 100 + LENGTH + 1; // and one begins after the window
    sample_documents(where, tokens, LENGTH + 1, loader.rule, &file, 100);
    batch_row(batch, 0, tokens, where, &loader);
    for (int t = 0; t < LENGTH; t++) {
        const int32_t target = counted[t] == '-' ? -1 : counted[t];
        if (from[t] != documents[t] - '0' || out[t] != target || in[t] != text[t])
            fail_msg("'%s' at %d: document at %d, expected %c; target %d, expected %c", text, t, from[t], documents[t],
                     out[t], counted[t]);
    }
}
static void documents_begin_where_the_rule_says(void **state) {
    window_check(BOUNDARY_FIRST, "abcdef", "", "00000", "bcdef");
    window_check(BOUNDARY_FIRST, "|abcde", "", "00000", "abcde");
    window_check(BOUNDARY_FIRST, "ab|cd|", "", "00222", "b|cd|"); // the delimiter is predicted, and then the text
    window_check(BOUNDARY_FIRST, "a||bcd", "", "01222", "||bcd");
    window_check(BOUNDARY_FIRST, "abcd|e", "", "00004", "bcd|e");
    window_check(BOUNDARY_FIRST, "||||||", "", "01234", "|||||");

    window_check(BOUNDARY_LAST, "abcdef", "", "00000", "bcdef");
    window_check(BOUNDARY_LAST, "|abcde", "", "01111", "-bcde"); // it ends a document that began before the window
    window_check(BOUNDARY_LAST, "ab|cde", "", "00033", "b|-de");
    window_check(BOUNDARY_LAST, "ab||cd", "", "00034", "b||-d"); // an empty document, whose delimiter is predicted
    window_check(BOUNDARY_LAST, "abcd|e", "", "00000", "bcd|-");
    window_check(BOUNDARY_LAST, "abcde|", "", "00000", "bcde|");
    window_check(BOUNDARY_LAST, "||||||", "", "01234", "|||||");

    window_check(BOUNDARY_INDEX, "ab|cd|", "      ", "00000", "b|cd|"); // the tokens themselves do not matter
    window_check(BOUNDARY_INDEX, "abcdef", "^     ", "00000", "bcdef");
    window_check(BOUNDARY_INDEX, "abcdef", " ^^  ^", "01222", "--de-");
    window_check(BOUNDARY_INDEX, "ab|cde", "   ^  ", "00033", "b|-de"); // the delimiter comes last
    window_check(BOUNDARY_INDEX, "ab|cde", "  ^   ", "00222", "b|cde"); // the delimiter comes first
    window_check(BOUNDARY_INDEX, "abcde|", "     ^", "00000", "bcde|");
    window_check(BOUNDARY_INDEX, "abcdef", "^^^^^^", "01234", "-----");
}

// ---------------------------------------------------------------------------------------------------------------------
// Whole files

static void documents_equal_those_of_a_scan(void **state) {
    static const int rarities[] = {2, 9, 40, 100000};
    int rows = 0, masked = 0, inside = 0;
    for (int r = 0; r < 4; r++)
        for (int k = 0; k < CASES; k++) {
            files_write(cases[k].megatron, rarities[r], (uint64_t)(10 * r + k));
            for (int ahead = 0; ahead < 3; ahead++)
                for (int B = 1; B <= ROWS; B += B < 3 ? 1 : 3) {
                    struct dataloader *loader = documents_open(&cases[k], ahead != 1, 0, 1, B, ahead);
                    while ((int)dataloader_epochs(loader, 0, loader->position) < 2) {
                        batch_check(loader, B, cases[k].rule, true);
                        for (int i = 0; i < B * T; i++) {
                            masked += targets[i] == -1;
                            inside += i % T && starts[i];
                        }
                        rows += B;
                    }
                    dataloader_close(loader);
                }
        }
    assert_true(rows >= 4 * CASES * 12 * 2 * 138 && masked > rows / 10 && inside > rows); // so the test is not empty
}

static void documents_survive_seeks_and_other_batches(void **state) {
    uint64_t random = 3;
    for (int k = 0; k < CASES; k++) {
        files_write(cases[k].megatron, 9, (uint64_t)k);
        for (int ahead = 0; ahead < 3; ahead++)
            for (int rank = 0; rank < 2; rank++) {
                struct dataloader *loader = documents_open(&cases[k], true, rank, 2, 3, ahead);
                for (int i = 0; i < 100; i++) {
                    if (i % 3 == 0)
                        dataloader_seek(loader, test_random(&random) % 500);
                    batch_check(loader, 1 + (int)(test_random(&random) % ROWS), cases[k].rule, i % 5 != 4);
                }
                dataloader_close(loader);
            }
    }
}

// Checks a run that is resumed after a position at which documents may be separated: it gets the samples of a run that
// went on.
static void documents_survive_a_resume(void **state) {
    for (int k = 0; k < CASES; k++)
        for (int ahead = 0; ahead < 3; ahead++) {
            int32_t expected[3][ROWS * T];
            const struct data_change all = {0, FILES, 0, 0}, grown = {0, 2, 0, 0};
            const struct part_start whole = {0, &all, 1}, fewer = {0, &grown, 1};
            files_write(cases[k].megatron, 9, (uint64_t)k);
            struct dataloader *loader = documents_open(&cases[k], true, 0, 1, ROWS, ahead);
            for (int i = 0; i < 20; i++)
                batch_check(loader, ROWS, cases[k].rule, true);
            memcpy(expected[0], inputs, sizeof inputs);
            memcpy(expected[1], targets, sizeof targets);
            memcpy(expected[2], starts, sizeof starts);
            dataloader_close(loader);

            loader = documents_open(&cases[k], true, 0, 1, ROWS, ahead);
            dataloader_resume(loader, 0, &whole, 19 * ROWS);
            assert_int_equal(loader->ahead.capacity, ahead * ROWS);
            batch_check(loader, ROWS, cases[k].rule, true);
            assert_memory_equal(inputs, expected[0], sizeof inputs);
            assert_memory_equal(targets, expected[1], sizeof targets);
            assert_memory_equal(starts, expected[2], sizeof starts);
            batch_check(loader, 4, cases[k].rule, true); // another batch, and then one more shard
            dataloader_resume(loader, 0, &fewer, 19 * ROWS);
            assert_int_equal(loader->ahead.capacity, ahead * ROWS);
            while ((int)dataloader_epochs(loader, 0, loader->position) < 4)
                batch_check(loader, ROWS, cases[k].rule, true);
            dataloader_close(loader);

            loader = dataloader_open(in_folder(cases[k].megatron ? "index_*.bin" : "shard_*.bin"), T, 5, true, VOCAB, 0,
                                     1, ROWS, ahead, "--train-data");
            dataloader_seek(loader, 19 * ROWS);
            dataloader_separate_documents(loader, cases[k].rule);
            assert_int_equal(dataloader_position(loader), 19 * ROWS);
            batch_check(loader, ROWS, cases[k].rule, true);
            assert_memory_equal(inputs, expected[0], sizeof inputs);
            assert_memory_equal(targets, expected[1], sizeof targets);
            assert_memory_equal(starts, expected[2], sizeof starts);
            dataloader_close(loader);
        }
}

// Checks that without a rule a batch is as it always was: every target counts.
static void without_a_rule_every_target_counts(void **state) {
    const struct document_rule none = {BOUNDARY_NONE, -1, false};
    files_write(false, 4, 1);
    for (int ahead = 0; ahead < 2; ahead++) {
        struct dataloader *loader =
            dataloader_open(in_folder("shard_*.bin"), T, 5, true, VOCAB, 0, 1, 2, ahead, "--train-data");
        while ((int)dataloader_epochs(loader, 0, loader->position) < 1)
            batch_check(loader, 2, none, false);
        dataloader_close(loader);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The .idx

static void the_index_says_where_documents_begin(void **state) {
    // Sequences: 3 0 2 | (nothing) | 0 | 1 | 4 | (nothing) 0 at the end. Documents without tokens begin nowhere.
    static const int lengths[] = {3, 0, 2, 0, 1, 4, 0}, entries[] = {0, 3, 3, 4, 5, 6, 6, 7};
    static const uint64_t expected[] = {0, 5, 6};
    const uint32_t tokens[10] = {0};
    struct error_text error;
    for (int width = 2; width <= 4; width += 2) {
        struct token_file file;
        bin_write("small.bin", tokens, (size_t)(10 * width));
        index_write("small.idx", width, lengths, 7, entries, 8);
        memset(&file, 0, sizeof file);
        assert_null(token_file_open(&file, in_folder("small.bin"), &error));
        assert_null(file.documents);
        assert_null(token_file_read_documents(&file, &error));
        assert_int_equal(file.num_documents, 3);
        assert_memory_equal(file.documents, expected, sizeof expected);
        const uint64_t *kept = file.documents;
        assert_null(token_file_read_documents(&file, &error)); // a second time it reads nothing
        assert_ptr_equal(file.documents, kept);
        token_file_close(&file);
        assert_null(file.documents);
    }
    struct token_file shard; // it has no .idx, and no documents
    files_write(false, 9, 1);
    memset(&shard, 0, sizeof shard);
    assert_null(token_file_open(&shard, in_folder("shard_0.bin"), &error));
    assert_null(token_file_read_documents(&shard, &error));
    assert_true(!shard.documents && shard.num_documents == 0);
    token_file_close(&shard);
}

// Checks that an .idx that has changed since the file was opened is refused, whatever it became.
static void an_index_that_changes_is_refused(void **state) {
    static const int lengths[] = {6, 4}, others[] = {6, 5}, halves[] = {12, 8}, entries[] = {0, 1, 2};
    const uint16_t tokens[20] = {0};
    struct error_text error;
    struct token_file file;
    memset(&file, 0, sizeof file);
    bin_write("change.bin", tokens, 40);
    index_write("change.idx", 2, halves, 2, entries, 3);
    assert_null(token_file_open(&file, in_folder("change.bin"), &error));
    index_write("change.idx", 2, others, 2, entries, 3);
    assert_error(token_file_read_documents(&file, &error), "change.idx: describes 22 bytes");
    index_write("change.idx", 4, lengths, 2, entries, 3); // as many bytes, half as many tokens
    assert_error(token_file_read_documents(&file, &error), "change.idx: has tokens of int32, but had uint16");
    bin_write("change.idx", "MMIDIDX", 5);
    assert_error(token_file_read_documents(&file, &error), "change.idx: is 5 bytes long");
    bin_write("change.idx", "", 0);
    assert_error(token_file_read_documents(&file, &error), "change.idx: is empty");
    assert_int_equal(unlink(in_folder("change.idx")), 0);
    assert_error(token_file_read_documents(&file, &error), "change.idx: can't be opened");
    assert_true(!file.documents && file.num_documents == 0);
    index_write("change.idx", 2, halves, 2, entries, 3);
    assert_null(token_file_read_documents(&file, &error));
    assert_int_equal(file.num_documents, 2);
    token_file_close(&file);
}
static void separate_without_an_index(void *unused) {
    const struct rule_case k = {{BOUNDARY_INDEX, -1, true}, true};
    struct dataloader *loader = dataloader_open(in_folder("index_*.bin"), T, 5, true, VOCAB, 0, 1, 2, 1, "--val-data");
    unlink(in_folder("index_1.idx"));
    dataloader_separate_documents(loader, k.rule);
}
static void a_lost_index_ends_the_program(void **state) {
    files_write(true, 9, 1);
    assert_fails(separate_without_an_index, NULL, "--val-data: |index_1.idx: can't be opened");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(documents_begin_where_the_rule_says),
        cmocka_unit_test(documents_equal_those_of_a_scan),
        cmocka_unit_test(documents_survive_seeks_and_other_batches),
        cmocka_unit_test(documents_survive_a_resume),
        cmocka_unit_test(without_a_rule_every_target_counts),
        cmocka_unit_test(the_index_says_where_documents_begin),
        cmocka_unit_test(an_index_that_changes_is_refused),
        cmocka_unit_test(a_lost_index_ends_the_program),
    };
    return cmocka_run_group_tests(tests, folder_create, folder_remove);
}
