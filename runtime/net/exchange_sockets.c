// The exchange over TCP: a connection between every two ranks, made once. An exchange is one loop over all of them that
// sends and receives what each can take, so no order of the ranks and no size can block it.
//
// Each block is sent with the exchange's number and its length, so that ranks that are out of step are detected. The
// sizes of the kernel's buffers are left alone: setting one ends its adaptation to the network, with a limit below what
// the kernel would choose.
#include "runtime/net/exchange_internal.h"
#include <errno.h>      // errno
#include <poll.h>       // poll
#include <stdarg.h>     // va_list
#include <stdbool.h>    // bool
#include <stdio.h>      // vsnprintf
#include <stdlib.h>     // calloc
#include <string.h>     // memset, strerror
#include <sys/random.h> // getrandom
#include <sys/socket.h> // sendmsg
#include <unistd.h>     // close

#include "runtime/machine/deadline.h" // deadline_clock_s
#include "runtime/net/control.h"      // control_all_gather
#include "runtime/net/sockets.h"      // socket_connect, socket_accept

// The header that is sent before each block.
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
    HELLO_S = 5      // timeout for an accepted connection's hello
};

// The address at which a rank listens, which all others get.
struct exchange_endpoint {
    struct socket_address address;
    uint64_t token; // rank 0's is used by the whole job
};
// The hello: sent by a rank that connects, and back by the rank that accepts, since an address may mean another host
// here, and anyone may connect.
struct exchange_hello {
    uint64_t token;
    int32_t from, to;
};

// The greeting of a rank that connects: sends its hello and checks the answer.
static enum socket_answer exchange_greet(int socket, void *context, double until_s, struct error_text *error) {
    const struct exchange_hello *const hello = (const struct exchange_hello *)context;
    struct exchange_hello answer;
    if (!socket_send_all(socket, hello, sizeof *hello, until_s) ||
        !socket_receive_all(socket, &answer, sizeof answer, until_s)) {
        error_format(error, "%s", strerror(errno));
        return SOCKET_STRANGER;
    }
    if (answer.token == hello->token && answer.from == hello->to && answer.to == hello->from)
        return SOCKET_FRIEND;
    error_format(error, "another process answered");
    return SOCKET_STRANGER;
}

// Answers an accepted connection. Returns the peer's rank; -1: it is no rank's, and is closed.
static int exchange_welcome(int socket, int rank, int ranks, uint64_t token) {
    const double until_s = deadline_clock_s() + HELLO_S;
    struct exchange_hello hello;
    if (socket_receive_all(socket, &hello, sizeof hello, until_s) && hello.token == token && hello.to == rank &&
        hello.from > rank && hello.from < ranks) {
        const struct exchange_hello answer = {token, rank, hello.from};
        if (socket_send_all(socket, &answer, sizeof answer, until_s))
            return hello.from;
    }
    close(socket);
    return -1;
}

// Accepts connections until all higher ranks have connected.
static const char *exchange_accept(struct exchange_sockets *s, int listener, uint64_t token, double until_s,
                                   struct error_text *error) {
    for (int missing = s->rank + 1; missing < s->ranks;) {
        if (!socket_ready(listener, POLLIN, until_s))
            return error_format(error, "rank %d has not connected to rank %d to exchange data: %s", missing, s->rank,
                                strerror(errno));
        const int accepted = socket_accept(listener);
        const int peer = accepted < 0 ? -1 : exchange_welcome(accepted, s->rank, s->ranks, token);
        if (peer >= 0 && s->sockets[peer] >= 0)
            close(s->sockets[peer]); // the peer has dropped this connection, since it has made another
        if (peer >= 0)
            s->sockets[peer] = accepted;
        while (missing < s->ranks && s->sockets[missing] >= 0)
            missing++;
    }
    return NULL;
}

// Each rank connects to all lower ones and then accepts all higher ones. So rank r answers when all lower ranks have
// answered it, and no two wait for each other.
static const char *exchange_sockets_connect(struct exchange_sockets *s, int listener,
                                            const struct exchange_endpoint *endpoints, struct error_text *error) {
    const double until_s = deadline_clock_s() + CONNECT_S;
    for (int peer = 0; peer < s->rank; peer++) {
        struct exchange_hello hello = {endpoints[0].token, s->rank, peer};
        struct error_text why;
        s->sockets[peer] = socket_connect(&endpoints[peer].address, until_s, exchange_greet, &hello, &why);
        if (s->sockets[peer] < 0)
            return error_format(error, "rank %d can't connect to rank %d to exchange data: %.500s", s->rank, peer,
                                why.text);
    }
    return exchange_accept(s, listener, endpoints[0].token, until_s, error);
}

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
    if (getrandom(&own.token, sizeof own.token, 0) != sizeof own.token)
        return error_format(error, "no random number for the job: %s", strerror(errno));
    control_all_gather(control, endpoints, &own, sizeof own, "the addresses for the exchange of data", false);
    for (int r = 0; r < ranks; r++)
        socket_address_terminate(&endpoints[r].address);
    const char *const problem = exchange_sockets_connect(s, listener, endpoints, error);
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

// ---- one exchange ----

__attribute__((noreturn, format(printf, 3, 4))) static void exchange_sockets_lost(const struct exchange_sockets *s,
                                                                                  int peer, const char *format, ...) {
    char text[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    exchange_lost(s->rank, peer, text);
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

// Sends what the connection takes now.
static void exchange_send_some(struct exchange_sockets *s, int peer, const struct exchange_block *block) {
    struct exchange_flow *const flow = &s->flows[peer];
    struct iovec pieces[2];
    struct msghdr message;
    memset(&message, 0, sizeof message);
    message.msg_iov = pieces;
    message.msg_iovlen = (size_t)exchange_left(pieces, &flow->send_header, block, flow->sent);
    const ssize_t moved = sendmsg(s->sockets[peer], &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (moved < 0 && errno != EAGAIN && errno != EINTR)
        exchange_sockets_lost(s, peer, "sending: %s", strerror(errno));
    flow->sent += moved > 0 ? (size_t)moved : 0;
}
// Receives what the connection has now.
static void exchange_receive_some(struct exchange_sockets *s, int peer, const struct exchange_block *block) {
    struct exchange_flow *const flow = &s->flows[peer];
    struct exchange_header *const header = &flow->receive_header;
    struct iovec pieces[2];
    // The header is received first, alone, since a block of another length must not be received into this one.
    const bool has_header = flow->received >= sizeof *header;
    struct msghdr message;
    memset(&message, 0, sizeof message);
    message.msg_iov = pieces;
    message.msg_iovlen = (size_t)exchange_left(pieces, header, block, flow->received);
    if (!has_header)
        message.msg_iovlen = 1;
    const ssize_t moved = recvmsg(s->sockets[peer], &message, MSG_DONTWAIT);
    if (moved == 0)
        exchange_sockets_lost(s, peer, "it closed the connection");
    if (moved < 0 && errno != EAGAIN && errno != EINTR)
        exchange_sockets_lost(s, peer, "receiving: %s", strerror(errno));
    flow->received += moved > 0 ? (size_t)moved : 0;
    if (!has_header && flow->received == sizeof *header &&
        (header->exchange != s->exchanges || header->bytes != block->bytes))
        exchange_sockets_lost(s, peer, "it sent %llu bytes of exchange %llu where %llu of exchange %llu were expected",
                              (unsigned long long)header->bytes, (unsigned long long)header->exchange,
                              (unsigned long long)block->bytes, (unsigned long long)s->exchanges);
}

// Prepares the poll for what each connection still has to do. False when all is done.
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

void exchange_sockets_run(struct exchange_sockets *s, const struct exchange_block *send,
                          const struct exchange_block *receive) {
    s->exchanges++;
    for (int r = 0; r < s->ranks; r++) {
        memset(&s->flows[r], 0, sizeof s->flows[r]);
        s->flows[r].send_header.exchange = s->exchanges;
        s->flows[r].send_header.bytes = send[r].bytes;
    }
    while (exchange_sockets_pending(s, send, receive)) {
        if (poll(s->polls, (nfds_t)(s->ranks - 1), -1) < 0 && errno != EINTR)
            exchange_sockets_lost(s, s->rank, "poll: %s", strerror(errno));
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
