// SHA-256 and HMAC-SHA-256, by the examples of their standards.
#include "runtime/net/sha256.h" // under test
#include "test/testing.h"       // cmocka

static void expect_hash(const unsigned char hash[SHA256_BYTES], const char *digits) {
    char text[2 * SHA256_BYTES + 1];
    for (int i = 0; i < SHA256_BYTES; i++)
        snprintf(text + 2 * i, 3, "%02x", hash[i]);
    assert_string_equal(text, digits);
}

// Checks FIPS 180-4's examples, as NIST publishes them.
static void sha256_of_the_standards_messages(void **state) {
    static const struct {
        const char *message;
        int times;
        const char *digits;
    } cases[] = {
        {"", 1, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
        {"abc", 1, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
        {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", 1,
         "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"},
        {"abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmnoijklmnopjklmnopqklmnopqrlmnopqrsmnopqrstnopqr"
         "stu",
         1, "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1"},
        {"a", 1000000, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        unsigned char hash[SHA256_BYTES];
        const size_t bytes = strlen(cases[i].message);
        char *const text = (char *)malloc(bytes * (size_t)cases[i].times + 1);
        for (int n = 0; n < cases[i].times; n++)
            memcpy(text + (size_t)n * bytes, cases[i].message, bytes);
        sha256(hash, text, bytes * (size_t)cases[i].times);
        expect_hash(hash, cases[i].digits);
        free(text);
    }
}

// Checks RFC 4231's cases 1 to 4, 6 and 7; case 5 has a shortened result, which nothing here uses.
static void hmac_of_the_standards_messages(void **state) {
    static const char larger[] = "This is a test using a larger than block-size key and a larger than block-size data. "
                                 "The key needs to be hashed before being used by the HMAC algorithm.";
    unsigned char hash[SHA256_BYTES], key[131], message[50];
    memset(key, 0x0b, 20);
    hmac_sha256(hash, key, 20, "Hi There", 8);
    expect_hash(hash, "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
    hmac_sha256(hash, "Jefe", 4, "what do ya want for nothing?", 28);
    expect_hash(hash, "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
    memset(key, 0xaa, sizeof key);
    memset(message, 0xdd, sizeof message);
    hmac_sha256(hash, key, 20, message, sizeof message);
    expect_hash(hash, "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
    hmac_sha256(hash, key, sizeof key, "Test Using Larger Than Block-Size Key - Hash Key First", 54);
    expect_hash(hash, "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
    hmac_sha256(hash, key, sizeof key, larger, sizeof larger - 1);
    expect_hash(hash, "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
    for (int i = 0; i < 25; i++)
        key[i] = (unsigned char)(i + 1);
    memset(message, 0xcd, sizeof message);
    hmac_sha256(hash, key, 25, message, sizeof message);
    expect_hash(hash, "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b");
}

static void equal_hashes(void **state) {
    unsigned char a[SHA256_BYTES] = {0}, b[SHA256_BYTES] = {0};
    assert_true(sha256_same(a, b));
    for (int i = 0; i < SHA256_BYTES; i++) {
        b[i] = 0x80;
        assert_false(sha256_same(a, b));
        b[i] = 0;
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sha256_of_the_standards_messages),
        cmocka_unit_test(hmac_of_the_standards_messages),
        cmocka_unit_test(equal_hashes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
