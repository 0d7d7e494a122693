// How the ranks of a job find each other: every other rank connects to rank 0, says hello, and is answered.
//
// A connection with another hello, or without one for a while, is dropped. A rank that ends before all have connected
// may connect again. Two connections of the same rank, or ranks that differ on how many there are, make the start fail.
#include <errno.h>      // errno
#include <poll.h>       // poll
#include <stdio.h>      // snprintf
#include <stdlib.h>     // calloc
#include <string.h>     // memcmp
#include <sys/socket.h> // recv
#include <unistd.h>     // close, getpid

#include "runtime/machine/deadline.h"     // deadline_clock_s
#include "runtime/net/control_internal.h" // struct control
#include "runtime/net/sockets.h"          // socket_connect

enum {
    CONTROL_VERSION = 1, // of the hello and the frames
    HELLO_S = 5,         // timeout for a connection's hello
    ANSWER_S = 10,       // timeout for rank 0's answer, which is immediate; whatever takes longer is another process
};

// The hello: sent by a rank when it has connected, and by rank 0 in answer.
struct control_hello {
    char magic[8];
    uint32_t version;
    int32_t rank, ranks; // rank 0 answers with rank 0, or with -1: refused, and rank 0 prints why
    struct control_peer who;
    uint64_t token;
};
static const char CONTROL_MAGIC[8] = {'t', 'r', 'a', 'i', 'n', 'g', 'p', 't'};

// A connection to rank 0 whose hello has not arrived in full.
struct control_unknown {
    int socket; // -1: a free slot
    double since_s;
    size_t bytes; // of hello, arrived
    struct control_hello hello;
};

struct control_start {
    struct control *c;
    struct control_hello own;
    struct control_unknown unknown[CONTROL_UNKNOWN]; // on rank 0
};

static struct control_start *control_start_create(struct control *c) {
    char host[SOCKET_HOST];
    struct control_start *const s = (struct control_start *)calloc(1, sizeof *s);
    if (!s)
        return NULL;
    s->c = c;
    socket_host_name(host);
    memcpy(s->own.magic, CONTROL_MAGIC, sizeof s->own.magic);
    s->own.version = CONTROL_VERSION;
    s->own.rank = c->rank;
    s->own.ranks = c->ranks;
    s->own.token = c->address.token;
    snprintf(s->own.who.host, sizeof s->own.who.host, "%.*s", CONTROL_HOST - 1, host);
    s->own.who.pid = (int32_t)getpid();
    c->peers[c->rank] = s->own.who;
    for (int i = 0; i < CONTROL_UNKNOWN; i++)
        s->unknown[i].socket = -1;
    return s;
}

// ---- rank 0 ----

// Answers a hello with `rank`, without waiting: the answer is smaller than any socket's buffer.
static void control_answer(const struct control_start *s, int socket, int rank) {
    struct control_hello answer = s->own;
    answer.rank = rank;
    socket_send_all(socket, &answer, sizeof answer, 0);
}

// Why a rank that said hello cannot be one of this job; NULL: it can.
static const char *control_contradiction(const struct control *c, const struct control_hello *hello,
                                         struct error_text *error) {
    const struct control_peer *const who = &hello->who;
    if (hello->version != CONTROL_VERSION)
        return error_format(error,
                            "a rank of another version of this program has connected (its control protocol is %u, not "
                            "%d); start all ranks from the same build",
                            hello->version, CONTROL_VERSION);
    if (hello->ranks != c->ranks || hello->rank <= 0 || hello->rank >= c->ranks)
        return error_format(error,
                            "the process on host %.*s, pid %d, says that it is rank %d of %d, but this is rank 0 of %d",
                            CONTROL_HOST - 1, who->host, who->pid, hello->rank, hello->ranks, c->ranks);
    const struct control_peer *const other = &c->peers[hello->rank];
    if (c->links[hello->rank].socket >= 0)
        return error_format(error, "two processes say that they are rank %d: host %s, pid %d, and host %.*s, pid %d",
                            hello->rank, other->host, other->pid, CONTROL_HOST - 1, who->host, who->pid);
    return NULL;
}

// Makes a connection with a complete hello a rank's, or drops it; returns an error where the start must fail.
static const char *control_admit(struct control_start *s, struct control_unknown *unknown, struct error_text *error) {
    struct control *const c = s->c;
    const struct control_hello *const hello = &unknown->hello;
    const char *const problem = control_contradiction(c, hello, error);
    if (hello->version == CONTROL_VERSION && hello->token != c->address.token) {
        close(unknown->socket);
        unknown->socket = -1;
        return NULL;
    }
    control_answer(s, unknown->socket, problem ? -1 : 0);
    if (problem)
        return problem;
    c->links[hello->rank].socket = unknown->socket;
    c->peers[hello->rank] = hello->who;
    c->peers[hello->rank].host[CONTROL_HOST - 1] = '\0';
    unknown->socket = -1;
    return NULL;
}

// Receives what has arrived of a hello.
static const char *control_receive_hello(struct control_start *s, struct control_unknown *unknown,
                                         struct error_text *error) {
    struct control_hello *const hello = &unknown->hello;
    ssize_t received;
    do
        received = recv(unknown->socket, (char *)hello + unknown->bytes, sizeof *hello - unknown->bytes, 0);
    while (received < 0 && errno == EINTR);
    unknown->bytes += received > 0 ? (size_t)received : 0;
    const size_t magic = unknown->bytes < sizeof CONTROL_MAGIC ? unknown->bytes : sizeof CONTROL_MAGIC;
    const bool silent = received < 0 && errno == EAGAIN;
    if (unknown->bytes == sizeof *hello && memcmp(hello->magic, CONTROL_MAGIC, magic) == 0)
        return control_admit(s, unknown, error);
    if ((received <= 0 && !silent) || memcmp(hello->magic, CONTROL_MAGIC, magic) != 0 ||
        deadline_clock_s() > unknown->since_s + HELLO_S) {
        close(unknown->socket);
        unknown->socket = -1;
    }
    return NULL;
}

// Accepts connections while there are free slots; further ones wait in the kernel.
static void control_accept(struct control_start *s) {
    for (int i = 0; i < CONTROL_UNKNOWN; i++) {
        if (s->unknown[i].socket >= 0)
            continue;
        s->unknown[i].socket = socket_accept(s->c->listener);
        s->unknown[i].bytes = 0;
        s->unknown[i].since_s = deadline_clock_s();
        if (s->unknown[i].socket < 0)
            return;
    }
}

// Drops ranks whose connections have ended: no rank sends before all have connected, so one that can be read has ended.
static void control_drop_ended(struct control *c, const struct pollfd *polls) {
    for (int r = 1; r < c->ranks; r++)
        if (c->links[r].socket >= 0 && polls[r].revents) {
            close(c->links[r].socket);
            c->links[r].socket = -1;
        }
}

// Waits until something happens, or until an unknown connection has been silent for long enough.
static void control_start_wait(struct control_start *s, double until_s) {
    struct control *const c = s->c;
    const double silent_s = deadline_clock_s() + HELLO_S;
    int n = 0, unknown = 0;
    for (int i = 0; i < CONTROL_UNKNOWN; i++)
        unknown += s->unknown[i].socket >= 0;
    c->polls[n].fd = unknown < CONTROL_UNKNOWN ? c->listener : -1;
    c->polls[n++].events = POLLIN;
    for (int i = 0; i < CONTROL_UNKNOWN + c->ranks; i++, n++) {
        c->polls[n].fd = i < CONTROL_UNKNOWN ? s->unknown[i].socket : c->links[i - CONTROL_UNKNOWN].socket;
        c->polls[n].events = POLLIN;
    }
    if (poll(c->polls, (nfds_t)n, socket_poll_ms(until_s < silent_s ? until_s : silent_s)) < 0)
        memset(c->polls, 0, (size_t)n * sizeof *c->polls); // interrupted: clears the results of the previous poll
}

// The number of ranks that have not connected.
static int control_missing(const struct control *c) {
    int missing = 0;
    for (int r = 1; r < c->ranks; r++)
        missing += c->links[r].socket < 0;
    return missing;
}

static const char *control_missing_text(const struct control *c, double start_s, struct error_text *error) {
    char who[256] = "";
    int said = 0, length = 0;
    const int missing = control_missing(c);
    for (int r = 1; r < c->ranks && said < 16; r++)
        if (c->links[r].socket < 0)
            length += snprintf(who + length, sizeof who - (size_t)length, said++ ? ", %d" : "%d", r);
    if (missing > said)
        snprintf(who + length, sizeof who - (size_t)length, " and %d more", missing - said);
    return error_format(error,
                        "rank%s %s of %d did not connect to rank 0 (host %s, port %d) within %.3g s; start all ranks, "
                        "with the same number of them, and see that they can reach that host and port",
                        missing > 1 ? "s" : "", who, c->ranks, c->peers[0].host, (int)c->address.at.port, start_s);
}

static const char *control_gather(struct control_start *s, double start_s, struct error_text *error) {
    struct control *const c = s->c;
    const double until_s = deadline_clock_s() + start_s;
    const char *problem = NULL;
    while (!problem && control_missing(c) > 0 && deadline_clock_s() < until_s) {
        control_start_wait(s, until_s);
        control_drop_ended(c, c->polls + 1 + CONTROL_UNKNOWN);
        control_accept(s);
        for (int i = 0; i < CONTROL_UNKNOWN && !problem; i++)
            if (s->unknown[i].socket >= 0)
                problem = control_receive_hello(s, &s->unknown[i], error);
    }
    for (int i = 0; i < CONTROL_UNKNOWN; i++)
        if (s->unknown[i].socket >= 0)
            close(s->unknown[i].socket);
    return problem || control_missing(c) == 0 ? problem : control_missing_text(c, start_s, error);
}

const char *control_gather_ranks(struct control *c, double start_s, struct error_text *error) {
    struct control_start *const s = control_start_create(c);
    const char *const problem = s ? control_gather(s, start_s, error) : error_format(error, "out of memory");
    close(c->listener);
    free(s);
    return problem;
}

// ---- the others ----

// Whether rank 0 of this job answers.
static enum socket_answer control_greet(int socket, void *context, double until_s, struct error_text *error) {
    const struct control_start *const s = (const struct control_start *)context;
    struct control *const c = s->c;
    const double patience_s = deadline_clock_s() + ANSWER_S;
    const double answer_s = patience_s < until_s ? patience_s : until_s;
    struct control_hello answer;
    memset(&answer, 0, sizeof answer);
    if (!socket_send_all(socket, &s->own, sizeof s->own, answer_s) ||
        !socket_receive_all(socket, &answer, sizeof answer, answer_s) ||
        memcmp(answer.magic, CONTROL_MAGIC, sizeof answer.magic) != 0 ||
        (answer.version == CONTROL_VERSION && answer.token != s->own.token)) {
        error_format(error, "what listens there is not rank 0 of this job");
        return SOCKET_STRANGER;
    }
    if (answer.version != CONTROL_VERSION || answer.rank != 0) {
        error_format(error, "rank 0 refuses this process, which says that it is rank %d of %d; rank 0 says why",
                     c->rank, c->ranks);
        return SOCKET_REFUSAL;
    }
    c->peers[0] = answer.who;
    c->peers[0].host[CONTROL_HOST - 1] = '\0';
    return SOCKET_FRIEND;
}

// Waits until rank 0 says that all have connected.
static const char *control_await_welcome(struct control *c, double until_s, bool *aborted, struct error_text *error) {
    struct control_frame frame;
    const size_t bytes = (size_t)c->ranks * sizeof *c->peers;
    const bool heard = socket_receive_all(c->links[0].socket, &frame, sizeof frame, until_s);
    *aborted = heard && frame.type == CONTROL_ABORT;
    if (heard && frame.type == CONTROL_WELCOME && frame.payload_bytes == bytes &&
        socket_receive_all(c->links[0].socket, c->peers, bytes, until_s)) {
        for (int r = 0; r < c->ranks; r++)
            c->peers[r].host[CONTROL_HOST - 1] = '\0';
        return NULL;
    }
    return error_format(error, "rank 0 (host %s, pid %d) %s before all ranks had come", c->peers[0].host,
                        c->peers[0].pid, errno == ETIMEDOUT ? "said nothing more" : "ended");
}

const char *control_join_rank_0(struct control *c, double start_s, bool *aborted, struct error_text *error) {
    const struct socket_address *const at = &c->address.at;
    struct control_start *const s = control_start_create(c);
    struct error_text why;
    *aborted = false;
    if (!s)
        return error_format(error, "out of memory");
    c->links[0].socket = socket_connect(at, deadline_clock_s() + start_s, control_greet, s, &why);
    free(s);
    if (c->links[0].socket < 0)
        return error_format(error,
                            "rank 0 is not to be reached at %s, port %d, for %.3g s or until it answered: %.512s",
                            at->host, (int)at->port, start_s, why.text);
    // Rank 0 has listened for some time, so its own deadline comes before this one, unless it hangs.
    return control_await_welcome(c, deadline_clock_s() + start_s + ANSWER_S, aborted, error);
}
