// Declarations shared by control_link.c, control_send.c, control_start.c, control_watch.c and control.c.
#pragma once
#include <poll.h>      // struct pollfd
#include <pthread.h>   // pthread_t
#include <sys/types.h> // pid_t

#include "runtime/net/control.h" // struct control_address

enum {
    CONTROL_HOST = 68,        // bytes of a host's name, which Linux limits to 64
    CONTROL_NAME = 64,        // bytes of the name of a collective or an exchange; longer ones are cut
    CONTROL_QUEUE = 8,        // queued frames: at most a welcome, a result, a goodbye, an abort, and two heartbeats
    CONTROL_IN_FLIGHT = 1024, // collectives in flight whose names are kept
    ABORT_SAVE_S = 2,         // for a checkpoint in flight where the job ends: parts of ranks that are gone never come
};
// Most bytes of a contribution, which rank 0 may receive before its own caller asks: far more than any exchange has.
static const uint64_t CONTROL_MAX_BYTES = (uint64_t)64 << 20;

// ---- frames over one connection: control_link.c ----

// Says what a rank is doing. Zeroed: nothing so far.
struct control_report {
    uint64_t begun, done;            // collectives of the data path
    uint64_t exchanges;              // exchanges begun, on the control connections
    double collective_s, exchange_s; // time so far in the oldest unfinished collective, in the exchange
    uint32_t in_exchange, patient;
    char collective[CONTROL_NAME]; // name of the oldest unfinished collective, else of the last
    char exchange[CONTROL_NAME];   // name of the current exchange, else of the last
};

enum control_type {
    CONTROL_HEARTBEAT = 1,
    CONTROL_WELCOME,      // all ranks have connected; payload: their struct control_peer
    CONTROL_CONTRIBUTION, // to an exchange, sent to rank 0
    CONTROL_RESULT,       // of an exchange, sent by rank 0
    CONTROL_GOODBYE,      // this rank is done; from rank 0: all ranks are done
    CONTROL_ABORT,        // end at once, with the status that the frame has; the reason has been printed
};

// The head of a frame, sent as these bytes before the payload: all ranks are of one build on one kind of machine. Every
// frame has its sender's report, so that whichever rank must print why the job ended has all ranks' reports.
struct control_frame {
    uint32_t type, operation; // operation: of an exchange; of an abort, the exit status
    uint64_t number, bytes;   // of the exchange, as its callers gave them
    uint64_t payload_bytes;
    struct control_report report;
};

struct control_outgoing {
    struct control_frame frame;
    const void *payload; // not owned; must stay until it is sent
};

struct control_link {
    int socket;                   // -1: not connected, or closed
    bool said_goodbye;            // the peer said goodbye; of a rank's link to itself: this rank did
    bool broken;                  // writing failed; what the peer sent before may still be read
    bool shut;                    // nothing more is to be written
    double heard_s;               // when the peer's last bytes arrived
    struct control_report report; // the peer's last report
    struct control_frame in;      // the frame that is arriving, or has arrived
    size_t in_bytes;              // bytes of `in` and its payload that have arrived
    void *in_payload;             // where the payload is received
    struct control_outgoing queue[CONTROL_QUEUE];
    int first, waiting; // of the queue, a ring: index of the first frame, number of frames
    size_t sent_bytes;  // of the first frame
    // on rank 0: the peer's contribution to the next exchange
    bool contributed;
    struct control_frame contribution;
    void *contribution_data;
};

enum control_event {
    CONTROL_NOTHING, // nothing more has arrived
    CONTROL_HEAD,    // a frame's head, in `in`: the caller checks its payload_bytes and sets in_payload
    CONTROL_WHOLE,   // a whole frame, in `in` and at in_payload
    CONTROL_CLOSED,  // the peer has closed, or receiving failed; control_link_close is the caller's
};

// ---- a rank's connections: control.c ----

enum control_operation { CONTROL_ALL_GATHER, CONTROL_BROADCAST };

// The exchange that this rank's caller waits for.
struct control_exchange {
    bool pending, sent, patient;
    enum control_operation operation;
    void *all;
    const void *mine;
    size_t bytes;
    double since_s; // of deadline_clock_s
    char name[CONTROL_NAME];
};

struct control_peer {
    char host[CONTROL_HOST];
    int32_t pid;
};

struct control {
    int rank, ranks;
    double timeout_s, heartbeat_interval_s;
    struct control_address address;
    struct handshake_key key;
    int listener;               // on rank 0, until all have connected
    struct control_peer *peers; // (ranks)
    struct control_link *links; // (ranks) on rank 0 to each other rank, elsewhere only [0]; [rank]: its own report
    struct pollfd *polls;       // (1 + ranks)
    pthread_t thread;
    int wake; // an eventfd that wakes the thread: something under the mutex has changed
    // used only by the thread
    double heartbeat_s; // time of the last heartbeat, at which silence and waits are judged
    double suspended_s; // how long this process did not run before the last heartbeat, where that was long
    void *result;       // of the last exchange; may still be in flight to some ranks
    bool all_closed;    // all have said goodbye
    // shared
    pthread_mutex_t mutex; // guards what follows
    pthread_cond_t exchange_done;
    struct control_exchange exchange;
    uint64_t exchanges;
    uint64_t collectives_begun, collectives_done;
    char names[CONTROL_IN_FLIGHT][CONTROL_NAME];
    double collective_since_s; // when the oldest unfinished collective became the oldest
    bool closing;
    int exit_status;            // with which this process exits; 0: it does not, or without an error
    pthread_mutex_t poll_mutex; // guards the next two, and is held while the poll runs
    void (*poll)(void *context);
    void *poll_context;
    // at exit
    struct control **at_exit; // the exit function's pointer to this struct, set to NULL by control_close
    pid_t pid;                // of this process: the exit function does nothing in a child
};

__BEGIN_DECLS
// ---- control_link.c: frames over one connection ----

// Queues a copy of the frame, and the address of its payload (frame->payload_bytes; NULL: none), which must stay until
// it is sent. Drops the frame if the link is closed, broken or full; a heartbeat already if two frames wait.
void control_link_add(struct control_link *link, const struct control_frame *frame, const void *payload);
// Sends as much of the queue as the socket takes. An error drops the queue; control_link_receive then finds the end.
void control_link_send(struct control_link *link);
// Receives a frame without waiting. After CONTROL_HEAD the caller sets in_payload, for the payload, and calls again.
enum control_event control_link_receive(struct control_link *link);
// Closes the connection, if open, and drops waiting frames. Frees nothing, and resets neither `broken` nor byte counts.
void control_link_close(struct control_link *link);

// ---- control_send.c: frames to all other ranks ----

// Queues a frame, with this rank's last report, on each open connection: from rank 0 to each rank, from others to rank
// 0. status: an abort's, else 0. payload (payload_bytes) must stay until it is sent; NULL if there is none.
void control_send(struct control *c, enum control_type type, int status, const void *payload, size_t payload_bytes);
// Sends what is queued, then closes for writing, and drops what arrives, until the others have closed or `seconds` are
// over. A process that ended with unread bytes would reset the connection, and its peer might lose what was sent.
void control_flush_and_drain(struct control *c, double seconds);
// Tells the other ranks, through rank 0, to end with `status`. Waits up to half a second until the connections end.
void control_abort_others(struct control *c, int status);

// ---- control_start.c: how the ranks of a job find each other ----

// Gathers the other ranks on rank 0, within start_s seconds. Closes the listener in any case. NULL or the problem.
const char *control_gather_ranks(struct control *c, double start_s, struct error_text *error);
// Connects a rank other than 0 to rank 0, within start_s seconds, then waits up to start_s + 10 s until rank 0 says
// that all have connected. Returns NULL or the problem. If that is rank 0's abort, *status is its exit status, else 0.
const char *control_join_rank_0(struct control *c, double start_s, int *status, struct error_text *error);

// ---- control_watch.c: what the ranks are doing, and the line that is printed where the job must end ----

// Updates this rank's own report, with counts as of now and times as of the last heartbeat. Takes the mutex.
void control_report_own(struct control *c);
// Ends the job if a rank is silent or, on rank 0, a collective or an exchange that is not patient is overdue. Does
// nothing if the timeout is 0 or this process was suspended. The caller has read all that arrived.
void control_watch(struct control *c);
// Ends the job with `status`, because the connection of rank `lost` has closed or that rank exits. Takes the mutex.
void control_end_lost_rank(struct control *c, int lost, int status) __attribute__((noreturn));
// Ends the job, because other_rank contributed to another exchange than rank 0's.
void control_end_mismatch(struct control *c, int other_rank) __attribute__((noreturn));
// Ends the job, because other_rank sent the frame in its link's `in`, which no rank sends now.
void control_end_wrong_frame(struct control *c, int other_rank) __attribute__((noreturn));
void control_end_out_of_memory(struct control *c, size_t bytes) __attribute__((noreturn));
__END_DECLS
