// --chat: answers turns from the terminal. The KV cache stays between turns, so a turn costs only its own tokens.
#pragma once
#include "formats/chat_format.h"      // struct chat_format
#include "run/generate.cuh"           // open_tokenizer
#include "run/run.cuh"                // struct run
#include "run/sample.cuh"             // sample_next
#include "run/text_files.cuh"         // find_text_file
#include "runtime/machine/signals.h"  // signals_take_interrupt
#include "runtime/machine/text_add.h" // text_copy
#include "runtime/text/utf8.h"        // utf8_decode, unicode_is_space
#include <unistd.h>                   // isatty

struct chat {
    struct run *r;
    struct chat_format format;
    int stops[CHAT_MAX_STOPS + 1], stop_count; // tokens that end an answer
    char *system;                              // content of the system turn; NULL: there is none
    int capacity, longest;                     // in tokens: of the KV cache; of an answer
    int count;                                 // tokens in the KV cache
    const floatX *logits;                      // of the token that follows the KV cache
    int answers;                               // so far: each draws other random numbers
    bool terminal;                             // stdin and stderr are a terminal
};

struct chat_text {
    char *bytes;
    size_t length;
};
// Appends `length` bytes and a 0 to a text, which is zeroed while empty. The caller frees its bytes.
static void chat_add(struct chat_text *text, const char *more, size_t length) {
    text->bytes = (char *)realloc(text->bytes, text->length + length + 1);
    if (!text->bytes)
        fail("out of memory for a turn");
    memcpy(text->bytes + text->length, more, length);
    text->length += length;
    text->bytes[text->length] = 0;
}
static void chat_add_text(struct chat_text *text, const char *more) { chat_add(text, more, strlen(more)); }

// Appends a role's turn: the format's text before it, the content, trimmed where the format trims, and what follows it.
static void chat_add_turn(struct chat_text *text, const struct chat *chat, enum chat_role role, const char *content) {
    size_t length = strlen(content);
    uint32_t code;
    for (int n; chat->format.trim && length > 0; content += n, length -= (size_t)n) {
        n = utf8_decode((const unsigned char *)content, length, &code);
        if (n == 0 || !unicode_is_space(code))
            break;
    }
    for (size_t n = 1; chat->format.trim && n <= 3 && n <= length;) { // the last character has 1 to 3 bytes
        if (utf8_decode((const unsigned char *)content + length - n, n, &code) != (int)n || !unicode_is_space(code)) {
            n++;
            continue;
        }
        length -= n;
        n = 1;
    }
    chat_add_text(text, chat->format.roles[role].before);
    chat_add(text, content, length);
    chat_add_text(text, chat->format.roles[role].after);
}

// Encodes a text and the special tokens in it. Returns the tokens (*count), which the caller frees. An error, or a
// token outside the model's vocabulary, ends the program. `as` may not be ENCODE_IN_TEMPLATE, which adds tokens.
static int32_t *chat_encode(const struct chat *chat, const char *text, size_t bytes, enum encode_as as,
                            int64_t *count) {
    struct error_text error;
    int32_t *ids;
    const char *problem = tokenizer_encode(&chat->r->tokenizer, text, bytes, as, &ids, count, &error);
    if (problem)
        fail("--chat: %s", problem);
    for (int64_t i = 0; i < *count; i++)
        if (ids[i] >= chat->r->config->model.vocab_size)
            fail("--chat: the tokenizer makes token %d, outside the model's vocabulary of %d", (int)ids[i],
                 chat->r->config->model.vocab_size);
    return ids;
}
// Whether a content has a special token in its text, which would end its turn or begin another one.
static bool chat_has_special(const struct chat *chat, const char *content) {
    int64_t count;
    bool has = false;
    int32_t *ids = chat_encode(chat, content, strlen(content), ENCODE_TEXT, &count);
    for (int64_t i = 0; i < count; i++)
        has = has || tokenizer_is_added(&chat->r->tokenizer, ids[i]);
    free(ids);
    return has;
}

// Runs the model on tokens, at least one and no more than the KV cache has room for. Sets ->logits and adds to ->count.
static void chat_feed(struct chat *chat, const int32_t *tokens, int count) {
    struct gpt *m = chat->r->model;
    struct sampler *sampler = &chat->r->sampler;
    int fed = 0;
    long_wait_begin(sampler->watch);
    if (chat->count == 0) {
        fed = count < m->generation.prompt_tokens ? count : m->generation.prompt_tokens;
        memset(sampler->fed, 0, (size_t)m->generation.prompt_tokens * sizeof *sampler->fed);
        memcpy(sampler->fed, tokens, (size_t)fed * sizeof *tokens);
        chat->logits = gpt_prefill(m, sampler->fed, &fed);
        chat->count = fed;
    }
    for (; fed < count; fed++) {
        const int32_t position = chat->count++;
        chat->logits = gpt_decode(m, tokens + fed, &position);
    }
    long_wait_end(sampler->watch);
}

static bool chat_stops(const struct chat *chat, int32_t token) {
    for (int i = 0; i < chat->stop_count; i++)
        if (chat->stops[i] == token)
            return true;
    return false;
}
// Draws an answer to the turn fed last, and prints and feeds each token. Ends at a stop token, neither printed nor fed,
// at chat->longest tokens, a full KV cache or a signal to stop; an interrupt ends only the answer.
static void chat_answer(struct chat *chat) {
    struct run *r = chat->r;
    struct terminal_text out;
    memset(&out, 0, sizeof out);
    out.out = stdout;
    const double begin = seconds_now();
    const uint64_t stream = (uint64_t)chat->answers++;
    int n = 0;
    while (n < chat->longest && !signals_take_interrupt() && !stop_asked()) {
        const int32_t token = sample_next(r->model, &r->sampler, chat->logits, 0, chat->count, stream);
        n++;
        if (chat_stops(chat, token))
            break; // it is fed with the next turn, as a part of what ends this one
        vocabulary_print_token(&out, &r->vocabulary, token);
        fflush(stdout);
        if (chat->count == chat->capacity) {
            fprintf(stderr, "\n[the context of %d tokens is full]", chat->capacity);
            break;
        }
        chat_feed(chat, &token, 1);
    }
    terminal_text_end(&out);
    printf("\n");
    fflush(stdout);
    if (chat->terminal)
        fprintf(stderr, "[%d tokens, %.3g tokens/s, %d of %d in the context]\n", n, n / (seconds_now() - begin),
                chat->count, chat->capacity);
}

// Returns the text to feed for a user's turn, with the format's text around it, for free(). first: the chat begins.
static struct chat_text chat_turn(const struct chat *chat, const char *content, bool first) {
    struct chat_text text = {NULL, 0};
    if (!first)
        chat_add_text(&text, chat->format.roles[CHAT_ASSISTANT].after);
    if (first)
        chat_add_text(&text, chat->format.begin);
    if (first && chat->system)
        chat_add_turn(&text, chat, CHAT_SYSTEM, chat->system);
    chat_add_turn(&text, chat, CHAT_USER, content);
    chat_add_text(&text, chat->format.roles[CHAT_ASSISTANT].before);
    return text;
}
// Feeds the user's turn and prints the answer. If the KV cache lacks room for the turn, forgets the chat and begins
// another with this turn. Says on stderr where the turn is too long even so.
static void chat_say(struct chat *chat, const char *content) {
    for (int attempt = 0; attempt < 2; attempt++) {
        int64_t count;
        const bool first = chat->count == 0;
        struct chat_text text = chat_turn(chat, content, first);
        int32_t *ids = chat_encode(chat, text.bytes, text.length, first ? ENCODE_TEXT : ENCODE_AS_REST, &count);
        const bool fits = count + 1 <= chat->capacity - chat->count;
        if (fits) {
            chat_feed(chat, ids, (int)count);
            chat_answer(chat);
        } else if (first)
            fprintf(stderr, "[%lld tokens do not fit into the context of %d; a larger --seq-length has room]\n",
                    (long long)count, chat->capacity);
        else
            fprintf(stderr, "[the context of %d tokens is full: what was said before is forgotten]\n", chat->capacity);
        free(text.bytes);
        free(ids);
        chat->count = fits ? chat->count : 0;
        if (fits || first)
            return;
    }
}

// Sets a chat's sizes in *c, before plan_model: one sequence, a KV cache of --seq-length, prefills of up to 256 tokens.
static void chat_sizes(struct config *c) {
    enum { PROMPT_TOKENS = 256 };
    c->evaluation.sample_tokens = c->model.seq_length;
    c->prompt_tokens = c->model.seq_length < PROMPT_TOKENS ? c->model.seq_length : PROMPT_TOKENS;
    c->training.micro_batch_size = c->evaluation.sample_count = 1;
}

static bool chat_takes_system(const struct chat *chat) {
    return *chat->format.roles[CHAT_SYSTEM].before || *chat->format.roles[CHAT_SYSTEM].after;
}

// Begins an empty chat and opens r's sampler. The model, the tokenizer and the vocabulary must be open. longest: an
// answer's tokens. The caller frees chat->system and, by chat_format_free, chat->format. Ends the program where the
// model has no usable chat_format.json, or its chats have no turn for --chat-system.
static void chat_open(struct chat *chat, struct run *r, int longest) {
    const struct config *c = r->config;
    char path[PATH_MAX];
    struct error_text error;
    memset(chat, 0, sizeof *chat);
    chat->r = r;
    chat->capacity = r->model->generation.decode_tokens;
    chat->longest = longest;
    chat->terminal = isatty(STDIN_FILENO) && isatty(STDERR_FILENO);
    if (!find_text_file(r, "chat_format.json", path, sizeof path))
        fail("--chat: %s has no chat_format.json, the form of its chats; make it from the model's chat template by "
             "scripts/chat_format.py %s",
             c->checkpoints.init_from, c->checkpoints.init_from);
    const char *problem = chat_format_read(&chat->format, path, &error);
    if (problem)
        fail("--chat: %s", problem);
    for (int i = 0; i < chat->format.stop_count; i++) {
        int64_t count;
        int32_t *ids = chat_encode(chat, chat->format.stops[i], strlen(chat->format.stops[i]), ENCODE_TEXT, &count);
        if (count != 1)
            fail("--chat: %s: '%s' of stop is %lld tokens; expected one", path, chat->format.stops[i],
                 (long long)count);
        chat->stops[chat->stop_count++] = ids[0];
        free(ids);
    }
    if (r->vocabulary.end_of_text >= 0)
        chat->stops[chat->stop_count++] = r->vocabulary.end_of_text;
    if (chat_has_special(chat, c->evaluation.chat_system))
        fail("--chat-system holds a special token of the model, which would end the system turn; leave it out");
    if (*c->evaluation.chat_system && !chat_takes_system(chat))
        fail("--chat-system: the model's chats have no system turn (%s); say it in the first turn", path);
    const char *system = *c->evaluation.chat_system ? c->evaluation.chat_system : chat->format.default_system;
    chat->system = system ? text_copy(system) : NULL;
    sampler_open(&r->sampler, r->model, r->device_watch);
}

// Reads a turn from stdin: a line, and the next line if it ends in a backslash. Prompts a terminal. Returns the turn,
// which the caller frees, or NULL if the input ended, or a signal came, before anything was read.
static char *chat_read(const struct chat *chat) {
    struct chat_text turn = {NULL, 0};
    char *line = NULL;
    size_t room = 0;
    ssize_t length;
    bool more = true;
    if (chat->terminal)
        fprintf(stderr, "> ");
    while (more && (length = getline(&line, &room, stdin)) >= 0) {
        if (length > 0 && line[length - 1] == '\n')
            length--;
        more = length > 0 && line[length - 1] == '\\';
        chat_add(&turn, line, strlen(line) < (size_t)length ? strlen(line) : (size_t)(more ? length - 1 : length));
        if (more)
            chat_add_text(&turn, "\n");
    }
    free(line);
    return turn.bytes;
}
// Executes /system TEXT, which sets chat->system, and /reset; each begins another chat. Refuses, on stderr, a text with
// a special token, and /system where the format has no system turn. Returns whether the turn is a command.
static bool chat_command(struct chat *chat, const char *turn) {
    static const char set_system[] = "/system ";
    const bool system = strncmp(turn, set_system, sizeof set_system - 1) == 0;
    if (!system && strcmp(turn, "/reset") != 0)
        return false;
    if (system && !chat_takes_system(chat)) {
        fprintf(stderr, "[the model's chats have no system turn; say it in the first turn]\n");
        return true;
    }
    if (system && chat_has_special(chat, turn)) {
        fprintf(stderr, "[a turn can't hold a special token of the model; the system turn is what it was]\n");
        return true;
    }
    if (system) {
        free(chat->system);
        chat->system = text_copy(turn + sizeof set_system - 1);
    }
    chat->count = 0;
    return true;
}

// Answers turns until the input ends, /exit, or a signal. longest: an answer's tokens. The model, the tokenizer and the
// vocabulary must be open. Returns the exit status: EXIT_STOPPED for a signal other than an interrupt.
static int chat_only(struct run *r, int longest) {
    struct chat chat;
    char *turn;
    chat_open(&chat, r, longest);
    signals_interrupt_reads();
    if (chat.terminal)
        fprintf(stderr, "[a line is a turn, one that ends in \\ goes on; /system TEXT, /reset and /exit]\n");
    while (!stop_asked() && (turn = chat_read(&chat)) != NULL) {
        const bool ends = strcmp(turn, "/exit") == 0;
        if (!ends && !chat_command(&chat, turn)) {
            if (chat_has_special(&chat, turn))
                fprintf(stderr, "[a turn can't hold a special token of the model; it was not said]\n");
            else
                chat_say(&chat, turn);
        }
        free(turn);
        if (ends)
            break;
    }
    free(chat.system);
    chat_format_free(&chat.format);
    return stop_asked() && !signals_take_interrupt() ? EXIT_STOPPED : EXIT_SUCCESS;
}
