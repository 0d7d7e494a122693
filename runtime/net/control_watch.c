// Watches what each rank is doing and which one is silent or late, and prints the line that says why the job ends.
#include <poll.h>   // poll
#include <stdarg.h> // va_list
#include <stdio.h>  // vsnprintf
#include <stdlib.h> // EXIT_FAILURE
#include <string.h> // memcpy, strlen
#include <unistd.h> // write, _exit

#include "runtime/machine/before_exit.h"  // before_exit_finish
#include "runtime/machine/deadline.h"     // deadline_clock_s
#include "runtime/machine/say.h"          // say_escape
#include "runtime/net/control_internal.h" // struct control
#include "runtime/net/sockets.h"          // socket_sleep_s

enum { MAX_NAMED = 4 }; // ranks that the line names; the others are counted

struct last_line {
    char text[1024];
    size_t length;
};

__attribute__((format(printf, 2, 3))) static void last_line_add(struct last_line *message, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    const int length =
        vsnprintf(message->text + message->length, sizeof message->text - message->length, format, arguments);
    va_end(arguments);
    message->length += length > 0 ? (size_t)length : 0;
    if (message->length >= sizeof message->text)
        message->length = sizeof message->text - 1;
}

// Appends a rank with its host and process and, where its heartbeats are late, for how long it has been silent.
static void last_line_add_rank(struct control *c, struct last_line *message, int r) {
    last_line_add(message, "%d (host %s, pid %d", r, c->peers[r].host, c->peers[r].pid);
    const double silent_s = r == c->rank ? 0 : deadline_clock_s() - c->links[r].heard_s;
    if (silent_s > 4 * c->heartbeat_interval_s)
        last_line_add(message, ", silent for %.3g s", silent_s);
    last_line_add(message, ")");
}

// A set of ranks: the first MAX_NAMED of them, and their number.
struct rank_list {
    int first[MAX_NAMED];
    int n;
};
static void rank_list_add(struct rank_list *ranks, int r) {
    if (ranks->n < MAX_NAMED)
        ranks->first[ranks->n] = r;
    ranks->n++;
}
static void last_line_add_ranks(struct control *c, struct last_line *message, const struct rank_list *ranks) {
    last_line_add(message, ranks->n == 1 ? "rank " : "ranks ");
    for (int i = 0; i < ranks->n && i < MAX_NAMED; i++) {
        last_line_add(message, i ? ", " : "");
        last_line_add_rank(c, message, ranks->first[i]);
    }
    if (ranks->n > MAX_NAMED)
        last_line_add(message, " and %d more", ranks->n - MAX_NAMED);
}

// Prints the line on stderr by write, since another thread may hold stdio's locks. Waits a second at most for a reader.
static void last_line_print(struct last_line *message) {
    struct pollfd out = {STDERR_FILENO, POLLOUT, 0};
    char shown[sizeof message->text];
    say_escape(shown, sizeof shown - 1, message->text);
    const size_t length = strlen(shown);
    shown[length] = '\n';
    if (poll(&out, 1, 1000) == 1 && write(STDERR_FILENO, shown, length + 1) < 0)
        return; // nobody is left to tell
}

// Ends the job with `status`. Rank 0 prints the message and "; the job ends" and tells the others. Without rank 0, rank
// 1 prints; others wait 0.5 s: a launcher may end all with the first. All wait up to 2 s for a checkpoint in flight.
__attribute__((noreturn)) static void control_end_with(struct control *c, struct last_line *message, int status) {
    last_line_add(message, "; the job ends");
    if (c->rank <= 1)
        last_line_print(message);
    else
        socket_sleep_s(0.5);
    before_exit_finish(ABORT_SAVE_S);
    if (c->rank == 0)
        control_abort_others(c, status);
    _exit(status);
}
__attribute__((noreturn)) static void control_end(struct control *c, struct last_line *message) {
    control_end_with(c, message, EXIT_FAILURE);
}

void control_report_own(struct control *c) {
    struct control_report *const own = &c->links[c->rank].report;
    pthread_mutex_lock(&c->mutex);
    const double now_s = c->heartbeat_s; // not a later time: see control_beat
    const uint64_t begun = c->collectives_begun, done = c->collectives_done;
    const uint64_t shown = begun > done ? done : begun > 0 ? begun - 1 : 0; // index of the oldest unfinished, else last
    own->begun = begun;
    own->done = done;
    own->exchanges = c->exchanges;
    own->in_exchange = c->exchange.pending;
    own->patient = c->exchange.patient;
    own->collective_s = begun > done ? now_s - c->collective_since_s : 0;
    own->exchange_s = c->exchange.pending ? now_s - c->exchange.since_s : 0;
    memcpy(own->collective, c->names[shown % CONTROL_IN_FLIGHT], CONTROL_NAME);
    memcpy(own->exchange, c->exchange.name, CONTROL_NAME);
    pthread_mutex_unlock(&c->mutex);
}

// A collective or an exchange, by its number in the order of all collectives or of all exchanges.
struct operation {
    uint64_t number; // 0: none
    const char *name;
    bool exchange;
    double waited_s; // how long ranks have waited in an overdue operation
};
static void last_line_add_operation(struct last_line *message, const struct operation *operation) {
    last_line_add(message, "'%s' (%s %llu)", operation->name, operation->exchange ? "exchange" : "collective",
                  (unsigned long long)operation->number);
}

// Returns the unfinished operation with the least number that any rank except `but` is in or, with only_it, that rank
// `but` is in. A collective goes before an exchange. number 0: there is none.
static struct operation first_unfinished(const struct control *c, int but, bool only_it) {
    struct operation collective = {0, NULL, false, 0}, exchange = {0, NULL, true, 0};
    for (int r = 0; r < c->ranks; r++) {
        const struct control_report *const report = &c->links[r].report;
        if ((r == but) != only_it)
            continue;
        if (report->begun > report->done && (!collective.number || report->done + 1 < collective.number)) {
            collective.number = report->done + 1;
            collective.name = report->collective;
        }
        if (report->in_exchange && (!exchange.number || report->exchanges < exchange.number)) {
            exchange.number = report->exchanges;
            exchange.name = report->exchange;
        }
    }
    return collective.number ? collective : exchange;
}

// Returns the last collective that any rank has begun, or the last exchange if there is no collective (number 0: none).
static struct operation last_begun(const struct control *c) {
    struct operation collective = {0, NULL, false, 0}, exchange = {0, NULL, true, 0};
    for (int r = 0; r < c->ranks; r++) {
        const struct control_report *const report = &c->links[r].report;
        if (report->begun > collective.number) {
            collective.number = report->begun;
            collective.name = report->collective;
        }
        if (report->exchanges > exchange.number) {
            exchange.number = report->exchanges;
            exchange.name = report->exchange;
        }
    }
    return collective.number ? collective : exchange;
}

// Adds where a rank was lost: in the others' unfinished operation, else in its own, else after the last that was begun.
static void last_line_add_where(const struct control *c, struct last_line *message, int lost) {
    struct operation operation = first_unfinished(c, lost, false);
    if (!operation.number)
        operation = first_unfinished(c, lost, true);
    const bool during = operation.number;
    if (!during)
        operation = last_begun(c);
    last_line_add(message, operation.number ? during ? " during " : " after " : " at the start");
    if (operation.number)
        last_line_add_operation(message, &operation);
}

void control_end_lost_rank(struct control *c, int lost, int status) {
    struct last_line message = {"", 0};
    const double gap_s = deadline_clock_s() - c->heartbeat_s,
                 stopped_s = gap_s > c->suspended_s ? gap_s : c->suspended_s;
    control_report_own(c);
    last_line_add(&message, "train_gpt: ");
    if (c->timeout_s > 0 && stopped_s > c->timeout_s) {
        last_line_add(&message, "rank %d (host %s, pid %d) was stopped for %.3g s, in which the others ended", c->rank,
                      c->peers[c->rank].host, c->peers[c->rank].pid, stopped_s);
    } else {
        last_line_add(&message, "rank %d (host %s, pid %d) ended", lost, c->peers[lost].host, c->peers[lost].pid);
        last_line_add_where(c, &message, lost);
    }
    control_end_with(c, &message, status);
}

// Ends the job if a rank's heartbeats have been missing for longer than the timeout.
static void control_check_silence(struct control *c) {
    struct rank_list silent = {{0}, 0};
    const double before_s = c->heartbeat_s - c->timeout_s;
    for (int r = 0; r < c->ranks; r++)
        if (c->links[r].socket >= 0 && c->links[r].heard_s < before_s)
            rank_list_add(&silent, r);
    if (silent.n == 0)
        return;
    struct last_line message = {"", 0};
    last_line_add(&message, "train_gpt: ");
    last_line_add_ranks(c, &message, &silent);
    last_line_add(&message, silent.n == 1 ? " is stopped or cut off" : " are stopped or cut off");
    last_line_add_where(c, &message, silent.first[0]);
    control_end(c, &message);
}

// Returns the first overdue collective or, with `exchange`, exchange; number 0: none. A patient exchange never counts.
static struct operation first_overdue(const struct control *c, bool exchange) {
    struct operation overdue = {0, NULL, exchange, 0};
    for (int r = 0; r < c->ranks; r++) {
        const struct control_report *const report = &c->links[r].report;
        const bool in = exchange ? report->in_exchange && !report->patient : report->begun > report->done;
        const double waited_s = exchange ? report->exchange_s : report->collective_s;
        const uint64_t number = exchange ? report->exchanges : report->done + 1;
        if (!in || waited_s <= c->timeout_s || (overdue.number && overdue.number < number))
            continue;
        overdue.waited_s = overdue.number == number && overdue.waited_s > waited_s ? overdue.waited_s : waited_s;
        overdue.number = number;
        overdue.name = exchange ? report->exchange : report->collective;
    }
    return overdue;
}

// Ends the job if a collective or, with `exchange`, an exchange that is not patient is overdue. Rank 0 calls this.
static void control_check_overdue(struct control *c, bool exchange) {
    const struct operation operation = first_overdue(c, exchange);
    struct rank_list missing = {{0}, 0}, in = {{0}, 0};
    struct last_line message = {"", 0};
    if (!operation.number)
        return;
    for (int r = 0; r < c->ranks; r++) {
        const struct control_report *const report = &c->links[r].report;
        if ((exchange ? report->exchanges : report->begun) < operation.number)
            rank_list_add(&missing, r);
        else if (exchange ? report->exchanges == operation.number && report->in_exchange
                          : report->done < operation.number)
            rank_list_add(&in, r);
    }
    last_line_add(&message, "train_gpt: ");
    if (missing.n > 0) {
        last_line_add_ranks(c, &message, &missing);
        last_line_add(&message, missing.n == 1 ? " has not reached " : " have not reached ");
        last_line_add_operation(&message, &operation);
        last_line_add(&message, ", in which the other ranks have waited for %.3g s", operation.waited_s);
    } else {
        last_line_add_operation(&message, &operation);
        last_line_add(&message, " was begun by all ranks and after %.3g s is unfinished on ", operation.waited_s);
        last_line_add_ranks(c, &message, &in);
    }
    control_end(c, &message);
}

void control_watch(struct control *c) {
    // A process that was suspended has read nothing meanwhile, and all others look late to it.
    if (c->timeout_s <= 0 || c->suspended_s > 0)
        return;
    control_check_silence(c);
    if (c->rank != 0)
        return;
    control_check_overdue(c, false);
    control_check_overdue(c, true);
}

static void last_line_add_exchange(struct last_line *message, uint32_t operation, const char *name, uint64_t number,
                                   uint64_t bytes) {
    last_line_add(message, "the %s of '%s' (exchange %llu, %llu bytes)",
                  operation == CONTROL_ALL_GATHER ? "all-gather" : "broadcast", name, (unsigned long long)number,
                  (unsigned long long)bytes);
}

void control_end_mismatch(struct control *c, int other_rank) {
    const struct control_frame *const other = &c->links[other_rank].contribution;
    struct last_line message = {"", 0};
    last_line_add(&message, "train_gpt: rank ");
    last_line_add_rank(c, &message, other_rank);
    last_line_add(&message, " is in ");
    last_line_add_exchange(&message, other->operation, other->report.exchange, other->number, other->bytes);
    last_line_add(&message, " while rank 0 is in ");
    last_line_add_exchange(&message, c->exchange.operation, c->exchange.name, c->exchanges, c->exchange.bytes);
    control_end(c, &message);
}

void control_end_wrong_frame(struct control *c, int other_rank) {
    const struct control_frame *const frame = &c->links[other_rank].in;
    struct last_line message = {"", 0};
    last_line_add(&message, "train_gpt: rank ");
    last_line_add_rank(c, &message, other_rank);
    last_line_add(&message, " sent a frame of type %u with %llu bytes, which no rank sends now", frame->type,
                  (unsigned long long)frame->payload_bytes);
    control_end(c, &message);
}

void control_end_out_of_memory(struct control *c, size_t bytes) {
    struct last_line message = {"", 0};
    last_line_add(&message, "train_gpt: rank %d: out of memory for an exchange of %zu bytes", c->rank, bytes);
    control_end(c, &message);
}
