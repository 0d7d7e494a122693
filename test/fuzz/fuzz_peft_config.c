// adapter_config.json: what is accepted is valid, and is written and read again as the same settings.
#include "formats/peft_config.h" // under test
#include "test/fuzz/fuzz.h"      // fuzz_require

static void write_again(const struct peft_config *c) {
    struct peft_config again;
    struct error_text error;
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    fuzz_require(out);
    peft_config_write(out, c);
    fclose(out);
    fuzz_require(!peft_config_parse(&again, (unsigned char *)text, bytes, "again", &error));
    fuzz_require(again.rank == c->rank && again.alpha == c->alpha && again.dropout == c->dropout);
    fuzz_require(again.rslora == c->rslora && again.fan_in_fan_out == c->fan_in_fan_out);
    fuzz_require(strcmp(again.targets, c->targets) == 0 && strcmp(again.base, c->base) == 0);
    peft_config_free(&again);
    free(text);
}

static const char *fuzz_parse(const unsigned char *data, size_t bytes, struct error_text *error) {
    struct peft_config c;
    const char *problem = peft_config_parse(&c, data, bytes, "adapter_config.json", error);
    if (!problem) {
        fuzz_require(c.rank > 0 && c.alpha > 0 && c.dropout >= 0 && c.dropout < 1 && *c.targets);
        write_again(&c);
        peft_config_free(&c);
    }
    return problem;
}
