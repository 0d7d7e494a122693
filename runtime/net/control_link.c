// Frames over one control connection: queued and sent as the socket takes them, and received as they arrive.
#include <errno.h>      // errno, EAGAIN
#include <string.h>     // memset
#include <sys/socket.h> // sendmsg
#include <sys/uio.h>    // struct iovec
#include <unistd.h>     // close

#include "runtime/machine/deadline.h"     // deadline_clock_s
#include "runtime/net/control_internal.h" // struct control_link

enum { MAX_WAITING_HEARTBEATS = 2 };

void control_link_add(struct control_link *link, const struct control_frame *frame, const void *payload) {
    if (link->socket < 0 || link->broken || link->waiting == CONTROL_QUEUE)
        return;
    if (frame->type == CONTROL_HEARTBEAT && link->waiting >= MAX_WAITING_HEARTBEATS)
        return; // the queued frames show just as well that this rank lives
    struct control_outgoing *const last = &link->queue[(link->first + link->waiting++) % CONTROL_QUEUE];
    last->frame = *frame;
    last->payload = payload;
}

// rest = what is left to send of the frame and of its payload, when `sent` bytes of the two are out.
static void control_outgoing_rest(struct iovec rest[2], const struct control_outgoing *out, size_t sent) {
    const size_t of_head = sent < sizeof out->frame ? sent : sizeof out->frame;
    rest[0].iov_base = (char *)(uintptr_t)&out->frame + of_head; // iovec has no const
    rest[0].iov_len = sizeof out->frame - of_head;
    rest[1].iov_base = out->payload ? (char *)(uintptr_t)out->payload + (sent - of_head) : NULL;
    rest[1].iov_len = out->frame.payload_bytes - (sent - of_head);
}

void control_link_send(struct control_link *link) {
    while (link->socket >= 0 && link->waiting > 0) {
        const struct control_outgoing *const out = &link->queue[link->first];
        struct iovec rest[2];
        struct msghdr message;
        control_outgoing_rest(rest, out, link->sent_bytes);
        memset(&message, 0, sizeof message);
        message.msg_iov = rest;
        message.msg_iovlen = out->frame.payload_bytes > 0 ? 2 : 1;
        const ssize_t sent = sendmsg(link->socket, &message, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent < 0) {
            link->broken = errno != EAGAIN;
            link->waiting = link->broken ? 0 : link->waiting;
            return;
        }
        link->sent_bytes += (size_t)sent;
        if (link->sent_bytes == sizeof out->frame + out->frame.payload_bytes) {
            link->sent_bytes = 0;
            link->first = (link->first + 1) % CONTROL_QUEUE;
            link->waiting--;
        }
    }
}

enum control_event control_link_receive(struct control_link *link) {
    for (;;) {
        const bool head = link->in_bytes < sizeof link->in;
        const size_t end = sizeof link->in + (head ? 0 : link->in.payload_bytes);
        char *const place =
            head ? (char *)&link->in + link->in_bytes : (char *)link->in_payload + (link->in_bytes - sizeof link->in);
        const ssize_t received = recv(link->socket, place, end - link->in_bytes, 0);
        if (received < 0 && errno == EINTR)
            continue;
        if (received <= 0)
            return received < 0 && errno == EAGAIN ? CONTROL_NOTHING : CONTROL_CLOSED;
        link->heard_s = deadline_clock_s();
        link->in_bytes += (size_t)received;
        if (link->in_bytes < end)
            continue;
        if (head && link->in.payload_bytes > 0)
            return CONTROL_HEAD;
        link->in_bytes = 0;
        return CONTROL_WHOLE;
    }
}

void control_link_close(struct control_link *link) {
    if (link->socket >= 0)
        close(link->socket);
    link->socket = -1;
    link->waiting = 0;
}
