// How the ranks of a job find each other: every other rank connects to rank 0, says hello, and is answered.
//
// A connection that says something else is dropped, as is one that says nothing for a while. A rank that ends before all
// have come may come again. Two that say they are the same rank, or that differ on how many there are, end the start.
#pragma once
#include <poll.h>       // poll
#include <stdlib.h>     // malloc
#include <sys/random.h> // getrandom
#include <sys/types.h>  // pid_t

#include "runtime/net/control_link.h"   // struct control_link
#include "runtime/machine/error_text.h" // error_format
#include "runtime/net/sockets.h"        // socket_connect

enum {
    CONTROL_VERSION = 1,    // of hello and of the frames
    CONTROL_HOST = 68,      // bytes of a host's name, which Linux limits to 64
    CONTROL_STRANGERS = 64, // connections that have not said who they are, at a time
    CONTROL_STRANGER_S = 5, // and for how long
    CONTROL_ANSWER_S = 10,  // rank 0 answers at once; who takes longer is somebody else
};

struct control_peer {
    char host[CONTROL_HOST];
    int32_t pid;
};

// What rank 0 tells the others by MPI. The token is the job's own: who answers without it is of another.
struct control_address {
    struct socket_address at;
    uint64_t token;
};

// Said by a rank when it has connected, and by rank 0 in answer.
struct control_hello {
    char magic[8];
    uint32_t version;
    int32_t rank, ranks; // the answer's rank is 0, or -1: refused, rank 0 says why
    struct control_peer who;
    uint64_t token;
};
static const char CONTROL_MAGIC[8] = {'t', 'r', 'a', 'i', 'n', 'g', 'p', 't'};

struct control_stranger {
    int socket; // -1: a free place
    double came_s;
    size_t bytes; // of hello
    struct control_hello hello;
};

struct control_start {
    int rank, ranks;
    struct control_address address;
    struct control_hello own;
    struct control_peer *peers; // (ranks), filled in
    struct control_link *links; // on rank 0 (ranks), to each other one; else one, to rank 0
    struct pollfd *polls;       // (1 + CONTROL_STRANGERS + ranks), on rank 0
    int listener;               // on rank 0
    struct control_stranger strangers[CONTROL_STRANGERS];
};

static void control_start_own(struct control_start *s) {
    char host[SOCKET_HOST];
    socket_host_name(host);
    memset(&s->own, 0, sizeof s->own);
    memcpy(s->own.magic, CONTROL_MAGIC, sizeof s->own.magic);
    s->own.version = CONTROL_VERSION;
    s->own.rank = s->rank;
    s->own.ranks = s->ranks;
    s->own.token = s->address.token;
    snprintf(s->own.who.host, sizeof s->own.who.host, "%.*s", CONTROL_HOST - 1, host);
    s->own.who.pid = (int32_t)getpid();
}

// ---- rank 0 ----

// An answer that is smaller than any socket's buffer: it need not be waited for.
static void control_answer(const struct control_start *s, int socket, int rank) {
    struct control_hello answer = s->own;
    answer.rank = rank;
    socket_send_all(socket, &answer, sizeof answer, 0);
}

static const char *control_contradiction(const struct control_start *s, const struct control_hello *hello,
                                         struct error_text *error) {
    const struct control_peer *const who = &hello->who;
    if (hello->version != CONTROL_VERSION)
        return error_format(error,
                            "a rank of another version of this program has connected (its control protocol is %u, not "
                            "%d); start all ranks from the same build",
                            hello->version, CONTROL_VERSION);
    if (hello->ranks != s->ranks || hello->rank <= 0 || hello->rank >= s->ranks)
        return error_format(error,
                            "the process on host %.*s, pid %d, says that it is rank %d of %d, but this is rank 0 of %d",
                            CONTROL_HOST - 1, who->host, who->pid, hello->rank, hello->ranks, s->ranks);
    const struct control_peer *const other = &s->peers[hello->rank];
    if (s->links[hello->rank].socket >= 0)
        return error_format(error, "two processes say that they are rank %d: host %s, pid %d, and host %.*s, pid %d",
                            hello->rank, other->host, other->pid, CONTROL_HOST - 1, who->host, who->pid);
    return NULL;
}

// One that has said hello becomes a rank's connection, or is dropped, or ends the start.
static const char *control_admit(struct control_start *s, struct control_stranger *stranger, struct error_text *error) {
    const struct control_hello *const hello = &stranger->hello;
    const char *const problem = control_contradiction(s, hello, error);
    if (hello->version == CONTROL_VERSION && hello->token != s->address.token) {
        close(stranger->socket);
        stranger->socket = -1;
        return NULL;
    }
    control_answer(s, stranger->socket, problem ? -1 : 0);
    if (problem)
        return problem;
    s->links[hello->rank].socket = stranger->socket;
    s->peers[hello->rank] = hello->who;
    s->peers[hello->rank].host[CONTROL_HOST - 1] = '\0';
    stranger->socket = -1;
    return NULL;
}

static const char *control_hear_stranger(struct control_start *s, struct control_stranger *stranger,
                                         struct error_text *error) {
    struct control_hello *const hello = &stranger->hello;
    ssize_t received;
    do
        received = recv(stranger->socket, (char *)hello + stranger->bytes, sizeof *hello - stranger->bytes, 0);
    while (received < 0 && errno == EINTR);
    stranger->bytes += received > 0 ? (size_t)received : 0;
    const size_t magic = stranger->bytes < sizeof CONTROL_MAGIC ? stranger->bytes : sizeof CONTROL_MAGIC;
    const bool silent = received < 0 && errno == EAGAIN;
    if (stranger->bytes == sizeof *hello && memcmp(hello->magic, CONTROL_MAGIC, magic) == 0)
        return control_admit(s, stranger, error);
    if ((received <= 0 && !silent) || memcmp(hello->magic, CONTROL_MAGIC, magic) != 0 ||
        deadline_clock_s() > stranger->came_s + CONTROL_STRANGER_S) {
        close(stranger->socket);
        stranger->socket = -1;
    }
    return NULL;
}

// Where all places are taken, the others wait in the kernel.
static void control_accept_strangers(struct control_start *s) {
    for (int i = 0; i < CONTROL_STRANGERS; i++) {
        if (s->strangers[i].socket >= 0)
            continue;
        s->strangers[i].socket = socket_accept(s->listener);
        s->strangers[i].bytes = 0;
        s->strangers[i].came_s = deadline_clock_s();
        if (s->strangers[i].socket < 0)
            return;
    }
}

// Nobody has anything to say before all have come, so what can be read is an end.
static void control_find_lost(struct control_start *s, const struct pollfd *polls) {
    for (int r = 1; r < s->ranks; r++)
        if (s->links[r].socket >= 0 && polls[r].revents) {
            close(s->links[r].socket);
            s->links[r].socket = -1;
        }
}

// Until something happens, or a stranger has been silent for long enough.
static void control_start_wait(struct control_start *s, double until_s) {
    const double stranger_s = deadline_clock_s() + CONTROL_STRANGER_S;
    int n = 0, strangers = 0;
    for (int i = 0; i < CONTROL_STRANGERS; i++)
        strangers += s->strangers[i].socket >= 0;
    s->polls[n].fd = strangers < CONTROL_STRANGERS ? s->listener : -1;
    s->polls[n++].events = POLLIN;
    for (int i = 0; i < CONTROL_STRANGERS + s->ranks; i++, n++) {
        s->polls[n].fd = i < CONTROL_STRANGERS ? s->strangers[i].socket : s->links[i - CONTROL_STRANGERS].socket;
        s->polls[n].events = POLLIN;
    }
    if (poll(s->polls, (nfds_t)n, socket_poll_ms(until_s < stranger_s ? until_s : stranger_s)) < 0)
        memset(s->polls, 0, (size_t)n * sizeof *s->polls); // interrupted: what they hold is of the time before
}

static int control_missing(const struct control_start *s) {
    int missing = 0;
    for (int r = 1; r < s->ranks; r++)
        missing += s->links[r].socket < 0;
    return missing;
}

static const char *control_missing_text(const struct control_start *s, double start_s, struct error_text *error) {
    char who[256] = "";
    int said = 0, length = 0;
    const int missing = control_missing(s);
    for (int r = 1; r < s->ranks && said < 16; r++)
        if (s->links[r].socket < 0)
            length += snprintf(who + length, sizeof who - (size_t)length, said++ ? ", %d" : "%d", r);
    if (missing > said)
        snprintf(who + length, sizeof who - (size_t)length, " and %d more", missing - said);
    return error_format(error,
                        "rank%s %s of %d did not connect to rank 0 (host %s, port %d) within %.3g s; start all ranks, "
                        "with the same number of them, and see that they can reach that host and port",
                        missing > 1 ? "s" : "", who, s->ranks, s->own.who.host, (int)s->address.at.port, start_s);
}

// All others connect. The listener is closed at the end, whatever it was.
static const char *control_gather_ranks(struct control_start *s, double start_s, struct error_text *error) {
    const double until_s = deadline_clock_s() + start_s;
    const char *problem = NULL;
    for (int i = 0; i < CONTROL_STRANGERS; i++)
        s->strangers[i].socket = -1;
    while (!problem && control_missing(s) > 0 && deadline_clock_s() < until_s) {
        control_start_wait(s, until_s);
        control_find_lost(s, s->polls + 1 + CONTROL_STRANGERS);
        control_accept_strangers(s);
        for (int i = 0; i < CONTROL_STRANGERS && !problem; i++)
            if (s->strangers[i].socket >= 0)
                problem = control_hear_stranger(s, &s->strangers[i], error);
    }
    for (int i = 0; i < CONTROL_STRANGERS; i++)
        if (s->strangers[i].socket >= 0)
            close(s->strangers[i].socket);
    close(s->listener);
    return problem || control_missing(s) == 0 ? problem : control_missing_text(s, start_s, error);
}

// ---- the others ----

static enum socket_answer control_greet(int socket, void *context, double until_s, struct error_text *error) {
    struct control_start *const s = (struct control_start *)context;
    const double patience_s = deadline_clock_s() + CONTROL_ANSWER_S;
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
                     s->rank, s->ranks);
        return SOCKET_REFUSAL;
    }
    s->peers[0] = answer.who;
    s->peers[0].host[CONTROL_HOST - 1] = '\0';
    return SOCKET_FRIEND;
}

// Connects, and waits until rank 0 says that all have come; *ended: that it has said the job ends.
static const char *control_join_rank_0(struct control_start *s, double start_s, bool *ended, struct error_text *error) {
    const struct socket_address *const at = &s->address.at;
    struct error_text why;
    struct control_frame frame;
    const size_t bytes = (size_t)s->ranks * sizeof *s->peers;
    const int connected = socket_connect(at, deadline_clock_s() + start_s, control_greet, s, &why);
    if (connected < 0)
        return error_format(error,
                            "rank 0 is not to be reached at %s, port %d, for %.3g s or until it answered: %.512s",
                            at->host, (int)at->port, start_s, why.text);
    s->links[0].socket = connected;
    // Rank 0 has listened for some time, so its own deadline comes before this one, unless it hangs.
    const double until_s = deadline_clock_s() + start_s + CONTROL_ANSWER_S;
    const bool heard = socket_receive_all(connected, &frame, sizeof frame, until_s);
    *ended = heard && frame.type == CONTROL_ABORT;
    if (heard && frame.type == CONTROL_WELCOME && frame.payload_bytes == bytes &&
        socket_receive_all(connected, s->peers, bytes, until_s))
        return NULL;
    return error_format(error, "rank 0 (host %s, pid %d) %s before all ranks had come", s->peers[0].host,
                        s->peers[0].pid, errno == ETIMEDOUT ? "said nothing more" : "ended");
}
