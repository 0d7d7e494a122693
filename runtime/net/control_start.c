// Lets the ranks of a job find each other: every other rank connects to rank 0, says hello, and is answered. A
// connection that does not prove that it is of the job (handshake.h) counts for nothing. A rank that ends before all
// have connected may connect again. The start fails where two are of the same rank, or differ on the number of ranks.
#include <assert.h> // static_assert
#include <errno.h>  // errno
#include <poll.h>   // poll
#include <stdio.h>  // snprintf
#include <string.h> // memset
#include <unistd.h> // close, getpid

#include "runtime/machine/deadline.h"     // deadline_clock_s
#include "runtime/machine/text_add.h"     // text_add
#include "runtime/net/control_internal.h" // struct control
#include "runtime/net/handshake.h"        // handshake_next, handshake_join
#include "runtime/net/sockets.h"          // socket_connect

enum { WELCOME_S = 10 }; // by which the other ranks' timeout for all to connect is longer than rank 0's

// The hello: said by a rank, and by rank 0 in answer.
struct control_hello {
    int32_t rank, ranks;
    struct control_peer who;
};
static_assert(sizeof(struct control_hello) <= HANDSHAKE_HELLO, "a handshake has room for the hello");

// Fills *own, and this rank's entry in c->peers, with this rank's hello: rank, number of ranks, host and pid.
static void control_set_hello(struct control *c, struct control_hello *own) {
    char host[SOCKET_HOST];
    memset(own, 0, sizeof *own);
    socket_host_name(host);
    own->rank = c->rank;
    own->ranks = c->ranks;
    snprintf(own->who.host, sizeof own->who.host, "%.*s", CONTROL_HOST - 1, host);
    own->who.pid = (int32_t)getpid();
    c->peers[c->rank] = own->who;
}

// Returns, in `error`, why a rank that said hello cannot be one of this job; NULL: it can.
static const char *control_contradiction(const struct control *c, const struct control_hello *hello,
                                         struct error_text *error) {
    const struct control_peer *const who = &hello->who;
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

// Keeps the connection of the rank that handshake_next found, if still there. Returns NULL, or why the start must fail.
static const char *control_admit(struct control *c, struct handshake_door *door, const struct control_hello *hello,
                                 struct error_text *error) {
    struct control_hello own;
    const char *const problem = control_contradiction(c, hello, error);
    if (problem) {
        handshake_refuse(door);
        return problem;
    }
    control_set_hello(c, &own);
    c->links[hello->rank].socket = handshake_welcome(door, &own, sizeof own);
    c->peers[hello->rank] = hello->who;
    c->peers[hello->rank].host[CONTROL_HOST - 1] = '\0';
    return NULL;
}

// Drops ranks whose connections have ended. No rank sends before all have connected: a readable connection has ended.
static void control_drop_ended(struct control *c) {
    for (int r = 0; r < c->ranks; r++) {
        c->polls[r].fd = c->links[r].socket;
        c->polls[r].events = POLLIN;
        c->polls[r].revents = 0;
    }
    if (poll(c->polls, (nfds_t)c->ranks, 0) <= 0)
        return;
    for (int r = 1; r < c->ranks; r++)
        if (c->polls[r].revents)
            control_link_close(&c->links[r]);
}

static int control_num_missing(const struct control *c) {
    int missing = 0;
    for (int r = 1; r < c->ranks; r++)
        missing += c->links[r].socket < 0;
    return missing;
}

// Returns an error that names the ranks that have not connected within start_s seconds.
static const char *control_missing_text(const struct control *c, double start_s, struct error_text *error) {
    char who[256] = "";
    int said = 0;
    const int missing = control_num_missing(c);
    for (int r = 1; r < c->ranks && said < 16; r++)
        if (c->links[r].socket < 0)
            text_add(who, sizeof who, said++ ? ", %d" : "%d", r);
    if (missing > said)
        text_add(who, sizeof who, " and %d more", missing - said);
    return error_format(error,
                        "rank%s %s of %d did not connect to rank 0 (host %s, port %d) within %.3g s; start all ranks, "
                        "with the same number of them, and see that they can reach that host and port",
                        missing > 1 ? "s" : "", who, c->ranks, c->peers[0].host, (int)c->address.at.port, start_s);
}

const char *control_gather_ranks(struct control *c, double start_s, struct error_text *error) {
    const double until_s = deadline_clock_s() + start_s;
    struct control_hello hello;
    struct handshake_door *const door = handshake_open(c->listener, &c->key, c->rank, c->ranks);
    const char *problem = door ? NULL : error_format(error, "out of memory");
    control_set_hello(c, &hello);
    while (!problem && control_num_missing(c) > 0 && handshake_next(door, &hello, sizeof hello, until_s)) {
        control_drop_ended(c);
        problem = control_admit(c, door, &hello, error);
    }
    if (door)
        handshake_close(door);
    close(c->listener);
    return problem || control_num_missing(c) == 0 ? problem : control_missing_text(c, start_s, error);
}

// Says hello at a connection, and sets c->peers[0] if this job's rank 0 answers. context: the struct control.
static enum socket_answer control_greet(int socket, void *context, double until_s, struct error_text *error) {
    struct control *const c = (struct control *)context;
    struct control_hello own, answer;
    control_set_hello(c, &own);
    const enum socket_answer found = handshake_join(socket, &c->key, &own, &answer, sizeof own, until_s, error);
    if (found != SOCKET_FRIEND)
        return found;
    c->peers[0] = answer.who;
    c->peers[0].host[CONTROL_HOST - 1] = '\0';
    return SOCKET_FRIEND;
}

// Waits for rank 0's welcome, which sets c->peers (each rank's host name and process id). Returns NULL or the problem.
// An abort by rank 0 is a problem too: *status is then the exit status that it sent, else 0.
static const char *control_await_welcome(struct control *c, double until_s, int *status, struct error_text *error) {
    struct control_frame frame;
    const size_t bytes = (size_t)c->ranks * sizeof *c->peers;
    const bool heard = socket_receive_all(c->links[0].socket, &frame, sizeof frame, until_s);
    *status = heard && frame.type == CONTROL_ABORT ? (int)frame.operation : 0;
    if (heard && frame.type == CONTROL_WELCOME && frame.payload_bytes == bytes &&
        socket_receive_all(c->links[0].socket, c->peers, bytes, until_s)) {
        for (int r = 0; r < c->ranks; r++)
            c->peers[r].host[CONTROL_HOST - 1] = '\0';
        return NULL;
    }
    return error_format(error, "rank 0 (host %s, pid %d) %s before all ranks had come", c->peers[0].host,
                        c->peers[0].pid, errno == ETIMEDOUT ? "said nothing more" : "ended");
}

const char *control_join_rank_0(struct control *c, double start_s, int *status, struct error_text *error) {
    const struct socket_address *const at = &c->address.at;
    struct error_text why;
    *status = 0;
    c->links[0].socket = socket_connect(at, deadline_clock_s() + start_s, control_greet, c, &why);
    if (c->links[0].socket < 0)
        return error_format(error,
                            "rank 0 is not to be reached at %s, port %d, for %.3g s or until it answered: %.512s",
                            at->host, (int)at->port, start_s, why.text);
    // Rank 0 has listened for some time, so its own deadline comes before this one, unless it hangs.
    return control_await_welcome(c, deadline_clock_s() + start_s + WELCOME_S, status, error);
}
