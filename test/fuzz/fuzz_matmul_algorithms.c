// The parser of matmul_algorithms.txt on any bytes: it returns, and what it accepts reads back the same.
#include "formats/matmul_algorithms.h" // under test
#include "test/fuzz/fuzz.h"            // fuzz_require

static const char *fuzz_parse(const unsigned char *data, size_t bytes, struct error_text *error) {
    static const char *const key_names[] = {"a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k",
                                            "l", "m", "n", "o", "p", "q", "r", "s", "t", "u", "v"};
    _Static_assert(sizeof key_names / sizeof *key_names == MATMUL_ALGORITHMS_KEY, "a name for each number of a key");
    static struct matmul_algorithms algorithms, again;
    const char *const problem = matmul_algorithms_parse(&algorithms, key_names, data, bytes, "algorithms.txt", error);
    if (problem) {
        fuzz_require(problem == error->text && strncmp(problem, "algorithms.txt: line ", 21) == 0);
        return problem;
    }
    fuzz_require(algorithms.count >= 0 && algorithms.count <= MATMUL_ALGORITHMS_ROWS);
    size_t length = 0;
    char *const text = matmul_algorithms_text(&algorithms, key_names, &length);
    fuzz_require(text != NULL);
    fuzz_require(!matmul_algorithms_parse(&again, key_names, (unsigned char *)text, length, "again", error));
    fuzz_require(memcmp(&again, &algorithms, sizeof again) == 0);
    free(text);
    return NULL;
}
