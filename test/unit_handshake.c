// The handshake of a connection's two ends: who is let in, who is not, what each end says then, and where the secret
// comes from. test/unit_control_start.c has thousands of strangers at once.
#include "runtime/net/handshake.c" // under test
#include "runtime/net/secret.c"    // under test
#include "test/fails.h"            // assert_error
#include "test/heard.h"            // hear_stderr
#include <pthread.h>               // pthread_create

// ---- a secret's ways in ----

static const char SECRET[] = "correct horse battery staple";

static void a_secret_by_file_and_by_variable(void **state) {
    struct launch by_file, by_variable;
    struct error_text error;
    char path[TEST_PATH];
    memset(&by_file, 0, sizeof by_file);
    memset(&by_variable, 0, sizeof by_variable);
    unsetenv("TRAIN_GPT_SECRET");
    assert_null(launch_read_secret(&by_variable, "", &error));
    by_variable.kind = LAUNCH_RENDEZVOUS;
    by_variable.ranks = 2;
    assert_true(launch_has_no_secret(&by_variable));
    setenv("TRAIN_GPT_SECRET", SECRET, 1);
    assert_null(launch_read_secret(&by_variable, "", &error));
    assert_false(launch_has_no_secret(&by_variable));
    const int file = mkstemp(test_template(path, "secret"));
    assert_true(file >= 0 && write(file, SECRET, sizeof SECRET - 1) > 0 && write(file, "\n", 1) == 1);
    setenv("TRAIN_GPT_SECRET", "the file is what is taken", 1);
    assert_null(launch_read_secret(&by_file, path, &error));
    assert_memory_equal(by_file.secret, by_variable.secret, SHA256_BYTES);
    setenv("TRAIN_GPT_SECRET", "  too short\n", 1);
    assert_error(launch_read_secret(&by_variable, "", &error), "TRAIN_GPT_SECRET: a secret of 9 bytes; expected 16 to");
    assert_null(strstr(error.text, "short"));
    assert_int_equal(ftruncate(file, 0), 0);
    assert_error(launch_read_secret(&by_file, path, &error), "a secret of 0 bytes");
    assert_int_equal(ftruncate(file, 1 << 20), 0);
    assert_non_null(launch_read_secret(&by_file, path, &error));
    close(file);
    unlink(path);
    assert_error(launch_read_secret(&by_file, path, &error), path);
    unsetenv("TRAIN_GPT_SECRET");
}

// ---- one connection ----

static struct handshake_key key_of(const char *secret, bool job) {
    struct handshake_key key;
    memset(&key, 0, sizeof key);
    if (*secret)
        sha256(key.secret, secret, strlen(secret));
    if (job)
        sha256(key.job, "of this job", 11);
    return key;
}

// Kinds of joining ends; each runs in a thread, connects, and says what its kind says.
enum { HONEST, CUT, REPLAYED, FLIPPED };
struct joiner {
    int port, kind;
    struct handshake_key key;
    struct handshake_talk recorded; // for REPLAYED: what another connection said
    enum socket_answer found;
    uint64_t answer;
    struct error_text error;
};
static const uint64_t HELLO = 0x0123456789abcdef, ANSWER = 0xfedcba9876543210;

static int connected_to(int port) {
    const struct socket_address address = {"127.0.0.1", {""}, port};
    struct error_text error;
    const int connected = socket_connect(&address, deadline_clock_s() + 5, NULL, NULL, &error);
    assert_true(connected >= 0);
    return connected;
}
// Sends a reply without the engine's code, and reads what comes back: a welcome is for friends.
static enum socket_answer join_by_hand(struct joiner *j, int socket, double until_s) {
    struct handshake_talk talk;
    memset(&talk, 0, sizeof talk);
    if (!socket_receive_all(socket, &talk.challenge, sizeof talk.challenge, until_s))
        return SOCKET_STRANGER;
    talk.reply = j->recorded.reply;
    if (j->kind != REPLAYED) {
        memcpy(talk.reply.magic, HANDSHAKE_MAGIC, sizeof talk.reply.magic);
        talk.reply.version = HANDSHAKE_VERSION;
        handshake_prove_reply(talk.reply.proof, &j->key, &talk);
        talk.reply.proof[SHA256_BYTES - 1] ^= j->kind == FLIPPED;
    }
    socket_send_all(socket, &talk.reply, sizeof talk.reply - (j->kind == CUT), until_s);
    if (j->kind == CUT)
        shutdown(socket, SHUT_WR);
    return socket_receive_all(socket, &talk.answer, sizeof talk.answer, until_s) &&
                   talk.answer.verdict == VERDICT_WELCOME
               ? SOCKET_FRIEND
               : SOCKET_STRANGER;
}
static void *run_joiner(void *argument) {
    struct joiner *const j = (struct joiner *)argument;
    const double until_s = deadline_clock_s() + 5;
    const int socket = connected_to(j->port);
    j->found = j->kind == HONEST ? handshake_join(socket, &j->key, &HELLO, &j->answer, sizeof HELLO, until_s, &j->error)
                                 : join_by_hand(j, socket, until_s);
    close(socket);
    return NULL;
}
// Lets one joiner meet an accepting end that has the key; returns whether it was let in. *talk: what was said, if it
// was let in. If not, the accepting end prints a line that holds `words`.
static bool meets(const struct handshake_key *key, struct joiner *j, struct handshake_talk *talk, const char *words) {
    char text[1024];
    struct heard heard;
    pthread_t thread;
    uint64_t hello = 0;
    const int listener = socket_listen("127.0.0.1", 0);
    struct handshake_door *const door = handshake_open(listener, key, 0, 2);
    j->port = socket_port(listener);
    hear_stderr(&heard);
    assert_int_equal(pthread_create(&thread, NULL, run_joiner, j), 0);
    bool in = false;
    for (double until_s = deadline_clock_s() + 3; !in && !door->turned_away && deadline_clock_s() < until_s;)
        in = handshake_next(door, &hello, sizeof hello, deadline_clock_s() + 0.05);
    if (in) {
        *talk = door->proven->talk;
        const int socket = handshake_welcome(door, &ANSWER, sizeof ANSWER);
        assert_true(socket >= 0);
        assert_int_equal(hello == HELLO, j->kind == HONEST);
        pthread_join(thread, NULL);
        close(socket);
    } else
        pthread_join(thread, NULL);
    handshake_close(door);
    close(listener);
    end_hearing(&heard, text, sizeof text);
    if (in)
        assert_string_equal(text, "");
    else
        assert_error(text, words);
    return in;
}

static void who_has_the_key_is_let_in(void **state) {
    const char *const secrets[] = {"", SECRET, "another secret of a user"};
    for (int i = 0; i < 12; i++) {
        struct handshake_talk talk;
        struct joiner j;
        const bool job = i / 3 / 2;
        const struct handshake_key key = key_of(secrets[i % 3], job);
        memset(&j, 0, sizeof j);
        j.key = i / 3 % 2 ? key : key_of(secrets[(i + 1) % 3], job);
        const bool in = meets(&key, &j, &talk, "give all ranks the same by --rendezvous-secret");
        assert_int_equal(in, i / 3 % 2);
        assert_int_equal(j.found, in ? SOCKET_FRIEND : job ? SOCKET_STRANGER : SOCKET_REFUSAL);
        if (in)
            assert_int_equal(j.answer, ANSWER);
        else
            assert_error(j.error.text, "give all ranks the same by --rendezvous-secret");
    }
}

static void what_proves_nothing_is_turned_away(void **state) {
    static const char *const words[] = {"", "has ended without", "not have this rank's secret",
                                        "not have this rank's secret"};
    const struct handshake_key key = key_of(SECRET, false);
    struct handshake_talk talk;
    struct joiner j;
    memset(&j, 0, sizeof j);
    j.key = key;
    assert_true(meets(&key, &j, &talk, "")); // and is recorded
    for (int kind = CUT; kind <= FLIPPED; kind++) {
        memset(&j, 0, sizeof j);
        j.key = key;
        j.kind = kind;
        j.recorded = talk;
        assert_false(meets(&key, &j, &talk, words[kind]));
        assert_int_equal(j.found, SOCKET_STRANGER);
    }
}

// Checks that an end that says nothing is left: a rank that waits for this rank to accept would say nothing either.
static void what_says_nothing_is_a_stranger(void **state) {
    const struct handshake_key key = key_of(SECRET, false);
    const int listener = socket_listen("127.0.0.1", 0);
    const double until_s = deadline_clock_s() + 60;
    struct error_text error;
    uint64_t answer;
    answer_s = 0.1;
    const int socket = connected_to(socket_port(listener));
    assert_int_equal(handshake_join(socket, &key, &HELLO, &answer, sizeof HELLO, until_s, &error), SOCKET_STRANGER);
    assert_true(deadline_clock_s() < until_s - 30);
    answer_s = 10;
    close(socket);
    close(listener);
}

// An impostor without the key that listens in rank 0's place: none of its answers is believed, not even a welcome.
struct impostor {
    int listener;
    enum handshake_verdict verdict;
};
static void *run_impostor(void *argument) {
    const struct impostor *const impostor = (const struct impostor *)argument;
    const double until_s = deadline_clock_s() + 5;
    struct handshake_talk talk;
    memset(&talk, 0, sizeof talk);
    int socket = -1;
    if (!socket_wait_ready(impostor->listener, POLLIN, until_s) ||
        (socket = socket_accept(impostor->listener, NULL)) < 0)
        return NULL;
    memcpy(talk.challenge.magic, HANDSHAKE_MAGIC, sizeof talk.challenge.magic);
    talk.challenge.version = HANDSHAKE_VERSION;
    memcpy(talk.answer.magic, HANDSHAKE_MAGIC, sizeof talk.answer.magic);
    talk.answer.verdict = (uint32_t)impostor->verdict;
    if (socket_send_all(socket, &talk.challenge, sizeof talk.challenge, until_s) &&
        socket_receive_all(socket, &talk.reply, sizeof talk.reply, until_s)) {
        memcpy(talk.answer.proof, talk.reply.proof, sizeof talk.answer.proof); // the joining end's own proof, sent back
        socket_send_all(socket, &talk.answer, sizeof talk.answer, until_s);
    }
    close(socket);
    return NULL;
}
static void an_impostor_is_not_believed(void **state) {
    for (int verdict = VERDICT_WELCOME; verdict <= VERDICT_REFUSED; verdict++) {
        struct impostor impostor = {socket_listen("127.0.0.1", 0), (enum handshake_verdict)verdict};
        struct joiner j;
        pthread_t thread;
        memset(&j, 0, sizeof j);
        j.port = socket_port(impostor.listener);
        j.key = key_of(SECRET, false);
        assert_int_equal(pthread_create(&thread, NULL, run_impostor, &impostor), 0);
        run_joiner(&j);
        pthread_join(thread, NULL);
        close(impostor.listener);
        assert_int_equal(j.found, verdict == VERDICT_OTHER_SECRET ? SOCKET_REFUSAL : SOCKET_STRANGER);
        assert_int_equal(j.answer, 0);
    }
}

// Checks that a connection that says nothing, or half a reply, is closed after five seconds.
static void silence_is_closed(void **state) {
    long_test();
    char text[1024];
    struct heard heard;
    uint64_t hello;
    const struct handshake_key key = key_of(SECRET, false);
    const int listener = socket_listen("127.0.0.1", 0);
    struct handshake_door *const door = handshake_open(listener, &key, 0, 2);
    const int silent = connected_to(socket_port(listener)), half = connected_to(socket_port(listener));
    const double since_s = deadline_clock_s();
    assert_true(socket_send_all(half, HANDSHAKE_MAGIC, sizeof HANDSHAKE_MAGIC, 0));
    hear_stderr(&heard);
    assert_false(handshake_next(door, &hello, sizeof hello, since_s + 4.9));
    assert_int_equal(door->turned_away, 0);
    assert_false(handshake_next(door, &hello, sizeof hello, since_s + 5.5));
    assert_int_equal(door->turned_away, 2);
    handshake_close(door);
    end_hearing(&heard, text, sizeof text);
    assert_error(text, "it has not replied within 5 s");
    close(silent);
    close(half);
    close(listener);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_secret_by_file_and_by_variable),
        cmocka_unit_test(who_has_the_key_is_let_in),
        cmocka_unit_test(what_proves_nothing_is_turned_away),
        cmocka_unit_test(an_impostor_is_not_believed),
        cmocka_unit_test(silence_is_closed),
        cmocka_unit_test(what_says_nothing_is_a_stranger),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
