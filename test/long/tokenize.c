// Texts to ids for test/long/tokenizer_ids.py: tokenize TOKENIZER.json < texts > ids. A text is its length as u32 and
// its bytes, and is answered by the number of its ids as u32, the ids, the length of the decoded text, and the text.
#include "formats/tokenizer.h"
#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv) {
    struct tokenizer tokenizer;
    struct error_text error;
    uint32_t bytes;
    const char *problem = argc == 2 ? tokenizer_read(&tokenizer, argv[1], &error) : "usage: tokenize TOKENIZER.json";
    while (!problem && fread(&bytes, sizeof bytes, 1, stdin) == 1) {
        char *text = (char *)malloc((size_t)bytes + 1), *decoded = NULL;
        size_t length = 0;
        int32_t *ids;
        int64_t count;
        if (!text || fread(text, 1, bytes, stdin) != bytes)
            return 1;
        problem = tokenizer_encode(&tokenizer, text, bytes, ENCODE_TEXT, &ids, &count, &error);
        if (problem)
            break;
        FILE *out = open_memstream(&decoded, &length);
        for (int64_t i = 0; i < count; i++) {
            int token_bytes;
            const unsigned char *token = tokenizer_decode(&tokenizer, ids[i], &token_bytes);
            const int strips = i == 0 && tokenizer_strips_space(&tokenizer) && token_bytes > 0 && *token == ' ';
            fwrite(token + strips, 1, (size_t)(token_bytes - strips), out);
        }
        fclose(out);
        const uint32_t sizes[2] = {(uint32_t)count, (uint32_t)length};
        fwrite(&sizes[0], sizeof sizes[0], 1, stdout);
        fwrite(ids, sizeof *ids, (size_t)count, stdout);
        fwrite(&sizes[1], sizeof sizes[1], 1, stdout);
        fwrite(decoded, 1, length, stdout);
        free(decoded);
        free(ids);
        free(text);
    }
    if (problem)
        fprintf(stderr, "%s\n", problem);
    return problem != NULL;
}
