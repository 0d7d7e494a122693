// What the parts of the control connections share: control_link.c, control_start.c, control_watch.c and control.c.
#pragma once
#include <poll.h>      // struct pollfd
#include <pthread.h>   // pthread_t
#include <sys/types.h> // pid_t

#include "runtime/net/control.h" // struct control_address

enum {
    CONTROL_HOST = 68,        // bytes of a host's name, which Linux limits to 64
    CONTROL_NAME = 64,        // bytes of the name of a collective or an exchange; longer ones are cut
    CONTROL_QUEUE = 8,        // frames that wait: at most a welcome, a result, a goodbye, an abort, and two heartbeats
    CONTROL_IN_FLIGHT = 1024, // collectives begun and not done whose names are kept
    CONTROL_UNKNOWN = 64,     // connections to rank 0, at the start, that have not said whose they are
};

// ---- frames over one connection: control_link.c ----

// What a rank is doing. All zero: nothing so far.
struct control_report {
    uint64_t begun, done;            // collectives of the data path
    uint64_t exchanges;              // begun, on the control connections
    double collective_s, exchange_s; // time so far in the oldest unfinished collective, in the exchange
    uint32_t in_exchange, patient;
    char collective[CONTROL_NAME]; // the oldest unfinished, else the last
    char exchange[CONTROL_NAME];   // this one, or the last
};

enum control_type {
    CONTROL_HEARTBEAT = 1,
    CONTROL_WELCOME,      // all ranks are there; payload: their struct control_peer
    CONTROL_CONTRIBUTION, // to an exchange, sent to rank 0
    CONTROL_RESULT,       // of an exchange, sent by rank 0
    CONTROL_GOODBYE,      // this rank is done; from rank 0: all ranks are
    CONTROL_ABORT,        // end at once; the reason has been printed
};

// Sent as it is, before its payload: all ranks are of one build on one kind of machine. Every frame has its sender's
// report, so that whichever rank must print why the job ended knows it of all.
struct control_frame {
    uint32_t type, operation; // operation: of an exchange
    uint64_t number, bytes;   // of the exchange, as its callers gave them
    uint64_t payload_bytes;
    struct control_report report;
};

struct control_outgoing {
    struct control_frame frame;
    const void *payload; // stays where it is until it is sent
};

struct control_link {
    int socket;                   // -1: no connection, or none any more
    bool said_goodbye;            // the peer; of a rank's link to itself: this rank
    bool broken;                  // cannot be written to; what the peer sent before may still be read
    bool shut;                    // nothing more is to be written
    double heard_s;               // when the peer's last bytes arrived
    struct control_report report; // the peer's last
    struct control_frame in;      // the frame that is arriving, or has arrived
    size_t in_bytes;              // arrived, of it and its payload
    void *in_payload;             // where its payload goes
    struct control_outgoing queue[CONTROL_QUEUE];
    int first, waiting; // frames of the queue, a ring: where it begins, how many wait
    size_t sent_bytes;  // of the first
    // on rank 0: the peer's contribution to the next exchange
    bool contributed;
    struct control_frame contribution;
    void *contribution_data;
};

enum control_event {
    CONTROL_NOTHING, // no more for now
    CONTROL_HEAD,    // a frame without its payload, which needs a place: set in_payload
    CONTROL_WHOLE,   // a frame, in `in` and at in_payload
    CONTROL_CLOSED,
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
    int listener;               // of rank 0, until all have connected
    struct control_peer *peers; // (ranks)
    struct control_link *links; // (ranks); rank 0's to each other one, the others' [0]; [rank]'s report is its own
    struct pollfd *polls;       // (1 + CONTROL_UNKNOWN + ranks)
    pthread_t thread;
    int wake; // an eventfd: there is something new under the mutex
    // the thread's own
    double heartbeat_s; // the last
    double suspended_s; // how long this process did not run before that, where that is long
    void *result;       // of the last exchange, which may still be on its way to some ranks
    bool all_closed;    // all have said goodbye
    // shared
    pthread_mutex_t mutex; // over what follows
    pthread_cond_t exchange_done;
    struct control_exchange exchange;
    uint64_t exchanges;
    uint64_t collectives_begun, collectives_done;
    char names[CONTROL_IN_FLIGHT][CONTROL_NAME];
    double collective_since_s; // when the oldest unfinished one became that
    bool closing, exiting;
    pthread_mutex_t poll_mutex; // over these two, and held while the poll runs
    void (*poll)(void *context);
    void *poll_context;
    // at exit
    struct control **at_exit; // what it points at is NULL once this is closed
    pid_t pid;                // so that a child's exit leaves the connections alone
};

__BEGIN_DECLS
// control_link.c. Adds a frame to the queue; a heartbeat where others wait is dropped.
void control_link_add(struct control_link *link, const struct control_frame *frame, const void *payload);
// Sends as much of the queue as the socket takes. An error is left to be found by reading: what came before it counts.
void control_link_send(struct control_link *link);
// Receives until a frame, or its head, is complete, or nothing more is there.
enum control_event control_link_receive(struct control_link *link);
void control_link_close(struct control_link *link);

// control_start.c: how the ranks of a job find each other. Both return NULL or a text.
// Rank 0: returns when all others have connected. Closes the listener in any case.
const char *control_gather_ranks(struct control *c, double start_s, struct error_text *error);
// The others: connects, and waits until rank 0 says that all have. *aborted: rank 0 has said that the job ends.
const char *control_join_rank_0(struct control *c, double start_s, bool *aborted, struct error_text *error);

// control_watch.c: what the ranks are doing, and the line that is printed where the job must end.
// Brings this rank's own report up to date.
void control_report_own(struct control *c);
// Ends the job where a rank is silent or late. To be called after what has arrived was read.
void control_watch(struct control *c);
// End the job: that rank's connection has closed; it contributed to another exchange than rank 0 is in; no memory.
void control_end_lost_rank(struct control *c, int lost) __attribute__((noreturn));
void control_end_mismatch(struct control *c, int other_rank) __attribute__((noreturn));
void control_end_out_of_memory(struct control *c, size_t bytes) __attribute__((noreturn));

// control.c: tells the other ranks to end at once, and gives that half a second to reach them.
void control_abort_others(struct control *c);
__END_DECLS
