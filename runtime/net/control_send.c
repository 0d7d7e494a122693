#include <errno.h>      // errno
#include <poll.h>       // poll
#include <string.h>     // memset
#include <sys/socket.h> // shutdown, recv

#include "runtime/machine/deadline.h"     // deadline_clock_s
#include "runtime/net/control_internal.h" // struct control
#include "runtime/net/sockets.h"          // socket_poll_ms

static const double ABORT_S = 0.5; // timeout for an abort to reach the others, of which one may be stopped

void control_flush_and_drain(struct control *c, double seconds) {
    const double until_s = deadline_clock_s() + seconds;
    char dropped[4096];
    for (;;) {
        int open = 0;
        for (int r = 0; r < c->ranks; r++) {
            struct control_link *const link = &c->links[r];
            control_link_send(link);
            if (link->socket >= 0 && link->waiting == 0 && !link->shut) {
                shutdown(link->socket, SHUT_WR);
                link->shut = true;
            }
            ssize_t received = 1;
            while (link->socket >= 0 && received > 0)
                received = recv(link->socket, dropped, sizeof dropped, 0);
            if (received == 0 || (received < 0 && errno != EAGAIN && errno != EINTR))
                control_link_close(link);
            c->polls[r].fd = link->socket;
            c->polls[r].events = (short)(POLLIN | (link->waiting > 0 ? POLLOUT : 0));
            open += link->socket >= 0;
        }
        if (open == 0 || deadline_clock_s() >= until_s)
            return;
        poll(c->polls, (nfds_t)c->ranks, socket_poll_ms(until_s));
    }
}

void control_send(struct control *c, enum control_type type, int status, const void *payload, size_t payload_bytes) {
    struct control_frame frame;
    memset(&frame, 0, sizeof frame);
    frame.type = type;
    frame.operation = (uint32_t)status;
    frame.report = c->links[c->rank].report;
    frame.payload_bytes = payload_bytes;
    for (int r = 0; r < c->ranks; r++)
        if (r != c->rank)
            control_link_add(&c->links[r], &frame, payload);
}

void control_abort_others(struct control *c, int status) {
    control_send(c, CONTROL_ABORT, status, NULL, 0);
    control_flush_and_drain(c, ABORT_S);
}
