// The exchange over TCP: a connection for every two ranks. An exchange is one loop over them that sends and receives
// what each can take, so no order of ranks and no size can block it. Each block is sent with the exchange's number and
// its length, to detect ranks out of step. The kernel's buffers get no size: they adapt to the network.
#include "runtime/net/exchange_internal.h"
#include <errno.h>      // errno
#include <poll.h>       // poll
#include <stdarg.h>     // va_list
#include <stdbool.h>    // bool
#include <stdio.h>      // vsnprintf
#include <stdlib.h>     // calloc
#include <string.h>     // memset, strerror
#include <sys/socket.h> // sendmsg
#include <unistd.h>     // close

#include "runtime/machine/deadline.h" // deadline_clock_s
#include "runtime/net/control.h"      // control_all_gather
#include "runtime/net/handshake.h"    // handshake_join, handshake_next
#include "runtime/net/sockets.h"      // socket_connect, socket_accept

struct exchange_header {
    uint64_t exchange, bytes;
};
// The progress of one connection in one exchange: bytes of a header and its block together.
struct exchange_flow {
    struct exchange_header send_header, receive_header;
    size_t sent, received;
};
struct exchange_sockets {
    int rank, ranks;
    uint64_t exchanges;
    int *sockets;                // (ranks) this rank's is -1
    struct exchange_flow *flows; // (ranks)
    struct pollfd *polls;        // (ranks), by step
};

enum {
    CONNECT_S = 120, // timeout for all to connect: every rank runs, and has every address
};

// The address at which a rank listens, which all others get.
struct exchange_endpoint {
    struct socket_address address;
    unsigned char token[SHA256_BYTES]; // rank 0's is a part of the key of all these connections
};
// The hello: said by a rank that connects, and by the rank that accepts.
struct exchange_hello {
    int32_t from, to;
};
struct exchange_greeting {
    const struct handshake_key *key;
    struct exchange_hello hello;
};

// Says hello and checks who answers: an address may mean another host here. context: the struct exchange_greeting.
static enum socket_answer exchange_greet(int socket, void *context, double until_s, struct error_text *error) {
    const struct exchange_greeting *const greeting = (const struct exchange_greeting *)context;
    const struct exchange_hello *const hello = &greeting->hello;
    struct exchange_hello answer;
    const enum socket_answer found =
        handshake_join(socket, greeting->key, hello, &answer, sizeof answer, until_s, error);
    if (found != SOCKET_FRIEND || (answer.from == hello->to && answer.to == hello->from))
        return found;
    error_format(error, "another rank answered");
    return SOCKET_STRANGER;
}

// Takes connections from `door` until all higher ranks have connected. After until_s an error names one that has not.
static const char *exchange_accept_at(struct exchange_sockets *s, struct handshake_door *door, double until_s,
                                      struct error_text *error) {
    for (int missing = s->rank + 1; missing < s->ranks;) {
        struct exchange_hello hello;
        if (!handshake_next(door, &hello, sizeof hello, until_s))
            return error_format(error, "rank %d has not connected to rank %d to exchange data: %s", missing, s->rank,
                                strerror(ETIMEDOUT));
        if (hello.from <= s->rank || hello.from >= s->ranks) {
            handshake_refuse(door);
            continue;
        }
        const struct exchange_hello answer = {s->rank, hello.from};
        const int accepted = handshake_welcome(door, &answer, sizeof answer);
        const bool meant = accepted >= 0 && hello.to == s->rank; // else the answer tells the peer to look elsewhere
        const int dropped = meant ? s->sockets[hello.from] : accepted; // of two, the peer has dropped the former
        if (dropped >= 0)
            close(dropped);
        if (meant)
            s->sockets[hello.from] = accepted;
        while (missing < s->ranks && s->sockets[missing] >= 0)
            missing++;
    }
    return NULL;
}

// Takes the connections of all higher ranks at `listener`, which stays open.
static const char *exchange_accept(struct exchange_sockets *s, int listener, const struct handshake_key *key,
                                   double until_s, struct error_text *error) {
    struct handshake_door *const door = handshake_open(listener, key, s->rank, s->ranks);
    if (!door)
        return error_format(error, "no memory for an exchange between %d ranks", s->ranks);
    const char *const problem = exchange_accept_at(s, door, until_s, error);
    handshake_close(door);
    return problem;
}

// Connects to all lower ranks, at `endpoints` (ranks), then accepts the higher, so that no two wait for each other.
static const char *exchange_sockets_connect(struct exchange_sockets *s, int listener,
                                            const struct exchange_endpoint *endpoints, const struct handshake_key *key,
                                            struct error_text *error) {
    const double until_s = deadline_clock_s() + CONNECT_S;
    for (int peer = 0; peer < s->rank; peer++) {
        struct exchange_greeting greeting = {key, {s->rank, peer}};
        struct error_text why;
        s->sockets[peer] = socket_connect(&endpoints[peer].address, until_s, exchange_greet, &greeting, &why);
        if (s->sockets[peer] < 0)
            return error_format(error, "rank %d can't connect to rank %d to exchange data: %.500s", s->rank, peer,
                                why.text);
    }
    return exchange_accept(s, listener, key, until_s, error);
}

// Connects all ranks over TCP, with addresses from `control`. Every rank calls it. After an error nothing is freed.
const char *exchange_sockets_open(struct exchange_sockets **opened, int rank, int ranks, struct control *control,
                                  struct error_text *error) {
    struct exchange_sockets *const s = (struct exchange_sockets *)calloc(1, sizeof *s);
    if (!s)
        return error_format(error, "no memory for an exchange between %d ranks", ranks);
    *opened = s;
    s->rank = rank;
    s->ranks = ranks;
    s->sockets = (int *)malloc((size_t)ranks * sizeof *s->sockets);
    s->flows = (struct exchange_flow *)calloc((size_t)ranks, sizeof *s->flows);
    s->polls = (struct pollfd *)calloc((size_t)ranks, sizeof *s->polls);
    struct exchange_endpoint *const endpoints = (struct exchange_endpoint *)calloc((size_t)ranks, sizeof *endpoints);
    if (!s->sockets || !s->flows || !s->polls || !endpoints)
        return error_format(error, "no memory for an exchange between %d ranks", ranks);
    for (int r = 0; r < ranks; r++)
        s->sockets[r] = -1;
    const int listener = socket_listen(NULL, 0);
    if (listener < 0)
        return error_format(error, "can't listen for the other ranks: %s", strerror(errno));
    struct exchange_endpoint own;
    memset(&own, 0, sizeof own);
    socket_address_own(&own.address, listener);
    if (!random_bytes_of_system(own.token, sizeof own.token))
        return error_format(error, "no random number for the job: %s", strerror(errno));
    control_all_gather(control, endpoints, &own, sizeof own, "the addresses for the exchange of data", false);
    for (int r = 0; r < ranks; r++)
        socket_address_terminate(&endpoints[r].address);
    struct handshake_key key = control_key(control);
    handshake_derive(&key, &key, endpoints[0].token, sizeof endpoints[0].token);
    const char *const problem = exchange_sockets_connect(s, listener, endpoints, &key, error);
    close(listener);
    free(endpoints);
    return problem;
}

void exchange_sockets_close(struct exchange_sockets *s) {
    for (int r = 0; r < s->ranks; r++)
        if (s->sockets[r] >= 0)
            close(s->sockets[r]);
    free(s->sockets);
    free(s->flows);
    free(s->polls);
    free(s);
}

__attribute__((noreturn, format(printf, 3, 4))) static void
exchange_sockets_end_lost(const struct exchange_sockets *s, int peer, const char *format, ...) {
    char text[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    exchange_end_lost(s->rank, peer, text);
}

// pieces = what is left of a header and its block after `moved` bytes. Returns the number of pieces, at most 2.
static int exchange_left(struct iovec pieces[2], struct exchange_header *header, const struct exchange_block *block,
                         size_t moved) {
    int count = 0;
    if (moved < sizeof *header) {
        pieces[count].iov_base = (char *)header + moved;
        pieces[count++].iov_len = sizeof *header - moved;
    }
    const size_t moved_block = moved < sizeof *header ? 0 : moved - sizeof *header;
    if (moved_block < block->bytes) {
        pieces[count].iov_base = (char *)block->data + moved_block;
        pieces[count++].iov_len = block->bytes - moved_block;
    }
    return count;
}

// Sends what the connection takes now of the header and the block, without waiting. An error ends the process.
static void exchange_send_some(struct exchange_sockets *s, int peer, const struct exchange_block *block) {
    struct exchange_flow *const flow = &s->flows[peer];
    struct iovec pieces[2];
    struct msghdr message;
    memset(&message, 0, sizeof message);
    message.msg_iov = pieces;
    message.msg_iovlen = (size_t)exchange_left(pieces, &flow->send_header, block, flow->sent);
    const ssize_t moved = sendmsg(s->sockets[peer], &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (moved < 0 && errno != EAGAIN && errno != EINTR)
        exchange_sockets_end_lost(s, peer, "sending: %s", strerror(errno));
    flow->sent += moved > 0 ? (size_t)moved : 0;
}
// Receives what the connection has now, without waiting. An error, or a header other than expected, ends the process.
static void exchange_receive_some(struct exchange_sockets *s, int peer, const struct exchange_block *block) {
    struct exchange_flow *const flow = &s->flows[peer];
    struct exchange_header *const header = &flow->receive_header;
    struct iovec pieces[2];
    // The header is received first, by itself, since a block of another length must not be received into this one.
    const bool has_header = flow->received >= sizeof *header;
    struct msghdr message;
    memset(&message, 0, sizeof message);
    message.msg_iov = pieces;
    message.msg_iovlen = (size_t)exchange_left(pieces, header, block, flow->received);
    if (!has_header)
        message.msg_iovlen = 1;
    const ssize_t moved = recvmsg(s->sockets[peer], &message, MSG_DONTWAIT);
    if (moved == 0)
        exchange_sockets_end_lost(s, peer, "it closed the connection");
    if (moved < 0 && errno != EAGAIN && errno != EINTR)
        exchange_sockets_end_lost(s, peer, "receiving: %s", strerror(errno));
    flow->received += moved > 0 ? (size_t)moved : 0;
    if (!has_header && flow->received == sizeof *header &&
        (header->exchange != s->exchanges || header->bytes != block->bytes))
        exchange_sockets_end_lost(s, peer,
                                  "it sent %llu bytes of exchange %llu where %llu of exchange %llu were expected",
                                  (unsigned long long)header->bytes, (unsigned long long)header->exchange,
                                  (unsigned long long)block->bytes, (unsigned long long)s->exchanges);
}

// Sets s->polls to what each connection still has to do. Returns false when all is done.
static bool exchange_sockets_pending(struct exchange_sockets *s, const struct exchange_block *send,
                                     const struct exchange_block *receive) {
    bool pending = false;
    for (int step = 1; step < s->ranks; step++) {
        const int peer = exchange_to(s->rank, s->ranks, step);
        const struct exchange_flow *const flow = &s->flows[peer];
        const bool sends = flow->sent < sizeof flow->send_header + send[peer].bytes,
                   receives = flow->received < sizeof flow->receive_header + receive[peer].bytes;
        struct pollfd *const to_poll = &s->polls[step - 1];
        to_poll->fd = sends || receives ? s->sockets[peer] : -1;
        to_poll->events = (short)((sends ? POLLOUT : 0) | (receives ? POLLIN : 0));
        to_poll->revents = 0;
        pending = pending || sends || receives;
    }
    return pending;
}

void exchange_sockets_all_to_all(struct exchange_sockets *s, const struct exchange_block *send,
                                 const struct exchange_block *receive) {
    s->exchanges++;
    for (int r = 0; r < s->ranks; r++) {
        memset(&s->flows[r], 0, sizeof s->flows[r]);
        s->flows[r].send_header.exchange = s->exchanges;
        s->flows[r].send_header.bytes = send[r].bytes;
    }
    while (exchange_sockets_pending(s, send, receive)) {
        if (poll(s->polls, (nfds_t)(s->ranks - 1), -1) < 0 && errno != EINTR)
            exchange_sockets_end_lost(s, s->rank, "poll: %s", strerror(errno));
        for (int step = 1; step < s->ranks; step++) {
            const int peer = exchange_to(s->rank, s->ranks, step);
            const struct pollfd *const polled = &s->polls[step - 1];
            const short failed = POLLERR | POLLHUP | POLLNVAL; // sending or receiving then returns the error
            if ((polled->events & POLLOUT) && (polled->revents & (POLLOUT | failed)))
                exchange_send_some(s, peer, &send[peer]);
            if ((polled->events & POLLIN) && (polled->revents & (POLLIN | failed)))
                exchange_receive_some(s, peer, &receive[peer]);
        }
    }
}
