// One control connection: frames that are queued and sent as the socket takes them, and received piece by piece.
//
// Every frame brings along what its sender is doing, so that whoever must say why a job ended knows it of every rank. All
// ranks are of one build on one kind of machine: the structs travel as they are.
#pragma once
#include <errno.h>      // errno, EAGAIN
#include <stdbool.h>    // bool
#include <stdint.h>     // uint64_t
#include <string.h>     // memset
#include <sys/socket.h> // sendmsg
#include <sys/uio.h>    // struct iovec
#include <unistd.h>     // close

#include "runtime/machine/deadline.h" // deadline_clock_s

enum {
    CONTROL_NAME = 64, // bytes of the name of a collective or an exchange; longer ones are cut
    CONTROL_QUEUE = 8, // frames that wait: at most a welcome, a result, a goodbye, an abort, and the heartbeats below
    CONTROL_WAITING_BEATS = 2,
};

// What a rank is doing. All zero: nothing so far.
struct control_report {
    uint64_t begun, done;            // collectives of the data path
    uint64_t exchanges;              // begun, on the control connections
    double collective_s, exchange_s; // how long in the oldest unfinished collective, in the exchange
    uint32_t in_exchange, patient;
    char collective[CONTROL_NAME]; // the oldest unfinished, else the last
    char exchange[CONTROL_NAME];   // this one, or the last
};

enum control_type {
    CONTROL_ALIVE = 1,
    CONTROL_WELCOME,      // all ranks are there; payload: who they are
    CONTROL_CONTRIBUTION, // to an exchange, sent to rank 0
    CONTROL_RESULT,       // of an exchange, sent by rank 0
    CONTROL_GOODBYE,      // this rank is done; from rank 0: all ranks are
    CONTROL_ABORT,        // end at once; the reason has been printed
};

struct control_frame {
    uint32_t type, operation; // operation: of an exchange
    uint64_t number, bytes;   // of the exchange, as its callers gave them
    uint64_t payload_bytes;   // that follow
    struct control_report report;
};

struct control_outgoing {
    struct control_frame frame;
    const void *payload; // stays where it is until it is sent
};

struct control_link {
    int socket;  // -1: no connection, or none any more
    bool left;   // has said goodbye
    bool broken; // cannot be written to; what it sent before may still be read
    bool shut;   // nothing more is to be written
    double heard_s;
    struct control_report report; // the last that came
    struct control_frame in;      // the frame that is coming, or has come
    size_t in_bytes;              // of it and its payload
    void *in_payload;             // where that goes
    struct control_outgoing queue[CONTROL_QUEUE];
    int first, waiting;
    size_t sent_bytes; // of the first
    // on rank 0: this rank's contribution to the next exchange
    bool contributed;
    struct control_frame contribution;
    void *contribution_data;
};

// ---- sending ----

static void control_link_add(struct control_link *link, const struct control_frame *frame, const void *payload) {
    if (link->socket < 0 || link->broken || link->waiting == CONTROL_QUEUE)
        return;
    if (frame->type == CONTROL_ALIVE && link->waiting >= CONTROL_WAITING_BEATS)
        return; // what waits will say it when it gets there
    struct control_outgoing *const last = &link->queue[(link->first + link->waiting++) % CONTROL_QUEUE];
    last->frame = *frame;
    last->payload = payload;
}

// The rest of a frame: of its head, of its payload.
static void control_outgoing_rest(struct iovec rest[2], const struct control_outgoing *out, size_t sent) {
    const size_t of_head = sent < sizeof out->frame ? sent : sizeof out->frame;
    rest[0].iov_base = (char *)(uintptr_t)&out->frame + of_head; // iovec has no const
    rest[0].iov_len = sizeof out->frame - of_head;
    rest[1].iov_base = (char *)(uintptr_t)out->payload + (sent - of_head);
    rest[1].iov_len = out->frame.payload_bytes - (sent - of_head);
}

// Sends as much as the socket takes. An error is left to be found by reading: what came before it counts.
static void control_link_send(struct control_link *link) {
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

// ---- receiving ----

enum control_event {
    CONTROL_NOTHING, // more to come, later
    CONTROL_HEAD,    // of a frame whose payload needs a place: set in_payload
    CONTROL_WHOLE,   // a frame, in `in` and at in_payload
    CONTROL_CLOSED,
};

static enum control_event control_link_receive(struct control_link *link) {
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

static void control_link_close(struct control_link *link) {
    if (link->socket >= 0)
        close(link->socket);
    link->socket = -1;
    link->waiting = 0;
}
